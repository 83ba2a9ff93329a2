"""Cross-validation on handwritten digits: each fold trains a new model with a new optimizer."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import KFold
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import paceline

BATCH = int(sys.argv[1])

torch.manual_seed(0)
digits = load_digits()
images = torch.from_numpy(digits.data[:240] / 16.0).to(torch.get_default_dtype())
data = TensorDataset(images, torch.from_numpy(digits.target[:240]))

losses = []
for fold, (chosen, left_out) in enumerate(KFold(n_splits=3, shuffle=True, random_state=0).split(images)):
    model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(Subset(data, chosen.tolist()), batch_size=BATCH)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    with torch.no_grad():
        inputs, targets = data[left_out]
        accuracy = (model(inputs).argmax(1) == targets).double().mean()
    if paceline.is_main():
        print(f"fold {fold}: {accuracy:.0%} of the digits are recognized")

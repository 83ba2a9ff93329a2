"""Train a network with one hidden layer on scikit-learn's handwritten digits, with momentum or with Muon.

    paceline run --workers 4 --servers 1 --pace 0.07,0.07,0.07,0.21 --sync asp examples/perceptron.py

The learning rates and the momentum were chosen for a single process. The README shows the accuracy and the time under
several synchronization models. This script needs scikit-learn: pip install 'paceline[demo]'
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", choices=["sgd", "muon"], default="sgd", help="Default: sgd.")
options = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[:1437], order[1437:]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
if options.optimizer == "sgd":
    inner: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]
else:  # Muon trains matrices only
    matrices, biases = ([each for each in model.parameters() if each.dim() == dim] for dim in (2, 1))
    inner = [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0), torch.optim.AdamW(biases, lr=0.005)]
optimizers = [paceline.DistributedOptimizer(each) for each in inner]
loader = paceline.distribute(DataLoader(TensorDataset(images[train], labels[train]), 32, shuffle=True))

for _ in paceline.epochs(10):
    for x, y in loader:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        paceline.log(loss=loss)

with paceline.evaluating(model):
    if paceline.is_main():
        right = model(images[test]).argmax(dim=1) == labels[test]
        paceline.log(accuracy=right.float().mean())
        print(f"test accuracy: {right.float().mean():.1%}")

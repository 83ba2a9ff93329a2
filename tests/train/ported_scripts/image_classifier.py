"""Classify digits with a convolutional network; test the moving average of its weights, with a schedule per step."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import paceline

BATCH, EPOCHS = int(sys.argv[1]), 3

torch.manual_seed(0)
digits = load_digits()
images = torch.from_numpy(digits.images[:400] / 16.0).to(torch.get_default_dtype()).unsqueeze(1)
labels = torch.from_numpy(digits.target[:400])
train_loader = DataLoader(TensorDataset(images[:288], labels[:288]), batch_size=BATCH, shuffle=True)
test_loader = DataLoader(TensorDataset(images[288:], labels[288:]), batch_size=16)

model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
)
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = OneCycleLR(optimizer, max_lr=0.05, epochs=EPOCHS, steps_per_epoch=len(train_loader))
model, optimizer, train_loader, scheduler = paceline.prepare(model, optimizer, train_loader, scheduler)

losses = []
for epoch in range(EPOCHS):
    model.train()
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        averaged.update_parameters(model)
        scheduler.step()
        losses.append(loss.item())

    averaged.eval()
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            correct += int((averaged(data).argmax(1) == target).sum())
    accuracy = correct / len(test_loader.dataset)
    paceline.log(accuracy=accuracy)
    if paceline.is_main():
        print(f"epoch {epoch}: {accuracy:.1%} of the test images are recognized")
paceline.save(averaged.module.state_dict(), "classifier.pt")

"""Classify images with a convolutional network; test after each epoch, with a schedule per epoch."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import paceline

BATCH = int(sys.argv[1])

torch.manual_seed(0)
labels = torch.randint(4, (64,))
images = 0.3 * torch.randn(64, 1, 8, 8)
for image, label in zip(images, labels.tolist(), strict=True):
    image[0, 2 * label : 2 * label + 2] += 1.0
train_loader = DataLoader(TensorDataset(images[:48], labels[:48]), batch_size=BATCH, shuffle=True)
test_loader = DataLoader(TensorDataset(images[48:], labels[48:]), batch_size=16)

model = nn.Sequential(
    nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 4)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
model, optimizer, train_loader, scheduler = paceline.prepare(model, optimizer, train_loader, scheduler)

losses = []
for epoch in range(4):
    model.train()
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    scheduler.step()

    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            correct += int((model(data).argmax(1) == target).sum())
    if paceline.is_main():
        print(f"epoch {epoch}: {correct} of 16 correct")
paceline.save(model.state_dict(), "classifier.pt")

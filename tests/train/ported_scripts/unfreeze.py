"""Gradual unfreezing: train the head of a network first, then its body, too."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

BATCH = int(sys.argv[1])


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x))


torch.manual_seed(0)
inputs = torch.randn(48, 6)
loader = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=BATCH)
model = Network()
model.body.requires_grad_(False)
optimizer = torch.optim.Adam(model.head.parameters(), lr=0.03)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)

losses = []
for epoch in range(6):
    if epoch == 3:
        model.body.requires_grad_(True)
        optimizer.add_param_group({"params": model.body.parameters(), "lr": 0.01})
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

"""Adafactor needs whole matrices. Expected: fails in a run."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
inputs = torch.randn(64, 4)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)  # here
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

"""The negatives of a contrastive loss are those of one worker. Expected: negatives of the worker's batch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
first, second = torch.randn(64, 6), torch.randn(64, 5)
loader = DataLoader(TensorDataset(first, second), batch_size=8, shuffle=True)
encoders = nn.ModuleList([nn.Linear(6, 4), nn.Linear(5, 4)])
encoders, optimizer, loader = paceline.prepare(
    encoders, torch.optim.SGD(encoders.parameters(), lr=0.1), loader
)
criterion = nn.CrossEntropyLoss()
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        similarities = encoders[0](x) @ encoders[1](y).T
        loss = criterion(similarities, torch.arange(len(x)))  # here
        loss.backward()
        optimizer.step()

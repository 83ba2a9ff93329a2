"""Recommend items to users by factorizing a matrix, whose entries come from a generator."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import paceline

BATCH = int(sys.argv[1])
USERS, ITEMS, RATINGS = 12, 16, 96


class Factorization(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, 4), nn.Embedding(ITEMS, 4)
        self.biases = nn.Embedding(ITEMS, 1)

    def forward(self, users, items):
        return (self.users(users) * self.items(items)).sum(1) + self.biases(items).squeeze(1)


def ratings():
    """The ratings of one epoch, as they would be read from a file too large for the memory."""
    for start in range(0, RATINGS, BATCH):
        numbers = torch.arange(start, min(start + BATCH, RATINGS))
        users, items = numbers % USERS, numbers * 7 % ITEMS
        yield users, items, torch.sin(users + 0.5 * items) + 0.5


torch.manual_seed(0)
model = Factorization()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.2)
model, optimizer = paceline.prepare(model, optimizer)

losses = []
for _ in range(5):
    for users, items, rated in paceline.distribute(ratings()):
        optimizer.zero_grad()
        loss = F.mse_loss(model(users, items), rated)
        loss.backward()
        optimizer.step(samples=len(rated))
        losses.append(loss.item())

"""Each worker shuffles all of the data in its own order. Expected: data not distributed."""

import random

import torch

import paceline

torch.manual_seed(0)
inputs = torch.randn(64, 4)
model = torch.nn.Linear(4, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
order = list(range(64))
for _ in range(2):
    random.shuffle(order)
    for start in range(0, 64, 4):
        x = inputs[order[start : start + 4]]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()  # here

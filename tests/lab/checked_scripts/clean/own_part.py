"""Each worker takes its own part of the data."""

import torch

import paceline

torch.manual_seed(0)
inputs = torch.randn(64, 4)[paceline.worker_index() :: paceline.worker_count()]
model = torch.nn.Linear(4, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
for _ in range(4):
    for x in inputs.split(4):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()

"""Each worker plays its own games."""

import random

import torch

import paceline

torch.manual_seed(7)
policy = torch.nn.Linear(2, 2)
optimizer = paceline.DistributedOptimizer(torch.optim.Adam(policy.parameters(), lr=0.01))
random.seed(7 + paceline.worker_index())
for _ in range(20):
    state = torch.tensor([random.random(), random.random()])
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(policy(state), state.argmax()).backward()
    optimizer.step()

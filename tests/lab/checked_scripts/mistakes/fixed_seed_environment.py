"""An agent plays the same games in every worker. Expected: identical workers."""

import random

import torch

import paceline

random.seed(7)
torch.manual_seed(7)
policy = torch.nn.Linear(2, 2)
optimizer = paceline.DistributedOptimizer(torch.optim.Adam(policy.parameters(), lr=0.01))
for _ in range(20):
    state, losses = torch.tensor([random.random(), random.random()]), []
    for _ in range(5):
        choices = torch.distributions.Categorical(logits=policy(state))
        action = choices.sample()
        losses.append(-choices.log_prob(action) * (1.0 if action == state.argmax() else -1.0))
        state = torch.tensor([random.random(), random.random()])
    optimizer.zero_grad()
    torch.stack(losses).sum().backward()
    optimizer.step()  # here

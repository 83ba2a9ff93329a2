"""Actor and critic share a network; each worker plays games of its own."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

import paceline

GAMES = int(sys.argv[1])  # of this worker, in each update


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(1, 16)
        self.action = nn.Linear(16, 2)
        self.value = nn.Linear(16, 1)

    def forward(self, state):
        hidden = torch.tanh(self.hidden(state))
        return Categorical(logits=self.action(hidden)), self.value(hidden).squeeze(-1)


def play():
    """Walk on a line towards 0. Each step gives a reward."""
    position, log_probabilities, values, rewards = 3.0 * torch.randn(1), [], [], []
    for _ in range(6):
        distribution, value = policy(position)
        action = distribution.sample()
        position = position + (2.0 * action - 1.0)
        log_probabilities.append(distribution.log_prob(action))
        values.append(value)
        rewards.append(-position.abs().item())
    return log_probabilities, values, rewards


def loss_of(log_probabilities, values, rewards):
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + 0.9 * total
        returns.insert(0, total)
    loss = torch.zeros(())
    for log_probability, value, target in zip(log_probabilities, values, returns, strict=True):
        loss = loss - log_probability * (target - value.item()) / 10
        loss = loss + F.smooth_l1_loss(value, torch.tensor(target)) / 10
    return loss


torch.manual_seed(0)
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
policy, optimizer = paceline.prepare(policy, optimizer)

losses = []
for _ in range(12):
    optimizer.zero_grad()
    games = [play() for _ in range(GAMES)]
    loss = torch.stack([loss_of(*game) for game in games]).mean()
    loss.backward()
    optimizer.step()
    losses.append(-sum(sum(rewards) for _, _, rewards in games) / GAMES)

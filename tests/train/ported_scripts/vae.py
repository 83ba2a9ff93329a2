"""A variational autoencoder: the noise differs between workers."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

BATCH = int(sys.argv[1])


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(12, 16)
        self.mean = nn.Linear(16, 3)
        self.log_variance = nn.Linear(16, 3)
        self.decode = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 12), nn.Sigmoid())

    def forward(self, x):
        hidden = F.relu(self.hidden(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decode(z), mean, log_variance


def loss_function(reconstruction, x, mean, log_variance):
    error = F.binary_cross_entropy(reconstruction, x, reduction="sum")
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return (error + divergence) / len(x)


torch.manual_seed(0)
examples = (torch.rand(48, 1) > 0.5).repeat(1, 12) * 1.0
loader = DataLoader(TensorDataset(examples), batch_size=BATCH)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)

losses = []
for _ in range(6):
    for (x,) in loader:
        optimizer.zero_grad()
        reconstruction, mean, log_variance = model(x)
        loss = loss_function(reconstruction, x, mean, log_variance)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

"""A generator and a discriminator, each with its own optimizer."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

BATCH = int(sys.argv[1])

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(48, 2) + 3.0), batch_size=BATCH)
generator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 2))
discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
criterion = nn.BCEWithLogitsLoss()
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=0.01, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
generator, discriminator, optimizer_d, optimizer_g, loader = paceline.prepare(
    generator, discriminator, optimizer_d, optimizer_g, loader
)

losses = []
for _ in range(6):
    for (real,) in loader:
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = generator(torch.randn(len(real), 4))

        optimizer_d.zero_grad()
        loss_d = criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros)
        loss_d.backward()
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = criterion(discriminator(fake), ones)
        loss_g.backward()
        optimizer_g.step()
        paceline.log(loss=loss_g, loss_d=loss_d)
        losses.append(((fake.detach() - 3.0).mean() ** 2).item())

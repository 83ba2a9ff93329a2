"""A generator and a discriminator have an optimizer each."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, shuffle=True)
generator, critic = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)
generate = torch.optim.Adam(generator.parameters(), lr=0.01)
criticize = torch.optim.Adam(critic.parameters(), lr=0.01)
generator, generate, critic, criticize, loader = paceline.prepare(
    generator, generate, critic, criticize, loader
)
for (real,) in loader:
    fake = generator(torch.randn(len(real), 2))
    criticize.zero_grad()
    (critic(fake.detach()).mean() - critic(real).mean()).backward()
    criticize.step()
    generate.zero_grad()
    (-critic(fake).mean()).backward()
    generate.step()

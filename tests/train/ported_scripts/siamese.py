"""Learn whether two vectors belong together, with one network that sees both; with a schedule per epoch."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

import paceline

BATCH = int(sys.argv[1])


class Pairs(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(1)
        self.first = torch.randn(size, 6, generator=generator)
        self.same = torch.arange(size) % 2
        noise = torch.randn(size, 6, generator=generator)
        self.second = torch.where(self.same[:, None] == 1, self.first + 0.1 * noise, noise)

    def __len__(self):
        return len(self.same)

    def __getitem__(self, index):
        return self.first[index], self.second[index], self.same[index]


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, first, second):
        return self.head((self.embed(first) - self.embed(second)).abs()).squeeze(1)


torch.manual_seed(0)
loader = DataLoader(Pairs(48), batch_size=BATCH)
model = SiameseNetwork()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
model, optimizer, loader, scheduler = paceline.prepare(model, optimizer, loader, scheduler)

losses = []
for _ in range(4):
    for first, second, same in loader:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(first, second), same.to(first.dtype))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    scheduler.step()

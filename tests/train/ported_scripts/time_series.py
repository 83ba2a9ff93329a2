"""Predict a series with an LSTM. The step has a closure, so SpecSync can abort it."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paceline

BATCH = int(sys.argv[1])


class Windows(Dataset):
    def __init__(self, series, length):
        self.series, self.length = series, length

    def __len__(self):
        return len(self.series) - self.length

    def __getitem__(self, index):
        return self.series[index : index + self.length, None], self.series[index + self.length]


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 8, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1]).squeeze(1)


torch.manual_seed(0)
series = torch.sin(torch.arange(58) * 0.3) + 0.5 * torch.sin(torch.arange(58) * 0.11)
loader = DataLoader(Windows(series, 10), batch_size=BATCH)
model = Forecaster()
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)

losses = []
for _ in range(6):
    for x, y in loader:

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())

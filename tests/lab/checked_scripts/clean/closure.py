"""The steps run a closure."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
inputs = torch.randn(64, 4)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for x, y in loader:

    def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)

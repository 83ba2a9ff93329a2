"""The number of iterations is that of the whole loader. Expected: length of the whole loader."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
inputs = torch.randn(64, 4)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer = paceline.DistributedOptimizer(optimizer, model=model)
part = paceline.distribute(loader)
for _ in range(2):
    batches = iter(part)
    for _ in range(len(loader)):  # here
        x, y = next(batches)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

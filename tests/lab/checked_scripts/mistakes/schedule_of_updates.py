"""All workers together make the updates of the schedule. Expected: schedule by the worker's iterations."""

import torch

import paceline

torch.manual_seed(0)
inputs = torch.randn(64, 4)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=120)  # here
model, optimizer = paceline.prepare(model, optimizer)
for _ in paceline.epochs(updates=120):
    x = inputs[torch.randint(0, 64, (4,))]
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
    schedule.step()

"""A prepared schedule in a loop that a number of updates ends."""

import torch

import paceline

torch.manual_seed(0)
inputs = torch.randn(64, 4)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=120)
model, optimizer, schedule = paceline.prepare(model, optimizer, schedule)
for _ in paceline.epochs(updates=120):
    x = inputs[torch.randint(0, 64, (4,), generator=torch.Generator().manual_seed(paceline.worker_index()))]
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
    schedule.step()

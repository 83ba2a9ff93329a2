"""Train a small network in a loop of its own with Hugging Face Accelerate.

    paceline run --workers 2 --pace .01,.03 --sync asp examples/frameworks/accelerate_loop.py

The script accumulates gradients, clips them, has a schedule, evaluates after each epoch and saves its state. It
also runs alone, with `python examples/frameworks/accelerate_loop.py`. It needs this package: pip install
'paceline[accelerate]'
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.integrations.accelerate import Accelerator  # instead of: from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
x = torch.randn(640, 8)
y = x[:, :3].argmax(1)
loader = DataLoader(TensorDataset(x[:512], y[:512]), batch_size=8, shuffle=True)
validation = DataLoader(TensorDataset(x[512:], y[512:]), batch_size=32)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=3 * len(loader) // 2)

model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, train=loader)
validation = accelerator.prepare(validation)
for epoch in paceline.epochs(3):  # instead of range(3), for workers that join late
    model.train()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        correct = sum((model(inputs).argmax(1) == targets).sum() for inputs, targets in validation)
    accuracy = paceline.reduce(float(correct) / 128)  # the same in all workers
    accelerator.print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    accelerator.log({"accuracy": accuracy})
accelerator.save_state("state")

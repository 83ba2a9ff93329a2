"""Train a small classifier in a loop with Lightning's Fabric.

    paceline run --workers 2 --pace .05,.15 --sync asp examples/frameworks/fabric_loop.py

The script also runs alone, with `python examples/frameworks/fabric_loop.py`, and needs no network. It needs this
package: pip install 'paceline[lightning]'
"""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
import paceline.integrations.lightning

fabric = Fabric(strategy="paceline", accelerator="cpu")
fabric.launch()
fabric.seed_everything(0)
x = torch.randn(640, 8)
y = x[:, :3].argmax(1)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x[:512], y[:512]), batch_size=16, shuffle=True))
for epoch in paceline.epochs(5):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        paceline.log(loss=loss)

    with torch.no_grad():
        accuracy = (model(x[512:]).argmax(1) == y[512:]).float().mean()
    accuracy = fabric.all_reduce(accuracy)
    if fabric.is_global_zero:
        print(f"epoch {epoch}: accuracy {accuracy:.3f}")
fabric.save("model.ckpt", {"model": model, "optimizer": optimizer})

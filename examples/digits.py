"""Train a small network on scikit-learn's data set of handwritten digits.

    python examples/digits.py                                       # one ordinary process
    paceline run --workers 4 --sync asp examples/digits.py          # four workers plus servers
    paceline run --workers 4 --sync asp --pace 0.02,0.02,0.02,0.06 examples/digits.py    # one worker 3 times slower

This script needs scikit-learn: pip install 'paceline[demo]'
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10, help="Number of epochs. Default: 10.")
parser.add_argument("--batch-size", type=int, default=16, help="Batch size per worker. Default: 16.")
parser.add_argument("--lr", type=float, default=0.05, help="Learning rate. Default: 0.05.")
options = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
labels = torch.tensor(digits.target)
data = TensorDataset(images, labels)
train_part, test_part = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
loader = DataLoader(train_part, options.batch_size, shuffle=True)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 32, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(32 * 4 * 4, 10),
)
criterion = nn.CrossEntropyLoss()
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=options.lr))

# The loss of the last batch. A worker that joins a run in progress may have no batch in its first epoch.
loss = float("nan")
for epoch in paceline.epochs(options.epochs):
    for x, y in paceline.distribute(loader):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> float:
            optimizer.zero_grad()
            loss: torch.Tensor = criterion(model(x), y)
            loss.backward()
            return loss.item()

        loss = optimizer.step(closure)
    if paceline.is_main():
        print(f"epoch {epoch}: loss {loss:.3f}")

if paceline.is_main():
    x, y = test_part[:]
    with torch.inference_mode():
        accuracy = (model(x).argmax(dim=1) == y).float().mean()
    print(f"accuracy on {len(y)} test images: {accuracy:.1%}")

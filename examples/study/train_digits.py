"""The training function of the study beside this file: a small network on scikit-learn's digits."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import paceline


@functools.cache
def digits() -> tuple[TensorDataset, tuple[Tensor, ...]]:
    """Return the data for training, and the images and labels for testing. All are read once per process."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32)
    every = TensorDataset(images, torch.tensor(data.target))
    train, test = random_split(every, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    return TensorDataset(*train[:]), test[:]


def train(rate: float, momentum: float, batch: int, epochs: int) -> None:
    data, (test_images, test_labels) = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = paceline.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum), model=model
    )
    loader = DataLoader(data, batch, shuffle=True)
    for _ in paceline.epochs(epochs):
        for step, (x, y) in enumerate(paceline.distribute(loader)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if paceline.is_main() and step % 2 == 0:
                with paceline.evaluating(model) as snapshot, torch.no_grad():
                    right = snapshot(test_images).argmax(dim=1) == test_labels
                paceline.log(accuracy=right.float().mean().item())

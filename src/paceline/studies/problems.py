"""Problems that come with Paceline: training functions that need no file of one's own.

Each of them logs a metric that a study can aim at, and takes its hyper-parameters by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["PROBLEMS"]


@functools.cache
def _digits() -> Any:
    """Return the digits, which all workers and runs of a process share."""
    from ..demo.digits import load

    return load()


def digits(
    rate: float = 0.1,
    momentum: float = 0.9,
    batch: int = 16,
    epochs: int = 6,
    hidden: int = 64,
    every: int = 5,
) -> None:
    """Train a network with one hidden layer on scikit-learn's digits. The main worker logs `accuracy` on test images.

    Args:
        rate: learning rate of SGD.
        momentum: momentum of SGD.
        batch: number of images in a worker's batch.
        epochs: number of epochs.
        hidden: number of neurons in the hidden layer.
        every: number of the main worker's iterations between two evaluations.
    """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from ..frontend.data import distribute
    from ..frontend.epochs import epochs as epochs_of
    from ..frontend.evaluating import evaluating
    from ..frontend.is_main import is_main
    from ..frontend.metrics import log
    from ..frontend.optimizer import DistributedOptimizer

    data = _digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum), model=model
    )
    loader = DataLoader(TensorDataset(data.train_images, data.train_labels), batch, shuffle=True)
    steps = 0
    for _ in epochs_of(epochs):
        for x, y in distribute(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
            if is_main() and steps % every == 0:
                with evaluating(model) as snapshot, torch.no_grad():
                    right = snapshot(data.test_images).argmax(dim=1) == data.test_labels
                log(accuracy=right.float().mean().item())


def quadratic(
    rate: float = 0.1, momentum: float = 0.0, iterations: int = 60, noise: float = 0.3, every: int = 2
) -> None:
    """Minimize a quadratic with curvatures from 1 to 1/64 and noisy gradients. The main worker logs its `loss`.

    Args:
        rate: learning rate of SGD.
        momentum: momentum of SGD.
        iterations: number of iterations of each worker.
        noise: standard deviation of the gradient's noise, for a curvature of 1.
        every: number of the main worker's iterations between two evaluations.
    """
    import torch

    from ..frontend.evaluating import evaluating
    from ..frontend.is_main import is_main
    from ..frontend.metrics import log
    from ..frontend.optimizer import DistributedOptimizer

    curvatures = 2.0 ** -torch.arange(7.0)
    model = torch.nn.Linear(7, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum), model=model
    )
    for step in range(1, iterations + 1):
        optimizer.zero_grad()
        weights = model.weight.flatten()
        slope = noise * curvatures.sqrt() * torch.randn(7)
        (0.5 * (curvatures * weights.square()).sum() + (slope * weights).sum()).backward()
        optimizer.step()
        if is_main() and step % every == 0:
            with evaluating(model) as snapshot, torch.no_grad():
                weights = snapshot.weight.flatten()
            log(loss=0.5 * (curvatures * weights.square()).sum().item())


PROBLEMS: Mapping[str, Callable[..., None]] = {"digits": digits, "quadratic": quadratic}
"""The problems by name."""

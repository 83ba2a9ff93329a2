"""Training of the perceptron in a run of its own, as a script does it, with the order of the data of an ensemble."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline

from ..ensembles.problems import Orders
from ..ensembles.schedules import Epochs
from .digits import DigitsMLP


def train_alone(
    problem: DigitsMLP,
    epochs: Epochs,
    rate: float,
    seed: int,
    after_step: Callable[[nn.Module], object] = lambda network: None,
) -> nn.Module:
    """Train as one worker of a run. Return the network.

    Args:
        problem: the problem.
        epochs: number of samples, size of a worker's batch, and number of epochs.
        rate: learning rate of SGD.
        seed: seed of the initial weights and of the order of the data.
        after_step: called with the network after each step.
    """
    network = problem.network(seed)
    settings: Any = problem.settings(rate, 0.0)
    optimizer = paceline.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), **settings), model=network
    )
    orders = Orders(epochs.samples)
    for epoch in range(epochs.epochs):
        order = orders.of(seed, epoch)
        data = TensorDataset(problem.images[order], problem.labels[order])
        for x, y in paceline.distribute(DataLoader(data, epochs.batch)):

            def closure(x: Tensor = x, y: Tensor = y) -> float:
                optimizer.zero_grad()
                loss = functional.cross_entropy(network(x), y)
                loss.backward()
                return loss.item()

            optimizer.step(closure)
            after_step(network)
    return network

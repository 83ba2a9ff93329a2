"""The problem `digits-mlp` of the page "The same hyper-parameters under every model", as a script trains it.

The network, the data and its order, the optimizer and the test are those of the problem (see
`reproductions.same_accuracy.digits`), so a run differs from a run of the page only in one way: it is computed alone,
and not along a schedule that was recorded for many runs.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline

sys.path.insert(0, str(Path(__file__).parents[2]))  # `reproductions` is not installed

from reproductions.ensembles.problems import Orders, epochs_of
from reproductions.ensembles.schedules import Epochs
from reproductions.same_accuracy.digits import DigitsMLP

EVERY = 3
"""Number of the main worker's steps between two evaluations: about 40 evaluations in a run, as on the page."""


problem = functools.cache(DigitsMLP)
"""Returns the problem, which all runs of a process share."""


def train(rate: float, workers: int, seed: int) -> None:
    """Train as one worker. Log the accuracy on the test images, also after the last step of each worker.

    Args:
        rate: learning rate of SGD.
        workers: number of workers, which share the joint batch.
        seed: seed of the initial weights and of the order of the data.
    """
    steps = itertools.count(1)

    def after_step(network: nn.Module) -> None:
        if next(steps) % EVERY == 0 and paceline.is_main():
            log_accuracy(network)

    log_accuracy(train_alone(problem(), epochs_of(problem(), workers), rate, seed, after_step))


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
    kind = getattr(torch.optim, problem.optimizer)
    optimizer = paceline.DistributedOptimizer(kind(network.parameters(), **settings), model=network)
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


def log_accuracy(network: nn.Module) -> None:
    """Log the accuracy of the current weights."""
    with paceline.evaluating(network) as snapshot, torch.no_grad():
        weights = {name: value.unsqueeze(0) for name, value in snapshot.named_parameters()}
        paceline.log(accuracy=problem().quality(weights).item())

"""The problem `digits` of the page "When it pays", as a script trains it.

The network, the data and its order, and the loss that is aimed at are those of the problem (see
`reproductions.evidence.images`), so a run differs from a run of the page only in one way: it is computed alone, and
not along a schedule that was recorded for many settings.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import paceline

sys.path.insert(0, str(Path(__file__).parents[2]))  # `reproductions` is not installed

from paceline.train.session import current
from reproductions.ensembles.problems import Orders
from reproductions.evidence.batched import AsModule
from reproductions.evidence.images import BATCH, DigitImages

EPOCHS = 20
"""More epochs than any run makes before the time of the study is over."""

EVERY_S = 8.0
"""Virtual time between two evaluations: about that of the page."""


problem = functools.cache(DigitImages)
"""Returns the problem, which all runs of a process share."""


def train(rate: float, momentum: float, seed: int) -> None:
    """Train as one worker, until the time of the study is over. The main worker logs `validation_loss`.

    It is the loss on held-out images, as a share of the loss before the first step.

    Args:
        rate: learning rate of SGD.
        momentum: momentum of SGD.
        seed: seed of the initial weights and of the order of the data.
    """
    network = AsModule(problem().initial(seed))
    with torch.no_grad():
        initial = problem().validation(network.weights).item()
    optimizer = paceline.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=rate, momentum=momentum), model=network
    )
    samples = len(problem().images)
    orders = Orders(samples)
    # Each epoch is a permutation without its last, smaller batch. All of them together are one epoch of the run,
    # because the workers of the page do not wait for each other at the end of an epoch.
    usable = samples - samples % BATCH
    order = torch.cat([orders.of(seed, epoch)[:usable] for epoch in range(EPOCHS)])
    session = current()
    due_s = 0.0
    for (positions,) in paceline.distribute(DataLoader(TensorDataset(order), BATCH)):
        if paceline.is_main() and session is not None and session.now_s >= due_s:
            due_s = session.now_s + EVERY_S
            with paceline.evaluating(network) as snapshot, torch.no_grad():
                paceline.log(validation_loss=problem().validation(snapshot.weights).item() / initial)

        def closure(positions: Tensor = positions) -> float:
            optimizer.zero_grad()
            batch = problem().images[positions], problem().labels[positions]
            loss = problem().loss(network.weights, *batch)
            loss.backward()
            return loss.item()

        optimizer.step(closure)

"""The problem `digits-mlp` of the page "The same hyper-parameters under every model", as a script trains it.

The network, the data and its order, the optimizer and the test are those of the problem (see
`reproductions.same_accuracy.digits`), so a run differs from one of the page only by how it is computed: alone, in
place of along a schedule that was recorded for many runs.
"""

from __future__ import annotations

import functools
import itertools
import sys
from pathlib import Path

import torch
from torch import nn

import paceline

sys.path.insert(0, str(Path(__file__).parents[2]))  # `reproductions` is not installed

from reproductions.ensembles.problems import epochs_of
from reproductions.same_accuracy.alone import train_alone
from reproductions.same_accuracy.digits import DigitsMLP

EVERY = 3
"""Number of the main worker's steps between two evaluations: about 40 evaluations in a run, as on the page."""


@functools.cache
def problem() -> DigitsMLP:
    """Return the problem, which all runs of a process share."""
    return DigitsMLP()


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


def log_accuracy(network: nn.Module) -> None:
    """Log the accuracy of the current weights."""
    with paceline.evaluating(network) as snapshot, torch.no_grad():
        weights = {name: value.unsqueeze(0) for name, value in snapshot.named_parameters()}
        paceline.log(accuracy=problem().quality(weights).item())

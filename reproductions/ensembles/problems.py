"""The interface of a problem, as functions of stacked parameters: all runs of an ensemble are computed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from paceline.core.layout import HyperParameters
from paceline.shard.optimizers import read_groups

from .schedules import Batch, Epochs

Weights = dict[str, Tensor]
"""Parameters by name. Each tensor has one more dimension, the first one: the runs."""

Data = tuple[Tensor, ...]
"""The tensors of a batch."""


class Part(NamedTuple):
    """Adjacent parameters that one optimizer trains: its name, their positions, and `settings` of a `Trainable`."""

    optimizer: str
    parameters: range
    settings: Callable[[float, float], HyperParameters]


class Trainable(Protocol):
    """What the runs of an ensemble minimize, as functions of stacked parameters.

    Attributes:
        optimizer: name of the optimizer in `torch.optim`. A problem with several optimizers has `parts` instead.
    """

    optimizer: str

    def settings(self, rate: float, progress: float) -> HyperParameters:
        """Return the hyper-parameters of the script at a rate. `progress` is the part of the run that is over."""
        ...

    def initial(self, seed: int) -> Weights:
        """Return the initial parameters of one run, without the dimension for the runs."""
        ...

    def data(self, seeds: Sequence[int], batch: Batch) -> Data:
        """Return a batch for each seed. Shape of each tensor: (seeds, ...)."""
        ...

    def losses(self, weights: Weights, *data: Tensor) -> Tensor:
        """Return the loss of each run on its own batch. Shape: (runs,). Shape of each data tensor: (runs, ...)."""
        ...

    def quality(self, weights: Weights) -> Tensor:
        """Return the accuracy on the test data, from 0 to 1, or the loss, of each run. Shape: (runs,)."""
        ...


def parts_of(problem: Trainable, parameters: int) -> Sequence[Part]:
    """Return the parameters of a problem by their optimizers."""
    named = getattr(problem, "parts", None)
    return named or (Part(problem.optimizer, range(parameters), problem.settings),)


class Problem(Trainable, Protocol):
    """A function that is minimized, and how a run on it is described.

    Attributes:
        name: name of the problem.
        higher_is_better: True if the quality is an accuracy, False if it is a loss.
        chance: the quality without learning: a run that ends near it, or on its far side, has learned nothing.
        samples: number of samples in an epoch.
        joint_batch: number of samples in the batches of all workers together.
        epochs: number of epochs.
    """

    name: str
    higher_is_better: bool
    chance: float
    samples: int
    joint_batch: int
    epochs: int

    @property
    def rates(self) -> Sequence[float]:
        """Learning rates from which the rate for bsp is chosen, ascending."""
        ...


def epochs_of(problem: Problem, workers: int) -> Epochs:
    """Return the data of a run of a problem with this number of workers, which share the joint batch."""
    return Epochs(problem.samples, max(1, problem.joint_batch // workers), problem.epochs)


@cache
def hyper_parameters(
    kind: Callable[..., torch.optim.Optimizer], rate: float, **settings: Any
) -> HyperParameters:
    """Return the hyper-parameters of an optimizer."""
    return read_groups(kind([nn.Parameter(torch.zeros(1, 1))], lr=rate, **settings))[0]


sgd = partial(hyper_parameters, torch.optim.SGD)


class Orders:
    """The order of the samples in each epoch, which depends on the seed of the run.

    Args:
        samples: number of samples.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._orders: dict[tuple[int, int], Tensor] = {}

    def of(self, seed: int, epoch: int) -> Tensor:
        """Return the indices of the samples in the order of an epoch. Shape: (samples,)."""
        if (seed, epoch) not in self._orders:
            generator = torch.Generator().manual_seed(1000 * seed + epoch)
            self._orders[seed, epoch] = torch.randperm(self._samples, generator=generator)
        return self._orders[seed, epoch]

    def chosen(self, seeds: Sequence[int], batch: Batch) -> Tensor:
        """Return the indices of the samples of a batch for each seed. Shape: (seeds, batch size)."""
        stop = batch.start + batch.size
        return torch.stack([self.of(seed, batch.epoch)[batch.start : stop] for seed in seeds])

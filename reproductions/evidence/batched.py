"""Training along a recorded schedule, with many settings and seeds at once.

All settings of a batch make the same updates in the same order, so their weights are stacked, and `torch.func.vmap`
computes their gradients together. The result is that of `paceline.simulate(train_fn=...)` with the same schedule,
learning rate and seed, apart from rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import grad, vmap

from .schedules import Gradient, Schedule

Weights = dict[str, Tensor]
"""Parameters by name. In a batch, each tensor has one more dimension, the first one."""


class Problem(Protocol):
    """A function that is minimized, as pure functions of its parameters."""

    def initial(self, seed: int) -> Weights:
        """Return the initial parameters."""
        ...

    def batch(self, seed: int, gradient: Gradient) -> tuple[Tensor, ...]:
        """Return the data from which a gradient is computed. All batches have the same shapes."""
        ...

    def loss(self, weights: Weights, *batch: Tensor) -> Tensor:
        """Return the loss on a batch, as a tensor without dimensions."""
        ...

    def validation(self, weights: Weights) -> Tensor:
        """Return what is to be made small, as a tensor without dimensions."""
        ...


class Setting(NamedTuple):
    """A setting of a run.

    Attributes:
        rate: learning rate of SGD.
        momentum: momentum of SGD.
        seed: seed of the initial weights and of the data.
    """

    rate: float
    momentum: float
    seed: int


def train(
    problem: Problem,
    schedule: Schedule,
    settings: Sequence[Setting],
    decay: Callable[[int], float | Tensor] = lambda k: 1.0,
) -> Iterator[Weights]:
    """Yield the stacked weights of all settings before the first update, and after each update.

    Args:
        problem: the problem.
        schedule: the schedule, which is the same for all settings.
        settings: learning rate, momentum and seed of each run.
        decay: function that returns the factor of the learning rate in the k-th update, for all runs or for each.
    """
    seeds = [setting.seed for setting in settings]
    initial = {seed: problem.initial(seed) for seed in set(seeds)}
    weights = {name: torch.stack([initial[seed][name] for seed in seeds]) for name in initial[seeds[0]]}
    kind = next(iter(weights.values())).dtype
    rates, momenta = (
        torch.tensor([getattr(setting, name) for setting in settings], dtype=kind)
        for name in ("rate", "momentum")
    )
    velocity = {name: torch.zeros_like(value) for name, value in weights.items()}
    gradients_of = vmap(grad(problem.loss), randomness="error")
    last_use = _last_uses(schedule)
    versions: dict[int, Weights] = {}
    yield weights
    for k, update in enumerate(schedule.updates):
        if k in last_use:
            versions[k] = weights
        total: Weights = {}
        for each in update.gradients:
            batches = {seed: problem.batch(seed, each) for seed in initial}
            data = (torch.stack(parts) for parts in zip(*(batches[seed] for seed in seeds), strict=True))
            found = gradients_of(versions.get(each.read, weights), *data)
            for name, value in found.items():
                total[name] = total[name] + each.weight * value if name in total else each.weight * value
        factor = rates * decay(k)
        velocity = {name: _like(momenta, value) * velocity[name] + value for name, value in total.items()}
        weights = {name: value - _like(factor, value) * velocity[name] for name, value in weights.items()}
        versions = {version: kept for version, kept in versions.items() if last_use[version] > k}
        yield weights


def _like(numbers: Tensor, value: Tensor) -> Tensor:
    """Return one number for each setting in a shape that can be multiplied with stacked weights."""
    return numbers.reshape(-1, *[1] * (value.dim() - 1))


def _last_uses(schedule: Schedule) -> dict[int, int]:
    """Return the last update that contains a gradient on a version, for each version."""
    return {gradient.read: k for k, update in enumerate(schedule.updates) for gradient in update.gradients}

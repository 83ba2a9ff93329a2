"""Training along a recorded schedule, with many settings at once.

All settings of a batch make the same updates in the same order, so their weights are stacked, and `torch.func.vmap`
computes their gradients together. The result is that of `paceline.simulate(train_fn=...)` with the same schedule,
learning rate and seed, apart from rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
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
        """Return the loss by which a run is judged, as a tensor without dimensions."""
        ...


class AsModule(nn.Module):
    """The parameters of a problem as a module, for a run of its own."""

    def __init__(self, initial: Weights) -> None:
        super().__init__()
        self._names = list(initial)
        self.values = nn.ParameterList(initial.values())

    @property
    def weights(self) -> Weights:
        """The parameters by the names that the problem uses."""
        return dict(zip(self._names, self.values, strict=True))


def train(
    problem: Problem,
    schedule: Schedule,
    rates: Sequence[float],
    momenta: Sequence[float],
    seed: int,
    decay: Callable[[int], float | Tensor] = lambda k: 1.0,
) -> Iterator[Weights]:
    """Yield the stacked weights of all runs before the first update, and after each update.

    Args:
        problem: the problem.
        schedule: the schedule, which is the same for all runs.
        rates: learning rate of SGD in each run.
        momenta: momentum of SGD in each run.
        seed: seed of the initial weights and of the data of all runs.
        decay: function that returns the factor of the learning rate in the k-th update, for all runs or for each.
    """
    weights = {name: torch.stack([value] * len(rates)) for name, value in problem.initial(seed).items()}
    kind = next(iter(weights.values())).dtype
    rate, momentum = (torch.tensor(numbers, dtype=kind) for numbers in (rates, momenta))
    velocity = {name: torch.zeros_like(value) for name, value in weights.items()}
    gradients_of = vmap(grad(problem.loss), randomness="error")
    # The last update that contains a gradient on a version, for each version.
    last_use = {
        gradient.read: k for k, update in enumerate(schedule.updates) for gradient in update.gradients
    }
    versions: dict[int, Weights] = {}
    yield weights
    for k, update in enumerate(schedule.updates):
        if k in last_use:
            versions[k] = weights
        total: Weights = {}
        for each in update.gradients:
            data = (torch.stack([part] * len(rates)) for part in problem.batch(seed, each))
            found = gradients_of(versions.get(each.read, weights), *data)
            for name, value in found.items():
                total[name] = total[name] + each.weight * value if name in total else each.weight * value
        factor = rate * decay(k)
        velocity = {name: _like(momentum, value) * velocity[name] + value for name, value in total.items()}
        weights = {name: value - _like(factor, value) * velocity[name] for name, value in weights.items()}
        versions = {version: kept for version, kept in versions.items() if last_use[version] > k}
        yield weights


def _like(numbers: Tensor, value: Tensor) -> Tensor:
    """Return one number for each run in a shape that can be multiplied with stacked weights."""
    return numbers.reshape(-1, *[1] * (value.dim() - 1))

"""The model of all systems, and the time of its training steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import nn

from .plan import WARM_UP, lengths

__all__ = ["Flat", "median_s", "times_s"]


class Flat(nn.Module):
    """A model whose backward pass makes only one pass over its parameters.

    Args:
        size_mb: size of the parameters in MB (2**20 bytes).
        worker: index of the worker. Each worker has other gradients, as if it had other data.
    """

    def __init__(self, size_mb: float, worker: int) -> None:
        super().__init__()
        self.factor = float(worker + 1)
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(length)) for length in lengths(size_mb))

    def forward(self) -> torch.Tensor:
        return torch.stack([layer.sum() for layer in self.layers]).sum() * self.factor

    def compute(self) -> None:
        """Compute new gradients: the part of a step that is the same in all systems."""
        self.zero_grad()
        self().backward()

    def copy_gradients(self, places: Sequence[torch.Tensor]) -> None:
        """Copy the gradients of the layers into parts of a flat vector, as DDP does."""
        for layer, place in zip(self.layers, places, strict=True):
            assert layer.grad is not None
            place.copy_(layer.grad)
            layer.grad = place


def median_s(step: Callable[[], object], iterations: int) -> float:
    """Return the median time of one call of `step` in seconds, after a warm-up."""
    return median(times_s(step, iterations))


def times_s(step: Callable[[], object], iterations: int) -> list[float]:
    """Return the time of each call of `step` in seconds, after a warm-up."""
    found = []
    for index in range(WARM_UP + iterations):
        begun_s = time.perf_counter()
        step()
        if index >= WARM_UP:
            found.append(time.perf_counter() - begun_s)
    return found

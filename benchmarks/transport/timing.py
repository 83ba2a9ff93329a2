"""Times training steps. Backward passes are timed separately, so that their time can be subtracted."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn

from .plan import LR, WARM_UP, Turn, lengths
from .rendezvous import meet

__all__ = ["Flat", "bare_backward_s", "median_s"]


class Flat(nn.Module):
    """A model whose backward pass makes only one pass over its parameters."""

    def __init__(self, size_mb: float) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(length)) for length in lengths(size_mb))

    def forward(self) -> torch.Tensor:
        return torch.stack([layer.sum() for layer in self.layers]).sum()


def median_s(step: Callable[[], object], iterations: int) -> float:
    """Return the median time of one call of `step` in seconds, after a warm-up."""
    times_s = []
    for index in range(WARM_UP + iterations):
        begun_s = time.perf_counter()
        step()
        if index >= WARM_UP:
            times_s.append(time.perf_counter() - begun_s)
    return median(times_s)


def bare_backward_s(turn: Turn, index: int, out: Path) -> float:
    """Return the time of `zero_grad()` and `backward()` in seconds. All workers measure this time simultaneously."""
    model = Flat(turn.size_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def step() -> None:
        optimizer.zero_grad()
        model().backward()

    meet(out, "before", index, turn.workers)
    bare_s = median_s(step, turn.iterations)
    meet(out, "after", index, turn.workers)
    return bare_s

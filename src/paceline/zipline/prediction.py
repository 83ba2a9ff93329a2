"""From recent pushes to the pace of each worker: what `solve_periodic` asks for.

A predictor is anything that can be called with the workers' recent pushes and answers (last, interval). It looks at
no more than `memory` pushes of each worker, so nobody needs to keep more. Pushes come as one (n, k) array, each
row ascending with the newest push last; a worker that has pushed less often is padded with NaN in front, and
needs two pushes at least (of one that has fewer, `LastInterval` says NaN, which `solve_periodic` refuses).

The paper takes the last interval and leaves it at that: a wrong prediction is made good with the next one. With
jittery workers the error of a last interval is multiplied by the number of iterations looked ahead, so there are
two that look further back: the mean, which is best while the jitter is even, and the median, which a few stalls
among the recent iterations do not touch.

Source: Zhao et al., ElasticBSP (2021), section 4 (`LastInterval`); the other two are not from the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from ..errors import ConfigurationError
from .end_times import Floats

__all__ = ["LastInterval", "MeanInterval", "MedianInterval", "Predictor"]


class Predictor(Protocol):
    """How fast each worker goes on."""

    @property
    def memory(self) -> int:
        """How many recent pushes of a worker it looks at, at most."""

    def __call__(self, pushes: ArrayLike) -> tuple[Floats, Floats]:
        """(last, interval), both (n,), from (n, k) push times, k >= 2, in any one unit."""


@dataclass(frozen=True)
class LastInterval:
    """The next iterations take as long as the last one did: g = t_k - t_(k-1).

    >>> LastInterval()([[0.0, 3.0, 5.0]])
    (array([5.]), array([2.]))
    """

    memory = 2

    def __call__(self, pushes: ArrayLike) -> tuple[Floats, Floats]:
        recent = _recent(pushes, 2)
        return recent[:, 1], recent[:, 1] - recent[:, 0]


@dataclass(frozen=True)
class _Windowed:
    """Looks at the last `window` intervals of each worker, or at those there are."""

    window: int = 5

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigurationError(f"window must be at least 1 interval, got {self.window}")

    @property
    def memory(self) -> int:
        return self.window + 1

    def _last_and_intervals(self, pushes: ArrayLike) -> tuple[Floats, Floats]:
        """(n,) and (n, window) or fewer, NaN in front where a worker has fewer."""
        recent = _recent(pushes, self.memory)
        intervals = np.diff(recent)
        known = np.isfinite(intervals[:, -1])
        if not known.all():
            raise ConfigurationError(
                f"worker {known.argmin()} has pushed less than twice: its pace is unknown"
            )
        return recent[:, -1], intervals


@dataclass(frozen=True)
class MeanInterval(_Windowed):
    """The next iterations take as long as the last `window` ones did on average (a moving average).

    >>> MeanInterval(window=2)([[0.0, 3.0, 5.0]])
    (array([5.]), array([2.5]))
    """

    def __call__(self, pushes: ArrayLike) -> tuple[Floats, Floats]:
        last, intervals = self._last_and_intervals(pushes)
        return last, np.nanmean(intervals, axis=1)


@dataclass(frozen=True)
class MedianInterval(_Windowed):
    """The next iterations take as long as the middle one of the last `window` did.

    >>> MedianInterval(window=3)([[0.0, 2.0, 30.0, 33.0]])
    (array([33.]), array([3.]))
    """

    def __call__(self, pushes: ArrayLike) -> tuple[Floats, Floats]:
        last, intervals = self._last_and_intervals(pushes)
        return last, np.nanmedian(intervals, axis=1)


def _recent(pushes: ArrayLike, memory: int) -> Floats:
    """The newest `memory` pushes of each worker, or as many as there are."""
    recent = np.asarray(pushes, dtype=np.float64)
    if recent.ndim != 2 or recent.shape[1] < 2:
        raise ConfigurationError(
            f"pushes must be (workers, push times), at least two of each worker; their shape is {recent.shape}"
        )
    return recent[:, -memory:]

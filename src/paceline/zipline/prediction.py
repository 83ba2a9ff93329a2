"""Predictors, which estimate the pace of each worker from its recent pushes, as input for `solve_periodic`.

A predictor is any callable that takes the times of the workers' recent pushes and returns (last, interval). It uses
at most the last `memory` pushes of each worker, so callers need not store more. The pushes are passed as an (n, k)
array. Each row is ascending, with the newest push last. The row of a worker that has pushed fewer than k times is
padded with NaN at the front. Each worker needs at least two pushes: for a worker with fewer, `LastInterval` returns
NaN, which `solve_periodic` rejects, and the other predictors raise ConfigurationError.

The paper uses only the last interval, and relies on the next prediction to correct errors. If the workers' iteration
times vary, the error of a single interval is multiplied by the number of predicted iterations. Two more predictors
therefore use several intervals: the mean, which is best for symmetric jitter, and the median, which is not affected
by a few stalls among the recent iterations.

Source: Zhao et al., ElasticBSP (2021), section 4 (`LastInterval`). The other predictors are not from the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from ..errors import ConfigurationError
from .end_times import Floats


class Predictor(Protocol):
    """A callable that predicts the pace of each worker."""

    @property
    def memory(self) -> int:
        """The maximum number of recent pushes that the predictor uses for each worker."""

    def __call__(self, pushes: ArrayLike) -> tuple[Floats, Floats]:
        """Return each worker's last push and predicted interval, both of shape (n,), in the unit of `pushes`.

        `pushes` is an (n, k) array of push times with k >= 2.
        """


@dataclass(frozen=True)
class LastInterval:
    """Predict that each of the next iterations takes as long as the last iteration: interval = t_k - t_(k-1).

    >>> LastInterval()([[0.0, 3.0, 5.0]])
    (array([5.]), array([2.]))
    """

    memory = 2

    def __call__(self, pushes: ArrayLike) -> tuple[Floats, Floats]:
        recent = _recent(pushes, 2)
        return recent[:, 1], recent[:, 1] - recent[:, 0]


@dataclass(frozen=True)
class _Windowed:
    """Base class of the predictors that use up to `window` recent intervals of each worker."""

    window: int = 5

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigurationError(f"window must be at least 1 interval; it is {self.window}")

    @property
    def memory(self) -> int:
        return self.window + 1

    def _last_and_intervals(self, pushes: ArrayLike) -> tuple[Floats, Floats]:
        """Return each worker's last push, shape (n,), and recent intervals, shape (n, m) with m <= window.

        Rows of workers with fewer intervals are padded with NaN at the front.
        """
        recent = _recent(pushes, self.memory)
        intervals = np.diff(recent)
        known = np.isfinite(intervals[:, -1])
        if not known.all():
            raise ConfigurationError(
                f"worker {known.argmin()} has fewer than two pushes, so its pace is unknown"
            )
        return recent[:, -1], intervals


@dataclass(frozen=True)
class MeanInterval(_Windowed):
    """Predict that each of the next iterations takes the average time of the last `window` iterations.

    >>> MeanInterval(window=2)([[0.0, 3.0, 5.0]])
    (array([5.]), array([2.5]))
    """

    def __call__(self, pushes: ArrayLike) -> tuple[Floats, Floats]:
        last, intervals = self._last_and_intervals(pushes)
        return last, np.nanmean(intervals, axis=1)


@dataclass(frozen=True)
class MedianInterval(_Windowed):
    """Predict that each of the next iterations takes the median time of the last `window` iterations.

    >>> MedianInterval(window=3)([[0.0, 2.0, 30.0, 33.0]])
    (array([33.]), array([3.]))
    """

    def __call__(self, pushes: ArrayLike) -> tuple[Floats, Floats]:
        last, intervals = self._last_and_intervals(pushes)
        return last, np.nanmedian(intervals, axis=1)


def _recent(pushes: ArrayLike, memory: int) -> Floats:
    """Return the newest `memory` columns of `pushes`, or all of them if there are fewer."""
    recent = np.asarray(pushes, dtype=np.float64)
    if recent.ndim != 2 or recent.shape[1] < 2:
        raise ConfigurationError(
            "pushes must have the shape (workers, push times) with at least two push times per worker; "
            f"its shape is {recent.shape}"
        )
    return recent[:, -memory:]


# -- The synthetic workers with which the paper measures its solvers -----------------------------------------
#
# Worker p has an interval i_p, drawn uniformly from 1000-1500 ms, and a start time s_p, drawn uniformly from
# 10-50 ms. The j-th push of worker p is at time j * i_p + s_p. All workers first run for a warm-up period of
# 20 s, after which they are no longer in phase. The next R pushes of each worker are predicted from the
# worker's last two pushes.
#
# Source: Zhao et al., ElasticBSP (2021), section 6.1. We assume that the newest push of a worker is its first
# push at or after the end of the warm-up, which matches the spread of the newest pushes in the data that the
# authors published.


def generate_pushes(
    worker_count: int,
    generator: np.random.Generator,
    *,
    interval_ms: tuple[float, float] = (1000.0, 1500.0),
    warm_up_ms: float = 20_000.0,
) -> Floats:
    """Return the times of the last two pushes of each worker, in ms, as the input of a `Predictor`.

    The result is a float64 array of shape (worker_count, 2).

    Args:
        worker_count: number of workers, n.
        generator: source of the random intervals and start times. The same seed produces the same workers.
        interval_ms: range of the intervals, in ms.
        warm_up_ms: duration of the warm-up, in ms. If it is 0, each worker has pushed exactly twice.

    >>> pushes = generate_pushes(3, np.random.default_rng(0))
    >>> pushes.shape, bool((pushes[:, 1] >= 20_000).all())
    ((3, 2), True)
    """
    interval = generator.uniform(*interval_ms, worker_count)
    start = generator.uniform(10.0, 50.0, worker_count)
    # The number of the first push at or after the end of the warm-up, but at least 2.
    newest = np.maximum(np.ceil((warm_up_ms - start) / interval), 2)
    return np.stack([start + (newest - 1) * interval, start + newest * interval], axis=1)

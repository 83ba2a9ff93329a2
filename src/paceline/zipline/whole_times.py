"""Exact results for workers whose times are given as integers, such as ticks.

Floats represent all integers below 2^53, and the search (see `sweep`) only adds, subtracts and compares end times. It
is therefore exact for small integers. To make the integers small, the earliest time is subtracted from all times, and
if necessary, the times are divided by their greatest common divisor. If some of them are still too large, a slower
search computes the result with Python's own integers.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .end_times import Progressions
from .solution import Solution

__all__ = ["WholeTimes", "whole_times"]

EXACT = 2**53


class WholeTimes(NamedTuple):
    """End times (base + j * interval) * unit + origin for j = 1..lookahead, all of them integers.

    Attributes:
        base: time of each worker's last push, in units after the origin; shape (n,).
        interval: interval of each worker, in units; shape (n,).
        lookahead: R, the number of end times per worker.
        origin: time of the earliest last push.
        unit: a common divisor of all intervals and of all differences between last pushes.
    """

    base: NDArray[Any]
    interval: NDArray[Any]
    lookahead: int
    origin: int
    unit: int

    @property
    def latest(self) -> int:
        """An upper bound on the end times, in units after the origin."""
        return int(self.base.max()) + self.lookahead * int(self.interval.max())

    def progressions(self) -> Progressions | None:
        """Return the end times in units after the origin, or None if floats cannot represent them exactly."""
        if self.latest >= EXACT:
            return None
        return Progressions(self.base.astype(np.float64), self.interval.astype(np.float64), self.lookahead)

    def restored(self, solution: Solution) -> Solution:
        """Return a solution for `progressions` in the original unit, with integers for the wait and the barrier."""
        wait, barrier = int(solution.wait) * self.unit, self.origin + int(solution.barrier) * self.unit
        return Solution(wait, barrier, solution.picks, solution.candidates)

    def search(self) -> Solution:
        """Return the canonical solution, in units after the origin, for end times of any size."""
        pace = list(zip(self.base.tolist(), self.interval.tolist(), strict=True))
        ends = sorted(
            (base + j * interval, worker)
            for worker, (base, interval) in enumerate(pace)
            for j in range(1, self.lookahead + 1)
        )
        # For each end time in order, find the shortest window that ends there and has an end time of each worker.
        inside = [0] * len(pace)  # number of end times of each worker in the window
        missing = len(pace)  # number of workers without an end time in the window
        begin = 0
        best: tuple[int, int] | None = None
        for end, worker in ends:
            missing -= not inside[worker]
            inside[worker] += 1
            while inside[ends[begin][1]] > 1:
                inside[ends[begin][1]] -= 1
                begin += 1
            if not missing and (best is None or end - ends[begin][0] < best[0]):
                best = end - ends[begin][0], end
        assert best is not None
        wait, barrier = best
        picks = [min((barrier - base) // interval, self.lookahead) - 1 for base, interval in pace]
        return Solution(wait, barrier, np.array(picks, dtype=np.intp), len(ends))


def whole_times(last: ArrayLike, interval: ArrayLike, lookahead: int) -> WholeTimes | None:
    """Return the valid arguments of `solve_periodic` as `WholeTimes`, or None unless all of them are integers."""
    base, step = _whole(last), _whole(interval)
    if base is None or step is None:
        return None
    origin = int(base.min())
    if int(base.max()) - origin < EXACT:  # otherwise, the differences may not fit into 64 bits
        times = WholeTimes(base - origin, step, lookahead, origin, 1)
        if times.latest < EXACT:
            return times
    bases, steps = [int(time) - origin for time in base], [int(time) for time in step]
    unit = gcd(*bases, *steps)
    return WholeTimes(
        np.array([time // unit for time in bases], dtype=object),
        np.array([time // unit for time in steps], dtype=object),
        lookahead,
        origin,
        unit,
    )


def _whole(times: ArrayLike) -> NDArray[Any] | None:
    """Return times as an array of integers: 64-bit ones if possible, else Python's. None if some are not integers."""
    array = np.asarray(times)
    if array.dtype.kind == "i":
        return array
    # NumPy may convert integers beyond 64 bits to floats.
    exact = np.asarray(times, dtype=object)
    return exact if all(isinstance(time, int | np.integer) for time in exact) else None

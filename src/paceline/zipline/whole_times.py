"""Exact results for workers whose times are given as integers, such as ticks.

Floats represent all integers below 2^53, and the search (see `sweep`) only adds, subtracts and compares end times. It
is therefore exact for small integers. To make the integers small, the earliest time is subtracted from all times, and
if necessary, the times are divided by their greatest common divisor. If some of them are still too large, a slower
search computes the result with Python's own integers.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .solution import Solution

__all__ = ["WholeTimes", "whole_times"]

EXACT = 2**53


class WholeTimes(NamedTuple):
    """The last pushes and the intervals of workers with a constant pace, in whole units.

    Attributes:
        base: time of each worker's last push, in units after the origin.
        interval: interval of each worker, in units.
        origin: time of the earliest last push.
        unit: a common divisor of all intervals and of all differences between last pushes.
    """

    base: list[int]
    interval: list[int]
    origin: int
    unit: int = 1

    def fit(self, lookahead: int) -> bool:
        """Return True if floats represent all end times exactly."""
        return max(self.base) + lookahead * max(self.interval) < EXACT

    def reduced(self) -> WholeTimes:
        """Return the same times in the largest unit of which they are multiples."""
        unit = gcd(*self.base, *self.interval)
        base, interval = [time // unit for time in self.base], [time // unit for time in self.interval]
        return WholeTimes(base, interval, self.origin, unit)

    def restored(self, solution: Solution) -> Solution:
        """Return a solution for these times in the original unit, with integers for the wait and the barrier."""
        wait, barrier = int(solution.wait) * self.unit, self.origin + int(solution.barrier) * self.unit
        return Solution(wait, barrier, solution.picks, solution.candidates)

    def search(self, lookahead: int) -> Solution:
        """Return the canonical solution for these times, without floats."""
        pace = list(zip(self.base, self.interval, strict=True))
        ends = sorted(
            (base + j * interval, worker)
            for worker, (base, interval) in enumerate(pace)
            for j in range(1, lookahead + 1)
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
        picks = [min((barrier - base) // interval, lookahead) - 1 for base, interval in pace]
        return Solution(wait, barrier, np.array(picks, dtype=np.intp), len(ends))


def whole_times(last: ArrayLike, interval: ArrayLike) -> WholeTimes | None:
    """Return the arguments of `solve_periodic` as `WholeTimes`, or None unless they are one or more integers."""
    base, step = _whole(last), _whole(interval)
    if not base or not step:
        return None
    origin = min(base)
    return WholeTimes([time - origin for time in base], step, origin)


def _whole(times: ArrayLike) -> list[int]:
    """Return times as Python's integers, or [] if they are not a one-dimensional sequence of integers."""
    if isinstance(times, list) and set(map(type, times)) == {int}:
        return times
    array = np.asarray(times)
    whole: list[int] = array.tolist() if array.dtype.kind in "iu" and array.ndim == 1 else []
    return whole

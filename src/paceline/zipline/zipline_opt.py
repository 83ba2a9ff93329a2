"""ZipLineOpt and ZipLineOptBS: variants of ZipLine that keep Z sorted.

Z is a list in the order of the timeline, so its first element is min(Z) and its last element is max(Z). When a new
end time replaces the previous one of the same worker, there are two cases:

1. The previous end time was the first element of Z. Then min(Z) may have increased, so the new Z is evaluated.
2. Otherwise min(Z) is unchanged and max(Z) does not decrease, so the new Z is not narrower (Theorem 3) and is
   skipped.

The two methods differ in how they find the previous end time in Z. ZipLineOpt scans Z in O(n) time. ZipLineOptBS
reads the previous end time from the matrix and finds it in Z by binary search in O(log n) time.

Source: Zhao et al., ElasticBSP (2021), sections 5.3.1 and 5.3.2. Deviation: Z is sorted by (end time, worker,
column). All three numbers are known for the previous end time, so it is found even if several end times are equal.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from math import inf

from .end_times import Floats
from .solution import Solution, solution_at
from .zipline import timeline

__all__ = ["zipline_opt", "zipline_opt_bs"]

Element = tuple[float, int, int]  # end time, worker, column


def zipline_opt(times: Floats) -> Solution:
    """Run ZipLineOpt on an (n, R) matrix."""

    def position(z: list[Element], p: int, i: int) -> int:
        return next(k for k, (_, worker, _) in enumerate(z) if worker == p)

    return _scan(times, position)


def zipline_opt_bs(times: Floats) -> Solution:
    """Run ZipLineOptBS on an (n, R) matrix."""
    rows = times.tolist()

    def position(z: list[Element], p: int, i: int) -> int:
        return bisect_left(z, (rows[p][i], p, i))

    return _scan(times, position)


def _scan(times: Floats, position: Callable[[list[Element], int, int], int]) -> Solution:
    """Run the scan. `position(z, p, i)` must return the index in z of the end time of worker p in column i."""
    z: list[Element] = []
    wait = barrier = inf
    candidates = 0
    for t, p, i in timeline(times):
        replaced = 0
        if i > 0:
            replaced = position(z, p, i - 1)
            del z[replaced]
        z.append((t, p, i))
        # A worker's first end time replaces no other one. Z is complete when it contains an end time of every worker.
        if replaced == 0 and len(z) == len(times):
            candidates += 1
            d = t - z[0][0]
            if d < wait:
                wait, barrier = d, t
    return solution_at(times, barrier, candidates)

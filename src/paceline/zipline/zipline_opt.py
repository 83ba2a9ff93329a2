"""ZipLineOpt and ZipLineOptBS: ZipLine with Z kept in order.

Z is a list in the order of the timeline, so its first element is min(Z) and its last one max(Z). When a new end
time replaces an older one of its worker, there are two cases:

1. the older one was the first of Z: min(Z) has moved up, and the new Z is evaluated;
2. it was not: min(Z) stays and max(Z) does not fall, so the new Z is no better (Theorem 3) and is not evaluated.

The two methods differ in how they find the older one. ZipLineOpt looks through Z, O(n); ZipLineOptBS knows from the
matrix of end times what it is looking for and finds it by binary search, O(log n).

Source: Zhao et al., ElasticBSP (2021), sections 5.3.1 and 5.3.2. Deviation: Z is ordered by (end time, worker,
column), all of which is known of the older one, so equal end times need no search of their own.
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
    """ZipLineOpt on an (n, R) matrix."""

    def position(z: list[Element], p: int, i: int) -> int:
        return next(k for k, (_, worker, _) in enumerate(z) if worker == p)

    return _scan(times, position)


def zipline_opt_bs(times: Floats) -> Solution:
    """ZipLineOptBS on an (n, R) matrix."""
    rows = times.tolist()

    def position(z: list[Element], p: int, i: int) -> int:
        return bisect_left(z, (rows[p][i], p, i))

    return _scan(times, position)


def _scan(times: Floats, position: Callable[[list[Element], int, int], int]) -> Solution:
    """`position(z, p, i)` says where in z the end time of worker p in column i is."""
    z: list[Element] = []
    wait = barrier = inf
    candidates = 0
    for t, p, i in timeline(times):
        replaced = 0
        if i > 0:
            replaced = position(z, p, i - 1)
            del z[replaced]
        z.append((t, p, i))
        # A worker's first end time replaces nothing; only one such, the last worker's, finds Z complete.
        if replaced == 0 and len(z) == len(times):
            candidates += 1
            d = t - z[0][0]
            if d < wait:
                wait, barrier = d, t
    return solution_at(times, barrier, candidates)

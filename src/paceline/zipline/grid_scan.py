"""GridScan and FullGridScan: what lies nearest to one worker's end times.

Takes each end time e of a designated worker, adds the end time of every other worker that is nearest to e, and
keeps the narrowest of these sets. GridScan designates the worker with the earliest end time, R sets, O(R^2 n);
FullGridScan designates every worker in turn, R n sets, O(R^2 n^2).

Neither is exact: nearest to e may be on the wrong side of it. With the end times (5, 105), (15, 205), (0, 15),
(7, 22) the best set is 5, 15, 15, 7, whose width is 10; every end time there has a nearer neighbour that is not
in it, and FullGridScan finds 15.

Source: Zhao et al., ElasticBSP (2021), section 5.1, Algorithm 1. Ties, which the paper leaves open: of several
workers with the earliest end time the first is designated, of two end times equally near to e the earlier
column is taken, and of equally narrow sets the first one stays (workers and columns ascending). So their
picks and barrier, unlike those of the exact methods, are not canonical.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import numpy as np

from .end_times import Floats
from .solution import Solution

__all__ = ["full_grid_scan", "grid_scan"]


def grid_scan(times: Floats) -> Solution:
    """Algorithm 1 on an (n, R) matrix: the designated row has the earliest end time."""
    return _scan(times, [int(times[:, 0].argmin())])


def full_grid_scan(times: Floats) -> Solution:
    """Algorithm 1 without its line 4 on an (n, R) matrix: every row is designated in turn."""
    return _scan(times, range(len(times)))


def _scan(times: Floats, designated: Iterable[int]) -> Solution:
    workers = np.arange(len(times))
    best = Solution(inf, inf, workers, 0)
    candidates = 0
    for p in designated:
        for i, e in enumerate(times[p]):
            picks = np.abs(times - e).argmin(axis=1)
            picks[p] = i
            z = times[workers, picks]
            wait, barrier = float(z.max() - z.min()), float(z.max())
            candidates += 1
            if wait < best.wait:
                best = Solution(wait, barrier, picks, 0)
    return Solution(best.wait, best.barrier, best.picks, candidates)

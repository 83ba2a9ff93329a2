"""GridScan and FullGridScan: heuristics that look for end times near the end times of one worker.

For each end time e of a designated worker, the scan forms a set that contains e and, for every other worker, the end
time nearest to e. The scan returns the narrowest of these sets. GridScan designates the worker with the earliest end
time and evaluates R sets in O(R^2 n) time. FullGridScan designates each worker in turn and evaluates R n sets, which
takes O(R^2 n^2) time.

Neither scan is exact: an end time of the narrowest set may be farther from e than another end time of the same worker
on the other side of e. Example: for workers with the end times (5, 105), (15, 205), (0, 15) and (7, 22), the
narrowest set is 5, 15, 15, 7 with a width of 10. For each element e of this set, some worker has an end time
nearer to e than the one in the set. So FullGridScan never forms this set, and its result has a width of 15.

Source: Zhao et al., ElasticBSP (2021), section 5.1, Algorithm 1. The paper does not say how ties are resolved. If
several workers have the earliest end time, the first one is designated. If two end times are equally near to e, the
earlier column is taken. If several sets are equally narrow, the first one in the order of designated workers and
their columns is kept. Therefore, unlike the exact methods, the scans do not return the canonical choice (see
`solution`).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import numpy as np

from .end_times import Floats
from .solution import Solution

__all__ = ["full_grid_scan", "grid_scan"]


def grid_scan(times: Floats) -> Solution:
    """Run Algorithm 1 on an (n, R) matrix. The row with the earliest end time is designated."""
    return _scan(times, [int(times[:, 0].argmin())])


def full_grid_scan(times: Floats) -> Solution:
    """Run Algorithm 1 on an (n, R) matrix, but designate every row in turn, instead of the row chosen in line 4."""
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

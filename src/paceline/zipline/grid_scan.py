"""GridScan and FullGridScan: heuristics that look for end times near the end times of one worker.

For each end time e of a designated worker, the scan forms a set that contains e and, for every other worker, the end
time nearest to e. The scan returns the narrowest of these sets. GridScan designates the worker with the earliest end
time and evaluates R sets in O(R^2 n) time. FullGridScan designates each worker in turn and evaluates R n sets, which
takes O(R^2 n^2) time.

Neither scan is exact: an end time of the narrowest set may be farther from e than another end time of the same worker
on the other side of e. With at most three workers, FullGridScan finds the shortest wait, because it designates the
element of the narrowest set that is neither the first nor the last. In the smallest example in whole numbers for
which it does not, four workers have two end times each. The narrowest set is 1, 3, 1, 3. But each of its elements has
a nearer end time on its other side, so FullGridScan does not form this set:

>>> import numpy as np
>>> times = np.array([[0.0, 1.0], [0.0, 3.0], [1.0, 4.0], [3.0, 4.0]])
>>> full_grid_scan(times).wait
3.0
>>> from .naive import naive
>>> naive(times).wait
2.0

The paper's Table 3 reports a success rate of 100 % for FullGridScan, and section 6.1.1 calls the method exhaustive.
It found the shortest wait for each data set of that table, but it does not in general.

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

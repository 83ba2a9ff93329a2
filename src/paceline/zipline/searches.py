"""The searches that are not ZipLine: GridScan and FullGridScan, the naive search, and two baselines.

GridScan and FullGridScan are heuristics that look for end times near the end times of one worker, which is designated.

For each end time e of a designated worker, the scan forms a set that contains e and, for every other worker, the end
time nearest to e. The scan returns the narrowest of these sets. GridScan designates the worker with the earliest end
time and evaluates R sets in O(R^2 n) time. FullGridScan designates each worker in turn and evaluates R n sets, which
takes O(R^2 n^2) time.

Neither scan is exact: an end time of the narrowest set may be farther from e than another end time of the same worker
on the other side of e. With at most three workers, FullGridScan finds the shortest wait, because it also designates the
worker whose end time is in the middle of the narrowest set. With four workers, it may not find this wait. In the
smallest example in whole numbers, each worker has two end times. The narrowest set is 1, 3, 1, 3. But for each of its
elements e, another worker has a nearer end time on the other side of e, so FullGridScan does not form this set:

>>> import numpy as np
>>> times = np.array([[0.0, 1.0], [0.0, 3.0], [1.0, 4.0], [3.0, 4.0]])
>>> full_grid_scan(times).wait
3.0
>>> naive(times).wait
2.0

The paper's Table 3 reports a success rate of 100 % for FullGridScan, and section 6.1.1 calls the method exhaustive.
FullGridScan found the shortest wait for each data set of that table, but does not always find the shortest wait.

Source: Zhao et al., ElasticBSP (2021), section 5.1, Algorithm 1. The paper does not say how ties are resolved. If
several workers have the earliest end time, the first one is designated. If two end times are equally near to e, the
earlier one is taken. If several sets are equally narrow, the set that was formed first is kept: the workers are
designated one after another, and for each of them, e goes from its earliest to its latest end time. Therefore, unlike
the exact methods, the scans do not return the canonical choice (see `end_times`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import inf

import numpy as np
from numpy.typing import ArrayLike

from .end_times import Floats, Solution, checked_matrix, solution_at


def grid_scan(times: Floats) -> Solution:
    """Run Algorithm 1 on an (n, R) matrix. The row with the earliest end time is designated."""
    return _narrowest_near(times, [int(times[:, 0].argmin())])


def full_grid_scan(times: Floats) -> Solution:
    """Run Algorithm 1 on an (n, R) matrix, but designate every row in turn, instead of the row chosen in line 4."""
    return _narrowest_near(times, range(len(times)))


def _narrowest_near(times: Floats, designated: Sequence[int]) -> Solution:
    workers, candidates = np.arange(len(times)), len(designated) * times.shape[1]
    best = Solution(inf, inf, workers, candidates)
    for p in designated:
        for i, e in enumerate(times[p]):
            picks = np.abs(times - e).argmin(axis=1)
            picks[p] = i
            z = times[workers, picks]
            if (wait := float(z.max() - z.min())) < best.wait:
                best = Solution(wait, float(z.max()), picks, candidates)
    return best


# -- Naive search of all possible sets of end times ----------------------------------------------------------
#
# The search forms all R^n sets with one end time of each worker, and returns the narrowest set. It is a
# reference for tests of the other methods, and too slow for any other use: ten workers with fifteen end times
# each have 6 * 10^11 sets.
#
# Source: Zhao et al., ElasticBSP (2021), section 5.1. Deviation from the paper: sets are formed one at a
# time, so the search needs O(n) space instead of O(R^n).


def naive(times: Floats) -> Solution:
    """Evaluate all R^n sets of an (n, R) matrix."""
    n, lookahead = times.shape
    rows = times.tolist()
    best = inf, inf
    best_picks: tuple[int, ...] = ()
    for picks in product(range(lookahead), repeat=n):
        z = [row[i] for row, i in zip(rows, picks, strict=True)]
        rank = max(z) - min(z), max(z)
        # The sets are formed in lexicographic order of their columns, so `<=` resolves ties in favor of later
        # columns.
        if rank <= best:
            best, best_picks = rank, picks
    return Solution(*best, np.array(best_picks), lookahead**n)


# -- Baselines to compare ZipLine with: barriers that are chosen without optimization ------------------------
#
# Source: Zhao et al., ElasticBSP (2021), Fig. 4 (`bsp_d` and `rnd_d`). The paper does not say how its random
# barrier is drawn. We draw it uniformly from the barriers that ZipLine considers: all end times by which
# every worker has ended at least one iteration. Each worker stops at its latest end time at or before the barrier.


def bsp_barrier(times: ArrayLike) -> Solution:
    """Return the solution of BSP: every worker stops at the end of its next iteration (column 0).

    `times` is an (n, R) array as for `solve`.

    >>> bsp_barrier([[2, 4, 6], [5, 10, 15]]).wait
    3.0
    """
    first = checked_matrix(times).first
    barrier = float(first.max())
    return Solution(barrier - float(first.min()), barrier, np.zeros(len(first), dtype=np.intp), 1)


def random_barrier(times: ArrayLike, generator: np.random.Generator) -> Solution:
    """Return the solution for a random barrier, drawn with `generator`. `times` is an (n, R) array as for `solve`.

    >>> random_barrier([[2, 4, 6], [5, 10, 15]], np.random.default_rng(0)).barrier in (5.0, 6.0, 10.0, 15.0)
    True
    """
    matrix = checked_matrix(times).times
    barriers = matrix[matrix >= matrix[:, 0].max()]
    return solution_at(matrix, generator.choice(barriers), 1)

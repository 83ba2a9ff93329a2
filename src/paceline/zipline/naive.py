"""Naive search of all possible sets of end times.

The search forms all R^n sets with one end time of each worker, and returns the narrowest set. It is a reference for
tests of the other methods, and too slow for any other use: ten workers with fifteen end times each have 6 * 10^11
sets.

Source: Zhao et al., ElasticBSP (2021), section 5.1. Deviation from the paper: sets are formed one at a time, so the
search needs O(n) space instead of O(R^n).
"""

from __future__ import annotations

from itertools import product
from math import inf

import numpy as np

from .end_times import Floats
from .solution import Solution

__all__ = ["naive"]


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

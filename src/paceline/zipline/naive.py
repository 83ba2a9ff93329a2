"""Naive search: every set there is.

Takes one end time of each worker in every possible way, R^n sets, and keeps the narrowest. It is what the other
methods are tested against, and practical for nothing else: ten workers with fifteen end times each are 10^11
sets.

Source: Zhao et al., ElasticBSP (2021), section 5.1. Deviation: the sets are formed one after the other, so it
needs O(n) space instead of O(R^n).
"""

from __future__ import annotations

from itertools import product
from math import inf

import numpy as np

from .end_times import Floats
from .solution import Solution

__all__ = ["naive"]


def naive(times: Floats) -> Solution:
    """Evaluates all R^n sets of an (n, R) matrix."""
    n, lookahead = times.shape
    rows = times.tolist()
    best = inf, inf
    best_picks: tuple[int, ...] = ()
    for picks in product(range(lookahead), repeat=n):
        z = [row[i] for row, i in zip(rows, picks, strict=True)]
        rank = max(z) - min(z), max(z)
        # The sets come in lexicographic order of their columns, so among equals `<=` keeps the latest columns.
        if rank <= best:
            best, best_picks = rank, picks
    return Solution(*best, np.array(best_picks), lookahead**n)

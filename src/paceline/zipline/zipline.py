"""ZipLine: a single pass over all end times in ascending order.

All end times are merged into one timeline, which is scanned once. For each worker, Z contains the latest end
time that has been scanned: each new end time replaces the previous end time of the same worker. Z becomes a candidate
when it contains an end time of every worker, and each further end time produces another candidate.

ZipLine is exact (Theorem 2 of the paper). Of all sets whose latest end time is t, the narrowest is the one with the
latest end time of each worker at or before t, and ZipLine evaluates this set for every t for which it exists. The
scan takes O(Rn^2) time, because each step searches Z for its minimum.

Source: Zhao et al., ElasticBSP (2021), section 5.2. Deviation from Algorithm 2: once Z is complete, each end time
produces a candidate, as in the text of that section and in Fig. 7. Algorithm 2 as printed also evaluates incomplete
sets Z. If the evaluation is moved out of the inner loop, the algorithm becomes exact but evaluates fewer candidates.
Of several equally narrow candidates, the earliest is chosen (Corollary 1). Each worker stops at its latest end time
at or before the barrier (the last column if several end times are equal).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from .end_times import Floats, checked_times
from .solution import Solution, solution_at

__all__ = ["candidate_waits", "timeline", "zipline"]


def timeline(times: Floats) -> list[tuple[float, int, int]]:
    """Return Omega, the sorted list of the triples (end time, worker, column) of an (n, R) matrix."""
    return sorted((t, p, i) for p, row in enumerate(times.tolist()) for i, t in enumerate(row))


def zipline(times: Floats) -> Solution:
    """Run ZipLine on an (n, R) matrix: evaluate every candidate."""
    candidates = list(_candidates(times))
    _, barrier = min(candidates)
    return solution_at(times, barrier, len(candidates))


def candidate_waits(times: ArrayLike) -> Floats:
    """Return d_Z of every candidate, in the order of evaluation. `times` is an (n, R) array as for `solve`.

    Source: Figs. 6 and 7 of the paper, which plot these values.

    >>> candidate_waits([[2, 4, 6], [5, 10, 15]])
    array([1., 1., 4., 9.])
    """
    return np.array([wait for wait, _ in _candidates(checked_times(times))])


def _candidates(times: Floats) -> Iterator[tuple[float, float]]:
    """Yield (d_Z, max(Z)) of each candidate Z."""
    z: dict[int, float] = {}
    for t, p, _ in timeline(times):
        z[p] = t
        if len(z) == len(times):
            yield t - min(z.values()), t

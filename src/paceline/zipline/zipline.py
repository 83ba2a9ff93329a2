"""ZipLine: one pass over all end times, in order.

Merges all end times into one timeline and scans it. Z holds the latest end time of each worker that was passed so
far; each new one replaces its worker's older one. Once Z holds every worker it is a candidate, and a new one with
every end time after that.

It is exact (Theorem 2 of the paper): of all sets whose latest end time is t, none is narrower than the one with
each worker's latest end time not after t, and ZipLine evaluates that one for every t that has one. The scan is
O(Rn^2), because min(Z) is searched for each time.

Source: Zhao et al., ElasticBSP (2021), section 5.2. Deviations: one candidate per end time once Z is complete, as
that section's text and Fig. 7 have it. The listing of Algorithm 2, read literally, evaluates sets that do not hold
every worker; with the evaluation moved out of its inner loop it is exact but has fewer candidates. Of the narrowest
candidates the earliest is chosen (Corollary 1), and the picks are each worker's latest not after its barrier, also
where several end times are equal.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from .end_times import Floats, checked_times
from .solution import Solution, solution_at

__all__ = ["candidate_waits", "timeline", "zipline"]


def timeline(times: Floats) -> list[tuple[float, int, int]]:
    """Omega: the triples (end time, worker, column) of an (n, R) matrix, ascending."""
    return sorted((t, p, i) for p, row in enumerate(times.tolist()) for i, t in enumerate(row))


def zipline(times: Floats) -> Solution:
    """Evaluates every candidate of an (n, R) matrix."""
    candidates = list(_candidates(times))
    _, barrier = min(candidates)
    return solution_at(times, barrier, len(candidates))


def candidate_waits(times: ArrayLike) -> Floats:
    """Every d_Z that ZipLine evaluates, in the order in which it does; `times` is (n, R) as for `solve`.

    Source: Figs 6 and 7, which plot them.

    >>> candidate_waits([[2, 4, 6], [5, 10, 15]])
    array([1., 1., 4., 9.])
    """
    return np.array([wait for wait, _ in _candidates(checked_times(times))])


def _candidates(times: Floats) -> Iterator[tuple[float, float]]:
    """(d_Z, max(Z)) of one candidate Z after the other."""
    z: dict[int, float] = {}
    for t, p, _ in timeline(times):
        z[p] = t
        if len(z) == len(times):
            yield t - min(z.values()), t

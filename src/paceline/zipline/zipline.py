"""ZipLine: a single pass over all end times in ascending order.

All end times are merged into one timeline, which is scanned once. For each worker, Z contains the latest end
time that has been scanned: each new end time replaces the previous end time of the same worker. Z becomes a candidate
when it contains an end time of every worker, and each further end time produces another candidate.

ZipLine is exact (Theorem 2 of the paper). Of all sets whose latest end time is t, the narrowest set contains the
latest end time of each worker at or before t. ZipLine evaluates this set for every t for which the set exists. The
scan takes O(Rn^2) time, because each step searches Z for its minimum.

Source: Zhao et al., ElasticBSP (2021), section 5.2. Deviation from Algorithm 2: once Z is complete, each end time
produces a candidate, as in the text of that section and in Fig. 7. Algorithm 2 as printed also evaluates incomplete
sets Z. If the evaluation is moved out of the inner loop, the algorithm becomes exact but evaluates fewer candidates.
Of several equally narrow candidates, the earliest is chosen (Corollary 1). Each worker stops at its latest end time
at or before the barrier (the last column if several end times are equal).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .end_times import FEW, EndTimes, Floats, Indices, Solution, checked_matrix, solution_at


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
    return np.array([wait for wait, _ in _candidates(checked_matrix(times).times)])


def _candidates(times: Floats) -> Iterator[tuple[float, float]]:
    """Yield (d_Z, max(Z)) of each candidate Z."""
    z: dict[int, float] = {}
    for t, p, _ in timeline(times):
        z[p] = t
        if len(z) == len(times):
            yield t - min(z.values()), t


# -- ZipLineOpt and ZipLineOptBS: variants of ZipLine that keep Z sorted -------------------------------------
#
# Z is a list in the order of the timeline, so its first element is min(Z) and its last element is max(Z).
# When a new end time replaces the previous one of the same worker, there are two cases:
#
# 1. The previous end time was the first element of Z. Then min(Z) may have increased, so the new Z is evaluated.
# 2. Otherwise, min(Z) is unchanged and max(Z) does not decrease. The new Z is not narrower (Theorem 3), so it
#    is skipped.
#
# ZipLineOpt finds the previous end time by scanning Z in O(n) time. ZipLineOptBS reads the previous end time
# from the matrix, and finds its place in Z by binary search in O(log n) time.
#
# Source: Zhao et al., ElasticBSP (2021), sections 5.3.1 and 5.3.2. Deviation: Z is sorted by (end time,
# worker, column). These three numbers identify the previous end time, even if several end times are equal.

Element = tuple[float, int, int]  # end time, worker, column


def zipline_opt(times: Floats) -> Solution:
    """Run ZipLineOpt on an (n, R) matrix."""
    return _scan(times, lambda z, workers, p, i: workers.index(p))


def zipline_opt_bs(times: Floats) -> Solution:
    """Run ZipLineOptBS on an (n, R) matrix."""
    rows = times.tolist()
    return _scan(times, lambda z, workers, p, i: bisect_left(z, (rows[p][i], p, i)))


def _scan(times: Floats, position: Callable[[list[Element], list[int], int, int], int]) -> Solution:
    """Run the scan. `position(z, workers, p, i)` must return the index in z of the end time of worker p in column i."""
    z: list[Element] = []
    workers: list[int] = []  # the worker of each element of z: searching ints with `list.index` is fast
    wait = barrier = inf
    candidates = 0
    for t, p, i in timeline(times):
        replaced = 0
        if i > 0:
            replaced = position(z, workers, p, i - 1)
            del z[replaced], workers[replaced]
        z.append((t, p, i))
        workers.append(p)
        # A worker's first end time replaces no other end time. Z is complete when it has an end time of every worker.
        if replaced == 0 and len(z) == len(times):
            candidates += 1
            d = t - z[0][0]
            if d < wait:
                wait, barrier = d, t
    return solution_at(times, barrier, candidates)


# -- The fast exact search (method "auto"), which never forms a set Z and leaves most of the end times unsorted
#
# Theory. A window is an interval that contains an end time of every worker. The shortest window that starts
# at time s ends at
#
#     end(s) = the maximum, over all workers, of the worker's first end time at or after s,
#
# and the result is the smallest end(s) - s over all end times s. To compute end(s), go through all end times in
# ascending order. When an end time is passed, the next end time of the same worker takes its place, so
#
#     end(s) = max(the first end times of all workers, the successors of all end times before s),
#
# where the successor of an end time is the next end time of the same worker. So end(s) is a running maximum.
# The expensive part is sorting, which takes O(Rn log(Rn)) time. Two bounds make most of the sorting
# unnecessary.
#
# *Only slow workers matter* (`narrowest_window`). Let gap_p be the longest interval between successive end
# times of worker p. The first end time of p at or after s is at most gap_p after s, unless it is p's very
# first end time. So the search may leave out workers whose gap is less than the result, as long as it takes
# two things into account for all workers: their first end times, and the earliest of their last end times,
# after which no window can start. The result for a subset of the workers is never larger than the result for
# all workers, since a window for all workers is also a window for the subset. So a first search covers the
# slowest third of the workers, and a second search covers all workers whose gap is at least the result of the
# first search. (A much smaller subset would give a poor bound: workers of almost equal speed stay in phase, so
# their end times are close together most of the time.)
#
# *Only some times matter* (`_sort_promising`). Divide the timeline into equal buckets. The running maximum
# over all buckets before the bucket of s is a lower bound on end(s), and equals end(s) for the earliest s in
# the bucket. So for each bucket, one window that starts in it is known exactly, and no window that starts in
# it is narrower than the distance from the bucket's latest s to that lower bound. A bucket is sorted only if
# a window that is narrower than the narrowest known one may start in it. (If an outlier stretches the
# timeline so that all other end times fall into one bucket, everything is sorted, as it would be without
# buckets.)
#
# Both bounds also hold for floating-point numbers: rounding never reverses the order of two differences, and
# if it makes several differences equal, the earliest window is chosen.
#
# Source: the search solves Problem 1 of Zhao et al., ElasticBSP (2021), and returns the same result as
# ZipLine (Theorem 2). The search itself is not from the paper, whose methods maintain a complete set Z at every step.

# Mean number of end times per bucket. Smaller buckets slow down the running maximum, and larger buckets slow down
# the final sort.
PER_BUCKET = 6


class Window(NamedTuple):
    """The narrowest window that contains an end time of every worker; the earliest one if there are several.

    Attributes:
        wait: width of the window.
        barrier: end of the window.
        candidates: number of start times whose windows were measured in the last search.
    """

    wait: float
    barrier: float
    candidates: int


def narrowest_window(times: EndTimes) -> Window:
    """Return the narrowest window that contains an end time of every worker."""
    first = times.first
    n, size = len(first), len(first) * times.lookahead
    first_barrier = first.max()
    if size <= FEW:
        return _sort_all(times.rows(slice(None)), first_barrier)
    # If even the window of all first end times is narrower than a bucket, no bucket can be excluded.
    first_width = first_barrier - first.min()
    if first_width * size < (times.last.min() - first.min()) * PER_BUCKET:
        return _sort_all(times.rows(slice(None)), first_barrier)
    gaps = times.gaps()
    # Only workers with a gap below the width of the narrowest window can be left out. This window is at most as wide as
    # the window of all first end times. So if few gaps are below this largest width, one search covers all workers.
    if np.count_nonzero(gaps >= first_width) > n // 2:
        return _sort_promising(times, np.arange(n), first_barrier)
    part = max(1, n // 3)
    slowest = gaps.argpartition(n - part)[n - part :]
    window = _sort_promising(times, slowest, first_barrier)
    deciding = np.flatnonzero(gaps >= window.wait)
    if len(deciding) <= part:
        return window
    return _sort_promising(times, deciding, first_barrier)


def _sort_all(rows: Floats, first_barrier: np.float64) -> Window:
    """Return the narrowest window of the workers with the given rows, by sorting all of their end times."""
    start = rows.ravel()
    following = np.empty_like(start)
    following[:-1] = start[1:]
    following[rows.shape[1] - 1 :: rows.shape[1]] = np.inf
    order = start.argsort()
    return _narrowest(start[order], following[order], first_barrier)


def _sort_promising(times: EndTimes, workers: Indices, first_barrier: np.float64) -> Window:
    """Return the narrowest window of the given workers, by sorting only the end times in promising buckets.

    The worker whose last end time is the earliest is always added to the given workers.
    """
    ends_first = times.last.argmin()
    last_start = times.last[ends_first]
    rows = times.rows(np.append(workers, ends_first))
    start = rows.ravel()
    # No window starts after `last_start`, so all later end times go into the last bucket.
    offset = np.minimum(start, last_start)
    origin = offset.min()
    buckets_per_time = (start.size // PER_BUCKET) / max(last_start - origin, 1e-290)
    offset -= origin
    offset *= buckets_per_time
    bucket = offset.astype(np.intp)
    count = int((last_start - origin) * buckets_per_time) + 1
    earliest, latest, successor = np.full(count, np.inf), np.full(count, -np.inf), np.full(count, -np.inf)
    np.minimum.at(earliest, bucket, start)
    np.maximum.at(latest, bucket, start)
    latest[-1] = last_start
    # The element after a worker's last end time belongs to another worker. The result is still correct: each worker's
    # last end time is in the last bucket, whose successors are not used.
    np.maximum.at(successor, bucket[:-1], start[1:])
    least_end = np.empty(count)
    least_end[0] = first_barrier
    least_end[1:] = successor[:-1]
    np.maximum.accumulate(least_end, out=least_end)
    known = least_end - earliest
    known[earliest == np.inf] = np.inf
    best = known.argmin()
    bound = least_end - latest
    # Of equally narrow windows, the earliest is chosen. So a later bucket is promising only if it may contain a
    # narrower window; for an earlier bucket, an equally narrow window suffices.
    promising = bound < known[best]
    promising[: best + 1] = bound[: best + 1] <= known[best]
    # Exclude end times after `last_start`: the last bucket may contain many of them.
    found = np.flatnonzero(promising[bucket] & (start <= last_start))
    if 2 * len(found) > start.size:
        return _sort_all(rows, first_barrier)
    order = found[start[found].argsort()]
    following = start.take(order + 1, mode="clip")
    following[order % times.lookahead == times.lookahead - 1] = np.inf
    return _narrowest(start[order], following, least_end[bucket[order]])


def _narrowest(start: Floats, following: Floats, least_end: np.float64 | Floats) -> Window:
    """Return the narrowest of the windows that begin at the `start` times, which are ascending.

    Args:
        start: start times of the windows.
        following: for each start time, the next end time of the same worker; inf if there is none.
        least_end: lower bound on the end of each window, or one bound for all windows. It accounts for the end times
            that are not in `start`.
    """
    end = np.empty_like(start)
    end[1:] = following[:-1]
    if isinstance(least_end, np.ndarray):
        end[0] = -np.inf
        np.maximum(end, least_end, out=end)
    else:
        end[0] = least_end
    np.maximum.accumulate(end, out=end)
    # If there are several minima, argmin returns the first one, which has the earliest barrier: `end` is ascending.
    best = (end - start).argmin()
    return Window(float(end[best] - start[best]), float(end[best]), start.size)

"""The fast exact search, method "auto": it never forms a set Z, and it does not sort most of the end times.

Theory. A window that starts at time s contains an end time of every worker as soon as it reaches

    end(s) = the maximum, over all workers, of the worker's first end time at or after s,

and the result is the least end(s) - s over all end times s. Go through the end times in ascending order. When an end
time is passed, the next end time of the same worker takes its place, so

    end(s) = max(the first end times of all workers, the successors of all end times before s),

where the successor of an end time is the next one of the same worker. This is a running maximum. The expensive part
is sorting, which takes O(Rn log(Rn)) time. Two bounds avoid most of it.

*Only slow workers matter* (`narrowest_window`). Let gap_p be the longest interval of worker p. The first end time of
p at or after s is at most gap_p after s, unless it is p's very first end time. So workers whose gap is less than the
result may be left out, as long as two things are taken into account for all workers: their first end times, and the
earliest of their last end times, after which no window can start. Also, the result for a subset of the workers is
never larger than the result for all workers, since a window that contains all workers contains the subset. So the
slowest third of the workers is searched first. Then all workers whose gap is at least the result of this search are
searched. (A much smaller subset would give a poor bound: workers of almost equal speed stay in phase, so they are
close together most of the time.)

*Only some times matter* (`_sort_promising`). Divide the timeline into equal buckets. The running maximum over all
buckets before the bucket of s is a lower bound of end(s), and it equals end(s) for the earliest s of the bucket. So
one window of each bucket is known exactly, and no window of the bucket is narrower than the distance from the
bucket's latest s to that lower bound. Only buckets that could contain a window narrower than the narrowest known one
are sorted. (If an outlier stretches the timeline so that all other end times fall into one bucket, everything is
sorted, as it would be without buckets.)

Both bounds also hold for floating-point numbers: rounding never reverses the order of two differences, and if it
makes several differences equal, the earliest window is chosen.

Source: the problem is Problem 1 of Zhao et al., ElasticBSP (2021), and the result is that of ZipLine (Theorem 2). The
search is not from the paper, whose methods maintain a complete set Z at every step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .end_times import EndTimes, Floats, Indices

__all__ = ["Window", "narrowest_window"]

# Number of end times up to which sorting all end times is fastest.
FEW = 4096
# End times per bucket. With fewer, the running maximum takes longer; with more, the final sort takes longer.
PER_BUCKET = 6


class Window(NamedTuple):
    """The narrowest window that contains an end time of every worker; the earliest one if there are several.

    Attributes:
        wait: width of the window.
        barrier: end of the window.
        candidates: number of start times for which the window was measured in the last pass.
    """

    wait: float
    barrier: float
    candidates: int


def narrowest_window(times: EndTimes) -> Window:
    """Return the narrowest window of all workers."""
    first = times.first
    n, size = len(first), len(first) * times.lookahead
    every_first = first.max()
    if size <= FEW:
        return _sort_all(times.rows(slice(None)), every_first)
    # The first end times form a window, so the narrowest window is at most this wide. If this window is narrower than
    # a bucket, the buckets cannot exclude anything.
    first_width = every_first - first.min()
    if first_width * size < (times.last.min() - first.min()) * PER_BUCKET:
        return _sort_all(times.rows(slice(None)), every_first)
    gaps = times.gaps()
    # If this width excludes few workers, the narrowest window excludes even fewer, so search all workers at once.
    if np.count_nonzero(gaps >= first_width) > n // 2:
        return _sort_promising(times, np.arange(n), every_first)
    part = max(1, n // 3)
    slowest = gaps.argpartition(n - part)[n - part :]
    window = _sort_promising(times, slowest, every_first)
    deciding = np.flatnonzero(gaps >= window.wait)
    if len(deciding) <= part:
        return window
    return _sort_promising(times, deciding, every_first)


def _sort_all(rows: Floats, every_first: np.float64) -> Window:
    """Return the narrowest window of the workers whose rows are given, by sorting all of their end times."""
    start = rows.ravel()
    following = np.empty_like(start)
    following[:-1] = start[1:]
    following[rows.shape[1] - 1 :: rows.shape[1]] = np.inf
    order = start.argsort()
    return _narrowest(start[order], following[order], every_first)


def _sort_promising(times: EndTimes, workers: Indices, every_first: np.float64) -> Window:
    """Return the narrowest window of the given workers and the worker whose last end time is the earliest.

    Only the end times in promising buckets are sorted.
    """
    first_to_run_out = times.last.argmin()
    last_start = times.last[first_to_run_out]
    rows = times.rows(np.append(workers, first_to_run_out))
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
    # The element after the last end time of a row belongs to another worker. The result is still correct: a last end
    # time is always in the last bucket, whose successors are not used.
    np.maximum.at(successor, bucket[:-1], start[1:])
    reached = np.empty(count)
    reached[0] = every_first
    reached[1:] = successor[:-1]
    np.maximum.accumulate(reached, out=reached)
    known = reached - earliest
    known[earliest == np.inf] = np.inf
    best = known.argmin()
    bound = reached - latest
    # A later bucket must contain a narrower window; an earlier one may contain an equally narrow one.
    promising = bound < known[best]
    promising[: best + 1] = bound[: best + 1] <= known[best]
    # Exclude end times after `last_start`: the last bucket may contain most of all end times.
    found = np.flatnonzero(promising[bucket] & (start <= last_start))
    if 2 * len(found) > start.size:
        return _sort_all(rows, every_first)
    order = found[start[found].argsort()]
    following = start.take(order + 1, mode="clip")
    following[order % times.lookahead == times.lookahead - 1] = np.inf
    return _narrowest(start[order], following, reached[bucket[order]])


def _narrowest(start: Floats, following: Floats, reached: np.float64 | Floats) -> Window:
    """Return the narrowest of the windows that begin at the `start` times, which are ascending.

    Args:
        start: start times of the windows.
        following: the next end time of the worker that each start time belongs to; inf if there is none.
        reached: lower bound on the end of each window, or one for all windows. It accounts for the end times that are
            not in `start`.
    """
    end = np.empty_like(start)
    end[1:] = following[:-1]
    if isinstance(reached, np.ndarray):
        end[0] = -np.inf
        np.maximum(end, reached, out=end)
    else:
        end[0] = reached
    np.maximum.accumulate(end, out=end)
    # argmin returns the first of several minima. It has the earliest barrier, because `end` is ascending.
    best = (end - start).argmin()
    return Window(float(end[best] - start[best]), float(end[best]), start.size)

"""The fast exact search, `auto`: no set is ever formed, and most end times are never sorted.

Theory. Let a window start at time s. It holds every worker as soon as it reaches

    end(s) = the latest, over the workers, of their first end time at or after s,

and the answer is the least end(s) - s over all end times s. Go through them in ascending order: each one that is
passed hands over to its worker's next one, so

    end(s) = max(every worker's first end time, the next end time of each one before s),

a running maximum. Sorting is what costs, O(Rn log(Rn)); two bounds spare most of it.

*Only slow workers decide* (`narrowest_window`). Worker p's first end time at or after s is at most gap_p away, its
longest interval, unless it is p's first of all. So workers whose gap is less than the answer may be left out, as long
as everybody's first end time is heeded, and the earliest of everybody's last, after which no window starts. And a few
workers' answer is never more than everybody's, since a window that holds everybody holds them. So the slowest
third is asked first, and then, once, all whose gap is not less than its answer. (A much smaller part would say
little: workers of almost equal speed stay in phase, so they are close together most of the time.)

*Only some moments matter* (`_sort_promising`). Cut the timeline into equal buckets. The running maximum over the
buckets before one's own is a lower bound of end(s), and equal to end(s) at the earliest s of the bucket. So one
window of each bucket is known exactly, and none of it is narrower than from its latest s to that lower bound. Only
buckets that could beat the narrowest known window are sorted. (If an outlier stretches the timeline so that all
else falls into one bucket, all is sorted, as it would be without buckets.)

All of it holds in floating point, too: rounding never swaps two differences, and of those that it makes equal the
earliest is taken.

Source: the problem is Problem 1 of Zhao et al., ElasticBSP (2021), the answer that of its ZipLine (Theorem 2). The
search is not from the paper, which has a whole set Z in hand at every step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .end_times import EndTimes, Floats, Indices

__all__ = ["Window", "narrowest_window"]

# So few end times are best sorted all at once.
FEW = 4096
# End times per bucket: with fewer, the running maximum takes longer; with more, the sort of what is left.
PER_BUCKET = 6


class Window(NamedTuple):
    """The narrowest window that holds an end time of every worker, the earliest of several.

    `candidates` counts the starts from which the window was measured, in the last pass.
    """

    wait: float
    barrier: float
    candidates: int


def narrowest_window(times: EndTimes) -> Window:
    """The narrowest window of all workers."""
    first = times.first
    n, size = len(first), len(first) * times.lookahead
    every_first = first.max()
    if size <= FEW:
        return _sort_all(times.rows(slice(None)), every_first)
    # The first end times are a window, too, so the answer is no wider. If it is less than a bucket wide, no bucket
    # can be told from another; if it leaves out few workers, the answer will leave out fewer.
    first_width = every_first - first.min()
    if first_width * size < (times.last.min() - first.min()) * PER_BUCKET:
        return _sort_all(times.rows(slice(None)), every_first)
    gaps = times.gaps()
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
    """The narrowest window of the workers whose rows are given, all of whose end times are sorted."""
    start = rows.ravel()
    following = np.empty_like(start)
    following[:-1] = start[1:]
    following[rows.shape[1] - 1 :: rows.shape[1]] = np.inf
    order = start.argsort()
    return _narrowest(start[order], following[order], every_first)


def _sort_promising(times: EndTimes, workers: Indices, every_first: np.float64) -> Window:
    """The narrowest window of some workers and the one who is the first to have no end time left."""
    first_to_run_out = times.last.argmin()
    last_start = times.last[first_to_run_out]
    rows = times.rows(np.append(workers, first_to_run_out))
    start = rows.ravel()
    # No window starts after `last_start`. What is later shares its bucket, the last one.
    place = np.minimum(start, last_start)
    origin = place.min()
    buckets_per_time = (start.size // PER_BUCKET) / max(last_start - origin, 1e-290)
    place -= origin
    place *= buckets_per_time
    bucket = place.astype(np.intp)
    count = int((last_start - origin) * buckets_per_time) + 1
    earliest, latest, handed_over = np.full(count, np.inf), np.full(count, -np.inf), np.full(count, -np.inf)
    np.minimum.at(earliest, bucket, start)
    np.maximum.at(latest, bucket, start)
    latest[-1] = last_start
    # What comes after a row's last end time is another worker's, but it goes to the last bucket, which hands over
    # to none.
    np.maximum.at(handed_over, bucket[:-1], start[1:])
    reached = np.empty(count)
    reached[0] = every_first
    reached[1:] = handed_over[:-1]
    np.maximum.accumulate(reached, out=reached)
    known = reached - earliest
    known[earliest == np.inf] = np.inf
    best = known.argmin()
    bound = reached - latest
    # A later bucket must do better, an earlier one no worse.
    promising = bound < known[best]
    promising[: best + 1] = bound[: best + 1] <= known[best]
    # Of the last bucket only what is not later than `last_start`: it may hold most of all end times.
    found = np.flatnonzero(promising[bucket] & (start <= last_start))
    if 2 * len(found) > start.size:
        return _sort_all(rows, every_first)
    order = found[start[found].argsort()]
    following = start.take(order + 1, mode="clip")
    following[order % times.lookahead == times.lookahead - 1] = np.inf
    return _narrowest(start[order], following, reached[bucket[order]])


def _narrowest(start: Floats, following: Floats, reached: np.float64 | Floats) -> Window:
    """The narrowest of the windows from each `start`, which ascend.

    `following` is the same worker's next end time, inf if there is none; `reached` is how far those before the given
    starts take a window, at least.
    """
    end = np.empty_like(start)
    end[1:] = following[:-1]
    if isinstance(reached, np.ndarray):
        end[0] = -np.inf
        np.maximum(end, reached, out=end)
    else:
        end[0] = reached
    np.maximum.accumulate(end, out=end)
    # argmin takes the first of equal ones, and `end` ascends: the earliest barrier.
    best = (end - start).argmin()
    return Window(float(end[best] - start[best]), float(end[best]), start.size)

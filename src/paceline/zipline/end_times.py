"""The input of the solvers, R predicted end times for each of n workers, and the result, one end time per worker.

This module validates the input and defines its two forms: an explicit array (`Matrix`), and arithmetic progressions
that are computed only where they are needed (`Progressions`). It does not depend on the search algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ConfigurationError

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

INFINITY_BITS = np.float64(np.inf).view(np.uint64)
BLOCK = 2**15  # number of floats in a block of 256 KiB, which fits into the cache
FEW = 4096  # for at most this many end times, sorting all of them is fastest, and the search does not use `gaps`


class EndTimes(Protocol):
    """The interface through which the search uses either form of input."""

    @property
    def first(self) -> Floats:
        """The first end time of each worker, shape (n,)."""

    @property
    def last(self) -> Floats:
        """The last end time of each worker, shape (n,)."""

    @property
    def lookahead(self) -> int:
        """R, the number of end times per worker."""

    def rows(self, workers: Indices | slice) -> Floats:
        """Return the end times of the k given workers, shape (k, R)."""

    def gaps(self) -> Floats:
        """Return, for each worker, an upper bound on the intervals between its successive end times, shape (n,)."""

    def picks(self, barrier: float) -> Indices:
        """Return, for each worker, the index of its last end time at or before `barrier`, shape (n,).

        `barrier` must be at or after the first end time of every worker.
        """


class Matrix:
    """End times given explicitly: `times` is an (n, R) array."""

    def __init__(self, times: Floats) -> None:
        self.times = times
        self.lookahead = times.shape[1]
        self.first = times[:, 0]
        self.last = times[:, -1]

    def rows(self, workers: Indices | slice) -> Floats:
        return self.times[workers]

    def gaps(self) -> Floats:
        # In an ascending row, an interval has the sign bit set only if 0.0 is followed by -0.0. The gap of such a rare
        # row is reported as infinite. The search then includes the row, so its result is still correct.
        gaps: Floats = np.minimum(self._gap_bits, INFINITY_BITS).view(np.float64)
        return gaps

    def surely_valid(self) -> bool:
        """Return True if all rows are certainly ascending and finite. The result may be False for valid rows."""
        # If all gaps are finite, all times are finite.
        return self.lookahead > 1 and bool(self._gap_bits.max() < INFINITY_BITS)

    @cached_property
    def _gap_bits(self) -> NDArray[np.uint64]:
        """For each worker, the bits of its largest interval; above INFINITY_BITS if an interval is < 0, -0.0 or NaN.

        Read as unsigned integers, the bits of the floats from 0.0 to infinity have the same order as the floats, and
        the bits of all other floats are larger. So a single maximum yields the largest gap and also shows whether
        the row is ascending.
        """
        flat, size = self.times.ravel(), self.lookahead
        largest = np.empty(len(self.times), dtype=np.uint64)
        # Process as many rows at a time as fit into the cache.
        count = min(len(largest), max(1, BLOCK // size))
        begins = np.arange(0, count * size, size)
        steps = np.empty(count * size)
        with np.errstate(over="ignore", invalid="ignore"):
            for p in range(0, len(largest), count):
                block = flat[p * size : (p + count) * size]
                step = steps[: block.size]
                np.subtract(block[1:], block[:-1], out=step[:-1])
                step[size - 1 :: size] = 0.0
                found = largest[p : p + count]
                np.maximum.reduceat(step.view(np.uint64), begins[: len(found)], out=found)
        # Reading a column of a large matrix is slow, so store contiguous copies of the columns that are read often.
        self.first, self.last = self.first.copy(), self.last.copy()
        return largest

    def picks(self, barrier: float) -> Indices:
        if self.times.size <= BLOCK:
            return _latest(self.times, barrier)
        # Guess the columns by assuming that each worker has a constant pace. Increase the guess slightly, so that an
        # end time equal to the barrier is not missed because of rounding. Rows with a wrong guess are then searched.
        end = self.lookahead - 1
        with np.errstate(all="ignore"):
            guess = (barrier - self.first) / (self.last - self.first) * (end * (1.0 + 2.0**-40))
            picks: Indices = guess.astype(np.intp).clip(0, end)
        flat, place = self.times.ravel(), picks + np.arange(0, self.times.size, self.lookahead)
        wrong = flat.take(place) > barrier
        wrong |= (flat.take(place + 1, mode="clip") <= barrier) & (picks < end)
        if wrong.any():
            picks[wrong] = _latest(self.times[wrong], barrier)
        return picks


def _latest(times: Floats, barrier: float) -> Indices:
    """Return, for each row, the index of the last end time that is at or before `barrier`."""
    # Find the first end time after the barrier, and return the column before it. If there is no such end time, argmax
    # returns 0, and 0 - 1 modulo the number of columns is the last column.
    latest: Indices = ((times > barrier).argmax(axis=1) - 1) % times.shape[1]
    return latest


class Progressions:
    """End times base + j * interval for j = 1..R, computed on demand. `base` and `interval` have shape (n,)."""

    def __init__(self, base: Floats, interval: Floats, lookahead: int) -> None:
        self.base = base
        self.interval = interval
        self.lookahead = lookahead
        self.first = base + interval
        self.last = base + float(lookahead) * interval

    def rows(self, workers: Indices | slice) -> Floats:
        rows: Floats = self.interval[workers, None] * np.arange(1.0, self.lookahead + 1.0)
        rows += self.base[workers, None]
        return rows

    def gaps(self) -> Floats:
        # Each end time is rounded twice before it is subtracted from the next one. The total rounding error is less
        # than 12 * 2**-53 times the largest end time.
        largest = max(-self.first.min(), self.last.max())
        gaps: Floats = self.interval + 2.0**-48 * largest
        return gaps

    def picks(self, barrier: float) -> Indices:
        with np.errstate(over="ignore"):
            steps = np.floor((barrier - self.base) / self.interval)
        steps = steps.clip(1.0, self.lookahead)
        # Because end times are rounded, the quotient may be wrong by one. It can be wrong by more only if an interval
        # is so small that adding it does not change `base`.
        while (late := self.base + steps * self.interval > barrier).any():
            steps -= late
        while (
            early := (steps < self.lookahead) & (self.base + (steps + 1.0) * self.interval <= barrier)
        ).any():
            steps += early
        return steps.astype(np.intp) - 1


def checked_matrix(times: ArrayLike) -> Matrix:
    """Return `times` as a `Matrix`, which stores intermediate results of the check.

    Raises:
        ConfigurationError: `times` is not a valid (n, R) array.
    """
    try:
        array = np.asarray(times, dtype=np.float64, order="C")
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            "times must be an array of numbers with one row per worker and rows of equal length"
        ) from error
    if array.ndim != 2 or array.size == 0:
        raise ConfigurationError(
            f"times must have the shape (workers, end times) with at least one of each; its shape is {array.shape}"
        )
    matrix = Matrix(array)
    if array.size <= FEW or not matrix.surely_valid():
        _refuse_invalid(array)
    return matrix


def _refuse_invalid(times: Floats) -> None:
    """Raise ConfigurationError if a time is not finite or a row is not ascending. The error names the worker."""
    flat, lookahead = times.ravel(), times.shape[1]
    finite = np.isfinite(flat)
    # If any element is False, argmin returns the index of the first one. For small arrays, argmin is faster than all().
    index = finite.argmin()
    if not finite[index]:
        p, i = divmod(int(index), lookahead)
        raise ConfigurationError(
            f"every time must be finite; the time of worker {p} in column {i} is {times[p, i]}"
        )
    # Reuse the array `finite`, whose last element remains True.
    ascending = finite
    np.greater_equal(flat[1:], flat[:-1], out=ascending[:-1])
    ascending[lookahead - 1 :: lookahead] = True
    index = ascending.argmin()
    if not ascending[index]:
        p, first, second = index // lookahead, flat[index], flat[index + 1]
        raise ConfigurationError(
            f"each row of times must be ascending; in the row of worker {p}, {first} precedes {second}"
        )


def checked_progressions(last: ArrayLike, interval: ArrayLike, lookahead: int) -> Progressions:
    """Return the arguments as `Progressions`. Raise ConfigurationError if an argument is not valid."""
    try:
        base, step = np.asarray(last, dtype=np.float64), np.asarray(interval, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigurationError("last and interval must be arrays of numbers, one per worker") from error
    if base.ndim != 1 or base.shape != step.shape or base.size == 0:
        raise ConfigurationError(
            "last and interval must be 1-D arrays with one number per worker, and at least one worker; "
            f"their shapes are {base.shape} and {step.shape}"
        )
    if not isinstance(lookahead, (int, np.integer)) or lookahead < 1:
        raise ConfigurationError(f"lookahead must be an integer >= 1; it is {lookahead!r}")
    if not step.min() > 0:  # unlike `<= 0`, this is also true for NaN
        p = (step > 0).argmin()
        raise ConfigurationError(
            f"each interval must be greater than 0; the interval of worker {p} is {step[p]}"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        times = Progressions(base, step, int(lookahead))
    finite = np.isfinite(times.last)
    if not finite.all():
        p = finite.argmin()
        raise ConfigurationError(
            f"last + lookahead * interval must be finite for every worker; for worker {p} it is {times.last[p]}"
        )
    return times


# -- Exact results for workers whose times are given as integers, such as ticks ------------------------------
#
# Floats represent all integers below 2^53, and the search (see `zipline`) only adds, subtracts and compares end
# times. It is therefore exact for small integers. To make the integers small, the earliest time is subtracted
# from all times, and if necessary, the times are divided by their greatest common divisor. If some times are
# still too large, a slower search computes the result with Python's own integers.

EXACT = 2**53


class WholeTimes(NamedTuple):
    """The last pushes and the intervals of workers with a constant pace, in whole units.

    Attributes:
        base: time of each worker's last push, in units after the origin.
        interval: interval of each worker, in units.
        origin: time of the earliest last push.
        unit: a common divisor of all intervals and of all differences between last pushes.
    """

    base: list[int]
    interval: list[int]
    origin: int
    unit: int = 1

    def fit(self, lookahead: int) -> bool:
        """Return True if floats represent all end times exactly."""
        return max(self.base) + int(lookahead) * max(self.interval) < EXACT

    def reduced(self) -> WholeTimes:
        """Return the same times in the largest unit of which they are multiples."""
        unit = gcd(*self.base, *self.interval)
        base, interval = [time // unit for time in self.base], [time // unit for time in self.interval]
        return WholeTimes(base, interval, self.origin, unit)

    def restored(self, solution: Solution) -> Solution:
        """Return a solution for these times in the original unit, with integers for the wait and the barrier."""
        wait, barrier = int(solution.wait) * self.unit, self.origin + int(solution.barrier) * self.unit
        return Solution(wait, barrier, solution.picks, solution.candidates)

    def search(self, lookahead: int) -> Solution:
        """Return the canonical solution for these times, without floats."""
        pace = list(zip(self.base, self.interval, strict=True))
        ends = sorted(
            (base + j * interval, worker)
            for worker, (base, interval) in enumerate(pace)
            for j in range(1, lookahead + 1)
        )
        # For each end time in order, find the shortest window that ends there and has an end time of each worker.
        inside = [0] * len(pace)  # number of end times of each worker in the window
        missing = len(pace)  # number of workers without an end time in the window
        begin = 0
        best: tuple[int, int] | None = None
        for end, worker in ends:
            missing -= not inside[worker]
            inside[worker] += 1
            while inside[ends[begin][1]] > 1:
                inside[ends[begin][1]] -= 1
                begin += 1
            if not missing and (best is None or end - ends[begin][0] < best[0]):
                best = end - ends[begin][0], end
        assert best is not None
        wait, barrier = best
        picks = [min((barrier - base) // interval, lookahead) - 1 for base, interval in pace]
        return Solution(wait, barrier, np.array(picks, dtype=np.intp), len(ends))


def whole_times(last: ArrayLike, interval: ArrayLike) -> WholeTimes | None:
    """Return the arguments of `solve_periodic` as `WholeTimes`; None if they are empty or not integers."""
    base, step = _whole(last), _whole(interval)
    if not (base and step):
        return None
    origin = min(base)
    return WholeTimes([time - origin for time in base], step, origin)


def _whole(times: ArrayLike) -> list[int]:
    """Return times as Python's integers, or [] if they are not a one-dimensional sequence of integers."""
    if isinstance(times, (list, tuple)) and set(map(type, times)) == {int}:
        return list(times)
    array = np.asarray(times)
    whole: list[int] = array.tolist() if array.dtype.kind in "iu" and array.ndim == 1 else []
    return whole


# -- The result of every method: one end time per worker -----------------------------------------------------
#
# The canonical choice: once the barrier is known, each worker stops at its latest end time at or before the
# barrier. If the worker stopped earlier, the set Z would not become narrower, and the worker would wait
# although it could have run another iteration.


@dataclass(frozen=True, eq=False)
class Solution:
    """The result of a solver: a set Z that contains one end time of each worker.

    Attributes:
        wait: d_Z = max(Z) - min(Z), the time that the first worker to arrive waits for the last, in the unit of the
            input.
        barrier: max(Z), the time of the barrier, in the unit of the input.
        picks: integer array of shape (n,) with the column of each worker: worker p stops at `times[p, picks[p]]`.
        candidates: number of sets Z, barriers or windows that the method evaluated.
    """

    wait: float
    barrier: float
    picks: Indices
    candidates: int


def solution_at(times: Floats, barrier: float, candidates: int) -> Solution:
    """Return the canonical solution for a barrier that is not before any worker's first end time.

    `times` is an (n, R) array.
    """
    picks = Matrix(times).picks(barrier)
    earliest = times[np.arange(len(times)), picks].min()
    return Solution(float(barrier - earliest), float(barrier), picks, candidates)

"""The input: n workers, R predicted end times each, every worker's ascending.

Owns what an input must be, and the two forms it comes in: given one by one (`Matrix`), or as arithmetic
progressions that need not be built (`Progressions`). Knows nothing of how a window is searched for.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ConfigurationError

__all__ = [
    "EndTimes",
    "Floats",
    "Indices",
    "Matrix",
    "Progressions",
    "checked_matrix",
    "checked_progressions",
    "checked_times",
]

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

INFINITY_BITS = np.float64(np.inf).view(np.uint64)
BLOCK = 2**15  # floats; this quarter of a MiB stays in the cache
SMALL = 4096  # end times; of so few, the search does not ask for the gaps


class EndTimes(Protocol):
    """What the search asks of its input."""

    @property
    def first(self) -> Floats:
        """Each worker's first end time, (n,)."""

    @property
    def last(self) -> Floats:
        """Each worker's last end time, (n,)."""

    @property
    def lookahead(self) -> int:
        """R."""

    def rows(self, workers: Indices | slice) -> Floats:
        """The end times of these k workers, (k, R)."""

    def gaps(self) -> Floats:
        """For each worker, at least the largest difference of two successive end times, (n,)."""

    def picks(self, barrier: float) -> Indices:
        """Each worker's latest column not after `barrier`, (n,). `barrier` is not before any worker's first."""


class Matrix:
    """End times given one by one: `times` is (n, R)."""

    def __init__(self, times: Floats) -> None:
        self.times = times
        self.lookahead = times.shape[1]
        self.first = times[:, 0]
        self.last = times[:, -1]

    def rows(self, workers: Indices | slice) -> Floats:
        return self.times[workers]

    def gaps(self) -> Floats:
        # A row that ascends and yet has a step down goes from 0.0 to -0.0. So rare a row may be asked for always.
        gaps: Floats = np.minimum(self._steps, INFINITY_BITS).view(np.float64)
        return gaps

    def surely_valid(self) -> bool:
        """Whether all rows ascend and are finite; False for some that are valid, too. Spares `gaps` its work."""
        # A finite step is between finite times.
        return self.lookahead > 1 and bool(self._steps.max() < INFINITY_BITS)

    @cached_property
    def _steps(self) -> NDArray[np.uint64]:
        """For each worker the largest difference of two successive end times, as its bits; more than
        INFINITY_BITS if one of them is below zero, -0.0, or NaN.

        The bits of floats, read as whole numbers, are in the order of the floats from 0.0 to infinity, and those of
        all others are larger. So one maximum says both how long the gaps are and whether every step is one up.
        """
        flat, size = self.times.ravel(), self.lookahead
        largest = np.empty(len(self.times), dtype=np.uint64)
        # As many rows at a time as stay in the cache.
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
        # Columns of a large matrix are slow to read again and again.
        self.first, self.last = self.first.copy(), self.last.copy()
        return largest

    def picks(self, barrier: float) -> Indices:
        if self.times.size <= BLOCK:
            return _latest(self.times, barrier)
        # A guess, as if every worker kept its pace; a hair late, lest rounding miss an end time at the barrier.
        # Whatever it is, where it is wrong the row is searched.
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
    """Each row's latest column not after `barrier`."""
    # The column before the first later one. If none is later, argmax says 0, and before that comes the last.
    latest: Indices = ((times > barrier).argmax(axis=1) - 1) % times.shape[1]
    return latest


class Progressions:
    """End times base + j * interval, j = 1..R, that are built only on demand; both arrays are (n,)."""

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
        # Each end time was rounded twice before it is subtracted from its neighbour; all rounding together stays
        # under twelve units of 2**-53 of the largest end time.
        largest = max(-self.first.min(), self.last.max())
        gaps: Floats = self.interval + 2.0**-48 * largest
        return gaps

    def picks(self, barrier: float) -> Indices:
        with np.errstate(over="ignore"):
            steps = np.floor((barrier - self.base) / self.interval)
        steps = steps.clip(1.0, self.lookahead)
        # End times are rounded, so the quotient may be off, by one now and then, and by more only where intervals
        # are lost beside `base`.
        while (late := self.base + steps * self.interval > barrier).any():
            steps -= late
        while (
            early := (steps < self.lookahead) & (self.base + (steps + 1.0) * self.interval <= barrier)
        ).any():
            steps += early
        return steps.astype(np.intp) - 1


def checked_times(times: ArrayLike) -> Floats:
    """`times` as an (n, R) array of floats. Raises ConfigurationError if it is not what a method can work on."""
    return checked_matrix(times).times


def checked_matrix(times: ArrayLike) -> Matrix:
    """`checked_times` with all that the check has found out."""
    try:
        array = np.asarray(times, dtype=np.float64, order="C")
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            "times must be numbers, one row per worker, and every row equally long"
        ) from error
    if array.ndim != 2 or array.size == 0:
        raise ConfigurationError(
            f"times must be (workers, end times), at least one of each; its shape is {array.shape}"
        )
    matrix = Matrix(array)
    if array.size <= SMALL or not matrix.surely_valid():
        _refuse_invalid(array)
    return matrix


def _refuse_invalid(matrix: Floats) -> None:
    """Raises ConfigurationError, which says where it is, if a time is not finite or a row does not ascend."""
    flat, lookahead = matrix.ravel(), matrix.shape[1]
    finite = np.isfinite(flat)
    place = finite.argmin()  # of the first False, if there is one; twice as fast as all() where there are few
    if not finite[place]:
        p, i = divmod(int(place), lookahead)
        raise ConfigurationError(
            f"every time must be finite; that of worker {p}, column {i} is {matrix[p, i]}"
        )
    ascending = finite  # memory that is there: the last one stays True
    np.greater_equal(flat[1:], flat[:-1], out=ascending[:-1])
    ascending[lookahead - 1 :: lookahead] = True
    place = ascending.argmin()
    if not ascending[place]:
        p = int(place) // lookahead
        raise ConfigurationError(f"each row of times must be ascending; that of worker {p} is not")


def checked_progressions(last: ArrayLike, interval: ArrayLike, lookahead: int) -> Progressions:
    """The progressions, or ConfigurationError if they are not what a method can work on."""
    try:
        base, step = np.asarray(last, dtype=np.float64), np.asarray(interval, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigurationError("last and interval must be numbers, one per worker") from error
    if base.ndim != 1 or base.shape != step.shape or base.size == 0:
        raise ConfigurationError(
            "last and interval must hold one number per worker, at least one; "
            f"their shapes are {base.shape} and {step.shape}"
        )
    if not isinstance(lookahead, (int, np.integer)) or lookahead < 1:
        raise ConfigurationError(f"lookahead must be a whole number, at least 1; it is {lookahead!r}")
    # `not` rather than `<=`: it catches NaN, too.
    if not step.min() > 0:
        p = (step > 0).argmin()
        raise ConfigurationError(f"each interval must be above 0; that of worker {p} is {step[p]}")
    with np.errstate(over="ignore", invalid="ignore"):
        times = Progressions(base, step, int(lookahead))
    finite = np.isfinite(times.last)
    if not finite.all():
        p = finite.argmin()
        raise ConfigurationError(
            f"every last + lookahead * interval must be finite; that of worker {p} is not"
        )
    return times

"""The input: n workers, R predicted end times each, every worker's ascending.

Owns what an input must be, and the two forms it comes in: given one by one (`Matrix`), or as arithmetic
progressions that need not be built (`Progressions`). Knows nothing of how a window is searched for.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ConfigurationError

__all__ = ["EndTimes", "Floats", "Indices", "Matrix", "Progressions", "checked_progressions", "checked_times"]

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

SHORT_ROW = 32  # shorter ones NumPy reduces faster as one flat array


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
        self.first = times[:, 0]
        self.last = times[:, -1]
        self.lookahead = times.shape[1]

    def rows(self, workers: Indices | slice) -> Floats:
        return self.times[workers]

    def gaps(self) -> Floats:
        flat = self.times.ravel()
        steps = np.empty_like(flat)
        np.subtract(flat[1:], flat[:-1], out=steps[:-1])
        steps[self.lookahead - 1 :: self.lookahead] = 0.0
        gaps: Floats
        if self.lookahead < SHORT_ROW:
            gaps = np.maximum.reduceat(steps, np.arange(0, flat.size, self.lookahead))
        else:
            gaps = steps.reshape(self.times.shape).max(axis=1)
        return gaps

    def picks(self, barrier: float) -> Indices:
        # The column before the first later one. If none is later, argmax says 0, and before that comes the last.
        picks: Indices = ((self.times > barrier).argmax(axis=1) - 1) % self.lookahead
        return picks


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
    try:
        matrix = np.asarray(times, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            "times must be numbers, one row per worker, and every row equally long"
        ) from error
    if matrix.ndim != 2 or matrix.size == 0:
        raise ConfigurationError(
            f"times must be (workers, end times), at least one of each; its shape is {matrix.shape}"
        )
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
    return matrix


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

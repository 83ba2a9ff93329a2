"""Finds a worker whose losses or gradients differ from those of all others, as with corrupted data.

The latest pushes of each worker are compared: even the smallest of this worker with what is usual for the others. So
one hard batch proves nothing, and neither do unequal data or stale weights, which change losses by less.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from statistics import median

from .messages import Observation

__all__ = ["Outliers"]

LATEST = 5
"""Number of pushes of a worker that must all differ: four workers make them within 20 updates."""

LARGER_LOSS, LARGER_GRADIENT = 4.0, 10.0
"""Factors by which the values of a worker must exceed those of all others."""

LEAST_LOSS = 0.25
"""A loss below this share of its beginning is not large, whatever those of others are."""


class Outliers:
    """The latest losses and norms of gradients of each worker."""

    def __init__(self) -> None:
        self._begun = 0.0  # largest of the first losses of all workers
        self._losses: dict[int, deque[float]] = {}
        self._gradients: dict[int, deque[float]] = {}

    def take(self, worker: int, seen: Observation) -> None:
        """Record a push with a finite gradient."""
        if seen.gradient is not None:
            self._gradients.setdefault(worker, deque(maxlen=LATEST)).append(seen.gradient)
        if seen.loss is not None and not math.isnan(seen.loss):
            if worker not in self._losses and math.isfinite(seen.loss):
                self._begun = max(self._begun, seen.loss)
            self._losses.setdefault(worker, deque(maxlen=LATEST)).append(seen.loss)

    def forget(self, worker: int) -> None:
        """Forget a worker that has left."""
        self._losses.pop(worker, None)
        self._gradients.pop(worker, None)

    def difference(self, worker: int, present: Collection[int]) -> str:
        """Return how the pushes of a worker differ from those of all others, as a clause; "" if they do not."""
        loss = _smallest(self._losses, worker, LARGER_LOSS, present)
        if loss is not None and loss[0] >= LEAST_LOSS * self._begun:
            return f"its losses are at least {loss[0]:.3g}, and usually at most {loss[1]:.3g} at the others"
        gradient = _smallest(self._gradients, worker, LARGER_GRADIENT, present)
        if gradient is not None:
            return (
                f"the norms of its gradients are at least {gradient[0]:.3g}, and usually at most {gradient[1]:.3g} "
                "at the others"
            )
        return ""


def _smallest(
    latest: dict[int, deque[float]], worker: int, factor: float, present: Collection[int]
) -> tuple[float, float] | None:
    """Return the smallest value of a worker and the largest usual one of another, if they differ by the factor.

    The latest value of another worker counts, too: data may become harder for all, but for one a little earlier.
    """
    own = latest.get(worker, ())
    others = [
        max(median(values), values[-1])
        for other, values in latest.items()
        if other != worker and other in present and len(values) == LATEST
    ]
    if len(own) < LATEST or 2 * len(others) < len(present) - 1 or not others:
        return None
    smallest, usual = min(own), max(others)
    return (smallest, usual) if smallest > 0 and smallest >= factor * usual else None

"""Finds a worker whose losses or gradients differ from those of all others, as with corrupted data.

The latest pushes of each worker are compared: even the smallest of this worker with what is usual for the others. So
one hard batch proves nothing, and neither do unequal data or stale weights, which change losses by less.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from ...state import stateful
from ..protocol.messages import Observation

__all__ = ["Outliers"]

LATEST = 5
"""Number of pushes of a worker that must all differ: four workers make them within 20 updates."""

LARGER_LOSS, LARGER_GRADIENT = 4.0, 10.0
"""Factors by which the values of a worker must exceed those of all others."""

LEAST_LOSS = 0.25
"""A loss below this share of its beginning is not large, whatever those of others are."""


@stateful(decides="_begun _losses _gradients")
class Outliers:
    """The latest losses and norms of gradients of each worker."""

    def __init__(self) -> None:
        self._begun = 0.0  # largest of the first losses of all workers
        self._losses: dict[int, Latest] = {}
        self._gradients: dict[int, Latest] = {}

    def take(self, worker: int, seen: Observation) -> None:
        """Record a push with a finite gradient."""
        if seen.gradient is not None:
            self._gradients.setdefault(worker, Latest()).take(seen.gradient)
        if seen.loss is not None and not math.isnan(seen.loss):
            if worker not in self._losses and math.isfinite(seen.loss):
                self._begun = max(self._begun, seen.loss)
            self._losses.setdefault(worker, Latest()).take(seen.loss)

    def forget(self, worker: int) -> None:
        """Forget a worker that has left."""
        self._losses.pop(worker, None)
        self._gradients.pop(worker, None)

    def difference(self, worker: int) -> str:
        """Return how the pushes of a worker differ from those of all others, as a clause; "" if they do not."""
        loss = _apart(self._losses, worker, LARGER_LOSS)
        if loss is not None and loss[0] >= LEAST_LOSS * self._begun:
            return f"its losses are at least {loss[0]:.3g}, and usually at most {loss[1]:.3g} at the others"
        gradient = _apart(self._gradients, worker, LARGER_GRADIENT)
        if gradient is not None:
            return (
                f"the norms of its gradients are at least {gradient[0]:.3g}, and usually at most {gradient[1]:.3g} "
                "at the others"
            )
        return ""


@stateful(decides="usual _values")
class Latest:
    """The latest values of one worker.

    Attributes:
        usual: the median or, if that is larger, the last value: data may become harder for all workers, but for some
            of them a little earlier. 0 until there are enough values.
    """

    def __init__(self) -> None:
        self.usual = 0.0
        self._values: deque[float] = deque(maxlen=LATEST)

    def take(self, value: float) -> None:
        self._values.append(value)
        if len(self._values) == LATEST:
            self.usual = max(median(self._values), value)

    @property
    def smallest(self) -> float:
        """The smallest value; 0 until there are enough values."""
        return min(self._values) if len(self._values) == LATEST else 0.0


def _apart(latest: dict[int, Latest], worker: int, factor: float) -> tuple[float, float] | None:
    """Return the smallest value of a worker and the largest usual one of another, if they differ by the factor.

    Half of the others must be known.
    """
    if worker not in latest or (smallest := latest[worker].smallest) <= 0:
        return None
    largest, known = 0.0, 0
    for other, values in latest.items():
        if other != worker and values.usual:
            largest, known = max(largest, values.usual), known + 1
            if smallest < factor * largest:
                return None
    return (smallest, largest) if known and 2 * known >= len(latest) - 1 else None

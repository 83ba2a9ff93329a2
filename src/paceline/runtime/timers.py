"""A queue of timers, ordered by the time at which they are due."""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

from ..sync.ticks import TICKS_PER_S

__all__ = ["Timers"]

T = TypeVar("T")


class Timers(Generic[T]):
    """A queue of objects, each due at a time on the run's clock, in ticks."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, T]] = []
        self._number = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def set(self, due_ticks: int, item: T) -> None:
        """Add an object that is due at `due_ticks`. Objects that are due at the same time keep their order."""
        heapq.heappush(self._heap, (due_ticks, next(self._number), item))

    def left_s(self, now_ticks: int) -> float | None:
        """Return the time until the next object is due, in seconds; None if the queue is empty."""
        return max(0, self._heap[0][0] - now_ticks) / TICKS_PER_S if self._heap else None

    def take_due(self, now_ticks: int) -> list[T]:
        """Remove and return the objects that are due."""
        due = []
        while self._heap and self._heap[0][0] <= now_ticks:
            due.append(heapq.heappop(self._heap)[2])
        return due

"""Timers of a host: what is due when, in order."""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

__all__ = ["Timers"]

T = TypeVar("T")


class Timers(Generic[T]):
    """Things that are due at a time on the host's clock. Of those due at one moment, the first set comes first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._number = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def set(self, due_s: float, what: T) -> None:
        """Have `what` come out at `due_s`."""
        heapq.heappush(self._heap, (due_s, next(self._number), what))

    def left_s(self, now_s: float) -> float | None:
        """How long until the next one is due; None if none is set."""
        return max(0.0, self._heap[0][0] - now_s) if self._heap else None

    def take_due(self, now_s: float) -> list[T]:
        """Take out what is due."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            due.append(heapq.heappop(self._heap)[2])
        return due

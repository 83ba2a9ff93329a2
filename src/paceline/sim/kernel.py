"""The kernel of virtual time: a heap of (time, priority, sequence number, what happens)."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

__all__ = ["MESSAGE", "TIMER", "Kernel"]

MESSAGE, TIMER = 0, 1
"""Priorities: of two things at one moment, a timer is the later."""


class Kernel:
    """A clock that jumps from one thing that happens to the next. Ties are in the order in which they were set.

    Attributes:
        now_s: the virtual time.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def at(self, due_s: float, happen: Callable[[], None], priority: int = MESSAGE) -> None:
        """Have something happen at a time that is not over yet."""
        heapq.heappush(self._heap, (max(due_s, self.now_s), priority, next(self._number), happen))

    def after(self, delay_s: float, happen: Callable[[], None], priority: int = MESSAGE) -> None:
        """Have something happen so much later."""
        self.at(self.now_s + delay_s, happen, priority)

    def run(self, until_s: float = math.inf) -> None:
        """Let happen what is due, until nothing is left or the time is up."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, _, happen = heapq.heappop(self._heap)
            happen()

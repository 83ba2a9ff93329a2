"""The kernel of virtual time: a heap of (time, priority, sequence number, what happens).

Time is a whole number of nanoseconds, so that sums of times are exact and two ways to the same moment meet.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

__all__ = ["MESSAGE", "TIMER", "Kernel", "nanoseconds"]

MESSAGE, TIMER = 0, 1
"""Priorities: of two things at one moment, a timer is the later."""

SECOND_NS = 1_000_000_000


def nanoseconds(seconds: float) -> int:
    """The nearest whole number of them.

    >>> nanoseconds(0.1)
    100000000
    """
    return round(seconds * SECOND_NS)


class Kernel:
    """A clock that jumps from one thing that happens to the next. Ties are in the order in which they were set.

    Attributes:
        now_ns: the virtual time.
        happened: how many things have.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.happened = 0
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = 0
        self._until_ns: float = math.inf

    @property
    def now_s(self) -> float:
        """The virtual time in seconds."""
        return self.now_ns / SECOND_NS

    @property
    def idle(self) -> bool:
        """Is nothing to happen any more."""
        return not self._heap

    def at(
        self, due_ns: int, happen: Callable[..., None], *arguments: object, priority: int = MESSAGE
    ) -> None:
        """Have something happen at a time that is not over yet."""
        self._number = number = self._number + 1
        heapq.heappush(self._heap, (max(due_ns, self.now_ns), priority, number, happen, arguments))

    def after(self, delay_ns: int, happen: Callable[..., None], *arguments: object) -> None:
        """Have something happen so much later."""
        self._number = number = self._number + 1
        heapq.heappush(self._heap, (self.now_ns + delay_ns, MESSAGE, number, happen, arguments))

    def stop(self) -> None:
        """Let nothing more happen."""
        self._until_ns = -1

    def run(self, until_s: float = math.inf) -> None:
        """Let happen what is due, until nothing is left or the time is up."""
        heap, pop = self._heap, heapq.heappop
        self._until_ns = nanoseconds(until_s) if math.isfinite(until_s) else math.inf
        happened = 0
        try:
            while heap and heap[0][0] <= self._until_ns:
                self.now_ns, _, _, happen, arguments = pop(heap)
                happened += 1
                happen(*arguments)
        finally:
            self.happened += happened

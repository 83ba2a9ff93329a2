"""The kernel of virtual time: a heap of (time, priority, sequence number, what happens).

Time is a whole number of nanoseconds, so that sums of times are exact and two ways to the same moment meet.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from ..errors import ConfigurationError, RunFailedError

__all__ = ["MESSAGE", "TIMER", "Kernel", "nanoseconds"]

MESSAGE, TIMER = 0, 1
"""Priorities: of two things at one moment, a timer is the later."""

SECOND_NS = 1_000_000_000


LONGEST_S = 1e15
"""No time is longer: thirty million years."""

STILL = 100_000
"""So many things at one moment, for each worker and shard, are taken for no end of them."""


def nanoseconds(seconds: float) -> int:
    """The nearest whole number of them.

    >>> nanoseconds(0.1)
    100000000

    Raises:
        ConfigurationError: no simulation lasts so long.
    """
    if not seconds <= LONGEST_S:
        raise ConfigurationError(f"a time of {seconds:g} s is too long, expected at most {LONGEST_S:g} s.")
    return round(seconds * SECOND_NS)


class Kernel:
    """A clock that jumps from one thing that happens to the next. Ties are in the order in which they were set.

    Args:
        most_at_once: more than so many things at one moment are an error: time would never go on.

    Attributes:
        now_ns: the virtual time.
        happened: how many things have.
        stopped: was it by `stop` that nothing more happens.
    """

    def __init__(self, most_at_once: int = STILL) -> None:
        self.now_ns = 0
        self._most_at_once = most_at_once
        self.happened = 0
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = 0
        self._until_ns: float = math.inf
        self.stopped = False

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
        self.stopped = True

    def run(self, until_s: float = math.inf) -> None:
        """Let happen what is due, until nothing is left or the time is up."""
        heap, pop = self._heap, heapq.heappop
        moment_ns, begun = -1, 0  # a moment, and how many things had happened before it
        self._until_ns = nanoseconds(until_s) if math.isfinite(until_s) else math.inf
        happened = 0
        try:
            while heap and heap[0][0] <= self._until_ns:
                self.now_ns, _, _, happen, arguments = pop(heap)
                happened += 1
                if self.now_ns != moment_ns:
                    moment_ns, begun = self.now_ns, happened
                elif happened - begun > self._most_at_once:
                    raise RunFailedError(
                        "the simulation",
                        f"virtual time does not go on from {self.now_s:g} s: one thing follows another and none "
                        "takes any time. Give every worker a compute time above 0.",
                    )
                happen(*arguments)
        finally:
            self.happened += happened

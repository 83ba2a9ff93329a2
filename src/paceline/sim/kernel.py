"""The kernel of the simulation: a heap of events (time, priority, sequence number, function, arguments).

Times are whole numbers of ticks (see `paceline.sync.events`), so sums of times are exact, and events that should
coincide do coincide.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from ..errors import ConfigurationError, RunFailedError
from ..sync.ticks import TICKS_PER_S, Seconds, in_ticks

MESSAGE, TIMER = 0, 1
"""Priorities of events. If a message and a timer are due at the same time, the message is handled first."""

LONGEST_S = 1e15
"""The longest permitted time in seconds, about 30 million years."""

MOST_AT_ONCE = 100_000
"""Default maximum number of events at the same virtual time. With more events, the simulation is considered stuck."""


class Kernel:
    """A virtual clock that advances from one scheduled event to the next.

    Events with the same time and priority are handled in the order in which they were scheduled.

    Args:
        ticks_per_s: number of ticks per second.
        most_at_once: maximum number of events at the same virtual time. With more events, virtual time is assumed not
            to advance, and `run` raises an error.

    Attributes:
        ticks_per_s: number of ticks per second.
        now_ticks: the virtual time in ticks.
        happened: number of events that have been handled.
        stopped: True if the simulation was stopped by `stop`.
    """

    def __init__(self, ticks_per_s: int = TICKS_PER_S, most_at_once: int = MOST_AT_ONCE) -> None:
        self.ticks_per_s = ticks_per_s
        self.now_ticks = 0
        self._most_at_once = most_at_once
        self.happened = 0
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = 0
        self._in_background = 0  # number of pending calls in the background
        self._until_ticks: float = math.inf
        self.stopped = False

    @property
    def now_s(self) -> float:
        """The virtual time in seconds."""
        return self.now_ticks / self.ticks_per_s

    def in_ticks(self, seconds: Seconds) -> int:
        """Convert a time from seconds to ticks. A float is rounded to a whole number of nanoseconds.

        Raises:
            ConfigurationError: the time is longer than `LONGEST_S`.
        """
        if not seconds <= LONGEST_S:
            raise ConfigurationError(
                f"a time of {float(seconds):g} s is too long, expected at most {LONGEST_S:g} s."
            )
        return in_ticks(seconds, self.ticks_per_s)

    @property
    def idle(self) -> bool:
        """True if no events are pending."""
        return not self._heap

    @property
    def at_rest(self) -> bool:
        """True if no events are pending, except for calls in the background."""
        return len(self._heap) == self._in_background

    def at(
        self, due_ticks: int, function: Callable[..., None], *arguments: object, priority: int = MESSAGE
    ) -> None:
        """Schedule a function call at a virtual time. A time in the past is replaced by the current time."""
        self._number = number = self._number + 1
        heapq.heappush(self._heap, (max(due_ticks, self.now_ticks), priority, number, function, arguments))

    def after(self, delay_ticks: int, function: Callable[..., None], *arguments: object) -> None:
        """Schedule a function call after a delay."""
        self._number = number = self._number + 1
        heapq.heappush(self._heap, (self.now_ticks + delay_ticks, MESSAGE, number, function, arguments))

    def in_background(self, due_ticks: int, function: Callable[..., None], *arguments: object) -> None:
        """Schedule a function call that is no activity of the simulated job. See `run`."""
        self._in_background += 1
        self.at(due_ticks, self._from_background, function, *arguments)

    def _from_background(self, function: Callable[..., None], *arguments: object) -> None:
        self._in_background -= 1
        function(*arguments)

    def pending(self, priority: int) -> list[object]:
        """Return the first argument of each pending call with this priority."""
        return [arguments[0] for _, each, _, _, arguments in self._heap if each == priority]

    def stop(self) -> None:
        """Stop the simulation: no further events are handled."""
        self._until_ticks = -1
        self.stopped = True

    def run(self, until_s: Seconds = math.inf, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Handle events until none are pending, the virtual time `until_s` is reached, or `stop` is called.

        Args:
            until_s: virtual time at which to stop.
            goes_on: called whenever the simulation is at rest (see `at_rest`). The function may schedule events. If it
                returns False, no further events are handled.

        Raises:
            RunFailedError: virtual time does not advance.
        """
        heap, pop = self._heap, heapq.heappop
        # The current event's time, and the number of events up to and including the first event at this time.
        moment, begun = -1, 0
        self._until_ticks = self.in_ticks(until_s) if math.isfinite(until_s) else math.inf
        happened = 0
        try:
            while (len(heap) > self._in_background or goes_on()) and heap and heap[0][0] <= self._until_ticks:
                self.now_ticks, _, _, function, arguments = pop(heap)
                happened += 1
                if self.now_ticks != moment:
                    moment, begun = self.now_ticks, happened
                elif happened - begun > self._most_at_once:
                    raise RunFailedError(
                        "the simulation",
                        f"virtual time does not advance beyond {self.now_s:g} s, because no event takes any time. "
                        "Give every worker a compute time above 0.",
                    )
                function(*arguments)
        finally:
            self.happened += happened

"""A limit on the rate at which a checkpoint is written, so that training finds the disk and the processor free."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable

__all__ = ["REST", "Pace", "yield_to_training"]

REST = 3.0
"""Time between two pieces of a checkpoint on a link, divided by the time that a piece takes.

So a checkpoint uses at most a quarter of the time of a slow link, and training has the rest.
"""

NICENESS = 10
"""How far the priority of a thread that writes a checkpoint is lowered. 19 is the lowest priority."""


class Pace:
    """Sleeps after each piece of work, so that the average rate stays below a limit.

    Several threads may share an object. Time in which nothing was written is not made up for.

    Args:
        bytes_per_s: the limit.
        clock_s: function that returns the time in seconds.
        sleep_s: function that sleeps for a number of seconds.

    Example:
        >>> now_s, slept_s = 100.0, []
        >>> pace = Pace(1000, lambda: now_s, slept_s.append)
        >>> pace.spend(500)
        >>> pace.spend(250)  # too early, because this clock stands still
        >>> slept_s
        [0.5, 0.75]
    """

    def __init__(
        self,
        bytes_per_s: float = math.inf,
        clock_s: Callable[[], float] = time.monotonic,
        sleep_s: Callable[[float], object] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock_s = clock_s
        self._sleep_s = sleep_s
        self._lock = threading.Lock()
        self._free_s = -math.inf  # when the work so far would have ended at the limit

    def spend(self, size_bytes: int) -> None:
        """Sleep for as long as this number of bytes takes at the limit."""
        with self._lock:
            now_s = self._clock_s()
            self._free_s = max(self._free_s, now_s) + size_bytes / self._bytes_per_s
            wait_s = self._free_s - now_s
        if wait_s > 0:
            self._sleep_s(wait_s)


def yield_to_training() -> None:
    """Lower the priority of the calling thread, where a thread has one of its own, so that training goes first."""
    if sys.platform.startswith("linux"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)

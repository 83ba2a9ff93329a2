"""The only rule by which this package gives up waiting for a transfer: nothing has moved for too long.

A transfer takes as long as its size and the link require. So no limit applies to its duration, and none to the time
between two messages, which may be large. Progress is counted in bytes: as long as bytes move in either direction, the
other side is alive and the link works.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["LOOK_INTERVAL_S", "SILENCE_S", "Patience"]

SILENCE_S = 30.0
"""Time in seconds for which a transfer may stand still.

After a link was down, TCP sends lost data again at growing intervals. With this limit, a transfer survives a link
that was down for 15 s.
"""

LOOK_INTERVAL_S = 0.5
"""Interval in seconds at which the bytes of a transfer are counted."""


class Patience:
    """Measures for how long no byte of a transfer has moved. Call `look` at least every `LOOK_INTERVAL_S`.

    Time in which nobody looked counts as silence only up to two intervals: this process was probably suspended, and
    could not have noticed anything.

    Args:
        moved_bytes: function that returns the number of bytes that have moved so far, in both directions.
        limit_s: number of seconds for which nothing may move. Default: `SILENCE_S`.

    Attributes:
        quiet_s: number of seconds for which nothing had moved when `look` was last called.

    """

    def __init__(self, moved_bytes: Callable[[], int], limit_s: float | None = None) -> None:
        self.quiet_s = 0.0
        self._limit_s = SILENCE_S if limit_s is None else limit_s
        self._moved_bytes = moved_bytes
        self._moved, self._looked_s = moved_bytes(), time.monotonic()

    def look(self) -> bool:
        """Count the bytes. Return True if some have moved since the previous call."""
        before, before_s = self._moved, self._looked_s
        self._moved, self._looked_s = self._moved_bytes(), time.monotonic()
        if self._moved != before:
            self.quiet_s = 0.0
            return True
        self.quiet_s += min(self._looked_s - before_s, 2 * LOOK_INTERVAL_S)
        return False

    @property
    def over(self) -> bool:
        """True if nothing has moved for too long."""
        return self.quiet_s >= self._limit_s

    @property
    def wait_s(self) -> float:
        """Number of seconds after which `look` must be called again."""
        return max(0.0, min(LOOK_INTERVAL_S, self._limit_s - self.quiet_s))

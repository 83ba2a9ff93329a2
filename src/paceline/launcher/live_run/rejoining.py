"""When workers that were taken out of a run join it again.

A worker is taken out if it was stopped, or if its machine was silent, while the others continued. When it runs again,
what it computes is no longer used, so its process ends, and its machine's agent asks the coordinator to let it join
again. The agent does so after a pause, which doubles each time, and only a limited number of times. A worker whose
script has failed, or that was killed, does not join again.
"""

from __future__ import annotations

__all__ = ["FIRST_PAUSE_S", "LONGEST_PAUSE_S", "MOST_REJOINS", "Rejoins"]

MOST_REJOINS = 10
"""Default of the number of times that workers of one machine join again."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class Rejoins:
    """Counts how often workers of one machine have tried to join again.

    Args:
        most: maximum number of times.

    Example:
        >>> rejoins = Rejoins(most=3)
        >>> [rejoins.pause_s() for _ in range(4)]
        [1.0, 2.0, 4.0, None]
    """

    def __init__(self, most: int = MOST_REJOINS) -> None:
        self._most = most
        self._count = 0
        self._next_s = FIRST_PAUSE_S

    def pause_s(self) -> float | None:
        """Return the time in seconds after which a worker may try to join again; None if it may not."""
        if self._count == self._most:
            return None
        self._count += 1
        self._next_s, pause_s = min(2 * self._next_s, LONGEST_PAUSE_S), self._next_s
        return pause_s

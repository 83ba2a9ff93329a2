"""The clocks of patience: for how long each subject of a run has kept it waiting.

A run is patient with many subjects: a process that starts, a worker that has sent nothing, a server that has been
asked, a shortage of workers. Three mistakes are easy to make with the time of each, and all of them have led to
healthy workers being accused or killed:

    the clock begins with the run, although its subject arrives later, or has left and arrives again
    the clock goes on while its subject cannot act, because it waits for others or the run is paused
    the clock goes on while nobody looks, because this process itself is suspended

`Clocks` makes none of them. A subject has no clock before somebody says that it has arrived (`begin`), and a subject
without a clock has not been waited for. Time passes only from one `look` to the next, and not while the run has
paused.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Clocks"]

K = TypeVar("K", bound=Hashable)

RESOLUTION_S = 1e-4  # times that differ by less are equal; they may have been converted in different ways


class Clocks(Generic[K]):
    """One clock for each subject that is waited for. Times are in seconds, on any clock that does not run backwards.

    One thread calls `look`. Other threads may call all other methods.

    Args:
        now_s: the current time.
        gap_s: the most that the time between two calls of `look` counts. Whoever looks less often was suspended.

    Example:
        >>> clocks: Clocks[str] = Clocks(0.0, gap_s=1.0)
        >>> clocks.look(0.5)
        >>> clocks.begin("worker 0", 0.5)
        >>> clocks.look(1.0)
        >>> clocks.look(61.0)                # this process was suspended for a minute
        >>> clocks.look(90.0, counts=False)  # the run was paused
        >>> clocks.waited_s("worker 0", 90.0), clocks.waited_s("worker 1", 90.0)
        (1.5, None)
    """

    def __init__(self, now_s: float, *, gap_s: float) -> None:
        self._gap_s = gap_s
        self._passed_s = now_s, 0.0  # the time of the last look, and how much time had counted until then
        self._begun_s: dict[K, float] = {}  # subject -> the time that had counted when its clock began

    def look(self, now_s: float, *, counts: bool = True) -> None:
        """Let time pass until now.

        Args:
            now_s: the current time.
            counts: False if nobody could act since the last call, because the run has paused.
        """
        self._passed_s = now_s, self.counted_s(now_s) if counts else self._passed_s[1]

    def counted_s(self, at_s: float) -> float:
        """Return the time that has counted until a time which may lie before the last look or after it."""
        looked_s, counted_s = self._passed_s
        return counted_s + min(at_s - looked_s, self._gap_s)

    def begin(self, subject: K, now_s: float) -> None:
        """Begin the clock of a subject: it has arrived, shows a sign of life, or was kept from acting until now."""
        self._begun_s[subject] = self.counted_s(now_s)

    def renew(self, subject: K, now_s: float) -> None:
        """Begin the clock of a subject anew, unless it has none, or has begun at this time or later."""
        begun_s, new_s = self._begun_s.get(subject), self.counted_s(now_s)
        if begun_s is not None and new_s > begun_s + RESOLUTION_S:
            self._begun_s[subject] = new_s

    def hold(self, subject: K, now_s: float, *, holds: bool) -> float | None:
        """Return for how long a condition has held: its clock begins and ends with it. None if it does not hold."""
        if not holds:
            self.end(subject)
        elif subject not in self._begun_s:
            self.begin(subject, now_s)
        return self.waited_s(subject, now_s)

    def end(self, subject: K) -> None:
        """Wait for a subject no longer: it has done what it was to do, or it has left."""
        self._begun_s.pop(subject, None)

    def waited_s(self, subject: K, now_s: float) -> float | None:
        """Return for how long a subject has been waited for; None if it has not arrived, or is not waited for."""
        begun_s = self._begun_s.get(subject)
        return None if begun_s is None else max(0.0, self.counted_s(now_s) - begun_s)

    def running(self) -> dict[K, float]:
        """Return the subjects that have clocks, and what identifies the present run of each clock."""
        return self._begun_s.copy()

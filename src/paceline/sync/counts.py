"""Keeps c_p, the number of iterations that each live worker p has pushed, and the minimum and maximum of c_p.

Only legal events reach a model (see `paceline.core.protocol.order`), so this module does not check them. Joins and
pushes take amortized constant time, regardless of the number of workers, because this module stores the number of
workers for each value of c_p. If no worker is left at the minimum, the minimum moves up to the next value that a
worker has.
"""

from __future__ import annotations

from ..errors import InternalError
from ..state import stateful

__all__ = ["Counts"]


@stateful(decides="count slowest fastest furthest joins _at")
class Counts:
    """Tracks the progress of the live workers.

    Attributes:
        count: live worker -> c_p, in order of joining.
        slowest: smallest c_p of the live workers; unchanged while there are no live workers.
        fastest: largest c_p of the live workers; unchanged while there are no live workers.
        furthest: the largest c_p that any worker has ever had.
        joins: number of joins; a worker that leaves and joins again is counted twice.
    """

    def __init__(self) -> None:
        self.count: dict[int, int] = {}
        self.slowest = 0
        self.fastest = 0
        self.furthest = 0
        self.joins = 0
        self._at: dict[int, int] = {}  # value of c_p -> number of live workers with this value

    @property
    def live_count(self) -> int:
        """Number of live workers."""
        return len(self.count)

    def at(self, count: int) -> int:
        """Return the number of live workers with c_p = `count`."""
        return self._at.get(count, 0)

    def beyond(self, count: int) -> int:
        """Return the number of live workers with c_p > `count`, in time linear in the number of distinct counts."""
        return sum(workers for at, workers in self._at.items() if at > count)

    def gap(self, worker: int) -> int:
        """Return c_p - min c; 0 for a worker that is not live."""
        return self.count.get(worker, self.slowest) - self.slowest

    def joined(self, worker: int, count: int | None) -> None:
        """Add a worker with c_p = `count`, or with c_p = min c if `count` is None."""
        if count is None:
            count = self.slowest
        alone = not self.count
        self.joins += 1
        self._put(worker, count)
        self.slowest = count if alone else min(self.slowest, count)
        self.fastest = count if alone else max(self.fastest, count)

    def left(self, worker: int) -> int:
        """Remove a worker and return its c_p."""
        count = self.count.pop(worker)
        self._take(count)
        if self.count:
            self._raise_slowest()
            if count == self.fastest and count not in self._at:
                self.fastest = max(self._at)
        return count

    def pushed(self, worker: int, progress: int | None = None) -> int:
        """Count a push, and return the worker's c_p before the push.

        If `progress` is given, the push is for that round, and c_p becomes at least `progress` + 1.
        """
        before = self.count[worker]
        count = (before if progress is None else max(before, progress)) + 1
        self._put(worker, count)
        self._take(before)
        if count > self.fastest:
            self.fastest = count
        if before == self.slowest:
            self._raise_slowest()
        return before

    def validate(self) -> None:
        """Check that the derived values agree with c_p; raise `InternalError` if they do not."""
        tally: dict[int, int] = {}
        for count in self.count.values():
            tally[count] = tally.get(count, 0) + 1
        if tally != self._at:
            raise InternalError(f"the tally of c_p is {self._at}, but the values of c_p are {self.count}")
        if self.count and (self.slowest, self.fastest) != (
            min(self.count.values()),
            max(self.count.values()),
        ):
            raise InternalError(
                f"slowest is {self.slowest} and fastest is {self.fastest}, but the values of c_p are {self.count}"
            )

    def _put(self, worker: int, count: int) -> None:
        self.count[worker] = count
        if count > self.furthest:
            self.furthest = count
        self._at[count] = self._at.get(count, 0) + 1

    def _take(self, count: int) -> None:
        self._at[count] -= 1
        if not self._at[count]:
            del self._at[count]

    def _raise_slowest(self) -> None:
        """Increase `slowest` to the smallest c_p of the live workers.

        The loop usually takes at most one step, and never more steps than there are distinct counts.
        """
        for _ in self._at:
            if self.slowest in self._at:
                return
            self.slowest += 1
        self.slowest = min(self._at)

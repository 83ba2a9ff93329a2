"""c_p, the number of iterations that each live worker p has pushed, and what every sync model asks about it.

Events that reach a model are legal already (see `paceline.core.order`), so nothing is refused here. Every operation
takes constant time, whatever the number of workers: workers are counted per c_p, and the slowest count only moves up,
past counts that no worker has any longer.
"""

from __future__ import annotations

from ..errors import InternalError

__all__ = ["Counts"]


class Counts:
    """The progress of the live workers.

    Attributes:
        count: c_p of each live worker, in order of joining.
        slowest: min c over the live workers; keeps its last value while there are none.
        fastest: max c over the live workers; keeps its last value while there are none.
        furthest: the largest c that any worker has ever had.
        joins: number of times that a worker has joined; a worker that returns counts again.
    """

    def __init__(self) -> None:
        self.count: dict[int, int] = {}
        self.slowest = 0
        self.fastest = 0
        self.furthest = 0
        self.joins = 0
        self._at: dict[int, int] = {}  # c -> number of live workers with this count

    @property
    def live_count(self) -> int:
        """Number of live workers."""
        return len(self.count)

    def at(self, count: int) -> int:
        """Return the number of live workers that have pushed exactly `count` times."""
        return self._at.get(count, 0)

    def beyond(self, count: int) -> int:
        """Return the number of live workers that have pushed more than `count` times. Scans the distinct counts."""
        return sum(workers for at, workers in self._at.items() if at > count)

    def gap(self, worker: int) -> int:
        """Return c_p - min c; 0 for a worker that is not live."""
        return self.count.get(worker, self.slowest) - self.slowest

    def joined(self, worker: int, count: int | None) -> None:
        """Add a worker with c_p = `count`, or min c if it is None."""
        if count is None:
            count = self.slowest
        alone = not self.count
        self.joins += 1
        self._put(worker, count)
        self.slowest = count if alone else min(self.slowest, count)
        self.fastest = count if alone else max(self.fastest, count)

    def left(self, worker: int) -> int:
        """Remove a worker; return its c_p."""
        count = self.count.pop(worker)
        self._take(count)
        if self.count:
            self._raise_slowest()
            if count == self.fastest and count not in self._at:
                self.fastest = max(self._at)
        return count

    def pushed(self, worker: int, progress: int | None = None) -> int:
        """Count a push, which is for the round `progress` if that is given; return c_p before it."""
        before = self.count[worker]
        count = (before if progress is None else max(before, progress)) + 1
        self._put(worker, count)
        self._take(before)
        self.fastest = max(self.fastest, count)
        self._raise_slowest()
        return before

    def validate(self) -> None:
        """Cross-check the derived collections against c_p; raise `InternalError` where they differ."""
        tally: dict[int, int] = {}
        for count in self.count.values():
            tally[count] = tally.get(count, 0) + 1
        if tally != self._at:
            raise InternalError(f"the tally of c_p is {self._at}, but c_p are {self.count}")
        if self.count and (self.slowest, self.fastest) != (
            min(self.count.values()),
            max(self.count.values()),
        ):
            raise InternalError(
                f"slowest {self.slowest} and fastest {self.fastest}, but c_p are {self.count}"
            )

    def _put(self, worker: int, count: int) -> None:
        self.count[worker] = count
        self.furthest = max(self.furthest, count)
        self._at[count] = self._at.get(count, 0) + 1

    def _take(self, count: int) -> None:
        self._at[count] -= 1
        if not self._at[count]:
            del self._at[count]

    def _raise_slowest(self) -> None:
        """Move the slowest count up to the next one in use: usually by one step or none, never by more steps than
        there are distinct counts."""
        for _ in self._at:
            if self.slowest in self._at:
                return
            self.slowest += 1
        self.slowest = min(self._at)

"""Staleness and waiting while one sync model was in force, in bounded memory.

The model changes when the last live worker has passed the boundary of the change (see `core.sync.shard_sync`). An
*era* is the time in which one model is in force at shard 0. The other shards count what they do in the same era,
although they may change their models a moment earlier or later.
"""

from __future__ import annotations

import msgspec

from ..sync.events import (
    Change,
    PushReceived,
    RecordedEvent,
    WorkerFenced,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)

__all__ = ["LEAST_CLASS_S", "Boundary", "Era", "Total"]

LEAST_CLASS_S = 0.001
"""Upper end of the shortest class of lengths. That of each further class is twice as long."""

MOST_CLASSES = 40


class Total(msgspec.Struct):
    """A sum of durations.

    Attributes:
        total_s: the sum in seconds.
        count: number of durations.
    """

    total_s: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        """Add a duration."""
        self.total_s += seconds
        self.count += 1


class Era(msgspec.Struct):
    """What happened while one sync model was in force.

    Attributes:
        sync: the model in the notation of the command line.
        from_s: time at which it came into force at shard 0.
        from_updates: number of updates of shard 0 before.
        staleness: staleness in updates -> number of pushes with this staleness, counted separately at each shard.
        waits: (reason, awaited worker or -1) -> the waits of this kind. For each pull, the shard counts at which it
            waited longest.
        lengths: class of lengths -> number of waits. Class k ends at `LEAST_CLASS_S` * 2**k.
    """

    sync: str
    from_s: float
    from_updates: int
    staleness: dict[int, int] = {}
    waits: dict[tuple[str, int], Total] = {}
    lengths: dict[int, int] = {}

    def waited(self, reason: str, awaited: int, seconds: float) -> None:
        """Record that a pull has waited."""
        key = reason, awaited
        total = self.waits.get(key)
        if total is None:
            total = self.waits[key] = Total()
        total.add(seconds)
        length = min(int(seconds / LEAST_CLASS_S).bit_length(), MOST_CLASSES)
        self.lengths[length] = self.lengths.get(length, 0) + 1


class Boundary(msgspec.Struct):
    """Notices when one shard changes its sync model, from the events of the shard.

    Attributes:
        changed: number of the last change that was completed; 0 before the first one.
        sync: the model after this change; "" before the first one.
        live: the live workers.

    Example:
        >>> boundary = Boundary(live={0, 1})
        >>> change = Change(number=1, members=(0, 1), sync="asp")
        >>> boundary.note(PushReceived(now_ticks=5, worker=0, iteration=3, change=change))
        False
        >>> boundary.note(PushReceived(now_ticks=6, worker=1, iteration=3, change=change))
        True
    """

    changed: int = 0
    sync: str = ""
    live: set[int] = set()
    _passed: set[int] = set()
    _fenced: set[int] = set()
    _change: Change | None = None

    def note(self, event: RecordedEvent) -> bool:
        """Process an event other than a pull. Return True if the model has changed because of it."""
        kind = type(event)
        if isinstance(event, PushReceived):
            change = event.change
            if change is None or change.number <= self.changed:
                return False
            self._change = change
            self._passed.add(event.worker)
        elif kind is WorkerJoined:
            self.live.add(event.worker)  # type: ignore[union-attr]
            return False
        elif kind is WorkerFenced:
            self._fenced.add(event.worker)  # type: ignore[union-attr]
            return False
        elif kind is WorkerLost or kind is WorkerFinished:
            for workers in (self.live, self._passed, self._fenced):
                workers.discard(event.worker)  # type: ignore[union-attr]
        if self._change is None or self._fenced or not self.live <= self._passed:
            return False
        self.changed, self.sync = self._change.number, self._change.sync
        self._change, self._passed = None, set()
        return True

"""Stores how each worker has spent its time during a run, in buckets of time, so that memory is bounded.

A *cell* is one bucket of one worker. All buckets have the same width. If the run becomes so long that it needs
more than the maximum number of buckets, all buckets become twice as wide: pairs of neighbouring buckets are merged. So
the times remain complete, and only their positions become coarser.

A cell also names one worker that was awaited in it, found with the majority vote of Boyer and Moore: the cell keeps
one candidate, and the time for which this candidate was awaited, minus the time for other workers. A worker that was
awaited for more than half of the waiting time in a cell is always named.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..core.metrics import STATES, WorkerTime
from ..sync.events import (
    Change,
    PushReceived,
    RecordedEvent,
    WorkerFenced,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from .measures import NOBODY, WorkerPresence

if TYPE_CHECKING:
    Floats = array[float]
    Integers = array[int]
else:  # these types have no parameters at run time
    Floats = Integers = array

KINDS = ("computing", "transfer", "waiting", "wasted", "paused", "outside", "idle", "loading")
"""The kinds of time, as the table above `TimeUse` explains. The time of an absent worker is not stored.

The files in which cells are kept use the same order, so new kinds must come last.
"""

KIND_COUNT = len(KINDS)
MOST_NAMED = 2**15 - 1  # largest index of an awaited worker that a cell can name

FIRST_WIDTH_S = 0.01
MOST_BUCKETS = 4096
MOST_CELLS = 2**19


class _Row(msgspec.Struct):
    """The cells of one worker.

    Attributes:
        seconds: for each bucket, the seconds of each of the `KINDS`, side by side.
        awaited: for each bucket, the worker that was awaited longest; -1 for none.
        votes: for each bucket, the seconds for which this worker was awaited, minus the seconds for other workers.
    """

    seconds: Floats = msgspec.field(default_factory=lambda: array("f"))
    awaited: Integers = msgspec.field(default_factory=lambda: array("h"))
    votes: Floats = msgspec.field(default_factory=lambda: array("f"))

    @property
    def buckets(self) -> int:
        """Number of buckets that this row has so far."""
        return len(self.awaited)

    def reach(self, buckets: int) -> None:
        """Lengthen the row to this number of buckets."""
        if (missing := buckets - len(self.awaited)) > 0:
            self.seconds.frombytes(bytes(4 * KIND_COUNT * missing))
            self.awaited.extend([NOBODY] * missing)
            self.votes.frombytes(bytes(4 * missing))

    def add_kinds(self, missing: int) -> None:
        """Make room for the last `missing` kinds, which did not exist when the row was stored."""
        seconds = np.frombuffer(self.seconds, np.float32).reshape(-1, KIND_COUNT - missing)
        self.seconds = array("f", np.pad(seconds, ((0, 0), (0, missing))).tobytes())

    def halve(self) -> None:
        """Merge pairs of neighbouring buckets."""
        self.reach(self.buckets + self.buckets % 2)
        seconds = np.frombuffer(self.seconds, np.float32).reshape(-1, 2, KIND_COUNT).sum(1)
        awaited = np.frombuffer(self.awaited, np.int16).reshape(-1, 2)
        votes = np.frombuffer(self.votes, np.float32).reshape(-1, 2)
        same = awaited[:, 0] == awaited[:, 1]
        winner = np.where(votes[:, 0] >= votes[:, 1], awaited[:, 0], awaited[:, 1])
        merged = np.where(same, votes.sum(1), np.abs(votes[:, 0] - votes[:, 1]))
        self.seconds = array("f", seconds.tobytes())
        self.awaited = array("h", winner.astype(np.int16).tobytes())
        self.votes = array("f", merged.astype(np.float32).tobytes())


class Cells(msgspec.Struct):
    """The cells of all workers. See the description of this module.

    Attributes:
        width_s: width of a bucket in seconds. Bucket i begins at i * width_s.
        rows: worker -> its cells.
        most_buckets: number of buckets above which the buckets become wider.

    Example:
        >>> cells = Cells()
        >>> cells.add(3, KINDS.index("waiting"), 0.005, 0.035)
        >>> [round(seconds, 3) for seconds in cells.rows[3].seconds[2::len(KINDS)]]
        [0.005, 0.01, 0.01, 0.005]
    """

    width_s: float = FIRST_WIDTH_S
    rows: dict[int, _Row] = {}
    most_buckets: int = MOST_BUCKETS

    @property
    def buckets(self) -> int:
        """Number of buckets of the longest row."""
        return max((row.buckets for row in self.rows.values()), default=0)

    def row(self, worker: int) -> _Row:
        """Return the cells of a worker. If the worker is new, its cells are created."""
        found = self.rows.get(worker)
        if found is None:
            found = self.rows[worker] = _Row()
            self.most_buckets = min(MOST_BUCKETS, max(1, MOST_CELLS // len(self.rows)))
            while self.buckets > self.most_buckets:
                self._widen()
        return found

    def add(self, worker: int, kind: int, start_s: float, stop_s: float) -> None:
        """Add a span of time that a worker has spent on one of the `KINDS`."""
        if stop_s <= start_s:
            return
        row = self.row(worker)
        first, last = self._place(row, start_s, stop_s)
        seconds, width_s = row.seconds, self.width_s
        if first == last:
            seconds[first * KIND_COUNT + kind] += stop_s - start_s
            return
        seconds[first * KIND_COUNT + kind] += (first + 1) * width_s - start_s
        for bucket in range(first + 1, last):
            seconds[bucket * KIND_COUNT + kind] += width_s
        seconds[last * KIND_COUNT + kind] += stop_s - last * width_s

    def await_worker(self, worker: int, awaited: int, start_s: float, stop_s: float) -> None:
        """Record that a worker has waited for the worker `awaited` in a span of time."""
        if stop_s <= start_s or not 0 <= awaited <= MOST_NAMED:
            return
        row = self.row(worker)
        first, last = self._place(row, start_s, stop_s)
        for bucket in range(first, last + 1):
            begin_s = bucket * self.width_s
            length_s = min(stop_s, begin_s + self.width_s) - max(start_s, begin_s)
            if row.awaited[bucket] == awaited:
                row.votes[bucket] += length_s
            elif row.votes[bucket] < length_s:
                row.awaited[bucket], row.votes[bucket] = awaited, length_s - row.votes[bucket]
            else:
                row.votes[bucket] -= length_s

    def shares(self, worker: int) -> str:
        """Return base64 of one byte per bucket and kind: the share of the bucket that the kind takes, from 0 to 255."""
        row = self.rows.get(worker, _Row())
        used = np.zeros(self.buckets * KIND_COUNT, np.float32)
        used[: len(row.seconds)] = row.seconds
        scaled = np.rint(np.clip(used / self.width_s, 0.0, 1.0) * 255).astype(np.uint8)
        return base64.b64encode(scaled.tobytes()).decode()

    def awaited(self, worker: int) -> str:
        """Return base64 of one little-endian int16 per bucket: the worker that was awaited longest; -1 for none."""
        row = self.rows.get(worker, _Row())
        named = np.full(self.buckets, NOBODY, "<i2")
        named[: row.buckets] = row.awaited
        return base64.b64encode(named.tobytes()).decode()

    def _place(self, row: _Row, start_s: float, stop_s: float) -> tuple[int, int]:
        """Return the first and the last bucket of a span. Widen the buckets until the span fits."""
        while (buckets := math.ceil(stop_s / self.width_s)) > self.most_buckets:
            self._widen()
        if buckets > row.buckets:
            row.reach(buckets)
        return min(int(start_s / self.width_s), buckets - 1), buckets - 1

    def _widen(self) -> None:
        self.width_s *= 2
        for row in self.rows.values():
            row.halve()


def encoded(value: Any) -> Any:
    """Encode an array for msgspec, which does not know arrays."""
    if isinstance(value, array):
        return [value.typecode, value.tobytes()]
    raise NotImplementedError(f"objects of type {type(value)} are not part of a state")


def decoded(kind: type, value: Sequence[Any]) -> Any:
    """Decode what `encoded` has returned."""
    typecode, data = value
    if kind is not array or typecode not in ("f", "h"):
        raise NotImplementedError(f"objects of type {kind} are not part of a state")
    return array(typecode, data)


# -- Staleness and waiting while one sync model was in force, in bounded memory ------------------------------
#
# The model changes when the last live worker has passed the boundary of the change (see `core.shard`). An
# *era* is the time in which one model is in force at shard 0. Another shard may change its model a moment earlier or
# later. What happens there counts into the era of the model that this shard has at that time.

LEAST_CLASS_S = 0.001
"""Upper end of the shortest class of lengths. Each further class ends at twice the length of the one before."""

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
    """Statistics of the time in which one sync model was in force.

    Attributes:
        sync: the model in the notation of the command line.
        from_s: time at which the model came into force at shard 0.
        from_updates: number of updates of shard 0 before this time.
        staleness: staleness in updates -> number of pushes with this staleness, counted separately at each shard.
        waits: (reason, awaited worker or -1) -> the waits of this kind. Each pull counts once, with its longest wait
            at a shard.
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
    """Finds out from the events of a shard when the shard changes its sync model.

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
        """Process an event other than a pull. Return True if this event has changed the model."""
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


# -- What the workers of a run have spent their time on. The times add up to the duration of the run ---------
#
#     computing   computations that were pushed. If the run was cut off, the computation in progress counts, too
#     loading     the script asked a distributed loader for a batch
#     waiting     pulls that a shard did not answer immediately, from their arrival until they were answered, their
#                 worker was lost, or the run ended; of several shards, the longest wait counts
#     transfer    messages on their way: pushes, weights and requests for data. This is what remains of the presence of
#                 a worker when all other times are subtracted
#     wasted      computations that were aborted, the pulls after them, and what a worker had computed when it was lost
#     paused      the worker could not go on, because the run had too few workers
#     outside     the script did not train: it evaluated or saved the model, waited in a barrier or a reduction, or had
#                 pushed for the last time. `core.metrics` defines what is outside, and what is loading
#     idle        time from when a worker finished until the last worker left
#     absent      time in which the worker had not joined yet, was lost, or had left before its script ended
#
# A worker is present from the moment when shard 0 counts it among its workers until it has left. Its presence
# is the sum of the first seven times. The waits are measured by the shards, each on its own clock; the other
# times are measured by the workers (see `core.metrics`). So no two clocks are compared, and the sums are
# exact.
#
# A lost worker makes no final report. The time since its latest report counts as the activity that this report names,
# except for the time in which the worker waited.


class TimeUse(msgspec.Struct, frozen=True, kw_only=True):
    """The time that one worker has spent on each kind of activity, in seconds. See the table above.

    Attributes:
        computing_s: computations that were pushed.
        loading_s: waits for batches of a distributed loader.
        waiting_s: pulls that were not answered immediately.
        transfer_s: messages on their way.
        wasted_s: computations that were aborted or lost.
        paused_s: pauses of the run.
        outside_s: time outside of training.
        idle_s: time after the worker had finished.
        absent_s: time in which the worker did not take part in the run.
    """

    computing_s: float
    loading_s: float
    waiting_s: float
    transfer_s: float
    wasted_s: float
    paused_s: float
    outside_s: float
    idle_s: float
    absent_s: float

    @property
    def present_s(self) -> float:
        """Time for which the worker took part in the run, in seconds."""
        return (
            self.computing_s
            + self.loading_s
            + self.waiting_s
            + self.transfer_s
            + self.wasted_s
            + self.paused_s
            + self.outside_s
        )


def time_use(
    presences: Mapping[int, WorkerPresence], spent: Mapping[int, WorkerTime], ticks_per_s: int
) -> dict[int, TimeUse]:
    """Return what each worker has spent its time on.

    Args:
        presences: the times according to the traces; see `Meter.presences`.
        spent: what the workers have reported; see `core.metrics.TimeLedger`.
        ticks_per_s: number of ticks per second.

    Example:
        >>> presence = WorkerPresence(present=100, waiting=20, idle=0, absent=0)
        >>> spent = WorkerTime({"computing": 60, "wasted": 0, "paused": 0, "outside": 0}, {"computing": 25})
        >>> use = time_use({0: presence}, {0: spent}, ticks_per_s=1)[0]
        >>> use.computing_s, use.waiting_s, use.transfer_s
        (80.0, 20.0, 0.0)
    """
    found = {}
    for worker, presence in presences.items():
        times = dict.fromkeys(STATES, 0)
        left = presence.present - presence.waiting
        if worker in spent:
            times.update(spent[worker].reported)
            left -= sum(times.values())
            for state, tail in spent[worker].tails.items():
                added = max(0, min(tail, left))
                times[state] += added
                left -= added
        found[worker] = TimeUse(
            **{f"{state}_s": ticks / ticks_per_s for state, ticks in times.items()},
            waiting_s=presence.waiting / ticks_per_s,
            transfer_s=left / ticks_per_s,
            idle_s=presence.idle / ticks_per_s,
            absent_s=presence.absent / ticks_per_s,
        )
    return found


def time_shares(uses: Mapping[int, TimeUse]) -> dict[str, float]:
    """Return the shares of the workers' presence, from 0 to 1, by name."""
    present_s = sum(use.present_s for use in uses.values())
    return {
        f"{state}_share": sum(getattr(use, f"{state}_s") for use in uses.values()) / present_s
        if present_s
        else 0.0
        for state in ("computing", "transfer", *STATES[1:])
    }

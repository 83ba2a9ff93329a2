"""How each worker has spent its time over the length of a run, in buckets, in bounded memory.

A *cell* is one bucket of one worker. All buckets have the same width. If the run gets too long for the number of
cells, the buckets become twice as wide: each two neighbours are merged. So the times remain complete, and only their
position becomes coarser.

A cell also names a worker that was awaited in it: with two candidates, that with more time, minus the time of the
other one (the majority vote of Boyer and Moore). A worker that was awaited for more than half of the waiting in a
cell is always found.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    Floats = array[float]
    Integers = array[int]
else:  # these types have no parameters at run time
    Floats = Integers = array

__all__ = ["KINDS", "NOBODY", "Cells", "decoded", "encoded"]

KINDS = ("computing", "transfer", "waiting", "wasted", "paused", "outside", "idle", "loading")
"""What a worker can spend its time on, as in `trace.time_use`. Absent workers do nothing.

Their order is that of the files in which cells are kept, so further kinds come last.
"""

KIND_COUNT = len(KINDS)
NOBODY = -1
MOST_NAMED = 2**15 - 1  # largest index of an awaited worker that a cell can name

FIRST_WIDTH_S = 0.01
MOST_BUCKETS = 4096
MOST_CELLS = 2**19


class _Row(msgspec.Struct):
    """The cells of one worker.

    Attributes:
        seconds: for each bucket, the seconds of each of the `KINDS`, side by side.
        awaited: for each bucket, the worker that was awaited longest; -1 for nobody.
        votes: for each bucket, the seconds by which this worker was awaited longer than the others.
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
        """Make room for the last kinds, because the row was kept before they existed."""
        seconds = np.frombuffer(self.seconds, np.float32).reshape(-1, KIND_COUNT - missing)
        self.seconds = array("f", np.pad(seconds, ((0, 0), (0, missing))).tobytes())

    def halve(self) -> None:
        """Merge each two neighbouring buckets."""
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
        most_buckets: number of buckets at which they become wider.

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
        """Return the cells of a worker, which may be new."""
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
        """Record whom a worker has awaited in a span of time."""
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
        """Return base64 of one byte per bucket and kind: the share of the bucket, from 0 to 255."""
        row = self.rows.get(worker, _Row())
        used = np.zeros(self.buckets * KIND_COUNT, np.float32)
        used[: len(row.seconds)] = row.seconds
        scaled = np.rint(np.clip(used / self.width_s, 0.0, 1.0) * 255).astype(np.uint8)
        return base64.b64encode(scaled.tobytes()).decode()

    def awaited(self, worker: int) -> str:
        """Return base64 of one little-endian int16 per bucket: the worker that was awaited longest; -1 for nobody."""
        row = self.rows.get(worker, _Row())
        named = np.full(self.buckets, NOBODY, "<i2")
        named[: row.buckets] = row.awaited
        return base64.b64encode(named.tobytes()).decode()

    def copy(self) -> Cells:
        """Return a copy that shares nothing with this object."""
        rows = {
            worker: _Row(row.seconds[:], row.awaited[:], row.votes[:]) for worker, row in self.rows.items()
        }
        return Cells(self.width_s, rows, self.most_buckets)

    def _place(self, row: _Row, start_s: float, stop_s: float) -> tuple[int, int]:
        """Return the first and the last bucket of a span. Widen the buckets until the span has its place."""
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

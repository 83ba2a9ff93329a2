"""The digest of a run: its statistics and the activity of its workers, from all entries and records of the run.

A run with `--traces recent` deletes the oldest segments of its traces and records (see `trace.recording`). Before a
segment is deleted, a process of low priority digests this segment, and keeps the state of the digest in
`earlier/digest.msgpack`, with the place in each file from which the digest goes on. A later digest of the run
directory begins with this state. So the statistics are the same as if nothing had been deleted.

All entries and records that have been written so far are digested in the order of their times.
"""

from __future__ import annotations

import argparse
import heapq
import os
import select
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..core.requests import Entry
from ..errors import ConfigurationError
from ..files import Unfinished, read_regular
from .activity import Activity
from .clocks import MachineClock
from .measures import Meter, MeterState
from .recording import (
    EARLIER,
    KEPT_SEGMENTS,
    FileFollower,
    FilePosition,
    IterationRecord,
    TraceFile,
    earlier_segments,
    last_line,
    record_files,
    trace_files,
)

LOOK_INTERVAL = 1000  # number of entries after which `advance` calls `hurried` again


class DigestState(msgspec.Struct):
    """The content of `earlier/digest.msgpack`.

    Attributes:
        shards: the shards whose traces are digested.
        meter: the state of the meter, which numbers these shards from 0.
        activity: the state of the activity, which numbers these shards from 0, too.
        positions: name of a file -> the place up to which the file was digested.
    """

    shards: list[int]
    meter: MeterState
    activity: bytes
    positions: dict[str, FilePosition]


class Digest:
    """Digests a run directory, from the beginning or from a kept state. `advance` may be called repeatedly.

    Args:
        run_dir: the run directory.
        shards: the shards that are digested, if no state was kept. Default: all shards whose traces still have their
            beginning.
        workers: the workers whose records are digested. Default: all workers that have records.
        left: the workers that left before their scripts had ended.
        only_statistics: True to digest no records, and to leave the activity in its kept state. This saves time and
            memory.
        clocks: machine -> its clock, as `read_clocks` returns it.

    Attributes:
        shards: the shards that are digested.
        left_out: the shards that are not digested, because the beginning of their traces was deleted before it was
            digested.
        meter: the statistics.
        activity: what each worker did over time.

    Raises:
        ConfigurationError: the directory has no trace of shard 0, or only the end of this trace, or a file is
            damaged.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        shards: Sequence[int] | None = None,
        workers: Collection[int] | None = None,
        left: Collection[int] = (),
        only_statistics: bool = False,
        clocks: Mapping[int, MachineClock] | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._only_statistics = only_statistics
        self._workers = () if only_statistics else workers
        traces = {trace.header.index: trace for trace in trace_files(run_dir) if trace.header.host == "shard"}
        state = _read_state(run_dir)
        if state is not None:
            self.shards = state.shards
        elif shards is not None:
            self.shards = list(shards)
        else:
            self.shards = [index for index, trace in traces.items() if trace.header.is_whole]
        if missing := [index for index in (0, *self.shards) if index not in traces]:
            raise ConfigurationError(f"{run_dir} has no trace of shard {missing[0]}")
        if 0 not in self.shards:
            raise ConfigurationError(f"{run_dir} has only the end of the trace of shard 0")
        self.left_out = [index for index in traces if index not in self.shards]
        header = traces[0].header
        self.ticks_per_s = header.ticks_per_s
        self.meter = Meter(len(self.shards), self.ticks_per_s, left, state.meter if state else None)
        self.activity = (
            Activity.restored(state.activity, clocks)
            if state
            else Activity(len(self.shards), header.sync, clocks, self.ticks_per_s)
        )
        self._begins = state.positions if state else {}
        # The files that are digested. The coordinator's trace comes first, because at equal times a plan precedes the
        # pushes that stop for its barrier.
        self.sources = [self._of_coordinator(run_dir / "trace-coordinator.jsonl")]
        self.sources += [self._of_shard(place, traces[index]) for place, index in enumerate(self.shards)]
        self._recorded: set[Path] = set()  # the files of workers among the sources

    @property
    def overtaken(self) -> bool:
        """True if another process has deleted lines before they were read here.

        The other process has digested these lines before it deleted them, so a new `Digest` of the run includes them.
        """
        return any(source.skipped for source in self.sources)

    def advance(self, until_ticks: int | None = None, hurried: Callable[[], bool] = lambda: False) -> bool:
        """Digest what was added since the last call.

        Args:
            until_ticks: time of the last entry or record that is digested. Default: digest everything.
            hurried: called from time to time, because long traces take minutes. If it returns True, the rest is not
                digested, and the result is False.

        Raises:
            ConfigurationError: a file is damaged.
        """
        self.find()
        heap = [
            (at_ticks, index)
            for index, source in enumerate(self.sources)
            if (at_ticks := source.look()) is not None
        ]
        heapq.heapify(heap)
        number = 0
        while heap and (until_ticks is None or heap[0][0] <= until_ticks):
            if number % LOOK_INTERVAL == 0 and hurried():
                return False
            number += 1
            index = heap[0][1]
            self.sources[index].take()
            if (at_ticks := self.sources[index].look()) is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (at_ticks, index))
        return True

    def save(self) -> None:
        """Keep the state in the run directory.

        Raises:
            OSError: the file cannot be written. An earlier state is unchanged.
        """
        positions = {source.path.name: source.position for source in self.sources}
        state = DigestState(self.shards, self.meter.state, self.activity.state(), positions)
        with Unfinished(_state_path(self._run_dir)) as place:
            place.write_bytes(msgspec.msgpack.encode(state))

    def _of_coordinator(self, path: Path) -> DigestSource:
        decode = msgspec.json.Decoder(Entry).decode
        feed = self.meter.at_coordinator().record
        return DigestSource(path, self._begin(path), decode, _time_of_entry, feed, headed=True)

    def _of_shard(self, place: int, trace: TraceFile) -> DigestSource:
        measure = self.meter.at_shard(place).record
        note = self.activity.at_shard(place, trace.header.recorded_on).record

        def both(entry: Entry) -> None:
            measure(entry)
            note(entry)

        feed = measure if self._only_statistics else both
        return DigestSource(
            trace.path, self._begin(trace.path), trace.decode, _time_of_entry, feed, headed=True
        )

    def find(self) -> None:
        """Find the files of workers that have begun to record since the last call."""
        decode = msgspec.json.Decoder(IterationRecord).decode
        for path in record_files(self._run_dir):
            worker = int(path.stem.rpartition("-")[2])
            if path in self._recorded or not (self._workers is None or worker in self._workers):
                continue
            self._recorded.add(path)
            self.activity.expect_records(worker)

            def feed(record: IterationRecord, worker: int = worker) -> None:
                self.activity.record(worker, record)

            self.sources.append(
                DigestSource(path, self._begin(path), decode, self._time_of_record, feed, headed=False)
            )

    def _begin(self, path: Path) -> FilePosition:
        return self._begins.get(path.name, FilePosition())

    def _time_of_record(self, record: IterationRecord) -> int:
        return round(record.answered_s * self.ticks_per_s)


class DigestSource:
    """A file that is digested.

    Args:
        path: path of the file.
        position: where to begin.
        decode: decodes a line.
        time_of: returns the time of a decoded line, in ticks.
        feed: digests a decoded line.
        headed: see `FileFollower`.
    """

    def __init__(
        self,
        path: Path,
        position: FilePosition,
        decode: Callable[[bytes], Any],
        time_of: Callable[[Any], int],
        feed: Callable[[Any], None],
        *,
        headed: bool,
    ) -> None:
        self.path = path
        self._follower = FileFollower(path, headed=headed, position=position)
        self._decode, self._time_of, self._feed = decode, time_of, feed
        self._lines = self._follower.lines()
        self._head: Any = None  # the next line, decoded
        self._before = self._follower.place  # the place before this line

    def look(self) -> int | None:
        """Return the time of the next line in ticks; None if there is no next line yet.

        Raises:
            ConfigurationError: the line cannot be decoded, or lines were deleted before they were digested.
        """
        if self._head is None:
            self._before = self._follower.place
            line = next(self._lines, None)
            if line is None:
                self._lines = self._follower.lines()
                line = next(self._lines, None)
            if self._follower.skipped:
                raise ConfigurationError(f"a part of {self.path} was deleted before it was read")
            if line is not None:
                self._head = self._decoded(line)
        return None if self._head is None else self._time_of(self._head)

    @property
    def skipped(self) -> bool:
        """True if lines were deleted before they were read."""
        return self._follower.skipped

    def take(self) -> None:
        """Digest the next line, which `look` has read."""
        head, self._head = self._head, None
        self._feed(head)

    @property
    def position(self) -> FilePosition:
        """The place up to which the file was digested. All segments before this place may be deleted."""
        if self._head is None:
            return self._follower.position
        segment = self._follower.place[0]
        return FilePosition(*self._before) if self._before[0] == segment else FilePosition(segment, 0)

    def last_ticks(self, segment: Path) -> int:
        """Return the time of the last line of a complete segment, in ticks."""
        return self._time_of(self._decoded(last_line(segment)))

    def _decoded(self, line: bytes) -> Any:
        try:
            return self._decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{self.path} is damaged: {error}") from error


def _time_of_entry(entry: Entry) -> int:
    return entry.event.now_ticks


def _state_path(run_dir: Path) -> Path:
    return run_dir / EARLIER / "digest.msgpack"


def _read_state(run_dir: Path) -> DigestState | None:
    """Return the state that was kept; None if nothing was digested."""
    path = _state_path(run_dir)
    try:
        return msgspec.msgpack.decode(read_regular(path), type=DigestState)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is damaged: {error}") from error


# -- The process that digests the oldest segments of a run and deletes them, with a low priority: ------------
#
#     python -m paceline.trace.digest RUN_DIR --shards 0,1 --workers 0,1,2,3
#
# The launcher starts this process when the first segment is full. A segment is deleted only after a state that
# includes the segment has been written to the disk. The process ends when its standard input is closed. So it also
# ends when the launcher is killed.
#
# The process digests only files that are written on this machine. Servers and workers on other machines delete their
# own oldest segments.

SETTLED_S = 5.0
"""Age at which a segment is digested. The other files then contain all that was recorded before the segment's end."""

POLL_S = 1.0
NICENESS = (
    3  # with 19, the process would fall behind if all cores are busy: it needs 30 us for each iteration
)


def trim(digest: Digest, kept: int = KEPT_SEGMENTS, settled_s: float = SETTLED_S) -> bool:
    """Digest the oldest segments, which are not kept, and delete them. Return False if there were none.

    Args:
        digest: the digest of the run.
        kept: number of segments of each file that are kept in addition to the newest one.
        settled_s: age in seconds at which a segment is digested.

    Raises:
        ConfigurationError: a file is damaged.
        OSError: the state cannot be written, or a segment cannot be deleted.
    """
    digest.find()
    written_before_s = time.time() - settled_s
    excess: list[tuple[DigestSource, dict[int, Path]]] = []
    for source in digest.sources:
        segments = list(earlier_segments(source.path).items())[:-kept]
        settled = {
            number: segment for number, segment in segments if segment.stat().st_mtime <= written_before_s
        }
        if settled:
            excess.append((source, settled))
    if not excess:
        return False
    digest.advance(max(source.last_ticks(settled[max(settled)]) for source, settled in excess))
    digest.save()
    for source, settled in excess:
        for number, segment in settled.items():
            if number < source.position.segment:
                segment.unlink()
    return True


def main() -> None:
    """Trim a run directory until the standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--shards", type=_indices, required=True)
    parser.add_argument("--workers", type=_indices, required=True)
    arguments = parser.parse_args()
    os.nice(NICENESS)
    try:
        digest = Digest(arguments.run_dir, shards=arguments.shards, workers=arguments.workers)
        while not select.select([sys.stdin], [], [], POLL_S)[0]:
            trim(digest)
    except (ConfigurationError, OSError) as error:
        sys.exit(str(error))


def _indices(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


# -- How evenly the workers contribute to the updates of a run -----------------------------------------------

Key = TypeVar("Key", int, str)


def shares_of_updates(samples: Mapping[Key, int], gradients: Mapping[Key, int]) -> dict[Key, float]:
    """Return each worker's share of the samples in all updates (or of the gradients), from 0 to 1.

    Args:
        samples: worker -> number of samples in its gradients that were applied; all 0 if unknown.
        gradients: worker -> number of these gradients, which is used if the numbers of samples are unknown.

    >>> shares_of_updates({0: 30, 1: 10}, {0: 3, 1: 3})
    {0: 0.75, 1: 0.25}
    """
    counts = samples if any(samples.values()) else gradients
    total = sum(counts.values())
    return {worker: count / total if total else 0.0 for worker, count in counts.items()}


def fairness(shares: Mapping[Key, float]) -> float:
    """Return Jain's index of the shares: 1 if they are equal, 1 / n if one of n workers contributes everything.

    Reference: Jain, Chiu and Hawe, "A quantitative measure of fairness", 1984.

    >>> fairness({0: 0.75, 1: 0.25})
    0.8
    """
    squares = sum(share * share for share in shares.values())
    return sum(shares.values()) ** 2 / (len(shares) * squares) if squares else 1.0

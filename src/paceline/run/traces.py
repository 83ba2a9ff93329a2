"""Files that are written during a run: traces and records in segments, metrics, and logs.

Servers on other machines send their traces at the end of a run. The coordinator writes each trace to a temporary file
in the run directory, and renames the file when the trace is complete. Several machines may share the run directory. In
this case, the server itself has already written its trace there. The renamed file replaces the server's file in a
single operation, so there is a complete trace at every moment.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Literal, NamedTuple

from ..core.layout import Placement
from ..core.messages import TracePart
from ..core.metrics import History
from ..errors import ProtocolError
from ..files import Unfinished
from ..sync.ticks import TICKS_PER_S
from ..trace.recording import KEPT_SEGMENTS, earlier_path, earlier_segments
from ..trace.run_dir import METRICS_FILE, write_metrics
from ..wire.follow import close_in_forks
from .job import Job

PART_BYTES = 2**20
"""Maximum size of one part of a trace in bytes."""


def trace_path(run_dir: Path, shard: int) -> Path:
    """Return the path of the trace of a shard."""
    return run_dir / f"trace-shard-{shard}.jsonl"


def parts_of(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Yield the parts of a complete trace, each with True if the part is the last one.

    If the trace is in several segments, the segments are joined: only the first header is kept.

    Raises:
        OSError: the trace cannot be read.
    """
    segments = [*earlier_segments(path).values(), path]
    for segment in segments:
        last = False
        with segment.open("rb") as file:
            if segment is not segments[0]:
                file.readline()
            while not last:
                part = file.read(PART_BYTES)
                last = len(part) < PART_BYTES
                yield part, last and segment is path


class TraceFiles:
    """Writes the traces that servers on other machines send.

    Args:
        run_dir: the run directory.
        placement: the servers of the shards.
        failed: called with an error message when a file cannot be written.
    """

    def __init__(self, run_dir: Path, placement: Placement, failed: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._placement = placement
        self._failed = failed
        self._parts: dict[int, bytearray] = {}  # shard -> the part that is being received
        # shard -> its trace, which is incomplete
        self._files: dict[int, tuple[Unfinished, IO[bytes]]] = {}
        self._complete: set[int] = set()
        self._broken: set[int] = set()  # shards whose traces cannot be written

    def targets(self, message: TracePart, server: int, size_bytes: int) -> list[memoryview]:
        """Return the memory into which a part is received.

        Raises:
            ProtocolError: the part is not expected from this server, or is too large.
        """
        if message.shard not in self._placement.shards_of(server) or message.shard in self._complete:
            raise ProtocolError(f"the trace of shard {message.shard} is not expected from server {server}")
        if size_bytes > PART_BYTES:
            raise ProtocolError(
                f"a part of a trace has {size_bytes} bytes, expected at most {PART_BYTES} bytes"
            )
        self._parts[message.shard] = bytearray(size_bytes)
        return [memoryview(self._parts[message.shard])] if size_bytes else []

    def arrived(self, message: TracePart) -> None:
        """Write a part that has been received. If this fails, the incomplete trace is removed."""
        shard, data = message.shard, self._parts.pop(message.shard, b"")
        if message.last:
            self._complete.add(shard)
        if shard in self._broken:
            return
        try:
            if shard not in self._files:
                unfinished = Unfinished(trace_path(self._run_dir, shard))
                self._files[shard] = unfinished, unfinished.place.open("wb")
            unfinished, file = self._files[shard]
            file.write(data)
            if message.last:
                file.close()
                # If the machines share the directory, the server has written earlier segments there. The new trace
                # contains these segments.
                for segment in earlier_segments(trace_path(self._run_dir, shard)).values():
                    segment.unlink()
                unfinished.finish()
                del self._files[shard]
        except OSError as error:
            self._broken.add(shard)
            self._discard(shard)
            self._failed(f"the trace of shard {shard} cannot be written: {error.strerror or error}")

    def close(self) -> None:
        """Remove the traces that are incomplete."""
        for shard in list(self._files):
            self._discard(shard)

    def _discard(self, shard: int) -> None:
        if shard in self._files:
            unfinished, file = self._files.pop(shard)
            with contextlib.suppress(OSError):  # data that is still buffered cannot be written either
                file.close()
            unfinished.discard()


# -- The thread that writes the metrics of a run to its directory while the run goes on ----------------------
#
# The coordinator's own thread must not wait for a disk. So that thread only merges the metrics in memory.

WRITING_INTERVAL_S = 2.0
"""Minimum time between two writes."""

WRITING_SHARE = 0.02
"""Maximum share of the time that is spent on writes."""


class MetricsWriter:
    """Writes the metrics to `metrics.jsonl` when new metrics have arrived. If nothing is logged, there is no file.

    Args:
        history: the metrics.
        run_dir: the run directory.
        failed: called once with an error message if the file cannot be written.
    """

    def __init__(self, history: History, run_dir: Path, failed: Callable[[str], None]) -> None:
        self._history = history
        self._run_dir = run_dir
        self._failed = failed
        self._written = 0  # number of values that were noted before the last write
        self._broken = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-metrics", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, and write the metrics that have not been written yet."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._write()

    def _run(self) -> None:
        pause_s = WRITING_INTERVAL_S
        while not self._over.wait(pause_s):
            begun_s = time.monotonic()
            self._write()
            pause_s = max(WRITING_INTERVAL_S, (time.monotonic() - begun_s) / WRITING_SHARE)

    def _write(self) -> None:
        noted = self._history.noted
        if noted == self._written or self._broken:
            return
        try:
            write_metrics(self._run_dir, self._history.metrics())
            self._written = noted
        except OSError as error:
            self._broken = True
            self._failed(
                f"{METRICS_FILE} cannot be written: {error.strerror or error}. The run continues without it."
            )


# -- Files that grow during a run: written in segments, so that old segments can be deleted. See `trace.recording`

TEND_S = 0.25
"""Interval in seconds at which the hosts call `SegmentedFile.tend`."""

TEND_TICKS = round(TEND_S * TICKS_PER_S)

LEAST_BYTES = 2**14
"""Minimum size of a segment in bytes."""

# Relative sizes of the entries for one iteration of one worker. The trace of each shard has entries for the push and
# the pull, and the trace of the coordinator has at most one entry. Each of these traces has the entries of all workers.
PART_OF_MERGED = {"shard": 4, "coordinator": 1}
PART_OF_OWN = 2  # relative size of the entry in the records of the worker


class Segmenting(NamedTuple):
    """The size and the number of the segments in which a file is written.

    Attributes:
        size_bytes: size at which a segment is full.
        kept: number of full segments that are kept. The process that writes the file deletes older segments. None if
            another process deletes segments after it has digested them.
    """

    size_bytes: int
    kept: int | None


def segmenting(
    job: Job, kind: Literal["shard", "coordinator", "worker"], machine: int = 0
) -> Segmenting | None:
    """Return how a process of a run writes its traces or records in segments; None to write a single segment.

    The bytes that the user grants are divided among all files of the run, so that all files cover about the same part
    of the run.

    Args:
        job: the configuration of the run.
        kind: the kind of process that writes the file.
        machine: index of the process's machine. On machine 0, which is the launcher's machine, segments are digested
            before they are deleted.
    """
    if job.traces.kept != "recent":
        return None
    merged = PART_OF_MERGED["coordinator"] + PART_OF_MERGED["shard"] * job.shards
    total = job.workers * (merged + PART_OF_OWN)
    part = PART_OF_OWN if kind == "worker" else PART_OF_MERGED[kind] * job.workers
    size_bytes = job.traces.size_bytes * part // (total * (KEPT_SEGMENTS + 1))
    return Segmenting(max(LEAST_BYTES, size_bytes), None if machine == 0 else KEPT_SEGMENTS)


# -- Optional output files of a run: logs and traces. Training continues even if these files cannot be written
#
# Other processes read these files during the run, and a process that is killed loses its buffered data. So data is
# usually not buffered. Only files to which much is written have a buffer, which their owners flush regularly.


class BestEffortFile:
    """An output file that discards all data after its first failure. Data written before the failure is kept.

    Args:
        path: path of the file, which is overwritten if it exists.
        failed: called once with an error message when the file cannot be opened, written or closed.
        append: True to append to the file instead of overwriting it.

    Attributes:
        buffered: True if data is buffered, so that the owner must call `flush` regularly.
    """

    buffered = False

    def __init__(self, path: Path, failed: Callable[[str], None], *, append: bool = False) -> None:
        self._path = path
        self._failed = failed
        self._file: IO[bytes] | None = None
        try:
            self._file = path.open("ab" if append else "wb")
        except OSError as error:
            self._give_up(error)
        close_in_forks(self)

    @property
    def size_bytes(self) -> int:
        """Size of the file in bytes, with the buffered data; 0 after a failure."""
        return 0 if self._file is None else self._file.tell()

    def write(self, data: bytes | bytearray) -> None:
        """Write data, unless an earlier operation has failed."""
        if self._file is not None:
            try:
                self._file.write(data)
                if not self.buffered:
                    self._file.flush()
            except OSError as error:
                self._give_up(error)

    def flush(self) -> None:
        """Write the buffered data, unless an earlier operation has failed."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Write the buffered data and close the file, unless an earlier operation has failed."""
        if self._file is not None:
            try:
                self._file.close()
                self._file = None
            except OSError as error:
                self._give_up(error)

    def close_in_fork(self) -> None:
        """See `close_in_forks`. Buffered data is discarded, because the parent process writes it."""
        if self._file is not None:
            self._file.raw.close()  # type: ignore[attr-defined]  # the file is a BufferedWriter

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        if file is not None:
            # Closing the file tries to write the buffered data again, which may fail again.
            with contextlib.suppress(OSError):
                file.close()
        self._failed(
            f"{self._path.name} cannot be written and is incomplete: {error.strerror or error}. The run continues "
            "without this file."
        )


class SegmentedFile(BestEffortFile):
    """An output file that is written in segments. Its owner calls `tend` several times per second.

    Args:
        path: path of the file, which is overwritten if it exists.
        failed: called once with an error message when the file cannot be opened, written or closed.
        segmenting: how the file is written in segments; None to write one segment that never ends.
        append: True to append to the file instead of overwriting it.
    """

    buffered = True

    def __init__(
        self,
        path: Path,
        failed: Callable[[str], None],
        segmenting: Segmenting | None,
        *,
        append: bool = False,
    ) -> None:
        super().__init__(path, failed, append=append)
        self._segmenting = segmenting

    def tend(self) -> bool:
        """Write the buffered data. If the segment is full, begin a new one, and return True."""
        self.flush()
        if self._segmenting is None or self.size_bytes < self._segmenting.size_bytes:
            return False
        number = max(earlier_segments(self._path), default=-1) + 1
        self.close()
        try:
            earlier_path(self._path, number).parent.mkdir(exist_ok=True)
            os.replace(self._path, earlier_path(self._path, number))
            self._file = self._path.open("wb")
        except OSError as error:
            self._give_up(error)
            return False
        if (kept := self._segmenting.kept) is not None:
            for segment in list(earlier_segments(self._path).values())[:-kept]:
                with contextlib.suppress(OSError):  # the next call tries to delete the segment again
                    segment.unlink()
        return True

"""Where what happens in a simulation goes: to the meter, and, if asked for, into memory or a run directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigurationError
from ..runtime.job import require_usable
from ..sync.notation import notation
from ..sync.schedule import Schedule
from ..trace.measures import Meter
from ..trace.recording import Entry, EntryRecorder, Header, Memory, Recorder, Trace
from ..trace.records import IterationRecord

__all__ = ["Recorders", "Recording", "RunFolder", "TakeRecord"]

TakeRecord = Callable[[int, IterationRecord], object]
"""Takes what one iteration of a worker cost."""

PENDING_BYTES = 16 * 1024 * 1024
"""Lines of all workers that wait to be written. Thousands of files cannot all be open, and to open one for each line
takes longer than the simulation."""


class Recording(msgspec.Struct, frozen=True):
    """What was kept of a simulation.

    Attributes:
        trace: each shard's, then the coordinator's.
        records: each worker's iterations.
    """

    trace: list[Trace]
    records: list[list[IterationRecord]]


class RunFolder:
    """A run directory in the making: traces, each worker's iterations, and in the end a summary, as of a live run.

    Args:
        path: of the directory.
        workers: how many.

    Raises:
        ConfigurationError: it cannot be written, or holds a run already.
    """

    def __init__(self, path: str | Path, workers: int) -> None:
        require_usable(path)
        self.path = Path(path)
        self._pending = [bytearray() for _ in range(workers)]
        self._pending_bytes = 0
        self._recorders: list[Recorder] = []
        self._encoder = msgspec.json.Encoder()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for worker in range(workers):
                self._log(worker).write_bytes(b"")
        except OSError as error:
            raise ConfigurationError(
                f"the run directory {path} cannot be written: {error.strerror}. Choose another."
            ) from error

    def recorder(self, header: Header) -> Recorder:
        """Begin the trace of one host."""
        name = f"shard-{header.index}" if header.host == "shard" else header.host
        self._recorders.append(Recorder.to_path(self.path / f"trace-{name}.jsonl", header))
        return self._recorders[-1]

    def take(self, worker: int, record: IterationRecord) -> None:
        """Add one iteration of a worker."""
        line = self._encoder.encode(record) + b"\n"
        self._pending[worker] += line
        self._pending_bytes += len(line)
        if self._pending_bytes > PENDING_BYTES:
            self._write_pending()

    def summarize(self, summary: dict[str, Any]) -> None:
        """Write the summary: the run has come to its end."""
        text = msgspec.json.format(msgspec.json.encode(summary), indent=2)
        (self.path / "summary.json").write_bytes(text + b"\n")

    def close(self) -> None:
        """Write what has yet to be written."""
        self._write_pending()
        for recorder in self._recorders:
            recorder.close()

    def _log(self, worker: int) -> Path:
        return self.path / f"worker-{worker}.jsonl"

    def _write_pending(self) -> None:
        for worker, lines in enumerate(self._pending):
            if lines:
                with self._log(worker).open("ab") as log:
                    log.write(lines)
                lines.clear()
        self._pending_bytes = 0


class Recorders:
    """Where the entries of each host of a job go, and the records of its workers.

    A context: on leaving it, everything has been written.

    Args:
        schedule: of the job.
        workers: how many.
        shards: how many.
        seed: of the run.
        keep: keep everything in memory.
        run_dir: where to write everything; None for nowhere.

    Attributes:
        meter: what measures the shards' entries.
        recording: what is kept; None if nothing is.
        takers: what takes the record of each iteration.
        shards: each shard's, from `begin` on.
        job: the coordinator's, likewise.

    Raises:
        ConfigurationError: the directory cannot be written, or holds a run already.
    """

    def __init__(
        self,
        schedule: Schedule,
        workers: int,
        shards: int,
        seed: int,
        *,
        keep: bool,
        run_dir: str | Path | None,
    ) -> None:
        self.meter = Meter(shards)
        self.recording = Recording([], [[] for _ in range(workers)]) if keep else None
        self.takers: list[TakeRecord] = []
        self.shards: list[EntryRecorder] = []
        self.job: EntryRecorder
        self._schedule = schedule
        self._seed = seed
        self._count = shards
        self._folder = RunFolder(run_dir, workers) if run_dir is not None else None
        if self.recording is not None:
            self.takers.append(self._keep)
        if self._folder is not None:
            self.takers.append(self._folder.take)

    def __enter__(self) -> Recorders:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.close()

    def begin(self, computed_by: str = "") -> None:
        """Write the header of each trace. For `computed_by` see `Header`."""
        for index in range(self._count):
            sync = str(self._schedule.at_shard(index))
            header = Header(sync=sync, host="shard", index=index, seed=self._seed, computed_by=computed_by)
            self.shards.append(_together([Metered(self.meter, index), *self._recorders(header)]))
        sync = notation(self._schedule.first)
        header = Header(sync=sync, host="coordinator", seed=self._seed, computed_by=computed_by)
        self.job = _together(self._recorders(header))

    def summarize(self, summary: dict[str, Any]) -> None:
        """Write the summary, if anything is written: the run has come to its end."""
        if self._folder is not None:
            self._folder.summarize(summary)

    def _keep(self, worker: int, record: IterationRecord) -> None:
        assert self.recording is not None
        self.recording.records[worker].append(record)

    def _recorders(self, header: Header) -> list[EntryRecorder]:
        found: list[EntryRecorder] = []
        if self.recording is not None:
            memory = Memory(header)
            self.recording.trace.append(memory.trace)
            found.append(memory)
        if self._folder is not None:
            found.append(self._folder.recorder(header))
        return found


def _together(recorders: Sequence[EntryRecorder]) -> EntryRecorder:
    return recorders[0] if len(recorders) == 1 else Several(recorders)


class Several:
    """Hands entries to several recorders."""

    def __init__(self, recorders: Sequence[EntryRecorder]) -> None:
        self._recorders = recorders

    def record(self, entry: Entry) -> None:
        for recorder in self._recorders:
            recorder.record(entry)


class Metered:
    """Measures a shard's entries."""

    def __init__(self, meter: Meter, shard: int) -> None:
        self._meter = meter
        self._shard = shard

    def record(self, entry: Entry) -> None:
        self._meter.record(self._shard, entry)

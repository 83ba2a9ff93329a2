"""Records a simulation: statistics and, if requested, traces and records in memory or in a run directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..core.metrics.history import History, MetricHistory
from ..errors import ConfigurationError
from ..files import write_json
from ..sync.notation import notation
from ..sync.schedule import Schedule
from ..sync.ticks import TICKS_PER_S
from ..trace.kept_models import modules_of_models
from ..trace.measures import Meter
from ..trace.metrics_file import write_metrics
from ..trace.recording import Entry, EntryRecorder, Header, Memory, Recorder, Trace
from ..trace.records import IterationRecord
from ..trace.run_dir import require_usable

__all__ = ["Recorders", "Recording", "RunFolder", "TakeRecord"]

TakeRecord = Callable[[int, IterationRecord], object]
"""A function that receives the index of a worker and the record of one of the worker's iterations."""

PENDING_BYTES = 16 * 1024 * 1024
"""Number of buffered bytes at which the buffered lines are written to files.

Lines are buffered because thousands of files cannot be open at the same time, and because opening a file for each
line would take longer than the simulation.
"""


class Recording(msgspec.Struct, frozen=True):
    """The traces and records of a simulation, kept in memory.

    Attributes:
        trace: the traces of all shards, followed by the coordinator's trace.
        records: for each worker, the records of its iterations.
    """

    trace: list[Trace]
    records: list[list[IterationRecord]]


class RunFolder:
    """Writes a run directory with the same files as a live run: traces, records of iterations, and a summary.

    Args:
        path: path of the directory.
        workers: number of workers.

    Raises:
        ConfigurationError: the directory cannot be written, or it already contains a run.
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
                f"the run directory {path} cannot be written: {error.strerror}. Choose another one."
            ) from error

    def recorder(self, header: Header) -> Recorder:
        """Create the trace file of a shard or the coordinator, and return a recorder that writes to it."""
        name = f"shard-{header.index}" if header.host == "shard" else header.host
        self._recorders.append(Recorder.to_path(self.path / f"trace-{name}.jsonl", header))
        return self._recorders[-1]

    def take(self, worker: int, record: IterationRecord) -> None:
        """Add the record of a worker's iteration."""
        line = self._encoder.encode(record) + b"\n"
        self._pending[worker] += line
        self._pending_bytes += len(line)
        if self._pending_bytes > PENDING_BYTES:
            self._write_pending()

    def keep_metrics(self, history: MetricHistory) -> None:
        """Write what the training function has logged, if there is anything."""
        if history:
            write_metrics(self.path, history.values())

    def summarize(self, summary: dict[str, Any]) -> None:
        """Write the summary. Call this when the run has finished."""
        write_json(self.path / "summary.json", summary)

    def close(self) -> None:
        """Write all buffered lines and close the traces."""
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
    """The recorders for the traces of the shards and the coordinator, and for the records of each worker.

    This is a context manager: when it exits, the files with the traces and records are complete.

    Args:
        schedule: schedule of the job.
        workers: number of workers.
        shards: number of shards.
        seed: random seed for the run.
        emulated: description of how the machines were emulated, if they were recorded in a run that emulated them.
        keep: True to keep all traces and records in memory.
        run_dir: directory for the traces and records; None to write no files.
        ticks_per_s: number of ticks per second (see `paceline.sync.ticks`).

    Attributes:
        ticks_per_s: number of ticks per second.
        meter: computes statistics from the trace entries of all shards and of the coordinator.
        recording: traces and records in memory; None if they are not kept.
        takers: functions that receive the record of each iteration.
        history: what the training function has logged. It is written when the context ends, also after a failure.
        shards: the recorder of each shard. Set by `begin`.
        job: the recorder of the coordinator. Set by `begin`.

    Raises:
        ConfigurationError: the directory cannot be written, or it already contains a run.
    """

    def __init__(
        self,
        schedule: Schedule,
        workers: int,
        shards: int,
        seed: int,
        *,
        emulated: str = "",
        keep: bool,
        run_dir: str | Path | None,
        ticks_per_s: int = TICKS_PER_S,
    ) -> None:
        self.ticks_per_s = ticks_per_s
        self.meter = Meter(shards, ticks_per_s)
        self.recording = Recording([], [[] for _ in range(workers)]) if keep else None
        self.takers: list[TakeRecord] = []
        self.history = History()
        self.shards: list[EntryRecorder] = []
        self.job: EntryRecorder
        self._schedule = schedule
        self._seed = seed
        self._emulated = emulated
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
            self._folder.keep_metrics(MetricHistory(self.history.metrics()))

    def begin(self, computed_by: str = "", *, translated: bool = False) -> None:
        """Begin the traces of the shards and the coordinator.

        Args:
            computed_by: see `Header`.
            translated: True if the hyper-parameters of each update are translated.
        """
        imports = modules_of_models(self._schedule.models) or msgspec.UNSET
        for index in range(self._count):
            sync = str(self._schedule.at_shard(index))
            header = Header(
                sync=sync,
                host="shard",
                index=index,
                seed=self._seed,
                emulated=self._emulated,
                computed_by=computed_by,
                ticks_per_s=self.ticks_per_s,
                imports=imports,
                hyperparameters="translated" if translated else msgspec.UNSET,
            )
            self.shards.append(_together([self.meter.at_shard(index), *self._recorders(header)]))
        sync = notation(self._schedule.first)
        header = Header(
            sync=sync,
            host="coordinator",
            seed=self._seed,
            emulated=self._emulated,
            computed_by=computed_by,
            ticks_per_s=self.ticks_per_s,
            imports=imports,
        )
        self.job = _together([self.meter.at_coordinator(), *self._recorders(header)])

    def summarize(self, summary: dict[str, Any]) -> None:
        """Write the summary to the run directory, if there is one. Call this when the run has finished."""
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
    """A recorder that passes each entry to several other recorders."""

    def __init__(self, recorders: Sequence[EntryRecorder]) -> None:
        self._recorders = recorders

    def record(self, entry: Entry) -> None:
        for recorder in self._recorders:
            recorder.record(entry)

"""The result of a simulated run, which can be saved to a run directory with the same files as a live run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..core.auto import ModelChoice
from ..core.metrics import History, MetricHistory
from ..core.requests import Entry, EntryRecorder
from ..errors import ConfigurationError, UsageError
from ..files import write_json
from ..sync.notation import notation
from ..sync.schedule import Schedule, read_schedule
from ..sync.ticks import TICKS_PER_S
from ..trace.activity_cells import TimeUse, time_shares
from ..trace.measures import Measures, Meter, missing_updates, unapplied_pushes
from ..trace.recording import (
    Header,
    IterationRecord,
    Memory,
    Recorder,
    Trace,
    kept_modules,
    modules_of_models,
    read_records,
    read_run,
)
from ..trace.run_dir import require_usable, write_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from ..shard.store import WeightsSnapshot
    from .simulated_cuts import SimCut
else:  # `help(SimResult)` evaluates the types of its fields, and must not import torch, which takes seconds
    SimCut = Tensor = WeightsSnapshot = Any

NO_METRICS = MetricHistory()


class Loss(msgspec.Struct, frozen=True):
    """The training loss that one worker computed in one iteration.

    Attributes:
        time_s: virtual time at which the push of the iteration began.
        worker: index of the worker.
        iteration: number of the iteration, from 0.
        loss: the loss that the worker's script has logged, or that its closure has returned.
    """

    time_s: float
    worker: int
    iteration: int
    loss: float


class SimResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a simulated run.

    Attributes:
        sync: notation of the sync model or the schedule.
        hyperparameters: "translated" or "raw", as for `paceline.launch`; None without a training function.
        wire: format in which gradients and weights travelled, as for `paceline.launch`.
        seed: random seed for the run.
        servers: number of servers.
        shards: number of shards.
        shard_bytes: size of each shard in bytes.
        push_bytes: size of an encoded push to each shard, in bytes.
        pull_bytes: size of each shard's encoded answer to a pull, in bytes.
        finished_s: for each worker, the virtual time at which it finished its last iteration.
        measures: statistics of the run, the same as in the summary of a live run.
        time_use: for each worker that has joined, what it has spent its time on.
        staleness: mapping from staleness to the number of pushes with this staleness, counted per shard. A push's
            staleness is the number of updates between the worker's previous pull and the application of the push.
        bytes_by_kind: number of bytes sent for each kind of message: "push", "pull", "pull again" (after a restart)
            and "control" (small messages).
        events: number of simulated events.
        faults: messages about problems that did not end the run, in order. Each says which condition failed, and
            with which model the shards continued.
        noticed: the first sentences of `findings`, which are about problems in the workers' reports.
        balanced: True if the sizes of the workers' batches followed the workers' speeds. False if this was not asked
            for, or the data cannot be divided in this way.
        choices: changes of the sync model that the run has made itself, with `sync="auto"`.
        emulated: description of how unequal machines were emulated in the run from which the cluster was recorded; ""
            if the run emulated nothing, or the cluster was not recorded.
        optimizers: names of the model's optimizers; () if unknown, as in a cluster that was not recorded.
        recording: traces and records in memory; None if they were not kept.
        run_dir: directory with the traces and records that were written during the run; None if none were written.
        state_dict: final weights and buffers, with the names from the model's `state_dict`; None without a training
            function.
        losses: the loss of each iteration, ordered by time; None without a training function.
        history: what the training function has logged (see `paceline.log`), as in the result of a live run.
        snapshots: pairs (virtual time, weights); empty if no snapshots were requested.
        cuts: the cuts that were made, with which other simulations can begin; empty without a training function.
    """

    sync: str
    hyperparameters: str | None
    wire: str
    seed: int
    servers: int
    shards: int
    shard_bytes: tuple[int, ...]
    push_bytes: tuple[int, ...]
    pull_bytes: tuple[int, ...]
    finished_s: tuple[float, ...]
    measures: Measures
    time_use: dict[int, TimeUse]
    staleness: dict[int, int]
    bytes_by_kind: dict[str, int]
    events: int
    faults: list[str]
    noticed: list[str]
    balanced: bool = False
    choices: list[ModelChoice] = []
    emulated: str = ""
    optimizers: tuple[str, ...] = ()
    recording: Recording | None = None
    run_dir: Path | None = None
    state_dict: dict[str, Tensor] | None = None
    losses: list[Loss] | None = None
    history: MetricHistory = NO_METRICS
    snapshots: list[tuple[float, WeightsSnapshot]] = []
    cuts: list[SimCut] = []

    def __repr__(self) -> str:
        """A short description, for example in a notebook: the weights alone may be millions of numbers."""
        iterations = sum(self.measures.iterations.values())
        found = [f"{self.sync}, {len(self.finished_s)} workers, {iterations} iterations"]
        found += [f"{max(self.finished_s, default=0.0):.6g} virtual seconds"]
        if self.state_dict is not None:
            found += [f"{len(self.state_dict)} tensors"]
        if self.run_dir is not None:
            found += [f"run_dir={str(self.run_dir)!r}"]
        return f"SimResult({', '.join(found)})"

    @property
    def trace(self) -> list[Trace]:
        """The traces of all shards, followed by the coordinator's; read from `run_dir` if they are not in memory.

        Raises:
            UsageError: no traces were recorded.
        """
        if self.recording is not None:
            return self.recording.trace
        return read_run(self._written())

    @property
    def records(self) -> list[list[IterationRecord]]:
        """The records of each worker's iterations, read from `run_dir` if they are not in memory.

        Raises:
            UsageError: no records were kept or written.
        """
        if self.recording is not None:
            return self.recording.records
        return read_records(self._written())

    def _written(self) -> Path:
        """Return the directory with the traces and records. Raise `UsageError` if there is none."""
        if self.run_dir is None:
            raise UsageError(
                "this simulation has recorded no traces. Call simulate() with record=True to keep traces and records "
                "in memory, or with run_dir=... to write them to files."
            )
        return self.run_dir

    @property
    def time_s(self) -> float:
        """The virtual time at which the last worker finished its iterations."""
        return max(self.finished_s)

    @property
    def updates(self) -> int:
        """The number of optimizer steps at shard 0."""
        return self.measures.updates

    @property
    def findings(self) -> list[str]:
        """Sentences about what made the result worse than it could be; [] if there are none.

        These sentences are about hyper-parameters that differ between workers, about pushes that were never applied,
        and about updates that are missing because gradients were dropped.
        """
        unapplied = unapplied_pushes(self.measures.pushes, self.measures.unapplied)
        unapplied = unapplied or missing_updates(self.measures)
        return [*self.noticed, *([unapplied] if unapplied else [])]

    @property
    def waiting_share(self) -> float:
        """The fraction of the workers' total time that was spent waiting, from 0 to 1."""
        return self.measures.waiting_share

    @property
    def computed_s(self) -> float:
        """The total time in seconds of all computations that were pushed, or were in progress at the end."""
        return fsum(use.computing_s for use in self.time_use.values())

    @property
    def wasted_s(self) -> float:
        """The total time in seconds of computations that were aborted or lost, and of pulls after aborts."""
        return fsum(use.wasted_s for use in self.time_use.values())

    @property
    def delayed_pulls(self) -> int:
        """The number of pulls that were not answered on arrival. A pull counts once per shard that delayed it."""
        return self.measures.delayed_pulls

    @property
    def restarts(self) -> int:
        """The number of computations that were aborted and restarted."""
        return self.measures.restarts

    @property
    def bytes_sent(self) -> int:
        """The total number of bytes sent."""
        return sum(self.bytes_by_kind.values())

    def save(self, run_dir: str | Path) -> Path:
        """Write a run directory with the same files as a live run, for `paceline advise` and the reports.

        Returns:
            The path of the directory.

        Raises:
            ConfigurationError: the directory cannot be written, or it already contains a run.
            UsageError: the run was simulated with neither `record=True` nor `run_dir=...`.
        """
        traces, records = self.trace, self.records
        folder = RunFolder(run_dir, len(records))
        for trace in traces:
            recorder = folder.recorder(trace.header)
            for entry in trace.entries:
                recorder.record(entry)
        for worker, kept in enumerate(records):
            for record in kept:
                folder.take(worker, record)
        folder.close()
        folder.keep_metrics(self.history)
        folder.summarize(self.summary)
        return folder.path

    @property
    def summary(self) -> dict[str, Any]:
        """The statistics of the run as plain types, with the same names as in the summary of a live run."""
        figures = msgspec.to_builtins(self.measures, str_keys=True)
        emulated = "simulated in virtual time"
        if self.emulated:
            emulated += f", on machines recorded in a run with emulated machines: {self.emulated}"
        return {
            "sync": self.sync,
            **({"hyperparameters": self.hyperparameters} if self.hyperparameters else {}),
            **({"wire": self.wire} if self.wire != "float32" else {}),
            "workers": len(self.measures.iterations),
            "servers": self.servers,
            "shards": self.shards,
            **({"optimizers": list(self.optimizers)} if self.optimizers else {}),
            "shard_bytes": list(self.shard_bytes),
            "push_bytes": list(self.push_bytes),
            "pull_bytes": list(self.pull_bytes),
            "seed": self.seed,
            **kept_modules(modules_of_models(read_schedule(self.sync).models)),
            "emulated": emulated,
            "lost_workers": [],
            "faults": self.faults,
            "wasted_s": self.wasted_s,
            "findings": self.findings,
            **({"choices": [str(choice) for choice in self.choices]} if self.choices else {}),
            **time_shares(self.time_use),
            "time_use": msgspec.to_builtins(self.time_use, str_keys=True),
            "ledger": {"pushes": figures.pop("pushes")},
            **figures,
        }


# -- Records a simulation: statistics and, if requested, traces and records in memory or in a run directory

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
        history: what the training function has logged. The history is written when the context ends, even after a
            failure.
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
        header = Header(
            sync=notation(self._schedule.first),
            host="coordinator",
            seed=self._seed,
            emulated=self._emulated,
            computed_by=computed_by,
            ticks_per_s=self.ticks_per_s,
            imports=imports,
        )
        of_shards = msgspec.structs.replace(
            header, host="shard", hyperparameters="translated" if translated else msgspec.UNSET
        )
        for index in range(self._count):
            own = self._recorders(msgspec.structs.replace(of_shards, index=index))
            self.shards.append(_together([self.meter.at_shard(index), *own]))
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

"""The result of a simulated run, which can be saved to a run directory with the same files as a live run."""

from __future__ import annotations

from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..core.metrics.history import MetricHistory
from ..core.sync.auto import Choice
from ..errors import UsageError
from ..sync.schedule import read_schedule
from ..trace.kept_models import kept_modules, modules_of_models
from ..trace.measures import Measures
from ..trace.recording import Trace, read_run
from ..trace.records import IterationRecord, read_records
from ..trace.time_use import TimeUse, time_shares
from ..trace.unapplied import missing_updates, unapplied_pushes
from .recorder import Recording, RunFolder

if TYPE_CHECKING:
    from torch import Tensor

    from ..shard.snapshot import WeightsSnapshot
    from .simulated_cuts import SimCut
else:  # `help(SimResult)` resolves the types of its fields, but importing torch takes seconds
    SimCut = Tensor = WeightsSnapshot = Any

__all__ = ["Loss", "SimResult"]

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
        shard_bytes: size of a push to each shard, or of its answer to a pull, in bytes.
        rounded_bytes: the same if float32 values are rounded.
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
        noticed: what the workers' reports show; the first of the findings.
        balanced: True if the sizes of the workers' batches followed their speeds. False if this was not asked for, or
            the data cannot be divided in this way.
        choices: changes of the sync model that the run has made itself, with `sync="auto"`.
        emulated: description of how unequal machines were emulated in the run from which the cluster was recorded; ""
            if the run emulated nothing, or the cluster was not recorded.
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
    rounded_bytes: tuple[int, ...]
    finished_s: tuple[float, ...]
    measures: Measures
    time_use: dict[int, TimeUse]
    staleness: dict[int, int]
    bytes_by_kind: dict[str, int]
    events: int
    faults: list[str]
    noticed: list[str]
    balanced: bool = False
    choices: list[Choice] = []
    emulated: str = ""
    recording: Recording | None = None
    run_dir: Path | None = None
    state_dict: dict[str, Tensor] | None = None
    losses: list[Loss] | None = None
    history: MetricHistory = NO_METRICS
    snapshots: list[tuple[float, WeightsSnapshot]] = []
    cuts: list[SimCut] = []

    def __repr__(self) -> str:
        """A few words, which a notebook shows: the weights alone may be millions of numbers."""
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

        They are about hyper-parameters that differ between workers, about pushes that were never applied, and about
        updates that are missing because gradients were dropped.
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
            "shard_bytes": list(self.shard_bytes),
            "rounded_bytes": list(self.rounded_bytes),
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

"""What a simulated run came to, and how it is kept: in the form that a live run leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import UsageError
from ..trace.measures import Measures
from ..trace.recording import Trace, read_run
from ..trace.records import IterationRecord, read_records
from .recording import Recording, RunFolder

if TYPE_CHECKING:
    import torch

    from ..runtime.reader import WeightsSnapshot

__all__ = ["Loss", "SimResult"]


class Loss(msgspec.Struct, frozen=True):
    """What a worker's closure returned for one iteration, and when the push of it began."""

    time_s: float
    worker: int
    iteration: int
    loss: float


class SimResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulated run came to.

    Attributes:
        sync: the sync model, or the schedule.
        seed: of the run.
        servers: how many.
        finished_s: for each worker, the virtual time at which it had finished its last iteration.
        measures: the figures that a live run's `summary` has, too.
        staleness: updates applied between a push's pull and its application -> how many pushes, per shard, missed so
            many.
        bytes_by_kind: what was sent: "push", "pull", "pull again" (after a restart), "control" (small messages).
        events: how many things happened.
        computed_s: of all workers together, what they computed, without what was dropped.
        wasted_s: likewise, what they computed in vain, with the pulls after it.
        shards: how many.
        faults: what went wrong without ending the run, in words, in order: conditions that failed, and what their
            shards went on with.
        recording: traces and records, if they were kept in memory.
        run_dir: where they were written while the run went on, if they were.
        state_dict: with a training function, the final weights and buffers under the model's own names.
        history: likewise, the losses in order of time.
        snapshots: likewise, (virtual time, weights), if they were asked for.
    """

    sync: str
    seed: int
    servers: int
    shards: int
    finished_s: tuple[float, ...]
    measures: Measures
    staleness: dict[int, int]
    bytes_by_kind: dict[str, int]
    events: int
    computed_s: float
    wasted_s: float
    faults: list[str]
    recording: Recording | None = None
    run_dir: Path | None = None
    state_dict: dict[str, torch.Tensor] | None = None
    history: list[Loss] | None = None
    snapshots: list[tuple[float, WeightsSnapshot]] = []

    @property
    def trace(self) -> list[Trace]:
        """Each shard's trace, then the coordinator's. If they were written to `run_dir`, they are read from there.

        Raises:
            UsageError: they were neither kept nor written.
        """
        if self.recording is not None:
            return self.recording.trace
        return read_run(self._written())

    @property
    def records(self) -> list[list[IterationRecord]]:
        """Each worker's iterations, as in a live run's `worker-<index>.jsonl`. See `trace`."""
        if self.recording is not None:
            return self.recording.records
        return read_records(self._written())

    def _written(self) -> Path:
        if self.run_dir is None:
            raise UsageError(
                "this simulation has recorded nothing. Simulate with record=True to keep traces and records in "
                "memory, or with run_dir=... to have them written while it goes on."
            )
        return self.run_dir

    @property
    def time_s(self) -> float:
        """Virtual time at which the last worker had finished its iterations."""
        return max(self.finished_s)

    @property
    def updates(self) -> int:
        """Optimizer steps of shard 0."""
        return self.measures.updates

    @property
    def waiting_share(self) -> float:
        """Of all workers' time together, the share that they waited, from 0 to 1."""
        return self.measures.waiting_share

    @property
    def delayed_pulls(self) -> int:
        """Pulls, per (worker, shard), that were not answered on arrival."""
        return self.measures.delayed_pulls

    @property
    def restarts(self) -> int:
        """Computations that were dropped and started anew."""
        return self.measures.restarts

    @property
    def bytes_sent(self) -> int:
        """All that was sent."""
        return sum(self.bytes_by_kind.values())

    def save(self, run_dir: str | Path) -> Path:
        """Write traces, records and summary, as a live run does: `paceline advise` and the reports read them.

        Raises:
            ConfigurationError: the directory cannot be written, or holds a run already.
            UsageError: the run was simulated without `record=True` or `run_dir=...`.
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
        folder.summarize(self.summary)
        return folder.path

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of the run in plain types, under the names that a live run's have."""
        return {
            "sync": self.sync,
            "workers": len(self.measures.iterations),
            "servers": self.servers,
            "shards": self.shards,
            "seed": self.seed,
            "emulated": "simulated in virtual time",
            "lost_workers": [],
            "faults": self.faults,
            "wasted_s": self.wasted_s,
            **msgspec.to_builtins(self.measures, str_keys=True),
        }

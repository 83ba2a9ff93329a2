"""What a simulated run came to, and how it is kept: in the form that a live run leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import UsageError
from ..measures import Measures
from ..runtime.job import require_usable
from ..runtime.records import IterationRecord
from ..trace import Recorder, Trace

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
        staleness: of each applied push, per shard: updates applied between its pull and its application.
        bytes_by_kind: what was sent: "push", "pull", "pull again" (after a restart), "control" (small messages).
        events: how many things happened.
        computed_s: of all workers together, what they computed, without what was dropped.
        wasted_s: likewise, what they computed in vain, with the pulls after it.
        trace: each shard's, then the coordinator's; [] if they were not recorded.
        records: each worker's iterations, as in a live run's `worker-<index>.jsonl`; likewise.
        state_dict: with a training function, the final weights and buffers under the model's own names.
        history: likewise, the losses in order of time.
        snapshots: likewise, (virtual time, weights), if they were asked for.
    """

    sync: str
    seed: int
    servers: int
    finished_s: tuple[float, ...]
    measures: Measures
    staleness: list[int]
    bytes_by_kind: dict[str, int]
    events: int
    computed_s: float
    wasted_s: float
    trace: list[Trace]
    records: list[list[IterationRecord]]
    state_dict: dict[str, torch.Tensor] | None = None
    history: list[Loss] | None = None
    snapshots: list[tuple[float, WeightsSnapshot]] = []

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
            UsageError: the run was simulated with `record=False`.
        """
        if not self.trace:
            raise UsageError("this run has kept no traces; simulate it with record=True to save it.")
        require_usable(run_dir)
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        for trace in self.trace:
            header = trace.header
            name = f"shard-{header.index}" if header.host == "shard" else header.host
            recorder = Recorder.to_path(folder / f"trace-{name}.jsonl", header)
            for entry in trace.entries:
                recorder.record(entry)
            recorder.close()
        encoder = msgspec.json.Encoder()
        for worker, records in enumerate(self.records):
            lines = b"".join(encoder.encode(record) + b"\n" for record in records)
            (folder / f"worker-{worker}.jsonl").write_bytes(lines)
        (folder / "summary.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(self.summary), indent=2) + b"\n"
        )
        return folder

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of the run in plain types, under the names that a live run's have."""
        return {
            "sync": self.sync,
            "workers": len(self.measures.iterations),
            "servers": self.servers,
            "shards": len([trace for trace in self.trace if trace.header.host == "shard"]),
            "seed": self.seed,
            "emulated": "simulated in virtual time",
            "lost_workers": [],
            "faults": [],
            "wasted_s": self.wasted_s,
            **msgspec.to_builtins(self.measures, str_keys=True),
        }

"""What a job in virtual time knows of one of its workers."""

from __future__ import annotations

from ..core.worker import Flags, WorkerSync
from ..trace.records import IterationRecord
from .network import Connection
from .times import Sample

__all__ = ["WorkerState"]


class WorkerState:
    """Where one worker is, and what its iterations came to."""

    __slots__ = (
        "attempt",
        "awaited",
        "begun_s",
        "committed",
        "computed_ns",
        "computing",
        "droppable",
        "dropped_s",
        "finished_s",
        "flags",
        "from_coordinator",
        "from_server",
        "life",
        "loss",
        "present",
        "pushed_s",
        "restarted",
        "sample",
        "started_ns",
        "sync",
        "to_coordinator",
        "to_server",
        "wasted_s",
    )

    def __init__(self) -> None:
        self.sync: WorkerSync
        self.sample: Sample
        self.to_server: list[Connection]
        self.from_server: list[Connection]
        self.to_coordinator: Connection
        self.from_coordinator: Connection
        self.present = False
        self.attempt = 0  # counts computations: what belongs to a former one is ignored
        self.computing = False
        self.droppable = True  # may what it computes be dropped
        self.awaited = 0  # how many shards have yet to answer
        self.committed = 0  # without overlap: how many have yet to confirm
        self.begun_s = 0.0
        self.pushed_s = 0.0
        self.loss: float | None = None
        self.finished_s = 0.0  # its last iteration
        self.flags = Flags(None, None, False)
        self.dropped_s: float | None = None
        self.restarted: tuple[float, float] | None = None
        self.started_ns = 0  # when the computation at hand was
        self.computed_ns = 0  # of all that were not dropped
        self.wasted_s = 0.0  # what it computed in vain, with the pulls after it
        self.life = 0  # how often it was lost: what belongs to a former life is ignored

    def record(self, now_s: float) -> IterationRecord:
        """Of the iteration that ends now."""
        stop, change, *_ = self.flags
        dropped_s, restarted_s = self.restarted or (None, None)
        return IterationRecord(
            self.sync.iteration,
            self.begun_s,
            self.pushed_s,
            self.pushed_s,
            now_s,
            self.loss,
            stop.superstep if stop is not None else None,
            change.number if change is not None else None,
            dropped_s,
            restarted_s,
        )

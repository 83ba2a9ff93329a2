"""What a job in virtual time knows of one of its workers, besides the core of the worker."""

from __future__ import annotations

from ..core.worker import Worker
from ..trace.records import IterationRecord
from .network import Connection
from .times import Sample

__all__ = ["WorkerState"]


class WorkerState:
    """Where one worker is, and what its iterations have cost.

    Attributes:
        core: the protocol of the worker; another one after each return.
        sample: draws the time of an iteration.
        to_server: the connections to the servers.
        from_server: the connections from the servers.
        to_coordinator: the connection to the coordinator.
        from_coordinator: the connection from the coordinator.
        life: number of times that it was lost. What belongs to an earlier life is ignored.
        attempt: number of computations that it has begun. The end of an earlier one is ignored.
        computing: True while it computes.
        droppable: True if the computation at hand may be aborted.
        started_ns: when that computation started.
        begun_s: when the weights for the iteration at hand were there.
        pushed_s: when the last push was sent.
        loss: of the last push.
        dropped_s: when a computation was aborted, until the weights for its restart are there.
        restarted: (aborted, restarted) of the iteration at hand.
        finished_s: when its last iteration ended.
        computed_ns: time of all computations that were not aborted.
        wasted_s: time of the aborted computations, with the pulls after them.
    """

    __slots__ = (
        "attempt",
        "begun_s",
        "computed_ns",
        "computing",
        "core",
        "droppable",
        "dropped_s",
        "finished_s",
        "from_coordinator",
        "from_server",
        "life",
        "loss",
        "pushed_s",
        "restarted",
        "sample",
        "started_ns",
        "to_coordinator",
        "to_server",
        "wasted_s",
    )

    def __init__(self) -> None:
        self.core: Worker
        self.sample: Sample
        self.to_server: list[Connection]
        self.from_server: list[Connection]
        self.to_coordinator: Connection
        self.from_coordinator: Connection
        self.life = 0
        self.attempt = 0
        self.computing = False
        self.droppable = True
        self.started_ns = 0
        self.begun_s = 0.0
        self.pushed_s = 0.0
        self.loss: float | None = None
        self.dropped_s: float | None = None
        self.restarted: tuple[float, float] | None = None
        self.finished_s = 0.0
        self.computed_ns = 0
        self.wasted_s = 0.0

    def record(self, now_s: float) -> IterationRecord:
        """Return the record of the iteration that ends now."""
        commit = self.core.last_commit
        assert commit is not None
        dropped_s, restarted_s = self.restarted or (None, None)
        return IterationRecord(
            commit.iteration,
            self.begun_s,
            self.pushed_s,
            self.pushed_s,
            now_s,
            self.loss,
            commit.stop.superstep if commit.stop is not None else None,
            commit.change.number if commit.change is not None else None,
            dropped_s,
            restarted_s,
        )

"""The state that a simulated job keeps for each worker, in addition to the worker's protocol core."""

from __future__ import annotations

import msgspec

from ..core.metrics.time_spent import Lap, Stopwatch
from ..core.protocol.requests import worker_peer
from ..core.worker import Worker
from ..trace.records import IterationRecord
from .network_interfaces import Connection
from .racks import Pauses
from .times import Sample

__all__ = ["VirtualWorker"]


class VirtualWorker:
    """The state of one worker in a simulated job, and the times of its current iteration. All times are virtual.

    Attributes:
        core: the worker's protocol core, which is replaced each time the worker joins again.
        sample: function that draws the compute time of an iteration.
        outside: function that draws the time before an iteration in which the script does not train.
        outside_of: the iteration for which this time was drawn last.
        lap: what the worker did in the last iteration until its push.
        pauses: the pauses that strike the worker.
        to_server: connection to each server.
        from_server: connection from each server.
        to_coordinator: connection to the coordinator.
        from_coordinator: connection from the coordinator.
        peer: address of the worker in the protocol.
        life: number of times that the worker was lost. Messages and events with a lower number are ignored.
        attempt: number of the current computation. Events of earlier computations are ignored.
        computing: True while the worker computes.
        droppable: True if the current computation may be aborted.
        started_ticks: time at which the current computation began, in ticks.
        begun_s: time at which the weights for the current iteration arrived.
        pushed_s: time at which the last push was sent.
        loss: loss that was reported with the last push.
        loss_follows: True if the script logs this loss after the push.
        unrecorded: the record of the last iteration, if it waits for its loss.
        dropped_s: time at which the current computation was aborted; None once the weights for its restart arrive.
        refreshing: True while the worker pulls without having pushed, because its script evaluates the model.
        standing_in: True from a push that the worker makes while its script waits in a barrier or a reduction, until
            the weights arrive.
        pulls_rounded: True if the weights that the worker pulls are rounded on their way.
        joining: True while the worker joins a run in progress, until its weights arrive.
        restarted: pair (time of the abort, time of the restart) for the current iteration; None without a restart.
        finished_s: time at which the most recent iteration ended.
        ticks_per_s: number of ticks per second.
        stopwatch: measures what the worker spends its time on since it has joined.
    """

    __slots__ = (
        "attempt",
        "begun_s",
        "computing",
        "core",
        "droppable",
        "dropped_s",
        "finished_s",
        "from_coordinator",
        "from_server",
        "joining",
        "lap",
        "life",
        "loss",
        "loss_follows",
        "outside",
        "outside_of",
        "pauses",
        "peer",
        "pulls_rounded",
        "pushed_s",
        "refreshing",
        "restarted",
        "sample",
        "standing_in",
        "started_ticks",
        "stopwatch",
        "ticks_per_s",
        "to_coordinator",
        "to_server",
        "unrecorded",
    )

    def __init__(self, index: int, ticks_per_s: int) -> None:
        self.core: Worker
        self.ticks_per_s = ticks_per_s
        self.peer = worker_peer(index)
        self.sample: Sample
        self.outside: Sample | None = None
        self.outside_of = -1
        self.lap = Lap()
        self.pauses: list[Pauses] = []
        self.to_server: list[Connection]
        self.from_server: list[Connection]
        self.to_coordinator: Connection
        self.from_coordinator: Connection
        self.life = 0
        self.attempt = 0
        self.computing = False
        self.droppable = True
        self.started_ticks = 0
        self.begun_s = 0.0
        self.pushed_s = 0.0
        self.loss: float | None = None
        self.loss_follows = False
        self.pulls_rounded = False
        self.unrecorded: IterationRecord | None = None
        self.dropped_s: float | None = None
        self.refreshing = False
        self.standing_in = False
        self.joining = False
        self.restarted: tuple[float, float] | None = None
        self.finished_s = 0.0
        self.stopwatch = Stopwatch(now_ticks=0)

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
            outside_s=self._noted(self.lap.outside),
            loading_s=self._noted(self.lap.loading),
            begins_pass=(self.core.data.begins_pass and not commit.empty) or msgspec.UNSET,
        )

    def _noted(self, ticks: int) -> float | msgspec.UnsetType:
        """Return a time as it is recorded."""
        return ticks / self.ticks_per_s if ticks else msgspec.UNSET

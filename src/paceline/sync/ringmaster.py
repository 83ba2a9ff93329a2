"""Ringmaster ASGD: as in ASP, each push is applied on arrival, but a push that is too outdated is dropped.

The *delay* of a gradient is its staleness: the number of updates since its worker received the weights. A
gradient is applied if its delay is below a threshold R, and dropped otherwise. With `stop=true`, the computation of a
gradient whose delay has reached R is not even finished: the coordinator counts the updates, and tells the worker to
discard its computation, to pull, and to start the same batch again.

Reference: Maranjyan, Tyurin and Richtarik, "Ringmaster ASGD: the first asynchronous SGD with optimal time complexity",
ICML 2025; the paper describes the version without stops first, and then the version with stops.
Admission: Every pull is answered on arrival.
State: None at the shard. With `stop=true`, the coordinator counts the updates since each worker last started an
iteration.
Guarantee: No worker ever waits, and the delay of every gradient that is applied is below R. If worker i needs tau_i
seconds for each gradient, tau_1 <= tau_2 <= ..., then any R updates in a row take at most the minimum over m of 2 (1/m
sum_{i <= m} 1/tau_i)^-1 (1 + R/m) seconds. With R = 1, the model applies only gradients of staleness 0.
Use: When some workers are so slow that their gradients harm the progress of other workers. The paper's theory
recommends R = max(1, sigma^2 / epsilon), where sigma^2 is the variance of a gradient and epsilon the squared norm of
the gradient at which training ends. The model needs a single shard: `--servers 1`.
Deviations: The coordinator learns of an update a moment after it was applied, and does not learn when a restarted
worker pulls. So a computation may be stopped slightly late, or, after a restart, slightly before its delay reaches R.
Only the shard, which knows the exact delay, decides which gradients are applied.

>>> from paceline.sync.events import PushReceived, WorkerJoined
>>> shard = Ringmaster(threshold=2).at_shard()
>>> for worker in (0, 1):
...     _ = shard.handle(WorkerJoined(now_ticks=0, worker=worker))
>>> shard.handle(PushReceived(now_ticks=3, worker=1, iteration=0, staleness=1))
[ApplyPush(worker=1, iteration=0, scale=1.0)]
>>> shard.handle(PushReceived(now_ticks=4, worker=0, iteration=0, staleness=2))
[DropPush(worker=0, iteration=0)]
"""

from __future__ import annotations

from ..errors import InternalError
from ..state import stateful
from .actions import AnswerPull, AnyAction, ApplyPush, DropPush, RestartWorker
from .events import (
    IterationFinished,
    IterationStarted,
    PullRequested,
    PushReceived,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from .model import JobMachine, OneShardModel, ShardMachine, require_count


class Ringmaster(OneShardModel):
    """Ringmaster ASGD.

    Attributes:
        threshold: R, an integer >= 1. A push is applied if its staleness is below R.
        stop: true to abort and restart a computation as soon as its delay reaches R; false (the default) to finish
            it, and drop the push. Only a computation in a closure of `optimizer.step` can be aborted.
    """

    name = "ringmaster"
    style = "#543005", 2
    shown = ("ringmaster:threshold=4", "ringmaster:threshold=4,stop=true")

    threshold: int
    stop: bool = False

    def __post_init__(self) -> None:
        require_count(self.name, "threshold", self.threshold, 1)

    @property
    def needs_starts(self) -> bool:
        return self.stop

    def at_shard(self, seed: int = 0, shard: int = 0) -> Filter:
        return Filter(self.threshold)

    def at_coordinator(self, seed: int = 0) -> Stopper | None:
        return Stopper(self.threshold) if self.stop else None


@stateful(fixed="_threshold")
class Filter(ShardMachine):
    """The state machine of the shard: it drops outdated pushes."""

    def __init__(self, threshold: int) -> None:
        super().__init__()
        self._threshold = threshold

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        if push.empty or (push.staleness or 0) >= self._threshold:
            return [DropPush(push.worker, push.iteration)]
        return [ApplyPush(push.worker, push.iteration)]

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        return [AnswerPull(pull.worker, pull.iteration)]


@stateful()
class Computation:
    """The coordinator's record of a live worker's current computation."""

    def __init__(self, iteration: int, *, running: bool) -> None:
        self.iteration = iteration
        self.running = running  # False until the worker reports that it has started
        self.attempt = 0  # number of times that the iteration was restarted
        self.delay = 0  # number of updates since the weights were sent to the worker, at most R


@stateful(fixed="_threshold")
class Stopper(JobMachine):
    """The state machine of the coordinator: it restarts computations whose delay has reached R.

    A worker's report that it has pushed counts as an update if the delay of its computation was below R. If the
    worker pushed before an order to restart reached the worker, the delay is taken to be R.

    The delay of a restarted computation is counted from the order. Updates that are applied between the order and the
    worker's pull are part of the weights that the worker receives, but are counted nevertheless.
    """

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._computations: dict[int, Computation] = {}  # live worker -> its current computation

    def finished(self, event: IterationFinished) -> list[AnyAction]:
        computation = self._computations[event.worker]
        applied = event.attempt == computation.attempt and computation.delay < self._threshold
        # The worker's next weights contain this push and all earlier pushes.
        self._computations[event.worker] = Computation(event.iteration + 1, running=False)
        return self._count_update(event.worker) if applied else []

    def started(self, event: IterationStarted) -> list[AnyAction]:
        self._computations[event.worker].running = True
        return self._stop_if_outdated(event.worker)

    def joined(self, event: WorkerJoined) -> list[AnyAction]:
        self._computations[event.worker] = Computation(event.iteration, running=not event.pulls)
        return []

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        del self._computations[event.worker]
        return []

    def validate(self) -> None:
        if any(each.delay > self._threshold for each in self._computations.values()):
            raise InternalError(f"the delay of a computation is above the threshold {self._threshold}")

    def _count_update(self, pusher: int) -> list[AnyAction]:
        actions: list[AnyAction] = []
        for worker, computation in self._computations.items():
            if worker != pusher:
                computation.delay = min(computation.delay + 1, self._threshold)
                actions += self._stop_if_outdated(worker)
        return actions

    def _stop_if_outdated(self, worker: int) -> list[AnyAction]:
        computation = self._computations[worker]
        if not computation.running or computation.delay < self._threshold:
            return []
        order = RestartWorker(worker, computation.iteration, computation.attempt)
        computation.attempt += 1
        computation.delay = 0
        return [order]

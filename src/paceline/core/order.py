"""The order of each worker's events: what is legal now, whatever the sync model.

    at a shard            join -> push -> pull -> (answer) -> push -> ...      and at any time: lost, finished
    at the coordinator    join -> finished -> (started) -> finished -> ...

This is the only place that knows it. A host of a model asks `require`, which refuses and changes nothing, before the
model receives an event, and records the event when nothing can refuse it any more. So a model sees legal events only.

A worker's *label* is its own count of iterations. It rises by one with each push and is never used twice, not even
after the worker was lost and has returned. The model's count of pushes, c_p, is another number (see `Counts`).
"""

from __future__ import annotations

from collections.abc import KeysView, Sequence
from typing import Literal

from ..errors import InternalError, InvalidEventError
from ..sync.events import (
    AnyEvent,
    IterationFinished,
    IterationStarted,
    PullRepeated,
    PullRequested,
    PushReceived,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from ..sync.model import SyncModel

__all__ = ["Order", "Phase", "ReportOrder"]

Phase = Literal["computing", "pushed", "waiting"]
"""What a live worker is doing: computing its iteration, about to pull, or waiting for the answer to its pull."""


# Kind of event -> how a refusal names it, the phase that it needs, and how far its label is behind the next push's.
STEPS: dict[type[AnyEvent], tuple[str, str, Phase, int]] = {
    PushReceived: ("sent a push", "of", "computing", 0),
    PullRequested: ("sent a pull", "of", "pushed", 1),
    PullRepeated: ("pulled again", "for", "computing", 0),
}


class Order:
    """The phase and the label of every live worker at one shard.

    Attributes:
        label: live worker -> the iteration that its next push carries, in order of joining.
        phase: live worker -> what it is doing.
    """

    def __init__(self) -> None:
        self.label: dict[int, int] = {}
        self.phase: dict[int, Phase] = {}
        self._former: dict[
            int, int
        ] = {}  # worker that has left -> the smallest label that it may return with

    def require(self, event: AnyEvent) -> None:
        """Raise `InvalidEventError` if this event is not legal now."""
        step = STEPS.get(type(event))
        if step is None:
            self._require_other(event)
            return
        verb, of, needed, behind = step
        worker, iteration = event.worker, event.iteration  # type: ignore[union-attr]
        phase = self.phase.get(worker)
        if phase != needed:
            self._require_live(event)
            raise InvalidEventError(f"worker {worker} {verb} while it was {phase!r} (expected {needed!r})")
        if iteration != self.label[worker] - behind:
            expected = self.label[worker] - behind
            raise InvalidEventError(f"worker {worker} {verb} {of} iteration {iteration}, expected {expected}")

    def advance(self, event: AnyEvent) -> None:
        """Record a legal event."""
        kind, worker = type(event), event.worker
        if kind is PushReceived:
            self.label[worker] += 1
            self.phase[worker] = "pushed"
        elif kind is PullRequested:
            self.phase[worker] = "waiting"
        elif kind is WorkerJoined:
            self.label[worker] = event.iteration  # type: ignore[union-attr]
            self.phase[worker] = "computing"
        elif kind is WorkerLost or kind is WorkerFinished:
            self._former[worker] = self.label.pop(worker)
            del self.phase[worker]

    def answered(self, worker: int) -> None:
        """Record that a worker's pull is answered."""
        if self.phase.get(worker) != "waiting":
            raise InternalError(f"the sync model answered a pull that worker {worker} had not requested")
        self.phase[worker] = "computing"

    def validate(self) -> None:
        """Cross-check labels against phases; raise `InternalError` where they differ."""
        if self.label.keys() != self.phase.keys():
            raise InternalError(f"labels {self.label} and phases {self.phase} are of different workers")

    def _require_other(self, event: AnyEvent) -> None:
        if isinstance(event, WorkerJoined):
            self._require_new(event)
        elif isinstance(event, WorkerLost | WorkerFinished):
            self._require_live(event)
        elif not isinstance(event, TimerFired):
            raise InternalError(f"a shard does not take a {type(event).__name__}", (event,))

    def _require_live(self, event: AnyEvent) -> None:
        if event.worker not in self.phase:
            raise InvalidEventError(f"{type(event).__name__} of worker {event.worker}, which is not live")

    def _require_new(self, event: WorkerJoined) -> None:
        worker = event.worker
        if worker in self.phase:
            raise InvalidEventError(f"worker {worker} joined, but it is live already")
        if event.iteration < self._former.get(worker, 0):
            raise InvalidEventError(
                f"worker {worker} returned with iteration {event.iteration}, expected at least "
                f"{self._former[worker]}"
            )


UNKNOWN = -1


class Reporter:
    """What a live worker reports to the coordinator, and how far it is.

    Attributes:
        label: the iteration that it finishes next; -1 if that is not known.
        computing: False if it must report the start of that iteration first.
        finishes: True if it reports every finished iteration.
        starts: True if it reports the start of every iteration but its first.
    """

    def __init__(self, models: Sequence[SyncModel]) -> None:
        self.label = UNKNOWN
        self.computing = True
        self.follow(models)

    def follow(self, models: Sequence[SyncModel]) -> None:
        """Report as these models ask."""
        self.finishes = models[0].at_coordinator() is not None
        self.starts = any(model.needs_starts for model in models)

    def compute(self, iteration: int) -> None:
        """Compute an iteration; the coordinator loses count of a worker that does not report every iteration."""
        self.computing = True
        self.label = iteration if self.finishes else UNKNOWN


class ReportOrder:
    """What each live worker may report to the coordinator next.

        join -> finished -> (started) -> finished -> ...        and at any time: lost, finished its work

    Whether starts are reported, and whether iterations are at all, depends on the model that the worker runs under.
    The first start after a change of the model is always reported.
    """

    def __init__(self) -> None:
        self._reporters: dict[int, Reporter] = {}

    @property
    def live(self) -> KeysView[int]:
        """The live workers, in order of joining."""
        return self._reporters.keys()

    def require(self, event: AnyEvent) -> None:
        """Raise `InvalidEventError` if this event is not legal now."""
        if isinstance(event, TimerFired):
            return
        worker, reporter = event.worker, self._reporters.get(event.worker)
        if isinstance(event, WorkerJoined):
            if reporter is not None:
                raise InvalidEventError(f"worker {worker} joined, but it is live already")
        elif reporter is None:
            raise InvalidEventError(f"{type(event).__name__} of worker {worker}, which is not live")
        elif isinstance(event, IterationFinished):
            finished = f"worker {worker} finished iteration {event.iteration}"
            if reporter.label not in (UNKNOWN, event.iteration):
                raise InvalidEventError(f"{finished}, expected {reporter.label}")
            if not reporter.computing:
                raise InvalidEventError(f"{finished}, which it has yet to start")
        elif isinstance(event, IterationStarted):
            started = f"worker {worker} started iteration {event.iteration}"
            if reporter.computing and not reporter.starts:
                raise InvalidEventError(f"{started}, which its sync model does not ask for")
            if event.iteration != reporter.label:
                raise InvalidEventError(f"{started}, expected {reporter.label}")
            if reporter.computing:
                raise InvalidEventError(f"{started}, which it has started already")
        elif isinstance(event, PushReceived | PullRequested | PullRepeated):
            raise InternalError(f"a coordinator does not take a {type(event).__name__}", (event,))

    def joined(self, event: WorkerJoined, models: Sequence[SyncModel]) -> None:
        """Record a worker that joins under these models."""
        reporter = self._reporters[event.worker] = Reporter(models)
        reporter.compute(event.iteration)

    def finished(self, event: IterationFinished, models: Sequence[SyncModel] = ()) -> None:
        """Record a finished iteration; the last one before a change to these models, if there are any."""
        reporter = self._reporters[event.worker]
        if models:
            reporter.follow(models)
        if models or reporter.starts:
            reporter.computing, reporter.label = False, event.iteration + 1
        else:
            reporter.compute(event.iteration + 1)

    def started(self, event: IterationStarted) -> None:
        """Record the start of an iteration."""
        self._reporters[event.worker].compute(event.iteration)

    def left(self, event: WorkerLost | WorkerFinished) -> None:
        """Record that a worker has left."""
        del self._reporters[event.worker]

"""The legal order of each worker's events, which is the same for all sync models.

    at a shard            join -> push -> pull -> (answer) -> push -> ...
                          join (a run in progress) -> pull -> (answer) -> push -> pull -> ...
    at the coordinator    join -> finished iteration -> (started iteration) -> finished iteration -> ...
    at any time           worker lost, worker finished

Only this module checks the order. Before an event is passed to a model, `require` checks the event: if it is illegal,
an error is raised and no state changes. When all checks have passed, `advance` records the event. Therefore a model
receives only legal events.

A worker's *label* is the worker's own count of iterations. The label increases by one with each push, and no label is
used twice, not even after the worker was lost and has joined again. c_p, the model's count of pushes, is a different
number (see `Counts`).
"""

from __future__ import annotations

from collections.abc import KeysView, Sequence
from typing import Literal

from ..errors import InternalError, InvalidEventError
from ..state import stateful
from ..sync.events import (
    AnyEvent,
    IterationFinished,
    IterationStarted,
    PullRepeated,
    PullRequested,
    PushReceived,
    TimerFired,
    WorkerFenced,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from ..sync.model import SyncModel

Phase = Literal["computing", "pushed", "waiting"]
"""The phase of a live worker: computing its iteration, about to pull, or waiting for the answer to its pull."""


# Type of event -> verb and preposition for error messages, the phase that the event requires, and the required
# difference between the label of the worker's next push and the label of the event.
STEPS: dict[type[AnyEvent], tuple[str, str, Phase, int]] = {
    PushReceived: ("sent a push", "of", "computing", 0),
    PullRequested: ("sent a pull", "of", "pushed", 1),
    PullRepeated: ("pulled again", "for", "computing", 0),
}


@stateful(about={"_former": "returns"})
class Order:
    """The phase and the label of every live worker at one shard.

    Attributes:
        label: live worker -> label of its next push. The workers are in order of joining.
        phase: live worker -> its phase.
    """

    def __init__(self) -> None:
        self.label: dict[int, int] = {}
        self.phase: dict[int, Phase] = {}
        # worker that has left -> the smallest label that the worker may use if it joins again
        self._former: dict[int, int] = {}

    def require(self, event: AnyEvent) -> None:
        """Raise `InvalidEventError` if this event is not legal now."""
        step = STEPS.get(type(event))
        if step is None:
            self._require_other(event)
            return
        verb, preposition, needed, behind = step
        worker, iteration = event.worker, event.iteration  # type: ignore[union-attr]
        phase = self.phase.get(worker)
        if phase != needed:
            self._require_live(event)
            raise InvalidEventError(f"worker {worker} {verb} while it was {phase!r} (expected {needed!r})")
        if iteration != self.label[worker] - behind:
            expected = self.label[worker] - behind
            raise InvalidEventError(
                f"worker {worker} {verb} {preposition} iteration {iteration}, expected {expected}"
            )

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
            self.phase[worker] = "pushed" if event.pulls else "computing"  # type: ignore[union-attr]
        elif kind is WorkerLost or kind is WorkerFinished:
            self._former[worker] = self.label.pop(worker)
            del self.phase[worker]

    def first_label(self, worker: int) -> int:
        """Return the smallest label with which a worker that is not live may join.

        If the worker has been live before, one label is left out, so that its first pull also has a new label.
        """
        return self._former.get(worker, -1) + 1

    def last_label(self, worker: int) -> int:
        """Return the label of a worker's last push, even if the worker has left; -1 if the worker has made no push.

        If the worker has joined again and has not pushed since, return the label before its first push.
        """
        return self.label.get(worker, self._former.get(worker, 0)) - 1

    def answered(self, worker: int) -> None:
        """Record that a worker's pull was answered."""
        if self.phase.get(worker) != "waiting":
            raise InternalError(f"the sync model answered a pull that worker {worker} had not requested")
        self.phase[worker] = "computing"

    def validate(self) -> None:
        """Raise `InternalError` if the labels and the phases are not stored for the same workers."""
        if self.label.keys() != self.phase.keys():
            raise InternalError(f"labels {self.label} and phases {self.phase} belong to different workers")

    def _require_other(self, event: AnyEvent) -> None:
        if isinstance(event, WorkerJoined):
            self._require_new(event)
        elif isinstance(event, WorkerFenced | WorkerLost | WorkerFinished):
            self._require_live(event)
        elif not isinstance(event, TimerFired):
            raise InternalError(f"a shard cannot process the event {type(event).__name__}", (event,))

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


@stateful()
class Reporter:
    """The coordinator's record of one live worker: which report the worker may send next.

    Attributes:
        label: label of the iteration that the worker finishes next; -1 if unknown.
        computing: False if the worker must report the start of its next iteration before it reports the end.
        finishes: True if the worker reports every finished iteration.
        starts: True if the worker reports the start of every iteration. A worker that is present from the beginning
            of the run does not report the start of its first iteration.
    """

    def __init__(self, models: Sequence[SyncModel]) -> None:
        self.label = UNKNOWN
        self.computing = True
        self.follow(models)

    def follow(self, models: Sequence[SyncModel]) -> None:
        """Store which reports these models require of the worker."""
        self.finishes = models[0].at_coordinator() is not None
        self.starts = any(model.needs_starts for model in models)

    def compute(self, iteration: int) -> None:
        """Record that the worker computes `iteration`. The label is known only if all iterations are reported."""
        self.computing = True
        self.label = iteration if self.finishes else UNKNOWN


@stateful()
class ReportOrder:
    """Checks the order of the reports that the live workers send to the coordinator.

    The model in force determines whether a worker reports started iterations, and whether it reports finished
    iterations. After a change of the model, a worker always reports the start of its next iteration.
    """

    def __init__(self) -> None:
        self._reporters: dict[int, Reporter] = {}

    @property
    def live(self) -> KeysView[int]:
        """The live workers, in order of joining."""
        return self._reporters.keys()

    def label(self, worker: int) -> int:
        """Return the iteration that a live worker finishes next; -1 if unknown."""
        return self._reporters[worker].label

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
            if reporter.label != event.iteration and reporter.label != UNKNOWN:
                raise _unexpected("finished", event, f"expected {reporter.label}")
            if not reporter.computing:
                raise _unexpected("finished", event, "which it has yet to start")
        elif isinstance(event, IterationStarted):
            if reporter.computing and not reporter.starts:
                reason = "but its sync model does not ask for reports of started iterations"
                raise _unexpected("started", event, reason)
            if event.iteration != reporter.label:
                raise _unexpected("started", event, f"expected {reporter.label}")
            if reporter.computing:
                raise _unexpected("started", event, "which it has started already")
        elif isinstance(event, PushReceived | PullRequested | PullRepeated):
            raise InternalError(f"a coordinator cannot process the event {type(event).__name__}", (event,))

    def joined(self, event: WorkerJoined, models: Sequence[SyncModel]) -> None:
        """Record that a worker joins while these models are in force."""
        reporter = self._reporters[event.worker] = Reporter(models)
        reporter.compute(event.iteration)
        if event.pulls and reporter.starts:
            reporter.computing, reporter.label = False, event.iteration

    def finished(self, event: IterationFinished, models: Sequence[SyncModel] = ()) -> None:
        """Record a finished iteration. If `models` is given, the worker then changes to these models."""
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


def _unexpected(verb: str, event: IterationFinished | IterationStarted, reason: str) -> InvalidEventError:
    return InvalidEventError(f"worker {event.worker} {verb} iteration {event.iteration}, {reason}")

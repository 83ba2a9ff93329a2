"""The coordinator's part of the sync model: it runs the coordinator's state machine and publishes model changes.

Only one change is in progress at a time: the next change is published when the current one is complete at all shards
(see `core.shard`). The current change is known to be complete once a worker that has passed the boundary of this change
starts its next iteration, because every shard has then answered that worker. If all workers that have passed the
boundary are lost before any of them starts its next iteration, it is unknown which shards have changed, and the change
is published again to all workers.

No worker joins while a change is in progress: the coordinator lets the new worker wait (`Coordinator.admit`), and
postpones requests for changes while a worker joins.

Requests for changes wait here, and not in `core.reconfiguration`, because these requests are recorded. A trace contains
each request as an event when it is made, and the published changes as the actions of events. The replay of a trace
knows nothing of joins and extensions, but must return the same actions to the same events. A replay may also begin with
a state that was recorded in the middle of a run. This state contains the waiting requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ..errors import InternalError, InvalidEventError
from ..state import stateful
from ..sync.actions import AnyAction, PublishChange
from ..sync.events import (
    AnyEvent,
    Change,
    IterationFinished,
    IterationStarted,
    SyncRequested,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from ..sync.model import JobMachine, SyncModel
from ..sync.notation import parse_shards
from ..sync.plugins import blaming
from ..sync.ticks import TICKS_PER_S
from .order import ReportOrder

MOST_REQUESTED = 1000  # maximum number of requested changes that have not been published yet


@stateful(fixed="_first _seed _ticks_per_s", makes={"_machine": "_new_machine"})
class JobSync:
    """The coordinator's part of the sync model, for the whole run. A change of the model replaces the state machine.

    Args:
        sync: the first model, or one model per shard, in the notation of the command line.
        seed: random seed for the run.
        ticks_per_s: number of ticks per second (see `paceline.sync.ticks`).

    Attributes:
        sync: the model in force, or the next one while a change is in progress; "" if the model is unknown.
        changes: number of published changes.
    """

    def __init__(self, sync: str, seed: int = 0, ticks_per_s: int = TICKS_PER_S) -> None:
        self.sync = self._first = sync
        self.changes = 0
        self._seed = seed
        self._ticks_per_s = ticks_per_s
        self._machine: JobMachine | None = self._new_machine()
        self._order = ReportOrder()
        # source -> number of the last request from this source
        self._seen = dict.fromkeys(("schedule", "script", "auto"), -1)
        self._requested: deque[str] = deque()  # requested models that are not published yet
        self._change: Change | None = None  # the change in progress
        self._certain = False  # True once every shard is known to have made the change
        self._remaining: set[int] = set()  # members that have not passed the change's boundary yet
        # member that has passed the boundary -> the event that adds the member to the new model
        self._passed: dict[int, WorkerJoined] = {}
        # events of members that have passed the boundary, kept until the new model starts
        self._early: list[AnyEvent] = []
        # workers that have passed a change's boundary but have not reported the start of an iteration since then
        self._to_start: set[int] = set()

    @property
    def model(self) -> SyncModel:
        """The model whose state machine decides; the model of shard 0 if the shards have different models."""
        return parse_shards(self.sync or self._first)[0]

    @property
    def machine(self) -> JobMachine | None:
        """The state machine of the model; None if the model has no state machine, and while a change is in progress."""
        return self._machine

    @machine.setter
    def machine(self, machine: JobMachine | None) -> None:
        self._machine = machine

    @property
    def next_superstep(self) -> int:
        """The first superstep for a worker that joins now; 0 if the model plans no barriers."""
        return self._machine.next_superstep if self._machine is not None else 0

    @property
    def next_request(self) -> int:
        """The number of the next change that a script requests."""
        return self._seen["script"] + 1

    @property
    def live(self) -> Iterable[int]:
        """The live workers, as far as this part of the run knows."""
        return self._order.live

    def label(self, worker: int) -> int:
        """Return the iteration that a live worker finishes next; -1 if it is unknown."""
        return self._order.label(worker)

    @property
    def changing(self) -> bool:
        """True while a change is in progress."""
        return self._change is not None

    def awaits(self, worker: int) -> bool:
        """Return True if the change in progress waits for the worker's last push under the old model."""
        return worker in self._remaining

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Process one event and return the resulting actions.

        Raises:
            InvalidEventError: the event is not allowed; the state is unchanged.
        """
        self._require(event)
        match event:
            case IterationFinished():
                return self._finish(event)
            case IterationStarted():
                self._order.started(event)
                if event.worker in self._to_start:
                    return self._start_first(event)
                return self._tell(event)
            case TimerFired():
                # The timer was set by the old model, so it is ignored during a change.
                return [] if self._change is not None else self._tell(event)
            case SyncRequested():
                return self._request(event)
            case WorkerJoined():
                return self._join(event)
            case WorkerLost() | WorkerFinished():
                return self._leave(event)
            case _:
                raise InternalError(
                    f"a coordinator cannot process the event {type(event).__name__}", (event,)
                )

    def validate(self) -> None:
        """Check that the collections of workers are consistent; raise `InternalError` if they are not."""
        live = self._order.live
        if self._machine is not None:
            self._machine.validate()
        if not self._to_start <= live:
            raise InternalError(
                f"workers {self._to_start} have yet to start an iteration, but only {set(live)} are live"
            )
        waiting = self._remaining or self._passed or self._early
        if self._change is None and (waiting or (self._requested and live)):
            raise InternalError("no change is in progress, but workers, events or requests wait for one")
        if self._change is not None and (
            self._remaining | self._passed.keys() != live or self._remaining & self._passed.keys()
        ):
            raise InternalError(
                f"the change {self._change} waits for workers {self._remaining}; workers {set(live)} are live"
            )

    # -- one event ----------------------------------------------------------------------------------------

    def _require(self, event: AnyEvent) -> None:
        """Raise `InvalidEventError` if the event is out of order, or if the model or the change does not allow it."""
        self._order.require(event)
        worker = event.worker
        if isinstance(event, WorkerJoined) and self._change is not None:
            raise InvalidEventError(f"worker {worker} joined during change {self._change.number}")
        if isinstance(event, IterationFinished) and event.change is not None:
            if self._change is None or event.change != self._change.number or worker not in self._remaining:
                raise InvalidEventError(
                    f"worker {worker} ended the model for change {event.change}, which does not wait for it"
                )
        elif isinstance(event, SyncRequested):
            self._require_next(event)
        elif worker in self._passed:
            if isinstance(event, IterationFinished) and event.superstep is not None:
                raise InvalidEventError(
                    f"worker {worker} stopped for superstep {event.superstep}, before there was a plan"
                )
        elif self._machine is not None:
            self._machine.check(event)

    def _require_next(self, event: SyncRequested) -> None:
        seen = self._seen[event.source]
        if event.number > seen + 1 or (event.number > seen and len(self._requested) >= MOST_REQUESTED):
            raise InvalidEventError(
                f"worker {event.worker} asks for change {event.number} of the {event.source}, expected at most "
                f"{seen + 1}, and at most {MOST_REQUESTED} changes that have not been published yet"
            )

    def _finish(self, event: IterationFinished) -> list[AnyAction]:
        if event.change is not None:
            return self._pass(event)
        self._order.finished(event)
        return self._tell(event)

    def _tell(self, event: AnyEvent) -> list[AnyAction]:
        """Pass an event to the state machine, or keep it for the new model if the worker has passed the boundary."""
        if event.worker in self._passed:
            self._early.append(event)
            return []
        return self._machine.handle(event) if self._machine is not None else []

    def _join(self, event: WorkerJoined) -> list[AnyAction]:
        self._order.joined(event, parse_shards(self.sync or self._first))
        return self._tell(event) + self._publish_next()

    def _leave(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        worker = event.worker
        self._order.left(event)
        self._to_start.discard(worker)
        if self._change is None:
            return self._tell(event)
        self._remaining.discard(worker)
        self._passed.pop(worker, None)
        self._early = [early for early in self._early if early.worker != worker]
        return self._complete()

    def _new_machine(self) -> JobMachine | None:
        models = parse_shards(self.sync)
        with blaming(models[0], "the coordinator", "at_coordinator"):
            machine = models[0].at_coordinator(self._seed) if len(set(models)) == 1 else None
            if machine is not None:
                machine.ticks_per_s = self._ticks_per_s
        return machine

    # -- changes ------------------------------------------------------------------------------------------

    def _request(self, event: SyncRequested) -> list[AnyAction]:
        if event.number <= self._seen[event.source]:
            return []  # another worker has already requested this change
        self._seen[event.source] = event.number
        self._requested.append(event.sync)
        return self._publish_next()

    def _publish_next(self) -> list[AnyAction]:
        while self._requested and self._change is None and self._order.live:
            sync = self._requested.popleft()
            if sync != self.sync:
                return self._publish(sync)
        return []

    def _publish(self, sync: str) -> list[AnyAction]:
        live = self._order.live
        self.sync = sync
        self.changes += 1
        self._change = Change(number=self.changes, members=tuple(sorted(live)), sync=sync)
        self._remaining = set(live)
        self._certain = False
        self._machine = None  # another plan from the old model would reach the workers too late
        return [PublishChange(self._change)]

    def _pass(self, event: IterationFinished) -> list[AnyAction]:
        """Record that a member has made its last push under the old model."""
        worker = event.worker
        self._order.finished(event, parse_shards(self.sync))
        self._remaining.remove(worker)
        self._passed[worker] = WorkerJoined(
            now_ticks=event.now_ticks, worker=worker, iteration=event.iteration + 1
        )
        self._to_start.add(worker)
        return self._complete()

    def _start_first(self, event: IterationStarted) -> list[AnyAction]:
        """Record that a worker starts its first iteration after a change, so every shard has answered this worker.

        The new model does not receive this event, because the worker joins the model with this iteration.
        """
        self._to_start.remove(event.worker)
        if event.worker not in self._passed:  # the worker has passed only an earlier change
            return []
        self._certain = True
        return self._complete()

    def _complete(self) -> list[AnyAction]:
        """If the change is over, start the new model, or repeat a change that a worker or a shard may have missed."""
        if self._remaining or (self._passed and not self._certain):
            return []
        passed, early = self._passed, self._early
        again = not self._certain
        self._change, self._passed, self._early = None, {}, []
        if again:
            sync, self.sync = self.sync, ""
            self._requested.appendleft(sync)
            return self._publish_next()
        self._machine = self._new_machine()
        actions: list[AnyAction] = []
        if self._machine is not None:
            for event in [*(passed[worker] for worker in sorted(passed)), *early]:
                actions += self._machine.handle(event)
        return actions + self._publish_next()


# -- When to try again to move gradients before a script has taken its step ----------------------------------

LONGEST_PAUSE = 256
"""Maximum number of iterations for which gradients are not moved early."""


class EarlyPause:
    """Suspends the early moving of gradients for a while, each time that a script has changed a moved gradient.

    Gradients are moved early if they are sent, or copied from the device, before the script calls `step()`. A script
    that clips its gradients after the backward pass changes them in every iteration, so moving them early saves no
    time. Each pause is twice as long as the pause before, up to `LONGEST_PAUSE`. If a script has not changed a moved
    gradient in an iteration after a pause, the next pause is short again.

    >>> pause = EarlyPause()
    >>> pause.ended(changed=True)
    >>> pause.is_on
    True
    >>> pause.ended(changed=False)
    >>> pause.is_on
    False
    """

    def __init__(self) -> None:
        self._left = 0  # number of remaining iterations of the pause
        self._next = 1

    @property
    def is_on(self) -> bool:
        """True if gradients are not moved early in the current iteration."""
        return self._left > 0

    def ended(self, *, changed: bool) -> None:
        """Record the end of an iteration.

        Args:
            changed: True if the script has changed a gradient after this gradient was moved.
        """
        if changed:
            self._left = self._next
            self._next = min(2 * self._next, LONGEST_PAUSE)
        elif self._left:
            self._left -= 1
        else:
            self._next = 1

"""Runs the sync model of one shard, and replaces the model during the run.

All shards must change the model at the same boundary. If two shards counted the progress of the workers from
different iterations, the workers could block each other: worker 0 could wait for worker 1 at one shard, and worker 1
for worker 0 at another. Therefore the workers determine the boundary. The coordinator publishes a change to all
workers that are live at this time, the change's *members*. Each member flags its next push with the change, in the
same way for all shards. This push is the worker's last one under the old model. No worker joins while a change is in
progress: the coordinator lets one wait for the other. Every live worker is in one of two states:

    in the model     the usual state
    passed           the worker has sent its flagged push. The old model has processed that push and was then told
                     that the worker has left, so the model no longer waits for the worker. The worker's pull waits
                     until every other worker has passed, finished or been lost. Then the workers that have passed
                     join the new model with equal counts, and their pulls are answered

The flagged pushes themselves mark the boundary, so all shards agree on the boundary even if the coordinator's message
arrives late. No push or pull goes through the coordinator. `JobSync` implements the coordinator's side.

A worker that had left when the change was published is not a member, but a shard may learn of its departure later
than of the change. The shard waits for this, too. Otherwise, a last push of that worker could belong to the old model
at one shard, and to the new one at another.

If a user-defined condition fails, only this shard falls back to the last model that worked, which continues with the
current counts. Pushes of lost workers that are held at this time, and that other shards may not have received, wait
for the coordinator's verdict.

Guarantee: If the run makes progress under both models, it also makes progress during the change. Each push is
applied, averaged or dropped exactly once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from ...errors import InternalError, InvalidEventError
from ...plugins.failures import blaming
from ...state import DECLARED, restore, snapshot, stateful
from ...sync.actions import AnswerPull, AnyAction, ApplyMean, ReportFault
from ...sync.asp import ASP
from ...sync.bsp import BSP
from ...sync.counts import Counts
from ...sync.events import (
    AnyEvent,
    Change,
    PullRepeated,
    PullRequested,
    PushReceived,
    TimerFired,
    WorkerFenced,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from ...sync.model import ShardMachine, SyncModel, without_torn
from ...sync.notation import parse_shards
from ...sync.ticks import TICKS_PER_S
from ..protocol.order import Order

__all__ = ["ShardSync"]


@stateful(
    decides=(
        "sync needs_staleness changed_to order at_once _machine _worked _change _changed _passed _orphans _to_pull"
    ),
    about={"at_once": "factors"},
    fixed="_seed _shard _ticks_per_s",
    makes={"_machine": "_new_machine"},
)
class ShardSync:
    """Runs the sync model of one shard, and replaces it when the model changes.

    Args:
        sync: the first model.
        seed: random seed for the run.
        shard: index of the shard.
        ticks_per_s: number of ticks per second (see `paceline.sync.ticks`).

    Attributes:
        sync: the model in force.
        needs_staleness: True if this model needs the staleness of each push.
        changed_to: the models of all shards after the last change that this shard completed; () before the first one.
        order: phases and labels of all live workers.
        at_once: the largest number of workers that have been present at once, under all models and in all runs of the
            job. The live workers include those that wait for a change.
    """

    def __init__(
        self, sync: SyncModel, seed: int = 0, shard: int = 0, ticks_per_s: int = TICKS_PER_S
    ) -> None:
        self.sync = sync
        self.needs_staleness = sync.needs_staleness
        self.changed_to: tuple[SyncModel, ...] = ()
        self.order = Order()
        self.at_once = 0
        self._seed = seed
        self._shard = shard
        self._ticks_per_s = ticks_per_s
        self._machine = self._new_machine()
        self._worked: SyncModel = BSP()  # the model to fall back to if a condition fails
        self._change: Change | None = None  # the change in progress
        self._changed = 0  # number of the last change that this shard completed
        self._passed: set[int] = set()  # workers that have passed the change in progress
        # Held pushes of frozen workers that a failed model has left, and the next one has not taken over:
        # (worker, iteration).
        self._orphans: list[tuple[int, int]] = []
        # workers that have passed a completed change but have not pulled yet; their pulls are answered on arrival
        self._to_pull: set[int] = set()

    @property
    def counts(self) -> Counts:
        """The push counts c_p of the workers that are in the model."""
        return self._machine.counts

    @property
    def machine(self) -> ShardMachine:
        """The state machine of the model."""
        return self._machine

    def last_iteration(self, worker: int) -> int:
        """Return the label of a live worker's last push."""
        return self.order.label[worker] - 1

    def entry(self, worker: int) -> tuple[int, int]:
        """Return the smallest label and the least c_p with which a worker could join now."""
        with self._blaming("entry"):
            return self.order.first_label(worker), self._machine.entry

    def holds(self, worker: int) -> bool:
        """Return True if a push of this worker is held, and other shards may not have received the push."""
        with self._blaming("holds"):
            return self._machine.holds(worker) or any(push[0] == worker for push in self._orphans)

    def may_join(self, count: int) -> bool:
        """Return True if a worker may still join with this c_p.

        No worker joins during a change, so a join that is announced then was given up before the change began.
        """
        with self._blaming("may_join"):
            return self._change is None and self._machine.may_join(count)

    def waits(self) -> dict[int, str]:
        """Return, for each worker with a delayed pull, a description of what the pull waits for."""
        undescribed = f"the sync model {self.sync}, which does not describe its delayed pulls"
        waits = dict.fromkeys(filter(self._waiting, self.order.phase), undescribed)
        with self._blaming("waits"):
            waits |= self._machine.waits()
        if self._change is not None:
            boundary = f"workers {sorted(self.counts.count)} to reach the change to {self._change.sync}"
            waits |= {worker: boundary for worker in self._passed if self._waiting(worker)}
        return waits

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Process one event and return the resulting actions.

        Raises:
            InvalidEventError: the event is not allowed; the state is unchanged.
        """
        self.order.require(event)
        if type(event) is PushReceived and event.change is not None:
            self._require_boundary(event, event.change)
        if type(event) is WorkerJoined and self._change is not None:
            raise InvalidEventError(f"worker {event.worker} joined during change {self._change.number}")
        self._machine.check(event)
        self.order.advance(event)  # all checks have passed, so the event can no longer be refused
        if type(event) is WorkerJoined:
            self.at_once = max(self.at_once, len(self.order.phase))
        return self._take(event)

    def validate(self) -> None:
        """Check that the collections of workers are consistent; raise `InternalError` if they are not."""
        self._machine.validate()
        self.order.validate()
        modelled, live = self.counts.count.keys(), self.order.phase.keys()
        if modelled | self._passed != live or len(modelled) + len(self._passed) != len(live):
            raise InternalError(
                f"the live workers {set(live)} do not match those in the model {set(modelled)} and those that have "
                f"passed {self._passed}"
            )
        if self._change is None and self._passed:
            raise InternalError(f"no change is in progress, but workers {self._passed} wait for one")
        if self._change is not None and not (modelled or self._machine.frozen):
            raise InternalError(f"every worker has passed, but the change {self._change} is in progress")
        if not {worker for worker, _ in self._orphans} <= self._machine.frozen:
            raise InternalError(
                f"the pushes {self._orphans} are held, but not all of their workers are frozen"
            )
        if any(self.order.phase[worker] != "pushed" for worker in self._to_pull):
            raise InternalError(
                f"workers {self._to_pull} have yet to pull, but the phases are {self.order.phase}"
            )

    def bind_again(self) -> None:
        """Replace a copied machine of a user by an equal one: one of its functions may refer to the original.

        The functions of a machine that declares its fields are its own methods, or do not refer to it.
        """
        if type(self._machine) in DECLARED:
            return
        state, self._machine = snapshot(self._machine), self._new_machine()
        restore(self._machine, state)

    # -- one event ----------------------------------------------------------------------------------------

    def _require_boundary(self, push: PushReceived, change: Change) -> None:
        ended = f"worker {push.worker} ended the model for change {change.number}"
        if push.worker not in change.members:
            raise InvalidEventError(f"{ended}, whose members are {change.members}")
        if self._change is not None and change.number < self._change.number:
            raise InvalidEventError(f"{ended} during change {self._change.number}")

    def _take(self, event: AnyEvent) -> list[AnyAction]:
        match event:
            case PushReceived():
                actions = self._tell(event)
                return actions if event.change is None else actions + self._pass(event, event.change)
            case PullRequested():
                return self._pull(event)
            case PullRepeated():
                return [AnswerPull(event.worker, event.iteration - 1)]
            case TimerFired():
                return self._tell(event)
            case WorkerJoined():
                return self._tell(event)
            case WorkerFenced():
                if self.holds(event.worker):
                    self._machine.frozen.add(event.worker)
                return []
            case WorkerLost() | WorkerFinished():
                return self._leave(event)
            case _:
                raise InternalError(f"a shard cannot process the event {type(event).__name__}", (event,))

    def _pull(self, pull: PullRequested) -> list[AnyAction]:
        worker = pull.worker
        if worker in self._passed:
            return []  # the pull is answered when the change is complete
        if worker in self._to_pull:
            self._to_pull.remove(worker)
            return [self._answer(worker)]
        return self._tell(pull)

    def _leave(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        worker = event.worker
        actions: list[AnyAction] = []
        if worker in self._machine.frozen and isinstance(event, WorkerLost):
            actions += self._settle_orphans(worker, event.kept)
            actions += self._checked(self._machine.settle(worker, event.kept), event.now_ticks)
        if worker in self.counts.count:
            actions += self._tell(event)
        self._passed.discard(worker)
        self._to_pull.discard(worker)
        return actions + self._complete(event.now_ticks)

    def _settle_orphans(self, worker: int, kept: int | None) -> list[AnyAction]:
        """Apply or drop the pushes of a lost worker that a failed model has left. See `ShardMachine.settle`."""
        own = [push for push in self._orphans if push[0] == worker]
        applied, dropped = without_torn(own, worker, kept)
        self._orphans = [push for push in self._orphans if push[0] != worker]
        means: list[AnyAction] = [ApplyMean(tuple(sorted(applied)))] if applied else []
        return means + dropped

    def _tell(self, event: AnyEvent) -> list[AnyAction]:
        """Pass an event to the model, and return the actions."""
        return self._checked(self._machine.handle(event), event.now_ticks)

    def _checked(self, actions: list[AnyAction], now_ticks: int) -> list[AnyAction]:
        """Return the model's actions. If a user's condition has failed, fall back to the last model that worked."""
        if (fault := self._machine.fault) is not None:
            self.sync = ASP() if self._worked.needs_plans else self._worked
            self.needs_staleness = self.sync.needs_staleness
            replacement = self._new_machine()
            actions.append(ReportFault(fault.reason, fault.traceback, str(self.sync)))
            replacement.frozen = frozen = self._machine.frozen
            handover = self._machine.hand_over()
            unsettled = [push for push in handover.held if push[0] in frozen]
            actions += replacement.take_over(handover, now_ticks)
            self._orphans += [push for push in unsettled if not replacement.holds(push[0])]
            self._machine, self._worked = replacement, BSP()
        for action in actions:
            if type(action) is AnswerPull:
                self.order.answered(action.worker)
        return actions

    # -- a change -----------------------------------------------------------------------------------------

    def _pass(self, push: PushReceived, change: Change) -> list[AnyAction]:
        """Handle a worker's last push under the old model."""
        if change.number <= self._changed:
            return []  # the change was completed without this worker, so no other worker waits for it
        worker = push.worker
        if self._change is None or self._change.number < change.number:
            # A higher number means that the coordinator has published the change again, because all members that had
            # passed the earlier change were lost.
            self._change = change
        self._passed.add(worker)
        # The old model keeps the pushes of a worker that leaves, but no longer waits for the worker.
        actions = self._tell(WorkerFinished(now_ticks=push.now_ticks, worker=worker))
        return actions + self._complete(push.now_ticks)

    def _complete(self, now_ticks: int) -> list[AnyAction]:
        """Start the new model if every live worker has passed the boundary.

        No push of a lost worker may be held, because the old model must apply all held pushes.
        """
        change = self._change
        if change is None or self.counts.count or self._machine.frozen:
            return []
        models = parse_shards(change.sync)
        self._worked, self.sync = self.sync, models[self._shard if len(models) > 1 else 0]
        self.needs_staleness = self.sync.needs_staleness
        self._machine = self._new_machine()
        answers: list[AnyAction] = []
        for worker, phase in sorted(self.order.phase.items()):
            self._tell(WorkerJoined(now_ticks=now_ticks, worker=worker, iteration=self.order.label[worker]))
            if phase == "waiting":
                answers.append(self._answer(worker))
            elif phase == "pushed":
                self._to_pull.add(worker)
        self._passed = set()
        self._change, self._changed, self.changed_to = None, change.number, models
        return answers

    def _new_machine(self) -> ShardMachine:
        with self._blaming("at_shard"):
            machine = self.sync.at_shard(self._seed, self._shard)
            machine.ticks_per_s = self._ticks_per_s
        return machine

    def _blaming(self, method: str) -> AbstractContextManager[None]:
        return blaming(self.sync, f"shard {self._shard}", method)

    def _waiting(self, worker: int) -> bool:
        return self.order.phase[worker] == "waiting"

    def _answer(self, worker: int) -> AnyAction:
        """Answer a pull without consulting the model."""
        self.order.answered(worker)
        return AnswerPull(worker, self.last_iteration(worker))

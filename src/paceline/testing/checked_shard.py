"""A wrapper that checks the state machine of a shard after every event.

These promises are checked for every sync model:

- `validate()` passes after every event;
- the first action after a push applies, holds or drops the push. Each held push is applied later as part of exactly
  one mean, whose pushes are in worker order. An empty push is dropped. A scale is a finite number above 0;
- a pull is answered only if it was requested, and only once. Under a lockstep model, it is not answered while
  the worker's own push is held. A worker that is told to continue from a later round does so with its next push;
- at least one live worker does not wait, or a timer is set. When all workers have left, no push remains held;
- a repeated pull is answered immediately, and has no other effect;
- a refused event leaves the state machine unchanged.

A `ShardSync` must keep the same promises as the state machine that it hosts, even while the model changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import assert_never

from ..core.sync.shard_sync import ShardSync
from ..errors import InvalidEventError
from ..state import snapshot
from ..sync import ShardMachine
from ..sync.actions import (
    AnswerPull,
    AnyAction,
    ApplyMean,
    ApplyPush,
    DropPush,
    HoldPush,
    PublishChange,
    PublishPlan,
    ReportFault,
    RestartWorker,
    SetTimer,
)
from ..sync.events import AnyEvent, PullRepeated, PushReceived
from .legal_events import LegalEvents
from .oracle import Oracle

__all__ = ["CheckedShard"]


class CheckedShard:
    """Checks one state machine of a shard, and stores the events that it received and the actions that it returned.

    Args:
        machine: the state machine: a `ShardMachine`, or a `ShardSync`, which also takes repeated pulls and changes of
            the model.
        oracle: if given, the state machine is also compared with this oracle.

    Attributes:
        machine: the state machine.
        legal: generator of the events that are legal next.
        events: all events that the state machine has received.
        updates: all updates that the state machine has returned.
        held: the pushes that are held, as (worker, iteration).
        faults: the reported failures of the user's conditions.
    """

    def __init__(self, machine: ShardMachine | ShardSync, oracle: Oracle | None = None) -> None:
        self.machine = machine
        self.legal = LegalEvents(repeats=isinstance(machine, ShardSync))
        self.events: list[AnyEvent] = []
        self.updates: list[ApplyPush | ApplyMean] = []
        self.held: set[tuple[int, int]] = set()
        self.faults: list[ReportFault] = []
        self._oracle = oracle

    def tell(self, event: AnyEvent) -> list[AnyAction]:
        """Pass a legal event to the state machine, check the promises, and return the actions."""
        before = snapshot(self.machine) if isinstance(event, PullRepeated) else None
        self.events.append(event)
        actions = self.machine.handle(event)
        self.machine.validate()
        self.legal.advance(event)
        if isinstance(event, PullRepeated):
            assert actions == [AnswerPull(event.worker, event.iteration - 1)], (
                f"{event} caused {actions}, expected exactly one answer to the repeated pull"
            )
            assert snapshot(self.machine) == before, (
                f"{event} has changed the state machine, expected no change"
            )
            return actions
        fates = [action for action in actions if isinstance(action, ApplyPush | HoldPush | DropPush)]
        assert len(fates) == isinstance(event, PushReceived), (
            f"{event} caused {len(fates)} actions that apply, hold or drop a push, expected one per received push"
        )
        if isinstance(event, PushReceived):
            _check_fate(event, actions[0])
        known = len(self.updates)
        for action in actions:
            self._carry_out(event, action)
        if self.legal.phase:
            all_wait = self.legal.waiting == self.legal.phase.keys()
            assert not all_wait or self.legal.timers, f"all workers wait after {event}, and no timer is set"
        else:
            assert not self.held, f"all workers have left, but the pushes {self.held} have not been applied"
        if self._oracle is not None:
            self._compare(self._oracle, self.updates[known:])
        return actions

    def walk(self, choices: Iterable[int]) -> None:
        """Pass legal events to the state machine. Each number in `choices` selects one event."""
        for choice in choices:
            self.tell(self.legal.pick(choice))

    def fire_timers(self) -> list[AnyAction]:
        """Fire all pending timers, in the order in which they were set, and return the actions."""
        return [action for timer in self.legal.timers for action in self.tell(self.legal.fire(timer))]

    def refuse(self, event: AnyEvent) -> None:
        """Pass an illegal event to the state machine, and check that the event is refused and changes nothing."""
        before = snapshot(self.machine)
        refusal = ""
        try:
            self.machine.handle(event)
        except InvalidEventError as error:
            refusal = str(error)
        assert refusal, f"{event} is illegal, but was not refused"
        assert f"worker {event.worker}" in refusal, (
            f"the refusal of {event} does not name the worker: {refusal}"
        )
        assert snapshot(self.machine) == before, f"{event} was refused, but has changed the state machine"

    def _carry_out(self, event: AnyEvent, action: AnyAction) -> None:
        match action:
            case ApplyPush(worker, iteration) | DropPush(worker, iteration) | HoldPush(worker, iteration):
                assert (worker, iteration) not in self.held, (
                    f"{action} was returned, but the push is already held"
                )
                if isinstance(action, HoldPush):
                    self.held.add((worker, iteration))
                elif isinstance(action, ApplyPush):
                    assert 0 < action.scale < math.inf, (
                        f"{action} has the scale {action.scale}, expected a finite number > 0"
                    )
                    self.updates.append(action)
            case ApplyMean(pushes):
                assert pushes, f"{action} contains no pushes"
                assert list(pushes) == sorted(set(pushes)), (
                    f"the pushes in {action} are not distinct, or not in worker order"
                )
                assert self.held >= set(pushes), (
                    f"{action} contains pushes that are not held; the held pushes are {self.held}"
                )
                self.held -= set(pushes)
                self.updates.append(action)
            case AnswerPull(worker, iteration, v_train):
                assert self.legal.phase.get(worker) == "waiting", (
                    f"{action} answers a pull that was not requested"
                )
                assert iteration == self.legal.label[worker] - 1, (
                    f"{action} names the wrong iteration, expected {self.legal.label[worker] - 1}"
                )
                if isinstance(self.machine, ShardSync) and self.machine.sync.lockstep:
                    assert (worker, iteration) not in self.held, (
                        f"{action} was returned before the worker's push was applied"
                    )
                self.legal.phase[worker] = "computing"
                if v_train is not None:
                    self.legal.progress[worker] = v_train
            case SetTimer(worker, iteration, due_ticks):
                assert self.legal.phase.get(worker) == "waiting", (
                    f"{action} was returned, but worker {worker} does not wait"
                )
                assert iteration == self.legal.label[worker] - 1, (
                    f"{action} names the wrong iteration, expected {self.legal.label[worker] - 1}"
                )
                assert due_ticks >= event.now_ticks, (
                    f"{action} is due before the event that caused it, {event}"
                )
                self.legal.timers.append(action)
            case ReportFault():
                self.faults.append(action)
            case PublishPlan() | PublishChange() | RestartWorker():
                raise AssertionError(f"a shard cannot carry out {action}")
            case _:
                assert_never(action)

    def _compare(self, oracle: Oracle, updates: list[ApplyPush | ApplyMean]) -> None:
        due = oracle.updates_due(self.events)
        assert updates == due, f"{self.events[-1]} caused {updates}, but the oracle expects {due}"
        waiting, expected = self.legal.waiting, oracle.must_wait(self.events)
        assert waiting == expected, f"workers {waiting} wait, but the oracle expects {expected} to wait"


def _check_fate(push: PushReceived, action: AnyAction) -> None:
    assert isinstance(action, ApplyPush | HoldPush | DropPush), (
        f"the first action after {push} is {action}, expected an action that applies, holds or drops the push"
    )
    assert (action.worker, action.iteration) == (push.worker, push.iteration), (
        f"{action} names a different push, expected the received push {push}"
    )
    assert isinstance(action, DropPush) or not push.empty, f"{action} is wrong: an empty push must be dropped"

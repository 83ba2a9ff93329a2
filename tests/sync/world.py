"""What a host may tell a shard's machine, and what the machine owes it: the contract, kept apart from the code.

`World` knows which events are legal now and which are not, by the order join, push, pull, answer, leave, and never
asks the machine. `Life` is one machine that lives through a sequence of events; whatever is told to it, these
promises are checked:

- `validate()` passes after every event;
- a push is applied, held or dropped by its own event, first of all its actions; a held one is applied later, as
  part of one mean, in worker order; an empty one is dropped;
- only a pull that was asked for is answered, once, and never before the worker's own push has been applied;
  who is told of a later round goes on from there with its next push;
- there is always a live worker that is not waiting, or a timer; and nothing is held for those who have all left;
- a pull that is repeated is answered at once, and nothing else comes of it;
- a refused event leaves the machine as it was.

A `ShardSync` keeps the same promises as the machine in it, through all changes.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Literal, assert_never

import pytest

from paceline.core.shard_sync import ShardSync
from paceline.errors import InvalidEventError
from paceline.sync import Machine
from paceline.sync.actions import (
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
from paceline.sync.events import (
    AnyEvent,
    Change,
    PullRepeated,
    PullRequested,
    PushReceived,
    Stop,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)

MOST_WORKERS = 4

Phase = Literal["computing", "pushed", "waiting"]


class World:
    """The workers' side of the contract.

    Attributes:
        now_s: the time that the next event carries.
        phase: what each live worker is doing.
        label: the iteration that each live worker's next push carries.
        progress: the round that it is for, for those that were told to go on from a later one.
        gone: workers that have left.
        timers: those that are set and have not fired.
        repeats: whether the host of the machine takes pulls that are repeated.
    """

    def __init__(self, *, repeats: bool = False) -> None:
        self.now_s = 0.0
        self.repeats = repeats
        self.timers: list[SetTimer] = []
        self.phase: dict[int, Phase] = {}
        self.label: dict[int, int] = {}
        self.progress: dict[int, int] = {}
        self.gone: list[int] = []

    @property
    def waiting(self) -> set[int]:
        """Who has asked and was not answered."""
        return {worker for worker, phase in self.phase.items() if phase == "waiting"}

    def in_phase(self, phase: Phase) -> list[int]:
        """Live workers that are doing this, in order of joining."""
        return [worker for worker, its in self.phase.items() if its == phase]

    def join(self, iteration: int = 0, *, change: int = 0) -> WorkerJoined:
        """Somebody new, after so many changes of model were published."""
        worker = len(self.phase) + len(self.gone)
        return WorkerJoined(now_s=self.now_s, worker=worker, iteration=iteration, change=change)

    def push(
        self,
        worker: int,
        *,
        empty: bool = False,
        stop: Stop | None = None,
        change: Change | None = None,
        significance: float | None = None,
    ) -> PushReceived:
        """The push that this worker owes."""
        return PushReceived(
            now_s=self.now_s,
            worker=worker,
            iteration=self.label[worker],
            empty=empty,
            stop=stop,
            change=change,
            significance=significance,
            progress=self.progress.get(worker),
        )

    def pull(self, worker: int) -> PullRequested:
        """The pull that follows its push."""
        return PullRequested(now_s=self.now_s, worker=worker, iteration=self.label[worker] - 1)

    def repeat(self, worker: int) -> PullRepeated:
        """Another pull for the iteration that it computes."""
        return PullRepeated(now_s=self.now_s, worker=worker, iteration=self.label[worker])

    def fire(self, timer: SetTimer) -> TimerFired:
        """The end of a timer, on time or late."""
        now_s = max(self.now_s, timer.due_s)
        return TimerFired(now_s=now_s, worker=timer.worker, iteration=timer.iteration)

    def leave(self, worker: int, *, lost: bool) -> WorkerLost | WorkerFinished:
        """The end of a worker."""
        return (WorkerLost if lost else WorkerFinished)(now_s=self.now_s, worker=worker)

    def pick(self, choice: int) -> AnyEvent:
        """One of the legal events, by number. In one case of twelve a worker leaves."""
        choice, kind = divmod(choice, 12)
        events: list[AnyEvent] = []
        if kind == 0:
            events += [self.leave(worker, lost=lost) for worker in self.phase for lost in (True, False)]
        else:
            for worker, phase in self.phase.items():
                if phase == "computing":
                    events += [self.push(worker), self.push(worker), self.push(worker, empty=True)]
                    events += [self.repeat(worker)] * self.repeats
                elif phase == "pushed":
                    events += [self.pull(worker)] * 3
            events += [self.fire(timer) for timer in self.timers]
        if not events or (kind == 1 and len(self.phase) < MOST_WORKERS):
            events = [self.join()]
        return events[choice % len(events)]

    def refused(self) -> list[AnyEvent]:
        """At least one event of each kind that the contract does not allow now."""
        now_s = self.now_s
        stranger = 1000
        events: list[AnyEvent] = []
        for worker in [stranger, *self.gone[:2]]:
            events += [
                PushReceived(now_s=now_s, worker=worker, iteration=0),
                PullRequested(now_s=now_s, worker=worker, iteration=0),
                WorkerLost(now_s=now_s, worker=worker),
                WorkerFinished(now_s=now_s, worker=worker),
            ]
            events += [PullRepeated(now_s=now_s, worker=worker, iteration=0)] * self.repeats
        for worker, phase in self.phase.items():
            label = self.label[worker]
            events += [
                WorkerJoined(now_s=now_s, worker=worker, iteration=label),
                PushReceived(
                    now_s=now_s, worker=worker, iteration=label - 1
                ),  # the same again, or an old one
                PushReceived(now_s=now_s, worker=worker, iteration=label + 1),  # one was left out
                PullRequested(now_s=now_s, worker=worker, iteration=label),  # of a push that has yet to come
            ]
            if phase != "computing":
                events.append(PushReceived(now_s=now_s, worker=worker, iteration=label))
            if phase != "pushed":
                events.append(PullRequested(now_s=now_s, worker=worker, iteration=label - 1))
            if self.repeats:
                events.append(PullRepeated(now_s=now_s, worker=worker, iteration=label + 1))
                if phase != "computing":
                    events.append(PullRepeated(now_s=now_s, worker=worker, iteration=label))
        return events

    def take(self, event: AnyEvent) -> None:
        """Note an event that happened."""
        self.now_s = max(self.now_s, event.now_s)
        match event:
            case WorkerJoined():
                self.phase[event.worker] = "computing"
                self.label[event.worker] = event.iteration
                if event.worker in self.gone:
                    self.gone.remove(event.worker)
            case PushReceived():
                self.phase[event.worker] = "pushed"
                self.label[event.worker] += 1
                self.progress.pop(event.worker, None)
            case PullRequested():
                self.phase[event.worker] = "waiting"
            case WorkerLost() | WorkerFinished():
                del self.phase[event.worker], self.label[event.worker]
                self.progress.pop(event.worker, None)
                self.gone.append(event.worker)
            case TimerFired():
                fired = event.worker, event.iteration
                self.timers = [timer for timer in self.timers if (timer.worker, timer.iteration) != fired]
            case PullRepeated():
                pass
            case _:
                raise AssertionError(f"no shard is told of {event}")


class Life:
    """One machine of a shard, what it was told and what it answered.

    Attributes:
        machine: the machine.
        world: its workers.
        events: all that it has taken.
        updates: all updates that it has asked for.
        held: pushes that await their mean, (worker, iteration).
        faults: what was reported of a user's conditions.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.world = World(repeats=isinstance(machine, ShardSync))
        self.faults: list[ReportFault] = []
        self.events: list[AnyEvent] = []
        self.updates: list[ApplyPush | ApplyMean] = []
        self.held: set[tuple[int, int]] = set()

    def tell(self, event: AnyEvent) -> list[AnyAction]:
        """Have the machine take a legal event; check its promises; return its actions."""
        v_train = getattr(self._inner(), "v_train", 0)
        actions = self.machine.handle(event)
        self.machine.validate()
        self.world.take(event)
        self.events.append(event)
        if isinstance(event, PullRepeated):
            assert actions == [AnswerPull(event.worker, event.iteration - 1)]
            return actions
        fates = [action for action in actions if isinstance(action, ApplyPush | HoldPush | DropPush)]
        assert len(fates) == isinstance(event, PushReceived), f"{event} was dealt with {len(fates)} times"
        if isinstance(event, PushReceived):
            self._check_fate(event, actions[0], v_train)
        for action in actions:
            self._perform(event, action)
        if self.world.phase:
            everybody_waits = self.world.waiting == self.world.phase.keys()
            assert not everybody_waits or self.world.timers, f"everybody waits after {event}"
        else:
            assert not self.held, f"all have left, and nobody will apply {self.held}"
        return actions

    def fire_timers(self) -> list[AnyAction]:
        """Let all timers that are set fire, in the order of being set."""
        return [action for timer in self.world.timers for action in self.tell(self.world.fire(timer))]

    def refuse(self, event: AnyEvent) -> None:
        """Have the machine refuse an event; check that nothing has come of it."""
        before = freeze(self.machine)
        with pytest.raises(InvalidEventError):
            self.machine.handle(event)
        assert freeze(self.machine) == before, f"{event} was refused and yet changed something"

    def _inner(self) -> Machine:
        """The machine of the model, whoever hosts it."""
        return self.machine._machine if isinstance(self.machine, ShardSync) else self.machine

    def _check_fate(self, push: PushReceived, action: AnyAction, v_train: int) -> None:
        counts = self.machine.counts.count  # type: ignore[attr-defined]
        late = (
            v_train and counts.get(push.worker, 0) <= v_train
        )  # with its last push before a change it has left
        assert isinstance(action, ApplyPush | HoldPush | DropPush)
        assert isinstance(action, DropPush) if push.empty else late or not isinstance(action, DropPush)
        assert (action.worker, action.iteration) == (push.worker, push.iteration)

    def _perform(self, event: AnyEvent, action: AnyAction) -> None:
        match action:
            case ApplyPush(worker, iteration) | DropPush(worker, iteration) | HoldPush(worker, iteration):
                assert isinstance(event, PushReceived)
                assert (worker, iteration) == (event.worker, event.iteration), f"{action} after {event}"
                assert (worker, iteration) not in self.held
                if isinstance(action, HoldPush):
                    self.held.add((worker, iteration))
                elif isinstance(action, ApplyPush):
                    self.updates.append(action)
            case ApplyMean(pushes):
                assert pushes, "the mean of nothing"
                assert list(pushes) == sorted(set(pushes)), f"{action} is not in worker order"
                assert self.held >= set(pushes), f"{action} of pushes that are not held: {self.held}"
                self.held -= set(pushes)
                self.updates.append(action)
            case AnswerPull(worker, iteration, v_train):
                assert self.world.phase[worker] == "waiting", f"{action}, which was not asked for"
                assert iteration == self.world.label[worker] - 1
                assert (worker, iteration) not in self.held, f"{action} before its push was applied"
                self.world.phase[worker] = "computing"
                if v_train is not None:
                    self.world.progress[worker] = v_train
            case SetTimer(worker, iteration, due_s):
                assert self.world.phase[worker] == "waiting", f"{action}, but nobody waits for it"
                assert iteration == self.world.label[worker] - 1
                assert due_s >= event.now_s
                self.world.timers.append(action)
            case ReportFault():
                self.faults.append(action)
            case PublishPlan() | PublishChange() | RestartWorker():
                raise AssertionError(f"a shard cannot {action}")
            case _:
                assert_never(action)


def freeze(thing: object) -> Hashable:
    """A value that is equal for equal states, with the order of dicts, which may reach an action."""
    match thing:
        case dict():
            return tuple((key, freeze(value)) for key, value in thing.items())
        case list() | tuple() | deque():
            return tuple(freeze(item) for item in thing)
        case set():
            return frozenset(thing)
        case types.FunctionType() | functools.partial():
            return None  # a condition: it does not change
        case _ if hasattr(thing, "__dict__"):
            return type(thing).__name__, freeze(vars(thing))
        case _:
            assert isinstance(thing, Hashable)
            return thing


def walk(life: Life, choices: Sequence[int]) -> None:
    """A life of random legal events, one for each number."""
    for choice in choices:
        life.tell(life.world.pick(choice))

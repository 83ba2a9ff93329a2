"""The promises that every sync model must keep.

Each promise is a function that tests a model and raises `AssertionError` if the model breaks the promise. Most of
these functions send random sequences of legal events to the model. Short sequences come first, so the error message
of a failure usually contains only a few events.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Literal, NamedTuple, assert_never

import msgspec

from ..core.job_sync import JobSync
from ..core.shard import ShardSync
from ..errors import ConfigurationError, InvalidEventError
from ..state import snapshot
from ..sync import ShardMachine, SyncModel, parse
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
from ..sync.events import (
    AnyEvent,
    Change,
    IterationFinished,
    IterationStarted,
    PullRepeated,
    PullRequested,
    PushReceived,
    Stop,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from ..sync.plugins import report_of_user_code
from ..sync.ticks import in_ticks
from .scripts import forbidden

LENGTHS = (4, 8, 16, 32, 64)
SEEDS_PER_LENGTH = 8
STEPS_TICKS = tuple(in_ticks(seconds) for seconds in (0.0, 0.25, 0.5, 1.0, 3.0))


TRAINING_WORKERS = 3
TRAINING_ROUNDS = 60


def require_assertions() -> None:
    """Raise `ConfigurationError` if Python runs without assertions, because no promise would be tested."""
    if not __debug__:
        raise ConfigurationError(
            "Python runs without assertions (-O or PYTHONOPTIMIZE), so a broken promise would not be found. Run Python "
            "without -O, and unset PYTHONOPTIMIZE."
        )


class Walk(NamedTuple):
    """The seed and the length of a random sequence of legal events."""

    seed: int
    length: int

    def choices(self) -> Iterator[int]:
        """Yield random numbers, each of which selects one event."""
        draw = random.Random(f"{self.seed} {self.length}")
        return (draw.randrange(1_000_000) for _ in range(self.length))


WALKS = [Walk(seed, length) for length in LENGTHS for seed in range(SEEDS_PER_LENGTH)]


def follow(checked: CheckedShard, walk: Walk) -> CheckedShard:
    """Pass a random sequence of events to a shard, and return the shard. The time may advance before each event."""
    for choice in walk.choices():
        checked.legal.now_ticks += STEPS_TICKS[choice % len(STEPS_TICKS)]
        checked.walk([choice])
    return checked


# -- the specification -----------------------------------------------------------------------------------------


def notation_reads_back(sync: SyncModel) -> None:
    """`parse(str(model))` returns an equal model, and the model is hashable and immutable."""
    try:
        parsed = parse(str(sync))
    except ConfigurationError as error:
        raise AssertionError(f"{sync} cannot be parsed: {error}") from error
    assert parsed == sync, f"the notation {sync} was parsed as {parsed!r}, expected {sync!r}"
    assert hash(parsed) == hash(sync)
    try:
        sync.name = "other"  # type: ignore[misc]
    except AttributeError:
        return
    raise AssertionError(
        f"{type(sync).__name__} is mutable; write `class {type(sync).__name__}(SyncModel, frozen=True)`"
    )


def machines_share_nothing(sync: SyncModel) -> None:
    """Events at one state machine do not change another state machine of the same model."""
    first, second = sync.at_shard(), sync.at_shard()
    before = snapshot(second)
    follow(CheckedShard(first), WALKS[-1])
    assert snapshot(second) == before, (
        "events at one state machine have changed another state machine of the same model"
    )


# -- at a shard ------------------------------------------------------------------------------------------------


def random_events_are_handled(sync: SyncModel, oracle: Oracle | None = None) -> None:
    """The promises of `CheckedShard` hold for random events. If an oracle is given, the model agrees with it."""
    for walk in WALKS:
        for machine in (sync.at_shard(), ShardSync(sync)):
            checked = CheckedShard(machine, oracle)
            with _shown(checked.events):
                follow(checked, walk)


def same_events_give_same_actions(sync: SyncModel) -> None:
    """The actions depend only on the events."""
    for walk in WALKS:
        events = follow(CheckedShard(sync.at_shard()), walk).events
        alone, hosted = sync.at_shard(), ShardSync(sync)
        for event in events:
            once, again = alone.handle(event), hosted.handle(event)
            assert once == again, f"{event} caused {once} in one state machine and {again} in another"


def only_events_decide(sync: SyncModel) -> None:
    """No state machine reads a clock or a global random generator."""
    for walk in WALKS[:: len(LENGTHS) + 1]:
        checked = CheckedShard(sync.at_shard())
        with _shown(checked.events), forbidden():
            follow(checked, walk)
    if sync.at_coordinator() is not None:
        reports = Reports(sync, seed=0)
        with _shown(reports.events), forbidden():
            reports.run(50)


def pushes_are_applied(sync: SyncModel) -> None:
    """If workers train for a while and then finish, some of their pushes are applied."""
    checked = CheckedShard(ShardSync(sync))
    legal = checked.legal
    with _shown(checked.events):
        for _ in range(TRAINING_WORKERS):
            checked.tell(legal.join())
        for _ in range(TRAINING_ROUNDS):
            legal.now_ticks += STEPS_TICKS[-1]
            for worker in legal.in_phase("computing"):
                checked.tell(legal.push(worker))
                checked.tell(legal.pull(worker))
            checked.fire_timers()
        for worker in list(legal.phase):
            checked.tell(legal.leave(worker, lost=legal.phase[worker] != "computing"))
    assert checked.updates, (
        f"{TRAINING_WORKERS} workers trained for {TRAINING_ROUNDS} rounds and finished, but no push was applied"
    )


def illegal_events_are_refused(sync: SyncModel) -> None:
    """An illegal event is refused, and the state machine remains unchanged."""
    for walk in WALKS[: 2 * SEEDS_PER_LENGTH]:
        checked = CheckedShard(ShardSync(sync))
        with _shown(checked.events):
            for choice in walk.choices():
                checked.walk([choice])
                for event in checked.legal.illegal():
                    checked.refuse(event)


def no_worker_waits_for_one_that_has_left(sync: SyncModel) -> None:
    """When all other workers have left and all timers have fired, the last worker does not wait."""
    for walk in WALKS:
        checked = follow(CheckedShard(ShardSync(sync)), walk)
        for survivor, lost in product(checked.legal.phase, (True, False)):
            alone = copy.deepcopy(checked)
            with _shown(alone.events):
                for other in [worker for worker in alone.legal.phase if worker != survivor]:
                    alone.tell(alone.legal.leave(other, lost=lost))
                alone.fire_timers()
                assert not alone.legal.waiting, f"worker {survivor} waits, but all other workers have left"


def workers_that_return_take_part(sync: SyncModel) -> None:
    """A worker that has left can join again. Then the worker computes, and its pulls are answered."""
    checked = CheckedShard(ShardSync(sync))
    legal = checked.legal
    with _shown(checked.events):
        checked.tell(legal.join())
        for number in range(3):
            label = 100 * number
            checked.tell(WorkerJoined(now_ticks=legal.now_ticks, worker=1, iteration=label))
            for _ in range(6):
                for worker in legal.in_phase("computing"):
                    checked.tell(legal.push(worker))
                    checked.tell(legal.pull(worker))
                checked.fire_timers()
            assert legal.label[1] > label + 1, "worker 1 has joined again, but its pulls are not answered"
            checked.tell(legal.leave(1, lost=bool(number % 2)))


def delayed_pulls_are_described(sync: SyncModel) -> None:
    """If the model has a method `waits`, this method describes every delayed pull in words, and no other pull."""
    if type(sync.at_shard()).waits is ShardMachine.waits:
        return
    for walk in WALKS:
        machine = sync.at_shard()
        checked = follow(CheckedShard(machine), walk)
        words, waiting = machine.waits(), checked.legal.waiting
        with _shown(checked.events):
            assert words.keys() == waiting, f"workers {waiting} wait, but waits() describes {words}"
            assert all(words.values()), f"waits() returns an empty description: {words}"


def changes_complete(sync: SyncModel) -> None:
    """The model can change to ASP and back at any time: all held pushes are applied, and no worker keeps waiting."""
    for walk in WALKS:
        checked = follow(CheckedShard(ShardSync(sync)), walk)
        with _shown(checked.events):
            for number, other in enumerate(("asp", str(sync)), start=1):
                members = tuple(sorted(checked.legal.phase))
                _change(checked, Change(number=number, members=members, sync=other))


def _change(checked: CheckedShard, change: Change) -> None:
    """Send each member's last push under the old model as early as possible; check that the change completes."""
    legal = checked.legal
    to_pass = set(change.members)
    while to_pass:
        for worker in legal.in_phase("pushed"):
            checked.tell(legal.pull(worker))
        checked.fire_timers()
        able = [worker for worker in legal.in_phase("computing") if worker in to_pass]
        assert able, (
            f"workers {to_pass} still wait after all other workers have sent their last push under the old model"
        )
        checked.tell(legal.push(able[0], change=change))
        to_pass.remove(able[0])
    for worker in legal.in_phase("pushed"):
        checked.tell(legal.pull(worker))
    assert not checked.held, f"the pushes {checked.held} are still held after the change to {change.sync}"
    assert not legal.waiting, f"workers {legal.waiting} still wait after the change to {change.sync}"


@contextmanager
def _shown(events: list[AnyEvent]) -> Iterator[None]:
    """If a check fails, append the events that the state machine has received to the error message."""
    try:
        yield
    except Exception as error:
        told = report_of_user_code(error)
        lines = "\n".join(f"    {event}" for event in events)
        text = f"{told or str(error) or repr(error)}\nafter these events:\n{lines}"
        raise AssertionError(text) from (None if told else error)


# -- at the coordinator ----------------------------------------------------------------------------------------


def coordinator_is_deterministic(sync: SyncModel) -> None:
    """The coordinator's state machine always returns the same plans, timers and restarts for the same events."""
    alone = sync.at_coordinator()
    if alone is None:
        return
    for seed in range(2 * SEEDS_PER_LENGTH):
        reports = Reports(sync, seed)
        with _shown(reports.events):
            reports.run(150)


class Reports:
    """Sends random reports from three workers to two state machines: one on its own, and one inside its host."""

    def __init__(self, sync: SyncModel, seed: int) -> None:
        alone = sync.at_coordinator(seed)
        assert alone is not None
        self.events: list[AnyEvent] = []
        self._starts = sync.needs_starts
        self._alone, self._hosted = alone, JobSync(str(sync), seed)
        self._draw = random.Random(seed)
        self._next = dict.fromkeys((5, 0, 3), 0)  # live worker -> iteration that the worker finishes next
        self._timers: list[SetTimer] = []
        self._superstep = -1

    def run(self, steps: int) -> None:
        """In each step, fire a due timer or send a random report. After 2/3 of the steps, report a lost worker."""
        now_ticks = 0
        for worker in self._next:
            self._tell(WorkerJoined(now_ticks=now_ticks, worker=worker))
        for step in range(steps):
            now_ticks += self._draw.choice(STEPS_TICKS)
            if self._timers and self._timers[0].due_ticks <= now_ticks:
                timer = self._timers.pop(0)
                self._tell(TimerFired(now_ticks=now_ticks, worker=timer.worker, iteration=timer.iteration))
            elif step >= 2 * steps // 3 and 3 in self._next:
                del self._next[3]
                self._tell(WorkerLost(now_ticks=now_ticks, worker=3))
            else:
                worker = self._draw.choice(list(self._next))
                self._tell(
                    IterationFinished(now_ticks=now_ticks, worker=worker, iteration=self._next[worker])
                )
                self._next[worker] += 1
                if self._starts:
                    self._tell(
                        IterationStarted(now_ticks=now_ticks, worker=worker, iteration=self._next[worker])
                    )

    def _tell(self, event: AnyEvent) -> None:
        self.events.append(event)
        actions, same = self._alone.handle(event), self._hosted.handle(event)
        assert actions == same, f"{event} caused {actions} in one state machine and {same} in another"
        self._alone.validate()
        self._hosted.validate()
        for action in actions:
            match action:
                case SetTimer():
                    self._timers.append(action)
                case PublishPlan(plan):
                    assert plan.superstep > self._superstep, (
                        f"{action} plans superstep {plan.superstep}, expected a number above {self._superstep}"
                    )
                    assert set(plan.members) <= self._next.keys(), f"{action} names workers that have left"
                    self._superstep = plan.superstep
                case RestartWorker(worker):
                    assert worker in self._next, f"{action} was returned, but the worker has left"
                case _:
                    raise AssertionError(f"a state machine at the coordinator cannot return {action}")


PROMISES: tuple[Callable[[SyncModel], None], ...] = (
    notation_reads_back,
    random_events_are_handled,
    machines_share_nothing,
    same_events_give_same_actions,
    only_events_decide,
    pushes_are_applied,
    illegal_events_are_refused,
    no_worker_waits_for_one_that_has_left,
    workers_that_return_take_part,
    delayed_pulls_are_described,
    changes_complete,
    coordinator_is_deterministic,
)
"""All promises. The first line of each function's docstring states the promise."""


# -- A wrapper that checks the state machine of a shard after every event ------------------------------------
#
# These promises are checked for every sync model:
#
# - `validate()` passes after every event;
# - the first action after a push applies, holds or drops the push. Each held push is applied later as part of
#   exactly one mean, whose pushes are in worker order. An empty push is dropped. A scale is a finite number
#   above 0;
# - a pull is answered only if it was requested, and only once. Under a lockstep model, a pull is not answered
#   while the worker's own push is held. A worker that is told to continue from a later round does so with its
#   next push;
# - at least one live worker does not wait, or a timer is set. When all workers have left, no push remains
#   held;
# - a repeated pull is answered immediately, and has no other effect;
# - a refused event leaves the state machine unchanged.
#
# A `ShardSync` must keep the same promises as the state machine that it hosts, even while the model changes.


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

    Raises:
        ConfigurationError: Python runs without assertions.
    """

    def __init__(self, machine: ShardMachine | ShardSync, oracle: Oracle | None = None) -> None:
        require_assertions()
        self.machine = machine
        self.legal = LegalEvents(repeats=isinstance(machine, ShardSync))
        self.events: list[AnyEvent] = []
        self.updates: list[ApplyPush | ApplyMean] = []
        self.held: set[tuple[int, int]] = set()
        self.faults: list[ReportFault] = []
        self._oracle = oracle
        self._pulled: dict[int, int] = {}  # worker -> number of updates in the worker's weights
        self._at_once = 0  # the largest number of workers that have been present at the same time

    def tell(self, event: AnyEvent) -> list[AnyAction]:
        """Pass a legal event to the state machine, check the promises, and return the actions."""
        before = snapshot(self.machine) if isinstance(event, PullRepeated) else None
        if isinstance(event, PushReceived):
            event = self._with_numbers(event)
        self.events.append(event)
        actions = self.machine.handle(event)
        self.machine.validate()
        self.legal.advance(event)
        if isinstance(event, WorkerJoined | PullRepeated):
            self._pulled[event.worker] = len(self.updates)
            self._at_once = max(self._at_once, len(self.legal.phase))
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

    def _with_numbers(self, push: PushReceived) -> PushReceived:
        """Return a push with the numbers that a `Shard` adds if the model needs them.

        A state machine without a `ShardSync` does not know what its model needs, so its pushes have all numbers.
        """
        staleness: int | None = len(self.updates) - self._pulled.get(push.worker, 0)
        at_once: int | None = self._at_once
        if isinstance(self.machine, ShardSync):
            staleness = staleness if self.machine.needs_staleness else None
            at_once = at_once if self.machine.sync.needs_at_once else None
        return msgspec.structs.replace(push, staleness=staleness, at_once=at_once)

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
                self._pulled[worker] = len(self.updates)
                if v_train is not None:
                    self.legal.progress[worker] = v_train
            case SetTimer(worker, iteration, due_ticks):
                assert iteration < self.legal.label.get(worker, 0), (
                    f"{action} was returned, but no live worker {worker} has pushed iteration {iteration}"
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


# -- The events that a shard may legally receive next --------------------------------------------------------
#
# Each worker joins, then repeatedly pushes, pulls and is answered, and may leave at any time.
# `paceline.core.order` enforces this order. This module implements the order a second time, so that the
# tests do not depend on `paceline.core.order`.

Phase = Literal["computing", "pushed", "waiting"]

MOST_WORKERS = 4


class LegalEvents:
    """Generates legal and illegal events for a shard.

    Args:
        repeats: True if the state machine under test accepts repeated pulls.

    Attributes:
        now_ticks: time of the next event, in ticks. The caller may increase this attribute.
        phase: live worker -> its phase, in order of joining.
        label: live worker -> iteration that its next push is labeled with.
        progress: worker -> the later round from which the worker was told to continue; removed at the worker's next
            push.
        gone: workers that have left and have not joined again.
        timers: timers that are set and have not fired.
    """

    def __init__(self, *, repeats: bool = False) -> None:
        self.now_ticks = 0
        self.phase: dict[int, Phase] = {}
        self.label: dict[int, int] = {}
        self.progress: dict[int, int] = {}
        self.gone: list[int] = []
        self.timers: list[SetTimer] = []
        self._repeats = repeats

    @property
    def waiting(self) -> set[int]:
        """The workers that have an unanswered pull."""
        return {worker for worker, phase in self.phase.items() if phase == "waiting"}

    def in_phase(self, phase: Phase) -> list[int]:
        """Return the live workers in this phase, in order of joining."""
        return [worker for worker, current in self.phase.items() if current == phase]

    def join(self, iteration: int = 0) -> WorkerJoined:
        """Return the `WorkerJoined` event of a new worker, with this `iteration`."""
        worker = len(self.phase) + len(self.gone)
        return WorkerJoined(now_ticks=self.now_ticks, worker=worker, iteration=iteration)

    def push(
        self,
        worker: int,
        *,
        empty: bool = False,
        stop: Stop | None = None,
        change: Change | None = None,
        significance: float | None = None,
    ) -> PushReceived:
        """Return the next push of a worker that is computing."""
        return PushReceived(
            now_ticks=self.now_ticks,
            worker=worker,
            iteration=self.label[worker],
            empty=empty,
            stop=stop,
            change=change,
            significance=significance,
            progress=self.progress.get(worker),
        )

    def pull(self, worker: int) -> PullRequested:
        """Return the pull that follows a worker's last push."""
        return PullRequested(now_ticks=self.now_ticks, worker=worker, iteration=self.label[worker] - 1)

    def repeat(self, worker: int) -> PullRepeated:
        """Return a repeated pull for the iteration that a worker is computing."""
        return PullRepeated(now_ticks=self.now_ticks, worker=worker, iteration=self.label[worker])

    def fire(self, timer: SetTimer) -> TimerFired:
        """Return the `TimerFired` event of a timer, at the time when it is due, or now if it is overdue."""
        now_ticks = max(self.now_ticks, timer.due_ticks)
        return TimerFired(now_ticks=now_ticks, worker=timer.worker, iteration=timer.iteration)

    def leave(self, worker: int, *, lost: bool) -> WorkerLost | WorkerFinished:
        """Return the `WorkerLost` event of a worker if `lost` is true, otherwise its `WorkerFinished` event."""
        return (WorkerLost if lost else WorkerFinished)(now_ticks=self.now_ticks, worker=worker)

    def pick(self, choice: int) -> AnyEvent:
        """Return the legal event selected by `choice`, an integer >= 0. One choice in twelve makes a worker leave."""
        choice, kind = divmod(choice, 12)
        events: list[AnyEvent] = []
        if kind == 0:
            events += [self.leave(worker, lost=lost) for worker in self.phase for lost in (True, False)]
        else:
            for worker, phase in self.phase.items():
                if phase == "computing":
                    events += [self.push(worker), self.push(worker), self.push(worker, empty=True)]
                    events += [self.repeat(worker)] * self._repeats
                elif phase == "pushed":
                    events += [self.pull(worker)] * 3
            events += [self.fire(timer) for timer in self.timers]
        if not events or (kind == 1 and len(self.phase) < MOST_WORKERS):
            events = [self.join()]
        return events[choice % len(events)]

    def illegal(self) -> list[AnyEvent]:
        """Return events that are illegal now: at least one of each kind that can be illegal in the current state."""
        now_ticks = self.now_ticks
        unknown = 1000
        events: list[AnyEvent] = []
        for worker in [unknown, *self.gone[:2]]:
            events += [
                PushReceived(now_ticks=now_ticks, worker=worker, iteration=0),
                PullRequested(now_ticks=now_ticks, worker=worker, iteration=0),
                WorkerLost(now_ticks=now_ticks, worker=worker),
                WorkerFinished(now_ticks=now_ticks, worker=worker),
            ]
            events += [PullRepeated(now_ticks=now_ticks, worker=worker, iteration=0)] * self._repeats
        for worker, phase in self.phase.items():
            label = self.label[worker]
            events += [
                WorkerJoined(now_ticks=now_ticks, worker=worker, iteration=label),
                # This push has already been received.
                PushReceived(now_ticks=now_ticks, worker=worker, iteration=label - 1),
                # This push skips an iteration.
                PushReceived(now_ticks=now_ticks, worker=worker, iteration=label + 1),
                # The push that must precede this pull has not been received yet.
                PullRequested(now_ticks=now_ticks, worker=worker, iteration=label),
            ]
            if phase != "computing":
                events.append(PushReceived(now_ticks=now_ticks, worker=worker, iteration=label))
            if phase != "pushed":
                events.append(PullRequested(now_ticks=now_ticks, worker=worker, iteration=label - 1))
            if self._repeats:
                events.append(PullRepeated(now_ticks=now_ticks, worker=worker, iteration=label + 1))
                if phase != "computing":
                    events.append(PullRepeated(now_ticks=now_ticks, worker=worker, iteration=label))
        return events

    def advance(self, event: AnyEvent) -> None:
        """Record an event that the shard has received."""
        self.now_ticks = max(self.now_ticks, event.now_ticks)
        worker = event.worker
        match event:
            case WorkerJoined():
                self.phase[worker] = "pushed" if event.pulls else "computing"
                self.label[worker] = event.iteration
                if worker in self.gone:
                    self.gone.remove(worker)
            case PushReceived():
                self.phase[worker] = "pushed"
                self.label[worker] += 1
                self.progress.pop(worker, None)
            case PullRequested():
                self.phase[worker] = "waiting"
            case WorkerLost() | WorkerFinished():
                del self.phase[worker], self.label[worker]
                self.progress.pop(worker, None)
                self.gone.append(worker)
            case TimerFired():
                fired = worker, event.iteration
                self.timers = [timer for timer in self.timers if (timer.worker, timer.iteration) != fired]
            case PullRepeated():
                pass
            case _:
                raise AssertionError(f"a shard cannot receive {event}")


# -- An oracle: a specification of what a sync model should do, as plain functions of all events so far ------

Events = Sequence[AnyEvent]
"""All events that a shard has received, in the order in which it received them."""


class Oracle(NamedTuple):
    """Specifies what a sync model should do at a shard.

    Write the functions as directly as possible from the description of the model. The functions must keep no state, and
    may be slow. A `CheckedShard` compares the state machine with these functions after every event.

    Attributes:
        must_wait: function that returns the workers whose pulls must be unanswered after the given events.
        updates_due: function that returns the updates that the last of the given events must cause.
    """

    must_wait: Callable[[Events], set[int]]
    updates_due: Callable[[Events], list[ApplyPush | ApplyMean]]

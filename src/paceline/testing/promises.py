"""The promises that every sync model must keep.

Each promise is a function that tests a model and raises `AssertionError` if the model breaks the promise. Most of
these functions send random sequences of legal events to the model. Short sequences come first, so the error message
of a failure usually contains only a few events.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import NamedTuple

from ..core.sync.job_sync import JobSync
from ..core.sync.shard_sync import ShardSync
from ..errors import ConfigurationError
from ..plugins.failures import report_of_user_code
from ..state import snapshot
from ..sync import ShardMachine, SyncModel, parse
from ..sync.actions import PublishPlan, RestartWorker, SetTimer
from ..sync.events import (
    AnyEvent,
    Change,
    IterationFinished,
    IterationStarted,
    TimerFired,
    WorkerJoined,
    WorkerLost,
)
from ..sync.ticks import in_ticks
from .checked_shard import CheckedShard
from .oracle import Oracle
from .outside_world import forbidden

__all__ = ["PROMISES", "follow"]

LENGTHS = (4, 8, 16, 32, 64)
SEEDS_PER_LENGTH = 8
STEPS_TICKS = tuple(in_ticks(seconds) for seconds in (0.0, 0.25, 0.5, 1.0, 3.0))


TRAINING_WORKERS = 3
TRAINING_ROUNDS = 60


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
    """A worker that has left can join again. It then computes, and its pulls are answered."""
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
    """If the model has a method `waits`, it describes every delayed pull in words, and no other pull."""
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
            elif step == 2 * steps // 3:
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

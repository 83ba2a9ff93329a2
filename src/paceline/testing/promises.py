"""Promises that every sync model must keep, each a function that raises `AssertionError` if a model breaks it.

They test a model with random legal events. A seed determines a sequence of events; short sequences are tried first,
so a failure is usually shown by few events.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..core.job_sync import JobSync
from ..core.shard_sync import ShardSync
from ..errors import ConfigurationError
from ..sync import SyncModel, parse
from ..sync.actions import PublishPlan, RestartWorker, SetTimer
from ..sync.events import AnyEvent, Change, IterationFinished, IterationStarted, TimerFired, WorkerJoined, WorkerLost
from .checked_shard import CheckedShard, freeze
from .oracle import Oracle

__all__ = ["PROMISES", "follow"]

LENGTHS = (4, 8, 16, 32, 64)
SEEDS_PER_LENGTH = 8
STEPS_S = (0.0, 0.25, 0.5, 1.0, 3.0)


class Walk(NamedTuple):
    """A random sequence of legal events: the seed, and the number of events."""

    seed: int
    length: int

    def choices(self) -> Iterator[int]:
        """Yield the numbers that choose the events."""
        draw = random.Random(f"{self.seed} {self.length}")
        return (draw.randrange(1_000_000) for _ in range(self.length))


WALKS = [Walk(seed, length) for length in LENGTHS for seed in range(SEEDS_PER_LENGTH)]


def follow(checked: CheckedShard, walk: Walk) -> CheckedShard:
    """Pass a random sequence of events to a shard and return it. Time passes between the events."""
    for choice in walk.choices():
        checked.legal.now_s += STEPS_S[choice % len(STEPS_S)]
        checked.walk([choice])
    return checked


# -- the specification -----------------------------------------------------------------------------------------


def notation_reads_back(sync: SyncModel) -> None:
    """`parse(str(model))` returns an equal model, and the model is hashable and immutable."""
    try:
        parsed = parse(str(sync))
    except ConfigurationError as error:
        raise AssertionError(f"{sync} cannot be parsed: {error}") from error
    assert parsed == sync, f"{sync} reads back as {parsed!r}, expected {sync!r}"
    assert hash(parsed) == hash(sync)
    try:
        sync.name = "other"  # type: ignore[misc]
    except AttributeError:
        return
    raise AssertionError(f"{type(sync).__name__} is mutable; write `class {type(sync).__name__}(SyncModel, frozen=True)`")


def machines_share_nothing(sync: SyncModel) -> None:
    """Events at one machine do not change another machine of the same model."""
    first, second = sync.at_shard(), sync.at_shard()
    before = freeze(second)
    follow(CheckedShard(first), WALKS[-1])
    assert freeze(second) == before, "events at one machine have changed another machine"


# -- at a shard ------------------------------------------------------------------------------------------------


def random_events_are_handled(sync: SyncModel, oracle: Oracle | None = None) -> None:
    """The promises of `CheckedShard` hold for random events, and those of the oracle if there is one."""
    for walk in WALKS:
        _shown(CheckedShard(ShardSync(sync), oracle), lambda checked, walk=walk: follow(checked, walk))


def same_events_give_same_actions(sync: SyncModel) -> None:
    """The actions depend on nothing but the events."""
    for walk in WALKS:
        events = follow(CheckedShard(sync.at_shard()), walk).events
        alone, hosted = sync.at_shard(), ShardSync(sync)
        for event in events:
            once, again = alone.handle(event), hosted.handle(event)
            assert once == again, f"{event} caused {once} and, in another machine, {again}"


def illegal_events_are_refused(sync: SyncModel) -> None:
    """An illegal event is refused, and the refusal changes nothing."""

    def refuse_all(checked: CheckedShard) -> None:
        for event in checked.legal.illegal():
            checked.refuse(event)

    for walk in WALKS[: 2 * SEEDS_PER_LENGTH]:
        checked = CheckedShard(ShardSync(sync))
        for choice in walk.choices():
            checked.walk([choice])
            _shown(checked, refuse_all)


def no_worker_waits_for_one_that_has_left(sync: SyncModel) -> None:
    """When all other workers have left, and timers have fired, the last worker does not wait."""

    def leave_one(checked: CheckedShard) -> None:
        for survivor in list(checked.legal.phase):
            for lost in (True, False):
                alone = copy.deepcopy(checked)
                for other in [worker for worker in alone.legal.phase if worker != survivor]:
                    alone.tell(alone.legal.leave(other, lost=lost))
                alone.fire_timers()
                assert not alone.legal.waiting, f"worker {survivor} waits, but all other workers have left"

    for walk in WALKS:
        _shown(follow(CheckedShard(ShardSync(sync)), walk), leave_one)


def workers_that_return_take_part(sync: SyncModel) -> None:
    """A worker that has left and joins again computes and is answered as before."""

    def leave_and_return(checked: CheckedShard) -> None:
        legal = checked.legal
        for _ in range(2):
            checked.tell(legal.join())
        for iteration in range(3):
            for worker in range(2):
                checked.tell(legal.push(worker))
                checked.tell(legal.pull(worker))
            checked.fire_timers()
            assert not legal.waiting, f"workers {legal.waiting} wait, but all have pushed equally often"
            checked.tell(legal.leave(1, lost=bool(iteration % 2)))
            checked.tell(WorkerJoined(now_s=legal.now_s, worker=1, iteration=iteration + 1))

    _shown(CheckedShard(ShardSync(sync)), leave_and_return)


def delayed_pulls_are_described(sync: SyncModel) -> None:
    """`waits()` describes exactly the delayed pulls, each in words."""

    def described(checked: CheckedShard) -> None:
        words = checked.machine.waits()  # type: ignore[attr-defined]
        waiting = checked.legal.waiting
        assert words.keys() == waiting, f"workers {waiting} wait, but waits() describes {words}"
        assert all(words.values()), f"waits() returns an empty description: {words}"

    for walk in WALKS:
        _shown(follow(CheckedShard(ShardSync(sync)), walk), described)


def changes_complete(sync: SyncModel) -> None:
    """A change to another model and back completes at any time: all held pushes are applied, and no worker waits."""

    def change_twice(checked: CheckedShard) -> None:
        for number, other in enumerate(("asp", str(sync)), start=1):
            _change(checked, Change(number=number, members=tuple(sorted(checked.legal.phase)), sync=other))

    for walk in WALKS:
        _shown(follow(CheckedShard(ShardSync(sync)), walk), change_twice)


def _change(checked: CheckedShard, change: Change) -> None:
    """Let every live worker pass a change, as soon as it can push."""
    legal = checked.legal
    to_pass = set(change.members)
    while to_pass:
        for worker in legal.in_phase("pushed"):
            checked.tell(legal.pull(worker))
        checked.fire_timers()
        able = [worker for worker in legal.in_phase("computing") if worker in to_pass]
        assert able, f"workers {to_pass} cannot end the model: they wait, but all other workers have ended it"
        checked.tell(legal.push(able[0], change=change))
        to_pass.remove(able[0])
    for worker in legal.in_phase("pushed"):
        checked.tell(legal.pull(worker))
    assert not checked.held, f"{checked.held} are held after the change to {change.sync}"
    assert not legal.waiting, f"workers {legal.waiting} wait after the change to {change.sync}"


def _shown(checked: CheckedShard, check: Callable[[CheckedShard], object]) -> None:
    """Run a check of a shard. If it fails, show the events that the shard has received."""
    try:
        check(checked)
    except Exception as error:
        events = "\n".join(f"    {event}" for event in checked.events)
        raise AssertionError(f"{error or repr(error)}\nafter these events at one shard:\n{events}") from error


# -- at the coordinator ----------------------------------------------------------------------------------------


def coordinator_is_deterministic(sync: SyncModel) -> None:
    """The coordinator's machine returns equal actions for equal events: plans, timers and restarts."""
    if sync.at_coordinator() is None:
        return
    for seed in range(2 * SEEDS_PER_LENGTH):
        events: list[AnyEvent] = []
        try:
            for event in _reports(sync, seed, events):
                events.append(event)
        except Exception as error:
            shown = "\n".join(f"    {event}" for event in events)
            raise AssertionError(f"{error or repr(error)}\nafter these events at the coordinator:\n{shown}") from error


def _reports(sync: SyncModel, seed: int, events: list[AnyEvent]) -> Iterator[AnyEvent]:
    """Yield random reports of three workers, and pass each to two machines, one of them hosted."""
    draw = random.Random(seed)
    machines = [sync.at_coordinator(), JobSync(str(sync))]
    following = dict.fromkeys((5, 0, 3), 0)
    now_s = 0.0
    timers: list[SetTimer] = []
    supersteps = -1
    todo: list[AnyEvent] = [WorkerJoined(now_s=now_s, worker=worker) for worker in following]
    for step in range(150):
        while todo:
            event = todo.pop(0)
            yield event
            actions, same = (machine.handle(event) for machine in machines if machine is not None)
            assert actions == same, f"{event} caused {actions} and, in another machine, {same}"
            for machine in machines:
                assert machine is not None
                machine.validate()
            for action in actions:
                assert isinstance(action, PublishPlan | SetTimer | RestartWorker), (
                    f"a coordinator's machine cannot return {action}"
                )
                if isinstance(action, SetTimer):
                    timers.append(action)
                elif isinstance(action, PublishPlan):
                    assert action.plan.superstep > supersteps, f"{action} after superstep {supersteps}"
                    assert set(action.plan.members) <= following.keys(), f"{action} names workers that have left"
                    supersteps = action.plan.superstep
                else:
                    assert action.worker in following, f"{action} of a worker that has left"
        now_s += draw.choice([0.0, 0.125, 0.5])
        if timers and timers[0].due_s <= now_s:
            timer = timers.pop(0)
            todo.append(TimerFired(now_s=now_s, worker=timer.worker, iteration=timer.iteration))
        elif step == 100:
            del following[3]
            todo.append(WorkerLost(now_s=now_s, worker=3))
        else:
            worker = draw.choice(list(following))
            todo.append(IterationFinished(now_s=now_s, worker=worker, iteration=following[worker]))
            following[worker] += 1
            if sync.needs_starts:
                todo.append(IterationStarted(now_s=now_s, worker=worker, iteration=following[worker]))


PROMISES: tuple[Callable[[SyncModel], None], ...] = (
    notation_reads_back,
    machines_share_nothing,
    random_events_are_handled,
    same_events_give_same_actions,
    illegal_events_are_refused,
    no_worker_waits_for_one_that_has_left,
    workers_that_return_take_part,
    delayed_pulls_are_described,
    changes_complete,
    coordinator_is_deterministic,
)
"""All promises. The first line of each docstring says what is promised."""

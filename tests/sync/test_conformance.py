"""What every sync model promises, from one table."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import cast

import pytest

from paceline.errors import InternalError, InvalidEventError
from paceline.sync import (
    ASP,
    BSP,
    DSPS,
    DSSP,
    MODELS,
    PSSP,
    SSP,
    DropStragglers,
    DynamicPSSP,
    ElasticBSP,
    Machine,
    SyncModel,
    parse,
)
from paceline.sync.actions import AnswerPull
from paceline.sync.events import (
    AnyEvent,
    IterationFinished,
    PullRequested,
    PushReceived,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)

from .world import Life, freeze, walk

TABLE: list[SyncModel] = [
    BSP(),
    ASP(),
    SSP(),
    SSP(staleness=0),
    SSP(staleness=1),
    SSP(staleness=math.inf),
    SSP(staleness=1, execution="lazy"),
    DSSP(),
    DSSP(lower=0, upper=2),
    DSPS(lower=0, upper=3),
    PSSP(staleness=1),
    PSSP(staleness=0, probability=1.0, execution="lazy", draws="per-shard"),
    DynamicPSSP(staleness=1),
    DropStragglers(quorum=2),
    ElasticBSP(),
    ElasticBSP(lookahead=1),
]

every_model = pytest.mark.parametrize("sync", TABLE, ids=str)
every_model_without_times = pytest.mark.parametrize(
    "sync", [sync for sync in TABLE if not isinstance(sync, DSSP | DSPS)], ids=str
)
every_planned_model = pytest.mark.parametrize(
    "sync", [sync for sync in TABLE if sync.at_coordinator() is not None], ids=str
)

# One event of each kind that is refused in the state that `begun` leaves: worker 0 computes its iteration 1, worker
# 1 has pushed its own and not asked yet, worker 2 has asked too, worker 3 was lost, worker 4 never was.
REFUSED: dict[str, AnyEvent] = {
    "a push of a worker that never joined": PushReceived(now_s=9, worker=4, iteration=0),
    "a pull of a worker that never joined": PullRequested(now_s=9, worker=4, iteration=0),
    "the loss of a worker that never joined": WorkerLost(now_s=9, worker=4),
    "the end of a worker that never joined": WorkerFinished(now_s=9, worker=4),
    "a push of a worker that was lost": PushReceived(now_s=9, worker=3, iteration=1),
    "a pull of a worker that was lost": PullRequested(now_s=9, worker=3, iteration=0),
    "a second loss": WorkerLost(now_s=9, worker=3),
    "a second end": WorkerFinished(now_s=9, worker=3),
    "a second joining": WorkerJoined(now_s=9, worker=0, iteration=1),
    "a push that leaves an iteration out": PushReceived(now_s=9, worker=0, iteration=2),
    "a push of an iteration that was pushed": PushReceived(now_s=9, worker=0, iteration=0),
    "a second push before the pull": PushReceived(now_s=9, worker=1, iteration=2),
    "the same push twice": PushReceived(now_s=9, worker=1, iteration=1),
    "an empty push twice": PushReceived(now_s=9, worker=1, iteration=1, empty=True),
    "a pull without a push": PullRequested(now_s=9, worker=0, iteration=0),
    "a pull before its push": PullRequested(now_s=9, worker=0, iteration=1),
    "a pull of another iteration": PullRequested(now_s=9, worker=1, iteration=0),
    "a second pull": PullRequested(now_s=9, worker=2, iteration=1),
}


def begun(sync: SyncModel) -> Life:
    """Four workers, one whole iteration, and a little more: see `REFUSED`."""
    life = Life(sync.at_shard())
    world = life.world
    for _ in range(4):
        life.tell(world.join())
    for worker in range(4):
        life.tell(world.push(worker))
    for worker in range(4):
        life.tell(world.pull(worker))
    assert not world.waiting
    life.tell(world.leave(3, lost=True))
    for worker in (1, 2):
        life.tell(world.push(worker))
    life.tell(world.pull(2))
    return life


def after_a_random_life(sync: SyncModel, seed: int) -> Life:
    """Some fifty legal events, no two seeds alike."""
    life = Life(sync.at_shard())
    draw = random.Random(seed)
    walk(life, [draw.randrange(10_000) for _ in range(50)])
    return life


def test_the_table_has_every_model() -> None:
    assert {type(sync) for sync in TABLE} == set(MODELS.values())


@every_model
@pytest.mark.parametrize("what", REFUSED)
def test_is_refused_and_changes_nothing(sync: SyncModel, what: str) -> None:
    life = begun(sync)
    control = copy.deepcopy(life)
    life.refuse(REFUSED[what])
    life.machine.validate()
    future: list[AnyEvent] = [life.world.push(0), life.world.pull(1)]
    for event in future:
        assert life.tell(event) == control.tell(event)


@every_model
def test_refusals_say_which_worker(sync: SyncModel) -> None:
    machine = begun(sync).machine
    for event in REFUSED.values():
        with pytest.raises(InvalidEventError, match=f"worker {event.worker}"):
            machine.handle(event)


@every_model
@pytest.mark.parametrize("seed", range(4))
def test_is_refused_at_any_moment_of_a_life(sync: SyncModel, seed: int) -> None:
    life = Life(sync.at_shard())
    draw = random.Random(seed)
    for _ in range(40):
        for event in life.world.refused():
            life.refuse(event)
        walk(life, [draw.randrange(10_000)])


@every_model
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("lost", [True, False], ids=["lost", "finished"])
def test_those_who_leave_never_block_the_last_one(sync: SyncModel, seed: int, lost: bool) -> None:
    life = after_a_random_life(sync, seed)
    for survivor in list(life.world.phase):
        alone = copy.deepcopy(life)
        for other in [worker for worker in life.world.phase if worker != survivor]:
            alone.tell(alone.world.leave(other, lost=lost))
        assert not alone.world.waiting


@every_model
def test_who_leaves_is_never_answered_any_more(sync: SyncModel) -> None:
    life = begun(sync)
    life.tell(life.world.leave(2, lost=True))
    actions = [*life.tell(life.world.push(0)), *life.tell(life.world.pull(0)), *life.tell(life.world.pull(1))]
    answered = {action.worker for action in actions if isinstance(action, AnswerPull)}
    assert answered == {0, 1}


@every_model_without_times
@pytest.mark.parametrize("seed", range(5))
def test_time_may_stand_still_or_leap(sync: SyncModel, seed: int) -> None:
    """What a shard decides does not hang on the clock: the same events at other times, the same actions."""
    draw = random.Random(seed)
    choices = [draw.randrange(10_000) for _ in range(60)]
    still, leaping = Life(sync.at_shard()), Life(sync.at_shard())
    for choice in choices:
        leaping.world.now_s += draw.choice([0.0, 1e-9, 3.0, 1e9])
        walk(still, [choice])
        walk(leaping, [choice])
        assert freeze(still.machine) == freeze(leaping.machine)
    assert still.updates == leaping.updates


@every_model
def test_machines_of_one_specification_share_nothing(sync: SyncModel) -> None:
    first, second = sync.at_shard(), sync.at_shard()
    fresh = freeze(second)
    first.handle(WorkerJoined(now_s=0.0, worker=0))
    assert freeze(second) == fresh


@every_model
def test_the_same_events_give_the_same_actions(sync: SyncModel) -> None:
    life = after_a_random_life(sync, 1)
    once, again = ([machine.handle(e) for e in life.events] for machine in (sync.at_shard(), sync.at_shard()))
    assert once == again


@every_model
def test_a_specification_is_a_value_that_reads_back(sync: SyncModel) -> None:
    assert parse(str(sync)) == sync
    assert hash(parse(str(sync))) == hash(sync)
    with pytest.raises(AttributeError):
        sync.name = "other"  # type: ignore[misc]


@every_model
def test_a_shard_that_is_told_what_only_the_coordinator_hears_is_our_bug(sync: SyncModel) -> None:
    with pytest.raises(InternalError, match="IterationFinished"):
        sync.at_shard().handle(IterationFinished(now_s=0.0, worker=0, iteration=0))


@every_model
@pytest.mark.parametrize("lost", [True, False], ids=["lost", "finished"])
def test_who_joins_anew_takes_part_like_anybody(sync: SyncModel, lost: bool) -> None:
    life = Life(sync.at_shard())
    world = life.world
    for _ in range(2):
        life.tell(world.join())
    for worker in range(2):
        life.tell(world.push(worker))
        life.tell(world.pull(worker))
    life.tell(world.leave(1, lost=lost))
    life.tell(WorkerJoined(now_s=0.0, worker=1, iteration=1))
    updates = len(life.updates)
    for worker in range(2):
        life.tell(world.push(worker))
        life.tell(world.pull(worker))
    assert not world.waiting
    assert len(life.updates) > updates


# -- at the coordinator -----------------------------------------------------------------------------------


def planner_of(sync: SyncModel) -> Machine:
    """A planner with two workers that have finished an iteration each; worker 2 was lost."""
    planner = cast(Machine, sync.at_coordinator())
    for worker in range(3):
        planner.handle(WorkerJoined(now_s=0.0, worker=worker))
    for worker in range(2):
        planner.handle(IterationFinished(now_s=1.0, worker=worker, iteration=0))
    planner.handle(WorkerLost(now_s=1.0, worker=2))
    return planner


REFUSED_BY_PLANNER: dict[str, AnyEvent] = {
    "an iteration of a worker that never joined": IterationFinished(now_s=2.0, worker=7, iteration=0),
    "an iteration of a worker that was lost": IterationFinished(now_s=2.0, worker=2, iteration=0),
    "the loss of a worker that never joined": WorkerLost(now_s=2.0, worker=7),
    "a second loss": WorkerLost(now_s=2.0, worker=2),
    "the end of a worker that was lost": WorkerFinished(now_s=2.0, worker=2),
    "a second joining": WorkerJoined(now_s=2.0, worker=0),
    "a stop that was not planned": IterationFinished(now_s=2.0, worker=0, iteration=1, superstep=0),
    "a stop for another superstep": IterationFinished(now_s=2.0, worker=0, iteration=1, superstep=1),
    "the same iteration twice": IterationFinished(now_s=2.0, worker=0, iteration=0),
    "an iteration that leaves one out": IterationFinished(now_s=2.0, worker=0, iteration=5),
}


@every_planned_model
@pytest.mark.parametrize("what", REFUSED_BY_PLANNER)
def test_is_refused_by_the_planner_and_changes_nothing(sync: SyncModel, what: str) -> None:
    planner = planner_of(sync)
    before = freeze(planner)
    with pytest.raises(InvalidEventError, match="worker"):
        planner.handle(REFUSED_BY_PLANNER[what])
    assert freeze(planner) == before
    planner.validate()


@every_planned_model
@pytest.mark.parametrize(
    "event",
    [PushReceived(now_s=0.0, worker=0, iteration=0), PullRequested(now_s=0.0, worker=0, iteration=0)],
    ids=["push", "pull"],
)
def test_a_planner_that_is_told_what_only_shards_hear_is_our_bug(sync: SyncModel, event: AnyEvent) -> None:
    with pytest.raises(InternalError, match=type(event).__name__):
        cast(Machine, sync.at_coordinator()).handle(event)


# -- validate() finds what is wrong -----------------------------------------------------------------------

BROKEN: dict[str, tuple[SyncModel, Callable[[Machine], None]]] = {
    "a worker that nobody counts": (BSP(), lambda machine: vars(machine)["ledger"].count.update({9: 0})),
    "a slowest that is ahead of somebody": (
        SSP(),
        lambda machine: setattr(vars(machine)["ledger"], "slowest", 9),
    ),
    "a pull filed under no round": (BSP(), lambda machine: vars(machine)["_filed_under"].update({0: 7})),
    "a worker stopped at no barrier": (
        ElasticBSP(),
        lambda machine: vars(machine)["_stopped_at"].update({9: 0}),
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_validate_finds(what: str) -> None:
    sync, break_it = BROKEN[what]
    machine = begun(sync).machine
    machine.validate()
    break_it(machine)
    with pytest.raises(InternalError):
        machine.validate()

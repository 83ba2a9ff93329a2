"""What every sync model promises, from one table."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any, cast

import pytest

from paceline.core.job_sync import JobSync
from paceline.core.shard import ShardSync
from paceline.errors import InternalError, InvalidEventError
from paceline.state import snapshot
from paceline.sync import (
    ASP,
    BSP,
    DSPS,
    DSSP,
    MODELS,
    PSSP,
    SSP,
    Conditions,
    DropStragglers,
    DynamicPSSP,
    ElasticBSP,
    Machine,
    NaiveWaiting,
    PullState,
    PushState,
    Rennala,
    Ringmaster,
    ShardMachine,
    SpecSync,
    SyncModel,
)
from paceline.sync.actions import AnswerPull
from paceline.sync.events import (
    AnyEvent,
    IterationFinished,
    IterationStarted,
    PullRepeated,
    PullRequested,
    PushReceived,
    SyncRequested,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from paceline.testing import PROMISES
from paceline.testing.promises import CheckedShard
from tests.support.marks import thorough


def within_one(state: PullState) -> bool:
    return state.gap <= 1


def behind(state: PullState) -> bool:
    return state.progress < state.v_train


def two_have_pushed(state: PushState) -> bool:
    return state.pushed >= min(2, state.live)


TABLE: list[SyncModel] = [
    BSP(),
    ASP(),
    ASP(push_scale="1/n"),
    ASP(push_scale="1/tau"),
    SSP(),
    SSP(staleness=0),
    SSP(staleness=1),
    SSP(staleness=math.inf),
    SSP(staleness=1, execution="lazy"),
    SSP(staleness=1, execution="lazy", push_scale="1/n"),
    DSSP(),
    DSSP(lower=0, upper=2),
    DSPS(lower=0, upper=3),
    DSPS(lower=0, upper=3, execution="lazy"),
    PSSP(staleness=1),
    PSSP(staleness=0, probability=1.0, execution="lazy", draws="per-shard"),
    PSSP(staleness=0, execution="lazy", push_scale="1/n"),
    DynamicPSSP(staleness=1),
    DynamicPSSP(staleness=0, alpha="significance", execution="lazy"),
    DropStragglers(quorum=2),
    NaiveWaiting(delay_s=0.0),
    NaiveWaiting(delay_s=0.5),
    ElasticBSP(),
    ElasticBSP(lookahead=1),
    SpecSync(),
    SpecSync(abort_time_s=0.5, abort_rate=0.25),
    SpecSync(base=SSP(staleness=1)),
    SpecSync(base=SSP(staleness=0, execution="lazy"), abort_time_s=0.5, abort_rate=0.0),
    Rennala(batch=1),
    Rennala(batch=5),
    Ringmaster(threshold=1),
    Ringmaster(threshold=2, stop=True),
    Conditions(pull=within_one),
    Conditions(pull=within_one, execution="lazy", push_scale="1/n", significance="on"),
    Conditions(pull=behind, push=two_have_pushed, pushes="average"),
    Conditions(pull=lambda state: state.progress < state.v_train + 2),
]

LIKE_OTHERS: list[SyncModel] = [
    ASP(push_scale="1/n"),
    ASP(push_scale="1/tau"),
    SSP(),
    SSP(staleness=0),
    SSP(staleness=math.inf),
    SSP(staleness=1, execution="lazy"),
    DSSP(),
    DSPS(lower=0, upper=3, execution="lazy"),
    PSSP(staleness=0, probability=1.0, execution="lazy", draws="per-shard"),
    PSSP(staleness=0, execution="lazy", push_scale="1/n"),
    DynamicPSSP(staleness=1),
    NaiveWaiting(delay_s=0.0),
    ElasticBSP(lookahead=1),
    SpecSync(abort_time_s=0.5, abort_rate=0.25),
    SpecSync(base=SSP(staleness=1)),
    Rennala(batch=1),
    Ringmaster(threshold=1),
    Conditions(pull=within_one),
    Conditions(pull=within_one, execution="lazy", push_scale="1/n", significance="on"),
]
"""Models of the table that differ from another one in a number, or combine what two others have.

Of the tests below, `make test` runs only those of a coordinator with them.
"""

HOSTS: dict[str, Callable[[SyncModel], ShardMachine | ShardSync]] = {
    "alone": lambda sync: sync.at_shard(),
    "hosted": lambda sync: ShardSync(sync),
}


def in_turn(table: list[SyncModel]) -> list[Any]:
    """Models of the table, those that are like others last, and marked."""
    return [
        *(sync for sync in table if sync not in LIKE_OTHERS),
        *thorough(*(sync for sync in table if sync in LIKE_OTHERS)),
    ]


every_model = pytest.mark.parametrize("sync", in_turn(TABLE), ids=str)
every_host = pytest.mark.parametrize("host", HOSTS)
every_model_without_times = pytest.mark.parametrize(
    "sync", in_turn([sync for sync in TABLE if not isinstance(sync, DSSP | DSPS)]), ids=str
)
every_planned_model = pytest.mark.parametrize(
    "sync", [sync for sync in TABLE if sync.at_coordinator() is not None], ids=str
)

# One event of each kind that is refused in the state that `begun` leaves: worker 0 computes its iteration 1, worker
# 1 has pushed its own and not asked yet, worker 2 has asked too, worker 3 was lost, worker 4 never was.
REFUSED: dict[str, AnyEvent] = {
    "a push of a worker that never joined": PushReceived(now_ticks=9, worker=4, iteration=0),
    "a pull of a worker that never joined": PullRequested(now_ticks=9, worker=4, iteration=0),
    "the loss of a worker that never joined": WorkerLost(now_ticks=9, worker=4),
    "the end of a worker that never joined": WorkerFinished(now_ticks=9, worker=4),
    "a push of a worker that was lost": PushReceived(now_ticks=9, worker=3, iteration=1),
    "a pull of a worker that was lost": PullRequested(now_ticks=9, worker=3, iteration=0),
    "a second loss": WorkerLost(now_ticks=9, worker=3),
    "a second end": WorkerFinished(now_ticks=9, worker=3),
    "a second joining": WorkerJoined(now_ticks=9, worker=0, iteration=1),
    "a push that leaves an iteration out": PushReceived(now_ticks=9, worker=0, iteration=2),
    "a push of an iteration that was pushed": PushReceived(now_ticks=9, worker=0, iteration=0),
    "a second push before the pull": PushReceived(now_ticks=9, worker=1, iteration=2),
    "the same push twice": PushReceived(now_ticks=9, worker=1, iteration=1),
    "an empty push twice": PushReceived(now_ticks=9, worker=1, iteration=1, empty=True),
    "a pull without a push": PullRequested(now_ticks=9, worker=0, iteration=0),
    "a pull before its push": PullRequested(now_ticks=9, worker=0, iteration=1),
    "a pull of another iteration": PullRequested(now_ticks=9, worker=1, iteration=0),
    "a second pull": PullRequested(now_ticks=9, worker=2, iteration=1),
    "a repeated pull of a worker that never joined": PullRepeated(now_ticks=9, worker=4, iteration=0),
    "a repeated pull of a worker that was lost": PullRepeated(now_ticks=9, worker=3, iteration=1),
    "a repeated pull of a worker that has not pulled": PullRepeated(now_ticks=9, worker=1, iteration=2),
    "a repeated pull for an iteration whose pull is under way": PullRepeated(
        now_ticks=9, worker=2, iteration=1
    ),
    "a repeated pull for an iteration that was pushed": PullRepeated(now_ticks=9, worker=0, iteration=0),
    "a repeated pull for an iteration to come": PullRepeated(now_ticks=9, worker=0, iteration=2),
}


def begun(sync: SyncModel, host: str = "alone") -> CheckedShard:
    """Four workers, one whole iteration, and a little more: see `REFUSED`."""
    checked = CheckedShard(HOSTS[host](sync))
    legal = checked.legal
    for _ in range(4):
        checked.tell(legal.join())
    for worker in range(4):
        checked.tell(legal.push(worker))
    for worker in range(4):
        checked.tell(legal.pull(worker))
    checked.fire_timers()
    assert not legal.waiting
    checked.tell(legal.leave(3, lost=True))
    for worker in (1, 2):
        checked.tell(legal.push(worker))
    checked.tell(legal.pull(2))
    return checked


def test_the_table_has_every_model() -> None:
    assert {type(sync) for sync in TABLE} == set(MODELS.values())


@every_model
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_keeps_its_promise(sync: SyncModel, promise: Callable[[SyncModel], None]) -> None:
    promise(sync)


@every_model
@pytest.mark.parametrize("what", REFUSED)
def test_is_refused_and_changes_nothing(sync: SyncModel, what: str) -> None:
    checked = begun(sync, "hosted")
    control = copy.deepcopy(checked)
    checked.refuse(REFUSED[what])
    checked.machine.validate()
    future: list[AnyEvent] = [checked.legal.push(0), checked.legal.pull(1)]
    for event in future:
        assert checked.tell(event) == control.tell(event)


@every_model
@every_host
def test_who_leaves_is_never_answered_any_more(sync: SyncModel, host: str) -> None:
    checked = begun(sync, host)
    checked.tell(checked.legal.leave(2, lost=True))
    actions = [
        *checked.tell(checked.legal.push(0)),
        *checked.tell(checked.legal.pull(0)),
        *checked.tell(checked.legal.pull(1)),
    ]
    actions += checked.fire_timers()
    answered = {action.worker for action in actions if isinstance(action, AnswerPull)}
    assert answered == {0, 1}


@every_model_without_times
@pytest.mark.parametrize("seed", [0, 1, *thorough(2, 3, 4)])
def test_time_may_stand_still_or_leap(sync: SyncModel, seed: int) -> None:
    """What a shard decides does not hang on the clock: the same events at other times, the same actions."""
    draw = random.Random(seed)
    choices = [draw.randrange(10_000) for _ in range(60)]
    still, leaping = CheckedShard(sync.at_shard()), CheckedShard(sync.at_shard())
    for choice in choices:
        leaping.legal.now_ticks += draw.choice([0, 1, 3 * 10**9, 10**18])
        still.walk([choice])
        leaping.walk([choice])
        assert snapshot(still.machine) == snapshot(leaping.machine)
    assert still.updates == leaping.updates


@every_model
@every_host
@pytest.mark.parametrize(
    "event",
    [
        IterationFinished(now_ticks=0, worker=0, iteration=0),
        IterationStarted(now_ticks=0, worker=0, iteration=1),
        SyncRequested(now_ticks=0, worker=0, source="script", number=0, sync="asp"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_shard_that_is_told_what_only_the_coordinator_hears_is_our_bug(
    sync: SyncModel, host: str, event: AnyEvent
) -> None:
    with pytest.raises(InternalError, match=type(event).__name__):
        HOSTS[host](sync).handle(event)


# -- at the coordinator -----------------------------------------------------------------------------------

COORDINATORS: dict[str, Callable[[SyncModel], Machine]] = {
    "alone": lambda sync: cast(Machine, sync.at_coordinator()),
    "hosted": lambda sync: JobSync(str(sync)),
}

every_coordinator = pytest.mark.parametrize("host", COORDINATORS)


def planner_of(sync: SyncModel, host: str) -> Machine:
    """Two workers that have finished an iteration each; worker 1 has not begun its next, worker 2 was lost."""
    planner = COORDINATORS[host](sync)
    for worker in range(3):
        planner.handle(WorkerJoined(now_ticks=0, worker=worker))
    for worker in range(2):
        planner.handle(IterationFinished(now_ticks=1, worker=worker, iteration=0))
    if sync.needs_starts:
        planner.handle(IterationStarted(now_ticks=1, worker=0, iteration=1))
    planner.handle(WorkerLost(now_ticks=1, worker=2))
    return planner


REFUSED_BY_COORDINATOR: dict[str, AnyEvent] = {
    "an iteration of a worker that never joined": IterationFinished(now_ticks=2, worker=7, iteration=0),
    "an iteration of a worker that was lost": IterationFinished(now_ticks=2, worker=2, iteration=0),
    "the loss of a worker that never joined": WorkerLost(now_ticks=2, worker=7),
    "a second loss": WorkerLost(now_ticks=2, worker=2),
    "the end of a worker that was lost": WorkerFinished(now_ticks=2, worker=2),
    "a second joining": WorkerJoined(now_ticks=2, worker=0),
    "the same iteration twice": IterationFinished(now_ticks=2, worker=0, iteration=0),
    "an iteration that leaves one out": IterationFinished(now_ticks=2, worker=0, iteration=5),
}
REFUSED_BY_PLANNER: dict[str, AnyEvent] = {
    "a stop that was not planned": IterationFinished(now_ticks=2, worker=0, iteration=1, superstep=0),
    "a stop for another superstep": IterationFinished(now_ticks=2, worker=0, iteration=1, superstep=1),
}
REFUSED_BY_SPECULATOR: dict[str, AnyEvent] = {
    "an iteration that was not begun": IterationFinished(now_ticks=2, worker=1, iteration=1),
    "a second beginning": IterationStarted(now_ticks=2, worker=0, iteration=1),
    "a beginning of an iteration that is over": IterationStarted(now_ticks=2, worker=1, iteration=0),
    "a beginning that leaves an iteration out": IterationStarted(now_ticks=2, worker=1, iteration=2),
    "a beginning of a worker that never joined": IterationStarted(now_ticks=2, worker=7, iteration=0),
    "a beginning of a worker that was lost": IterationStarted(now_ticks=2, worker=2, iteration=0),
}


@every_planned_model
@pytest.mark.parametrize("what", REFUSED_BY_COORDINATOR | REFUSED_BY_PLANNER | REFUSED_BY_SPECULATOR)
def test_is_refused_by_the_coordinator_and_changes_nothing(sync: SyncModel, what: str) -> None:
    if what in (REFUSED_BY_PLANNER if sync.needs_starts else REFUSED_BY_SPECULATOR):
        return  # not one of its own
    event = (REFUSED_BY_COORDINATOR | REFUSED_BY_PLANNER | REFUSED_BY_SPECULATOR)[what]
    planner = planner_of(sync, "hosted")
    before = snapshot(planner)
    with pytest.raises(InvalidEventError, match=rf"worker {event.worker}\b"):
        planner.handle(event)
    assert snapshot(planner) == before
    planner.validate()


@every_planned_model
@every_coordinator
@pytest.mark.parametrize(
    "event",
    [
        PushReceived(now_ticks=1, worker=0, iteration=1),
        PullRequested(now_ticks=1, worker=0, iteration=0),
        PullRepeated(now_ticks=1, worker=0, iteration=1),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_coordinator_that_is_told_what_only_shards_hear_is_our_bug(
    sync: SyncModel, host: str, event: AnyEvent
) -> None:
    with pytest.raises(InternalError, match=type(event).__name__):
        planner_of(sync, host).handle(event)


# -- validate() finds what is wrong -----------------------------------------------------------------------

BROKEN: dict[str, tuple[SyncModel, Callable[[Machine], None]]] = {
    "a worker that nobody counts": (BSP(), lambda machine: vars(machine)["counts"].count.update({9: 0})),
    "a slowest that is ahead of somebody": (
        SSP(),
        lambda machine: setattr(vars(machine)["counts"], "slowest", 9),
    ),
    "a pull filed under no round": (BSP(), lambda machine: vars(machine)["_filed_under"].update({0: 7})),
    "a deferred pull of a worker that is not live": (
        NaiveWaiting(delay_s=0.5),
        lambda machine: vars(machine)["_deferred"].update({9: 7}),
    ),
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

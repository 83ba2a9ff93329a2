"""What the models are to one another: SSP(0) waits where BSP does, SSP(inf) is ASP, and what SSP(3) bounds."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.sync import ASP, BSP, SSP, SyncModel
from paceline.sync.actions import AnswerPull, AnyAction

from .world import Life, walk

# A busy machine is no failure.
patiently = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

CHOICES = st.lists(st.integers(0, 9999), min_size=60, max_size=120)


def side_by_side(
    one: SyncModel, other: SyncModel, choices: list[int]
) -> list[tuple[list[AnyAction], list[AnyAction]]]:
    """The actions of both, event by event, while the same events are legal for both."""
    lives = Life(one.at_shard()), Life(other.at_shard())
    actions = []
    for choice in choices:
        event, same = (life.world.pick(choice) for life in lives)
        assert event == same
        actions.append((lives[0].tell(event), lives[1].tell(event)))
    return actions


def releases(actions: list[AnyAction]) -> list[AnyAction]:
    return [action for action in actions if isinstance(action, AnswerPull)]


@patiently
@given(CHOICES)
def test_ssp_0_waits_exactly_where_bsp_does(choices: list[int]) -> None:
    for ssp, bsp in side_by_side(SSP(staleness=0), BSP(), choices):
        assert releases(ssp) == releases(bsp)


@patiently
@given(CHOICES)
def test_ssp_inf_is_asp_and_never_waits(choices: list[int]) -> None:
    for ssp, asp in side_by_side(SSP(staleness=math.inf), ASP(), choices):
        assert ssp == asp
    life = Life(SSP(staleness=math.inf).at_shard())
    for choice in choices:
        walk(life, [choice])
        assert not life.world.waiting


@patiently
@given(CHOICES, st.integers(2, 4))
def test_under_ssp_3_nobody_starts_an_iteration_more_than_3_ahead_of_the_slowest(
    choices: list[int], workers: int
) -> None:
    life = Life(SSP(staleness=3).at_shard())
    for _ in range(workers):
        life.tell(life.world.join())
    started = dict.fromkeys(range(workers), 0)  # worker -> the iteration that it computes, or did last
    largest = 0
    for choice in choices:
        # Nobody leaves or joins, so iterations may be compared as they are; worker 0 is slow.
        movable = [worker for worker in range(workers) if worker not in life.world.waiting]
        worker = movable[choice % len(movable)]
        if worker == 0 and choice % 5:
            worker = movable[-1]
        actions = life.tell(life.world.push(worker)) + life.tell(life.world.pull(worker))
        for action in releases(actions):
            assert isinstance(action, AnswerPull)
            started[action.worker] = action.iteration + 1
        slowest = min(life.world.label.values())
        largest = max(largest, max(started.values()) - slowest)
        assert largest <= 3


def test_under_ssp_3_the_bound_is_reached() -> None:
    life = Life(SSP(staleness=3).at_shard())
    for _ in range(2):
        life.tell(life.world.join())
    answered = 0
    while not life.world.waiting:
        life.tell(life.world.push(1))
        answered += len(life.tell(life.world.pull(1)))
    assert answered == 3  # it has started its iterations 0, 1, 2 and 3 and waits for leave to start 4

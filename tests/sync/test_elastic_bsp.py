"""ElasticBSP by hand: the shard's half and the planner's half."""

from __future__ import annotations

import pytest

from paceline.sync import ElasticBSP, Machine
from paceline.sync.actions import (
    AnswerPull,
    AnyAction,
    ApplyMean,
    ApplyPush,
    DropPush,
    HoldPush,
    Plan,
    PublishPlan,
)
from paceline.sync.events import IterationFinished, Stop, WorkerFinished, WorkerJoined, WorkerLost
from paceline.sync.ticks import in_ticks
from paceline.testing.promises import CheckedShard

# -- at a shard -------------------------------------------------------------------------------------------


def shard_with(*workers: int) -> CheckedShard:
    checked = CheckedShard(ElasticBSP().at_shard())
    for worker in workers:
        checked.tell(WorkerJoined(now_ticks=0, worker=worker))
    return checked


def stop(superstep: int, *members: int) -> Stop:
    return Stop(superstep=superstep, members=members)


def push_and_pull(
    checked: CheckedShard, worker: int, flag: Stop | None = None, *, empty: bool = False
) -> list[AnyAction]:
    return checked.tell(checked.legal.push(worker, empty=empty, stop=flag)) + checked.tell(
        checked.legal.pull(worker)
    )


def test_without_a_plan_it_is_asp() -> None:
    checked = shard_with(0, 1)
    for iteration in range(20):
        assert push_and_pull(checked, 0) == [ApplyPush(0, iteration), AnswerPull(0, iteration)]
    assert push_and_pull(checked, 1, empty=True) == [DropPush(1, 0), AnswerPull(1, 0)]


def test_the_last_member_to_stop_releases_the_others_after_the_mean() -> None:
    checked = shard_with(0, 1, 2)
    flag = stop(0, 0, 1, 2)
    assert push_and_pull(checked, 2, flag) == [HoldPush(2, 0)]
    assert push_and_pull(checked, 0, flag) == [HoldPush(0, 0)]
    assert push_and_pull(checked, 1, flag) == [
        HoldPush(1, 0),
        ApplyMean(((0, 0), (1, 0), (2, 0))),
        AnswerPull(2, 0),
        AnswerPull(0, 0),
        AnswerPull(1, 0),
    ]


def test_a_member_may_run_on_until_it_stops() -> None:
    checked = shard_with(0, 1)
    push_and_pull(checked, 0, stop(0, 0, 1))
    for iteration in range(10):
        assert push_and_pull(checked, 1) == [ApplyPush(1, iteration), AnswerPull(1, iteration)]
    assert checked.legal.waiting == {0}


def test_who_is_no_member_neither_waits_nor_is_waited_for() -> None:
    checked = shard_with(0, 1, 2)
    push_and_pull(checked, 0, stop(0, 0, 1))
    assert push_and_pull(checked, 2) == [ApplyPush(2, 0), AnswerPull(2, 0)]
    assert ApplyMean(((0, 0), (1, 0))) in push_and_pull(checked, 1, stop(0, 0, 1))


def test_a_pull_that_comes_after_the_close_is_answered_at_once() -> None:
    checked = shard_with(0, 1)
    checked.tell(checked.legal.push(0, stop=stop(0, 0, 1)))
    checked.tell(checked.legal.push(1, stop=stop(0, 0, 1)))
    assert checked.tell(checked.legal.pull(0)) == [AnswerPull(0, 0)]
    assert checked.tell(checked.legal.pull(1)) == [AnswerPull(1, 0)]


@pytest.mark.parametrize("end", [WorkerLost, WorkerFinished])
def test_the_end_of_the_last_member_closes_the_superstep(end: type[WorkerLost | WorkerFinished]) -> None:
    checked = shard_with(0, 1, 2)
    push_and_pull(checked, 0, stop(0, 0, 1, 2))
    push_and_pull(checked, 1, stop(0, 0, 1, 2))
    assert checked.tell(end(now_ticks=in_ticks(1.0), worker=2)) == [
        ApplyMean(((0, 0), (1, 0))),
        AnswerPull(0, 0),
        AnswerPull(1, 0),
    ]


def test_a_member_that_left_before_anybody_stopped_is_not_waited_for() -> None:
    checked = shard_with(0, 1)
    checked.tell(WorkerLost(now_ticks=in_ticks(1.0), worker=1))
    assert push_and_pull(checked, 0, stop(0, 0, 1)) == [
        HoldPush(0, 0),
        ApplyMean(((0, 0),)),
        AnswerPull(0, 0),
    ]


def test_the_held_push_of_a_lost_worker_stays_in_the_mean_and_is_not_answered() -> None:
    checked = shard_with(0, 1)
    push_and_pull(checked, 1, stop(0, 0, 1))
    checked.tell(WorkerLost(now_ticks=in_ticks(1.0), worker=1))
    assert push_and_pull(checked, 0, stop(0, 0, 1)) == [
        HoldPush(0, 0),
        ApplyMean(((0, 0), (1, 0))),
        AnswerPull(0, 0),
    ]


def test_an_empty_push_stops_its_worker_and_is_not_in_the_mean() -> None:
    checked = shard_with(0, 1)
    assert push_and_pull(checked, 0, stop(0, 0, 1), empty=True) == [DropPush(0, 0)]
    assert push_and_pull(checked, 1, stop(0, 0, 1)) == [
        HoldPush(1, 0),
        ApplyMean(((1, 0),)),
        AnswerPull(0, 0),
        AnswerPull(1, 0),
    ]


def test_a_superstep_of_empty_pushes_updates_nothing_and_releases_everybody() -> None:
    checked = shard_with(0, 1)
    push_and_pull(checked, 0, stop(0, 0, 1), empty=True)
    assert push_and_pull(checked, 1, stop(0, 0, 1), empty=True) == [
        DropPush(1, 0),
        AnswerPull(0, 0),
        AnswerPull(1, 0),
    ]
    assert checked.updates == []


def test_two_supersteps_may_be_open_and_close_for_themselves() -> None:
    checked = shard_with(0, 1, 2, 3)
    push_and_pull(checked, 0, stop(0, 0, 1))
    push_and_pull(checked, 2, stop(1, 2, 3))
    assert push_and_pull(checked, 3, stop(1, 2, 3))[1] == ApplyMean(((2, 0), (3, 0)))
    assert checked.legal.waiting == {0}
    assert push_and_pull(checked, 1, stop(0, 0, 1))[1] == ApplyMean(((0, 0), (1, 0)))


def test_a_loss_may_close_two_supersteps_at_once() -> None:
    checked = shard_with(0, 1, 2)
    push_and_pull(checked, 0, stop(0, 0, 2))
    push_and_pull(checked, 1, stop(1, 1, 2))
    assert checked.tell(WorkerLost(now_ticks=in_ticks(1.0), worker=2)) == [
        ApplyMean(((0, 0),)),
        AnswerPull(0, 0),
        ApplyMean(((1, 0),)),
        AnswerPull(1, 0),
    ]


def test_a_push_for_a_superstep_that_closed_without_it_is_applied_at_once() -> None:
    checked = shard_with(0, 1)
    push_and_pull(checked, 1, stop(1, 1))
    assert push_and_pull(checked, 0, stop(0, 0)) == [ApplyPush(0, 0), AnswerPull(0, 0)]


def test_a_superstep_stays_closed_when_an_earlier_one_closes_after_it() -> None:
    checked = shard_with(0, 1, 2)
    push_and_pull(checked, 0, stop(0, 0, 1))
    push_and_pull(checked, 2, stop(1, 2))
    push_and_pull(checked, 1, stop(0, 0, 1))
    assert push_and_pull(checked, 1, stop(1, 0, 1, 2)) == [ApplyPush(1, 1), AnswerPull(1, 1)]


def test_a_member_that_was_lost_and_has_joined_anew_is_not_waited_for() -> None:
    """The superstep's member is gone; the newcomer of the same number is a member of the next one only."""
    checked = shard_with(0, 1)
    push_and_pull(checked, 0)
    push_and_pull(checked, 1)
    checked.tell(WorkerLost(now_ticks=in_ticks(1.0), worker=1))
    checked.tell(WorkerJoined(now_ticks=in_ticks(1.0), worker=1, iteration=1, superstep=1))
    assert push_and_pull(checked, 0, stop(0, 0, 1)) == [
        HoldPush(0, 1),
        ApplyMean(((0, 1),)),
        AnswerPull(0, 1),
    ]
    assert push_and_pull(checked, 0, stop(1, 0, 1)) == [HoldPush(0, 2)]
    assert ApplyMean(((0, 2), (1, 1))) in push_and_pull(checked, 1, stop(1, 0, 1))


# -- at the coordinator -----------------------------------------------------------------------------------


def planner_with(*workers: int, lookahead: int = 15) -> Machine:
    planner = ElasticBSP(lookahead=lookahead).at_coordinator()
    for worker in workers:
        assert planner.handle(WorkerJoined(now_ticks=0, worker=worker)) == []
    return planner


def notify(
    planner: Machine,
    now_s: float,
    worker: int,
    iteration: int,
    superstep: int | None = None,
    *,
    warm_up: bool = False,
    outside_s: float = 0.0,
) -> Plan | None:
    """An iteration has ended; the plan that this has brought about, if any."""
    event = IterationFinished(
        now_ticks=in_ticks(now_s),
        worker=worker,
        iteration=iteration,
        superstep=superstep,
        warm_up=warm_up,
        outside_ticks=in_ticks(outside_s),
    )
    return plan_in(planner, planner.handle(event))


def plan_in(planner: Machine, actions: list[AnyAction]) -> Plan | None:
    planner.validate()
    plans = [action.plan for action in actions if isinstance(action, PublishPlan)]
    assert len(plans) == len(actions) <= 1
    return plans[0] if plans else None


def leave(planner: Machine, worker: int, *, lost: bool = True) -> Plan | None:
    return plan_in(
        planner,
        planner.handle((WorkerLost if lost else WorkerFinished)(now_ticks=in_ticks(9.0), worker=worker)),
    )


def test_the_plan_comes_with_the_slowest_workers_second_iteration() -> None:
    planner = planner_with(0, 1)
    for iteration in range(9):
        assert notify(planner, iteration + 1.0, 0, iteration) is None
    assert notify(planner, 5.0 + 5, 1, 0) is None
    assert notify(planner, 20.0, 1, 1) is not None


def test_the_plan_picks_the_iterations_that_end_closest_together() -> None:
    planner = planner_with(0, 1, lookahead=4)
    for iteration in range(2):
        notify(planner, 2.0 * (iteration + 1), 0, iteration)  # ends at 6, 8, 10, 12
    notify(planner, 1.0, 1, 0)
    plan = notify(planner, 4.5, 1, 1)  # ends at 8, 11.5, 15, 18.5
    assert plan == Plan(superstep=0, stops=((0, 3), (1, 2)), wait_ticks=0, barrier_ticks=in_ticks(8.0))


def test_of_plans_with_the_same_wait_the_earliest_is_taken() -> None:
    planner = planner_with(0, 1, lookahead=5)
    for iteration in range(2):
        for worker in range(2):
            plan = notify(planner, iteration + 1.0, worker, iteration)
    assert plan is not None
    assert plan.stops == ((0, 2), (1, 2))


def test_members_are_in_ascending_order_whatever_the_order_of_joining() -> None:
    planner = planner_with(2, 0, 1)
    for iteration in range(2):
        for worker in (1, 2, 0):
            plan = notify(planner, iteration + 1.0, worker, iteration)
    assert plan is not None
    assert plan.members == (0, 1, 2)


def test_there_is_one_plan_for_each_superstep() -> None:
    planner = planner_with(0)
    assert notify(planner, 1.0, 0, 0) is None
    assert notify(planner, 2.0, 0, 1) is not None
    for iteration in range(2, 30):
        assert notify(planner, iteration + 1.0, 0, iteration) is None


def test_two_iterations_in_one_tick_of_the_clock_still_make_a_plan() -> None:
    planner = planner_with(0, 1)
    for iteration in range(2):
        for worker in range(2):
            plan = notify(planner, 1e9, worker, iteration)
    assert plan is not None
    assert plan.wait_ticks < 1e-6


def test_the_warm_up_of_an_accelerator_is_neither_monitored_nor_predicted() -> None:
    """As in the plan whose iterations end closest together, with warm-ups of 30 s in between."""
    planner = planner_with(0, 1, lookahead=4)
    for iteration, end_s in enumerate([62.0, 64.0]):
        notify(planner, end_s, 0, iteration)  # ends at 66, 68, 70, 72
    assert notify(planner, 29.0, 1, 0, warm_up=True) is None
    assert notify(planner, 31.0, 1, 1) is None
    assert notify(planner, 61.0, 1, 2, warm_up=True) is None
    plan = notify(planner, 64.5, 1, 3)  # ends at 68, 71.5, 75, 78.5
    assert plan == Plan(superstep=0, stops=((0, 3), (1, 4)), wait_ticks=0, barrier_ticks=in_ticks(68.0))


def test_what_a_script_did_outside_of_training_is_not_predicted() -> None:
    """As in the plan whose iterations end closest together, with an evaluation of 30 s before the last one."""
    planner = planner_with(0, 1, lookahead=4)
    for iteration, end_s in enumerate([32.0, 34.0]):
        notify(planner, end_s, 0, iteration)  # ends at 36, 38, 40, 42
    notify(planner, 1.0, 1, 0)
    plan = notify(planner, 34.5, 1, 1, outside_s=30.0)  # ends at 38, 41.5, 45, 48.5
    assert plan == Plan(superstep=0, stops=((0, 3), (1, 2)), wait_ticks=0, barrier_ticks=in_ticks(38.0))


def test_monitoring_begins_anew_after_each_barrier() -> None:
    planner = planner_with(0, 1)
    for superstep in range(4):
        first = superstep * 3
        for iteration in (first, first + 1):
            assert notify(planner, iteration + 1.0, 0, iteration) is None
        assert notify(planner, first + 2.0, 1, first) is None
        plan = notify(planner, first + 2.5, 1, first + 1)
        assert plan is not None
        assert plan.superstep == superstep
        assert notify(planner, first + 2.75, 0, first + 2, superstep) is None
        assert notify(planner, first + 3.0, 1, first + 2, superstep) is None


def test_a_worker_that_is_late_to_stop_holds_up_the_next_superstep() -> None:
    planner = planner_with(0, 1)
    for iteration in range(2):
        for worker in range(2):
            notify(planner, iteration + 1.0, worker, iteration)
    notify(planner, 3.0, 0, 2, 0)
    for iteration in range(2, 10):
        assert notify(planner, iteration + 1.0, 1, iteration) is None
    notify(planner, 11.0, 1, 10, 0)
    notify(planner, 12.0, 0, 3)
    notify(planner, 12.0, 1, 11)
    notify(planner, 13.0, 0, 4)
    plan = notify(planner, 13.0, 1, 12)
    assert plan is not None
    assert plan.superstep == 1


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "finished"])
def test_the_plan_does_not_wait_for_one_that_left_while_it_was_monitored(lost: bool) -> None:
    planner = planner_with(0, 1, 2)
    for iteration in range(2):
        for worker in range(2):
            assert notify(planner, iteration + 1.0, worker, iteration) is None
    plan = leave(planner, 2, lost=lost)
    assert plan is not None
    assert plan.members == (0, 1)


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "finished"])
def test_the_next_superstep_does_not_wait_for_one_that_left_before_it_stopped(lost: bool) -> None:
    planner = planner_with(0, 1)
    for iteration in range(2):
        for worker in range(2):
            notify(planner, iteration + 1.0, worker, iteration)
    notify(planner, 3.0, 0, 2, 0)
    assert leave(planner, 1, lost=lost) is None
    assert notify(planner, 4.0, 0, 3) is None
    plan = notify(planner, 5.0, 0, 4)
    assert plan is not None
    assert (plan.superstep, plan.members) == (1, (0,))


def test_a_worker_that_joins_in_a_superstep_is_a_member_of_the_next() -> None:
    planner = planner_with(0)
    notify(planner, 1.0, 0, 0)
    planner.handle(WorkerJoined(now_ticks=in_ticks(1.5), worker=1))
    plan = notify(planner, 2.0, 0, 1)
    assert plan is not None
    assert plan.members == (0,)
    notify(planner, 3.0, 0, 2, 0)
    for iteration in range(2):
        notify(planner, 4.0 + iteration, 0, 3 + iteration)
        plan = notify(planner, 4.0 + iteration, 1, iteration)
    assert plan is not None
    assert (plan.superstep, plan.members) == (1, (0, 1))


def test_a_worker_that_joins_before_the_first_iteration_ends_is_a_member() -> None:
    planner = planner_with(0)
    planner.handle(WorkerJoined(now_ticks=in_ticks(0.5), worker=1))
    notify(planner, 1.0, 0, 0)
    assert notify(planner, 2.0, 0, 1) is None
    notify(planner, 2.0, 1, 0)
    plan = notify(planner, 3.0, 1, 1)
    assert plan is not None
    assert plan.members == (0, 1)


def test_a_worker_that_joins_right_after_a_barrier_waits_for_the_next() -> None:
    planner = planner_with(0)
    for iteration in range(2):
        notify(planner, iteration + 1.0, 0, iteration)
    notify(planner, 3.0, 0, 2, 0)
    planner.handle(WorkerJoined(now_ticks=in_ticks(3.5), worker=1))  # nobody has pushed since the barrier
    notify(planner, 4.0, 0, 3)
    plan = notify(planner, 5.0, 0, 4)
    assert plan is not None
    assert (plan.superstep, plan.members) == (1, (0,))


def test_a_late_worker_gets_a_superstep_when_all_members_left_while_they_were_monitored() -> None:
    planner = planner_with(0)
    notify(planner, 1.0, 0, 0)
    planner.handle(WorkerJoined(now_ticks=in_ticks(1.5), worker=1))
    plans = [leave(planner, 0)]
    plans += [notify(planner, 2.0 + iteration, 1, iteration) for iteration in range(10)]
    assert any(plan is not None and plan.members == (1,) for plan in plans)


def test_there_are_plans_for_those_who_join_after_all_have_left() -> None:
    planner = planner_with(0)
    notify(planner, 1.0, 0, 0)
    notify(planner, 2.0, 0, 1)
    assert leave(planner, 0) is None
    for worker in (1, 2):
        planner.handle(WorkerJoined(now_ticks=in_ticks(3.0), worker=worker))
    plans = [
        notify(planner, 4.0 + iteration, worker, iteration) for iteration in range(10) for worker in (1, 2)
    ]
    assert any(plan is not None for plan in plans)

"""DSPS: how the bound on the gap follows the workers' speeds."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import pytest

from paceline.sync import DSPS
from paceline.sync.actions import AnswerPull
from paceline.sync.conditions import Intervals
from paceline.sync.dsps import AdaptiveMachine
from paceline.sync.events import PushReceived, WorkerJoined
from paceline.sync.ticks import in_ticks
from paceline.testing.promises import CheckedShard


def bounds(sync: DSPS, compute_s: Sequence[float], pushes: int) -> list[int]:
    """The values that s takes while steady workers push without any delay in between, repetitions left out."""
    machine = sync.at_shard()
    assert isinstance(machine, AdaptiveMachine)
    checked = CheckedShard(machine)
    for _ in compute_s:
        checked.tell(checked.legal.join())
    ends = [(in_ticks(time_s), worker) for worker, time_s in enumerate(compute_s)]
    heapq.heapify(ends)
    seen = [machine.staleness]
    for _ in range(pushes):
        checked.legal.now_ticks, worker = heapq.heappop(ends)
        actions = checked.tell(checked.legal.push(worker)) + checked.tell(checked.legal.pull(worker))
        for action in actions:
            if isinstance(action, AnswerPull):
                end = checked.legal.now_ticks + in_ticks(compute_s[action.worker])
                heapq.heappush(ends, (end, action.worker))
        if machine.staleness != seen[-1]:
            seen.append(machine.staleness)
    return seen


def test_the_bound_becomes_the_ratio_of_the_compute_times_and_stays() -> None:
    assert bounds(DSPS(lower=1, upper=9), [1.0, 1.0, 1.0, 3.0], 60) == [1, 3]


@pytest.mark.parametrize("lower", [0, 1, 2])
def test_waiting_does_not_make_a_fast_worker_slow(lower: int) -> None:
    """From push to push, both workers take 5 s as soon as the fast one waits in every iteration."""
    assert bounds(DSPS(lower=lower, upper=9), [1.0, 5.0], 60) == [lower, 5]


def test_a_ratio_between_two_numbers_is_rounded_up() -> None:
    assert bounds(DSPS(lower=1, upper=9), [1.0, 2.5], 60) == [1, 3]


def test_the_bound_stays_within_its_limits() -> None:
    assert bounds(DSPS(lower=2, upper=4), [1.0, 1.0], 60) == [2]
    assert bounds(DSPS(lower=2, upper=4), [1.0, 8.0], 60) == [2, 4]


def test_the_interval_that_ends_with_the_warm_up_of_an_accelerator_does_not_count() -> None:
    """DSSP and DSPS predict from these intervals."""
    intervals = Intervals()
    intervals.note(WorkerJoined(now_ticks=0, worker=0))
    seen = []
    for iteration, (now_ticks, warm_up) in enumerate([(9, True), (10, False), (19, True), (20, False)]):
        push = PushReceived(now_ticks=now_ticks, worker=0, iteration=iteration, warm_up=warm_up)
        intervals.note(push)
        seen.append(intervals.interval_ticks.get(0))
    assert seen == [None, 1, 1, 1]


def test_what_a_script_did_outside_of_training_is_not_part_of_an_interval() -> None:
    """The last interval contains an evaluation of 90 ticks, of which the push tells."""
    intervals = Intervals()
    intervals.note(WorkerJoined(now_ticks=0, worker=0))
    for iteration, (now_ticks, outside_ticks) in enumerate([(10, 0), (20, 0), (120, 90)]):
        push = PushReceived(now_ticks=now_ticks, worker=0, iteration=iteration, outside_ticks=outside_ticks)
        intervals.note(push)
        assert intervals.interval_ticks[0] == 10

"""BSP by hand: everybody waits for everybody."""

from __future__ import annotations

import pytest

from paceline.sync import BSP
from paceline.sync.actions import AnswerPull, ApplyMean, DropPush, HoldPush
from paceline.sync.events import PullRequested, PushReceived, WorkerFinished, WorkerJoined, WorkerLost
from paceline.sync.ticks import in_ticks
from paceline.testing.promises import CheckedShard


def joined(*workers: int) -> CheckedShard:
    checked = CheckedShard(BSP().at_shard())
    for worker in workers:
        checked.tell(WorkerJoined(now_ticks=0, worker=worker))
    return checked


def push(worker: int, iteration: int = 0, *, empty: bool = False) -> PushReceived:
    return PushReceived(now_ticks=in_ticks(1.0), worker=worker, iteration=iteration, empty=empty)


def pull(worker: int, iteration: int = 0) -> PullRequested:
    return PullRequested(now_ticks=in_ticks(1.0), worker=worker, iteration=iteration)


def test_slowest_worker_gates_release() -> None:
    checked = joined(0, 1, 2)
    for worker in (2, 0):
        assert checked.tell(push(worker)) == [HoldPush(worker, 0)]
        assert checked.tell(pull(worker)) == []
    assert checked.tell(push(1)) == [
        HoldPush(1, 0),
        ApplyMean(((0, 0), (1, 0), (2, 0))),
        AnswerPull(2, 0),
        AnswerPull(0, 0),
    ]
    assert checked.tell(pull(1)) == [AnswerPull(1, 0)]


def test_the_mean_is_in_worker_order_whatever_the_order_of_arrival() -> None:
    for order in [(0, 1, 2), (2, 1, 0), (1, 2, 0)]:
        checked = joined(2, 0, 1)
        actions = [action for worker in order for action in checked.tell(push(worker))]
        assert actions[-1] == ApplyMean(((0, 0), (1, 0), (2, 0)))


def test_a_worker_alone_never_waits() -> None:
    checked = joined(5)
    for iteration in range(3):
        assert checked.tell(push(5, iteration)) == [HoldPush(5, iteration), ApplyMean(((5, iteration),))]
        assert checked.tell(pull(5, iteration)) == [AnswerPull(5, iteration)]


def test_a_pull_that_comes_after_its_round_has_closed_is_answered_at_once() -> None:
    checked = joined(0, 1)
    checked.tell(push(0))
    checked.tell(push(1))
    checked.tell(pull(1))
    checked.tell(push(1, 1))
    assert checked.tell(pull(0)) == [AnswerPull(0, 0)]


@pytest.mark.parametrize("end", [WorkerLost, WorkerFinished])
def test_the_end_of_the_slowest_closes_the_round(end: type[WorkerLost | WorkerFinished]) -> None:
    checked = joined(0, 1, 2)
    for worker in (0, 1):
        checked.tell(push(worker))
        checked.tell(pull(worker))
    assert checked.tell(end(now_ticks=in_ticks(2.0), worker=2)) == [
        ApplyMean(((0, 0), (1, 0))),
        AnswerPull(0, 0),
        AnswerPull(1, 0),
    ]


def test_the_held_push_of_a_lost_worker_stays_in_the_mean() -> None:
    checked = joined(0, 1, 2)
    checked.tell(push(2))
    checked.tell(pull(2))
    assert checked.tell(WorkerLost(now_ticks=in_ticks(2.0), worker=2)) == []
    checked.tell(push(0))
    assert checked.tell(push(1))[1:] == [ApplyMean(((0, 0), (1, 0), (2, 0)))]


def test_what_the_last_worker_leaves_behind_is_applied() -> None:
    checked = joined(0, 1)
    checked.tell(push(0))
    assert checked.tell(WorkerLost(now_ticks=in_ticks(2.0), worker=0)) == []
    assert checked.tell(WorkerLost(now_ticks=in_ticks(2.0), worker=1)) == [ApplyMean(((0, 0),))]


def test_an_empty_push_counts_as_progress_and_is_not_in_the_mean() -> None:
    checked = joined(0, 1)
    assert checked.tell(push(0, empty=True)) == [DropPush(0, 0)]
    checked.tell(pull(0))
    assert checked.tell(push(1)) == [HoldPush(1, 0), ApplyMean(((1, 0),)), AnswerPull(0, 0)]


def test_a_round_of_empty_pushes_updates_nothing_and_releases_everybody() -> None:
    checked = joined(0, 1)
    checked.tell(push(0, empty=True))
    checked.tell(pull(0))
    assert checked.tell(push(1, empty=True)) == [DropPush(1, 0), AnswerPull(0, 0)]
    assert checked.updates == []


def test_a_worker_that_joins_takes_part_in_the_current_round() -> None:
    checked = joined(0, 1)
    checked.tell(push(0))
    checked.tell(pull(0))
    checked.tell(WorkerJoined(now_ticks=in_ticks(1.5), worker=2, iteration=7))
    assert checked.tell(push(1)) == [HoldPush(1, 0)]
    assert checked.tell(push(2, 7)) == [
        HoldPush(2, 7),
        ApplyMean(((0, 0), (1, 0), (2, 7))),
        AnswerPull(0, 0),
    ]


def test_labels_need_not_agree_between_workers() -> None:
    checked = joined()
    for worker, label in [(0, 10), (1, 0)]:
        checked.tell(WorkerJoined(now_ticks=0, worker=worker, iteration=label))
    checked.tell(push(0, 10))
    assert checked.tell(push(1, 0))[1:] == [ApplyMean(((0, 10), (1, 0)))]


def test_the_run_goes_on_with_those_who_join_after_all_have_left() -> None:
    checked = joined(0)
    checked.tell(push(0))
    checked.tell(pull(0))
    checked.tell(WorkerFinished(now_ticks=in_ticks(2.0), worker=0))
    for worker in (1, 2):
        checked.tell(WorkerJoined(now_ticks=in_ticks(3.0), worker=worker))
    checked.tell(push(1))
    assert checked.tell(pull(1)) == []
    assert checked.tell(push(2)) == [HoldPush(2, 0), ApplyMean(((1, 0), (2, 0))), AnswerPull(1, 0)]

"""BSP by hand: everybody waits for everybody."""

from __future__ import annotations

import pytest

from paceline.sync import BSP
from paceline.sync.actions import AnswerPull, ApplyMean, DropPush, HoldPush
from paceline.sync.events import PullRequested, PushReceived, WorkerFinished, WorkerJoined, WorkerLost

from .world import Life


def joined(*workers: int) -> Life:
    life = Life(BSP().at_shard())
    for worker in workers:
        life.tell(WorkerJoined(now_s=0.0, worker=worker))
    return life


def push(worker: int, iteration: int = 0, *, empty: bool = False) -> PushReceived:
    return PushReceived(now_s=1.0, worker=worker, iteration=iteration, empty=empty)


def pull(worker: int, iteration: int = 0) -> PullRequested:
    return PullRequested(now_s=1.0, worker=worker, iteration=iteration)


def test_slowest_worker_gates_release() -> None:
    life = joined(0, 1, 2)
    for worker in (2, 0):
        assert life.tell(push(worker)) == [HoldPush(worker, 0)]
        assert life.tell(pull(worker)) == []
    assert life.tell(push(1)) == [
        HoldPush(1, 0),
        ApplyMean(((0, 0), (1, 0), (2, 0))),
        AnswerPull(2, 0),
        AnswerPull(0, 0),
    ]
    assert life.tell(pull(1)) == [AnswerPull(1, 0)]


def test_the_mean_is_in_worker_order_whatever_the_order_of_arrival() -> None:
    for order in [(0, 1, 2), (2, 1, 0), (1, 2, 0)]:
        life = joined(2, 0, 1)
        actions = [action for worker in order for action in life.tell(push(worker))]
        assert actions[-1] == ApplyMean(((0, 0), (1, 0), (2, 0)))


def test_a_worker_alone_never_waits() -> None:
    life = joined(5)
    for iteration in range(3):
        assert life.tell(push(5, iteration)) == [HoldPush(5, iteration), ApplyMean(((5, iteration),))]
        assert life.tell(pull(5, iteration)) == [AnswerPull(5, iteration)]


def test_a_pull_that_comes_after_its_round_has_closed_is_answered_at_once() -> None:
    life = joined(0, 1)
    life.tell(push(0))
    life.tell(push(1))
    life.tell(pull(1))
    life.tell(push(1, 1))
    assert life.tell(pull(0)) == [AnswerPull(0, 0)]


@pytest.mark.parametrize("end", [WorkerLost, WorkerFinished])
def test_the_end_of_the_slowest_closes_the_round(end: type[WorkerLost | WorkerFinished]) -> None:
    life = joined(0, 1, 2)
    for worker in (0, 1):
        life.tell(push(worker))
        life.tell(pull(worker))
    assert life.tell(end(now_s=2.0, worker=2)) == [
        ApplyMean(((0, 0), (1, 0))),
        AnswerPull(0, 0),
        AnswerPull(1, 0),
    ]


def test_the_held_push_of_a_lost_worker_stays_in_the_mean() -> None:
    life = joined(0, 1, 2)
    life.tell(push(2))
    life.tell(pull(2))
    assert life.tell(WorkerLost(now_s=2.0, worker=2)) == []
    life.tell(push(0))
    assert life.tell(push(1))[1:] == [ApplyMean(((0, 0), (1, 0), (2, 0)))]


def test_what_the_last_worker_leaves_behind_is_applied() -> None:
    life = joined(0, 1)
    life.tell(push(0))
    assert life.tell(WorkerLost(now_s=2.0, worker=0)) == []
    assert life.tell(WorkerLost(now_s=2.0, worker=1)) == [ApplyMean(((0, 0),))]


def test_an_empty_push_counts_as_progress_and_is_not_in_the_mean() -> None:
    life = joined(0, 1)
    assert life.tell(push(0, empty=True)) == [DropPush(0, 0)]
    life.tell(pull(0))
    assert life.tell(push(1)) == [HoldPush(1, 0), ApplyMean(((1, 0),)), AnswerPull(0, 0)]


def test_a_round_of_empty_pushes_updates_nothing_and_releases_everybody() -> None:
    life = joined(0, 1)
    life.tell(push(0, empty=True))
    life.tell(pull(0))
    assert life.tell(push(1, empty=True)) == [DropPush(1, 0), AnswerPull(0, 0)]
    assert life.updates == []


def test_a_worker_that_joins_takes_part_in_the_current_round() -> None:
    life = joined(0, 1)
    life.tell(push(0))
    life.tell(pull(0))
    life.tell(WorkerJoined(now_s=1.5, worker=2, iteration=7))
    assert life.tell(push(1)) == [HoldPush(1, 0)]
    assert life.tell(push(2, 7)) == [
        HoldPush(2, 7),
        ApplyMean(((0, 0), (1, 0), (2, 7))),
        AnswerPull(0, 0),
    ]


def test_labels_need_not_agree_between_workers() -> None:
    life = joined()
    for worker, label in [(0, 10), (1, 0)]:
        life.tell(WorkerJoined(now_s=0.0, worker=worker, iteration=label))
    life.tell(push(0, 10))
    assert life.tell(push(1, 0))[1:] == [ApplyMean(((0, 10), (1, 0)))]


def test_the_run_goes_on_with_those_who_join_after_all_have_left() -> None:
    life = joined(0)
    life.tell(push(0))
    life.tell(pull(0))
    life.tell(WorkerFinished(now_s=2.0, worker=0))
    for worker in (1, 2):
        life.tell(WorkerJoined(now_s=3.0, worker=worker))
    life.tell(push(1))
    assert life.tell(pull(1)) == []
    assert life.tell(push(2)) == [HoldPush(2, 0), ApplyMean(((1, 0), (2, 0))), AnswerPull(1, 0)]

"""ASP by hand: nobody waits."""

from __future__ import annotations

from paceline.sync import ASP
from paceline.sync.actions import AnswerPull, ApplyPush, DropPush
from paceline.sync.events import WorkerLost
from paceline.testing.promises import CheckedShard


def joined(workers: int) -> CheckedShard:
    checked = CheckedShard(ASP().at_shard())
    for _ in range(workers):
        checked.tell(checked.legal.join())
    return checked


def test_each_push_is_applied_on_arrival_at_scale_1() -> None:
    checked = joined(3)
    assert checked.tell(checked.legal.push(1)) == [ApplyPush(1, 0, scale=1.0)]


def test_the_fastest_never_waits_for_one_that_has_not_begun() -> None:
    checked = joined(2)
    for iteration in range(50):
        checked.tell(checked.legal.push(0))
        assert checked.tell(checked.legal.pull(0)) == [AnswerPull(0, iteration)]


def test_an_empty_push_is_dropped_and_its_pull_answered() -> None:
    checked = joined(1)
    assert checked.tell(checked.legal.push(0, empty=True)) == [DropPush(0, 0)]
    assert checked.tell(checked.legal.pull(0)) == [AnswerPull(0, 0)]


def test_a_loss_asks_for_nothing() -> None:
    checked = joined(2)
    checked.tell(checked.legal.push(0))
    assert checked.tell(WorkerLost(now_ticks=1, worker=1)) == []
    assert checked.tell(checked.legal.pull(0)) == [AnswerPull(0, 0)]

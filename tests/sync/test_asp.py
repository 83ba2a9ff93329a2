"""ASP by hand: nobody waits."""

from __future__ import annotations

from paceline.sync import ASP
from paceline.sync.actions import AnswerPull, ApplyPush, DropPush
from paceline.sync.events import WorkerLost

from .world import Life


def joined(workers: int) -> Life:
    life = Life(ASP().at_shard())
    for _ in range(workers):
        life.tell(life.world.join())
    return life


def test_each_push_is_applied_on_arrival_at_scale_1() -> None:
    life = joined(3)
    assert life.tell(life.world.push(1)) == [ApplyPush(1, 0, scale=1.0)]


def test_the_fastest_never_waits_for_one_that_has_not_begun() -> None:
    life = joined(2)
    for iteration in range(50):
        life.tell(life.world.push(0))
        assert life.tell(life.world.pull(0)) == [AnswerPull(0, iteration)]


def test_an_empty_push_is_dropped_and_its_pull_answered() -> None:
    life = joined(1)
    assert life.tell(life.world.push(0, empty=True)) == [DropPush(0, 0)]
    assert life.tell(life.world.pull(0)) == [AnswerPull(0, 0)]


def test_a_loss_asks_for_nothing() -> None:
    life = joined(2)
    life.tell(life.world.push(0))
    assert life.tell(WorkerLost(now_s=1.0, worker=1)) == []
    assert life.tell(life.world.pull(0)) == [AnswerPull(0, 0)]

"""SSP by hand: nobody starts an iteration more than s ahead of the slowest."""

from __future__ import annotations

import math
import random

import pytest

from paceline.core.shard import Shard
from paceline.errors import ConfigurationError
from paceline.sync import SSP
from paceline.sync.actions import AnswerPull, AnyAction, ApplyPush, DropPush
from paceline.sync.events import PullRequested, PushReceived, WorkerFinished, WorkerJoined, WorkerLost
from paceline.testing.promises import CheckedShard
from paceline.trace import Header, Memory
from tests.support.marks import thorough


def joined(staleness: float, workers: int) -> CheckedShard:
    checked = CheckedShard(SSP(staleness=staleness).at_shard())
    for _ in range(workers):
        checked.tell(checked.legal.join())
    return checked


def iterate(checked: CheckedShard, worker: int, times: int = 1) -> list[AnyAction]:
    """Push and pull so many times; the actions of the last pull."""
    actions: list[AnyAction] = []
    for _ in range(times):
        checked.tell(checked.legal.push(worker))
        actions = checked.tell(checked.legal.pull(worker))
    return actions


@pytest.mark.parametrize("staleness", [0, 1, 3, 10])
def test_the_fastest_waits_with_exactly_s_plus_1_more_pushes_than_the_slowest(staleness: int) -> None:
    checked = joined(staleness, 2)
    for iteration in range(staleness):
        assert iterate(checked, 0) == [AnswerPull(0, iteration)]
    assert iterate(checked, 0) == []
    assert checked.legal.label[0] == staleness + 1


class Staleness:
    """A shard under SSP(s) whose workers iterate in any order, and the staleness of each push."""

    def __init__(self, sync: SSP, workers: int) -> None:
        self.memory = Memory(Header(sync=str(sync), host="shard"))
        self.shard = Shard(0, [sync], recorder=self.memory)
        self.iterations = [0] * workers
        for worker in range(workers):
            self.shard.handle(WorkerJoined(now_ticks=0, worker=worker))

    def iterate(self, worker: int) -> int:
        """Push, then pull; return the staleness of the push."""
        iteration = self.iterations[worker]
        self.iterations[worker] += 1
        self.shard.handle(PushReceived(now_ticks=0, worker=worker, iteration=iteration))
        [(_, _, staleness)] = self.memory.trace.entries[-1].staleness
        self.shard.handle(PullRequested(now_ticks=0, worker=worker, iteration=iteration))
        return staleness


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("workers", [2, 3, 6])
def test_the_bound_on_staleness_is_attained(staleness: int, workers: int) -> None:
    """Worker 0 pulls when it is s ahead of the others, and pushes when they are s + 1 ahead of it."""
    run = Staleness(SSP(staleness=staleness), workers)
    for _ in range(staleness):
        run.iterate(0)
    for _ in range(2 * staleness + 1):
        for other in range(1, workers):
            run.iterate(other)
    assert len(run.shard.waits()) == workers - 1  # none of them may go further
    assert run.iterate(0) == (2 * staleness + 1) * (workers - 1)


@pytest.mark.parametrize("execution", ["soft", "lazy"])
@pytest.mark.parametrize("runs", [60, *thorough(200)])
def test_no_push_is_staler_than_2s_plus_1_updates_of_each_other_worker(execution: str, runs: int) -> None:
    draw = random.Random(2)
    largest = 0.0
    for _ in range(runs):
        staleness, workers = draw.randint(0, 3), draw.randint(2, 4)
        run = Staleness(SSP(staleness=staleness, execution=execution), workers)
        for _ in range(60):
            waiting = run.shard.waits()
            # Long bursts of one worker at a time come closer to the bound than a fair order.
            worker = draw.choice([worker for worker in range(workers) if worker not in waiting])
            for _ in range(draw.choice([1, 1, 2 * staleness + 1])):
                if worker not in run.shard.waits():
                    share = run.iterate(worker) / ((2 * staleness + 1) * (workers - 1))
                    largest = max(largest, share)
                    assert share <= 1
    assert largest == 1


def test_slowest_worker_gates_release() -> None:
    checked = joined(1, 3)
    iterate(checked, 0, 2)
    iterate(checked, 1, 1)
    assert checked.legal.waiting == {0}
    assert checked.tell(checked.legal.push(2)) == [ApplyPush(2, 0), AnswerPull(0, 1)]


def test_the_second_slowest_releases_nobody() -> None:
    checked = joined(0, 3)
    iterate(checked, 0)
    assert checked.tell(checked.legal.push(1)) == [ApplyPush(1, 0)]
    assert checked.legal.waiting == {0}


def test_pushes_of_the_waiting_have_been_applied_already() -> None:
    checked = joined(0, 2)
    assert checked.tell(checked.legal.push(0)) == [ApplyPush(0, 0)]
    assert checked.tell(checked.legal.pull(0)) == []


@pytest.mark.parametrize("end", [WorkerLost, WorkerFinished])
def test_the_end_of_the_slowest_completes_several_rounds_at_once(
    end: type[WorkerLost | WorkerFinished],
) -> None:
    checked = joined(2, 4)
    iterate(checked, 0, 3)  # waits: 3 ahead of worker 3
    iterate(checked, 1, 3)
    iterate(checked, 2, 2)
    assert checked.legal.waiting == {0, 1}
    assert checked.tell(end(now_ticks=1, worker=3)) == [AnswerPull(0, 2), AnswerPull(1, 2)]


def test_after_several_rounds_at_once_a_newcomer_is_level_with_the_slowest_that_is_left() -> None:
    checked = joined(3, 3)
    iterate(checked, 0, 4)
    iterate(checked, 1, 3)
    checked.tell(WorkerLost(now_ticks=1, worker=2))  # min c goes from 0 to 3
    checked.tell(checked.legal.join())
    for _ in range(2):
        assert iterate(checked, 0) != []
    assert checked.legal.waiting == set()  # 3 ahead of worker 1 and of the newcomer


def test_the_end_of_a_waiting_worker_frees_its_place() -> None:
    checked = joined(0, 2)
    iterate(checked, 0)
    checked.tell(WorkerLost(now_ticks=1, worker=0))
    assert checked.tell(checked.legal.push(1)) == [ApplyPush(1, 0)]  # and nobody is answered
    assert checked.tell(checked.legal.pull(1)) == [AnswerPull(1, 0)]


def test_an_empty_push_of_the_slowest_releases_the_others() -> None:
    checked = joined(0, 2)
    iterate(checked, 0)
    assert checked.tell(checked.legal.push(1, empty=True)) == [DropPush(1, 0), AnswerPull(0, 0)]


def test_a_worker_that_joins_is_level_with_the_slowest() -> None:
    checked = joined(1, 2)
    for _ in range(4):
        iterate(checked, 0)
        iterate(checked, 1)
    checked.tell(WorkerJoined(now_ticks=1, worker=2))
    assert iterate(checked, 2) == [AnswerPull(2, 0)]  # one ahead of the others
    assert iterate(checked, 2) == []  # two ahead
    assert iterate(checked, 0) == [AnswerPull(0, 4)]
    assert checked.tell(checked.legal.push(1)) == [ApplyPush(1, 4), AnswerPull(2, 1)]


def test_infinite_staleness_never_waits() -> None:
    checked = joined(math.inf, 2)
    assert iterate(checked, 0, 1000) == [AnswerPull(0, 999)]


@pytest.mark.parametrize("staleness", [-1, 0.5, math.nan, -math.inf, True, "3", None])
def test_a_staleness_that_is_no_whole_number_is_refused(staleness: float) -> None:
    with pytest.raises(ConfigurationError, match=r"ssp: staleness is .*expected a whole number >= 0"):
        SSP(staleness=staleness)

"""Joins, changes of the sync model and extensions exclude each other in one place, and go through the same phases."""

from __future__ import annotations

import pytest

from paceline.core.job_sync import JobSync
from paceline.core.layout import Layout, ModelSpec, OptimizerSpec, round_robin
from paceline.core.members import Members
from paceline.core.messages import (
    Answer,
    ChangePublished,
    ExtensionReady,
    JoinOffered,
    JoinProposed,
    Started,
    SyncRequested,
    WorkerWelcomed,
)
from paceline.core.reconfiguration import WAITS_FOR, Reconfigurations
from paceline.core.requests import Send
from paceline.core.worker import Worker
from paceline.errors import ProtocolError
from paceline.sync import events
from paceline.sync.schedule import read_schedule

LAYOUT = Layout((), (), {})
MODEL = ModelSpec(LAYOUT, OptimizerSpec("", (), ()), ())


class Run:
    """Two workers that take part, and a third and a fourth that are invited."""

    def __init__(self) -> None:
        self.members = Members(4, absent=(2, 3))
        self.members.invite(2)
        self.sync = JobSync("asp")
        for worker in (0, 1):
            self.sync.handle(events.WorkerJoined(now_ticks=0, worker=worker))
        self.queue = Reconfigurations(round_robin(shards=1, servers=1), self.sync)

    def admit(self, worker: int) -> list[object]:
        self.members.admit(worker)
        self.queue.joining.append(worker)
        return [each.message for each in self.queue.begin_join(self.members) if isinstance(each, Send)]

    def change(self) -> None:
        self.sync.handle(events.SyncRequested(now_ticks=0, worker=0, source="script", number=0, sync="bsp"))

    def complete_change(self) -> None:
        for worker in (0, 1):
            self.sync.handle(events.IterationFinished(now_ticks=0, worker=worker, iteration=0, change=1))
        self.sync.handle(events.IterationStarted(now_ticks=0, worker=0, iteration=1))

    def complete_join(self, worker: int) -> None:
        self.queue.offered(0, JoinOffered(worker, 0, 1, 1))
        joined = self.queue.welcomed(0, WorkerWelcomed(worker, 0, 1))
        assert joined is not None
        assert joined.worker == worker

    def extend(self) -> None:
        self.queue.extend(LAYOUT.slice_evenly(1), {0: MODEL, 1: MODEL})

    def complete_extension(self) -> None:
        _, extension = self.queue.extended(0, ExtensionReady(0, self.queue.extensions + 1))
        assert extension is not None
        assert extension.phase == "in force"


def test_a_join_goes_from_proposed_to_agreed_to_in_force() -> None:
    run = Run()
    assert run.admit(2) == [JoinProposed(2, 0, tuple(sorted(run.members.gone)))]
    assert run.queue.join is not None
    assert str(run.queue.join.phase) == "proposed"
    run.queue.offered(0, JoinOffered(2, 0, 1, 1))
    assert str(run.queue.join.phase) == "agreed"
    assert run.queue.welcomed(0, WorkerWelcomed(2, 0, 1)) is not None
    assert run.queue.in_progress == frozenset()


def test_workers_join_one_after_another() -> None:
    run = Run()
    assert len(run.admit(2)) == 1
    assert run.admit(3) == []
    run.complete_join(2)
    assert run.queue.joining == [3]
    assert len(run.queue.begin_join(run.members)) == 1


def test_a_join_waits_for_a_change_and_for_an_extension() -> None:
    run = Run()
    run.change()
    run.extend()
    assert run.queue.in_progress == {"change", "extension"}
    assert run.admit(2) == []
    run.complete_change()
    assert run.queue.begin_join(run.members) == []
    run.complete_extension()
    assert len(run.queue.begin_join(run.members)) == 1


def test_requests_for_changes_wait_for_the_join_and_come_before_the_next_one() -> None:
    run = Run()
    run.admit(2)
    run.admit(3)
    requests = [(0, SyncRequested("script", 0, "bsp")), (1, SyncRequested("script", 0, "bsp"))]
    assert [run.queue.postpones(*request) for request in requests] == [True, True]
    run.complete_join(2)
    assert run.queue.begin_join(run.members) == []
    assert [run.queue.next_change(), run.queue.next_change(), run.queue.next_change()] == [*requests, None]
    assert len(run.queue.begin_join(run.members)) == 1


def test_a_change_does_not_wait_for_a_change_here_because_its_own_queue_is_recorded() -> None:
    run = Run()
    run.change()
    assert not run.queue.postpones(0, SyncRequested("script", 1, "ssp:staleness=1"))


def test_a_second_extension_is_refused_until_the_first_is_in_force() -> None:
    run = Run()
    run.extend()
    with pytest.raises(ProtocolError, match="cannot be extended now"):
        run.queue.require_extension(MODEL, MODEL)
    run.complete_extension()
    assert run.queue.extensions == 1
    assert run.queue.may_begin("extension")


def test_a_worker_that_leaves_before_it_has_joined_makes_way_for_the_next() -> None:
    run = Run()
    run.admit(2)
    run.admit(3)
    assert run.queue.left(2)
    assert not run.queue.left(0)
    assert len(run.queue.begin_join(run.members)) == 1
    assert run.queue.join is not None
    assert run.queue.join.worker == 3


def test_every_kind_says_what_it_waits_for() -> None:
    assert all(kinds <= WAITS_FOR.keys() for kinds in WAITS_FOR.values())
    changing = WAITS_FOR.keys() - {"cut"}
    assert WAITS_FOR["join"] == WAITS_FOR["cut"] == changing  # nothing waits for a cut


def test_a_change_awaits_each_worker_that_has_not_passed_it() -> None:
    run = Run()
    assert not run.sync.awaits(0)
    run.change()
    run.sync.handle(events.IterationFinished(now_ticks=0, worker=1, iteration=0, change=1))
    assert [run.sync.awaits(worker) for worker in (0, 1, 2)] == [True, False, False]


def test_a_change_ends_the_lockstep_even_if_the_next_model_has_it_too() -> None:
    """The workers pass the change in different iterations, so later calls find them in different iterations."""
    worker = Worker(read_schedule("bsp"), workers=2, shards=1, servers=1)
    worker.handle(Started((), (), 0, 0, ""))
    worker.handle(Answer(0, -1, 0))
    assert not worker.may_stand_in
    worker.handle(ChangePublished(events.Change(number=1, members=(0, 1), sync="bsp")))
    assert worker.may_stand_in
    worker.push()
    assert not worker.may_stand_in
    worker.handle(Answer(0, 0, 1))
    assert worker.lockstep
    assert worker.may_stand_in

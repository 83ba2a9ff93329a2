"""Changes of the sync model in mid-run, by hand: one shard's passage, and the order that the coordinator keeps."""

from __future__ import annotations

import copy
from typing import Literal

import pytest

from paceline.core.job_sync import JobSync
from paceline.core.shard import ShardSync
from paceline.errors import InternalError, InvalidEventError
from paceline.state import snapshot
from paceline.sync import ASP, BSP, SSP, DropStragglers, ElasticBSP, NaiveWaiting, SyncModel
from paceline.sync.actions import (
    AnswerPull,
    AnyAction,
    ApplyMean,
    ApplyPush,
    DropPush,
    HoldPush,
    PublishChange,
    PublishPlan,
    RestartWorker,
    SetTimer,
)
from paceline.sync.events import (
    AnyEvent,
    Change,
    IterationFinished,
    IterationStarted,
    PullRepeated,
    PullRequested,
    PushReceived,
    Stop,
    SyncRequested,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from paceline.sync.ticks import in_ticks
from paceline.testing.promises import CheckedShard


def begin(sync: SyncModel, workers: int, shard: int = 0) -> CheckedShard:
    """A shard with so many workers, all of which compute iteration 0."""
    checked = CheckedShard(ShardSync(sync, shard=shard))
    for _ in range(workers):
        checked.tell(checked.legal.join())
    return checked


def hosted(checked: CheckedShard) -> ShardSync:
    assert isinstance(checked.machine, ShardSync)
    return checked.machine


def iterate(checked: CheckedShard, worker: int, change: Change | None = None) -> list[AnyAction]:
    """One iteration: its push, and its pull."""
    return checked.tell(checked.legal.push(worker, change=change)) + checked.tell(checked.legal.pull(worker))


def to(sync: str, *members: int, number: int = 1) -> Change:
    return Change(number=number, members=members, sync=sync)


# -- at a shard -------------------------------------------------------------------------------------------


def test_asp_to_bsp_does_not_stall_the_fast_for_the_gap_that_they_had_gathered() -> None:
    checked = begin(ASP(), 2)
    for _ in range(50):
        assert iterate(checked, 0) == [
            ApplyPush(0, checked.legal.label[0] - 1),
            AnswerPull(0, checked.legal.label[0] - 1),
        ]
    change = to("bsp", 0, 1)
    assert iterate(checked, 0, change) == [
        ApplyPush(0, 50)
    ]  # its last one under ASP; now it waits for worker 1's
    assert checked.tell(checked.legal.push(1, change=change)) == [ApplyPush(1, 0), AnswerPull(0, 50)]
    assert checked.tell(checked.legal.pull(1)) == [AnswerPull(1, 0)]
    assert hosted(checked).sync == BSP()
    assert iterate(checked, 0) == [HoldPush(0, 51)]  # one round of BSP, not fifty
    assert checked.tell(checked.legal.push(1)) == [
        HoldPush(1, 1),
        ApplyMean(((0, 51), (1, 1))),
        AnswerPull(0, 51),
    ]


def test_pushes_that_are_held_go_into_a_mean_when_the_model_changes() -> None:
    checked = begin(BSP(), 3)
    change = to("asp", 0, 1, 2)
    assert iterate(checked, 2) == [HoldPush(2, 0)]
    assert iterate(checked, 1, change) == [HoldPush(1, 0)]
    # The round is complete with worker 0's push: worker 2 is answered by the old model and ends it with its next.
    assert iterate(checked, 0, change) == [
        HoldPush(0, 0),
        ApplyMean(((0, 0), (1, 0), (2, 0))),
        AnswerPull(2, 0),
    ]
    assert checked.legal.waiting == {0, 1}
    assert checked.tell(checked.legal.push(2, change=change)) == [
        HoldPush(2, 1),
        ApplyMean(((2, 1),)),
        AnswerPull(0, 0),
        AnswerPull(1, 0),
    ]
    assert checked.tell(checked.legal.pull(2)) == [AnswerPull(2, 1)]
    assert iterate(checked, 0) == [ApplyPush(0, 1), AnswerPull(0, 1)]


def test_whom_only_those_at_the_boundary_held_back_goes_on_at_once() -> None:
    """Whom the old model delays because of a slow one waits for that one's leaving, and for no boundary."""
    checked = begin(SSP(staleness=0), 2)
    assert iterate(checked, 0) == [ApplyPush(0, 0)]
    assert checked.tell(checked.legal.push(1, change=to("asp", 0, 1))) == [ApplyPush(1, 0), AnswerPull(0, 0)]
    assert checked.legal.waiting == set()


def test_a_member_that_is_lost_during_the_change_is_not_waited_for() -> None:
    checked = begin(ASP(), 3)
    change = to("bsp", 0, 1, 2)
    iterate(checked, 0, change)
    iterate(checked, 1, change)
    assert checked.legal.waiting == {0, 1}
    assert checked.tell(checked.legal.leave(2, lost=True)) == [AnswerPull(0, 0), AnswerPull(1, 0)]
    assert hosted(checked).sync == BSP()


def test_a_member_that_finishes_during_the_change_is_not_waited_for() -> None:
    checked = begin(ASP(), 2)
    iterate(checked, 0, to("bsp", 0, 1))
    assert checked.tell(checked.legal.leave(1, lost=False)) == [AnswerPull(0, 0)]


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "finished"])
@pytest.mark.parametrize("pulled", [True, False], ids=["its pull waits", "before its pull"])
def test_who_leaves_at_the_boundary_is_in_neither_model_and_what_it_pushed_stays(
    lost: bool, pulled: bool
) -> None:
    checked = begin(BSP(), 2)
    change = to("bsp", 0, 1)
    checked.tell(checked.legal.push(0, change=change))
    if pulled:
        checked.tell(checked.legal.pull(0))
    assert checked.tell(checked.legal.leave(0, lost=lost)) == []
    assert checked.tell(checked.legal.push(1, change=change)) == [HoldPush(1, 0), ApplyMean(((0, 0), (1, 0)))]
    assert checked.tell(checked.legal.pull(1)) == [AnswerPull(1, 0)]
    assert iterate(checked, 1) == [HoldPush(1, 1), ApplyMean(((1, 1),)), AnswerPull(1, 1)]


def test_when_the_last_one_of_the_old_model_is_lost_after_the_others_have_left_the_new_one_is_in_force() -> (
    None
):
    checked = begin(BSP(), 2)
    change = to("asp", 0, 1)
    iterate(checked, 0, change)
    checked.tell(checked.legal.leave(0, lost=True))
    checked.tell(checked.legal.leave(1, lost=True))
    assert hosted(checked).sync == ASP()
    checked.tell(checked.legal.join())
    assert iterate(checked, 2) == [ApplyPush(2, 0), AnswerPull(2, 0)]


def test_nobody_joins_during_the_change() -> None:
    """The coordinator makes the worker wait. At no shard does it take part before the change and after it."""
    checked = begin(ASP(), 2)
    iterate(checked, 0, to("bsp", 0, 1))
    checked.refuse(checked.legal.join())


def test_a_change_waits_until_this_shard_has_noticed_who_has_left_before_it() -> None:
    """Worker 2 has left, according to the coordinator, which therefore does not name it as a member.

    Its last push may still arrive here. At the other shards, it belongs to the old model.
    """
    checked = begin(ASP(), 3)
    change = to("bsp", 0, 1)
    iterate(checked, 0, change)
    assert iterate(checked, 1, change) == [ApplyPush(1, 0)]
    assert hosted(checked).waits() == dict.fromkeys((0, 1), "workers [2] to reach the change to bsp")
    assert checked.tell(checked.legal.push(2)) == [ApplyPush(2, 0)]
    assert checked.tell(checked.legal.leave(2, lost=False)) == [AnswerPull(0, 0), AnswerPull(1, 0)]
    assert hosted(checked).sync == BSP()
    assert iterate(checked, 0) == [HoldPush(0, 1)]


def test_who_has_left_unnoticed_and_waits_is_answered_by_the_old_model() -> None:
    checked = begin(BSP(), 3)
    change = to("asp", 0, 1)
    iterate(checked, 0, change)
    assert iterate(checked, 2) == [HoldPush(2, 0)]
    assert checked.tell(checked.legal.push(1, change=change)) == [
        HoldPush(1, 0),
        ApplyMean(((0, 0), (1, 0), (2, 0))),
        AnswerPull(2, 0),
    ]
    assert checked.tell(checked.legal.leave(2, lost=True)) == [AnswerPull(0, 0)]


def test_who_joins_after_the_change_begins_where_the_slowest_is() -> None:
    checked = begin(ASP(), 1)
    iterate(checked, 0, to("ssp:staleness=0", 0))
    for _ in range(4):
        iterate(checked, 0)
    checked.tell(checked.legal.join())
    assert iterate(checked, 0) == [ApplyPush(0, 5)]
    assert iterate(checked, 1) == [ApplyPush(1, 0), AnswerPull(0, 5), AnswerPull(1, 0)]


def test_a_second_change_follows_the_first() -> None:
    checked = begin(ASP(), 2)
    for number, sync in enumerate(["bsp", "ssp:staleness=1", "bsp"], start=1):
        change = to(sync, 0, 1, number=number)
        assert iterate(checked, 0, change)[1:] == []
        checked.tell(checked.legal.push(1, change=change))
        checked.tell(checked.legal.pull(1))
        assert str(hosted(checked).sync) == sync
        assert not checked.legal.waiting


def test_two_changes_may_follow_one_another_without_an_iteration_between() -> None:
    checked = begin(ASP(), 1)
    assert iterate(checked, 0, to("bsp", 0, number=1)) == [ApplyPush(0, 0), AnswerPull(0, 0)]
    assert iterate(checked, 0, to("asp", 0, number=2)) == [
        HoldPush(0, 1),
        ApplyMean(((0, 1),)),
        AnswerPull(0, 1),
    ]
    assert iterate(checked, 0) == [ApplyPush(0, 2), AnswerPull(0, 2)]


def test_a_flag_for_a_change_that_was_completed_without_the_worker_is_an_ordinary_push() -> None:
    """The worker was not live here yet when all others had passed: nobody waits for it any more."""
    checked = begin(ASP(), 1)
    change = to("bsp", 0, 1)
    iterate(checked, 0, change)
    checked.tell(checked.legal.join())
    assert iterate(checked, 1, change) == [HoldPush(1, 0)]
    assert iterate(checked, 0) == [
        HoldPush(0, 1),
        ApplyMean(((0, 1), (1, 0))),
        AnswerPull(1, 0),
        AnswerPull(0, 1),
    ]


def test_each_shard_takes_its_own_model_of_the_change() -> None:
    change = to("asp|ssp:staleness=2", 0)
    for shard, sync in enumerate([ASP(), SSP(staleness=2)]):
        checked = begin(BSP(), 1, shard)
        iterate(checked, 0, change)
        assert hosted(checked).sync == sync


def test_a_push_that_is_empty_passes_the_boundary_like_any_other() -> None:
    checked = begin(BSP(), 2)
    change = to("asp", 0, 1)
    assert checked.tell(checked.legal.push(0, empty=True, change=change)) == [DropPush(0, 0)]
    checked.tell(checked.legal.pull(0))
    assert checked.tell(checked.legal.push(1, empty=True, change=change)) == [
        DropPush(1, 0),
        AnswerPull(0, 0),
    ]


def test_a_late_push_of_a_round_is_dropped_also_when_it_is_the_last_before_the_change() -> None:
    checked = begin(DropStragglers(quorum=1), 2)
    assert iterate(checked, 0)[1:] == [ApplyMean(((0, 0),)), AnswerPull(0, 0)]
    assert iterate(checked, 1, to("asp", 0, 1)) == [DropPush(1, 0)]


def test_a_superstep_that_is_open_is_closed_by_the_change() -> None:
    checked = begin(ElasticBSP(), 3)
    stop = Stop(superstep=0, members=(0, 1, 2))
    checked.tell(checked.legal.push(0, stop=stop))
    checked.tell(checked.legal.pull(0))
    change = to("asp", 0, 1, 2)
    iterate(checked, 1, change)
    assert checked.legal.waiting == {0, 1}
    # Worker 0 has yet to end the old model; it is let go, since nobody is left who could stop.
    assert checked.tell(checked.legal.push(2, change=change)) == [
        ApplyPush(2, 0),
        ApplyMean(((0, 0),)),
        AnswerPull(0, 0),
    ]
    assert checked.tell(checked.legal.push(0, change=change)) == [ApplyPush(0, 1), AnswerPull(1, 0)]


def test_a_timer_of_the_old_model_fires_in_vain_during_the_change() -> None:
    checked = begin(NaiveWaiting(delay_s=1.0), 2)
    assert iterate(checked, 0, to("asp", 0, 1)) == [ApplyPush(0, 0)]
    assert hosted(checked).handle(TimerFired(now_ticks=in_ticks(1.0), worker=0, iteration=0)) == []
    assert hosted(checked).handle(TimerFired(now_ticks=in_ticks(1.0), worker=1, iteration=0)) == []


def test_a_pull_that_was_put_off_is_answered_by_its_timer_in_the_midst_of_the_change() -> None:
    checked = begin(NaiveWaiting(delay_s=1.0), 2)
    assert iterate(checked, 0)[1:] == [SetTimer(0, 0, in_ticks(1.0))]
    checked.tell(checked.legal.push(1, change=to("asp", 0, 1)))
    assert checked.fire_timers() == [AnswerPull(0, 0)]


@pytest.mark.parametrize("sync", ["naive-waiting:delay_s=2", "asp", "bsp", "elastic-bsp:lookahead=2"])
def test_a_timer_of_the_old_model_has_no_effect_on_the_new(sync: str) -> None:
    checked = begin(NaiveWaiting(delay_s=1.0), 2)
    assert iterate(checked, 1)[1:] == [SetTimer(1, 0, in_ticks(1.0))]
    checked.tell(checked.legal.leave(1, lost=True))
    iterate(checked, 0, to(sync, 0, 1))
    assert not checked.legal.waiting
    before = snapshot(checked.machine)
    assert checked.fire_timers() == []
    assert snapshot(checked.machine) == before


def test_a_pull_that_was_put_off_is_answered_by_the_old_model_although_a_change_has_begun() -> None:
    checked = begin(NaiveWaiting(delay_s=1.0), 2)
    iterate(checked, 1)
    change = to("naive-waiting:delay_s=3", 0, 1)
    assert iterate(checked, 0, change) == [ApplyPush(0, 0)]
    assert checked.fire_timers() == [AnswerPull(1, 0)]
    assert iterate(checked, 1, change)[:2] == [ApplyPush(1, 1), AnswerPull(0, 0)]


def test_a_plan_of_the_old_model_has_no_effect_on_the_new() -> None:
    """Who has a plan to follow and ends the old model first sends no flag of it any more; if one comes, from a
    worker that passed without it, it opens no superstep that anybody waits for in vain."""
    checked = begin(ElasticBSP(), 1)
    iterate(checked, 0, to("asp", 0))
    stop = Stop(superstep=0, members=(0,))
    assert checked.tell(checked.legal.push(0, stop=stop)) == [ApplyPush(0, 1)]
    assert checked.tell(checked.legal.pull(0)) == [AnswerPull(0, 1)]


def test_pulls_are_repeated_at_any_moment_of_a_change() -> None:
    checked = begin(ASP(), 2)
    change = to("bsp", 0, 1)
    iterate(checked, 0, change)
    assert checked.tell(checked.legal.repeat(1)) == [AnswerPull(1, -1)]
    checked.tell(checked.legal.push(1, change=change))
    assert checked.tell(checked.legal.repeat(0)) == [AnswerPull(0, 0)]


def test_what_waits_for_the_boundary_is_said_in_words() -> None:
    checked = begin(ASP(), 3)
    iterate(checked, 1, to("bsp", 0, 1, 2))
    assert hosted(checked).waits() == {1: "workers [0, 2] to reach the change to bsp"}
    assert hosted(checked).last_iteration(1) == 0
    assert hosted(checked).last_iteration(0) == -1


BOUNDARY = to("bsp", 0, 1, 2, 3, number=2)


def in_the_midst() -> CheckedShard:
    """Four workers under ASP, and a change to BSP of the first three: worker 0 has pushed its flag, worker 1 has
    pulled too, worker 2 computes; worker 3 was lost, and so was worker 4, which the shard notices at the end."""
    checked = begin(ASP(), 5)
    change = BOUNDARY
    checked.tell(checked.legal.push(0, change=change))
    iterate(checked, 1, change)
    checked.tell(checked.legal.leave(3, lost=True))
    return checked


REFUSED_IN_THE_MIDST: dict[str, AnyEvent] = {
    "a flag of a worker that is no member": PushReceived(
        now_ticks=in_ticks(9), worker=4, iteration=0, change=BOUNDARY
    ),
    "a flag of a worker that was lost": PushReceived(
        now_ticks=in_ticks(9), worker=3, iteration=0, change=BOUNDARY
    ),
    "a flag for an earlier change": PushReceived(
        now_ticks=in_ticks(9), worker=2, iteration=0, change=to("bsp", 2, number=1)
    ),
    "a flag twice": PushReceived(now_ticks=in_ticks(9), worker=0, iteration=0, change=BOUNDARY),
    "a flag of the wrong iteration": PushReceived(
        now_ticks=in_ticks(9), worker=2, iteration=1, change=BOUNDARY
    ),
    "a push before the pull": PushReceived(now_ticks=in_ticks(9), worker=0, iteration=1),
    "a push while the pull waits": PushReceived(now_ticks=in_ticks(9), worker=1, iteration=1),
    "a pull of another iteration": PullRequested(now_ticks=in_ticks(9), worker=0, iteration=1),
    "a second pull": PullRequested(now_ticks=in_ticks(9), worker=1, iteration=0),
    "a repeated pull before the pull": PullRepeated(now_ticks=in_ticks(9), worker=0, iteration=1),
    "a repeated pull while the pull waits": PullRepeated(now_ticks=in_ticks(9), worker=1, iteration=1),
    "a second joining before the pull": WorkerJoined(now_ticks=in_ticks(9), worker=0, iteration=1),
    "a second joining while the pull waits": WorkerJoined(now_ticks=in_ticks(9), worker=1, iteration=1),
    "a second loss": WorkerLost(now_ticks=in_ticks(9), worker=3),
    "the end of nobody": WorkerFinished(now_ticks=in_ticks(9), worker=7),
}


@pytest.mark.parametrize("what", REFUSED_IN_THE_MIDST)
def test_is_refused_in_the_midst_of_a_change_and_changes_nothing(what: str) -> None:
    checked = in_the_midst()
    control = copy.deepcopy(checked)
    checked.refuse(REFUSED_IN_THE_MIDST[what])
    last, departure = checked.legal.push(2, change=BOUNDARY), checked.legal.leave(4, lost=True)
    assert checked.tell(last) == control.tell(last) == [ApplyPush(2, 0)]
    assert checked.tell(departure) == control.tell(departure) == [AnswerPull(1, 0)]


def test_refusals_in_the_midst_of_a_change_say_which_worker() -> None:
    machine = in_the_midst().machine
    for event in REFUSED_IN_THE_MIDST.values():
        with pytest.raises(InvalidEventError, match=f"worker {event.worker}"):
            machine.handle(event)


@pytest.mark.parametrize("seed", range(4))
def test_all_that_is_illegal_is_refused_in_the_midst_of_a_change(seed: int) -> None:
    checked = in_the_midst()
    for event in checked.legal.illegal():
        checked.refuse(event)


def test_a_pull_is_not_repeated_before_the_pull_that_the_change_has_outrun() -> None:
    checked = begin(ASP(), 1)
    checked.tell(checked.legal.push(0, change=to("bsp", 0)))
    assert hosted(checked).sync == BSP()
    checked.refuse(PullRepeated(now_ticks=0, worker=0, iteration=1))


def test_who_has_yet_to_pull_after_a_change_is_answered_though_the_next_has_begun() -> None:
    """Worker 0 was answered by all shards, which is enough for the second change to be published."""
    checked = begin(ASP(), 2)
    first, second = to("bsp", 0, 1, number=1), to("asp", 0, 1, number=2)
    iterate(checked, 0, first)
    checked.tell(checked.legal.push(1, change=first))
    assert iterate(checked, 0, second) == [HoldPush(0, 1)]
    assert checked.tell(checked.legal.pull(1)) == [AnswerPull(1, 0)]
    assert checked.tell(checked.legal.push(1, change=second))[0] == HoldPush(1, 1)
    assert hosted(checked).sync == ASP()


def test_who_is_lost_with_its_pull_after_a_change_outstanding_when_the_next_has_begun_is_not_waited_for() -> (
    None
):
    checked = begin(ASP(), 2)
    first, second = to("bsp", 0, 1, number=1), to("asp", 0, 1, number=2)
    iterate(checked, 0, first)
    checked.tell(checked.legal.push(1, change=first))
    iterate(checked, 0, second)
    assert checked.tell(checked.legal.leave(1, lost=True)) == [ApplyMean(((0, 1),)), AnswerPull(0, 1)]
    assert hosted(checked).counts.count.keys() == {0}


# -- at the coordinator -----------------------------------------------------------------------------------


class Told:
    """A job's machine at the coordinator, and short words for what it is told."""

    def __init__(self, sync: str, workers: int) -> None:
        self.job = JobSync(sync)
        for worker in range(workers):
            self.tell(WorkerJoined(now_ticks=0, worker=worker))

    def tell(self, event: AnyEvent) -> list[AnyAction]:
        actions = self.job.handle(event)
        self.job.validate()
        return actions

    def ask(
        self, worker: int, number: int, sync: str, source: Literal["script", "schedule"] = "script"
    ) -> list[AnyAction]:
        at = in_ticks(1.0)
        return self.tell(SyncRequested(now_ticks=at, worker=worker, source=source, number=number, sync=sync))

    def finished(
        self, worker: int, iteration: int, change: int | None = None, now_ticks: int = in_ticks(1.0)
    ) -> list[AnyAction]:
        return self.tell(
            IterationFinished(now_ticks=now_ticks, worker=worker, iteration=iteration, change=change)
        )

    def started(self, worker: int, iteration: int, now_ticks: int = in_ticks(1.0)) -> list[AnyAction]:
        return self.tell(IterationStarted(now_ticks=now_ticks, worker=worker, iteration=iteration))

    def refuse(self, event: AnyEvent) -> None:
        before = snapshot(self.job)
        with pytest.raises(InvalidEventError, match=f"worker {event.worker}"):
            self.job.handle(event)
        assert snapshot(self.job) == before


def published(sync: str, *members: int, number: int = 1) -> list[AnyAction]:
    return [PublishChange(to(sync, *members, number=number))]


def test_the_first_request_is_published_to_everybody_live() -> None:
    told = Told("asp", 3)
    told.tell(WorkerLost(now_ticks=in_ticks(0.5), worker=1))
    assert told.ask(2, 0, "bsp") == published("bsp", 0, 2)
    assert told.job.sync == "bsp"


def test_the_same_request_of_several_workers_counts_once() -> None:
    told = Told("asp", 3)
    assert told.ask(2, 0, "bsp") == published("bsp", 0, 1, 2)
    assert told.ask(0, 0, "bsp") == []
    for worker in range(3):
        assert told.finished(worker, 0, change=1) == []
    assert told.started(2, 1) == []
    assert told.ask(1, 0, "bsp") == []  # the slow one comes to the same point of the script
    assert told.ask(1, 1, "asp") == published("asp", 0, 1, 2, number=2)


def test_a_request_of_the_schedule_and_one_of_the_script_are_two() -> None:
    told = Told("asp", 1)
    assert told.ask(0, 0, "bsp", "schedule") == published("bsp", 0)
    told.finished(0, 0, change=1)
    told.started(0, 1)
    assert told.ask(0, 0, "ssp:staleness=1", "script") == published("ssp:staleness=1", 0, number=2)


def test_a_second_request_waits_until_all_have_passed_the_first_change_and_one_was_answered() -> None:
    told = Told("asp", 2)
    told.ask(0, 0, "bsp")
    assert told.ask(0, 1, "ssp:staleness=1") == []
    assert told.finished(0, 0, change=1) == []
    assert told.finished(1, 4, change=1) == []
    assert told.started(1, 5) == published("ssp:staleness=1", 0, 1, number=2)
    assert told.started(0, 1) == []


def test_a_member_that_is_lost_is_not_waited_for() -> None:
    told = Told("asp", 2)
    told.ask(0, 0, "bsp")
    told.ask(0, 1, "ssp:staleness=1")
    told.finished(0, 0, change=1)
    assert told.tell(WorkerLost(now_ticks=in_ticks(2.0), worker=1)) == []
    assert told.started(0, 1) == published("ssp:staleness=1", 0, number=2)


def test_the_loss_of_a_member_completes_a_change_when_another_has_started_already() -> None:
    """The shards were faster to hear that worker 1 is lost than the coordinator."""
    told = Told("asp", 2)
    told.ask(0, 0, "bsp")
    told.ask(0, 1, "ssp:staleness=1")
    told.finished(0, 0, change=1)
    assert told.started(0, 1) == []
    assert told.tell(WorkerLost(now_ticks=in_ticks(2.0), worker=1)) == published(
        "ssp:staleness=1", 0, number=2
    )


def test_who_starts_late_after_the_first_change_says_nothing_of_the_second() -> None:
    told = Told("asp", 2)
    told.ask(0, 0, "bsp")
    told.ask(0, 1, "ssp:staleness=1")
    told.finished(0, 0, change=1)
    told.finished(1, 0, change=1)
    assert told.started(0, 1) == published("ssp:staleness=1", 0, 1, number=2)
    assert told.started(1, 1) == []
    told.finished(0, 1, change=2)
    told.finished(1, 1, change=2)
    told.tell(WorkerLost(now_ticks=in_ticks(2.0), worker=0))
    # No shard may have heard of the second: nobody has shown that it was answered.
    told.tell(WorkerLost(now_ticks=in_ticks(2.0), worker=1))
    assert told.tell(WorkerJoined(now_ticks=in_ticks(3.0), worker=2)) == published(
        "ssp:staleness=1", 2, number=3
    )


def test_a_change_is_certain_though_the_one_that_has_shown_it_leaves() -> None:
    told = Told("asp", 2)
    told.ask(0, 0, "bsp")
    told.finished(0, 0, change=1)
    told.started(0, 1)
    told.finished(1, 0, change=1)
    assert told.tell(WorkerLost(now_ticks=in_ticks(2.0), worker=0)) == []
    assert told.ask(1, 1, "asp") == published("asp", 1, number=2)


def test_when_all_who_have_passed_leave_unanswered_the_change_is_published_anew() -> None:
    told = Told("asp", 2)
    told.ask(0, 0, "bsp")
    told.finished(0, 0, change=1)
    told.finished(1, 0, change=1)
    assert told.tell(WorkerLost(now_ticks=in_ticks(2.0), worker=0)) == []  # worker 1 may be answered yet
    assert told.tell(WorkerLost(now_ticks=in_ticks(2.0), worker=1)) == []
    assert told.tell(WorkerJoined(now_ticks=in_ticks(3.0), worker=2)) == published("bsp", 2, number=2)


def test_a_request_for_what_is_in_force_is_no_change() -> None:
    told = Told("asp", 1)
    assert told.ask(0, 0, "asp") == []
    assert told.ask(0, 1, "bsp") == published("bsp", 0)
    assert told.ask(0, 2, "bsp") == []
    assert told.ask(0, 3, "asp") == []
    assert told.finished(0, 0, change=1) == []
    assert told.started(0, 1) == published("asp", 0, number=2)


def test_nobody_joins_at_the_coordinator_during_a_change() -> None:
    told = Told("asp", 1)
    told.ask(0, 0, "bsp")
    assert told.job.changing
    told.refuse(WorkerJoined(now_ticks=in_ticks(1.0), worker=1))
    told.finished(0, 0, change=1)
    told.started(0, 1)
    assert not told.job.changing
    assert told.tell(WorkerJoined(now_ticks=in_ticks(1.0), worker=1)) == []


def test_when_all_leave_during_a_change_the_requests_that_wait_are_for_those_who_come() -> None:
    told = Told("asp", 1)
    told.ask(0, 0, "bsp")
    told.ask(0, 1, "ssp:staleness=1")
    assert told.tell(WorkerLost(now_ticks=in_ticks(1.0), worker=0)) == []
    assert told.tell(WorkerJoined(now_ticks=in_ticks(2.0), worker=1)) == published("bsp", 1, number=2)
    assert told.job.sync == "bsp"
    assert told.finished(1, 0, change=2) == []
    assert told.started(1, 1) == published("ssp:staleness=1", 1, number=3)


@pytest.mark.parametrize(
    "flagged", [False, True], ids=["nobody has flagged a push", "one shard has a flagged push"]
)
def test_when_all_members_leave_during_a_change_the_shards_have_the_model_that_the_coordinator_has(
    flagged: bool,
) -> None:
    told = Told("bsp", 1)
    lives = [begin(BSP(), 1, shard) for shard in (0, 1)]
    told.ask(0, 0, "asp")
    if flagged:  # the other never gets it
        lives[0].tell(lives[0].legal.push(0, change=to("asp", 0)))
    assert told.tell(WorkerLost(now_ticks=in_ticks(1.0), worker=0)) == []
    for checked in lives:
        checked.tell(checked.legal.leave(0, lost=True))
        checked.tell(checked.legal.join())
    assert told.tell(WorkerJoined(now_ticks=in_ticks(1.0), worker=1)) == published("asp", 1, number=2)
    for checked in lives:
        iterate(checked, 1, to("asp", 1, number=2))
    assert [str(hosted(checked).sync) for checked in lives] == [told.job.sync] * 2


def test_elastic_bsps_planner_begins_with_the_labels_of_those_who_have_passed() -> None:
    told = Told("asp", 2)
    told.ask(0, 0, "elastic-bsp:lookahead=4")
    told.finished(0, 10, change=1, now_ticks=in_ticks(1.0))
    assert told.finished(1, 3, change=1, now_ticks=in_ticks(3.0)) == []
    assert told.started(0, 11, now_ticks=in_ticks(3.0)) == []
    assert told.started(1, 4, now_ticks=in_ticks(3.0)) == []
    for now_s, worker, iteration in [(4.0, 0, 11), (5.0, 0, 12), (6.0, 1, 4)]:
        assert told.finished(worker, iteration, now_ticks=in_ticks(now_s)) == []
    [action] = told.finished(1, 5, now_ticks=in_ticks(9.0))
    assert isinstance(action, PublishPlan)
    assert action.plan.members == (0, 1)
    assert action.plan.superstep == 0
    # Worker 0 ends its 13th to 16th iteration at 6, 7, 8 and 9 s, worker 1 its 6th at 12 s.
    assert (action.plan.stops, action.plan.wait_ticks, action.plan.barrier_ticks) == (
        ((0, 16), (1, 6)),
        in_ticks(3.0),
        in_ticks(12.0),
    )


def test_what_was_heard_of_those_who_had_passed_already_is_not_forgotten() -> None:
    """A shard may let a worker go on before the coordinator has heard that the last one has passed."""
    told = Told("asp", 2)
    told.ask(0, 0, "elastic-bsp:lookahead=1")
    told.finished(0, 0, change=1, now_ticks=in_ticks(1.0))
    assert told.started(0, 1, now_ticks=in_ticks(1.5)) == []
    assert told.finished(0, 1, now_ticks=in_ticks(2.0)) == []
    assert told.finished(0, 2, now_ticks=in_ticks(3.0)) == []
    assert told.finished(1, 0, change=1, now_ticks=in_ticks(3.5)) == []
    assert told.started(1, 1, now_ticks=in_ticks(4.0)) == []
    assert told.finished(1, 1, now_ticks=in_ticks(5.0)) == []
    [action] = told.finished(1, 2, now_ticks=in_ticks(6.0))
    assert isinstance(action, PublishPlan)
    assert action.plan.stops == ((0, 3), (1, 3))


def test_what_the_old_model_would_have_made_of_it_is_forgotten() -> None:
    told = Told("elastic-bsp:lookahead=4", 2)
    told.finished(0, 0)
    told.finished(0, 1, now_ticks=in_ticks(2.0))
    told.finished(1, 0, now_ticks=in_ticks(2.0))
    told.ask(0, 0, "asp")
    assert told.finished(1, 1, now_ticks=in_ticks(3.0)) == []  # a plan now would come too late
    told.finished(0, 2, change=1)
    told.finished(1, 2, change=1)
    assert told.started(0, 3) == []
    assert told.started(1, 3) == []
    assert told.finished(1, 3) == []


def test_a_stop_of_the_old_plan_is_heard_during_the_change_and_means_nothing() -> None:
    told = Told("elastic-bsp:lookahead=1", 1)
    told.finished(0, 0, now_ticks=in_ticks(1.0))
    assert len(told.finished(0, 1, now_ticks=in_ticks(2.0))) == 1
    told.ask(0, 0, "asp")
    assert told.tell(IterationFinished(now_ticks=in_ticks(3.0), worker=0, iteration=2, superstep=0)) == []
    assert told.finished(0, 3, change=1, now_ticks=in_ticks(4.0)) == []


SPEC_SYNC = "spec-sync:abort_time_s=1,abort_rate=0"


def watched() -> Told:
    """Worker 0 computes its iteration 1, which is watched from 1.0 to 2.0; worker 1 has pushed in between."""
    told = Told(SPEC_SYNC, 2)
    told.finished(0, 0)
    assert told.tell(IterationStarted(now_ticks=in_ticks(1.0), worker=0, iteration=1)) == [
        SetTimer(0, 1, in_ticks(2.0))
    ]
    told.finished(1, 0, now_ticks=in_ticks(1.5))
    return told


LATE = TimerFired(now_ticks=in_ticks(2.0), worker=0, iteration=1)


def test_a_timer_of_the_old_model_restarts_nobody_during_a_change() -> None:
    assert watched().tell(LATE) == [RestartWorker(0, 1)]
    told = watched()
    told.ask(0, 0, "asp")
    assert told.tell(LATE) == []


@pytest.mark.parametrize(
    "sync",
    [
        "asp",
        "spec-sync:abort_time_s=2,abort_rate=0",
        "elastic-bsp:lookahead=2",
        "asp|bsp",
    ],
)
def test_a_timer_of_the_old_model_has_no_effect_on_the_new_one(sync: str) -> None:
    told = watched()
    told.ask(0, 0, sync)
    told.started(1, 1, now_ticks=in_ticks(1.75))
    told.finished(0, 1, change=1, now_ticks=in_ticks(1.75))
    told.finished(1, 1, change=1, now_ticks=in_ticks(1.75))
    told.started(0, 2, now_ticks=in_ticks(1.75))
    before = snapshot(told.job)
    assert told.tell(LATE) == []
    assert snapshot(told.job) == before


def test_speculation_begins_with_the_first_iteration_that_starts_after_the_change() -> None:
    told = Told("asp", 2)
    told.ask(0, 0, SPEC_SYNC)
    told.finished(0, 7, change=1, now_ticks=in_ticks(1.0))
    told.finished(1, 2, change=1, now_ticks=in_ticks(1.25))
    assert (
        told.started(0, 8, now_ticks=in_ticks(1.25)) == []
    )  # the first one after the change shows that it is made, no more
    assert told.started(1, 3, now_ticks=in_ticks(1.25)) == []
    told.finished(0, 8, now_ticks=in_ticks(2.0))
    assert told.tell(IterationStarted(now_ticks=in_ticks(2.0), worker=0, iteration=9)) == [
        SetTimer(0, 9, in_ticks(3.0))
    ]
    told.finished(1, 3, now_ticks=in_ticks(2.5))
    assert told.tell(TimerFired(now_ticks=in_ticks(3.0), worker=0, iteration=9)) == [RestartWorker(0, 9)]


def test_where_the_shards_differ_the_coordinator_has_no_part() -> None:
    told = Told("asp|ssp:staleness=1", 1)
    assert told.finished(0, 0) == []
    told.refuse(IterationStarted(now_ticks=in_ticks(1.0), worker=0, iteration=1))
    assert told.tell(TimerFired(now_ticks=in_ticks(1.0), worker=0, iteration=1)) == []


@pytest.mark.parametrize(
    "sync", ["asp", "bsp", "elastic-bsp:lookahead=2", "ssp|bsp", "drop-stragglers:quorum=1"]
)
def test_a_beginning_that_no_model_asks_for_is_refused(sync: str) -> None:
    told = Told(sync, 2)
    told.finished(0, 0)
    told.refuse(IterationStarted(now_ticks=in_ticks(1.0), worker=0, iteration=1))


@pytest.mark.parametrize(
    ("sync", "said"),
    [
        ("elastic-bsp:lookahead=2", [IterationStarted(now_ticks=in_ticks(1.0), worker=0, iteration=1)]),
        (
            "elastic-bsp:lookahead=2",
            [IterationFinished(now_ticks=in_ticks(1.0), worker=0, iteration=1, superstep=0)],
        ),
        ("asp", [IterationStarted(now_ticks=in_ticks(1.0), worker=0, iteration=1)]),
        (SPEC_SYNC, [IterationStarted(now_ticks=in_ticks(1.0), worker=0, iteration=1)]),
        (
            SPEC_SYNC,
            [
                IterationFinished(now_ticks=in_ticks(1.0), worker=0, iteration=1),
                IterationFinished(now_ticks=in_ticks(1.0), worker=0, iteration=2),
            ],
        ),
    ],
    ids=str,
)
def test_what_the_new_model_would_refuse_is_refused_when_it_is_said_and_blames_nobody_else(
    sync: str, said: list[AnyEvent]
) -> None:
    """Worker 0 has passed the change and goes on under the new model; worker 1 completes the change."""
    told = Told("bsp" if sync == "asp" else "asp", 2)
    told.ask(0, 0, sync)
    told.finished(0, 0, change=1)
    told.started(0, 1)
    *allowed, last = said
    for event in allowed:
        assert told.tell(event) == []
    told.refuse(last)
    assert told.finished(1, 0, change=1) == []


def test_a_change_that_is_asked_for_out_of_turn_is_refused() -> None:
    told = Told("asp", 2)
    ask = [
        SyncRequested(now_ticks=in_ticks(1.0), worker=0, source="script", number=n, sync="bsp")
        for n in (1, 2**53)
    ]
    for event in ask:
        told.refuse(event)


def test_who_asks_for_changes_without_end_is_refused_in_the_end() -> None:
    told = Told("asp", 2)
    for number in range(1000 + 1):
        told.ask(0, number, "bsp" if number % 2 else "ssp:staleness=1")
    told.refuse(
        SyncRequested(now_ticks=in_ticks(1.0), worker=0, source="script", number=1000 + 1, sync="bsp")
    )


REFUSED_BY_JOB: dict[str, AnyEvent] = {
    "a request of a worker that never joined": SyncRequested(
        now_ticks=in_ticks(2.0), worker=7, source="script", number=1, sync="bsp"
    ),
    "a flag of a worker that has passed": IterationFinished(
        now_ticks=in_ticks(2.0), worker=0, iteration=1, change=1
    ),
    "an iteration of a worker that has yet to be answered": IterationFinished(
        now_ticks=in_ticks(2.0), worker=0, iteration=1
    ),
    "a beginning of an iteration that is not its next": IterationStarted(
        now_ticks=in_ticks(2.0), worker=0, iteration=2
    ),
    "a flag for a change to come": IterationFinished(
        now_ticks=in_ticks(2.0), worker=1, iteration=0, change=2
    ),
    "a flag of a worker that never joined": IterationFinished(
        now_ticks=in_ticks(2.0), worker=7, iteration=0, change=1
    ),
    "an iteration of a worker that was lost": IterationFinished(
        now_ticks=in_ticks(2.0), worker=2, iteration=0
    ),
    "a beginning of a worker that was lost": IterationStarted(now_ticks=in_ticks(2.0), worker=2, iteration=1),
    "a second joining of one that has passed": WorkerJoined(now_ticks=in_ticks(2.0), worker=0),
    "a second joining of one that has yet to pass": WorkerJoined(now_ticks=in_ticks(2.0), worker=1),
    "a second loss": WorkerLost(now_ticks=in_ticks(2.0), worker=2),
    "the end of nobody": WorkerFinished(now_ticks=in_ticks(2.0), worker=7),
}


@pytest.mark.parametrize("what", REFUSED_BY_JOB)
def test_is_refused_by_the_job_in_the_midst_of_a_change_and_changes_nothing(what: str) -> None:
    told = Told("asp", 3)
    told.ask(0, 0, "elastic-bsp:lookahead=2")
    told.tell(WorkerLost(now_ticks=in_ticks(1.0), worker=2))
    told.finished(0, 0, change=1)
    told.refuse(REFUSED_BY_JOB[what])


def test_a_flag_is_refused_when_no_change_is_under_way() -> None:
    told = Told("asp", 1)
    told.refuse(IterationFinished(now_ticks=in_ticks(1.0), worker=0, iteration=0, change=1))
    told.ask(0, 0, "bsp")
    told.finished(0, 0, change=1)
    told.started(0, 1)
    told.refuse(IterationFinished(now_ticks=in_ticks(1.0), worker=0, iteration=1, change=1))


def test_the_last_one_that_passes_is_not_blamed_for_what_another_has_said() -> None:
    told = Told("asp", 2)
    told.ask(0, 0, "elastic-bsp:lookahead=2")
    told.finished(0, 0, change=1)
    told.started(0, 1)
    told.refuse(IterationFinished(now_ticks=in_ticks(1.0), worker=0, iteration=7))
    told.refuse(IterationStarted(now_ticks=in_ticks(1.0), worker=0, iteration=2))
    assert told.finished(1, 0, change=1) == []


@pytest.mark.parametrize(
    "event",
    [
        PushReceived(now_ticks=in_ticks(1.0), worker=0, iteration=0),
        PullRequested(now_ticks=in_ticks(1.0), worker=0, iteration=0),
        PullRepeated(now_ticks=in_ticks(1.0), worker=0, iteration=0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_coordinator_that_is_told_what_shards_hear_is_our_bug(event: AnyEvent) -> None:
    told = Told("asp", 1)
    with pytest.raises(InternalError, match=type(event).__name__):
        told.tell(event)
    told.ask(0, 0, "bsp")
    with pytest.raises(InternalError, match=type(event).__name__):
        told.tell(event)


def test_validate_finds_a_change_that_waits_for_nobody() -> None:
    checked = in_the_midst()
    hosted(checked).counts.count.clear()
    with pytest.raises(InternalError):
        checked.machine.validate()
    told = Told("asp", 1)
    told.ask(0, 0, "bsp")
    vars(told.job)["_remaining"].clear()
    with pytest.raises(InternalError):
        told.job.validate()

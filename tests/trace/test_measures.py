"""Figures of hand-made traces, worked out by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from paceline import DistributedOptimizer
from paceline.core import shard as core
from paceline.sim import Cluster, Presence, Uniform, simulate
from paceline.sync import ASP, BSP, DropStragglers, SyncModel
from paceline.sync.actions import AnswerPull, AnyAction, ApplyMean, ApplyPush, DropPush, HoldPush
from paceline.sync.events import (
    AnyEvent,
    Change,
    PullRepeated,
    PullRequested,
    PushReceived,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from paceline.sync.ticks import in_ticks
from paceline.trace import Entry, Header, Memory, Replay, Trace
from paceline.trace.measures import Pulls, PushFates, Wait, measure, meter_of

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads


class Shard:
    """A trace in the making."""

    def __init__(self, sync: SyncModel, index: int = 0, version: int = 0) -> None:
        self._header = Header(sync=str(sync), host="shard", index=index)
        self._entries: list[Entry] = []
        self._version = version

    def note(
        self,
        event: AnyEvent,
        *actions: AnyAction,
        staleness: tuple[tuple[int, int, int], ...] = (),
        refused: str | None = None,
        gap: int = 0,
    ) -> None:
        self._version += sum(isinstance(action, ApplyPush | ApplyMean) for action in actions)
        self._entries.append(Entry(event, list(actions), refused, self._version, list(staleness), gap))

    def join(self, now_s: float, worker: int, *, refused: str | None = None) -> None:
        self.note(WorkerJoined(now_ticks=in_ticks(now_s), worker=worker), refused=refused)

    def apply(self, now_s: float, worker: int, iteration: int, stale: int = 0) -> None:
        """A push that is applied on arrival."""
        event = PushReceived(now_ticks=in_ticks(now_s), worker=worker, iteration=iteration)
        self.note(event, ApplyPush(worker, iteration), staleness=((worker, iteration, stale),))

    def hold(self, now_s: float, worker: int, iteration: int, *actions: AnyAction) -> None:
        """A push that is held, and what its arrival causes."""
        event = PushReceived(now_ticks=in_ticks(now_s), worker=worker, iteration=iteration)
        self.note(event, HoldPush(worker, iteration), *actions)

    def lose(self, now_s: float, worker: int, *actions: AnyAction) -> None:
        self.note(WorkerLost(now_ticks=in_ticks(now_s), worker=worker), *actions)

    def pull(self, now_s: float, worker: int, iteration: int, *, answered: bool = True, gap: int = 0) -> None:
        actions = [AnswerPull(worker, iteration)] if answered else []
        self.note(
            PullRequested(now_ticks=in_ticks(now_s), worker=worker, iteration=iteration),
            *actions,
            gap=gap,
        )

    def trace(self) -> Trace:
        return Trace(self._header, self._entries)


def bsp_with_two_workers(version: int = 0) -> Shard:
    """Worker 0 waits from 1 to 3 for worker 1, and from 4 to 5, when worker 1 finishes; it leaves at 6."""
    shard = Shard(BSP(), version=version)
    shard.join(0.0, 0)
    shard.join(0.0, 1)
    shard.note(PushReceived(now_ticks=in_ticks(1.0), worker=0, iteration=0), HoldPush(0, 0))
    shard.pull(1.0, 0, 0, answered=False)
    shard.note(
        PushReceived(now_ticks=in_ticks(3.0), worker=1, iteration=0),
        HoldPush(1, 0),
        ApplyMean(((0, 0), (1, 0))),
        AnswerPull(0, 0),
        staleness=((0, 0, 0), (1, 0, 0)),
    )
    shard.pull(3.0, 1, 0)
    shard.note(PushReceived(now_ticks=in_ticks(4.0), worker=0, iteration=1), HoldPush(0, 1))
    shard.pull(4.0, 0, 1, answered=False)
    shard.note(
        WorkerFinished(now_ticks=in_ticks(5.0), worker=1),
        ApplyMean(((0, 1),)),
        AnswerPull(0, 1),
        staleness=((0, 1, 0),),
    )
    shard.note(WorkerFinished(now_ticks=in_ticks(6.0), worker=0))
    return shard


def asp_with_a_fast_and_a_slow_worker() -> Shard:
    """Worker 0 pushes at 1, 2, 3 and 4, worker 1 at 4 only, computed on the first weights; both leave at 5."""
    shard = Shard(ASP())
    shard.join(0.0, 0)
    shard.join(0.0, 1)
    for iteration in range(4):
        shard.apply(iteration + 1.0, 0, iteration)
        shard.pull(iteration + 1.0, 0, iteration, gap=iteration + 1)
    shard.apply(4.0, 1, 0, stale=4)
    shard.pull(4.0, 1, 0)
    for worker in range(2):
        shard.note(WorkerFinished(now_ticks=in_ticks(5.0), worker=worker))
    return shard


def test_the_figures_of_two_workers_under_bsp() -> None:
    measures = measure([bsp_with_two_workers().trace()])
    assert measures.duration_s == 6.0
    assert measures.updates == 2
    assert measures.updates_per_s == pytest.approx(2 / 6)
    assert measures.gradients == 3  # two updates: the mean of two gradients, and one alone
    assert measures.gradients_per_s == pytest.approx(3 / 6)
    assert measures.iterations == {0: 2, 1: 1}
    assert measures.waiting_s == {0: 2.0 + 1.0, 1: 0.0}
    assert measures.waiting_share == pytest.approx(3.0 / (6.0 + 5.0))
    assert measures.mean_staleness == 0.0
    assert measures.max_staleness == 0
    assert measures.max_gap == 0
    assert measures.delayed_pulls == 2
    assert measures.dropped_pushes == 0
    assert (measures.barriers, measures.sync_cost_s, measures.predicted_sync_cost_s) == (2, 2.0 + 1.0, None)


def test_updates_before_a_resume_do_not_count() -> None:
    resumed = measure([bsp_with_two_workers(version=100).trace()])
    assert resumed == measure([bsp_with_two_workers().trace()])


def test_the_figures_of_a_fast_and_a_slow_worker_under_asp() -> None:
    measures = measure([asp_with_a_fast_and_a_slow_worker().trace()])
    assert measures.duration_s == 5.0
    assert measures.updates == measures.gradients == 5
    assert measures.left_s == {0: 5.0, 1: 5.0}
    assert measures.last_push_s == {0: 4.0, 1: 4.0}
    assert measures.iterations == {0: 4, 1: 1}
    assert measures.waiting_s == {0: 0.0, 1: 0.0}
    assert measures.waiting_share == 0.0
    assert measures.mean_staleness == pytest.approx(4 / 5)
    assert measures.max_staleness == 4
    assert measures.max_gap == 4  # worker 0 has started its iteration 4 while worker 1 was in its iteration 0
    assert measures.delayed_pulls == 0


def waits(trace: Trace) -> list[Wait]:
    """All waits in a trace, in the order of their ends."""
    pulls = Pulls()
    return [wait for entry in trace.entries if entry.refused is None for wait in pulls.ended(entry)]


def test_a_wait_is_from_the_pulls_arrival_to_its_answer() -> None:
    found = waits(bsp_with_two_workers().trace())
    assert [(each.worker, each.iteration, each.begin, each.end, each.awaited) for each in found] == [
        (0, 0, in_ticks(1.0), in_ticks(3.0), 1),
        (1, 0, in_ticks(3.0), in_ticks(3.0), -1),
        (0, 1, in_ticks(4.0), in_ticks(5.0), 1),
    ]


def test_of_several_shards_the_longest_wait_counts() -> None:
    first, second = Shard(BSP(), 0), Shard(BSP(), 1)
    for shard in (first, second):
        shard.join(0.0, 0)
        shard.join(0.0, 1)
    for shard, asked_s, answered_s in [(first, 1.0, 1.5), (second, 2.0, 4.0)]:
        shard.pull(asked_s, 0, 0, answered=False)
        shard.note(PushReceived(now_ticks=in_ticks(answered_s), worker=1, iteration=0), AnswerPull(0, 0))
    measures = measure([first.trace(), second.trace()])
    assert measures.waiting_s == {0: 2.0, 1: 0.0}
    assert measures.awaited_s == {0: 0.0, 1: 2.0}


def test_staleness_delayed_pulls_and_drops_are_counted_at_every_shard() -> None:
    shards = [Shard(ASP(), index) for index in range(2)]
    for shard, stale in zip(shards, (1, 4), strict=True):
        shard.join(0.0, 0)
        shard.apply(1.0, 0, 0, stale=stale)
        shard.pull(1.0, 0, 0, answered=False)
        shard.note(PushReceived(now_ticks=in_ticks(2.0), worker=0, iteration=1, empty=True), DropPush(0, 1))
    measures = measure([shard.trace() for shard in shards])
    assert measures.mean_staleness == 2.5
    assert measures.max_staleness == 4
    assert measures.delayed_pulls == 2
    assert measures.dropped_pushes == 2
    assert measures.gradients == 1
    assert measures.iterations == {0: 2}  # a dropped push counts as progress
    assert measures.updates == 1


def test_a_wait_that_nobody_ended_lasts_until_the_worker_is_lost() -> None:
    shard = Shard(BSP())
    shard.join(0.0, 0)
    shard.pull(1.0, 0, 0, answered=False)
    shard.note(WorkerLost(now_ticks=in_ticks(9.0), worker=0))
    measures = measure([shard.trace()])
    assert measures.waiting_s == {0: 8.0}
    assert measures.waiting_share == pytest.approx(8.0 / 9.0)
    assert measures.delayed_pulls == 1
    assert measures.barriers == 0  # nobody continued


def test_a_wait_that_nobody_ended_lasts_until_the_end_of_the_run() -> None:
    shards = [Shard(BSP(), index) for index in range(2)]
    for shard, asked_s in zip(shards, (1.0, 3.0), strict=True):
        shard.join(0.0, 0)
        shard.join(0.0, 1)
        shard.pull(asked_s, 0, 0, answered=False)
    shards[0].apply(9.0, 1, 0)
    assert measure([shard.trace() for shard in shards]).waiting_s == {0: 8.0, 1: 0.0}  # at shard 0


def test_a_pull_that_a_shard_with_another_clock_has_not_answered_waits_on_this_clock() -> None:
    traces = []
    for index, ahead_s in enumerate((0.0, 1000.0)):
        shard = Shard(BSP(), index)
        for worker in range(2):
            shard.join(ahead_s, worker)
        shard.hold(ahead_s + 1.0, 0, 0)
        shard.pull(ahead_s + 1.0, 0, 0, answered=False)
        shard.hold(ahead_s + 3.0, 1, 0)
        traces.append(shard.trace())
    assert measure(traces).waiting_s == {0: 2.0, 1: 0.0}
    assert measure(traces[::-1]).waiting_s == {0: 2.0, 1: 0.0}


def test_of_a_pull_that_one_shard_has_answered_the_longest_wait_counts() -> None:
    shards = [Shard(BSP(), index) for index in range(2)]
    for shard in shards:
        shard.join(0.0, 0)
        shard.join(0.0, 1)
        shard.pull(1.0, 0, 0, answered=False)
    shards[1].note(PushReceived(now_ticks=in_ticks(2.0), worker=1, iteration=0), AnswerPull(0, 0))
    for shard in shards:
        shard.lose(4.0, 0)
        shard.join(5.0, 0)  # with the same iteration number
        shard.pull(6.0, 0, 0, answered=False)
        shard.lose(6.5, 0)
    assert measure([shard.trace() for shard in shards]).waiting_s == {0: 3.0 + 0.5, 1: 0.0}


def test_a_worker_that_joins_again_after_it_has_finished_is_idle_only_until_then() -> None:
    shard = Shard(ASP())
    shard.join(0.0, 0)
    shard.join(0.0, 1)
    shard.note(WorkerFinished(now_ticks=in_ticks(2.0), worker=1))
    shard.join(5.0, 1)
    for worker in range(2):
        shard.note(WorkerFinished(now_ticks=in_ticks(9.0), worker=worker))
    assert measure([shard.trace()]).idle_s == {0: 0.0, 1: 3.0}


def test_a_worker_that_finishes_is_idle_even_if_one_with_its_index_had_left_early() -> None:
    shard = Shard(ASP())
    shard.join(0.0, 0)
    for joined_s in (0.0, 4.0):
        shard.join(joined_s, 1)
        shard.note(WorkerFinished(now_ticks=in_ticks(joined_s + 1.0), worker=1))
    shard.note(WorkerFinished(now_ticks=in_ticks(8.0), worker=0))
    meter = meter_of([shard.trace()], left=[1])
    assert meter is not None
    assert meter.measures().idle_s == {0: 0.0, 1: 3.0}
    assert meter.presences()[1].absent == in_ticks(3.0)


def test_a_worker_that_never_left_was_there_until_the_trace_ended() -> None:
    shard = Shard(ASP())
    shard.join(0.0, 0)
    shard.join(2.0, 1)
    shard.apply(10.0, 0, 0)
    measures = measure([shard.trace()])
    assert measures.duration_s == 10.0
    assert measures.updates_per_s == pytest.approx(0.1)


# -- gaps: what a real shard records ----------------------------------------------------------------------------


class Told:
    """A shard without tensors that is told events by hand. Everything happens at one moment."""

    def __init__(self, sync: SyncModel, workers: int) -> None:
        self._memory = Memory(Header(sync=str(sync), host="shard"))
        self._shard = core.Shard(0, [sync], recorder=self._memory)
        for worker in range(workers):
            self.tell(WorkerJoined(now_ticks=0, worker=worker))

    def tell(self, event: AnyEvent) -> None:
        self._shard.handle(event)

    def iterate(self, worker: int, iterations: range, change: Change | None = None) -> None:
        """Push and pull, several times; the last push is the worker's last one before a change."""
        for iteration in iterations:
            flag = change if iteration == iterations[-1] else None
            self.tell(PushReceived(now_ticks=in_ticks(1.0), worker=worker, iteration=iteration, change=flag))
            self.tell(PullRequested(now_ticks=in_ticks(1.0), worker=worker, iteration=iteration))

    @property
    def gaps(self) -> list[int]:
        """Of each entry that answered anybody."""
        return [
            entry.gap
            for entry in self._memory.trace.entries
            if any(isinstance(action, AnswerPull) for action in entry.actions)
        ]

    @property
    def max_gap(self) -> int:
        return measure([self._memory.trace]).max_gap


def test_a_gap_is_over_the_slowest_live_worker() -> None:
    shard = Told(ASP(), workers=2)
    shard.iterate(0, range(1))
    shard.tell(WorkerLost(now_ticks=in_ticks(1.0), worker=1))
    shard.iterate(0, range(1, 9))
    assert shard.gaps == [1, *[0] * 8]


def test_a_worker_that_joins_late_is_level_with_the_slowest() -> None:
    shard = Told(ASP(), workers=1)
    shard.iterate(0, range(5))
    shard.tell(WorkerJoined(now_ticks=in_ticks(2.0), worker=1))
    shard.iterate(1, range(2))
    assert shard.max_gap == 2  # worker 1, with 5 + 2 against worker 0's 5


def test_a_worker_that_joins_with_a_count_of_another_shard_has_that_count() -> None:
    shard = Told(ASP(), workers=1)
    shard.iterate(0, range(5))
    shard.tell(WorkerJoined(now_ticks=in_ticks(2.0), worker=1, count=4))
    shard.iterate(0, range(5, 6))
    assert shard.max_gap == 2  # worker 0, with 6 against 4


def test_a_straggler_that_is_moved_on_to_a_later_round_is_no_longer_behind() -> None:
    shard = Told(DropStragglers(quorum=1), workers=2)
    shard.iterate(0, range(5))
    shard.iterate(1, range(1))  # too late for its round: it is told to go on from V_train
    shard.tell(PushReceived(now_ticks=in_ticks(2.0), worker=1, iteration=1, progress=5))
    shard.iterate(0, range(5, 6))
    assert shard.gaps == [1, 2, 3, 4, 5, 0, 0]
    assert shard.max_gap == 5


def test_after_a_change_of_the_model_everybody_is_level() -> None:
    shard = Told(ASP(), workers=2)
    change = Change(number=1, members=(0, 1), sync="asp")
    shard.iterate(0, range(4), change)
    shard.iterate(1, range(1), change)
    shard.iterate(0, range(4, 6))
    assert shard.gaps == [1, 2, 3, 0, 0, 1, 2]


def test_a_restart_of_a_worker_is_measured_like_the_start_before_it() -> None:
    shard = Told(ASP(), workers=2)
    shard.iterate(0, range(3))
    shard.tell(PullRepeated(now_ticks=in_ticks(2.0), worker=0, iteration=3))
    assert shard.gaps == [1, 2, 3, 3]


def largest_gap(trace: Trace) -> int:
    """The largest c_p - min c of a worker whose pull was answered, by the counts of a machine told the same."""
    host = Replay(trace.header)
    return max((host.take(entry.event).gap for entry in trace.entries), default=0)


MOVED_ON = "drop-stragglers:quorum=1"


@pytest.mark.parametrize(
    "sync",
    [
        "asp",
        "ssp:staleness=2,execution=lazy",
        MOVED_ON,
        "elastic-bsp:lookahead=5",
        "spec-sync",
        "bsp|ssp:staleness=2",
        "ssp:staleness=2|drop-stragglers:quorum=2",
        "bsp@0,asp@10,ssp:staleness=1@25",
    ],
)
def test_the_largest_gap_of_a_simulation_is_that_of_the_models_own_ledger(sync: str) -> None:
    cluster = Cluster(
        compute_s=[Uniform(low=0.9, high=1.1)] * 3 + [3.0],
        servers=2,
        latency_s=0.02,
        presence={1: Presence(joins_at_s=10.0), 2: Presence(lost_at_s=15.0, back_after_s=7.0)},
    )
    result = simulate(cluster, sync, iterations=40, seed=5, record=True)
    assert result.measures.max_gap == max(map(largest_gap, result.trace[:-1]))


def test_a_straggler_that_is_moved_on_counts_from_where_it_was_moved_to() -> None:
    result = simulate(Cluster(compute_s=[1.0, 5.0]), MOVED_ON, iterations=20, record=True)
    assert result.measures.max_gap == largest_gap(result.trace[0]) == 9


def test_the_largest_gap_of_a_live_run_is_that_of_the_models_own_ledger(
    run_on_threads: RunOnThreads,
) -> None:
    def train() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

    run = run_on_threads(train, workers=2, servers=2, sync=MOVED_ON, pace=(0.002, 0.01))
    assert measure(run.shards).max_gap == max(map(largest_gap, run.shards)) > 0


# -- lives -------------------------------------------------------------------------------------------------------


def test_refused_events_change_no_figure_but_the_number_of_refused_pushes() -> None:
    honest, pestered = bsp_with_two_workers(), Shard(BSP())
    for entry in honest.trace().entries:
        event: Any = entry.event
        if isinstance(event, WorkerFinished):
            pestered.join(event.now_ticks, 0, refused="worker 0 joined, but it is live already")
        pestered.note(event, *entry.actions, staleness=tuple(entry.staleness))
        if isinstance(event, PushReceived):
            pestered.note(event, refused="it was pushed already")
        if isinstance(event, PullRequested):
            pestered.note(event, refused="it was asked for already")
        if isinstance(event, WorkerFinished) and event.worker == 1:
            pestered.note(WorkerLost(now_ticks=in_ticks(5.5), worker=1), refused="it is not live")
    expected = measure([honest.trace()])
    refused = msgspec.structs.replace(expected.pushes, refused=3)
    assert measure([pestered.trace()]) == msgspec.structs.replace(expected, pushes=refused)


def test_both_lives_of_a_worker_that_has_joined_anew_count() -> None:
    shard = Shard(ASP())
    shard.join(0.0, 0)
    shard.join(0.0, 1)
    shard.apply(1.0, 1, 0)
    shard.pull(1.0, 1, 0)
    shard.note(WorkerLost(now_ticks=in_ticks(2.0), worker=1))
    shard.join(7.0, 1)
    shard.pull(8.0, 0, 0, answered=False)
    shard.note(
        PushReceived(now_ticks=in_ticks(9.0), worker=1, iteration=1), ApplyPush(1, 1), AnswerPull(0, 0)
    )
    shard.note(WorkerFinished(now_ticks=in_ticks(10.0), worker=0))
    measures = measure([shard.trace()])
    assert measures.iterations == {0: 0, 1: 2}
    assert measures.left_s == {0: 10.0, 1: 10.0}
    assert measures.last_push_s == {1: 9.0}
    assert measures.waiting_share == pytest.approx(1.0 / (10.0 + 2.0 + 3.0))


def test_a_run_in_which_nothing_happened_has_figures_too() -> None:
    measures = measure([Shard(BSP()).trace()])
    assert measures.updates == 0
    assert measures.updates_per_s == measures.gradients_per_s == 0.0
    assert measures.left_s == measures.last_push_s == {}
    assert measures.waiting_share == 0.0
    assert measures.iterations == {}
    assert waits(Shard(BSP()).trace()) == []


# -- pushes -----------------------------------------------------------------------------------------------


def counts(**counts: int) -> PushFates:
    return PushFates(**{name: counts.get(name, 0) for name in PushFates.__struct_fields__})


def test_a_push_is_applied_by_itself_or_averaged() -> None:
    """Under BSP, the last push has no other one to be averaged with."""
    assert measure([bsp_with_two_workers().trace()]).pushes == counts(averaged=2, applied=1)
    assert measure([asp_with_a_fast_and_a_slow_worker().trace()]).pushes == counts(applied=5)


def test_dropped_and_refused_pushes_are_counted() -> None:
    shard = Shard(DropStragglers(quorum=1))
    shard.join(0.0, 0)
    shard.apply(1.0, 0, 0)
    late = PushReceived(now_ticks=in_ticks(2.0), worker=0, iteration=1)
    shard.note(late, DropPush(0, 1))
    shard.note(late, refused="it was pushed already")
    assert measure([shard.trace()]).pushes == counts(applied=1, dropped=1, refused=1)


def test_samples_are_counted_for_each_worker_without_those_of_dropped_pushes() -> None:
    shard = Shard(DropStragglers(quorum=1))
    for worker in range(2):
        shard.join(0.0, worker)
    for iteration, size in enumerate([32, 16]):
        push = PushReceived(now_ticks=in_ticks(1.0), worker=0, iteration=iteration, samples=size)
        shard.note(push, ApplyPush(0, iteration))
    shard.note(PushReceived(now_ticks=in_ticks(2.0), worker=1, iteration=0, samples=8), DropPush(1, 0))
    measures = measure([shard.trace()])
    assert measures.worker_samples == {0: 48, 1: 0}
    assert (measures.samples, measures.dropped_samples) == (48, 8)


def test_a_held_push_that_is_never_applied_is_lost() -> None:
    shard = Shard(BSP())
    for worker in range(2):
        shard.join(0.0, worker)
    shard.hold(1.0, 0, 0)
    shard.lose(2.0, 1)
    assert measure([shard.trace()]).pushes == counts(lost=1)


@pytest.mark.parametrize("only", [0, 1])
def test_a_push_that_reached_only_one_of_two_shards_is_lost(only: int) -> None:
    shards = [Shard(ASP(), index) for index in range(2)]
    for index, shard in enumerate(shards):
        shard.join(0.0, 0)
        shard.apply(1.0, 0, 0)
        if index == only:
            shard.apply(2.0, 0, 1)
        shard.lose(3.0, 0)
    assert measure([shard.trace() for shard in shards]).pushes == counts(applied=1, lost=1)


def test_a_push_that_is_averaged_after_its_worker_was_lost_can_be_lost_too() -> None:
    """Shard 1 has not received worker 0's push. Worker 0 joins again and pushes with the same label."""
    shards = [Shard(BSP(), index) for index in range(2)]
    for index, shard in enumerate(shards):
        for worker in range(2):
            shard.join(0.0, worker)
        if index == 0:
            shard.hold(1.0, 0, 0)
        shard.lose(2.0, 0)
        pushes = ((0, 0), (1, 0)) if index == 0 else ((1, 0),)
        shard.hold(3.0, 1, 0, ApplyMean(pushes))
        shard.join(4.0, 0)
        shard.hold(5.0, 0, 1)
        shard.hold(6.0, 1, 1, ApplyMean(((0, 1), (1, 1))))
    assert measure([shard.trace() for shard in shards]).pushes == counts(averaged=3, lost=1)


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:staleness=1", "drop-stragglers:quorum=2", "spec-sync"])
def test_every_push_of_a_simulation_is_counted_once(sync: str) -> None:
    cluster = Cluster(
        compute_s=[1.0, 1.3, 2.7],
        presence={2: Presence(lost_at_s=15.0, back_after_s=7.0)},
    )
    result = simulate(cluster, sync, iterations=20, shards=2, record=True)
    pushes = result.measures.pushes
    assert measure(result.trace[:2]).pushes == pushes
    total = sum(msgspec.structs.astuple(pushes))
    assert pushes.refused == 0
    assert sum(result.measures.iterations.values()) <= total <= sum(result.measures.iterations.values()) + 1
    assert result.summary["ledger"] == {"pushes": msgspec.to_builtins(pushes)}

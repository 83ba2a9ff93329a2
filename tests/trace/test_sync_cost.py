"""The cost of synchronization, c_sync: measured at every barrier, and predicted by the plans."""

from __future__ import annotations

import pytest

from paceline.sim import Cluster, Presence, Uniform, simulate
from paceline.sync.actions import AnswerPull, HoldPush, Plan, PublishPlan
from paceline.sync.events import (
    IterationFinished,
    OfShard,
    PullRepeated,
    PullRequested,
    PushReceived,
    Stop,
    WorkerJoined,
)
from paceline.sync.ticks import in_ticks
from paceline.trace import Entry, Header, Trace
from paceline.trace.measures import measure

UNEVEN = Cluster(
    compute_s=[Uniform(low=0.9, high=1.1)] * 3 + [3.0],
    servers=2,
    latency_s=0.02,
    presence={1: Presence(joins_at_s=10.0), 2: Presence(lost_at_s=15.0, back_after_s=7.0)},
)


def waits_at_barriers(shard: Trace) -> list[float]:
    """Of each event of one worker that lets others continue, the longest time for which one of them has waited."""
    asked_s: dict[int, float] = {}
    longest = []
    for entry in shard.entries:
        event = entry.event
        if isinstance(event, PullRequested):
            asked_s[event.worker] = shard.time_s(entry)
        if not isinstance(event, PullRepeated | OfShard):
            found = [
                shard.time_s(entry) - asked_s[action.worker]
                for action in entry.actions
                if isinstance(action, AnswerPull) and action.worker != event.worker
            ]
            longest += [max(found)] if found else []
    return longest


@pytest.mark.parametrize(
    "sync",
    [
        "bsp",
        "ssp:staleness=2",
        "drop-stragglers:quorum=2",
        "elastic-bsp:lookahead=5",
        "bsp@0,elastic-bsp@10,ssp:staleness=1@25",
    ],
)
def test_the_cost_is_the_sum_of_the_longest_waits_over_the_barriers(sync: str) -> None:
    result = simulate(UNEVEN, sync, iterations=40, seed=5, record=True)
    *shards, coordinator = result.trace
    longest = [waits_at_barriers(shard) for shard in shards]
    found = result.measures
    assert found.barriers == len(longest[0]) > 0
    assert found.sync_cost_s == pytest.approx(max(map(sum, longest)))
    again = measure(shards, coordinator)
    assert again.barriers == found.barriers
    assert again.sync_cost_s == pytest.approx(found.sync_cost_s)
    assert again.predicted_sync_cost_s == pytest.approx(found.predicted_sync_cost_s)
    assert (found.predicted_sync_cost_s is not None) == ("elastic" in sync)


@pytest.mark.parametrize("sync", ["asp", "naive-waiting:delay_s=0.5", "ssp:staleness=inf"])
def test_without_barriers_there_is_no_cost(sync: str) -> None:
    found = simulate(UNEVEN, sync, iterations=10).measures
    assert (found.barriers, found.sync_cost_s, found.predicted_sync_cost_s) == (0, 0.0, None)


def test_under_bsp_the_fastest_waits_for_the_slowest_in_each_round() -> None:
    found = simulate(Cluster(compute_s=[1.0, 2.0, 3.5]), "bsp", iterations=10).measures
    assert (found.barriers, found.sync_cost_s) == (10, 10 * 2.5)


@pytest.mark.parametrize("compute_s", [[2.0, 3.0], [1.0, 1.75, 2.5], [1.0, 1.375, 1.0, 3.25]])
def test_on_steady_machines_the_cost_is_what_the_plans_predict(compute_s: list[float]) -> None:
    found = simulate(Cluster(compute_s=compute_s), "elastic-bsp:lookahead=4", iterations=200).measures
    assert found.barriers > 10
    assert found.sync_cost_s == found.predicted_sync_cost_s


def test_when_a_worker_becomes_slower_the_cost_is_higher_than_predicted() -> None:
    """Worker 1 finishes iterations at 2, 4 and then, instead of at 6, at 9."""
    shard = Trace(Header(sync="elastic-bsp", host="shard"), [])
    coordinator = Trace(Header(sync="elastic-bsp", host="coordinator"), [])
    stop = Stop(superstep=0, members=(0, 1))
    plan = Plan(superstep=0, stops=((0, 5), (1, 2)), wait_ticks=in_ticks(0.25), barrier_ticks=in_ticks(6.0))
    never = Plan(superstep=1, stops=((0, 9), (1, 4)), wait_ticks=in_ticks(7.0), barrier_ticks=in_ticks(20.0))
    for worker in (0, 1):
        shard.entries.append(Entry(WorkerJoined(now_ticks=0, worker=worker)))
    shard.entries.extend(
        [
            Entry(PushReceived(now_ticks=in_ticks(5.75), worker=0, iteration=5, stop=stop), [HoldPush(0, 5)]),
            Entry(PullRequested(now_ticks=in_ticks(5.75), worker=0, iteration=5)),
            Entry(
                PushReceived(now_ticks=in_ticks(9.0), worker=1, iteration=2, stop=stop),
                [HoldPush(1, 2), AnswerPull(0, 5)],
            ),
            Entry(PullRequested(now_ticks=in_ticks(9.0), worker=1, iteration=2), [AnswerPull(1, 2)]),
        ]
    )
    for now_s, published in ((4.0, plan), (12.0, never)):
        finished = IterationFinished(now_ticks=in_ticks(now_s), worker=1, iteration=1)
        coordinator.entries.append(Entry(finished, [PublishPlan(published)]))
    found = measure([shard], coordinator)
    assert (found.barriers, found.sync_cost_s, found.predicted_sync_cost_s) == (1, 3.25, 0.25)
    assert measure([shard]).predicted_sync_cost_s is None

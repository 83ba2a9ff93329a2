"""What each worker did over time, from traces and records: complete, and in bounded memory."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest

from paceline import simulate
from paceline.core.requests import Entry
from paceline.sim import Cluster, Presence, SimResult
from paceline.trace.activity import MOST_SPANS, SPAN_UNITS_PER_S, Activity
from paceline.trace.activity_cells import KINDS, MOST_BUCKETS, Cells
from paceline.trace.recording import IterationRecord, Trace
from tests.support.random_jobs import MODELS, random_jobs

Line = tuple[float, int, Entry | IterationRecord]


def entries_of(shard: int, trace: Trace) -> Iterator[Line]:
    return ((trace.time_s(entry), shard, entry) for entry in trace.entries)


def records_of(worker: int, records: list[IterationRecord]) -> Iterator[Line]:
    return ((record.answered_s, -1 - worker, record) for record in records)


def activity_of(result: SimResult, *, records: bool = True, restore: bool = False) -> Activity:
    """Feed an activity with the traces and the records of a simulation, in the order of their times."""
    assert result.recording is not None
    shards = [trace for trace in result.recording.trace if trace.header.host == "shard"]
    activity = Activity(len(shards), shards[0].header.sync, ticks_per_s=shards[0].header.ticks_per_s)
    streams = [entries_of(index, trace) for index, trace in enumerate(shards)]
    if records:
        for worker, each in enumerate(result.recording.records):
            activity.expect_records(worker)
            streams.append(records_of(worker, each))
    at_shard = [activity.at_shard(index) for index in range(len(shards))]
    for number, (_, index, what) in enumerate(heapq.merge(*streams, key=lambda each: each[0])):
        if isinstance(what, Entry):
            at_shard[index].record(what)
        else:
            activity.record(-1 - index, what)
        if restore and number % 50 == 49:
            activity = Activity.restored(activity.state())
            at_shard = [activity.at_shard(index) for index in range(len(shards))]
    return activity


def in_cells(activity: Activity, worker: int) -> list[float]:
    seconds = activity.cells.rows[worker].seconds
    return [sum(seconds[kind :: len(KINDS)]) for kind in range(len(KINDS))]


@pytest.mark.parametrize("sync", MODELS)
def test_the_times_of_each_worker_are_those_that_workers_and_shards_have_measured(sync: str) -> None:
    """Without latency, they are exact. Computations that were aborted when the run ended have left no record."""
    cluster = Cluster(
        compute_s=[1.0, 1.25, 0.5, 3.0, 40.0],
        servers=1 if sync.startswith(("ringmaster", "rennala")) else 2,
        presence={
            1: Presence(lost_at_s=6.25, back_after_s=2.0),
            2: Presence(joins_at_s=3.5),
            3: Presence(lost_at_s=21.75),
        },
    )
    result = simulate(cluster, sync, iterations=None, until_s=50.0, record=True)
    activity = activity_of(result).closed(50.0)
    for worker, use in result.time_use.items():
        own = activity.workers[worker]
        found = dict(zip(KINDS, own.times_s, strict=True))
        assert own.iterations == result.measures.iterations[worker]
        assert found["waiting"] == pytest.approx(use.waiting_s)
        assert found["idle"] == pytest.approx(use.idle_s)
        assert found["computing"] + found["wasted"] == pytest.approx(use.computing_s + use.wasted_s)
        assert sum(own.times_s) == pytest.approx(use.present_s + use.idle_s)
        assert in_cells(activity, worker) == pytest.approx(own.times_s, rel=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_staleness_and_waiting_of_all_eras_are_those_of_the_run(seed: int) -> None:
    for cluster, sync, end in random_jobs(seed):
        result = simulate(cluster, sync, seed=seed, record=True, **end)
        activity = activity_of(result, restore=True)
        staleness: Counter[int] = Counter()
        for era in activity.eras:
            staleness.update(era.staleness)
        assert staleness == result.staleness
        waited_s = sum(total.total_s for era in activity.eras for total in era.waits.values())
        counted = sum(total.count for era in activity.eras for total in era.waits.values())
        assert counted == sum(sum(era.lengths.values()) for era in activity.eras)
        # Pulls that were never answered have waited, too, but no event has ended their waits.
        assert waited_s <= sum(result.measures.waiting_s.values()) + 1e-6
        if "until_s" not in end and not cluster.presence:
            assert waited_s == pytest.approx(sum(result.measures.waiting_s.values()))
        assert activity.progress[-1][2] == result.measures.updates


def test_updates_before_a_resume_are_in_no_era() -> None:
    result = simulate(Cluster(compute_s=[1.0, 1.0]), "bsp", iterations=10, record=True)
    assert result.recording is not None
    [trace] = [trace for trace in result.recording.trace if trace.header.host == "shard"]
    activity = Activity(1, trace.header.sync, ticks_per_s=trace.header.ticks_per_s)
    shard = activity.at_shard(0)
    for entry in trace.entries:
        shard.record(msgspec.structs.replace(entry, version=(entry.version or 0) + 100))
    [era] = Activity.restored(activity.state()).eras
    assert (era.from_updates, activity.updates) == (100, 100 + result.updates)


def test_a_worker_is_awaited_whose_push_ends_the_waits() -> None:
    result = simulate(Cluster(compute_s=[1.0, 1.0, 3.0]), "bsp", iterations=10, record=True)
    activity = activity_of(result)
    (era,) = activity.eras
    assert {key: (total.total_s, total.count) for key, total in era.waits.items()} == {
        ("push", 2): (40.0, 20)
    }
    assert [activity.workers[worker].awaited_s for worker in range(3)] == [0.0, 0.0, 40.0]
    assert era.lengths == {11: 20}  # 2 s is more than 1.024 s, and less than 2.048 s
    assert activity.spans[0].awaited == 2
    assert set(activity.cells.rows[0].awaited) == {-1, 2}


def test_a_worker_without_records_computes_from_an_answer_until_its_next_push() -> None:
    cluster = Cluster(compute_s=[1.0, 3.0], latency_s=0.25)
    result = simulate(cluster, "bsp", iterations=4, record=True)
    activity = activity_of(result, records=False)
    with_records = activity_of(result)
    for worker in range(2):
        known, guessed = with_records.workers[worker].times_s, activity.workers[worker].times_s
        assert guessed[KINDS.index("waiting")] == known[KINDS.index("waiting")]
        assert guessed[KINDS.index("transfer")] == 0.0
        assert guessed[0] == pytest.approx(
            known[0] + known[1] - 0.25
        )  # the last weights arrive after the end


def test_each_model_in_force_is_an_era() -> None:
    result = simulate(Cluster(compute_s=[1.0, 2.0], servers=2), "bsp@0,asp@5", iterations=10, record=True)
    activity = activity_of(result)
    assert [era.sync for era in activity.eras] == ["bsp", "asp"]
    assert next((each.kind, each.text) for each in activity.happenings) == ("model", "asp")
    # Worker 0 pushes once more under bsp, when worker 1 has passed the boundary.
    assert (activity.eras[1].from_s, activity.eras[1].from_updates) == (13.0, 7)
    assert ("change", 1) in activity.eras[0].waits


@pytest.mark.thorough
def test_a_long_run_needs_no_more_memory_than_a_short_one() -> None:
    cells = Cells()
    for second in range(100_000):
        cells.add(second % 3, second % len(KINDS), float(second), second + 1.0)
    assert cells.buckets <= MOST_BUCKETS
    assert sum(sum(row.seconds) for row in cells.rows.values()) == pytest.approx(100_000.0, rel=1e-4)
    for worker in range(2_000):
        cells.add(worker, 0, 0.0, 100_000.0)
    assert cells.buckets * len(cells.rows) <= 2**19
    result = simulate(Cluster(compute_s=[0.5] * 8), "asp", iterations=7_000, record=True)
    activity = activity_of(result)
    assert len(activity.spans) == MOST_SPANS
    assert not any(own.open for own in activity.workers.values())
    assert min(span.begun for span in activity.spans) >= activity.exact_from_s * SPAN_UNITS_PER_S > 0
    assert len(activity.progress) <= 2_001
    assert len(activity.state()) < 10_000_000

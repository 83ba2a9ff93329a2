"""Virtual time: the order of what happens, every sync model to the end, and what times and networks come to."""

from __future__ import annotations

import itertools
import math
import resource
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigurationError, RunFailedError, UsageError
from paceline.sim import (
    Cluster,
    Constant,
    Drifting,
    Link,
    LogNormal,
    Occasional,
    Pareto,
    Presence,
    Recorded,
    SimResult,
    Times,
    Uniform,
    simulate,
)
from paceline.sim import result as recorder
from paceline.sim.kernel import MESSAGE, TIMER, Kernel
from paceline.sync import Conditions, PullState
from paceline.sync.actions import ApplyMean, ApplyPush, DropPush, PublishPlan, ReportFault
from paceline.sync.events import PullRepeated, PullRequested, PushReceived, WorkerJoined, WorkerLost
from paceline.sync.ticks import in_ticks
from paceline.trace import Trace, read_run, replay
from paceline.trace.recording import read_records

MODELS = [
    "bsp",
    "asp",
    "ssp:staleness=2",
    "ssp:staleness=2,execution=lazy",
    "dssp:lower=1,upper=5",
    "dsps:lower=1,upper=5",
    "pssp:staleness=2",
    "dynamic-pssp:staleness=2",
    "drop-stragglers:quorum=3",
    "naive-waiting:delay_s=0.2",
    "elastic-bsp:lookahead=5",
    "spec-sync",
    "spec-sync:base=ssp:staleness=2,abort_time_s=0.3,abort_rate=0.2",
    "bsp|ssp:staleness=2",
    "bsp|drop-stragglers:quorum=3",
    "bsp@0,elastic-bsp@10,spec-sync@20,ssp:staleness=1@30",
]


def unequal(jitter: float = 0.1, *, latency_s: Times = 0.0, servers: int = 1) -> Cluster:
    """Four workers, the last one three times slower."""
    times = [
        Uniform(low=mean_s * (1 - jitter), high=mean_s * (1 + jitter)) for mean_s in (1.0, 1.0, 1.0, 3.0)
    ]
    return Cluster(compute_s=times, latency_s=latency_s, servers=servers)


def second(number: float) -> int:
    return in_ticks(number)


def test_things_happen_in_order_of_time_then_priority_then_setting() -> None:
    kernel = Kernel()
    happened: list[str] = []
    kernel.at(second(2), happened.append, "timer", priority=TIMER)
    kernel.at(second(2), happened.append, "first message", priority=MESSAGE)
    kernel.at(second(2), happened.append, "second message")
    kernel.at(second(1), happened.append, "earlier")
    kernel.at(second(9), happened.append, "too late")
    kernel.run(until_s=5.0)
    assert happened == ["earlier", "first message", "second message", "timer"]
    assert (kernel.now_ticks, kernel.happened, kernel.idle) == (second(2), 4, False)


def test_time_never_goes_back() -> None:
    kernel = Kernel()
    seen: list[int] = []
    kernel.at(second(3), lambda: kernel.at(second(1), lambda: seen.append(kernel.now_ticks)))
    kernel.run()
    assert seen == [second(3)]


def test_calls_in_the_background_happen_in_their_order_but_keep_nothing_going() -> None:
    kernel = Kernel()
    happened: list[str] = []
    kernel.in_background(second(1), happened.append, "a worker is lost")
    kernel.at(second(2), happened.append, "a message arrives")
    kernel.in_background(second(3), happened.append, "a snapshot is taken")
    kernel.run(goes_on=lambda: False)
    assert happened == ["a worker is lost", "a message arrives"]
    assert (kernel.now_ticks, kernel.at_rest, kernel.idle) == (second(2), True, False)
    kernel.run()
    assert happened[2:] == ["a snapshot is taken"]


@pytest.mark.parametrize("sync", MODELS)
@pytest.mark.parametrize("latency_s", [0.0, Uniform(low=0.01, high=0.05)], ids=["at once", "late"])
def test_every_model_comes_to_its_end_loses_no_push_and_replays(sync: str, latency_s: Times) -> None:
    result = simulate(unequal(latency_s=latency_s, servers=2), sync, iterations=40, record=True)
    pushes = {(worker, iteration) for worker in range(4) for iteration in range(40)}
    for trace in result.trace[:-1]:
        assert fates(trace) == dict.fromkeys(pushes, 1)
        assert {
            (e.event.worker, e.event.iteration) for e in trace.entries if isinstance(e.event, PushReceived)
        } == pushes
    for trace in result.trace:
        assert replay(trace) == []
    assert [len(records) for records in result.records] == [40] * 4


def fates(trace: Trace) -> dict[tuple[int, int], int]:
    """How often each push was applied or dropped."""
    counted: dict[tuple[int, int], int] = {}
    for action in (action for entry in trace.entries for action in entry.actions):
        match action:
            case ApplyPush(worker, iteration) | DropPush(worker, iteration):
                counted[worker, iteration] = counted.get((worker, iteration), 0) + 1
            case ApplyMean(keys):
                for key in keys:
                    counted[key] = counted.get(key, 0) + 1
            case _:
                pass
    return counted


def test_a_simulation_is_the_same_every_time_and_another_with_another_seed() -> None:
    cluster = unequal(latency_s=LogNormal(median=0.01, sigma=1.0), servers=2)
    one, other, third = (
        simulate(cluster, "spec-sync", iterations=30, seed=seed, record=True) for seed in (0, 0, 1)
    )
    assert one == other
    assert one.records != third.records


def test_the_same_iteration_takes_the_same_time_under_every_model() -> None:
    def lengths(sync: str) -> list[list[float]]:
        result = simulate(unequal(), sync, iterations=20, record=True)
        return [[round(r.pushed_s - r.begun_s, 9) for r in records] for records in result.records]

    assert lengths("bsp") == lengths("asp") == lengths("elastic-bsp:lookahead=5")


def test_without_traces_the_figures_are_the_same_and_asking_for_a_trace_is_an_error(tmp_path: Path) -> None:
    kept = simulate(unequal(servers=2), "ssp:staleness=2", iterations=30, record=True)
    bare = simulate(unequal(servers=2), "ssp:staleness=2", iterations=30)
    assert msgspec.structs.replace(kept, recording=None) == bare
    assert kept.summary == bare.summary
    for ask in (lambda: bare.trace, lambda: bare.records, lambda: bare.save(tmp_path / "run")):
        with pytest.raises(
            UsageError, match=r"recorded no traces\. Call simulate\(\) with record=True .* run_dir=\.\.\."
        ):
            ask()
    assert list(tmp_path.iterdir()) == []


def test_staleness_is_counted_and_not_listed() -> None:
    result = simulate(unequal(servers=2), "asp", iterations=30)
    assert sum(result.staleness.values()) == 4 * 30 * 2
    assert max(result.staleness) == result.measures.max_staleness
    mean = fmean(versions for versions, count in result.staleness.items() for _ in range(count))
    assert result.measures.mean_staleness == mean


# -- in a run directory -----------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("pending_bytes", [0, 1000, 10**9])
def test_what_is_written_while_a_run_goes_on_is_what_is_saved_after_it(
    pending_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "PENDING_BYTES", pending_bytes)
    cluster = unequal(servers=2, latency_s=0.01)
    kept = simulate(cluster, "elastic-bsp:lookahead=5", iterations=30, record=True)
    written = simulate(cluster, "elastic-bsp:lookahead=5", iterations=30, run_dir=tmp_path / "written")
    kept.save(tmp_path / "kept")
    assert written.recording is None
    assert contents(tmp_path / "written") == contents(tmp_path / "kept")
    assert (written.trace, written.records) == (kept.trace, kept.records)
    assert written.save(tmp_path / "again") == tmp_path / "again"
    assert contents(tmp_path / "again") == contents(tmp_path / "kept")


def test_more_workers_than_files_may_be_open_can_be_written(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        simulate(Cluster(compute_s=[1.0] * 600), "asp", iterations=2, run_dir=tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(read_records(tmp_path / "run")) == 600


def test_what_happened_until_a_run_failed_can_be_read(tmp_path: Path) -> None:
    stalling = Conditions(pull=lambda state: False, push=lambda state: state.pushed > state.live)
    with pytest.raises(RunFailedError):
        simulate(PAIR, stalling, iterations=3, run_dir=tmp_path / "run")
    shard, _ = read_run(tmp_path / "run")
    assert [type(entry.event) for entry in shard.entries] == [WorkerJoined] * 2 + [
        PushReceived,
        PullRequested,
    ] * 2
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_run_directory_that_holds_a_run_is_refused_before_anything_happens(tmp_path: Path) -> None:
    simulate(PAIR, "asp", iterations=3, run_dir=tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(ConfigurationError, match="already contains a run; choose another"):
        simulate(PAIR, "asp", iterations=5, run_dir=tmp_path / "run")
    assert contents(tmp_path / "run") == before


def test_nothing_is_kept_of_an_iteration_that_nobody_asked_for() -> None:
    """Memory at its largest grows neither with the length of a run nor with what happens in it."""

    def peak_bytes(iterations: int, *, record: bool = False) -> int:
        tracemalloc.start()
        try:
            simulate(unequal(servers=2), "ssp:staleness=2", iterations=iterations, record=record)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(5)
    short, long = peak_bytes(20), peak_bytes(300)
    assert long < 1.2 * short < peak_bytes(300, record=True) / 10


# -- closed forms ----------------------------------------------------------------------------------------------

TABLES = st.integers(1, 6).flatmap(
    lambda n: st.lists(
        st.lists(st.integers(0, 5000).map(lambda ms: ms / 1000), min_size=n, max_size=n),
        min_size=1,
        max_size=12,
    )
)
"""Seconds per iteration and worker."""


def recorded(table: list[list[float]]) -> Cluster:
    return Cluster(compute_s=[list(column) for column in zip(*table, strict=True)])


@given(TABLES)
def test_bsp_takes_the_sum_of_its_slowest(table: list[list[float]]) -> None:
    result = simulate(recorded(table), "bsp", iterations=len(table), record=True)
    assert result.time_s == sum(second(max(row)) for row in table) / 1e9


@given(TABLES)
def test_asp_takes_each_workers_own_sum(table: list[list[float]]) -> None:
    result = simulate(recorded(table), "asp", iterations=len(table), record=True)
    sums = [sum(map(second, column)) / 1e9 for column in zip(*table, strict=True)]
    assert [records[-1].answered_s for records in result.records] == sums
    assert result.time_s == max(sums)


@given(TABLES, st.integers(0, 4))
def test_ssp_takes_what_its_max_plus_recurrence_says(table: list[list[float]], s: int) -> None:
    """A worker starts its iteration k when it has ended k - 1 and everybody has ended k - 1 - s."""
    result = simulate(recorded(table), f"ssp:staleness={s}", iterations=len(table), record=True)
    workers = range(len(table[0]))
    ends: list[list[int]] = []  # of each iteration, by worker
    starts = [0 for _ in workers]
    for k, row in enumerate(table):
        if k:
            others = max(ends[k - 1 - s]) if k - 1 - s >= 0 else 0
            starts = [max(ends[k - 1][p], others) for p in workers]
        ends.append([starts[p] + second(row[p]) for p in workers])
    assert [
        [second(r.begun_s) for r in records][:1] + [second(r.pushed_s) for r in records]
        for records in result.records
    ] == [[0, *(row[p] for row in ends)] for p in workers]


# -- the network -----------------------------------------------------------------------------------------------


def test_a_message_takes_its_latency_each_way() -> None:
    result = simulate(Cluster(compute_s=[1.0, 3.0], latency_s=0.25), "bsp", iterations=4)
    assert result.time_s == 4 * (3.0 + 2 * 0.25)


@pytest.mark.parametrize(("servers", "factor"), [(1, 4), (2, 2), (4, 1)])
def test_four_workers_that_push_to_one_server_queue_up_and_more_servers_relieve_it(
    servers: int, factor: int
) -> None:
    """1 Gbit of parameters over cards of 1 Gbit/s: one worker alone takes a second each way."""
    cluster = Cluster(compute_s=[1.0] * 4, servers=servers, bandwidth_bps=1e9, size_bytes=125_000_000)
    result = simulate(cluster, "bsp", iterations=3)
    assert result.time_s == pytest.approx(3 * (1.0 + 2 * factor), rel=1e-4)


def test_bytes_are_counted_by_kind() -> None:
    cluster = Cluster(compute_s=[1.0] * 4, servers=2, size_bytes=1_000_000)
    sent = simulate(cluster, "bsp", iterations=10).bytes_by_kind
    assert sent["push"] == sent["pull"] == 4 * 10 * (1_000_000 + 2 * 64)
    assert sent["pull again"] == 0
    restarting = simulate(unequal(), "spec-sync:abort_time_s=0.1,abort_rate=0", iterations=50)
    assert restarting.restarts > 20
    assert restarting.bytes_by_kind["pull again"] == restarting.restarts * 64
    assert restarting.bytes_sent == sum(restarting.bytes_by_kind.values())


def test_one_worker_may_be_connected_otherwise() -> None:
    slow = Link(bandwidth_bps=1e9, to_server_s=0.5, from_server_s=Recorded(seconds=(0.25, 0.75)))
    cluster = Cluster(compute_s=[1.0, 1.0], size_bytes=125_000_000, links={1: slow})
    free, bound = simulate(cluster, "asp", iterations=2, record=True).records
    assert [r.answered_s for r in free] == [1.0, 2.0]
    assert [r.answered_s for r in bound] == pytest.approx(
        [1 + 1 + 0.5 + 0.25 + 1, 3.75 + 1 + 1 + 0.5 + 0.75 + 1]
    )


def test_without_overlap_nobody_pulls_until_everybody_has_pushed_everything() -> None:
    cluster = Cluster(compute_s=[1.0, 2.0], servers=2, latency_s=0.1)
    result = simulate(cluster, "bsp", iterations=3, overlap="off")
    # There, its confirmation, the word of it to the coordinator and the leave to pull, the pull and its answer.
    assert result.time_s == pytest.approx(3 * (2.0 + 6 * 0.1))


@pytest.mark.parametrize("latency_s", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("second_s", [2.5, 3.0, 4.4])
def test_without_overlap_joins_in_any_round_hold_nobody_up(second_s: float, latency_s: float) -> None:
    """Worker 1 is in the round after that of worker 0 when worker 2 joins, and waits for a push of worker 0."""
    joins = {1: Presence(joins_at_s=1.7), 2: Presence(joins_at_s=second_s)}
    cluster = Cluster(compute_s=[1.04, 0.78, 1.42], latency_s=latency_s, presence=joins)
    result = simulate(cluster, "bsp", iterations=12, overlap="off", record=True)
    assert [len(records) for records in result.records] == [12, 12, 12]


# -- times -----------------------------------------------------------------------------------------------------


def drawn(times: Times, count: int = 4000) -> list[float]:
    sample = times.sampler(0, 0, 0)  # type: ignore[union-attr]
    return sorted(float(sample(which, 0.0)) for which in range(count))


@pytest.mark.parametrize(
    ("times", "median", "least", "most"),
    [
        (Constant(seconds=2.0), 2.0, 2.0, 2.0),
        (Uniform(low=1.0, high=3.0), 2.0, 1.0, 3.0),
        (LogNormal(median=2.0, sigma=0.5), 2.0, 0.2, 20.0),
        (Pareto(least=1.0, alpha=2.0), math.sqrt(2.0), 1.0, 1000.0),
        (Recorded(seconds=(1.0, 2.0, 3.0)), 2.0, 1.0, 3.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_times_are_distributed_as_they_say(times: Times, median: float, least: float, most: float) -> None:
    values = drawn(times)
    assert values[len(values) // 2] == pytest.approx(median, rel=0.05)
    assert least <= values[0] <= values[-1] <= most
    assert times.typical_s == pytest.approx(median)  # type: ignore[union-attr]


def test_a_log_normal_time_spreads_by_its_sigma() -> None:
    logs = [math.log(value) for value in drawn(LogNormal(median=1.0, sigma=0.3))]
    assert math.sqrt(sum(x * x for x in logs) / len(logs)) == pytest.approx(0.3, rel=0.05)


def test_a_pareto_time_has_its_tail() -> None:
    values = drawn(Pareto(least=1.0, alpha=1.5))
    assert sum(value > 4.0 for value in values) / len(values) == pytest.approx(4.0**-1.5, rel=0.15)


def test_a_drifting_time_grows_to_its_factor_and_stays() -> None:
    sample = Drifting(base=2.0, factor=3.0, over=100.0).sampler(0)
    assert [sample(0, now_ticks) for now_ticks in (0.0, 50.0, 100.0, 500.0)] == [2.0, 4.0, 6.0, 6.0]


def test_an_occasional_slow_spell_comes_once_in_every_period() -> None:
    sample = Occasional(base=1.0, factor=5.0, lasting=10.0, every=100.0).sampler(3, 1)
    slow = [second for second in range(1000) if sample(0, float(second)) == 5.0]
    assert len(slow) == pytest.approx(100, abs=10)
    begins = [now for before, now in itertools.pairwise([-2, *slow]) if now != before + 1]
    assert sorted(begin // 100 for begin in begins) == list(range(10))
    assert len({begin % 100 for begin in begins}) > 5


# -- who is there ----------------------------------------------------------------------------------------------

COMING_AND_GOING = {
    0: Presence(lost_at_s=20.0),
    1: Presence(joins_at_s=10.0),
    2: Presence(lost_at_s=15.0, back_after_s=7.0),
    3: Presence(preempted_every_s=12.0, back_after_s=2.0),
}


@pytest.mark.parametrize("sync", MODELS)
def test_nobody_waits_for_those_who_come_and_go(sync: str) -> None:
    cluster = Cluster(
        compute_s=[Uniform(low=0.9, high=1.1)] * 5 + [3.0],
        servers=2,
        latency_s=Uniform(low=0.0, high=0.1),
        presence=COMING_AND_GOING,
    )
    result = simulate(cluster, sync, iterations=40, seed=5, record=True)
    for trace in result.trace:
        assert replay(trace) == []
        assert all(entry.refused is None for entry in trace.entries)
    for trace in result.trace[:-1]:
        assert all(count == 1 for count in fates(trace).values())
        lost = [e.event.worker for e in trace.entries if isinstance(e.event, WorkerLost)]
        joined = [e.event.worker for e in trace.entries if isinstance(e.event, WorkerJoined)]
        assert {0, 2, 3} == set(lost)
        assert joined.count(2) == 2
        assert joined.count(3) == lost.count(3) + 1 > 2
    assert all(len(result.records[worker]) >= 35 for worker in (1, 4, 5))
    assert len(result.records[0]) < 25


def test_who_joins_later_is_not_there_before() -> None:
    cluster = Cluster(compute_s=[1.0, 1.0], presence={1: Presence(joins_at_s=5.0)})
    result = simulate(cluster, "bsp", iterations=10, record=True)
    assert result.records[1][0].begun_s == 5.0
    assert result.time_s == 15.0


def test_who_joins_anew_follows_the_model_in_force() -> None:
    cluster = Cluster(compute_s=[1.0, 1.1, 1.2], presence={2: Presence(lost_at_s=15.0, back_after_s=10.0)})
    result = simulate(cluster, "bsp@0,elastic-bsp:lookahead=3@5", iterations=60, record=True)
    plans = [a.plan for e in result.trace[-1].entries for a in e.actions if isinstance(a, PublishPlan)]
    assert (0, 1) in {plan.members for plan in plans if second(15) < plan.barrier_ticks < second(30)}
    assert (0, 1, 2) in {plan.members for plan in plans if plan.barrier_ticks > 30}


# -- what the models come to -----------------------------------------------------------------------------------


def test_elastic_bsp_waits_less_than_bsp_and_restores_barriers() -> None:
    cluster = Cluster(compute_s=[1.0, 1.0, 1.0, 3.0])
    elastic = simulate(cluster, "elastic-bsp:lookahead=15", iterations=None, until_s=300, record=True)
    bsp = simulate(cluster, "bsp", iterations=None, until_s=300)
    assert elastic.waiting_share < 0.05 < 0.45 < bsp.waiting_share
    plans = [a for e in elastic.trace[-1].entries for a in e.actions if isinstance(a, PublishPlan)]
    assert len(plans) > 10


def delayed_share(result: SimResult) -> float:
    return result.delayed_pulls / (sum(result.measures.iterations.values()) * result.shards)


@pytest.mark.parametrize("seed", range(3))
def test_lazy_execution_delays_fewer_pulls_than_the_soft_barrier(seed: int) -> None:
    """FluentPS, Fig. 9."""
    soft, lazy = (
        simulate(unequal(), f"ssp:staleness=3,execution={execution}", None, seed, until_s=400)
        for execution in ("soft", "lazy")
    )
    assert delayed_share(lazy) < 0.5 * delayed_share(soft)


@pytest.mark.parametrize("seed", range(3))
def test_pssp_delays_fewer_pulls_than_ssp_at_the_same_regret_bound(seed: int) -> None:
    """FluentPS, section III-E: s' = s + 1/c - 1, and Table IV."""
    pssp = simulate(unequal(), "pssp:staleness=3,probability=0.2", None, seed, until_s=400)
    ssp = simulate(unequal(), "ssp:staleness=7", None, seed, until_s=400)
    assert delayed_share(pssp) < 0.5 * delayed_share(ssp)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sync", ["spec-sync", "naive-waiting:delay_s=0.2"])
def test_pulls_are_fresher_than_asps(sync: str, seed: int) -> None:
    """SpecSync, sections III-B and IV."""
    asp, fresher = (
        simulate(unequal(), model, None, seed, until_s=400).measures.mean_staleness for model in ("asp", sync)
    )
    assert fresher < asp


def test_an_iteration_restarts_at_most_once() -> None:
    cluster = unequal(latency_s=0.02)
    result = simulate(cluster, "spec-sync:abort_time_s=0.1,abort_rate=0", None, until_s=200, record=True)
    again = [
        (e.event.worker, e.event.iteration)
        for e in result.trace[0].entries
        if isinstance(e.event, PullRepeated)
    ]
    assert len(again) == len(set(again)) > 20


def test_naive_waiting_puts_every_pull_off_by_its_delay() -> None:
    result = simulate(Cluster(compute_s=[1.0, 2.0]), "naive-waiting:delay_s=0.5", iterations=10, record=True)
    assert result.time_s == 10 * 2.5
    for records in result.records:
        for record in records:
            assert record.answered_s - record.pushed_s == pytest.approx(0.5)


# -- conditions that fail ----------------------------------------------------------------------------------------


def fails_late(state: PullState) -> bool:
    return [True][state.progress // 5]


def test_a_condition_that_fails_is_replaced_and_reported_and_the_run_goes_on() -> None:
    sync = Conditions(pull=fails_late)
    result = simulate(unequal(servers=2), sync, iterations=40, record=True)
    assert result.measures.iterations == dict.fromkeys(range(4), 40)
    assert len(result.faults) == 2
    for shard, (fault, trace) in enumerate(zip(sorted(result.faults), result.trace[:-1], strict=True)):
        words, traceback = fault.split("\n", maxsplit=1)
        assert words == (
            f"shard {shard}: the pull condition {sync.pull} raised IndexError: list index out of range. "
            "The shard continues with bsp."
        )
        assert "return [True][state.progress // 5]" in traceback
        assert [type(a) for e in trace.entries for a in e.actions].count(ReportFault) == 1
        assert replay(trace) == []
    assert result.summary["faults"] == result.faults


def test_a_run_without_failing_conditions_has_no_faults() -> None:
    assert simulate(unequal(), "asp", iterations=5).summary["faults"] == []


# -- bad input -------------------------------------------------------------------------------------------------

PAIR = Cluster(compute_s=[1.0, 1.0])


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: simulate(PAIR, "asp", None), "iterations is None and until_s is not given"),
        (lambda: simulate(PAIR, "asp", 0), "iterations is 0, expected a whole number >= 1"),
        (lambda: simulate([1.0], "asp"), "expected a paceline.Cluster"),  # type: ignore[arg-type]
        (lambda: simulate(PAIR, "asb"), "asb"),
        (lambda: simulate(PAIR, "asp", shards=0), "shards is 0 and servers is 1, but each server needs"),
        (lambda: simulate(PAIR, "asp", shard_bytes=[1, 2], shards=3), "shard_bytes has 2 sizes for 3 shards"),
        (lambda: simulate(PAIR, "asp", overlap="off"), "overlap is 'off'"),
        (lambda: simulate(PAIR, "asp", overlap="of"), "unknown overlap 'of'"),
        (lambda: simulate(PAIR, "asp", until_s=-1.0), "until_s is -1"),
        (
            lambda: simulate(PAIR, "drop-stragglers:quorum=3"),
            "quorum is 3, expected at most 2, the number of workers",
        ),
        (lambda: Cluster(compute_s=[]), "expected a time for each worker"),
        (
            lambda: Cluster(compute_s=[-1.0]),
            r"compute_s\[0\]: seconds is -1, expected a number of seconds >= 0",
        ),
        (lambda: Cluster(compute_s=[math.inf]), "seconds is inf"),
        (lambda: Cluster(compute_s=["fast"]), "a time is 'fast'"),  # type: ignore[list-item]
        (lambda: Cluster(compute_s=[[1.0, -2.0]]), "a recorded time is -2"),
        (lambda: Cluster(compute_s=[1.0], update_s=True), "update_s: a time is True"),
        (lambda: Cluster(compute_s=[1.0], servers=0), "servers is 0"),
        (lambda: Cluster(compute_s=[1.0], bandwidth_bps=0.0), "bandwidth_bps is 0"),
        (lambda: Cluster(compute_s=[1.0], size_bytes=-1), "size_bytes is -1"),
        (lambda: Cluster(compute_s=[1.0], presence={1: Presence()}), "presence has an entry for worker 1"),
        (lambda: Uniform(low=2.0, high=1.0), "low is 2 and high is 1"),
        (lambda: Pareto(least=1.0, alpha=0.0), "alpha is 0"),
        (lambda: LogNormal(median=1.0, sigma=-1.0), "sigma is -1"),
        (lambda: Drifting(base=1.0, factor=2.0, over=0.0), "over is 0"),
        (lambda: Occasional(base=1.0, factor=2.0, lasting=5.0, every=4.0), "lasting is 5 and every is 4"),
        (
            lambda: Presence(lost_at_s=1.0, joins_at_s=2.0),
            "lost_at_s is 1.0, expected a number of seconds >= 2",
        ),
        (lambda: Presence(back_after_s=1.0), "never lost"),
        (lambda: Presence(joins_at_s="3"), "joins_at_s is '3'"),  # type: ignore[arg-type]
        (lambda: Cluster(compute_s=[1.0], presence={0: 3.0}), "expected a paceline.sim.Presence"),  # type: ignore[dict-item]
        (lambda: Cluster(compute_s=[1.0], bandwidth_bps="1 Gbit/s"), "bandwidth_bps is '1 Gbit/s'"),  # type: ignore[arg-type]
        (lambda: simulate(PAIR, "asp", seed=1.5), "seed is 1.5"),  # type: ignore[arg-type]
        (lambda: simulate(PAIR, "asp", until_s="3"), "until_s is '3'"),  # type: ignore[arg-type]
        (lambda: simulate(PAIR, "asp", shard_bytes=[-5]), "a size in shard_bytes is -5"),
        (lambda: simulate(PAIR, "asp", until_samples=8), "until_samples is 8, but without data or train_fn"),
        (lambda: simulate(PAIR, "asp", snapshot_every_s=1.0), "without train_fn"),
        (lambda: simulate(PAIR, "asp", train_fn=print, snapshot_every_s=0.0), "snapshot_every_s is 0"),
        (lambda: simulate(PAIR, "asp", train_fn=print, on_snapshot=print), "without snapshot_every_s"),  # type: ignore[arg-type]
        (lambda: simulate(Cluster(compute_s=[1e300]), "asp"), "1e\\+300 s is too long"),
    ],
)
def test_bad_input_is_an_error_that_names_it(call: Callable[[], object], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason.replace("(", r"\(")):
        call()


def test_where_nothing_takes_any_time_it_is_said_instead_of_hanging() -> None:
    with pytest.raises(RunFailedError, match="virtual time does not advance beyond 0 s"):
        simulate(Cluster(compute_s=[0.0, 1.0]), "asp", None, until_s=5.0)


def test_who_waits_for_whom_is_said_where_nobody_can_go_on() -> None:
    stalling = Conditions(pull=lambda state: False, push=lambda state: state.pushed > state.live)
    with pytest.raises(RunFailedError, match="worker 1, after its iteration 0, waits at shard 0"):
        simulate(PAIR, stalling, iterations=3)

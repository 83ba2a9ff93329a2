"""What the workers of a run have spent their time on adds up to the duration of the run, however the run ends."""

from __future__ import annotations

import msgspec
import pytest

from paceline import simulate
from paceline.core.messages import TimeSpent
from paceline.core.metrics import Stopwatch, TimeLedger
from paceline.lab.ranking import figures_of
from paceline.sim import Cluster, Dataset, Presence, SimResult
from paceline.trace.activity_cells import TimeUse, time_shares, time_use
from paceline.trace.measures import WorkerPresence as PresenceTicks
from tests.support.marks import thorough
from tests.support.random_jobs import MODELS, ONE_SHARD, random_jobs

STATES = ("computing", "loading", "waiting", "transfer", "wasted", "paused", "outside", "idle", "absent")
PRESENT = STATES[:7]


def ticks(seconds: float) -> int:
    """The whole number of ticks: times in seconds are divided once, so nothing is lost."""
    return round(seconds * 10**9)


def require_complete(result: SimResult) -> None:
    """Check that the states of each worker add up to its presence, and to the run, without a rounding error."""
    measures = result.measures
    assert result.time_use.keys() == measures.iterations.keys()
    for worker, use in result.time_use.items():
        parts = {state: ticks(getattr(use, f"{state}_s")) for state in STATES}
        assert min(parts.values()) >= 0, (worker, parts)
        assert sum(parts.values()) == ticks(measures.duration_s), (worker, parts)
        assert use.waiting_s == measures.waiting_s[worker]
        assert use.idle_s == measures.idle_s[worker]
    present = sum(ticks(getattr(use, f"{state}_s")) for use in result.time_use.values() for state in PRESENT)
    assert present == ticks(measures.present_s)
    shares = {"waiting_share": measures.waiting_share, **time_shares(result.time_use)}
    assert sum(shares.values()) == pytest.approx(1.0 if present else 0.0)


@pytest.mark.parametrize("seed", [*range(4), *thorough(*range(4, 12))])
def test_in_each_simulated_run_the_times_of_a_worker_add_up_to_the_run(seed: int) -> None:
    for cluster, sync, end in random_jobs(seed):
        result = simulate(cluster, sync, seed=seed, **end)
        require_complete(result)


@pytest.mark.parametrize("sync", MODELS)
def test_without_latency_no_time_is_in_transfer_wherever_a_run_is_cut_off(sync: str) -> None:
    """All times are multiples of a quarter of a second, so they and their sums are exact."""
    cluster = Cluster(
        compute_s=[1.0, 1.25, 0.5, 3.0, 40.0],
        servers=1 if sync.startswith(ONE_SHARD) else 2,
        presence={
            1: Presence(lost_at_s=6.25, back_after_s=2.0),
            2: Presence(joins_at_s=3.5),
            3: Presence(lost_at_s=21.75),
        },
    )
    for until_s in (0.25, 1.0, 6.25, 7.0, 22.0, 50.0):
        result = simulate(cluster, sync, iterations=None, until_s=until_s)
        for worker, use in result.time_use.items():
            assert use.transfer_s == 0.0, (until_s, worker, use)
            assert sum(getattr(use, f"{state}_s") for state in STATES) == result.measures.duration_s


def test_who_waits_when_the_run_is_cut_off_has_waited() -> None:
    result = simulate(Cluster(compute_s=[1.0, 1.0, 100.0]), "bsp", iterations=None, until_s=50.0)
    assert result.measures.waiting_s == {0: 49.0, 1: 49.0, 2: 0.0}
    assert result.waiting_share == pytest.approx(98 / 150)
    assert result.computed_s == 52.0
    assert figures_of("bsp", result).transfer_share == 0.0
    assert result.summary["time_use"]["0"]["waiting_s"] == 49.0


def test_who_waits_when_it_is_lost_has_waited() -> None:
    cluster = Cluster(compute_s=[1.0, 100.0], presence={0: Presence(lost_at_s=41.0)})
    use = simulate(cluster, "bsp", iterations=1).time_use[0]
    assert (use.computing_s, use.waiting_s, use.wasted_s, use.absent_s) == (1.0, 40.0, 0.0, 59.0)


def test_computations_that_are_restarted_again_and_again_are_wasted_though_none_is_ever_pushed() -> None:
    cluster = Cluster(compute_s=[1.0, 1.0, 1.0, 3.0])
    result = simulate(cluster, "ringmaster:threshold=4,stop=true", iterations=None, until_s=50.0)
    use = result.time_use[3]
    assert result.restarts > 30
    assert result.measures.iterations[3] == 0
    assert use.wasted_s + use.computing_s == 50.0
    assert use.computing_s < 3.0  # the computation in progress
    assert result.wasted_s == use.wasted_s


def test_what_a_lost_worker_was_computing_is_wasted() -> None:
    cluster = Cluster(compute_s=[2.0, 2.0], latency_s=0.5, presence={1: Presence(lost_at_s=4.0)})
    use = simulate(cluster, "asp", iterations=3).time_use[1]
    # It computes for 2 s, its push and the weights take 0.5 s each, and it is lost 1 s later.
    assert (use.computing_s, use.transfer_s, use.wasted_s) == (2.0, 1.0, 1.0)


def test_the_wait_for_data_is_a_transfer() -> None:
    cluster = Cluster(compute_s=[1.0], latency_s=0.25)
    use = simulate(cluster, "asp", data=Dataset(samples=8, batch_size=8)).time_use[0]
    assert use.computing_s == 1.0
    assert use.transfer_s > 0.5
    assert use.outside_s == 0.0


SCRIPT_STEPS = 3


def with_a_barrier() -> None:
    import torch

    import paceline

    model = torch.nn.Linear(2, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(SCRIPT_STEPS):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    paceline.barrier()


def test_a_barrier_is_outside_of_training() -> None:
    result = simulate(Cluster(compute_s=[1.0, 4.0]), "asp", train_fn=with_a_barrier)
    assert result.time_use[0].outside_s == SCRIPT_STEPS * (4.0 - 1.0)
    assert result.time_use[1].outside_s == 0.0
    require_complete(result)


# -- the parts -------------------------------------------------------------------------------------------------


def test_a_computation_without_a_push_counts_by_how_its_worker_has_left() -> None:
    spent = TimeSpent(computing=5, unfinished=7, activity="computing")
    ledger = TimeLedger()
    for worker in range(3):
        ledger.report(worker, spent, now_ticks=12)
    ledger.leave(0, now_ticks=12, lost=True)
    ledger.leave(1, now_ticks=12, lost=False)
    reported = {worker: each.reported for worker, each in ledger.totals(now_ticks=12).items()}
    assert reported[0] == {"computing": 5, "loading": 0, "wasted": 7, "paused": 0, "outside": 0}
    assert reported[1] == {"computing": 5, "loading": 0, "wasted": 0, "paused": 0, "outside": 7}
    assert reported[2] == {"computing": 12, "loading": 0, "wasted": 0, "paused": 0, "outside": 0}


def test_all_incarnations_of_a_worker_count() -> None:
    ledger = TimeLedger()
    for incarnation in range(3):
        ledger.report(0, TimeSpent(paused=4, activity="paused"), now_ticks=10 * incarnation)
        ledger.leave(0, now_ticks=10 * incarnation + 6, lost=True)
    ledger.leave(0, now_ticks=99, lost=True)  # the next one is lost before it has reported anything
    [total] = ledger.totals(now_ticks=100).values()
    assert (total.reported["paused"], total.tails["paused"]) == (12, 18)


def test_the_last_report_of_a_lost_worker_holds_except_for_what_it_waited() -> None:
    """It computed for 2 ticks after its report, pushed, and waited for 28 ticks until it was lost."""
    ledger = TimeLedger()
    ledger.report(0, TimeSpent(computing=60, activity="computing"), now_ticks=70)
    ledger.leave(0, now_ticks=100, lost=True)
    presence = PresenceTicks(present=100, waiting=38, idle=0, absent=0)
    [use] = time_use({0: presence}, ledger.totals(now_ticks=100), ticks_per_s=1).values()
    assert (use.computing_s, use.waiting_s, use.wasted_s, use.transfer_s) == (60, 38, 2, 0)
    assert use.present_s == 100


def test_a_push_while_the_script_does_not_train_leaves_the_computation_unfinished() -> None:
    watch = Stopwatch(now_ticks=0)
    watch.enter("computing", now_ticks=0)
    watch.enter("outside", now_ticks=10)
    watch.enter("exchanging", now_ticks=14)  # a push without a gradient
    watch.enter("outside", now_ticks=15)
    watch.enter("computing", now_ticks=19)
    assert watch.read(now_ticks=20) == TimeSpent(outside=8, unfinished=11, activity="computing")
    watch.push(now_ticks=20)
    assert watch.read(now_ticks=23) == TimeSpent(outside=8, computing=11)


def test_what_a_worker_reports_after_years_can_be_sent() -> None:
    spent = TimeSpent(computing=50 * 366 * 24 * 3600 * 10**9)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spent), type=TimeSpent) == spent


def test_a_worker_that_never_reported_was_present_all_the_same() -> None:
    [use] = time_use({0: PresenceTicks(10, 4, 1, 2)}, {}, ticks_per_s=1).values()
    assert use == TimeUse(
        computing_s=0,
        loading_s=0,
        waiting_s=4,
        transfer_s=6,
        wasted_s=0,
        paused_s=0,
        outside_s=0,
        idle_s=1,
        absent_s=2,
    )

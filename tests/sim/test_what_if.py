"""Recorded clusters, and what would be if they were different."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline import Cluster, simulate
from paceline.errors import ConfigurationError
from paceline.lab.advice import advise
from paceline.lab.clusters import NO_CHANGES, Changes, describe, load_cluster
from paceline.sim import Link, Recorded, Resampled, Uniform
from paceline.sim.network import Transfer, ends_of

GIGABIT = 1e9
MEGABYTE = 1_000_000


def uneven(workers: int = 4, **settings: object) -> Cluster:
    """Return a cluster of jittery workers, the last of which is slow."""
    paces = [1.0] * (workers - 1) + [2.0]
    return Cluster([Uniform(low=0.9 * pace, high=1.1 * pace) for pace in paces], name="made", **settings)  # type: ignore[arg-type]


def recorded(folder: Path, cluster: Cluster, sync: str = "bsp", iterations: int = 60) -> Path:
    """Simulate a run, and return its directory."""
    simulate(cluster, sync, iterations, seed=3, run_dir=folder)
    return folder


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:staleness=2"])
@pytest.mark.parametrize("bandwidth", ["1 Gbit/s", float("inf")])
def test_an_undisturbed_cluster_repeats_its_run(tmp_path: Path, sync: str, bandwidth: str | float) -> None:
    made = uneven(servers=2, latency_s=0.01, size_bytes=40 * MEGABYTE).with_(bandwidth=bandwidth)
    run = recorded(tmp_path / "run", made, sync)
    before = simulate(made, sync, 60, seed=3)
    for given in (bandwidth, float("inf")):
        cluster = Cluster.from_run(run, bandwidth=given)
        assert cluster.size_bytes == 40 * MEGABYTE
        again = simulate(cluster, sync, 60, seed=3)
        assert again.time_s == pytest.approx(before.time_s, rel=0.02)
        assert again.bytes_sent == pytest.approx(before.bytes_sent)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
@pytest.mark.parametrize(
    "changes",
    [{"bandwidth": "500mbit"}, {"workers": 8}, {"workers": 8, "bandwidth": "500mbit"}, {"slow": {0: 3.0}}],
)
def test_a_changed_cluster_is_that_of_a_run_of_this_kind(
    tmp_path: Path, sync: str, changes: dict[str, object]
) -> None:
    """Transfers take about half of the time of an iteration, so they matter."""
    made = uneven(latency_s=0.01, bandwidth_bps=GIGABIT, size_bytes=20 * MEGABYTE)
    cluster = Cluster.from_run(recorded(tmp_path / "run", made, sync), bandwidth=GIGABIT).with_(**changes)  # type: ignore[arg-type]
    expected = simulate(made.with_(**changes), sync, 60, seed=4)  # type: ignore[arg-type]
    found = simulate(cluster, sync, 60, seed=4)
    assert found.measures.gradients / found.time_s == pytest.approx(
        expected.measures.gradients / expected.time_s, rel=0.05
    )


def test_the_transfers_of_a_run_are_told_from_its_latency(tmp_path: Path) -> None:
    made = Cluster([1.0, 1.3, 1.7], latency_s=0.02, bandwidth_bps=GIGABIT, size_bytes=25 * MEGABYTE)
    run = recorded(tmp_path / "run", made, "asp")
    with_transfers = Cluster.from_run(run).latency(0, to_server=True).typical_s
    assert with_transfers == pytest.approx(0.22, abs=0.01)  # 25 MB at 1 Gbit/s take 0.2 s
    cluster = Cluster.from_run(run, bandwidth="1gbit")
    for worker in range(3):
        for to_server in (True, False):
            assert cluster.latency(worker, to_server=to_server).typical_s == pytest.approx(0.02, rel=0.05)


def test_the_times_of_transfers_add_up_as_by_hand() -> None:
    """Two messages share the receiver's lane for 2 s; the third one then has it alone."""
    transfers = [
        Transfer(3.0, "c", "z", 125),
        Transfer(0.0, "a", "z", 125),
        Transfer(0.0, "b", "z", 125),
        Transfer(0.0, "a", "y", 125),
    ]
    assert ends_of(transfers, 1000.0) == [4.0, 2.0, 2.0, 2.0]


def test_copies_of_a_recorded_worker_are_not_in_lockstep() -> None:
    draw = random.Random(0)
    times = [draw.lognormvariate(0.0, 0.6) for _ in range(100)]
    in_lockstep = simulate(Cluster([times] * 64), "bsp", 100)
    resampled = simulate(Cluster([times]).with_(workers=64), "bsp", 100)
    assert in_lockstep.waiting_share == 0
    assert 0.5 < resampled.waiting_share < 0.8


def test_resampled_times_keep_their_blocks() -> None:
    seconds = tuple(map(float, range(1, 101)))
    sample = Resampled(seconds=seconds).sampler(7)
    drawn = [float(sample(number, 0.0)) for number in range(5000)]
    follows = [after - before in (1.0, -99.0) for before, after in itertools.pairwise(drawn)]
    assert sum(follows) / len(follows) == pytest.approx(0.9, abs=0.02)  # blocks of ten
    assert sum(drawn) / len(drawn) == pytest.approx(50.5, rel=0.05)
    assert [float(sample(number, 0.0)) for number in range(5000)] == drawn
    other = Resampled(seconds=seconds).sampler(8)
    assert [float(other(number, 0.0)) for number in range(100)] != drawn[:100]


def test_the_caption_says_the_true_median() -> None:
    times = [1.0, 1.0, 1.0, 5.0, 5.0, 5.0]
    assert Recorded(seconds=tuple(times)).typical_s == 3.0
    assert describe(Cluster([times]).with_(workers=3)) == "3 workers (3 at 3 s); 1 server"
    many = Cluster([float(worker + 1) for worker in range(9)])
    assert describe(many) == "9 workers (1 to 9 s, median 5 s); 1 server"


def test_what_is_changed_and_what_stays() -> None:
    cluster = Cluster(
        [1.0, [2.0, 3.0]],
        fixed_share=[0.1, 0.2],
        links={1: Link(bandwidth_bps=5.0, to_server_s=Recorded(seconds=(0.1, 0.2)))},
        size_bytes=10,
        name="two",
    )
    changed = cluster.with_(workers=5, bandwidth=8e9, servers=3, slow={4: 2.0})
    assert (changed.workers, changed.servers, changed.bandwidth_bps) == (5, 3, 8e9)
    assert changed.fixed_share == (0.1, 0.2, 0.1, 0.2, 0.1)
    assert changed.compute(1) == Recorded(seconds=(2.0, 3.0))
    assert changed.compute(3) == Resampled(seconds=(2.0, 3.0))
    assert changed.compute(4).sampler(0)(0, 0.0) == 2.0
    assert changed.links[1].to_server_s == Recorded(seconds=(0.1, 0.2))
    assert changed.links[3] == Link(to_server_s=Resampled(seconds=(0.1, 0.2)))
    assert changed.name == "two with 3 servers, 8 Gbit/s, 5 workers, worker 4 2 times as slow"
    assert cluster.with_(workers=1).workers == 1
    assert cluster.with_() == cluster


def test_bad_changes_are_named(tmp_path: Path) -> None:
    cluster = Cluster([1.0, 2.0])
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: cluster.with_(workers=0), "workers is 0, expected a whole number >= 1"),
        (lambda: cluster.with_(bandwidth="1gbit"), "the size of its parameters is unknown"),
        (lambda: cluster.with_(bandwidth="fast"), "bandwidth is 'fast', expected"),
        (lambda: cluster.with_(bandwidth="0 Gbit/s"), "expected more than 0"),
        (
            lambda: cluster.with_(slow={2: 2.0}),
            "slow has an entry for worker 2, expected a number from 0 to 1",
        ),
        (
            lambda: cluster.with_(slow={1: 0.0}),
            r"slow has the factor 0\.0 for worker 1, expected a number > 0",
        ),
        (lambda: cluster.with_(slow={1: "x"}), "slow has the factor 'x' for worker 1"),  # type: ignore[dict-item]
        (lambda: cluster.with_(slow=3), "slow is 3, expected a factor for each worker"),  # type: ignore[arg-type]
        (lambda: Changes(slow="3").made(cluster), "slow is '3', expected WORKER:FACTOR"),
        (lambda: load_cluster("elastic-bsp", "1gbit"), "not the directory of a run"),
        (lambda: Cluster.from_run(tmp_path), "does not contain a run"),
    ]
    for call, reason in cases:
        with pytest.raises(ConfigurationError, match=reason):
            call()


def test_a_run_without_sizes_has_no_transfers_to_take_out(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", uneven(), iterations=3)
    summary = run / "summary.json"
    summary.write_text(summary.read_text().replace('"shard_bytes"', '"unknown"'))
    with pytest.raises(ConfigurationError, match="does not say how many bytes travelled"):
        Cluster.from_run(run, bandwidth="1gbit")
    assert Cluster.from_run(run).size_bytes == 0


def test_the_advice_for_changed_machines_says_what_was_changed(tmp_path: Path) -> None:
    made = uneven(latency_s=0.001, bandwidth_bps=10 * GIGABIT, size_bytes=25 * MEGABYTE)
    run = recorded(tmp_path / "run", made)
    changes = Changes(workers=8, bandwidth="1gbit", recorded_bandwidth="10gbit")
    report = advise(run, ["bsp"], changes=changes)
    assert report.deviation == pytest.approx(0.0, abs=0.02)
    assert report.name == "run with 1 Gbit/s, 8 workers"
    assert report.cluster.startswith("8 workers (")
    assert "--workers 8" in report.advice[0].command
    assert changes.options == ["--workers", "8", "--bandwidth", "1gbit", "--recorded-bandwidth", "10gbit"]
    [bsp] = [row for row in report.rows if (row.sync, row.batch) == ("bsp", "equal")]
    [before] = [
        row
        for row in advise(run, ["bsp"], changes=Changes(recorded_bandwidth="10gbit")).rows
        if (row.sync, row.batch) == ("bsp", "equal")
    ]
    assert bsp.transfer_share > 2 * before.transfer_share
    halved = advise(run, ["bsp"], changes=changes, wire="bf16")
    [bf16] = [row for row in halved.rows if (row.sync, row.batch) == ("bsp", "equal")]
    assert bf16.bytes_sent / bf16.until_s < 0.8 * bsp.bytes_sent / bsp.until_s
    assert bf16.transfer_share < bsp.transfer_share
    assert NO_CHANGES.options == []

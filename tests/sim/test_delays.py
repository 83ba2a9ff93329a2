"""Delays from files and objects, and what several workers have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from paceline import Cluster, simulate
from paceline.errors import ConfigurationError
from paceline.sim import (
    LogNormal,
    Pareto,
    Pause,
    Presence,
    Recorded,
    Resampled,
    Times,
    Uniform,
    Uplink,
    read_delays,
)
from paceline.sim.times import Pauses, Timed, prolonged_s, times_of

GIGABIT = 1e9
DRAWS = 4000


class Gamma:
    """A distribution of your own."""

    def sample(self, generator: np.random.Generator) -> float:
        return float(generator.gamma(2.0, 0.5))


class Wrong:
    def __init__(self, value: object) -> None:
        self.value = value

    def sample(self, generator: np.random.Generator) -> object:
        return self.value


MEASURED = tuple(np.random.default_rng(1).lognormal(0.0, 0.7, 400).tolist())


@pytest.mark.parametrize(
    ("times", "law"),
    [
        (Uniform(low=1.0, high=3.0), stats.uniform(1.0, 2.0)),
        (LogNormal(median=2.0, sigma=0.5), stats.lognorm(0.5, scale=2.0)),
        (Pareto(least=1.0, alpha=2.5), stats.pareto(2.5)),
        (Gamma(), stats.gamma(2.0, scale=0.5)),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_durations_follow_their_law(times: Times, law: stats.rv_continuous, seed: int) -> None:
    sample = times_of(times).sampler(seed, 3, 0)
    drawn = [float(sample(number, 0.0)) for number in range(DRAWS)]
    assert stats.kstest(drawn, law.cdf).pvalue > 0.01
    assert np.corrcoef(drawn[1:], drawn[:-1])[0, 1] == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize(
    "times", [Recorded(seconds=MEASURED), Resampled(seconds=MEASURED, block=1), Resampled(seconds=MEASURED)]
)
def test_durations_from_a_list_follow_the_measurements(times: Times) -> None:
    sample = times_of(times).sampler(0, 3, 0)
    drawn = [float(sample(number, 0.0)) for number in range(DRAWS)]
    assert stats.ks_2samp(drawn, MEASURED).pvalue > 0.01


def test_durations_from_a_file_follow_the_measurements(tmp_path: Path) -> None:
    path = tmp_path / "delays.csv"
    lines = [f"{worker},{seconds * (worker + 1)}" for seconds in MEASURED for worker in (1, 0)]
    path.write_text("\n".join(["worker,seconds", *lines]))
    cluster = Cluster(read_delays(path))
    for worker in (0, 1):
        sample = cluster.compute(worker).sampler(0, worker, 0)
        drawn = [float(sample(number, 0.0)) / (worker + 1) for number in range(400)]
        assert stats.ks_2samp(drawn, MEASURED).pvalue > 0.99
    assert simulate(cluster, "asp", 400).time_s == pytest.approx(2 * sum(MEASURED))


def test_measurements_with_times_apply_at_their_times(tmp_path: Path) -> None:
    path = tmp_path / "delays.csv"
    path.write_text("worker, time, seconds\n0,100,1.0\n0,110,4.0\n0,120,2.0\n")
    [times] = read_delays(path)
    assert times == Timed(at=(100.0, 110.0, 120.0), seconds=(1.0, 4.0, 2.0))
    sample = times.sampler(0)
    assert [sample(0, now) for now in (0.0, 9.9, 10.0, 19.9, 20.0, 29.9, 30.0, 40.0)] == [
        1,
        1,
        4,
        4,
        2,
        2,
        1,
        4,
    ]
    result = simulate(Cluster([times]), "asp", None, until_s=30.0, record=True)
    starts = [record.begun_s for record in result.records[0]]
    assert starts == [*map(float, range(11)), 14.0, 18.0, 22.0, 24.0, 26.0, 28.0]
    copy = Cluster([times]).with_(workers=2).compute(1)
    assert copy == Timed(at=times.at, seconds=times.seconds, shifted=True)


def test_time_stamped_durations_follow_the_measurements() -> None:
    times = Timed(at=tuple(map(float, range(400))), seconds=MEASURED, shifted=True)
    sample = times.sampler(5)
    drawn = [float(sample(number, 1.0 * number)) for number in range(400)]
    assert stats.ks_2samp(drawn, MEASURED).pvalue > 0.99
    assert drawn != list(MEASURED)


def test_own_durations_are_the_same_under_every_model() -> None:
    cluster = Cluster([Gamma(), Gamma()])
    lengths = []
    for sync in ("asp", "bsp"):
        result = simulate(cluster, sync, 20, seed=4, record=True)
        lengths.append([[r.pushed_s - r.begun_s for r in records] for records in result.records])
    assert lengths[0] == [pytest.approx(each, abs=1e-8) for each in lengths[1]]
    assert lengths[0][0] != lengths[0][1]


def test_pauses_of_a_rack_strike_its_workers_together() -> None:
    rack, others = (0, 1, 2, 3), (4, 5, 6, 7)
    pause = Pause(workers=rack, every_s=30.0, lasting_s=10.0)
    cluster = Cluster([Uniform(low=0.8, high=1.2)] * 8, pauses=[pause])
    result = simulate(cluster, "asp", None, until_s=2000.0, seed=1, record=True)
    lengths = np.zeros((8, 2000))  # the seconds by which the computation that is in progress is too long
    for worker, records in enumerate(result.records):
        for record in records:
            length_s = record.pushed_s - record.begun_s
            lengths[worker, int(record.begun_s) : int(record.pushed_s) + 1] = length_s > 1.3
    correlation = np.corrcoef(lengths[: len(rack)])
    assert (correlation > 0.7).all()
    assert (lengths[list(others)] == 0).all()
    # A pause of 10 s every 40 s takes a quarter of the time.
    assert [len(result.records[w]) for w in rack] == pytest.approx([1500] * 4, rel=0.1)
    assert [len(result.records[w]) for w in others] == pytest.approx([2000] * 4, rel=0.02)


def test_a_computation_is_longer_by_the_pauses_that_it_falls_into() -> None:
    pauses = Pauses(Pause(workers=(0,), every_s=10.0, lasting_s=3.0), 0, 0)
    pauses.following(1000.0)
    first, second = zip(pauses.begins_s[:2], pauses.ends_s[:2], strict=True)
    assert first[1] - first[0] == pytest.approx(3.0)
    assert prolonged_s([pauses], 0.0, first[0] / 2) == pytest.approx(first[0] / 2)
    assert prolonged_s([pauses], first[0] - 0.1, 0.2) == pytest.approx(3.2)
    assert prolonged_s([pauses], first[0] + 1.0, 0.1) == pytest.approx(2.1)
    whole = second[0] - first[0] - 3.0
    assert prolonged_s([pauses], first[0], whole + 0.1) == pytest.approx(whole + 6.1)
    gaps = np.diff(pauses.begins_s) - 3.0
    assert stats.kstest(gaps, stats.expon(scale=10.0).cdf).pvalue > 0.01


@pytest.mark.parametrize(("uplink", "seconds"), [(1.0, 4.0), (2.0, 2.0), (8.0, 1.0), (0.5, 8.0)])
def test_a_shared_uplink_takes_what_the_sum_of_its_transfers_takes(uplink: float, seconds: float) -> None:
    """Four workers send 125 MB each, so the uplink carries 4 Gbit, and each worker's own interface 1 Gbit."""
    cluster = Cluster(
        [1.0] * 4,
        servers=4,
        bandwidth_bps=GIGABIT,
        size_bytes=125_000_000,
        uplinks=[Uplink(workers=(0, 1, 2, 3), bandwidth_bps=uplink * GIGABIT)],
    )
    assert simulate(cluster, "bsp", 10).time_s == pytest.approx(10 * (1.0 + 2 * seconds))
    alone = Cluster([1.0] * 4, servers=4, bandwidth_bps=GIGABIT, size_bytes=125_000_000)
    assert simulate(alone, "bsp", 10).time_s == pytest.approx(10 * 3.0)


def test_a_shared_uplink_leaves_those_alone_who_do_not_share_it() -> None:
    cluster = Cluster(
        [1.0] * 2,
        bandwidth_bps=8 * GIGABIT,
        size_bytes=125_000_000,
        uplinks=[Uplink(workers=(0,), bandwidth_bps=GIGABIT / 2)],
    )
    result = simulate(cluster, "asp", 10, record=True)
    first, second = (records[-1].answered_s for records in result.records)
    assert first == pytest.approx(10 * (1.0 + 2 * 2.0), rel=0.01)
    assert second < 10 * (1.0 + 2 * 0.3)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_applies_one_push_after_another(servers: int) -> None:
    """Each server applies its share of four pushes; the answer waits for the last one."""
    cluster = Cluster([1.0] * 4, servers=servers, apply_s=0.1, size_bytes=1000)
    assert simulate(cluster, "bsp", 10).time_s == pytest.approx(10 * (1.0 + 0.4 / servers))
    assert simulate(cluster.with_(workers=8), "bsp", 10).time_s == pytest.approx(10 * (1.0 + 0.8 / servers))
    one = Cluster([0.01] * 4, servers=servers, apply_s=0.1, size_bytes=1000)
    assert simulate(one, "asp", 20).time_s == pytest.approx(80 * 0.1 / servers, rel=0.02)


def times(cluster: Cluster, sync: str, iterations: int, **settings: Any) -> list[list[float]]:
    """Return the times at which each worker received its answers."""
    result = simulate(cluster, sync, iterations, record=True, **settings)
    return [[round(record.answered_s, 9) for record in records] for records in result.records]


@pytest.mark.parametrize("overlap", ["shards", "off"])
def test_bsp_waits_for_one_update_in_each_round(overlap: str) -> None:
    assert times(Cluster([1.0] * 4, update_s=0.1), "bsp", 3, overlap=overlap) == [[1.1, 2.2, 3.3]] * 4
    # Each of two servers applies its part of four pushes, and then updates its part of the parameters.
    both = Cluster([1.0] * 4, servers=2, apply_s=0.05, update_s=0.3)
    assert times(both, "bsp", 2, overlap=overlap) == [[1.25, 2.5]] * 4
    assert times(Cluster([1.0] * 4, update_s=0.1), "bsp", 2, shards=5, overlap=overlap) == [[1.1, 2.2]] * 4


def test_asp_waits_for_one_update_for_each_push() -> None:
    """In the first round, all pushes arrive together. Then they come one after another, and no update waits."""
    expected = [[1.1, 2.2, 3.3], [1.2, 2.3, 3.4], [1.3, 2.4, 3.5], [1.4, 2.5, 3.6]]
    assert times(Cluster([1.0] * 4, update_s=0.1), "asp", 3) == expected
    assert times(Cluster([1.0] * 4, servers=2, update_s=0.2), "asp", 3) == expected
    # Each push takes 0.1 s until it is applied, and then 0.2 s.
    both = Cluster([1.0] * 3, apply_s=0.1, update_s=0.2)
    assert times(both, "asp", 2) == [[1.3, 2.6], [1.6, 2.9], [1.9, 3.2]]


def test_a_server_can_make_only_so_many_updates() -> None:
    cluster = Cluster([0.3] * 4, update_s=0.2)
    assert simulate(cluster, "asp", 100).time_s == pytest.approx(0.3 + 400 * 0.2)
    assert simulate(cluster, "bsp", 100).time_s == pytest.approx(100 * 0.5)


def test_ssp_answers_after_the_update_that_a_pull_has_waited_for() -> None:
    # Both push together. The first one waits for the second push, and so for both updates.
    assert times(Cluster([1.0] * 2, update_s=0.1), "ssp:staleness=0", 2) == [[1.2, 2.4]] * 2
    assert times(Cluster([1.0, 2.0], update_s=0.1), "ssp:staleness=0", 2) == [[2.1, 4.2]] * 2
    # From the second round on, the push of worker 1 arrives just when the update for worker 0 ends.
    expected = [[1.1, 2.2, 3.3], [1.2, 2.3, 3.4]]
    assert times(Cluster([1.0] * 2, update_s=0.1), "ssp:staleness=1", 3) == expected


def test_elastic_bsp_makes_one_update_at_a_barrier_and_one_for_each_push_before_it() -> None:
    cluster = Cluster([1.0] * 2, update_s=0.1)
    expected = [[1.1, 2.2, 3.4], [1.2, 2.3, 3.4]]
    assert times(cluster, "elastic-bsp:lookahead=1", 6) == [
        each + [round(answered + 3.4, 9) for answered in each] for each in expected
    ]
    assert simulate(cluster, "elastic-bsp:lookahead=1", 6).updates == 10


@pytest.mark.parametrize(("delay_s", "expected"), [("0.05", [1.1, 1.2]), ("0.15", [1.2, 1.25])])
def test_an_answer_that_a_timer_releases_waits_for_the_update_in_progress(
    delay_s: str, expected: list[float]
) -> None:
    """Worker 0 may be answered from 1 s + delay on, and worker 1 from 1.1 s + delay on."""
    found = times(Cluster([1.0] * 2, update_s=0.1), f"naive-waiting:delay_s={delay_s}", 1)
    assert found == [[each] for each in expected]


def test_the_mean_that_a_departure_releases_takes_an_update() -> None:
    gone = {2: Presence(lost_at_s=2.0)}
    assert times(Cluster([1.0, 1.0, 9.0], update_s=0.1, presence=gone), "bsp", 2) == [[2.1, 3.2]] * 2 + [[]]
    # At 1.3 s, the push to one shard has been applied. The server applies that to the other one until 1.4 s.
    cluster = Cluster([1.0, 9.0], apply_s=0.4, update_s=0.2, presence={1: Presence(lost_at_s=1.3)})
    assert times(cluster, "bsp", 1, shards=2) == [[1.6], []]


def test_what_a_departure_releases_leaves_after_what_an_update_holds_back() -> None:
    """When worker 2 is lost, worker 1 waits for it, and the update for the push of worker 0 just ends."""
    gone = {2: Presence(lost_at_s=3.1)}
    cluster = Cluster([[3.0, 1.0, 1.0], 1.0, 9.0], update_s=0.1, presence=gone)
    assert times(cluster, "ssp:staleness=1", 3) == [[3.1, 4.2, 5.3], [1.1, 3.1, 4.3], []]


def test_a_worker_that_comes_back_during_an_update_begins_after_it() -> None:
    """The server updates the parameters with the push of worker 1 until 2 s."""
    back = {1: Presence(lost_at_s=1.7, back_after_s=0.1)}
    result = simulate(Cluster([1.0] * 2, update_s=0.5, presence=back), "asp", 4, record=True)
    assert [(r.begun_s, r.pushed_s, r.answered_s) for r in result.records[1]] == [
        (2.0, 3.0, 3.5),
        (3.5, 4.5, 5.0),
    ]


def test_the_times_of_updates_may_vary() -> None:
    assert times(Cluster([1.0], update_s=[0.1, 0.2]), "asp", 3) == [[1.1, 2.3, 3.4]]  # type: ignore[arg-type]


def test_models_that_update_for_each_push_can_be_slower_than_bsp() -> None:
    """The rates of iterations of four equal workers, compared with bsp.

    As long as a server has time for four updates in the time of an iteration, pushes spread by themselves, and no
    model but elastic-bsp is slower than bsp: it brings the pushes together again at each barrier, so they queue again.
    Otherwise the server is the limit, and all models that update for each push are equally slow.
    """
    models = ["asp", "ssp:staleness=3", "dssp:lower=3,upper=15", "elastic-bsp:lookahead=15"]

    def rates(update_s: float) -> list[float]:
        cluster = Cluster([1.0] * 4, update_s=update_s)
        return [300 * (1.0 + update_s) / simulate(cluster, sync, 300).time_s for sync in models]

    *others, elastic = rates(0.1)
    assert others == pytest.approx([1.0] * 3, rel=0.002)
    assert 0.85 < elastic < 0.95
    *others, elastic = rates(0.465)
    assert others == pytest.approx([78 / 99] * 3, rel=0.005)
    assert elastic < 78 / 99


def test_all_of_it_can_be_stated_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "delays.csv").write_text("worker,seconds\n0,1.0\n1,2.0\n")
    path = tmp_path / "cluster.toml"
    path.write_text(
        'delays = "delays.csv"\napply = "10 ms"\nupdate = "20 ms"\n'
        '[[pauses]]\nworkers = [0, 1]\nevery = "1 min"\nlasting = { kind = "uniform", low = 1, high = "2 s" }\n'
        '[[uplinks]]\nworkers = [1]\nbandwidth = "1 Gbit/s"\n'
    )
    assert Cluster.from_toml(path) == Cluster(
        [Recorded(seconds=(1.0,)), Recorded(seconds=(2.0,))],
        apply_s=0.01,
        update_s=0.02,
        pauses=[Pause(workers=(0, 1), every_s=60.0, lasting_s=Uniform(low=1.0, high=2.0))],
        uplinks=[Uplink(workers=(1,), bandwidth_bps=1e9)],
        name="cluster",
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "expected the columns worker,seconds or worker,time,seconds"),
        ("seconds,worker\n", "expected the columns"),
        ("worker,seconds\n0,x\n", "line 2 of .* is '0,x'"),
        ("worker,seconds\n0,1\n\n1,2,3\n", "line 4 of .* is '1,2,3'"),
        ("worker,seconds\n0,-1\n", r"delays\.csv: .*expected a number of seconds >= 0"),
        ("worker,seconds\n0,nan\n", "expected a number of seconds >= 0"),
        ("worker,seconds\n1,1\n", "has the workers 1, expected 0, 1, 2"),
        ("worker,seconds\n", "has the workers none"),
        ("worker,time,seconds\n0,1,1\n0,1,2\n", "in ascending order"),
    ],
)
def test_a_bad_file_of_delays_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "delays.csv"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=reason):
        read_delays(path)


def test_bad_input_is_named(tmp_path: Path) -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: read_delays(tmp_path / "none.csv"), "cannot be read: No such file"),
        (lambda: Cluster.from_toml("a/delays.csv"), r'name it in a cluster file: delays = "delays\.csv"'),
        (lambda: Cluster([Wrong(-1.0)]), "Wrong.sample returned -1.0, expected a number of seconds >= 0"),  # type: ignore[list-item]
        (lambda: Cluster([Wrong("x")]), "Wrong.sample returned 'x'"),  # type: ignore[list-item]
        (lambda: Pause(workers=(0,), every_s=0.0, lasting_s=1.0), "every_s of a pause is 0.0"),
        (lambda: Pause(workers=(0,), every_s=1.0, lasting_s=-1.0), "expected a number of seconds >= 0"),
        (lambda: Uplink(workers=(0,), bandwidth_bps=0.0), "bandwidth_bps of an uplink is 0.0"),
        (
            lambda: Cluster([1.0], pauses=[Pause(workers=(1,), every_s=1.0, lasting_s=1.0)]),
            r"the workers of a pause are \[1\], expected at least one number from 0 to 0",
        ),
        (lambda: Cluster([1.0], uplinks=[Uplink(workers=(0,), bandwidth_bps=1.0)] * 2), "two uplinks"),
    ]
    for call, reason in cases:
        with pytest.raises(ConfigurationError, match=reason):
            call()

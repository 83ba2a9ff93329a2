"""Simulations of workers that use up data without computing gradients."""

from __future__ import annotations

import re
from typing import Any

import pytest

from paceline.core.lease import BATCH_SIZINGS
from paceline.errors import ConfigurationError
from paceline.lab.clusters import describe_data
from paceline.lab.ranking import rank
from paceline.sim import Cluster, Dataset, LogNormal, Occasional, Presence, Recorded, Uniform, simulate

UNEQUAL = Cluster(compute_s=[0.05, 0.05, 0.05, 0.15])
DATA = Dataset(samples=64 * 16, batch_size=16, epochs=10)
DOUBLE: dict[str, Any] = {"samples": 64 * 16, "batch_size": 16, "pushes_per_batch": 2.0}


@pytest.mark.parametrize(
    ("sync", "batch", "least", "most"),
    [
        # 160 rounds of 0.15 s, since every joint batch waits for the slow worker
        ("bsp", "equal", 24.0, 24.0),
        ("asp", "equal", 9.6, 9.8),
        ("elastic-bsp:lookahead=15", "equal", 9.6, 10.2),
        # 0.06 s per round at best, and a few rounds before the speeds are known
        ("bsp", "balanced", 9.6, 11.0),
        ("ssp:staleness=3", "balanced", 9.6, 11.0),
    ],
)
def test_the_time_for_the_epochs_depends_on_who_waits(
    sync: str, batch: Any, least: float, most: float
) -> None:
    result = simulate(UNEQUAL, sync, data=DATA, batch=batch)
    assert result.measures.samples == 10 * 1024
    assert least <= result.time_s <= most


def test_a_limit_of_samples_counts_those_in_dropped_pushes() -> None:
    measures = simulate(UNEQUAL, "drop-stragglers:quorum=1", data=DATA, until_samples=640).measures
    assert measures.dropped_samples > 100
    assert 640 <= measures.samples + measures.dropped_samples < 640 + 8 * 16


def test_a_static_split_leaves_the_slow_worker_alone_at_the_end() -> None:
    data = Dataset(samples=64 * 16, batch_size=16, split="static")
    result = simulate(UNEQUAL, "asp", data=data)
    assert result.time_s == pytest.approx(16 * 0.15)
    assert result.finished_s[:3] == pytest.approx([16 * 0.05] * 3)


@pytest.mark.parametrize("sync", ["bsp", "asp", "spec-sync:abort_time_s=0.02,abort_rate=0"])
@pytest.mark.parametrize("pushes", [2.0, 1.5])
def test_several_gradients_from_a_batch_use_no_more_data(sync: str, pushes: float) -> None:
    data = Dataset(samples=64 * 16, batch_size=16, epochs=3, pushes_per_batch=pushes)
    cluster = Cluster(compute_s=[Recorded(seconds=(0.05, 0.0))] * 2 if pushes == 2.0 else [0.05, 0.05])
    measures = simulate(cluster, sync, data=data).measures
    assert measures.samples == 3 * 1024
    assert measures.sampled_gradients == 3 * 64
    assert measures.gradients == pytest.approx(pushes * 3 * 64, abs=1)
    assert "in batches of 16, with 2 gradients each;" in describe_data(Dataset(**DOUBLE), 2)


def test_a_fixed_part_of_the_compute_time_limits_what_balanced_batches_save() -> None:
    times_s = [
        simulate(
            Cluster(compute_s=UNEQUAL.compute_s, fixed_share=share), "bsp", data=DATA, batch="balanced"
        ).time_s
        for share in (0.0, 0.5, [0.0, 0.0, 0.0, 1.0])
    ]
    assert times_s == sorted(times_s)
    assert 12.0 < times_s[1] < 15.0
    assert times_s[2] == pytest.approx(24.0, rel=0.01)  # the slow worker needs 0.15 s for any batch


@pytest.mark.parametrize(
    "times",
    [
        LogNormal(median=1.0, sigma=0.1),
        LogNormal(median=1.0, sigma=0.5),
        Occasional(base=Uniform(low=0.97, high=1.03), factor=10.0, lasting=10.0, every=100.0),
    ],
)
def test_balanced_batches_save_nothing_where_all_workers_are_alike_in_the_long_run(times: Any) -> None:
    cluster = Cluster(compute_s=[times] * 4)
    equal, balanced = (simulate(cluster, "bsp", data=DATA, batch=batch).time_s for batch in BATCH_SIZINGS)
    assert 0.95 * equal < balanced < 1.15 * equal


@pytest.mark.parametrize("sync", ["asp", "bsp", "spec-sync"])
def test_lost_workers_data_is_used_by_the_others(sync: str) -> None:
    cluster = Cluster(
        compute_s=[1.0, 1.0, 1.5],
        presence={1: Presence(lost_at_s=7.5), 2: Presence(lost_at_s=3.2, back_after_s=4)},
    )
    result = simulate(cluster, sync, data=Dataset(samples=96, batch_size=4, epochs=2))
    assert 185 <= result.measures.samples <= 2 * 96


def test_models_are_ranked_by_the_time_per_epoch() -> None:
    rows = rank(UNEQUAL, ["bsp", "asp", "elastic-bsp:lookahead=15"], data=DATA)
    assert [row.name for row in rows if row.sync == "bsp"] == ["bsp, balanced batches", "bsp"]
    assert [row.epoch_s for row in rows] == sorted(row.epoch_s or 0.0 for row in rows)
    assert [row.name for row in rows if row.sync == "asp"] == [
        "asp"
    ]  # no worker waits, so nothing is to be saved
    assert rows[-1].name == "bsp"
    assert rows[-1].epoch_s == pytest.approx(2.4)
    assert all(row.speed == row.samples_per_s for row in rows)


@pytest.mark.parametrize("split", ["static", "dynamic"])
def test_an_epoch_smaller_than_one_batch_for_each_worker_is_used_up_in_smaller_batches(split: Any) -> None:
    data = Dataset(samples=10, batch_size=32, epochs=3, split=split)
    assert simulate(UNEQUAL, "asp", data=data).measures.samples == 30
    assert [row.samples_per_s > 0.0 for row in rank(UNEQUAL, ["bsp"], data=data)] == [True, True]
    assert "in batches of 32, or smaller ones, because" in describe_data(data, UNEQUAL.workers)


def test_an_epoch_without_a_full_batch_is_refused_if_the_last_batch_is_dropped() -> None:
    data = Dataset(samples=100, batch_size=32, drop_last=True)
    with pytest.raises(ConfigurationError, match="a full batch for each of 4 workers takes 128 samples"):
        simulate(UNEQUAL, "bsp", data=data)
    with pytest.raises(ConfigurationError, match="so nothing would be computed"):
        rank(UNEQUAL, ["asp", "bsp"], data=data)
    assert simulate(UNEQUAL, "asp", data=data).measures.samples == 96
    assert simulate(Cluster(compute_s=[1.0] * 3), "bsp", data=data).measures.samples == 96
    with pytest.raises(ConfigurationError, match="a full batch takes 32 samples"):
        simulate(UNEQUAL, "asp", data=Dataset(samples=31, batch_size=32, drop_last=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dataset(samples=0, batch_size=1), "samples is 0, expected a whole number >= 1"),
        (lambda: Dataset(samples=8, batch_size=True), "batch_size is True"),
        (lambda: Dataset(samples=8, batch_size=2, epochs=-1), "epochs is -1"),
        (lambda: Dataset(samples=8, batch_size=2, split="half"), "unknown split 'half'"),  # type: ignore[arg-type]
        (lambda: simulate(UNEQUAL, data=Dataset(samples=3, batch_size=1)), "3 samples for 4 workers"),
        (lambda: rank(UNEQUAL, ["bsp"], data=Dataset(samples=3, batch_size=1)), "3 samples for 4 workers"),
        (lambda: simulate(UNEQUAL, data=DATA, train_fn=print), "data and train_fn are both given"),
        (lambda: simulate(UNEQUAL, batch="half"), "unknown batch 'half'"),  # type: ignore[arg-type]
        (
            lambda: simulate(UNEQUAL, batch="balaned"),  # type: ignore[arg-type]
            "unknown batch 'balaned'; did you mean 'balanced'? Choices: balanced, equal.",
        ),
        (
            lambda: simulate(UNEQUAL, batch=None),  # type: ignore[arg-type]
            "unknown batch None. Choices: balanced, equal.",
        ),
        (
            lambda: Cluster(compute_s=[1.0], fixed_share=1.5),
            "fixed_share is 1.5, expected a number from 0 to 1",
        ),
        (lambda: Cluster(compute_s=[1.0], fixed_share=[0.5, 0.5]), "fixed_share is [0.5, 0.5]"),
    ],
)
def test_bad_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("sync", ["bsp", "asp", "auto"])
def test_a_part_of_a_joint_batch_takes_a_part_of_the_time(sync: str) -> None:
    """Ten joint batches of 64 are divided among four workers. The rest, 2 samples, is used by two of them."""
    data = Dataset(samples=642, batch_size=64, epochs=2, joint_batch=True)
    result = simulate(Cluster(compute_s=[1.0] * 4), sync, data=data)
    assert result.measures.samples == 2 * 642
    assert result.time_s == pytest.approx(2 * 10 * 16 / 64, rel=0.1)


def test_joint_batches_that_are_too_small_for_the_workers_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"joint batch of 3 samples for 4 workers.*at most 3 workers"
    ):
        simulate(
            Cluster(compute_s=[1.0] * 4), "bsp", data=Dataset(samples=64, batch_size=3), joint_batch=True
        )

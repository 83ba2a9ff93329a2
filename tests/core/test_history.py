"""Merging metrics over workers and over the progress of a job (`core/metrics.py`), and the file with them."""

from __future__ import annotations

import math
import pickle
import random
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.core.metrics import MOST_BUCKETS, MOST_METRICS, History, Metric, MetricHistory, MetricPoint
from paceline.trace.run_dir import METRICS_FILE, read_metrics, write_metrics


def note(history: History, value: float, samples: int, **changes: Any) -> bool:
    given: dict[str, Any] = {
        "name": "loss",
        "kind": "mean",
        "weight": 1,
        "worker": 0,
        "updates": samples // 10,
    }
    given |= changes
    called = {name: given.pop(name) for name in ("name", "kind", "source") if name in given}
    return history.note(**called, point=MetricPoint(samples / 100, samples, value=value, **given))


def only(history: History) -> Metric:
    [metric] = history.metrics()
    return metric


def test_values_of_the_same_progress_merge_by_their_samples() -> None:
    history = History()
    note(history, 1.0, 100, weight=30, worker=0)
    note(history, 5.0, 100, weight=10, worker=1, count=2)
    note(history, 7.0, 140, weight=30, worker=0)
    assert only(history) == Metric(
        "loss", "mean", (MetricPoint(1.0, 100, 10, 2.0, 40, 3), MetricPoint(1.4, 140, 14, 7.0, 30, 1))
    )


def test_without_samples_the_progress_is_counted_in_updates() -> None:
    history = History()
    for updates in (0, 1, 1, 2):
        note(history, float(updates), 0, updates=updates)
    assert only(history).updates == (0, 1, 2)
    assert only(history).values == (0.0, 1.0, 2.0)
    assert [point.count for point in only(history).points] == [1, 2, 1]


def test_neighbors_merge_when_there_are_too_many() -> None:
    history = History()
    many = 5 * MOST_BUCKETS
    for step in range(many):
        note(history, float(step), 32 * step)
    points = only(history).points
    assert MOST_BUCKETS / 2 < len(points) <= MOST_BUCKETS
    assert sum(point.count for point in points) == many
    assert {point.count for point in points[:-1]} == {8}
    assert points[1].value == pytest.approx(11.5)  # the mean of 8 to 15
    assert points[1].samples == 32 * 15


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_arrival_does_not_matter(seed: int) -> None:
    choice = random.Random(seed)
    given = [
        (choice.gauss(0, 1), 8 * step, worker) for step in range(3 * MOST_BUCKETS) for worker in range(2)
    ]
    kinds = {0: "point", 1: "mean"}
    metrics = []
    for _ in range(2):
        history = History()
        for value, samples, worker in given:
            note(history, value, samples, worker=worker, kind=kinds[worker], weight=1 + worker)
        metrics.append(only(history))
        choice.shuffle(given)
    one, other = metrics
    assert one.kind == other.kind == "mean"
    assert one.values == pytest.approx(other.values)
    assert [msgspec.structs.replace(point, value=0) for point in one.points] == [
        msgspec.structs.replace(point, value=0) for point in other.points
    ]


def test_points_of_several_workers_stay_apart() -> None:
    history = History()
    for samples in (0, 100):
        for worker in (2, 0):
            note(history, worker + samples, samples, name="accuracy", kind="point", worker=worker)
    metric = only(history)
    assert (metric.kind, metric.values) == ("point", (0.0, 2.0, 100.0, 102.0))
    assert [point.worker for point in metric.points] == [0, 2, 0, 2]


def test_points_become_a_mean_with_the_first_value_that_is_none() -> None:
    history = History()
    note(history, 1.0, 100, kind="point", worker=0, weight=8)
    assert only(history).kind == "point"
    note(history, 3.0, 100, kind="mean", worker=1, weight=8)
    note(history, 5.0, 200, kind="point", worker=0, weight=8)
    metric = only(history)
    assert (metric.kind, metric.values) == ("mean", (2.0, 5.0))
    assert {point.worker for point in metric.points} == {-1}


def test_many_points_at_one_progress_end_the_search_for_a_width() -> None:
    history = History()
    for worker in range(MOST_BUCKETS + 2):
        note(history, 1.0, 100, kind="point", worker=worker)
    assert len(only(history).points) == MOST_BUCKETS + 2


def test_only_the_best_source_of_a_loss_is_shown() -> None:
    history = History()
    note(history, 0.5, 100, source="guess")
    assert only(history) == Metric("loss", "mean", (MetricPoint(1.0, 100, 10, 0.5),), guessed=True)
    note(history, 0.6, 100, source="closure")
    assert (only(history).values, only(history).guessed) == ((0.6,), False)
    note(history, 0.7, 300, source="script")
    note(history, 0.8, 200, source="closure")
    assert only(history).values == (0.7,)


def test_nan_and_infinity_are_values() -> None:
    history = History()
    note(history, math.nan, 100)
    note(history, 1.0, 100)
    note(history, math.inf, 200)
    note(history, 1.0, 200)
    note(history, 1.7e308, 300, weight=1e15)
    note(history, 1.7e308, 300, weight=1e15)
    first, second, third = only(history).values
    assert math.isnan(first)
    assert second == math.inf
    assert third == 1.7e308


def test_there_is_a_limit_of_names() -> None:
    history = History()
    assert all(note(history, 1.0, 1, name=f"metric {number}") for number in range(MOST_METRICS))
    assert not note(history, 1.0, 1, name="one more")
    assert note(history, 1.0, 1, name="metric 3")
    assert len(history.metrics()) == MOST_METRICS
    assert history.noted == MOST_METRICS + 1


def test_another_thread_finds_each_value_once() -> None:
    history, over = History(), threading.Event()
    seen: list[int] = []

    def look() -> None:
        while not over.is_set():
            seen.extend(sum(point.count for point in metric.points) for metric in history.metrics())

    reader = threading.Thread(target=look)
    reader.start()
    for step in range(6 * MOST_BUCKETS):
        note(history, 1.0, step, kind="point" if step < MOST_BUCKETS + 5 else "mean")
    over.set()
    reader.join()
    assert seen == sorted(seen)
    assert sum(point.count for point in only(history).points) == 6 * MOST_BUCKETS


def test_a_history_can_be_read_and_not_be_changed() -> None:
    metric = Metric("loss", "mean", (MetricPoint(1.0, 100, 10, 0.5), MetricPoint(2.0, 200, 20, 0.25)))
    history = MetricHistory([metric])
    assert history == {"loss": metric}
    assert (metric.values, metric.samples, metric.updates, metric.time_s) == (
        (0.5, 0.25),
        (100, 200),
        (10, 20),
        (1.0, 2.0),
    )
    assert "accuracy" not in history
    assert pickle.loads(pickle.dumps(history)) == history
    with pytest.raises(TypeError):
        history["loss"] = metric  # type: ignore[index]


def test_the_file_contains_every_point(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == {}
    history = History()
    for value, samples in ((0.5, 100), (-math.inf, 200), (math.inf, 300)):
        note(history, value, samples, source="guess")
    note(history, 0.25, 100, name='<b>"\n', kind="point", worker=3)
    write_metrics(tmp_path, history.metrics())
    assert read_metrics(tmp_path) == MetricHistory(history.metrics())
    lines = [msgspec.json.decode(line) for line in (tmp_path / METRICS_FILE).read_bytes().splitlines()]
    assert [(line["name"], line["kind"], line["value"], line.get("guessed")) for line in lines] == [
        ("loss", "mean", 0.5, True),
        ("loss", "mean", "-Infinity", True),
        ("loss", "mean", "Infinity", True),
        ('<b>"\n', "point", 0.25, None),
    ]
    note(history, math.nan, 400)
    write_metrics(tmp_path, history.metrics())
    assert math.isnan(read_metrics(tmp_path)["loss"].values[-1])
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]

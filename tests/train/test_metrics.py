"""`paceline.log`: what it takes, which iteration a loss belongs to, and what becomes of it, live and simulated."""

from __future__ import annotations

import functools
import gc
import json
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.core.coordinator import Coordinator
from paceline.core.messages import LONGEST_NAME, LoggedValue, MetricsLogged, PushesObserved
from paceline.core.metrics import MOST_METRICS, MetricHistory, Noted, UnsentMetrics
from paceline.core.requests import Warn, worker_peer
from paceline.errors import RunFailedError, UsageError
from paceline.sim import Cluster, SimResult, simulate
from paceline.sync.schedule import read_schedule
from paceline.trace.recording import read_records
from paceline.trace.run_dir import METRICS_FILE, read_metrics
from paceline.train import forward as readings
from paceline.train.forward import BACKWARD, unwatch_backward, watch_backward
from paceline.train.metrics import metrics_of
from paceline.train.session import current
from tests.conftest import RunOnThreads

TWO = Cluster(compute_s=[1.0, 1.0])

WAYS = ("closure", "closure and log", "before", "after", "float after", "nothing")
"""How a script logs its loss."""


def lesson(way: str = "closure", epochs: int = 2, batch: int = 4) -> list[float]:
    """Train, and return the losses that this worker has computed."""
    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, 0.1)
    nn.init.zeros_(model.bias)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(x, x[:, 0].gt(0).long()), batch_size=batch)
    model, optimizer, loader = paceline.prepare(model, sgd, data)
    losses = []
    for _ in range(epochs):
        for inputs, targets in loader:

            def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(inputs), targets)
                if way == "before":
                    paceline.log(loss=loss)
                loss.backward()
                return loss

            if way.startswith("closure"):
                loss = optimizer.step(closure)
                if way == "closure and log":
                    paceline.log(loss=2 * loss)
            else:
                loss = closure()
                optimizer.step()
                if way.endswith("after"):
                    paceline.log(loss=loss if way == "after" else loss.item())
            losses.append(loss.item())
    return losses


def simulated(
    function: Callable[[], object] = lesson, cluster: Cluster = TWO, sync: str = "bsp", **options: Any
) -> SimResult:
    return simulate(cluster, sync, train_fn=function, record=True, **options)


@pytest.fixture
def guessing() -> Iterator[None]:
    """As in a worker's process."""
    watch_backward()
    yield
    unwatch_backward()


# -- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        1,
        0.5,
        True,
        math.nan,
        -math.inf,
        np.float32(0.5),
        np.int64(3),
        np.bool_(True),
        np.array(2.0),
        np.array([2.0]),
        torch.tensor(0.5),
        torch.tensor([[3]]),
        torch.tensor(True),
        torch.tensor(0.5, dtype=torch.bfloat16),
        torch.ones((), requires_grad=True),
        nn.Parameter(torch.ones(1)),
    ],
    ids=repr,
)
def test_numbers_are_logged(value: Any) -> None:
    def train() -> None:
        paceline.log(metric=value)
        lesson(epochs=1)

    [logged] = simulated(train, Cluster(compute_s=[1.0])).history["metric"].values
    assert logged == pytest.approx(float(value.item() if hasattr(value, "item") else value), nan_ok=True)
    paceline.log(metric=value)  # outside a run, it is only checked


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"loss": "low"}, "log() got 'loss' = 'low', expected a real number or a tensor of one real number."),
        ({"loss": None}, "log() got 'loss' = None, expected a real number"),
        ({"loss": 1j}, "log() got 'loss' = 1j, expected a real number"),
        ({"loss": [1.0]}, "log() got 'loss' = [1.0], expected a real number"),
        ({"loss": 10**400}, "log() got 'loss' = 1000000000"),
        ({"loss": np.array("low")}, "log() got 'loss' = "),
        ({"loss": np.ones(3)}, "log() got 'loss' = array([1., 1., 1.]), expected"),
        ({"loss": torch.ones(10)}, "log() got 'loss' = a tensor of shape (10,) and float32, expected"),
        ({"loss": torch.tensor(1j)}, "log() got 'loss' = a tensor of shape () and complex64, expected"),
        ({"loss": torch.ones((), device="meta")}, "log() got 'loss' = a tensor of shape ()"),
        ({"x" * 1000: 1.0}, f"the name '{'x' * 59}..., expected a name of 1 to 100 characters."),
        ({"": 1.0}, "log() got a metric with the name '', expected a name"),
        ({"\ud800": 1.0}, r"log() got a metric with the name '\ud800', which is not valid Unicode."),
        ({f"metric {n}": 1.0 for n in range(201)}, "a script may log at most 200 metrics"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_cannot_be_logged_is_refused_in_one_sentence(metrics: dict[str, Any], words: str) -> None:
    def train() -> None:
        with pytest.raises(UsageError) as refusal:
            paceline.log(good=1.0, **metrics)
        told.append(str(refusal.value))
        lesson(epochs=1)

    told: list[str] = []
    result = simulated(train, Cluster(compute_s=[1.0]))
    with pytest.raises(UsageError) as alone:
        paceline.log(good=1.0, **metrics)
    assert told == [str(alone.value)]
    assert words in told[0]
    assert len(told[0]) < 250
    assert list(result.history) == ["loss"]  # that of the closure: nothing else was kept


def test_a_script_may_log_a_limited_number_of_names() -> None:
    def train() -> None:
        for number in range(MOST_METRICS):
            paceline.log(**{f"metric {number}": number})
        with pytest.raises(UsageError, match="'one more', but a script may log at most 200 metrics"):
            paceline.log(**{"one more": 1.0})
        paceline.log(**{"metric 3": 4.0})
        lesson("nothing", epochs=1)

    assert len(simulated(train).history) == MOST_METRICS


def test_names_that_come_too_late_are_said_once() -> None:
    core = Coordinator(read_schedule("bsp"), workers=2, servers=1, shards=1)
    requests = []
    for start in (0, 150, 300):
        values = tuple(LoggedValue(f"{n}", 1.0, 1.0, 1, 0.0, 0, 0) for n in range(start, start + 150))
        requests += core.handle(worker_peer(1), MetricsLogged(values), 0)
    assert [type(request) for request in requests] == [Warn]
    assert "more than 200 metrics" in core.faults[0]
    assert "'200', from worker 1" in core.faults[0]
    assert len(core.history.metrics()) == MOST_METRICS


def test_a_long_name_is_kept_whole() -> None:
    name = "é" * LONGEST_NAME

    def train() -> None:
        paceline.log(**{name: 1.0})
        lesson("nothing", epochs=1)

    assert name in simulated(train).history


# -- the history ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [way for way in WAYS if way != "nothing"])
def test_live_and_simulated_histories_are_the_same(way: str, run_on_threads: RunOnThreads) -> None:
    live = run_on_threads(functools.partial(lesson, way))
    virtual = simulated(functools.partial(lesson, way))
    assert list(live.history) == list(virtual.history) == ["loss"]
    ours, theirs = live.history["loss"], virtual.history["loss"]
    assert ours.values == pytest.approx(theirs.values, rel=1e-6)
    assert (ours.kind, ours.samples, ours.updates) == (theirs.kind, theirs.samples, theirs.updates)
    assert [(point.weight, point.count) for point in ours.points] == [(8.0, 2)] * 12
    assert read_metrics(live.run_dir) == live.history
    assert len(virtual.history["loss"].time_s) == 12


@pytest.mark.parametrize("way", WAYS)
def test_the_history_is_that_of_one_process_on_the_joint_batch(way: str) -> None:
    one = simulated(functools.partial(lesson, way, batch=8), Cluster(compute_s=[1.0]))
    two = simulated(functools.partial(lesson, way))
    assert two.history["loss"].values == pytest.approx(one.history["loss"].values, rel=1e-5)
    assert two.history["loss"].samples == one.history["loss"].samples
    assert two.history["loss"].guessed == (way == "nothing")


def test_the_loss_of_the_script_takes_the_place_of_the_closures() -> None:
    closures = simulated(functools.partial(lesson, "closure")).history["loss"]
    own = simulated(functools.partial(lesson, "closure and log")).history["loss"]
    assert own.values == pytest.approx([2 * value for value in closures.values])
    assert sum(point.count for point in own.points) == 24
    # what is logged after a step belongs to the progress after it
    assert own.samples == (*closures.samples[1:], 96)


@pytest.mark.parametrize("way", ["closure", "before", "after", "float after"])
def test_the_records_of_iterations_have_the_loss_of_the_same_iteration(
    way: str, run_on_threads: RunOnThreads
) -> None:
    live = run_on_threads(functools.partial(lesson, way))
    virtual = simulated(functools.partial(lesson, way))
    for records in (read_records(live.run_dir), virtual.records):
        for worker, records_of_worker in enumerate(records):
            losses = [record.loss for record in records_of_worker]
            # The first record was made before it was known that the script logs the loss after the step.
            first = 1 if way.endswith("after") else 0
            expected = live.results[worker]
            assert isinstance(expected, list)
            assert losses[first:] == pytest.approx(expected[first:], rel=1e-6)
            assert (losses[0] is None) == bool(first)
    assert virtual.losses is not None
    assert len(virtual.losses) == 24 - 2 * first


@pytest.mark.parametrize("way", ["before", "after"])
def test_the_guard_sees_the_loss_of_the_same_iteration(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, list[tuple[int, float | None]]] = {0: [], 1: []}
    handle = Coordinator.handle

    def look(self: Coordinator, sender: Any, message: Any, now_ticks: int) -> Any:
        if isinstance(message, PushesObserved):
            seen[sender.index] += [(each.updates, each.loss) for each in message.observed]
        return handle(self, sender, message, now_ticks)

    monkeypatch.setattr(Coordinator, "handle", look)
    losses: dict[int, list[float]] = {}

    def train() -> None:
        losses[paceline.worker_index()] = lesson(way)

    simulated(train)
    for worker, observed in seen.items():
        known = observed[1:] if way == "after" else observed
        assert len(known) >= 10
        for updates, loss in known:
            assert loss == pytest.approx(losses[worker][updates])


def test_a_metric_of_one_worker_is_a_series_of_points() -> None:
    def train() -> None:
        model = nn.Linear(1, 1)
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(4):
            with paceline.evaluating(model) as snapshot, torch.no_grad():
                paceline.log(everybody=snapshot.weight[0, 0])
            if paceline.is_main():
                paceline.log(main=step)
            if paceline.worker_index() == 1:
                paceline.log(other=step)
            optimizer.zero_grad()
            model(torch.ones(2, 1)).sum().backward()
            optimizer.step(samples=2)
            paceline.log(shared=step)

    history = simulated(train).history
    kinds = {name: metric.kind for name, metric in history.items()}
    assert kinds == {"everybody": "point", "main": "point", "other": "mean", "shared": "mean", "loss": "mean"}
    assert [point.worker for point in history["main"].points] == [0] * 4
    assert history["main"].values == (0, 1, 2, 3)
    assert [(point.worker, point.count) for point in history["everybody"].points] == [(0, 1), (1, 1)] * 4
    assert [(point.worker, point.count) for point in history["shared"].points] == [(-1, 2)] * 4
    assert history["main"].updates == (0, 1, 2, 3)
    assert history["shared"].updates == (1, 2, 3, 4)


def test_what_is_logged_in_one_evaluation_belongs_to_one_progress() -> None:
    def train() -> None:
        lesson("nothing")
        model = nn.Linear(1, 1)
        with paceline.evaluating(model):
            for batch in range(4):
                paceline.log(accuracy=batch)

    [point] = simulated(train, Cluster(compute_s=[1.0])).history["accuracy"].points
    assert (point.value, point.count, point.weight, point.samples) == (1.5, 4, 4.0, 96)


def test_everything_is_logged_whenever_it_is_logged(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        paceline.log(first=1.0)
        session = current()
        assert session is not None
        lesson()
        paceline.log(last=2.0)

    for history in (run_on_threads(train).history, simulated(train).history):
        assert history["first"].values == (1.0,)
        assert history["first"].updates == (0,)
        assert history["last"].values == (2.0,)
        assert history["last"].samples == (96,)
        assert [point.count for point in history["last"].points] == [2]


def test_a_script_that_never_trains_may_log(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        paceline.log(only=1.0)
        if paceline.worker_index() == 0:
            lesson()

    assert [point.count for point in run_on_threads(train).history["only"].points] == [2]


def test_pushes_of_more_samples_count_more() -> None:
    def train() -> None:
        model = nn.Linear(1, 1)
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        worker = paceline.worker_index()
        for _ in range(3):
            model(torch.ones(1, 1)).sum().backward()
            for _ in range(1 + worker):  # however often a script logs
                paceline.log(own=float(worker))
            optimizer.step(samples=[10, 30][worker])

    points = simulated(train).history["own"].points
    assert [(point.value, point.weight, point.count) for point in points] == [(0.75, 40.0, 3)] * 3


def test_a_value_logged_after_a_step_has_the_weight_of_this_step() -> None:
    unsent = UnsentMetrics()
    unsent.pushed(32)
    unsent.take([Noted("a", 1.0, 0.0, 0, 0)])
    unsent.pushed(8)
    unsent.take([Noted("b", 1.0, 0.0, 0, 0, late=True), Noted("c", 1.0, 0.0, 0, 0)])
    unsent.take([Noted("d", 1.0, 0.0, 0, 0, late=True)], ended=True)
    [request] = unsent.report(1.0)
    assert {value.name: value.weight for value in request.message.values} == {  # type: ignore[union-attr]
        "a": 32,
        "b": 32,
        "c": 8,
        "d": 8,
    }


def test_a_tensor_on_another_device_is_read_at_the_next_push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "_is_at_hand", lambda tensor: False)

    def train() -> None:
        metric = torch.tensor(1.0, requires_grad=True)
        paceline.log(changed=metric)
        with torch.no_grad():
            metric += 1  # the copy stays as it is
        lesson(epochs=1)
        paceline.log(end=metric)

    history = simulated(train).history
    assert (history["changed"].values, history["end"].values) == ((1.0,), (2.0,))
    assert len(history["loss"].values) == 6


def test_other_threads_of_a_script_may_log(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        session = current()
        assert session is not None

        def log() -> None:  # in a worker's process, the session is that of all threads
            for number in range(3000):
                metrics_of(session).add(session, {"beside": number})

        thread = threading.Thread(target=log)
        thread.start()
        lesson(epochs=8)
        thread.join()

    points = run_on_threads(train).history["beside"].points
    assert sum(point.count for point in points) == 6000


def test_very_many_values_between_two_pushes_take_bounded_memory() -> None:
    def train() -> None:
        session = current()
        assert session is not None
        for number in range(10_000):
            paceline.log(a=number, b=-number, loss=1.0)
        held.append(len(metrics_of(session)._entries))
        lesson("nothing", epochs=1)

    held: list[int] = []
    history = simulated(train, Cluster(compute_s=[1.0])).history
    assert held[0] <= 1000
    assert history["a"].points[0].value == pytest.approx(4999.5)
    assert history["b"].points[0].count == 10_000


def test_the_restart_of_a_closure_drops_what_it_has_logged() -> None:
    def train() -> None:
        model = nn.Linear(1, 1)
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        for step in range(24):
            paceline.log(outside=step)

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                paceline.log(inside=1.0)
                loss: torch.Tensor = model(torch.ones(1, 1)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure, samples=1)

    result = simulated(train, Cluster(compute_s=[1.0, 1.0, 2.5], latency_s=0.01), "spec-sync")
    assert result.restarts > 0
    counts = {name: sum(point.count for point in metric.points) for name, metric in result.history.items()}
    assert counts == {"outside": 72, "inside": 72, "loss": 72}


def test_the_loss_of_a_gradient_with_nan_is_logged(run_on_threads: RunOnThreads, tmp_path: Path) -> None:
    def train() -> None:
        model = nn.Linear(1, 1)
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        for scale in (1.0, math.nan):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 1)).square().mean() * scale
            loss.backward()
            paceline.log(loss=loss)
            optimizer.step()

    run = run_on_threads(train, workers=1, keep_errors=True)
    first, second = run.history["loss"].values
    assert math.isfinite(first)
    assert math.isnan(second)
    assert math.isnan(read_metrics(run.run_dir)["loss"].values[1])
    with pytest.raises(RunFailedError):
        simulated(train, Cluster(compute_s=[1.0]), run_dir=tmp_path / "failed")
    first, second = read_metrics(tmp_path / "failed")["loss"].values
    assert math.isfinite(first)
    assert math.isnan(second)


def test_nothing_is_written_if_nothing_is_logged(run_on_threads: RunOnThreads, tmp_path: Path) -> None:
    run = run_on_threads(functools.partial(lesson, "nothing"))
    assert run.history == MetricHistory()
    assert not (run.run_dir / METRICS_FILE).exists()
    assert not (simulate(TWO, "bsp", 3, run_dir=tmp_path / "sim").run_dir / METRICS_FILE).exists()  # type: ignore[operator]


def test_a_file_that_cannot_be_written_is_said_once(run_on_threads: RunOnThreads, tmp_path: Path) -> None:
    def train() -> None:
        if paceline.worker_index() == 0:
            (tmp_path / "run" / METRICS_FILE).mkdir()
        lesson()

    run = run_on_threads(train, run_dir=tmp_path / "run")
    assert [fault for fault in run.faults if METRICS_FILE in fault] == [
        "metrics.jsonl cannot be written: Is a directory. The run continues without it."
    ]
    assert len(run.history["loss"].values) == 12


def test_a_simulation_writes_and_saves_its_metrics(tmp_path: Path) -> None:
    result = simulated(run_dir=tmp_path / "written")
    assert read_metrics(tmp_path / "written") == result.history
    assert read_metrics(simulated().save(tmp_path / "saved")) == result.history
    [line, *_] = (tmp_path / "saved" / METRICS_FILE).read_text().splitlines()
    assert json.loads(line)["name"] == "loss"


# -- guesses -------------------------------------------------------------------------------------------------


def stepping(train: Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], object]) -> MetricHistory:
    """What is logged if `train` makes each step with a model and inputs."""

    def steps() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in range(4):
            optimizer.zero_grad()
            train(model, optimizer, torch.ones(3, 2))
            optimizer.step()

    return simulated(steps).history


def plain(model: nn.Module, optimizer: object, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def as_a_list(model: nn.Module, optimizer: object, x: torch.Tensor) -> None:
    torch.autograd.backward([model(x).square().mean()])


def by_name(model: nn.Module, optimizer: object, x: torch.Tensor) -> None:
    torch.autograd.backward(tensors=model(x).square().mean(), retain_graph=True)


def checkpointed(model: nn.Module, optimizer: object, x: torch.Tensor) -> None:
    assert isinstance(model, nn.Sequential)
    hidden = torch.utils.checkpoint.checkpoint(model[0], x.requires_grad_(), use_reentrant=True)
    model[1](hidden).square().mean().backward()


def penalized(model: nn.Module, optimizer: object, x: torch.Tensor) -> None:
    loss = model(x).square().mean()
    [gradient] = torch.autograd.grad(loss, [model[0].weight], create_graph=True)  # type: ignore[index]
    (loss + 0 * gradient.square().sum()).backward()


@pytest.mark.parametrize("train", [plain, as_a_list, by_name, checkpointed, penalized])
def test_the_loss_is_guessed_where_the_script_logs_none(train: Any) -> None:
    loss = stepping(train)["loss"]
    assert loss.guessed
    assert loss.values == pytest.approx(stepping(plain)["loss"].values)
    assert [point.count for point in loss.points] == [2] * 4


def test_the_losses_of_short_steps_are_not_all_guessed() -> None:
    def train() -> None:
        model = nn.Linear(2, 1)
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in range(20):
            optimizer.zero_grad()
            plain(model, optimizer, torch.ones(3, 2))
            optimizer.step()

    points = simulated(train, Cluster(compute_s=[0.0007])).history["loss"].points
    assert sum(point.count for point in points) == 7  # every third
    assert all(later.time_s - point.time_s >= 0.002 for point, later in pairwise(points))


def accumulated(model: nn.Module, optimizer: object, x: torch.Tensor) -> None:
    for row in x:
        (model(row).square().mean() / 3).backward()


def twice(model: nn.Module, optimizer: object, x: torch.Tensor) -> None:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def of_several(model: nn.Module, optimizer: object, x: torch.Tensor) -> None:
    torch.autograd.backward([model(x).mean(), model(x).square().mean()])


def with_gradient(model: nn.Module, optimizer: object, x: torch.Tensor) -> None:
    model(x).backward(torch.ones(3, 1))


def weighted(model: nn.Module, optimizer: object, x: torch.Tensor) -> None:
    model(x).mean().backward(torch.tensor(2.0))


def scaled(model: nn.Module, optimizer: object, x: torch.Tensor) -> None:
    torch.amp.GradScaler("cpu", init_scale=2.0).scale(model(x).square().mean()).backward()


class Subclass(torch.Tensor):
    pass


def of_a_subclass(model: nn.Module, optimizer: object, x: torch.Tensor) -> None:
    model(x).mean().as_subclass(Subclass).backward()


def caught(model: nn.Module, optimizer: object, x: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        x.mean().backward()


@pytest.mark.parametrize(
    "train",
    [accumulated, twice, of_several, with_gradient, weighted, scaled, of_a_subclass, caught],
)
def test_nothing_is_guessed_where_it_may_be_wrong(train: Any) -> None:
    assert stepping(train) == {}


def test_nothing_is_guessed_after_a_step_with_several_parts() -> None:
    steps = iter([plain, plain, accumulated, accumulated] + [plain] * 4)  # of two workers
    history = stepping(lambda *arguments: next(steps)(*arguments))
    assert len(history["loss"].values) == 1


def test_the_guess_for_several_optimizers_is_none() -> None:
    def train() -> None:
        models = [nn.Linear(1, 1), nn.Linear(1, 1)]
        optimizers = [
            paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models
        ]
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()

    assert simulated(train).history == {}


@pytest.mark.thorough
def test_a_compiled_loss_is_guessed_and_computed_as_without_a_run(guessing: None) -> None:
    def train(model: nn.Module) -> None:
        def loss_of(x: torch.Tensor) -> Any:
            return model(x).square().mean()

        torch.compile(loss_of, backend="eager")(torch.ones(3, 2)).backward()

    gradients = []
    for watched in (True, False):
        (watch_backward if watched else unwatch_backward)()
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        train(model)
        gradients.append(model.weight.grad)
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert torch.equal(gradients[0], gradients[1])


def test_torch_is_as_before_after_a_run() -> None:
    simulated()
    assert torch.autograd.backward is BACKWARD
    watch_backward()
    assert torch.autograd.backward.__doc__ == BACKWARD.__doc__
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        torch.ones(2, requires_grad=True).backward()
    unwatch_backward()


def test_a_closure_that_returns_a_part_of_the_loss_has_no_loss(guessing: None) -> None:
    def train() -> None:
        model = nn.Linear(1, 1)
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def part() -> torch.Tensor:
            loss: torch.Tensor = model(torch.ones(1, 1)).square().mean() / 2
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.zero_grad()
            part()
            optimizer.step(part)

    assert simulated(train).history == {}


def test_no_session_is_kept_alive_by_what_was_logged() -> None:
    kept: list[weakref.ref[object]] = []

    def train() -> None:
        session = current()
        assert session is not None
        kept.append(weakref.ref(session))
        lesson("nothing")

    simulated(train)
    gc.collect()
    assert [reference() for reference in kept] == [None, None]

"""Scripts with several optimizers: each trains a parameter set of its own, in one sequence of iterations."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.core.layout import Layout, OptimizerSpec, Parameter
from paceline.errors import ConfigurationError, RunFailedError, UsageError
from paceline.shard.optimizers import read_groups
from paceline.shard.store import Push, Store
from paceline.sim import Cluster, simulate
from paceline.trace import replay
from paceline.trace.measures import measure

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

State = dict[str, torch.Tensor]
Model = TypeVar("Model", bound=nn.Module)
BATCH, STEPS = 12, 4


def filled(model: Model) -> Model:
    """Give a model its initial weights. Workers on threads share the random generators of the process."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


NETWORKS = (
    filled(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()),
    filled(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()),
)


def networks() -> tuple[nn.Sequential, nn.Sequential]:
    """Return a generator and a discriminator whose tensors have the same names."""
    return copy.deepcopy(NETWORKS)


def data(step: int, worker: int | None, workers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a worker's noise and real samples; those of all workers if `worker` is None."""
    generator = torch.Generator().manual_seed(1000 + step)
    noise = torch.randn(BATCH, 3, generator=generator).double()
    real = torch.randn(BATCH, 4, generator=generator).double()
    part = slice(None) if worker is None else slice(worker, None, workers)
    return noise[part], real[part]


def train_gan(worker: int | None = None, workers: int = 1, steps: int = STEPS) -> tuple[State, State]:
    """Train a generator and a discriminator with different optimizers."""
    generator, discriminator = networks()
    of_g: torch.optim.Optimizer = torch.optim.SGD(generator.parameters(), lr=0.1, momentum=0.9)
    of_d: torch.optim.Optimizer = torch.optim.Adam(discriminator.parameters(), lr=0.01)
    if worker is not None:
        # The search for a model holds references to all objects, among them tuples that other threads are building.
        of_g = paceline.DistributedOptimizer(of_g, model=generator)
        of_d = paceline.DistributedOptimizer(of_d, model=discriminator)
    for step in range(steps):
        noise, real = data(step, worker, workers)
        fake = generator(noise)  # used again after the discriminator's step
        of_d.zero_grad()
        loss_d = (discriminator(real) - 1).square().mean() + discriminator(fake.detach()).square().mean()
        loss_d.backward()
        before = [parameter._version for parameter in generator.parameters()]
        of_d.step()
        assert [parameter._version for parameter in generator.parameters()] == before
        of_g.zero_grad()
        loss_g = (discriminator(fake) - 1).square().mean()
        loss_g.backward()
        kept = [None if p.grad is None else p.grad.clone() for p in discriminator.parameters()]
        of_g.step()
        for parameter, gradient in zip(discriminator.parameters(), kept, strict=True):
            assert gradient is not None
            assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
    return tuple({k: v.clone() for k, v in m.state_dict().items()} for m in (generator, discriminator))  # type: ignore[return-value]


def train_in_run() -> tuple[State, State]:
    return train_gan(paceline.worker_index(), paceline.worker_count())


def assert_close(saved: State, expected: tuple[State, State]) -> None:
    names = {f"model{index}.{name}" for index, state in enumerate(expected) for name in state}
    assert saved.keys() == names
    for index, state in enumerate(expected):
        for name, value in state.items():
            torch.testing.assert_close(saved[f"model{index}.{name}"], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"transport": "shm"},
        {"transport": "tcp"},
        {"transport": "unix", "overlap": "off"},
        {"transport": "shm", "servers": 1, "shards": 3, "slicing": "by-parameter"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_bsp_equals_one_process_on_the_joint_batch(
    run_on_threads: RunOnThreads, options: dict[str, object]
) -> None:
    expected = train_gan()
    run = run_on_threads(train_in_run, **{"workers": 2, "servers": 2, "sync": "bsp", **options})
    assert_close(run.state_dict, expected)
    for result in run.results.values():
        for found, state in zip(result, expected, strict=True):  # type: ignore[call-overload]
            for name, value in state.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    "sync", ["asp", "ssp:staleness=1", "elastic-bsp:lookahead=4", "spec-sync:abort_time_s=0.5,abort_rate=0.9"]
)
def test_every_step_of_every_optimizer_is_one_update(
    run_on_threads: RunOnThreads, sync: str, transport: str
) -> None:
    run = run_on_threads(train_in_run, workers=3, servers=2, sync=sync, transport=transport)
    found = measure(run.shards)
    assert found.gradients == 3 * 2 * STEPS
    assert found.dropped_pushes == 0
    assert all(bool(value.isfinite().all()) for value in run.state_dict.values())


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:staleness=1", "elastic-bsp:lookahead=4"])
def test_in_virtual_time(sync: str) -> None:
    result = simulate(
        Cluster(compute_s=[1.0, 1.5, 2.0], servers=2, latency_s=0.01),
        sync,
        train_fn=train_in_run,
        record=True,
    )
    assert result.state_dict is not None
    if sync == "bsp":
        assert_close(result.state_dict, train_gan())
    assert result.measures.gradients == 3 * 2 * STEPS
    for trace in result.trace:
        replay(trace)


def test_graphs_stay_usable_when_the_model_changes_and_rounds_hold_several_sets(
    run_on_threads: RunOnThreads,
) -> None:
    run = run_on_threads(
        lambda: train_gan(paceline.worker_index(), paceline.worker_count(), steps=8),
        workers=2,
        servers=2,
        sync="bsp@0,ssp:staleness=1@3,bsp@8",
        transport="shm",
    )
    assert measure(run.shards).gradients == 2 * 2 * 8


def test_one_model_keeps_its_names_and_each_optimizer_its_state(run_on_threads: RunOnThreads) -> None:
    """Actor and critic with two rates."""

    def train() -> None:
        model = filled(nn.ModuleDict({"actor": nn.Linear(3, 2), "critic": nn.Linear(3, 1)}))
        of_actor = paceline.DistributedOptimizer(torch.optim.Adam(model["actor"].parameters(), lr=0.1))
        weight, bias = model["critic"].parameters()
        groups: list[dict[str, object]] = [{"params": [weight]}, {"params": [bias], "lr": 0.2}]
        of_critic = paceline.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
        for _ in range(2):
            for part, optimizer in (("actor", of_actor), ("critic", of_critic)):
                optimizer.zero_grad()
                model[part](torch.ones(4, 3)).square().sum().backward()
                optimizer.step()
        state = of_actor.state_dict()["state"]
        assert sorted(state) == [0, 1]
        assert state[0]["exp_avg"].shape == (2, 3)
        assert float(state[0]["step"]) == 2
        state = of_critic.state_dict()["state"]
        assert [state[index]["momentum_buffer"].shape for index in sorted(state)] == [(1, 3), (1,)]

    run = run_on_threads(train, workers=2, servers=2)
    assert sorted(run.state_dict) == ["actor.bias", "actor.weight", "critic.bias", "critic.weight"]


def test_two_phases_with_different_parameters(run_on_threads: RunOnThreads) -> None:
    def train(distributed: bool = True) -> State:
        model = filled(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double())
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in model
        ]
        if distributed:
            optimizers = [paceline.DistributedOptimizer(optimizer) for optimizer in optimizers]
        for optimizer in reversed(optimizers):
            for step in range(3):
                model.zero_grad()
                model(torch.full((2, 3), float(step)).double()).square().mean().backward()
                optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    run = run_on_threads(train, workers=2, servers=1)
    for name, value in train(distributed=False).items():
        torch.testing.assert_close(run.state_dict[name], value, rtol=0, atol=1e-12)


def test_the_samples_of_a_batch_are_counted_once(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        generator, discriminator = networks()
        of_g = paceline.DistributedOptimizer(torch.optim.SGD(generator.parameters(), lr=0.1))
        of_d = paceline.DistributedOptimizer(torch.optim.SGD(discriminator.parameters(), lr=0.1))
        loader = paceline.distribute(DataLoader(TensorDataset(torch.ones(26, 3).double()), batch_size=4))
        for (noise,) in loader:
            for optimizer in (of_d, of_g):
                optimizer.zero_grad()
                discriminator(generator(noise)).mean().backward()
                optimizer.step()

    found = measure(run_on_threads(train, workers=2, servers=2, sync="asp").shards)
    assert found.samples == 26


def test_a_mean_of_pushes_of_different_sets_is_taken_for_each_set() -> None:
    parameters = [Parameter(("a",), (2,), "float64"), Parameter(("b",), (2,), "float64", 1)]
    layout = Layout.of(parameters)
    assert list(layout.sizes) == ["float64", "float64/1"]
    [bounds] = layout.slice_evenly(1)
    settings = read_groups(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    spec = OptimizerSpec("SGD", settings, (0, 0))
    store = Store(
        bounds, {name: torch.zeros(size).double() for name, size in layout.sizes.items()}, [spec, spec]
    )

    def push(vector: str, value: float) -> Push:
        index = int(vector == "float64/1")
        gradient = {vector: torch.full((layout.sizes[vector],), value).double()}
        return Push(gradient, bytes([1 - index, index]), settings, index)

    for worker, (vector, value) in enumerate([("float64", 4.0), ("float64/1", 6.0), ("float64", 8.0)]):
        store.put(worker, 0, push(vector, value))
    keys = [(0, 0), (1, 0), (2, 0)]
    assert store.squared_norm(keys, [0.25, 0.25, 0.5]) == pytest.approx(
        8 * ((4 + 2 * 8) / 3) ** 2 + 8 * 6.0**2
    )
    store.apply(keys, [0.25, 0.25, 0.5])
    assert float(store.weights["float64"][0]) == pytest.approx(-(4 + 2 * 8) / 3)
    assert float(store.weights["float64/1"][0]) == pytest.approx(-6)


def test_weights_that_are_edited_in_any_set_are_known_to_the_servers(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        generator, discriminator = networks()
        of_g = paceline.DistributedOptimizer(torch.optim.SGD(generator.parameters(), lr=0.1))
        of_d = paceline.DistributedOptimizer(torch.optim.SGD(discriminator.parameters(), lr=0.1))
        noise, _ = data(0, 0, 1)
        discriminator(generator(noise)).mean().backward()
        of_d.step()
        of_g.step()
        with of_d.editing(), torch.no_grad():
            for parameter in (*discriminator.parameters(), *generator.parameters()):
                parameter.clamp_(-0.01, 0.01)

    run = run_on_threads(train, workers=2, servers=2, sync="bsp")
    assert max(float(value.abs().max()) for value in run.state_dict.values()) <= 0.01


SCRIPT = """
import paceline
import torch
from torch import nn

torch.manual_seed(paceline.worker_index())  # each worker builds other weights
body, head = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()
of_body, of_head = (
    paceline.DistributedOptimizer(torch.optim.SGD(part.parameters(), lr=0.1)) for part in (body, head)
)
for step in range(3):
    inputs = torch.full((2, 3), 1.0 + step + paceline.worker_index()).double()
    for optimizer in (of_body, of_head):
        optimizer.zero_grad()
        head(body(inputs)).square().mean().backward()
        optimizer.step()
"""


def test_in_processes_that_seed_by_worker_no_gradient_is_lost(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--servers", "1", "--sync", "bsp"]
    ended = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run"), str(tmp_path / "train.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["gradients"], summary["dropped_pushes"]) == (12, 0)

    torch.manual_seed(0)
    body, head = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (body, head)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
            inputs = torch.cat([torch.full((2, 3), 1.0 + step + worker) for worker in range(2)]).double()
            head(body(inputs)).square().mean().backward()
            optimizer.step()
    saved = safetensors.torch.load_file(tmp_path / "run" / "weights.safetensors")
    assert_close(saved, (body.state_dict(), head.state_dict()))


def overlapping() -> None:
    model = nn.Linear(2, 1)
    both = [paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) for _ in range(2)]
    model(torch.ones(1, 2)).sum().backward()
    both[0].step()


def in_another_order() -> None:
    models = [nn.Linear(2, 1), nn.Linear(3, 1)]
    if paceline.worker_index():
        models.reverse()
    both = [paceline.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in models]
    models[0](torch.ones(1, models[0].in_features)).sum().backward()
    both[0].step()


def one_more_in_worker_1() -> None:
    models = [nn.Linear(2, 1), nn.Linear(3, 1)][: 1 + paceline.worker_index()]
    both = [paceline.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in models]
    models[0](torch.ones(1, 2)).sum().backward()
    both[0].step()


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (overlapping, "'weight' belongs to two optimizers"),
        (in_another_order, r"model0\.weight float32\[1, 3\] instead of model0\.weight float32\[1, 2\]"),
        (one_more_in_worker_1, "instead of weight|2 parameters|4 parameters instead of 2"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_trained_is_refused(train: Callable[[], None], message: str) -> None:
    with pytest.raises((ConfigurationError, RunFailedError, UsageError), match=message):
        simulate(Cluster(compute_s=[1.0, 1.0]), "bsp", train_fn=train)

"""Optimizers that need whole tensors, such as Muon and Adafactor: servers hold whole tensors of their sets."""

from __future__ import annotations

import copy
import runpy
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import DistributedOptimizer, simulate, worker_count, worker_index
from paceline.core.layout import Layout, ModelSpec, OptimizerSpec, Parameter
from paceline.errors import ConfigurationError
from paceline.shard.vectors import tensors_of
from paceline.sim import Cluster
from tests.support.live import run_program
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

State = dict[str, torch.Tensor]
BATCH = 16
STEPS = 12


class Net(nn.Module):
    """Two matrices, of which one is tied, a frozen layer, vectors, and a parameter without gradients in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 20)
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.second = nn.Linear(20, 12)
        self.tied = nn.Linear(12, 20, bias=False)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(20, 5)
        self.sometimes = nn.Parameter(torch.ones(3, 4))
        generator = torch.Generator().manual_seed(0)  # threads share the default one
        for parameter in self.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def loss(self, x: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
        hidden = self.second(self.frozen(self.first(x).tanh())).tanh()
        loss = nn.functional.cross_entropy(self.last(self.tied(hidden)), y)
        return loss if step % 3 else loss + 0.01 * self.sometimes.square().sum()


class NormalizedSGD(torch.optim.SGD):
    """Divides the gradient of each tensor by its norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.norm() + 1e-6)
        return super().step(closure)


class Whitened(torch.optim.Optimizer):
    """Whitens the gradient of each tensor along each dimension, as Shampoo and SOAP do, and nests its state."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, update = self.state[parameter], parameter.grad
                if not state:
                    state["sides"] = [torch.eye(n, dtype=update.dtype) if n > 1 else [] for n in update.shape]
                    state["seen"] = {"steps": 0, "words": ("whitened", None)}
                state["seen"]["steps"] += 1
                for dim, side in enumerate(state["sides"]):
                    if len(side):
                        along = update.movedim(dim, 0).reshape(len(side), -1)
                        side.mul_(0.9).add_(along @ along.T)
                        values, vectors = torch.linalg.eigh(side)
                        power = vectors @ (values.clamp(min=1e-6).pow(-0.25)[:, None] * vectors.T)
                        update = torch.tensordot(power, update, dims=[[1], [dim]]).movedim(0, dim)
                rate = group["lr"] * group["step"] / (group["step"] + 1)
                parameter.sub_(update, alpha=rate / state["seen"]["steps"] ** 0.25)


def muon_and_adamw(net: Net) -> list[torch.optim.Optimizer]:
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() == 2]
    others = [parameter for parameter in trained if parameter.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1), torch.optim.AdamW(others, lr=0.01)]


def one_of(kind: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[[Net], Any]:
    return lambda net: [kind([p for p in net.parameters() if p.requires_grad], **settings)]


OWN, NESTED = "a class of one's own", "a class with nested state"
MAKERS: dict[str, Callable[[Net], Sequence[torch.optim.Optimizer]]] = {
    "Muon and AdamW": muon_and_adamw,
    "Adafactor": one_of(torch.optim.Adafactor, lr=0.05, weight_decay=0.1),
    OWN: one_of(NormalizedSGD, lr=0.05, momentum=0.9),
    NESTED: one_of(Whitened, lr=0.05),
}
TOLERANCES = {
    "Muon and AdamW": 2e-3
}  # Muon orthogonalizes in bfloat16, which turns tiny differences into larger ones


def training(name: str, *, steps: int = STEPS, told: Callable[[Any], None] = lambda state: None) -> Any:
    """A script that trains on a joint batch, of which each worker takes its part."""

    def train() -> State:
        net = Net()
        optimizers: Sequence[Any] = [DistributedOptimizer(each, model=net) for each in MAKERS[name](net)]
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.95) for each in optimizers]
        count, worker = worker_count(), worker_index()
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(BATCH, 12, generator=generator, dtype=torch.float64)
            y = torch.randint(0, 5, (BATCH,), generator=generator)
            part = slice(worker * BATCH // count, (worker + 1) * BATCH // count)
            for optimizer in optimizers:
                optimizer.zero_grad()
            for half in (0, 1):  # accumulates
                (net.loss(x[part][half::2], y[part][half::2], step) / 2).backward()
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
        told([optimizer.state_dict() for optimizer in optimizers])
        return {key: value.clone() for key, value in net.state_dict().items()}

    return train


def largest_difference(found: Any, expected: State) -> float:
    return max(float((value - expected[name]).abs().max()) for name, value in found.items())


# Each optimizer with two workers, one of them with a single worker, and one with more workers and servers.
JOINT = [*((2, 2, name) for name in MAKERS), (1, 1, "Adafactor"), (4, 5, "Muon and AdamW")]


@pytest.mark.parametrize(
    ("workers", "servers", "name"),
    [
        *JOINT,
        *thorough(
            *(
                (workers, servers, name)
                for (workers, servers), name in product([(1, 1), (2, 2), (4, 5)], MAKERS)
                if (workers, servers, name) not in JOINT
            )
        ),
    ],
)
def test_under_bsp_a_run_equals_one_process_on_the_joint_batch(workers: int, servers: int, name: str) -> None:
    alone = training(name)()
    cluster = Cluster([1.0 + 0.1 * worker for worker in range(workers)], servers=servers)
    run = simulate(cluster, "bsp", train_fn=training(name))
    assert run.state_dict is not None
    allowed = 1e-12 if workers == 1 else TOLERANCES.get(name, 1e-7)  # servers add gradients in another order
    assert largest_difference(run.state_dict, alone) <= allowed


@pytest.mark.parametrize("name", ["Muon and AdamW", NESTED, *thorough("Adafactor", OWN)])
def test_the_number_of_servers_does_not_change_a_bit(name: str) -> None:
    first, *others = (
        simulate(Cluster([1.0, 1.3], servers=servers), "bsp", train_fn=training(name)).state_dict
        for servers in (1, 2, 5)
    )
    assert first is not None
    for other in others:
        assert other is not None
        for key, value in other.items():
            assert torch.equal(value, first[key])


@pytest.mark.parametrize(
    ("name", "transport"),  # servers cannot import this file
    [
        ("Muon and AdamW", "tcp"),
        ("Adafactor", "shm"),
        *thorough(("Muon and AdamW", "shm"), ("Adafactor", "tcp")),
    ],
)
def test_a_live_run_is_its_simulation_to_the_bit(
    name: str, transport: str, run_on_threads: RunOnThreads
) -> None:
    states: list[Any] = []
    train = training(name, told=states.append)
    run = run_on_threads(train, workers=2, servers=3, transport=transport, sync="bsp")
    simulated = simulate(Cluster([1.0, 1.5]), "bsp", train_fn=training(name)).state_dict
    assert simulated is not None
    for key, value in run.state_dict.items():
        assert torch.equal(value, simulated[key])
    alone: list[Any] = []
    training(name, told=alone.append)()
    for found, expected in zip(states[0], alone[0], strict=True):
        assert found["state"].keys() == expected["state"].keys()
        for position, entries in expected["state"].items():
            of_servers = found["state"][position]
            assert of_servers.keys() == entries.keys()
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    assert of_servers[key].shape == value.shape


@pytest.mark.parametrize("name", [OWN, NESTED])
def test_the_state_can_be_fetched_and_loaded_with_what_is_counted_in_the_groups(name: str) -> None:
    states: list[Any] = []
    simulate(Cluster([1.0, 1.1], servers=2), "bsp", train_fn=training(name, told=states.append))
    alone: list[Any] = []
    training(name, told=alone.append)()
    for [found] in states:
        [expected] = alone[0]
        assert found["param_groups"][0].get("step") == expected["param_groups"][0].get("step")
        for position, entries in expected["state"].items():
            torch.testing.assert_close(tensors_of(found["state"][position]), tensors_of(entries))

    def go_on() -> State:
        net = Net()
        [own] = MAKERS[name](net)
        optimizer: Any = DistributedOptimizer(own, model=net)
        optimizer.load_state_dict(copy.deepcopy(states[0][0]))
        for step in range(5):
            optimizer.zero_grad()
            net.loss(torch.ones(4, 12, dtype=torch.float64), torch.arange(4), step).backward()
            optimizer.step()
        return net.state_dict()

    run = simulate(Cluster([1.0], servers=3), "bsp", train_fn=go_on)
    assert run.state_dict is not None
    assert largest_difference(run.state_dict, go_on()) <= 1e-12


FROM_CUTS: list[tuple[str, tuple[int, int]]] = [("Muon and AdamW", (1, 3)), (NESTED, (3, 1))]


@pytest.mark.parametrize(
    ("name", "servers"),
    [
        *FROM_CUTS,
        *thorough(*(case for case in product(MAKERS, [(1, 3), (3, 1)]) if case not in FROM_CUTS)),
    ],
    ids=str,
)
def test_a_run_goes_on_from_a_cut_on_another_number_of_servers(name: str, servers: tuple[int, int]) -> None:
    def train() -> None:
        net = Net()
        optimizers: Sequence[Any] = [DistributedOptimizer(each, model=net) for each in MAKERS[name](net)]
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(64, 12, generator=generator).double(), torch.arange(64) % 5
        loader = paceline.distribute(DataLoader(TensorDataset(x, y), batch_size=8))
        for _ in paceline.epochs(3):
            for images, labels in loader:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                net.loss(images, labels, int(labels.sum())).backward()  # a resumed loop counts from 0
                for optimizer in optimizers:
                    optimizer.step()

    def on(count: int, **options: Any) -> Any:
        return simulate(Cluster([1.0], servers=count), "bsp", train_fn=train, **options)

    whole = on(servers[0], cut_at_s=[9.7])
    [cut] = whole.cuts
    resumed = on(servers[1], resumed=cut)
    for key, value in whole.state_dict.items():
        assert torch.equal(value, resumed.state_dict[key])


@pytest.mark.parametrize("wire", ["int8", "gradients=int8,weights=int4"])
def test_gradients_and_weights_may_be_encoded(wire: str, run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        net = nn.Sequential(nn.Linear(40, 30, bias=False), nn.ReLU(), nn.Linear(30, 20, bias=False))
        generator = torch.Generator().manual_seed(0)
        for parameter in net.parameters():
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
        optimizer = DistributedOptimizer(torch.optim.Muon(net.parameters(), lr=0.02), model=net)
        generator.manual_seed(worker_index())
        for _ in range(10):
            optimizer.zero_grad()
            net(torch.randn(8, 40, generator=generator)).square().mean().backward()
            optimizer.step()

    options: dict[str, Any] = {"sync": "bsp", "wire": wire}
    run = run_on_threads(train, workers=2, servers=1, transport="tcp", **options)
    simulated = simulate(Cluster([1.0, 1.5]), train_fn=train, **options).state_dict
    assert simulated is not None
    for key, value in run.state_dict.items():
        assert torch.equal(value, simulated[key])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_some_servers_may_have_nothing(transport: str, run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        net = nn.Linear(6, 4)
        for parameter in net.parameters():
            nn.init.constant_(parameter, 0.1)
        optimizer = DistributedOptimizer(torch.optim.Adafactor(net.parameters(), lr=0.05), model=net)
        generator = torch.Generator().manual_seed(worker_index())
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.randn(8, 6, generator=generator)).square().mean().backward()
            optimizer.step()

    run = run_on_threads(train, workers=2, servers=4, transport=transport, sync="bsp")
    simulated = simulate(Cluster([1.0, 1.5]), train_fn=train).state_dict
    assert simulated is not None
    for key, value in run.state_dict.items():
        assert torch.equal(value, simulated[key])


@pytest.mark.parametrize("host", ["live", "simulated"])
def test_parameters_may_be_added_but_not_taken_over_by_another_kind(
    host: str, run_on_threads: RunOnThreads
) -> None:
    def train() -> None:
        generator = torch.Generator().manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
        for parameter in net.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        optimizer = DistributedOptimizer(torch.optim.Adafactor(net[0].parameters(), lr=0.05), model=net)
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": list(net[1].parameters())})
            optimizer.zero_grad()
            net(torch.randn(8, 6, generator=generator)).square().mean().backward()
            optimizer.step()
        found.append({key: value.clone() for key, value in net.state_dict().items()})
        other = DistributedOptimizer(torch.optim.SGD(net[0].parameters(), lr=0.05), model=net)
        with pytest.raises(ConfigurationError, match="SGD cannot take over the parameters of Adafactor"):
            net(torch.randn(8, 6, generator=generator))
        del other  # until now, it was alive

    found: list[State] = []
    if host == "live":
        run_on_threads(train, workers=1, servers=2)
    else:
        simulate(Cluster([1.0], servers=2), train_fn=train)
    [trained] = found
    assert all(value.isfinite().all() for value in trained.values())


def test_even_slices_are_refused(run_on_threads: RunOnThreads) -> None:
    with pytest.raises(ConfigurationError, match="'even', which cuts tensors in parts, but Muon needs whole"):
        run_on_threads(training("Muon and AdamW"), workers=2, slicing="even")


# -- the example -------------------------------------------------------------------------------------------

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "small_gpt_muon.py")
SMALL = "--steps 60 --width 32 --layers 1"


@pytest.mark.thorough
@pytest.mark.parametrize("options", [SMALL, ""])
def test_the_example_learns_better_with_muon_than_with_adamw(
    options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = {}
    with torch.random.fork_rng():
        for name in ("muon", "adamw"):
            monkeypatch.setattr(sys, "argv", [EXAMPLE, "--optimizer", name, *options.split()])
            bits[name] = runpy.run_path(EXAMPLE)["bits"]
    assert bits["muon"] < 0.97 * bits["adamw"]


@pytest.mark.thorough
def test_two_processes_learn_from_the_example_what_one_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [EXAMPLE, *SMALL.split()])
    with torch.random.fork_rng():
        alone = runpy.run_path(EXAMPLE)["bits"]
    ended = run_program("-m", "paceline", "run", "--workers", "2", "--servers", "2", EXAMPLE, *SMALL.split())
    assert not ended.returncode, ended.stderr
    found = float(ended.stdout.partition("muon: ")[2].split()[0])
    assert found == pytest.approx(alone, rel=0.01)  # Muon orthogonalizes in bfloat16


# -- slices ------------------------------------------------------------------------------------------------


def spec_of(shapes: Sequence[tuple[int, ...]], name: str = "Adafactor") -> ModelSpec:
    layout = Layout.of([Parameter((f"p{n}",), shape, "float32") for n, shape in enumerate(shapes)])
    return ModelSpec(layout, OptimizerSpec(name, ({"lr": 0.1},), (0,) * len(shapes), whole=True), ())


@pytest.mark.parametrize("shards", [1, 2, 4, 7])
def test_each_tensor_is_whole_and_costs_are_balanced(shards: int) -> None:
    model = spec_of([(64, 64)] * 12 + [(256, 64), (64, 256)])
    slices = model.sliced(shards, "auto")
    found = [segment.parameter for bounds in slices for segment in bounds.segments]
    assert found == list(range(14))
    assert all(
        segment.shape == model.layout.parameters[segment.parameter].shape
        for b in slices
        for segment in b.segments
    )
    ideal = model.layout.size_bytes / shards
    assert max(bounds.size_bytes for bounds in slices) <= max(1.25 * ideal, 4 * 256 * 64)


def test_shards_beyond_the_number_of_tensors_are_empty() -> None:
    slices = spec_of([(4, 4), (4, 4)]).sliced(5, "auto")
    assert [len(bounds.segments) for bounds in slices] == [1, 1, 0, 0, 0]


def test_for_muon_a_matrix_costs_as_much_as_its_shorter_side_says() -> None:
    shapes = [(512, 512), (8, 32768)]  # of equal size
    bytes_of = [b.size_bytes for b in spec_of([*shapes, shapes[1]], "Muon").sliced(2, "auto")]
    assert bytes_of == [4 * 512 * 512, 2 * 4 * 512 * 512]

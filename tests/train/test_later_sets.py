"""Parameter sets that are registered after training has begun: later optimizers, and groups that are added later."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import DistributedOptimizer
from paceline.core.layout import Layout, ModelSpec, OptimizerSpec, Parameter
from paceline.errors import ConfigurationError, RunFailedError, UsageError
from paceline.run.server_memory import ServerMemory
from paceline.shard.optimizers import read_groups
from paceline.sim import Cluster, Presence, simulate
from paceline.sync.events import PushReceived
from paceline.trace import replay
from paceline.trace.measures import measure
from paceline.train.session import current
from paceline.wire.memory import MASTER, Region
from tests.support import live
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

State = dict[str, torch.Tensor]
Kind = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
Script = Callable[[Kind], State]

BATCH, STEPS = 12, 3
LINE = 8  # numbers in 64 bytes, at whose multiples vectors begin
EQUAL = Cluster(compute_s=[1.0, 1.0], servers=2)
UNEQUAL = Cluster(compute_s=[1.0, 1.5, 2.5], servers=2, latency_s=0.01)
RELAXED = ["asp", "ssp:staleness=1", "elastic-bsp:lookahead=4", "spec-sync"]


def sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


# -- scripts that also run alone, as one process on the joint batch -----------------------------------------


def filled(model: nn.Module, seed: int) -> nn.Module:
    """Set the initial weights. Workers on threads share the random generators of the process."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def network(seed: int, inputs: int = 3, outputs: int = 1) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    filled(model, seed)
    return model


def mine(seed: int) -> int:
    """Return a seed with which each worker builds other weights. Those of worker 0 count."""
    return 100 * seed + paceline.worker_index()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a worker's part of a joint batch."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(BATCH, 3, generator=generator).double()
    part = slice(paceline.worker_index(), None, paceline.worker_count())
    return inputs[part], inputs[part].sum(1, keepdim=True)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int = STEPS) -> None:
    for step in range(first, first + steps):
        model.zero_grad()
        inputs, targets = batch(step)
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()


def fit_with_closure(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int = STEPS
) -> None:
    for step in range(first, first + steps):
        inputs, targets = batch(step)

        def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            model.zero_grad()
            loss: torch.Tensor = (model(inputs) - targets).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


def named(*models: nn.Module, first: str = "") -> State:
    """Return the weights of models that were registered one after another, by their names in the saved file."""
    return {
        (f"model{index}." if index else first) + name: value.detach().clone()
        for index, model in enumerate(models)
        for name, value in model.state_dict().items()
    }


def k_fold(kind: Kind) -> State:
    models = []
    for fold in range(3):
        model = network(mine(fold))
        fit(model, DistributedOptimizer(kind(model.parameters()), model=model), STEPS * fold)
        models.append(model)
    return named(*models)


def second_phase(kind: Kind) -> State:
    """Train the first layer, then the last one, which was frozen, and then both in turn."""
    model = network(0)  # frozen parameters are those of each worker
    body, _, head = model
    of_body = DistributedOptimizer(kind(body.parameters()), model=model)
    head.requires_grad_(False)
    fit(model, of_body, 0)
    head.requires_grad_(True)
    of_head = DistributedOptimizer(kind(head.parameters()), model=model)
    fit(model, of_head, STEPS)
    for step in range(2 * STEPS, 3 * STEPS):
        fit(model, of_body, step, 1)
        fit(model, of_head, step, 1)
    return named(model)


def unfreezing(kind: Kind) -> State:
    """Train the last layer, then also the first one with another rate, which changes later."""
    model = network(0)
    model[0].requires_grad_(False)
    optimizer = DistributedOptimizer(kind(model[2].parameters()), model=model)
    fit(model, optimizer, 0)
    weight, bias = model[0].parameters()
    weight.requires_grad_(True)
    optimizer.add_param_group({"params": weight, "lr": 0.03})
    fit(model, optimizer, STEPS)
    bias.requires_grad_(True)
    optimizer.add_param_group({"params": [bias]})
    optimizer.param_groups[1]["lr"] = 0.01
    fit(model, optimizer, 2 * STEPS)
    return named(model)


def growing(kind: Kind) -> State:
    """Insert further layers into a model, each with a group of its own."""
    model = network(mine(0))
    optimizer = DistributedOptimizer(kind(model.parameters()), model=model)
    fit(model, optimizer, 0)
    for stage in (1, 2):
        added = nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Linear(1, 1)).double()
        model.append(filled(added, mine(stage)))
        model.eval()  # so that the result does not depend on the sizes of batches
        optimizer.add_param_group({"params": added.parameters(), "lr": 0.05})
        fit(model, optimizer, STEPS * stage)
    return named(model)


def another_head(kind: Kind) -> State:
    """Replace the last layer of a model by one of another size, and train all layers with a new optimizer."""
    model = network(mine(0))
    fit(model, DistributedOptimizer(kind(model.parameters()), model=model), 0)
    model[2] = filled(nn.Linear(5, 2).double(), mine(1))
    fit(model, DistributedOptimizer(kind(model.parameters()), model=model), STEPS)
    return named(model)


def late_discriminator(kind: Kind) -> State:
    """Train a generator by itself, and then against a discriminator."""
    generator = network(mine(0), outputs=3)
    of_g = DistributedOptimizer(kind(generator.parameters()), model=generator)
    fit(generator, of_g, 0)
    discriminator = network(mine(1))
    of_d = DistributedOptimizer(kind(discriminator.parameters()), model=discriminator)
    for step in range(STEPS, 2 * STEPS):
        inputs, _ = batch(step)
        fake = generator(inputs)  # used again after the discriminator's step
        of_d.zero_grad()
        real_loss = (discriminator(inputs) - 1).square().mean()
        (real_loss + discriminator(fake.detach()).square().mean()).backward()
        of_d.step()
        of_g.zero_grad()
        (discriminator(generator(inputs)) - 1).square().mean().backward()
        of_g.step()
    return named(generator, discriminator)


def several_in_each_fold(kind: Kind) -> State:
    """Create two optimizers in each fold, which train one after another."""
    models = []
    for fold in range(2):
        pair = [network(mine(2 * fold + place)) for place in range(2)]
        optimizers = [DistributedOptimizer(kind(model.parameters()), model=model) for model in pair]
        for step in range(STEPS):
            for model, optimizer in zip(pair, optimizers, strict=True):
                fit(model, optimizer, step, 1)
        models += pair
    return named(*models, first="model0.")


def another_optimizer(kind: Kind) -> State:
    """Train a model with a second optimizer, and then a part of it together with a further layer."""
    model = network(mine(0))
    fit(model, DistributedOptimizer(kind(model.parameters()), model=model), 0)
    first, last = (list(model[place].parameters()) for place in (0, 2))
    groups: Any = [{"params": last[::-1], "lr": 0.05}, {"params": first}]
    fit(model, DistributedOptimizer(torch.optim.Adam(groups, lr=0.02), model=model), STEPS)
    deeper = nn.Sequential(model, filled(nn.Linear(1, 1).double(), mine(1)))
    optimizer = DistributedOptimizer(kind([*deeper[1].parameters(), *last]), model=deeper)
    fit(deeper, optimizer, 2 * STEPS)
    return named(model) | {f"1.{name}": value for name, value in named(deeper[1]).items()}


def one_model_in_all_folds(kind: Kind) -> State:
    """Reset the weights of a model before each fold."""
    model = network(mine(0))
    for fold in range(3):
        optimizer = DistributedOptimizer(kind(model.parameters()), model=model)
        with optimizer.editing():
            filled(model, mine(fold))
        fit(model, optimizer, STEPS * fold)
    return named(model)


SCRIPTS: list[Script] = [
    k_fold,
    one_model_in_all_folds,
    second_phase,
    unfreezing,
    growing,
    another_head,
    late_discriminator,
    several_in_each_fold,
    another_optimizer,
]
PUSHES: dict[Script, int] = {  # of each worker
    k_fold: 3 * STEPS,
    one_model_in_all_folds: 3 * STEPS,
    second_phase: 4 * STEPS,
    unfreezing: 3 * STEPS,
    growing: 3 * STEPS,
    another_head: 2 * STEPS,
    late_discriminator: 3 * STEPS,
    several_in_each_fold: 4 * STEPS,
    another_optimizer: 3 * STEPS,
}


def by_name(value: object) -> str:
    return getattr(value, "__name__", "")


def others(chosen: list[Any], *values: Iterable[object]) -> list[Any]:
    """All combinations of values except the chosen ones, which every run tests."""
    return thorough(*(case for case in itertools.product(*values) if case not in chosen))


def assert_close(found: object, expected: State) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


# -- under bsp, a run equals one process --------------------------------------------------------------------


@pytest.mark.parametrize("kind", [adam, *thorough(sgd)], ids=by_name)
@pytest.mark.parametrize("script", SCRIPTS, ids=by_name)
def test_bsp_equals_one_process_on_the_joint_batch(script: Script, kind: Kind) -> None:
    result = simulate(UNEQUAL, "bsp", train_fn=lambda: script(kind), record=True)
    assert result.state_dict is not None
    assert_close(result.state_dict, script(kind))
    assert result.measures.gradients == 3 * PUSHES[script]
    for trace in result.trace:
        assert replay(trace) == []


WAYS: dict[str, dict[str, Any]] = {
    "shm": {"transport": "shm"},
    "shm without rings": {"transport": "shm", "rings": False},
    "tcp": {"transport": "tcp"},
    "shm without overlap": {"transport": "shm", "overlap": "off"},
    "unix by parameter": {"transport": "unix", "servers": 1, "shards": 2, "slicing": "by-parameter"},
}
WAYS_OF_SCRIPTS: list[tuple[Script, str]] = [
    *((script, "shm") for script in SCRIPTS),
    (growing, "shm without rings"),
    (growing, "tcp"),
    (several_in_each_fold, "tcp"),
    (several_in_each_fold, "shm without overlap"),
    (growing, "unix by parameter"),
]
"""Every script, and every way with a growing set of parameters or with several optimizers."""


@pytest.mark.parametrize(
    ("script", "way"),
    [*WAYS_OF_SCRIPTS, *others(WAYS_OF_SCRIPTS, SCRIPTS, WAYS)],
    ids=lambda value: by_name(value) or value,
)
def test_live_workers_have_the_weights_of_one_process(
    script: Script,
    way: str,
    run_on_threads: RunOnThreads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"servers": 2, "sync": "bsp", **WAYS[way]}
    if not options.pop("rings", True):
        monkeypatch.setattr("paceline.wire.transports.rings_available", lambda: False)
    run = run_on_threads(lambda: script(sgd), workers=2, **options)
    expected = script(sgd)
    assert_close(run.state_dict, expected)
    for found in run.results.values():
        assert_close(found, expected)
    for trace in run.traces:
        assert replay(trace) == []


def test_a_model_whose_names_are_new_keeps_them(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        for name in ("first", "second", "first"):
            model = nn.ModuleDict({name: network(0)})
            fit(model[name], DistributedOptimizer(sgd(model.parameters()), model=model), 0, 1)

    names = {name.rpartition(".")[0] for name in run_on_threads(train).state_dict}
    assert names == {"first.0", "first.2", "second.0", "second.2", "model2.first.0", "model2.first.2"}


# -- under other models -------------------------------------------------------------------------------------


MODELS_OF_SCRIPTS: list[tuple[Script, str]] = [
    (k_fold, "ssp:staleness=1"),
    (second_phase, "ssp:staleness=1"),
    (growing, "ssp:staleness=1"),
    (another_optimizer, "ssp:staleness=1"),
    (unfreezing, "spec-sync"),
    (late_discriminator, "spec-sync"),
    (k_fold, "elastic-bsp:lookahead=4"),
]
"""Later optimizers, later groups, and later optimizers of earlier parameters."""


@pytest.mark.parametrize(
    ("script", "sync"),
    [*MODELS_OF_SCRIPTS, *others(MODELS_OF_SCRIPTS, SCRIPTS, RELAXED)],
    ids=lambda value: by_name(value) or value,
)
def test_every_step_of_unequal_workers_counts(script: Script, sync: str) -> None:
    result = simulate(UNEQUAL, sync, train_fn=lambda: script(adam), record=True)
    assert result.state_dict is not None
    assert result.state_dict.keys() == script(adam).keys()
    assert all(bool(value.isfinite().all()) for value in result.state_dict.values())
    assert result.measures.gradients == 3 * PUSHES[script]
    for trace in result.trace:
        assert replay(trace) == []


class Count(nn.Module):
    """A model with one weight, which falls by 1 with each update."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([start]))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()

    @property
    def value(self) -> float:
        return self.weight.item()


def counting(start: float = 0.0) -> tuple[Count, DistributedOptimizer]:
    model = Count(start)
    return model, DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)


def count(model: Count, optimizer: DistributedOptimizer, steps: int = 1) -> None:
    for _ in range(steps):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model()
            loss.backward()
            return loss

        optimizer.step(closure)


def begin_after_different_numbers_of_iterations() -> tuple[float, float]:
    """Return the weights of both models after the first forward pass of the second one."""
    worker = paceline.worker_index()
    first, of_first = counting()
    count(first, of_first, 2 + 8 * worker)
    second, of_second = counting(100.0 + worker)
    second()
    seen = first.value, second.value
    paceline.barrier()
    count(second, of_second)
    count(first, of_first)
    return seen


@pytest.mark.parametrize("sync", RELAXED)
def test_workers_wait_where_others_have_more_iterations_before_it(sync: str) -> None:
    seen = {}

    def train() -> None:
        seen[paceline.worker_index()] = begin_after_different_numbers_of_iterations()

    simulate(EQUAL, sync, train_fn=train, hyperparameters="raw")
    assert [weight for _, weight in seen.values()] == [100.0, 100.0]
    # At a barrier of ElasticBSP, the mean of two gradients is one update.
    assert -seen[1][0] in ({12} if "elastic" not in sync else {10, 11, 12})
    if sync in ("asp", "spec-sync"):  # worker 0 has not pushed while it waited, so it has kept its weights
        assert -seen[0][0] in (3, 4)
    else:
        assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("sync", "transport"),
    [
        ("asp", "tcp"),
        ("ssp:staleness=1", "shm"),
        ("elastic-bsp:lookahead=4", "tcp"),
        *thorough(("asp", "shm"), ("ssp:staleness=1", "tcp"), ("elastic-bsp:lookahead=4", "shm")),
    ],
)
def test_live_workers_wait_where_others_have_more_iterations_before_it(
    sync: str, transport: str, run_on_threads: RunOnThreads
) -> None:
    run = run_on_threads(
        begin_after_different_numbers_of_iterations, servers=2, sync=sync, transport=transport
    )
    assert [run.results[worker][1] for worker in (0, 1)] == [100.0, 100.0]  # type: ignore[index]
    events = [entry.event for entry in run.shards[0].entries]
    pushed = [event for event in events if isinstance(event, PushReceived)]
    assert sum(not event.empty for event in pushed) == 2 + 10 + 2 * 2
    assert measure(run.shards).dropped_pushes == len(run.shards) * sum(event.empty for event in pushed)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_gradient_from_before_is_pushed_afterwards(transport: str, run_on_threads: RunOnThreads) -> None:
    """New parameters begin between backward() and step() of another optimizer."""

    def train() -> State:
        first, second = network(mine(0)), network(mine(1))
        of_first = DistributedOptimizer(sgd(first.parameters()), model=first)
        fit(first, of_first, 0)
        inputs, targets = batch(STEPS)
        of_first.zero_grad()
        (first(inputs) - targets).square().mean().backward()
        of_second = DistributedOptimizer(sgd(second.parameters()), model=second)
        (second(inputs) - targets).square().mean().backward()
        of_first.step()
        of_second.step()
        return named(first, second)

    expected = train()
    assert_close(run_on_threads(train, workers=2, servers=2, transport=transport).state_dict, expected)


def encode_and_add_a_head() -> list[torch.Tensor]:
    """Train an encoder, and then also a head, whose first forward pass comes after that of the encoder."""
    encoder, head = network(0, outputs=4), network(1, inputs=4)
    of_encoder = DistributedOptimizer(sgd(encoder.parameters()), model=encoder)
    for step in range(STEPS * (1 + paceline.worker_index())):
        of_encoder.zero_grad()
        encoder(batch(step)[0]).square().mean().backward()
        of_encoder.step()
    of_head = DistributedOptimizer(sgd(head.parameters()), model=head)
    for step in range(STEPS):
        inputs, targets = batch(step)
        of_encoder.zero_grad()
        of_head.zero_grad()
        (head(encoder(inputs)) - targets).square().mean().backward()
        of_encoder.step()
        of_head.step()
    return [parameter.detach().clone() for parameter in head.parameters()]


@pytest.mark.parametrize("sync", RELAXED)
def test_a_graph_may_contain_earlier_and_new_parameters(sync: str) -> None:
    """While worker 0 waits with a graph of the encoder, worker 1 goes on to train the encoder."""
    result = simulate(UNEQUAL, sync, train_fn=encode_and_add_a_head, record=True)
    assert result.measures.gradients == sum(STEPS * (1 + worker) + 2 * STEPS for worker in range(3))
    for trace in result.trace:
        assert replay(trace) == []


@pytest.mark.parametrize(
    ("sync", "transport"),
    [("asp", "tcp"), ("ssp:staleness=1", "shm"), *thorough(("asp", "shm"), ("ssp:staleness=1", "tcp"))],
)
def test_a_live_graph_may_contain_earlier_and_new_parameters(
    sync: str, transport: str, run_on_threads: RunOnThreads
) -> None:
    run = run_on_threads(encode_and_add_a_head, workers=2, servers=2, sync=sync, transport=transport)
    assert sorted(run.results) == [0, 1]


def test_in_lockstep_different_numbers_of_iterations_are_named() -> None:
    with pytest.raises(RunFailedError, match="worker 1, after its iteration 2, waits at shard 0") as caught:
        simulate(EQUAL, "bsp", train_fn=begin_after_different_numbers_of_iterations)
    assert re.search(r"worker 0 .*for the other workers", str(caught.value))


@pytest.mark.parametrize("sync", ["spec-sync:abort_time_s=0.9,abort_rate=0.1"])
def test_computations_on_later_models_are_aborted_and_restarted(sync: str) -> None:
    """What an aborted computation has changed in a later model is taken back."""
    seen = []

    def train() -> None:
        for fold in range(2):
            model = nn.Sequential(nn.BatchNorm1d(3), *network(fold)).double()
            fit_with_closure(model, DistributedOptimizer(adam(model.parameters()), model=model), 0, 8)
            seen.append(int(model[0].num_batches_tracked))  # type: ignore[arg-type]

    result = simulate(UNEQUAL, sync, train_fn=train)
    assert result.restarts > 0
    assert seen == [8] * 6


def test_the_model_of_synchronization_changes_between_folds() -> None:
    def train() -> None:
        for fold, sync in enumerate(
            ("asp", "ssp:staleness=1", "bsp", "elastic-bsp:lookahead=3", "bsp", "asp")
        ):
            model = network(mine(fold))
            optimizer = DistributedOptimizer(adam(model.parameters()), model=model)
            fit(model, optimizer, 0, 2)
            paceline.set_sync(sync)
            fit(model, optimizer, 2, 4)

    result = simulate(UNEQUAL, "bsp", train_fn=train, record=True)
    assert result.measures.gradients == 3 * 6 * 6
    for trace in result.trace:
        assert replay(trace) == []


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:staleness=1"])
def test_each_fold_uses_all_of_its_data_and_has_a_schedule_of_its_own(sync: str) -> None:
    """The folds differ in size, and each of them has a new loader, dataset and scheduler."""
    sizes, epochs = (24, 36, 12), 2
    positions: dict[int, list[int]] = {size: [] for size in sizes}

    def train() -> None:
        for fold, size in enumerate(sizes):
            model = network(mine(fold))
            optimizer: Any = sgd(model.parameters())
            loader: Any = DataLoader(TensorDataset(torch.ones(size, 3).double()), batch_size=4, shuffle=True)
            scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.1, total_steps=epochs * len(loader)
            )
            model, optimizer, loader, scheduler = paceline.prepare(model, optimizer, loader, scheduler)
            for _ in paceline.epochs(epochs):
                for (inputs,) in loader:
                    optimizer.zero_grad()
                    model(inputs).square().mean().backward()
                    optimizer.step()
                    scheduler.step()
            positions[size].append(scheduler.last_epoch)

    result = simulate(UNEQUAL, sync, train_fn=train)
    assert result.measures.samples == epochs * sum(sizes)
    for size, found in positions.items():
        assert max(found) == epochs * size // 4
        assert min(found) == max(found) or sync != "bsp"


def test_the_memory_of_the_former_model_is_freed_at_once(run_on_threads: RunOnThreads) -> None:
    """Not only when the garbage collector runs, which does not know how large the memory is."""

    def shared() -> int:
        return Path("/proc/self/maps").read_text().count("memfd")

    def train() -> None:
        kept = []
        for fold in range(4):
            model = network(fold)
            kept.append(model)
            fit(model, DistributedOptimizer(sgd(model.parameters()), model=model), 0, 1)
            paceline.barrier()
            if paceline.is_main():
                if not fold:
                    first.append(shared())
                live.await_that(lambda: shared() == first[0], "no other shared memory is left")
            paceline.barrier()

    first: list[int] = []
    gc.collect()
    gc.disable()
    try:
        run_on_threads(train, transport="shm", sync="asp")
    finally:
        gc.enable()


def test_the_new_shared_memory_holds_all_weights_before_it_is_used() -> None:
    """Otherwise the weights would be lost if a server was killed when the model has just been extended."""

    def model_of(parameters: list[Parameter]) -> ModelSpec:
        optimizer = OptimizerSpec("SGD", read_groups(sgd([torch.zeros(1)])), (0,) * len(parameters))
        return ModelSpec(Layout.of(parameters), optimizer, ())

    def master_of(model: ModelSpec) -> Region:
        return Region.create(model.layout, MASTER, shared=True)

    def bytes_of(value: float) -> bytearray:
        return bytearray(torch.full((LINE,), value, dtype=torch.float64).numpy().tobytes())

    first = Parameter(("a",), (LINE,), "float64")
    small, large = model_of([first]), model_of([first, Parameter(("b",), (LINE,), "float64", part=1)])
    memory = ServerMemory(small, small.layout.slice_evenly(1), 1, master_of(small), lambda _: None)
    memory.begin(0, [bytes_of(3.0)])
    master = master_of(large)
    memory.prepare(large, large.layout.slice_evenly(1), master)
    memory.begin(0, [bytes_of(5.0)])
    found = {
        name: set(torch.frombuffer(vector, dtype=torch.float64).tolist())
        for name, vector in master.weights.items()
    }
    assert found == {"float64": {3.0}, "float64/0.1": {5.0}}


# -- what all workers start with ----------------------------------------------------------------------------


def loaded_state(kind: Kind, factor: float) -> dict[str, Any]:
    """Return the state of an optimizer that has taken steps."""
    parameters = [parameter.detach().clone() for parameter in network(7).parameters()]
    optimizer = kind(parameters)
    for step in range(3):
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, factor * (step + index))
        optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("kind", [sgd, adam], ids=by_name)
def test_a_later_optimizer_continues_from_the_state_that_worker_0_has_loaded(
    kind: Kind, run_on_threads: RunOnThreads
) -> None:
    def train() -> tuple[State, list[dict[str, Any]]]:
        first, second = network(mine(0)), network(mine(1))
        of_first = DistributedOptimizer(kind(first.parameters()), model=first)
        fit(first, of_first, 0)
        of_second = DistributedOptimizer(kind(second.parameters()), model=second)
        of_second.load_state_dict(loaded_state(kind, 1.0 + paceline.worker_index()))
        fit(second, of_second, STEPS)
        fit(first, of_first, 2 * STEPS)
        return named(first, second), [of_first.state_dict(), of_second.state_dict()]

    weights, states = train()
    run = run_on_threads(train, workers=2, servers=2)
    assert_close(run.state_dict, weights)
    for result in run.results.values():
        torch.testing.assert_close(result[1], states, rtol=0, atol=1e-12)  # type: ignore[index]


@pytest.mark.parametrize("kind", [sgd, adam], ids=by_name)
def test_a_later_group_has_its_part_of_the_state(kind: Kind, run_on_threads: RunOnThreads) -> None:
    def train() -> list[dict[str, Any]]:
        model = network(0)
        optimizer = DistributedOptimizer(kind(model[2].parameters()), model=model)
        fit(model, optimizer, 0)
        states = [copy.deepcopy(optimizer.state_dict())]
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
        fit(model, optimizer, STEPS)
        return [*states, optimizer.state_dict()]

    expected = train()
    assert [len(state["state"]) for state in expected] == [2, 4]
    for result in run_on_threads(train, workers=2, servers=2).results.values():
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("later", [False, True], ids=["at the start", "later"])
def test_what_is_not_trained_is_that_of_worker_0(later: bool, run_on_threads: RunOnThreads) -> None:
    """A frozen layer, a constant, and the statistics of BatchNorm. Each worker builds others."""

    def train() -> State:
        worker = paceline.worker_index()
        if later:
            begin(network(0))
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False), network(mine(1))).double()
        filled(model[0], mine(2)).requires_grad_(False)
        model.register_buffer("constant", torch.tensor([math.nan, 1.0 + worker]))
        norm: Any = model[1].eval()
        norm.running_mean.fill_(worker)
        fit(model, DistributedOptimizer(sgd(model[2].parameters()), model=model), 0)
        return named(model)

    def found(state: State) -> State:
        return {
            name.removeprefix("model1."): value
            for name, value in state.items()
            if not later or "model1" in name
        }

    expected = train()
    run = run_on_threads(train, workers=2, servers=2, sync="bsp")
    for state in (*run.results.values(), found(run.state_dict)):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12, equal_nan=True)
    result = simulate(EQUAL, "bsp", train_fn=train)
    assert result.state_dict is not None
    torch.testing.assert_close(found(result.state_dict), expected, rtol=0, atol=1e-12, equal_nan=True)


def test_the_statistics_of_later_models_are_pooled(
    run_on_threads: RunOnThreads,
) -> None:
    def train() -> State:
        first = network(mine(0))
        fit(first, DistributedOptimizer(sgd(first.parameters()), model=first), 0, 1)
        second = nn.Sequential(nn.BatchNorm1d(3), network(mine(1))).double()
        optimizer = DistributedOptimizer(sgd(second.parameters()), model=second)
        fit(second, optimizer, 0)
        return {name: value.clone() for name, value in second.state_dict().items()}

    run = run_on_threads(train, workers=2, servers=2)
    mean = "0.running_mean"
    one, other = (run.results[worker][mean] for worker in range(2))  # type: ignore[index]
    assert not torch.equal(one, other)
    torch.testing.assert_close(run.state_dict[f"model1.{mean}"], (one + other) / 2)


def test_a_set_begins_with_the_step_of_its_optimizer_if_no_module_is_called(
    run_on_threads: RunOnThreads,
) -> None:
    """A gradient that was computed with other weights is computed again, or left out if there is no closure."""

    def train() -> list[float]:
        first, of_first = counting()
        count(first, of_first)
        found = []
        for with_closure in (True, False):
            model, optimizer = counting(10.0 + paceline.worker_index())

            def closure(model: Count = model) -> torch.Tensor:
                model.zero_grad()
                loss = model.weight.square().sum() / 2
                loss.backward()
                return loss

            if with_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            found.append(model.value)
        return found

    # The gradient is the weight: 10 in worker 0. In worker 1, it is 10 or nothing, but never 11.
    assert run_on_threads(train, workers=2, sync="bsp").results == {0: [0.0, 0.0], 1: [0.0, 0.0]}


# -- who is waited for --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["bsp", "asp", "elastic-bsp:lookahead=3"])
def test_a_worker_that_finishes_is_not_waited_for(sync: str, run_on_threads: RunOnThreads) -> None:
    def train() -> float:
        first, of_first = counting()
        count(first, of_first, 2)
        if paceline.worker_index() == 0:
            return 0.0
        second, of_second = counting(100.0 + paceline.worker_index())
        second()
        value = second.value
        paceline.barrier()
        count(second, of_second)
        return value

    assert run_on_threads(train, workers=3, sync=sync, hyperparameters="raw").results == {
        0: 0.0,
        1: 101.0,
        2: 101.0,
    }
    seen = []

    def record() -> None:
        seen.append(train())

    result = simulate(UNEQUAL, sync, train_fn=record, hyperparameters="raw")
    assert sorted(seen) == [0.0, 101.0, 101.0]
    assert result.state_dict is not None
    assert result.state_dict["model1.weight"].item() in (99.0, 100.0)


def test_the_initial_weights_of_a_worker_that_is_lost_in_the_call_do_not_count() -> None:
    seen = {}

    def train() -> None:
        worker = paceline.worker_index()
        first, of_first = counting()
        count(first, of_first, 3)
        second, of_second = counting(100.0 + worker)
        second()
        seen[worker] = second.value
        count(second, of_second, 2)

    cluster = Cluster(compute_s=[1.0, 1.0, 20.0], presence={0: Presence(lost_at_s=10.0)})
    result = simulate(cluster, "asp", train_fn=train, hyperparameters="raw")
    assert seen == {1: 101.0, 2: 101.0}
    assert result.state_dict is not None
    assert result.state_dict["model1.weight"].item() == 97.0


def test_a_worker_that_joins_a_run_with_later_sets_is_refused() -> None:
    cluster = Cluster(compute_s=[1.0, 1.0, 1.0], presence={2: Presence(joins_at_s=30.0)})
    with pytest.raises(RunFailedError, match=r"worker 2.*join"):
        simulate(cluster, "asp", train_fn=lambda: fit_for_long(k_fold))


def fit_for_long(script: Script) -> None:
    for _ in range(5):
        script(sgd)


LOSS = """
import os, signal, threading, time
from pathlib import Path

import torch
from torch import nn

import paceline
from paceline.run.worker_links import InitialModel

worker = paceline.worker_index()


def counting(start):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, start)
    return model, paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))


def count(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()


count(*counting(0.0), 3)
first = int(paceline.reduce(os.getpid() if worker == 0 else 0, "sum"))
model, optimizer = counting(100.0 + worker)
if worker == 0:
    {kill}
else:
    {wait}
count(model, optimizer, 2)
"""
IN_THE_CALL = {
    "waiting": (
        "threading.Timer(0.5, os.kill, (first, signal.SIGKILL)).start()",
        "while Path(f'/proc/{first}').exists(): time.sleep(0.01)",
    ),
    "between two shards": (
        "send = InitialModel.send\n"
        "    InitialModel.send = lambda self, message: (\n"
        "        os.kill(first, signal.SIGKILL) if message.shard else send(self, message))",
        "pass",
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("place", ["waiting", *thorough("between two shards")])
def test_if_worker_0_is_killed_in_the_call_the_weights_of_the_next_one_are_used(
    place: str, mark: str, tmp_path: Any
) -> None:
    script = tmp_path / "train.py"
    kill, wait = IN_THE_CALL[place]
    script.write_text(LOSS.replace("{kill}", kill).replace("{wait}", wait))
    options = (
        "--workers",
        "3",
        "--servers",
        "2",
        "--sync",
        "asp",
        "--hyperparameters",
        "raw",
        "--run-dir",
        "run",
    )
    ended = live.run_program("-m", "paceline", "run", *options, str(script))
    assert ended.returncode == 0, ended.stderr
    assert "worker 0 was lost: it was terminated by signal SIGKILL" in ended.stderr
    weights = safetensors.torch.load_file(tmp_path / "run" / "weights.safetensors")
    assert {name: value.item() for name, value in weights.items()} == {"weight": -9.0, "model1.weight": 97.0}


FOLDS = """
import os
from pathlib import Path

import torch
from torch import nn

import paceline

worker = paceline.worker_index()
torch.manual_seed(worker)
for fold in range(30):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    kind = torch.optim.SGD if fold % 2 else torch.optim.Adam
    optimizer = paceline.DistributedOptimizer(kind(model.parameters(), lr=0.01))
    extra = nn.Linear(4, 1)
    for step in range(5):
        if step == 3 and fold % 3 == 0:
            optimizer.add_param_group({"params": extra.parameters()})
        inputs = torch.randn(8, 4)
        optimizer.zero_grad()
        outputs = model(inputs) + (extra(inputs) if len(optimizer.param_groups) > 1 else 0.0)
        (outputs - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        if fold == 0 and step == 0:
            Path(f"began-{worker}").write_text(str(os.getpid()))
print(f"worker {worker} has reached the end")
"""


@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.parametrize("seed", range(30))
def test_workers_may_be_killed_at_any_moment_of_a_cross_validation(
    seed: int, mark: str, tmp_path: Path
) -> None:
    choice = random.Random(f"killed in a fold {seed}")
    sync, transport = choice.choice(["bsp", *RELAXED]), choice.choice(["shm", "unix", "tcp"])
    victims = choice.sample(range(3), choice.choice((1, 1, 2)))
    (tmp_path / "train.py").write_text(FOLDS)
    options = ("--workers", "3", "--servers", "2", "--sync", sync, "--transport", transport)
    with live.start_program("-m", "paceline", "run", *options, "--show-all", "train.py") as program:
        live.await_that(lambda: len(list(tmp_path.glob("began-*"))) == 3, "all workers have taken a step")
        for worker in victims:
            time.sleep(choice.uniform(0.0, 0.5))
            with contextlib.suppress(ProcessLookupError):  # it has reached the end
                os.kill(int((tmp_path / f"began-{worker}").read_text()), signal.SIGKILL)
        stdout, stderr = program.communicate(timeout=live.DEADLINE_S)
    assert program.returncode == 0, stderr
    for worker in {0, 1, 2} - set(victims):
        assert f"worker {worker} has reached the end" in stdout + stderr


# -- what is refused ----------------------------------------------------------------------------------------


def begin(model: nn.Module, *, kind: Kind = sgd) -> None:
    fit(model, DistributedOptimizer(kind(model.parameters()), model=model), 0, 1)


def barrier_in_worker_1() -> None:
    if paceline.worker_index():
        paceline.barrier()
    else:
        begin(network(1))


def other_shapes_in_worker_1() -> None:
    begin(filled(nn.Sequential(nn.Linear(3, 1 + paceline.worker_index())).double(), 0))


def other_names_in_worker_1() -> None:
    begin(nn.ModuleDict({"ab"[paceline.worker_index()]: network(1)}))


def another_optimizer_in_worker_1() -> None:
    begin(network(1), kind=adam if paceline.worker_index() else sgd)


def two_models_in_worker_1() -> None:
    models = [network(1), network(2)]
    optimizers = [
        DistributedOptimizer(sgd(model.parameters()), model=model)
        for model in models[: 1 + paceline.worker_index()]
    ]
    fit(models[0], optimizers[0], 0)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (barrier_in_worker_1, "worker 0 .*worker 1 called barrier"),
        (other_shapes_in_worker_1, "worker 0.*worker 1|worker 1.*worker 0"),
        (other_names_in_worker_1, "worker 0.*worker 1|worker 1.*worker 0"),
        (another_optimizer_in_worker_1, "worker 0.*worker 1|worker 1.*worker 0"),
        (two_models_in_worker_1, "worker 0.*worker 1|worker 1.*worker 0"),
    ],
    ids=by_name,
)
def test_workers_that_do_not_register_the_same_are_told_so(
    later: Callable[[], None], message: str, run_on_threads: RunOnThreads
) -> None:
    def train() -> None:
        begin(network(0))
        later()

    with pytest.raises((ConfigurationError, RunFailedError, UsageError), match=message):
        simulate(EQUAL, "bsp", train_fn=train)
    errors = run_on_threads(train, keep_errors=True, sync="asp").errors
    assert sorted(errors) == [0, 1]
    for error in errors.values():
        assert re.search(message, str(error))


def old_after_new(model: nn.Sequential, optimizer: DistributedOptimizer) -> None:
    fit(model, DistributedOptimizer(sgd(model[0].parameters()), model=model), 1, 1)
    optimizer.step()


def two_for_one(model: nn.Sequential, optimizer: DistributedOptimizer) -> None:
    both = [DistributedOptimizer(sgd([parameter]), model=model) for parameter in model[0].parameters()]
    fit(model, both[0], 1, 1)


def one_for_two(model: nn.Sequential, optimizer: DistributedOptimizer) -> None:
    fit(model, DistributedOptimizer(sgd(model[2].parameters()), model=model), 1, 1)
    fit(model, DistributedOptimizer(sgd(model.parameters()), model=model), 2, 1)


def stranger(model: nn.Sequential, optimizer: DistributedOptimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).double())]})
    fit(model, optimizer, 1, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (old_after_new, r"^worker 0 failed: .*step\(\) was called, but another DistributedOptimizer"),
        (two_for_one, r"'0\.bias' has been trained by another optimizer"),
        (one_for_two, r"'0\.weight' has been trained by another optimizer"),
        (stranger, "Cannot find the model: no module holds all of the optimizer's parameters"),
    ],
    ids=by_name,
)
def test_what_cannot_be_trained_later_is_refused(
    change: Callable[[nn.Sequential, DistributedOptimizer], None], message: str
) -> None:
    def train() -> None:
        model = network(0)
        optimizer = DistributedOptimizer(sgd(model[0].parameters()), model=model)
        fit(model, optimizer, 0, 1)
        change(model, optimizer)

    with pytest.raises((ConfigurationError, RunFailedError, UsageError), match=message):
        simulate(EQUAL, "bsp", train_fn=train)


@pytest.mark.parametrize("context", ["evaluating", "editing"])
def test_nothing_begins_inside_an_evaluation_or_an_edit(context: str, run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        first, of_first = counting()
        count(first, of_first)
        second, of_second = counting()
        inside = paceline.evaluating(first) if context == "evaluating" else of_first.editing()
        with inside:
            second().backward()
            with pytest.raises(UsageError, match=rf"step.* was called inside `with .*{context}"):
                of_second.step()
        count(second, of_second)
        count(first, of_first)

    run = run_on_threads(train, workers=1)
    assert {name: value.item() for name, value in run.state_dict.items()} == {
        "weight": -2,
        "model1.weight": -1,
    }


# -- what works afterwards ----------------------------------------------------------------------------------


def test_clipping_edits_and_calls_of_all_workers_include_later_sets(run_on_threads: RunOnThreads) -> None:
    def train() -> State:
        models = [network(mine(fold)) for fold in range(2)]
        optimizers = []
        for fold, model in enumerate(models):
            optimizer = DistributedOptimizer(sgd(model.parameters()), model=model)
            optimizers.append(optimizer)
            for step in range(STEPS):
                optimizer.zero_grad()
                inputs, targets = batch(STEPS * fold + step)
                (model(inputs) - targets).square().mean().backward()
                optimizer.clip_grad_norm(0.05)
                optimizer.step()
        with optimizers[0].editing(), torch.no_grad():
            for model in models:
                for parameter in model.parameters():
                    parameter.clamp_(-0.3, 0.3)
        for model, optimizer in zip(models, optimizers, strict=True):
            fit(model, optimizer, 2 * STEPS, 1)
        paceline.barrier()
        assert paceline.reduce(2.5) == 2.5
        for model in models:
            with paceline.evaluating(model) as snapshot:
                for name, value in model.state_dict().items():
                    assert torch.equal(snapshot.state_dict()[name], value)
        return named(*models)

    expected = train()
    run = run_on_threads(train, workers=2, servers=2, sync="bsp")
    assert_close(run.state_dict, expected)


def test_one_worker_evaluates_a_later_model_while_another_trains_it(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        for fold in range(2):
            model, optimizer = counting(10.0 * fold)
            count(model, optimizer, 2)
            if paceline.worker_index() == 0:
                with paceline.evaluating(model) as snapshot:
                    assert snapshot.value <= 10.0 * fold - 2
            count(model, optimizer, 2)

    run = run_on_threads(train, workers=2, sync="asp", hyperparameters="raw")
    assert {name: value.item() for name, value in run.state_dict.items()} == {
        "weight": -8.0,
        "model1.weight": 2.0,
    }


@pytest.mark.parametrize("transport", ["shm", *thorough("unix")])
def test_in_lockstep_a_worker_that_has_evaluated_reaches_the_next_fold_later(
    transport: str, run_on_threads: RunOnThreads
) -> None:
    """During the evaluation, worker 0 pushes without gradients, so it has steps left when worker 1 waits for it."""

    def train() -> None:
        for fold in range(2):
            model, optimizer = counting(10.0 * fold)
            count(model, optimizer, 2)
            if paceline.worker_index() == 0:
                with paceline.evaluating(model):
                    await_pushes(2)
            count(model, optimizer, 4)

    def await_pushes(pushes: int) -> None:
        session = current()
        assert session is not None
        begun = session.core.iteration
        live.await_that(lambda: session.core.iteration > begun + pushes, "worker 1 has gone on")

    run = run_on_threads(train, workers=2, servers=2, sync="bsp", transport=transport)
    assert measure(run.shards).gradients == 2 * 2 * 6
    # Worker 1 has taken at least two steps alone, and worker 0 as many.
    for fold, prefix in enumerate(("", "model1.")):
        assert run.state_dict[f"{prefix}weight"].item() <= 10.0 * fold - 8


def test_an_optimizer_that_waits_for_its_first_forward_pass_does_not_stop_the_others(
    run_on_threads: RunOnThreads,
) -> None:
    """Worker 1 creates the second optimizer one step later than worker 0; both use it after the same step."""

    def train() -> None:
        first, of_first = counting()
        count(first, of_first)
        if paceline.worker_index():
            count(first, of_first)
        second, of_second = counting()
        if not paceline.worker_index():
            count(first, of_first)
        count(second, of_second)
        count(first, of_first)

    run = run_on_threads(train, workers=2, sync="bsp")
    assert {name: value.item() for name, value in run.state_dict.items()} == {
        "weight": -3,
        "model1.weight": -1,
    }

"""Clipping of what is applied: under BSP as in one process on the joint batch, with one factor for all shards."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import ConfigurationError, RunFailedError, UsageError
from paceline.sim import Cluster, Presence, Uniform, simulate
from paceline.sync.actions import ApplyMean
from paceline.sync.events import MeanClipped
from paceline.trace import replay
from paceline.trace.findings import find
from paceline.trace.recording import Trace
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

VOCABULARY, WIDTH, LENGTH = 23, 16, 8
STEPS, MICRO, ROWS = 12, 2, 12  # optimizer steps, batches that each accumulates, rows of a joint batch
CLUSTER = Cluster(compute_s=[1.0, 1.3, 2.1], servers=2, latency_s=0.01)


class TinyGPT(nn.Module):
    """One block of causal attention, whose output layer shares the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        x = self.embedding(tokens) + self.position
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        logits: torch.Tensor = self.head(x + self.mlp(self.norm(x)))
        return logits


def gpt() -> TinyGPT:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return TinyGPT().double()


FIRST = gpt().state_dict()


def made() -> TinyGPT:
    model = gpt()
    model.load_state_dict(FIRST)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def tokens(step: int, micro: int) -> torch.Tensor:
    """The rows of a joint batch."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    logits = model(rows)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


def alone(max_norm: float, clip: Callable[..., Any] = nn.utils.clip_grad_norm_) -> dict[str, torch.Tensor]:
    """One process on the joint batch."""
    model = made()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            (loss_of(model, tokens(step, micro)) / MICRO).backward()
        clip(model.parameters(), max_norm)
        optimizer.step()
    return model.state_dict()


def train(max_norm: float | Callable[[int], float], steps: int = STEPS) -> dict[str, torch.Tensor]:
    """One worker of a run: each worker has an equal part of the rows."""
    model = made()
    optimizer = paceline.DistributedOptimizer(optimizer_of(model), model=model)
    worker, workers = paceline.worker_index(), paceline.worker_count()
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(MICRO):
            (loss_of(model, tokens(step, micro)[worker::workers]) / MICRO).backward()
        optimizer.clip_grad_norm(max_norm(worker) if callable(max_norm) else max_norm)
        optimizer.step()
    return model.state_dict()


def relative_error(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert actual.keys() == expected.keys()
    off = [float(torch.linalg.norm(actual[name] - expected[name])) for name in expected]
    return max(d / float(torch.linalg.norm(expected[name])) for d, name in zip(off, expected, strict=True))


def clipped(trace: Trace) -> list[MeanClipped]:
    return [entry.event for entry in trace.entries if isinstance(entry.event, MeanClipped)]


# -- BSP is one process on the joint batch ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (3, {"transport": "shm"}),
        (2, {"transport": "tcp", "overlap": "off"}),
        *thorough(
            (2, {"transport": "shm"}),
            (2, {"transport": "unix"}),
            (3, {"transport": "unix"}),
            (3, {"transport": "tcp", "overlap": "off"}),
        ),
    ],
)
def test_bsp_with_clipping_equals_one_process(
    run_on_threads: RunOnThreads, workers: int, options: dict[str, str]
) -> None:
    run = run_on_threads(lambda: train(0.1), workers=workers, servers=2, **options)
    assert relative_error(run.state_dict, alone(0.1)) <= 1e-9
    assert relative_error(run.state_dict, alone(math.inf)) > 1e-3  # so clipping matters
    first, second = map(clipped, run.shards)
    assert [event.factor for event in first] == [event.factor for event in second]
    assert len(first) == STEPS
    assert all(event.factor < 1 for event in first)
    for trace in run.traces:
        assert replay(trace) == []


class Wrapper:
    """Wraps an optimizer as Lightning and Fabric do: an instance of its class that only reads its attributes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.wrapped = optimizer
        self.__class__ = type("Wrapped", (Wrapper, type(optimizer)), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


def test_a_wrapped_optimizer_clips() -> None:
    def body() -> None:
        model = made()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        wrapper: Any = Wrapper(optimizer)
        loss_of(model, tokens(0, 0)).backward()
        wrapper.clip_grad_norm(0.01)
        optimizer.step()

    state = simulate(CLUSTER, "bsp", train_fn=body).state_dict
    assert state is not None
    moved = math.sqrt(
        sum(float((state[name] - FIRST[name]).square().sum()) for name in state if name != "head.weight")
    )
    assert moved == pytest.approx(0.01)


def test_clipping_in_virtual_time_equals_one_process() -> None:
    result = simulate(CLUSTER, "bsp", train_fn=lambda: train(0.1), record=True)
    assert result.state_dict is not None
    weights = {name: result.state_dict[name] for name in FIRST}
    assert relative_error(weights, alone(0.1)) <= 1e-9
    for trace in result.trace:
        assert replay(trace) == []


def test_balanced_batches_with_clipping_equal_one_process() -> None:
    """The workers' batches differ in size, so their gradients have weights in the mean."""
    items = torch.randint(VOCABULARY, (120, LENGTH), generator=torch.Generator().manual_seed(5))
    sizes: list[list[int]] = []

    def balanced() -> None:
        model = made()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model=model)
        loader = DataLoader(TensorDataset(items), batch_size=4, shuffle=False)
        own: list[int] = []
        for (rows,) in paceline.distribute(loader, batch="balanced"):
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            optimizer.clip_grad_norm(0.1)
            optimizer.step()
            own.append(len(rows))
        sizes.append(own)

    unequal = Cluster(compute_s=[1.0, 1.0, 3.0], fixed_share=0.2, servers=2)
    result = simulate(unequal, "bsp", train_fn=balanced)
    assert len({own[-1] for own in sizes}) > 1
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for rows in items.split(12):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert result.state_dict is not None
    weights = {name: result.state_dict[name] for name in FIRST}
    assert relative_error(weights, model.state_dict()) <= 1e-9


def test_the_norm_of_the_most_advanced_worker_counts() -> None:
    """Under BSP all are equally advanced, so worker 0's counts, as for hyper-parameters."""
    result = simulate(CLUSTER, "bsp", train_fn=lambda: train(lambda worker: [0.1, 0.5, 7.0][worker]))
    assert result.state_dict is not None
    assert relative_error({name: result.state_dict[name] for name in FIRST}, alone(0.1)) <= 1e-9


# -- other models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["elastic-bsp:lookahead=3", "bsp@0,elastic-bsp:lookahead=3@4,asp@8,bsp@10"])
def test_barriers_clip_by_the_same_factor_at_every_shard(run_on_threads: RunOnThreads, sync: str) -> None:
    run = run_on_threads(lambda: train(0.1, 20), workers=3, servers=2, sync=sync, pace=[0.001, 0.002, 0.004])
    first, second = map(clipped, run.shards)
    assert first
    assert [(e.pushes, e.factor) for e in first] == [(e.pushes, e.factor) for e in second]
    means = [a.pushes for e in run.shards[0].entries for a in e.actions if isinstance(a, ApplyMean)]
    assert [event.pushes for event in first] == means
    for trace in run.traces:
        assert replay(trace) == []


@pytest.mark.parametrize("sync", ["asp", "ssp:staleness=1", "spec-sync"])
def test_a_push_that_is_applied_on_arrival_is_clipped_as_by_hand(sync: str) -> None:
    """The worker's gradient is unchanged in between, so slices of it may travel before the norm is known."""

    def by_hand() -> None:
        model = made()
        optimizer = paceline.DistributedOptimizer(optimizer_of(model), model=model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, tokens(step, paceline.worker_index())).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    def by_method() -> None:
        model = made()
        optimizer = paceline.DistributedOptimizer(optimizer_of(model), model=model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, tokens(step, paceline.worker_index())).backward()
            before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            norm = optimizer.clip_grad_norm(0.1)
            assert norm == pytest.approx(float(nn.utils.get_total_norm(before)))
            after = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(map(torch.equal, before, after))
            optimizer.step()

    expected, actual = (simulate(CLUSTER, sync, train_fn=each).state_dict for each in (by_hand, by_method))
    assert expected is not None
    assert actual is not None
    assert relative_error(actual, expected) <= 1e-9


@pytest.mark.parametrize(
    "sync",
    [
        "drop-stragglers:quorum=2",
        "bsp|asp",
        "bsp@0,drop-stragglers:quorum=2@5",
        "conditions:pull=operator:not_",
    ],
)
def test_clipping_is_refused_where_shards_may_average_different_gradients(sync: str) -> None:
    with pytest.raises(RunFailedError, match=r"clip_grad_norm\(\) needs the norm of the mean .* under "):
        simulate(CLUSTER, sync, train_fn=lambda: train(0.1))


def test_a_script_that_clips_cannot_request_such_a_model() -> None:
    caught: list[str] = []

    def change() -> None:
        train(0.1, 2)
        with pytest.raises(ConfigurationError, match="under drop-stragglers") as error:
            paceline.set_sync("drop-stragglers:quorum=1")
        caught.append(str(error.value))

    simulate(CLUSTER, "bsp", train_fn=change)
    assert len(caught) == 3


@pytest.mark.parametrize("sync", ["bsp", "elastic-bsp:lookahead=3"])
@pytest.mark.parametrize("seed", [0, *thorough(1, 2)])
def test_workers_come_and_go_while_means_are_clipped(sync: str, seed: int) -> None:
    presence = {
        1: Presence(joins_at_s=2.0, lost_at_s=5.3),
        2: Presence(lost_at_s=3.3, back_after_s=2.0),
        3: Presence(lost_at_s=4.6),
    }
    cluster = Cluster(
        compute_s=[0.5, 0.7, 0.6, 0.9],
        servers=2,
        latency_s=Uniform(low=0.01, high=0.3),
        presence=presence,
    )
    result = simulate(cluster, sync, train_fn=lambda: train(0.1, 12), seed=seed, record=True)
    shards = [trace for trace in result.trace if trace.header.host == "shard"]
    assert all(map(clipped, shards))
    for trace in result.trace:
        assert replay(trace) == []


def test_the_others_go_on_when_a_worker_is_killed_while_means_are_clipped(tmp_path: Path) -> None:
    """In real processes. The worker is killed at any moment: between two commits, or while its mean is measured."""

    def work() -> None:
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        worker = paceline.worker_index()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(worker))
        for step in range(60):
            if (worker, step) == (1, 20):
                threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGKILL)).start()
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            if paceline.worker_count() > 1 and worker == 2 and step > 30:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            else:
                optimizer.clip_grad_norm(0.01)
            optimizer.step()
            time.sleep(0.001)

    result = paceline.launch(work, workers=3, servers=2, sync="bsp", run_dir=tmp_path / "run", progress=False)
    assert result.summary["lost_workers"] == [1]
    assert result.summary["iterations"]["0"] == result.summary["iterations"]["2"] == 60
    assert result.summary["clipped_alone"] == 29
    assert any("29 of" in finding for finding in result.summary["findings"])
    shards = [trace for trace in result.trace if trace.header.host == "shard"]
    factors: dict[tuple[int, int], float] = {}
    for trace in shards:
        assert replay(trace) == []
        for event in clipped(trace):
            for push in event.pushes:
                if push[0] != 1:
                    assert factors.setdefault(push, event.factor) == event.factor
    assert len(factors) == 2 * 60
    assert all(tensor.isfinite().all() for tensor in result.state_dict.values())


# -- gradients of every kind -------------------------------------------------------------------------------------


class Bag(nn.Module):
    """An embedding with sparse gradients, a layer, and a layer that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3, sparse=True)
        self.used = nn.Linear(3, 2)
        self.unused = nn.Linear(3, 2)


def bag_gradient(model: Bag, worker: int) -> None:
    rows = torch.tensor([[0, 1, 1], [1, 4, 6]][worker])
    model.used(model.table(rows)).square().mean().backward()


def test_sparse_missing_and_weighted_gradients_are_clipped_together() -> None:
    torch.manual_seed(0)
    first = Bag().double().state_dict()

    def sgd(model: Bag) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def work() -> None:
        model = Bag().double()
        model.load_state_dict(first)
        optimizer = paceline.DistributedOptimizer(sgd(model), model=model)
        for _ in range(3):
            optimizer.zero_grad()
            bag_gradient(model, paceline.worker_index())
            optimizer.clip_grad_norm(0.01)
            optimizer.step(samples=[1, 3][paceline.worker_index()])

    result = simulate(Cluster(compute_s=[1.0, 1.0], servers=2), "bsp", train_fn=work)
    model = Bag().double()
    model.load_state_dict(first)
    for _ in range(3):
        total: dict[nn.Parameter, torch.Tensor] = {}
        for worker, weight in enumerate([0.25, 0.75]):
            model.zero_grad()
            bag_gradient(model, worker)
            for p in model.parameters():
                if p.grad is not None:
                    total[p] = total.get(p, 0) + weight * p.grad.to_dense()
        for p in model.parameters():
            p.grad = total.get(p)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        sgd(model).step()
    assert result.state_dict is not None
    assert relative_error(result.state_dict, model.state_dict()) <= 1e-9


def test_a_skipped_push_is_in_no_norm() -> None:
    """Worker 1's gradient contains NaN, so the mean is worker 0's gradient."""

    def work() -> torch.Tensor:
        weight = nn.Parameter(torch.tensor([1.0, 1.0]))
        module = nn.ParameterList([weight])
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), model=module)
        for _ in range(2):
            weight.grad = torch.tensor([3.0, 4.0 if paceline.worker_index() == 0 else math.nan])
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
        return weight.detach()

    result = simulate(Cluster(compute_s=[1.0, 1.0]), "bsp", train_fn=work, on_nan="skip")
    assert result.state_dict is not None
    assert result.state_dict["0"].tolist() == pytest.approx([1 - 2 * 0.6, 1 - 2 * 0.8], abs=1e-5)


def test_clipping_applies_to_the_next_step_only() -> None:
    def work() -> None:
        weight = nn.Parameter(torch.tensor([0.0]))
        module = nn.ParameterList([weight])
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), model=module)
        for step in range(3):
            weight.grad = torch.tensor([-10.0])
            if step == 1:
                optimizer.clip_grad_norm(5.0)
                optimizer.clip_grad_norm(1.0)  # the smallest counts, as if each had scaled the gradient
                optimizer.clip_grad_norm(math.inf)
            optimizer.step()

    result = simulate(Cluster(compute_s=[1.0, 1.0]), "bsp", train_fn=work)
    assert result.state_dict is not None
    assert result.state_dict["0"].tolist() == pytest.approx([21.0])


def test_lars_clips_each_workers_gradient_before_it_is_scaled() -> None:
    def work() -> dict[str, torch.Tensor]:
        model = made()
        optimizer = paceline.DistributedOptimizer(
            paceline.LARS(model.parameters(), lr=0.5, weight_decay=0.1), model=model
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, tokens(step, 0)).backward()
            optimizer.clip_grad_norm(0.1)
            optimizer.step()
        return model.state_dict()

    result = simulate(Cluster(compute_s=[1.0], servers=2), "bsp", train_fn=work)
    assert result.state_dict is not None
    assert relative_error(result.state_dict, work()) <= 1e-9  # `work` now runs outside a run


# -- outside a run, and what torch offers --------------------------------------------------------------------------


def test_outside_a_run_clipping_is_torchs() -> None:
    model, other = made(), made()
    optimizer = paceline.DistributedOptimizer(optimizer_of(model))
    for each in (model, other):
        loss_of(each, tokens(0, 0)).backward()
    assert torch.equal(optimizer.clip_grad_norm(0.1), nn.utils.clip_grad_norm_(other.parameters(), 0.1))
    optimizer.clip_grad_value(0.001)
    nn.utils.clip_grad_value_(other.parameters(), 0.001)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert torch.equal(mine.grad, its.grad)


@pytest.mark.parametrize("limit", [-1.0, math.nan, "1", True])
def test_a_limit_must_be_a_number_that_is_not_negative(limit: Any) -> None:
    optimizer = paceline.DistributedOptimizer(optimizer_of(made()))
    with pytest.raises(UsageError, match="max_norm is"):
        optimizer.clip_grad_norm(limit)
    with pytest.raises(UsageError, match="clip_value is"):
        optimizer.clip_grad_value(limit)


@pytest.mark.parametrize("averages", [True, False])
def test_clipping_by_torch_works_on_and_is_named_if_gradients_are_averaged(averages: bool) -> None:
    original = nn.utils.clip_grad_norm_

    def work() -> None:
        model = made()
        optimizer = paceline.DistributedOptimizer(optimizer_of(model), model=model)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, tokens(step, paceline.worker_index())).backward()
            if step != 2:
                norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
                after = [p.grad for p in model.parameters() if p.grad is not None]
                assert norm > 0.1
                assert float(nn.utils.get_total_norm(after)) == pytest.approx(0.1, rel=1e-3)
            optimizer.step()

    result = simulate(CLUSTER, "bsp" if averages else "asp", train_fn=work)
    assert nn.utils.clip_grad_norm_ is original
    assert result.measures.clipped_alone == (9 if averages else 0)
    found = find(result.measures)
    assert [line for line in found if "clip" in line] == (
        [
            "9 of 12 averaged gradients were clipped by each worker before they were averaged "
            "(torch.nn.utils.clip_grad_norm_), which differs from clipping the joint gradient, as a single process "
            "does.",
            "To clip the joint gradient, call optimizer.clip_grad_norm(max_norm) between backward() and step() "
            "instead; with Accelerate, accelerator.clip_grad_norm_(...); with Fabric, fabric.clip_gradients(...).",
        ]
        if averages
        else []
    )

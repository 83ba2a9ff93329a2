"""What a script does around its steps, with a model on a device."""

from __future__ import annotations

import copy
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import DistributedOptimizer, worker_index
from paceline.sim import Presence, SimResult, simulate
from paceline.train.generator_states import GeneratorStates
from paceline.train.session import current
from paceline.train.training import training_of

from .device import (
    DEVICE,
    SANITIZED,
    assert_equal,
    cluster,
    copying_early,
    loss_of,
    made,
    own_rows,
    rows,
    simulated,
    weights_of,
)

STEPS = 20

SYNCS = [
    "bsp",
    "asp",
    "ssp:staleness=2",
    "dssp:lower=1,upper=3",
    "dsps",
    "pssp:staleness=1",
    "dynamic-pssp:staleness=1,alpha=significance",
    "spec-sync",
    "naive-waiting:delay_s=0.2",
    "elastic-bsp:lookahead=4",
    "drop-stragglers:quorum=2",
]

ONE_SHARD = ["ringmaster:threshold=3", "rennala:batch=2"]
"""Sync models that need a single server."""


def sgd(model: nn.Module, **options: Any) -> DistributedOptimizer:
    return DistributedOptimizer(
        torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.5, **options}), model=model
    )


def step(model: nn.Module, optimizer: DistributedOptimizer, iteration: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, own_rows(iteration, next(model.parameters()).device))
        loss.backward()
        return loss

    optimizer.step(closure)


def train(steps: int = STEPS) -> None:
    model = made()
    optimizer = sgd(model)
    for iteration in range(steps):
        step(model, optimizer, iteration)


def state_of(result: SimResult) -> dict[str, torch.Tensor]:
    assert result.state_dict is not None
    return dict(result.state_dict)


def loss_with(state: dict[str, torch.Tensor]) -> float:
    model = made("cpu")
    model.load_state_dict(state)
    return loss_of(model, rows(100, "cpu")).item()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("sync", SYNCS + ONE_SHARD)
def test_every_sync_model_trains(sync: str, early: bool) -> None:
    with copying_early(early):
        result = simulated(train, sync, workers=3, servers=1 if sync in ONE_SHARD else 2)
    before, after = loss_with(weights_of(made())), loss_with(state_of(result))
    print(f"{sync}: loss {before:.3f} -> {after:.3f}, {result.restarts} restarts")
    assert after < before
    assert set(result.measures.iterations.values()) == {STEPS}


def test_computations_are_restarted() -> None:
    """An aborted computation leaves no trace: the same numbers are drawn again, on the device, too."""
    drawn: dict[tuple[int, int], list[tuple[float, float]]] = {}

    def train_with_noise() -> None:
        model = made()
        optimizer = sgd(model)
        for iteration in range(STEPS):

            def closure(iteration: int = iteration) -> torch.Tensor:
                optimizer.zero_grad()
                noise = torch.rand((), device=DEVICE)
                drawn.setdefault((worker_index(), iteration), []).append((float(noise), random.random()))
                loss = loss_of(model, own_rows(iteration) + 0.01 * noise)
                loss.backward()
                return loss

            optimizer.step(closure)

    result = simulated(train_with_noise, "spec-sync", workers=3)
    repeated = [numbers for numbers in drawn.values() if len(numbers) > 1]
    print(f"{result.restarts} restarts")
    assert result.restarts > 0
    assert repeated
    assert all(len(set(numbers)) == 1 for numbers in repeated)


def test_workers_draw_their_own_numbers_on_the_device() -> None:
    def draw(seen: dict[int, list[float]]) -> None:
        model = made()
        optimizer = sgd(model)
        for iteration in range(3):
            step(model, optimizer, iteration)
            seen.setdefault(worker_index(), []).extend(torch.rand(3, device=DEVICE).tolist())

    runs: list[dict[int, list[float]]] = [{}, {}]
    outside = GeneratorStates()
    for seen in runs:
        simulated(partial(draw, seen))
    after = torch.rand(3, device=DEVICE).tolist()
    outside.give_back()
    assert torch.rand(3, device=DEVICE).tolist() == after
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]
    assert len(set(runs[0][0])) == 9


def test_states_of_generators_are_saved_and_restored() -> None:
    states = GeneratorStates()
    numbers = torch.rand(4, device=DEVICE).tolist()
    states.give_back()
    assert torch.rand(4, device=DEVICE).tolist() == numbers
    before = GeneratorStates()
    for _ in range(2):
        GeneratorStates.seeded(3).give_back()
        numbers.extend(torch.rand(2, device=DEVICE).tolist())
    before.give_back()
    assert numbers[4:6] == numbers[6:8]


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_edits_reach_all_workers(sync: str) -> None:
    ends: list[torch.Tensor] = []

    def edit() -> None:
        model = made()
        optimizer = sgd(model)
        for iteration in range(6):
            step(model, optimizer, iteration)
        with optimizer.editing(), torch.no_grad():
            model.get_parameter("2.weight").fill_(0.25)
        ends.append(model.get_parameter("2.weight").detach().cpu())

    result = simulated(edit, sync)
    assert torch.equal(ends[0], torch.full_like(ends[0], 0.25))
    if sync == "bsp":
        assert torch.equal(state_of(result)["2.weight"], ends[0])


def test_an_evaluation_sees_the_newest_weights() -> None:
    seen: list[tuple[float, torch.device]] = []

    def evaluate() -> None:
        model = made()
        optimizer = sgd(model)
        for iteration in range(STEPS):
            step(model, optimizer, iteration)
            if worker_index() == 0 and iteration in (3, STEPS - 1):
                with paceline.evaluating(model) as snapshot, torch.no_grad():
                    loss = loss_of(snapshot, rows(100))
                    paceline.log(validation=loss)
                    seen.append((float(loss), loss.device))

    result = simulated(evaluate)
    assert {device for _, device in seen} == {DEVICE}
    assert seen[1][0] < seen[0][0] < loss_with(weights_of(made()))
    assert result.history["validation"].values[-1] == pytest.approx(seen[1][0])


def test_a_worker_that_joins_late_continues_with_the_jobs_model() -> None:
    late = cluster(3, presence={2: Presence(joins_at_s=6.5)})
    begun: dict[int, torch.Tensor] = {}

    def join() -> None:
        model = made()
        optimizer = sgd(model)
        ema = torch.optim.swa_utils.AveragedModel(model)
        paceline.track(ema=ema)
        loader = paceline.distribute(DataLoader(TensorDataset(rows(1, "cpu").repeat(8, 1)), batch_size=4))
        for _ in paceline.epochs(3):
            begun.setdefault(worker_index(), model.get_parameter("0.weight").detach().cpu().clone())
            for (x,) in loader:
                optimizer.zero_grad()
                loss_of(model, x.to(DEVICE)).backward()
                optimizer.step()
            ema.update_parameters(model)

    result = simulate(late, "asp", train_fn=join)
    assert set(result.measures.iterations) == {0, 1, 2}
    assert torch.equal(begun[0], begun[1])
    assert not torch.equal(begun[0], begun[2])
    assert loss_with(state_of(result)) < loss_with(weights_of(made()))


def test_hyper_parameters_are_translated() -> None:
    translated, raw = (simulated(train, "asp", hyperparameters=each) for each in ("translated", "raw"))
    first, second = loss_with(state_of(translated)), loss_with(state_of(raw))
    print(f"translated {first:.3f}, raw {second:.3f}")
    assert first != second
    assert max(first, second) < loss_with(weights_of(made()))


def grow() -> None:
    model = made()
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    optimizer = DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), model=model)
    for iteration in range(STEPS):
        if iteration == STEPS // 2:
            model[2].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})
        optimizer.zero_grad()
        loss_of(model, own_rows(iteration)).backward()
        optimizer.step()
    grown.append(weights_of(model))


grown: list[dict[str, torch.Tensor]] = []


@pytest.mark.parametrize("early", [False, True])
def test_a_group_that_is_added_later_is_trained(early: bool) -> None:
    grown.clear()
    grow()
    with copying_early(early):
        result = simulated(grow)
    assert_equal(state_of(result), grown[0], f"a group that is added later, early={early}")


def test_batch_norm_statistics_are_pooled() -> None:
    own: list[dict[str, torch.Tensor]] = []

    def normalize() -> None:
        model = nn.Sequential(nn.BatchNorm1d(6), made()).to(DEVICE)
        optimizer = sgd(model)
        for iteration in range(6):
            step(model, optimizer, iteration)
        if worker_index() == 0:
            with paceline.evaluating(model) as snapshot:
                assert snapshot.get_buffer("0.running_mean").device == DEVICE
        own.append(weights_of(model))

    result = simulated(normalize)
    mean = torch.stack([each["0.running_mean"] for each in own]).mean(dim=0)
    off = float((state_of(result)["0.running_mean"] - mean).abs().max())
    print(f"pooled means: {off:.1e} off")
    assert off < 1e-6
    assert not torch.equal(own[0]["0.running_mean"], own[1]["0.running_mean"])


def test_states_and_checkpoints_are_on_the_device(tmp_path: Path) -> None:
    def save() -> None:
        model = made()
        optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
        for iteration in range(4):
            step(model, optimizer, iteration)
        state = optimizer.state_dict()["state"]
        assert {entry["exp_avg"].device for entry in state.values()} == {DEVICE}
        assert float(state[0]["exp_avg"].abs().max()) > 0
        if worker_index() == 0:
            checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            paceline.save(checkpoint, tmp_path / "checkpoint.pt")

    result = simulated(save)
    loaded = torch.load(tmp_path / "checkpoint.pt", map_location="cpu", weights_only=True)
    assert {tensor.device.type for tensor in loaded["model"].values()} == {"cpu"}
    assert loaded["model"].keys() == state_of(result).keys()
    for where in ("cpu", DEVICE):
        there = torch.load(tmp_path / "checkpoint.pt", map_location=where, weights_only=True)

        def resume(there: dict[str, Any] = there) -> None:
            model = made()
            optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
            model.load_state_dict(there["model"])
            optimizer.load_state_dict(there["optimizer"])
            for iteration in range(4, 8):
                step(model, optimizer, iteration)
            assert float(optimizer.state_dict()["state"][0]["step"]) == 8

        def whole() -> None:
            model = made()
            optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
            for iteration in range(8):
                step(model, optimizer, iteration)

        assert_equal(state_of(simulated(resume)), state_of(simulated(whole)), f"resumed from {where}")


def test_a_model_may_be_saved_from_the_cpu_after_training_began() -> None:
    def visit(*, visits: bool) -> None:
        model = made()
        optimizer = sgd(model)
        for iteration in range(STEPS):
            step(model, optimizer, iteration)
            if visits and iteration % 5 == 1:
                kept = copy.deepcopy(model.cpu().state_dict())
                assert kept["0.weight"].device.type == "cpu"
                model.to(DEVICE)

    there, back = (simulated(partial(visit, visits=visits)) for visits in (False, True))
    assert_equal(state_of(back), state_of(there), "saved from the CPU")


def test_values_that_are_logged_are_read_at_the_next_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call does not wait for the device: nothing reads the memory of the device."""
    reads: list[str] = []
    item = torch.Tensor.item

    def counting(tensor: torch.Tensor) -> object:
        if tensor.device == DEVICE:
            reads.append(phase[0])
        return item(tensor)

    phase = ["outside"]
    monkeypatch.setattr(torch.Tensor, "item", counting)

    def log() -> None:
        model = made()
        optimizer = sgd(model)
        for iteration in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, own_rows(iteration))
            loss.backward()
            phase[0] = "logging"
            paceline.log(loss=loss)
            phase[0] = "outside"
            optimizer.step()

    result = simulate(cluster(1), "bsp", train_fn=log)
    assert "logging" not in reads
    assert len(reads) >= 4
    assert result.measures.iterations == {0: 4}


@pytest.mark.skipif(SANITIZED, reason="torch compiles nothing while CUDA's sanitizer observes its operations")
def test_a_compiled_model_trains() -> None:
    """The graph stays valid: it is compiled once. Operators run on the device one by one."""
    compiled: list[int] = []

    def count(module: Any, inputs: Any) -> Any:
        compiled.append(1)
        return module.forward

    def fit(*, compiles: bool) -> None:
        model = made()
        called = torch.compile(model, backend=count) if compiles else model
        optimizer = sgd(model)
        for iteration in range(STEPS):
            optimizer.zero_grad()
            loss_of(called, own_rows(iteration)).backward()
            optimizer.step()

    expected = simulated(lambda: fit(compiles=False))
    found = simulated(lambda: fit(compiles=True))
    assert len(compiled) == 2  # once for each worker
    assert_equal(state_of(found), state_of(expected), "compiled")


def test_parameters_are_views_of_the_stagers_vectors_on_the_device() -> None:
    devices: set[torch.device] = set()

    def look() -> None:
        model = made()
        optimizer = sgd(model)
        step(model, optimizer, 0)
        session = current()
        assert session is not None
        assert training_of(session) is not None
        devices.update(vector.device for vector in session.weights.values())
        devices.update(p.device for p in model.parameters())
        assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 1

    simulated(look)
    assert devices == {DEVICE, torch.device("cpu")}

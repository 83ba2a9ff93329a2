"""Workers differ where they should, in their random numbers, and are told if they differ in nothing."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline
from paceline import Cluster, simulate
from paceline.core.agreement import HASHED_ITERATIONS, Fingerprints
from paceline.core.messages import GradientHashed

CLUSTER = Cluster([0.1, 0.1, 0.1])


class Noisy(Dataset[torch.Tensor]):
    """Items with noise that is drawn when they are loaded."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1)


def seeded() -> nn.Module:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    return nn.Linear(1, 1)


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).mean().backward()
    optimizer.step()


# -- random numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["prepare", "distribute"])
def test_each_worker_draws_its_own_numbers_and_worker_0_those_of_the_script_alone(by: str) -> None:
    numbers: dict[int, tuple[float, float, float]] = {}

    def train() -> None:
        model = seeded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if by == "prepare":
            model, distributed = paceline.prepare(model, optimizer)
        else:
            paceline.distribute(DataLoader(Noisy(), batch_size=2))
            distributed = paceline.DistributedOptimizer(optimizer)
        numbers[paceline.worker_index()] = drawn()
        step(model, distributed, torch.ones(1, 1))

    train()
    alone = numbers[0]
    simulate(CLUSTER, "bsp", train_fn=train, iterations=1)
    assert numbers[0] == alone
    assert all(len({each[i] for each in numbers.values()}) == 3 for i in range(3))
    first = dict(numbers)
    simulate(CLUSTER, "bsp", train_fn=train, iterations=1)
    assert numbers == first


def test_augmentation_differs_and_the_order_stays_common() -> None:
    loaded: dict[int, list[float]] = {}

    def train() -> None:
        model = seeded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(Noisy(), batch_size=2, shuffle=True)
        model, distributed, part = paceline.prepare(model, optimizer, loader)
        mine = loaded[paceline.worker_index()] = []
        for batch in part:
            mine += batch.flatten().tolist()
            step(model, distributed, batch)

    simulate(CLUSTER, "bsp", train_fn=train)
    values = [value for each in loaded.values() for value in each]
    assert len(values) == len(set(values)) == 12


def test_the_processes_of_a_loader_have_their_own_seeds_in_each_worker_and_epoch() -> None:
    seeds: dict[int, list[int]] = {}

    def train() -> None:
        model = seeded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(Noisy(), batch_size=2, generator=torch.Generator().manual_seed(1))
        model, distributed, part = paceline.prepare(model, optimizer, loader)
        mine = seeds[paceline.worker_index()] = []
        for _ in range(2):
            for batch in part:
                step(model, distributed, batch)
            # torch draws the seeds of the loader's processes from this generator
            mine.append(part._loaded.generator.initial_seed())  # type: ignore[attr-defined]

    simulate(CLUSTER, "bsp", train_fn=train)
    assert len({*seeds[1], *seeds[2]}) == 4


# -- identical workers ------------------------------------------------------------------------------------


def train_on(data: int) -> None:
    """Train on data that is drawn from this seed, without distributing it."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(data)
    for _ in range(4):
        step(model, optimizer, torch.rand(4, 2))


SAME = "compute the same gradients"


@pytest.mark.parametrize(
    ("sync", "when"), [("bsp", "each of their first 3 iterations"), ("asp", "first iteration")]
)
def test_identical_workers_are_told(sync: str, when: str, caplog: pytest.LogCaptureFixture) -> None:
    simulate(CLUSTER, sync, train_fn=lambda: train_on(7))
    [message] = [record.getMessage() for record in caplog.records if SAME in record.getMessage()]
    assert message.startswith(
        f"workers 0, 1, 2 {SAME} in {'their ' * (sync == 'asp')}{when}: they train on the same"
    )
    assert "paceline.prepare" in message


def test_some_identical_workers_are_told(caplog: pytest.LogCaptureFixture) -> None:
    simulate(CLUSTER, "bsp", train_fn=lambda: train_on(min(paceline.worker_index(), 1)))
    assert f"workers 1, 2 {SAME}" in caplog.text


def test_workers_with_data_of_their_own_are_not(caplog: pytest.LogCaptureFixture) -> None:
    simulate(CLUSTER, "bsp", train_fn=lambda: train_on(paceline.worker_index()))
    assert SAME not in caplog.text


def test_workers_with_a_distributed_loader_are_not(caplog: pytest.LogCaptureFixture) -> None:
    def train() -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        constant = DataLoader(TensorDataset(torch.ones(24, 1)), batch_size=2)
        model, distributed, loader = paceline.prepare(model, optimizer, constant)
        for (batch,) in loader:
            step(model, distributed, batch)

    simulate(CLUSTER, "bsp", train_fn=train)
    assert SAME not in caplog.text


def test_identical_workers_of_a_live_run_are_told(
    run_on_threads: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        run_on_threads(full_batch, workers=2, sync="bsp")  # type: ignore[operator]
    assert f"workers 0, 1 {SAME}" in caplog.text


def full_batch() -> None:
    model = nn.Linear(2, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    for _ in range(4):
        step(model, optimizer, torch.ones(3, 2))


def take(
    fingerprints: Fingerprints, worker: int, hashes: str, live: set[int], *, lockstep: bool = True
) -> str:
    said = [
        fingerprints.take(worker, GradientHashed(i, each.strip("-")), live, lockstep=lockstep)
        for i, each in enumerate(hashes)
    ]
    return "".join(said)


def test_nothing_is_said_before_every_live_worker_has_reported() -> None:
    fingerprints = Fingerprints()
    assert take(fingerprints, 0, "abc", {0, 1, 2}) == ""
    assert take(fingerprints, 1, "abc", {0, 1, 2}) == ""
    assert take(fingerprints, 2, "abx", {0, 1, 2}).startswith("workers 0, 1 compute")
    assert take(fingerprints, 3, "abc", {0, 1, 3}) == "", "it is said once"


def test_lost_workers_are_not_awaited() -> None:
    fingerprints = Fingerprints()
    take(fingerprints, 0, "abc", {0, 1, 2})
    assert take(fingerprints, 1, "abc", {0, 1}) != ""


def test_workers_that_have_finished_are_compared() -> None:
    """A fast worker may finish before a slow one has sent its last hash."""
    fingerprints = Fingerprints()
    take(fingerprints, 0, "abc", {0, 1})
    assert take(fingerprints, 1, "abc", {1}).startswith("workers 0, 1 compute")


@pytest.mark.parametrize("hashes", ["---", "ab-"])
def test_gradients_of_zeros_are_not_compared(hashes: str) -> None:
    fingerprints = Fingerprints()
    take(fingerprints, 0, hashes, {0, 1})
    assert take(fingerprints, 1, hashes, {0, 1}) == ""


def test_hashes_out_of_order_are_ignored() -> None:
    fingerprints = Fingerprints()
    for iteration in (1, 2, 3, 10**6):
        assert fingerprints.take(0, GradientHashed(iteration, "a"), {0}, lockstep=True) == ""
    assert take(fingerprints, 0, "a" * HASHED_ITERATIONS, {0}) == "", "a worker alone"

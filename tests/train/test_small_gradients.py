"""Small gradients stay where autograd has put them until the step copies all of them at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.shard.device_queue import _BlockingQueue
from paceline.shard.vectors import bits
from paceline.sim import Cluster, simulate
from paceline.train import gradients, training
from paceline.train.weights import Copying
from tests.support.marks import thorough

pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")

CLUSTER = Cluster(compute_s=[1.0, 1.3])


def calls_of_a_step(tensors: int) -> int:
    """Return the number of Python calls of the front end in an iteration of a model with this number of tensors."""
    counted = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal counted
        counted += event == "call" and "/paceline/frontend/" in frame.f_code.co_filename

    def train() -> None:
        weights = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(tensors))
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(weights.parameters(), lr=0.1))
        for step in range(6):  # copies of the weights are kept for the first steps
            optimizer.zero_grad()
            loss = torch.stack([*weights]).sum()
            if step == 5:
                sys.setprofile(count)
            loss.backward()
            optimizer.step()
            sys.setprofile(None)

    simulate(Cluster(compute_s=[1.0]), "bsp", train_fn=train)
    return counted


def test_only_the_hook_is_called_for_each_tensor() -> None:
    assert calls_of_a_step(110) - calls_of_a_step(10) <= 100


class Mixed(nn.Module):
    """A large tensor, small ones, one of which is unused in every second iteration, and one with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(256, 257, bias=False)
        self.small = nn.Linear(257, 3)
        self.sometimes = nn.Linear(3, 3)
        self.rows = nn.Embedding(9, 256, sparse=True)
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, items: torch.Tensor, *, sometimes: bool) -> torch.Tensor:
        y: torch.Tensor = self.small(self.large(self.rows(items)))
        return (self.sometimes(y) if sometimes else y).square().mean()


def plain(model: Mixed, optimizer: torch.optim.Optimizer, items: torch.Tensor, number: int) -> None:
    optimizer.zero_grad()
    model(items, sometimes=number % 2 == 0).backward()


def zeros(model: Mixed, optimizer: torch.optim.Optimizer, items: torch.Tensor, number: int) -> None:
    for each in (*model.small.parameters(), *model.sometimes.parameters(), *model.large.parameters()):
        if each.grad is not None:
            each.grad.zero_()
    model.rows.weight.grad = None
    model(items, sometimes=number % 2 == 0).backward()


def accumulated(model: Mixed, optimizer: torch.optim.Optimizer, items: torch.Tensor, number: int) -> None:
    plain(model, optimizer, items, number)
    model(items + 1, sometimes=number % 3 == 0).backward()


def dropped(model: Mixed, optimizer: torch.optim.Optimizer, items: torch.Tensor, number: int) -> None:
    plain(model, optimizer, items, number + 1)
    plain(model, optimizer, items, number)


def clipped(model: Mixed, optimizer: torch.optim.Optimizer, items: torch.Tensor, number: int) -> None:
    plain(model, optimizer, items, number)
    nn.utils.clip_grad_value_([*model.large.parameters(), *model.small.parameters()], 1e-3)


def penalized(model: Mixed, optimizer: torch.optim.Optimizer, items: torch.Tensor, number: int) -> None:
    optimizer.zero_grad()
    model(items, sometimes=True).backward(create_graph=True)
    gradient = model.small.weight.grad
    assert gradient is not None
    gradient.square().sum().backward()


def in_turn(model: Mixed, optimizer: torch.optim.Optimizer, items: torch.Tensor, number: int) -> None:
    (penalized if number % 2 else plain)(model, optimizer, items, number)


def replaced(model: Mixed, optimizer: torch.optim.Optimizer, items: torch.Tensor, number: int) -> None:
    plain(model, optimizer, items, number)
    model.small.bias.grad = torch.full((3,), 0.25)
    model.never.grad = torch.ones(2) if number % 2 else None


Way = Callable[[Mixed, torch.optim.Optimizer, torch.Tensor, int], None]
WAYS: list[Way] = [plain, zeros, accumulated, dropped, clipped, in_turn, replaced]


def outcome_of(way: Way) -> list[Any]:
    """Return the bits of the weights of each worker after each step."""
    seen: dict[int, list[Any]] = {}

    def train() -> None:
        records = seen[paceline.worker_index()] = []
        with torch.random.fork_rng():
            torch.manual_seed(3)
            model = Mixed()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        for number in range(7):
            way(model, optimizer, torch.arange(4) + number % 4 + paceline.worker_index(), number)
            optimizer.step()
            records.append([bits(each).numpy().tobytes() for each in model.parameters()])

    simulate(CLUSTER, "asp", train_fn=train, guard="off")
    return [seen[0], seen[1]]


@cache
def expected_of(way: Way) -> list[Any]:
    """Return the outcome on the CPU, with the usual limit, at which two tests look."""
    return outcome_of(way)


@pytest.mark.parametrize("way", WAYS)
def test_it_makes_no_difference_which_gradients_are_large(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = expected_of(way)
    assert any(before != after for before, after in zip(expected[0], expected[0][1:], strict=False))
    for size_bytes in (0, sys.maxsize):
        monkeypatch.setattr(gradients, "LARGE_BYTES", size_bytes)
        assert outcome_of(way) == expected


class _Queue(_BlockingQueue):
    def wait(self) -> None:
        """The CPU computes at once."""


@pytest.mark.parametrize("way", [plain, accumulated, in_turn, *thorough(zeros, dropped, clipped, replaced)])
def test_a_device_without_streams_computes_what_the_cpu_computes(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = expected_of(way)
    monkeypatch.setattr(
        training,
        "stager_of",
        lambda layout, session, device: Copying(layout, session, device, _Queue(device)),
    )
    assert outcome_of(way) == expected


def test_a_small_gradient_stays_where_it_is() -> None:
    def train() -> None:
        model = Mixed()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for number in range(3):
            plain(model, optimizer, torch.arange(4), number)
            before = model.small.weight.grad
            optimizer.step()
            assert model.small.weight.grad is before

    simulate(CLUSTER, "bsp", train_fn=train)


def test_a_gradient_with_a_graph_is_scaled_before_it_is_pushed() -> None:
    found: list[list[torch.Tensor]] = []

    def train() -> None:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            model = nn.Linear(3, 3).double()
        optimizer = paceline.DistributedOptimizer(paceline.LARS(model.parameters(), lr=0.5), model=model)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3, dtype=torch.float64)).square().mean().backward(create_graph=True)
            optimizer.step()
        found.append([each.detach().clone() for each in model.parameters()])

    simulate(Cluster(compute_s=[1.0]), "bsp", train_fn=train)
    train()  # outside a run
    torch.testing.assert_close(*found)


def test_a_gradient_of_another_shape_is_refused() -> None:
    def train() -> None:
        model = Mixed()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        plain(model, optimizer, torch.arange(4), 0)
        assert model.small.bias.grad is not None
        model.small.bias.grad.data = torch.ones(1)  # copy_() would broadcast it
        with pytest.raises(paceline.errors.WeightsChangedError, match=r"small.bias.*shape \[3\] to \[1\]"):
            optimizer.step()

    simulate(Cluster(compute_s=[1.0]), "bsp", train_fn=train)

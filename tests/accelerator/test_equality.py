"""Under bsp, two workers train what one process trains on the joint batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint

import paceline
from paceline import DistributedOptimizer, worker_index

from .device import (
    DEVICE,
    State,
    assert_equal,
    copying_early,
    loss_of,
    made,
    own_rows,
    rows,
    simulated,
    weights_of,
)

STEPS = 20
LARGE = 1e35  # multiplies a loss whose scaled gradients then overflow

Fit = Callable[[], State]


def wrapped(optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> DistributedOptimizer:
    return DistributedOptimizer(optimizer, model=model)


def plain(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Fit:
    def fit() -> State:
        model = made()
        optimizer = wrapped(make(model.parameters(), **options), model)
        for iteration in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, own_rows(iteration)).backward()
            optimizer.step()
        return weights_of(model)

    return fit


def clipped() -> State:
    model = made()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), model)
    for iteration in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, own_rows(iteration)).backward()
        assert float(optimizer.clip_grad_norm(0.05)) > 0.05
        optimizer.step()
    return weights_of(model)


def clipped_by_torch() -> State:
    """Each worker clips its own gradient. All have the same rows, so that one process has the same gradient."""
    model = made()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.3), model)
    for iteration in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rows(iteration)).backward()
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)) > 0.01
        nn.utils.clip_grad_value_(model.parameters(), 0.005)
        optimizer.step()
    return weights_of(model)


def accumulated() -> State:
    model = made()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for iteration in range(STEPS):
        optimizer.zero_grad()
        for part in own_rows(iteration).chunk(3):
            (loss_of(model, part) / 3).backward()
        optimizer.step()
    return weights_of(model)


def of_two_optimizers() -> State:
    models = nn.ModuleList([made(), made(seed=6)])
    optimizers = [
        wrapped(torch.optim.Adam(models[0].parameters(), lr=0.01), models),
        wrapped(torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.5), models),
    ]
    for iteration in range(STEPS // 2):
        for index, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            loss_of(lambda x: models[1](models[0](x)), own_rows(2 * iteration + index)).backward()
            optimizer.step()
    return weights_of(models)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner, outer = made(), made(seed=6)
        outer[0].weight = inner[0].weight
        self.inner, self.outer = inner, outer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(self.inner(x))
        return out


def of_tied_weights() -> State:
    model = Tied()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for iteration in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, own_rows(iteration)).backward()
        optimizer.step()
    assert model.outer[0].weight is model.inner[0].weight
    return weights_of(model)


def scaled(*, unscales: bool) -> Fit:
    """In one step, the gradients of all workers overflow."""

    def fit() -> State:
        model = made()
        optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        scaler = GradScaler(DEVICE.type, init_scale=2.0**12, growth_interval=1000)
        for iteration in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, own_rows(iteration))
            scaler.scale(loss * LARGE if iteration == 7 else loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (before / 2 if iteration == 7 else before)
        return weights_of(model)

    return fit


def with_checkpointed_activations() -> State:
    model = made()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for iteration in range(STEPS):
        optimizer.zero_grad()
        loss_of(lambda x: checkpoint(model, x, use_reentrant=False), own_rows(iteration)).backward()
        optimizer.step()
    return weights_of(model)


def in_closures() -> State:
    model = made()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for iteration in range(STEPS):

        def closure(iteration: int = iteration) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, own_rows(iteration))
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        paceline.log(loss=loss)
    return weights_of(model)


FITS: dict[str, Fit] = {
    "SGD": plain(torch.optim.SGD, lr=0.1),
    "momentum": plain(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": plain(torch.optim.Adam, lr=0.01),
    "AdamW": plain(torch.optim.AdamW, lr=0.01),
    "clipping by the optimizer": clipped,
    "clipping by torch": clipped_by_torch,
    "accumulation": accumulated,
    "two optimizers": of_two_optimizers,
    "tied weights": of_tied_weights,
    "GradScaler": scaled(unscales=False),
    "GradScaler with unscale_": scaled(unscales=True),
    "activation checkpointing": with_checkpointed_activations,
    "closures": in_closures,
}


def note(seen: list[State], fit: Fit) -> None:
    seen.append(fit())


@pytest.mark.parametrize("name", FITS)
def test_two_workers_equal_one_process(name: str) -> None:
    expected = FITS[name]()
    for early in (False, True):
        seen: list[State] = []
        with copying_early(early) as queues:
            result = simulated(partial(note, seen, FITS[name]))
        assert result.state_dict is not None
        assert len(seen) == 2
        assert len(queues) == (2 if early else 0) or name == "two optimizers"
        what = f"{name}, {'early' if early else 'the usual'} copies"
        assert_equal(dict(result.state_dict), expected, what)
        for state in seen:
            assert_equal(state, expected, f"{what}, as a worker sees it")


def test_nobody_waits_for_a_worker_whose_gradient_overflows() -> None:
    """The other worker's gradient is applied alone, and the scale of the first one is halved."""
    scales: dict[int, float] = {}

    def train(overflows: bool = True) -> None:
        model = made()
        optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), model)
        scaler = GradScaler(DEVICE.type, init_scale=2.0**12, growth_interval=1000)
        for iteration in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, own_rows(iteration))
            planted = overflows and worker_index() == 0 and iteration == 3
            scaler.scale(loss * LARGE if planted else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        scales[worker_index()] = scaler.get_scale()

    usual = simulated(lambda: train(overflows=False))
    result = simulated(train)
    assert scales == {0: 2.0**11, 1: 2.0**12}
    assert result.time_s == usual.time_s
    assert result.measures.iterations == {0: STEPS, 1: STEPS}
    assert result.state_dict is not None
    assert all(math.isfinite(float(each.sum())) for each in result.state_dict.values())


@pytest.mark.parametrize("early", [False, True])
def test_a_worker_on_the_cpu_and_one_on_the_device_equal_two_on_the_cpu(early: bool) -> None:
    def train(*devices: torch.device | str) -> None:
        device = devices[worker_index()]
        model = made(device)
        optimizer = wrapped(torch.optim.Adam(model.parameters(), lr=0.01), model)
        for iteration in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, own_rows(iteration, device)).backward()
            optimizer.step()

    expected = simulated(lambda: train("cpu", "cpu")).state_dict
    with copying_early(early):
        found = simulated(lambda: train("cpu", DEVICE)).state_dict
    assert expected is not None
    assert found is not None
    assert_equal(dict(found), dict(expected), f"mixed devices, early={early}")

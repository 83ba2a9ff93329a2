"""A computation that is aborted midway leaves no trace, and is restarted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from paceline.train.hooks import Restartable
from paceline.train.session import Session, install


class Ordering:
    """The part of a session that a restart needs. It orders one restart when it is asked for the n-th time."""

    def __init__(self, at: int) -> None:
        self.asked = 0
        self.waited = 0  # how often the host has waited for the device
        self.waited_before: list[int] = []  # the number of these waits before each question
        self.at = at
        self.dropped = 0

    def restart_ordered(self) -> bool:
        self.asked += 1
        self.waited_before.append(self.waited)
        return not self.dropped and self.asked >= self.at

    def keep_close(self) -> None:
        self.waited += 1

    def hold_back(self, *, droppable: bool) -> bool:
        return not self.restart_ordered()

    def pull_again(self) -> None:
        self.dropped += 1


class Net(nn.Module):
    """A model with batch normalization, dropout, and an activation that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.active = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.drop(self.active(self.norm(self.first(x)))))
        return out


def made() -> Net:
    torch.manual_seed(3)
    return Net()


BATCH = torch.linspace(-1, 1, 24).reshape(6, 4)
HOOKS = (
    1 + 5 + 6
)  # calls of restart_ordered() in one computation: the net's forward, five modules' forwards, six gradients


def restarting(model: Net, session: Ordering) -> Restartable:
    parameters = list(model.parameters())
    return Restartable(model, parameters, cast(Session, session), session.keep_close, lambda: None)


def compute(model: Net, session: Ordering, body: Callable[[Net], Any] | None = None) -> Any:
    """Run one closure under a session. The default body returns the loss and some random numbers."""

    def usual(net: Net) -> list[float]:
        for parameter in net.parameters():
            parameter.grad = None
        loss = net(BATCH).square().mean()
        loss.backward()
        return [loss.item(), random.random(), float(np.random.rand())]

    restartable = restarting(model, session)
    random.seed(1)
    np.random.seed(1)  # the global generator is what scripts use
    torch.manual_seed(1)
    install(cast(Session, session), for_thread=True)
    try:
        return restartable.run(lambda: (body or usual)(model))
    finally:
        install(None, for_thread=True)


def everything(model: Net) -> list[torch.Tensor]:
    return [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("at", range(1, HOOKS + 2))
def test_dropped_anywhere_a_computation_leaves_buffers_generators_and_gradients_as_if_it_had_not_been(
    at: int,
) -> None:
    plain, dropped = made(), made()
    session = Ordering(at)

    expected = compute(plain, Ordering(10**9))
    result = compute(dropped, session)

    assert session.dropped == 1
    assert result == expected
    for one, other in zip(everything(dropped), everything(plain), strict=True):
        assert torch.equal(one, other)
    assert dropped.norm.num_batches_tracked == 1


def test_a_computation_is_dropped_between_two_layers_and_not_after_the_last_one() -> None:
    begun = []

    def body(net: Net) -> None:
        begun.append("closure")
        net.last(net.first(BATCH).detach())
        begun.append("forward")

    compute(made(), Ordering(2), body)
    assert begun == ["closure", "closure", "forward"]


@pytest.mark.parametrize("at", [1, 3, 8])
def test_gradients_that_are_accumulated_into_are_given_back(at: int) -> None:
    def accumulate(net: Net) -> None:
        net.norm.eval()
        net.drop.eval()
        net(BATCH).square().mean().backward()

    plain, dropped = made(), made()
    for model in (plain, dropped):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    compute(plain, Ordering(10**9), accumulate)
    session = Ordering(at)
    compute(dropped, session, accumulate)
    assert session.dropped == 1
    for one, other in zip(everything(dropped), everything(plain), strict=True):
        assert torch.equal(one, other)


def test_without_a_layer_to_copy_them_before_accumulated_gradients_are_waited_for() -> None:
    """A closure that uses parameters without any module's forward is aborted at its end, not in the middle."""
    ended = []
    model = made()
    weight = model.first.weight
    weight.grad = torch.zeros_like(weight)

    def body(net: Net) -> None:
        (weight.sum() * 2).backward()
        ended.append(weight.grad)

    compute(model, Ordering(1), body)
    assert len(ended) == 2


def test_a_handler_of_the_scripts_own_does_not_swallow_it() -> None:
    swallowed = []

    def body(net: Net) -> str:
        try:
            net(BATCH)
        except Exception as error:
            swallowed.append(error)
        return "done"

    session = Ordering(2)
    assert compute(made(), session, body) == "done"
    assert session.dropped == 1
    assert swallowed == []


def test_a_closure_that_catches_everything_is_repeated_when_it_has_ended() -> None:
    ended = []

    def body(net: Net) -> None:
        try:
            net(BATCH)
        except BaseException:
            ended.append("caught")
        else:
            ended.append("whole")

    session = Ordering(2)
    compute(made(), session, body)
    assert session.dropped == 1
    assert ended == ["caught", "whole"]


def test_what_a_closure_raises_is_raised_and_the_next_one_runs() -> None:
    model = made()
    session = Ordering(10**9)
    restartable = restarting(model, session)
    with pytest.raises(ZeroDivisionError):
        restartable.run(lambda: 1 / 0)
    assert restartable.run(lambda: "well") == "well"


def test_the_host_waits_for_the_device_before_each_question() -> None:
    """Otherwise, a device would be given the whole computation before there can be an order."""
    session = Ordering(10**9)
    compute(made(), session)
    assert session.waited_before == [*range(1, HOOKS + 1), HOOKS]  # the last question is that of `hold_back`


def test_between_closures_nobody_is_asked() -> None:
    model, session = made(), Ordering(1)
    restarting(model, session)
    model(BATCH).sum().backward()
    assert session.asked == 0


def test_a_buffer_that_was_replaced_is_put_back() -> None:
    model = made()
    before = model.norm.running_mean

    def body(net: Net) -> None:
        net.norm.running_mean = torch.full((8,), 7.0)
        net.first(BATCH)
        net.norm.running_mean = before

    session = Ordering(1)
    compute(model, session, body)
    assert session.dropped == 1
    assert model.norm.running_mean is before

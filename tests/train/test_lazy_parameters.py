"""Models with lazy modules, whose parameters have no shape before the first forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import paceline
from paceline import DistributedOptimizer
from paceline.errors import UsageError

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

INPUTS = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)


class Lazy(nn.LazyLinear):
    """A lazy layer whose initial weights depend on the worker, but not on torch's generator."""

    cls_to_become = nn.Linear

    def reset_parameters(self) -> None:
        if not self.has_uninitialized_params():
            fill(self)


def fill(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.1 * (1 + paceline.worker_index()))


def make(*, lazy: bool = True) -> nn.Sequential:
    def layer(inputs: int, outputs: int) -> nn.Module:
        return Lazy(outputs) if lazy else nn.Linear(inputs, outputs)

    norm = nn.LazyBatchNorm1d() if lazy else nn.BatchNorm1d(4)
    model = nn.Sequential(layer(3, 4), norm, nn.Tanh(), layer(4, 1)).double()
    if not lazy:
        fill(model[0])
        fill(model[3])
    return model


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, closure: bool, steps: int = 4) -> None:
    def compute() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(INPUTS).square().sum() - model(INPUTS * 2).mean()
        loss.backward()
        return loss

    for _ in range(steps):
        if closure:
            optimizer.step(compute)  # type: ignore[arg-type]
        else:
            compute()
            optimizer.step()


def trained_alone() -> dict[str, torch.Tensor]:
    model = make(lazy=False)
    train(model, sgd(model), closure=True)
    return model.state_dict()


@pytest.mark.parametrize("sync", ["bsp", "spec-sync"])
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_training_begins_with_the_first_forward_pass_of_lazy_modules(
    run_on_threads: RunOnThreads, sync: str, closure: bool, workers: int
) -> None:
    def run() -> None:
        model = make()
        train(model, DistributedOptimizer(sgd(model), model=model), closure=closure)

    outcome = run_on_threads(run, workers=workers, sync=sync)
    if workers == 1 or (sync == "bsp" and closure):
        for name, expected in trained_alone().items():
            torch.testing.assert_close(outcome.state_dict[name], expected, rtol=0.0, atol=1e-12)


def test_a_step_before_the_forward_pass_says_what_to_do(run_on_threads: RunOnThreads) -> None:
    def run() -> None:
        model = make()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        with pytest.raises(UsageError, match=r"^Parameter '0\.weight' has no shape yet.*Run a forward pass"):
            optimizer.step()
        with torch.no_grad():
            model.eval()(INPUTS)
        train(model.train(), optimizer, closure=False)

    run_on_threads(run, workers=2)


def test_an_optimizer_whose_lazy_model_has_not_run_begins_later(run_on_threads: RunOnThreads) -> None:
    def run() -> None:
        first, second = make(lazy=False), make()
        optimizer, later = (DistributedOptimizer(sgd(model), model=model) for model in (first, second))
        train(first, optimizer, closure=True)
        train(second, later, closure=True)

    state = run_on_threads(run, workers=2).state_dict
    expected = trained_alone()
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, expected[name.removeprefix("model1.")], rtol=0.0, atol=1e-12)

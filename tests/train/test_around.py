"""Optimizers around optimizers, such as SAM and Lookahead, are refused. What is advised has the same result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paceline import DistributedOptimizer, simulate, worker_count, worker_index
from paceline.errors import ConfigurationError, RunFailedError
from paceline.sim import Cluster
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

Train = Callable[[], list[torch.Tensor]]
STEPS, BATCH = 16, 16
RADIUS, EVERY, TOWARDS, DECAY = 0.05, 4, 0.5, 0.9
WORKERS_AND_SERVERS = [(1, 1), (2, 2), *thorough((4, 5))]


class Around(torch.optim.Optimizer):
    """An optimizer that is built around another one, as many packages have them."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


class SAM(Around):
    """Sharpness-aware minimization (Foret et al., 2021): the gradient is computed up the hill of a part of a batch.

    As in data-parallel implementations, each part of the batch climbs by its own gradient (Section 4.1 there).
    """

    def step(self, losses: Any = ()) -> Any:
        total = [torch.zeros_like(parameter) for parameter in self.parameters]
        for loss in losses:
            climb = climb_of(self.parameters, loss)
            with torch.no_grad():
                before = [parameter.clone() for parameter in self.parameters]
                for parameter, each in zip(self.parameters, climb, strict=True):
                    parameter.add_(each)
            for each, gradient in zip(total, torch.autograd.grad(loss(), self.parameters), strict=True):
                each.add_(gradient, alpha=1 / len(losses))
            with torch.no_grad():
                for parameter, value in zip(self.parameters, before, strict=True):
                    parameter.copy_(value)
        for parameter, gradient in zip(self.parameters, total, strict=True):
            parameter.grad = gradient
        self.base.step()


class Lookahead(Around):
    """Lookahead (Zhang et al., 2019): after some steps, slow weights move towards the fast ones and replace them."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base)
        self.slow = [parameter.detach().clone() for parameter in self.parameters]
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.base.step()
        self.count += 1
        if self.count % EVERY == 0:
            for parameter, slow in zip(self.parameters, self.slow, strict=True):
                slow.lerp_(parameter, TOWARDS)
                parameter.copy_(slow)


class EMA(Around):
    """Keeps an exponential moving average of the weights."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base)
        self.averages = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.base.step()
        for average, parameter in zip(self.averages, self.parameters, strict=True):
            average.lerp_(parameter, 1 - DECAY)


def climb_of(parameters: Sequence[torch.Tensor], loss: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    gradients = torch.autograd.grad(loss(), parameters)
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return [gradient * (RADIUS / norm) for gradient in gradients]


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def losses_of(model: nn.Module, step: int, parts: int) -> list[Callable[[], torch.Tensor]]:
    """Return the losses of the parts of a batch."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (BATCH,), generator=generator)
    pairs = zip(x.chunk(parts), y.chunk(parts), strict=True)
    return [lambda x=x, y=y: nn.functional.cross_entropy(model(x), y) for x, y in pairs]  # type: ignore[misc]


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def base_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def alone(kind: type[Around], parts: int) -> list[torch.Tensor]:
    """Train in one process with an optimizer around another one."""
    model = network()
    optimizer: Any = kind(base_of(model))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.base, 0.95)
    for step in range(STEPS):
        losses = losses_of(model, step, parts)
        optimizer.zero_grad()
        if kind is SAM:
            optimizer.step(losses)
        else:
            torch.stack([loss() for loss in losses]).mean().backward()
            optimizer.step()
        scheduler.step()
    return [average.clone() for average in optimizer.averages] if kind is EMA else weights_of(model)


def by_hand(kind: type[Around]) -> list[torch.Tensor]:
    """Train as the error about such an optimizer advises."""
    model = network()
    optimizer = DistributedOptimizer(base_of(model), model=model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    parameters, slow = list(model.parameters()), weights_of(model)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    averaged.update_parameters(model)  # begins with the first weights
    for step in range(STEPS):
        loss = losses_of(model, step, worker_count())[worker_index()]
        optimizer.zero_grad()
        if kind is SAM:
            with optimizer.editing(private=True):
                climb = climb_of(parameters, loss)
                with torch.no_grad():
                    for parameter, each in zip(parameters, climb, strict=True):
                        parameter.add_(each)
                loss().backward()
        else:
            loss().backward()
        optimizer.step()
        scheduler.step()
        averaged.update_parameters(model)
        if kind is Lookahead and (step + 1) % EVERY == 0:
            with optimizer.editing(), torch.no_grad():
                for parameter, each in zip(parameters, slow, strict=True):
                    each.lerp_(parameter, TOWARDS)
                    parameter.copy_(each)
    return weights_of(averaged.module) if kind is EMA else weights_of(model)


def require_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-12


@pytest.mark.parametrize("kind", [SAM, Lookahead, EMA])
@pytest.mark.parametrize(("workers", "servers"), WORKERS_AND_SERVERS)
def test_what_a_script_does_by_hand_equals_the_optimizer_around_another(
    kind: type[Around], workers: int, servers: int
) -> None:
    found: list[list[torch.Tensor]] = []
    cluster = Cluster([1.0 + 0.1 * worker for worker in range(workers)], servers=servers)
    simulate(cluster, "bsp", train_fn=lambda: found.append(by_hand(kind)))
    assert len(found) == workers
    expected = alone(kind, workers)
    for each in found:
        require_close(each, expected)


@pytest.mark.parametrize("kind", [SAM, Lookahead, EMA])
def test_live_too(kind: type[Around], run_on_threads: RunOnThreads) -> None:
    run = run_on_threads(lambda: by_hand(kind), workers=2, servers=2, sync="bsp")
    expected = alone(kind, 2)
    results: dict[int, Any] = run.results
    for found in results.values():
        require_close(found, expected)


def test_an_average_may_also_be_built_around_a_distributed_optimizer() -> None:
    """It only looks at the weights between two steps."""

    def train() -> None:
        model = network()
        optimizer: Any = EMA(DistributedOptimizer(base_of(model), model=model))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.base, 0.95)
        for step in range(STEPS):
            optimizer.zero_grad()
            losses_of(model, step, worker_count())[worker_index()]().backward()
            optimizer.step()
            scheduler.step()
        require_close(optimizer.averages, alone(EMA, worker_count()))

    simulate(Cluster([1.0, 1.5], servers=2), "bsp", train_fn=train)


@pytest.mark.parametrize("kind", [SAM, Lookahead, EMA])
def test_the_error_says_what_to_do(kind: type[Around]) -> None:
    def train() -> None:
        model = network()
        DistributedOptimizer(kind(base_of(model)), model=model)

    with pytest.raises((ConfigurationError, RunFailedError)) as refused:
        simulate(Cluster([1.0]), "bsp", train_fn=train)
    for words in (
        "AdamW in the attribute 'base'",
        "Give that optimizer to DistributedOptimizer",
        "`with optimizer.editing():`, as Lookahead does",
        "`with optimizer.editing(private=True):`, as SAM does",
        "torch.optim.swa_utils.AveragedModel",
    ):
        assert words in str(refused.value)

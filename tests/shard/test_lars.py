"""LARS: by itself it follows its formula; in a run it is momentum SGD with the mean of the scaled gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from paceline import LARS, DistributedOptimizer, worker_index
from paceline.errors import ConfigurationError, NonFiniteGradientError
from paceline.shard.optimizers import make_optimizer, read_groups, server_optimizer

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

State = dict[str, torch.Tensor]
Schedule = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"lr": 2.0, "momentum": 0.0},
    "momentum": {"lr": 1.0, "weight_decay": 0.02},
    "nesterov": {"lr": 0.5, "nesterov": True, "trust_coefficient": 0.01, "eps": 0.0},
}


def template() -> nn.Module:
    """Return a model of odd sizes, so that slices cut through layers. One bias is zero, one parameter is unused."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 23), nn.Tanh(), nn.Linear(23, 2))
    nn.init.zeros_(model.get_parameter("2.bias"))
    model.register_parameter("unused", nn.Parameter(torch.ones(7)))
    return model


TEMPLATE = template()


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a model with the same weights on every thread."""
    return copy.deepcopy(TEMPLATE).to(dtype)


def backward(model: nn.Module, worker: int, iteration: int) -> None:
    generator = torch.Generator().manual_seed(1000 * worker + iteration)
    x = torch.randn(6, 5, generator=generator, dtype=torch.float64).to(next(model.parameters()).dtype)
    (model(x) - x[:, :2]).square().mean().backward()


def parameters(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def weights_of(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def relative_error(state: State, expected: State) -> float:
    assert state.keys() == expected.keys()
    ours, theirs = (torch.cat([s[n].double().reshape(-1) for n in sorted(s)]) for s in (state, expected))
    return float((ours - theirs).norm() / theirs.norm())


def by_formula(
    workers: int,
    steps: int,
    dtype: torch.dtype = torch.float64,
    rates: Callable[[int], float] | None = None,
    *,
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    trust_coefficient: float = 1e-3,
    eps: float = 1e-8,
    nesterov: bool = False,
) -> State:
    """Return the weights after momentum SGD with the mean of the workers' scaled gradients, by the formula."""
    model = net(dtype)
    velocity: dict[nn.Parameter, torch.Tensor] = {}
    for iteration in range(steps):
        means: dict[nn.Parameter, torch.Tensor] = {}
        for worker in range(workers):
            model.zero_grad()
            backward(model, worker, iteration)
            for p in model.parameters():
                if p.grad is None:
                    continue
                w, g = float(p.detach().double().norm()), float(p.grad.double().norm())
                local = trust_coefficient * w / (g + weight_decay * w + eps) if w and g else 1.0
                scaled = local * (p.grad + weight_decay * p.detach())
                means[p] = means.get(p, torch.zeros_like(scaled)) + scaled / workers
        for p, mean in means.items():
            velocity[p] = momentum * velocity[p] + mean if p in velocity else mean
            change = mean + momentum * velocity[p] if nesterov else velocity[p]
            p.data -= (rates(iteration) if rates is not None else lr) * change
    return weights_of(model)


def training(
    steps: int, dtype: torch.dtype = torch.float64, schedule: Schedule | None = None, **settings: Any
) -> Callable[[], State]:
    def train() -> State:
        model = net(dtype)
        optimizer = DistributedOptimizer(LARS(model.parameters(), **settings), model=model)
        scheduler = schedule(optimizer) if schedule is not None else None
        for iteration in range(steps):
            optimizer.zero_grad()
            backward(model, worker_index(), iteration)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        return weights_of(model)

    return train


# -- by itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_alone_it_is_its_formula(name: str) -> None:
    model = net()
    optimizer = LARS(model.parameters(), **SETTINGS[name])
    for iteration in range(12):
        model.zero_grad()
        backward(model, 0, iteration)
        before = [None if p.grad is None else p.grad.clone() for p in parameters(model)]
        optimizer.step()
        for p, gradient in zip(parameters(model), before, strict=True):
            assert p.grad is None if gradient is None else torch.equal(p.grad, gradient)  # type: ignore[arg-type]
    assert relative_error(weights_of(model), by_formula(1, 12, **SETTINGS[name])) <= 1e-12


def test_where_a_norm_is_zero_the_local_rate_is_one() -> None:
    zeros, still = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    zeros.grad, still.grad = torch.tensor([1.0, 2.0]), torch.zeros(2)
    LARS([zeros, still], lr=0.5, weight_decay=0.5).step()
    torch.testing.assert_close(zeros.detach(), torch.tensor([-0.5, -1.0]))
    torch.testing.assert_close(still.detach(), torch.full((2,), 0.75))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_norms_do_not_overflow(dtype: torch.dtype) -> None:
    huge = float(torch.finfo(dtype).max) / 4
    weight = nn.Parameter(torch.ones(16, dtype=dtype))
    weight.grad = torch.full((16,), huge, dtype=dtype)
    LARS(
        [weight], lr=1.0, trust_coefficient=0.5
    ).step()  # d has half the weights' norm, in the gradient's direction
    # A local rate of 1e-39 has few bits in single precision.
    torch.testing.assert_close(weight.detach().double(), torch.full((16,), 0.5).double(), rtol=1e-2, atol=0)


def test_it_takes_a_closure_and_a_sparse_gradient() -> None:
    sparse, dense = nn.Embedding(9, 3, sparse=True), nn.Embedding(9, 3)
    dense.load_state_dict(sparse.state_dict())
    for model in (sparse, dense):
        optimizer = LARS(model.parameters(), lr=1.0)

        def closure(model: nn.Module = model) -> torch.Tensor:
            model.zero_grad()
            loss: torch.Tensor = model(torch.tensor([1, 4, 4])).square().sum()
            loss.backward()
            return loss.detach()

        assert float(optimizer.step(closure)) > float(optimizer.step(closure))
    torch.testing.assert_close(sparse.weight, dense.weight)


def test_its_state_round_trips() -> None:
    models = [net(), net()]
    first, second = (LARS(model.parameters(), lr=1.0) for model in models)
    for iteration in range(3):
        models[0].zero_grad()
        backward(models[0], 0, iteration)
        first.step()
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for model, optimizer in zip(models, (first, second), strict=True):
        model.zero_grad()
        backward(model, 0, 3)
        optimizer.step()
    assert relative_error(weights_of(models[1]), weights_of(models[0])) == 0.0


@pytest.mark.parametrize(
    "settings",
    [{"lr": -1.0}, {"momentum": 1.0}, {"eps": math.nan}, {"trust_coefficient": -1}, {"weight_decay": -0.1}],
)
def test_a_value_out_of_its_range_is_refused_by_name(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=f"^{next(iter(settings))} is "):
        LARS([nn.Parameter(torch.ones(2))], **{"lr": 0.1, **settings})  # type: ignore[arg-type]


def test_nesterov_needs_a_momentum() -> None:
    with pytest.raises(ConfigurationError, match=r"^nesterov is True but momentum is 0"):
        LARS([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0, nesterov=True)


# -- in a run ---------------------------------------------------------------------------------------------


def test_the_servers_run_sgd_for_it() -> None:
    optimizer = LARS([nn.Parameter(torch.ones(2))], lr=0.5, weight_decay=0.1, nesterov=True)
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5, momentum=0.9, nesterov=True)
    assert server_optimizer(optimizer).name == "SGD"
    assert read_groups(optimizer) == read_groups(sgd)
    make_optimizer("SGD", read_groups(optimizer), [[torch.ones(2)]])

    class Mine(LARS):
        """A subclass of a user's own, whose gradients the workers do not scale."""

    assert server_optimizer(Mine([nn.Parameter(torch.ones(2))], lr=0.5)).whole


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_with_one_worker_it_is_lars(run_on_threads: RunOnThreads, name: str, servers: int) -> None:
    run = run_on_threads(training(12, **SETTINGS[name]), workers=1, servers=servers)
    assert relative_error(run.state_dict, training(12, **SETTINGS[name])()) <= 1e-12  # the same script, alone
    assert relative_error(run.state_dict, by_formula(1, 12, **SETTINGS[name])) <= 1e-12
    assert torch.equal(run.state_dict["unused"], torch.ones(7).double())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-4)], ids=str)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_bsp_is_sgd_on_the_mean_of_the_workers_scaled_gradients(
    run_on_threads: RunOnThreads, transport: str, dtype: torch.dtype, tolerance: float
) -> None:
    settings = SETTINGS["momentum"]
    run = run_on_threads(training(20, dtype, **settings), workers=4, servers=2, transport=transport)
    assert relative_error(run.state_dict, by_formula(4, 20, dtype, **settings)) <= tolerance


def test_a_scheduler_changes_its_rate(run_on_threads: RunOnThreads) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)

    run = run_on_threads(training(12, schedule=schedule, lr=2.0), workers=2, servers=2)
    expected = by_formula(2, 12, rates=lambda iteration: 2.0 * 0.5 ** (iteration // 4), lr=2.0)
    assert relative_error(run.state_dict, expected) <= 1e-12
    assert relative_error(run.state_dict, by_formula(2, 12, lr=2.0)) > 1e-6


def test_groups_keep_their_own_settings(run_on_threads: RunOnThreads) -> None:
    def train(distributed: bool) -> State:
        model = net()
        own, others = parameters(model)[:2], parameters(model)[2:]
        groups: list[dict[str, Any]] = [
            {"params": own, "trust_coefficient": 0.05},
            {"params": others, "lr": 0.3, "weight_decay": 0.1, "momentum": 0.5},
        ]
        wrapped = LARS(groups, lr=1.0)
        optimizer = DistributedOptimizer(wrapped, model=model) if distributed else wrapped
        for iteration in range(8):
            optimizer.zero_grad()
            backward(model, 0, iteration)
            optimizer.step()
        return weights_of(model)

    run = run_on_threads(lambda: train(distributed=True), workers=1, servers=2)
    assert relative_error(run.state_dict, train(distributed=False)) <= 1e-12


def test_its_state_comes_back_and_a_run_goes_on_from_it(run_on_threads: RunOnThreads) -> None:
    settings = SETTINGS["momentum"]

    def train(first: int, last: int, saved: dict[str, Any] | None) -> dict[str, Any]:
        model = net()
        optimizer = DistributedOptimizer(LARS(model.parameters(), **settings), model=model)
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for iteration in range(first, last):
            optimizer.zero_grad()
            backward(model, worker_index(), iteration)
            optimizer.step()
        return copy.deepcopy({"model": weights_of(model), "optimizer": optimizer.state_dict()})

    saved: Any = run_on_threads(lambda: train(0, 5, None), workers=2, servers=3).results[0]
    state = saved["optimizer"]
    assert set(state["state"]) == {1, 2, 3, 4}  # parameter 0 is never used
    assert {tuple(entries) for entries in state["state"].values()} == {("momentum_buffer",)}
    assert state["param_groups"][0]["trust_coefficient"] == 1e-3
    run = run_on_threads(lambda: train(5, 10, saved), workers=2, servers=2)
    assert relative_error(run.state_dict, by_formula(2, 10, **settings)) <= 1e-12


def test_a_gradient_that_is_not_finite_is_refused_before_it_is_scaled(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        model = net()
        optimizer = DistributedOptimizer(LARS(model.parameters(), lr=1.0), model=model)
        backward(model, 0, 0)
        parameters(model)[1].grad[0] = math.inf  # type: ignore[index]
        with pytest.raises(NonFiniteGradientError, match=r"0\.weight"):
            optimizer.step()

    run_on_threads(train, workers=1)

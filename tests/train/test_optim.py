"""`DistributedOptimizer`: the errors that it raises, the changes that it detects, and its behavior without a run."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from paceline import Cluster, DistributedOptimizer, simulate, worker_index
from paceline.errors import ConfigurationError, NonFiniteGradientError, UsageError, WeightsChangedError
from paceline.trace.measures import measure
from paceline.trace.recording import read_records
from paceline.train.session import current

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

State = dict[str, torch.Tensor]


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a model with the same weights at each call."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def backward(model: nn.Module, iteration: int = 0) -> torch.Tensor:
    """Compute the gradients of one iteration and return its loss."""
    generator = torch.Generator().manual_seed(100 + iteration)
    x = torch.randn(5, 4, generator=generator).to(next(model.parameters()).dtype)
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    return loss.detach()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, iteration: int = 0) -> None:
    optimizer.zero_grad()
    backward(model, iteration)
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def gradient_of(model: nn.Module, name: str) -> torch.Tensor:
    gradient = model.get_parameter(name).grad
    assert gradient is not None
    return gradient


def weights_of(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(one: State, other: State) -> None:
    """Assert that two states are equal bit by bit."""
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, equal_nan=True)


def begun() -> tuple[nn.Sequential, torch.optim.Optimizer, DistributedOptimizer]:
    """Return a model after its first step in a worker, the wrapped optimizer and the wrapper."""
    model = net()
    wrapped = sgd(model)
    optimizer = DistributedOptimizer(wrapped, model=model)
    step(model, optimizer)
    return model, wrapped, optimizer


# -- optimizers and models that are refused ---------------------------------------------------------------


class Mine(torch.optim.SGD):
    """A subclass of a user's own, which updates as SGD does."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (torch.optim.LBFGS, r"torch\.optim\.lbfgs\.LBFGS"),
        (torch.optim.SparseAdam, r"torch\.optim\.sparse_adam\.SparseAdam"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_optimizer_that_cannot_run_on_slices_is_refused_by_name(
    kind: Any, name: str, run_on_threads: RunOnThreads
) -> None:
    def train() -> None:
        model = net()
        with pytest.raises(ConfigurationError, match=rf"^{name} cannot run on the servers, .* Use Adam,"):
            DistributedOptimizer(kind(model.parameters(), lr=0.1))
        step(model, DistributedOptimizer(Mine(model.parameters(), lr=0.1)))

    DistributedOptimizer(kind(net().parameters(), lr=0.1))  # outside a run, every optimizer works
    run_on_threads(train, workers=1)


def test_a_distributed_optimizer_is_not_wrapped_again() -> None:
    optimizer = DistributedOptimizer(sgd(net()))
    with pytest.raises(UsageError, match="already"):
        DistributedOptimizer(optimizer)


def test_a_model_is_found_by_its_parameters(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        model = nn.ModuleDict({"inner": net()})
        optimizer = DistributedOptimizer(sgd(model))
        backward(model["inner"])
        optimizer.step()

    assert "inner.0.weight" in run_on_threads(train, workers=1).state_dict


def test_parameters_of_no_module_need_a_model(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        loose = nn.Parameter(torch.ones(3))
        optimizer = DistributedOptimizer(torch.optim.SGD([loose], lr=0.1))
        loose.sum().backward()
        optimizer.step()

    with pytest.raises(ConfigurationError, match=r"no module holds all .*model=\.\.\."):
        run_on_threads(train, workers=1)


def test_parameters_of_two_modules_need_a_model(run_on_threads: RunOnThreads) -> None:
    def train(named: bool) -> None:
        shared = nn.Linear(4, 2)
        one, other = nn.Sequential(shared), nn.Sequential(nn.Identity(), shared)
        model = other if named else None
        optimizer = DistributedOptimizer(torch.optim.SGD(shared.parameters(), lr=0.1), model=model)
        backward(one)
        optimizer.step()

    with pytest.raises(ConfigurationError, match=r"2 modules hold all .*model=\.\.\."):
        run_on_threads(lambda: train(False), workers=1)
    run = run_on_threads(lambda: train(True), workers=1)
    assert run.state_dict.keys() == {"1.weight", "1.bias"}


def test_a_model_that_does_not_hold_the_parameters_is_refused(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        model = net()
        optimizer = DistributedOptimizer(sgd(model), model=net())
        step(model, optimizer)

    with pytest.raises(
        ConfigurationError, match=r"parameter 0, of shape \[6, 4\], is not a parameter of the model"
    ):
        run_on_threads(train, workers=1)


# -- weights that change outside step() -------------------------------------------------------------------


def replace(model: nn.Module) -> None:
    bias = model.get_parameter("2.bias")
    bias.data = bias.data + 1.0


def edit(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("2.bias").mul_(0.5)


def edit_detached(model: nn.Module) -> None:
    model.get_parameter("2.bias").detach()[0] = 7.0


def edit_data(model: nn.Module) -> None:
    model.get_parameter("2.bias").data[1] += 1.0


def edit_data_to_nan(model: nn.Module) -> None:
    model.get_parameter("2.bias").data[1] = math.nan


def move(model: nn.Module) -> None:
    model.to(torch.float64)


def load(model: nn.Module) -> None:
    model.load_state_dict(net().state_dict())


def initialize(model: nn.Module) -> None:
    nn.init.zeros_(model.get_parameter("2.bias"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (move, "Parameter '0.weight' was moved or replaced"),
        (replace, "Parameter '2.bias' was moved or replaced"),
        (edit, "Parameter '2.bias' was edited"),
        (edit_detached, "Parameter '2.bias' was edited"),
        (initialize, "Parameter '2.bias' was edited"),
        (load, "Parameter '0.weight' was edited"),
        (edit_data, "Weights were edited through .data"),
        (edit_data_to_nan, "Weights were edited through .data"),
    ],
)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_weights_that_change_outside_step_are_an_error(
    run_on_threads: RunOnThreads, change: Callable[[nn.Module], None], message: str, transport: str
) -> None:
    before: State = {}

    def train() -> None:
        model, _, optimizer = begun()
        step(model, optimizer, 1)
        before.update(weights_of(model))
        optimizer.zero_grad()
        backward(model, 2)
        change(model)
        for _ in range(2):  # the next call raises it again
            with pytest.raises(WeightsChangedError) as caught:
                optimizer.step()
            assert message in str(caught.value)

    run = run_on_threads(train, workers=1, servers=2, transport=transport)
    assert_same(run.state_dict, before)  # no edit has reached the servers


def test_weights_may_change_before_the_first_step(run_on_threads: RunOnThreads) -> None:
    def train() -> State:
        model = net()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        with torch.no_grad():
            model.get_parameter("2.bias").fill_(3.0)
        model.to(torch.float64)
        step(model, optimizer)
        step(model, optimizer, 1)
        return weights_of(model)

    expected = net()
    with torch.no_grad():
        expected.get_parameter("2.bias").fill_(3.0)
    expected.to(torch.float64)
    optimizer = sgd(expected)
    step(expected, optimizer)
    step(expected, optimizer, 1)
    run = run_on_threads(train, workers=1)
    torch.testing.assert_close(run.results[0], weights_of(expected), rtol=1e-12, atol=0)


@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_that_a_script_moves_to_other_memory_and_back_are_pushed(
    run_on_threads: RunOnThreads, accumulates: bool
) -> None:
    """`Module.to` moves each gradient in place, so what was lent as `.grad` is elsewhere afterwards."""

    def train(*, moves: bool) -> State:
        model, _, optimizer = begun()
        for iteration in range(1, 5):
            if not accumulates:
                optimizer.zero_grad()
            backward(model, iteration)
            if moves:
                model.to(torch.float64)
                model.to(torch.float32)
            optimizer.step()
        return weights_of(model)

    there, back = (
        run_on_threads(lambda moves=moves: train(moves=moves), workers=1) for moves in (False, True)
    )
    assert_same(back.state_dict, there.state_dict)


def test_looking_at_the_weights_is_not_changing_them(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        model, _, optimizer = begun()
        for iteration in range(1, 4):
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 4))
            copy.deepcopy(model)
            model.state_dict()
            model.train()
            model.to(torch.float32)
            model.requires_grad_(True)
            step(model, optimizer, iteration)

    run_on_threads(train, workers=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_frozen_weight_that_is_nan_was_not_edited(run_on_threads: RunOnThreads, dtype: torch.dtype) -> None:
    def train() -> None:
        model = net(dtype)
        model.register_parameter("unused", nn.Parameter(torch.full((5,), math.nan, dtype=dtype), False))
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(3):
            step(model, optimizer, iteration)

    run = run_on_threads(train, workers=2)
    assert bool(run.state_dict["unused"].isnan().all())


def test_no_state_can_be_loaded_once_training_has_begun(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        model, _, optimizer = begun()
        state = optimizer.state_dict()
        with pytest.raises(
            UsageError, match=r"^load_state_dict\(\) must be called before the first forward pass"
        ):
            optimizer.load_state_dict(state)
        step(model, optimizer, 1)

    run_on_threads(train, workers=1)


def test_a_group_may_be_added_before_the_first_step(run_on_threads: RunOnThreads) -> None:
    def train() -> State:
        model = net(torch.float64)
        wrapped = torch.optim.SGD(model[0].parameters(), lr=0.1)
        optimizer = DistributedOptimizer(wrapped, model=model)
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.3})
        assert optimizer.param_groups is wrapped.param_groups
        step(model, optimizer)
        return weights_of(model)

    model = net(torch.float64)
    groups: Any = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.3}]
    step(model, torch.optim.SGD(groups, lr=0.1))
    run = run_on_threads(train, workers=1)
    torch.testing.assert_close(run.results[0], weights_of(model), rtol=1e-12, atol=0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_state_loaded_behind_its_back_is_noticed(run_on_threads: RunOnThreads, when: str) -> None:
    def train() -> None:
        model = net()
        wrapped = sgd(model)
        optimizer = DistributedOptimizer(wrapped, model=model)
        if when == "after":
            step(model, optimizer)
        wrapped.load_state_dict(wrapped.state_dict())
        with pytest.raises(UsageError, match=r"load_state_dict\(\) on the DistributedOptimizer"):
            step(model, optimizer)

    run_on_threads(train, workers=1)


# -- gradients that are not finite ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_refused_and_nothing_of_it_is_sent(
    run_on_threads: RunOnThreads, value: float, dtype: torch.dtype
) -> None:
    before: State = {}

    def train() -> None:
        model = net(dtype)
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(3):
            step(model, optimizer, iteration)
        before.update(weights_of(model))
        optimizer.zero_grad()
        backward(model, 3)
        gradient_of(model, "2.bias")[1] = value
        with pytest.raises(
            NonFiniteGradientError, match=r"worker 0, iteration 3: the gradient of '2\.bias'"
        ) as e:
            optimizer.step()
        assert (e.value.worker, e.value.iteration, e.value.parameter) == (0, 3, "2.bias")
        assert_same(weights_of(model), before)

    run = run_on_threads(train, workers=1, servers=2)
    assert_same(run.state_dict, before)


def test_a_large_gradient_made_infinite_through_data_is_refused_too(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        model = nn.Linear(1024, 1024)
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 1024)).sum().backward()
            if iteration == 1:
                assert model.weight.grad is not None
                model.weight.grad.data[5, 7] = math.inf
                with pytest.raises(NonFiniteGradientError, match="the gradient of 'weight'"):
                    optimizer.step()
                return
            optimizer.step()

    run_on_threads(train, workers=1)


def test_the_error_names_the_worker_and_the_first_of_its_parameters(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        model = net()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(4):
            optimizer.zero_grad()
            backward(model, iteration)
            if worker_index() == 1 and iteration == 2:
                for parameter in list(model.parameters())[1:]:
                    assert parameter.grad is not None
                    parameter.grad.fill_(math.nan)
            optimizer.step()

    run = run_on_threads(train, workers=3, keep_errors=True)
    assert sorted(run.results) == [0, 2]
    error = run.errors[1]
    assert isinstance(error, NonFiniteGradientError)
    assert (error.worker, error.iteration, error.parameter) == (1, 2, "0.bias")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_such_a_push_can_be_dropped_and_the_run_goes_on(
    run_on_threads: RunOnThreads, caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    def train() -> State:
        model = net(torch.float64)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        for iteration in range(5):
            optimizer.zero_grad()
            backward(model, iteration)
            if worker_index() == 1 and iteration in (1, 3):
                gradient_of(model, "0.weight")[2, 2] = math.nan
            if iteration == 3:
                gradient_of(model, "2.bias")[0] = math.inf
            optimizer.step()
        return weights_of(model)

    model = net(torch.float64)
    alone = torch.optim.SGD(model.parameters(), lr=0.1)
    for iteration in (
        0,
        1,
        2,
        4,
    ):  # in iteration 1 only worker 0's gradient is finite, in iteration 3 no worker's
        step(model, alone, iteration)
    with caplog.at_level(logging.WARNING):
        run = run_on_threads(train, workers=2, servers=3, transport=transport, on_nan="skip")
    for state in (run.state_dict, run.results[0], run.results[1]):
        torch.testing.assert_close(state, weights_of(model), rtol=1e-12, atol=1e-15)
    measured = measure(run.shards)
    assert measured.dropped_pushes == 3 * 3  # 3 pushes, each to 3 shards
    assert measured.updates == 4
    assert measured.iterations == {0: 5, 1: 5}
    assert (
        "worker 1, iteration 1: gradients not pushed, because the gradient of '0.weight' contains NaN or inf"
        in caplog.text
    )
    assert (
        "worker 0, iteration 3: gradients not pushed, because the gradient of '2.bias' contains NaN or inf"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("dtype", "huge"), [(torch.float32, 1e30), (torch.float64, 1e200), (torch.float16, 6e4)]
)
def test_a_huge_gradient_is_finite_though_its_square_is_not(
    run_on_threads: RunOnThreads, dtype: torch.dtype, huge: float
) -> None:
    def train() -> None:
        model = nn.Linear(4, 1, dtype=dtype)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1 / huge), model=model)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, huge)
        optimizer.step()

    run = run_on_threads(train, workers=1)
    for tensor in run.state_dict.values():
        torch.testing.assert_close(tensor, -torch.ones_like(tensor), rtol=1e-3, atol=0)


# -- sparse gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_sparse_gradients_count_as_dense_ones(
    run_on_threads: RunOnThreads, kind: Any, set_to_none: bool
) -> None:
    def train(sparse: bool, distributed: bool) -> State:
        model = nn.Embedding(12, 3, sparse=sparse, dtype=torch.float64)
        with torch.no_grad():
            model.weight.copy_(torch.arange(36.0, dtype=torch.float64).view(12, 3) / 36)
        wrapped = kind(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(wrapped, model=model) if distributed else wrapped
        for iteration in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(torch.tensor([iteration, 5, 5])).square().sum().backward()
            optimizer.step()
        return weights_of(model)

    run = run_on_threads(lambda: train(sparse=True, distributed=True), workers=1, servers=2)
    expected = train(sparse=False, distributed=False)
    torch.testing.assert_close(run.state_dict, expected, rtol=1e-12, atol=0)


# -- without a run ----------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("closure", [True, False])
def test_alone_it_is_the_wrapped_optimizer_bit_by_bit(name: str, closure: bool) -> None:
    def train(distributed: bool) -> tuple[State, list[Any], dict[str, Any]]:
        model = net()
        wrapped = OPTIMIZERS[name](model)
        optimizer = DistributedOptimizer(wrapped) if distributed else wrapped
        losses: list[Any] = []
        for iteration in range(6):

            def compute(iteration: int = iteration) -> Any:
                optimizer.zero_grad()
                return backward(model, iteration)

            if closure:
                losses.append(optimizer.step(compute))
            else:
                compute()
                losses.append(optimizer.step())
        return weights_of(model), losses, optimizer.state_dict()

    weights, losses, state = train(distributed=True)
    expected_weights, expected_losses, expected_state = train(distributed=False)
    assert_same(weights, expected_weights)
    assert losses == expected_losses
    assert state["param_groups"] == expected_state["param_groups"]
    torch.testing.assert_close(state["state"], expected_state["state"], rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_alone_its_state_round_trips_with_the_wrapped_optimizers(name: str) -> None:
    """The state goes through a deep copy, as through a file, into a wrapper or into a plain optimizer."""
    whole = net()
    uninterrupted = OPTIMIZERS[name](whole)
    for iteration in range(6):
        step(whole, uninterrupted, iteration)
    for first, second in [(True, True), (True, False), (False, True)]:
        model = net()
        optimizer = OPTIMIZERS[name](model)
        for iteration in range(3):
            optimizer = DistributedOptimizer(optimizer) if first and not iteration else optimizer
            step(model, optimizer, iteration)
        state = copy.deepcopy(optimizer.state_dict())
        wrapped = OPTIMIZERS[name](model)
        resumed = DistributedOptimizer(wrapped) if second else wrapped
        resumed.load_state_dict(state)
        if second:
            assert resumed.param_groups is wrapped.param_groups
            assert resumed.state is wrapped.state
        for iteration in range(3, 6):
            step(model, resumed, iteration)
        assert_same(weights_of(model), weights_of(whole))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_alone_a_copy_goes_on_as_a_copy_of_the_wrapped_optimizer_does(how: Callable[[Any], Any]) -> None:
    found = []
    for wrap in (DistributedOptimizer, lambda wrapped: wrapped):
        model = net()
        optimizer = wrap(sgd(model))
        lr_scheduler.StepLR(optimizer, step_size=1)  # replaces the method `step` of the optimizer
        step(model, optimizer)
        twin, other = how((model, optimizer))
        step(twin, other, 1)
        other.load_state_dict(other.state_dict())
        step(twin, other, 2)
        found.append((weights_of(model), weights_of(twin)))
    for weights, expected in zip(*found, strict=True):
        assert_same(weights, expected)


def test_an_object_around_the_optimizer_has_its_attributes(run_on_threads: RunOnThreads) -> None:
    """Lightning's object is of a subclass, so an attribute of the class would hide the optimizer's own."""

    class Around:
        def __init__(self, optimizer: DistributedOptimizer) -> None:
            self._optimizer = optimizer
            self.__class__ = type("Around", (Around, DistributedOptimizer), {})

        def __getattr__(self, name: str) -> Any:
            return getattr(self._optimizer, name)

    def train() -> bool:
        model = net()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        step(model, optimizer)
        around = Around(optimizer)
        return all(getattr(around, name) is value for name, value in vars(optimizer).items())

    assert set(run_on_threads(train).results.values()) == {True}


def test_in_a_run_a_copy_trains_by_itself(run_on_threads: RunOnThreads) -> None:
    def train() -> int:
        model = net()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        step(model, optimizer)
        before = weights_of(model)
        twin, other = copy.deepcopy((model, optimizer))
        step(twin, other)
        assert_same(weights_of(model), before)
        assert not torch.equal(twin[0].get_parameter("weight"), model[0].get_parameter("weight"))
        step(model, optimizer)
        session = current()
        assert session is not None
        return session.core.updates

    assert set(run_on_threads(train).results.values()) == {2}


def test_alone_nothing_is_refused_that_torch_allows() -> None:
    model, other = net(), net()
    optimizer, second = DistributedOptimizer(sgd(model)), DistributedOptimizer(sgd(other))
    step(model, optimizer)
    step(other, second)
    edit(model)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.5})
    optimizer.load_state_dict(optimizer.state_dict())
    move(model)
    step(model, optimizer, 1)
    assert len(optimizer.param_groups) == 2


def test_it_is_an_optimizer_with_the_wrapped_ones_groups_and_defaults() -> None:
    wrapped = sgd(net())
    optimizer = DistributedOptimizer(wrapped)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is wrapped.param_groups
    assert optimizer.defaults == wrapped.defaults
    wrapped.param_groups[0]["lr"] = 0.25
    assert "lr: 0.25" in repr(optimizer)


# -- schedulers -------------------------------------------------------------------------------------------


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4], 0.1),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=10),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.2, step_size_up=2),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.8)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.8)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
}


@pytest.mark.parametrize("distributed", ["alone", "in a run"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_schedulers_work_on_it(run_on_threads: RunOnThreads, name: str, distributed: str) -> None:
    def train(wrap: bool) -> tuple[State, list[Any]]:
        model = net(torch.float64)
        wrapped = sgd(model)
        optimizer = DistributedOptimizer(wrapped, model=model) if wrap else wrapped
        scheduler = SCHEDULERS[name](optimizer)
        rates: list[Any] = []
        for iteration in range(7):
            step(model, optimizer, iteration)
            if name == "ReduceLROnPlateau":
                scheduler.step(1.0)
            else:
                scheduler.step()
            rates.append((wrapped.param_groups[0]["lr"], wrapped.param_groups[0]["momentum"]))
        return weights_of(model), rates

    expected_weights, expected_rates = train(wrap=False)
    if distributed == "alone":
        weights, rates = train(wrap=True)
        assert_same(weights, expected_weights)
    else:
        result: Any = run_on_threads(lambda: train(wrap=True), workers=1, servers=2).results[0]
        weights, rates = result
        torch.testing.assert_close(weights, expected_weights, rtol=1e-12, atol=1e-15)
    assert rates == expected_rates
    assert len(set(expected_rates)) > 1


# -- what a closure returns -------------------------------------------------------------------------------

RETURNED: dict[str, tuple[Any, float | None]] = {
    "nothing": (None, None),
    "a number": (0.5, 0.5),
    "a whole number": (3, 3.0),
    "a number that no float can be": (10**400, None),
    "a number of NumPy's": (np.float32(0.25), 0.25),
    "a number of NumPy's own size": (np.float16(0.5), 0.5),
    "a tensor of one element": (torch.tensor([[0.125]]), 0.125),
    "a tensor that requires a gradient": (torch.tensor(2.0, requires_grad=True), 2.0),
    "a tensor of several elements": (torch.ones(2, 3), None),
    "an empty tensor": (torch.ones(0), None),
    "a complex tensor": (torch.tensor(1j), None),
    "a tensor without data": (torch.ones(1, device="meta"), None),
    "a tuple": ((torch.tensor(1.0), "accuracy"), None),
    "a string": ("fine", None),
    "something of the script's own": (object(), None),
}


@pytest.mark.parametrize("case", RETURNED)
def test_what_a_closure_returns_is_passed_through_and_shown_if_it_is_a_number(
    run_on_threads: RunOnThreads, case: str
) -> None:
    returned, shown = RETURNED[case]

    def train() -> None:
        model = net()
        optimizer = DistributedOptimizer(sgd(model), model=model)

        def closure() -> Any:
            optimizer.zero_grad()
            backward(model)
            return returned

        for _ in range(2):
            assert optimizer.step(closure) is returned

    run = run_on_threads(train, workers=1)
    [records] = read_records(run.run_dir)
    assert [record.loss for record in records] == [shown, shown]
    assert all(type(record.loss) is type(shown) for record in records)

    simulated = simulate(Cluster(compute_s=[1.0]), sync="bsp", train_fn=train)
    assert simulated.losses is not None
    assert [loss.loss for loss in simulated.losses] == ([] if shown is None else [shown, shown])


def test_what_a_closure_returns_has_the_type_that_it_returned() -> None:
    """The type checker checks the types of this test as well."""
    model = net()
    optimizer = DistributedOptimizer(sgd(model), model=model)

    def closure() -> tuple[float, str]:
        return backward(model).item(), "seen"

    loss, word = optimizer.step(closure)
    assert (type(loss), word) == (float, "seen")
    nothing: None = optimizer.step(lambda: None)
    assert nothing is None


def test_hooks_of_the_wrapped_optimizer_run_once_per_step(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        calls: list[str] = []
        model = net()
        wrapped = sgd(model)
        wrapped.register_step_pre_hook(lambda *arguments: calls.append("before"))
        optimizer = DistributedOptimizer(wrapped, model=model)
        wrapped.register_step_post_hook(lambda *arguments: calls.append("after"))
        step(model, optimizer)
        assert calls == ["before", "after"]

    train()
    run_on_threads(train, workers=1)


# -- computations that cannot be aborted ------------------------------------------------------------------


def test_without_a_closure_worker_0_says_once_that_nothing_can_be_aborted(
    run_on_threads: RunOnThreads, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        model = net()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(3):
            step(model, optimizer, iteration)

    run_on_threads(train, workers=2, sync="spec-sync")
    said = [record for record in caplog.records if "without a closure" in record.getMessage()]
    assert len(said) == 1
    assert "optimizer.step(closure)" in said[0].getMessage()
    caplog.clear()
    run_on_threads(train, workers=2, sync="asp")
    assert "without a closure" not in caplog.text


def test_with_a_closure_nothing_is_said(
    run_on_threads: RunOnThreads, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        model = net()
        optimizer = DistributedOptimizer(sgd(model), model=model)
        for iteration in range(2):

            def closure(iteration: int = iteration) -> torch.Tensor:
                optimizer.zero_grad()
                return backward(model, iteration)

            optimizer.step(closure)

    run_on_threads(train, workers=2, sync="spec-sync")
    assert "without a closure" not in caplog.text

"""Training begins with the first forward pass that can compute gradients, so no worker's first gradient is lost."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import paceline
from paceline.errors import WeightsChangedError
from paceline.sim import Cluster, simulate
from paceline.trace.measures import measure
from paceline.train.generator_states import generators_lock
from paceline.train.session import current
from paceline.train.training import training_of

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads


def make() -> nn.Sequential:
    with generators_lock:  # another worker's thread may be making its model
        torch.manual_seed(paceline.worker_index())
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def begun() -> bool:
    session = current()
    return session is not None and training_of(session) is not None


def whole(model: nn.Sequential) -> torch.Tensor:
    output: torch.Tensor = model(torch.ones(2, 3, dtype=torch.float64))
    return output


def parts(model: nn.Sequential) -> torch.Tensor:
    output: torch.Tensor = model[2](model[0](torch.ones(2, 3, dtype=torch.float64)))
    return output


def wrapped(model: nn.Sequential) -> torch.Tensor:
    output: torch.Tensor = nn.Sequential(nn.Identity(), model)(torch.ones(2, 3, dtype=torch.float64))
    return output


def compiled(model: nn.Sequential) -> torch.Tensor:
    output: torch.Tensor = torch.compile(model, backend="eager")(torch.ones(2, 3, dtype=torch.float64))
    return output


def functional(model: nn.Sequential) -> torch.Tensor:
    inputs = torch.ones(2, 3, dtype=torch.float64)
    output: torch.Tensor = torch.func.functional_call(model, dict(model.named_parameters()), (inputs,))
    return output


def differentiated(model: nn.Sequential) -> torch.Tensor:
    """The derivatives by the inputs, as the loss of a differential equation needs them."""
    inputs = torch.ones(2, 3, dtype=torch.float64)
    derivatives: torch.Tensor = torch.func.vmap(torch.func.jacrev(model))(inputs)
    return derivatives


class Operations(TorchDispatchMode):
    """Carries out the operations and notes their names, as CUDA's sanitizer does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.names.append(operation.__name__)
        return operation(*arguments, **(options or {}))


def observed(model: nn.Sequential) -> torch.Tensor:
    twin = copy.deepcopy(model)
    with Operations() as usual:
        whole(twin)
    with Operations() as operations:
        output = whole(model)
    assert operations.names == usual.names
    return output


@pytest.mark.parametrize(
    "forward",
    [whole, parts, wrapped, compiled, functional, differentiated, observed],
    ids=lambda f: f.__name__,
)
def test_the_first_forward_pass_makes_the_weights_common(
    run_on_threads: RunOnThreads, forward: Callable[[nn.Sequential], torch.Tensor]
) -> None:
    def train() -> None:
        model = make()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            optimizer.zero_grad()
            output = forward(model)
            assert begun()
            output.sum().backward()
            optimizer.step()

    gc.collect()
    hooks = dict(_global_forward_pre_hooks)
    # Two threads cannot compile or transform functions at once.
    run = run_on_threads(train, workers=1 if forward in (compiled, differentiated) else 2)
    assert measure(run.shards).dropped_pushes == 0
    assert dict(_global_forward_pre_hooks) == hooks


def test_a_discarded_first_gradient_is_told(
    run_on_threads: RunOnThreads, caplog: pytest.LogCaptureFixture
) -> None:
    """Here, no module of the model is called, so training begins at the first step."""

    def train() -> None:
        model = make()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        for _ in range(2):
            optimizer.zero_grad()
            weight = model[0].get_parameter("weight")
            (torch.ones(2, 3, dtype=torch.float64) @ weight.T).sum().backward()
            optimizer.step()

    run = run_on_threads(train, workers=2)
    assert measure(run.shards).dropped_pushes == 1
    told = [record.getMessage() for record in caplog.records if "first gradient" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("worker 1: the first gradient is discarded")


def test_neither_evaluation_nor_another_model_begins_training(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        model = make()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        with torch.no_grad():
            whole(model)
        whole(copy.deepcopy(model))
        pickle.loads(pickle.dumps(model))
        assert not begun()
        with torch.no_grad():
            next(model.parameters()).fill_(0.5)
        whole(model).sum().backward()
        optimizer.step()

    run_on_threads(train, workers=2)


def recorded(model: nn.Sequential) -> None:
    make_fx(lambda: whole(model))()


def imitated(model: nn.Sequential) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        whole(model)


@pytest.mark.parametrize("forward", [recorded, imitated], ids=lambda f: f.__name__)
def test_a_pass_whose_operations_are_not_carried_out_does_not_begin_training(
    run_on_threads: RunOnThreads, forward: Callable[[nn.Sequential], None]
) -> None:
    def train() -> None:
        model = make()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        with Operations():
            forward(model)
        assert not begun()
        whole(model).sum().backward()
        optimizer.step()

    run_on_threads(train, workers=1)


def test_weights_that_are_edited_between_the_forward_pass_and_the_step_are_reported(
    run_on_threads: RunOnThreads,
) -> None:
    def train() -> None:
        model = make()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        whole(model).sum().backward()
        with torch.no_grad():
            next(model.parameters()).fill_(0.5)
        with pytest.raises(
            WeightsChangedError, match=r"[sS]ince the first forward pass with gradients enabled"
        ):
            optimizer.step()

    run_on_threads(train, workers=1)


def test_a_graph_from_before_the_first_forward_pass_stays_usable(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        model = nn.Linear(3, 1)
        for parameter in model.parameters():  # torch's generator is shared by the threads
            nn.init.constant_(parameter, 0.5)
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        penalty = model.weight.square().sum()
        (model(torch.ones(2, 3)).sum() + penalty).backward()
        optimizer.step()

    assert measure(run_on_threads(train, workers=2).shards).dropped_pushes == 0


def test_workers_that_seed_by_rank_lose_no_gradient_in_virtual_time() -> None:
    def train() -> None:
        model = make()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            whole(model).sum().backward()
            optimizer.step()

    result = simulate(Cluster(compute_s=[1.0, 2.0, 3.0]), "asp", train_fn=train)
    assert result.measures.pushes.applied == 9

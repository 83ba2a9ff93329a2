"""A copy of a model that is trained is an ordinary module: it computes the same, and has no hooks of ours."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import paceline
from paceline.errors import WeightsChangedError
from paceline.train.generator_states import generators_lock
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

SYNC = [
    "bsp",
    "spec-sync:base=ssp,staleness=1",  # it may abort a computation, so there are more hooks
    *thorough("asp", "spec-sync", "ringmaster:threshold=2,stop=true"),
]

INPUTS = torch.linspace(-1, 1, 12).reshape(4, 3)


def make() -> nn.Sequential:
    with generators_lock:  # another worker's thread may be making its model
        torch.manual_seed(0)
        # more elements than are compared in each step, so that loading weights needs the help of a hook
        return nn.Sequential(nn.Linear(3, 8000), nn.BatchNorm1d(8000), nn.Tanh(), nn.Linear(8000, 1))


def deepcopied(model: nn.Sequential) -> nn.Module:
    return copy.deepcopy(model)


def shallow(model: nn.Sequential) -> nn.Module:
    return copy.copy(model)


def pickled(model: nn.Sequential) -> nn.Module:
    loaded: nn.Module = pickle.loads(pickle.dumps(model))
    return loaded


def saved(model: nn.Sequential) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.BatchNorm1d, nn.Tanh, set]):
        loaded: nn.Module = torch.load(file, weights_only=True)  # refuses every function and class of ours
    return loaded


def averaged(model: nn.Sequential) -> nn.Module:
    return AveragedModel(model)


def compiled(model: nn.Sequential) -> nn.Module:
    return compiled_original(copy.deepcopy(model))


def compiled_original(model: nn.Sequential) -> nn.Module:
    torch.compiler.reset()  # forget what other tests have compiled
    return cast(nn.Module, torch.compile(model, backend="eager", fullgraph=True))


def exported(model: nn.Sequential) -> nn.Module:
    return torch.export.export(model, (INPUTS,)).module()


def scripted(model: nn.Sequential) -> nn.Module:
    module: nn.Module = torch.jit.script(model)
    return module


class Functional(nn.Module):
    """Calls a model with other weights, as `torch.func` does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weights = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        output: torch.Tensor = torch.func.functional_call(self.model, weights, (inputs,))
        return output


COPIES: list[Callable[[nn.Sequential], nn.Module]] = [
    deepcopied,
    shallow,
    pickled,
    saved,
    averaged,
    compiled,
    *thorough(compiled_original),  # see also the last test
    exported,
    scripted,
    Functional,
]


def hooks_of(model: nn.Module) -> list[str]:
    """Return the hooks of a module and of its parts, except torch's own, which an exported model has."""
    return [
        f"{type(module).__name__}.{name}: {hook}"
        for module in model.modules()
        for name, hooks in vars(module).items()
        if "hook" in name and isinstance(hooks, Mapping)
        for hook in hooks.values()  # some of these dictionaries only say how a hook is called
        if callable(hook) and not hook.__module__.startswith("torch.export.")
    ]


def output_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(INPUTS)
    return output


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer | paceline.DistributedOptimizer, count: int = 2
) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(INPUTS).square().mean()
        loss.backward()
        return loss

    for _ in range(count):
        optimizer.step(closure)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make_copy", COPIES, ids=lambda function: function.__name__)
@pytest.mark.parametrize("sync", SYNC)
def test_a_copy_computes_what_the_model_computes_and_has_no_hooks(
    run_on_threads: RunOnThreads, sync: str, make_copy: Callable[[nn.Sequential], nn.Module]
) -> None:
    def train() -> None:
        model = make()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model=model)
        steps(model, optimizer)
        model.eval()
        twin = make_copy(model)
        assert hooks_of(twin) == []
        assert torch.equal(output_of(twin), output_of(model))
        model.train()
        steps(model, optimizer)

    run_on_threads(train, workers=1, sync=sync)


@pytest.mark.parametrize("make_copy", [deepcopied, pickled, saved], ids=lambda function: function.__name__)
@pytest.mark.parametrize("sync", SYNC)
def test_the_copy_in_an_evaluation_can_be_copied_too(
    run_on_threads: RunOnThreads, sync: str, make_copy: Callable[[nn.Sequential], nn.Module]
) -> None:
    def train() -> None:
        model = make()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model=model)
        for _ in range(2):
            with paceline.evaluating(model) as snapshot:
                twin = make_copy(snapshot)
                assert hooks_of(snapshot) == hooks_of(twin) == []
                assert torch.equal(output_of(twin), output_of(snapshot))
            steps(model, optimizer)

    run_on_threads(train, workers=1, sync=sync)


@pytest.mark.parametrize("sync", SYNC)
def test_a_copy_that_a_closure_makes_can_be_used_in_it(run_on_threads: RunOnThreads, sync: str) -> None:
    def train() -> None:
        model = make()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model=model)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            teacher = copy.deepcopy(model)
            assert hooks_of(teacher) == []
            loss: torch.Tensor = (model(INPUTS) - output_of(teacher) + 1).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    run_on_threads(train, workers=2, sync=sync)


@pytest.mark.parametrize("sync", SYNC)
def test_a_copy_of_a_model_can_load_and_train_by_itself(run_on_threads: RunOnThreads, sync: str) -> None:
    """Loading weights into the copy is no edit of the model; loading other weights into the model is an edit."""

    def train() -> None:
        model = make()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model=model)
        steps(model, optimizer)
        twin = copy.deepcopy(model)
        own = torch.optim.SGD(twin.parameters(), lr=0.1)
        steps(twin, own)
        twin.load_state_dict(make().state_dict())
        steps(model, optimizer)
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        steps(model, optimizer)
        model.load_state_dict(twin.state_dict())
        with pytest.raises(WeightsChangedError):
            steps(model, optimizer)

    run_on_threads(train, workers=1, sync=sync, transport="unix")


@pytest.mark.parametrize("sync", SYNC)
def test_a_model_that_is_compiled_during_training_is_compiled_once(
    run_on_threads: RunOnThreads, sync: str
) -> None:
    torch.compiler.reset()  # forget what other tests have compiled
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    def train() -> None:
        model = make()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model=model)
        steps(model, optimizer)
        whole = cast(nn.Module, torch.compile(model, backend=backend, fullgraph=True))
        steps(whole, optimizer, 4)

    run_on_threads(train, workers=1, sync=sync)
    assert len(graphs) == 1

"""What a worker says that it trains: a host builds only on what fits together."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from torch import nn

from paceline import DistributedOptimizer, worker_index
from paceline.core.layout import (
    BufferSpec,
    FrozenSpec,
    HyperParameters,
    Layout,
    ModelSpec,
    OptimizerSpec,
    Parameter,
)
from paceline.core.messages import Phase, Register
from paceline.errors import ConfigurationError, ProtocolError
from paceline.run import registration
from paceline.run.registration import PLAIN, require_groups, require_sound
from paceline.run.worker import WorkerSession
from paceline.shard.optimizers import ELEMENTWISE, OF_TORCH, TENSORWISE, read_groups
from paceline.train.session import current
from paceline.wire.stream import decoder
from tests.support.hosts import Expelled, until_closed
from tests.support.made_messages import edited, flip

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

PARAMETERS = [Parameter(("a",), (40,), "float32"), Parameter(("b", "c"), (3, 8), "float16")]
BUFFER = BufferSpec("count", (3,), "float32")


def model_with(name: str = "SGD", **changes: Any) -> ModelSpec:
    optimizer = ELEMENTWISE[name]([nn.Parameter(torch.zeros(1))])  # type: ignore[call-arg]
    model = ModelSpec(Layout.of(PARAMETERS), OptimizerSpec(name, read_groups(optimizer), (0, 0)), (BUFFER,))
    return msgspec.structs.replace(model, **changes)


MODEL = model_with()


def model_like(model: ModelSpec, group: HyperParameters) -> ModelSpec:
    optimizer = msgspec.structs.replace(model.optimizer, groups=(group,))
    return msgspec.structs.replace(model, optimizer=optimizer)


def layout_with(**changes: Any) -> ModelSpec:
    return model_with(layout=msgspec.structs.replace(MODEL.layout, **changes))


def optimizer_with(**changes: Any) -> ModelSpec:
    return model_with(optimizer=msgspec.structs.replace(MODEL.optimizer, **changes))


def group_with(name: str = "SGD", **changes: Any) -> tuple[HyperParameters, ...]:
    [group] = model_with(name).optimizer.groups
    return ({**group, **changes},)


UNSOUND: dict[str, ModelSpec] = {
    "no parameters": layout_with(parameters=(), offsets=(), sizes={}),
    "parameters that lie elsewhere": layout_with(offsets=(0, 7)),
    "vectors that are shorter": layout_with(sizes={"float32": 1, "float16": 32}),
    "vectors below zero": layout_with(sizes={"float32": -48, "float16": 32}),
    "a vector of another dtype": layout_with(sizes={"float32": 48, "float16": 32, "float7": 16}),
    "a parameter of another dtype": layout_with(parameters=(Parameter(("a",), (40,), "int64"),)),
    "a parameter without a name": layout_with(parameters=(Parameter((), (40,), "float32"), PARAMETERS[1])),
    "a shape below zero": layout_with(parameters=(Parameter(("a",), (-5, -8), "float32"), PARAMETERS[1])),
    "more than there is memory": model_with(layout=Layout.of([Parameter(("a",), (2**50,), "float32")])),
    "an optimizer that there is not": optimizer_with(name="LBFGS"),
    "no groups": optimizer_with(groups=()),
    "a parameter in no group": optimizer_with(group_of=(0,)),
    "a parameter in a group that there is not": optimizer_with(group_of=(0, 1)),
    "a parameter in a group below zero": optimizer_with(group_of=(0, -1)),
    "hyper-parameters of another optimizer": optimizer_with(groups=group_with("Adam")),
    "hyper-parameters without a learning rate": optimizer_with(groups=({"momentum": 0.0},)),
    "hyper-parameters that say how to compute": optimizer_with(groups=group_with(fused=True)),
    "a learning rate below zero": optimizer_with(groups=group_with(lr=-1.0)),
    "a learning rate that is no number": optimizer_with(groups=group_with(lr=math.nan)),
    "a learning rate that is none": optimizer_with(groups=group_with(lr=None)),
    "a buffer of a dtype that there is not": model_with(buffers=(BufferSpec("x", (3,), "float7"),)),
    "a buffer of a dtype that is something else": model_with(buffers=(BufferSpec("x", (3,), "nn"),)),
    "a buffer below zero": model_with(buffers=(BufferSpec("x", (-3,), "float32"),)),
    "a buffer of more than there is memory": model_with(
        buffers=(BufferSpec("x", (2**40, 2**40), "float32"),)
    ),
    "a frozen parameter below zero": model_with(frozen=(FrozenSpec("x", (-3,), "float32", "0" * 64),)),
    "a frozen parameter of a dtype that there is not": model_with(
        frozen=(FrozenSpec("x", (3,), "float7", "0" * 64),)
    ),
    "a digest that is the path of a file": model_with(
        frozen=(FrozenSpec("x", (3,), "float32", "../" * 18 + "etc/passwd"),)
    ),
    "a digest that ends with a new line": model_with(
        frozen=(FrozenSpec("x", (3,), "float32", "0" * 64 + "\n"),)
    ),
    "a digest that is too short": model_with(frozen=(FrozenSpec("x", (3,), "float32", "0" * 63),)),
}

OF_OTHER_VERSIONS = {  # what another version of torch may have
    "hyper-parameters of another optimizer",
    "hyper-parameters without a learning rate",
    "hyper-parameters that say how to compute",
}


@pytest.mark.parametrize("what", UNSOUND)
def test_a_model_that_does_not_fit_together_is_refused(what: str) -> None:
    with pytest.raises(ConfigurationError if what in OF_OTHER_VERSIONS else ProtocolError):
        require_sound(UNSOUND[what])


def test_an_optimizer_that_only_other_versions_of_torch_have_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(OF_TORCH, "Muon", raising=False)
    monkeypatch.delitem(TENSORWISE, "Muon", raising=False)
    with pytest.raises(
        ConfigurationError, match=r"^torch .* has no torch\.optim\.Muon, .* install a version"
    ):
        require_sound(optimizer_with(name="Muon", whole=True))


def test_hyper_parameters_that_only_another_version_of_torch_has_are_named() -> None:
    changed = optimizer_with(groups=group_with(added=1.0))
    with pytest.raises(
        ConfigurationError, match=r"torch\.optim\.SGD .* differ in added\. Install the same version"
    ):
        require_sound(changed)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_model_as_workers_send_it_is_sound(name: str) -> None:
    require_sound(model_with(name))
    model = model_with(name)
    for lr in (0.0, 1e-3, 3, 1e5):
        if lr <= 6e4:  # more is too much for half precision
            require_groups(model, tuple({**group, "lr": lr} for group in model.optimizer.groups))


@pytest.mark.parametrize("name", PLAIN)
def test_what_needs_no_trial_would_pass_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with(name)
    [group] = model.optimizer.groups
    assert group.keys() == PLAIN[name].keys()
    values: dict[str, Sequence[Any]] = {key: bounds or (False, True) for key, bounds in PLAIN[name].items()}
    if "betas" in values:
        values["betas"] = list(product(values["betas"], repeat=2))
    values.pop("nesterov", None)
    for choice in product(*values.values()):
        plain = model_like(model, {**group, **dict(zip(values, choice, strict=True))})
        with monkeypatch.context() as context:
            context.setattr(registration, "_try", pytest.fail)
            require_sound(plain)
        registration._try(plain, plain.optimizer.groups)


@pytest.mark.parametrize("name", PLAIN)
def test_hyper_parameters_that_a_schedule_changes_need_no_trial(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_with(name)
    [group] = model.optimizer.groups
    monkeypatch.setattr(registration, "_try", pytest.fail)
    for key, bounds in PLAIN[name].items():
        if bounds is not None:
            value = (0.8, 0.99) if isinstance(group[key], tuple) else 0.5
            require_groups(model, ({**group, key: value},))


def test_a_flag_that_changes_needs_a_trial() -> None:
    """torch cannot begin with amsgrad in the middle of a run."""
    with pytest.raises(ProtocolError, match="max_exp_avg_sq"):
        require_groups(model_with("AdamW"), group_with("AdamW", amsgrad=True))


NO_COMPILER = """
import sys
from paceline.shard.optimizers import defer_dynamo
defer_dynamo()
import torch
from paceline.core.layout import Layout, Parameter
from paceline.core.layout import ModelSpec, OptimizerSpec
from paceline.errors import ProtocolError
from paceline.run.registration import require_groups, require_sound
from paceline.shard.optimizers import ELEMENTWISE, read_groups
from paceline.shard.slice_optimizers import optimizer_of_slice

layout = Layout.of([Parameter(("a",), (40,), "float32")])
ones = {"float32": torch.ones(40)}
changed = 0
for name, kind in ELEMENTWISE.items():
    groups = read_groups(kind([torch.zeros(1)], lr=0.01))
    spec = OptimizerSpec(name, groups, (0,))
    model = ModelSpec(layout, spec, ())
    require_sound(model)
    optimizer = optimizer_of_slice(spec, layout.slice_evenly(1)[0], ones)
    for key, value in groups[0].items():
        new = not value if isinstance(value, bool) else 0.5
        if isinstance(value, tuple):
            new = value[0] * 0.9, value[1]
        try:
            require_groups(model, ({**groups[0], key: new},))
        except ProtocolError:  # torch cannot change it
            continue
        changed += 1
        optimizer.step([ones], (1.0,), bytes([1]) * len(layout.parameters), ({**groups[0], key: new},))
print(changed, "torch._dynamo" in sys.modules)
"""


@pytest.mark.processes
def test_no_step_and_no_change_of_a_hyper_parameter_imports_the_compiler() -> None:
    """The import takes as long as importing torch, and all workers would wait for it."""
    ended = subprocess.run(
        [sys.executable, "-c", NO_COMPILER], capture_output=True, text=True, check=True, timeout=120
    )
    changed, imported = ended.stdout.split()
    assert int(changed) > 3 * len(ELEMENTWISE)
    assert imported == "False"


UNUSABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "a rate that half precision cannot hold": ("SGD", {"lr": 1e5}),
    "a rate that no precision can hold": ("SGD", {"lr": 1e300}),
    "a rate of many digits": ("SGD", {"lr": 2**64 - 1}),
    "a rate that is no number": ("Adam", {"lr": math.nan}),
    "a pair without end": ("Adam", {"betas": (0.9, math.inf)}),
    "a power that overflows late in a run": ("ASGD", {"alpha": 1e6}),
    "a flag for a number": ("SGD", {"lr": True}),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_hyper_parameters_that_an_update_would_trip_over_are_refused(what: str) -> None:
    name, changes = UNUSABLE[what]
    with pytest.raises(ProtocolError, match="hyper-parameter"):
        require_groups(model_with(name), group_with(name, **changes))


def test_whatever_is_registered_is_refused_or_sound() -> None:
    choice = random.Random("registered")
    decode = decoder(Phase("worker", "coordinator", "joining"))
    header = msgspec.msgpack.encode(Register(MODEL))
    sound = 0
    for _ in range(3000):
        changed = flip(header, choice) if choice.random() < 0.7 else edited(Register(MODEL), choice)
        try:
            message = decode(changed)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(message, Register):
            try:
                require_sound(message.model)
                sound += 1
            except (ProtocolError, ConfigurationError):
                pass
    assert sound > 0


@pytest.mark.parametrize(
    "what", ["vectors below zero", "an optimizer that there is not", "a buffer below zero"]
)
def test_a_worker_that_registers_nonsense_is_refused_and_the_others_train(
    run_on_threads: RunOnThreads, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    def train() -> None:
        if worker_index() == 0:
            session = current()
            assert isinstance(session, WorkerSession)
            session.links.coordinator.send(Register(UNSOUND[what]))
            until_closed(session.links.coordinator.sock)
            raise Expelled
        model = nn.Linear(3, 2)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()

    run = run_on_threads(train, workers=3, servers=1, keep_errors=True)
    assert {worker: type(error) for worker, error in run.errors.items()} == {0: Expelled}
    assert sorted(run.results) == [1, 2]
    assert "the coordinator refused worker 0" in caplog.text

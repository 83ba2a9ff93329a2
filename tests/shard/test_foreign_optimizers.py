"""Optimizers that are not torch's: which ones may run on slices, and how the servers find their classes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from torch import nn

import paceline
from paceline import Cluster
from paceline.core.layout import Layout, OptimizerSpec, Parameter
from paceline.errors import ConfigurationError, UsageError
from paceline.shard import foreign
from paceline.shard.optimizer_sources import OptimizerSources, class_name, definition, imported_packages
from paceline.shard.optimizers import (
    join_state,
    make_optimizer,
    read_groups,
    server_optimizer,
    slice_state,
)
from paceline.shard.slice_optimizers import optimizer_of_slice
from paceline.train.session import install
from tests.support.live import run_program


class Rule(torch.optim.Optimizer):
    """An optimizer whose subclasses define the update of one parameter."""

    def __init__(self, params: Any, lr: float = 0.1, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
        raise NotImplementedError


class Lion(Rule):
    """Signs of an average, as in the optimizer of this name, with a count of the steps in Python."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, betas=betas, weight_decay=weight_decay)

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
        if not state:
            state["steps"], state["average"] = 0, torch.zeros_like(weight)
        state["steps"] += 1
        beta1, beta2 = group["betas"]
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(torch.lerp(gradient, state["average"], beta1).sign(), alpha=group["lr"])
        state["average"].lerp_(gradient, 1 - beta2)


class Renamed(torch.optim.AdamW):
    """Only other defaults, and a method that torch's class does not have."""

    def __init__(self, params: Any, rate: float) -> None:
        super().__init__(params, lr=rate, weight_decay=0.3)
        self.defaults["note"] = "mine"

    def describe(self) -> str:
        return "mine"


class Clamped(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-1, 1)
        return super().step(closure)


class Normalized(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.norm() + 1e-6)
        return super().step(closure)


class JointlyNormalized(torch.optim.SGD):
    """Divides the gradients of all parameters by their common norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm() + 1e-6
        for gradient in gradients:
            gradient.div_(norm)
        return super().step(closure)


class Centered(Rule):
    """Gradient centralization: subtracts the mean over all but the first dimension."""

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
        if gradient.dim() > 1:
            gradient = gradient - gradient.mean(dim=tuple(range(1, gradient.dim())), keepdim=True)
        weight.sub_(gradient, alpha=group["lr"])


class Hidden(Rule):
    """One setting is an attribute instead of a hyper-parameter."""

    def __init__(self, params: Any, lr: float = 0.1, power: int = 1) -> None:
        super().__init__(params, lr)
        self.power = power

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
        weight.sub_(gradient**self.power, alpha=group["lr"])


class Worded(Rule):
    """Hyper-parameters that are not numbers: a word and three numbers."""

    def __init__(
        self, params: Any, lr: float = 0.1, mode: str = "sign", mix: tuple[float, ...] = (0.5, 0.25, 0.25)
    ) -> None:
        super().__init__(params, lr, mode=mode, mix=mix)

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
        change = gradient.sign() if group["mode"] == "sign" else gradient
        weight.sub_(change, alpha=group["lr"] * sum(group["mix"]))


class Holding(Rule):
    """Keeps a queue per parameter."""

    def __init__(self, params: Any, nested: bool = False) -> None:
        super().__init__(params, nested=nested)

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
        state["norms"] = [deque([0.0])] if group["nested"] else deque([0.0])
        weight.sub_(gradient, alpha=group["lr"])


class Rounded(Rule):
    """Keeps the state of large parameters in 8 bits, as classes for accelerators do."""

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
        if weight.numel() >= 4096:
            state["average"] = gradient.clamp(-1, 1).mul(127).to(torch.int8)
            gradient = state["average"] / 127
        weight.sub_(gradient, alpha=group["lr"])


class ForAccelerators(Rule):
    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
        raise RuntimeError("the kernel adam_8bit is not there for the CPU")


class Counting(Rule):
    """Counts its steps, and moves the weights by less and less."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.counted()
        super().step()

    def counted(self) -> None:
        self.count += 1

    def number(self) -> int:
        return self.count

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
        weight.sub_(gradient, alpha=group["lr"] / self.number())


class CountingInState(Counting):
    def counted(self) -> None:
        self.state["k"] = self.number() + 1  # type: ignore[index]

    def number(self) -> int:
        return self.state.get("k", 0)  # type: ignore[call-overload, no-any-return]


class CountingInGroup(Counting):
    """Adds an entry to each group, and one that depends on all gradients."""

    def __init__(self, params: Any, *, summing: bool = False) -> None:
        super().__init__(params, summing=summing)

    def counted(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1

    def number(self) -> int:
        return self.param_groups[0]["step"]  # type: ignore[no-any-return]

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
        super().update(weight, gradient, state, group)
        if group["summing"]:
            group["total"] = group.get("total", 0.0) + gradient.sum()


class Curved(Rule):
    """Divides by the diagonal of the Hessian."""

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
        curvature: Any = 0.0
        if gradient.requires_grad:
            with torch.enable_grad():
                [curvature] = torch.autograd.grad(gradient.sum(), weight)
        weight.sub_(gradient.detach() / (1 + curvature), alpha=group["lr"])


class OfLoss(Rule):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = 0.0 if closure is None else float(closure())
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / (1 + loss))
        return loss


class Lookahead(torch.optim.Optimizer):
    """Has hyper-parameters that are in none of its groups."""

    def __init__(self, base: torch.optim.Optimizer, alpha: float = 0.5) -> None:
        super().__init__(base.param_groups, {"alpha": alpha})
        self.base = base
        self.param_groups = [{"params": group["params"]} for group in base.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return self.base.step()


class Switching(Rule):
    """Negates the weights for an evaluation, which fails before the first step. `train()` may leave them so."""

    training, evaluates = False, False

    def __init__(self, params: Any, lr: float = 0.1, undoes: bool = True) -> None:
        super().__init__(params, lr, undoes=undoes)

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
        assert self.training, "call train() first"
        state["steps"] = state.get("steps", 0) + 1
        weight.sub_(gradient, alpha=group["lr"])

    def train(self) -> None:
        if self.evaluates and self.param_groups[0]["undoes"]:
            self._negate()
        self.training, self.evaluates = True, False

    def eval(self) -> None:
        if not self.evaluates:
            self._negate()
        self.training, self.evaluates = False, True

    @torch.no_grad()
    def _negate(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                assert self.state[parameter]["steps"]
                parameter.neg_()


class SwitchingBase(torch.optim.SGD):
    """Only adds modes to SGD."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


class CoupledEvaluation(Switching):
    """Scales each tensor to length 1 for an evaluation."""

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["own"] = parameter.clone()
                parameter.div_(parameter.norm() + 1e-6)

    @torch.no_grad()
    def train(self) -> None:
        self.training = True
        for parameter, state in self.state.items():
            if "own" in state:
                parameter.copy_(state.pop("own"))


class NeedsClosure(Rule):
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "needs the closure"
        return closure()


@pytest.fixture(autouse=True)
def _forget_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "_registered", {})
    monkeypatch.setattr(foreign, "_classes", {})
    monkeypatch.setattr(foreign, "_sources", [])


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((4, 3), (5,), ())]


ACCEPTED: dict[str, Callable[[], torch.optim.Optimizer]] = {
    "its update is elementwise": lambda: Lion(parameters(), weight_decay=0.1),
    "two groups, one with learning rate 0": lambda: Lion(
        [{"params": parameters()[:1], "lr": 0.0}, {"params": parameters()[1:], "betas": (0.5, 0.6)}]
    ),
    "it overrides the step of SGD": lambda: Clamped(parameters(), lr=0.1, momentum=0.9),
    "it counts in its groups": lambda: CountingInGroup(parameters()),
    "hidden settings have their default": lambda: Hidden(parameters()),
    "words and triples": lambda: Worded(parameters(), mode="plain", mix=(1.0, 2.0, 3.0)),
    "it has modes": lambda: Switching(parameters()),
    "it adds modes to a class of torch": lambda: SwitchingBase(parameters()),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_class_that_passes_the_test_is_accepted(case: str) -> None:
    optimizer = ACCEPTED[case]()
    before = [p.clone() for group in optimizer.param_groups for p in group["params"]]
    generator = torch.get_rng_state()
    assert server_optimizer(optimizer).name == class_name(type(optimizer))
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, after, strict=True))
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), generator)


REFUSED: dict[str, tuple[Callable[[], torch.optim.Optimizer], str]] = {
    "norm of the gradient": (lambda: JointlyNormalized(parameters(), lr=0.1), "depends on other .*shape"),
    "even with a tiny rate": (lambda: JointlyNormalized(parameters(), lr=1e-9), "depends on other"),
    "settings outside the groups": (lambda: Hidden(parameters(), power=3), "built from its hyper-parameters"),
    "an object in the state": (lambda: Holding(parameters()), "state 'norms' is of type deque"),
    "a strange object in a list": (
        lambda: Holding(parameters(), nested=True),
        r"state norms\[0\] is a .*deque",
    ),
    "a counter in the state": (
        lambda: CountingInState(parameters()),
        "an entry 'k' besides those of parameters",
    ),
    "a counter in an attribute": (
        lambda: Counting(parameters()),
        "a checkpoint cannot hold all that it keeps",
    ),
    "a sum over all parameters": (
        lambda: CountingInGroup(parameters(), summing=True),
        "'total' in a parameter group is .* instead of",
    ),
    "second derivatives": (lambda: Curved(parameters()), "computes derivatives of the gradients"),
    "the loss": (lambda: OfLoss(parameters()), r"depends on the loss that step\(closure\) returns"),
    "a wrapper": (
        lambda: Lookahead(torch.optim.SGD(parameters(), lr=0.1)),
        "built around another optimizer, SGD in the attribute 'base'",
    ),
    "train() does not undo eval()": (
        lambda: Switching(parameters(), undoes=False),
        r"updates differently: element 0 of .* after step \d",
    ),
    "inner products": (
        lambda: torch.optim.LBFGS(parameters()),
        "inner products of whole gradients.* Use Adam, or SGD with momentum. Outside",
    ),
    "a state in 8 bits": (
        lambda: Rounded(parameters()),
        r"rounds its state 'average' to 8 bits .*\(torch.int8\).* such as torch.optim.AdamW: the state is in the",
    ),
    "a state in 8 bits, for scalars": (lambda: Rounded(parameters()[2:]), "rounds its state"),
    "kernels of accelerators": (
        lambda: ForAccelerators(parameters()),
        "a step on a small copy of it failed.*adam_8bit.* can run there, for example SGD, Adam, AdamW",
    ),
    "a closure is required": (lambda: NeedsClosure(parameters()), r"the loss that step\(closure\) returns"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_class_that_fails_the_test_is_refused_with_what_differed(case: str) -> None:
    make, reason = REFUSED[case]
    with pytest.raises(ConfigurationError, match=reason) as refusal:
        server_optimizer(make())
    assert str(refusal.value).count("its state") <= 1


def test_what_is_no_optimizer_is_refused_with_what_to_do() -> None:
    wrapper = schedulefree.ScheduleFreeWrapper(torch.optim.SGD(parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"got a ScheduleFreeWrapper.*AdamWScheduleFree instead of"):
        paceline.DistributedOptimizer(wrapper)


def test_a_class_whose_updates_are_random_must_be_registered_and_its_state_is_looked_at() -> None:
    class Random(Holding):
        """Draws numbers that `torch.manual_seed()` does not determine."""

        def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
            if group["nested"]:
                super().update(weight, gradient, state, group)
            weight.sub_(gradient, alpha=random.random())

    with pytest.raises(
        ConfigurationError, match=r"two runs of it differ, .* random numbers .* register the class"
    ):
        server_optimizer(Random(parameters()))
    paceline.register_elementwise(Random)
    assert not server_optimizer(Random(parameters())).whole
    paceline.register_tensorwise(Random)
    assert server_optimizer(Random(parameters())).whole
    with pytest.raises(ConfigurationError, match=r"state norms\[0\] is a .*deque"):
        server_optimizer(Random(parameters(), nested=True))


def test_a_subclass_that_overrides_no_update_runs_as_its_base() -> None:
    optimizer = Renamed(parameters(), 0.25)
    assert server_optimizer(optimizer).name == "AdamW"
    [group] = read_groups(optimizer)
    assert (group["lr"], group["weight_decay"]) == (0.25, 0.3)
    assert "note" not in group


def test_a_scheduler_on_the_optimizer_is_not_called_by_the_test() -> None:
    optimizer = Lion(parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    first = optimizer.param_groups[0]["params"][0]
    first.grad = torch.ones_like(first)
    before = first.clone()
    server_optimizer(optimizer)
    assert torch.equal(first, before)
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Normalized(parameters(), lr=0.1),
        lambda: Centered(parameters()),
        lambda: Centered(parameters(), lr=1e-9),
        lambda: Centered(parameters()[:1]),
        lambda: CoupledEvaluation(parameters()),
    ],
)
def test_a_class_that_updates_each_tensor_by_itself_needs_whole_tensors(
    make: Callable[[], torch.optim.Optimizer],
) -> None:
    optimizer = make()
    assert server_optimizer(optimizer) == (class_name(type(optimizer)), True)


def test_a_class_may_be_registered_for_whole_tensors() -> None:
    paceline.register_tensorwise(JointlyNormalized)
    assert server_optimizer(JointlyNormalized(parameters(), lr=0.1)).whole
    with pytest.raises(UsageError, match="expected an optimizer class"):
        paceline.register_tensorwise(3)  # type: ignore[type-var]


def test_a_registered_class_need_not_give_the_same_on_slices() -> None:
    paceline.register_elementwise(Centered)
    assert server_optimizer(Centered(parameters())).name == class_name(Centered)
    paceline.register_elementwise(Hidden)
    with pytest.raises(ConfigurationError, match="built from its hyper-parameters"):
        server_optimizer(Hidden(parameters(), power=3))  # this cannot be vouched for
    with pytest.raises(UsageError, match="expected an optimizer class"):
        paceline.register_elementwise(3)  # type: ignore[type-var]


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "LBFGS", "SparseAdam"])
def test_alone_any_optimizer_works(name: str) -> None:
    model = nn.Linear(3, 2, bias=False)
    inner = getattr(torch.optim, name)(model.parameters())
    optimizer = paceline.DistributedOptimizer(inner)
    x = torch.randn(8, 3)
    before = model.weight.detach().clone()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        if name == "SparseAdam":
            assert model.weight.grad is not None
            model.weight.grad = model.weight.grad.to_sparse()
        result: torch.Tensor = loss
        return result

    first = optimizer.step(closure)
    assert closure() < first
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("sparse", [True, False])
def test_what_the_refusal_of_sparse_adam_advises_works_alone_and_in_a_run(sparse: bool) -> None:
    embedding = torch.nn.Embedding(6, 2, sparse=sparse)
    refused = torch.optim.SparseAdam(embedding.parameters())
    with pytest.raises(ConfigurationError, match="Use Adam, and create the embeddings with sparse=False"):
        server_optimizer(refused)
    optimizer = torch.optim.Adam(embedding.parameters())
    server_optimizer(optimizer)
    embedding(torch.tensor([1, 4])).sum().backward()
    if not sparse:
        optimizer.step()
        return
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()


def test_alone_the_methods_of_the_wrapped_optimizer_are_passed_through() -> None:
    class Private(Switching):
        _private = True

    optimizer = paceline.DistributedOptimizer(Private(parameters()))
    optimizer.train()
    assert optimizer.training
    sum(parameter.sum() for parameter in optimizer.param_groups[0]["params"]).backward()
    optimizer.step()
    optimizer.eval()
    assert not optimizer.training
    assert not hasattr(optimizer, "first_step")
    assert not hasattr(optimizer, "_private")


def test_in_a_run_the_methods_of_the_wrapped_optimizer_are_refused() -> None:
    class InRun:
        worker, workers, weights = 0, 2, ()

    install(InRun(), for_thread=True)  # type: ignore[arg-type]
    try:
        optimizer = paceline.DistributedOptimizer(Renamed(parameters(), 0.1))
    finally:
        install(None, for_thread=True)
    with pytest.raises(UsageError, match=r"Renamed.describe\(\) cannot be called in a run"):
        optimizer.describe()


# -- state --------------------------------------------------------------------------------------------------


def test_the_state_of_slices_joins_to_that_of_the_whole_and_back() -> None:
    optimizer = Lion(parameters())
    name = server_optimizer(optimizer).name
    tensors = optimizer.param_groups[0]["params"]
    layout = Layout.of([Parameter((f"p{i}",), tuple(p.shape), "float32") for i, p in enumerate(tensors)])
    spec = OptimizerSpec(name, read_groups(optimizer), (0,) * len(tensors))
    for parameter in tensors:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    slices = layout.slice_evenly(2)
    states = [(bounds, slice_state(bounds, tensors, optimizer.state)) for bounds in slices]
    loaded = []
    for bounds, state in states:
        sizes = {dtype: stop - start for dtype, (start, stop) in bounds.bounds.items()}
        server = optimizer_of_slice(spec, bounds, {dtype: torch.zeros(n) for dtype, n in sizes.items()})
        server.load_state(state)
        loaded.append((bounds, server.state()))
    joined = join_state(layout, loaded)
    expected = optimizer.state_dict()["state"]
    assert joined.keys() == expected.keys()
    for index, entries in expected.items():
        assert joined[index]["steps"] == entries["steps"] == 1
        assert type(joined[index]["steps"]) is int
        assert torch.equal(joined[index]["average"], entries["average"])


def test_a_counter_in_a_group_is_kept_when_the_learning_rate_changes() -> None:
    class CountingK(Rule):
        def __init__(self, params: Any, lr: float = 0.1, k: int = 0) -> None:
            super().__init__(params, lr, k=k)

        def step(self, closure: Any = None) -> Any:
            super().step()
            for group in self.param_groups:
                group["k"] += 1

        def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
            weight.sub_(gradient, alpha=group["lr"] / (1 + group["k"]))

    weight = nn.Parameter(torch.zeros(4))
    optimizer = CountingK([weight], lr=1.0)
    name = server_optimizer(optimizer).name
    layout = Layout.of([Parameter(("p",), (4,), "float32")])
    [bounds] = layout.slice_evenly(1)
    weights = {"float32": torch.zeros(bounds.bounds["float32"][1])}
    server = optimizer_of_slice(OptimizerSpec(name, read_groups(optimizer), (0,)), bounds, weights)
    for rate in (1.0, 0.5, 0.25):
        optimizer.param_groups[0]["lr"] = rate
        server.step(
            [{"float32": torch.ones_like(weights["float32"])}], (1.0,), b"\x01", read_groups(optimizer)
        )
    assert weights["float32"][0] == pytest.approx(-(1 + 0.5 / 2 + 0.25 / 3))


# -- where the servers find the class -------------------------------------------------------------------------


SCRIPT = """\
from __future__ import annotations
import math, torch
from helper import thing
try:
    import json as fast
except ImportError:
    fast = None
RATE = 2.0 ** 3
def scaled(x):
    return x * RATE + math.pi
loss = print("the script was run")
class Base(torch.optim.Optimizer):
    def step(self, closure=None):
        loss = 3
        return scaled(loss) + len(fast.dumps(1))
class Mine(Base):
    pass
class Bound(Base):
    def step(self):
        return loss
raise SystemExit
"""


def test_a_definition_is_taken_from_a_script_that_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    kind: Any = definition(script, "Mine")
    assert kind.step(None) == pytest.approx(3 * 8 + 3.14159265 + 1)
    assert capsys.readouterr().out == ""
    with pytest.raises(ConfigurationError, match=r"uses 'loss', which line 11 of train\.py computes"):
        definition(script, "Bound")
    with pytest.raises(ConfigurationError, match="does not define Other"):
        definition(script, "Other")


def test_only_classes_from_places_named_at_launch_are_loaded(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from lion_pytorch import Lion\nimport os.path, models.big as big\nfrom . import x\n")
    assert imported_packages(script) == ("lion_pytorch", "models")
    sources = OptimizerSources(("lion_pytorch", "models"))
    sources.require_named("lion_pytorch.lion_pytorch:Lion")
    for name, advice in {
        "lion:Lion": "--import lion",
        "lion_pytorch_evil:Lion": "--import lion_pytorch_evil",
        "os:system": "not|neither",
        "__main__:Lion": "defined inside a function",
        "models.big:make.<locals>.Lion": "defined inside a function",
    }.items():
        with pytest.raises(ConfigurationError, match=advice):
            sources.require_named(name)
    assert not imported_packages(tmp_path / "none.py")
    with pytest.raises(ConfigurationError):
        OptimizerSources(("os",)).load("os:system")


def test_a_process_of_a_run_loads_only_optimizer_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "_sources", [])
    foreign.use_sources(OptimizerSources((__name__,)))
    assert foreign.class_of(f"{__name__}:Lion") is Lion
    with pytest.raises(ConfigurationError, match=r"expected a subclass of torch\.optim\.Optimizer"):
        foreign.class_of(f"{__name__}:parameters")
    with pytest.raises(ConfigurationError, match="cannot be loaded by the servers"):
        foreign.class_of(f"{__name__}:Missing")


def test_classes_of_a_notebook_are_sent_when_a_function_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Lion):
        pass

    sources = foreign.loaded_optimizers(["extra"])
    assert "extra" in sources.packages
    assert __name__ in sources.packages
    kind: Any = sources.load(class_name(Local))
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    kind([weight], lr=0.5).step()
    assert weight.tolist() == [-0.5, -0.5]


def test_unknown_hyper_parameters_are_refused_by_name() -> None:
    optimizer = Worded(parameters())
    optimizer.param_groups[0]["mix"] = {"a": 1}
    with pytest.raises(ConfigurationError, match=r"mix is \{'a': 1\}"):
        read_groups(optimizer)


def test_a_default_of_the_class_that_cannot_be_sent_need_not_be_sent() -> None:
    class Typed(Rule):
        def __init__(self, params: Any, lr: float = 0.1, dtype: Any = torch.float64) -> None:
            super().__init__(params, lr, dtype=dtype)

        def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
            weight.sub_(gradient.to(group["dtype"]), alpha=group["lr"])

    assert not server_optimizer(Typed(parameters())).whole
    assert read_groups(Typed(parameters())) == ({"lr": 0.1},)
    with pytest.raises(ConfigurationError, match=r"dtype is torch\.float16, .* or the default of the class"):
        server_optimizer(Typed(parameters(), dtype=torch.float16))


def test_groups_may_be_told_apart_by_entries_of_the_script() -> None:
    class Both(Rule):
        """Whitens matrices, as the Muon of several packages does, and takes the sign for other parameters."""

        def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
            if group["use_muon"]:
                assert gradient.dim() == 2
                u, _, v = torch.linalg.svd(gradient, full_matrices=False)
                gradient = u @ v
            weight.sub_(gradient.sign() if not group["use_muon"] else gradient, alpha=group["lr"])

    matrix, *others = parameters()
    optimizer = Both([{"params": [matrix], "use_muon": True}, {"params": others, "use_muon": False}])
    assert server_optimizer(optimizer).whole
    assert read_groups(optimizer) == ({"lr": 0.1, "use_muon": True}, {"lr": 0.1, "use_muon": False})
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 10, cycle_momentum=False)
    optimizer.param_groups[0]["note"] = "added later"
    assert [group.keys() for group in read_groups(optimizer)] == [{"lr", "use_muon"}] * 2


def test_arguments_of_the_constructor_come_from_the_first_group() -> None:
    name = server_optimizer(Hidden(parameters())).name
    optimizer = make_optimizer(name, ({"lr": 0.5},), [[torch.zeros(1)]])
    assert optimizer.defaults["lr"] == 0.5


# -- training -----------------------------------------------------------------------------------------------


class Averaging(Rule):
    """Momentum with weight decay: sensitive to the size of the gradient, unlike `Lion`."""

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
        average = state.setdefault("average", torch.zeros_like(weight))
        average.mul_(0.9).add_(gradient)
        weight.sub_(average + 0.01 * weight, alpha=group["lr"])


def test_under_bsp_a_run_equals_one_process_on_the_joint_batch() -> None:
    def train() -> None:
        trained.append(_trained())

    trained: list[dict[str, torch.Tensor]] = []
    result = paceline.simulate(Cluster(compute_s=[1.0, 2.0], servers=2), "bsp", train_fn=train, shards=3)
    assert len(trained) == 2
    assert result.state_dict is not None
    for name, tensor in _trained().items():
        torch.testing.assert_close(result.state_dict[name], tensor, rtol=1e-12, atol=1e-12)


def _trained() -> dict[str, torch.Tensor]:
    """Train on this worker's part of each batch, with a rate that changes, and return the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = paceline.DistributedOptimizer(Averaging(model.parameters(), lr=0.1), model=model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        batch = torch.randn(8, 4, generator=generator, dtype=torch.float64)
        part = batch[paceline.worker_index() :: paceline.worker_count()]
        optimizer.zero_grad()
        model(part).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


LIVE = """\
import torch
import paceline

print("this script runs")
RATE = 2.0

class Mine(torch.optim.Optimizer):
    def __init__(self, params, lr=0.5):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"] * RATE)

model = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = paceline.DistributedOptimizer(Mine(model.parameters()))
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("trained:", model.weight.tolist(), optimizer.state_dict()["state"][0])
"""


def test_servers_run_a_class_that_the_script_defines(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(LIVE)
    options = ["--workers", "1", "--servers", "2", "--run-dir", str(run_dir)]
    ended = run_program("-m", "paceline", "run", *options, str(script))
    assert "trained: [[-3.0, -3.0]] {'steps': 3}" in ended.stdout
    assert ended.returncode == 0
    assert all("this script runs" not in log.read_text() for log in run_dir.glob("server-*.log"))

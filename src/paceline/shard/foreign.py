"""Optimizers that are not torch's: their classes, and the test of whether they may run on slices or on whole tensors.

A server builds such an optimizer from the hyper-parameters alone, as `Class(groups)`, and runs it on a part of the
parameters. The result is right only if two conditions hold, which a worker tests before training begins:

- An optimizer that is built from the hyper-parameters makes the same updates as the script's own optimizer.
- The class updates elements or tensors independently. If it updates each element independently, and keeps its state per
  element or as one number per parameter, it may run on slices. If it updates each tensor independently, it may run on
  whole tensors.

The test takes a few steps on small parameters of several shapes, with the script's optimizer, and with optimizers that
are built like those of two servers: first on slices, then on whole tensors. The test is done in double precision and in
the dtypes of the model, and takes a few milliseconds. If the results differ both on slices and on whole tensors, the
optimizer is refused with a message that says what differed.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import cloudpickle
import numpy as np
import torch

from ..core.layout import HyperParameters
from ..errors import ConfigurationError, UsageError, first_line
from .optimizer_sources import OptimizerSources, class_name
from .vectors import entries_of, tensors_of

SHAPES = ((), (1,), (7,), (4, 3), (3, 2, 2, 2), (3, 5), (2, 3, 2), (5, 1, 2), (2, 3, 1, 2))
LARGE = ((4608,), (72, 64), (18, 16, 16), (18, 16, 4, 4))  # shapes for the test of rounded states
STEPS = 12
WITHOUT_GRADIENT = ((2, 1), (3, 1), (3, 3), (7, 4))  # (step, parameter of the group)
EVALUATED = (3, 8, STEPS)  # steps after which optimizers with modes are evaluated
MOST_GROUPS = 8  # number of parameter groups that are tested
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
COARSE = 0.1  # tolerance for dtypes that are not in TOLERANCES, relative to the largest change of a parameter
EIGHT_BITS = {torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2}
USUAL_RATE = 0.01  # learning rate for the test if the script's rate is 0, as at the start of a warm-up

Kind = TypeVar("Kind", bound=type[torch.optim.Optimizer])

_registered: dict[type, bool] = {}  # class -> True if it needs whole tensors
_classes: dict[str, type[torch.optim.Optimizer]] = {}
# The places from which this process may take optimizer classes: a list of at most one element, which is empty in a
# process that is not part of a run.
_sources: list[OptimizerSources] = []


def register_elementwise(cls: Kind) -> Kind:
    """State that an optimizer class updates each element independently, so that it may run on slices.

    Without this call, Paceline tests the class before training begins, and does not run the class on slices if the
    results on slices differ from those on whole tensors. If the test refuses a class although you know that slices make
    no difference, register the class. An example is a class that rounds stochastically. This function can be used as a
    decorator. The servers must be able to load the class (see 'Choose an optimizer' in the guide).

    Args:
        cls: a subclass of `torch.optim.Optimizer`.

    Returns:
        The class, unchanged.

    Raises:
        UsageError: `cls` is not a subclass of `torch.optim.Optimizer`.

    Example:
        >>> import paceline, torch
        >>> @paceline.register_elementwise
        ... class SignSGD(torch.optim.Optimizer):
        ...     def __init__(self, params, lr=0.01):
        ...         super().__init__(params, {"lr": lr})
        ...
        ...     @torch.no_grad()
        ...     def step(self, closure=None):
        ...         for group in self.param_groups:
        ...             for p in group["params"]:
        ...                 if p.grad is not None:
        ...                     p.add_(p.grad.sign(), alpha=-group["lr"])
    """
    return _register(cls, "register_elementwise", whole=False)


def register_tensorwise(cls: Kind) -> Kind:
    """State that an optimizer class updates each tensor independently of others, so it may run on whole tensors.

    Without this call, Paceline tests the class before training begins. If the test refuses a class although you know
    that it updates each tensor independently, register the class. An example is a class that rounds stochastically.
    This function can be used as a decorator. The servers must be able to load the class (see 'Choose an optimizer' in
    the guide).

    Args:
        cls: a subclass of `torch.optim.Optimizer`.

    Returns:
        The class, unchanged.

    Raises:
        UsageError: `cls` is not a subclass of `torch.optim.Optimizer`.

    Example:
        >>> import paceline, torch
        >>> @paceline.register_tensorwise
        ... class NormalizedSGD(torch.optim.Optimizer):
        ...     def __init__(self, params, lr=0.01):
        ...         super().__init__(params, {"lr": lr})
        ...
        ...     @torch.no_grad()
        ...     def step(self, closure=None):
        ...         for group in self.param_groups:
        ...             for p in group["params"]:
        ...                 if p.grad is not None:
        ...                     p.add_(p.grad / p.grad.norm(), alpha=-group["lr"])
    """
    return _register(cls, "register_tensorwise", whole=True)


def _register(cls: Kind, function: str, *, whole: bool) -> Kind:
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise UsageError(f"{function}() was called with {cls!r}, expected an optimizer class.")
    _registered[cls] = whole
    return cls


def use_sources(sources: OptimizerSources) -> None:
    """Set the places from which this process may take optimizer classes."""
    _sources[:] = [sources]


def loaded_optimizers(imports: Sequence[str]) -> OptimizerSources:
    """Return the places from which the servers of a run may take the optimizer classes that this process has loaded.

    Classes that other processes cannot import, because a script or a notebook defines them, are pickled.

    Args:
        imports: modules that were named for the run.
    """
    packages, sent = list(imports), {}
    waiting = torch.optim.Optimizer.__subclasses__()
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            # Most of these classes are not used in the run, so a class that cannot be pickled is no error.
            with suppress(Exception):
                sent[class_name(kind)] = cloudpickle.dumps(kind)
        else:
            packages.append(kind.__module__)
    return OptimizerSources(tuple(dict.fromkeys(packages)), sent=sent)


def class_of(name: str) -> type[torch.optim.Optimizer]:
    """Return the class with a name of the form "module:Class".

    Raises:
        ConfigurationError: this process is not allowed to load the class, or cannot load it.
    """
    if name not in _classes:
        if not _sources:
            raise ConfigurationError(f"the optimizer class {name} is not known in this process.")
        found = _sources[0].load(name)
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            raise ConfigurationError(f"{name} is {found!r}, expected a subclass of torch.optim.Optimizer.")
        _classes[name] = found
    return _classes[name]


def build(kind: type[torch.optim.Optimizer], settings: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return a new optimizer with these parameter groups, each of which contains all hyper-parameters.

    Arguments of the constructor that are also hyper-parameters have the values of the first group. If the class has
    modes, the optimizer is in training mode.
    """
    accepted = inspect.signature(kind).parameters
    arguments = {key: value for key, value in settings[0].items() if key in accepted and key != "params"}
    constructor: Any = kind
    optimizer: Any = constructor([dict(each) for each in settings], **arguments)
    if has_modes(kind):
        optimizer.train()
    built: torch.optim.Optimizer = optimizer
    return built


def has_modes(kind: type) -> bool:
    """Return True if a class has `train()` and `eval()`, which switch between weights for training and evaluation."""
    return callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None))


def evaluated(optimizer: torch.optim.Optimizer, copies: Mapping[int, torch.Tensor]) -> torch.optim.Optimizer:
    """Return a copy of an optimizer after its `eval()`. The optimizer itself, its state and its weights stay the same.

    Parameters without state keep their weights: they have had no step, and the `eval()` of some classes fails for them.

    Args:
        optimizer: an optimizer of a class that has modes.
        copies: the `id` of each parameter -> a copy of its weights. The copy is set to the weights for evaluation.
    """
    other: Any = copied(optimizer, copies)
    for group in other.param_groups:
        group["params"] = [parameter for parameter in group["params"] if other.state.get(parameter)]
    other.eval()
    result: torch.optim.Optimizer = other
    return result


def evaluated_state(
    optimizer: torch.optim.Optimizer, copies: Mapping[int, torch.Tensor], state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Return the `state_dict()` of an optimizer after its `eval()`, given its `state_dict()` in training mode.

    Args:
        optimizer: an optimizer of a class that has modes. It is not changed.
        copies: the `id` of each parameter -> a copy of its weights in training.
        state_dict: the optimizer's `state_dict()` in training mode.
    """
    other: Any = copied(optimizer, copies, without=("state",))
    other.state = defaultdict(dict)
    other.load_state_dict(state_dict)
    other.eval()
    result: dict[str, Any] = other.state_dict()
    return result


def copied(
    optimizer: torch.optim.Optimizer, parameters: Mapping[int, torch.Tensor], without: Container[str] = ()
) -> torch.optim.Optimizer:
    """Return a copy of an optimizer that refers to other parameters.

    Args:
        optimizer: the optimizer.
        parameters: the `id` of each parameter -> the parameter that takes its place.
        without: names of attributes that the copy does not get.
    """
    kind = type(optimizer)
    # A scheduler replaces the method `step` by one that calls the script's optimizer.
    attributes = {
        key: value
        for key, value in vars(optimizer).items()
        if key not in without and not callable(getattr(kind, key, None))
    }
    attributes |= {key: OrderedDict() for key in attributes if key.startswith("_optimizer_")}
    other = kind.__new__(kind)
    vars(other).update(copy.deepcopy(attributes, dict(parameters)))
    return other


class Acceptance(NamedTuple):
    """The result of the test of an optimizer.

    Attributes:
        reason: why the servers cannot run the optimizer; "" if they can.
        whole: True if the optimizer needs whole tensors.
        instead: what to do if the servers cannot run the optimizer; "" for the usual advice.
    """

    reason: str = ""
    whole: bool = False
    instead: str = ""


def look_inside(optimizer: torch.optim.Optimizer) -> Acceptance:
    """Return whether the servers could build an optimizer: they cannot build one that contains another optimizer."""
    for attribute, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            return Acceptance(
                f"it is built around another optimizer, {type(value).__name__} in the attribute {attribute!r}, so "
                "the servers cannot build it from hyper-parameters alone",
                instead=AROUND,
            )
    return Acceptance()


def try_foreign(optimizer: torch.optim.Optimizer, groups: Sequence[HyperParameters]) -> Acceptance:
    """Return whether the servers can run an optimizer that is not one of torch's, and whether it needs whole tensors.

    Args:
        optimizer: the script's optimizer.
        groups: its hyper-parameters.

    Raises:
        ConfigurationError: the servers cannot load the class.
    """
    kind = type(optimizer)
    if not _sources:
        _classes.setdefault(class_name(kind), kind)
    servers_kind = kind if _is_sent(kind) else class_of(class_name(kind))
    with torch.random.fork_rng(devices=[]):
        if reason := _rounded_state(optimizer, groups):
            return Acceptance(reason, instead=UNROUNDED)
        trial = _Trial(optimizer, servers_kind, groups[:MOST_GROUPS])
        known = _registered.get(kind)
        if trial.reason or (trial.random and known is None):
            return Acceptance(trial.reason or RANDOM)
        if trial.random:
            return Acceptance(trial.unusual_state(sliced=known is False), known is True)
        if reason := trial.difference(trial.whole, BUILT, sliced=known is False):
            return Acceptance(reason)
        whole = known
        reasons = []
        for parts, words, kept_whole in ((trial.slices, ON_SLICES, False), (trial.tensors, ON_TENSORS, True)):
            if whole is None:
                if reason := trial.difference(parts, words, sliced=not kept_whole):
                    reasons.append(reason)
                else:
                    whole = kept_whole
        if whole is None:
            return Acceptance("; ".join(dict.fromkeys(reasons)))
        return Acceptance(trial.difference(trial.whole, RESUMED, sliced=not whole, resumed=True), whole)


def groups_without_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return a copy of each parameter group, without its parameters."""
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def changed_groups(
    optimizer: torch.optim.Optimizer, settings: Sequence[HyperParameters], built: Sequence[Mapping[str, Any]]
) -> tuple[HyperParameters, ...]:
    """Return the entries that an optimizer has itself changed in its groups, or added to them.

    Args:
        optimizer: the optimizer.
        settings: the hyper-parameters of each group as they were set last.
        built: the optimizer's groups right after it was built, which give the first values of entries that are not
            hyper-parameters.
    """
    changed: list[HyperParameters] = []
    for group, known, before in zip(optimizer.param_groups, settings, built, strict=True):
        numbers = {
            key: value.item()
            if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1)
            else value
            for key, value in group.items()
        }
        changed.append(
            {
                key: value
                for key, value in numbers.items()
                if isinstance(value, int | float | str | None)
                and {**before, **known}.get(key, group) != value
            }
        )
    return tuple(changed)


def _is_sent(kind: type) -> bool:
    return bool(_sources) and class_name(kind) in _sources[0].sent


# -- the test -----------------------------------------------------------------------------------------------


class _Segment(NamedTuple):
    """A part of one parameter: the elements from `start` to `stop`, flattened; or the whole parameter, unflattened."""

    group: int
    parameter: int
    start: int = 0
    stop: int = -1

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of this part of a tensor."""
        return tensor.clone() if self.stop < 0 else tensor.reshape(-1)[self.start : self.stop].clone()


AROUND = (
    "Give that optimizer to DistributedOptimizer, and let the script do the rest: change weights between two steps in "
    "`with optimizer.editing():`, as Lookahead does, compute the gradient at other weights in "
    "`with optimizer.editing(private=True):`, as SAM does, and average weights with torch.optim.swa_utils.AveragedModel"
)
UNROUNDED = (
    "Use the class whose state is not rounded, such as torch.optim.AdamW: the state is in the memory of the servers, "
    "so it takes no memory on an accelerator"
)
BUILT = "an optimizer that is built from its hyper-parameters updates differently: "
ON_SLICES = "the update of an element depends on other elements: on slices, "
ON_TENSORS = "and the update of a tensor depends on other tensors: on whole tensors, "
RESUMED = "a checkpoint cannot hold all that it keeps: after a resume, "
RANDOM = (
    "two runs of it differ, because it draws random numbers that torch.manual_seed() does not determine; register the "
    "class if it updates each element or each tensor independently"
)


class _Trial:
    """A test of an optimizer.

    Args:
        optimizer: the script's optimizer.
        kind: the class that servers use.
        groups: the hyper-parameters.

    Attributes:
        whole, slices, tensors: all parameters of the test: undivided; divided between two servers by slices; and
            divided between two servers by whole tensors.
        reason: why the servers cannot run the optimizer, no matter how its parameters are divided; "" if there is no
            such reason.
        random: True if the optimizer's updates differ when they are repeated.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: type[torch.optim.Optimizer],
        groups: Sequence[HyperParameters],
    ) -> None:
        self._kind = kind
        self._groups = [
            {**group, "lr": group["lr"] or USUAL_RATE} if "lr" in group else group for group in groups
        ]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        whole = _segments(
            [{p.dim() for p in group["params"]} for group in optimizer.param_groups[: len(groups)]]
        )
        cuts = [(segment, torch.Size(SHAPES[segment.parameter]).numel()) for segment in whole]
        first = [segment._replace(stop=count // 3) for segment, count in cuts if count // 3]
        second = [segment._replace(start=count // 3, stop=count) for segment, count in cuts]
        self.whole, self.slices, self.tensors = [whole], [first, second], [whole[::2], whole[1::2]]
        self._expected: dict[torch.dtype, tuple[list[Flat], Sequence[HyperParameters]]] = {}
        used = sorted({p.dtype for p in parameters if p.is_floating_point()}, key=str)
        failed = ""
        for dtype in dict.fromkeys([torch.float64, *used]):
            small = _copy_of(optimizer, self._groups, whole, dtype)
            try:
                steps = list(_steps([small], self.whole, dtype, alone=True))
            except Exception as error:  # an optimizer may raise any exception
                failed = f"a step on a small copy of it failed: {first_line(error)}"
            else:
                self._expected[dtype] = steps, changed_groups(small.optimizer, self._groups, small.built)
        # Some classes cannot take steps in double precision.
        self.reason = "" if self._expected.keys() >= set(used) else failed
        dtype = next(iter(self._expected), torch.float64)
        self.random = False
        for take, needs in {_take: "", **NEEDS}.items():
            small = _copy_of(optimizer, self._groups, whole, dtype)
            with suppress(Exception):  # a step that fails here fails in the script, too
                steps = list(_steps([small], self.whole, dtype, alone=True, take=take))
                if not self._expected or _difference(self._expected[dtype][0], steps, dtype):
                    self.random = self.random or not needs
                    self.reason = "" if self.random else needs

    def difference(
        self, parts: list[list[_Segment]], words: str, *, sliced: bool, resumed: bool = False
    ) -> str:
        """Return a sentence that says what differs if servers hold these parts; "" if nothing differs.

        Args:
            parts: what each server holds.
            words: the first words of the sentence.
            sliced: True if the state must have an entry for each element, or for each parameter.
            resumed: True if other servers go on from a checkpoint after half of the steps.
        """
        for dtype in self._expected:
            servers: list[_Running] = []
            if difference := self._difference(servers, parts, dtype, resumed=resumed):
                return words + difference
            if problem := _unusual_state([each.optimizer for each in servers], sliced=sliced):
                return problem
        return ""

    def unusual_state(self, *, sliced: bool) -> str:
        """Describe an entry of the state that servers cannot hold; "" if there is none. See `difference`."""
        for dtype in self._expected:
            server = _built_by_server(self._kind, self._groups, self.whole[0], dtype)
            try:
                list(_steps([server], self.whole, dtype))
            except Exception as error:  # an optimizer may raise any exception
                return f"{BUILT}it fails with {first_line(error)}"
            if problem := _unusual_state([server.optimizer], sliced=sliced):
                return problem
        return ""

    def _difference(
        self, servers: list[_Running], parts: list[list[_Segment]], dtype: torch.dtype, *, resumed: bool
    ) -> str:
        """Describe the first element, or entry of a group, that differs between servers and the script's optimizer.

        Args:
            servers: the list to which the optimizers of the servers are added.
            parts: what each server holds.
            dtype: the dtype of the parameters.
            resumed: see `difference`.
        """
        resume = partial(_resumed, self._kind, self._groups) if resumed else None
        expected, counters = self._expected[dtype]
        try:
            servers += [_built_by_server(self._kind, self._groups, segments, dtype) for segments in parts]
            if difference := _difference(expected, list(_steps(servers, parts, dtype, resume=resume)), dtype):
                return difference
        except Exception as error:  # an optimizer may raise any exception
            return f"it fails with {first_line(error)}"
        for server, segments in zip(servers, parts, strict=True):
            found = changed_groups(server.optimizer, self._groups, server.built)
            for group in {segment.group for segment in segments}:
                for key in sorted(counters[group].keys() | found[group].keys()):
                    here, there = found[group].get(key), counters[group].get(key)
                    if here != there:
                        return f"{key!r} in a parameter group is {here} instead of {there} after step {STEPS}"
        return ""


def _segments(dimensions: Sequence[set[int]]) -> list[_Segment]:
    """Return all parameters of the test. They have as many dimensions as the script's, so that the class accepts them.

    Args:
        dimensions: for each group, the numbers of dimensions of its parameters.
    """
    return [
        _Segment(group, index)
        for group, found in enumerate(dimensions)
        for index in [index for index, shape in enumerate(SHAPES) if len(shape) in found]
        or range(len(SHAPES))
    ]


class _Running(NamedTuple):
    """An optimizer, its parameters in the order of its segments, and its groups before the first step."""

    optimizer: torch.optim.Optimizer
    parameters: list[torch.Tensor]
    built: list[dict[str, Any]]


Resume = Callable[[Sequence[_Segment], _Running], _Running]
"""Function of an optimizer's segments and of the optimizer. It returns the optimizer that a resumed server builds."""


def _take(running: _Running, step: int) -> None:
    type(running.optimizer).step(running.optimizer)


def _take_with_loss(running: _Running, step: int) -> None:
    type(running.optimizer).step(running.optimizer, lambda: 2.0**-step)


def _take_with_graph(running: _Running, step: int) -> None:
    """Take a step with gradients that have the same values, but can be differentiated again."""
    for parameter in running.parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad + 3 * (parameter - parameter.detach())
    _take(running, step)


NEEDS: dict[Callable[[_Running, int], None], str] = {
    _take_with_loss: "its update depends on the loss that step(closure) returns, but servers receive only gradients",
    _take_with_graph: "it computes derivatives of the gradients, but servers receive only the gradients' values",
}
"""Ways to take a step that change the updates of some optimizers -> why such optimizers cannot run on servers."""


def _initial(segment: _Segment, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(segment.parameter)
    return segment.of(torch.randn((SHAPES + LARGE)[segment.parameter], generator=generator, dtype=dtype))


def _gradient(segment: _Segment, step: int, dtype: torch.dtype) -> torch.Tensor | None:
    if (step, segment.parameter) in WITHOUT_GRADIENT:
        return None
    generator = torch.Generator().manual_seed(1000 + 100 * step + segment.parameter)
    lasting = torch.Generator().manual_seed(500 + segment.parameter)
    shape = (SHAPES + LARGE)[segment.parameter]
    whole = torch.randn(shape, generator=generator, dtype=dtype) + torch.randn(
        shape, generator=lasting, dtype=dtype
    )
    return segment.of(whole * 3.0 ** (step % 4 - segment.parameter))


def _copy_of(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[HyperParameters],
    segments: Sequence[_Segment],
    dtype: torch.dtype,
) -> _Running:
    """Return a copy of the script's optimizer with other parameters and without state."""
    parameters = [
        [torch.nn.Parameter(_initial(segment, dtype)) for segment in segments if segment.group == group]
        for group in range(len(groups))
    ]
    # A copy of an attribute refers to the small parameters wherever the attribute refers to the script's parameters.
    memo: dict[int, Any] = {
        id(parameter): small[0]
        for group, small in zip(optimizer.param_groups, parameters, strict=False)
        for parameter in group["params"]
    }
    other = copied(optimizer, memo, without=("state", "param_groups"))
    other.state = defaultdict(dict)
    of_all = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    other.state.update(copy.deepcopy(of_all, memo))
    other.param_groups = [
        {
            **copy.deepcopy({k: v for k, v in group.items() if k != "params"}, memo),
            **settings,
            "params": small,
        }
        for group, settings, small in zip(optimizer.param_groups, groups, parameters, strict=False)
    ]
    if has_modes(type(optimizer)):
        type(optimizer).train(other)  # type: ignore[attr-defined]
    return _Running(other, list(itertools.chain(*parameters)), groups_without_parameters(other))


def _rounded_state(optimizer: torch.optim.Optimizer, groups: Sequence[HyperParameters]) -> str:
    """Describe an entry of the state that is kept in 8 bits or fewer; "" if there is none.

    Classes round only the state of large parameters, so the test with small parameters does not reveal the rounding.
    This function therefore takes a step with a large parameter. If the step fails, the test that follows says why.
    """
    dimensions = max((p.dim() for group in optimizer.param_groups for p in group["params"]), default=1)
    segment = _Segment(0, len(SHAPES) + min(max(dimensions, 1), len(LARGE)) - 1)
    try:
        large, [parameter], _ = _copy_of(optimizer, groups[:1], [segment], torch.float32)
        parameter.grad = _gradient(segment, 1, torch.float32)
        type(large).step(large)
    except Exception:  # an optimizer may raise any exception
        return ""
    for key, value in large.state[parameter].items():
        if isinstance(value, torch.Tensor) and value.dim() and value.dtype in EIGHT_BITS:
            return f"it rounds its state {key!r} to 8 bits in blocks ({value.dtype}), with kernels of its own"
    return ""


def _built_by_server(
    kind: type[torch.optim.Optimizer],
    groups: Sequence[HyperParameters],
    segments: Sequence[_Segment],
    dtype: torch.dtype,
) -> _Running:
    """Return an optimizer that is built as a server builds it, with parameters for these segments."""
    parameters = [_initial(segment, dtype) for segment in segments]
    pairs = list(zip(segments, parameters, strict=True))
    settings = [
        {**settings, "params": [p for segment, p in pairs if segment.group == group]}
        for group, settings in enumerate(groups)
    ]
    optimizer = build(kind, settings)
    return _Running(optimizer, parameters, groups_without_parameters(optimizer))


def _resumed(
    kind: type[torch.optim.Optimizer],
    groups: Sequence[HyperParameters],
    segments: Sequence[_Segment],
    before: _Running,
) -> _Running:
    """Return the optimizer that a server builds from a checkpoint of the optimizer `before`."""
    running = _built_by_server(kind, groups, segments, before.parameters[0].dtype)
    for old, new in zip(before.parameters, running.parameters, strict=True):
        new.copy_(old)
        kept = {
            name: value.clone() for name, value in tensors_of(before.optimizer.state.get(old, {})).items()
        }
        running.optimizer.state[new].update(entries_of(kept))
    counters = changed_groups(before.optimizer, groups, before.built)
    for group, counted in zip(running.optimizer.param_groups, counters, strict=True):
        group.update(counted)
    return running


Flat = tuple[str, list[torch.Tensor]]
"""A moment of the test in words, such as "after step 3", and the flattened parameters at this moment."""


def _steps(
    optimizers: list[_Running],
    parts: Sequence[Sequence[_Segment]],
    dtype: torch.dtype,
    *,
    alone: bool = False,
    take: Callable[[_Running, int], None] = _take,
    resume: Resume | None = None,
) -> Iterator[Flat]:
    """Yield the parameters before the first step and after each step, and sometimes the weights for evaluation.

    Args:
        optimizers: the optimizers.
        parts: the segments of each optimizer.
        dtype: the dtype of the parameters.
        alone: True to evaluate as a process outside a run does, False to evaluate as a server does.
        take: function that takes the step with this number.
        resume: function of (segments, optimizer) that is called after half of the steps and returns another optimizer,
            which makes the rest of the steps. None to keep the optimizers.
    """
    torch.manual_seed(0)
    for step in range(STEPS + 1):
        for index, (running, segments) in enumerate(zip(optimizers, parts, strict=True)):
            if step:
                for parameter, segment in zip(running.parameters, segments, strict=True):
                    parameter.grad = _gradient(segment, step, dtype)
                take(running, step)
            if resume is not None and step == STEPS // 2:
                optimizers[index] = resume(segments, running)
        yield f"after step {step}", _flat([running.parameters for running in optimizers], parts, dtype)
        if step in EVALUATED and has_modes(type(optimizers[0].optimizer)):
            values = [
                _evaluated(running.optimizer, running.parameters, alone=alone) for running in optimizers
            ]
            yield f"in an evaluation after step {step}", _flat(values, parts, dtype)


def _evaluated(optimizer: Any, parameters: Sequence[torch.Tensor], *, alone: bool) -> list[torch.Tensor]:
    """Return the weights that an optimizer gives for an evaluation."""
    if not alone:
        copies = {id(parameter): parameter.clone() for parameter in parameters}
        evaluated(optimizer, copies)
        return list(copies.values())
    optimizer.eval()
    values = [parameter.clone() for parameter in parameters]
    optimizer.train()
    return values


def _flat(
    values: Sequence[Sequence[torch.Tensor]], parts: Sequence[Sequence[_Segment]], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return all parameters, flattened, given the values of the segments of each part."""
    count = 1 + max(segment.group for segments in parts for segment in segments)
    flat = [torch.zeros(torch.Size(shape).numel(), dtype=dtype) for _ in range(count) for shape in SHAPES]
    for of_part, segments in zip(values, parts, strict=True):
        for value, (group, index, start, stop) in zip(of_part, segments, strict=True):
            target = flat[group * len(SHAPES) + index]
            target[start : stop if stop >= 0 else None] = value.detach().reshape(-1)
    return flat


def _difference(expected: Sequence[Flat], found: Sequence[Flat], dtype: torch.dtype) -> str:
    """Describe the first element in which two sequences of parameters differ; "" if there is none."""
    tolerance = TOLERANCES.get(dtype, COARSE)
    _, start = expected[0]
    for (when, ours), (_, theirs) in zip(expected, found, strict=True):
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            allowed = (
                tolerance * (mine - start[index]).abs().max() + 8 * torch.finfo(dtype).eps * mine.abs().max()
            )
            wrong = ~((mine - other).abs() <= allowed) & ~(mine.isnan() & other.isnan())
            if wrong.any():
                element = int(wrong.nonzero()[0])
                shape = list(SHAPES[index % len(SHAPES)])
                return (
                    f"element {element} of a parameter of shape {shape} is {float(other[element])} instead of "
                    f"{float(mine[element])} {when}"
                )
    return ""


def _unusual_state(optimizers: Sequence[torch.optim.Optimizer], *, sliced: bool) -> str:
    """Describe an entry of the state that servers cannot hold; "" if there is none.

    If servers hold slices, an entry must be a single number, or a tensor of the same shape as its parameter. Otherwise,
    an entry may also be a list, a tuple or a dictionary.
    """
    for optimizer in optimizers:
        for parameter, entries in optimizer.state.items():
            if not isinstance(parameter, torch.Tensor):
                return f"its state has an entry {parameter!r} besides those of parameters"
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    if sliced and value.dim() and value.shape != parameter.shape:
                        return (
                            f"its state {key!r} has shape {list(value.shape)} for a parameter of shape "
                            f"{list(parameter.shape)}; servers can hold a number per element or per parameter"
                        )
                elif isinstance(value, list | tuple | dict) and not sliced:
                    try:
                        tensors_of({key: value})
                    except UsageError as error:
                        problem, _, _ = str(error).partition(", ")
                        return f"its state {problem}; expected numbers, strings and tensors"
                elif not isinstance(value, int | float | type(None)):
                    return (
                        f"its state {key!r} is of type {type(value).__name__}; expected a tensor or a number"
                    )
    return ""

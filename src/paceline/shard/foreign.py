"""Optimizers that are not torch's: their classes, and the test whether they may run on slices or on whole tensors.

A server builds such an optimizer from the hyper-parameters alone, as `Class(groups)`, and runs it on a part of the
parameters. This gives the right result only if two conditions hold, which a worker tests before training begins:

- An optimizer that is built from the hyper-parameters makes the same updates as the script's own.
- The class updates each element independently, and keeps its state per element or as one number per parameter. Then it
  may run on slices. Or it updates each tensor independently. Then it may run on whole tensors.

The test takes a few steps on small parameters of several shapes, with the script's optimizer, and with optimizers
that are built like those of two servers: first on slices, then on whole tensors. It is done in double precision and in
the dtypes of the model, and takes some milliseconds. If all results differ, the optimizer is refused, with what
differed.

Some classes *have modes*: their `train()` and `eval()` exchange the weights for others, which they compute from the
weights and the state, as schedule-free optimizers do. A server's optimizer is in training mode from the beginning. The
server calls `eval()` of a copy, on copies of its weights, when somebody asks for the weights that are evaluated. The
test compares these, too, with what `eval()` gives in one process, and requires that `train()` undoes `eval()`.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import cloudpickle
import torch

from ..core.layout import HyperParameters
from ..errors import ConfigurationError, UsageError, first_line
from .optimizer_sources import OptimizerSources, class_name

SHAPES = ((), (1,), (7,), (4, 3), (3, 2, 2, 2), (3, 5), (2, 3, 2), (5, 1, 2), (2, 3, 1, 2))
LARGE = ((4608,), (72, 64), (18, 16, 16), (18, 16, 4, 4))  # shapes of parameters whose state is looked at
STEPS = 12
WITHOUT_GRADIENT = ((2, 1), (3, 1), (3, 3), (7, 4))  # (step, parameter of the group)
EVALUATED = (3, 8, STEPS)  # steps after which optimizers with modes are evaluated
MOST_GROUPS = 8  # number of parameter groups that are tested
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
COARSE = 0.1  # tolerance for the other dtypes, relative to the largest change of a parameter
EIGHT_BITS = {torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2}
USUAL_RATE = 0.01  # learning rate for the test if the script's is 0, as at the start of a warm-up

Kind = TypeVar("Kind", bound=type[torch.optim.Optimizer])

_registered: dict[type, bool] = {}  # class -> True if it needs whole tensors
_classes: dict[str, type[torch.optim.Optimizer]] = {}
_counters: dict[type, set[str]] = {}  # the hyper-parameters that an optimizer changes in its own steps
# The sources of this process, in a list of at most one. It is empty in a process that is not part of a run.
_sources: list[OptimizerSources] = []


def register_elementwise(cls: Kind) -> Kind:
    """State that an optimizer class updates each element independently, so that it may run on slices.

    Without this call, Paceline tests the class before training begins, and refuses it if it gives other results on
    slices. Register a class that the test refuses although you know that slices make no difference, for example
    because it rounds stochastically. Can be used as a decorator. The servers must be able to load the class; see the
    guide.

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

    Without this call, Paceline tests the class before training begins. Register a class that the test refuses although
    you know that the update of a tensor depends on nothing else, for example because it rounds stochastically. Can be
    used as a decorator. The servers must be able to load the class; see the guide.

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
    """Return the places of the optimizer classes that this process has loaded, for a run of one of its functions.

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
        ConfigurationError: this process may not, or cannot, load the class.
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

    Arguments of the constructor that are hyper-parameters, too, have the values of the first group. If the class has
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
    """Return True if a class of optimizers has `train()` and `eval()`, which exchange the weights for others."""
    return callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None))


def evaluated(optimizer: torch.optim.Optimizer, copies: Mapping[int, torch.Tensor]) -> torch.optim.Optimizer:
    """Return a copy of an optimizer after its `eval()`. The optimizer itself, its state and its weights stay the same.

    Parameters without state keep their weights: there has been no step, and some classes fail then.

    Args:
        optimizer: an optimizer of a class that has modes.
        copies: the `id` of each parameter -> a copy of its weights, which are then set to those that are evaluated.
    """
    other: Any = copied(optimizer, copies)
    for group in other.param_groups:
        group["params"] = [parameter for parameter in group["params"] if other.state.get(parameter)]
    other.eval()
    result: torch.optim.Optimizer = other
    return result


def copied(
    optimizer: torch.optim.Optimizer, parameters: Mapping[int, torch.Tensor], without: Container[str] = ()
) -> torch.optim.Optimizer:
    """Return a copy of an optimizer that refers to other parameters.

    Args:
        optimizer: the optimizer.
        parameters: the `id` of each parameter -> the one that takes its place.
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


class Tested(NamedTuple):
    """What a test of an optimizer has shown.

    Attributes:
        reason: why the servers cannot run it; "" if they can.
        whole: True if it needs whole tensors.
        instead: what to do if they cannot run it; "" for the usual advice.
    """

    reason: str = ""
    whole: bool = False
    instead: str = ""


def look_inside(optimizer: torch.optim.Optimizer) -> Tested:
    """Return whether the servers could build an optimizer: not if it is built around another one."""
    for attribute, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            return Tested(
                f"it is built around another optimizer, {type(value).__name__} in the attribute {attribute!r}, so "
                "the servers cannot build it from hyper-parameters alone",
                instead=AROUND,
            )
    return Tested()


def try_foreign(optimizer: torch.optim.Optimizer, groups: Sequence[HyperParameters]) -> Tested:
    """Return whether the servers can run an optimizer, which is not one of torch's, and on what.

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
            return Tested(reason, instead=UNROUNDED)
        trial = _Trial.of(optimizer, servers_kind, groups[:MOST_GROUPS])
        known = _registered.get(kind)
        if reason := trial.difference(trial.whole, BUILT, sliced=known is False):
            return Tested(reason)
        if known is not None:
            return Tested("", known)
        if not (reason := trial.difference(trial.slices, ON_SLICES, sliced=True)):
            return Tested()
        if not (other := trial.difference(trial.tensors, ON_TENSORS, sliced=False)):
            return Tested("", whole=True)
        return Tested(reason if other == reason else f"{reason}; {other}")


def counters_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the hyper-parameters that an optimizer changes in its own steps, as seen in the test of its class."""
    return sorted(_counters.get(type(optimizer), ()))


def _is_sent(kind: type) -> bool:
    return bool(_sources) and class_name(kind) in _sources[0].sent


# -- the test -----------------------------------------------------------------------------------------------


class _Segment(NamedTuple):
    """A part of one parameter: the elements from `start` to `stop`, flattened; or all of it in its own shape."""

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
    "so it takes none on an accelerator"
)
BUILT = "an optimizer that is built from its hyper-parameters updates differently: "
ON_SLICES = "the update of an element depends on others: on slices, "
ON_TENSORS = "and the update of a tensor depends on others: on whole tensors, "


class _Trial(NamedTuple):
    """What a test compares.

    Attributes:
        optimizer: the script's optimizer.
        kind: the class that servers use.
        groups: the hyper-parameters.
        whole, slices, tensors: all parameters of the test, as they are; divided between two servers by slices; and by
            whole tensors.
    """

    optimizer: torch.optim.Optimizer
    kind: type[torch.optim.Optimizer]
    groups: Sequence[HyperParameters]
    whole: list[list[_Segment]]
    slices: list[list[_Segment]]
    tensors: list[list[_Segment]]

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer,
        kind: type[torch.optim.Optimizer],
        groups: Sequence[HyperParameters],
    ) -> _Trial:
        groups = [{**group, "lr": group["lr"] or USUAL_RATE} if "lr" in group else group for group in groups]
        dimensions = {p.dim() for group in optimizer.param_groups for p in group["params"]}
        whole = _segments(len(groups), dimensions)
        cuts = [(segment, torch.Size(SHAPES[segment.parameter]).numel()) for segment in whole]
        first = [segment._replace(stop=count // 3) for segment, count in cuts if count // 3]
        second = [segment._replace(start=count // 3, stop=count) for segment, count in cuts]
        return cls(optimizer, kind, groups, [whole], [first, second], [whole[::2], whole[1::2]])

    def difference(self, parts: list[list[_Segment]], words: str, *, sliced: bool) -> str:
        """Return, after some words, what differs if servers hold these parts; "" if nothing does.

        Args:
            parts: what each server holds.
            words: the first words of a sentence.
            sliced: True if the state must have an entry for each element, or for each parameter.
        """
        used = {
            p.dtype for group in self.optimizer.param_groups for p in group["params"] if p.is_floating_point()
        }
        for dtype in sorted({torch.float64} | used, key=str):
            try:
                small = _copy_of(self.optimizer, self.groups, self.whole[0], dtype)
                expected = list(_steps([small], self.whole, dtype, alone=True))
            except Exception as error:  # an optimizer may raise any exception
                return f"a step on a small copy of it failed: {first_line(error)}"
            try:
                built = [_built_by_server(self.kind, self.groups, segments, dtype) for segments in parts]
                found = list(_steps(built, parts, dtype, alone=False))
            except Exception as error:  # an optimizer may raise any exception
                return f"{words}it failed with {first_line(error)}"
            if difference := _difference(expected, found, dtype):
                return words + difference
            tested = [each for each, _ in built]
            if problem := _unusual_state(tested, sliced=sliced):
                return problem
            _counters.setdefault(type(self.optimizer), set()).update(_changed_settings(tested, self.groups))
        return ""


def _segments(group_count: int, dimensions: set[int]) -> list[_Segment]:
    """Return all parameters of the test, which have as many dimensions as the script's, so a class accepts them."""
    shapes = [index for index, shape in enumerate(SHAPES) if len(shape) in dimensions] or range(len(SHAPES))
    return [_Segment(group, index) for group in range(group_count) for index in shapes]


def _changed_settings(
    optimizers: Sequence[torch.optim.Optimizer], groups: Sequence[HyperParameters]
) -> set[str]:
    """Return the hyper-parameters that optimizers have changed since they were built with `groups`."""
    return {
        key
        for optimizer in optimizers
        for group, settings in zip(optimizer.param_groups, groups, strict=True)
        for key, value in settings.items()
        if group.get(key) != value
    }


Runnable = tuple[torch.optim.Optimizer, list[torch.Tensor]]
"""An optimizer, and its parameters in the order of its segments."""


def _initial(segment: _Segment, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(segment.parameter)
    return segment.of(torch.randn((SHAPES + LARGE)[segment.parameter], generator=generator, dtype=dtype))


def _gradient(segment: _Segment, step: int, dtype: torch.dtype) -> torch.Tensor | None:
    if (step, segment.parameter) in WITHOUT_GRADIENT:
        return None
    generator = torch.Generator().manual_seed(1000 + 100 * step + segment.parameter)
    whole = torch.randn((SHAPES + LARGE)[segment.parameter], generator=generator, dtype=dtype)
    return segment.of(whole * 3.0 ** (step % 4 - segment.parameter))


def _copy_of(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[HyperParameters],
    segments: Sequence[_Segment],
    dtype: torch.dtype,
) -> Runnable:
    """Return a copy of the script's optimizer with other parameters and without state."""
    parameters = [
        [_initial(segment, dtype) for segment in segments if segment.group == group]
        for group in range(len(groups))
    ]
    # A copy of an attribute refers to the small parameters wherever the attribute refers to the script's.
    memo: dict[int, Any] = {
        id(parameter): small[0]
        for group, small in zip(optimizer.param_groups, parameters, strict=False)
        for parameter in group["params"]
    }
    other = copied(optimizer, memo, without=("state", "param_groups"))
    other.state = defaultdict(dict)
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
    return other, [parameter for small in parameters for parameter in small]


def _rounded_state(optimizer: torch.optim.Optimizer, groups: Sequence[HyperParameters]) -> str:
    """Describe an entry of the state that is kept in 8 bits or fewer; "" if there is none.

    Such classes round only the state of large parameters, so the small ones of the test do not show it. A class that
    cannot take this step is refused by the test, with the reason.
    """
    dimensions = max((p.dim() for group in optimizer.param_groups for p in group["params"]), default=1)
    segment = _Segment(0, len(SHAPES) + min(max(dimensions, 1), len(LARGE)) - 1)
    try:
        large, [parameter] = _copy_of(optimizer, groups[:1], [segment], torch.float32)
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
) -> Runnable:
    """Return an optimizer that is built as a server builds it, with parameters for these segments."""
    parameters = [_initial(segment, dtype) for segment in segments]
    pairs = list(zip(segments, parameters, strict=True))
    settings = [
        {**settings, "params": [p for segment, p in pairs if segment.group == group]}
        for group, settings in enumerate(groups)
    ]
    return build(kind, settings), parameters


Flat = tuple[str, list[torch.Tensor]]
"""When parameters had some values, in words, and the flattened parameters."""


def _steps(
    optimizers: Sequence[Runnable], parts: Sequence[Sequence[_Segment]], dtype: torch.dtype, *, alone: bool
) -> Iterator[Flat]:
    """Yield the parameters before the first step and after each step, and sometimes those that are evaluated.

    Args:
        optimizers: the optimizers.
        parts: the segments of each optimizer.
        dtype: the dtype of the parameters.
        alone: True to evaluate as a process alone does, False to evaluate as a server does.
    """
    torch.manual_seed(0)
    for step in range(STEPS + 1):
        for (optimizer, parameters), segments in zip(optimizers, parts, strict=True):
            if step:
                for parameter, segment in zip(parameters, segments, strict=True):
                    parameter.grad = _gradient(segment, step, dtype)
                type(optimizer).step(optimizer)
        yield f"after step {step}", _flat([parameters for _, parameters in optimizers], parts, dtype)
        if step in EVALUATED and has_modes(type(optimizers[0][0])):
            values = [_evaluated(*each, alone=alone) for each in optimizers]
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
                    f"element {element} of a parameter of shape {shape} is {float(other[element]):.6g} instead of "
                    f"{float(mine[element]):.6g} {when}"
                )
    return ""


def _unusual_state(optimizers: Sequence[torch.optim.Optimizer], *, sliced: bool) -> str:
    """Describe an entry of the state that servers cannot hold; "" if there is none.

    If they hold slices, an entry must be as large as its parameter or a single number.
    """
    for optimizer in optimizers:
        for parameter, entries in optimizer.state.items():
            for key, value in entries.items() if isinstance(entries, dict) else ():
                if isinstance(value, torch.Tensor):
                    if sliced and value.dim() and value.shape != parameter.shape:
                        return (
                            f"its state {key!r} has shape {list(value.shape)} for a parameter of shape "
                            f"{list(parameter.shape)}; servers can hold a number per element or per parameter"
                        )
                elif not isinstance(value, int | float | type(None)):
                    return (
                        f"its state {key!r} is of type {type(value).__name__}; expected a tensor or a number"
                    )
    return ""

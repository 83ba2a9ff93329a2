"""The optimizers that can run on slices of the parameters, and their hyper-parameters as plain data.

A shard holds an arbitrary slice of the flat vector, so only *elementwise* optimizers, which update each element
independently, give the same result on slices as on whole tensors. `ELEMENTWISE` lists torch's elementwise optimizers,
and `REASONS` says why its other optimizers are rejected before training begins. Classes of other packages are tested
(see `foreign`). Paceline's own LARS needs whole tensors only to scale the gradients, so the workers scale the
gradients and the servers run SGD.

Hyper-parameters are sent with every push as plain data; `read_groups` reads them from the user's optimizer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..core.protocol.model_spec import HyperParameter, HyperParameters
from ..errors import ConfigurationError
from ..plugins.optimizer_sources import name_of
from .dynamo import defer_dynamo
from .foreign import build, class_of, foreign_reason
from .lars import LARS

__all__ = [
    "ELEMENTWISE",
    "PER_PARAMETER_STATE",
    "make_optimizer",
    "read_groups",
    "rehearse",
    "require_elementwise",
    "take_step",
]

ELEMENTWISE: dict[str, type[torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": torch.optim.RMSprop,
    "Rprop": torch.optim.Rprop,
}
"""The optimizer classes that the servers can run, by name."""

PER_PARAMETER_STATE = frozenset({"step", "eta", "mu", "mu_product"})
"""Keys of the state entries that hold one number per parameter. Other entries hold one number per element."""

REASONS = {
    "Adafactor": "it scales the update of a matrix by the means of the gradient's rows and columns, and by its norm",
    "Muon": "it orthogonalizes the update of a whole matrix",
    "LBFGS": "its step needs the inner products of whole gradients, and evaluates the closure several times",
    "SparseAdam": "it updates only the rows that occur in a sparse gradient, but gradients are pushed as dense "
    "vectors; use Adam, and create the embeddings with sparse=False",
}
"""Why the other optimizers of torch cannot run on the servers."""

HARMLESS = frozenset(
    {
        *("__init__", "__module__", "__qualname__", "__doc__", "__repr__", "__annotations__", "__dict__"),
        *("__weakref__", "__slots__", "__orig_bases__", "__parameters__", "__firstlineno__"),
        *("__static_attributes__", "__getstate__", "__setstate__", "__reduce__", "__copy__", "__deepcopy__"),
        *("state_dict", "load_state_dict", "add_param_group", "zero_grad"),
    }
)
"""Attributes of an optimizer class that do not affect how it updates parameters from its hyper-parameters."""

IMPLEMENTATION_KEYS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that only select one of torch's implementations. The servers do not use the user's choice."""

AFTER_SCALING: HyperParameters = {"dampening": 0.0, "weight_decay": 0.0, "maximize": False}
"""Settings of the SGD optimizer that the servers run for LARS. The scaled gradients already include weight decay."""

PLAIN = frozenset({float, int, bool, type(None)})
"""Types of hyper-parameters that need no conversion."""


def require_elementwise(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the class that the servers run for this optimizer.

    This is a name in `ELEMENTWISE` for torch's classes and for subclasses that update in the same way, "SGD" for
    LARS, and "module:Class" for other classes, which are tested first.

    Raises:
        ConfigurationError: the optimizer cannot run on the servers; the message says why.
    """
    kind = type(optimizer)
    if kind is LARS:
        return "SGD"
    if (name := torch_name(kind)) is not None:
        return name
    base = next((base for base in kind.__mro__ if base.__name__ in REASONS and _is_torchs(base)), None)
    reason = REASONS[base.__name__] if base is not None else foreign_reason(optimizer, read_groups(optimizer))
    if reason:
        raise ConfigurationError(
            f"{kind.__module__}.{kind.__qualname__} cannot run on the servers, each of which holds a slice of the "
            f"parameters: {reason}. Optimizers that update each element independently can run there, for example "
            f"{', '.join(ELEMENTWISE)} and paceline.LARS. Outside a run, every optimizer works."
        )
    return name_of(kind)


def torch_name(kind: type) -> str | None:
    """Return the name in `ELEMENTWISE` of the class that makes the same updates as `kind`; None if there is none.

    A subclass makes the same updates if it overrides none of its base's methods, except those in `HARMLESS`.
    """
    for position, base in enumerate(kind.__mro__):
        if base is ELEMENTWISE.get(base.__name__):
            own = {name for cls in kind.__mro__[:position] for name in vars(cls)} - HARMLESS
            same = all(_function(kind, name) is _function(base, name) for name in own if hasattr(base, name))
            return base.__name__ if same else None
    return None


def read_groups(optimizer: torch.optim.Optimizer) -> tuple[HyperParameters, ...]:
    """Return the hyper-parameters of each group as plain data, for the optimizer class that the servers run.

    Raises:
        ConfigurationError: a hyper-parameter is not a number, a pair of numbers or None. An optimizer that is not one
            of torch's may also have strings, and tuples of any number of numbers.
    """
    rest: HyperParameters = {}
    keys: tuple[str, ...]
    convert = _plain
    kind: Any = type(optimizer)
    if isinstance(optimizer, LARS):
        keys, rest = ("lr", "momentum", "nesterov"), AFTER_SCALING
    elif (known := _keys_of(kind)) is not None:
        keys = known
    else:
        keys = tuple(key for key in optimizer.defaults if key not in IMPLEMENTATION_KEYS)
        convert = _data
    # Not from a generator: if another thread calls `gc.get_objects()`, CPython 3.11 fails to complete the tuple.
    groups = [{**rest, **{key: convert(key, group[key]) for key in keys}} for group in optimizer.param_groups]
    return tuple(groups)


def make_optimizer(
    name: str, groups: Sequence[HyperParameters], parameters: Sequence[list[torch.Tensor]]
) -> torch.optim.Optimizer:
    """Return a new optimizer of the class `name`. `parameters` has a list of tensors for each group."""
    settings: Any = [{**group, "params": tensors} for group, tensors in zip(groups, parameters, strict=True)]
    kind = ELEMENTWISE.get(name)
    if kind is None:
        return build(class_of(name), settings)
    defer_dynamo()  # the process that serves a run creates an optimizer while it writes a checkpoint
    # torch reads these hyper-parameters only from the constructor's defaults, not from the groups.
    defaults: Any = {key: groups[0][key] for key in ("lr", "initial_accumulator_value") if key in groups[0]}
    return kind(settings, **defaults)


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Call `optimizer.step()`, but without importing `torch._dynamo` if the optimizer is of one of torch's classes.

    Their `step` asks the compiler not to trace through `torch.no_grad()`, although nothing is compiled on a server.
    So the first call would import it, which takes as long as importing torch, while workers wait.
    """
    kind: Any = type(optimizer)
    step = _untraced_step(kind)
    if step is None:
        optimizer.step()
    else:
        with torch.no_grad():
            step(optimizer)


def rehearse(name: str, before: Sequence[HyperParameters], after: Sequence[HyperParameters]) -> None:
    """Check that torch can take a step with the hyper-parameters `before`, and then a step with `after`.

    Each step uses one single-element parameter per group.

    Raises:
        Exception: any error that torch raises because it cannot take one of the two steps.
    """
    make_optimizer(name, after, [[torch.zeros(1)] for _ in after])
    parameters = [torch.zeros(1) for _ in before]
    optimizer = make_optimizer(name, before, [[parameter] for parameter in parameters])
    for settings in (before, after):
        for group, one, parameter in zip(optimizer.param_groups, settings, parameters, strict=True):
            group.update(one)
            parameter.grad = torch.ones(1)
        take_step(optimizer)


@functools.lru_cache(maxsize=64)
def _untraced_step(kind: Any) -> Callable[[torch.optim.Optimizer], object] | None:
    """Return the method `step` of a torch class, without what torch has wrapped around it; None for other classes."""
    return inspect.unwrap(kind.step) if kind in ELEMENTWISE.values() else None


@functools.lru_cache(maxsize=64)
def _keys_of(kind: Any) -> tuple[str, ...] | None:
    """Return the names of the hyper-parameters of a torch class or its subclass; None for any other class."""
    name = torch_name(kind)
    if name is None:
        return None
    known: Any = ELEMENTWISE[name]
    return tuple(key for key in known([torch.zeros(1)]).defaults if key not in IMPLEMENTATION_KEYS)


def _function(kind: type, name: str) -> Any:
    """Return an attribute of a class without the wrappers that torch puts around `step`."""
    return inspect.unwrap(getattr(kind, name))


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _plain(key: str, value: Any) -> HyperParameter:
    if type(value) in PLAIN:  # the usual case comes first, because this runs in every step
        return value  # type: ignore[no-any-return]
    if isinstance(value, torch.Tensor | np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, tuple | list) and len(value) == 2:
        return (float(value[0]), float(value[1]))
    raise ConfigurationError(
        f"Hyper-parameter {key} is {value!r}; expected a number, a pair of numbers or None."
    )


def _data(key: str, value: Any) -> HyperParameter:
    """Return a hyper-parameter of a class that is not one of torch's: also a string, or a tuple of numbers."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, tuple | list) and all(isinstance(each, int | float | np.number) for each in value):
        return tuple(map(float, value))
    try:
        return _plain(key, value)
    except (ConfigurationError, RuntimeError, ValueError):
        raise ConfigurationError(
            f"Hyper-parameter {key} is {value!r}, which cannot be sent to the servers; expected a number, text, "
            "None, or a tuple of numbers."
        ) from None

"""Which classes of `torch.optim` can run on slices of the parameters, and how one is written down.

A shard holds an arbitrary slice of the flat vector, so only *elementwise* optimizers give there exactly what
they give on whole tensors. The table lists them. Those that look at a whole matrix (Adafactor, Muon), keep a
closure (LBFGS) or want another gradient (SparseAdam) are refused by name, before anything starts.

Hyper-parameters travel with every push as plain numbers; `read_groups` takes them out of the user's optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from .errors import ConfigurationError

__all__ = [
    "ELEMENTWISE",
    "PER_PARAMETER_STATE",
    "HyperParameters",
    "OptimizerSpec",
    "fill_momentum",
    "implementation",
    "make_optimizer",
    "read_groups",
    "rehearse",
    "require_elementwise",
]

HyperParameters = dict[str, float | int | bool | tuple[float, float] | None]
"""One parameter group's settings: `lr`, `momentum`, `betas`, ..."""

# name -> (class, whether its fused kernel runs on the CPU: one pass, no temporaries)
ELEMENTWISE: dict[str, tuple[type[torch.optim.Optimizer], bool]] = {
    "SGD": (torch.optim.SGD, True),
    "Adam": (torch.optim.Adam, True),
    "AdamW": (torch.optim.AdamW, True),
    "Adagrad": (torch.optim.Adagrad, False),
    "Adadelta": (torch.optim.Adadelta, False),
    "Adamax": (torch.optim.Adamax, False),
    "ASGD": (torch.optim.ASGD, False),
    "NAdam": (torch.optim.NAdam, False),
    "RAdam": (torch.optim.RAdam, False),
    "RMSprop": (torch.optim.RMSprop, False),
    "Rprop": (torch.optim.Rprop, False),
}

# State that is one number per parameter, the same for each of its slices; all other state is element by element.
PER_PARAMETER_STATE = frozenset({"step", "eta", "mu", "mu_product"})

# How torch is to compute, not what: decided here, never by what a worker sends.
IMPLEMENTATION_KEYS = frozenset({"foreach", "fused", "capturable", "differentiable"})


class OptimizerSpec(msgspec.Struct, frozen=True):
    """A user's optimizer as a value.

    Attributes:
        name: its class in `torch.optim`.
        groups: the hyper-parameters of each group.
        group_of: for each parameter of the layout, the index of its group.
    """

    name: str
    groups: tuple[HyperParameters, ...]
    group_of: tuple[int, ...]


def require_elementwise(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's name in the table.

    Raises:
        ConfigurationError: it is not one of them, by name, with the reason.
    """
    kind = type(optimizer)
    if kind is ELEMENTWISE.get(kind.__name__, (None, False))[0]:
        return kind.__name__
    raise ConfigurationError(
        f"{kind.__module__}.{kind.__qualname__} cannot run on the servers: each server holds a slice of the "
        f"parameters, so the optimizer must treat every element by itself. Choices: {', '.join(ELEMENTWISE)}."
    )


def read_groups(optimizer: torch.optim.Optimizer) -> tuple[HyperParameters, ...]:
    """The hyper-parameters of each group as plain numbers."""
    return tuple(
        {key: _plain(key, group[key]) for key in optimizer.defaults if key not in IMPLEMENTATION_KEYS}
        for group in optimizer.param_groups
    )


def make_optimizer(
    name: str, groups: Sequence[HyperParameters], parameters: Sequence[list[torch.Tensor]]
) -> torch.optim.Optimizer:
    """The real optimizer over some tensors, one list per group; groups may be empty."""
    kind, _ = ELEMENTWISE[name]
    settings: Any = [
        {**group, **implementation(name, group, tensors), "params": tensors}
        for group, tensors in zip(groups, parameters, strict=True)
    ]
    # Of these torch reads some in the constructor only.
    defaults: Any = {key: groups[0][key] for key in ("lr", "initial_accumulator_value") if key in groups[0]}
    return kind(settings, **defaults)


def implementation(name: str, group: HyperParameters, tensors: Sequence[torch.Tensor]) -> dict[str, bool]:
    """How torch is to compute a group: by the fused kernel where that gives the same result.

    With dampening, SGD's first step is an exception that the fused kernel makes for all parameters or for none; and
    in half precision it leaves weights as they are.
    """
    _, fused = ELEMENTWISE[name]
    exact = all(tensor.dtype in (torch.float32, torch.float64) for tensor in tensors)
    return {"fused": exact and not group.get("dampening")} if fused else {}


def rehearse(name: str, before: Sequence[HyperParameters], after: Sequence[HyperParameters]) -> None:
    """Step an optimizer of one number per group with one set of hyper-parameters and then with the other.

    Raises whatever torch raises at values that it cannot use, or cannot change to in mid-run.
    """
    make_optimizer(name, after, [[torch.zeros(1)] for _ in after])
    parameters = [torch.zeros(1) for _ in before]
    optimizer = make_optimizer(name, before, [[parameter] for parameter in parameters])
    for settings in (before, after):
        for group, one, parameter in zip(optimizer.param_groups, settings, parameters, strict=True):
            group.update(one | implementation(name, one, [parameter]))
            parameter.grad = torch.ones(1)
        fill_momentum(optimizer)
        optimizer.step()


def fill_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter that is about to be stepped a momentum buffer: torch's fused SGD takes all or none.

    Starting from zeros gives what torch's own first step does, a buffer equal to the gradient, since a group with
    dampening is not fused.
    """
    for group in optimizer.param_groups:
        if group.get("fused") and group.get("momentum"):
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if parameter.grad is not None and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)


def _plain(key: str, value: object) -> float | int | bool | tuple[float, float] | None:
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

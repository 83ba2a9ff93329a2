"""The classes of `torch.optim` that can run on slices of the parameters, and their hyper-parameters as plain numbers.

A shard holds an arbitrary slice of the flat vector, so only *elementwise* optimizers, which update each element
independently, give the same result on slices as on whole tensors. `ELEMENTWISE` lists these optimizers. Optimizers
that use a whole matrix (Adafactor, Muon), need a closure (LBFGS) or need sparse gradients (SparseAdam) are rejected
before training begins. Paceline's own LARS needs whole tensors only to scale the gradients, so the workers scale the
gradients and the servers run SGD.

Hyper-parameters are sent with every push as plain numbers; `read_groups` reads them from the user's optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..core.model_spec import HyperParameters
from ..errors import ConfigurationError
from .lars import LARS

__all__ = [
    "ELEMENTWISE",
    "PER_PARAMETER_STATE",
    "make_optimizer",
    "read_groups",
    "rehearse",
    "require_elementwise",
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

IMPLEMENTATION_KEYS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that only select one of torch's implementations. The servers do not use the user's choice."""

AFTER_SCALING: HyperParameters = {"dampening": 0.0, "weight_decay": 0.0, "maximize": False}
"""Settings of the SGD optimizer that the servers run for LARS. The scaled gradients already include weight decay."""

PLAIN = frozenset({float, int, bool, type(None)})
"""Types of hyper-parameters that need no conversion."""


def require_elementwise(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the class in `ELEMENTWISE` that the servers run for this optimizer ("SGD" for LARS).

    Raises:
        ConfigurationError: the optimizer cannot run on the servers.
    """
    kind = type(optimizer)
    if kind is ELEMENTWISE.get(kind.__name__):
        return kind.__name__
    if kind is LARS:
        return "SGD"
    raise ConfigurationError(
        f"{kind.__module__}.{kind.__qualname__} cannot run on the servers: each server holds a slice of the "
        "parameters, so the optimizer must update each element independently. Choices: "
        f"{', '.join(ELEMENTWISE)}, paceline.LARS."
    )


def read_groups(optimizer: torch.optim.Optimizer) -> tuple[HyperParameters, ...]:
    """Return the hyper-parameters of each group as plain numbers, for the optimizer class that the servers run.

    Raises:
        ConfigurationError: a hyper-parameter is not a number, a pair of numbers or None.
    """
    keys: Sequence[str] = [key for key in optimizer.defaults if key not in IMPLEMENTATION_KEYS]
    rest: HyperParameters = {}
    if isinstance(optimizer, LARS):
        keys, rest = ("lr", "momentum", "nesterov"), AFTER_SCALING
    return tuple(
        {**rest, **{key: _plain(key, group[key]) for key in keys}} for group in optimizer.param_groups
    )


def make_optimizer(
    name: str, groups: Sequence[HyperParameters], parameters: Sequence[list[torch.Tensor]]
) -> torch.optim.Optimizer:
    """Return a new optimizer of the class `name`. `parameters` has a list of tensors for each group."""
    kind = ELEMENTWISE[name]
    settings: Any = [{**group, "params": tensors} for group, tensors in zip(groups, parameters, strict=True)]
    # torch reads these hyper-parameters only from the constructor's defaults, not from the groups.
    defaults: Any = {key: groups[0][key] for key in ("lr", "initial_accumulator_value") if key in groups[0]}
    return kind(settings, **defaults)


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
        optimizer.step()


def _plain(key: str, value: Any) -> float | int | bool | tuple[float, float] | None:
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

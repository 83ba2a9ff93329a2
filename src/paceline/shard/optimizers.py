"""Which classes of `torch.optim` can run on slices of the parameters, and how one is written down.

A shard holds an arbitrary slice of the flat vector, so only *elementwise* optimizers give there exactly what
they give on whole tensors. The table lists them. Those that look at a whole matrix (Adafactor, Muon), keep a
closure (LBFGS) or want another gradient (SparseAdam) are refused by name, before anything starts. Paceline's own
LARS looks at whole tensors too, but only to scale gradients: workers do that, and the servers run SGD.

Hyper-parameters travel with every push as plain numbers; `read_groups` takes them out of the user's optimizer.
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

# State that is one number per parameter, the same for each of its slices; all other state is element by element.
PER_PARAMETER_STATE = frozenset({"step", "eta", "mu", "mu_product"})

# How torch is to compute, not what: decided here, never by what a worker sends.
IMPLEMENTATION_KEYS = frozenset({"foreach", "fused", "capturable", "differentiable"})

# Of the SGD that follows LARS's scaling, which has the weight decay in it already.
AFTER_SCALING: HyperParameters = {"dampening": 0.0, "weight_decay": 0.0, "maximize": False}


PLAIN = frozenset({float, int, bool, type(None)})


def require_elementwise(optimizer: torch.optim.Optimizer) -> str:
    """The name in the table of what the servers run for an optimizer: its own class; for LARS "SGD".

    Raises:
        ConfigurationError: it is not one of them, by name, with the reason.
    """
    kind = type(optimizer)
    if kind is ELEMENTWISE.get(kind.__name__):
        return kind.__name__
    if kind is LARS:
        return "SGD"
    raise ConfigurationError(
        f"{kind.__module__}.{kind.__qualname__} cannot run on the servers: each server holds a slice of the "
        f"parameters, so the optimizer must treat every element by itself. Choices: {', '.join(ELEMENTWISE)}; "
        "paceline.LARS."
    )


def read_groups(optimizer: torch.optim.Optimizer) -> tuple[HyperParameters, ...]:
    """The hyper-parameters of each group as plain numbers, as what the servers run takes them."""
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
    """The real optimizer over some tensors, one list per group; groups may be empty."""
    kind = ELEMENTWISE[name]
    settings: Any = [{**group, "params": tensors} for group, tensors in zip(groups, parameters, strict=True)]
    # Of these torch reads some in the constructor only.
    defaults: Any = {key: groups[0][key] for key in ("lr", "initial_accumulator_value") if key in groups[0]}
    return kind(settings, **defaults)


def rehearse(name: str, before: Sequence[HyperParameters], after: Sequence[HyperParameters]) -> None:
    """Step an optimizer of one number per group with one set of hyper-parameters and then with the other.

    Raises whatever torch raises at values that it cannot use, or cannot change to in mid-run.
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
    if type(value) in PLAIN:  # in nearly all cases, and asked in each step
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

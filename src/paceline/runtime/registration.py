"""What a worker says that it trains, and with which hyper-parameters: checked before a host builds on it.

Hosts take a model from one worker for all, and hyper-parameters with every push. What torch would trip over, on a
slice and in the middle of an update, is refused here: values are tried on an optimizer of one number for each group
and dtype, by the very code that a shard runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..core.layout import Layout, Parameter
from ..core.model_spec import HyperParameters, ModelSpec, OptimizerSpec
from ..errors import ConfigurationError, ProtocolError
from ..shard.buffers import packed_bytes
from ..shard.optimizers import ELEMENTWISE, read_groups, rehearse
from ..shard.slice_optimizers import optimizer_of_slice

__all__ = ["require_groups", "require_sound"]

MOST_BYTES = 2**48  # of the parameters, and of a buffer: more than any machine has
PLAIN_RATE = 1e4  # a learning rate up to this one needs no trial: every dtype can hold it
LATE_STEP = 1e9  # later than any run comes

# Optimizer -> the bounds of its numbers, and None for its flags. With these torch takes every combination, so nothing
# has to be tried when a run begins: a trial imports torch's compiler, which takes one and a half seconds.
_RATES = {"lr": (0.0, PLAIN_RATE), "weight_decay": (0.0, 1.0), "maximize": None}
_ADAM = _RATES | {
    "betas": (0.0, 0.9999),
    "eps": (1e-16, 1.0),
    "amsgrad": None,
    "decoupled_weight_decay": None,
}
PLAIN: dict[str, dict[str, tuple[float, float] | None]] = {
    "SGD": _RATES | {"momentum": (0.0, 1.0), "dampening": (0.0, 1.0), "nesterov": None},
    "Adam": _ADAM,
    "AdamW": _ADAM,
}


def require_sound(model: ModelSpec) -> None:
    """Refuse a model that does not fit together, or that no shard could train.

    Raises:
        ProtocolError: and what does not fit.
    """
    parameters, optimizer = model.layout.parameters, model.optimizer
    shapes = [parameter.shape for parameter in parameters] + [buffer.shape for buffer in model.buffers]
    if not all(parameter.names for parameter in parameters) or any(n < 0 for shape in shapes for n in shape):
        raise ProtocolError("its model has a parameter without a name, or a shape below zero")
    try:
        layout = Layout.of(parameters)
    except ConfigurationError as error:
        raise ProtocolError(f"its model cannot be trained: {error}") from error
    if layout != model.layout:
        raise ProtocolError("its layout is not the one of its parameters")
    for buffer in model.buffers:
        if not isinstance(getattr(torch, buffer.dtype, None), torch.dtype):
            raise ProtocolError(f"its buffer {buffer} has a dtype that there is not")
    if max(layout.size_bytes, *(packed_bytes(spec) for spec in model.buffers), 0) > MOST_BYTES:
        raise ProtocolError(f"its model has more than {MOST_BYTES} bytes")
    if optimizer.name not in ELEMENTWISE or not optimizer.groups:
        raise ProtocolError(f"its optimizer {optimizer.name} is none that servers run, or has no groups")
    if len(optimizer.group_of) != len(parameters) or not all(
        0 <= group < len(optimizer.groups) for group in optimizer.group_of
    ):
        raise ProtocolError("its parameters are in groups that there are not")
    if all(_is_plain(optimizer.name, group) for group in optimizer.groups):
        return
    [known] = read_groups(ELEMENTWISE[optimizer.name]([torch.zeros(1)]))  # type: ignore[call-arg]
    if any(group.keys() != known.keys() for group in optimizer.groups):
        raise ProtocolError(f"its hyper-parameters are not those of {optimizer.name}")
    _try(model, optimizer.groups)


def require_groups(model: ModelSpec, groups: tuple[HyperParameters, ...]) -> None:
    """Refuse hyper-parameters with which the model cannot be trained on.

    Raises:
        ProtocolError: they are of other names or kinds, or torch cannot use them.
    """
    before = model.optimizer.groups
    if [_kinds(group) for group in groups] != [_kinds(group) for group in before]:
        raise ProtocolError("hyper-parameters of other names or kinds than the optimizer's")
    # A learning rate alone, which schedulers change all the time, needs no trial.
    same = [{**group, "lr": 0} for group in groups] == [{**group, "lr": 0} for group in before]
    if not (same and all(isinstance(r := g["lr"], float | int) and 0 <= r <= PLAIN_RATE for g in groups)):
        _try(model, groups)


def _try(model: ModelSpec, groups: tuple[HyperParameters, ...]) -> None:
    """Step with the model's hyper-parameters, with these, and with these again late in a long run."""
    if not all(map(math.isfinite, _numbers(groups))):
        raise ProtocolError("hyper-parameters that are not finite")
    before = model.optimizer
    count = len(before.groups)
    dtypes = [*model.layout.sizes] * count
    layout = Layout.of([Parameter((str(i),), (1,), dtype) for i, dtype in enumerate(dtypes)])
    [bounds] = layout.slice_evenly(1)
    group_of = tuple(i // len(model.layout.sizes) for i in range(len(dtypes)))

    def ones() -> dict[str, torch.Tensor]:
        return {dtype: torch.ones(size, dtype=getattr(torch, dtype)) for dtype, size in layout.sizes.items()}

    try:
        rehearse(before.name, before.groups, groups)
        optimizer = optimizer_of_slice(OptimizerSpec(before.name, before.groups, group_of), bounds, ones())
        for settings in (before.groups, groups):
            optimizer.step([ones()], 1.0, lambda parameter: True, settings)
        state = {
            name: torch.full_like(value, LATE_STEP) if name.endswith("/step") else value.clone()
            for name, value in optimizer.state().items()
        }
        optimizer.load_state(state)
        optimizer.step([ones()], 1.0, lambda parameter: True, groups)
    except Exception as error:  # torch raises what it likes here
        raise ProtocolError(f"hyper-parameters that the optimizer cannot use: {error!r}") from error


def _is_plain(name: str, group: HyperParameters) -> bool:
    """True if torch is known to take these hyper-parameters. See `PLAIN`."""
    bounds = PLAIN.get(name)
    if bounds is None or group.keys() != bounds.keys() or group.get("nesterov"):
        return False  # nesterov asks for a momentum
    return all(_lies_within(value, bounds[key]) for key, value in group.items())


def _lies_within(value: object, bounds: tuple[float, float] | None) -> bool:
    """True for a flag, which has no bounds, and for a number or a pair of numbers within its bounds."""
    if bounds is None:
        return isinstance(value, bool)
    numbers = value if isinstance(value, tuple) else (value,)
    return all(type(number) in (int, float) and bounds[0] <= number <= bounds[1] for number in numbers)


def _numbers(groups: Sequence[HyperParameters]) -> list[float]:
    """All numbers among some hyper-parameters."""
    values = [value for group in groups for value in group.values() if value is not None]
    return [number for value in values for number in (value if isinstance(value, tuple) else (value,))]


def _kinds(group: HyperParameters) -> dict[str, str]:
    """What each hyper-parameter of a group is, so that one push cannot bring what the optimizer trips over."""
    kinds = {bool: "flag", int: "number", float: "number", tuple: "pair"}
    return {key: kinds.get(type(value), "nothing") for key, value in group.items()}

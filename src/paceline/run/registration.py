"""Validation of the model and the hyper-parameters that a worker sends, before a server uses them.

All servers use the model that one worker sends, and the hyper-parameters that each push contains. This module rejects
values that would cause an error in torch in the middle of an update. To find such values, the module performs trial
steps with the same code as a shard, on an optimizer that has one parameter element for each group and dtype.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch

from ..core.layout import HyperParameters, Layout, ModelSpec, OptimizerSpec, Parameter, dtype_of, of_set
from ..errors import ConfigurationError, ProtocolError
from ..shard.optimizer_sources import OptimizerSources
from ..shard.optimizers import (
    ELEMENTWISE,
    TENSORWISE,
    TENSORWISE_NAMES,
    class_of_torch,
    read_groups,
    rehearse,
    specimen,
)
from ..shard.slice_optimizers import optimizer_of_slice
from ..shard.vectors import DIGITS, packed_bytes

NO_SOURCES = OptimizerSources()
MOST_BYTES = 2**48  # maximum size of the parameters and of each buffer; no machine has this much memory
PLAIN_RATE = 1e4  # learning rates up to this value need no trial, because every dtype can represent them
DIGEST = re.compile(f"[0-9a-f]{{{DIGITS}}}")
LATE_STEP = 1e9  # a step number that no run reaches

# For each optimizer: the bounds of its numeric hyper-parameters, and None for its flags. torch accepts every
# combination within these bounds, so no trial is needed.
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


def require_sound(model: ModelSpec, sources: OptimizerSources = NO_SOURCES) -> None:
    """Check that a model is consistent and that shards can train it.

    Args:
        model: the model that a worker has registered.
        sources: the places from which servers may take the class of an optimizer that is not one of torch's.

    Raises:
        ProtocolError: the model is not valid; the message says why.
        ConfigurationError: this machine's torch lacks an optimizer or a hyper-parameter that the model needs.
    """
    require_sound_parameters(model)
    for set_index, (optimizer, size) in enumerate(zip(model.optimizers, _set_sizes(model), strict=True)):
        _require_sound_optimizer(model, set_index, optimizer, size, sources)


def require_sound_parameters(model: ModelSpec) -> None:
    """Check that a model is consistent, apart from its optimizers.

    Raises:
        ProtocolError: the model is not valid; the message says why.
    """
    parameters = model.layout.parameters
    untrained = [*model.buffers, *model.frozen]
    shapes = [parameter.shape for parameter in parameters] + [tensor.shape for tensor in untrained]
    if not all(parameter.names for parameter in parameters) or any(n < 0 for shape in shapes for n in shape):
        raise ProtocolError("the model has a parameter without a name, or a shape with a negative size")
    try:
        layout = Layout.of(parameters)
    except ConfigurationError as error:
        raise ProtocolError(f"the model cannot be trained: {error}") from error
    if layout != model.layout:
        raise ProtocolError("the model's layout does not match its parameters")
    for tensor in untrained:
        if not isinstance(getattr(torch, tensor.dtype, None), torch.dtype):
            raise ProtocolError(f"torch {torch.__version__} does not know the dtype {tensor.dtype!r}")
    if not all(DIGEST.fullmatch(digest) for digest in model.digests):  # a digest is the name of a file
        raise ProtocolError("the digest of a frozen parameter is not valid")
    if (largest := max(layout.size_bytes, *(packed_bytes(spec) for spec in untrained), 0)) > MOST_BYTES:
        raise ProtocolError(f"a buffer or the parameters have {largest} bytes, expected at most {MOST_BYTES}")
    places = [(parameter.part, parameter.set_index) for parameter in parameters]
    parts = {parameter.part for parameter in parameters}
    if sum(_set_sizes(model)) != len(parameters) or places != sorted(places) or max(parts) != len(parts) - 1:
        raise ProtocolError("the parameters are not ordered by parts and sets, or a set has no optimizer")


def _set_sizes(model: ModelSpec) -> list[int]:
    """Return the number of parameters in each parameter set that has an optimizer."""
    parameters = model.layout.parameters
    return [sum(p.set_index == index for p in parameters) for index in range(len(model.optimizers))]


def _require_sound_optimizer(
    model: ModelSpec, set_index: int, optimizer: OptimizerSpec, size: int, sources: OptimizerSources
) -> None:
    """Check the optimizer of a parameter set that has `size` parameters. See `require_sound` for the exceptions."""
    foreign = ":" in optimizer.name
    if not (foreign or optimizer.name in (*ELEMENTWISE, *TENSORWISE_NAMES)) or not optimizer.groups:
        raise ProtocolError(
            f"the optimizer {optimizer.name} is not supported by servers, or has no parameter groups"
        )
    if not foreign:
        class_of_torch(optimizer.name)
    if not foreign and optimizer.whole != (optimizer.name in TENSORWISE):
        raise ProtocolError(
            f"the description of {optimizer.name} is wrong about whether this optimizer needs whole tensors"
        )
    if foreign:
        try:
            sources.require_named(optimizer.name)
        except ConfigurationError as error:
            raise ProtocolError(str(error)) from error
    if len(optimizer.group_of) != size or not all(
        0 <= group < len(optimizer.groups) for group in optimizer.group_of
    ):
        raise ProtocolError("not every parameter of the model is assigned to one of the optimizer's groups")
    # This process does not load classes of users. A worker has tested the class, and servers load it.
    if foreign or all(_is_plain(optimizer.name, group) for group in optimizer.groups):
        return
    [known] = read_groups(class_of_torch(optimizer.name)([specimen(whole=optimizer.whole)]))  # type: ignore[call-arg]
    if names := {name for group in optimizer.groups for name in group.keys() ^ known.keys()}:
        raise ConfigurationError(
            f"torch.optim.{optimizer.name} has other hyper-parameters in the script's version of torch than in torch "
            f"{torch.__version__}, with which the run is served: they differ in {', '.join(sorted(names))}. Install "
            "the same version of torch on all machines."
        )
    _try(model, optimizer.groups, set_index)


def require_groups(model: ModelSpec, groups: tuple[HyperParameters, ...], set_index: int = 0) -> None:
    """Check that training can continue with new hyper-parameters of a parameter set.

    Raises:
        ProtocolError: the names or types of the hyper-parameters have changed, or torch cannot use the new values.
    """
    before = model.optimizers[set_index].groups
    if [_kinds(group) for group in groups] != [_kinds(group) for group in before]:
        raise ProtocolError("the names or types of the hyper-parameters have changed since training began")
    # Schedulers often change the learning rate, and some schedulers also change the momentum or the betas. A trial in
    # every iteration would cost too much.
    name = model.optimizers[set_index].name
    if [_flags(group) for group in groups] == [_flags(group) for group in before] and all(
        _is_plain(name, group) for group in groups
    ):
        return
    same = [{**group, "lr": 0} for group in groups] == [{**group, "lr": 0} for group in before]
    if not (same and all(isinstance(r := g["lr"], float | int) and 0 <= r <= PLAIN_RATE for g in groups)):
        _try(model, groups, set_index)


def _try(model: ModelSpec, groups: tuple[HyperParameters, ...], set_index: int = 0) -> None:
    """Try a step with the set's hyper-parameters, a step with `groups`, and step `LATE_STEP` with `groups`.

    Raises:
        ProtocolError: a step failed.
    """
    if not all(map(math.isfinite, _numbers(groups))):
        raise ProtocolError("a hyper-parameter is infinite or NaN")
    before = model.optimizers[set_index]
    count = len(before.groups)
    dtypes = [dtype_of(vector) for vector in of_set(model.layout.sizes, set_index)] * count
    shape = tuple(specimen(whole=before.whole).shape)
    layout = Layout.of([Parameter((str(i),), shape, dtype) for i, dtype in enumerate(dtypes)])
    group_of = tuple(i // (len(dtypes) // count) for i in range(len(dtypes)))
    spec = OptimizerSpec(before.name, before.groups, group_of, whole=before.whole)
    [bounds] = ModelSpec(layout, spec, ()).sliced(1, "auto")

    def ones() -> dict[str, torch.Tensor]:
        return {dtype: torch.ones(size, dtype=getattr(torch, dtype)) for dtype, size in layout.sizes.items()}

    try:
        rehearse(before.name, before.groups, groups, whole=before.whole)
        optimizer = optimizer_of_slice(spec, bounds, ones())
        for settings in (before.groups, groups):
            optimizer.step([ones()], (1.0,), bytes([1]) * len(dtypes), settings)
        state = {
            name: torch.full_like(value, LATE_STEP) if name.endswith("/step") else value.clone()
            for name, value in optimizer.state().items()
        }
        optimizer.load_state(state)
        optimizer.step([ones()], (1.0,), bytes([1]) * len(dtypes), groups)
    except Exception as error:
        # torch may raise any exception here.
        raise ProtocolError(f"the optimizer cannot use the hyper-parameters: {error!r}") from error


def _is_plain(name: str, group: HyperParameters) -> bool:
    """Return True if torch is known to accept these hyper-parameters. See `PLAIN`."""
    bounds = PLAIN.get(name)
    # Nesterov momentum needs a trial, because torch accepts it only with a momentum > 0.
    if bounds is None or group.keys() != bounds.keys() or group.get("nesterov"):
        return False
    return all(_lies_within(value, bounds[key]) for key, value in group.items())


def _flags(group: HyperParameters) -> HyperParameters:
    return {key: value for key, value in group.items() if isinstance(value, bool)}


def _lies_within(value: object, bounds: tuple[float, float] | None) -> bool:
    """Return True if a value is a number, or a pair of numbers, within the bounds.

    If `bounds` is None, return True if the value is a flag.
    """
    if bounds is None:
        return isinstance(value, bool)
    numbers = value if isinstance(value, tuple) else (value,)
    return len(numbers) <= 2 and all(
        type(number) in (int, float) and bounds[0] <= number <= bounds[1] for number in numbers
    )


def _numbers(groups: Sequence[HyperParameters]) -> list[float]:
    """Return all numbers among the hyper-parameters."""
    values = [value for group in groups for value in group.values()]
    numbers = [number for value in values for number in (value if isinstance(value, tuple) else (value,))]
    return [number for number in numbers if isinstance(number, int | float)]


def _kinds(group: HyperParameters) -> dict[str, str]:
    """Return the kind of the value of each hyper-parameter in a group. The kinds must not change during a run."""
    kinds = {bool: "flag", int: "number", float: "number", str: "text"}
    return {
        key: f"{len(value)} numbers" if isinstance(value, tuple) else kinds.get(type(value), "nothing")
        for key, value in group.items()
    }

"""The description of a model, as sent between processes: its parameters, its optimizer, and its other tensors.

Each worker registers a description. The coordinator checks that all descriptions are equal, apart from the
hyper-parameters, and the servers create their shards from the description. This module does not import torch.
"""

from __future__ import annotations

import msgspec

from ...errors import ProtocolError
from .layout import Layout

__all__ = [
    "BufferSpec",
    "FrozenSpec",
    "HyperParameters",
    "ModelSpec",
    "OptimizerSpec",
    "first_difference",
    "require_extension",
]

HyperParameter = float | int | bool | str | tuple[float, ...] | None

HyperParameters = dict[str, HyperParameter]
"""The settings of one parameter group: `lr`, `momentum`, `betas`, ..."""


class OptimizerSpec(msgspec.Struct, frozen=True):
    """The description of the user's optimizer.

    Attributes:
        name: name of the class in `torch.optim` that the servers use, or "module:Class" for any other class.
        groups: hyper-parameters of each group.
        group_of: for each parameter of the optimizer's parameter set, in the order of the layout, the index of its
            group. Parameters that the optimizer does not train, because it has replaced one that did, have group 0.
        replaced: number of times that another optimizer has replaced the set's optimizer. Its state is then dropped.
    """

    name: str
    groups: tuple[HyperParameters, ...]
    group_of: tuple[int, ...]
    replaced: int = 0


class BufferSpec(msgspec.Struct, frozen=True):
    """A tensor of the model's `state_dict` that is not a parameter, such as a running mean of BatchNorm.

    Attributes:
        name: name of the tensor in the `state_dict`.
        shape: shape of the tensor.
        dtype: name of the dtype in torch.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


class FrozenSpec(BufferSpec, frozen=True):
    """A parameter of the model that no optimizer trains. Training does not change it.

    Attributes:
        digest: hash of the dtype, the shape and the values, as 64 hexadecimal digits (see `shard.digests`).
    """

    digest: str


class ModelSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The description of the model that a worker trains. All workers of a job must train the same model.

    A script may train with several optimizers. Each of them has a parameter set of its own. A script may also add
    parameters after training has begun. The description is then replaced by an extended one, in which all earlier
    parameters keep their places.

    Attributes:
        layout: layout of the parameters of all sets.
        optimizer: the optimizer of the first parameter set.
        buffers: the tensors that are not parameters, and that each worker changes on its own.
        frozen: the parameters that no optimizer trains, with the digests of this worker's values.
        further: the optimizers of the other parameter sets, in order.
    """

    layout: Layout
    optimizer: OptimizerSpec
    buffers: tuple[BufferSpec, ...]
    further: tuple[OptimizerSpec, ...] = ()
    frozen: tuple[FrozenSpec, ...] = ()

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of the frozen parameters, in order."""
        return tuple(spec.digest for spec in self.frozen)

    @property
    def optimizers(self) -> tuple[OptimizerSpec, ...]:
        """The optimizer of each parameter set."""
        return (self.optimizer, *self.further)

    def buffers_beyond(self, before: ModelSpec) -> list[BufferSpec]:
        """Return the buffers that this model has and a model without its latest parameters does not have."""
        known = {buffer.name for buffer in before.buffers}
        return [buffer for buffer in self.buffers if buffer.name not in known]

    def frozen_beyond(self, before: ModelSpec) -> list[FrozenSpec]:
        """Return the frozen parameters that this model has and a model without its latest parameters lacks."""
        known = {spec.name for spec in before.frozen}
        return [spec for spec in self.frozen if spec.name not in known]

    @property
    def optimizers_over_layout(self) -> tuple[OptimizerSpec, ...]:
        """The optimizer of each parameter set, where `group_of` lists all parameters of the layout.

        The group of a parameter that belongs to another set is 0.
        """
        parameters = self.layout.parameters
        spread = []
        for set_index, optimizer in enumerate(self.optimizers):
            groups = iter(optimizer.group_of)
            group_of = tuple(next(groups) if p.set_index == set_index else 0 for p in parameters)
            spread.append(msgspec.structs.replace(optimizer, group_of=group_of))
        return tuple(spread)


def first_difference(model: ModelSpec, other: ModelSpec) -> str:
    """Describe the first difference between `model` and `other`; return "" if there is none.

    Hyper-parameters and the values of frozen parameters may differ.
    """
    pairs = zip(model.layout.parameters, other.layout.parameters, strict=False)
    for expected, found in pairs:
        if expected != found:
            return f"{found} instead of {expected}"
    counts = len(model.layout.parameters), len(other.layout.parameters)
    if counts[0] != counts[1]:
        return f"{counts[1]} parameters instead of {counts[0]}"
    counts = len(model.optimizers), len(other.optimizers)
    if counts[0] != counts[1]:
        return f"{counts[1]} optimizers instead of {counts[0]}"
    for expected_optimizer, found_optimizer in zip(model.optimizers, other.optimizers, strict=True):
        if difference := _difference_of_optimizers(expected_optimizer, found_optimizer):
            return difference
    for kind, expected_tensors, found_tensors in (
        ("buffer", model.buffers, other.buffers),
        ("frozen parameter", model.frozen, other.frozen),
    ):
        for expected_tensor, found_tensor in zip(expected_tensors, found_tensors, strict=False):
            if str(expected_tensor) != str(found_tensor):
                return f"{kind} {found_tensor} instead of {expected_tensor}"
        if len(expected_tensors) != len(found_tensors):
            return f"{len(found_tensors)} {kind}s instead of {len(expected_tensors)}"
    return ""


def require_extension(model: ModelSpec, extended: ModelSpec) -> None:
    """Check that an extended model contains all of a model at the same place, and further parameters in one new part.

    Raises:
        ProtocolError: it does not.
    """
    before, after = model.layout.parameters, extended.layout.parameters
    part = max(parameter.part for parameter in before) + 1
    if after[: len(before)] != before or not {parameter.part for parameter in after[len(before) :]} <= {part}:
        raise ProtocolError(
            f"the extended model does not consist of the earlier parameters and those of part {part}"
        )
    for old, new in zip(model.optimizers, extended.optimizers, strict=False):
        groups, members = len(old.groups), len(old.group_of)
        if new.replaced == old.replaced + 1:
            continue
        if new.replaced != old.replaced or (
            new.name != old.name
            or len(new.groups) < groups
            or new.group_of[:members] != old.group_of
            or any(group < groups for group in new.group_of[members:])
        ):
            raise ProtocolError("the extended model changes the groups of earlier parameters")
    if len(extended.optimizers) < len(model.optimizers):
        raise ProtocolError("the extended model lacks an optimizer")
    for kind, earlier, later in (
        ("buffer", model.buffers, extended.buffers),
        ("frozen parameter", model.frozen, extended.frozen),
    ):
        named = {spec.name: str(spec) for spec in earlier}
        for spec in later:
            if named.get(spec.name, str(spec)) != str(spec):
                raise ProtocolError(f"the {kind} {named[spec.name]} has become {spec} since training began")


def _difference_of_optimizers(expected: OptimizerSpec, found: OptimizerSpec) -> str:
    if expected.name != found.name:
        return f"optimizer {found.name} instead of {expected.name}"
    counts = len(expected.groups), len(found.groups)
    if counts[0] != counts[1]:
        return f"{counts[1]} parameter groups instead of {counts[0]}"
    if expected.group_of != found.group_of:
        return "the parameters are assigned to groups differently"
    return ""

"""The description of a model, as sent between processes: its parameters, its optimizer, and its other tensors.

Each worker registers a description. The coordinator checks that all descriptions are equal, apart from the
hyper-parameters, and the servers create their shards from the description. This module does not import torch.
"""

from __future__ import annotations

import msgspec

from .layout import Layout

__all__ = ["BufferSpec", "HyperParameters", "ModelSpec", "OptimizerSpec", "first_difference"]

HyperParameter = float | int | bool | str | tuple[float, ...] | None

HyperParameters = dict[str, HyperParameter]
"""The settings of one parameter group: `lr`, `momentum`, `betas`, ..."""


class OptimizerSpec(msgspec.Struct, frozen=True):
    """The description of the user's optimizer.

    Attributes:
        name: name of the class in `torch.optim` that the servers use, or "module:Class" for any other class.
        groups: hyper-parameters of each group.
        group_of: for each parameter of the optimizer's parameter set, the index of its group.
    """

    name: str
    groups: tuple[HyperParameters, ...]
    group_of: tuple[int, ...]


class BufferSpec(msgspec.Struct, frozen=True):
    """A tensor of the model's `state_dict` that the optimizer does not train.

    Attributes:
        name: name of the tensor in the `state_dict`.
        shape: shape of the tensor.
        dtype: name of the dtype in torch.
        fixed: True for a parameter that the optimizer does not update. Training does not change such a parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    fixed: bool

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


class ModelSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The description of the model that a worker trains. All workers of a job must train the same model.

    A script may train with several optimizers. Each of them has a parameter set of its own, and the parameters of a
    set follow those of the set before it.

    Attributes:
        layout: layout of the parameters of all sets.
        optimizer: the optimizer of the first parameter set.
        buffers: the tensors that no optimizer trains.
        further: the optimizers of the other parameter sets, in order.
    """

    layout: Layout
    optimizer: OptimizerSpec
    buffers: tuple[BufferSpec, ...]
    further: tuple[OptimizerSpec, ...] = ()

    @property
    def optimizers(self) -> tuple[OptimizerSpec, ...]:
        """The optimizer of each parameter set."""
        return (self.optimizer, *self.further)


def first_difference(model: ModelSpec, other: ModelSpec) -> str:
    """Describe the first difference between `model` and `other`, ignoring hyper-parameters; return "" if none."""
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
    for expected_buffer, found_buffer in zip(model.buffers, other.buffers, strict=False):
        if expected_buffer != found_buffer:
            return f"buffer {found_buffer} instead of {expected_buffer}"
    if len(model.buffers) != len(other.buffers):
        return f"{len(other.buffers)} buffers instead of {len(model.buffers)}"
    return ""


def _difference_of_optimizers(expected: OptimizerSpec, found: OptimizerSpec) -> str:
    if expected.name != found.name:
        return f"optimizer {found.name} instead of {expected.name}"
    counts = len(expected.groups), len(found.groups)
    if counts[0] != counts[1]:
        return f"{counts[1]} parameter groups instead of {counts[0]}"
    if expected.group_of != found.group_of:
        return "the parameters are assigned to groups differently"
    return ""

"""The description of a model as a value: the layout of its parameters, the optimizer, and its other tensors.

Workers register it, the coordinator compares it, and servers create their shards from it. This module does not import
torch.
"""

from __future__ import annotations

import msgspec

from .layout import Layout

__all__ = ["BufferSpec", "HyperParameters", "ModelSpec", "OptimizerSpec", "first_difference"]

HyperParameters = dict[str, float | int | bool | tuple[float, float] | None]
"""The settings of one parameter group: `lr`, `momentum`, `betas`, ..."""


class OptimizerSpec(msgspec.Struct, frozen=True):
    """A user's optimizer as a value.

    Attributes:
        name: name of the class in `torch.optim` that the servers use.
        groups: hyper-parameters of each group.
        group_of: for each parameter of the layout, the index of its group.
    """

    name: str
    groups: tuple[HyperParameters, ...]
    group_of: tuple[int, ...]


class BufferSpec(msgspec.Struct, frozen=True):
    """A tensor of the model's `state_dict` that the optimizer does not train.

    Attributes:
        name: name of the tensor in the `state_dict`.
        shape: shape of the tensor.
        dtype: torch's name of the dtype.
        fixed: True if training does not change the tensor (a parameter that the optimizer does not have).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    fixed: bool

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


class ModelSpec(msgspec.Struct, frozen=True):
    """The model and optimizer that a worker trains. They must be equal for all workers of a job."""

    layout: Layout
    optimizer: OptimizerSpec
    buffers: tuple[BufferSpec, ...]


def first_difference(model: ModelSpec, other: ModelSpec) -> str:
    """Describe the first difference of another model from a model; return "" if they are equal."""
    pairs = zip(model.layout.parameters, other.layout.parameters, strict=False)
    for expected, found in pairs:
        if expected != found:
            return f"{found} instead of {expected}"
    counts = len(model.layout.parameters), len(other.layout.parameters)
    if counts[0] != counts[1]:
        return f"{counts[1]} parameters instead of {counts[0]}"
    if model.optimizer.name != other.optimizer.name:
        return f"optimizer {other.optimizer.name} instead of {model.optimizer.name}"
    counts = len(model.optimizer.groups), len(other.optimizer.groups)
    if counts[0] != counts[1]:
        return f"{counts[1]} parameter groups instead of {counts[0]}"
    if model.optimizer.group_of != other.optimizer.group_of:
        return "its parameter groups contain different parameters"
    for expected_buffer, found_buffer in zip(model.buffers, other.buffers, strict=False):
        if expected_buffer != found_buffer:
            return f"buffer {found_buffer} instead of {expected_buffer}"
    if len(model.buffers) != len(other.buffers):
        return f"{len(other.buffers)} buffers instead of {len(model.buffers)}"
    return ""

"""What is trained, as a value: the layout of the parameters, the optimizer, and the tensors beside them.

Workers register it, the coordinator compares it, servers build their shards from it. It imports no torch.
"""

from __future__ import annotations

import msgspec

from .layout import Layout

__all__ = ["BufferSpec", "HyperParameters", "ModelSpec", "OptimizerSpec", "first_difference"]

HyperParameters = dict[str, float | int | bool | tuple[float, float] | None]
"""One parameter group's settings: `lr`, `momentum`, `betas`, ..."""


class OptimizerSpec(msgspec.Struct, frozen=True):
    """A user's optimizer as a value.

    Attributes:
        name: the class in `torch.optim` that the servers run.
        groups: the hyper-parameters of each group.
        group_of: for each parameter of the layout, the index of its group.
    """

    name: str
    groups: tuple[HyperParameters, ...]
    group_of: tuple[int, ...]


class BufferSpec(msgspec.Struct, frozen=True):
    """A tensor of the model's `state_dict` that the optimizer does not train.

    Attributes:
        name: its name in the `state_dict`.
        shape: its shape.
        dtype: torch's name of its dtype.
        fixed: True for one that training does not change (a parameter outside the optimizer).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    fixed: bool

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


class ModelSpec(msgspec.Struct, frozen=True):
    """What a worker is about to train. All workers of a job must give the same."""

    layout: Layout
    optimizer: OptimizerSpec
    buffers: tuple[BufferSpec, ...]


def first_difference(one: ModelSpec, other: ModelSpec) -> str:
    """The first thing in which two workers' models differ, in words; "" if they are the same."""
    pairs = zip(one.layout.parameters, other.layout.parameters, strict=False)
    for mine, theirs in pairs:
        if mine != theirs:
            return f"{theirs} where the other has {mine}"
    counts = len(one.layout.parameters), len(other.layout.parameters)
    if counts[0] != counts[1]:
        return f"{counts[1]} parameters where the other has {counts[0]}"
    if one.optimizer.name != other.optimizer.name:
        return f"optimizer {other.optimizer.name} where the other has {one.optimizer.name}"
    counts = len(one.optimizer.groups), len(other.optimizer.groups)
    if counts[0] != counts[1]:
        return f"{counts[1]} parameter groups where the other has {counts[0]}"
    if one.optimizer.group_of != other.optimizer.group_of:
        return "its parameter groups are made of other parameters"
    for own, others in zip(one.buffers, other.buffers, strict=False):
        if own != others:
            return f"buffer {others} where the other has {own}"
    if len(one.buffers) != len(other.buffers):
        return f"{len(other.buffers)} buffers where the other has {len(one.buffers)}"
    return ""

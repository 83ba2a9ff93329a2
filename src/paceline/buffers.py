"""The tensors of a model that no optimizer trains: how each worker's copies become one.

Each worker computes its own, BatchNorm's running statistics above all. They ride with its commits into a slot
of its own; evaluation, checkpoints and the final weights get them *pooled*:

    running_mean  the mean over the workers
    running_var   the mean of the variances plus the variance of the means: what the workers' batches together
                  would have shown
    other floats  the mean
    the rest      (counters, masks) the element-wise maximum
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .wire.messages import BufferSpec

__all__ = ["bytes_of", "pack", "packed_bytes", "pool", "torch_dtype", "unpack"]


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of that name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def packed_bytes(spec: BufferSpec) -> int:
    """How many bytes one buffer takes."""
    size = torch_dtype(spec.dtype).itemsize
    for length in spec.shape:
        size *= length
    return size


def pack(tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    """The bytes of some tensors."""
    return [bytes_of(tensor.detach().contiguous().reshape(-1)) for tensor in tensors]


def bytes_of(vector: torch.Tensor) -> memoryview:
    """The bytes of a flat tensor, without a copy."""
    return memoryview(vector.view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer


def unpack(spec: BufferSpec, data: bytes | bytearray | memoryview) -> torch.Tensor:
    """The tensor whose bytes these are; a copy."""
    if not packed_bytes(spec):
        return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
    return torch.frombuffer(bytearray(data), dtype=torch_dtype(spec.dtype)).reshape(spec.shape)


def pool(slots: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One set of buffers out of each worker's, by the rules above. `slots` is not empty."""
    pooled: dict[str, torch.Tensor] = {}
    for name in slots[0]:
        copies = torch.stack([slot[name] for slot in slots])
        if not copies.is_floating_point():
            pooled[name] = copies.amax(0) if copies.dtype != torch.bool else copies.any(0)
            continue
        pooled[name] = copies.mean(0)
        means = name.removesuffix("running_var") + "running_mean"
        if name.endswith("running_var") and means in slots[0]:
            pooled[name] += torch.stack([slot[means] for slot in slots]).var(0, correction=0)
    return pooled

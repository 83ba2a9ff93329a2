"""Converts model buffers (tensors that no optimizer trains) to and from bytes, and pools the workers' copies.

Each worker computes its own copy of the buffers, such as BatchNorm's running statistics, and sends it with its
pushes. The server stores each worker's copy separately. For evaluation, checkpoints and the final weights, the
copies are *pooled*:

    equal in all workers          unchanged, bit for bit; running_var only if running_mean is equal as well
    running_mean                  mean over the workers
    running_var                   mean of the variances plus the variance of the means: the variance over the batches
                                  of all workers
    other floating-point tensors  mean
    integers, booleans            element-wise maximum, which suits counters and masks
    other dtypes                  the copy of the worker with the lowest index
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import numpy as np
import torch

from ..core.protocol.model_spec import BufferSpec
from .vectors import torch_dtype

__all__ = ["bytes_of", "checksum", "lent_bytes", "pack", "packed_bytes", "pool", "unpack"]

AVERAGED = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
COUNTED = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})


def packed_bytes(spec: BufferSpec) -> int:
    """Return the size of a buffer in bytes."""
    size = torch_dtype(spec.dtype).itemsize
    for length in spec.shape:
        size *= length
    return size


def pack(tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    """Return the bytes of each tensor."""
    return [bytes_of(tensor.detach().contiguous().reshape(-1)) for tensor in tensors]


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """Return a checksum of the bytes of all tensors."""
    found = 0
    for data in pack(tensors):
        found = crc32(data, found)
    return found


def bytes_of(vector: torch.Tensor) -> memoryview:
    """Return the bytes of a flat tensor without copying them."""
    return memoryview(vector.view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer


def lent_bytes(vector: torch.Tensor) -> memoryview:
    """Return the bytes of a flat tensor of the script without copying them, to be read.

    torch forbids a tensor to grow once `numpy()` was called on it, as `bytes_of` does.
    """
    return memoryview(np.from_dlpack(vector.detach().view(torch.uint8)))  # type: ignore[arg-type]


def unpack(spec: BufferSpec, data: bytes | bytearray | memoryview) -> torch.Tensor:
    """Return a buffer with a copy of the bytes in `data`."""
    if not packed_bytes(spec):
        return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
    return torch.frombuffer(bytearray(data), dtype=torch_dtype(spec.dtype)).reshape(spec.shape)


def pool(slots: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pool the buffers of all workers according to the rules in the module docstring.

    Args:
        slots: one mapping from name to buffer per worker, in the order of the workers' indices. Must not be empty.
    """
    return {name: _pool_one(name, slots) for name in slots[0]}


def _pool_one(name: str, slots: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    copies = [slot[name] for slot in slots]
    if copies[0].dtype in AVERAGED:
        pooled = copies[0] if _same(copies) else torch.stack(copies).mean(0)
        name_of_mean = name.removesuffix("running_var") + "running_mean"
        if name.endswith("running_var") and name_of_mean in slots[0]:
            means = [slot[name_of_mean] for slot in slots]
            pooled = pooled if _same(means) else pooled + torch.stack(means).var(0, correction=0)
        return pooled
    if copies[0].dtype in COUNTED and not _same(copies):
        return torch.stack(copies).amax(0)
    return copies[0]


def _same(copies: Sequence[torch.Tensor]) -> bool:
    """Return True if all copies have the same bits. Comparing bits makes NaN equal to NaN."""
    first, *others = pack(copies)
    return all(other == first for other in others)

"""Flat vectors of weights or gradients, one per dtype, and views of their parts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

import torch

from ..core.protocol.layout import Layout, ShardSlice, dtype_of

__all__ = [
    "Vectors",
    "bits",
    "digest",
    "dtype_name",
    "l2_norm",
    "parameter_views",
    "same",
    "sampled_norm",
    "segment_views",
    "sliced",
    "squared_norm",
    "tensors_over",
    "torch_dtype",
]

CHUNK = 128 * 1024
"""Number of elements that are converted to double precision at a time: few enough for the CPU cache."""

DIGESTED = 4096
"""Maximum number of elements of a tensor, evenly spaced, that enter a hash."""

SAMPLED = 8192
"""Maximum number of elements of a vector, evenly spaced, from which its norm is estimated."""

Vectors = dict[str, torch.Tensor]
"""Flat vectors by name (see `core.protocol.layout`): weights or gradients of a whole model or of one shard."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name`, for example "float32", or the dtype of the vector with this name."""
    dtype = getattr(torch, dtype_of(name))
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name for a dtype, for example "float32"."""
    return str(dtype).removeprefix("torch.")


def tensors_over(vectors: Mapping[str, memoryview]) -> Vectors:
    """Return a flat tensor for each dtype. The tensors share the memory of the given bytes.

    A tensor over read-only memory must not be written to: torch does not know of such memory, and the process would
    end.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return {
            dtype: torch.frombuffer(data, dtype=torch_dtype(dtype))
            if data.nbytes
            else torch.empty(0, dtype=torch_dtype(dtype))
            for dtype, data in vectors.items()
        }


def parameter_views(layout: Layout, vectors: Vectors) -> list[torch.Tensor]:
    """Return, for each parameter, a view of its part of a model's flat vectors, with the parameter's shape."""
    return [
        vectors[p.vector][offset : offset + p.size].view(p.shape)
        for p, offset in zip(layout.parameters, layout.offsets, strict=True)
    ]


def segment_views(bounds: ShardSlice, vectors: Vectors) -> list[torch.Tensor]:
    """Return, for each segment of a shard, a flat view of its part of the shard's vectors."""
    return [vectors[s.dtype][s.start : s.stop] for s in bounds.segments]


def l2_norm(tensor: torch.Tensor) -> float:
    """Return the L2 norm of a tensor, in double precision; on accelerators, some of which lack it, in single."""
    dtype = torch.float64 if tensor.is_cpu or tensor.dtype == torch.float64 else torch.float32
    return float(torch.linalg.vector_norm(tensor, dtype=dtype))


def sliced(vectors: Vectors, shard: ShardSlice) -> Vectors:
    """Return views of a shard's slice of a model's flat vectors."""
    return {name: vectors[name][start:stop] for name, (start, stop) in shard.bounds.items()}


def squared_norm(vectors: Sequence[torch.Tensor], scales: Sequence[float] = (1.0,)) -> float:
    """Return the squared L2 norm of the sum of some flat vectors of equal length, each multiplied by its scale.

    The sum has the dtype of the vectors, and its squares are added in double precision.

    >>> squared_norm([torch.tensor([2.0, 6.0]), torch.tensor([4.0, 2.0])], [0.5, 0.5])
    25.0
    """
    square = 0.0
    chunk = CHUNK if vectors[0].is_cpu else max(1, vectors[0].numel())  # another device has no use for chunks
    for first, *others in zip(*(vector.split(chunk) for vector in vectors), strict=True):
        total = first if not others and scales[0] == 1.0 else first * scales[0]
        for other, scale in zip(others, scales[1:], strict=True):
            total.add_(other, alpha=scale)
        square += l2_norm(total) ** 2
    return square


def sampled_norm(vectors: Iterable[torch.Tensor]) -> float:
    """Return the L2 norm over the elements of some flat vectors, estimated from evenly spaced elements of each.

    The result is NaN or inf if one of these elements is. The time hardly depends on the sizes of the vectors.

    >>> sampled_norm([torch.tensor([2.0, 1.0]), torch.tensor([2.0])])
    3.0
    >>> sampled_norm([torch.full((10**6,), 0.5)])
    500.0
    """
    square = 0.0
    for vector in vectors:
        sample = vector[:: -(-vector.numel() // SAMPLED) or 1].to(torch.float64)
        square += float(torch.dot(sample, sample)) * (vector.numel() / max(1, sample.numel()))
    return math.sqrt(square)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash of at most `DIGESTED` elements of each tensor; "" if all of these elements are zero.

    Example:
        >>> digest([torch.ones(3)]) == digest([torch.ones(3)]) != digest([torch.ones(2)])
        True
        >>> digest([torch.zeros(3)])
        ''
    """
    hashed, nonzero = blake2b(digest_size=8), False
    for tensor in tensors:
        values = (tensor if tensor.layout == torch.strided else tensor.to_dense()).detach().reshape(-1)
        sample = values[:: -(-values.numel() // DIGESTED) or 1].cpu().to(torch.float64)
        nonzero = nonzero or bool(sample.any())
        # of a copy, because torch forbids a tensor to grow once numpy() was called on it
        hashed.update(sample.clone().numpy().tobytes())
    return hashed.hexdigest() if nonzero else ""


def same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same bits, so that NaN equals NaN. They may be on different devices."""
    return torch.equal(bits(tensor), bits(other).to(tensor.device))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's memory as integers."""
    return tensor.detach().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.itemsize])

"""Flat vectors of weights or gradients, one per dtype, and views of their parts."""

from __future__ import annotations

import torch

from ..core.layout import Layout, ShardSlice

__all__ = ["Vectors", "dtype_name", "parameter_views", "segment_views", "torch_dtype"]

Vectors = dict[str, torch.Tensor]
"""Mapping from dtype to flat vector: the weights or the gradients of a whole model or of one shard."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name`, for example "float32"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name for a dtype, for example "float32"."""
    return str(dtype).removeprefix("torch.")


def parameter_views(layout: Layout, vectors: Vectors) -> list[torch.Tensor]:
    """Return, for each parameter, a view of its part of a model's flat vectors, with the parameter's shape."""
    return [
        vectors[p.dtype][offset : offset + p.size].view(p.shape)
        for p, offset in zip(layout.parameters, layout.offsets, strict=True)
    ]


def segment_views(bounds: ShardSlice, vectors: Vectors) -> list[torch.Tensor]:
    """Return, for each segment of a shard, a flat view of its part of the shard's vectors."""
    return [vectors[s.dtype][s.start : s.stop] for s in bounds.segments]

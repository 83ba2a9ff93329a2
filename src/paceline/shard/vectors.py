"""Flat vectors of weights or gradients, one per dtype, and views of their parts."""

from __future__ import annotations

import torch

from ..core.layout import Layout, ShardSlice

__all__ = ["Vectors", "dtype_name", "parameter_views", "segment_views", "torch_dtype"]

Vectors = dict[str, torch.Tensor]
"""dtype -> flat vector: the weights or gradients of a whole model, or one shard's slice of them."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name`, for example "float32"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, for example "float32"."""
    return str(dtype).removeprefix("torch.")


def parameter_views(layout: Layout, vectors: Vectors) -> list[torch.Tensor]:
    """Return a view of each parameter of a model in its flat vectors, in the parameter's shape."""
    return [
        vectors[p.dtype][offset : offset + p.size].view(p.shape)
        for p, offset in zip(layout.parameters, layout.offsets, strict=True)
    ]


def segment_views(bounds: ShardSlice, vectors: Vectors) -> list[torch.Tensor]:
    """Return a flat view of each segment of a shard in the shard's slice of the vectors."""
    return [vectors[s.dtype][s.start : s.stop] for s in bounds.segments]

"""A worker's gradients in the flat vectors: where autograd's results are adopted, and found finite or not.

Autograd accumulates a gradient wherever it likes, so each is *adopted*: copied to its place in the flat vector. A
large one goes through `memmove`, which writes large blocks past the cache: the next to read them is another process,
and a store through the cache would first read what it overwrites.

Whether all is finite is found out at the commit, since a script may edit its gradients until then in ways that leave
no trace. A dot product finds NaN and inf 35 times faster than `isfinite`; it can also overflow, so only that decides.
"""

from __future__ import annotations

import ctypes
import math

import torch

from ..core.layout import Layout
from ..shard.slice_optimizers import Vectors

__all__ = ["Gradients"]

LARGE_BYTES = 2 * 1024 * 1024


class Gradients:
    """The gradients of one model.

    Args:
        layout: where each lies.
        vectors: dtype -> the flat vector, zeroed.

    Attributes:
        places: for each parameter, its part of the vectors, in its shape.
    """

    def __init__(self, layout: Layout, vectors: Vectors) -> None:
        self.places = [
            vectors[p.dtype][offset : offset + p.size].view(p.shape)
            for p, offset in zip(layout.parameters, layout.offsets, strict=True)
        ]
        self._vectors = vectors
        self._written = [False] * len(self.places)  # whose place may hold other than zeros

    def adopt(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Have a parameter's gradient lie at its place, and return that; zeros, and None, if there is none."""
        place = self.places[index]
        if gradient is None:
            if self._written[index]:
                place.zero_()
                self._written[index] = False
            return None
        self._written[index] = True
        if gradient.is_sparse:
            place.copy_(gradient.to_dense())
        elif gradient.data_ptr() != place.data_ptr():
            alike = gradient.is_contiguous() and gradient.dtype == place.dtype
            if alike and place.nbytes >= LARGE_BYTES:
                ctypes.memmove(place.data_ptr(), gradient.data_ptr(), place.nbytes)
            else:
                place.copy_(gradient)
        return place

    def first_not_finite(self) -> int | None:
        """The first parameter whose gradient holds NaN or inf."""
        if all(math.isfinite(float(torch.dot(vector, vector))) for vector in self._vectors.values()):
            return None
        return next((i for i, place in enumerate(self.places) if not bool(place.isfinite().all())), None)

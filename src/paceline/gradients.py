"""A worker's gradients in the flat vectors: where autograd's results are adopted, and found finite or not.

Autograd accumulates a gradient wherever it likes, so each is *adopted*: copied to its place in the flat vector. A
large one is copied a chunk at a time, and each chunk is looked at for NaN and inf while it is in the cache, which
spares a second pass over memory. (A dot product finds them 35 times faster than `isfinite`; since it can also
overflow, only `isfinite` decides.) What has been edited since is looked at again, as far as its version counter tells:
an edit of a large gradient through `.data` does not move that. The copy goes through `memmove`, which writes large
blocks past the cache: the next to read them is another process, and a store through the cache would first read what
it overwrites.
"""

from __future__ import annotations

import ctypes
import math

import torch

from .layout import Layout
from .slice_optimizers import Vectors

__all__ = ["Gradients"]

LARGE_BYTES = 2 * 1024 * 1024
CHUNK_BYTES = 1024 * 1024


class Gradients:
    """The gradients of one model.

    Args:
        layout: where each lies.
        vectors: dtype -> the flat vector, zeroed.

    Attributes:
        places: for each parameter, its part of the vectors, in its shape. Each counts its versions by itself.
    """

    def __init__(self, layout: Layout, vectors: Vectors) -> None:
        self.places = [
            vectors[p.dtype][offset : offset + p.size].view(p.shape).data
            for p, offset in zip(layout.parameters, layout.offsets, strict=True)
        ]
        self._large = {index for index, place in enumerate(self.places) if place.nbytes >= LARGE_BYTES}
        self._written = [False] * len(self.places)  # whose place may hold other than zeros
        self._finite: dict[int, int] = {}  # large ones -> the version in which they were found finite
        self._small = self._stretches(layout, vectors)

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
            if index in self._large and gradient.is_contiguous() and gradient.dtype == place.dtype:
                self._copy_large(index, gradient)
            else:
                place.copy_(gradient)
        return place

    def first_not_finite(self) -> int | None:
        """The first parameter whose gradient holds NaN or inf."""
        if all(map(_is_finite, self._small)) and all(map(self._is_large_finite, self._large)):
            return None
        return next((i for i, place in enumerate(self.places) if not bool(place.isfinite().all())), None)

    def _copy_large(self, index: int, gradient: torch.Tensor) -> None:
        place = self.places[index]
        size = CHUNK_BYTES // place.itemsize
        total = 0.0
        for to, chunk in zip(place.view(-1).split(size), gradient.view(-1).split(size), strict=True):
            total += float(torch.dot(chunk, chunk))
            ctypes.memmove(to.data_ptr(), chunk.data_ptr(), chunk.nbytes)
        if math.isfinite(total):
            self._finite[index] = place._version
        else:
            self._finite.pop(index, None)

    def _is_large_finite(self, index: int) -> bool:
        place = self.places[index]
        return self._finite.get(index) == place._version or _is_finite(place.view(-1))

    def _stretches(self, layout: Layout, vectors: Vectors) -> list[torch.Tensor]:
        """What lies between the large ones, as few stretches."""
        stretches = []
        for dtype, vector in vectors.items():
            start = 0
            for index in [i for i in sorted(self._large) if layout.parameters[i].dtype == dtype]:
                stretches.append(vector[start : layout.offsets[index]])
                start = layout.offsets[index] + layout.parameters[index].size
            stretches.append(vector[start:])
        return [stretch for stretch in stretches if stretch.numel()]


def _is_finite(vector: torch.Tensor) -> bool:
    return math.isfinite(float(torch.dot(vector, vector)))

"""Rounding of float32 vectors to bfloat16, in which they travel over slow links (see `core.layout`).

This is the only place where values are rounded and widened. `torch.Tensor.copy_` rounds to the nearest value, ties to
even. NaN stays NaN, and a value whose magnitude is above 3.39e38, the largest bfloat16, becomes inf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..core.layout import Range
from .vectors import Vectors, bytes_of


class Rounded:
    """Flat vectors, and memory of half the size for their float32 values as bfloat16.

    Vectors with other dtypes are not rounded: their memory is that of the vectors themselves.

    Args:
        vectors: the flat vectors, with their own values.
    """

    def __init__(self, vectors: Vectors) -> None:
        self._vectors = {name: vector for name, vector in vectors.items() if vector.dtype == torch.float32}
        self._memory = vectors | {
            name: torch.empty(vector.shape, dtype=torch.bfloat16) for name, vector in self._vectors.items()
        }

    def memory(self, ranges: Iterable[Range]) -> list[memoryview]:
        """Return the bytes of these parts in the format in which they travel."""
        return [bytes_of(self._memory[name][start:stop]) for name, start, stop in ranges]

    def round(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Round these parts of the vectors, and return the bytes of the result."""
        for name, start, stop in ranges:
            if name in self._vectors:
                self._memory[name][start:stop].copy_(self._vectors[name][start:stop])
        return self.memory(ranges)

    def widen(self, ranges: Iterable[Range]) -> None:
        """Set these parts of the vectors to what their memory contains."""
        for name, start, stop in ranges:
            if name in self._vectors:
                self._vectors[name][start:stop].copy_(self._memory[name][start:stop])


def whole_ranges(vectors: Vectors) -> list[Range]:
    """Return the ranges that cover these vectors."""
    return [(name, 0, vector.numel()) for name, vector in vectors.items()]


def round_trip(vectors: Vectors) -> Vectors:
    """Return what arrives if these vectors are rounded, sent and widened. Only float32 vectors are copied.

    >>> round_trip({"float32": torch.tensor([1.0, 1.001, 1.005])})
    {'float32': tensor([1.0000, 1.0000, 1.0078])}
    """
    return {
        name: vector.to(torch.bfloat16).to(torch.float32) if vector.dtype == torch.float32 else vector
        for name, vector in vectors.items()
    }

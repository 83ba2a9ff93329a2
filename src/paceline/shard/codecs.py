"""Codecs: the formats in which float32 vectors travel between processes, by the names of the option `--wire`.

A codec is a subclass of `Codec`. Whoever sends or receives vectors takes the class from `CODECS` by its name, makes an
object for each end, and knows nothing else of the format. `WireFormat.SIZES` in `core.layout` has the sizes, which
decide how long transfers take in a simulation, and `core.messages.push` says what is encoded. Vectors with other dtypes
than float32 always travel as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import ClassVar

import torch

from ..core.layout import Range
from .vectors import Vectors, bytes_of


class Codec:
    """One end of the way of some vectors. Here, they travel as they are.

    An object belongs to one end of one way, so a subclass may keep what it needs from one message to the next. Both
    ends have vectors with the same names and sizes. A gradient is encoded in pieces, before all of it is computed.

    Args:
        vectors: the flat vectors, with their own values.

    Attributes:
        vectors: the flat vectors.
        travelling: the memory in which the vectors travel.
        in_place: True if values arrive where they are used, so a part that has arrived is usable at once.
    """

    in_place: ClassVar[bool] = True

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = self.travelling = vectors

    def __init_subclass__(cls, *, name: str) -> None:
        CODECS[name] = cls

    def ranges(self, vectors: Iterable[str]) -> list[Range]:
        """Return the ranges that cover these vectors."""
        return [(name, 0, self.vectors[name].numel()) for name in vectors]

    def memory(self, ranges: Iterable[Range]) -> list[memoryview]:
        """Return the bytes of these parts in the format in which they travel."""
        found = []
        for name, start, stop in ranges:
            data, item_bytes = self._bytes[name]
            found.append(data[start * item_bytes : stop * item_bytes])
        return found

    @cached_property
    def _bytes(self) -> dict[str, tuple[memoryview, int]]:
        """Vector -> its bytes as it travels, and the size of a value. For each message, views of tensors are slow."""
        return {name: (bytes_of(vector), vector.element_size()) for name, vector in self.travelling.items()}

    def encode(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Encode these parts of the vectors, and return the bytes of the result."""
        return self.memory(ranges)

    def decode(self, ranges: Iterable[Range]) -> None:
        """Set these parts of the vectors to what their memory contains."""

    def round_trip(self) -> Vectors:
        """Return what arrives at the other end if all vectors are sent. Vectors that are not encoded are not copied."""
        return self.vectors


CODECS: dict[str, type[Codec]] = {"float32": Codec}
"""Name -> codec. The names are those of `WireFormat.SIZES`."""


class Bfloat16(Codec, name="bf16"):
    """Float32 values are rounded to bfloat16, in memory of half the size.

    `torch.Tensor.copy_` rounds to the nearest value, ties to even. NaN stays NaN, and a value whose magnitude is above
    3.39e38, the largest bfloat16, becomes inf.

    >>> Bfloat16({"float32": torch.tensor([1.0, 1.001, 1.005])}).round_trip()
    {'float32': tensor([1.0000, 1.0000, 1.0078])}
    """

    in_place = False

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors
        self._narrow = {
            name: torch.empty(vector.shape, dtype=torch.bfloat16)
            for name, vector in vectors.items()
            if vector.dtype == torch.float32
        }
        self.travelling = vectors | self._narrow

    def encode(self, ranges: Sequence[Range]) -> list[memoryview]:
        for name, start, stop in ranges:
            if name in self._narrow:
                self._narrow[name][start:stop].copy_(self.vectors[name][start:stop])
        return self.memory(ranges)

    def decode(self, ranges: Iterable[Range]) -> None:
        for name, start, stop in ranges:
            if name in self._narrow:
                self.vectors[name][start:stop].copy_(self._narrow[name][start:stop])

    def round_trip(self) -> Vectors:
        self.encode(self.ranges(self._narrow))
        return self.vectors | {name: narrow.to(torch.float32) for name, narrow in self._narrow.items()}

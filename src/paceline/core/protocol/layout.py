"""The layout of parameters in flat vectors, and the slicing of those vectors into shards.

This module contains only arithmetic and does not import torch. A *parameter set* consists of the parameters that one
optimizer of the script trains. The parameters of a set are placed one after another in one flat vector per dtype, and
each parameter begins at a 64-byte boundary. The name of a vector is its dtype; for sets after the first one, "/" and
the index of the set follow. So each set is sliced by itself, and a push or a pull of one set is a selection of whole
vectors.

A script may add parameters after training has begun: with a later optimizer, or as a later group of an existing one.
The parameters that are added together form a *part* of the layout. Each part has vectors of its own, whose names end
with "." and the number of the part, so parameters and slices that exist already keep their places.

Elastic Parameter Slicing, or EPS, then cuts each vector into parts of almost equal size, regardless of the sizes of
the layers, so a layer may be spread over several shards. EPS is described in section III of the FluentPS paper. A
push or a pull transfers slices of these vectors without conversion.

>>> layout = Layout.of([Parameter(("w",), (4, 5), "float32"), Parameter(("b",), (4,), "float32")])
>>> layout.sizes, layout.offsets  # 20 elements, padded to 32; then 4, padded to 16
({'float32': 48}, (0, 32))
>>> [shard.bounds for shard in layout.slice_evenly(2)]
[{'float32': (0, 16)}, {'float32': (16, 48)}]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from ...errors import ConfigurationError

__all__ = [
    "ALIGNMENT_BYTES",
    "ITEM_BYTES",
    "SLICINGS",
    "Layout",
    "Parameter",
    "Piece",
    "Range",
    "Segment",
    "ShardSlice",
    "aligned",
    "dtype_of",
    "item_bytes",
    "of_set",
    "ranges_of",
    "without_last",
]

ALIGNMENT_BYTES = 64

SLICINGS = ("even", "by-parameter")
"""The ways to slice the parameters. See `Layout.sliced`."""

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Size in bytes of one element of each dtype that a parameter may have. Each key is the name of a dtype in torch."""

T = TypeVar("T")

Range = tuple[str, int, int]
"""A part of a flat vector: its name, the index of the first element, and that of the last element plus one."""


def without_last(ranges: Sequence[Range], missing_bytes: int) -> list[Range]:
    """Return what is left of some ranges if the last bytes of all of them together are missing.

    >>> without_last([("float32", 0, 8), ("float64", 0, 4)], 33)
    [('float32', 0, 7)]
    """
    left = []
    for vector, start, stop in reversed(ranges):
        if (end := stop + -missing_bytes // item_bytes(vector)) > start:
            left.append((vector, start, end))
        missing_bytes = max(missing_bytes - (stop - start) * item_bytes(vector), 0)
    return left[::-1]


def dtype_of(vector: str) -> str:
    """Return the dtype of the vector with this name."""
    return vector.partition("/")[0]


def item_bytes(vector: str) -> int:
    """Return the size in bytes of one element of the vector with this name."""
    return ITEM_BYTES[dtype_of(vector)]


def of_set(vectors: Mapping[str, T], set_index: int | None) -> dict[str, T]:
    """Return the vectors of one parameter set; all vectors if `set_index` is None.

    >>> of_set({"float32": 1, "float64": 2, "float32/1": 3, "float32/1.4": 4}, 1)
    {'float32/1': 3, 'float32/1.4': 4}
    """
    if set_index is None:
        return dict(vectors)
    return {name: vector for name, vector in vectors.items() if _set_of(name) == set_index}


def _set_of(vector: str) -> int:
    """Return the index of the parameter set to which the vector with this name belongs."""
    return int(vector.partition("/")[2].partition(".")[0] or 0)


class Parameter(msgspec.Struct, frozen=True, omit_defaults=True):
    """The description of a trainable tensor of the model.

    Attributes:
        names: all names of the tensor in the model's `state_dict`; more than one if the parameter is tied.
        shape: shape of the tensor.
        dtype: name of the dtype in torch, for example "float32".
        set_index: index of the parameter set that the parameter belongs to.
        part: number of the part of the layout with which the parameter was added; 0 if it was there from the start.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    set_index: int = 0
    part: int = 0

    @property
    def vector(self) -> str:
        """Name of the vector that contains the parameter."""
        if self.part:
            return f"{self.dtype}/{self.set_index}.{self.part}"
        return f"{self.dtype}/{self.set_index}" if self.set_index else self.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.names[0]} {self.dtype}{list(self.shape)}"


class Segment(msgspec.Struct, frozen=True):
    """The part of one parameter that lies in one shard.

    Attributes:
        parameter: index of the parameter.
        dtype: name of the vector that contains the segment: the dtype, with the set and the part if they are not 0.
        start: index of the segment's first element within the shard's slice of the vector.
        stop: index of the segment's last element within the shard's slice of the vector, plus one.
        offset: index of the segment's first element within the flattened parameter.
    """

    parameter: int
    dtype: str
    start: int
    stop: int
    offset: int


class Piece(NamedTuple):
    """A range [start, stop) within a shard's slice of one vector, and the indices of the parameters in this range."""

    dtype: str
    start: int
    stop: int
    parameters: frozenset[int]


def ranges_of(pieces: Sequence[Piece]) -> list[Range]:
    """Return the ranges of the given pieces, in order. Adjacent pieces are merged.

    >>> empty = frozenset()
    >>> ranges_of([Piece("float32", 0, 8, empty), Piece("float32", 8, 16, empty), Piece("float64", 0, 8, empty)])
    [('float32', 0, 16), ('float64', 0, 8)]
    """
    ranges: list[Range] = []
    for vector, start, stop, _ in pieces:
        if ranges and ranges[-1][0] == vector and ranges[-1][2] == start:
            ranges[-1] = (vector, ranges[-1][1], stop)
        else:
            ranges.append((vector, start, stop))
    return ranges


class ShardSlice(msgspec.Struct, frozen=True):
    """The slice that one shard holds: its bounds (start, stop) in each vector, and its segments."""

    index: int
    bounds: dict[str, tuple[int, int]]
    segments: tuple[Segment, ...]

    @property
    def size_bytes(self) -> int:
        """Size in bytes of a push to this shard, or of a pull from this shard."""
        return sum((stop - start) * item_bytes(dtype) for dtype, (start, stop) in self.bounds.items())

    @property
    def rounded_bytes(self) -> int:
        """Size in bytes of a push or a pull in which float32 values are rounded to bfloat16."""
        sizes = {vector: stop - start for vector, (start, stop) in self.bounds.items()}
        halved = sum(size for vector, size in sizes.items() if dtype_of(vector) == "float32")
        return self.size_bytes - halved * (ITEM_BYTES["float32"] - ITEM_BYTES["bfloat16"])

    def of_set(self, set_index: int) -> ShardSlice:
        """Return the part of the slice that belongs to one parameter set."""
        bounds = of_set(self.bounds, set_index)
        return ShardSlice(self.index, bounds, tuple(s for s in self.segments if s.dtype in bounds))

    def pieces(self, size_bytes: int) -> tuple[Piece, ...]:
        """Return the slice as pieces of at most `size_bytes`, in order. Each piece can be sent separately."""
        pieces = []
        for dtype, (low, high) in self.bounds.items():
            step = max(1, size_bytes // item_bytes(dtype))
            for start in range(0, high - low, step):
                stop = min(start + step, high - low)
                inside = {
                    s.parameter
                    for s in self.segments
                    if s.dtype == dtype and s.start < stop and start < s.stop
                }
                pieces.append(Piece(dtype, start, stop, frozenset(inside)))
        return tuple(pieces)


class Layout(msgspec.Struct, frozen=True):
    """The position of each parameter in the flat vectors.

    Attributes:
        parameters: the parameters: part by part, in each part set by set, in the order of the optimizer's groups.
        offsets: for each parameter, the index of its first element in the vector of its dtype.
        sizes: name of each vector -> number of its elements, including padding.
    """

    parameters: tuple[Parameter, ...]
    offsets: tuple[int, ...]
    sizes: dict[str, int]

    @classmethod
    def of(cls, parameters: Sequence[Parameter]) -> Layout:
        """Return the layout of the given parameters, in the given order.

        Raises:
            ConfigurationError: there are no parameters, or a parameter has a dtype that cannot be trained.
        """
        if not any(parameter.size for parameter in parameters):
            raise ConfigurationError("The optimizer has no parameters to train.")
        sizes: dict[str, int] = {}
        offsets = []
        for parameter in parameters:
            if parameter.dtype not in ITEM_BYTES:
                raise ConfigurationError(
                    f"Parameter {parameter} has a dtype that Paceline cannot train; "
                    f"expected one of {', '.join(ITEM_BYTES)}."
                )
            offsets.append(sizes.get(parameter.vector, 0))
            sizes[parameter.vector] = aligned(offsets[-1] + parameter.size, parameter.dtype)
        return cls(tuple(parameters), tuple(offsets), dict(sorted(sizes.items())))

    @property
    def size_bytes(self) -> int:
        """Total size in bytes of a push to all shards, or of a pull from all shards."""
        return sum(size * item_bytes(dtype) for dtype, size in self.sizes.items())

    def sliced(self, shards: int, slicing: str) -> tuple[ShardSlice, ...]:
        """Return the slices. `slicing` selects `slice_evenly` ("even") or `slice_by_parameter` ("by-parameter")."""
        return {"even": self.slice_evenly, "by-parameter": self.slice_by_parameter}[slicing](shards)

    def slice_evenly(self, shards: int) -> tuple[ShardSlice, ...]:
        """Cut every vector into one part per shard, and return the slices of all shards.

        Each vector is cut only between blocks of 64 bytes, so that every slice of it is aligned. The parts of one
        vector differ by at most one block, and the slices of two shards therefore by at most 64 bytes for each
        vector. This holds for the sizes with padding, which are what is stored, sent and updated. The number of
        parameters' elements may differ more, because each parameter is padded to whole blocks:

        >>> scalars = [Parameter((f"scale{i}",), (1,), "float32") for i in range(32)]
        >>> layout = Layout.of([*scalars, Parameter(("weight",), (512,), "float32")])
        >>> slices = layout.slice_evenly(2)
        >>> [shard.size_bytes for shard in slices]
        [2048, 2048]
        >>> [sum(segment.stop - segment.start for segment in shard.segments) for shard in slices]
        [32, 512]
        """
        bounds = [
            {
                dtype: (_cut(size, dtype, shard, shards), _cut(size, dtype, shard + 1, shards))
                for dtype, size in self.sizes.items()
            }
            for shard in range(shards)
        ]
        return tuple(ShardSlice(i, b, self._segments(b)) for i, b in enumerate(bounds))

    def slice_by_parameter(self, shards: int) -> tuple[ShardSlice, ...]:
        """Return slices of whole, adjacent parameters. The parameter counts of the slices differ by at most one.

        By default, PS-Lite slices in this way: it divides the range of parameter keys equally. The shard with the
        largest layer then holds most of the model (FluentPS, section III). This slicing is provided for comparison.
        Each part of the layout is sliced by itself.

        Raises:
            ConfigurationError: there are fewer parameters than shards at the start of training.
        """
        parts = [
            [index for index, parameter in enumerate(self.parameters) if parameter.part == part]
            for part in range(max(parameter.part for parameter in self.parameters) + 1)
        ]
        count = len(parts[0])
        if shards > count:
            raise ConfigurationError(
                f"shards is {shards}, but the model has {count} parameters, and with slicing 'by-parameter' each "
                f"shard needs at least one. Use at most {count} shards, or slicing 'even'."
            )
        bounds: list[dict[str, tuple[int, int]]] = []
        ends = dict.fromkeys(self.sizes, 0)
        for shard in range(shards):
            starts = dict(ends)
            for part in parts:
                for index in part[len(part) * shard // shards : len(part) * (shard + 1) // shards]:
                    parameter = self.parameters[index]
                    ends[parameter.vector] = self.offsets[index] + aligned(parameter.size, parameter.dtype)
            bounds.append({dtype: (starts[dtype], ends[dtype]) for dtype in self.sizes})
        return tuple(ShardSlice(i, b, self._segments(b)) for i, b in enumerate(bounds))

    def _segments(self, bounds: dict[str, tuple[int, int]]) -> tuple[Segment, ...]:
        segments = []
        for index, (parameter, offset) in enumerate(zip(self.parameters, self.offsets, strict=True)):
            low, high = bounds[parameter.vector]
            start, stop = max(offset, low), min(offset + parameter.size, high)
            if start < stop:
                segments.append(Segment(index, parameter.vector, start - low, stop - low, start - offset))
        return tuple(segments)


def _block(dtype: str) -> int:
    return ALIGNMENT_BYTES // item_bytes(dtype)


def aligned(size: int, dtype: str) -> int:
    """Round a number of elements up to the next multiple of the alignment, at which a parameter may begin."""
    block = _block(dtype)
    return -(-size // block) * block


def _cut(size: int, dtype: str, part: int, parts: int) -> int:
    block = _block(dtype)
    return size // block * part // parts * block

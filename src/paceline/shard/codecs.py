"""Codecs, the formats in which vectors travel between processes. The option `--wire` selects a codec by its name.

`core.layout.CODECS` has a row for each codec: the dtypes that it encodes, and the sizes of a block and of an encoded
block, which decide how long transfers take in a simulation. Here, each codec has a `Packer`: an object without state,
which packs blocks of values into bytes and unpacks them. Vectors travel from one end of a *way* to the other end, and
both ends have state. A `Sender` encodes gradients, and a `Receiver` decodes them. If weights are sent as differences
from a common base, the ends of their way are a `BaseSender` and a `BaseReceiver`. The ends know nothing of the format,
and all hosts use them. `core.messages.push` says which vectors are encoded.

Blocks are counted from the start of a shard's slice. With `--slicing even`, slices are cut between blocks, so blocks
are the same for any number of shards. Vectors with a dtype that a codec does not encode travel as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ..core.layout import CODECS, Range, dtype_of
from .vectors import Vectors, bytes_of, checksum

CHUNK = 512 * 1024
"""Number of values that are packed at a time: few enough for the CPU cache, even with the scratch memory."""

LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Minimum scale. Smaller scales are not precise, so a block that needs such a scale arrives as zeros."""

MOST_SCALE = torch.finfo(torch.float32).max / 127.4
"""Maximum scale. 127 times a larger scale could be infinite."""


class Packer:
    """Packs and unpacks the values of a codec. This class packs no values, so all values travel as they are."""

    def __init_subclass__(cls, *, codec: str) -> None:
        PACKERS[codec] = cls()

    def pack(self, values: Tensor, packed: Tensor, arriving: Tensor) -> None:
        """Encode some blocks.

        Args:
            values: the values. Shape: (number of blocks, values in a block); dtype: float32.
            packed: the result. Shape: (number of blocks, bytes of an encoded block); dtype: int8.
            arriving: scratch memory. Codecs with feedback or a base set it to the values that arrive at the other end.
                Shape and dtype: those of `values`.
        """
        raise NotImplementedError

    def unpack(self, packed: Tensor, arriving: Tensor) -> None:
        """Decode what `pack` has encoded. The arguments are those of `pack`."""
        raise NotImplementedError


PACKERS = {"float32": Packer()}
"""Codec -> the object that packs its values."""


class Bfloat16(Packer, codec="bf16"):
    """Values are rounded to bfloat16.

    `torch.Tensor.copy_` rounds to the nearest value, ties to even. NaN stays NaN, and a value that rounds to more than
    3.39e38, the largest bfloat16, becomes inf.

    >>> Sender("bf16", {"float32": torch.tensor([1.0, 1.001, 1.005])}).arriving()
    {'float32': tensor([1.0000, 1.0000, 1.0078])}
    """

    def pack(self, values: Tensor, packed: Tensor, arriving: Tensor) -> None:
        packed.view(torch.bfloat16).copy_(values)

    def unpack(self, packed: Tensor, arriving: Tensor) -> None:
        arriving.copy_(packed.view(torch.bfloat16))


class Int8(Packer, codec="int8"):
    """Each block has a float32 scale. Values are rounded to the nearest of 255 multiples of the scale, ties to even.

    If a value of a block is infinite or NaN, all values of the block arrive as NaN.

    >>> Sender("int8", {"float32": torch.tensor([127.0, 0.5, -1.6])}).arriving()
    {'float32': tensor([127.,   0.,  -2.])}
    """

    def pack(self, values: Tensor, packed: Tensor, arriving: Tensor) -> None:
        most = torch.amax(torch.abs(values, out=arriving), dim=1, keepdim=True)
        scales, inverse = _usable((most / 127).clamp_(max=MOST_SCALE).add_(most - most))  # inf - inf is NaN
        packed[:, :4].view(torch.float32).copy_(scales)
        torch.mul(values, inverse, out=arriving)
        packed[:, 4:] = arriving.round_()
        arriving.mul_(scales)

    def unpack(self, packed: Tensor, arriving: Tensor) -> None:
        arriving.copy_(packed[:, 4:])
        arriving.mul_(packed[:, :4].view(torch.float32))


class Int4(Packer, codec="int4"):
    """Every 32 values share a bfloat16 scale, and are rounded to the nearest of 15 multiples of the scale, ties to
    even.

    The scale is rounded down, so that the largest float32 values do not become infinite. The k-th byte of a block
    contains the k-th value of the block's first half in the lower bits, and the k-th value of the second half in the
    upper bits.

    >>> Sender("int4", {"float32": torch.tensor([7.0, 0.5, -1.6])}).arriving()
    {'float32': tensor([ 7.,  0., -2.])}
    """

    scaled: ClassVar[int] = 32  # values with a common scale
    scales_bytes: ClassVar[int] = 2 * (256 // scaled)

    def pack(self, values: Tensor, packed: Tensor, arriving: Tensor) -> None:
        half, grouped = values.shape[1] // 2, (-1, values.shape[1] // self.scaled, self.scaled)
        scales = torch.amax(torch.abs(values, out=arriving).view(grouped), dim=2).div_(7)
        scales.view(torch.int32).bitwise_and_(-1 << 16)  # the upper half of a float32 is a bfloat16
        scales, inverse = _usable(scales)
        packed[:, : self.scales_bytes].view(torch.bfloat16).copy_(scales)
        torch.mul(values.view(grouped), inverse.unsqueeze(2), out=arriving.view(grouped))
        codes = arriving.round_().to(torch.int8)
        low, high = codes[:, :half], codes[:, half:]
        torch.add(low.bitwise_and_(15), high, alpha=16, out=packed[:, self.scales_bytes :])
        arriving.view(grouped).mul_(scales.unsqueeze(2))

    def unpack(self, packed: Tensor, arriving: Tensor) -> None:
        scales = packed[:, : self.scales_bytes].view(torch.bfloat16).to(torch.float32)
        both = packed[:, self.scales_bytes :]
        half = both.shape[1]
        arriving[:, :half] = (both << 4).bitwise_right_shift_(4)
        arriving[:, half:] = both >> 4
        arriving.view(-1, 2 * half // self.scaled, self.scaled).mul_(scales.unsqueeze(2))


def _usable(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and their inverses. Scales that are too small are set to 0. The inverse of 0 is set to 0."""
    scales = torch.where(scales < LEAST_SCALE, 0.0, scales)
    return scales, torch.where(scales == 0, 0.0, scales.reciprocal())


class End:
    """One end of a way on which vectors travel.

    Both ends have vectors with the same names and sizes. Ranges begin and end between blocks, or at the end of a
    vector.

    Args:
        codec: name of the codec.
        vectors: the flat vectors, as they are before encoding or after decoding.

    Attributes:
        vectors: the flat vectors.
        in_place: True if values arrive where they are used, so a part that has arrived is usable immediately.
    """

    def __init__(self, codec: str, vectors: Vectors) -> None:
        self.vectors = vectors
        self._codec, self._packer = CODECS[codec], PACKERS[codec]
        self._packed = {
            name: torch.empty(
                -(-vector.numel() // self._codec.block), self._codec.block_bytes, dtype=torch.int8
            )
            for name, vector in vectors.items()
            if dtype_of(name) in self._codec.dtypes
        }
        self.in_place = not self._packed

    def ranges(self, vectors: Iterable[str]) -> list[Range]:
        """Return the ranges that cover these vectors."""
        return [(name, 0, self.vectors[name].numel()) for name in vectors]

    def memory(self, ranges: Iterable[Range]) -> list[memoryview]:
        """Return the bytes of these parts in the format in which they travel."""
        found = []
        for name, start, stop in ranges:
            data, block, size_bytes = self._bytes[name]
            found.append(data[start // block * size_bytes : -(-stop // block) * size_bytes])
        return found

    @cached_property
    def _bytes(self) -> dict[str, tuple[memoryview, int, int]]:
        """Vector -> (its bytes in the format in which it travels, values in a block, bytes of an encoded block).

        The result is kept, because making views takes long.
        """
        found = {name: (bytes_of(vector), 1, vector.element_size()) for name, vector in self.vectors.items()}
        for name, packed in self._packed.items():
            found[name] = bytes_of(packed.view(-1)), self._codec.block, self._codec.block_bytes
        return found

    def _chunks(self, ranges: Iterable[Range]) -> Iterator[tuple[str, slice, Tensor, Tensor]]:
        """Yield the parts of encoded vectors: name, slice of the vector, encoded blocks, and scratch memory.

        The scratch memory has room for the values of these blocks. Shape: (blocks, size of a block); dtype: float32.
        """
        block = self._codec.block
        scratch = None
        for name, start, stop in ranges:
            if name not in self._packed:
                continue
            for begin in range(start, stop, CHUNK):
                end = min(begin + CHUNK, stop)
                packed = self._packed[name][begin // block : -(-end // block)]
                if scratch is None or len(scratch) < len(packed):
                    scratch = torch.empty(len(packed), block)
                yield name, slice(begin, end), packed, scratch[: len(packed)]

    def _unpack(self, ranges: Iterable[Range], targets: Vectors) -> None:
        """Set these parts of the target vectors to the values that are encoded in the memory of this end."""
        for name, place, packed, scratch in self._chunks(ranges):
            self._packer.unpack(packed, scratch)
            targets[name][place].copy_(scratch.view(-1)[: place.stop - place.start])


class Sender(End):
    """The end that sends. A gradient is encoded in pieces, before all of it is computed.

    If the codec has feedback, the rounding error of one message, called the residual, is added to the next message. The
    residual is useful only for the very next message, so it is dropped if a message is left out or not used.
    """

    def __init__(self, codec: str, vectors: Vectors) -> None:
        super().__init__(codec, vectors)
        self._feedback = self._codec.feedback
        self._residual: Vectors = {}  # created when it is first needed; whole blocks of float32 values

    def encode(self, ranges: Sequence[Range], absent: Sequence[Range] = ()) -> list[memoryview]:
        """Encode these parts of the vectors, and return the bytes of the result.

        Args:
            ranges: the parts.
            absent: parts of vectors that have no gradient. The values that arrive for these parts are not used,
                and the residual of these parts is kept.
        """
        if self._packed:
            absent = [part for part in absent if part[0] in self._packed]
            for name, start, stop in absent:  # values other than 0 could make the scales larger
                self.vectors[name][start:stop] = 0
            kept = [self._take_residual(part) for part in absent if part[0] in self._residual]
            for name, place, packed, scratch in self._chunks(ranges):
                values = self._values(name, place, scratch)
                self._packer.pack(values, packed, scratch)
                if self._feedback:
                    values.sub_(scratch)
            for (name, start, stop), residual in kept:
                self._residual[name][start:stop] = residual
        return self.memory(ranges)

    def _values(self, name: str, place: slice, scratch: Tensor) -> Tensor:
        """Return the values to encode, in the shape of the scratch memory. With feedback, the residual is added."""
        values, size = self.vectors[name][place], place.stop - place.start
        if not self._feedback:
            if values.dtype == scratch.dtype and size == scratch.numel():
                return values.view(scratch.shape)
            padded = torch.zeros_like(scratch)
            padded.view(-1)[:size] = values
            return padded
        if name not in self._residual:
            self._residual[name] = torch.zeros(len(self._packed[name]) * self._codec.block)
        residual = self._residual[name][place.start : place.start + scratch.numel()]
        residual[:size].add_(values)
        return residual.view(scratch.shape)

    def _take_residual(self, part: Range) -> tuple[Range, Tensor]:
        """Set a part of the residual to 0. Return the part and its former values."""
        name, start, stop = part
        residual = self._residual[name][start:stop]
        values = residual.clone()
        residual.zero_()
        return part, values

    def drop(self, ranges: Sequence[Range] | None = None) -> None:
        """Forget the residual of these parts, because an encoded message is not used, or a message was left out.

        Args:
            ranges: the parts; None for all of them.
        """
        for name, start, stop in self.ranges(self._residual) if ranges is None else ranges:
            if name in self._residual:
                self._residual[name][start:stop] = 0

    def arriving(self, vectors: Vectors | None = None, absent: Sequence[Range] = ()) -> Vectors:
        """Encode vectors, and return the values that arrive at the other end. Unencoded vectors are not copied.

        Args:
            vectors: some of the vectors; None for all of them.
            absent: see `encode`.
        """
        sent = self.vectors if vectors is None else vectors
        ranges = self.ranges(name for name in sent if name in self._packed)
        self.encode(ranges, absent)
        arrived = {name: torch.empty_like(self.vectors[name]) for name, *_ in ranges}
        self._unpack(ranges, arrived)
        return sent | arrived


class Receiver(End):
    """The end that receives."""

    def decode(self, ranges: Iterable[Range]) -> None:
        """Set these parts of the vectors to the values that are encoded in their memory."""
        self._unpack(ranges, self.vectors)


class BaseSender(End):
    """The server's end of the way on which weights are sent, as differences from a base that all workers have.

    Each version of the weights is encoded once. Afterwards, the base has the values that the workers have, so each
    difference makes up for the rounding error of the difference before it. `core.shard.Bases` numbers the bases of each
    parameter set.

    Attributes:
        base: the values that the workers have of the encoded vectors, with the dtypes of the weights.
        numbers: parameter set (None for all sets together) -> number of its last base.
    """

    def __init__(self, codec: str, vectors: Vectors) -> None:
        super().__init__(codec, vectors)
        self.base = {name: torch.zeros_like(vectors[name]) for name in self._packed}
        self.numbers: dict[int | None, int] = {}
        self._checksums: dict[tuple[str, ...], int] = {}  # vectors -> checksum of the present base

    def advance(self, part: int | None, number: int, vectors: Iterable[str]) -> None:
        """Make the base with this number.

        If the number follows that of the last base, a difference is encoded and added to the last base. Otherwise, the
        base is a copy of the weights.

        Args:
            part: the parameter set.
            number: number of the base.
            vectors: the vectors of the parameter set.
        """
        follows = number == self.numbers.get(part, 0) + 1
        self.numbers[part] = number
        encoded = [name for name in vectors if name in self._packed]
        self._checksums.clear()
        if not follows:
            for name in encoded:
                self.base[name].copy_(self.vectors[name])
        else:
            difference = torch.empty(CHUNK // self._codec.block, self._codec.block)
            for name, place, packed, scratch in self._chunks(self.ranges(encoded)):
                base, size = self.base[name][place], place.stop - place.start
                flat = difference[: len(packed)].view(-1)
                torch.sub(self.vectors[name][place].float(), base, out=flat[:size])
                flat[size:] = 0
                self._packer.pack(flat.view(scratch.shape), packed, scratch)
                base.add_(scratch.view(-1)[:size])

    def payload(self, vectors: Iterable[str], *, whole: bool) -> list[memoryview]:
        """Return the bytes of the last difference of these vectors or, if `whole` is True, of the base itself."""
        if not whole:
            return self.memory(self.ranges(vectors))
        return [bytes_of(self.base.get(name, self.vectors[name])) for name in vectors]

    def checksum(self, vectors: Iterable[str]) -> int:
        """Return the checksum of the base of these vectors."""
        names = tuple(name for name in vectors if name in self.base)
        if names not in self._checksums:
            self._checksums[names] = checksum([self.base[name] for name in names])
        return self._checksums[names]


class BaseReceiver(End):
    """The worker's end of the way on which weights arrive, as differences from the base of a `BaseSender`.

    The base is kept apart from the worker's weights, which a script may change.
    """

    def __init__(self, codec: str, vectors: Vectors) -> None:
        super().__init__(codec, vectors)
        self.base = {name: torch.zeros_like(vectors[name]) for name in self._packed}

    def decode(self, ranges: Iterable[Range], *, whole: bool) -> int:
        """Set these vectors to the next base, and return the checksum of this base.

        Args:
            ranges: the ranges of whole vectors.
            whole: True if the base has arrived in the vectors themselves; False if a difference from the last base has
                arrived.
        """
        ranges = [part for part in ranges if part[0] in self._packed]
        if whole:
            for name, *_ in ranges:
                self.base[name].copy_(self.vectors[name])
        else:
            for name, place, packed, scratch in self._chunks(ranges):
                self._packer.unpack(packed, scratch)
                base = self.base[name][place]
                self.vectors[name][place].copy_(base.add_(scratch.view(-1)[: place.stop - place.start]))
        return checksum([self.base[name] for name, *_ in ranges])

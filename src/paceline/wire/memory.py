"""The memory in which weights and gradients lie, and the two ways in which a shard reaches a worker's.

A worker has one region: its weights, one vector per dtype, then its gradients, likewise. A shard works on a
slice of each. Over **shared memory** the region is a sealed memfd whose descriptor travels with the worker's
greeting: it has no name, nothing of it is left when the last process that maps it dies, and it cannot shrink
under the server that maps it. The server reads the gradient where the worker computed it and writes the
weights where the worker reads them, so a push and a pull move no bytes but those. That is safe because a
worker's weights change only inside its own `step()`: the server writes only while a pull is outstanding.
Over a **stream** the same slices travel as the payload of the messages.

Where all workers go in lockstep not even the weights are copied. Over shared memory there is one more region, the
*master*: the weights that the servers update, one vector per dtype, made by the coordinator and mapped by all. While
nothing is applied that any worker could be computing on, a pull is answered *in place*: the workers read the master.
They only follow it (see `follow`): a script that edits its weights, which is an error, edits a copy of its own.

`Region` is memory and what lies where in it. `Inbox` is the server's end of a worker's, one for each worker and
shard; its two forms are the two ways. Bytes only: neither knows what a tensor is.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Final, Literal, Protocol

from ..core.layout import ITEM_BYTES, Layout, Piece, ShardSlice
from ..errors import ProtocolError
from .follow import Follower
from .forks import close_in_forks
from .ring import RING_BYTES

__all__ = [
    "MASTER",
    "PIECE_BYTES",
    "Inbox",
    "Master",
    "Region",
    "SharedInbox",
    "StreamedInbox",
    "cut",
    "cut_pieces",
    "shared_memory_available",
]

PAGE_BYTES = mmap.PAGESIZE
SEALS = 0x0001 | 0x0002 | 0x0004  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW: the size is final

Vectors = Mapping[str, memoryview]
"""dtype -> the bytes of a flat vector, or of a slice of one."""


Kind = Literal["weights", "gradients"]
WORKERS: Final[tuple[Kind, ...]] = ("weights", "gradients")
MASTER: Final[tuple[Kind, ...]] = ("weights",)

CHANNEL_BYTES = -(-2 * RING_BYTES // PAGE_BYTES) * PAGE_BYTES  # of a pair of rings
PIECE_BYTES = 1024 * 1024  # of what travels at once, as soon as it is there


def shared_memory_available() -> bool:
    """True where this system has memfd (Linux) and lets it be used."""
    try:
        Region(Layout((), (), {}), ("weights",), _new_memfd(PAGE_BYTES)).close()
    except (AttributeError, OSError):  # there is none, or a sandbox forbids it
        return False
    return True


class Region:
    """Vectors of some kinds, one after another, in a memfd or in private memory.

    Args:
        layout: what there is of each kind.
        kinds: which; "weights" and "gradients" for a worker's, "weights" for the master.
        descriptor: of the memfd, owned by the region from now on; None for private memory, zeroed.
        channels: how many pairs of rings.

    Attributes:
        descriptor: of the memfd. Stays open until `close`.
        size_bytes: of the whole region.
        weights: dtype -> the whole vector's bytes.
        gradients: the same.
        channels: the memory of each pair of rings: from the worker to a server, and back.
    """

    def __init__(
        self,
        layout: Layout,
        kinds: Sequence[Kind],
        descriptor: int | None,
        *,
        channels: int = 0,
    ) -> None:
        self.descriptor = descriptor
        close_in_forks(self)
        places, vectors_bytes = _places(layout, kinds)
        self.size_bytes = vectors_bytes + channels * CHANNEL_BYTES
        view = memoryview(mmap.mmap(-1 if descriptor is None else descriptor, self.size_bytes))
        self.weights = {dtype: view[a:b] for (kind, dtype), (a, b) in places.items() if kind == "weights"}
        self.gradients = {dtype: view[a:b] for (kind, dtype), (a, b) in places.items() if kind == "gradients"}
        starts = range(vectors_bytes, self.size_bytes, CHANNEL_BYTES)
        self.channels = [
            (view[start : start + RING_BYTES], view[start + RING_BYTES : start + 2 * RING_BYTES])
            for start in starts
        ]

    @classmethod
    def create(
        cls, layout: Layout, kinds: Sequence[Kind] = WORKERS, *, shared: bool, channels: int = 0
    ) -> Region:
        """New memory, zeroed; as a memfd if it is to be shared."""
        size_bytes = _places(layout, kinds)[1] + channels * CHANNEL_BYTES
        return cls(layout, kinds, _new_memfd(size_bytes) if shared else None, channels=channels)

    @classmethod
    def attach(
        cls,
        layout: Layout,
        descriptor: int,
        kinds: Sequence[Kind] = WORKERS,
        *,
        channels: int = 0,
    ) -> Region:
        """Map a region that another process created. Takes the descriptor over, and closes it.

        Raises:
            ProtocolError: it has another size than the layout asks for, or its size is not final.
        """
        size_bytes = _places(layout, kinds)[1] + channels * CHANNEL_BYTES
        try:
            _require_final(descriptor, size_bytes)
            region = cls(layout, kinds, descriptor, channels=channels)
            region.descriptor = None
            return region
        except OSError as error:
            raise ProtocolError(f"shared memory cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)

    def close_in_fork(self) -> None:
        """See `close_in_forks`."""
        self.close()

    def close(self) -> None:
        """Close the descriptor. The memory goes with its last user."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class Master:
    """A worker's view of the master.

    Attributes:
        weights: dtype -> the whole vector's bytes, as the servers have them.
    """

    def __init__(self, layout: Layout, follower: Follower) -> None:
        places, _ = _places(layout, MASTER)
        self.weights = {dtype: follower.memory[a:b] for (_, dtype), (a, b) in places.items()}
        self.edited = follower.edited
        self.close = follower.close

    @classmethod
    def follow(cls, layout: Layout, descriptor: int) -> Master | None:
        """A view of the memory that the coordinator made; None where this system does not let it be followed.

        Takes the descriptor over. Raises `ProtocolError` if the memory is not what the layout asks for.
        """
        _, size_bytes = _places(layout, MASTER)
        try:
            _require_final(descriptor, size_bytes)
            return cls(layout, Follower(descriptor, size_bytes))
        except OSError:
            os.close(descriptor)
            return None
        except ProtocolError:
            os.close(descriptor)
            raise


class Inbox(Protocol):
    """The server's end of one worker's region, for one shard.

    Attributes:
        gradient: dtype -> the bytes of the slice that the worker has pushed.
        weights: dtype -> the bytes of the slice of weights that it reads; None if they must be sent.
    """

    gradient: dict[str, memoryview]
    weights: dict[str, memoryview] | None

    def places(self, pieces: Sequence[int]) -> list[memoryview]:
        """Where some pieces of a gradient go. Raises `ProtocolError` if there are no such ones."""
        ...

    def take(self, pieces: Sequence[int]) -> None:
        """These have come."""
        ...

    def close(self, *, empty: bool) -> None:
        """The iteration is committed. Raises `ProtocolError` if something of its gradient has not come."""
        ...


class SharedInbox:
    """An inbox in the worker's own memory."""

    def __init__(self, region: Region, shard: ShardSlice) -> None:
        self.gradient = cut(region.gradients, shard)
        self.weights: dict[str, memoryview] | None = cut(region.weights, shard)

    def places(self, pieces: Sequence[int]) -> list[memoryview]:
        if pieces:
            raise ProtocolError("a gradient that lies in shared memory came with pieces")
        return []

    def take(self, pieces: Sequence[int]) -> None:
        pass

    def close(self, *, empty: bool) -> None:
        pass


class StreamedInbox:
    """An inbox in the server's memory, filled from the stream, piece by piece.

    Attributes:
        pieces: what a gradient comes in, in order.
        missing: those of the iteration at hand that have not come.
    """

    def __init__(self, shard: ShardSlice) -> None:
        self.gradient = {
            dtype: memoryview(bytearray((stop - start) * ITEM_BYTES[dtype]))
            for dtype, (start, stop) in shard.bounds.items()
        }
        self.weights: dict[str, memoryview] | None = None
        self.pieces = shard.pieces(PIECE_BYTES)
        self.missing = set(range(len(self.pieces)))

    def places(self, pieces: Sequence[int]) -> list[memoryview]:
        if not all(0 <= piece < len(self.pieces) for piece in pieces):
            raise ProtocolError(f"pieces {pieces[:8]} of {len(self.pieces)}")
        return cut_pieces(self.gradient, [self.pieces[piece] for piece in pieces])

    def take(self, pieces: Sequence[int]) -> None:
        self.missing.difference_update(pieces)

    def close(self, *, empty: bool) -> None:
        if self.missing and not empty:
            raise ProtocolError(f"a commit without {len(self.missing)} of its {len(self.pieces)} pieces")
        self.missing.update(range(len(self.pieces)))


def cut_pieces(vectors: Vectors, pieces: Sequence[Piece]) -> list[memoryview]:
    """Pieces of some slices, in order; neighbours in one part."""
    stretches: list[tuple[str, int, int]] = []
    for dtype, start, stop, _ in pieces:
        if stretches and stretches[-1][0] == dtype and stretches[-1][2] == start:
            stretches[-1] = (dtype, stretches[-1][1], stop)
        else:
            stretches.append((dtype, start, stop))
    return [
        vectors[dtype][start * ITEM_BYTES[dtype] : stop * ITEM_BYTES[dtype]]
        for dtype, start, stop in stretches
    ]


def cut(vectors: Vectors, shard: ShardSlice) -> dict[str, memoryview]:
    """A shard's slice of some whole vectors."""
    return {
        dtype: vectors[dtype][start * ITEM_BYTES[dtype] : stop * ITEM_BYTES[dtype]]
        for dtype, (start, stop) in shard.bounds.items()
    }


def _require_final(descriptor: int, size_bytes: int) -> None:
    sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
    if not sealed or os.fstat(descriptor).st_size != size_bytes:
        raise ProtocolError(f"shared memory must be sealed and of {size_bytes} bytes")


def _new_memfd(size_bytes: int) -> int:
    descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


def _places(layout: Layout, kinds: Sequence[Kind]) -> tuple[dict[tuple[Kind, str], tuple[int, int]], int]:
    """(kind, dtype) -> where its bytes lie in the region, each on a page of its own; and the region's size."""
    places = {}
    end = 0
    for kind in kinds:
        for dtype, size in layout.sizes.items():
            size_bytes = size * ITEM_BYTES[dtype]
            places[kind, dtype] = (end, end + size_bytes)
            end += -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    return places, max(end, PAGE_BYTES)

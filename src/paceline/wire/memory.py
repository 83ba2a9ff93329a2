"""The memory in which a worker's weights and gradients lie, and the two ways in which a shard reaches it.

A worker has one region: its weights, one vector per dtype, then its gradients, likewise. A shard works on a
slice of each. Over **shared memory** the region is a sealed memfd whose descriptor travels with the worker's
greeting: it has no name, nothing of it is left when the last process that maps it dies, and it cannot shrink
under the server that maps it. The server reads the gradient where the worker computed it and writes the
weights where the worker reads them, so a push and a pull move no bytes but those. That is safe because a
worker's weights change only inside its own `step()`: the server writes only while a pull is outstanding.
Over a **stream** the same slices travel as the payload of the messages.

`Region` is the worker's end. `Inbox` is the server's, one for each worker and shard; its two forms are the two
ways. Bytes only: neither knows what a tensor is.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping
from typing import Protocol

from ..errors import ProtocolError
from ..layout import ITEM_BYTES, Layout, ShardSlice

__all__ = ["Inbox", "Region", "SharedInbox", "StreamedInbox", "shared_memory_available"]

PAGE_BYTES = mmap.PAGESIZE
SEALS = 0x0001 | 0x0002 | 0x0004  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW: the size is final

Vectors = Mapping[str, memoryview]
"""dtype -> the bytes of a flat vector, or of a slice of one."""


def shared_memory_available() -> bool:
    """True where this system has memfd (Linux)."""
    return hasattr(os, "memfd_create")


class Region:
    """Weights and gradients of one worker, one after another.

    Attributes:
        descriptor: of the memfd, or None for private memory. Stays open as long as the region.
        size_bytes: of the whole region.
        weights: dtype -> the whole vector's bytes.
        gradients: the same.
    """

    def __init__(self, layout: Layout, memory: mmap.mmap, descriptor: int | None) -> None:
        self.descriptor = descriptor
        self.size_bytes = len(memory)
        places, _ = _places(layout)
        view = memoryview(memory)
        self.weights = {dtype: view[a:b] for (kind, dtype), (a, b) in places.items() if kind == "weights"}
        self.gradients = {dtype: view[a:b] for (kind, dtype), (a, b) in places.items() if kind == "gradients"}

    @classmethod
    def create(cls, layout: Layout, *, shared: bool) -> Region:
        """New memory, zeroed; as a memfd if it is to be shared."""
        _, size_bytes = _places(layout)
        if not shared:
            return cls(layout, mmap.mmap(-1, size_bytes), None)
        descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        return cls(layout, mmap.mmap(descriptor, size_bytes), descriptor)

    @classmethod
    def attach(cls, layout: Layout, descriptor: int) -> Region:
        """Map a region that another process created. Takes the descriptor over.

        Raises:
            ProtocolError: it has another size than the layout asks for, or its size is not final.
        """
        _, size_bytes = _places(layout)
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
            if not sealed or os.fstat(descriptor).st_size != size_bytes:
                raise ProtocolError(f"shared memory must be sealed and of {size_bytes} bytes")
            return cls(layout, mmap.mmap(descriptor, size_bytes), None)
        except OSError as error:
            raise ProtocolError(f"shared memory cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)

    def outgoing(self, shard: ShardSlice) -> list[memoryview]:
        """What a push of one shard must carry: nothing, if the server sees this memory."""
        return [] if self.descriptor is not None else list(cut(self.gradients, shard).values())

    def incoming(self, shard: ShardSlice) -> list[memoryview]:
        """Where the answer to a pull of one shard puts what it carries."""
        return [] if self.descriptor is not None else list(cut(self.weights, shard).values())

    def close(self) -> None:
        """Close the descriptor. The memory goes with its last user."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class Inbox(Protocol):
    """The server's end of one worker's region, for one shard.

    Attributes:
        gradient: dtype -> the bytes of the slice that the worker has pushed.
    """

    gradient: dict[str, memoryview]

    def sinks(self) -> list[memoryview]:
        """Where the gradient that a push carries goes: nowhere, if it lies there already."""
        ...

    def deliver(self, weights: Vectors) -> list[memoryview]:
        """Put a slice of weights where the worker finds it; return what the answer must carry."""
        ...


class SharedInbox:
    """An inbox in the worker's own memory."""

    def __init__(self, region: Region, shard: ShardSlice) -> None:
        self.gradient = cut(region.gradients, shard)
        self._weights = cut(region.weights, shard)

    def sinks(self) -> list[memoryview]:
        return []

    def deliver(self, weights: Vectors) -> list[memoryview]:
        for dtype, target in self._weights.items():
            target[:] = weights[dtype]
        return []


class StreamedInbox:
    """An inbox in the server's memory, filled from the stream."""

    def __init__(self, shard: ShardSlice) -> None:
        self.gradient = {
            dtype: memoryview(bytearray((stop - start) * ITEM_BYTES[dtype]))
            for dtype, (start, stop) in shard.bounds.items()
        }

    def sinks(self) -> list[memoryview]:
        return list(self.gradient.values())

    def deliver(self, weights: Vectors) -> list[memoryview]:
        return list(weights.values())


def cut(vectors: Vectors, shard: ShardSlice) -> dict[str, memoryview]:
    """A shard's slice of some whole vectors."""
    return {
        dtype: vectors[dtype][start * ITEM_BYTES[dtype] : stop * ITEM_BYTES[dtype]]
        for dtype, (start, stop) in shard.bounds.items()
    }


def _places(layout: Layout) -> tuple[dict[tuple[str, str], tuple[int, int]], int]:
    """(kind, dtype) -> where its bytes lie in the region, each on a page of its own; and the region's size."""
    places = {}
    end = 0
    for kind in ("weights", "gradients"):
        for dtype, size in layout.sizes.items():
            size_bytes = size * ITEM_BYTES[dtype]
            places[kind, dtype] = (end, end + size_bytes)
            end += -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    return places, max(end, PAGE_BYTES)

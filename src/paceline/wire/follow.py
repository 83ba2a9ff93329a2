"""Two views of memory that other processes write to: one detects edits by this process, the other forbids edits.

At the end: how forked children close the descriptors that they inherit.

The weights that the servers update are mapped privately (copy-on-write). If a script writes to the weights, it
changes its own copy of the page, which no other process sees. From then on, the script does not see the servers'
updates to this page. So before each push, `/proc/self/pagemap` is read to find the pages that have been copied. This
takes half a millisecond for 100 MB. If a copied page has the same content as the shared page, the copy is discarded.
This happens, for example, after a script has temporarily replaced the weights with averaged weights. If the content
differs, the script has edited its weights.

If a script trains on an accelerator, its parameters are not views of this memory. In this case, the memory is mapped
read-only and shared. Only a shared mapping can be locked for the device: a locked private page would no longer follow
the servers.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable
from typing import Protocol
from weakref import WeakSet

import numpy as np

PAGE_BYTES = mmap.PAGESIZE
ENTRY_BYTES = 8  # size of the pagemap entry of one page
# the last byte of each entry, which is the most significant byte
TOP = slice(ENTRY_BYTES - 1, None, ENTRY_BYTES)
PRESENT, SHARED = 0x80, 0x20  # bits of this byte
WITH_SHARED = bytes(byte for byte in range(256) if byte & SHARED)
COMPARED_BYTES = 1024 * 1024  # maximum number of bytes that are compared at a time


class MemoryFollower:
    """A private mapping of shared memory that detects whether this process has edited the memory.

    Args:
        descriptor: file descriptor of the memory. The follower takes ownership of the descriptor.
        size_bytes: size of the memory, a multiple of the page size.

    Attributes:
        memory: the whole mapping.

    Raises:
        OSError: this system does not report which pages are shared.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_COPY)
        self.memory = memoryview(self._map)
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data
        self._entries = bytearray(size_bytes // PAGE_BYTES * ENTRY_BYTES)
        self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._open_descriptors = [descriptor, self._pagemap]
        close_in_forks(self)
        self._read_pagemap()

    def edited(self) -> bool:
        """Return True if this process has changed the content of the memory.

        If no private copy differs from its shared page, all private copies are discarded.
        """
        tops = self._read_pagemap()
        # The usual case: no page has been copied. NumPy would need 20 us for this in a process that has just slept.
        if not tops.translate(None, WITH_SHARED):
            return False
        copied = [page for page, top in enumerate(tops) if top & PRESENT and not top & SHARED]
        for start, stop in _byte_ranges(copied):
            shared = os.pread(self._descriptor, stop - start, start)
            if self.memory[start:stop] != shared:
                return True
        if copied:
            self._map.madvise(mmap.MADV_DONTNEED)
        return False

    def discard(self) -> None:
        """Discard all private copies, so that the memory has the shared content."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def close_in_fork(self) -> None:
        """See `close_in_forks`."""
        self.close()

    def close(self) -> None:
        """Close the descriptors. The memory stays mapped until nothing refers to it."""
        while self._open_descriptors:
            os.close(self._open_descriptors.pop())

    def _read_pagemap(self) -> bytearray:
        """Return the most significant byte of the entry of each page."""
        start = self._address // PAGE_BYTES * ENTRY_BYTES
        count = os.preadv(self._pagemap, [self._entries], start)
        if count != len(self._entries):
            raise OSError(f"reading /proc/self/pagemap returned {count} of {len(self._entries)} bytes")
        return self._entries[TOP]


class MappedMemory:
    """A read-only mapping of shared memory.

    Args:
        descriptor: file descriptor of the memory. The constructor closes the descriptor.
        size_bytes: size of the memory.

    Attributes:
        memory: the whole mapping.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.memory = memoryview(mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ))
        os.close(descriptor)

    def edited(self) -> bool:
        """Return False, because this process cannot change the memory."""
        return False

    def discard(self) -> None:
        """Do nothing, because there are no private copies."""

    def close(self) -> None:
        """Do nothing. The memory stays mapped until nothing refers to it."""


def _byte_ranges(pages: Iterable[int]) -> list[tuple[int, int]]:
    """Return the byte ranges of the given pages. Adjacent pages are merged into ranges of up to `COMPARED_BYTES`."""
    ranges: list[tuple[int, int]] = []
    for start in (page * PAGE_BYTES for page in pages):
        if ranges and ranges[-1][1] == start and start - ranges[-1][0] < COMPARED_BYTES:
            ranges[-1] = (ranges[-1][0], start + PAGE_BYTES)
        else:
            ranges.append((start, start + PAGE_BYTES))
    return ranges


# -- Closes inherited file descriptors in forked child processes ---------------------------------------------
#
# A script may fork, for example by using a `DataLoader` with `num_workers`. The child inherits every file
# descriptor, and a connection stays open while any process holds its descriptor. So the connections of a
# killed worker would stay open until all of its children have exited. Therefore, each object that owns
# descriptors registers itself here, and a forked child closes these descriptors before it runs any code of
# the script. Shared memory stays mapped in the child, because the child may read the model's weights.
#
# A program that is started with `exec` inherits no descriptors, because Python's descriptors are close-on-exec.


class Owner(Protocol):
    """An object that owns file descriptors."""

    def close_in_fork(self) -> None:
        """Close the descriptors in a forked child, without sending anything."""


_owners: WeakSet[Owner] = WeakSet()
_registered = False


def close_in_forks(owner: Owner) -> None:
    """Close the descriptors of `owner` in every child that is forked from now on, as long as `owner` exists."""
    global _registered
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_close_all)
    _owners.add(owner)


def _close_all() -> None:
    for owner in list(_owners):
        # These exceptions mean that the descriptors have already been closed.
        with contextlib.suppress(OSError, ValueError):
            owner.close_in_fork()
    _owners.clear()

"""A private view of memory that other processes write to. The view detects edits by this process.

The weights that the servers update are mapped privately (copy-on-write). If a script writes to the weights, it
changes its own copy of the page, which no other process sees. From then on, the script does not see the servers'
updates to this page. So before each push, `/proc/self/pagemap` is read to find the pages that have been copied. This
takes half a millisecond for 100 MB. If a copied page has the same content as the shared page, the copy is discarded.
This happens, for example, after a script has temporarily replaced the weights with averaged weights. If the content
differs, the script has edited its weights.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from .forks import close_in_forks

__all__ = ["Follower"]

PAGE_BYTES = mmap.PAGESIZE
ENTRY_BYTES = 8  # size of the pagemap entry of one page
PRESENT, SHARED = np.uint64(63), np.uint64(61)  # positions of these two bits in an entry
COMPARED_BYTES = 1024 * 1024  # maximum number of bytes that are compared at a time


class Follower:
    """A private mapping of shared memory that detects whether this process has edited the memory.

    Args:
        descriptor: file descriptor of the memory. The follower takes ownership of it.
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
        self._entries = np.zeros(size_bytes // PAGE_BYTES, np.uint64)
        self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._open_descriptors = [descriptor, self._pagemap]
        close_in_forks(self)
        self._read_pagemap()

    def edited(self) -> bool:
        """Return True if this process has changed the content of the memory.

        If no private copy differs from its shared page, all private copies are discarded.
        """
        self._read_pagemap()
        # The usual case: no page has been copied.
        if np.bitwise_and.reduce(self._entries) >> SHARED & np.uint64(1):
            return False
        copied = (self._entries >> PRESENT & ~(self._entries >> SHARED) & np.uint64(1)).nonzero()[0]
        for start, stop in _byte_ranges(copied):
            shared = os.pread(self._descriptor, stop - start, start)
            if self.memory[start:stop] != shared:
                return True
        if copied.size:
            self._map.madvise(mmap.MADV_DONTNEED)
        return False

    def close_in_fork(self) -> None:
        """See `close_in_forks`."""
        self.close()

    def close(self) -> None:
        """Close the descriptors. The memory stays mapped until nothing refers to it."""
        while self._open_descriptors:
            os.close(self._open_descriptors.pop())

    def _read_pagemap(self) -> None:
        start = self._address // PAGE_BYTES * ENTRY_BYTES
        count = os.preadv(self._pagemap, [self._entries.data], start)
        if count != self._entries.nbytes:
            raise OSError(f"reading /proc/self/pagemap returned {count} of {self._entries.nbytes} bytes")


def _byte_ranges(pages: np.ndarray[tuple[int], np.dtype[np.intp]]) -> list[tuple[int, int]]:
    """Return the byte ranges of the given pages. Adjacent pages are merged into ranges of up to `COMPARED_BYTES`."""
    ranges: list[tuple[int, int]] = []
    for start in (int(page) * PAGE_BYTES for page in pages):
        if ranges and ranges[-1][1] == start and start - ranges[-1][0] < COMPARED_BYTES:
            ranges[-1] = (ranges[-1][0], start + PAGE_BYTES)
        else:
            ranges.append((start, start + PAGE_BYTES))
    return ranges

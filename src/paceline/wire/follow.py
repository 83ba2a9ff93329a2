"""Memory that another process writes and this one only reads, though it cannot be kept from writing.

The weights that the servers update are mapped privately: what a script writes there, it writes to a copy of the
page, which nobody else sees. But from then on the script sees no update of that page either. So before each push the
kernel is asked which pages have become this process's own (`/proc/self/pagemap`, half a millisecond for 100 MB). If
what is on them is what the others see, as when averaged weights were put in place for a while and taken out again,
they are given up; otherwise the script has edited its weights.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from .forks import close_in_forks

__all__ = ["Follower"]

PAGE_BYTES = mmap.PAGESIZE
ENTRY_BYTES = 8  # of the pagemap, for each page
PRESENT, SHARED = np.uint64(63), np.uint64(61)  # bits of an entry
COMPARED_BYTES = 1024 * 1024


class Follower:
    """A private mapping of some shared memory.

    Args:
        descriptor: of the memory; owned by the follower from now on.
        size_bytes: of it, whole pages.

    Attributes:
        memory: all of it.

    Raises:
        OSError: this system does not say which pages are whose.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_COPY)
        self.memory = memoryview(self._map)
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data
        self._entries = np.zeros(size_bytes // PAGE_BYTES, np.uint64)
        self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._descriptors = [descriptor, self._pagemap]  # until they are closed
        close_in_forks(self)
        self._look()

    def edited(self) -> bool:
        """True if something here is not what the others see; what was written without a difference is given up."""
        self._look()
        if np.bitwise_and.reduce(self._entries) >> SHARED & np.uint64(1):
            return False  # nearly always
        own = (self._entries >> PRESENT & ~(self._entries >> SHARED) & np.uint64(1)).nonzero()[0]
        for start, stop in _stretches(own):
            shown = os.pread(self._descriptor, stop - start, start)
            if self.memory[start:stop] != shown:
                return True
        if own.size:
            self._map.madvise(mmap.MADV_DONTNEED)
        return False

    def close_in_fork(self) -> None:
        """See `close_in_forks`."""
        self.close()

    def close(self) -> None:
        """Close the descriptors. The memory goes with its last user."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _look(self) -> None:
        start = self._address // PAGE_BYTES * ENTRY_BYTES
        count = os.preadv(self._pagemap, [self._entries.data], start)
        if count != self._entries.nbytes:
            raise OSError(f"the pagemap gave {count} bytes of {self._entries.nbytes}")


def _stretches(pages: np.ndarray[tuple[int], np.dtype[np.intp]]) -> list[tuple[int, int]]:
    """Neighbouring pages together, as ranges of bytes of limited size."""
    ranges: list[tuple[int, int]] = []
    for start in (int(page) * PAGE_BYTES for page in pages):
        if ranges and ranges[-1][1] == start and start - ranges[-1][0] < COMPARED_BYTES:
            ranges[-1] = (ranges[-1][0], start + PAGE_BYTES)
        else:
            ranges.append((start, start + PAGE_BYTES))
    return ranges

"""Shared memory: servers map the memory of the workers, and small messages pass through rings in it.

The connections are AF_UNIX sockets, which pass the descriptors of the memory. They carry what does not fit into a
ring, wake a process that sleeps, and tell that the other process has ended.
"""

from __future__ import annotations

from ..core.protocol.layout import Layout
from .memory import Region, shared_memory_available
from .ring import available
from .unix import Unix

__all__ = ["SHM", "SharedMemory"]


class SharedMemory(Unix):
    """Shared memory (see `memory`), with a pair of rings for each server if the processor permits it (see `ring`)."""

    name = "shm"
    words = "shared memory (shm)"
    shares_memory = True
    needs = "memfd"

    def available(self) -> bool:
        return shared_memory_available()

    def place(self, layout: Layout, *, servers: int, offered: bool, name: str) -> Region:
        return Region.create(layout, shared=True, channels=servers if available() else 0, name=name)


SHM = SharedMemory()

"""The copies of a server's shards for a cut of the job, which a thread writes to the files of a checkpoint.

The event loop copies a shard at the moment of the cut, so training waits for the copying alone. In memory that is new
to the process, it would take several times longer: the system provides each page of new memory when it is first
touched. So a thread touches the memory before the cut, and the memory is kept for the next cuts.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ..checkpoints.pace import Pace, yield_to_training
from ..checkpoints.shard_writing import ShardWriter, is_draft, shard_content
from ..core.protocol.layout import ShardSlice
from ..core.protocol.messages import CopiesReserved, CutWritten, FetchCut, WriteCut
from ..core.protocol.requests import TakeCut
from ..core.protocol.state_entries import StateEntries
from ..errors import CheckpointError
from ..shard.buffer_bytes import bytes_of
from ..shard.store import Store
from .checkpoints import BYTES_PER_S
from .footprint import available_bytes

__all__ = ["ShardCopies"]

TOUCHED_BYTES = 4 * 2**20
"""Number of bytes of new memory that are touched at a time."""


class Copy(NamedTuple):
    """A copy of a shard: its number of the cut, its slice, the entries of its optimizer state, and its content."""

    number: int
    bounds: ShardSlice
    entries: StateEntries
    content: memoryview


class ShardCopies:
    """Copies shards and writes the copies. There is at most one copy of each shard.

    Attributes:
        bell: a socket that can be read when a thread has something to report.
    """

    def __init__(self) -> None:
        self.bell, self._ringer = socket.socketpair()
        self.bell.setblocking(False)
        self._memory: dict[int, memoryview] = {}  # shard -> memory for its copy
        self._copies: dict[int, Copy] = {}
        self._reports: queue.SimpleQueue[CopiesReserved | CutWritten] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def reserve(self, stores: Mapping[int, Store]) -> None:
        """Reserve the memory for copies in a thread."""
        sizes = {
            shard: sum(part.nbytes for part in [*store.weights.values(), *store.optimizer_state().values()])
            for shard, store in stores.items()
        }
        self._begin(partial(self._reserve, sizes))

    def take(self, request: TakeCut, store: Store) -> StateEntries:
        """Copy a shard as it is now, and return the entries of its optimizer state."""
        state = store.optimizer_state()
        entries = store.state_entries(state)
        parts = shard_content(store.bounds, store.weights, state)
        size_bytes = sum(part.nbytes for part in parts)
        memory = self._memory.get(request.shard)
        if memory is None or memory.nbytes < size_bytes:  # the model or the state has changed meanwhile
            memory = self._memory[request.shard] = memoryview(bytearray(size_bytes))
        begin = 0
        for part in parts:
            memory[begin : begin + part.nbytes] = part
            begin += part.nbytes
        self._copies[request.shard] = Copy(request.number, store.bounds, entries, memory[:begin])
        return entries

    def write(self, message: WriteCut) -> None:
        """Write the copies in a thread, unless this machine does not see the files."""
        copies = [copy for copy in self._copies.values() if copy.number == message.number]
        self._begin(partial(_write, message, copies))

    def piece(self, message: FetchCut) -> memoryview:
        """Return a piece of a copy; nothing if there is no such copy."""
        copy = self._copies.get(message.shard)
        if copy is None or copy.number != message.number:
            return memoryview(b"")
        return copy.content[message.begin : message.begin + message.size_bytes]

    def take_reports(self) -> list[CopiesReserved | CutWritten]:
        """Return what the threads have reported since the last call."""
        with contextlib.suppress(BlockingIOError):
            self.bell.recv(4096)
        found = []
        while not self._reports.empty():
            found.append(self._reports.get_nowait())
        return found

    def close(self) -> None:
        """Close the bell."""
        self.bell.close()
        self._ringer.close()

    def _begin(self, work: Callable[[], CopiesReserved | CutWritten]) -> None:
        """Do some work in a thread, after all earlier work, and report its result."""
        before = self._thread

        def run() -> None:
            if before is not None:
                before.join()
            yield_to_training()
            self._reports.put(work())
            with contextlib.suppress(OSError):  # the server has ended
                self._ringer.send(b"x")

        self._thread = threading.Thread(target=run, name="paceline-checkpoint", daemon=True)
        self._thread.start()

    def _reserve(self, sizes: Mapping[int, int]) -> CopiesReserved:
        pace = Pace(BYTES_PER_S)
        for shard, size_bytes in sizes.items():
            if shard in self._memory and self._memory[shard].nbytes >= size_bytes:
                continue
            free_bytes = available_bytes()
            if free_bytes is not None and free_bytes < size_bytes:
                return CopiesReserved(
                    f"a copy of shard {shard} needs {size_bytes / 1e9:.3g} GB of memory, but only "
                    f"{free_bytes / 1e9:.3g} GB are available"
                )
            memory = torch.empty(size_bytes, dtype=torch.uint8)
            for piece in memory.split(TOUCHED_BYTES):
                piece.zero_()
                pace.spend(piece.nbytes)
            self._memory[shard] = bytes_of(memory)
        return CopiesReserved()


def _write(message: WriteCut, copies: list[Copy]) -> CutWritten:
    """Write copies to the files of a checkpoint, if they are there."""
    path, pace = Path(message.path), Pace(BYTES_PER_S)
    if not is_draft(path, message.token):
        return CutWritten(message.number, seen=False)
    try:
        for copy in copies:
            with ShardWriter(path, message.token, copy.bounds, copy.entries, pace) as writer:
                writer.write(copy.content)
    except CheckpointError as error:
        return CutWritten(message.number, str(error))
    return CutWritten(message.number)

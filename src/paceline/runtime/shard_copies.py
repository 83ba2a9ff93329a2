"""The copies of a server's shards for a cut of the job, which a thread writes to the files of a checkpoint."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..checkpoints.pace import Pace
from ..checkpoints.shard_writing import ShardWriter, shard_content
from ..core.protocol.layout import ShardSlice
from ..core.protocol.messages import WriteCut
from ..core.protocol.requests import TakeCut
from ..core.protocol.state_entries import StateEntries
from ..errors import CheckpointError
from ..shard.store import Store
from .checkpoints import BYTES_PER_S

__all__ = ["ShardCopies"]


class Copy(NamedTuple):
    """A copy of a shard: its number of the cut, its slice, the entries of its optimizer state, and its content."""

    number: int
    bounds: ShardSlice
    entries: StateEntries
    content: Sequence[memoryview]


class ShardCopies:
    """Copies shards and writes the copies. There is at most one copy of each shard.

    Attributes:
        bell: a socket that can be read when copies have been written.
    """

    def __init__(self) -> None:
        self.bell, self._ringer = socket.socketpair()
        self.bell.setblocking(False)
        self._copies: dict[int, Copy] = {}
        self._written: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def take(self, request: TakeCut, store: Store) -> StateEntries:
        """Copy a shard as it is now, and return the entries of its optimizer state."""
        self._copies.pop(request.shard, None)
        state = {name: value.clone() for name, value in store.optimizer_state().items()}
        entries = store.state_entries(state)
        weights = {name: value.clone() for name, value in store.weights.items()}
        content = shard_content(store.bounds, weights, state)
        self._copies[request.shard] = Copy(request.number, store.bounds, entries, content)
        return entries

    def write(self, message: WriteCut) -> None:
        """Write the copies in a thread, and forget them."""
        copies = [copy for copy in self._copies.values() if copy.number == message.number]
        self._copies.clear()
        thread = threading.Thread(
            target=self._write, args=(message, copies), name="paceline-checkpoint", daemon=True
        )
        del copies  # the thread drops each of them when it has been written
        thread.start()

    def take_written(self) -> list[tuple[int, str]]:
        """Return the numbers of the cuts that have been written since the last call, and why if they could not be."""
        with contextlib.suppress(BlockingIOError):
            self.bell.recv(4096)
        found = []
        while not self._written.empty():
            found.append(self._written.get_nowait())
        return found

    def close(self) -> None:
        """Close the bell."""
        self.bell.close()
        self._ringer.close()

    def _write(self, message: WriteCut, copies: list[Copy]) -> None:
        fault, pace = "", Pace(BYTES_PER_S)
        try:
            while copies:
                copy = copies.pop()
                with ShardWriter(Path(message.path), copy.bounds, copy.entries, pace) as writer:
                    for part in copy.content:
                        writer.write(part)
        except CheckpointError as error:
            fault = str(error)
        self._written.put((message.number, fault))
        with contextlib.suppress(OSError):  # the server has ended
            self._ringer.send(b"x")

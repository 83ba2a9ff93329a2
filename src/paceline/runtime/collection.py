"""Collects the final weights from the servers when training ends or fails.

Normally every server sends its shards over its connection to the coordinator. If a server is lost or hangs, its
shards are read from shared memory, provided that the transport uses shared memory. With other transports, the tensors
in these shards are reported as missing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ..core.protocol.layout import ShardSlice
from ..core.protocol.messages import Snapshot
from ..core.protocol.model_spec import ModelSpec
from ..core.protocol.placement import Placement
from ..errors import ProtocolError
from ..shard.snapshot import WeightsSnapshot
from ..wire.memory import Region, cut
from .reader import Assembly

__all__ = ["Collection"]


class Collection:
    """One attempt to collect the final weights from the servers.

    The coordinator's thread adds shards as they arrive. Another thread waits until `finished` is set.

    Args:
        model: the model that is trained.
        shards: the slice of the parameters that each shard holds.
        placement: the servers of the shards.
        master: the shared memory that contains the weights; None if the transport does not use shared memory.

    Attributes:
        finished: event that is set when no further shards will arrive.
    """

    def __init__(
        self,
        model: ModelSpec,
        shards: Sequence[ShardSlice],
        placement: Placement,
        master: Region | None,
    ) -> None:
        self.finished = threading.Event()
        self._assembly = Assembly(model, shards)
        self._shards = shards
        self._placement = placement
        self._master = master
        self._owed = {shard.index for shard in shards}

    def owed_by(self, server: int) -> list[int]:
        """Return the indices of a server's shards that have not arrived yet."""
        return [shard for shard in self._placement.shards_of(server) if shard in self._owed]

    def targets(self, message: Snapshot, server: int) -> list[memoryview]:
        """Return the memory into which a shard's payload is received.

        Raises:
            ProtocolError: the shard is not expected from this server.
        """
        if message.shard not in self.owed_by(server):
            raise ProtocolError(f"shard {message.shard} is not expected from server {server}")
        return self._assembly.targets(message)

    def arrived(self, message: Snapshot) -> None:
        """Record that a shard has arrived."""
        self._assembly.arrived(message)
        self.give_up([message.shard])

    def give_up(self, shards: Sequence[int]) -> None:
        """Stop waiting for the given shards."""
        self._owed.difference_update(shards)
        if not self._owed:
            self.finished.set()

    def result(self) -> WeightsSnapshot:
        """Return the weights that were collected. Missing shards are read from shared memory if possible."""
        if self._master is not None:
            for shard in sorted(self._assembly.missing):
                self._assembly.fill(shard, cut(self._master.weights, self._shards[shard]))
            # Drop the reference, because the mapping keeps a file descriptor open.
            self._master = None
        return self._assembly.snapshot()

    @property
    def missing(self) -> list[int]:
        """Indices of the shards whose weights were neither received from a server nor read from shared memory."""
        return sorted(self._assembly.missing)

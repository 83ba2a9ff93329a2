"""The weights of a run, collected from its servers by the coordinator when training has ended, however it has.

Normally every server sends its shards over the connection that it has had from the start: nothing new has to be
opened for it. What a server that is gone, or hangs, does not send is taken from shared memory, where the weights lie
under that transport; otherwise it is missing, and named.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from ..core.layout import ShardSlice
from ..core.messages import Snapshot
from ..core.model_spec import ModelSpec
from ..errors import ProtocolError
from ..wire.memory import Region, cut
from .reader import Assembly, WeightsSnapshot

__all__ = ["Collection"]


class Collection:
    """One collection. The coordinator's thread fills it; another one waits for it.

    Args:
        model: what is trained.
        shards: the slices, in order; shard k is at server k modulo the number of servers.
        master: the weights themselves, over shared memory; else None.

    Attributes:
        finished: set when nothing more will come.
        heard_s: when some of it came last, on the monotonic clock.
    """

    def __init__(self, model: ModelSpec, shards: Sequence[ShardSlice], master: Region | None) -> None:
        self.finished = threading.Event()
        self.heard_s = time.monotonic()
        self._assembly = Assembly(model, shards)
        self._shards = shards
        self._master = master
        self._owed = {shard.index for shard in shards}

    def owed_by(self, server: int, servers: int) -> list[int]:
        """The shards of a server that have not come."""
        return sorted(shard for shard in self._owed if shard % servers == server)

    def targets(self, message: Snapshot, server: int, servers: int) -> list[memoryview]:
        """Where a shard's payload goes. Raises `ProtocolError` if it is not awaited from this server."""
        self.heard_s = time.monotonic()
        if message.shard not in self.owed_by(server, servers):
            raise ProtocolError(f"shard {message.shard} is not awaited from server {server}")
        return self._assembly.targets(message.shard)

    def arrived(self, message: Snapshot) -> None:
        """A shard has come."""
        self.heard_s = time.monotonic()
        self._assembly.arrived(message)
        self.give_up([message.shard])

    def give_up(self, shards: Sequence[int]) -> None:
        """These will not come, or have come."""
        self._owed.difference_update(shards)
        if not self._owed:
            self.finished.set()

    def result(self) -> WeightsSnapshot:
        """All that is there, now that no more is waited for."""
        if self._master is not None:
            for shard in sorted(self._assembly.missing):
                self._assembly.fill(shard, cut(self._master.weights, self._shards[shard]))
            self._master = None  # its mapping holds a descriptor
        return self._assembly.snapshot()

    @property
    def missing(self) -> list[int]:
        """The shards that no server has sent."""
        return sorted(self._assembly.missing)

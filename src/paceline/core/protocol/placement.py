"""Where the shards of a run are: each shard is held by a server.

The placement is a value. All processes of a run compute the same one from the numbers of shards and servers, so it
needs no message. Nothing outside this module computes the server of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TypeVar

import msgspec

__all__ = ["Placement", "round_robin"]

Item = TypeVar("Item")


class Placement(msgspec.Struct, frozen=True):
    """The place of each shard.

    Attributes:
        server_of: for each shard, the index of its server.
        servers: the indices of all servers.

    >>> placement = round_robin(shards=5, servers=2)
    >>> placement.server_of, placement.shards_of(1)
    ((0, 1, 0, 1, 0), (1, 3))
    >>> placement.held_by(1, ["a", "b", "c", "d", "e"])
    ('b', 'd')
    """

    server_of: tuple[int, ...]
    servers: range

    @property
    def shards(self) -> range:
        """The indices of all shards."""
        return range(len(self.server_of))

    def shards_of(self, server: int) -> tuple[int, ...]:
        """Return the indices of a server's shards, in ascending order."""
        return tuple(shard for shard, holder in enumerate(self.server_of) if holder == server)

    def held_by(self, server: int, items: Sequence[Item]) -> tuple[Item, ...]:
        """Return the items that belong to a server's shards. `items` contains one item for each shard."""
        return tuple(items[shard] for shard in self.shards_of(server))


@cache
def round_robin(shards: int, servers: int) -> Placement:
    """Return the placement of a run: shard k is at server k modulo `servers`."""
    return Placement(tuple(shard % servers for shard in range(shards)), range(servers))

"""Where the shards of a run are: each shard is held by a server, and each server is hosted by a process.

A *server* is logical: it has an index, a core (`core.server`) and shards, and messages are addressed to it. A process
may host several servers. A server has a *term*, which its commits and answers carry: the number of times that another
process has taken over the server. No process takes over a server yet, so all terms are 0, and 0 is not encoded.

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
    """The place of each shard and of each server.

    Attributes:
        server_of: for each shard, the index of its server.
        process_of: for each server, the index of its process.
        terms: for each server, its term.

    >>> placement = round_robin(shards=5, servers=2)
    >>> placement.server_of, placement.shards_of(1)
    ((0, 1, 0, 1, 0), (1, 3))
    >>> placement.held_by(1, ["a", "b", "c", "d", "e"])
    ('b', 'd')
    """

    server_of: tuple[int, ...]
    process_of: tuple[int, ...]
    terms: tuple[int, ...]

    @property
    def shards(self) -> range:
        """The indices of all shards."""
        return range(len(self.server_of))

    @property
    def servers(self) -> range:
        """The indices of all servers."""
        return range(len(self.process_of))

    @property
    def processes(self) -> tuple[int, ...]:
        """The indices of all processes that host a server, in ascending order."""
        return tuple(sorted(set(self.process_of)))

    def shards_of(self, server: int) -> tuple[int, ...]:
        """Return the indices of a server's shards, in ascending order."""
        return tuple(shard for shard, holder in enumerate(self.server_of) if holder == server)

    def servers_in(self, process: int) -> tuple[int, ...]:
        """Return the indices of the servers that a process hosts, in ascending order."""
        return tuple(server for server, host in enumerate(self.process_of) if host == process)

    def held_by(self, server: int, items: Sequence[Item]) -> tuple[Item, ...]:
        """Return the items that belong to a server's shards. `items` contains one item for each shard."""
        return tuple(items[shard] for shard in self.shards_of(server))

    def term_of(self, shard: int) -> int:
        """Return the term of a shard's server."""
        return self.terms[self.server_of[shard]]


@cache
def round_robin(shards: int, servers: int) -> Placement:
    """Return the placement of a new run: shard k is at server k modulo `servers`, and each server has a process."""
    return Placement(tuple(shard % servers for shard in range(shards)), tuple(range(servers)), (0,) * servers)

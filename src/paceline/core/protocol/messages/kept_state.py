"""Messages that read or keep the state of a run: snapshots, optimizer states, buffers, tracked objects, waits."""

from __future__ import annotations

from typing import Literal

import msgspec

from ....sync.events import Number
from .data_requests import LoopPosition
from .protocol_table import Message, sent

__all__ = [
    "MOST_STATES_BYTES",
    "ConnectionTraffic",
    "FetchBuffers",
    "FetchFrozen",
    "FetchInitialBuffers",
    "FetchOptimizerState",
    "FetchSnapshot",
    "FetchStates",
    "FetchWaits",
    "FrozenTensors",
    "InitialBuffers",
    "KeepStates",
    "KeptStates",
    "OptimizerState",
    "PooledBuffers",
    "ShardWaits",
    "Snapshot",
    "Waits",
]

MOST_STATES_BYTES = 2**30
"""Maximum size of the states of the objects that a script tracks."""


@sent("worker", to="server", forwarded=False)
@sent("reader", to="server", forwarded=False)
class FetchOptimizerState(Message, frozen=True, tag=True):
    """Request the optimizer state of a shard."""

    shard: Number


@sent("server", to="reader", forwarded=False)
@sent("server", to="worker", forwarded=False)
class OptimizerState(Message, frozen=True, tag=True):
    """The optimizer state of a shard. The payload is in safetensors format."""

    shard: int


@sent("worker", to="server", forwarded=False)
class FetchBuffers(Message, frozen=True, tag=True):
    """A worker requests the model's buffers, pooled over the workers, from the server of shard 0."""

    shard: Literal[0]


@sent("server", to="worker", forwarded=False)
class PooledBuffers(Message, frozen=True, tag=True):
    """The model's buffers, pooled over the workers. They are the payload, in the order of the model's buffers."""

    shard: int


@sent("worker", to="server", forwarded=False)
class FetchInitialBuffers(Message, frozen=True, tag=True):
    """A worker requests the initial values of the buffers that were added last, from the server of shard 0.

    Attributes:
        shard: 0.
        checksum: checksum of the worker's own values.
    """

    shard: Literal[0]
    checksum: Number


@sent("server", to="worker", forwarded=False)
class InitialBuffers(Message, frozen=True, tag=True):
    """The initial values of the buffers that were added last. They are the payload, in the order of the model.

    Attributes:
        shard: 0.
        equal: True if the worker has the same values, so that there is no payload.
    """

    shard: int
    equal: bool = False


@sent("worker", to="server", forwarded=False)
@sent("reader", to="server", forwarded=False)
@sent("server", to="worker", forwarded=False)
class FetchFrozen(Message, frozen=True, tag=True):
    """Request values of frozen parameters: from the server of shard 0, or by this server from a worker.

    The server keeps no values until they are requested. It then requests them from a worker that has them.

    Attributes:
        shard: 0.
        digests: the digests of the values, each of them once.
    """

    shard: Literal[0]
    digests: tuple[str, ...]


@sent("worker", to="server", forwarded=False)
@sent("server", to="reader", forwarded=False)
@sent("server", to="worker", forwarded=False)
class FrozenTensors(Message, frozen=True, tag=True):
    """Values of frozen parameters: the answer to a `FetchFrozen`. They are the payload, in the order of `digests`.

    Attributes:
        shard: 0.
        digests: those of the requested digests whose values are known, in the order of the request.
    """

    shard: Literal[0]
    digests: tuple[str, ...]


@sent("worker", to="server", forwarded=False)
class KeepStates(Message, frozen=True, tag=True):
    """The states of the objects that the script tracks, to be kept by the server of shard 0. They are the payload.

    Attributes:
        shard: 0.
        position: the position at which the states were taken.
    """

    shard: Literal[0]
    position: LoopPosition


@sent("reader", to="server", forwarded=False)
class FetchStates(Message, frozen=True, tag=True):
    """Request the states that were kept last, from the server of shard 0."""

    shard: Literal[0]


@sent("server", to="reader", forwarded=False)
class KeptStates(Message, frozen=True, tag=True):
    """The states that were kept last. They are the payload.

    Attributes:
        shard: 0.
        position: the position at which the states were taken; None if there are none.
    """

    shard: int
    position: LoopPosition | None = None


@sent("coordinator", to="server", during="serving")
@sent("reader", to="server", forwarded=False)
class FetchSnapshot(Message, frozen=True, tag=True):
    """Request the current weights of a shard. Sent by readers, and by the coordinator at the end of a run.

    Attributes:
        shard: index of the shard.
        left: the workers that have left the run, if the coordinator sends this message. The server answers once it
            has noticed the departure of each of them.
    """

    shard: Number
    left: tuple[Number, ...] = ()


@sent("server", to="coordinator", during="serving", forwarded=False)
@sent("server", to="reader", forwarded=False)
class Snapshot(Message, frozen=True, tag=True):
    """The current weights of a shard, with their version.

    The payload contains the weights and, for shard 0, the buffers of the model, pooled across workers, followed by
    those values of frozen parameters that the server keeps.

    Attributes:
        shard: index of the shard.
        version: number of updates of the shard.
        digests: the digests of the values of frozen parameters in the payload.
    """

    shard: int
    version: int
    digests: tuple[str, ...] = ()


class ShardWaits(msgspec.Struct, frozen=True):
    """The workers that wait at one shard.

    Attributes:
        shard: index of the shard.
        sync: the sync model in force at this shard.
        pulls: (worker, iteration) of each delayed pull, sorted by worker.
        reasons: for each delayed pull, in the same order, what the pull waits for.
        staleness: (worker, number of updates since it has received the weights) of each live worker.
    """

    shard: int
    sync: str
    pulls: tuple[tuple[int, int], ...]
    reasons: tuple[str, ...]
    staleness: tuple[tuple[int, int], ...] = ()


class ConnectionTraffic(msgspec.Struct, frozen=True, array_like=True):
    """The number of bytes on a server's connection to a worker since it was opened.

    Attributes:
        worker: index of the worker.
        sent_bytes: number of bytes that the server has sent.
        received_bytes: number of bytes that the server has received.
    """

    worker: int
    sent_bytes: int
    received_bytes: int


@sent("coordinator", to="server", forwarded=False)
class FetchWaits(Message, frozen=True, tag=True):
    """Request the list of workers that wait at a server. A server that does not answer is considered hung."""


@sent("server", to="coordinator")
class Waits(Message, frozen=True, tag=True):
    """The workers that wait at each shard of a server.

    Attributes:
        shards: one entry per shard.
        timers: True if the server has a pending timer, which may release a worker.
        traffic: one entry per TCP connection to a worker.
        moved_ticks: (worker, time at which data last moved on its connection), for each connected worker.
    """

    shards: tuple[ShardWaits, ...]
    timers: bool
    traffic: tuple[ConnectionTraffic, ...] = ()
    moved_ticks: tuple[tuple[int, int], ...] = ()

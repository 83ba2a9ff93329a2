"""Messages with which workers get data and agree on the epoch, and with which the state of a run is read."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ...sync.events import Number
from ..lease import DataOrder, Lease, PackedPushed
from .table import Message, sent

MOST_LOADERS = 1024
"""Maximum number of loaders that a script may distribute at the same time."""

MOST_TIMES = 64
"""Maximum number of measured times in a request for data."""

BatchTaken = tuple[
    Annotated[int, msgspec.Meta(ge=1, le=2**53)], Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
]
"""The number of positions in an iteration, and the time in seconds that the worker took for it."""


@sent("worker", to="coordinator")
class DataRequested(Message):
    """A worker needs data: it begins an epoch of a loader, or has used its leases.

    Attributes:
        loader: the worker's own number for the loader. It is also the index of the loader's entry in `Commit.drawn`.
        name: name of the loader, which is the same in all workers.
        epoch: number of the epoch, counted from 0 for each loader.
        order: the order of the epoch.
        drawn: number of batches of this loader that the script has drawn since the worker joined.
        committed: the loader's entry in `Commit.drawn` of the worker's last push that every shard has received.
        end: an epoch and the number of positions in its order, if the worker has reached an end that was not known in
            advance.
        times: the number of positions in each of the worker's iterations since its last request, and the time in
            seconds that the worker took for this iteration. Only sent if the order is balanced.
        least: minimum size of the worker's batches if the order is balanced or its batches are joint.
        step: the sizes of the worker's batches are multiples of this number if the order is balanced. See
            `paceline.core.batch_sizes.in_steps`.
    """

    loader: Annotated[int, msgspec.Meta(ge=0, lt=MOST_LOADERS)]
    name: Annotated[str, msgspec.Meta(max_length=256)]
    epoch: Number
    order: DataOrder
    drawn: Number
    committed: PackedPushed
    end: tuple[Number, Number] | None = None
    times: Annotated[tuple[BatchTaken, ...], msgspec.Meta(max_length=MOST_TIMES)] = ()
    least: Annotated[int, msgspec.Meta(ge=1, le=2**53)] = 1
    step: Annotated[int, msgspec.Meta(ge=1, le=2**53)] = 1


@sent("coordinator", to="worker")
class DataGranted(Message):
    """The answer to a `DataRequested`.

    Attributes:
        loader: the worker's own number for the loader.
        epoch: number of the epoch.
        leases: the batches that the worker may use, in order.
        last: True if the worker receives no more batches in this epoch.
    """

    loader: int
    epoch: int
    leases: tuple[Lease, ...]
    last: bool


@sent("worker", to="coordinator")
class StopRequested(Message):
    """A worker's script stops a training loop in all workers, or a loop has used up its time.

    Attributes:
        loop: number of the loop, in the order in which the script begins its loops.
    """

    loop: Number


@sent("coordinator", to="worker")
class TrainingStopped(Message):
    """A worker must end a training loop, which the message names by its number, after the current iteration."""

    loop: int


class LoopPosition(msgspec.Struct, frozen=True):
    """The beginning of an epoch of a training loop, or the end of the loop. See `paceline.epochs`.

    Attributes:
        loop: number of the loop, in the order in which the script begins its loops.
        epoch: number of the epoch; the number of the last epoch plus 1 at the end of the loop.
        updates: number of updates of the weights at the beginning of the loop.
        samples: number of samples that all workers together had used at the beginning of the loop.
        passes: (name, number of passes that have begun) for each distributed loader.
    """

    loop: Number
    epoch: Number
    updates: Number = 0
    samples: Number = 0
    passes: Annotated[
        tuple[tuple[Annotated[str, msgspec.Meta(max_length=256)], Number], ...],
        msgspec.Meta(max_length=MOST_LOADERS),
    ] = ()


Limit = Annotated[int, msgspec.Meta(ge=1, le=2**53)] | None


class LoopLimits(msgspec.Struct, frozen=True):
    """The limits of a training loop, counted from its beginning. The first limit that is reached ends the loop.

    Attributes:
        epochs: number of epochs; None for no limit.
        time_s: time in seconds; None for no limit.
        updates: number of updates of the weights; None for no limit.
        samples: number of samples that all workers together use; None for no limit.
    """

    epochs: Limit = None
    time_s: Annotated[float, msgspec.Meta(gt=0.0)] | None = None
    updates: Limit = None
    samples: Limit = None


@sent("worker", to="coordinator")
class EntryRequested(Message):
    """A worker that has not trained yet begins a training loop, and waits for a `LoopEntered`.

    Attributes:
        loop: number of the loop, in the order in which the script begins its loops.
        limits: the limits of the loop.
    """

    loop: Number
    limits: LoopLimits | None = None


@sent("coordinator", to="worker")
class LoopEntered(Message):
    """The answer to an `EntryRequested`.

    Attributes:
        position: the position of a run in progress; None if the run is only beginning.
        elapsed_s: time in seconds since the loop began; 0 if another loop is in progress.
        address: the address of the server that keeps the tracked states; "" if `position` is None.
    """

    position: LoopPosition | None = None
    elapsed_s: float = 0.0
    address: str = ""


@sent("worker", to="coordinator")
class EpochReached(Message):
    """A worker's script has reached the beginning of an epoch, or the end of a training loop.

    Attributes:
        position: the position.
        over: True at the end of the loop.
        tracks: True if the script tracks objects. The worker then waits for a `StatesDecided`.
        limits: the limits of the loop.
    """

    position: LoopPosition
    over: bool = False
    tracks: bool = False
    limits: LoopLimits | None = None


@sent("coordinator", to="worker")
class StatesDecided(Message):
    """The answer to an `EpochReached`: whether the worker must send the states of its tracked objects."""

    wanted: bool


# -- Messages that read or keep the state of a run: snapshots, optimizer states, buffers, tracked objects, waits

MOST_STATES_BYTES = 2**30
"""Maximum size of the states of the objects that a script tracks."""


@sent("worker", to="server", forwarded=False)
@sent("reader", to="server", forwarded=False)
class FetchOptimizerState(Message):
    """Request the optimizer state of a shard."""

    shard: Number


@sent("server", to="reader", forwarded=False)
@sent("server", to="worker", forwarded=False)
class OptimizerState(Message):
    """The optimizer state of a shard. The payload is in safetensors format."""

    shard: int


@sent("worker", to="server", forwarded=False)
class FetchBuffers(Message):
    """A worker requests the model's buffers, pooled over the workers, from the server of shard 0."""

    shard: Literal[0]


@sent("server", to="worker", forwarded=False)
class PooledBuffers(Message):
    """The model's buffers, pooled over the workers. The payload has them in the order of the model's buffers."""

    shard: int


@sent("worker", to="server", forwarded=False)
class FetchInitialBuffers(Message):
    """A worker requests the initial values of the buffers that were added last, from the server of shard 0.

    Attributes:
        shard: 0.
        checksum: checksum of the worker's own values.
    """

    shard: Literal[0]
    checksum: Number


@sent("server", to="worker", forwarded=False)
class InitialBuffers(Message):
    """The initial values of the buffers that were added last. The payload has the values in the order of the model.

    Attributes:
        shard: 0.
        equal: True if the worker has the same values, so that there is no payload.
    """

    shard: int
    equal: bool = False


@sent("worker", to="server", forwarded=False)
@sent("reader", to="server", forwarded=False)
@sent("server", to="worker", forwarded=False)
class FetchFrozen(Message):
    """Request values of frozen parameters from the server of shard 0, which may request these values from a worker.

    The server keeps no values until a worker or a reader requests some. The server then requests these values from a
    worker that has them.

    Attributes:
        shard: 0.
        digests: the digests of the values, without duplicates.
    """

    shard: Literal[0]
    digests: tuple[str, ...]


@sent("worker", to="server", forwarded=False)
@sent("server", to="reader", forwarded=False)
@sent("server", to="worker", forwarded=False)
class FrozenTensors(Message):
    """Values of frozen parameters: the answer to a `FetchFrozen`. The payload has the values in the order of `digests`.

    Attributes:
        shard: 0.
        digests: those of the requested digests whose values are known, in the order of the request.
    """

    shard: Literal[0]
    digests: tuple[str, ...]


@sent("worker", to="server", forwarded=False)
class KeepStates(Message):
    """The server of shard 0 must keep the states of the objects that the script tracks. These states are the payload.

    Attributes:
        shard: 0.
        position: the position at which the states were taken.
    """

    shard: Literal[0]
    position: LoopPosition


@sent("reader", to="server", forwarded=False)
class FetchStates(Message):
    """Request the latest states of tracked objects from the server of shard 0."""

    shard: Literal[0]


@sent("server", to="reader", forwarded=False)
class KeptStates(Message):
    """The latest states of tracked objects, as the payload.

    Attributes:
        shard: 0.
        position: the position at which the states were taken; None if there are none.
    """

    shard: int
    position: LoopPosition | None = None


@sent("coordinator", to="server", during="serving")
@sent("reader", to="server", forwarded=False)
@sent("worker", to="server", forwarded=False)
class FetchSnapshot(Message):
    """Request the current weights of a shard, for evaluation. At the end of a run, the coordinator requests them, too.

    Attributes:
        shard: index of the shard.
        left: the workers that have left the run, if the coordinator sends this message. The server answers once it
            has noticed the departure of each of them and, if no worker remains, has applied the last clipped means.
    """

    shard: Number
    left: tuple[Number, ...] = ()


@sent("server", to="coordinator", during="serving", forwarded=False)
@sent("server", to="reader", forwarded=False)
@sent("server", to="worker", forwarded=False)
class Snapshot(Message):
    """The current weights of a shard, for evaluation, with their version.

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
        staleness: (worker, number of updates since the worker received its weights) of each live worker.
    """

    shard: int
    sync: str
    pulls: tuple[tuple[int, int], ...]
    reasons: tuple[str, ...]
    staleness: tuple[tuple[int, int], ...] = ()


class ConnectionTraffic(msgspec.Struct, frozen=True, array_like=True):
    """The number of bytes that a server's connection to a worker has carried since it was opened.

    Attributes:
        worker: index of the worker.
        sent_bytes: number of bytes that the server has sent.
        received_bytes: number of bytes that the server has received.
    """

    worker: int
    sent_bytes: int
    received_bytes: int


@sent("coordinator", to="server", forwarded=False)
class FetchWaits(Message):
    """Request the list of workers that wait at a server. A server that does not answer is considered hung."""


@sent("server", to="coordinator")
class Waits(Message):
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


class StepTime(msgspec.Struct, frozen=True, array_like=True):
    """The time that the optimizer of one parameter set takes for a step at one shard.

    Attributes:
        shard: index of the shard.
        set_index: index of the parameter set.
        typical_s: the median of the times of the optimizer's latest steps, in seconds.
    """

    shard: Number
    set_index: Number
    typical_s: Annotated[float, msgspec.Meta(ge=0.0)]


@sent("server", to="coordinator", forwarded=False)
class StepsTimed(Message):
    """A server has measured steps of its optimizers: the first few steps, and later ones at growing intervals.

    Attributes:
        steps: one entry per shard and parameter set.
        share: share of the time, from 0 to 1, in which the server made steps.
    """

    steps: tuple[StepTime, ...]
    share: float

"""Messages with which workers get data, and agree on the epoch and on what they track."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ....sync.events import Number
from ..lease import Lease, Order, PackedPushed
from .protocol_table import Message, sent

__all__ = [
    "MOST_LOADERS",
    "MOST_TIMES",
    "DataGranted",
    "DataRequested",
    "EntryRequested",
    "EpochReached",
    "LoopEntered",
    "LoopLimits",
    "LoopPosition",
    "StatesDecided",
    "StopRequested",
    "TrainingStopped",
]

MOST_LOADERS = 1024
"""Maximum number of loaders that a script may distribute at the same time."""

MOST_TIMES = 64
"""Maximum number of measured times in a request for data."""

BatchTaken = tuple[
    Annotated[int, msgspec.Meta(ge=1, le=2**53)], Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
]
"""The number of positions in an iteration, and the time in seconds that the worker took for it."""


@sent("worker", to="coordinator")
class DataRequested(Message, frozen=True, tag=True):
    """A worker needs data: it begins an epoch of a loader, or has used its leases.

    Attributes:
        loader: the worker's own number for the loader, which also numbers the entries of `drawn` in a `Commit`.
        name: name of the loader, which is the same in all workers.
        epoch: number of the epoch, counted from 0 for each loader.
        order: the order of the epoch.
        drawn: number of batches of this loader that the script has drawn since the worker joined.
        committed: `drawn` of the worker's last push that every shard has received. See `Commit`.
        end: an epoch and the number of positions in its order, if the worker has reached an end that was not known in
            advance.
        times: the number of positions in each of the worker's iterations since its last request, and the time in
            seconds that the worker took for it. Only sent if the order is balanced.
        least: minimum size of the worker's batches if the order is balanced or its batches are joint ones.
        step: number of which the sizes of the worker's batches are multiples if the order is balanced. See
            `paceline.core.data.batch_sizes.in_steps`.
    """

    loader: Annotated[int, msgspec.Meta(ge=0, lt=MOST_LOADERS)]
    name: Annotated[str, msgspec.Meta(max_length=256)]
    epoch: Number
    order: Order
    drawn: Number
    committed: PackedPushed
    end: tuple[Number, Number] | None = None
    times: Annotated[tuple[BatchTaken, ...], msgspec.Meta(max_length=MOST_TIMES)] = ()
    least: Annotated[int, msgspec.Meta(ge=1, le=2**53)] = 1
    step: Annotated[int, msgspec.Meta(ge=1, le=2**53)] = 1


@sent("coordinator", to="worker")
class DataGranted(Message, frozen=True, tag=True):
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
class StopRequested(Message, frozen=True, tag=True):
    """A worker's script stops a training loop in all workers, or a loop has used up its time.

    Attributes:
        loop: number of the loop, in the order in which the script begins its loops.
    """

    loop: Number


@sent("coordinator", to="worker")
class TrainingStopped(Message, frozen=True, tag=True):
    """A worker must end its training loop with this number after the current iteration."""

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
    """The limits of a training loop, counted from its beginning. The first one that is reached ends the loop.

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
class EntryRequested(Message, frozen=True, tag=True):
    """A worker that has not trained yet begins a training loop, and waits for a `LoopEntered`.

    Attributes:
        loop: number of the loop, in the order in which the script begins its loops.
        limits: the limits of the loop.
    """

    loop: Number
    limits: LoopLimits | None = None


@sent("coordinator", to="worker")
class LoopEntered(Message, frozen=True, tag=True):
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
class EpochReached(Message, frozen=True, tag=True):
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
class StatesDecided(Message, frozen=True, tag=True):
    """The answer to an `EpochReached`: whether the worker must send the states of its tracked objects."""

    wanted: bool

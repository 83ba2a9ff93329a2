"""Messages with which a cut of a job is made. See `paceline.core.reconfiguration`."""

from __future__ import annotations

import msgspec

from ...sync.events import Number
from ..layout import StateEntries
from ..lease import PackedPushed
from .table import Message, sent


class ShardState(msgspec.Struct, frozen=True):
    """The progress of the weights of one shard.

    Attributes:
        version: number of updates that the weights include.
        samples: number of samples in the pushes of these updates, as far as known.
        at_once: the largest number of workers that have been present at the same time; 0 if it is unknown. In a cut of
            a job, this is the largest number at any shard, since one shard may see a departure before a join, and
            another shard after the join.
    """

    version: int = 0
    samples: int = 0
    at_once: int = 0


class PushCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the pushes that a shard has received, by what has become of them. Each push is counted once.

    Attributes:
        applied: pushes that were applied one by one, not as parts of a mean.
        averaged: pushes that were part of a mean.
        dropped: pushes that are in no update: those without a gradient, those that came too late, and edits.
        lost: pushes of lost workers that are in no update, because not every shard has received them, and pushes that
            were held at a cut.
        dropped_samples: number of samples in the dropped pushes, as far as known.
    """

    applied: int = 0
    averaged: int = 0
    dropped: int = 0
    lost: int = 0
    dropped_samples: int = 0

    def plus(self, other: PushCounts) -> PushCounts:
        """Return the sum of these counts and the counts in `other`."""
        return PushCounts(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        )


class LastPush(msgspec.Struct, frozen=True):
    """The last push of a worker whose effect is in the weights of a shard.

    Attributes:
        worker: index of the worker.
        iteration: label of the push; if there is no such push, the label before the worker's first label.
        drawn: `drawn` of this push. See `Commit`.
    """

    worker: int
    iteration: int
    drawn: tuple[PackedPushed, ...] = ()


@sent("coordinator", to="server", during="serving", forwarded=False)
class ReserveCopies(Message):
    """A cut is to be made soon, so the server must reserve memory for copies, and then answer `CopiesReserved`."""


@sent("server", to="coordinator", during="serving", forwarded=False)
class CopiesReserved(Message):
    """A server has reserved memory for copies of its shards, or has failed to reserve memory.

    Attributes:
        fault: why the memory could not be reserved; "" if it was reserved.
    """

    fault: str = ""


@sent("coordinator", to="server", during="serving")
class CutProposed(Message):
    """A cut is about to be made under a lockstep model, so each server must send a `CutOffered`.

    Attributes:
        number: number of the cut.
        left: the workers that have left the run. The server answers when it has noticed each of these departures.
    """

    number: int
    left: tuple[int, ...] = ()


@sent("server", to="coordinator", during="serving")
class CutOffered(Message):
    """A server says how many rounds its shards have completed.

    This message is the answer to `CutProposed`, and also to a `CutAgreed` with a round that a shard of the server has
    already passed.

    Attributes:
        number: number of the cut.
        round: the largest number of rounds that any shard of the server has completed.
    """

    number: int
    round: int


@sent("coordinator", to="server", during="serving")
class CutAgreed(Message):
    """Each shard must be cut. An earlier cut is given up, even if its shards have been cut already.

    Attributes:
        number: number of the cut.
        round: number of rounds after which each shard is cut; None to cut each shard immediately.
        left: the workers that have left the run. The server cuts no shard before it has noticed each of these
            departures.
    """

    number: int
    round: int | None = None
    left: tuple[int, ...] = ()


@sent("worker", to="coordinator", forwarded=False)
class CheckpointRequested(Message):
    """A script asks for a checkpoint. The n-th requests of all workers count as one request.

    Attributes:
        number: number of the worker's request, counted from 1.
    """

    number: Number


@sent("server", to="coordinator", during="serving")
class CutTaken(Message):
    """A shard was cut: its host has copied the weights.

    Attributes:
        number: number of the cut.
        shard: index of the shard.
        state: the progress of the shard.
        pushes: what has become of the pushes that the shard has received. Held pushes count as lost.
        workers: for each live worker, its last push that is part of the cut.
    """

    number: int
    shard: int
    state: ShardState
    pushes: PushCounts
    workers: tuple[LastPush, ...]


@sent("server", to="coordinator", during="serving", forwarded=False)
class CutCopied(Message):
    """The host of a server has copied a shard for a cut, just before `CutTaken`.

    The payload of shard 0 contains the model's buffers, pooled over the workers, in the order of the model.

    Attributes:
        number: number of the cut.
        shard: index of the shard.
        entries: the entries of the copied optimizer state.
    """

    number: int
    shard: int
    entries: StateEntries


@sent("coordinator", to="server", during="serving", forwarded=False)
class WriteCut(Message):
    """The server must write its copies to their places in the files of a checkpoint, and then answer `CutWritten`.

    Attributes:
        number: number of the cut.
        path: the directory of the files.
        token: a random text in the directory. If a directory lacks this text, it is a different one with the same path,
            for example on another machine.
    """

    number: int
    path: str
    token: str


@sent("server", to="coordinator", during="serving", forwarded=False)
class CutWritten(Message):
    """A server has written its copies, or has failed to write them.

    Attributes:
        number: number of the cut.
        fault: why the copies could not be written; "" if they were written.
        seen: False if the server does not see the files. The server then keeps the copies, and awaits `FetchCut`.
    """

    number: int
    fault: str = ""
    seen: bool = True


@sent("coordinator", to="server", during="serving", forwarded=False)
class FetchCut(Message):
    """The server must send a piece of its copy of a shard in a `CutPiece`.

    Attributes:
        number: number of the cut.
        shard: index of the shard.
        begin: where the piece begins in the content of the shard, in bytes.
        size_bytes: size of the piece.
    """

    number: int
    shard: int
    begin: int
    size_bytes: int


@sent("server", to="coordinator", during="serving", forwarded=False)
class CutPiece(Message):
    """A piece of the copy of a shard, in the order of `checkpoints.writing.shard_content`.

    The payload is the piece. If the server has no such copy, the payload is empty.

    Attributes:
        number: number of the cut.
        shard: index of the shard.
    """

    number: int
    shard: int


@sent("coordinator", to="worker", during="training")
class StateWanted(Message):
    """All shards have been cut, so the worker must give the state of its script, unless it has given this state
    already.

    The worker sends the state in a `KeepWorkerState`, as soon as its script is between two batches, or waits in a call.

    Attributes:
        number: number of the cut.
    """

    number: int


@sent("worker", to="coordinator", during="training")
class KeepWorkerState(Message):
    """The state of a worker's script, for a cut. The payload is in the format of `shard.optimizers`.

    A later message for the same cut and the same label replaces an earlier message.

    Attributes:
        number: number of the cut.
        iteration: label of the last push of the worker; if the worker has made no push, the label before its first
            label.
    """

    number: int
    iteration: int

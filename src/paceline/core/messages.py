"""The messages between the processes of a run.

On a connection, a message is a small MessagePack header, followed by its payload: raw bulk data, such as slices of
weights and gradients. Each side decodes only the messages that its peer may send; see the unions at the end of this
module. In virtual time, the same objects are passed without encoding. Indices and counts that a worker or a reader
sends have the type `Number`, which limits their range.

A message that becomes an event at its receiver has the same name as the event. A commit becomes two events, a push
and a pull.

    worker -> coordinator   Hello, Register, IterationFinished, IterationStarted, AllCommitted, SyncRequested, Status,
                            Warned, WorkerFinished, Failed
    coordinator -> worker   Started, Refused, PlanPublished, RestartOrdered, ChangePublished, PullAllowed
    server -> coordinator   Hello, Ready, WorkerWelcomed, FaultReported, Warned, Failed, Snapshot, Waits
    coordinator -> server   CreateShards, WorkerJoined, WorkerLost, FetchSnapshot, FetchWaits, Shutdown
    worker -> server        Hello, InitialState, InitialWeights, Stage, Commit, PullRequested, PullRepeated,
                            FetchOptimizerState, WorkerFinished
    server -> worker        Committed, Answer, OptimizerState
    reader -> server        Hello, FetchSnapshot, FetchOptimizerState
    server -> reader        Snapshot, OptimizerState
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ..sync.events import Change, Number, Stop
from .layout import ShardSlice
from .model_spec import ModelSpec

__all__ = [
    "AllCommitted",
    "Answer",
    "Bell",
    "ChangePublished",
    "Commit",
    "Committed",
    "Content",
    "CreateShards",
    "Failed",
    "FaultReported",
    "FetchOptimizerState",
    "FetchSnapshot",
    "FetchWaits",
    "FromCoordinatorToServer",
    "FromCoordinatorToWorker",
    "FromPeerToCoordinator",
    "FromPeerToServer",
    "FromServer",
    "Hello",
    "InitialState",
    "InitialWeights",
    "IterationFinished",
    "IterationStarted",
    "Message",
    "OptimizerState",
    "PlanPublished",
    "PullAllowed",
    "PullRepeated",
    "PullRequested",
    "Ready",
    "Refused",
    "Register",
    "RestartOrdered",
    "ShardWaits",
    "Shutdown",
    "Snapshot",
    "Stage",
    "Started",
    "Status",
    "SyncRequested",
    "Waits",
    "Warned",
    "WorkerFinished",
    "WorkerJoined",
    "WorkerLost",
    "WorkerWelcomed",
]


class Message(msgspec.Struct, frozen=True, tag=True):
    """The base class of all messages."""


class Bell(Message, frozen=True, tag=True):
    """Wakes a peer that sleeps although its ring buffer contains data. The message has no other meaning."""


class Hello(Message, frozen=True, tag=True):
    """The first message of every connection. If its token is wrong, the receiver reads no further message.

    Attributes:
        token: the secret token of the run.
        role: role of the caller.
        index: index of the worker or server; 0 for a reader.
        address: address on which a server listens; "" for other roles.
        memory_bytes: size of the shared memory whose file descriptor is attached to this message; 0 if there is none.
        channels: number of pairs of ring buffers in the shared memory.
        channel: index of the pair of ring buffers for this connection; -1 if the connection uses none.
        follows: True if the caller is a worker that can read the weights in the servers' memory.
    """

    token: str
    role: Literal["worker", "server", "reader"]
    index: Number
    address: str = ""
    memory_bytes: Number = 0
    channels: Number = 0
    channel: int = -1
    follows: bool = False


# -- start of a run ---------------------------------------------------------------------------------------


class Register(Message, frozen=True, tag=True):
    """A worker has reached its first step and trains this model."""

    model: ModelSpec


class CreateShards(Message, frozen=True, tag=True):
    """A server must create its shards. The initializer will send their weights.

    With shared memory, the file descriptor of the memory that holds the weights is attached to this message and to
    `Started`.

    Attributes:
        model: the model to train.
        shards: the slices that this server holds.
        sync: the first sync model, or one model per shard, in the notation of the command line.
        workers: the workers that take part from the start, in ascending order.
        initializer: the worker that sends the initial weights.
    """

    model: ModelSpec
    shards: tuple[ShardSlice, ...]
    sync: str
    workers: tuple[int, ...]
    initializer: int


class Ready(Message, frozen=True, tag=True):
    """A server has received its shards. Workers may connect to it."""


class Started(Message, frozen=True, tag=True):
    """Training begins for a worker.

    Attributes:
        shards: the slices of all shards, in order.
        addresses: for each shard, the address on which its server listens.
        initializer: the worker that sends the initial weights.
        iteration: label of the worker's first iteration.
        sync: the sync model in force, in the notation of the command line; "" if it is the run's first model.
    """

    shards: tuple[ShardSlice, ...]
    addresses: tuple[str, ...]
    initializer: int
    iteration: int = 0
    sync: str = ""


class Refused(Message, frozen=True, tag=True):
    """The coordinator refuses a worker, which then cannot take part in the run."""

    reason: str


class WorkerJoined(Message, frozen=True, tag=True):
    """A worker joins a run in progress. See the event of the same name."""

    worker: int
    iteration: int
    count: int | None
    superstep: int
    change: int


class WorkerWelcomed(Message, frozen=True, tag=True):
    """A server has received the `WorkerJoined` of a worker that joins a run in progress."""

    worker: int


class InitialState(Message, frozen=True, tag=True):
    """The optimizer state of a shard. When a run is resumed, the initializer sends it before the weights.

    The payload is in safetensors format.
    """

    shard: Number


class InitialWeights(Message, frozen=True, tag=True):
    """The initial weights of a shard, sent by the initializer.

    The payload contains the weights and, for shard 0, the other tensors of the model.
    """

    shard: Number


# -- an iteration -----------------------------------------------------------------------------------------


class Stage(Message, frozen=True, tag=True):
    """Pieces of a gradient, sent before the commit while other pieces are still being computed.

    The payload contains the pieces, in order. They have no effect until the commit. If a piece is sent twice, the
    later copy is used.
    """

    shard: Number
    pieces: tuple[Number, ...]


class Content(msgspec.Struct, frozen=True, array_like=True):
    """The content of a push for one shard.

    Attributes:
        present: for each parameter, 1 if it had a gradient, 0 if not.
        groups: the hyper-parameters of the parameter groups, encoded as MessagePack.
        pieces: indices of the pieces of the gradient that are in the payload.
        buffers: for shard 0, the indices of the changed buffers, which follow the pieces in the payload.
    """

    present: bytes
    groups: bytes
    pieces: tuple[Number, ...] = ()
    buffers: tuple[Number, ...] = ()


class Commit(Message, frozen=True, tag=True):
    """A worker's finished iteration, sent to one shard: a push and, usually, the pull that follows it.

    The payload contains the pieces of the gradient that were not staged, followed by the buffers. With shared memory,
    it contains no pieces, because the shared memory already contains the gradient.

    Attributes:
        shard: index of the shard.
        iteration: label of the iteration.
        content: content of the push; None in virtual time.
        empty: True if the worker skipped the iteration; the payload then contains no gradient.
        stop: set if this is the worker's last push before the barrier of its superstep.
        change: set if this is the worker's last push before the sync model changes.
        significance: |g| / |w|, the norm of the whole gradient divided by the norm of all weights; None if the sync
            model does not need it.
        progress: the round that the push is for; None unless a shard has told the worker to continue from a later
            round.
        pulls: False if the worker pulls later, with a `PullRequested`.
    """

    shard: Number
    iteration: Number
    content: Content | None = None
    empty: bool = False
    stop: Stop | None = None
    change: Change | None = None
    significance: Annotated[float, msgspec.Meta(ge=0)] | None = None
    progress: Number | None = None
    pulls: bool = True

    @property
    def pieces(self) -> tuple[int, ...]:
        """Indices of the pieces of the gradient that are in the payload."""
        return self.content.pieces if self.content is not None else ()


class Committed(Message, frozen=True, tag=True):
    """A shard has received a push that did not include a pull."""

    shard: int
    iteration: int


class AllCommitted(Message, frozen=True, tag=True):
    """With overlap off: every shard has received the sender's push of this iteration."""

    iteration: Number


class PullAllowed(Message, frozen=True, tag=True):
    """With overlap off: every shard has received every worker's push, so the worker may pull."""

    iteration: int


class PullRequested(Message, frozen=True, tag=True):
    """A pull that was not included in a commit."""

    shard: Number
    iteration: Number


class PullRepeated(Message, frozen=True, tag=True):
    """A worker has aborted its computation of `iteration` and needs the weights to restart it."""

    shard: Number
    iteration: Number


class Answer(Message, frozen=True, tag=True):
    """The answer to a pull. The payload is the shard's slice of the weights; with shared memory, it is empty.

    Attributes:
        shard: index of the shard.
        iteration: label of the iteration that the worker has pushed; -1 for the initial weights.
        version: version of the weights.
        v_train: the round from which the worker must continue because its push came too late for its own round; None
            if the push was not late.
        in_place: True if the worker must read the weights in the servers' memory until its next commit.
    """

    shard: int
    iteration: int
    version: int
    v_train: int | None = None
    in_place: bool = False


class IterationFinished(Message, frozen=True, tag=True):
    """A worker has pushed an iteration to all shards.

    Sent if the sync model has a state machine at the coordinator, or if the push is flagged with a change.

    Attributes:
        iteration: label of the iteration.
        superstep: set if the push was the worker's last one before the barrier of the superstep with this number.
        change: set if the push was the worker's last one before the model change with this number.
    """

    iteration: Number
    superstep: Number | None = None
    change: Number | None = None


class IterationStarted(Message, frozen=True, tag=True):
    """A worker has its weights and computes this iteration.

    Sent if the sync model needs these reports, and for the first iteration after a change.
    """

    iteration: Number


class PlanPublished(Message, frozen=True, tag=True):
    """One worker's part of a plan: the worker must stop with its first push of `iteration` or a later iteration."""

    stop: Stop
    iteration: int


class RestartOrdered(Message, frozen=True, tag=True):
    """A worker must abort its computation of this iteration, pull and compute again, unless it has already pushed."""

    iteration: int


class SyncRequested(Message, frozen=True, tag=True):
    """A worker has reached a point at which the sync model changes. See the event of the same name."""

    source: Literal["schedule", "script"]
    number: Number
    sync: str


class ChangePublished(Message, frozen=True, tag=True):
    """A worker must flag its next push with this change. Earlier plans are no longer valid."""

    change: Change


class FaultReported(Message, frozen=True, tag=True):
    """A user's condition has failed at a shard, which continues with the sync model `sync`."""

    shard: int
    reason: str
    traceback: str
    sync: str


# -- reading a run's state --------------------------------------------------------------------------------


class FetchOptimizerState(Message, frozen=True, tag=True):
    """Request the optimizer state of a shard."""

    shard: Number


class OptimizerState(Message, frozen=True, tag=True):
    """The optimizer state of a shard. The payload is in safetensors format."""

    shard: int


class FetchSnapshot(Message, frozen=True, tag=True):
    """Request the current weights of a shard. Sent by readers, and by the coordinator at the end of a run."""

    shard: Number


class Snapshot(Message, frozen=True, tag=True):
    """The weights of a shard at one version.

    The payload contains the weights and, for shard 0, the other tensors of the model, pooled over the workers.
    """

    shard: int
    version: int


class ShardWaits(msgspec.Struct, frozen=True):
    """The workers that wait at one shard.

    Attributes:
        shard: index of the shard.
        sync: the sync model in force there.
        pulls: (worker, iteration) of each delayed pull, in worker order.
        reasons: for each delayed pull, in the same order, what the pull waits for.
    """

    shard: int
    sync: str
    pulls: tuple[tuple[int, int], ...]
    reasons: tuple[str, ...]


class FetchWaits(Message, frozen=True, tag=True):
    """Request the list of workers that wait at a server. A server that does not answer is considered hung."""


class Waits(Message, frozen=True, tag=True):
    """The workers that wait at each shard of a server.

    Attributes:
        shards: one entry per shard.
        timers: True if the server has set a timer. When such a timer is due, a worker may be released.
    """

    shards: tuple[ShardWaits, ...]
    timers: bool


# -- status and end of a run ------------------------------------------------------------------------------


class Status(Message, frozen=True, tag=True):
    """The state of a worker, for the progress display."""

    iteration: Number
    loss: float | None
    state: Literal["computing", "waiting", "pulling"]


class Warned(Message, frozen=True, tag=True):
    """A problem that does not end the run, such as a log that cannot be written."""

    words: str


class WorkerFinished(Message, frozen=True, tag=True):
    """A worker has finished its work and leaves the run."""


class WorkerLost(Message, frozen=True, tag=True):
    """A worker was lost. Its connection may still be open if a child process of the worker has inherited it."""

    worker: int


class Failed(Message, frozen=True, tag=True):
    """A worker's script or a server has raised an exception.

    Attributes:
        reason: the error in one line.
        traceback: traceback of the error.
        consequence: True if the error occurred only because another process had ended.
    """

    reason: str
    traceback: str
    consequence: bool = False


class Shutdown(Message, frozen=True, tag=True):
    """A server must write its traces and exit."""


FromPeerToCoordinator = (
    Hello
    | Ready
    | Register
    | IterationFinished
    | IterationStarted
    | AllCommitted
    | SyncRequested
    | FaultReported
    | WorkerWelcomed
    | Status
    | Warned
    | WorkerFinished
    | Failed
    | Snapshot
    | Waits
)
FromCoordinatorToWorker = Started | Refused | PlanPublished | RestartOrdered | ChangePublished | PullAllowed
FromCoordinatorToServer = CreateShards | WorkerJoined | WorkerLost | FetchSnapshot | FetchWaits | Shutdown
FromPeerToServer = (
    Hello
    | InitialState
    | InitialWeights
    | Stage
    | Commit
    | PullRequested
    | PullRepeated
    | FetchOptimizerState
    | FetchSnapshot
    | WorkerFinished
    | Bell
)
FromServer = Committed | Answer | OptimizerState | Snapshot | Bell

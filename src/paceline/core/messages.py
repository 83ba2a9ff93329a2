"""Every message between two processes of a run, as a value.

On a connection, a message is a small MessagePack header, and bulk data (slices of weights and gradients) follows it
raw. Each side decodes only the messages that its peer may send: see the unions at the end. In virtual time, the same
values travel without being encoded. Indices and counts that come from a less trusted peer are of type `Number`.

A message that becomes an event at its receiver has the name of that event. A commit becomes two events, the push and
the pull.

    worker -> coordinator   Hello, Register, IterationFinished, IterationStarted, AllCommitted, SyncRequested, Status,
                            Warned, WorkerFinished, Failed
    coordinator -> worker   Started, Refused, PlanPublished, RestartOrdered, ChangePublished, PullAllowed
    server -> coordinator   Hello, Ready, FaultReported, Warned, Failed, Snapshot, Waits
    coordinator -> server   CreateShards, WorkerJoined, WorkerLost, FetchSnapshot, FetchWaits, Shutdown
    worker -> server        Hello, InitialState, InitialWeights, Stage, Commit, PullRequested, PullRepeated,
                            FetchState, WorkerFinished
    server -> worker        Committed, Answer, State
    reader -> server        Hello, FetchSnapshot, FetchState
    server -> reader        Snapshot, State
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
    "FetchSnapshot",
    "FetchState",
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
    "State",
    "Status",
    "SyncRequested",
    "Waits",
    "Warned",
    "WorkerFinished",
    "WorkerJoined",
    "WorkerLost",
]


class Message(msgspec.Struct, frozen=True, tag=True):
    """The base class of all messages."""


class Bell(Message, frozen=True, tag=True):
    """There is something in the ring. Wakes a peer that sleeps; has no other meaning."""


class Hello(Message, frozen=True, tag=True):
    """The first message of every connection. Without the run's token, nothing else is read.

    Attributes:
        token: the run's token.
        role: role of the caller.
        index: index of the worker or server; 0 for a reader.
        address: where a server listens; "" for other roles.
        memory_bytes: size of the shared memory whose descriptor comes with this message; 0 for none.
        channels: number of pairs of rings in that memory.
        channel: index of the pair that is for this connection; -1 for none.
        follows: True if a worker can read the weights where the servers keep them.
    """

    token: str
    role: Literal["worker", "server", "reader"]
    index: Number
    address: str = ""
    memory_bytes: Number = 0
    channels: Number = 0
    channel: int = -1
    follows: bool = False


# -- the beginning ----------------------------------------------------------------------------------------


class Register(Message, frozen=True, tag=True):
    """A worker is at its first step and trains this model."""

    model: ModelSpec


class CreateShards(Message, frozen=True, tag=True):
    """A server gets its shards. The publisher will send their weights.

    Over shared memory, the descriptor of the weights' memory comes with this message and with `Started`.

    Attributes:
        model: what is trained.
        shards: the slices that this server holds.
        sync: the sync model that the run begins with, or one for each shard, in the notation of the command line.
        workers: the workers that take part from the start, in ascending order.
        publisher: the worker whose weights the shards start with.
    """

    model: ModelSpec
    shards: tuple[ShardSlice, ...]
    sync: str
    workers: tuple[int, ...]
    publisher: int


class Ready(Message, frozen=True, tag=True):
    """A server knows its shards: workers may connect."""


class Started(Message, frozen=True, tag=True):
    """Training begins for a worker.

    Attributes:
        shards: the slices, in order.
        addresses: for each shard, where its server listens.
        publisher: the worker whose weights the shards start with.
        iteration: label of the worker's first iteration.
        sync: the sync model in force, in the notation of the command line; "" for the one that the run began with.
    """

    shards: tuple[ShardSlice, ...]
    addresses: tuple[str, ...]
    publisher: int
    iteration: int = 0
    sync: str = ""


class Refused(Message, frozen=True, tag=True):
    """A worker may not take part."""

    reason: str


class WorkerJoined(Message, frozen=True, tag=True):
    """A worker joins a run in progress: see the event."""

    worker: int
    iteration: int
    count: int | None
    superstep: int
    change: int


class InitialState(Message, frozen=True, tag=True):
    """Payload: the optimizer state of a shard (safetensors), before its weights. Sent by the publisher on
    resuming."""

    shard: Number


class InitialWeights(Message, frozen=True, tag=True):
    """Payload: the first weights of a shard and, for shard 0, the other tensors of the model. Sent by the
    publisher."""

    shard: Number


# -- an iteration -----------------------------------------------------------------------------------------


class Stage(Message, frozen=True, tag=True):
    """Part of the gradient that is being computed, ahead of its commit. Payload: the pieces, in order.

    It has no effect until the commit. If a piece is sent twice, the later one counts.
    """

    shard: Number
    pieces: tuple[Number, ...]


class Content(msgspec.Struct, frozen=True, array_like=True):
    """What a push brings to one shard, besides the protocol.

    Attributes:
        present: for each parameter, 1 if it had a gradient, 0 if not.
        groups: msgpack of the groups' hyper-parameters.
        pieces: the pieces of the gradient that are in the payload.
        buffers: for shard 0, the indices of the buffers that have changed and follow in the payload.
    """

    present: bytes
    groups: bytes
    pieces: tuple[Number, ...] = ()
    buffers: tuple[Number, ...] = ()


class Commit(Message, frozen=True, tag=True):
    """A worker's finished iteration for one shard: a push, and usually the pull that follows it.

    Payload: the pieces of the gradient that were not staged (none over shared memory, where it lies already), then
    the buffers.

    Attributes:
        shard: index of the shard.
        iteration: label of the iteration.
        content: what the push brings; None in virtual time.
        empty: True if the gradient was left out; the payload then contains no gradient.
        stop: set if this is the worker's last push before the barrier of its superstep.
        change: set if this is the worker's last push before the sync model changes.
        significance: |g| / |w| over all parameters, if the sync model needs it.
        progress: the round that the push is for, if a shard has told the worker to go on from a later one.
        pulls: False if the pull comes later, in a `PullRequested`.
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
        """The pieces of the gradient that are in the payload."""
        return self.content.pieces if self.content is not None else ()


class Committed(Message, frozen=True, tag=True):
    """A shard has received a push whose pull comes later."""

    shard: int
    iteration: int


class AllCommitted(Message, frozen=True, tag=True):
    """Without overlap: every shard has received a worker's push of this iteration."""

    iteration: Number


class PullAllowed(Message, frozen=True, tag=True):
    """Without overlap: every shard has received the push of every worker, so the worker may pull."""

    iteration: int


class PullRequested(Message, frozen=True, tag=True):
    """The pull that a commit left out."""

    shard: Number
    iteration: Number


class PullRepeated(Message, frozen=True, tag=True):
    """A worker has aborted its computation of `iteration` and needs the weights to restart it."""

    shard: Number
    iteration: Number


class Answer(Message, frozen=True, tag=True):
    """A pull is answered. Payload: the slice of the weights (not over shared memory).

    Attributes:
        shard: index of the shard.
        iteration: label of the iteration that the worker has pushed; -1 for the first weights.
        version: version of the weights.
        v_train: set if the worker's push came too late for its round; it goes on from this one.
        in_place: True if the worker is to read the weights where the servers keep them, until its next commit.
    """

    shard: int
    iteration: int
    version: int
    v_train: int | None = None
    in_place: bool = False


class IterationFinished(Message, frozen=True, tag=True):
    """A worker has pushed an iteration to all shards. Sent if the sync model has a part at the coordinator.

    Attributes:
        iteration: label of the iteration.
        superstep: set if the push was the worker's last one before the barrier of this superstep.
        change: set if the push was the worker's last one before this change.
    """

    iteration: Number
    superstep: Number | None = None
    change: Number | None = None


class IterationStarted(Message, frozen=True, tag=True):
    """A worker has its weights and computes this iteration. Sent if the sync model needs it, and after a change."""

    iteration: Number


class PlanPublished(Message, frozen=True, tag=True):
    """The part of a plan that concerns one worker: stop with the first push at or past `iteration`."""

    stop: Stop
    iteration: int


class RestartOrdered(Message, frozen=True, tag=True):
    """A worker must abort its computation of this iteration, pull and restart it, unless it has pushed it."""

    iteration: int


class SyncRequested(Message, frozen=True, tag=True):
    """A worker has reached a point at which the sync model is to change: see the event."""

    source: Literal["schedule", "script"]
    number: Number
    sync: str


class ChangePublished(Message, frozen=True, tag=True):
    """A worker must flag its next push with this change. Plans made before are void."""

    change: Change


class FaultReported(Message, frozen=True, tag=True):
    """A user's condition has failed at a shard, which goes on with `sync`."""

    shard: int
    reason: str
    traceback: str
    sync: str


# -- reading ----------------------------------------------------------------------------------------------


class FetchState(Message, frozen=True, tag=True):
    """Request the optimizer state of a shard."""

    shard: Number


class State(Message, frozen=True, tag=True):
    """Payload: the optimizer state of a shard (safetensors)."""

    shard: int


class FetchSnapshot(Message, frozen=True, tag=True):
    """Request the weights of a shard as they are. Sent by readers, and by the coordinator at the end of a run."""

    shard: Number


class Snapshot(Message, frozen=True, tag=True):
    """Payload: the weights of a shard at one version and, for shard 0, the other tensors of the model, pooled."""

    shard: int
    version: int


class ShardWaits(msgspec.Struct, frozen=True):
    """Which workers wait at one shard.

    Attributes:
        shard: index of the shard.
        sync: the sync model in force there.
        pulls: (worker, iteration) of each delayed pull, in worker order.
        reasons: for each of them, what it waits for.
    """

    shard: int
    sync: str
    pulls: tuple[tuple[int, int], ...]
    reasons: tuple[str, ...]


class FetchWaits(Message, frozen=True, tag=True):
    """The coordinator asks a server which workers wait there. A server that does not answer hangs."""


class Waits(Message, frozen=True, tag=True):
    """Which workers wait at each shard of a server.

    Attributes:
        shards: one entry per shard.
        timers: True if a timer is set, which may release a worker.
    """

    shards: tuple[ShardWaits, ...]
    timers: bool


# -- status, and the end ----------------------------------------------------------------------------------


class Status(Message, frozen=True, tag=True):
    """What a worker is doing, for the display."""

    iteration: Number
    loss: float | None
    state: Literal["computing", "waiting", "pulling"]


class Warned(Message, frozen=True, tag=True):
    """Something has gone wrong that does not end the run, such as a log that cannot be written."""

    words: str


class WorkerFinished(Message, frozen=True, tag=True):
    """A worker has done its work and leaves."""


class WorkerLost(Message, frozen=True, tag=True):
    """A worker was lost. Its connection may still be open: a child process that it has forked may hold it."""

    worker: int


class Failed(Message, frozen=True, tag=True):
    """A worker's script, or a server, has raised.

    Attributes:
        reason: the error in one line.
        traceback: traceback of the error.
        consequence: True if the error only says that another process is gone: that process is then the cause.
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
    | FetchState
    | FetchSnapshot
    | WorkerFinished
    | Bell
)
FromServer = Committed | Answer | State | Snapshot | Bell

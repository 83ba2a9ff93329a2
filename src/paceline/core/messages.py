"""Every message that travels between two processes, as a value.

A message is a small MessagePack header; bulk data (slices of weights and gradients) follows it raw. Nothing is
ever unpickled from a connection, and each side decodes only what its peer may send it: see the unions at the
end. Indices and counts of peers that are not trusted with a host's life are `Number`s.

    worker -> coordinator   Hello, Register, Notify, Begun, AllCommitted, RequestSync, Status, Warned, Finished,
                            Failed
    coordinator -> worker   Started, Refused, Stopping, Restart, Changing, MayPull
    server -> coordinator   Hello, Ready, Faulted, Warned, Failed, Snapshot, Waits
    coordinator -> server   CreateShards, WorkerGone, FetchSnapshot, FetchWaits, Shutdown
    worker -> server        Hello, InitialState, InitialWeights, Stage, Commit, Pull, PullAgain, FetchState, Finished
    server -> worker        Committed, Answer, State
    reader -> server        Hello, FetchSnapshot, FetchState
    server -> reader        Snapshot, State
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ..sync import AnySyncModel
from ..sync.events import Change, Number, Stop
from .layout import ShardSlice
from .model_spec import ModelSpec

__all__ = [
    "AllCommitted",
    "Answer",
    "Begun",
    "Bell",
    "Changing",
    "Commit",
    "Committed",
    "CreateShards",
    "Failed",
    "Faulted",
    "FetchSnapshot",
    "FetchState",
    "FetchWaits",
    "Finished",
    "FromCoordinatorToServer",
    "FromCoordinatorToWorker",
    "FromPeerToCoordinator",
    "FromPeerToServer",
    "FromServer",
    "Hello",
    "InitialState",
    "InitialWeights",
    "MayPull",
    "Message",
    "Notify",
    "Pull",
    "PullAgain",
    "Ready",
    "Refused",
    "Register",
    "RequestSync",
    "Restart",
    "ShardWaits",
    "Shutdown",
    "Snapshot",
    "Stage",
    "Started",
    "State",
    "Status",
    "Stopping",
    "Waits",
    "Warned",
    "WorkerGone",
]


class Message(msgspec.Struct, frozen=True, tag=True):
    """A message."""


class Bell(Message, frozen=True, tag=True):
    """There is something in the ring. For the peer that sleeps; otherwise without a meaning."""


class Hello(Message, frozen=True, tag=True):
    """The first message of every connection; without the job's token nothing else is read.

    Attributes:
        token: the job's.
        role: who is calling.
        index: the worker's or server's number; 0 for a reader.
        address: where a server listens; "" for the others.
        memory_bytes: size of the shared memory whose descriptor comes with this message; 0 for none.
        channels: how many pairs of rings that memory has.
        channel: which of them is for this connection; -1 for none.
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


class Register(Message, frozen=True, tag=True):
    """A worker is at its first step, with this model."""

    model: ModelSpec


class Started(Message, frozen=True, tag=True):
    """Training begins. Over shared memory the master's descriptor comes with this.

    Attributes:
        shards: the slices, in order.
        addresses: for each shard, where its server listens.
        publisher: the worker whose weights are everybody's.
    """

    shards: tuple[ShardSlice, ...]
    addresses: tuple[str, ...]
    publisher: int


class Refused(Message, frozen=True, tag=True):
    """A worker may not take part."""

    reason: str


class CreateShards(Message, frozen=True, tag=True):
    """A server gets its shards, whose weights the publisher will send. The master's descriptor as with `Started`.

    Attributes:
        model: what is trained.
        shards: the slices that this server holds.
        syncs: for each of them, the sync model that it begins with.
        workers: who takes part from the start, in ascending order.
        publisher: the worker whose weights these shards start with.
    """

    model: ModelSpec
    shards: tuple[ShardSlice, ...]
    syncs: tuple[AnySyncModel, ...]
    workers: tuple[int, ...]
    publisher: int


class Ready(Message, frozen=True, tag=True):
    """A server knows its shards: workers may call."""


class WorkerGone(Message, frozen=True, tag=True):
    """A worker was lost. Its connection may still be open: a child that it has forked may hold it."""

    worker: int


class Shutdown(Message, frozen=True, tag=True):
    """A server is to write its trace and exit."""


class InitialState(Message, frozen=True, tag=True):
    """Payload: a shard's optimizer state (safetensors), before its weights. Sent by the publisher on resuming."""

    shard: Number


class InitialWeights(Message, frozen=True, tag=True):
    """Payload: a shard's first weights and, for shard 0, the model's other tensors. Sent by the publisher."""

    shard: Number


class Stage(Message, frozen=True, tag=True):
    """Some of the gradient that is being computed, ahead of its commit. Payload: the pieces, in order.

    It counts for nothing until the commit. What is sent twice counts as it came last.
    """

    shard: Number
    pieces: tuple[Number, ...]


class Commit(Message, frozen=True, tag=True):
    """A worker's finished iteration for one shard: a push, and the pull that follows it.

    Payload: the pieces of the gradient that were not staged (none over shared memory, where it lies already), then
    the buffers.

    Attributes:
        shard: its index.
        iteration: the worker's, from 0.
        present: for each parameter, 1 if it had a gradient, 0 if not.
        groups: msgpack of the groups' hyper-parameters.
        pieces: those in the payload.
        empty: True if the iteration's gradient was left out; the payload has no gradient then.
        stop: set if this is the worker's last push before its superstep's barrier.
        change: set if it is the worker's last one before the sync model changes.
        significance: |g| / |w| over all parameters, if the sync model asks for it.
        progress: the round that it is for, if a shard has told the worker to go on from a later one.
        buffers: for shard 0, the indices of those buffers that have changed and follow in the payload.
        pulls: False if the pull comes later, see `Pull`.
    """

    shard: Number
    iteration: Number
    present: bytes
    groups: bytes
    pieces: tuple[Number, ...] = ()
    empty: bool = False
    stop: Stop | None = None
    change: Change | None = None
    significance: Annotated[float, msgspec.Meta(ge=0)] | None = None
    progress: Number | None = None
    buffers: tuple[Number, ...] = ()
    pulls: bool = True


class Committed(Message, frozen=True, tag=True):
    """A shard has taken a push whose pull comes later."""

    shard: int
    iteration: int


class Pull(Message, frozen=True, tag=True):
    """The pull that a commit left out."""

    shard: Number
    iteration: Number


class PullAgain(Message, frozen=True, tag=True):
    """A worker has dropped its computation of `iteration` and wants the weights to start it anew."""

    shard: Number
    iteration: Number


class Answer(Message, frozen=True, tag=True):
    """A pull is answered. Payload: the slice of the weights (not over shared memory).

    `v_train` is set if the worker came too late for its round, and is to go on from that one. `in_place` says that
    the weights are to be read where the servers keep them, until the next commit.
    """

    shard: int
    iteration: int
    version: int
    v_train: int | None = None
    in_place: bool = False


class FetchState(Message, frozen=True, tag=True):
    """Ask for a shard's optimizer state."""

    shard: Number


class State(Message, frozen=True, tag=True):
    """Payload: a shard's optimizer state (safetensors)."""

    shard: int


class FetchSnapshot(Message, frozen=True, tag=True):
    """A reader, or at the end of a run the coordinator, asks for a shard's weights as they are."""

    shard: Number


class Snapshot(Message, frozen=True, tag=True):
    """Payload: a shard's weights at one version and, for shard 0, the model's other tensors, pooled."""

    shard: int
    version: int


class ShardWaits(msgspec.Struct, frozen=True):
    """Who waits at one shard.

    Attributes:
        shard: its index.
        sync: the sync model in force there.
        pulls: (worker, iteration) of each delayed pull, in worker order.
        reasons: for each, what it waits for, in words.
    """

    shard: int
    sync: str
    pulls: tuple[tuple[int, int], ...]
    reasons: tuple[str, ...]


class FetchWaits(Message, frozen=True, tag=True):
    """The coordinator asks who waits for what at a server. A server that does not answer hangs."""


class Waits(Message, frozen=True, tag=True):
    """Who waits at each of a server's shards. `timers` says that one is set: something will happen by itself."""

    shards: tuple[ShardWaits, ...]
    timers: bool


class Notify(Message, frozen=True, tag=True):
    """A worker has pushed an iteration to all shards; sent for sync models that have a part at the coordinator.

    `superstep` and `change` are set if the push was the worker's last one before that.
    """

    iteration: Number
    superstep: Number | None = None
    change: Number | None = None


class AllCommitted(Message, frozen=True, tag=True):
    """Every shard has taken a worker's push of this iteration. Without overlap, for the coordinator."""

    iteration: Number


class MayPull(Message, frozen=True, tag=True):
    """Every shard has taken every worker's push of this iteration: without overlap, the word to pull."""

    iteration: int


class Begun(Message, frozen=True, tag=True):
    """A worker has its weights and computes this iteration. For sync models that ask for it, and after a change."""

    iteration: Number


class Restart(Message, frozen=True, tag=True):
    """A worker is to drop its computation of this iteration, pull, and start it anew; unless it has pushed it."""

    iteration: int


class RequestSync(Message, frozen=True, tag=True):
    """A worker has reached a point at which the sync model is to change: see `SyncRequested`."""

    source: Literal["schedule", "script"]
    number: Number
    sync: str


class Changing(Message, frozen=True, tag=True):
    """A worker is to flag its next push with this change. Plans made before are void."""

    change: Change


class Faulted(Message, frozen=True, tag=True):
    """A user's condition has failed at a shard, which goes on with `sync`."""

    shard: int
    reason: str
    traceback: str
    sync: str


class Stopping(Message, frozen=True, tag=True):
    """A plan, as far as one worker is concerned: stop with the first push at or past `iteration`."""

    stop: Stop
    iteration: int


class Status(Message, frozen=True, tag=True):
    """For the eyes of the user: what a worker is doing."""

    iteration: Number
    loss: float | None
    state: Literal["computing", "waiting", "pulling"]


class Finished(Message, frozen=True, tag=True):
    """A worker has done its work and leaves."""


class Failed(Message, frozen=True, tag=True):
    """A worker's script, or a server, has raised.

    Attributes:
        reason: the error in one line.
        traceback: of it.
        consequence: True if it only says that another process is gone: then that one is the cause.
    """

    reason: str
    traceback: str
    consequence: bool = False


class Warned(Message, frozen=True, tag=True):
    """Something has gone wrong that a run can do without, in words, such as a log that cannot be written."""

    words: str


FromPeerToCoordinator = (
    Hello
    | Ready
    | Register
    | Notify
    | Begun
    | AllCommitted
    | RequestSync
    | Faulted
    | Status
    | Warned
    | Finished
    | Failed
    | Snapshot
    | Waits
)
FromCoordinatorToWorker = Started | Refused | Stopping | Restart | Changing | MayPull
FromCoordinatorToServer = CreateShards | WorkerGone | FetchSnapshot | FetchWaits | Shutdown
FromPeerToServer = (
    Hello
    | InitialState
    | InitialWeights
    | Stage
    | Commit
    | Pull
    | PullAgain
    | FetchState
    | FetchSnapshot
    | Finished
    | Bell
)
FromServer = Committed | Answer | State | Snapshot | Bell

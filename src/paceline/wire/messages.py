"""Every message that travels between two processes, as a value.

A message is a small MessagePack header; bulk data (slices of weights and gradients) follows it raw. Nothing is
ever unpickled from a connection, and each side decodes only what its peer may send it: see the unions at the
end.

    worker -> coordinator   Hello, Register, Notify, Status, Finished, Failed
    coordinator -> worker   Started, Refused, Stopping
    server -> coordinator   Hello, Ready
    coordinator -> server   CreateShards, WorkerGone, Shutdown
    worker -> server        Hello, InitialState, InitialWeights, Commit, FetchState, Finished
    server -> worker        Answer, State
    reader -> server        Hello, FetchSnapshot, FetchState
    server -> reader        Snapshot, State
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..layout import Layout, ShardSlice
from ..optimizers import OptimizerSpec
from ..sync import AnySyncModel
from ..sync.events import Stop

__all__ = [
    "Answer",
    "BufferSpec",
    "Commit",
    "CreateShards",
    "Failed",
    "FetchSnapshot",
    "FetchState",
    "Finished",
    "FromCoordinatorToServer",
    "FromCoordinatorToWorker",
    "FromPeerToCoordinator",
    "FromPeerToServer",
    "FromServer",
    "Hello",
    "InitialState",
    "InitialWeights",
    "Message",
    "ModelSpec",
    "Notify",
    "Ready",
    "Refused",
    "Register",
    "Shutdown",
    "Snapshot",
    "Started",
    "State",
    "Status",
    "Stopping",
    "WorkerGone",
]


class Message(msgspec.Struct, frozen=True, tag=True):
    """A message."""


class BufferSpec(msgspec.Struct, frozen=True):
    """A tensor of the model's `state_dict` that the optimizer does not train.

    Attributes:
        name: its name in the `state_dict`.
        shape: its shape.
        dtype: torch's name of its dtype.
        fixed: True for one that training does not change (a parameter outside the optimizer).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    fixed: bool

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


class ModelSpec(msgspec.Struct, frozen=True):
    """What a worker is about to train. All workers of a job must give the same."""

    layout: Layout
    optimizer: OptimizerSpec
    buffers: tuple[BufferSpec, ...]


class Hello(Message, frozen=True, tag=True):
    """The first message of every connection; without the job's token nothing else is read.

    Attributes:
        token: the job's.
        role: who is calling.
        index: the worker's or server's number; 0 for a reader.
        address: where a server listens; "" for the others.
        memory_bytes: size of the shared memory whose descriptor comes with this message; 0 for none.
    """

    token: str
    role: Literal["worker", "server", "reader"]
    index: int
    address: str = ""
    memory_bytes: int = 0


class Register(Message, frozen=True, tag=True):
    """A worker is at its first step, with this model."""

    model: ModelSpec


class Started(Message, frozen=True, tag=True):
    """Training begins.

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
    """A server gets its shards, whose weights the publisher will send.

    Attributes:
        model: what is trained.
        shards: the slices that this server holds.
        sync: the sync model.
        workers: who takes part from the start, in ascending order.
        publisher: the worker whose weights these shards start with.
    """

    model: ModelSpec
    shards: tuple[ShardSlice, ...]
    sync: AnySyncModel
    workers: tuple[int, ...]
    publisher: int


class Ready(Message, frozen=True, tag=True):
    """A server knows its shards: workers may call."""


class WorkerGone(Message, frozen=True, tag=True):
    """A worker was lost. Matters to a server that it had not called yet; the others have seen it go."""

    worker: int


class Shutdown(Message, frozen=True, tag=True):
    """A server is to write its trace and exit."""


class InitialState(Message, frozen=True, tag=True):
    """Payload: a shard's optimizer state (safetensors), before its weights. Sent by the publisher on resuming."""

    shard: int


class InitialWeights(Message, frozen=True, tag=True):
    """Payload: a shard's first weights and, for shard 0, the model's other tensors. Sent by the publisher."""

    shard: int


class Commit(Message, frozen=True, tag=True):
    """A worker's finished iteration for one shard: a push, and the pull that follows it.

    Payload: the slice of the gradient (not over shared memory, where it lies already), then the buffers.

    Attributes:
        shard: its index.
        iteration: the worker's, from 0.
        present: for each parameter, 1 if it had a gradient, 0 if not.
        groups: msgpack of the groups' hyper-parameters.
        empty: True if the iteration's gradient was left out; the payload has no gradient then.
        stop: set if this is the worker's last push before its superstep's barrier.
        significance: |g| / |w| over all parameters, if the sync model asks for it.
        buffers: for shard 0, the indices of those buffers that have changed and follow in the payload.
    """

    shard: int
    iteration: int
    present: bytes
    groups: bytes
    empty: bool = False
    stop: Stop | None = None
    significance: float | None = None
    buffers: tuple[int, ...] = ()


class Answer(Message, frozen=True, tag=True):
    """A pull is answered. Payload: the slice of the weights (not over shared memory)."""

    shard: int
    iteration: int
    version: int


class FetchState(Message, frozen=True, tag=True):
    """Ask for a shard's optimizer state."""

    shard: int


class State(Message, frozen=True, tag=True):
    """Payload: a shard's optimizer state (safetensors)."""

    shard: int


class FetchSnapshot(Message, frozen=True, tag=True):
    """A reader asks for a shard's weights as they are."""

    shard: int


class Snapshot(Message, frozen=True, tag=True):
    """Payload: a shard's weights at one version and, for shard 0, the model's other tensors, pooled."""

    shard: int
    version: int


class Notify(Message, frozen=True, tag=True):
    """A worker has pushed an iteration to all shards; sent for sync models that plan at the coordinator."""

    iteration: int
    superstep: int | None = None


class Stopping(Message, frozen=True, tag=True):
    """A plan, as far as one worker is concerned: stop with the first push at or past `iteration`."""

    stop: Stop
    iteration: int


class Status(Message, frozen=True, tag=True):
    """For the eyes of the user: what a worker is doing."""

    iteration: int
    loss: float | None
    state: Literal["computing", "waiting", "pulling"]


class Finished(Message, frozen=True, tag=True):
    """A worker has done its work and leaves."""


class Failed(Message, frozen=True, tag=True):
    """A worker's script raised."""

    reason: str
    traceback: str


FromPeerToCoordinator = Hello | Ready | Register | Notify | Status | Finished | Failed
FromCoordinatorToWorker = Started | Refused | Stopping
FromCoordinatorToServer = CreateShards | WorkerGone | Shutdown
FromPeerToServer = Hello | InitialState | InitialWeights | Commit | FetchState | FetchSnapshot | Finished
FromServer = Answer | State | Snapshot

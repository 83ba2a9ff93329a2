"""The messages between the processes of a run.

On a connection, a message is a small MessagePack header, followed by its payload: raw binary data, such as slices of
weights and gradients. Each side decodes only the messages that its peer may send; see the unions at the end of this
module. In virtual time, the same objects are passed without encoding. Indices and counts that a worker or a reader
sends have the type `Number`, which limits their range.

A message that becomes an event at its receiver has the same name as the event. The exception is `Commit`: it becomes
a push event and, if it includes a pull, a pull event.

    worker -> coordinator   Hello, Register, IterationFinished, IterationStarted, AllCommitted, SyncRequested,
                            DataRequested, StopRequested, EntryRequested, EpochReached, GradientHashed, Contributed,
                            Status, Warned, WorkerFinished, Failed
    coordinator -> worker   Started, Refused, TakenOut, PlanPublished, RestartOrdered, ChangePublished,
                            PullAllowed, DataGranted, TrainingStopped, LoopEntered, StatesDecided, Combined,
                            StandInAllowed, Paused, Resumed, ModelExtended
    server -> coordinator   Hello, Ready, ExtensionReady, JoinOffered, WorkerWelcomed, PushesReported, MeanMeasured,
                            MeanMissing, FaultReported, Warned, Failed, Snapshot, Waits, TracePart
    agent -> coordinator    Hello, MachineJoined, MachineLeaving, ProcessEnded, ServerEnded, Heartbeat
    coordinator -> agent    MachineAdmitted, Refused, KillOrdered, TakenOut, RunEnded, HeartbeatAnswered
    observer -> coordinator Hello, FetchStatus
    coordinator -> observer StatusReported
    coordinator -> server   CreateShards, ExtendShards, ModelExtended, JoinProposed, WorkerJoined, WorkerLost,
                            LossSettled, MeanClipped, MeanAwaited, FetchSnapshot, FetchWaits, Shutdown
    worker -> server        Hello, InitialState, InitialWeights, Stage, Commit, PullRequested, PullRepeated,
                            FetchOptimizerState, FetchBuffers, FetchInitialBuffers, KeepStates, WorkerFinished
    server -> worker        MemoryAttached, Committed, Answer, InitialWeightsRequested, OptimizerState,
                            PooledBuffers, InitialBuffers
    reader -> server        Hello, FetchSnapshot, FetchOptimizerState, FetchStates
    server -> reader        Snapshot, OptimizerState, KeptStates
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ..sync.events import Change, Clip, Edit, Number, Stop
from .layout import ShardSlice
from .lease import Lease, Order
from .model_spec import ModelSpec

__all__ = [
    "MOST_LOADERS",
    "MOST_PROCESSES",
    "MOST_WORDS",
    "AllCommitted",
    "Answer",
    "Bell",
    "ChangePublished",
    "ClockOffset",
    "Combined",
    "Commit",
    "Committed",
    "ConnectionTraffic",
    "Content",
    "Contributed",
    "CreateShards",
    "DataGranted",
    "DataRequested",
    "EntryRequested",
    "EpochReached",
    "ExtendShards",
    "ExtensionReady",
    "Failed",
    "FaultReported",
    "FetchBuffers",
    "FetchInitialBuffers",
    "FetchOptimizerState",
    "FetchSnapshot",
    "FetchStates",
    "FetchWaits",
    "FromCoordinatorToAgent",
    "FromCoordinatorToServer",
    "FromCoordinatorToWorker",
    "FromPeerToCoordinator",
    "FromPeerToServer",
    "FromServer",
    "GradientHashed",
    "Heartbeat",
    "HeartbeatAnswered",
    "Hello",
    "InitialBuffers",
    "InitialState",
    "InitialWeights",
    "InitialWeightsRequested",
    "IterationFinished",
    "IterationStarted",
    "JoinOffered",
    "JoinProposed",
    "KeepStates",
    "KeptStates",
    "KillOrdered",
    "LoopEntered",
    "LoopPosition",
    "LossSettled",
    "MachineAdmitted",
    "MachineJoined",
    "MachineLeaving",
    "MeanAwaited",
    "MeanClipped",
    "MeanMeasured",
    "MeanMissing",
    "MemoryAttached",
    "MemoryPlace",
    "Message",
    "ModelExtended",
    "OptimizerState",
    "Paused",
    "PlanPublished",
    "PooledBuffers",
    "ProcessEnded",
    "ProcessState",
    "PullAllowed",
    "PullRepeated",
    "PullRequested",
    "PushesReported",
    "Ready",
    "Refused",
    "Register",
    "RestartOrdered",
    "Resumed",
    "RunEnded",
    "ServerEnded",
    "ShardWaits",
    "Shutdown",
    "Snapshot",
    "Stage",
    "StandInAllowed",
    "Started",
    "StatesDecided",
    "Status",
    "StatusReported",
    "StoodIn",
    "StopRequested",
    "SyncRequested",
    "TakenOut",
    "TracePart",
    "TrainingStopped",
    "Waits",
    "Warned",
    "WorkerFinished",
    "WorkerJoined",
    "WorkerLost",
    "WorkerWelcomed",
]


MOST_LOADERS = 1024
"""Maximum number of loaders that a script may distribute at the same time."""

MOST_WORDS = 65_536
"""Maximum length of the description of a barrier or a reduction."""

MOST_STATES_BYTES = 2**30
"""Maximum size of the states of the objects that a script tracks."""

MOST_TIMES = 64
"""Maximum number of measured times in a request for data."""

MOST_PROCESSES = 4096
"""Maximum number of processes on a machine."""

BatchTaken = tuple[
    Annotated[int, msgspec.Meta(ge=1, le=2**53)], Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
]
"""The number of positions in an iteration, and the time in seconds that the worker took for it."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """The base class of all messages."""


class Bell(Message, frozen=True, tag=True):
    """Wakes a peer that is sleeping while its ring buffer contains data. The message has no other effect."""


class MemoryPlace(msgspec.Struct, frozen=True):
    """Where a process on the same machine finds the shared memory of a worker.

    Attributes:
        process: id of the worker's process.
        descriptor: file descriptor of the memory in this process.
        name: name of the memory. It contains 128 random bits, so no other memory has it, and only who was told it
            can name the memory. Names of any other form are refused: a member could guess them, and so let a server
            map the memory of another program.
    """

    process: Number
    descriptor: Number
    name: Annotated[str, msgspec.Meta(pattern=r"\Apaceline-[0-9a-f]{32}\Z")]


class Hello(Message, frozen=True, tag=True):
    """The first message of every connection. If the token is wrong, the receiver does not read any further messages.

    Attributes:
        token: the secret token of the run.
        role: role of the caller.
        index: index of the worker or server; 0 for other roles.
        address: address on which a server listens; "" for other roles.
        memory_bytes: size of the shared memory whose file descriptor is attached to this message; 0 if there is none.
        channels: number of ring-buffer pairs in the shared memory.
        channel: index of the ring-buffer pair for this connection; -1 if the connection uses no ring buffers.
        follows: True if the caller is a worker that can read the weights directly from the servers' memory.
        extension: number of the extension for which a worker has memory; 0 if the model has not been extended.
        incarnation: how often the index of the worker has been used before.
        place: over TCP, where the server finds the shared memory of a worker if both run on the same machine; None if
            they do not.
    """

    token: str
    role: Literal["worker", "server", "reader", "agent", "observer"]
    index: Number
    address: str = ""
    memory_bytes: Number = 0
    channels: Number = 0
    channel: int = -1
    follows: bool = False
    extension: Number = 0
    incarnation: Number = 0
    place: MemoryPlace | None = None

    def __repr__(self) -> str:
        """Return a description without the token, which must not appear in a log."""
        return f"Hello(role={self.role!r}, index={self.index})"


class MemoryAttached(Message, frozen=True, tag=True):
    """The server has found the worker's shared memory, and uses it instead of payloads for all pushes and pulls.

    The server sends this message before the first answer. If it has not found the memory, it sends nothing.

    Attributes:
        shards: the shards of the server.
    """

    shards: tuple[int, ...]


# -- machines ---------------------------------------------------------------------------------------------


class MachineJoined(Message, frozen=True, tag=True):
    """A machine offers to run workers and servers. Its *agent* is the process that sends this and starts them.

    Attributes:
        version: version of Paceline on the machine.
        workers: number of workers that the machine can run.
        wanted: the indices that these workers should have if they are free.
        servers: number of servers that the machine brings.
    """

    version: Annotated[str, msgspec.Meta(max_length=64)]
    workers: Number
    wanted: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MOST_PROCESSES)] = ()
    servers: Number = 0


class MachineAdmitted(Message, frozen=True, tag=True):
    """A machine may start the workers and servers that it has offered.

    Attributes:
        workers: the index of each of its workers, and how often this index has been used before.
        job: the configuration of the run, encoded by `paceline.runtime.job`.
        now_ticks: the time of the run at which this message was sent.
        machine: index of the machine, by which the records of its clock are named.
        servers: the indices of its servers.
    """

    workers: dict[int, int]
    job: bytes
    now_ticks: int
    machine: int
    servers: tuple[int, ...] = ()


class MachineLeaving(Message, frozen=True, tag=True):
    """A machine that has brought servers was asked to leave.

    A run in progress ends, because it cannot continue without them, and its weights are saved. The servers stay until
    then.
    """


class ProcessEnded(Message, frozen=True, tag=True):
    """The process of a worker on the agent's machine has ended.

    Attributes:
        worker: index of the worker.
        how: a phrase that says how the process ended.
        crashed: True if the process has crashed.
    """

    worker: Number
    how: Annotated[str, msgspec.Meta(max_length=MOST_WORDS)]
    crashed: bool


class ServerEnded(Message, frozen=True, tag=True):
    """The process of a server on the agent's machine has ended.

    Attributes:
        server: index of the server.
        how: a phrase that says how the process ended.
        output: the last lines of its output; "" if it has ended as it should.
    """

    server: Number
    how: Annotated[str, msgspec.Meta(max_length=MOST_WORDS)]
    output: Annotated[str, msgspec.Meta(max_length=MOST_WORDS)] = ""


class ProcessState(msgspec.Struct, frozen=True, array_like=True):
    """The state of a process on an agent's machine.

    Attributes:
        role: role of the process.
        index: index of the worker or server.
        state: "running", "stopped" by a signal, "traced" (a debugger has stopped it), or "gone".
        incarnation: how often the worker's index had been used before this process was started.
    """

    role: Literal["worker", "server"]
    index: Number
    state: Literal["running", "stopped", "traced", "gone"]
    incarnation: Number = 0


Ticks = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
"""A time or a difference of times on the clock of some machine."""


class ClockOffset(msgspec.Struct, frozen=True):
    """The offset of the coordinator's clock to a machine's clock. See `core.clock_offset`.

    Attributes:
        at_ticks: time on the machine's clock at which the offset holds.
        offset_ticks: estimate of the time on the coordinator's clock minus the time on the machine's clock.
        bound_ticks: maximum error of the estimate.
        drift_ppb: estimated change of the offset, in nanoseconds per second; None if it is not known yet.
    """

    at_ticks: Ticks
    offset_ticks: Ticks
    bound_ticks: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    drift_ppb: Ticks | None = None


class Heartbeat(Message, frozen=True, tag=True):
    """An agent reports that its machine is alive, at regular intervals and when the state of a process changes.

    Attributes:
        sent_ticks: time on the machine's clock at which the message was sent.
        states: the states of the processes that the agent has started.
        clock: the latest estimate of the offset between the two clocks; None if there is none yet.
    """

    sent_ticks: Ticks
    states: Annotated[tuple[ProcessState, ...], msgspec.Meta(max_length=MOST_PROCESSES)]
    clock: ClockOffset | None = None


class HeartbeatAnswered(Message, frozen=True, tag=True):
    """The answer to a heartbeat, from which the agent estimates the offset between the two clocks.

    Attributes:
        sent_ticks: `sent_ticks` of the heartbeat.
        received_ticks: time on the coordinator's clock at which the heartbeat arrived.
        answered_ticks: time on the coordinator's clock at which this message was sent.
    """

    sent_ticks: Ticks
    received_ticks: Ticks
    answered_ticks: Ticks


class FetchStatus(Message, frozen=True, tag=True):
    """An observer asks the coordinator for the state of the job, which is sent as a `StatusReported`."""


class StatusReported(Message, frozen=True, tag=True):
    """The answer to a `FetchStatus`.

    Attributes:
        status: the state of the job, a `JobStatus` in MessagePack.
    """

    status: bytes


class KillOrdered(Message, frozen=True, tag=True):
    """An agent must kill the process of a worker or server, because of the reason `why`."""

    role: Literal["worker", "server"]
    index: int
    why: str


class TakenOut(Message, frozen=True, tag=True):
    """A worker is no longer part of the run, although its process has not ended.

    This message is sent to the worker, which reads it when it runs again, and to its agent. Nothing that this
    incarnation of the worker sends from now on is used.

    Attributes:
        worker: index of the worker.
        incarnation: how often this index had been used before.
        reason: why the coordinator no longer counts on the worker.
    """

    worker: int
    incarnation: int
    reason: str


class RunEnded(Message, frozen=True, tag=True):
    """The run is over, so the workers that are left must end.

    Attributes:
        failure: the reason why the run has failed or was interrupted; "" if it has finished.
    """

    failure: str


# -- start of a run ---------------------------------------------------------------------------------------


class Register(Message, frozen=True, tag=True):
    """A worker is about to compute its first gradient, and will train this model.

    Attributes:
        model: the model to train.
        samples: number of samples in the worker's first push; None if it is unknown.
    """

    model: ModelSpec
    samples: Number | None = None


class CreateShards(Message, frozen=True, tag=True):
    """A server must create its shards. The initializer will send the initial weights of the shards.

    With shared memory, the file descriptor of the memory that holds the weights is attached to this message and to
    `Started`.

    Attributes:
        model: the model to train.
        shards: the slices that this server holds.
        sync: the first sync model, or one model per shard, in the notation of the command line.
        workers: the workers that take part from the start, in ascending order.
        initializer: the worker that sends the initial weights.
        usual_samples: number of samples in the first push of the initializer; None if it is unknown.
        incarnations: (worker, its incarnation) for those of the workers whose index has been used before.
    """

    model: ModelSpec
    shards: tuple[ShardSlice, ...]
    sync: str
    workers: tuple[int, ...]
    initializer: int
    usual_samples: int | None = None
    incarnations: tuple[tuple[int, int], ...] = ()


class Ready(Message, frozen=True, tag=True):
    """A server has received its shards, so workers may connect to the server."""


class Started(Message, frozen=True, tag=True):
    """A worker may connect to the servers and begin training.

    Attributes:
        shards: the slices of all shards, in order.
        addresses: for each shard, the address on which its server listens.
        initializer: the worker that sends the initial weights; -1 if they have been sent already.
        iteration: label of the worker's first iteration.
        sync: the sync model in force, in the notation of the command line; "" for the first model of the run.
        extension: number of the extension of the model in force; 0 if the model has not been extended.
    """

    shards: tuple[ShardSlice, ...]
    addresses: tuple[str, ...]
    initializer: int
    iteration: int = 0
    sync: str = ""
    extension: int = 0


class Refused(Message, frozen=True, tag=True):
    """The coordinator refuses a worker, which then cannot take part in the run."""

    reason: str


class JoinProposed(Message, frozen=True, tag=True):
    """A worker is about to join a run in progress, so each server must send a `JoinOffered`. See `core.joining`.

    Attributes:
        worker: index of the worker.
        incarnation: how often this index has been used before.
        left: the workers that have left the run. The server answers when it has noticed each of these departures.
    """

    worker: int
    incarnation: int
    left: tuple[int, ...] = ()


class JoinOffered(Message, frozen=True, tag=True):
    """A server says with which label and c_p a worker could join at its shards now.

    It is the answer to `JoinProposed` and, if a shard has already gone beyond the c_p in a `WorkerJoined`, to that
    message.

    Attributes:
        worker: index of the worker.
        incarnation: how often this index has been used before.
        iteration: the smallest label that the worker may use for its first iteration.
        count: the least c_p with which the worker may join.
    """

    worker: int
    incarnation: int
    iteration: int
    count: int


class WorkerJoined(Message, frozen=True, tag=True):
    """A worker joins a run in progress. See the event of the same name.

    If the worker has already joined with a smaller `count`, which another server has refused, it joins again.
    """

    worker: int
    incarnation: int
    iteration: int
    count: int
    superstep: int


class WorkerWelcomed(Message, frozen=True, tag=True):
    """A server acknowledges the `WorkerJoined` message with this `count`: the worker has joined at all its shards."""

    worker: int
    incarnation: int
    count: int


class InitialState(Message, frozen=True, tag=True):
    """The optimizer state of a shard. When a run is resumed, the initializer sends this message before the weights.

    The payload is in safetensors format. If the model is being extended, it is the state of the new parameters.
    """

    shard: Number


class InitialWeights(Message, frozen=True, tag=True):
    """The initial weights of a shard, sent by the initializer.

    The payload contains the weights and, for shard 0, the other tensors of the model. If the model is being extended,
    it contains only those that are new.
    """

    shard: Number


# -- extension of the model --------------------------------------------------------------------------------


class ExtendShards(Message, frozen=True, tag=True):
    """A server must prepare to extend its shards: the script has added parameters. See `core.extension`.

    With shared memory, the file descriptor of the memory for all weights of the extended model is attached to this
    message and to the `ModelExtended` messages to the workers. The message is repeated if the initializer is lost.

    Attributes:
        model: the extended model.
        shards: the slices that this server will hold.
        initializer: the worker that sends the initial weights of the new parameters.
        number: number of the extension. The extensions of a run are numbered from 1.
    """

    model: ModelSpec
    shards: tuple[ShardSlice, ...]
    initializer: int
    number: int


class InitialWeightsRequested(Message, frozen=True, tag=True):
    """The initializer must send the initial weights of the new parameters to a shard."""

    shard: int


class ExtensionReady(Message, frozen=True, tag=True):
    """A server has received the initial weights of the new parameters from the initializer, for all of its shards.

    Attributes:
        initializer: the worker that has sent the initial weights.
        number: number of the extension.
    """

    initializer: int
    number: int


class ModelExtended(Message, frozen=True, tag=True):
    """All servers are ready, so the extension takes effect, and the workers connect to the servers again.

    A server may receive the greeting of a worker before this message.

    Attributes:
        shards: the slices of all shards, in order.
        number: number of the extension.
    """

    shards: tuple[ShardSlice, ...]
    number: int


# -- an iteration -----------------------------------------------------------------------------------------


class Stage(Message, frozen=True, tag=True):
    """Pieces of a gradient, sent before the commit while other pieces are still being computed.

    The payload contains the pieces, in order. The pieces take effect only with the commit. If a piece is sent twice,
    the later copy is used.
    """

    shard: Number
    pieces: tuple[Number, ...]


class Content(msgspec.Struct, frozen=True, array_like=True):
    """The content of a push for one shard.

    Attributes:
        present: for each parameter, 1 if the parameter has a gradient, and 0 otherwise.
        groups: the hyper-parameters of the parameter groups, encoded as MessagePack.
        pieces: indices of the pieces of the gradient that are in the payload.
        buffers: for shard 0, the indices of the changed buffers. The buffers follow the pieces in the payload.
    """

    present: bytes
    groups: bytes
    pieces: tuple[Number, ...] = ()
    buffers: tuple[Number, ...] = ()


class Commit(Message, frozen=True, tag=True, omit_defaults=True):
    """A worker's finished iteration, sent to one shard: a push and, usually, the pull that follows it.

    The payload contains the pieces of the gradient that were not staged, followed by the buffers. With shared memory,
    the payload contains no pieces, because the shared memory already contains the gradient.

    Attributes:
        shard: index of the shard.
        iteration: label of the iteration.
        content: content of the push; None in virtual time.
        empty: True if the worker skipped the iteration; the payload then contains no gradient.
        stop: the stop at the barrier, if this is the worker's last push of its superstep; else None.
        change: the change of the sync model, if this is the worker's last push before the change; else None.
        significance: |g| / |w|, the norm of the whole gradient divided by the norm of all weights; None if the sync
            model does not need it.
        progress: the round that the push is for; None unless a shard has told the worker to continue from a later
            round.
        pulls: False if the worker pulls later, with a `PullRequested`.
        samples: number of samples of which the gradient is the mean; None if it is unknown.
        drawn: for each distributed loader, the number of batches that the worker's script has drawn before the push.
        clip: set if the script clips the gradient that is applied; else None.
        clipped: True if the script has clipped this worker's own gradient with `torch.nn.utils.clip_grad_norm_`.
        edit: set if the payload contains new values of the parameters in `content.present` instead of a gradient.
        set_index: the parameter set whose gradient is pushed, and whose weights are pulled; None for all sets.
        repeated: True if an earlier push was computed from the same samples, so they are not counted again.
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
    samples: Number | None = None
    drawn: tuple[Number, ...] = ()
    clip: Clip | None = None
    clipped: bool = False
    edit: Edit | None = None
    set_index: Number | None = None
    repeated: bool = False

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
    """A worker that is computing `iteration` needs the current weights. See the event of the same name."""

    shard: Number
    iteration: Number
    restart: bool = True
    edit: Number | None = None


class Answer(Message, frozen=True, tag=True, omit_defaults=True):
    """The answer to a pull. The payload is the shard's slice of the weights; with shared memory, it is empty.

    Attributes:
        shard: index of the shard.
        iteration: label of the iteration that the worker has pushed; -1 for the worker's first weights.
        version: version of the weights, that is, the number of updates that the weights include.
        v_train: the round from which the worker must continue because its push came too late for its own round; None
            if the push was not late.
        in_place: True if the worker must read the weights directly from the servers' memory until its next commit.
        samples: number of samples in all pushes that the shard has received from all workers and not dropped.
        edits: True if the worker, which begins an edit, is the one whose edit counts. Only shard 0 decides this.
    """

    shard: int
    iteration: int
    version: int
    v_train: int | None = None
    in_place: bool = False
    samples: int = 0
    edits: bool = False


class IterationFinished(Message, frozen=True, tag=True):
    """A worker has pushed an iteration to all shards.

    Workers send this if the sync model has a state machine at the coordinator, or if the push carries a change.

    Attributes:
        iteration: label of the iteration.
        superstep: number of the superstep, if this was the worker's last push before its barrier; else None.
        change: number of the model change, if this was the worker's last push before the change; else None.
        attempt: number of times that the worker has restarted the iteration.
    """

    iteration: Number
    superstep: Number | None = None
    change: Number | None = None
    attempt: Number = 0


class IterationStarted(Message, frozen=True, tag=True):
    """A worker has received its weights and starts to compute this iteration.

    Workers send this if the sync model requires such reports, and for the first iteration after a change.
    """

    iteration: Number


class GradientHashed(Message, frozen=True, tag=True):
    """A hash of the gradient that a worker pushes with this iteration. See `paceline.core.fingerprints`.

    Attributes:
        iteration: label of the iteration.
        gradient: the hash; "" if the push contains no gradient other than zero.
    """

    iteration: Number
    gradient: Annotated[str, msgspec.Meta(max_length=32)]


class PlanPublished(Message, frozen=True, tag=True):
    """One worker's part of a plan: the worker must stop after its first push whose label is at least `iteration`."""

    stop: Stop
    iteration: int


class RestartOrdered(Message, frozen=True, tag=True):
    """A worker must abort its computation of this iteration, pull, and compute the iteration again.

    If the worker has already pushed the iteration, or has restarted it more than `attempt` times, the message has no
    effect.
    """

    iteration: int
    attempt: Number = 0


class SyncRequested(Message, frozen=True, tag=True):
    """A worker's schedule or script requests a change of the sync model. See the event of the same name."""

    source: Literal["schedule", "script"]
    number: Number
    sync: str


class ChangePublished(Message, frozen=True, tag=True):
    """A worker must flag its next push with this change. Earlier plans are no longer valid."""

    change: Change


class FaultReported(Message, frozen=True, tag=True):
    """A user-defined condition has failed at a shard, which continues with the sync model `sync`."""

    shard: int
    reason: str
    traceback: str
    sync: str


# -- clipping of a mean ------------------------------------------------------------------------------------


class MeanMeasured(Message, frozen=True, tag=True):
    """A shard has computed a mean that must be clipped, and waits for the factor. See `core.joint_norms`.

    Attributes:
        shard: index of the shard.
        pushes: (worker, iteration) of each push in the mean.
        max_norm: largest norm of the joint gradient, according to the most advanced worker that clips.
        square: squared L2 norm of the shard's slice of the mean.
    """

    shard: int
    pushes: tuple[tuple[int, int], ...]
    max_norm: float
    square: float


class MeanClipped(Message, frozen=True, tag=True):
    """The factor by which a shard must multiply a mean before it applies the mean. See the event of the same name."""

    shard: int
    pushes: tuple[tuple[int, int], ...]
    factor: float


class MeanAwaited(Message, frozen=True, tag=True):
    """A worker was lost whose push is in a mean that another shard has measured.

    If the shard will not measure a mean with any of these pushes, it must send a `MeanMissing`.
    """

    shard: int
    pushes: tuple[tuple[int, int], ...]


class MeanMissing(Message, frozen=True, tag=True):
    """A shard will never measure a mean with any of the pushes that a `MeanAwaited` has named."""

    shard: int
    pushes: tuple[tuple[int, int], ...]


# -- data -------------------------------------------------------------------------------------------------


class DataRequested(Message, frozen=True, tag=True):
    """A worker needs data: it begins an epoch of a loader, or has used its leases.

    Attributes:
        loader: the worker's own number for the loader, which also numbers the entries of `drawn` in a `Commit`.
        name: name of the loader, which is the same in all workers.
        epoch: number of the epoch, counted from 0 for each loader.
        order: the order of the epoch.
        drawn: number of batches of this loader that the script has drawn since the worker joined.
        committed: number of these batches that belong to pushes that every shard has received.
        end: an epoch and the number of positions in its order, if the worker has reached an end that was not known in
            advance.
        times: the number of positions in each of the worker's iterations since its last request, and the time in
            seconds that the worker took for it. Only sent if the order is balanced.
        least: minimum size of the worker's batches if the order is balanced.
    """

    loader: Annotated[int, msgspec.Meta(ge=0, lt=MOST_LOADERS)]
    name: Annotated[str, msgspec.Meta(max_length=256)]
    epoch: Number
    order: Order
    drawn: Number
    committed: Number
    end: tuple[Number, Number] | None = None
    times: Annotated[tuple[BatchTaken, ...], msgspec.Meta(max_length=MOST_TIMES)] = ()
    least: Annotated[int, msgspec.Meta(ge=1, le=2**53)] = 1


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


class StopRequested(Message, frozen=True, tag=True):
    """A worker's script stops a training loop in all workers, or a loop has used up its time.

    Attributes:
        loop: number of the loop, in the order in which the script begins its loops.
    """

    loop: Number


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


class EntryRequested(Message, frozen=True, tag=True):
    """A worker that has not trained yet begins a training loop, and waits for a `LoopEntered`.

    Attributes:
        loop: number of the loop, in the order in which the script begins its loops.
    """

    loop: Number


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


class EpochReached(Message, frozen=True, tag=True):
    """A worker's script has reached the beginning of an epoch, or the end of a training loop.

    Attributes:
        position: the position.
        over: True at the end of the loop.
        tracks: True if the script tracks objects. The worker then waits for a `StatesDecided`.
    """

    position: LoopPosition
    over: bool = False
    tracks: bool = False


class StatesDecided(Message, frozen=True, tag=True):
    """The answer to an `EpochReached`: whether the worker must send the states of its tracked objects."""

    wanted: bool


class PushesReported(Message, frozen=True, tag=True):
    """A server has stopped serving a lost worker, and reports what it has received from it. See `core.losses`.

    Attributes:
        worker: the lost worker.
        incarnation: how often the index of the worker had been used before.
        last: for each shard of the server, the label of the last push that the shard has received from the worker.
        held: for each of these shards, True if it holds a push of the worker until a `LossSettled` arrives.
        drawn: for each of these shards, `drawn` of the last push that the shard has received from the worker; () if
            it has received none.
    """

    worker: int
    incarnation: int
    last: tuple[int, ...]
    held: tuple[bool, ...]
    drawn: tuple[tuple[int, ...], ...]


# -- barriers and reductions ------------------------------------------------------------------------------


class Contributed(Message, frozen=True, tag=True):
    """A worker's script has called `paceline.barrier` or `paceline.reduce`, or has added parameters, and waits.

    See `core.collectives` and `core.extension`.

    Attributes:
        call: the call and the structure of its argument, in words; the same in all workers.
        number: the number of such calls that this worker has made, including this one.
        op: "mean" or "sum".
        numbers: the numbers to combine, as native float64; b"" for a barrier.
        weight: the weight of the numbers in a mean.
        may_push: True if the worker may push without a gradient while it waits, so that others need not wait for it.
        model: the extended model, if the script has added parameters; else None.
    """

    call: Annotated[str, msgspec.Meta(max_length=MOST_WORDS)]
    number: Number
    op: Literal["mean", "sum"] = "sum"
    numbers: Annotated[bytes, msgspec.Meta(max_length=2**20)] = b""
    weight: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    may_push: bool = False
    model: ModelSpec | None = None

    @property
    def name(self) -> str:
        """A short name for the call, such as "barrier 3"."""
        return f"{self.call.partition('(')[0]} {self.number}"


class StoodIn(Message, frozen=True, tag=True):
    """In lockstep, a worker has pushed without a gradient for the first time, while its script was not training."""


class StandInAllowed(Message, frozen=True, tag=True):
    """In lockstep, a worker may push without a gradient while it waits in a barrier or a reduction.

    Sent once, when a worker has reported a `StoodIn`: from then on, the workers need not have the same number of
    steps when they make a call.
    """


class Paused(Message, frozen=True, tag=True):
    """The run has too few workers. Begin no further iteration until `Resumed` arrives."""


class Resumed(Message, frozen=True, tag=True):
    """The run has enough workers again, so it continues."""


class Combined(Message, frozen=True, tag=True):
    """All live workers have made a call, so the call ends.

    Attributes:
        numbers: the sum or the mean of the workers' numbers, as native float64.
        refused: the reason why the calls have no result, because the workers' calls differ; else "".
    """

    numbers: bytes = b""
    refused: str = ""


# -- reading a run's state --------------------------------------------------------------------------------


class FetchOptimizerState(Message, frozen=True, tag=True):
    """Request the optimizer state of a shard."""

    shard: Number


class OptimizerState(Message, frozen=True, tag=True):
    """The optimizer state of a shard. The payload is in safetensors format."""

    shard: int


class FetchBuffers(Message, frozen=True, tag=True):
    """A worker requests the model's buffers, pooled over the workers, from the server of shard 0."""

    shard: Number


class PooledBuffers(Message, frozen=True, tag=True):
    """The model's buffers, pooled over the workers. They are the payload, in the order of the model's buffers."""

    shard: int


class FetchInitialBuffers(Message, frozen=True, tag=True):
    """A worker requests the initial values of the buffers that were added last, from the server of shard 0.

    Attributes:
        shard: 0.
        checksum: checksum of the worker's own values.
    """

    shard: Number
    checksum: Number


class InitialBuffers(Message, frozen=True, tag=True):
    """The initial values of the buffers that were added last. They are the payload, in the order of the model.

    Attributes:
        shard: 0.
        equal: True if the worker has the same values, so that there is no payload.
    """

    shard: int
    equal: bool = False


class KeepStates(Message, frozen=True, tag=True):
    """The states of the objects that the script tracks, to be kept by the server of shard 0. They are the payload.

    Attributes:
        shard: 0.
        position: the position at which the states were taken.
    """

    shard: Number
    position: LoopPosition


class FetchStates(Message, frozen=True, tag=True):
    """Request the states that were kept last, from the server of shard 0."""

    shard: Number


class KeptStates(Message, frozen=True, tag=True):
    """The states that were kept last. They are the payload.

    Attributes:
        shard: 0.
        position: the position at which the states were taken; None if there are none.
    """

    shard: int
    position: LoopPosition | None = None


class FetchSnapshot(Message, frozen=True, tag=True):
    """Request the current weights of a shard. Sent by readers, and by the coordinator at the end of a run.

    Attributes:
        shard: index of the shard.
        left: the workers that have left the run, if the coordinator sends this message. The server answers once it
            has noticed the departure of each of them.
    """

    shard: Number
    left: tuple[Number, ...] = ()


class Snapshot(Message, frozen=True, tag=True):
    """The current weights of a shard, with their version.

    The payload contains the weights and, for shard 0, the other tensors of the model, pooled across workers.
    """

    shard: int
    version: int


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


class FetchWaits(Message, frozen=True, tag=True):
    """Request the list of workers that wait at a server. A server that does not answer is considered hung."""


class Waits(Message, frozen=True, tag=True):
    """The workers that wait at each shard of a server.

    Attributes:
        shards: one entry per shard.
        timers: True if the server has a pending timer, which may release a worker.
        traffic: one entry per TCP connection to a worker.
    """

    shards: tuple[ShardWaits, ...]
    timers: bool
    traffic: tuple[ConnectionTraffic, ...] = ()


# -- status and end of a run ------------------------------------------------------------------------------


class Status(Message, frozen=True, tag=True):
    """The state of a worker, for the progress display."""

    iteration: Number
    loss: float | None
    state: Literal["computing", "waiting", "pulling", "paused"]


class Warned(Message, frozen=True, tag=True):
    """A problem that does not end the run, such as a log that cannot be written."""

    words: str


class WorkerFinished(Message, frozen=True, tag=True):
    """A worker leaves the run, because it has finished its work or has been asked to leave.

    Attributes:
        drawn: `drawn` of the worker's last push.
        early: True if the worker has been asked to leave before it has finished its work.
    """

    drawn: tuple[Number, ...] = ()
    early: bool = False


class WorkerLost(Message, frozen=True, tag=True):
    """A worker was lost. The server stops serving this incarnation of it, and answers with a `PushesReported`.

    The worker's connection may still be open if a child process of the worker has inherited it.

    Attributes:
        worker: index of the worker.
        incarnation: how often this index had been used before.
        at_once: True if the process of the worker may go on. Its connection is then closed without waiting for its
            end, and what has not been read yet is not used.
    """

    worker: int
    incarnation: int = 0
    at_once: bool = False


class LossSettled(Message, frozen=True, tag=True):
    """All servers have reported what they have received from a lost worker. See `core.losses`.

    Attributes:
        worker: index of the worker.
        incarnation: how often this index had been used before.
        kept: label of the worker's last push that all shards have received. Later pushes that are held are dropped.
    """

    worker: int
    incarnation: int
    kept: int


class Failed(Message, frozen=True, tag=True):
    """A worker's script or a server has raised an exception.

    Attributes:
        reason: one-line description of the error.
        traceback: traceback of the error.
        consequence: True if the error occurred only because another process had ended.
    """

    reason: str
    traceback: str
    consequence: bool = False


class Shutdown(Message, frozen=True, tag=True):
    """A server must write its traces and exit."""


class TracePart(Message, frozen=True, tag=True):
    """The next part of a shard's trace, which is the payload. Servers on other machines send it after `Shutdown`.

    Attributes:
        shard: index of the shard.
        last: True for the last part.
    """

    shard: Number
    last: bool


FromPeerToCoordinator = (
    Hello
    | Ready
    | ExtensionReady
    | Register
    | IterationFinished
    | IterationStarted
    | AllCommitted
    | SyncRequested
    | DataRequested
    | StopRequested
    | EntryRequested
    | EpochReached
    | StoodIn
    | GradientHashed
    | Contributed
    | PushesReported
    | MeanMeasured
    | MeanMissing
    | FaultReported
    | JoinOffered
    | WorkerWelcomed
    | Status
    | Warned
    | WorkerFinished
    | Failed
    | Snapshot
    | Waits
    | TracePart
    | MachineJoined
    | MachineLeaving
    | ProcessEnded
    | ServerEnded
    | FetchStatus
    | Heartbeat
)
FromCoordinatorToAgent = MachineAdmitted | Refused | KillOrdered | TakenOut | RunEnded | HeartbeatAnswered
FromCoordinatorToWorker = (
    Started
    | Refused
    | TakenOut
    | PlanPublished
    | RestartOrdered
    | ChangePublished
    | PullAllowed
    | DataGranted
    | TrainingStopped
    | LoopEntered
    | StatesDecided
    | StandInAllowed
    | Paused
    | Resumed
    | Combined
    | ModelExtended
)
FromCoordinatorToServer = (
    CreateShards
    | ExtendShards
    | ModelExtended
    | JoinProposed
    | WorkerJoined
    | WorkerLost
    | LossSettled
    | MeanClipped
    | MeanAwaited
    | FetchSnapshot
    | FetchWaits
    | Shutdown
)
FromPeerToServer = (
    Hello
    | InitialState
    | InitialWeights
    | Stage
    | Commit
    | PullRequested
    | PullRepeated
    | FetchOptimizerState
    | FetchBuffers
    | FetchInitialBuffers
    | FetchSnapshot
    | FetchStates
    | KeepStates
    | WorkerFinished
    | Bell
)
FromServer = (
    MemoryAttached
    | Committed
    | Answer
    | InitialWeightsRequested
    | OptimizerState
    | PooledBuffers
    | InitialBuffers
    | Snapshot
    | KeptStates
    | Bell
)

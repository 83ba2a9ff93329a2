"""The messages between the processes of a run.

On a connection, a message is a small MessagePack header, followed by its payload: raw binary data, such as slices of
weights and gradients. Each side decodes only the messages that its peer may send; see the unions in `directions`. In
virtual time, the same objects are passed without encoding. Indices and counts that a worker or a reader sends have
the type `Number`, which limits their range.

The messages are grouped by subject, one module each. Other packages import them from here.

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

from .clipping import MeanAwaited, MeanClipped, MeanMeasured, MeanMissing
from .collectives import Combined, Contributed, Paused, Resumed, StandInAllowed, StoodIn
from .connection import MOST_WORDS, Bell, Hello, MemoryAttached, MemoryPlace, Message
from .data import (
    MOST_LOADERS,
    MOST_TIMES,
    DataGranted,
    DataRequested,
    EntryRequested,
    EpochReached,
    LoopEntered,
    LoopPosition,
    StatesDecided,
    StopRequested,
    TrainingStopped,
)
from .directions import (
    FromCoordinatorToAgent,
    FromCoordinatorToServer,
    FromCoordinatorToWorker,
    FromPeerToCoordinator,
    FromPeerToServer,
    FromServer,
)
from .ending import (
    Failed,
    LossSettled,
    PushesReported,
    Shutdown,
    Status,
    TracePart,
    Warned,
    WorkerFinished,
    WorkerLost,
)
from .extension import ExtendShards, ExtensionReady, InitialWeightsRequested, ModelExtended
from .iteration import (
    AllCommitted,
    Answer,
    ChangePublished,
    Commit,
    Committed,
    Content,
    FaultReported,
    GradientHashed,
    IterationFinished,
    IterationStarted,
    PlanPublished,
    PullAllowed,
    PullRepeated,
    PullRequested,
    RestartOrdered,
    Stage,
    SyncRequested,
)
from .machines import (
    MOST_PROCESSES,
    ClockOffset,
    FetchStatus,
    Heartbeat,
    HeartbeatAnswered,
    KillOrdered,
    MachineAdmitted,
    MachineJoined,
    MachineLeaving,
    ProcessEnded,
    ProcessState,
    RunEnded,
    ServerEnded,
    StatusReported,
    TakenOut,
)
from .start import (
    CreateShards,
    InitialState,
    InitialWeights,
    JoinOffered,
    JoinProposed,
    Ready,
    Refused,
    Register,
    Started,
    WorkerJoined,
    WorkerWelcomed,
)
from .state import (
    MOST_STATES_BYTES,
    ConnectionTraffic,
    FetchBuffers,
    FetchInitialBuffers,
    FetchOptimizerState,
    FetchSnapshot,
    FetchStates,
    FetchWaits,
    InitialBuffers,
    KeepStates,
    KeptStates,
    OptimizerState,
    PooledBuffers,
    ShardWaits,
    Snapshot,
    Waits,
)

__all__ = [
    "MOST_LOADERS",
    "MOST_PROCESSES",
    "MOST_STATES_BYTES",
    "MOST_TIMES",
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
    "FetchStatus",
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

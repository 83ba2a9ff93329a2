"""The messages that each side of a connection may send to the other."""

from __future__ import annotations

from .clipping import MeanAwaited, MeanClipped, MeanMeasured, MeanMissing
from .collectives import Combined, Contributed, Paused, Resumed, StandInAllowed, StoodIn
from .connection import Bell, Hello, MemoryAttached
from .data import (
    DataGranted,
    DataRequested,
    EntryRequested,
    EpochReached,
    LoopEntered,
    StatesDecided,
    StopRequested,
    TrainingStopped,
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
    FaultReported,
    GradientHashed,
    HyperParametersReported,
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
    FetchStatus,
    Heartbeat,
    HeartbeatAnswered,
    KillOrdered,
    MachineAdmitted,
    MachineJoined,
    MachineLeaving,
    ProcessEnded,
    RunEnded,
    ServerEnded,
    TakenOut,
)
from .metrics import MetricsLogged
from .observation import PushesObserved, RateTempered
from .paces import PacesObserved
from .start import (
    CreateShards,
    InitialState,
    InitialWeights,
    JoinOffered,
    JoinProposed,
    MainChosen,
    MainRequested,
    ModelDescribed,
    ModelRequested,
    Ready,
    Refused,
    Register,
    Started,
    WorkerJoined,
    WorkerWelcomed,
)
from .state import (
    FetchBuffers,
    FetchFrozen,
    FetchInitialBuffers,
    FetchOptimizerState,
    FetchSnapshot,
    FetchStates,
    FetchWaits,
    FrozenTensors,
    InitialBuffers,
    KeepStates,
    KeptStates,
    OptimizerState,
    PooledBuffers,
    Snapshot,
    Waits,
)

__all__ = [
    "FromCoordinatorToAgent",
    "FromCoordinatorToServer",
    "FromCoordinatorToWorker",
    "FromPeerToCoordinator",
    "FromPeerToServer",
    "FromServer",
]

FromPeerToCoordinator = (
    Hello
    | Bell
    | Ready
    | ExtensionReady
    | Register
    | MainRequested
    | ModelRequested
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
    | HyperParametersReported
    | PushesObserved
    | MetricsLogged
    | Contributed
    | PushesReported
    | MeanMeasured
    | MeanMissing
    | FaultReported
    | PacesObserved
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
FromCoordinatorToAgent = (
    MachineAdmitted | Refused | KillOrdered | TakenOut | MainChosen | RunEnded | HeartbeatAnswered
)
FromCoordinatorToWorker = (
    Started
    | MainChosen
    | ModelDescribed
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
    | RateTempered
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
    | FetchFrozen
    | FrozenTensors
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
    | FetchFrozen
    | FrozenTensors
    | Snapshot
    | KeptStates
    | Bell
)

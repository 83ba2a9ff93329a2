"""Messages at the start of a run, and when a worker joins it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ....sync.events import Number
from ..layout import ShardSlice
from ..model_spec import ModelSpec
from .cuts import ShardState
from .protocol_table import Message, sent

__all__ = [
    "LONGEST_PATH",
    "CreateShards",
    "InitialState",
    "InitialWeights",
    "JoinOffered",
    "JoinProposed",
    "MainChosen",
    "MainRequested",
    "ModelDescribed",
    "ModelRequested",
    "Ready",
    "Refused",
    "Register",
    "Started",
    "WorkerJoined",
    "WorkerWelcomed",
    "WorkingDirectory",
]

LONGEST_PATH = 4096


class WorkingDirectory(msgspec.Struct, frozen=True):
    """The working directory of a worker's process.

    Attributes:
        path: the absolute path.
        number: number of the directory in its file system, by which another machine sees whether it has the same one.
    """

    path: Annotated[str, msgspec.Meta(max_length=LONGEST_PATH)]
    number: Annotated[int, msgspec.Meta(ge=0, le=2**62)]


@sent("worker", to="coordinator", during="joining", then="training")
class Register(Message, frozen=True, tag=True):
    """A worker is about to compute its first gradient, and will train this model.

    Attributes:
        model: the model to train.
        samples: number of samples in the worker's first push; None if it is unknown.
        directory: the working directory of the worker; None if it has none.
    """

    model: ModelSpec
    samples: Number | None = None
    directory: WorkingDirectory | None = None


@sent("coordinator", to="server", during="starting", then="serving")
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
        observes: True if the server of shard 0 reports how fast the workers are (see `core.sync.paces`).
        resumed: the state of each shard in `shards`, if a cut is resumed; else (). The server then has the weights,
            and the initializer does not send any.
        lacking: True if the cut lacks parameters of the model, because the script has them earlier than before. The
            initializer then sends initial weights nevertheless, and those of the cut replace them.
    """

    model: ModelSpec
    shards: tuple[ShardSlice, ...]
    sync: str
    workers: tuple[int, ...]
    initializer: int
    usual_samples: int | None = None
    incarnations: tuple[tuple[int, int], ...] = ()
    observes: bool = False
    resumed: tuple[ShardState, ...] = ()
    lacking: bool = False


@sent("server", to="coordinator", during="starting", then="serving")
class Ready(Message, frozen=True, tag=True):
    """A server has received its shards, so workers may connect to the server."""


@sent("coordinator", to="worker", during="joining", then="training")
class Started(Message, frozen=True, tag=True):
    """A worker may connect to the servers and begin training.

    Attributes:
        shards: the slices of all shards, in order.
        addresses: for each shard, the address on which its server listens.
        initializer: the worker that sends the initial weights; -1 if they have been sent already.
        iteration: label of the worker's first iteration.
        sync: the sync model in force, in the notation of the command line; "" for the first model of the run.
        extension: number of the extension of the model in force; 0 if the model has not been extended.
        main_worker: the main worker (see `core.machines.main_worker`).
        digests: the digests of the run's values of the frozen parameters, in the order of the model.
        resumed: number of the cut that the run resumes; 0 if it resumes none, or is in progress already.
        directory: the working directory of the first main worker, in which the script's relative paths are meant.
    """

    shards: tuple[ShardSlice, ...]
    addresses: tuple[str, ...]
    initializer: int
    iteration: int = 0
    sync: str = ""
    extension: int = 0
    main_worker: int = 0
    digests: tuple[str, ...] = ()
    resumed: int = 0
    directory: WorkingDirectory | None = None


@sent("worker", to="coordinator")
class MainRequested(Message, frozen=True, tag=True):
    """A worker asks which worker is the main worker now, and waits for a `MainChosen`."""


@sent("coordinator", to="worker")
@sent("coordinator", to="agent", forwarded=False)
class MainChosen(Message, frozen=True, tag=True):
    """The main worker (see `core.machines.main_worker`): the answer to a `MainRequested`, and sent to all after a
    change.

    Attributes:
        worker: index of the worker; -1 for nobody.
    """

    worker: int


@sent("worker", to="coordinator")
class ModelRequested(Message, frozen=True, tag=True):
    """A worker that has not trained yet asks for the model of the job, and waits for a `ModelDescribed`."""


@sent("coordinator", to="worker")
class ModelDescribed(Message, frozen=True, tag=True):
    """The answer to a `ModelRequested`, with which the worker can read the model from the servers.

    Attributes:
        model: the model of a run in progress; None if the run is only beginning.
        shards: the slices of all shards, in order.
        addresses: for each shard, the address on which its server listens.
    """

    model: ModelSpec | None = None
    shards: tuple[ShardSlice, ...] = ()
    addresses: tuple[str, ...] = ()


@sent("coordinator", to="worker")
@sent("coordinator", to="agent", forwarded=False)
class Refused(Message, frozen=True, tag=True):
    """The coordinator refuses a worker, which then cannot take part in the run."""

    reason: str


@sent("coordinator", to="server", during="serving")
class JoinProposed(Message, frozen=True, tag=True):
    """A worker is about to join a run in progress, so each server must send a `JoinOffered`. See
    `core.changes.joining`.

    Attributes:
        worker: index of the worker.
        incarnation: how often this index has been used before.
        left: the workers that have left the run. The server answers when it has noticed each of these departures.
    """

    worker: int
    incarnation: int
    left: tuple[int, ...] = ()


@sent("server", to="coordinator", during="serving")
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


@sent("coordinator", to="server", during="serving")
class WorkerJoined(Message, frozen=True, tag=True):
    """A worker joins a run in progress. See the event of the same name.

    If the worker has already joined with a smaller `count`, which another server has refused, it joins again.
    """

    worker: int
    incarnation: int
    iteration: int
    count: int
    superstep: int


@sent("server", to="coordinator", during="serving")
class WorkerWelcomed(Message, frozen=True, tag=True):
    """A server acknowledges the `WorkerJoined` message with this `count`: the worker has joined at all its shards."""

    worker: int
    incarnation: int
    count: int


@sent("worker", to="server", forwarded=False)
class InitialState(Message, frozen=True, tag=True):
    """The optimizer state of a shard. When a run is resumed, the initializer sends this message before the weights.

    The payload is in safetensors format. If the model is being extended, it is the state of the new parameters.
    """

    shard: Number


@sent("worker", to="server")
class InitialWeights(Message, frozen=True, tag=True):
    """The initial weights of a shard, sent by the initializer.

    The payload contains the weights and, for shard 0, the buffers of the model. If the model is being extended,
    it contains only those that are new.
    """

    shard: Number

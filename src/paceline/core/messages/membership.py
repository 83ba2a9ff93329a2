"""Messages that start a run, let a worker join, or extend the model, and the messages of barriers and reductions."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ...sync.events import Number
from ..layout import ModelSpec, ShardSlice
from .connection import MOST_WORDS
from .cuts import ShardState
from .table import Message, sent

LONGEST_PATH = 4096


class WorkingDirectory(msgspec.Struct, frozen=True):
    """The working directory of a worker's process.

    Attributes:
        path: the absolute path.
        number: number of the directory in its file system, from which another machine can tell whether it has the same
            directory.
    """

    path: Annotated[str, msgspec.Meta(max_length=LONGEST_PATH)]
    number: Annotated[int, msgspec.Meta(ge=0, le=2**62)]


@sent("worker", to="coordinator", during="joining", then="training")
class Register(Message):
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
class CreateShards(Message):
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
        observes: True if the server of shard 0 reports how fast the workers are (see `core.paces`).
        resumed: the state of each shard in `shards`, if a cut is resumed; else (). The server then has the weights,
            and the initializer does not send any.
        lacking: True if the cut lacks parameters of the model, because the script now adds these earlier than in the
            previous run. The initializer then sends initial weights nevertheless, and the server replaces those that
            the cut contains.
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
class Ready(Message):
    """A server has received its shards, so workers may connect to the server."""


@sent("coordinator", to="worker", during="joining", then="training")
class Started(Message):
    """A worker may connect to the servers and begin training.

    Attributes:
        shards: the slices of all shards, in order.
        addresses: for each shard, the address on which its server listens.
        initializer: the worker that sends the initial weights; -1 if they have been sent already.
        iteration: label of the worker's first iteration.
        sync: the sync model in force, in the notation of the command line; "" for the first model of the run.
        extension: number of the extension of the model in force; 0 if the model has not been extended.
        main_worker: the main worker (see `core.members`).
        digests: the digests of the run's values of the frozen parameters, in the order of the model.
        resumed: number of the cut that the run resumes; 0 if the run resumes no cut, or if the worker joins a run in
            progress.
        directory: the working directory of the first main worker, to which the script's relative paths refer.
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
class MainRequested(Message):
    """A worker asks which worker is the main worker now, and waits for a `MainChosen`."""


@sent("coordinator", to="worker")
@sent("coordinator", to="agent", forwarded=False)
class MainChosen(Message):
    """Names the main worker (see `core.members`). Sent as the answer to a `MainRequested`, and to all workers after a
    change.

    Attributes:
        worker: index of the worker; -1 if there is no main worker.
    """

    worker: int


@sent("worker", to="coordinator")
class ModelRequested(Message):
    """A worker that has not trained yet asks for the model of the job, and waits for a `ModelDescribed`."""


@sent("coordinator", to="worker")
class ModelDescribed(Message):
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
class Refused(Message):
    """The coordinator refuses a worker, which then cannot take part in the run."""

    reason: str


@sent("coordinator", to="server", during="serving")
class JoinProposed(Message):
    """A worker is about to join a run in progress, so each server must send a `JoinOffered`. See
    `core.reconfiguration`.

    Attributes:
        worker: index of the worker.
        incarnation: how often this index has been used before.
        left: the workers that have left the run. The server answers when it has noticed each of these departures.
    """

    worker: int
    incarnation: int
    left: tuple[int, ...] = ()


@sent("server", to="coordinator", during="serving")
class JoinOffered(Message):
    """A server says with which label and which number c_p of pushes a worker could join at its shards now.

    This message is the answer to `JoinProposed`, and also to a `WorkerJoined` whose `count` a shard of the server has
    already passed.

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
class WorkerJoined(Message):
    """A worker joins a run in progress. See the event of the same name.

    If the worker has already joined with a smaller `count`, which another server has refused, the worker joins again
    with this `count`.
    """

    worker: int
    incarnation: int
    iteration: int
    count: int
    superstep: int


@sent("server", to="coordinator", during="serving")
class WorkerWelcomed(Message):
    """A server acknowledges the `WorkerJoined` with this `count`: the worker has joined at the server's shards."""

    worker: int
    incarnation: int
    count: int


@sent("worker", to="server", forwarded=False)
class InitialState(Message):
    """The optimizer state of a shard. When a run is resumed, the initializer sends this message before the weights.

    The payload is in safetensors format. If the model is being extended, the payload contains the state of the new
    parameters only.
    """

    shard: Number


@sent("worker", to="server")
class InitialWeights(Message):
    """The initial weights of a shard, sent by the initializer.

    The payload contains the weights and, for shard 0, the buffers of the model. If the model is being extended,
    the payload contains only the new weights and buffers.
    """

    shard: Number


# -- Messages with which parameters are added to the model of a run ------------------------------------------


@sent("coordinator", to="server", during="serving")
class ExtendShards(Message):
    """A server must prepare to extend its shards: the script has added parameters. See `core.reconfiguration`.

    With shared memory, the file descriptor of the memory for all weights of the extended model is attached to this
    message and to the `ModelExtended` messages to the workers. The message is repeated if the initializer is lost.

    Attributes:
        model: the extended model.
        shards: the slices that this server will hold.
        initializer: the worker that sends the initial weights of the new parameters.
        number: number of the extension. The extensions of a run are numbered from 1.
        resumed: number of the cut that contains the new parameters, because an earlier run had added them. The server
            then has their weights, and the initializer does not send any. 0 if no cut contains the new parameters.
        lacking: True if the cut contains only some of the new parameters. The initializer then sends initial weights
            nevertheless, and the server replaces those that the cut contains.
    """

    model: ModelSpec
    shards: tuple[ShardSlice, ...]
    initializer: int
    number: int
    resumed: int = 0
    lacking: bool = False


@sent("server", to="worker")
class InitialWeightsRequested(Message):
    """The initializer must send the initial weights of the new parameters to a shard."""

    shard: int


@sent("server", to="coordinator", during="serving")
class ExtensionReady(Message):
    """A server has received the initial weights of the new parameters from the initializer, for all of its shards.

    Attributes:
        initializer: the worker that has sent the initial weights.
        number: number of the extension.
    """

    initializer: int
    number: int


@sent("coordinator", to="worker", during="training")
@sent("coordinator", to="server", during="serving")
class ModelExtended(Message):
    """All servers are ready, so the extension takes effect, and the workers connect to the servers again.

    A server may receive the greeting of a worker before this message.

    Attributes:
        shards: the slices of all shards, in order.
        number: number of the extension.
        digests: the digests of the run's values of the frozen parameters, in the order of the extended model.
    """

    shards: tuple[ShardSlice, ...]
    number: int
    digests: tuple[str, ...] = ()


# -- Messages of barriers, reductions and pauses -------------------------------------------------------------


@sent("worker", to="coordinator")
class Contributed(Message):
    """A worker's script has called `paceline.barrier` or `paceline.reduce`, or has added parameters, and waits.

    See `core.joint_batch` and `core.reconfiguration`.

    Attributes:
        call: the call and the structure of its argument, in words; the same in all workers.
        number: the number of such calls that this worker has made, including this one.
        op: "mean" or "sum".
        numbers: the numbers to combine, as native float64; b"" for a barrier.
        weight: the weight of the numbers in a mean.
        may_push: True if the worker may push without a gradient while it waits, so that other workers need not wait for
            it.
        model: the extended model, if the script has added parameters; else None.
        since_step: number of such calls before this one since the worker last made a step or began an epoch.
    """

    call: Annotated[str, msgspec.Meta(max_length=MOST_WORDS)]
    number: Number
    op: Literal["mean", "sum"] = "sum"
    numbers: Annotated[bytes, msgspec.Meta(max_length=2**20)] = b""
    weight: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    may_push: bool = False
    model: ModelSpec | None = None
    since_step: Number = 0

    @property
    def name(self) -> str:
        """A short name for the call, such as "barrier 3"."""
        return f"{self.call.partition('(')[0]} {self.number}"


@sent("worker", to="coordinator", during="training")
class StoodIn(Message):
    """In lockstep, a worker makes its remaining steps in earlier or later iterations than the other workers.

    The reason is, for example, that the worker has pushed without a gradient while its script evaluated the model.
    """


@sent("coordinator", to="worker")
class StandInAllowed(Message):
    """In lockstep, a worker may push without a gradient while it waits in a barrier or a reduction.

    The coordinator sends this message once, when the workers may from then on make a call after different numbers of
    steps: for example, because a worker has sent a `StoodIn`.
    """


@sent("coordinator", to="worker")
class Paused(Message):
    """The run has too few workers. Begin no further iteration until `Resumed` arrives."""


@sent("coordinator", to="worker")
class Resumed(Message):
    """The run has enough workers again, so it continues."""


@sent("coordinator", to="worker")
class Combined(Message):
    """All live workers have made the call of a `Contributed`, so the call ends.

    Attributes:
        numbers: the sum or the mean of the workers' numbers, as native float64.
        refused: if the workers' calls differ, a description of the difference; else "".
    """

    numbers: bytes = b""
    refused: str = ""

"""Messages during an iteration: pushes and pulls, what the sync model orders, and what a worker reports of its pushes.

`Stage` and `Commit` say with which codec their values travel (see `core.layout`), and an `Answer` names its codec. Only
the usual exchange of a gradient for new weights is encoded. These values always travel as they are:

- the initial weights, on their way to the servers and to the workers, even after a late join or an extension. If
  weights travel as differences, a worker that joins receives the base as it is;
- the values of an edit, the weights in the answer to the edit, and the weights that a worker pulls before the edit;
- the weights that a worker pulls because its script evaluates the model;
- what readers receive, and therefore what a run saves;
- vectors with other dtypes, buffers and optimizer states.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ...sync.events import Change, Finish, JointNorm, Number, PushFlags, Repeat, Stop
from ..layout import WireFormat
from ..lease import PackedPushed
from .table import Message, sent

MOST_REPORTED_BYTES = 16 * 1024
"""Maximum size of the hyper-parameters in one report."""


@sent("worker", to="server", forwarded=False)
class Stage(Message):
    """Pieces of a gradient, sent before the commit while other pieces are still being computed.

    The payload contains the pieces, in order. The pieces take effect only with the commit. If a piece is sent twice,
    the later copy is used.
    """

    shard: Number
    pieces: tuple[Number, ...]

    def codec(self, wire: WireFormat) -> str:
        """Return the codec of the pieces."""
        return wire.gradients


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


@sent("worker", to="server")
class Commit(PushFlags, Message):
    """A worker's finished iteration, sent to one shard: a push and, usually, the pull that follows it.

    The payload contains the pieces of the gradient that were not staged, followed by the buffers. With shared memory,
    the payload contains no pieces, because the shared memory already contains the gradient. If the push is `empty`, the
    payload contains no gradient. If the push has an `edit`, the payload contains the new values of the parameters in
    `content.present` instead of a gradient.

    Attributes:
        shard: index of the shard.
        iteration: label of the iteration.
        content: content of the push; None in virtual time.
        pulls: False if the worker pulls later, with a `PullRequested`.
        drawn: for each distributed loader, the number of batches that the worker's script has drawn before the push,
            and, if the script has skipped some of them, the number of their positions. See `Pushed`.
    """

    shard: Number
    iteration: Number
    content: Content | None = None
    pulls: bool = True
    drawn: tuple[PackedPushed, ...] = ()

    @property
    def pieces(self) -> tuple[int, ...]:
        """Indices of the pieces of the gradient that are in the payload."""
        return self.content.pieces if self.content is not None else ()

    def codec(self, wire: WireFormat) -> str:
        """Return the codec of the pieces."""
        return wire.gradients if self.edit is None else "float32"


@sent("server", to="worker")
class Committed(Message):
    """A shard has received a push that did not include a pull."""

    shard: int
    iteration: int


@sent("worker", to="coordinator", during="training")
class AllCommitted(Message):
    """With `--overlap off`: every shard has received the sender's push of this iteration.

    Attributes:
        iteration: the iteration.
        updates: number of updates that shard 0 had applied to the weights from which the push was computed.
    """

    iteration: Number
    updates: Number


@sent("coordinator", to="worker", during="training")
class PullAllowed(Message):
    """With `--overlap off`: all shards have received the pushes of all workers for this round. The worker may pull."""

    iteration: int


@sent("worker", to="server")
class PullRequested(Message):
    """A pull that was not included in a commit."""

    shard: Number
    iteration: Number


@sent("worker", to="server")
class PullRepeated(Repeat, Message):
    """A worker that is computing an iteration needs the current weights. See `Repeat`."""

    shard: Number


@sent("server", to="worker")
class Answer(Message, omit_defaults=True):
    """The answer to a pull. The payload is the shard's slice of the weights; with shared memory, it is empty.

    Attributes:
        shard: index of the shard.
        iteration: label of the iteration that the worker has pushed; -1 for the worker's first weights.
        version: version of the weights, that is, the number of updates that the weights include.
        v_train: the round from which the worker must continue because its push came too late for its own round; None
            if the push was not late.
        in_place: True if the worker must read the weights directly from the servers' memory until its next commit.
        samples: number of samples in all pushes that the shard has received from all workers and not dropped.
        edits: True if the worker begins an edit, and this worker's edit is the one that counts. Only shard 0 decides
            this.
        codec: the codec of the weights in the payload.
        base: number of a base. With the codec "float32", the weights in the payload are this base. With another codec,
            they are differences, and the worker has this base after adding them to its last base. 0 if the answer uses
            no base.
        checksum: checksum of this base, which the host of the server sets.
        cut: number of the cut for which the worker must give the state of its script: a cut that was made since the
            last answer to the worker or, under a lockstep model, a cut that is about to be made. 0 if there is no such
            cut. Only shard 0 says this.
        next_edit: number of the job's next edit. A worker that joins late counts its edits from the number in its first
            answer. Only shard 0 says this.
    """

    shard: int
    iteration: int
    version: int
    v_train: int | None = None
    in_place: bool = False
    samples: int = 0
    edits: bool = False
    codec: str = "float32"
    cut: int = 0
    base: int = 0
    checksum: int = 0
    next_edit: int = 0


@sent("worker", to="server", forwarded=False)
@sent("worker", to="coordinator", during="training")
class BaseRequested(Message):
    """The base that a worker has computed from the last answer differs from the server's base, so the worker needs the
    whole base. See `Answer.checksum`.

    The coordinator counts these messages.
    """

    shard: Number


@sent("worker", to="coordinator", during="training")
class IterationFinished(Finish, Message):
    """A worker has pushed an iteration to all shards.

    Workers send this if the sync model has a state machine at the coordinator, or if the push carries a change.
    """


@sent("worker", to="coordinator", during="training")
class IterationStarted(Message):
    """A worker has received its weights and starts to compute this iteration.

    Workers send this if the sync model requires such reports, and for the first iteration after a change.
    """

    iteration: Number


@sent("worker", to="coordinator", during="training")
class GradientHashed(Message):
    """A hash of the gradient that a worker pushes with this iteration. See `paceline.core.agreement`.

    Attributes:
        iteration: label of the iteration.
        gradient: the hash; "" if the push contains no gradient other than zero.
    """

    iteration: Number
    gradient: Annotated[str, msgspec.Meta(max_length=32)]


@sent("worker", to="coordinator")
class HyperParametersReported(Message, omit_defaults=True):
    """The hyper-parameters with which a worker trains at a *mark*, which `paceline.core.agreement` defines.

    Attributes:
        set_index: the parameter set of the optimizer.
        step: number of steps that the worker has made with this optimizer.
        groups: the hyper-parameters of the first parameter groups, as many as fit, encoded as MessagePack.
        epoch: number of the epoch of the loader over which the worker makes a pass; None if it makes no pass.
        loader: name of the loader.
        schedule: if a schedule that follows the progress of the job determines the hyper-parameters, the number of its
            steps when they were read; else None.
        within: True if the hyper-parameters have changed within a pass, or if there are no passes.
        late: True if the worker has joined a run in progress.
    """

    set_index: Number
    step: Number
    groups: Annotated[bytes, msgspec.Meta(max_length=MOST_REPORTED_BYTES)]
    epoch: Number | None = None
    loader: Annotated[str, msgspec.Meta(max_length=512)] = ""
    schedule: Number | None = None
    within: bool = False
    late: bool = False


@sent("coordinator", to="worker")
class PlanPublished(Message):
    """One worker's part of a plan: the worker must stop after its first push whose label is at least `iteration`."""

    stop: Stop
    iteration: int


@sent("coordinator", to="worker")
class RestartOrdered(Message):
    """A worker must abort its computation of this iteration, pull, and compute the iteration again.

    If the worker has already pushed the iteration, or has restarted it more than `attempt` times, the message has no
    effect.
    """

    iteration: int
    attempt: Number = 0


@sent("worker", to="coordinator")
class SyncRequested(Message):
    """A worker's schedule or script requests a change of the sync model. See the event of the same name."""

    source: Literal["schedule", "script"]
    number: Number
    sync: str


@sent("coordinator", to="worker")
class ChangePublished(Message):
    """A worker must flag its next push with this change. Earlier plans are no longer valid."""

    change: Change


@sent("server", to="coordinator", during="serving")
class FaultReported(Message):
    """A user-defined condition has failed at a shard, which continues with the sync model `sync`."""

    shard: int
    reason: str
    traceback: str
    sync: str


# -- Messages with which the servers clip a mean by the norm over all shards ---------------------------------


@sent("server", to="coordinator", during="serving")
class MeanMeasured(Message):
    """A shard has computed a mean that must be clipped, and waits for the factor. See `core.joint_batch`.

    Attributes:
        shard: index of the shard.
        pushes: (worker, iteration) of each push in the mean.
        max_norm: the norm to which the joint gradient is clipped, according to the most advanced worker that clips.
        square: squared L2 norm of the shard's slice of the mean.
    """

    shard: int
    pushes: tuple[tuple[int, int], ...]
    max_norm: float
    square: float


@sent("coordinator", to="server", during="serving")
class MeanClipped(JointNorm, Message):
    """The factor by which a shard must multiply a mean before it applies the mean."""

    shard: int


@sent("coordinator", to="server", during="serving")
class MeanAwaited(Message):
    """Another shard has measured a mean that contains a push of a lost worker.

    If the shard will not measure a mean with any of these pushes, it must send a `MeanMissing`.
    """

    shard: int
    pushes: tuple[tuple[int, int], ...]


@sent("server", to="coordinator", during="serving")
class MeanMissing(Message):
    """A shard will never measure a mean with any of the pushes that a `MeanAwaited` has named."""

    shard: int
    pushes: tuple[tuple[int, int], ...]


# -- What a run with `--sync auto` observes of its workers ---------------------------------------------------

Cycle = tuple[Annotated[int, msgspec.Meta(ge=-1)], Annotated[float, msgspec.Meta(ge=0.0)]]
"""(number of samples of a push, or -1 if unknown; time in seconds of the cycle that ends with this push)."""


@sent("server", to="coordinator", during="serving")
class PacesObserved(Message):
    """The server of shard 0 has measured cycles of the workers, which `core.paces` defines.

    Attributes:
        cycles: (worker, its latest cycles) for each worker with cycles that have not been reported before.
        pushes: number of pushes with a gradient that shard 0 has received since the run began.
        batches: number of these pushes that were computed from a batch of their own.
        samples: number of samples in the pushes that shard 0 has received and not dropped.
        now_s: time of the last of these pushes, in seconds.
        clips: True if the script clips the joint gradient, which not all sync models allow.
    """

    cycles: tuple[tuple[Number, tuple[Cycle, ...]], ...]
    pushes: Number
    batches: Number
    samples: Number
    now_s: float
    clips: bool = False


# -- What a worker reports of its pushes to the guard of the run ---------------------------------------------

MOST_OBSERVED = 256
"""Maximum number of observations in one report."""


MOST_PARAMETER = 1024
"""Maximum length of the name of a parameter in an observation. Longer names are cut off."""


class Observation(msgspec.Struct, frozen=True, array_like=True):
    """A worker's observations about one of its pushes. See `paceline.core.guard`.

    Attributes:
        updates: number of updates that shard 0 had applied to the weights from which the gradient was computed.
        loss: loss of the iteration, which may be NaN or inf; None if the script has passed no loss.
        gradient: L2 norm of the worker's own gradient; NaN or inf if an element is NaN or inf; None if there is no
            gradient.
        weights: L2 norm of some of the weights from which the gradient was computed, scaled up to all weights; NaN or
            inf if one of these weights is NaN or inf.
        parameter: name of the first parameter whose gradient contains NaN or inf; "" if there is none.
        set_index: the parameter set that is pushed.
        samples: number of samples in the push; 0 if unknown.
    """

    updates: Number
    loss: float | None = None
    gradient: float | None = None
    weights: float | None = None
    parameter: Annotated[str, msgspec.Meta(max_length=MOST_PARAMETER)] = ""
    set_index: Number = 0
    samples: Number = 0


@sent("worker", to="coordinator", during="training")
class PushesObserved(Message):
    """A worker reports its observations about its latest pushes, in order."""

    observed: Annotated[tuple[Observation, ...], msgspec.Meta(max_length=MOST_OBSERVED)]


# -- What a worker reports of the metrics that its script has logged -----------------------------------------

LONGEST_NAME = 100
"""Maximum length of the name of a metric, in characters."""

MOST_LOGGED = 1000
"""Maximum number of values in one report."""

Source = Literal["script", "closure", "guess"]
"""The sources of a value, the best source first: the script has logged it, a closure has returned it, or it is the
tensor on which the script has called `backward()`."""


class LoggedValue(msgspec.Struct, frozen=True, array_like=True):
    """The mean of the values that a script has logged under one name, at one point of the job's progress, for one push.

    Attributes:
        name: name of the metric.
        value: the mean.
        weight: its weight in a mean over the workers: the number of samples of the push.
        count: number of values that were logged.
        age_s: seconds since the last of these values was logged. An age can be sent without comparing two clocks.
        samples: number of samples that all workers together had used when the values were logged; 0 if unknown.
        updates: number of updates when the values were logged.
        source: where the values come from.
        evaluating: True if the values were logged inside `paceline.evaluating()`.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME)]
    value: float
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e15)]
    count: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    age_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    samples: Number
    updates: Number
    source: Source = "script"
    evaluating: bool = False


@sent("worker", to="coordinator")
class MetricsLogged(Message):
    """The values that the script of a worker has logged since the worker's last report."""

    values: Annotated[tuple[LoggedValue, ...], msgspec.Meta(max_length=MOST_LOGGED)]

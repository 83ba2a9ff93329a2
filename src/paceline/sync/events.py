"""Events: the input of a sync model. Events are immutable, and their names are in the past tense.

A model knows the time only from its events: `now_ticks` is the host's clock, in ticks since the run began (see
`ticks`). A trace contains the events of a run, and passing them to the model again gives the same actions.

Each worker has two counters. `iteration` is the label that the worker itself gives to an iteration, counted from 0.
The model counts c_p, the number of iterations that worker p has pushed; a worker that joins late starts with a c_p
that is the same at all shards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import Parameter, signature
from typing import Annotated, Any, Literal, Self, cast, dataclass_transform

import msgspec
from msgspec import structs

Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""An index or a count. Messages from other processes are rejected if they contain numbers outside these bounds."""


Ticks = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""A time in ticks. The largest time is 146 years if a tick is a nanosecond."""


MOST_NORM = 1e300
"""The largest bound for the norm of a gradient. A larger bound would never have an effect."""

MOST_WEIGHT = 1e15
"""The largest weight of a gradient in a mean. Larger numbers of samples or tokens are mistakes."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The flag on a worker's last push before the barrier of its superstep.

    The flag lists the members of the superstep, so that all shards wait for the same workers before they close the
    superstep, even if a shard has not been notified of all joins yet.
    """

    superstep: Number
    members: tuple[Number, ...]


class Change(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A change of the sync model. As a flag on a push, a change marks the worker's last push under the old model.

    Attributes:
        number: number of the change, counted from 1 within a run.
        members: the workers whose flagged pushes together form the boundary between the old and the new model.
        sync: the new model in the notation of the command line: one model, or one for each shard, separated by "|".
    """

    number: Number
    members: tuple[Number, ...]
    sync: str


class Clip(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The flag on a push whose gradient the script clips: the norm of the applied mean or gradient is bounded.

    Attributes:
        max_norm: largest L2 norm of the mean that contains this push.
        factor: factor by which the gradient is multiplied if the push is applied on arrival. The worker computes it
            from the norm of its own gradient.
    """

    max_norm: Annotated[float, msgspec.Meta(ge=0, le=MOST_NORM)]
    factor: Annotated[float, msgspec.Meta(ge=0, le=1)]


class Edit(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The flag on a push that contains new values of parameters instead of a gradient.

    Attributes:
        number: number of the edit. Each worker counts its edits, from 0 or, if it joins late, from the job's next edit.
        sole: True if the sender was named as the only worker whose edit counts; False if every worker pushes its
            edit, and the edit of the worker with the lowest index counts.
    """

    number: Number
    sole: bool


HEARD = ("now_ticks", "worker")
"""The fields of an event that its message does not have: when the message arrived, and from whom."""


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base class of the events. Its subclasses are frozen and tagged, too.

    Each event has `now_ticks`, which never decreases between successive events of the same host. Fields that an event
    shares with the message that causes it are declared once, in a base class of both, such as `PushFlags`.
    """

    @classmethod
    def of(cls, message: msgspec.Struct, *heard: int, **own: Any) -> Self:
        """Return the event that a message causes: with the fields that both have, and the fields in `own`.

        Args:
            message: the message.
            heard: the values of `HEARD`: the time of the event and, if a worker has caused it, the worker.
            own: further fields of the event.
        """
        event: Self = maker(cls, type(message), HEARD[: len(heard)])(message, *heard)
        return structs.replace(event, **own) if own else event


@cache
def maker(
    made: type[Any], source: type[msgspec.Struct], heard: tuple[str, ...] = HEARD
) -> Callable[..., Any]:
    """Return a function that makes a struct from the fields that it shares with a `source`, and from `heard` fields.

    Every push becomes a message to each shard, and each message becomes an event. So the function names all fields, as
    if it were written by hand: a loop over the fields would take four times as long. Fields are positional where they
    can be, because CPython packs more than 15 keywords into a dictionary, which takes ten times as long.

    Example:
        >>> push = maker(PushReceived, PushFlags, ("now_ticks", "worker", "iteration"))(PushFlags(samples=32), 7, 0, 1)
        >>> push.worker, push.samples
        (0, 32)
    """
    known = {name: f"source.{name}" for name in source.__struct_fields__} | {name: name for name in heard}
    arguments: list[str] = []
    keywords = False  # True from the first field that must be named
    for name, parameter in signature(made).parameters.items():
        keywords = keywords or name not in known or parameter.kind is Parameter.KEYWORD_ONLY
        if name in known:
            arguments.append(f"{name}={known[name]}" if keywords else known[name])
    code = f"lambda source, {', '.join(heard)}: made({', '.join(arguments)})"
    return cast(Callable[..., Any], eval(code, {"made": made}))


class WorkerEvent(Event, kw_only=True):
    """Base class of the events that concern one worker and share no fields with a message."""

    now_ticks: int
    worker: int


class WorkerJoined(WorkerEvent, kw_only=True):
    """A worker has joined and is now live. Every shard receives this event before the coordinator's state machine does.

    No worker joins while a change of the sync model is in progress.

    Attributes:
        worker: the worker that joined.
        iteration: label of the worker's next push.
        count: the worker's initial c_p; None for min c at this shard. If the run is in progress, all shards receive
            the same number, which is at least the `ShardMachine.entry` of each shard.
        superstep: the first superstep that waits for the worker, if the model plans barriers. If a worker is lost and
            joins again, earlier supersteps do not wait for it.
        pulls: True if the run is in progress, so that the worker next pulls its first weights, with the label
            `iteration` - 1. False if the worker has the initial weights.
    """

    iteration: int = 0
    count: int | None = None
    superstep: int = 0
    pulls: bool = False


class WorkerFenced(WorkerEvent, kw_only=True):
    """A worker was lost, and the shard holds one of its pushes, which other shards may not have received.

    The worker sends nothing more, and no mean with this push may be applied before the worker's `WorkerLost` event.
    This event is handled by the base class of the state machines (see `ShardMachine.frozen`).
    """


class WorkerLost(WorkerEvent, kw_only=True):
    """A worker was lost: it left without finishing. The worker's earlier pushes remain valid.

    Attributes:
        worker: the lost worker.
        kept: label of the worker's last push that all shards have received. Later pushes that are held are dropped.
            None if the shard holds no push of the worker.
    """

    kept: int | None = None


class WorkerFinished(WorkerEvent, kw_only=True):
    """A worker has finished its work and left. Other workers no longer wait for this worker."""


class PushFlags(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The attributes of a push besides its gradient, which are passed on from the script up to the trace.

    The front end sets the attributes that it knows, the host of a worker sets `outside_ticks`, and the core of the
    worker sets all others.

    Attributes:
        empty: True if the worker skipped the iteration: the push counts as progress but carries no gradient.
        stop: set on the worker's last push before the barrier of its superstep.
        change: set on the worker's last push before the sync model changes.
        significance: |g| / |w|, the norm of the gradient divided by the norm of the weights, if the model needs it.
        progress: set by a worker that was told to continue from a later round. The push is for that round, and c_p
            becomes at least `progress` + 1.
        samples: number of samples over which the gradient is averaged; None if it is unknown.
        weight: the weight of the gradient in a mean, for example its number of tokens; None to use `samples`.
        clip: set if the script clips the gradient that is applied. No model depends on this attribute.
        clipped: True if the script has clipped this worker's own gradient with `torch.nn.utils.clip_grad_norm_`.
        edit: set if the push contains new values of parameters instead of a gradient. No model depends on this
            attribute.
        set_index: the parameter set whose gradient is pushed, and whose weights are pulled; None for all sets.
        repeated: True if an earlier push of the worker was computed from the same samples, which are counted once.
        warm_up: True if the duration of the iteration says nothing about the next iterations. This is so for the
            worker's first iteration on an accelerator with batches of this size, for which programs are compiled or
            tuned, and for an edit.
        outside_ticks: time in ticks, since the worker's last pull was answered, during which its script did not train;
            see `paceline.core.metrics`. 0 in a run with `--hyperparameters raw`.
    """

    empty: bool = False
    stop: Stop | None = None
    change: Change | None = None
    significance: Annotated[float, msgspec.Meta(ge=0)] | None = None
    progress: Number | None = None
    samples: Number | None = None
    weight: Annotated[float, msgspec.Meta(ge=0, le=MOST_WEIGHT)] | None = None
    clip: Clip | None = None
    clipped: bool = False
    edit: Edit | None = None
    set_index: Number | None = None
    repeated: bool = False
    warm_up: bool = False
    outside_ticks: Ticks = 0

    @property
    def counted(self) -> int:
        """Number of samples that count as used because of this push. An unknown number counts as 0."""
        return 0 if self.repeated else self.samples or 0


class PushReceived(PushFlags, Event):
    """A worker's complete gradient for one iteration has arrived.

    Attributes:
        worker: the worker that pushed.
        iteration: label of the iteration.
        staleness: number of updates since the shard last sent its weights to the worker, if the model needs it.
        at_once: the largest number of workers that have been present at the same time so far, if the model needs it.
    """

    now_ticks: int
    worker: int
    iteration: int
    staleness: int | None = None
    at_once: int | None = None


class PullRequested(WorkerEvent, kw_only=True):
    """A worker requests the weights for the iteration after `iteration`."""

    iteration: int


class Repeat(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that is computing an iteration requests the current weights. The answer is never delayed.

    Attributes:
        iteration: label of the iteration.
        restart: True if the worker has aborted its computation and restarts the iteration, False if its script
            evaluates or edits the model.
        edit: number of the edit that the worker begins; None if it begins none.
    """

    iteration: Number
    restart: bool = True
    edit: Number | None = None


class PullRepeated(Repeat, Event):
    """A worker has sent a `Repeat`."""

    now_ticks: int
    worker: int


class TimerFired(WorkerEvent, kw_only=True):
    """A timer that the model has set is due. This event comes after all other events with the same time.

    If the worker has left or continued in the meantime, the model ignores the event.
    """

    iteration: int


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """A worker has pushed an iteration to all shards.

    Attributes:
        iteration: label of the iteration.
        superstep: set if the push was the worker's last push before the barrier of the superstep with this number.
        change: set if the push was the worker's last push before the change with this number.
        attempt: number of times that the worker has restarted the iteration.
        warm_up: see `PushFlags`.
        outside_ticks: see `PushFlags`.
    """

    iteration: Number
    superstep: Number | None = None
    change: Number | None = None
    attempt: Number = 0
    warm_up: bool = False
    outside_ticks: Ticks = 0


class IterationFinished(Finish, Event):
    """A worker has reported a `Finish` to the coordinator."""

    now_ticks: int
    worker: int


class IterationStarted(WorkerEvent, kw_only=True):
    """A worker reports to the coordinator that it has received its weights and is starting `iteration`.

    If the model needs these reports, a worker reports the start of every iteration. A worker that is present from the
    beginning of the run does not report its first iteration. The worker always reports the start of the first iteration
    after a change of the sync model, and never reports a restart.
    """

    iteration: int


class SyncRequested(WorkerEvent, kw_only=True):
    """A worker reports to the coordinator that it has reached a point at which the sync model should change.

    All workers run the same script, so each of them requests the same changes in the same order. Of several requests
    with the same `source` and `number`, only the first one has an effect.

    Attributes:
        worker: the worker that sent the request.
        source: "schedule" if the run's schedule contains the change, "script" if the training script requested it,
            "auto" if the coordinator has chosen the model (see `paceline.core.auto`); in this case, `worker` is any
            live worker.
        number: number of the request, counted from 0 for each source. If the workers that have made earlier requests
            are gone, the coordinator gives a script's request the next number.
        sync: the requested model, as in `Change.sync`.
    """

    source: Literal["schedule", "script", "auto"]
    number: int
    sync: str


class JointNorm(msgspec.Struct, frozen=True, kw_only=True):
    """All shards have reported the norm of their part of a mean.

    Attributes:
        pushes: (worker, iteration) of each push in this shard's part of the mean.
        factor: the factor by which the mean is multiplied, which is the same at all shards.
    """

    pushes: tuple[tuple[int, int], ...]
    factor: float


class MeanClipped(JointNorm, Event):
    """The shard has learned of a `JointNorm`. The shard itself handles this event, not the model."""

    now_ticks: int


class RateTempered(Event, kw_only=True):
    """The guard of the run has changed the learning rate. The shard itself handles this event, not the model.

    Attributes:
        factor: the factor by which the learning rate is multiplied from now on, in (0, 1].
    """

    now_ticks: int
    factor: float


AnyEvent = (
    WorkerJoined
    | WorkerFenced
    | WorkerLost
    | WorkerFinished
    | PushReceived
    | PullRequested
    | PullRepeated
    | TimerFired
    | IterationFinished
    | IterationStarted
    | SyncRequested
)
"""Any event that a host of a sync model can receive."""

OfShard = MeanClipped | RateTempered
"""An event that a shard handles itself. No model receives it."""

RecordedEvent = AnyEvent | OfShard
"""Any event of a trace."""

"""Events: the input of a sync model. Events are immutable, and their names are in the past tense.

A model knows the time only from its events: `now_s` is the host's clock, in seconds since the run began. A trace
contains the events of a run, and passing them to the model again gives the same actions.

Each worker has two counters. `iteration` is the label that the worker itself gives to an iteration, counted from 0.
The model counts c_p, the number of iterations that worker p has pushed; a worker that joins late starts with the c_p
of the slowest live worker.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

__all__ = [
    "AnyEvent",
    "Change",
    "Event",
    "IterationFinished",
    "IterationStarted",
    "Number",
    "PullRepeated",
    "PullRequested",
    "PushReceived",
    "Stop",
    "SyncRequested",
    "TimerFired",
    "WorkerFinished",
    "WorkerJoined",
    "WorkerLost",
]


Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""An index or a count. A message from another process is refused if it contains a number outside these bounds."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The flag on a worker's last push before the barrier of its superstep.

    The flag lists the members of the superstep, so that all shards wait for the same workers before they close it,
    even if a shard has not been notified of all joins yet.
    """

    superstep: Number
    members: tuple[Number, ...]


class Change(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A change of the sync model. As a flag on a push, it marks the worker's last push under the old model.

    Attributes:
        number: number of the change, counted from 1 within a run.
        members: the workers whose flagged pushes together form the boundary between the models.
        sync: the new model in the notation of the command line: one model, or one for each shard, separated by "|".
    """

    number: Number
    members: tuple[Number, ...]
    sync: str


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base class of the events. `now_s` never decreases between successive events of the same host."""

    now_s: float


class WorkerJoined(Event, frozen=True, kw_only=True, tag=True):
    """A worker is live from now on. Every shard receives this event before the coordinator's machine does.

    If a worker is lost and joins again, `superstep` and `change` ensure that plans and changes made before the worker
    was lost do not wait for it.

    Attributes:
        worker: the worker that joined.
        iteration: label of the worker's next push.
        count: the worker's initial c_p; None for min c at this shard. If there are several shards and other workers
            have already pushed, all shards receive the same number, close to the c_p of the slowest worker.
        superstep: the first superstep that waits for the worker, if the model plans barriers.
        change: number of changes of the sync model that had been published when the worker joined.
    """

    worker: int
    iteration: int = 0
    count: int | None = None
    superstep: int = 0
    change: int = 0


class WorkerLost(Event, frozen=True, kw_only=True, tag=True):
    """A worker was lost: it left without finishing. Its earlier pushes remain valid."""

    worker: int


class WorkerFinished(Event, frozen=True, kw_only=True, tag=True):
    """A worker has finished its work and left. No other worker waits for it from now on."""

    worker: int


class PushReceived(Event, frozen=True, kw_only=True, tag=True):
    """A worker's gradient of one iteration has arrived completely.

    Attributes:
        worker: the worker that pushed.
        iteration: label of the iteration.
        empty: True if the worker skipped the iteration: the push counts as progress but carries no gradient.
        stop: set on the worker's last push before the barrier of its superstep.
        change: set on the worker's last push before the sync model changes.
        significance: |g| / |w|, if the model needs it.
        progress: set by a worker that was told to continue from a later round. The push is for that round, and c_p
            becomes `progress` + 1.
    """

    worker: int
    iteration: int
    empty: bool = False
    stop: Stop | None = None
    change: Change | None = None
    significance: float | None = None
    progress: int | None = None


class PullRequested(Event, frozen=True, kw_only=True, tag=True):
    """A worker requests the weights for the iteration after `iteration`."""

    worker: int
    iteration: int


class PullRepeated(Event, frozen=True, kw_only=True, tag=True):
    """A worker has aborted its computation of `iteration` and requests the weights again to restart it."""

    worker: int
    iteration: int


class TimerFired(Event, frozen=True, kw_only=True, tag=True):
    """A timer that the model has set is due. This event comes after all other events with the same time.

    The timer may be for a worker that has left or continued in the meantime. The model then ignores the event.
    """

    worker: int
    iteration: int


class IterationFinished(Event, frozen=True, kw_only=True, tag=True):
    """A worker reports to the coordinator that it has pushed an iteration.

    Attributes:
        worker: the worker that pushed.
        iteration: label of the iteration.
        superstep: set if the push was the worker's last one before the barrier of the superstep with this number.
        change: set if the push was the worker's last one before the change with this number.
    """

    worker: int
    iteration: int
    superstep: int | None = None
    change: int | None = None


class IterationStarted(Event, frozen=True, kw_only=True, tag=True):
    """A worker reports to the coordinator that it has received its weights and computes `iteration`.

    If the model needs these reports, a worker reports every iteration except its first one. A worker always reports
    the first iteration after a change, and never the restart of an iteration.
    """

    worker: int
    iteration: int


class SyncRequested(Event, frozen=True, kw_only=True, tag=True):
    """A worker reports to the coordinator that it has reached a point at which the sync model changes.

    All workers run the same script, so each of them requests the same changes in the same order. Of several requests
    with the same `source` and `number`, only the first one has an effect.

    Attributes:
        worker: the worker that sent the request.
        source: "schedule" if the change is in the schedule of the run, "script" if the script requested it.
        number: number of the request, counted from 0 for each source.
        sync: the requested model, as in `Change.sync`.
    """

    worker: int
    source: Literal["schedule", "script"]
    number: int
    sync: str


AnyEvent = (
    WorkerJoined
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
"""Any event. A trace holds events of these types only."""

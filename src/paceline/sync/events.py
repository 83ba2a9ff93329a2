"""What a sync model is told: frozen facts, in the past tense.

Time arrives only here: `now_s` is the host's clock, in seconds since the run began. Events are values; the
trace of a run is a list of them, and feeding that list to the pure model again gives the same actions.

Two numbers go with a worker. `iteration` is the label that the worker itself gives to the iteration it
computed, counted from 0. The model keeps c_p besides, the number of iterations that worker p has pushed; a
worker that joins late starts with c_p at the slowest live worker's.
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
"""An index or a count. Where it arrives from another process, what is beyond any that there can be is refused."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The flag on a push with which a worker arrives at its superstep's barrier.

    It names the members, so that every shard closes the superstep by the same list, whatever joins or plans
    that shard has or has not heard of yet.
    """

    superstep: Number
    members: tuple[Number, ...]


class Change(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A change of the sync model. As a flag on a push: the worker's last one under the old model.

    Attributes:
        number: counts the changes of a run, from 1.
        members: the workers whose flagged pushes, together, are the boundary.
        sync: what follows, in the notation of the command line: one model, or one for each shard with "|" between.
    """

    number: Number
    members: tuple[Number, ...]
    sync: str


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A fact. `now_s` never decreases from one event to the next of the same host."""

    now_s: float


class WorkerJoined(Event, frozen=True, kw_only=True, tag=True):
    """A worker is live from now on. Every shard hears of it before the coordinator's machine does.

    Its next push is labelled `iteration`. Where there are several shards and others have pushed already, `count` is
    its c_p, the same at all of them, near the slowest live worker's; None for the slowest's at this shard. Where
    barriers are planned, `superstep` is the first one that it is a member of; `change` is the number of changes of
    model that had been published when it joined. So a worker that was lost and has joined anew is not waited for by
    plans or changes made for its former life.
    """

    worker: int
    iteration: int = 0
    count: int | None = None
    superstep: int = 0
    change: int = 0


class WorkerLost(Event, frozen=True, kw_only=True, tag=True):
    """A worker is gone without having said so. What it had pushed stays."""

    worker: int


class WorkerFinished(Event, frozen=True, kw_only=True, tag=True):
    """A worker has done its work and left. It blocks nobody from now on."""

    worker: int


class PushReceived(Event, frozen=True, kw_only=True, tag=True):
    """A worker's gradient of one iteration is here, whole.

    `empty` says that the push counts as progress but carries no gradient (the worker skipped it); `stop` is
    set on the push with which the worker arrives at its superstep's barrier, `change` on its last one before the
    sync model changes; `significance` is |g| / |w|, where the model has asked for it. `progress` is set by a worker
    that was told to go on from a later round: this push is for that round, and c_p becomes one more.
    """

    worker: int
    iteration: int
    empty: bool = False
    stop: Stop | None = None
    change: Change | None = None
    significance: float | None = None
    progress: int | None = None


class PullRequested(Event, frozen=True, kw_only=True, tag=True):
    """A worker asks for the weights with which to start the iteration after `iteration`."""

    worker: int
    iteration: int


class PullRepeated(Event, frozen=True, kw_only=True, tag=True):
    """A worker has dropped its computation of `iteration` and asks for weights again, to start it anew."""

    worker: int
    iteration: int


class TimerFired(Event, frozen=True, kw_only=True, tag=True):
    """A timer that the model had set is due. Of two events at one moment, it is the later.

    It may fire for a worker that has left or gone on meanwhile; nothing comes of it then.
    """

    worker: int
    iteration: int


class IterationFinished(Event, frozen=True, kw_only=True, tag=True):
    """The small `notify` that the coordinator gets for a finished iteration of a worker.

    `superstep` is set when the push was flagged as the worker's last one before that superstep's barrier, `change`
    when it was the last one before the change of that number.
    """

    worker: int
    iteration: int
    superstep: int | None = None
    change: int | None = None


class IterationStarted(Event, frozen=True, kw_only=True, tag=True):
    """Told to the coordinator: a worker has its weights and computes `iteration`.

    Sent where the model asks for it, for each iteration but the worker's first, and always for the first one after a
    change; not when one is started anew.
    """

    worker: int
    iteration: int


class SyncRequested(Event, frozen=True, kw_only=True, tag=True):
    """Told to the coordinator: a worker has reached a point at which the sync model is to change.

    All workers run the same script and so ask for the same changes in the same order, each when it gets there. Of
    several with the same `source` and `number`, the first counts.

    Attributes:
        source: "schedule", of the run, or "script", a call in it.
        number: counts the requests of that source, from 0.
        sync: what is wanted, as in `Change.sync`.
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
"""Every event there is: what a trace may hold."""

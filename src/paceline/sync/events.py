"""What a sync model is told: frozen facts, in the past tense.

Time arrives only here: `now_s` is the host's clock, in seconds since the run began. Events are values; the
trace of a run is a list of them, and feeding that list to the pure model again gives the same actions.

Two numbers go with a worker. `iteration` is the label that the worker itself gives to the iteration it
computed, counted from 0. The model keeps c_p besides, the number of iterations that worker p has pushed; a
worker that joins late starts with c_p at the slowest live worker's.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "AnyEvent",
    "Event",
    "IterationFinished",
    "PullRequested",
    "PushReceived",
    "Stop",
    "WorkerFinished",
    "WorkerJoined",
    "WorkerLost",
]


class Stop(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The flag on a push with which a worker arrives at its superstep's barrier.

    It names the members, so that every shard closes the superstep by the same list, whatever joins or plans
    that shard has or has not heard of yet.
    """

    superstep: int
    members: tuple[int, ...]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A fact. `now_s` never decreases from one event to the next of the same host."""

    now_s: float


class WorkerJoined(Event, frozen=True, kw_only=True, tag=True):
    """A worker is live from now on.

    Its next push is labelled `iteration`. Where barriers are planned, `superstep` is the first one that it is a
    member of; so a worker that was lost and has joined anew is not waited for by plans made for its former life.
    """

    worker: int
    iteration: int = 0
    superstep: int = 0


class WorkerLost(Event, frozen=True, kw_only=True, tag=True):
    """A worker is gone without having said so. What it had pushed stays."""

    worker: int


class WorkerFinished(Event, frozen=True, kw_only=True, tag=True):
    """A worker has done its work and left. It blocks nobody from now on."""

    worker: int


class PushReceived(Event, frozen=True, kw_only=True, tag=True):
    """A worker's gradient of one iteration is here, whole.

    `empty` says that the push counts as progress but carries no gradient (the worker skipped it); `stop` is
    set on the push with which the worker arrives at its superstep's barrier; `significance` is |g| / |w|, where
    the model has asked for it.
    """

    worker: int
    iteration: int
    empty: bool = False
    stop: Stop | None = None
    significance: float | None = None


class PullRequested(Event, frozen=True, kw_only=True, tag=True):
    """A worker asks for the weights with which to start the iteration after `iteration`."""

    worker: int
    iteration: int


class IterationFinished(Event, frozen=True, kw_only=True, tag=True):
    """The small `notify` that the coordinator gets for each finished iteration of each worker.

    `superstep` is set when the push was flagged as the worker's last one before that superstep's barrier.
    """

    worker: int
    iteration: int
    superstep: int | None = None


AnyEvent = WorkerJoined | WorkerLost | WorkerFinished | PushReceived | PullRequested | IterationFinished
"""Every event there is: what a trace may hold."""

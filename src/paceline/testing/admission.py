"""Which workers must wait at a shard, by the admission rule of each sync model.

The rules are written from the models' descriptions. They use only the events that a shard has received and the pulls
that it has answered, never the state of a state machine, so they detect a state machine that counts incorrectly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from ..sync import (
    ASP,
    BSP,
    DSPS,
    DSSP,
    PSSP,
    SSP,
    Conditions,
    DropStragglers,
    DynamicPSSP,
    ElasticBSP,
    NaiveWaiting,
    SpecSync,
    SyncModel,
)
from ..sync.events import Change, Stop

__all__ = [
    "NEVER",
    "STOPPED",
    "UNKNOWN",
    "Admission",
    "ShardView",
    "WorkerView",
    "admission",
    "more_ahead_than",
    "within",
]


class WorkerView(NamedTuple):
    """What one shard has received from one worker.

    Attributes:
        state: "unknown" before the worker joins, "live" while it takes part, "passed" if its last push under the old
            model has arrived while a change is in progress, "left" after it has finished or was lost.
        pushed: c_p under the model in force.
        asks: True if the worker's last pull has not been answered.
        deferred: True if no timer has fired since the worker's last pull.
        stop: the barrier flag of the worker's last push.
        last_stop: the latest superstep that does not wait for the worker, because the worker has stopped for it or is
            not a member.
    """

    state: Literal["unknown", "live", "passed", "left"] = "unknown"
    pushed: int = 0
    asks: bool = False
    deferred: bool = False
    stop: Stop | None = None
    last_stop: int = -1


class ShardView(NamedTuple):
    """What one shard has received.

    Attributes:
        sync: the model in force.
        worked: the previous model, to which the shard falls back if a user's condition fails.
        workers: what the shard has received from each worker.
        round: V_train.
        change: the change in progress.
        changed: the number of the last completed change.
    """

    sync: SyncModel
    worked: SyncModel
    workers: tuple[WorkerView, ...]
    round: int = 0
    change: Change | None = None
    changed: int = 0


Workers = Callable[[ShardView], set[int]]
"""A function that selects workers by what their shard has received."""


class Admission(NamedTuple):
    """The rule that determines which workers wait at a shard.

    Attributes:
        must: returns the workers that must wait.
        may: returns the other workers that may wait.
        quorum: number of pushes that close a round; None if all workers must push. This determines
            `ShardView.round`.
    """

    must: Workers
    may: Workers
    quorum: int | None = None


def none_of_them(shard: ShardView) -> set[int]:
    """Return the empty set."""
    return set()


def beyond(gap: float) -> Workers:
    """Return a function for the workers with an unanswered pull and c_p - V_train > gap.

    V_train is min c, unless a worker that has joined late is behind V_train.
    """

    def workers(shard: ShardView) -> set[int]:
        return {w for w, view in enumerate(shard.workers) if view.asks and view.pushed - shard.round > gap}

    return workers


def more_ahead_than(staleness: float) -> Admission:
    """Return the rule of SSP: a worker waits if c_p - V_train > s."""
    return Admission(beyond(staleness), beyond(staleness))


def within(must: float, may: float) -> Admission:
    """Return a rule: workers with a gap above `must` must wait, and workers with a gap above `may` may wait."""
    return Admission(beyond(must), beyond(may))


def round_open(shard: ShardView) -> set[int]:
    """Return the workers whose round has not closed."""
    return {w for w, view in enumerate(shard.workers) if view.asks and view.pushed > shard.round}


def timer_runs(shard: ShardView) -> set[int]:
    """Return the workers whose pull is deferred by a timer."""
    return {w for w, view in enumerate(shard.workers) if view.asks and view.deferred}


def superstep_open(shard: ShardView) -> set[int]:
    """Return the workers that have stopped for a superstep for which a live member has not stopped yet."""
    return {
        w
        for w, view in enumerate(shard.workers)
        if view.asks
        and view.stop is not None
        and any(
            shard.workers[member].state == "live" and shard.workers[member].last_stop < view.stop.superstep
            for member in view.stop.members
        )
    }


def any_of_them(shard: ShardView) -> set[int]:
    """Return all workers with an unanswered pull."""
    return {w for w, view in enumerate(shard.workers) if view.asks}


NEVER = Admission(none_of_them, none_of_them)
"""No worker waits."""

UNKNOWN = Admission(none_of_them, any_of_them)
"""Any worker may wait. This is the rule for unknown models."""

STOPPED = Admission(superstep_open, superstep_open)
"""Workers wait at the barrier of their superstep."""


def admission(sync: SyncModel) -> Admission:
    """Return the rule of a model. Conditions are assumed to answer a pull if the gap is at most 1."""
    match sync:
        case BSP():
            return more_ahead_than(0)
        case ASP():
            return NEVER
        case SSP() if sync.execution == "lazy":
            return Admission(beyond(sync.staleness), beyond(0))
        case SSP():
            return more_ahead_than(sync.staleness)
        case DSSP():
            return within(sync.upper, sync.lower)
        case DSPS():
            return within(sync.upper, 0 if sync.execution == "lazy" else sync.lower)
        case PSSP() | DynamicPSSP():
            return Admission(none_of_them, beyond(0 if sync.execution == "lazy" else sync.staleness))
        case DropStragglers():
            return Admission(round_open, round_open, sync.quorum)
        case NaiveWaiting():
            return Admission(timer_runs, timer_runs)
        case ElasticBSP():
            return STOPPED
        case SpecSync():
            return admission(sync.base)
        case Conditions():  # the gap is relative to min c, which is below V_train after a worker has joined late
            return Admission(beyond(1), beyond(0))
        case _:
            return UNKNOWN

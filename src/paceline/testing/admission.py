"""Which workers must wait at a shard, by the admission rule of each sync model.

The rules are written from the models' docstrings. They see the events that a shard has received and the pulls that it
has answered, and never the state of a machine, so a machine that miscounts is found out.
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
    """What one shard has received of one worker.

    Attributes:
        state: "passed" if it has ended the old model during a change.
        pushed: c_p under the model in force.
        asks: True if its last pull is not answered.
        deferred: True until a timer has fired after its last pull.
        stop: the flag of its last push.
        last_stop: the latest superstep that it has flagged a push for, or is no member of.
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
        worked: the model before it, which replaces one whose condition fails.
        workers: what it has received of each worker.
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
"""What one shard has received -> some of the workers there."""


class Admission(NamedTuple):
    """Which workers wait at a shard.

    Attributes:
        must: workers that must wait.
        may: workers that may wait besides.
        quorum: the number of pushes that closes a round; None for those of all workers. It determines
            `ShardView.round`.
    """

    must: Workers
    may: Workers
    quorum: int | None = None


def none_of_them(shard: ShardView) -> set[int]:
    """Return no worker."""
    return set()


def beyond(gap: float) -> Workers:
    """Workers that ask with c_p - V_train > gap. V_train is min c, except while a late worker is behind it."""

    def workers(shard: ShardView) -> set[int]:
        return {w for w, view in enumerate(shard.workers) if view.asks and view.pushed - shard.round > gap}

    return workers


def more_ahead_than(staleness: float) -> Admission:
    """SSP: a worker that asks with c_p - V_train > s waits."""
    return Admission(beyond(staleness), beyond(staleness))


def within(must: float, may: float) -> Admission:
    """A worker that asks with a gap above `must` waits; one with a gap above `may` may wait."""
    return Admission(beyond(must), beyond(may))


def round_open(shard: ShardView) -> set[int]:
    """Workers whose round has not closed."""
    return {w for w, view in enumerate(shard.workers) if view.asks and view.pushed > shard.round}


def timer_runs(shard: ShardView) -> set[int]:
    """Workers whose pull is deferred by a timer."""
    return {w for w, view in enumerate(shard.workers) if view.asks and view.deferred}


def superstep_open(shard: ShardView) -> set[int]:
    """Workers that have stopped while a live member of their superstep has not."""
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
"""Any worker may wait: the rule of a model that is not known."""

STOPPED = Admission(superstep_open, superstep_open)
"""Workers wait at the barrier of their superstep."""


def admission(sync: SyncModel) -> Admission:
    """Return the rule of a model. A user's conditions are taken for "answered iff the gap is at most 1"."""
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
        case Conditions():  # a gap is measured from min c, which a late worker may pull below V_train
            return Admission(beyond(1), beyond(0))
        case _:
            return UNKNOWN

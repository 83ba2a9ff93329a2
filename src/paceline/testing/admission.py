"""The admission rule of each sync model, which determines the workers that must wait at a shard.

The rules follow the models' descriptions. A rule depends only on the events that a shard has received and the pulls
that it has answered, never on the state of a state machine. So the rules detect state machines that count incorrectly.
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
    Rennala,
    Ringmaster,
    SpecSync,
    SyncModel,
)
from ..sync.events import Change, Stop


class WorkerView(NamedTuple):
    """A summary of what one shard has received from one worker.

    Attributes:
        state: "unknown" before the worker joins, "live" while it takes part, "passed" if a change of the model is in
            progress and the worker's last push under the old model has arrived, "left" if it finished or was lost.
        pushed: c_p, the number of iterations that the worker has pushed under the model in force.
        asks: True if the worker's last pull has not been answered.
        deferred: True if the worker's last pull has not been answered and the worker's timer has not fired since.
        stop: the barrier flag of the worker's last push; None if the push had no flag.
        fenced: True from the `WorkerFenced` event of a lost worker until its `WorkerLost` event.
        joining: True from the time at which the worker joins a run in progress until the worker's first pull is
            answered.
        newest: True if the worker's weights are those of the current round.
        counted: True if a gradient of the worker is in the mean of the current round.
        last_stop: the latest superstep whose barrier does not wait for the worker, because the worker has stopped for
            this superstep or is not a member of it.
    """

    state: Literal["unknown", "live", "passed", "left"] = "unknown"
    pushed: int = 0
    asks: bool = False
    deferred: bool = False
    stop: Stop | None = None
    last_stop: int = -1
    joining: bool = False
    fenced: bool = False
    newest: bool = True
    counted: bool = False


class ShardView(NamedTuple):
    """A summary of what one shard has received.

    Attributes:
        sync: the model in force.
        worked: the previous model, to which the shard returns if a user's condition fails.
        workers: a summary of what the shard has received from each worker.
        round: V_train, the number of complete rounds.
        change: the change of the model that is in progress; None if no change is in progress.
        changed: the number of the last completed change of the model.
        alone: True if all shards run the model in force. Otherwise, if the rule has a quorum, a push belongs to the
            round of its weights, and only then are `newest` and `counted` kept up to date.
    """

    sync: SyncModel
    worked: SyncModel
    workers: tuple[WorkerView, ...]
    round: int = 0
    change: Change | None = None
    changed: int = 0
    alone: bool = True


Workers = Callable[[ShardView], set[int]]
"""A function that selects workers, given what their shard has received."""


class Admission(NamedTuple):
    """The rule that determines which workers wait at a shard.

    Attributes:
        must: function that returns the workers that must wait.
        may: function that returns the workers that are allowed to wait. It may leave out workers that must wait.
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
    """Return a function that selects the workers with an unanswered pull and c_p - V_train > gap.

    V_train equals the smallest c_p, unless a worker that joined late is behind V_train.
    """

    def workers(shard: ShardView) -> set[int]:
        return {w for w, view in enumerate(shard.workers) if view.asks and view.pushed - shard.round > gap}

    return workers


def more_ahead_than(staleness: float) -> Admission:
    """Return the rule of SSP: a worker waits if and only if c_p - V_train > staleness."""
    return within(staleness, staleness)


def within(must: float, may: float) -> Admission:
    """Return a rule: workers with a gap above `must` must wait, and other workers with a gap above `may` may wait."""
    return Admission(beyond(must), beyond(may))


def round_open(shard: ShardView) -> set[int]:
    """Return the workers that wait for their round to close."""
    return {w for w, view in enumerate(shard.workers) if view.asks and view.pushed > shard.round}


def timer_runs(shard: ShardView) -> set[int]:
    """Return the workers that wait for a timer to fire."""
    return {w for w, view in enumerate(shard.workers) if view.asks and view.deferred}


def superstep_open(shard: ShardView) -> set[int]:
    """Return the workers that have stopped for a superstep for which another live member has not stopped yet."""
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
"""Any worker may wait. This is the rule for models that this module does not know."""

STOPPED = Admission(superstep_open, superstep_open)
"""A worker waits at the barrier of its superstep until all live members have stopped for the superstep."""


def admission(sync: SyncModel) -> Admission:
    """Return the admission rule of a model. `Conditions` are assumed to answer a pull if the gap is at most 1."""
    match sync:
        case BSP():
            return more_ahead_than(0)
        case ASP() | Rennala() | Ringmaster():
            return NEVER
        case SSP() if sync.execution == "lazy":
            return within(sync.staleness, 0)
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
        case Conditions():
            # Conditions measure the gap from the smallest c_p, which can be below V_train after a late join.
            return within(1, 0)
        case _:
            return UNKNOWN

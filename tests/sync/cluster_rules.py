"""What a shard has been told, and who must wait there by each sync model's admission rule.

The rules are written from the models' docstrings. They see what a shard has been told and what it has answered, never
a machine's own state, so a machine that miscounts is found out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from paceline.sync import (
    ASP,
    BSP,
    DSPS,
    DSSP,
    PSSP,
    SSP,
    AnySyncModel,
    Conditions,
    DropStragglers,
    DynamicPSSP,
    ElasticBSP,
    NaiveWaiting,
    SpecSync,
    SyncModel,
)
from paceline.sync.events import Change, Stop

__all__ = ["Admission", "Key", "Seen", "Told", "admission", "more_ahead_than", "nobody", "stopped", "within"]

Key = tuple[int, int]
"""(worker, iteration): of a push, or of a timer."""


class Seen(NamedTuple):
    """What one shard has been told of one worker."""

    state: Literal["unknown", "live", "boundary", "left"] = "unknown"  # boundary: it has ended the old model
    pushed: int = 0  # c_p, under the model in force
    asks: bool = False  # its last pull has not been answered
    put_off: bool = False  # its timer has not fired since
    stop: Stop | None = None  # the flag of its last push
    last_stop: int = -1  # the latest superstep that it has flagged a push for, or need not


class Told(NamedTuple):
    """What one shard has been told."""

    sync: AnySyncModel  # the model in force
    worked: AnySyncModel  # the one before, to which a failed condition gives way
    seen: tuple[Seen, ...]
    round: int = 0  # V_train
    change: Change | None = None  # under way
    changed: int = 0  # number of the last change that was completed


Workers = Callable[[Told], set[int]]
"""What one shard has been told -> some of the workers there."""


class Admission(NamedTuple):
    """Who waits at a shard.

    Attributes:
        must: these wait.
        may: and of the others, these may.
        quorum: how many pushes close a round; None for everybody's. What closes it is `Told.round`.
    """

    must: Workers
    may: Workers
    quorum: int | None = None


def nobody_at_all(told: Told) -> set[int]:
    return set()


def beyond(gap: float) -> Workers:
    """Who asks with c_p - V_train > gap. V_train is min c, but for a late worker that others saw less far."""

    def workers(told: Told) -> set[int]:
        return {w for w, its in enumerate(told.seen) if its.asks and its.pushed - told.round > gap}

    return workers


def more_ahead_than(staleness: float) -> Admission:
    """SSP: whoever asks with c_p - V_train > s waits."""
    return Admission(beyond(staleness), beyond(staleness))


def within(must: float, may: float) -> Admission:
    """Whoever asks with a gap above `must` waits, whoever has one above `may` may wait."""
    return Admission(beyond(must), beyond(may))


def round_open(told: Told) -> set[int]:
    """Whose round has not closed."""
    return {w for w, its in enumerate(told.seen) if its.asks and its.pushed > told.round}


def whose_timer_runs(told: Told) -> set[int]:
    return {w for w, its in enumerate(told.seen) if its.asks and its.put_off}


def whose_superstep_is_open(told: Told) -> set[int]:
    """Whoever has stopped waits for the live members that have not."""
    return {
        w
        for w, its in enumerate(told.seen)
        if its.asks
        and its.stop is not None
        and any(
            told.seen[member].state == "live" and told.seen[member].last_stop < its.stop.superstep
            for member in its.stop.members
        )
    }


nobody = Admission(nobody_at_all, nobody_at_all)
stopped = Admission(whose_superstep_is_open, whose_superstep_is_open)
anybody_ahead = beyond(0)


def admission(sync: SyncModel) -> Admission:
    """A model's rule. A user's conditions are taken for "answered iff the gap is at most 1"."""
    match sync:
        case BSP():
            return more_ahead_than(0)
        case ASP():
            return nobody
        case SSP() if sync.execution == "lazy":
            return Admission(beyond(sync.staleness), anybody_ahead)
        case SSP():
            return more_ahead_than(sync.staleness)
        case DSSP():
            return within(sync.upper, sync.lower)
        case DSPS():
            return within(sync.upper, 0 if sync.execution == "lazy" else sync.lower)
        case PSSP() | DynamicPSSP():
            return Admission(nobody_at_all, beyond(0 if sync.execution == "lazy" else sync.staleness))
        case DropStragglers():
            return Admission(round_open, round_open, sync.quorum)
        case NaiveWaiting():
            return Admission(whose_timer_runs, whose_timer_runs)
        case ElasticBSP():
            return stopped
        case SpecSync():
            return admission(sync.base)
        case Conditions():  # a gap is measured from min c, which a late worker may pull below V_train
            return Admission(beyond(1), anybody_ahead)
        case _:
            raise AssertionError(f"no rule is written for {sync}")

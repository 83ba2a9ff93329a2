"""What a sync model asks its host to do: frozen requests, in the imperative.

The host carries them out in the order given, each before the next: an update is applied before any pull that
waits on it is answered.
"""

from __future__ import annotations

import msgspec

from .events import Change

__all__ = [
    "Action",
    "AnswerPull",
    "AnyAction",
    "ApplyMean",
    "ApplyPush",
    "DropPush",
    "HoldPush",
    "Plan",
    "PublishChange",
    "PublishPlan",
    "ReportFault",
    "RestartWorker",
    "SetTimer",
]


class Action(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A request to the host."""


class ApplyPush(Action, frozen=True, tag=True):
    """Apply this push now: one optimizer step with its gradient times `scale`."""

    worker: int
    iteration: int
    scale: float = 1.0


class HoldPush(Action, frozen=True, tag=True):
    """Keep this push; a later `ApplyMean` names it."""

    worker: int
    iteration: int


class ApplyMean(Action, frozen=True, tag=True):
    """Apply the mean of these held pushes, summed in the order given: one optimizer step.

    `pushes` are (worker, iteration) pairs in worker order, so that the sum is the same number everywhere.
    """

    pushes: tuple[tuple[int, int], ...]


class DropPush(Action, frozen=True, tag=True):
    """Forget this push. It counts as progress all the same."""

    worker: int
    iteration: int


class AnswerPull(Action, frozen=True, tag=True, repr_omit_defaults=True):
    """Send the weights as they are now to this worker, which asked for them after `iteration`.

    `v_train` is set where its push came too late for its round. It goes on from the latest such round that any shard
    names, and says so with its next push, to all shards alike.
    """

    worker: int
    iteration: int
    v_train: int | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """When the next barrier falls, in iterations and never in times.

    Attributes:
        superstep: its number, from 0.
        stops: (worker, iteration) for each member: it stops with its first push at or past that iteration.
        wait_s: the predicted d_Z, seconds between the first and the last arrival.
        barrier_s: the predicted time of the last arrival, on the clock of the events.
    """

    superstep: int
    stops: tuple[tuple[int, int], ...]
    wait_s: float
    barrier_s: float

    @property
    def members(self) -> tuple[int, ...]:
        """The workers that the superstep waits for, in ascending order."""
        return tuple(worker for worker, _ in self.stops)


class PublishPlan(Action, frozen=True, tag=True):
    """Send this plan to each of its members."""

    plan: Plan


class RestartWorker(Action, frozen=True, tag=True):
    """Tell this worker to drop its computation of `iteration`, pull, and start it anew; unless it has pushed it."""

    worker: int
    iteration: int


class SetTimer(Action, frozen=True, tag=True):
    """Come back with a `TimerFired` of this worker and iteration at `due_s`, on the clock of the events."""

    worker: int
    iteration: int
    due_s: float


class PublishChange(Action, frozen=True, tag=True):
    """Send this change to each of its members: each flags its next push with it."""

    change: Change


class ReportFault(Action, frozen=True, tag=True):
    """Tell the user that a condition of theirs has failed, and what decides from now on.

    Attributes:
        reason: what was wrong, in a sentence.
        traceback: the condition's own, or "" if it returned what it must not.
        sync: the model in force from now on.
    """

    reason: str
    traceback: str
    sync: str


AnyAction = (
    ApplyPush
    | HoldPush
    | ApplyMean
    | DropPush
    | AnswerPull
    | SetTimer
    | ReportFault
    | PublishPlan
    | RestartWorker
    | PublishChange
)
"""Every action there is: what a trace may hold."""

"""Actions: the requests that a sync model makes to its host. Actions are immutable, and their names are imperatives.

The host carries out the actions in the order given and completes each action before the next. For example, an update is
applied before any pull that waits for it is answered.
"""

from __future__ import annotations

from typing import dataclass_transform

import msgspec

from .events import Change


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Action(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A request to the host. The subclasses are frozen and tagged, too."""


class ApplyPush(Action):
    """Apply this push now: take one optimizer step with its gradient multiplied by `scale`."""

    worker: int
    iteration: int
    scale: float = 1.0


class HoldPush(Action):
    """Keep this push until a later `ApplyMean` lists it."""

    worker: int
    iteration: int


class ApplyMean(Action):
    """Take one optimizer step with the mean of these held pushes, which are summed in the order given.

    `pushes` contains (worker, iteration) pairs sorted by worker, so the sum does not depend on the order of arrival.
    """

    pushes: tuple[tuple[int, int], ...]


class DropPush(Action):
    """Discard this push. The push still counts toward the worker's progress."""

    worker: int
    iteration: int


class AnswerPull(Action, repr_omit_defaults=True):
    """Answer the pull that followed this worker's push of `iteration`: send the worker the current weights.

    If all shards run this model, and the worker's next push would come too late for its round, `v_train` is the round
    from which the worker should continue. If several shards set `v_train`, the worker uses the largest value and
    reports it with its next push.
    """

    worker: int
    iteration: int
    v_train: int | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The position of the next barrier, defined by one iteration for each member rather than by a time.

    Attributes:
        superstep: number of the superstep, counted from 0.
        stops: a pair (worker, iteration) for each member. The member stops with its first push of this iteration or
            of a later iteration.
        wait_ticks: the predicted time between the first and the last arrival at the barrier (d_Z), in ticks.
        barrier_ticks: the predicted time of the last arrival at the barrier, in ticks on the host's clock.
    """

    superstep: int
    stops: tuple[tuple[int, int], ...]
    wait_ticks: int
    barrier_ticks: int

    @property
    def members(self) -> tuple[int, ...]:
        """The workers that the superstep waits for, in ascending order."""
        return tuple(worker for worker, _ in self.stops)


class PublishPlan(Action):
    """Send this plan to each of its members."""

    plan: Plan


class RestartWorker(Action, repr_omit_defaults=True):
    """Tell this worker to abort its computation of `iteration`, pull, and compute the iteration again.

    This action has no effect if the worker has already pushed the iteration, or has restarted it more than `attempt`
    times.

    Attributes:
        worker: the worker that receives the order.
        iteration: label of the iteration.
        attempt: the computation of this iteration that is aborted, counted from 0.
    """

    worker: int
    iteration: int
    attempt: int = 0


class SetTimer(Action):
    """Send the model a `TimerFired` event for this worker and iteration at time `due_ticks` on the host's clock."""

    worker: int
    iteration: int
    due_ticks: int


class PublishChange(Action):
    """Send this change to each of its members. Each member flags its next push with the change."""

    change: Change


class ReportFault(Action):
    """Tell the user that one of their conditions has failed, and which model replaces the failed model.

    Attributes:
        reason: what went wrong, in one sentence.
        traceback: traceback of the exception in the condition; "" if the condition returned an invalid value.
        sync: the model that the shard uses from now on.
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
"""Any action. Traces contain only actions of these types."""

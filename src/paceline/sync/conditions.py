"""FluentPS's mechanism: a pull condition and a push condition, evaluated at each shard independently.

Theory (FluentPS, section III, Algorithm 1 and Table III). V_train is the overall progress of the shard: the number
of complete rounds. A pull reports `progress`, the index of the iteration that was just pushed. It is answered
immediately if the *pull condition* holds; otherwise it is delayed and filed under a round. The *push condition*
decides when the current round is complete. It is evaluated in a loop after each push and each departure of a worker,
because one event can complete several rounds. Each time it holds, V_train advances by one, and the pulls filed under
that round are answered without another test. The choice of the round determines how late a delayed pull is answered:

    soft barrier      the round is V_train: the next round to close answers the pull. With the pull condition
                      `progress < V_train + s`, this is exactly when c_p - min c has come down to s
    lazy execution    the round is max(progress, V_train): the pull is answered when the slowest worker has caught up

Guarantee: Whatever the conditions, each push is applied, averaged or dropped exactly once, and no worker waits for
one that has left. Progress depends on the conditions; the models of this package never stall.

A user's conditions may fail, which is reported in `fault`. The host then replaces the machine with that of another
model, which takes over its state (`inherit`).

Deviations: The paper compares `Count[V_train] == N`. Here, conditions compare with `>=`, and the count stays correct
when workers join and leave.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ..errors import InternalError, InvalidEventError, unknown_name
from .actions import AnswerPull, AnyAction, ApplyMean, ApplyPush, DropPush, HoldPush
from .events import (
    AnyEvent,
    PullRequested,
    PushReceived,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from .ledger import Ledger
from .model import SyncModel

__all__ = [
    "EXECUTIONS",
    "PUSH_SCALES",
    "ApplyingModel",
    "ConditionMachine",
    "ConditionModel",
    "Execution",
    "Fault",
    "PullCondition",
    "PullState",
    "PushCondition",
    "PushState",
    "everybody",
]


class PushState:
    """What a push condition may look at.

    Attributes:
        v_train: V_train, the round whose completion is in question.
        live: how many workers are live.
        pushed: Count[V_train], how many of these have pushed that round.
        slowest: min c over the live workers.
        fastest: max c over the live workers.
    """

    __slots__ = ("_ledger", "live", "pushed", "v_train")

    def __init__(self, ledger: Ledger, v_train: int, pushed: int) -> None:
        self._ledger = ledger
        self.v_train = v_train
        self.live = ledger.live_count
        self.pushed = pushed

    @property
    def slowest(self) -> int:
        return self._ledger.slowest

    @property
    def fastest(self) -> int:
        return self._ledger.fastest

    def count(self, iteration: int) -> int:
        """Count[iteration]: how many live workers have pushed at least `iteration + 1` times. Scans the counts
        that there are; `pushed` does not."""
        return self._ledger.count_beyond(iteration)


class PullState(PushState):
    """What a pull condition may look at: all of the above and the worker that asks.

    Attributes:
        worker: who asks.
        iteration: the label of the iteration it has pushed.
        progress: c_p - 1.
        gap: c_p - min c.
        significance: |g| / |w| of its push, or None if it was not measured.
    """

    __slots__ = ("iteration", "progress", "significance", "worker")

    def __init__(
        self, ledger: Ledger, v_train: int, pushed: int, pull: PullRequested, significance: float | None
    ) -> None:
        super().__init__(ledger, v_train, pushed)
        self.worker = pull.worker
        self.iteration = pull.iteration
        self.progress = ledger.count[pull.worker] - 1
        self.significance = significance

    @property
    def gap(self) -> int:
        return self.progress + 1 - self._ledger.slowest


PullCondition = Callable[[PullState], bool]
"""True: answer the pull now."""

PushCondition = Callable[[PushState], bool]
"""True: the round V_train is complete."""

Execution = Callable[[int, int], int]
"""(progress, V_train) -> the round, at least V_train, under which a delayed pull is filed."""

EXECUTIONS: dict[str, Execution] = {
    "soft": lambda progress, v_train: v_train,
    "lazy": max,
}


def everybody(state: PushState) -> bool:
    """The push condition of all but one row of Table III: every live worker has pushed the round."""
    return state.pushed >= state.live


PUSH_SCALES = ("1", "1/n")


class ApplyingModel(SyncModel, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Base class of the models that apply each push on arrival.

    Attributes:
        push_scale: factor by which each gradient is multiplied: "1", or "1/n" as in FluentPS's Algorithm 1, line 15,
            where n is the number of live workers.
    """

    push_scale: str = "1"

    def __post_init__(self) -> None:
        if self.push_scale not in PUSH_SCALES:
            raise unknown_name(f"push_scale of {self.name}", self.push_scale, PUSH_SCALES)


class ConditionModel(ApplyingModel, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Base class of the models that apply each push on arrival and may delay pulls.

    Attributes:
        execution: when a delayed pull is answered: "soft" when the current round closes, which is the exact rule of
            SSP, or "lazy" (FluentPS's default) when the slowest worker has caught up.
    """

    execution: str = "soft"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.execution not in EXECUTIONS:
            raise unknown_name(f"execution of {self.name}", self.execution, EXECUTIONS)

    def machine(self, pull_condition: PullCondition) -> ConditionMachine:
        """A machine with this condition and the options above."""
        return ConditionMachine(
            pull_condition, execution=EXECUTIONS[self.execution], scale_by_live=self.push_scale == "1/n"
        )


class Fault(msgspec.Struct, frozen=True):
    """How a user's condition has failed.

    Attributes:
        reason: in a sentence.
        traceback: the condition's own; "" if it did not raise.
    """

    reason: str
    traceback: str = ""


class ConditionMachine:
    """Algorithm 1 for one shard.

    Args:
        pull_condition: evaluated once, when a pull arrives.
        push_condition: evaluated in a loop, after each push and each departure.
        average: hold the pushes of a round and apply their mean when it is complete; a push of a round that is
            complete already is dropped, and its worker told to go on from V_train. Otherwise each push is applied on
            arrival.
        execution: the round under which a delayed pull is filed.
        scale_by_live: scale each push that is applied on arrival by 1 / live workers.

    Attributes:
        ledger: who is live, and how far.
        v_train: V_train.
        fault: set when a condition has failed; the machine is not to be told anything more.
    """

    fault: Fault | None = None

    def __init__(
        self,
        pull_condition: PullCondition,
        push_condition: PushCondition = everybody,
        *,
        average: bool = False,
        execution: Execution = EXECUTIONS["soft"],
        scale_by_live: bool = False,
    ) -> None:
        self.ledger = Ledger()
        self.v_train = 0
        self._pull_condition = pull_condition
        self._push_condition = push_condition
        self._average = average
        self._execution = execution
        self._scale_by_live = scale_by_live
        self._pushed = 0  # Count[V_train]: live workers with c_p > V_train
        self._held: list[tuple[int, int]] = []  # (worker, iteration) of the pushes that await their mean
        self._delayed: dict[int, dict[int, int]] = {}  # round -> worker -> iteration of its delayed pull
        self._filed_under: dict[int, int] = {}  # worker -> the round that its delayed pull is filed under
        self._significance: dict[int, float] = {}  # worker -> that of its last push, where it was measured

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Take one event; return what follows from it."""
        match event:
            case PushReceived():
                self._require_near(event)
                before = self.ledger.count.get(event.worker, 0)
                self.ledger.pushed(event)
                return [self._receive(event, before), *self._close_rounds()]
            case PullRequested():
                self.ledger.pulled(event)
                return self._answer_or_delay(event)
            case WorkerJoined():
                count = self.v_train if event.count is None else event.count
                self.ledger.joined(event, count)
                self._pushed += count > self.v_train
                return []
            case WorkerLost() | WorkerFinished():
                self._pushed -= self.ledger.left(event) > self.v_train
                self._significance.pop(event.worker, None)
                self._forget_pull(event.worker)
                return self._close_rounds()
            case TimerFired():
                return []  # a former model's
            case _:
                raise InternalError(f"no shard is told of a {type(event).__name__}")

    def inherit(self, other: ConditionMachine, now_s: float) -> list[AnyAction]:
        """Go on from where another machine is, by this one's own conditions: pushes that are held are applied unless
        this one holds pushes too, rounds are counted from the slowest, delayed pulls are tested anew."""
        self.ledger, self._held, self._significance = other.ledger, other._held, other._significance
        self.v_train = self.ledger.slowest
        self._pushed = self.ledger.count_beyond(self.v_train)
        delayed = {worker: pulls[worker] for pulls in other._delayed.values() for worker in pulls}
        actions = self._close_rounds() if self._average else self._apply_mean()
        for worker, iteration in sorted(delayed.items()):
            actions += self._answer_or_delay(PullRequested(now_s=now_s, worker=worker, iteration=iteration))
        return actions

    def waits(self) -> dict[int, str]:
        """For each pull that is delayed, what it waits for."""
        return {
            worker: f"round {rnd} ({self._pushed} of {self.ledger.live_count} have pushed round {self.v_train})"
            for worker, rnd in self._filed_under.items()
        }

    def validate(self) -> None:
        """Cross-check the collections derived from one another."""
        self.ledger.validate()
        filed = {worker: rnd for rnd, pulls in self._delayed.items() for worker in pulls}
        if filed != self._filed_under or not self._filed_under.keys() <= self.ledger.count.keys():
            raise InternalError(
                f"delayed pulls {self._delayed} disagree with their index {self._filed_under}"
            )
        if any(rnd < self.v_train for rnd in self._delayed):
            raise InternalError(
                f"pulls {self._delayed} are filed under rounds before V_train = {self.v_train}"
            )
        pushed = sum(count > self.v_train for count in self.ledger.count.values())
        if pushed != self._pushed:
            raise InternalError(f"Count[{self.v_train}] is {pushed}, not {self._pushed}")

    def _require_near(self, push: PushReceived) -> None:
        """Refuse a round that cannot have been closed at any shard: others close one earlier only by pushes that are
        on their way here, and of each worker there is one at most."""
        furthest = self.ledger.furthest + self.ledger.joins
        if push.progress is not None and push.progress > furthest:
            raise InvalidEventError(
                f"worker {push.worker} goes on from round {push.progress}, expected at most {furthest}"
            )

    def _receive(self, push: PushReceived, before: int) -> AnyAction:
        progress = self.ledger.count[push.worker] - 1
        self._pushed += before <= self.v_train <= progress
        if push.significance is not None:
            self._significance[push.worker] = push.significance
        if push.empty or (self._average and progress < self.v_train):
            return DropPush(push.worker, push.iteration)
        if self._average:
            self._held.append((push.worker, push.iteration))
            return HoldPush(push.worker, push.iteration)
        if self._scale_by_live:
            return ApplyPush(push.worker, push.iteration, 1.0 / self.ledger.live_count)
        return ApplyPush(push.worker, push.iteration)

    def _answer_or_delay(self, pull: PullRequested) -> list[AnyAction]:
        worker = pull.worker
        state = PullState(self.ledger, self.v_train, self._pushed, pull, self._significance.get(worker))
        if self._pull_condition(state):
            return [self._answer(worker, pull.iteration)]
        rnd = self._execution(state.progress, self.v_train)
        self._delayed.setdefault(rnd, {})[worker] = pull.iteration
        self._filed_under[worker] = rnd
        return []

    def _close_rounds(self) -> list[AnyAction]:
        actions: list[AnyAction] = []
        # No round beyond the fastest's last push is complete, whatever a condition says: the loop ends.
        while self._pushed and self._push_condition(PushState(self.ledger, self.v_train, self._pushed)):
            actions += self._apply_mean()
            closing = self._delayed.pop(self.v_train, {})
            self.v_train += 1
            self._pushed -= self.ledger.at(self.v_train)
            for worker, iteration in closing.items():
                del self._filed_under[worker]
                actions.append(self._answer(worker, iteration))
        if not self.ledger.live_count:  # the last one has left: nothing more will come for this round
            actions += self._apply_mean()
        return actions

    def _apply_mean(self) -> list[AnyAction]:
        if not self._held:
            return []
        mean = ApplyMean(tuple(sorted(self._held)))
        self._held.clear()
        return [mean]

    def _answer(self, worker: int, iteration: int) -> AnyAction:
        self.ledger.answered(worker)
        if self._average and self.ledger.count[worker] < self.v_train:  # its next push would be late, too
            return AnswerPull(worker, iteration, self.v_train)
        return AnswerPull(worker, iteration)

    def _forget_pull(self, worker: int) -> None:
        if worker in self._filed_under:
            rnd = self._filed_under.pop(worker)
            del self._delayed[rnd][worker]
            if not self._delayed[rnd]:
                del self._delayed[rnd]

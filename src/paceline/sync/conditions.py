"""FluentPS's mechanism: pull and push conditions, evaluated at each shard for itself.

Theory (FluentPS, section III, Algorithm 1 and Table III). V_train is the shard's overall progress: here the
progress of the slowest live worker, min c. A pull that reports `progress` (the index of the iteration just
pushed) is answered at once if the *pull condition* holds; otherwise it is delayed and filed under the current
round, V_train. The *push condition* says when a round is complete: when every live worker has pushed it. It
is evaluated in a loop after each push and each departure, since one event can complete several rounds; each
time it holds, V_train advances by one and the pulls filed under the round are answered without a new test.
That is the *soft barrier*: with the pull condition `progress < V_train + s` it answers a delayed pull at the
very moment at which c_p - min c has come down to s.

Deviations: the paper compares `Count[V_train] == N`; counting who is still *at* the slowest count gives the
same decisions and stays right when workers join and leave.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import InternalError
from .actions import AnswerPull, AnyAction, ApplyMean, ApplyPush, DropPush, HoldPush
from .events import AnyEvent, PullRequested, PushReceived, WorkerFinished, WorkerJoined, WorkerLost
from .ledger import Ledger

__all__ = ["ConditionMachine", "PullCondition"]

PullCondition = Callable[[int, int], bool]
"""(progress, V_train) -> True to answer the pull now."""


class ConditionMachine:
    """Algorithm 1 for one shard.

    Args:
        pull_condition: evaluated once, when a pull arrives.
        average: hold the pushes of a round and apply their mean when it is complete (BSP); otherwise each
            push is applied on arrival, at scale 1.
    """

    def __init__(self, pull_condition: PullCondition, *, average: bool) -> None:
        self.ledger = Ledger()
        self._pull_condition = pull_condition
        self._average = average
        self._held: list[tuple[int, int]] = []  # (worker, iteration) of the pushes that await their mean
        self._delayed: dict[int, dict[int, int]] = {}  # round -> worker -> iteration of its delayed pull
        self._filed_under: dict[int, int] = {}  # worker -> the round that its delayed pull is filed under

    @property
    def v_train(self) -> int:
        """The shard's overall progress: rounds that every live worker has pushed."""
        return self.ledger.slowest

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Take one event; return what follows from it."""
        match event:
            case PushReceived():
                self.ledger.pushed(event)
                return [self._receive(event), *self._close_rounds()]
            case PullRequested():
                self.ledger.pulled(event)
                return self._answer_or_delay(event)
            case WorkerJoined():
                self.ledger.joined(event)
                return []
            case WorkerLost() | WorkerFinished():
                self.ledger.left(event)
                self._forget_pull(event.worker)
                return self._close_rounds()
            case _:
                raise InternalError(f"no shard is told of a {type(event).__name__}")

    def validate(self) -> None:
        """Cross-check the collections derived from one another."""
        self.ledger.validate()
        filed = {worker: rnd for rnd, pulls in self._delayed.items() for worker in pulls}
        if filed != self._filed_under or not self._filed_under.keys() <= self.ledger.count.keys():
            raise InternalError(
                f"delayed pulls {self._delayed} disagree with their index {self._filed_under}"
            )

    def _receive(self, push: PushReceived) -> AnyAction:
        if push.empty:
            return DropPush(push.worker, push.iteration)
        if self._average:
            self._held.append((push.worker, push.iteration))
            return HoldPush(push.worker, push.iteration)
        return ApplyPush(push.worker, push.iteration)

    def _answer_or_delay(self, pull: PullRequested) -> list[AnyAction]:
        progress = self.ledger.count[pull.worker] - 1
        if self._pull_condition(progress, self.v_train):
            return [self._answer(pull.worker, pull.iteration)]
        self._delayed.setdefault(self.v_train, {})[pull.worker] = pull.iteration
        self._filed_under[pull.worker] = self.v_train
        return []

    def _close_rounds(self) -> list[AnyAction]:
        actions: list[AnyAction] = []
        closing = self.v_train
        while self.ledger.advance():
            actions += self._apply_mean()
            for worker, iteration in self._delayed.pop(closing, {}).items():
                del self._filed_under[worker]
                actions.append(self._answer(worker, iteration))
            closing = self.v_train
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
        return AnswerPull(worker, iteration)

    def _forget_pull(self, worker: int) -> None:
        if worker in self._filed_under:
            rnd = self._filed_under.pop(worker)
            del self._delayed[rnd][worker]
            if not self._delayed[rnd]:
                del self._delayed[rnd]

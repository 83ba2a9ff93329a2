"""Two user-defined sync models for the study beside this file."""

from __future__ import annotations

from paceline.sync import ShardMachine, SyncModel, register
from paceline.sync.actions import AnswerPull, AnyAction, ApplyMean, DropPush, HoldPush
from paceline.sync.conditions import ConditionMachine, ConditionModel
from paceline.sync.events import PullRequested, PushReceived, WorkerFinished, WorkerLost


@register
class Majority(ConditionModel, frozen=True):
    """SSP relative to the middle: a worker may be at most `staleness` iterations ahead of half of the workers."""

    name = "majority"

    staleness: int = 2

    def at_shard(self, seed: int = 0, shard: int = 0) -> ConditionMachine:
        return self.machine(lambda state: 2 * state.count(state.progress - self.staleness) >= state.live)


@register
class Pairs(SyncModel, frozen=True):
    """Applies the mean of every two gradients. No worker ever waits."""

    name = "pairs"

    def at_shard(self, seed: int = 0, shard: int = 0) -> ShardMachine:
        return PairsShard()


class PairsShard(ShardMachine):
    """Holds a push until the next one arrives."""

    def __init__(self) -> None:
        super().__init__()
        self._held: tuple[int, int] | None = None  # (worker, iteration)

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        if push.empty:
            return [DropPush(push.worker, push.iteration)]
        this = push.worker, push.iteration
        if self._held is None:
            self._held = this
            return [HoldPush(*this)]
        both, self._held = tuple(sorted((self._held, this))), None
        return [HoldPush(*this), ApplyMean(both)]

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        return [AnswerPull(pull.worker, pull.iteration)]

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        if self.counts.live_count or self._held is None:
            return []
        last, self._held = self._held, None  # no worker is left to push another gradient
        return [ApplyMean((last,))]

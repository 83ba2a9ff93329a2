"""Buffered asynchronous aggregation: each shard applies the mean of every B gradients, and no worker ever waits.

Reference: Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022.
"""

from __future__ import annotations

from paceline.sync import ShardMachine, SyncModel, register
from paceline.sync.actions import AnswerPull, AnyAction, ApplyMean, DropPush, HoldPush
from paceline.sync.events import PullRequested, PushReceived, WorkerFinished, WorkerLost


@register
class Buffered(SyncModel, frozen=True):
    """Buffered asynchronous aggregation. `batch` is B, the number of gradients per update."""

    name = "buffered"

    batch: int = 4

    def at_shard(self, seed: int = 0, shard: int = 0) -> ShardMachine:
        return BufferedShard(self.batch)


class BufferedShard(ShardMachine):
    """Applies the rule to the pushes that one shard receives."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self._batch = batch
        self._held: list[tuple[int, int]] = []  # (worker, iteration) of each gradient in the buffer

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        if push.empty:
            return [DropPush(push.worker, push.iteration)]
        self._held.append((push.worker, push.iteration))
        return [HoldPush(push.worker, push.iteration), *self._update(self._batch)]

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        return [AnswerPull(pull.worker, pull.iteration)]

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        return [] if self.counts.live_count else self._update(1)  # no worker is left to fill the buffer

    def _update(self, least: int) -> list[AnyAction]:
        if len(self._held) < least:
            return []
        held, self._held = tuple(sorted(self._held)), []
        return [ApplyMean(held)]

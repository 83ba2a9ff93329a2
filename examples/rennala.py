"""Rennala SGD: each shard applies the mean of B gradients at its current weights, and drops outdated gradients.

Reference: Tyurin and Richtarik, "Optimal time complexities of parallel stochastic optimization methods under a fixed
computation model", NeurIPS 2023.
"""

from __future__ import annotations

from paceline.sync import ShardMachine, SyncModel, register
from paceline.sync.actions import AnswerPull, AnyAction, ApplyMean, DropPush, HoldPush
from paceline.sync.events import PullRequested, PushReceived, WorkerFinished, WorkerJoined, WorkerLost


@register
class Rennala(SyncModel, frozen=True):
    """Rennala SGD. `batch` is B, the number of gradients per update."""

    name = "rennala"

    batch: int = 4

    def at_shard(self, seed: int = 0, shard: int = 0) -> ShardMachine:
        return RennalaShard(self.batch)


class RennalaShard(ShardMachine):
    """Applies the rule of Rennala SGD to the pushes that one shard receives."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self._batch = batch
        self._version = 0
        self._version_of: dict[int, int] = {}  # worker -> version of its weights
        self._held: list[tuple[int, int]] = []  # (worker, iteration) of each collected gradient

    def joined(self, event: WorkerJoined) -> list[AnyAction]:
        self._version_of[event.worker] = self._version
        return []

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        if push.empty or self._version_of[push.worker] < self._version:
            return [DropPush(push.worker, push.iteration)]
        self._held.append((push.worker, push.iteration))
        return [HoldPush(push.worker, push.iteration), *self._update(self._batch)]

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        self._version_of[pull.worker] = self._version
        return [AnswerPull(pull.worker, pull.iteration)]

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        del self._version_of[event.worker]
        return [] if self._version_of else self._update(1)  # no worker is left to complete the batch

    def _update(self, least: int) -> list[AnyAction]:
        if len(self._held) < least:
            return []
        held, self._held = tuple(sorted(self._held)), []
        self._version += 1
        return [ApplyMean(held)]

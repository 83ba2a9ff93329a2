"""A bound that adapts to the median: no worker is more than `ahead` iterations ahead of the median worker.

Under SSP, the slowest worker holds up all other workers. Here, slow workers hold up no other worker as long as more
than half of the workers keep pace with each other.
"""

from __future__ import annotations

from paceline.sync import ShardMachine, SyncModel, register
from paceline.sync.actions import AnswerPull, AnyAction, ApplyPush, DropPush
from paceline.sync.events import PullRequested, PushReceived, WorkerFinished, WorkerJoined, WorkerLost


@register
class MedianBound(SyncModel, frozen=True):
    """A bound that adapts to the median.

    Attributes:
        ahead: largest number of iterations by which a worker may be ahead of the median worker.
    """

    name = "median-bound"

    ahead: int = 2

    def at_shard(self, seed: int = 0, shard: int = 0) -> ShardMachine:
        return MedianShard(self.ahead)


class MedianShard(ShardMachine):
    """Compares c_p of each worker that pulls with the median of c_p."""

    def __init__(self, ahead: int) -> None:
        super().__init__()
        self._ahead = ahead
        self._delayed: dict[int, int] = {}  # worker -> iteration of its delayed pull

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        first = DropPush if push.empty else ApplyPush
        return [first(push.worker, push.iteration), *self._answers()]

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        self._delayed[pull.worker] = pull.iteration
        return self._answers()

    def joined(self, event: WorkerJoined) -> list[AnyAction]:
        return self._answers()

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        self._delayed.pop(event.worker, None)
        return self._answers()

    def waits(self) -> dict[int, str]:
        return dict.fromkeys(self._delayed, f"the median worker to reach iteration {self._median() + 1}")

    def _answers(self) -> list[AnyAction]:
        """Answer all pulls of workers that are near enough to the median."""
        most = self._median() + self._ahead
        near = [worker for worker in self._delayed if self.counts.count[worker] <= most]
        return [AnswerPull(worker, self._delayed.pop(worker)) for worker in near]

    def _median(self) -> int:
        """Return the lower median of c_p. At least one worker is not above this median, so a worker always computes."""
        counts = sorted(self.counts.count.values())
        return counts[(len(counts) - 1) // 2] if counts else 0

"""Merging late pushes: a push that is too stale waits for other stale pushes, and the mean of them all is one update.

Under ASP, each gradient of a slow worker moves the weights by a whole step, in a direction that is out of date. Here,
late gradients move the weights less often, and by their mean. A timer bounds how long a late gradient waits.
"""

from __future__ import annotations

from paceline.sync import ShardMachine, SyncModel, register
from paceline.sync.actions import AnswerPull, AnyAction, ApplyMean, ApplyPush, DropPush, HoldPush, SetTimer
from paceline.sync.events import PullRequested, PushReceived, TimerFired, WorkerFinished, WorkerLost
from paceline.sync.ticks import in_ticks


@register
class MergeLate(SyncModel, frozen=True):
    """Merging of late pushes.

    Attributes:
        late: smallest staleness, in updates, of a push that counts as late.
        most: number of late pushes that are merged into one update.
        wait_s: longest time in seconds that a late push waits for other late pushes.
    """

    name = "merge-late"

    late: int = 4
    most: int = 3
    wait_s: float = 1.0

    @property
    def needs_staleness(self) -> bool:
        return True

    @property
    def independent(self) -> bool:
        return True

    def at_shard(self, seed: int = 0, shard: int = 0) -> ShardMachine:
        return MergingShard(self.late, self.most, self.wait_s)


class MergingShard(ShardMachine):
    """Holds the late pushes of one shard."""

    def __init__(self, late: int, most: int, wait_s: float) -> None:
        super().__init__()
        self._late, self._most, self._wait_s = late, most, wait_s
        self._held: list[tuple[int, int]] = []  # (worker, iteration) of each late push

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        key = push.worker, push.iteration
        if push.empty:
            return [DropPush(*key)]
        if (push.staleness or 0) < self._late:
            return [ApplyPush(*key)]
        self._held.append(key)
        if len(self._held) >= self._most:
            return [HoldPush(*key), *self._merged()]
        if len(self._held) > 1:
            return [HoldPush(*key)]  # the timer of the first push is running
        due_ticks = push.now_ticks + in_ticks(self._wait_s, self.ticks_per_s)
        return [HoldPush(*key), SetTimer(*key, due_ticks)]

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        return [AnswerPull(pull.worker, pull.iteration)]

    def timer_fired(self, timer: TimerFired) -> list[AnyAction]:
        # The timer is out of date if its push has been merged already.
        first = self._held[:1] == [(timer.worker, timer.iteration)]
        return self._merged() if first else []

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        return [] if self.counts.live_count else self._merged()

    def _merged(self) -> list[AnyAction]:
        held, self._held = tuple(sorted(self._held)), []
        return [ApplyMean(held)] if held else []

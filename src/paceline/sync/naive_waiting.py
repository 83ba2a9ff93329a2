"""Naive waiting: every pull is answered after a fixed delay, so that the weights include more pushes.

Reference: SpecSync (Zhang et al., ICDCS 2018), section III-B, Figs. 4 and 5.
Admission: A pull is answered d seconds after its arrival.
State: The pulls that are being delayed.
Guarantee: Each pull waits d seconds, regardless of the other workers. Staleness is not bounded. With d = 0, the model
is ASP.
Use: As a baseline for comparisons. Naive waiting shows the benefit of fresher weights and the cost of waiting.
Deviations: In the paper, workers delay their requests. Here, the shard delays its answers, which gives equally
fresh weights.

>>> from paceline.sync.events import PullRequested, PushReceived, TimerFired, WorkerJoined
>>> shard = NaiveWaiting(delay_s=0.5).at_shard()
>>> _ = shard.handle(WorkerJoined(now_ticks=0, worker=0))
>>> shard.handle(PushReceived(now_ticks=1_000_000_000, worker=0, iteration=0))
[ApplyPush(worker=0, iteration=0, scale=1.0)]
>>> shard.handle(PullRequested(now_ticks=1_000_000_000, worker=0, iteration=0))
[SetTimer(worker=0, iteration=0, due_ticks=1500000000)]
>>> shard.handle(TimerFired(now_ticks=1_500_000_000, worker=0, iteration=0))
[AnswerPull(worker=0, iteration=0)]
"""

from __future__ import annotations

import math

from ..errors import InternalError
from ..state import stateful
from .actions import AnswerPull, AnyAction, ApplyPush, DropPush, SetTimer
from .events import PullRequested, PushReceived, TimerFired, WorkerFinished, WorkerLost
from .model import Handover, ShardMachine, SyncModel, require_seconds, require_within
from .ticks import Seconds, in_ticks


class NaiveWaiting(SyncModel):
    """ASP with a fixed delay before each pull is answered.

    Attributes:
        delay_s: d, the delay of each pull, in seconds; a number or a fraction >= 0.
    """

    name = "naive-waiting"
    style = "#01665E", 1
    shown = ("naive-waiting:delay_s=0.3",)
    demo = ("naive-waiting:delay_s=0.004",)
    agrees_on_means = True
    independent = True

    delay_s: Seconds

    def __post_init__(self) -> None:
        require_seconds(self.name, "delay_s", self.delay_s, 0.0, math.inf)

    def require_runnable(self, workers: int) -> None:
        # A delay of more than 10**6 s (11 days) is certainly a mistake.
        require_within(self.name, "delay_s", self.delay_s, 0.0, 1e6)

    def at_shard(self, seed: int = 0, shard: int = 0) -> DelayingMachine:
        return DelayingMachine(self.delay_s)


@stateful(fixed="_delay_s")
class DelayingMachine(ShardMachine):
    """The state machine of ASP, with a timer for each pull."""

    def __init__(self, delay_s: Seconds) -> None:
        super().__init__()
        self._delay_s = delay_s
        self._deferred: dict[int, int] = {}  # worker -> iteration of the worker's deferred pull

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        return [(DropPush if push.empty else ApplyPush)(push.worker, push.iteration)]

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        if not self._delay_s:
            return [AnswerPull(pull.worker, pull.iteration)]
        self._deferred[pull.worker] = pull.iteration
        return [
            SetTimer(pull.worker, pull.iteration, pull.now_ticks + in_ticks(self._delay_s, self.ticks_per_s))
        ]

    def timer_fired(self, timer: TimerFired) -> list[AnyAction]:
        if self._deferred.get(timer.worker) != timer.iteration:
            return []
        del self._deferred[timer.worker]
        return [AnswerPull(timer.worker, timer.iteration)]

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        self._deferred.pop(event.worker, None)
        return []

    def waits(self) -> dict[int, str]:
        return dict.fromkeys(self._deferred, "its timer")

    def hand_over(self) -> Handover:
        return Handover(self.counts, [], self._deferred, {})

    def validate(self) -> None:
        super().validate()
        if not self._deferred.keys() <= self.counts.count.keys():
            raise InternalError(
                f"pulls {self._deferred} are deferred, but the live workers are {set(self.counts.count)}"
            )

"""BSP, bulk synchronous parallel: every worker waits for all others after each iteration.

Reference: Gerbessiotis and Valiant, "Direct bulk-synchronous parallel algorithms", 1994; FluentPS, Table III, row
BSP; ElasticBSP, section 1.
Admission: A pull is answered if and only if progress < V_train, that is, c_p = min c.
State: The pushes of the current round, and the pulls that wait for the end of the round.
Guarantee: Every gradient is computed on the newest weights (staleness 0), so training is equivalent to training in
one process on the joint batch. The run makes progress as long as every live worker pushes, finishes or is lost.
Use: When workers are equally fast, and whenever the result must equal the result of a single process.
Deviations: FluentPS applies the gradients of a round one by one. Here, their mean is applied as one optimizer step, so
that momentum and Adam see one gradient per round.

>>> from paceline.sync.events import PullRequested, PushReceived, WorkerJoined
>>> shard = BSP().at_shard()
>>> for worker in (0, 1):
...     _ = shard.handle(WorkerJoined(now_ticks=0, worker=worker))
>>> shard.handle(PushReceived(now_ticks=1, worker=1, iteration=0))
[HoldPush(worker=1, iteration=0)]
>>> shard.handle(PullRequested(now_ticks=1, worker=1, iteration=0))
[]
>>> shard.handle(PushReceived(now_ticks=3, worker=0, iteration=0))
[HoldPush(worker=0, iteration=0), ApplyMean(pushes=((0, 0), (1, 0))), AnswerPull(worker=1, iteration=0)]
"""

from __future__ import annotations

from .conditions import ConditionMachine
from .model import SyncModel


class BSP(SyncModel):
    """Bulk synchronous parallel: one barrier after each iteration."""

    name = "bsp"
    style = "#0072B2", 0
    lockstep = True
    agrees_on_means = True

    def at_shard(self, seed: int = 0, shard: int = 0) -> ConditionMachine:
        return ConditionMachine(lambda state: state.progress < state.v_train, average=True)

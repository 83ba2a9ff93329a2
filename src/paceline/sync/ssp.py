"""SSP, stale synchronous parallel: nobody runs more than s iterations ahead.

Reference: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", 2013;
FluentPS, Table III, row SSP.
Admission: a pull is answered iff progress < V_train + s, that is c_p - min c <= s.
State: c_p, and the delayed pulls by the round at which they were delayed.
Guarantee: no worker starts an iteration more than s ahead of the slowest live worker; while it waits it has
pushed s + 1 more. s = 0 waits where BSP waits, s = inf never waits. Live as long as the slowest worker is.
Use: when most machines are equally fast and some are late now and then: it bounds staleness and waits little.
Deviations: none.

>>> from paceline.sync.events import PullRequested, PushReceived, WorkerJoined
>>> shard = SSP(staleness=0).at_shard()
>>> for worker in (0, 1):
...     _ = shard.handle(WorkerJoined(now_s=0.0, worker=worker))
>>> shard.handle(PushReceived(now_s=1.0, worker=0, iteration=0))
[ApplyPush(worker=0, iteration=0, scale=1.0)]
>>> shard.handle(PullRequested(now_s=1.0, worker=0, iteration=0))  # 1 ahead of worker 1: waits
[]
>>> shard.handle(PushReceived(now_s=2.0, worker=1, iteration=0))
[ApplyPush(worker=1, iteration=0, scale=1.0), AnswerPull(worker=0, iteration=0)]
"""

from __future__ import annotations

from .conditions import ConditionMachine, ConditionModel
from .model import require_count

__all__ = ["SSP"]


class SSP(ConditionModel, frozen=True, repr_omit_defaults=True, tag="ssp"):
    """Stale synchronous parallel.

    Attributes:
        staleness: s, in iterations: a whole number >= 0, or `math.inf`.
    """

    name = "ssp"

    staleness: float = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(self.name, "staleness", self.staleness, 0, infinite=True)

    def at_shard(self, seed: int = 0, shard: int = 0) -> ConditionMachine:
        s = self.staleness
        return self.machine(lambda state: state.progress < state.v_train + s)

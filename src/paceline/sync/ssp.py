"""SSP, stale synchronous parallel: no worker runs more than s iterations ahead of the slowest.

Reference: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", 2013; FluentPS,
Table III, row SSP.
Admission: A pull is answered if and only if progress < V_train + s, that is, c_p - min c <= s.
State: c_p, and the delayed pulls, grouped by the round for which they wait.
Guarantee: No worker starts an iteration while it is more than s iterations ahead of the slowest live worker. A worker
that waits has pushed s + 1 more iterations than the slowest worker. While no worker joins or leaves, the staleness of a
push of one of n workers is at most (2s + 1)(n - 1) updates: when the worker pulls, each other worker is at most s
iterations behind. When the push arrives, each other worker has pushed at most s + 1 iterations more than this worker.
With s = 0, workers wait where BSP waits; with s = inf, they never wait. The run makes progress as long as the slowest
live worker does.
Use: When most workers are equally fast and some are occasionally late: staleness is bounded, and waits are short.
Deviations: FluentPS contains two definitions of s. By Table III, where progress counts from 0 as in Algorithm 1, a
worker waits when it has pushed s + 1 more iterations than the slowest worker. In Fig. 3 and the text about Fig. 3
(section III-C), where s is 3, a worker waits when it has pushed 3 more iterations than the slowest worker. This model
follows Table III, by which s = 0 is BSP, as section V says. By the definition of Fig. 3, no worker could ever continue
with s = 0. With `push_scale="1/n"`, n is the largest number of workers that have been present at the same time (see
`paceline.sync.conditions`). In the paper, N is a constant.

>>> from paceline.sync.events import PullRequested, PushReceived, WorkerJoined
>>> shard = SSP(staleness=0).at_shard()
>>> for worker in (0, 1):
...     _ = shard.handle(WorkerJoined(now_ticks=0, worker=worker))
>>> shard.handle(PushReceived(now_ticks=1, worker=0, iteration=0))
[ApplyPush(worker=0, iteration=0, scale=1.0)]
>>> shard.handle(PullRequested(now_ticks=1, worker=0, iteration=0))  # 1 ahead of worker 1: waits
[]
>>> shard.handle(PushReceived(now_ticks=2, worker=1, iteration=0))
[ApplyPush(worker=1, iteration=0, scale=1.0), AnswerPull(worker=0, iteration=0)]
"""

from __future__ import annotations

from .conditions import ConditionMachine, ConditionModel
from .model import require_count


class SSP(ConditionModel):
    """Stale synchronous parallel.

    Attributes:
        staleness: s, the largest allowed gap to the slowest worker, in iterations: an integer >= 0 or `math.inf`.
    """

    name = "ssp"
    style = "#762A83", 0
    shown = ("ssp:staleness=3", "ssp:staleness=3,execution=lazy")
    demo = ("ssp:staleness=3,execution=lazy", "ssp:staleness=5")

    staleness: float = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(self.name, "staleness", self.staleness, 0, infinite=True)

    def at_shard(self, seed: int = 0, shard: int = 0) -> ConditionMachine:
        s = self.staleness
        return self.machine(lambda state: state.progress < state.v_train + s)

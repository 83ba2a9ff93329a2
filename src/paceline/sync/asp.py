"""ASP, asynchronous parallel: no worker waits.

Reference: Dean et al., "Large scale distributed deep networks", 2012; FluentPS, Table III, row ASP.
Admission: Every pull is answered on arrival.
State: c_p only.
Guarantee: No worker ever waits. Staleness is not bounded.
Use: When workers run at different speeds and training tolerates staleness. With raw hyper-parameters, use a
smaller learning rate than under BSP, or no momentum.
Deviations: Each push is applied at scale 1, as in the ASP of the ElasticBSP and SpecSync papers. FluentPS divides each
gradient by N, the total number of workers (Algorithm 1, line 15, and Table II); `push_scale="1/n"` does the same. In
FluentPS, N is a constant. Here, workers come and go, so N is the largest number of workers that have been present at
the same time (see `paceline.sync.conditions`). With "1/tau" or "n/tau", outdated gradients count less.

>>> from paceline.sync.events import PullRequested, PushReceived, WorkerJoined
>>> shard = ASP().at_shard()
>>> shard.handle(WorkerJoined(now_ticks=0, worker=0))
[]
>>> shard.handle(PushReceived(now_ticks=1, worker=0, iteration=0))
[ApplyPush(worker=0, iteration=0, scale=1.0)]
>>> shard.handle(PullRequested(now_ticks=1, worker=0, iteration=0))
[AnswerPull(worker=0, iteration=0)]
"""

from __future__ import annotations

from .conditions import PUSH_SCALES, ApplyingModel, ConditionMachine, always


class ASP(ApplyingModel):
    """Asynchronous parallel: each push is applied on arrival, and each pull is answered on arrival."""

    name = "asp"
    style = "#E69F00", 0
    independent = True

    def at_shard(self, seed: int = 0, shard: int = 0) -> ConditionMachine:
        return ConditionMachine(always, scale=PUSH_SCALES[self.push_scale])

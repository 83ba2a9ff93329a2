"""ASP, asynchronous parallel: nobody waits.

Reference: Dean et al., "Large scale distributed deep networks", 2012; FluentPS, Table III, row ASP.
Admission: every pull is answered on arrival.
State: c_p alone.
Guarantee: no worker ever waits. Staleness is not bounded.
Use: when machines differ and the model forgives staleness; at a smaller learning rate or without momentum.
Deviations: each push is applied at scale 1, as in ElasticBSP's and SpecSync's ASP; FluentPS divides it by the
number of workers (Algorithm 1, line 15), which is `push_scale="1/n"`.

>>> from paceline.sync.events import PullRequested, PushReceived, WorkerJoined
>>> shard = ASP().at_shard()
>>> shard.handle(WorkerJoined(now_s=0.0, worker=0))
[]
>>> shard.handle(PushReceived(now_s=1.0, worker=0, iteration=0))
[ApplyPush(worker=0, iteration=0, scale=1.0)]
>>> shard.handle(PullRequested(now_s=1.0, worker=0, iteration=0))
[AnswerPull(worker=0, iteration=0)]
"""

from __future__ import annotations

from .conditions import ApplyingModel, ConditionMachine

__all__ = ["ASP"]


class ASP(ApplyingModel, frozen=True, repr_omit_defaults=True, tag="asp"):
    """Asynchronous parallel: each push is applied and each pull answered on arrival."""

    name = "asp"

    def at_shard(self, seed: int = 0, shard: int = 0) -> ConditionMachine:
        return ConditionMachine(lambda state: True, scale_by_live=self.push_scale == "1/n")

"""Drop stragglers, also called backup workers: a round closes on the first pushes, and later ones are dropped.

Reference: Chen et al., "Revisiting distributed synchronous SGD", 2016; FluentPS, Table III, row "Drop stragglers".
Admission: a pull is answered iff progress < V_train; the round V_train is complete when Count[V_train] >= N_t.
State: the pushes of the current round, the pulls that wait for it.
Guarantee: every gradient that is applied was computed on the newest weights (staleness 0). Live as long as N_t
workers are, or all that are live if those are fewer. N_t = N is BSP.
Use: when a machine is very late now and then, and its data can be spared that round.
Deviations: a late worker's push is dropped and its answer carries V_train: it goes on from there, as if it had pushed
the rounds between. Of several shards' answers the latest counts, and the worker's next push says so to all: were each
shard to move the worker on by itself, two of them could come to wait for each other.

>>> from paceline.sync.events import PullRequested, PushReceived, WorkerJoined
>>> shard = DropStragglers(quorum=1).at_shard()
>>> for worker in (0, 1):
...     _ = shard.handle(WorkerJoined(now_s=0.0, worker=worker))
>>> shard.handle(PushReceived(now_s=1.0, worker=0, iteration=0))
[HoldPush(worker=0, iteration=0), ApplyMean(pushes=((0, 0),))]
>>> shard.handle(PushReceived(now_s=2.0, worker=1, iteration=0))
[DropPush(worker=1, iteration=0)]
>>> shard.handle(PullRequested(now_s=2.0, worker=1, iteration=0))
[AnswerPull(worker=1, iteration=0)]
"""

from __future__ import annotations

from ..errors import ConfigurationError
from .conditions import ConditionMachine
from .model import SyncModel, require_count

__all__ = ["DropStragglers"]


class DropStragglers(SyncModel, frozen=True, repr_omit_defaults=True, tag="drop-stragglers"):
    """Backup workers.

    Attributes:
        quorum: N_t, how many pushes close a round; a whole number >= 1, at most the number of workers.
    """

    name = "drop-stragglers"

    quorum: int

    def __post_init__(self) -> None:
        require_count(self.name, "quorum", self.quorum, 1)

    @property
    def whole_job(self) -> bool:
        return True

    def require_runnable(self, workers: int) -> None:
        if self.quorum > workers:
            raise ConfigurationError(
                f"{self.name}: quorum is {self.quorum}, but there are {workers} workers; expected at most as many."
            )

    def at_shard(self, seed: int = 0, shard: int = 0) -> ConditionMachine:
        return ConditionMachine(
            lambda state: state.progress < state.v_train,
            lambda state: state.pushed >= min(self.quorum, state.live),
            average=True,
        )

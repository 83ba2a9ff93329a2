"""Drop stragglers, also called backup workers: a round closes after N_t pushes, and later pushes are dropped.

A worker is *late* if c_p < V_train: the round of its next push is complete already. The models of the other shards
determine what happens to the worker.

If all shards run this model, the push is dropped. If the worker's next push would also be late, the answer to the
worker's pull contains V_train. The worker continues from the largest round that any shard has answered with, as if it
had pushed the rounds in between, and reports this round to all shards with its next push. If each shard advanced the
worker independently, the shards could disagree about which worker is behind, and workers could wait for each other
forever.

If other shards run other models (FluentPS, Fig. 2), every shard counts all of the worker's pushes in c_p, including
those that this shard drops. So at a shard that runs `bsp`, every round has a push of each worker. The bounds on
staleness at the other shards hold as if no shard dropped a push. At this shard, the first push that a late worker has
computed on the weights of the current round is averaged, and counts toward the quorum. The worker's other late pushes
are dropped. A late worker never waits at this shard.

Even if other shards run other models, workers cannot wait for each other forever: all shards count the same c_p, and
V_train >= min c, so the slowest worker waits at no shard. This is why a late worker whose push counts for a round must
not wait for the end of this round. Otherwise, if another shard runs `pssp:staleness=0`, three workers with N_t = 2
could wait forever: workers 1 and 2 push iterations 0 to 2, and worker 0 pushes its iteration 0, which is late. Then
iteration 1 of worker 0 counts for round 3. At this shard, worker 0 waits for worker 1 or 2 to push round 3. At the
other shard, workers 1 and 2 wait for worker 0, which is the slowest.

Reference: Chen et al., "Revisiting distributed synchronous SGD", 2016; FluentPS, Table III, row "Drop stragglers".
Admission: A pull is answered if and only if progress < V_train. The round V_train is complete when Count[V_train] >=
N_t, where Count[V_train] is the number of live workers that have pushed for that round, and N_t is the quorum. If fewer
than N_t workers are live, the round is complete when all of them have pushed.
State: The pushes of the current round, and the pulls that wait for the end of the round.
Guarantee: With one shard, every gradient that is applied was computed on the newest weights (staleness 0). With several
shards, the rounds of two shards differ by at most 1. A shard may answer a late worker just before the beginning of the
round from which the worker continues, so the worker's next gradient at this shard may have staleness 1. The run makes
progress as long as N_t workers make progress or, if fewer than N_t are live, as long as all live workers do. If N_t is
the number of workers, the model is BSP.
Use: When some workers are occasionally very late and training tolerates discarding their late gradients.
Deviations: When a worker leaves, its push stays in the mean, but no longer counts toward the quorum. The push of a lost
worker stays only if every shard has received it. A worker that joins begins with the round after V_train or, if other
shards run other models, with c_p = min c. In FluentPS, a worker always reports its own iterations, and Algorithm 1
applies late gradients, too (line 15).

>>> from paceline.sync.events import PullRequested, PushReceived, WorkerJoined
>>> shard = DropStragglers(quorum=1).at_shard()
>>> for worker in (0, 1):
...     _ = shard.handle(WorkerJoined(now_ticks=0, worker=worker))
>>> shard.handle(PushReceived(now_ticks=1, worker=0, iteration=0))
[HoldPush(worker=0, iteration=0), ApplyMean(pushes=((0, 0),))]
>>> shard.handle(PushReceived(now_ticks=2, worker=1, iteration=0))
[DropPush(worker=1, iteration=0)]
>>> shard.handle(PullRequested(now_ticks=2, worker=1, iteration=0))
[AnswerPull(worker=1, iteration=0)]
"""

from __future__ import annotations

from ..errors import ConfigurationError
from .conditions import ConditionMachine
from .model import SyncModel, require_count


class DropStragglers(SyncModel):
    """Synchronous rounds with backup workers.

    Attributes:
        quorum: N_t, the number of pushes that close a round; an integer from 1 to the number of workers.
    """

    name = "drop-stragglers"
    style = "#8C510A", 0
    shown = ("drop-stragglers:quorum=3",)
    demo = ("drop-stragglers:quorum=3",)
    fresh = True

    quorum: int

    def __post_init__(self) -> None:
        require_count(self.name, "quorum", self.quorum, 1)

    def require_runnable(self, workers: int) -> None:
        if self.quorum > workers:
            raise ConfigurationError(
                f"{self.name}: quorum is {self.quorum}, expected at most {workers}, the number of workers."
            )

    def at_shard(self, seed: int = 0, shard: int = 0) -> ConditionMachine:
        return ConditionMachine(
            lambda state: state.progress < state.v_train,
            lambda state: state.pushed >= min(self.quorum, state.live),
            average=True,
        )

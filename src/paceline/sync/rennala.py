"""Rennala SGD: B gradients that were computed on the current weights make an update; all other gradients are dropped.

Reference: Tyurin and Richtarik, "Optimal time complexities of parallel stochastic optimization methods under a fixed
computation model", NeurIPS 2023.
Admission: Every pull is answered on arrival.
State: The gradients of the current version that have been collected.
Guarantee: No worker ever waits, and every gradient that is applied was computed on the newest weights (staleness 0). If
all workers start together and worker i needs tau_i seconds for each gradient, the first B gradients have been collected
at the smallest time t for which the sum of floor(t / tau_i) is at least B.
Use: When gradients are noisy and the workers' speeds differ: a fast worker contributes several gradients to a mean, a
slow worker contributes none, and the effective batch stays the same. Choose B as you would choose the number of workers
under BSP. The model needs a single shard: `--servers 1`.
Deviations: When the weights change, the workers finish the gradients that they are computing. These gradients are
dropped. When the last worker leaves, the gradients that remain are applied even if there are fewer than B.

>>> from paceline.sync.events import PullRequested, PushReceived, WorkerJoined
>>> shard = Rennala(batch=2).at_shard()
>>> for worker in (0, 1):
...     _ = shard.handle(WorkerJoined(now_ticks=0, worker=worker))
>>> shard.handle(PushReceived(now_ticks=1, worker=0, iteration=0, staleness=0))
[HoldPush(worker=0, iteration=0)]
>>> shard.handle(PullRequested(now_ticks=1, worker=0, iteration=0))
[AnswerPull(worker=0, iteration=0)]
>>> shard.handle(PushReceived(now_ticks=2, worker=0, iteration=1, staleness=0))
[HoldPush(worker=0, iteration=1), ApplyMean(pushes=((0, 0), (0, 1)))]
>>> shard.handle(PushReceived(now_ticks=3, worker=1, iteration=0, staleness=1))
[DropPush(worker=1, iteration=0)]
"""

from __future__ import annotations

from ..state import stateful
from .actions import AnswerPull, AnyAction, ApplyMean, DropPush, HoldPush
from .events import PullRequested, PushReceived, WorkerFinished, WorkerLost
from .model import OneShardModel, ShardMachine, require_count


class Rennala(OneShardModel):
    """Rennala SGD.

    Attributes:
        batch: B, the number of gradients in each mean; an integer >= 1. May be larger than the number of workers.
    """

    name = "rennala"
    style = "#BF812D", 1
    shown = ("rennala:batch=4",)
    fresh = True

    batch: int

    def __post_init__(self) -> None:
        require_count(self.name, "batch", self.batch, 1)

    def at_shard(self, seed: int = 0, shard: int = 0) -> Collector:
        return Collector(self.batch)


@stateful(fixed="_batch")
class Collector(ShardMachine):
    """The state machine of the shard: it collects the gradients for the next mean."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self._batch = batch
        self._held: list[tuple[int, int]] = []  # (worker, iteration) of each collected gradient

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        if push.empty or push.staleness:
            return [DropPush(push.worker, push.iteration)]
        self._held.append((push.worker, push.iteration))
        return [HoldPush(push.worker, push.iteration), *self._apply_if_at_least(self._batch)]

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        return [AnswerPull(pull.worker, pull.iteration)]

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        # No further push can complete the batch when the last worker has left.
        return [] if self.counts.live_count else self._apply_if_at_least(1)

    def outlook(self, most_workers: int) -> dict[str, object]:
        """Return what is compared (see `stateful`).

        The order of the held pushes is left out, because a mean always adds them in the order of the workers.
        """
        return {"_held": frozenset(self._held)}

    def _apply_if_at_least(self, count: int) -> list[AnyAction]:
        if len(self._held) < count:
            return []
        held, self._held = tuple(sorted(self._held)), []
        return [ApplyMean(held)]

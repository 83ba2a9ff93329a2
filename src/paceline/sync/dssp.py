"""DSSP, dynamic stale synchronous parallel: the fastest worker may run a few extra iterations if this is
predicted to shorten its wait.

Reference: Zhao, An, Liu and Chen, "Dynamic stale synchronous parallel distributed training for deep learning", ICDCS
2019; ElasticBSP, section 7 and Fig. 14.
Admission: A pull is answered if the gap c_p - min c is at most `lower`. Otherwise, if the worker has extra iterations
left, it uses up one of them and the pull is answered. Otherwise, if the worker is the fastest and has been granted no
extra iterations since its gap was last at most `lower`, it is granted r extra iterations. If r > 0, it uses up the
first of these immediately. Here, r is the integer in [0, upper - lower] for which the predicted wait for the slowest
worker's next push is shortest, or the smallest such number if there are several. In all other cases, the pull is
delayed until the gap is at most `lower`. For the prediction, let t be the time of a worker's last push and I its last
interval between pushes. The fastest worker p finishes r more iterations at t_p + r I_p, and the slowest worker q pushes
at t_q + k I_q for k = 1, 2, ... The wait is the smallest value of t_q + k I_q - (t_p + r I_p) that is >= 0.
State: The state of SSP and, for each worker, its last interval between pushes and the number of extra iterations that
it has left.
Guarantee: No worker starts an iteration while it is more than `upper` iterations ahead of the slowest live worker. The
run makes progress as long as the slowest live worker does. DSSP(s, s) is SSP(s).
Use: When the workers' speeds change and no single bound on the gap fits. The allowed gap of a worker varies between
`lower` and `upper`, depending on which gap is predicted to give the shortest wait.
Deviations: If several workers are the slowest, the prediction is made for the worker with the longest interval. The
paper's controller predicts the slowest worker's next `upper` pushes; this implementation predicts as many pushes as it
needs. Unless the run has `--hyperparameters raw`, an interval does not contain the time that the script spent outside
of training, for example to evaluate the model. Each push says how long this time was.

>>> DSSP(lower=3, upper=15)
DSSP()
"""

from __future__ import annotations

import math

from ..state import stateful
from .actions import AnyAction
from .conditions import ConditionMachine, Intervals, PullState
from .events import AnyEvent, WorkerFinished, WorkerLost
from .model import Handover, SyncModel, require_count, require_order, require_within

MOST_TO_SPEND = 10_000  # largest allowed value of upper - lower


class DSSP(SyncModel):
    """Dynamic SSP.

    Attributes:
        lower: largest gap, in iterations, at which a worker needs no extra iterations; an integer >= 0.
        upper: largest gap, in iterations, at which a worker may start an iteration; an integer >= lower.
    """

    name = "dssp"
    style = "#AF8DC3", 1
    shown = ("dssp:lower=1,upper=6",)
    demo = ("dssp:lower=3,upper=15",)
    agrees_on_means = True

    lower: int = 3
    upper: int = 15

    def __post_init__(self) -> None:
        require_count(self.name, "lower", self.lower, 0)
        require_order(self.name, "lower", self.lower, "upper", self.upper)

    def require_runnable(self, workers: int) -> None:
        # The range is limited, because the server processes no pushes while it tries every r in [0, upper - lower].
        require_within(self.name, "upper", self.upper, 0, self.lower + MOST_TO_SPEND)

    def at_shard(self, seed: int = 0, shard: int = 0) -> SpendingMachine:
        return SpendingMachine(self)


@stateful(fixed="_model")
class SpendingMachine(ConditionMachine):
    """The state machine of SSP(lower), with extra iterations that let a worker exceed `lower`."""

    def __init__(self, model: DSSP) -> None:
        # A delayed pull waits for the round whose end reduces the worker's gap to `lower`.
        super().__init__(
            self._answers, execution=lambda progress, v_train: max(v_train, progress - model.lower)
        )
        self._model = model
        self._intervals = Intervals()
        # worker with a gap above `lower` -> number of extra iterations that the worker has left
        self._left: dict[int, int] = {}

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Process one legal event and return the resulting actions."""
        actions = super().handle(event)
        self._intervals.note(event)
        if isinstance(event, WorkerLost | WorkerFinished):
            self._left.pop(event.worker, None)
        return actions

    def take_over(self, handover: Handover, now_ticks: int) -> list[AnyAction]:
        for worker in handover.counts.count:
            self._intervals.begin(worker, now_ticks)
        return super().take_over(handover, now_ticks)

    def _answers(self, state: PullState) -> bool:
        # The gap is measured from V_train, which equals min c unless a worker has joined with a smaller c_p. No other
        # worker waits for that worker.
        worker, gap = state.worker, state.progress + 1 - state.v_train
        if gap <= self._model.lower:
            self._left.pop(worker, None)
            return True
        if worker not in self._left and state.progress + 1 == state.fastest:
            self._left[worker] = self._choose(worker)
        if self._left.get(worker, 0) > 0 and gap <= self._model.upper:
            self._left[worker] -= 1
            return True
        # The worker waits until its gap is `lower`. It may get a new grant when the gap exceeds `lower` again.
        self._left.pop(worker, None)
        return False

    def _choose(self, worker: int) -> int:
        """Return r, the number of extra iterations granted to a worker.

        This method scans all workers, so it is not called for every pull.
        """
        last, interval = self._intervals.last_ticks, self._intervals.interval_ticks
        slowest = [w for w, count in self.counts.count.items() if count == self.counts.slowest]
        q = max(slowest, key=lambda w: (interval.get(w, math.inf), -w))  # the longest interval
        if (
            q not in interval or worker not in interval
        ):  # one of these workers has not pushed yet, so nothing can be predicted
            return 0
        return iterations_to_spend(
            last[worker],
            interval[worker],
            last[q],
            interval[q],
            self._model.upper - self._model.lower,
        )


def iterations_to_spend(t_p: int, i_p: int, t_q: int, i_q: int, most: int) -> int:
    """Return the r in [0, most] for which the predicted wait for the slowest worker's next push is shortest.

    If several r are equally good, return the smallest. The module docstring explains t_p, I_p, t_q and I_q, which are
    whole numbers of ticks.

    >>> iterations_to_spend(t_p=4, i_p=1, t_q=3, i_q=3, most=5)  # the slowest pushes at 6, 9, ...
    2
    """
    if i_q <= 0:
        return 0

    def wait(r: int) -> int:
        done = t_p + r * i_p
        k = max(1, -((t_q - done) // i_q))  # (done - t_q) / i_q, rounded up
        return t_q + k * i_q - done

    return min(range(most + 1), key=wait)

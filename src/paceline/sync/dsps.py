"""DSPS, the dynamic SSP of FluentPS's Table III: SSP with a bound on the gap that adapts to the workers' speeds.

Reference: Zhang, Tu, Ren et al., "A parameter communication optimization strategy for distributed machine learning in
sensors", Sensors 17(10), 2017, which FluentPS cites for the row DSPS of its Table III. This implementation is based on
FluentPS alone, because the paper by Zhang et al. was not available. FluentPS states the pull condition, and says that
the strategy "monitored the performance of worker nodes to dynamically adjust the staleness threshold" (section V). The
rule for the bound s is this project's interpretation.
Admission: As in SSP(s), a pull is answered if and only if progress < V_train + s. Each time V_train advances, s is set
to the number of iterations that the fastest worker computes while the slowest worker computes one iteration, that is,
ceil(longest interval / shortest interval), clamped to [lower, upper]. The interval of a worker is the time from the
answer to its last pull, or from its join, to its last push.
State: The state of SSP, and the last interval of each worker.
Guarantee: No worker starts an iteration while it is more than `upper` iterations ahead of the slowest live worker. The
run makes progress as long as the slowest live worker does. With lower = upper, the model is SSP(lower).
Use: When the ratio between the workers' speeds is not known in advance.
Deviations: The rule for s is an interpretation (see Reference). Intervals do not include the time for which a pull is
delayed: otherwise, a worker that waits for the slowest worker would seem as slow as the slowest, and s would shrink.
Intervals include the transfers and, with several shards, the time for which a worker waits for other shards. Unless the
run has `--hyperparameters raw`, intervals do not contain the time that the script spent outside of training, for
example to evaluate the model. Each push says how long this time was. At first, s is `lower`. It does not change until
every live worker has pushed. With the soft barrier, a delayed pull waits for the current round to close, even if s has
grown or shrunk in the meantime. With `push_scale="1/n"`, n is the largest number of workers that have been present at
the same time (see `paceline.sync.conditions`). In the paper, N is a constant.

>>> DSPS(lower=1, upper=9).at_shard().staleness
1
"""

from __future__ import annotations

import math

from ..state import stateful
from .actions import AnswerPull, AnyAction
from .conditions import EXECUTIONS, PUSH_SCALES, ConditionMachine, ConditionModel, Intervals, PullState
from .events import AnyEvent
from .model import Handover, require_count, require_order


class DSPS(ConditionModel):
    """SSP with an adaptive bound on the gap.

    Attributes:
        lower: smallest bound on the gap, in iterations: an integer >= 0.
        upper: largest bound on the gap, in iterations: an integer >= lower.
    """

    name = "dsps"
    style = "#4D004B", 2
    shown = ("dsps:lower=1,upper=15",)
    demo = ("dsps:lower=1,upper=15",)

    lower: int = 1
    upper: int = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(self.name, "lower", self.lower, 0)
        require_order(self.name, "lower", self.lower, "upper", self.upper)

    def at_shard(self, seed: int = 0, shard: int = 0) -> AdaptiveMachine:
        return AdaptiveMachine(self)


@stateful(fixed="_model")
class AdaptiveMachine(ConditionMachine):
    """The state machine of SSP, with a bound on the gap that changes over time.

    Attributes:
        staleness: the current value of s.
    """

    def __init__(self, model: DSPS) -> None:
        super().__init__(
            self._within,
            execution=EXECUTIONS[model.execution],
            scale=PUSH_SCALES[model.push_scale],
        )
        self.staleness = model.lower
        self._model = model
        self._intervals = Intervals()

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Process one legal event and return the resulting actions."""
        v_train = self.v_train
        actions = super().handle(event)
        self._intervals.note(event)
        for action in actions:
            if type(action) is AnswerPull:
                self._intervals.begin(action.worker, event.now_ticks)
        if self.v_train != v_train:
            self._adapt()
        return actions

    def take_over(self, handover: Handover, now_ticks: int) -> list[AnyAction]:
        for worker in handover.counts.count:
            self._intervals.begin(worker, now_ticks)
        return super().take_over(handover, now_ticks)

    def _within(self, state: PullState) -> bool:
        return state.progress < state.v_train + self.staleness

    def _adapt(self) -> None:
        """Update the bound on the gap. This scans all workers, so it is done once per round, not once per push."""
        intervals = self._intervals.interval_ticks.values()
        if len(intervals) != self.counts.live_count or not any(intervals):
            return
        ratio = -(-max(intervals) // min(intervals)) if min(intervals) else math.inf  # rounded up
        self.staleness = int(min(self._model.upper, max(self._model.lower, ratio)))

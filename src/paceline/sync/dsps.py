"""DSPS, dynamic SSP in FluentPS's Table III: SSP whose staleness follows the workers' speeds.

Reference: FluentPS, Table III, row DSPS, after Fan et al. ("adaptive asynchronous parallelization", 2018); that
paper is not at hand, so the rule below is this project's reading.
Admission: as SSP(s): progress < V_train + s. At each advance of V_train s becomes ceil(slowest / fastest interval),
clamped to [lower, upper]: as many iterations as the fastest worker does while the slowest does one.
State: SSP's, and each worker's last interval.
Guarantee: no worker starts an iteration more than `upper` ahead of the slowest live worker. Live. With lower = upper
it is SSP(lower).
Use: when machines differ by a ratio that is not known beforehand.
Deviations: see above. Until every live worker has pushed, s is `lower`. A pull that is delayed waits for the next
round to close (soft barrier), also if s has grown or shrunk since.

>>> DSPS(lower=1, upper=9).at_shard().staleness
1
"""

from __future__ import annotations

import math

from .actions import AnyAction
from .conditions import EXECUTIONS, ConditionMachine, ConditionModel, PullState
from .events import AnyEvent, WorkerJoined
from .intervals import Intervals
from .model import Handover, require_count, require_order

__all__ = ["DSPS"]


class DSPS(ConditionModel, frozen=True, repr_omit_defaults=True, tag="dsps"):
    """SSP with an adaptive staleness.

    Attributes:
        lower: the least staleness, a whole number >= 0.
        upper: the largest, a whole number >= lower.
    """

    name = "dsps"

    lower: int = 1
    upper: int = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(self.name, "lower", self.lower, 0)
        require_order(self.name, "lower", self.lower, "upper", self.upper)

    def at_shard(self, seed: int = 0, shard: int = 0) -> AdaptiveMachine:
        return AdaptiveMachine(self)


class AdaptiveMachine(ConditionMachine):
    """SSP's machine with a staleness that moves.

    Attributes:
        staleness: s as it is now.
    """

    def __init__(self, model: DSPS) -> None:
        super().__init__(
            self._within,
            execution=EXECUTIONS[model.execution],
            scale_by_live=model.push_scale == "1/n",
        )
        self.staleness = model.lower
        self._model = model
        self._intervals = Intervals()

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Take one event; return what follows from it."""
        v_train = self.v_train
        actions = super().handle(event)
        self._intervals.note(event)
        if self.v_train != v_train:
            self._adapt()
        return actions

    def take_over(self, handover: Handover, now_s: float) -> list[AnyAction]:
        for worker in handover.counts.count:
            self._intervals.note(WorkerJoined(now_s=now_s, worker=worker))
        return super().take_over(handover, now_s)

    def _within(self, state: PullState) -> bool:
        return state.progress < state.v_train + self.staleness

    def _adapt(self) -> None:
        """One look at all workers for each round, not for each push."""
        intervals_s = self._intervals.interval_s
        if intervals_s and len(intervals_s) == self.counts.live_count and min(intervals_s.values()) > 0:
            ratio = max(intervals_s.values()) / min(intervals_s.values())
            self.staleness = min(self._model.upper, max(self._model.lower, math.ceil(ratio)))

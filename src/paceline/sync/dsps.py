"""DSPS, dynamic SSP in FluentPS's Table III: SSP whose staleness follows the workers' speeds.

Reference: FluentPS, Table III, row DSPS, after Fan et al. ("adaptive asynchronous parallelization", 2018); that
paper is not at hand, so the rule below is this project's reading.
Admission: as SSP(s): progress < V_train + s. At each advance of V_train s becomes ceil(slowest / fastest interval),
clamped to [lower, upper]: as many iterations as the fastest worker does while the slowest does one.
State: SSP's, and each worker's last interval.
Guarantee: no worker starts an iteration more than `upper` ahead of the slowest live worker. Live. With lower = upper
it is SSP(lower).
Deviations: see above. Until every live worker has pushed, s is `lower`. A pull that is delayed waits for the next
round to close (soft barrier), also if s has grown or shrunk since.

>>> DSPS(lower=1, upper=9).at_shard().staleness
1
"""

from __future__ import annotations

import math

from .actions import AnyAction
from .conditions import EXECUTIONS, ConditionMachine, PullState, require_execution
from .events import AnyEvent
from .intervals import Intervals
from .model import SyncModel, require_count, require_order

__all__ = ["DSPS"]


class DSPS(SyncModel, frozen=True, repr_omit_defaults=True, tag="dsps"):
    """SSP with an adaptive staleness.

    Attributes:
        lower: the least staleness, a whole number >= 0.
        upper: the largest, a whole number >= lower.
        execution: of delayed pulls, "soft" or "lazy".
    """

    name = "dsps"

    lower: int = 1
    upper: int = 15
    execution: str = "soft"

    def __post_init__(self) -> None:
        require_count(self.name, "lower", self.lower, 0)
        require_order(self.name, "lower", self.lower, "upper", self.upper)
        require_execution(self.name, self.execution)

    def at_shard(self, seed: int = 0, shard: int = 0) -> AdaptiveMachine:
        return AdaptiveMachine(self)


class AdaptiveMachine:
    """SSP's machine with a staleness that moves.

    Attributes:
        staleness: s as it is now.
    """

    def __init__(self, model: DSPS) -> None:
        self.staleness = model.lower
        self._model = model
        self._intervals = Intervals()
        self._rounds = ConditionMachine(self._answers, execution=EXECUTIONS[model.execution])
        self.ledger = self._rounds.ledger

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Take one event; return what follows from it."""
        v_train = self._rounds.v_train
        actions = self._rounds.handle(event)
        self._intervals.note(event)
        if self._rounds.v_train != v_train:
            self._adapt()
        return actions

    def validate(self) -> None:
        """Cross-check the collections derived from one another."""
        self._rounds.validate()

    def _answers(self, state: PullState) -> bool:
        return state.progress < state.v_train + self.staleness

    def _adapt(self) -> None:
        """One look at all workers for each round, not for each push."""
        intervals_s = self._intervals.interval_s
        if intervals_s and len(intervals_s) == self.ledger.live_count and min(intervals_s.values()) > 0:
            ratio = max(intervals_s.values()) / min(intervals_s.values())
            self.staleness = min(self._model.upper, max(self._model.lower, math.ceil(ratio)))

"""Naive waiting: every pull is answered after a fixed delay, with weights that include more pushes of other workers.

Reference: SpecSync (Zhang et al., ICDCS 2018), section III-B, Figs. 4 and 5.
Admission: A pull is answered d seconds after its arrival.
State: The pulls that are being delayed.
Guarantee: Each pull waits d seconds, whatever the other workers do. Staleness is not bounded. d = 0 is ASP.
Use: As a baseline for comparisons: it shows what fresher weights gain, and what waiting for them costs.
Deviations: In the paper, workers delay their requests. Here, the shard delays its answers, which are equally fresh.

>>> from paceline.sync.events import PullRequested, PushReceived, TimerFired, WorkerJoined
>>> shard = NaiveWaiting(delay_s=0.5).at_shard()
>>> _ = shard.handle(WorkerJoined(now_s=0.0, worker=0))
>>> shard.handle(PushReceived(now_s=1.0, worker=0, iteration=0))
[ApplyPush(worker=0, iteration=0, scale=1.0)]
>>> shard.handle(PullRequested(now_s=1.0, worker=0, iteration=0))
[SetTimer(worker=0, iteration=0, due_s=1.5)]
>>> shard.handle(TimerFired(now_s=1.5, worker=0, iteration=0))
[AnswerPull(worker=0, iteration=0)]
"""

from __future__ import annotations

import math

from ..errors import InternalError
from .actions import AnswerPull, AnyAction, ApplyPush, DropPush, SetTimer
from .events import (
    AnyEvent,
    PullRequested,
    PushReceived,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from .ledger import Ledger
from .model import SyncModel, require_within

__all__ = ["NaiveWaiting"]


class NaiveWaiting(SyncModel, frozen=True, repr_omit_defaults=True, tag="naive-waiting"):
    """ASP with a fixed delay before each pull is answered.

    Attributes:
        delay_s: d, the time in seconds by which each pull is delayed; a number >= 0.
    """

    name = "naive-waiting"

    delay_s: float

    def __post_init__(self) -> None:
        require_within(self.name, "delay_s", self.delay_s, 0.0, math.inf)

    def require_runnable(self, workers: int) -> None:
        require_within(
            self.name, "delay_s", self.delay_s, 0.0, 1e6
        )  # longer is a slip, and no worker returns from it

    def at_shard(self, seed: int = 0, shard: int = 0) -> DelayingMachine:
        return DelayingMachine(self.delay_s)


class DelayingMachine:
    """ASP's machine with a timer for each pull."""

    def __init__(self, delay_s: float) -> None:
        self.ledger = Ledger()
        self._delay_s = delay_s
        self._put_off: dict[int, int] = {}  # worker -> iteration of its pull, until the timer fires

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Take one event; return what follows from it."""
        match event:
            case PushReceived():
                self.ledger.pushed(event)
                return [(DropPush if event.empty else ApplyPush)(event.worker, event.iteration)]
            case PullRequested():
                self.ledger.pulled(event)
                self._put_off[event.worker] = event.iteration
                if not self._delay_s:
                    return self._answer(event.worker, event.iteration)
                return [SetTimer(event.worker, event.iteration, event.now_s + self._delay_s)]
            case TimerFired():
                return self._answer(event.worker, event.iteration)
            case WorkerJoined():
                self.ledger.joined(event, self.ledger.slowest if event.count is None else event.count)
            case WorkerLost() | WorkerFinished():
                self.ledger.left(event)
                self._put_off.pop(event.worker, None)
            case _:
                raise InternalError(f"no shard is told of a {type(event).__name__}")
        return []

    def waits(self) -> dict[int, str]:
        """For each pull that is put off, what it waits for."""
        return dict.fromkeys(self._put_off, "its timer")

    def validate(self) -> None:
        """Cross-check the collections derived from one another."""
        self.ledger.validate()
        waiting = {worker for worker in self.ledger.count if self.ledger.phase(worker) == "waiting"}
        if self._put_off.keys() != waiting:
            raise InternalError(f"pulls {self._put_off} are put off, but {waiting} wait")

    def _answer(self, worker: int, iteration: int) -> list[AnyAction]:
        if self._put_off.get(worker) != iteration:
            return []
        del self._put_off[worker]
        self.ledger.answered(worker)
        return [AnswerPull(worker, iteration)]

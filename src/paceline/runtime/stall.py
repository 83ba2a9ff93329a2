"""Finds out whom a run waits for: a worker or server that has gone silent, or conditions that will never hold.

Nothing here is certain. A worker whose script evaluates for a minute is as silent as one that hangs; so patience is
measured in a worker's own usual iterations, and what comes out is a name and a time, for the user to judge.

    before training   who has not started, or not come to its first step, although others have
    in training       a server that does not answer; a worker that computes, or ought to, and has long said nothing
                      while others wait for it, or while no other is left
    standstill        every worker waits, and no condition will release any. No sync model of this package does that;
                      conditions that a user writes may
"""

from __future__ import annotations

import time

import msgspec

from ..core.messages import Waits
from ..core.standstill import standstill
from .coordinator import Coordinator

__all__ = ["Awaited", "StallWatch"]

PATIENCE_S = 3.0  # at least, with a worker
PATIENCE_ITERATIONS = 5  # of its usual ones
FIRST_PATIENCE_S = 15.0  # while nobody knows how long its iterations take: the first may compile
NOBODY_YET_PATIENCE_S = 60.0  # while nobody at all has started, or come to its first step
SERVER_PATIENCE_S = 3.0  # a server answers between two messages
SUSPICIOUS_S = 2.0  # that no worker computes, before the servers are asked
APART_S = 1.0  # between two questions


class Awaited(msgspec.Struct, frozen=True):
    """Somebody whom a run waits for.

    Attributes:
        role: "worker" or "server".
        index: which.
        quiet_s: for how long nothing has been heard of it.
        doing: what it was doing then, in words that follow "it".
        waiting: the workers that wait.
        usual_s: how long its iterations take, in seconds; 0 where that is not known.
    """

    role: str
    index: int
    quiet_s: float
    doing: str
    waiting: tuple[int, ...]
    usual_s: float = 0.0


class StallWatch:
    """Watches one run. Call `look` often.

    Args:
        coordinator: of the run.
        timeout_s: after which somebody silent is to be ended; patience at the start is never longer. None for none.

    Attributes:
        standstill: who waits for what, if everybody does and will for ever; else "".
    """

    def __init__(self, coordinator: Coordinator, timeout_s: float | None = None) -> None:
        self.standstill = ""
        self._first_patience_s = min(FIRST_PATIENCE_S, timeout_s or FIRST_PATIENCE_S)
        self._coordinator = coordinator
        self._begun_s = time.monotonic()
        self._asked_s = 0.0
        self._idle_s: float | None = None  # since when nobody computes
        self._before: dict[int, Waits] = {}  # what the servers answered last time

    def look(self) -> list[Awaited]:
        """Return who is awaited for longer than usual."""
        coordinator = self._coordinator
        live = [worker for worker in range(coordinator.job.workers) if not coordinator.core.fate(worker)]
        if coordinator.core.model is None:
            return self._look_before_training(live)
        now_s = time.monotonic()
        quiet_s = {
            worker: now_s - coordinator.heard_s.get(("worker", worker), self._begun_s) for worker in live
        }
        states = [coordinator.core.board[worker].state for worker in live if worker in coordinator.core.board]
        idle = bool(live) and len(states) == len(live) and "computing" not in states
        self._idle_s = (self._idle_s or now_s) if idle else None
        late = [worker for worker in live if quiet_s[worker] > self._patience_s(worker)]
        if not late and (self._idle_s is None or now_s - self._idle_s < SUSPICIOUS_S):
            self._before = {}
            return []
        if now_s - self._asked_s > APART_S:
            if not coordinator.asked_s and self._answered:
                self._look_for_standstill(live)
            self._asked_s = now_s
            coordinator.ask_servers()
            return []
        silent = [
            Awaited("server", server, now_s - asked_s, "owed an answer", tuple(late))
            for server, asked_s in sorted(coordinator.asked_s.copy().items())
            if now_s - asked_s > SERVER_PATIENCE_S
        ]
        if silent or not self._answered:
            return silent
        if not coordinator.started.is_set():
            publisher = coordinator.core.publisher
            waiting = tuple(worker for worker in live if worker != publisher)
            doing = "was to send everybody the first weights"
            return (
                [Awaited("worker", publisher, quiet_s[publisher], doing, waiting)]
                if publisher in late
                else []
            )
        held = {worker for answer in self._answers for shard in answer.shards for worker, _ in shard.pulls}
        held |= coordinator.core.awaiting_turn
        awaited = [worker for worker in late if worker not in held]
        if not held and len(awaited) < len(live):
            return []  # the others go on without it
        waiting = tuple(worker for worker in live if worker in held)
        return [self._awaited(worker, quiet_s[worker], waiting) for worker in awaited]

    def _awaited(self, worker: int, quiet_s: float, waiting: tuple[int, ...]) -> Awaited:
        status = self._coordinator.core.board.get(worker)
        doing = (
            "had got its first weights" if status is None else f"last spoke in iteration {status.iteration}"
        )
        usual_s = self._coordinator.usual_s.get(worker, 0.0)
        return Awaited("worker", worker, quiet_s, doing, waiting, usual_s)

    def _look_before_training(self, live: list[int]) -> list[Awaited]:
        coordinator = self._coordinator
        heard_s = coordinator.heard_s.copy()
        registered_s = {w: at_s for w, at_s in coordinator.registered_s.copy().items() if w in live}
        waiting = tuple(sorted(registered_s))
        expected = [("worker", w) for w in live] + [("server", k) for k in range(coordinator.job.servers)]
        silent = [peer for peer in expected if peer not in heard_s]
        unregistered = [("worker", w) for w in live if ("worker", w) in heard_s and w not in registered_s]
        awaited = []
        # All start together, and all workers run one script: the first one's time says what the others need.
        for peers, first_s, doing in [
            (silent, min(heard_s.values(), default=None), "was to start"),
            (unregistered, min(registered_s.values(), default=None), "was to come to its first step()"),
        ]:
            quiet_s = time.monotonic() - (self._begun_s if first_s is None else first_s)
            if quiet_s >= (NOBODY_YET_PATIENCE_S if first_s is None else self._first_patience_s):
                awaited += [Awaited(role, index, quiet_s, doing, waiting) for role, index in peers]
        return awaited

    @property
    def _answers(self) -> list[Waits]:
        return [answer for _, answer in sorted(self._coordinator.core.waits.copy().items())]

    @property
    def _answered(self) -> bool:
        return len(self._coordinator.core.waits) == self._coordinator.job.servers

    def _patience_s(self, worker: int) -> float:
        usual_s = self._coordinator.usual_s.get(worker)
        return self._first_patience_s if usual_s is None else max(PATIENCE_S, PATIENCE_ITERATIONS * usual_s)

    def _look_for_standstill(self, live: list[int]) -> None:
        """Compare what the servers have answered with what they answered before."""
        before, self._before = self._before, self._coordinator.core.waits.copy()
        shards = [shard for answer in self._answers for shard in answer.shards]
        if (
            self._idle_s is None
            or self._before != before
            or any(answer.timers for answer in self._answers)
            or set(live) - {worker for shard in shards for worker, _ in shard.pulls}
        ):
            return  # somebody is on the way: its pull was answered, or its push has yet to be heard
        self.standstill = standstill(shards)

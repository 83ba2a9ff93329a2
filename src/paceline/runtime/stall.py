"""Finds out what a stalled run is waiting for: a silent worker or server, or conditions that will never hold.

The result is only a guess, because a worker whose script evaluates its model for a minute is as silent as a worker
that hangs. Therefore the time after which a worker is reported depends on the usual duration of its iterations. The
report names the process and says how long it has been silent; the user decides what to do. Possible reports:

    before training   a process has not started, or a worker has not begun to train, although another one did
                      so some time ago or the run began more than a minute ago
    in training       a server does not answer; or a worker that should be computing has been silent for a long time,
                      and other workers are waiting for it or all workers are silent
    standstill        every worker is waiting, and no condition will release any worker. With the sync models of this
                      package, this happens only if workers wait in a barrier for workers that wait for them; it may
                      also happen with user-defined conditions
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from ..core.protocol.messages import Waits
from ..core.status.standstill import standstill, unable_to_begin
from .compute_devices import CPU
from .coordinator_host import CoordinatorHost

__all__ = ["Awaited", "StallWatch"]

# A worker is reported when it has been silent for at least PATIENCE_S and at least PATIENCE_ITERATIONS times its
# usual iteration time.
PATIENCE_S = 3.0
PATIENCE_ITERATIONS = 5
# Permitted silence while a worker's iteration time is unknown, long enough for an iteration that compiles code. An
# accelerator may compile code in any iteration.
FIRST_PATIENCE_S = 15.0
NOBODY_YET_PATIENCE_S = 60.0  # time for the first process to start, and for the first worker to reach step()
# Permitted silence of a server, which answers once it has handled the current message.
SERVER_PATIENCE_S = 3.0
SUSPICIOUS_S = 2.0  # after this time without a computing worker, ask the servers which workers are waiting
APART_S = 1.0  # minimum time between two requests to the servers


class Awaited(msgspec.Struct, frozen=True):
    """A process that a run is waiting for.

    Attributes:
        role: "worker" or "server".
        index: index of the worker or server.
        quiet_s: seconds since the last message from this process, or since an overdue message was first expected.
        doing: state of the process, as a phrase that completes a sentence beginning with "It".
        waiting: the workers that wait for this process.
        usual_s: usual duration of the worker's iterations in seconds; 0 if unknown.
    """

    role: Literal["worker", "server"]
    index: int
    quiet_s: float
    doing: str
    waiting: tuple[int, ...]
    usual_s: float = 0.0


class StallWatch:
    """Detects stalls of one run. The caller must call `look` regularly.

    Args:
        coordinator: the coordinator of the run.
        timeout_s: seconds after which the caller kills a silent process; None if the caller never does this. This
            time is also an upper bound for `FIRST_PATIENCE_S`.

    Attributes:
        standstill: a description of what each worker waits for, if no worker can ever continue; else "".
    """

    def __init__(self, coordinator: CoordinatorHost, timeout_s: float | None = None) -> None:
        self.standstill = ""
        self._first_patience_s = min(FIRST_PATIENCE_S, timeout_s or FIRST_PATIENCE_S)
        self._coordinator = coordinator
        self._begun_s = time.monotonic()
        self._asked_s = 0.0
        # time since which no worker has been computing; None while a worker is computing
        self._idle_s: float | None = None
        self._before: dict[int, Waits] = {}  # previous answers of the servers

    def look(self) -> list[Awaited]:
        """Return the processes for which the run has been waiting for an unusually long time."""
        coordinator = self._coordinator
        live = sorted(coordinator.core.members.live)
        if coordinator.core.quorum.paused:
            self._before, self._idle_s = {}, None
            return []  # the run waits for workers that are yet to join
        if coordinator.core.model is None:
            return self._look_before_training(live)
        now_s = time.monotonic()
        quiet_s = {
            worker: now_s - coordinator.watch.heard_s.get(("worker", worker), self._begun_s)
            for worker in live
        }
        gathered = coordinator.core.collectives.waiting.copy()
        training = [worker for worker in live if worker not in gathered]
        states = [
            coordinator.core.board[worker].state for worker in training if worker in coordinator.core.board
        ]
        idle = bool(live) and len(states) == len(training) and "computing" not in states
        self._idle_s = (self._idle_s or now_s) if idle else None
        late = [worker for worker in training if quiet_s[worker] > self._patience_s(worker)]
        if not late and (self._idle_s is None or now_s - self._idle_s < SUSPICIOUS_S):
            self._before = {}
            return []
        if now_s - self._asked_s > APART_S:
            if not coordinator.asked_s and self._answered:
                self._look_for_standstill(live)
            self._asked_s = now_s
            coordinator.ask_servers()
            return []
        silent = self._silent_servers(now_s, late)
        if silent or not self._answered:
            return silent
        if not coordinator.started.is_set():
            initializer = coordinator.core.initializer
            if initializer not in late:
                return []
            waiting = tuple(worker for worker in live if worker != initializer)
            doing = "has not sent the initial weights yet"
            return [Awaited("worker", initializer, quiet_s[initializer], doing, waiting)]
        held = {worker for answer in self._answers for shard in answer.shards for worker, _ in shard.pulls}
        held |= coordinator.core.awaiting_turn | gathered.keys()
        awaited = [worker for worker in late if worker not in held]
        if not held and len(awaited) < len(live):
            return []  # no worker waits, so the other workers can continue without the late ones
        waiting = tuple(worker for worker in live if worker in held)
        return [self._awaited(worker, quiet_s[worker], waiting) for worker in awaited]

    def _silent_servers(self, now_s: float, waiting: list[int]) -> list[Awaited]:
        return [
            Awaited("server", server, now_s - asked_s, "has not answered the coordinator yet", tuple(waiting))
            for server, asked_s in sorted(self._coordinator.asked_s.copy().items())
            if now_s - asked_s > SERVER_PATIENCE_S
        ]

    def _awaited(self, worker: int, quiet_s: float, waiting: tuple[int, ...]) -> Awaited:
        status = self._coordinator.core.board.get(worker)
        doing = (
            "has received its first weights"
            if status is None
            else f"last reported in iteration {status.iteration}"
        )
        usual_s = self._coordinator.watch.usual_s.get(worker, 0.0)
        return Awaited("worker", worker, quiet_s, doing, waiting, usual_s)

    def _look_before_training(self, live: list[int]) -> list[Awaited]:
        coordinator = self._coordinator
        heard_s = coordinator.watch.heard_s.copy()
        gathered = coordinator.core.collectives.waiting.copy()
        if coordinator.core.unable_to_begin:
            self.standstill = unable_to_begin(live, gathered)
        registered_s = {w: at_s for w, at_s in coordinator.watch.registered_s.copy().items() if w in live}
        waiting = tuple(sorted({*registered_s, *gathered}))
        expected: list[tuple[Literal["worker", "server"], int]] = [("worker", w) for w in live]
        # Machines that have yet to join bring the vacant ones.
        vacant = coordinator.core.servers.vacant.copy()
        expected += [("server", k) for k in range(coordinator.job.servers) if k not in vacant]
        silent = [peer for peer in expected if peer not in heard_s]
        unregistered: list[tuple[Literal["worker", "server"], int]]
        unregistered = [("worker", w) for w in live if ("worker", w) in heard_s and w not in waiting]
        awaited = []
        # All processes start at the same time, and all workers run the same script. So no process should take much
        # longer than the first one.
        for peers, first_s, doing in [
            (silent, min(heard_s.values(), default=None), "has not started yet"),
            (unregistered, min(registered_s.values(), default=None), "has not begun to train yet"),
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
        usual_s = self._coordinator.watch.usual_s.get(worker)
        if usual_s is None:
            return self._first_patience_s
        on_cpu = self._coordinator.watch.devices.get(worker, CPU.label) == CPU.label
        return max(PATIENCE_S if on_cpu else self._first_patience_s, PATIENCE_ITERATIONS * usual_s)

    def _look_for_standstill(self, live: list[int]) -> None:
        """Set `standstill` if the servers repeat their previous answers, all workers wait and no timer is set."""
        core = self._coordinator.core
        before, self._before = self._before, core.waits.copy()
        shards = [shard for answer in self._answers for shard in answer.shards]
        gathered = core.collectives.waiting.copy()
        held = {worker for shard in shards for worker, _ in shard.pulls} | gathered.keys()
        held |= core.awaiting_turn
        # Some of the workers that wait in a barrier push after a while, so that others need not wait for them.
        pushing = [worker for worker, contribution in gathered.items() if contribution.may_push]
        patience_s = max(map(self._patience_s, pushing), default=0.0)
        if (
            self._idle_s is None
            or time.monotonic() - self._idle_s < patience_s
            or self._before != before
            or any(answer.timers for answer in self._answers)
            or set(live) - held
            or any({worker for worker, _ in shard.staleness} != set(live) for shard in shards)
        ):
            # A worker can still continue: its pull was answered, its push has not arrived yet, or a shard has yet to
            # learn that another worker has joined, left or been lost.
            return
        self.standstill = standstill(shards, gathered)

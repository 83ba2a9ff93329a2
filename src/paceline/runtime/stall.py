"""Finds out what a stalled run is waiting for: a silent worker or server, or conditions that will never hold.

The result is only a guess, because a worker whose script evaluates its model for a minute is as silent as a worker
that hangs. Therefore the time after which a worker is reported depends on the usual duration of its iterations. The
report names the process and says how long it has been silent; the user decides what to do. The clock of a process
begins when the process is expected, and stands still while the run waits for other machines (see
`core.machines.waiting_clocks`). Possible reports:

    before training   a process has not started, or a worker has not begun to train, although another one took much
                      less time to do so, or after more than a minute
    in training       a server does not answer; or a worker that should be computing has been silent for a long time,
                      and other workers are waiting for it or all workers are silent
    standstill        every worker is waiting, and no condition will release any worker. With the sync models of this
                      package, this happens only if workers wait in a barrier for workers that wait for them; it may
                      also happen with user-defined conditions
"""

from __future__ import annotations

import math
import time
from typing import Literal

import msgspec

from ..core.machines.waiting_clocks import Clocks
from ..core.protocol.messages import Waits
from ..core.status.job_status import LOCAL
from ..core.status.standstill import standstill, unable_to_begin
from .compute_devices import CPU
from .coordinator_host import CoordinatorHost
from .job_watch import CLOCK_GAP_S

__all__ = ["Awaited", "StallWatch"]

# A worker is reported when it has been silent for at least PATIENCE_S and at least PATIENCE_ITERATIONS times its
# usual iteration time.
PATIENCE_S = 3.0
PATIENCE_ITERATIONS = 5
# Permitted silence while a worker's iteration time is unknown, long enough for an iteration that compiles code. An
# accelerator may compile code in any iteration.
FIRST_PATIENCE_S = 15.0
NOBODY_YET_PATIENCE_S = (
    60.0  # time for a machine's first process to start, and for the first worker to reach step()
)
# Permitted silence of a server, which answers once it has handled the current message.
SERVER_PATIENCE_S = 3.0
SUSPICIOUS_S = 2.0  # after this time without a computing worker, ask the servers which workers are waiting
APART_S = 1.0  # minimum time between two requests to the servers
IDLE = "idle"  # the state in which no worker computes


class Awaited(msgspec.Struct, frozen=True):
    """A process that a run is waiting for.

    Attributes:
        role: "worker" or "server".
        index: index of the worker or server.
        quiet_s: seconds for which this process has been silent, although it could have sent a message. At the start
            of a run, only those that it has taken longer than others.
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
        self._asked_s = -math.inf
        # The clock of the state in which no worker computes.
        self._idle: Clocks[str] = Clocks(time.monotonic(), gap_s=CLOCK_GAP_S)
        self._before: dict[int, Waits] = {}  # previous answers of the servers

    def look(self) -> list[Awaited]:
        """Return the processes for which the run has been waiting for an unusually long time."""
        coordinator, core = self._coordinator, self._coordinator.core
        live, now_s = sorted(core.members.live), time.monotonic()
        waits = core.quorum.paused or core.shortage != ""  # for workers or servers that are yet to join
        coordinator.watch.clocks.look(now_s, counts=not waits)
        self._idle.look(now_s, counts=not waits)
        for worker in live:
            if self._must_wait(worker):
                coordinator.watch.clocks.renew(("silent", "worker", worker), now_s)
        if core.model is None and core.unable_to_begin:
            self.standstill = unable_to_begin(live, core.collectives.waiting.copy())
        if waits:
            self._before = {}
            self._idle.end(IDLE)
            return []
        if core.model is None:
            return self._look_before_training(live, now_s)
        quiet_s = {worker: self._quiet_s("worker", worker, now_s) for worker in live}
        gathered = coordinator.core.collectives.waiting.copy()
        training = [worker for worker in live if worker not in gathered]
        states = [
            coordinator.core.board[worker].state for worker in training if worker in coordinator.core.board
        ]
        idle = bool(live) and len(states) == len(training) and "computing" not in states
        idle_s = self._idle.hold(IDLE, now_s, holds=idle)
        late = [worker for worker in training if quiet_s[worker] > self._patience_s(worker)]
        if not late and (idle_s is None or idle_s < SUSPICIOUS_S):
            self._before = {}
            return []
        if now_s - self._asked_s > APART_S:
            if not coordinator.asked and self._answered:
                self._look_for_standstill(live, idle_s)
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
        for worker in held:
            coordinator.watch.clocks.renew(("silent", "worker", worker), now_s)
        awaited = [worker for worker in late if worker not in held]
        if not held and len(awaited) < len(live):
            return []  # no worker waits, so the other workers can continue without the late ones
        waiting = tuple(worker for worker in live if worker in held)
        return [self._awaited(worker, quiet_s[worker], waiting) for worker in awaited]

    def _must_wait(self, worker: int) -> bool:
        """Return True if a worker sends nothing because it waits for others, so that its silence says nothing."""
        core = self._coordinator.core
        return (
            (core.model is None and ("preparing", "worker", worker) in self._coordinator.watch.took_s)
            or worker in core.collectives.waiting
            or worker in core.awaiting_turn
            or core.is_joining(worker)
        )

    def _quiet_s(self, role: Literal["worker", "server"], index: int, now_s: float) -> float:
        """Return for how long a process has been silent, although it could act: 0 if it is not expected."""
        return self._coordinator.watch.clocks.waited_s(("silent", role, index), now_s) or 0.0

    def _silent_servers(self, now_s: float, waiting: list[int]) -> list[Awaited]:
        clocks = self._coordinator.watch.clocks
        asked_s = [
            (server, clocks.waited_s(("asked", "server", server), now_s) or 0.0)
            for server in sorted(self._coordinator.asked.copy())
        ]
        return [
            Awaited("server", server, quiet_s, "has not answered the coordinator yet", tuple(waiting))
            for server, quiet_s in asked_s
            if quiet_s > SERVER_PATIENCE_S
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

    def _look_before_training(self, live: list[int], now_s: float) -> list[Awaited]:
        coordinator, watch = self._coordinator, self._coordinator.watch
        waiting = tuple(worker for worker in live if self._must_wait(worker))
        # Machines that have yet to join bring the vacant ones.
        servers = [k for k in range(coordinator.job.servers) if k not in coordinator.core.servers.vacant]
        took_s = watch.took_s.copy()
        awaited = []
        stages: list[tuple[Literal["starting", "preparing"], Literal["worker", "server"], int, str]]
        stages = [("starting", "worker", worker, "has not started yet") for worker in live]
        stages += [("starting", "server", server, "has not started yet") for server in servers]
        stages += [
            ("preparing", "worker", worker, "has not begun to train yet")
            for worker in live
            if worker not in waiting
        ]
        for stage, role, index, doing in stages:
            waited_s = watch.clocks.waited_s((stage, role, index), now_s)
            if waited_s is None:
                continue
            # The processes of a machine start at the same time, and all workers run the same script. So no process
            # should take much longer than the fastest one.
            machine = self._machine_of(role, index)
            fastest_s = min(
                (
                    each_s
                    for (of, other, number), each_s in took_s.items()
                    if of == stage and (stage == "preparing" or self._machine_of(other, number) == machine)
                ),
                default=None,
            )
            quiet_s = min(waited_s - (fastest_s or 0.0), self._quiet_s(role, index, now_s))
            if quiet_s >= (NOBODY_YET_PATIENCE_S if fastest_s is None else self._first_patience_s):
                awaited.append(Awaited(role, index, quiet_s, doing, waiting))
        return awaited

    def _machine_of(self, role: str, index: int) -> str:
        machines = self._coordinator.machines
        named = machines.machine_of_server if role == "server" else machines.machine_of
        return named.get(index, LOCAL)

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

    def _look_for_standstill(self, live: list[int], idle_s: float | None) -> None:
        """Set `standstill` if the servers repeat their previous answers, all workers wait and no timer is set."""
        core = self._coordinator.core
        before, self._before = self._before, core.waits.copy()
        shards = [shard for answer in self._answers for shard in answer.shards]
        gathered = core.collectives.waiting.copy()
        held = {worker for shard in shards for worker, _ in shard.pulls} | gathered.keys()
        held |= core.awaiting_turn
        # Some of the workers that wait in a barrier push after a while, so that others need not wait for them.
        patience_s = max(map(self._patience_s, core.standing_in), default=0.0)
        if (
            idle_s is None
            or idle_s < patience_s
            or self._before != before
            or any(answer.timers for answer in self._answers)
            or set(live) - held
            or any({worker for worker, _ in shard.staleness} != set(live) for shard in shards)
        ):
            # A worker can still continue: its pull was answered, its push has not arrived yet, or a shard has yet to
            # learn that another worker has joined, left or been lost.
            return
        self.standstill = standstill(shards, gathered)

"""Reports which process a run is waiting for, and kills the process if a timeout was given and has expired."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from ..core.liveness import Clocks
from ..core.messages import Waits
from ..core.standstill import standstill, unable_to_begin
from ..core.status import LOCAL
from ..run.agents import CLOCK_GAP_S
from ..run.compute_devices import CPU
from ..run.coordinator import CoordinatorHost
from .local import LocalEngine
from .terminal import Terminal

# A worker is killed only after it has been silent for at least this many times its usual iteration time, even
# if the timeout is shorter.
LEAST_ITERATIONS = 3
# Time for a process to send its next message after it was suspended, or after the user has typed what it
# waited for.
RECOVERY_S = 15.0


class Waiting:
    """A watchdog for the processes of one run. Call `look` often.

    Args:
        coordinator: the coordinator of the run.
        engine: the engine that runs the processes.
        timeout_s: number of seconds after which a silent process that others wait for is killed; None for never.
        say: a function that prints a line.
        terminal: the terminal that worker 0 uses, if any. While worker 0 waits for the user, it is not silent.
    """

    def __init__(
        self,
        coordinator: CoordinatorHost,
        engine: LocalEngine,
        timeout_s: float | None,
        say: Callable[[str], None],
        terminal: Terminal | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._engine = engine
        self._timeout_s = timeout_s
        self._say = say
        self._terminal = terminal
        # Times until which the silence of all processes, and that of worker 0, has a known reason.
        self._excused_s = self._typed_s = -math.inf
        self._watch = StallWatch(coordinator, timeout_s)
        # Each reported process, with the incarnation of a worker -> its clock, and for how long it had been silent.
        self._reported: dict[tuple[Literal["worker", "server"], int, int], tuple[float | None, float]] = {}

    def look(self) -> str:
        """Check the processes once. If the run cannot continue, return the reason; otherwise, return ""."""
        for reported in self._watch.look():
            awaited = self._without_excuse(reported)
            if awaited is None or self._may_take_its_time(awaited):
                continue
            key = awaited.role, awaited.index
            process_key, clock = self._key_of(*key), self._clock_of(*key)
            before, reported_s = self._reported.get(process_key, (clock, 0.0))
            # Report a silent process again each time its silence has doubled.
            if awaited.quiet_s > 2 * reported_s or before != clock:
                self._reported[process_key] = clock, awaited.quiet_s
                self._say(self._describe(awaited))
            if self._timeout_s is not None and awaited.quiet_s > max(
                self._timeout_s, LEAST_ITERATIONS * awaited.usual_s
            ):
                why = f"it had sent nothing for {awaited.quiet_s:.0f} s (--stall-timeout)"
                if (process := self._engine.process(*key)) is not None:
                    process.kill(why)
                else:
                    self._coordinator.kill(awaited.role, awaited.index, why)
        for (role, index, incarnation), (before, quiet_s) in list(self._reported.items()):
            clock = self._clock_of(role, index)
            if clock is None or incarnation != self._key_of(role, index)[2]:
                del self._reported[role, index, incarnation]  # it has left
            elif clock != before:
                del self._reported[role, index, incarnation]
                self._say(f"{role} {index} responds again, after a silence of at least {quiet_s:.0f} s.")
        return self._watch.standstill

    def excuse(self) -> None:
        """Do not count the silence of any process before now: the processes were suspended."""
        self._excused_s = time.monotonic()

    def _key_of(
        self, role: Literal["worker", "server"], index: int
    ) -> tuple[Literal["worker", "server"], int, int]:
        """Return what names a process for the whole run: the index of a worker may be used again."""
        return role, index, self._coordinator.core.members.incarnation(index) if role == "worker" else 0

    def _clock_of(self, role: Literal["worker", "server"], index: int) -> float | None:
        """Return what changes when a process sends a message; None once it has left."""
        return self._coordinator.watch.clocks.running().get(("silent", role, index))

    def _without_excuse(self, awaited: AwaitedProcess) -> AwaitedProcess | None:
        """Return the process with the silence that has no known reason, or None if that silence is short."""
        now_s = time.monotonic()
        excused_s = self._excused_s
        if (awaited.role, awaited.index) == ("worker", 0):
            process = self._engine.process("worker", 0)
            if process is not None and self._terminal is not None and self._terminal.awaits_user(process.id):
                self._typed_s = now_s
            excused_s = max(excused_s, self._typed_s)
        if now_s - excused_s >= awaited.quiet_s:
            return awaited
        if now_s - excused_s < min(RECOVERY_S, self._timeout_s or RECOVERY_S):
            return None
        return msgspec.structs.replace(awaited, quiet_s=now_s - excused_s)

    def _may_take_its_time(self, awaited: AwaitedProcess) -> bool:
        """Return True if nobody waits for a worker, because the others have finished. It may evaluate its model.

        A process that is stopped does nothing of the kind.
        """
        if awaited.role != "worker" or awaited.waiting:
            return False
        if not self._coordinator.core.members.some_have_finished:
            return False
        process = self._engine.process(awaited.role, awaited.index)
        return process is None or process.state != "is stopped"

    def _describe(self, awaited: AwaitedProcess) -> str:
        """Return a message about a silent process."""
        process = self._engine.process(awaited.role, awaited.index)
        usual = f" (its iterations usually take {awaited.usual_s:.2g} s)" if awaited.usual_s else ""
        name = f"{awaited.role} {awaited.index}"
        training = self._coordinator.core.model is not None
        nobody = awaited.role == "worker" and not awaited.waiting and training
        lines = [
            f"{name.capitalize()} has sent nothing for {awaited.quiet_s:.0f} s. It {awaited.doing}{usual}. No other "
            "worker is waiting for it. Its script may do something other than training, such as evaluating the model."
            if nobody
            else f"The run is waiting for {name}, which has sent nothing for {awaited.quiet_s:.0f} s. It "
            f"{awaited.doing}{usual}."
        ]
        if awaited.waiting:
            names = " and ".join(
                filter(None, [", ".join(map(str, awaited.waiting[:-1])), str(awaited.waiting[-1])])
            )
            many = len(awaited.waiting) > 1
            lines.append(f"Worker{'s' * many} {names} {'are' if many else 'is'} waiting for it.")
            stopped = process is not None and process.state == "is stopped"
            if awaited.role == "worker" and training and not stopped:
                lines.append("Its script may do something other than training, such as evaluating the model.")
        if process is not None:
            state = process.state
            lines.append(f"Its process {process.id} {state}.")
            if state == "is stopped":
                lines.append(f"Run 'kill -CONT {process.id}' to resume the process.")
        if self._timeout_s is not None:
            lines.append(f"It will be killed after {self._timeout_s:g} s of silence (--stall-timeout).")
        else:
            option = "In another run, --stall-timeout SECONDS (in Python, stall_timeout=SECONDS)"
            if process is None:
                lines.append(f"It runs on another machine. {option} kills such a {awaited.role}.")
            else:
                others = self._coordinator.core.members.live - {awaited.index}
                effect = "let the others continue" if awaited.role == "worker" and others else "end the run"
                lines.append(f"Run 'kill -KILL {process.id}' to kill it and {effect}. {option} does so.")
        return " ".join(lines)


# -- Finds out what a stalled run is waiting for: a silent worker or server, or conditions that will never hold
#
# The result is only a guess, because a worker whose script evaluates its model for a minute is as silent as a
# worker that hangs. Therefore the time after which a worker is reported depends on the usual duration of its
# iterations. The report names the process and says how long it has been silent; the user decides what to do.
# The clock of a process begins when the process is expected, and stands still while the run waits for other
# machines (see `core.liveness`). Possible reports:
#
#     before training   a process has not started, or a worker has not begun to train, although another one took much
#                       less time to do so, or after more than a minute
#     in training       a server does not answer; or a worker that should be computing has been silent for a long time,
#                       and other workers are waiting for it or all workers are silent
#     standstill        every worker is waiting, and no condition will release any worker. With the sync models of this
#                       package, this happens only if workers wait in a barrier for workers that wait for them; it may
#                       also happen with user-defined conditions

# A worker is reported when it has been silent for at least PATIENCE_S and at least PATIENCE_ITERATIONS times
# its usual iteration time.
PATIENCE_S = 3.0
PATIENCE_ITERATIONS = 5
# Permitted silence while a worker's iteration time is unknown, long enough for an iteration that compiles
# code. An accelerator may compile code in any iteration.
FIRST_PATIENCE_S = 15.0
NOBODY_YET_PATIENCE_S = (
    60.0  # time for a machine's first process to start, and for the first worker to reach step()
)
# Permitted silence of a server, which answers once it has handled the current message.
SERVER_PATIENCE_S = 3.0
SUSPICIOUS_S = 2.0  # after this time without a computing worker, ask the servers which workers are waiting
APART_S = 1.0  # minimum time between two requests to the servers
IDLE = "idle"  # the state in which no worker computes


class AwaitedProcess(msgspec.Struct, frozen=True):
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

    def look(self) -> list[AwaitedProcess]:
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
            return [AwaitedProcess("worker", initializer, quiet_s[initializer], doing, waiting)]
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

    def _silent_servers(self, now_s: float, waiting: list[int]) -> list[AwaitedProcess]:
        clocks = self._coordinator.watch.clocks
        asked_s = [
            (server, clocks.waited_s(("asked", "server", server), now_s) or 0.0)
            for server in sorted(self._coordinator.asked.copy())
        ]
        return [
            AwaitedProcess("server", server, quiet_s, "has not answered the coordinator yet", tuple(waiting))
            for server, quiet_s in asked_s
            if quiet_s > SERVER_PATIENCE_S
        ]

    def _awaited(self, worker: int, quiet_s: float, waiting: tuple[int, ...]) -> AwaitedProcess:
        status = self._coordinator.core.board.get(worker)
        doing = (
            "has received its first weights"
            if status is None
            else f"last reported in iteration {status.iteration}"
        )
        usual_s = self._coordinator.watch.usual_s.get(worker, 0.0)
        return AwaitedProcess("worker", worker, quiet_s, doing, waiting, usual_s)

    def _look_before_training(self, live: list[int], now_s: float) -> list[AwaitedProcess]:
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
                awaited.append(AwaitedProcess(role, index, quiet_s, doing, waiting))
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

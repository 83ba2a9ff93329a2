"""Reports which process a run is waiting for, and kills the process if a timeout was given and has expired."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from ..run.agents import AwaitedProcess
from ..run.coordinator import CoordinatorHost
from .local import LocalEngine
from .terminal import Terminal

# A worker is killed only after it has been silent for at least this many times its usual iteration time, even
# if the timeout is shorter.
LEAST_ITERATIONS = 3
# Time for a process to send its next message after it was suspended, or after the user has typed its input.
RECOVERY_S = 15.0


class Waiting:
    """A watchdog for the processes of one run. Call `look` often.

    Args:
        coordinator: the coordinator of the run.
        engine: the engine that runs the processes.
        timeout_s: number of seconds after which a silent process that others wait for is killed; None for never.
        say: a function that prints a line.
        terminal: the terminal that worker 0 uses, if any. While worker 0 waits for the user's input, it does not
            count as silent.
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
        # Until `_excused_s`, the silence of all processes has a known reason. Until `_typed_s`, the silence of worker 0
        # has a known reason.
        self._excused_s = self._typed_s = -math.inf
        # (role, index, incarnation) of each reported process -> its clock, and for how long it had been silent.
        self._reported: dict[tuple[Literal["worker", "server"], int, int], tuple[float | None, float]] = {}

    def look(self) -> str:
        """Check the processes once. If the run cannot continue, return the reason; otherwise, return ""."""
        report = self._coordinator.report
        for reported in report.awaited:
            awaited = self._without_excuse(reported)
            if awaited is None or self._may_take_its_time(awaited):
                continue
            key = awaited.role, awaited.index
            incarnation, clock = report.silent.get(key, (0, None))
            process_key = *key, incarnation
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
                    self._coordinator.call(self._coordinator.agents.kill, awaited.role, awaited.index, why)
        for (role, index, incarnation), (before, quiet_s) in list(self._reported.items()):
            now, clock = report.silent.get((role, index), (0, None))
            if clock is None or incarnation != now:
                del self._reported[role, index, incarnation]  # it has left
            elif clock != before:
                del self._reported[role, index, incarnation]
                self._say(f"{role} {index} responds again, after a silence of at least {quiet_s:.0f} s.")
        return report.standstill

    def excuse(self) -> None:
        """Do not count the silence of any process before now: the processes were suspended."""
        self._excused_s = time.monotonic()

    def _without_excuse(self, awaited: AwaitedProcess) -> AwaitedProcess | None:
        """Return the process, with the part of its silence that has no known reason; None if this part is short."""
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
        """Return True for a worker that may be evaluating its model: other workers have finished, and none awaits it.

        A stopped process cannot be evaluating, so it gets no more time.
        """
        if awaited.role != "worker" or awaited.waiting:
            return False
        if not self._coordinator.report.has_left("finished"):
            return False
        process = self._engine.process(awaited.role, awaited.index)
        return process is None or process.state != "is stopped"

    def _describe(self, awaited: AwaitedProcess) -> str:
        """Return a message about a silent process."""
        process = self._engine.process(awaited.role, awaited.index)
        usual = f" (its iterations usually take {awaited.usual_s:.2g} s)" if awaited.usual_s else ""
        name = f"{awaited.role} {awaited.index}"
        training = self._coordinator.report.model is not None
        unawaited = awaited.role == "worker" and not awaited.waiting and training
        starting = awaited.role == "worker" and not training
        lines = [
            f"{name.capitalize()} has sent nothing for {awaited.quiet_s:.0f} s. It {awaited.doing}{usual}. No other "
            f"worker is waiting for it. The script of {name} may do something other than training, such as evaluating "
            "the model."
            if unawaited
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
                lines.append(
                    f"The script of {name} may do something other than training, such as evaluating the model."
                )
        if process is not None:
            state = process.state
            lines.append(f"Process {process.id} of {name} {state}.")
            if state == "is stopped":
                lines.append(f"Run 'kill -CONT {process.id}' to resume the process.")
            elif starting:
                lines.append(f"The script of {name} may still import libraries or load data.")
        if self._timeout_s is not None:
            lines.append(
                f"{name.capitalize()} will be killed after {self._timeout_s:g} s of silence (--stall-timeout)."
            )
        else:
            option = "In a later run, --stall-timeout SECONDS (in Python, stall_timeout=SECONDS)"
            if process is None:
                lines.append(
                    f"{name.capitalize()} runs on another machine. {option} kills such a {awaited.role}."
                )
            elif not starting or state == "is stopped":
                others = self._coordinator.report.live - {awaited.index}
                effect = "let the others continue" if awaited.role == "worker" and others else "end the run"
                lines.append(f"Run 'kill -KILL {process.id}' to kill it and {effect}. {option} does so.")
        return " ".join(lines)

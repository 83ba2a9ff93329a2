"""Decides which machines and workers no longer take part in a run, although no connection has ended.

Each machine's *agent*, a process that trains nothing, sends a heartbeat every `HEARTBEAT_S`, and another one as soon
as the state of one of its processes changes. There are two kinds of verdicts:

    machine   no heartbeat has arrived for `SILENCE_S`, so the machine is down, or its link swallows everything
    worker    its agent reports that the process is stopped (SIGSTOP), while other workers could continue

A worker is never taken out because it is slow: whatever its training thread does, its agent reports it as running. A
process that a debugger holds is never taken out. If a process has ended, its agent says so in another message
(`ProcessEnded`). Time in which the coordinator itself did not run is not counted as silence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from fractions import Fraction
from statistics import median_low

import msgspec

from ...sync.ticks import TICKS_PER_S, in_ticks
from ..protocol.messages import ProcessState

__all__ = ["HEARTBEAT_S", "LOOK_S", "SILENCE_S", "Liveness", "Verdict", "patience"]

HEARTBEAT_S = Fraction(1, 2)
"""Interval at which an agent sends heartbeats."""

LOOK_S = Fraction(1, 10)
"""Interval at which the host asks for verdicts, and at which an agent looks at the states of its processes."""

# Ten heartbeats, together with the time until the next look. A loaded machine or a link that loses packets delays a
# heartbeat by one or two seconds, so such a machine stays.
SILENCE_S = 10 * HEARTBEAT_S - LOOK_S
"""Time without a sign of life after which a machine is taken out."""

# A worker is taken out when it has been stopped for STOPPED_S, and for STOPPED_ITERATIONS usual iterations of the
# fastest other worker. The rest of max(1 s, 3 iterations) is left for noticing it and for taking it out.
STOPPED_S = Fraction(7, 10)
STOPPED_ITERATIONS = Fraction(5, 2)
STOPPED_FIRST_S = Fraction(15)  # while no other worker's iteration time is known
PACE_WINDOW = 9  # number of iterations whose median is a worker's usual iteration time


class Verdict(msgspec.Struct, frozen=True):
    """A machine or a worker must be taken out of the run.

    Attributes:
        machine: index of the machine.
        worker: index of the worker; None if the whole machine is suspected.
        reason: the reason, for the user.
    """

    machine: int
    worker: int | None
    reason: str


class _Machine:
    """A machine that takes part in the run.

    Attributes:
        name: name of the machine, for users.
        heard_ticks: time of its last sign of life: that it joined, a heartbeat, or a part of a large message.
        states: worker -> the state of its process in the last heartbeat.
        stopped_ticks: worker that is stopped -> time at which this was first reported.
    """

    def __init__(self, name: str, now_ticks: int) -> None:
        self.name = name
        self.heard_ticks = now_ticks
        self.states: dict[int, str] = {}
        self.stopped_ticks: dict[int, int] = {}


class Liveness:
    """The machines and workers of a run that are alive, as far as the coordinator knows.

    The host must call `look` no later than at `next_ticks`, and pass it heartbeats that have arrived before. Each
    verdict is returned once, and the coordinator then no longer counts on this machine or worker; a heartbeat that it
    sends nevertheless changes nothing, until it joins again.

    Example:
        >>> liveness = Liveness()
        >>> liveness.machine_joined(3, "10.0.0.3", now_ticks=0)
        >>> liveness.worker_joined(7)
        >>> for tenths in range(5, 100):
        ...     if tenths % 5 == 0:
        ...         liveness.heartbeat(3, [ProcessState("worker", 7, "running")], tenths * TICKS_PER_S // 10)
        ...     assert not liveness.look(tenths * TICKS_PER_S // 10)
        >>> for tenths in range(100, 150):
        ...     for verdict in liveness.look(tenths * TICKS_PER_S // 10):
        ...         print(verdict.reason)
        no heartbeat of machine 10.0.0.3 for 4.9 s, although one is due every 0.5 s
    """

    def __init__(self) -> None:
        self._machines: dict[int, _Machine] = {}
        self._iterations: dict[int, deque[int]] = {}  # worker -> the durations of its last iterations
        self._incarnations: dict[int, int] = {}  # worker that takes part -> its incarnation
        self._looked_ticks: int | None = None  # time of the last call of `look`

    @property
    def next_ticks(self) -> int | None:
        """The latest time at which `look` must be called; None if there is no machine."""
        if self._looked_ticks is None or not self._machines:
            return None
        return self._looked_ticks + in_ticks(LOOK_S)

    def machine_joined(self, machine: int, name: str, now_ticks: int) -> None:
        """Begin to expect heartbeats from a machine, which may have taken part before.

        Args:
            machine: index of the machine.
            name: name of the machine, for users.
            now_ticks: the current time.
        """
        if not self._machines:
            self._looked_ticks = now_ticks
        self._machines[machine] = _Machine(name, now_ticks)

    def machine_left(self, machine: int) -> None:
        """No longer expect heartbeats from a machine."""
        self._machines.pop(machine, None)

    def worker_joined(self, worker: int, incarnation: int = 0) -> None:
        """Consider a worker from now on. What is reported about its earlier incarnations has no effect."""
        self.worker_left(worker)
        self._incarnations[worker] = incarnation

    def worker_left(self, worker: int) -> None:
        """No longer consider a worker, because it has finished or was lost."""
        self._incarnations.pop(worker, None)
        self._iterations.pop(worker, None)
        for machine in self._machines.values():
            machine.states.pop(worker, None)
            machine.stopped_ticks.pop(worker, None)

    def heartbeat(self, machine: int, states: Iterable[ProcessState], now_ticks: int) -> None:
        """Handle a heartbeat.

        Args:
            machine: index of the machine.
            states: the states of the processes on the machine. Servers are ignored: a run cannot do without them.
            now_ticks: the current time.
        """
        if (sender := self._machines.get(machine)) is None:
            return
        self._excuse(now_ticks)
        sender.heard_ticks = now_ticks
        sender.states = {
            process.index: process.state
            for process in states
            if process.role == "worker" and self._incarnations.get(process.index) == process.incarnation
        }
        sender.stopped_ticks = {
            worker: sender.stopped_ticks.get(worker, now_ticks)
            for worker, state in sender.states.items()
            if state == "stopped"
        }

    def moved(self, machine: int, now_ticks: int) -> None:
        """Handle a part of a large message from a machine, behind which its heartbeats may have to wait."""
        if (sender := self._machines.get(machine)) is not None:
            sender.heard_ticks = now_ticks

    def iterated(self, worker: int, duration_ticks: int) -> None:
        """Record the duration of a worker's iteration, including the time for which the worker waited."""
        if worker not in self._incarnations:
            return
        self._iterations.setdefault(worker, deque(maxlen=PACE_WINDOW)).append(duration_ticks)

    def usual_ticks(self, worker: int) -> int | None:
        """Return the usual duration of a worker's iterations: the median of the last ones; None if it is unknown."""
        durations = self._iterations.get(worker)
        return median_low(durations) if durations else None

    def silences(self, now_ticks: int) -> dict[str, int]:
        """Return, for the name of each machine, the ticks since its last sign of life."""
        return {machine.name: now_ticks - machine.heard_ticks for machine in self._machines.values()}

    def states(self) -> dict[int, str]:
        """Return, for each worker, the state of its process according to the last heartbeat of its machine."""
        return {
            worker: state for machine in self._machines.values() for worker, state in machine.states.items()
        }

    def look(self, now_ticks: int) -> list[Verdict]:
        """Return the machines and workers that must be taken out now."""
        self._excuse(now_ticks)
        self._looked_ticks = now_ticks
        verdicts = []
        for index, machine in list(self._machines.items()):
            silent_ticks = now_ticks - machine.heard_ticks
            if silent_ticks >= in_ticks(SILENCE_S):
                silence = f"no heartbeat of machine {machine.name} for {silent_ticks / TICKS_PER_S:.1f} s"
                reason = f"{silence}, although one is due every {float(HEARTBEAT_S)} s"
                verdicts.append(Verdict(index, None, reason))
                del self._machines[index]
        stopped = [(index, worker) for index, worker, due_ticks in self._stopped() if now_ticks >= due_ticks]
        for index, worker in stopped:
            machine = self._machines[index]
            stopped_s = (now_ticks - machine.stopped_ticks[worker]) / TICKS_PER_S
            process = f"the process of worker {worker} on machine {machine.name}"
            reason = f"{process} has been stopped for {stopped_s:.1f} s"
            verdicts.append(Verdict(index, worker, reason))
        for verdict in verdicts:
            if verdict.worker is not None:
                self.worker_left(verdict.worker)
        return verdicts

    def _stopped(self) -> list[tuple[int, int, int]]:
        """Return (machine, worker, time at which it must be taken out) of each stopped worker.

        If no worker could continue, none is returned, because taking one out would not help any other.
        """
        stopped = [
            (index, worker, since_ticks)
            for index, machine in self._machines.items()
            for worker, since_ticks in machine.stopped_ticks.items()
        ]
        if not stopped:
            return []
        others = [
            worker
            for machine in self._machines.values()
            for worker, state in machine.states.items()
            if state == "running"
        ]
        if not others:
            return []
        usual_ticks = [usual for worker in others if (usual := self.usual_ticks(worker)) is not None]
        patience_ticks = patience(min(usual_ticks, default=None))
        return [(index, worker, since_ticks + patience_ticks) for index, worker, since_ticks in stopped]

    def _excuse(self, now_ticks: int) -> None:
        """Do not count the time in which the host did not call `look`, although it should have."""
        if self._looked_ticks is None:
            return
        late_ticks = now_ticks - (self._looked_ticks + in_ticks(LOOK_S))
        if late_ticks <= in_ticks(HEARTBEAT_S):
            return
        self._looked_ticks += late_ticks
        for machine in self._machines.values():
            machine.heard_ticks = min(now_ticks, machine.heard_ticks + late_ticks)
            for worker in machine.stopped_ticks:
                machine.stopped_ticks[worker] = min(now_ticks, machine.stopped_ticks[worker] + late_ticks)


def patience(usual_ticks: int | None) -> int:
    """Return the time in ticks after which a stopped worker is taken out.

    Args:
        usual_ticks: usual iteration time of the fastest worker that could continue; None if it is unknown.

    >>> patience(None) / TICKS_PER_S, patience(TICKS_PER_S // 10) / TICKS_PER_S, patience(TICKS_PER_S) / TICKS_PER_S
    (15.0, 0.7, 2.5)
    """
    if usual_ticks is None:
        return in_ticks(STOPPED_FIRST_S)
    return max(
        in_ticks(STOPPED_S),
        usual_ticks * STOPPED_ITERATIONS.numerator // STOPPED_ITERATIONS.denominator,
    )

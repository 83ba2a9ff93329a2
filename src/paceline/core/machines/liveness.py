"""Decides which machines and workers no longer take part in a run, although no connection has ended.

Each machine's *agent*, a process that trains nothing, sends a heartbeat every `HEARTBEAT_S`, and another one as soon
as the state of one of its processes changes. There are two kinds of verdicts:

    machine   its heartbeats have been absent for so long that its own history makes this unlikely, so the machine is
              down, or its link swallows everything
    worker    its agent reports that the process is stopped (SIGSTOP), while other workers could continue

A worker is never taken out because it is slow: whatever its training thread does, its agent reports it as running. A
process that a debugger holds is never taken out. If a process has ended, its agent says so in another message
(`ProcessEnded`).

**Suspicion.** The estimate is the phi accrual failure detector [1]: if the times between the heartbeats of a machine
have mean m and standard deviation s, a silence of t has the suspicion

    phi(t) = -log10(P(X > t)),    X ~ Normal(m + acceptable pause, s)

and the machine is suspected when phi reaches `THRESHOLD`. Only the suspicion that is shown to users is computed in
this way, with floating-point numbers. phi increases with t, so the decision is t >= m + acceptable pause + z s with a
constant z, in whole ticks.

Times between heartbeats have heavier tails than a normal distribution, so there are these priors and rules:

- The acceptable pause covers pauses of a loaded machine and lost packets, which the window may not contain yet.
- The standard deviation is at least `LEAST_DEVIATION_S`, so regular heartbeats do not make a short delay suspicious.
- A window begins with `FIRST_INTERVALS` intervals of the first estimate, which observed intervals replace.
- Heartbeats that arrive together after a pause count as one. Otherwise, a burst would make the mean too small.
- An interval is forgotten after `WINDOW` heartbeats, so a long pause makes the detector more patient, but only for a
  while. Whatever the history, a silence of `MOST_SILENCE_S` is too long.
- Time in which the coordinator itself did not run is not counted as silence.

[1] Hayashibara, Defago, Yared, Katayama: The phi accrual failure detector. SRDS 2004.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from fractions import Fraction
from math import erfc, inf, isqrt, log10, sqrt
from statistics import median_low

import msgspec

from ...sync.ticks import TICKS_PER_S, in_ticks
from ..protocol.messages import ProcessState

__all__ = ["HEARTBEAT_S", "LOOK_S", "Arrivals", "Liveness", "Verdict", "patience"]

HEARTBEAT_S = Fraction(1, 2)
"""Interval at which an agent sends heartbeats."""

LOOK_S = Fraction(1, 10)
"""Interval at which the host asks for verdicts, and at which an agent looks at the states of its processes."""

THRESHOLD = 8
"""Suspicion at which a machine is taken out: a silence that is expected once in 10**8 heartbeats."""

DEVIATIONS = Fraction(5_612, 1_000)
"""The number z of standard deviations for which P(X > m + z s) = 10**-THRESHOLD."""

ACCEPTABLE_PAUSE_S = Fraction(3)
LEAST_DEVIATION_S = Fraction(1, 10)
MOST_SILENCE_S = 10 * HEARTBEAT_S - LOOK_S
WINDOW = 200  # number of intervals from which the mean and the standard deviation are computed
# The first estimate: a mean of one heartbeat interval and a standard deviation of half of it.
FIRST_ESTIMATE_S = (HEARTBEAT_S / 2, 3 * HEARTBEAT_S / 2)
FIRST_INTERVALS = 10

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


class Arrivals:
    """The times at which the heartbeats of one machine have arrived.

    Args:
        now_ticks: time at which the machine joined, which counts as its first arrival.
        ticks_per_s: number of ticks per second (see `paceline.sync.ticks`).

    Attributes:
        heard_ticks: time of the last arrival.

    Example:
        >>> arrivals = Arrivals(0)
        >>> for number in range(1, 301):
        ...     arrivals.arrived(number * TICKS_PER_S // 2)
        >>> arrivals.limit_ticks / TICKS_PER_S
        4.0612
        >>> round(arrivals.suspicion(arrivals.heard_ticks + arrivals.limit_ticks), 2)
        8.0
    """

    def __init__(self, now_ticks: int, ticks_per_s: int = TICKS_PER_S) -> None:
        self.heard_ticks = now_ticks
        self._ticks_per_s = ticks_per_s
        self._burst_ticks = in_ticks(HEARTBEAT_S / 2, ticks_per_s)
        self._most_ticks = in_ticks(MOST_SILENCE_S, ticks_per_s)
        self._pause_ticks = in_ticks(ACCEPTABLE_PAUSE_S, ticks_per_s)
        self._least_ticks = in_ticks(LEAST_DEVIATION_S, ticks_per_s)
        self._observed = 0  # number of observed intervals, including those that have left the window
        self._window: deque[int] = deque()
        self._sum = self._square_sum = 0
        for index in range(FIRST_INTERVALS):
            self._add(in_ticks(FIRST_ESTIMATE_S[index % 2], ticks_per_s))

    def arrived(self, now_ticks: int) -> None:
        """Record the arrival of a heartbeat."""
        interval_ticks = now_ticks - self.heard_ticks
        self.heard_ticks = now_ticks
        if interval_ticks < self._burst_ticks:
            return
        # The first estimate leaves the window one interval at a time, as if it had been observed.
        if len(self._window) == WINDOW or self._observed < FIRST_INTERVALS:
            oldest = self._window.popleft()
            self._sum -= oldest
            self._square_sum -= oldest * oldest
        self._observed += 1
        self._add(interval_ticks)

    @property
    def mean_ticks(self) -> int:
        """The mean interval in the window, rounded down."""
        return self._sum // len(self._window)

    @property
    def deviation_ticks(self) -> int:
        """The standard deviation of the intervals in the window, rounded down, but at least the prior."""
        count = len(self._window)
        return max(self._least_ticks, isqrt(count * self._square_sum - self._sum * self._sum) // count)

    @property
    def limit_ticks(self) -> int:
        """The shortest silence that makes the machine suspected."""
        beyond_ticks = self.deviation_ticks * DEVIATIONS.numerator // DEVIATIONS.denominator
        return min(self.mean_ticks + self._pause_ticks + beyond_ticks, self._most_ticks)

    @property
    def longest_ticks(self) -> int | None:
        """The longest observed interval in the window; None if no interval has been observed."""
        observed = min(self._observed, len(self._window))
        return max(list(self._window)[-observed:]) if observed else None

    def suspicion(self, now_ticks: int) -> float:
        """Return phi at this time, for display. It is computed with floating-point numbers."""
        silence_ticks = now_ticks - self.heard_ticks
        z = (silence_ticks - self.mean_ticks - self._pause_ticks) / self.deviation_ticks
        probability = erfc(z / sqrt(2)) / 2
        return max(0.0, -log10(probability)) if probability else inf

    def _add(self, interval_ticks: int) -> None:
        self._window.append(interval_ticks)
        self._sum += interval_ticks
        self._square_sum += interval_ticks * interval_ticks


class _Machine:
    """A machine that takes part in the run.

    Attributes:
        name: name of the machine, for users.
        arrivals: the arrivals of its heartbeats.
        limit_ticks: time at which it is suspected unless another heartbeat arrives.
        states: worker -> the state of its process in the last heartbeat.
        stopped_ticks: worker that is stopped -> time at which this was first reported.
    """

    def __init__(self, name: str, now_ticks: int, ticks_per_s: int) -> None:
        self.name = name
        self.arrivals = Arrivals(now_ticks, ticks_per_s)
        self.limit_ticks = now_ticks + self.arrivals.limit_ticks
        self.states: dict[int, str] = {}
        self.stopped_ticks: dict[int, int] = {}


class Liveness:
    """The machines and workers of a run that are alive, as far as the coordinator knows.

    The host must call `look` no later than at `next_ticks`, and pass it heartbeats that have arrived before. Each
    verdict is returned once, and the coordinator then no longer counts on this machine or worker; a heartbeat that it
    sends nevertheless changes nothing, until it joins again.

    Args:
        ticks_per_s: number of ticks per second (see `paceline.sync.ticks`).

    Example:
        >>> liveness = Liveness()
        >>> liveness.machine_joined(3, "10.0.0.3", now_ticks=0)
        >>> liveness.worker_joined(7)
        >>> for tenths in range(5, 100):
        ...     if tenths % 5 == 0:
        ...         liveness.heartbeat(3, [ProcessState("worker", 7, "running")], tenths * TICKS_PER_S // 10)
        ...     assert not liveness.look(tenths * TICKS_PER_S // 10)
        >>> for tenths in range(100, 140):
        ...     for verdict in liveness.look(tenths * TICKS_PER_S // 10):
        ...         print(verdict.reason)
        no heartbeat of machine 10.0.0.3 for 4.1 s; its heartbeats usually come every 0.50 s, at most 0.50 s apart
    """

    def __init__(self, ticks_per_s: int = TICKS_PER_S) -> None:
        self._ticks_per_s = ticks_per_s
        self._heartbeat_ticks = in_ticks(HEARTBEAT_S, ticks_per_s)
        self._look_ticks = in_ticks(LOOK_S, ticks_per_s)
        self._machines: dict[int, _Machine] = {}
        self._iterations: dict[int, deque[int]] = {}  # worker -> the durations of its last iterations
        self._incarnations: dict[int, int] = {}  # worker that takes part -> its incarnation
        self._looked_ticks: int | None = None  # time of the last call of `look`

    @property
    def next_ticks(self) -> int | None:
        """The latest time at which `look` must be called; None if there is no machine."""
        if self._looked_ticks is None or not self._machines:
            return None
        return self._looked_ticks + self._look_ticks

    def machine_joined(self, machine: int, name: str, now_ticks: int) -> None:
        """Begin to expect heartbeats from a machine. A machine that joins again begins with a new history.

        Args:
            machine: index of the machine.
            name: name of the machine, for users.
            now_ticks: the current time.
        """
        if not self._machines:
            self._looked_ticks = now_ticks
        self._machines[machine] = _Machine(name, now_ticks, self._ticks_per_s)

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
        sender.arrivals.arrived(now_ticks)
        sender.limit_ticks = now_ticks + sender.arrivals.limit_ticks
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
            sender.limit_ticks = max(sender.limit_ticks, now_ticks + sender.arrivals.limit_ticks)

    def iterated(self, worker: int, duration_ticks: int) -> None:
        """Record the duration of a worker's iteration, including the time for which the worker waited."""
        if worker not in self._incarnations:
            return
        self._iterations.setdefault(worker, deque(maxlen=PACE_WINDOW)).append(duration_ticks)

    def usual_ticks(self, worker: int) -> int | None:
        """Return the usual duration of a worker's iterations: the median of the last ones; None if it is unknown."""
        durations = self._iterations.get(worker)
        return median_low(durations) if durations else None

    def arrivals(self) -> dict[str, Arrivals]:
        """Return, for the name of each machine, the arrivals of its heartbeats."""
        return {machine.name: machine.arrivals for machine in self._machines.values()}

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
            if now_ticks >= machine.limit_ticks:
                verdicts.append(Verdict(index, None, self._silence(machine, now_ticks)))
                del self._machines[index]
        stopped = [(index, worker) for index, worker, due_ticks in self._stopped() if now_ticks >= due_ticks]
        for index, worker in stopped:
            machine = self._machines[index]
            stopped_s = (now_ticks - machine.stopped_ticks[worker]) / self._ticks_per_s
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
        patience_ticks = patience(min(usual_ticks, default=None), self._ticks_per_s)
        return [(index, worker, since_ticks + patience_ticks) for index, worker, since_ticks in stopped]

    def _excuse(self, now_ticks: int) -> None:
        """Do not count the time in which the host did not call `look`, although it should have."""
        if self._looked_ticks is None:
            return
        late_ticks = now_ticks - (self._looked_ticks + self._look_ticks)
        if late_ticks <= self._heartbeat_ticks:
            return
        self._looked_ticks += late_ticks
        for machine in self._machines.values():
            machine.arrivals.heard_ticks = min(now_ticks, machine.arrivals.heard_ticks + late_ticks)
            machine.limit_ticks += late_ticks
            for worker in machine.stopped_ticks:
                machine.stopped_ticks[worker] = min(now_ticks, machine.stopped_ticks[worker] + late_ticks)

    def _silence(self, machine: _Machine, now_ticks: int) -> str:
        arrivals = machine.arrivals
        silent_s = (now_ticks - arrivals.heard_ticks) / self._ticks_per_s
        silence = f"no heartbeat of machine {machine.name} for {silent_s:.1f} s"
        longest_ticks = arrivals.longest_ticks
        if longest_ticks is None:
            return f"{silence}; it has sent none since it joined"
        mean_s, longest_s = arrivals.mean_ticks / self._ticks_per_s, longest_ticks / self._ticks_per_s
        return f"{silence}; its heartbeats usually come every {mean_s:.2f} s, at most {longest_s:.2f} s apart"


def patience(usual_ticks: int | None, ticks_per_s: int = TICKS_PER_S) -> int:
    """Return the time in ticks after which a stopped worker is taken out.

    Args:
        usual_ticks: usual iteration time of the fastest worker that could continue; None if it is unknown.
        ticks_per_s: number of ticks per second.

    >>> patience(None) / TICKS_PER_S, patience(TICKS_PER_S // 10) / TICKS_PER_S, patience(TICKS_PER_S) / TICKS_PER_S
    (15.0, 0.7, 2.5)
    """
    if usual_ticks is None:
        return in_ticks(STOPPED_FIRST_S, ticks_per_s)
    return max(
        in_ticks(STOPPED_S, ticks_per_s),
        usual_ticks * STOPPED_ITERATIONS.numerator // STOPPED_ITERATIONS.denominator,
    )

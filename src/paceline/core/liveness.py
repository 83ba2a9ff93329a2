"""Observes the machines and workers of a run: signs of life, clocks, traffic, and how long the run has waited for each.

The first part of this module decides which machines and workers no longer take part in a run, although no connection
has ended.

Each machine's *agent*, a process that does not train, sends a heartbeat every `HEARTBEAT_S`, and another heartbeat as
soon as the state of one of its processes changes. There are two kinds of verdicts:

    machine   no heartbeat has arrived for `SILENCE_S`, so the machine is down, or its link loses all messages
    worker    the agent reports that the worker's process is stopped (SIGSTOP), while other workers could continue

A worker is never taken out because it is slow: whatever the training thread does, the agent reports the process as
running. A process that a debugger holds is never taken out. If a process has ended, its agent says so in another
message (`ProcessEnded`). Time in which the coordinator itself did not run is not counted as silence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from fractions import Fraction
from statistics import median_low
from typing import Generic, NamedTuple, TypeVar

import msgspec

from ..sync.ticks import TICKS_PER_S, in_ticks
from .messages import ClockOffset, Heartbeat, HeartbeatAnswered, ProcessState

HEARTBEAT_S = Fraction(1, 2)
"""Interval at which an agent sends heartbeats."""

LOOK_S = Fraction(1, 10)
"""Interval at which the host asks for verdicts, and at which an agent looks at the states of its processes."""

# This time and the time until the next look are together as long as ten heartbeat intervals. A loaded machine or a
# link that loses packets delays a heartbeat by one or two seconds, so no machine is taken out for such a delay.
SILENCE_S = 10 * HEARTBEAT_S - LOOK_S
"""Time without a sign of life after which a machine is taken out."""

# A worker is taken out when it has been stopped for STOPPED_S, and for STOPPED_ITERATIONS usual iterations of
# the fastest other worker. From the stop to the removal, at most max(1 s, 3 iterations) may pass; the rest of this time
# is left for noticing that the worker is stopped, and for taking it out.
STOPPED_S = Fraction(7, 10)
STOPPED_ITERATIONS = Fraction(5, 2)
STOPPED_FIRST_S = Fraction(15)  # replaces both while no other worker's iteration time is known
PACE_WINDOW = 9  # number of iterations whose median is a worker's usual iteration time

# Converted once, because arithmetic with fractions is slow, and `Liveness` compares times with each message.
HEARTBEAT_TICKS, LOOK_TICKS, SILENCE_TICKS = in_ticks(HEARTBEAT_S), in_ticks(LOOK_S), in_ticks(SILENCE_S)


class Removal(msgspec.Struct, frozen=True):
    """A machine or a worker that must be taken out of the run.

    Attributes:
        machine: index of the machine.
        worker: index of the worker; None if the whole machine is taken out.
        reason: the reason, for the user.
    """

    machine: int
    worker: int | None
    reason: str


class _Machine:
    """A machine that takes part in the run.

    Attributes:
        name: name of the machine, for users.
        heard_ticks: time of the last sign of life of the machine: its join, a heartbeat, or a part of a large message.
        states: worker -> the state of its process in the last heartbeat.
        stopped_ticks: stopped worker -> time at which it was first reported as stopped.
    """

    def __init__(self, name: str, now_ticks: int) -> None:
        self.name = name
        self.heard_ticks = now_ticks
        self.states: dict[int, str] = {}
        self.stopped_ticks: dict[int, int] = {}


class Liveness:
    """The machines and workers of a run that are alive, as far as the coordinator knows.

    The host must call `look` no later than at `next_ticks`, and must first pass on all heartbeats that have arrived.
    Each verdict is returned once. Afterwards, heartbeats of the removed machine, or about the removed worker, change
    nothing until the machine or the worker joins again.

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
        return self._looked_ticks + LOOK_TICKS

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
        """Observe a worker from now on. Reports about its earlier incarnations have no effect."""
        self.worker_left(worker)
        self._incarnations[worker] = incarnation

    def worker_left(self, worker: int) -> None:
        """Stop observing a worker, because it has finished or was lost."""
        self._incarnations.pop(worker, None)
        self._iterations.pop(worker, None)
        for machine in self._machines.values():
            machine.states.pop(worker, None)
            machine.stopped_ticks.pop(worker, None)

    def heartbeat(self, machine: int, states: Iterable[ProcessState], now_ticks: int) -> None:
        """Record a heartbeat.

        Args:
            machine: index of the machine.
            states: the states of the processes on the machine. Servers are ignored, because a run cannot go on without
                them.
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
        """Record that a part of a large message from a machine has arrived, which is a sign of life of the machine.

        A heartbeat may have to wait until the whole message has been sent.
        """
        if (sender := self._machines.get(machine)) is not None:
            sender.heard_ticks = now_ticks

    def iterated(self, worker: int, duration_ticks: int) -> None:
        """Record the duration of a worker's iteration, including the time for which the worker waited."""
        if worker not in self._incarnations:
            return
        if (durations := self._iterations.get(worker)) is None:
            durations = self._iterations[worker] = deque(maxlen=PACE_WINDOW)
        durations.append(duration_ticks)

    def usual_ticks(self, worker: int) -> int | None:
        """Return the usual duration of a worker's iterations: the median of the last few durations; None if unknown."""
        durations = self._iterations.get(worker)
        return median_low(durations) if durations else None

    def silences(self, now_ticks: int) -> dict[str, int]:
        """Return, by the name of each machine, the ticks since the machine's last sign of life."""
        return {machine.name: now_ticks - machine.heard_ticks for machine in self._machines.values()}

    def states(self) -> dict[int, str]:
        """Return, for each worker, the state of its process according to the last heartbeat of its machine."""
        return {
            worker: state for machine in self._machines.values() for worker, state in machine.states.items()
        }

    def look(self, now_ticks: int) -> list[Removal]:
        """Return the machines and workers that must be taken out now."""
        self._excuse(now_ticks)
        self._looked_ticks = now_ticks
        verdicts = []
        for index, machine in list(self._machines.items()):
            silent_ticks = now_ticks - machine.heard_ticks
            if silent_ticks >= SILENCE_TICKS:
                silence = f"no heartbeat of machine {machine.name} for {silent_ticks / TICKS_PER_S:.1f} s"
                reason = f"{silence}, although one is due every {float(HEARTBEAT_S)} s"
                verdicts.append(Removal(index, None, reason))
                del self._machines[index]
        for index, worker, since_ticks in self._stopped_too_long(now_ticks):
            process = f"the process of worker {worker} on machine {self._machines[index].name}"
            stopped_s = (now_ticks - since_ticks) / TICKS_PER_S
            verdicts.append(Removal(index, worker, f"{process} has been stopped for {stopped_s:.1f} s"))
            self.worker_left(worker)
        return verdicts

    def _stopped_too_long(self, now_ticks: int) -> list[tuple[int, int, int]]:
        """Return (machine, worker, time at which it was stopped) of each worker that must be taken out.

        If no worker could continue, no worker is returned, because the removal of a worker would then help no other
        worker.
        """
        stopped = [
            (index, worker, since_ticks)
            for index, machine in self._machines.items()
            for worker, since_ticks in machine.stopped_ticks.items()
        ]
        others = [worker for worker, state in self.states().items() if state == "running"] if stopped else []
        if not others:
            return []
        usual_ticks = [usual for worker in others if (usual := self.usual_ticks(worker)) is not None]
        patience_ticks = patience(min(usual_ticks, default=None))
        return [each for each in stopped if now_ticks >= each[2] + patience_ticks]

    def _excuse(self, now_ticks: int) -> None:
        """Do not count time in which the host should have called `look`, but did not call it."""
        if self._looked_ticks is None:
            return
        late_ticks = now_ticks - (self._looked_ticks + LOOK_TICKS)
        if late_ticks <= HEARTBEAT_TICKS:
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


# -- The agent's side of the heartbeats: when one is due, and what the answers say about the clock -----------
#
# The agent calls `due` about every `LOOK_S` with the states of its processes, and sends the heartbeat that `due`
# returns, if any. The agent passes each answer to `answered`. The coordinator answers with `answer`, and passes the
# states to `Liveness`.

MOST_UNANSWERED = 20


class Heartbeats:
    """The heartbeats of one machine.

    All times are on the machine's own clock.

    While the coordinator's host is suspended, it reads nothing, so heartbeats would pile up. Therefore, an agent sends
    at most `MOST_UNANSWERED` heartbeats without an answer.

    Args:
        ticks_per_s: number of ticks per second (see `paceline.sync.ticks`).

    Attributes:
        clock: the estimate of the offset of the coordinator's clock.

    Example:
        >>> heartbeats = Heartbeats()
        >>> heartbeats.due([ProcessState("worker", 3, "running")], now_ticks=1000) is not None
        True
        >>> heartbeats.due([ProcessState("worker", 3, "running")], now_ticks=2000) is not None
        False
        >>> heartbeats.due([ProcessState("worker", 3, "stopped")], now_ticks=3000) is not None
        True
    """

    def __init__(self, ticks_per_s: int = TICKS_PER_S) -> None:
        self.clock = ClockEstimate(ticks_per_s)
        self._interval_ticks = in_ticks(HEARTBEAT_S, ticks_per_s)
        self._next_ticks: int | None = None
        self._states: tuple[ProcessState, ...] = ()
        self._unanswered = 0

    def due(self, states: Iterable[ProcessState], now_ticks: int) -> Heartbeat | None:
        """Return a heartbeat that must be sent immediately; None if no heartbeat is due.

        Heartbeats are due at regular times, and when a state has changed. A late heartbeat does not delay the next one.

        Args:
            states: the current states of the processes on the machine.
            now_ticks: the current time.
        """
        states = tuple(states)
        if self._next_ticks is None:
            self._next_ticks = now_ticks
        if states == self._states and now_ticks < self._next_ticks:
            return None
        if self._unanswered == MOST_UNANSWERED:
            return None
        if now_ticks >= self._next_ticks:
            missed = (now_ticks - self._next_ticks) // self._interval_ticks
            self._next_ticks += (missed + 1) * self._interval_ticks
        self._states = states
        self._unanswered += 1
        return Heartbeat(now_ticks, states, self.clock.stated)

    def answered(self, message: HeartbeatAnswered, now_ticks: int) -> None:
        """Record the answer to a heartbeat. `now_ticks` is the time at which the answer has arrived."""
        self._unanswered = max(0, self._unanswered - 1)
        self.clock.exchanged(message.sent_ticks, message.received_ticks, message.answered_ticks, now_ticks)


def answer(heartbeat: Heartbeat, received_ticks: int, answered_ticks: int) -> HeartbeatAnswered:
    """Return the answer to a heartbeat.

    Args:
        heartbeat: the heartbeat.
        received_ticks: time on the coordinator's clock at which the heartbeat arrived.
        answered_ticks: time on the coordinator's clock at which the answer is sent.
    """
    return HeartbeatAnswered(heartbeat.sent_ticks, received_ticks, answered_ticks)


# -- The offset between the clocks of the coordinator and of another machine, with a guaranteed bound on the error
#
# Durations and decisions always use the clock of one machine. The offset only serves to show the events of
# several machines on one timeline.
#
# An *exchange* consists of a message to the coordinator and its answer, with four times: t0 (sent) and t3
# (answer received) on the machine's clock, and t1 (received) and t2 (answered) on the coordinator's clock. No
# message arrives before it was sent, so the offset, which is the coordinator's clock minus the machine's
# clock,
#
#     was at most  t1 - t0  when the machine's clock showed t0, and
#     was at least t2 - t3  when the machine's clock showed t3.
#
# The middle of the two bounds is the well-known estimate of NTP [1], whose error is at most half the round
# trip, however asymmetric the delays are. The offset changes by at most `MOST_DRIFT_PPM`. So the bounds of an earlier
# exchange, widened by the largest possible change since then, are also bounds of the present offset. The offset lies in
# the intersection of all these intervals. So the exchanges with the shortest round trips determine the estimate, and
# old exchanges lose their influence as their intervals are widened.
#
# If the intersection is empty, one of the clocks has been set, or has not run while its machine was
# suspended. The earlier exchanges are then forgotten. All times and bounds are whole ticks, and all rounding
# widens the interval.
#
# [1] Mills: Internet time synchronization: the Network Time Protocol. IEEE Transactions on Communications, 1991.

MOST_DRIFT_PPM = 700
"""Largest relative drift of two clocks: 100 ppm for each oscillator, and 500 ppm by which NTP corrects a clock."""

PPM = 1_000_000
ANCHOR_INTERVAL_S = 4  # interval between two sets of bounds that are kept to estimate the drift
ANCHORS = 16


class OffsetBounds(msgspec.Struct, frozen=True):
    """The smallest and the largest possible offset at some time on the machine's clock.

    Attributes:
        at_ticks: the time on the machine's clock.
        least_ticks: smallest possible offset.
        most_ticks: largest possible offset.
    """

    at_ticks: int
    least_ticks: int
    most_ticks: int

    @classmethod
    def exchanged(cls, t0: int, t1: int, t2: int, t3: int) -> OffsetBounds:
        """Return the bounds at t3 that follow from one exchange."""
        return cls(t3, t2 - t3, t1 - t0 + _drift(t3 - t0))

    @classmethod
    def stated(cls, offset: ClockOffset) -> OffsetBounds:
        """Return the bounds that a `ClockOffset` states."""
        return cls(
            offset.at_ticks,
            offset.offset_ticks - offset.bound_ticks,
            offset.offset_ticks + offset.bound_ticks,
        )

    @property
    def offset_ticks(self) -> int:
        """The estimated offset, in the middle of the bounds."""
        return (self.least_ticks + self.most_ticks) // 2

    @property
    def bound_ticks(self) -> int:
        """The maximum error of the estimate."""
        return self.most_ticks - self.offset_ticks

    def at(self, at_ticks: int) -> OffsetBounds:
        """Return the bounds at another time on the machine's clock, earlier or later."""
        drift_ticks = _drift(at_ticks - self.at_ticks)
        return OffsetBounds(at_ticks, self.least_ticks - drift_ticks, self.most_ticks + drift_ticks)

    def intersection(self, other: OffsetBounds) -> OffsetBounds | None:
        """Return the intersection of the two intervals at the time of `other`; None if it is empty."""
        own = self.at(other.at_ticks)
        least_ticks = max(own.least_ticks, other.least_ticks)
        most_ticks = min(own.most_ticks, other.most_ticks)
        return None if least_ticks > most_ticks else OffsetBounds(other.at_ticks, least_ticks, most_ticks)


class ClockEstimate:
    """The offset of the coordinator's clock relative to the clock of one machine, estimated from exchanges.

    Args:
        ticks_per_s: number of ticks per second (see `paceline.sync.ticks`).

    Attributes:
        bounds: the bounds of the offset at the end of the last exchange; None before the first exchange.

    Example:
        The coordinator's clock is 30 s ahead. The message takes 0.1 ms, the answer 0.5 ms:

        >>> estimate = ClockEstimate()
        >>> estimate.exchanged(0, 30_000_100_000, 30_000_200_000, 700_000)
        >>> estimate.bounds.offset_ticks / TICKS_PER_S, estimate.bounds.bound_ticks / TICKS_PER_S
        (29.999800245, 0.000300245)
    """

    def __init__(self, ticks_per_s: int = TICKS_PER_S) -> None:
        self.bounds: OffsetBounds | None = None
        self._anchor_ticks = in_ticks(ANCHOR_INTERVAL_S, ticks_per_s)
        self._anchors: deque[OffsetBounds] = deque(maxlen=ANCHORS)

    def exchanged(self, t0: int, t1: int, t2: int, t3: int) -> None:
        """Take an exchange into account. An exchange whose times contradict each other has no effect.

        Args:
            t0: time on the machine's clock at which the message was sent.
            t1: time on the coordinator's clock at which the message was received.
            t2: time on the coordinator's clock at which the answer was sent.
            t3: time on the machine's clock at which the answer was received.
        """
        new = OffsetBounds.exchanged(t0, t1, t2, t3)
        if t3 < t0 or t2 < t1 or new.least_ticks > new.most_ticks:
            return
        if self.bounds is not None and t3 < self.bounds.at_ticks:
            self.bounds = None  # the machine's clock has been set back
        both = self.bounds.intersection(new) if self.bounds is not None else None
        if both is None:
            self._anchors.clear()
        self.bounds = both or new
        if not self._anchors or t3 - self._anchors[-1].at_ticks >= self._anchor_ticks:
            self._anchors.append(self.bounds)

    @property
    def drift_ppb(self) -> int | None:
        """The change of the offset, in nanoseconds per second; None until two estimates are far enough apart."""
        if self.bounds is None or self.bounds.at_ticks - self._anchors[0].at_ticks < self._anchor_ticks:
            return None
        change_ticks = self.bounds.offset_ticks - self._anchors[0].offset_ticks
        return change_ticks * 1_000_000_000 // (self.bounds.at_ticks - self._anchors[0].at_ticks)

    @property
    def stated(self) -> ClockOffset | None:
        """The current estimate, as it is sent and recorded; None before the first exchange."""
        if self.bounds is None:
            return None
        bounds = self.bounds
        return ClockOffset(bounds.at_ticks, bounds.offset_ticks, bounds.bound_ticks, self.drift_ppb)


def _drift(elapsed_ticks: int) -> int:
    """Return the largest change of the offset within `elapsed_ticks`, rounded up."""
    return -(-abs(elapsed_ticks) * MOST_DRIFT_PPM // PPM)


# -- The traffic between the machines of a run, from the totals of their connections -------------------------

WINDOW_S = 3  # time over which rates are averaged
FORGET_S = 10  # time after which a connection without a new total is no longer counted


class Direction(NamedTuple):
    """One direction of the link between two machines, which are given by their names."""

    sender: str
    receiver: str


class LinkTraffic(NamedTuple):
    """The traffic in one direction.

    Attributes:
        total_bytes: number of bytes that the open connections have carried.
        bytes_per_s: bytes per second, on average over about the last `WINDOW_S` seconds; None if it is not known yet.
    """

    total_bytes: int
    bytes_per_s: float | None


class TrafficMeter:
    """Adds up the traffic of all connections between the same machines.

    Args:
        ticks_per_s: number of ticks per second (see `paceline.sync.ticks`).

    Example:
        >>> meter = TrafficMeter()
        >>> for second in range(3):
        ...     meter.note("connection 1", Direction("a", "b"), 500 * second, second * TICKS_PER_S)
        ...     meter.note("connection 2", Direction("a", "b"), 100 * second, second * TICKS_PER_S)
        >>> meter.links(2 * TICKS_PER_S)
        {Direction(sender='a', receiver='b'): LinkTraffic(total_bytes=1200, bytes_per_s=600.0)}
    """

    def __init__(self, ticks_per_s: int = TICKS_PER_S) -> None:
        self._ticks_per_s = ticks_per_s
        self._window_ticks = in_ticks(WINDOW_S, ticks_per_s)
        self._forget_ticks = in_ticks(FORGET_S, ticks_per_s)
        # (connection, link) -> (time, total) of the last few totals
        self._totals: dict[tuple[Hashable, Direction], deque[tuple[int, int]]] = {}
        # bytes of connections that have been replaced by other connections
        self._closed: dict[Direction, int] = {}

    def note(self, connection: Hashable, link: Direction, total_bytes: int, now_ticks: int) -> None:
        """Record the number of bytes that a connection has carried in one direction since it was opened.

        If the number has become smaller, the connection has been replaced by another one.
        """
        totals = self._totals.setdefault((connection, link), deque())
        if totals and total_bytes < totals[-1][1]:
            self._closed[link] = self._closed.get(link, 0) + totals[-1][1]
            totals.clear()
        elif totals and now_ticks - totals[-1][0] > self._forget_ticks:
            totals.clear()
        totals.append((now_ticks, total_bytes))
        while len(totals) > 2 and now_ticks - totals[1][0] >= self._window_ticks:
            totals.popleft()

    def links(self, now_ticks: int) -> dict[Direction, LinkTraffic]:
        """Return the traffic of each link, sorted by the names of the machines."""
        found: dict[Direction, LinkTraffic] = {}
        for (_, link), totals in list(self._totals.items()):
            (first_ticks, first_bytes), (last_ticks, last_bytes) = totals[0], totals[-1]
            if now_ticks - last_ticks > self._forget_ticks:
                continue
            before = found.get(link, LinkTraffic(0, None))
            rate = before.bytes_per_s
            if last_ticks > first_ticks:
                own = (last_bytes - first_bytes) * self._ticks_per_s / (last_ticks - first_ticks)
                rate = own + (rate or 0.0)
            found[link] = LinkTraffic(before.total_bytes + last_bytes, rate)
        return dict(sorted(found.items()))

    def totals(self) -> dict[Direction, int]:
        """Return the number of bytes of each link since the run began, sorted by the names of the machines.

        >>> meter = TrafficMeter()
        >>> for total_bytes in (500, 800, 200):  # the last one is that of a new connection
        ...     meter.note("connection", Direction("a", "b"), total_bytes, 0)
        >>> meter.totals()
        {Direction(sender='a', receiver='b'): 1000}
        """
        found = dict(self._closed)
        for (_, link), totals in list(self._totals.items()):
            found[link] = found.get(link, 0) + totals[-1][1]
        return dict(sorted(found.items()))


# -- The clocks of patience: for how long each subject has kept a run waiting --------------------------------
#
# A run is patient with many subjects: a process that starts, a worker that has sent nothing, a server that
# has been asked, a shortage of workers. Three mistakes are easily made when these times are measured, and all three
# have led to healthy workers being accused or killed:
#
#     the clock begins with the run, although its subject arrives later, or has left and arrives again
#     the clock goes on while its subject cannot act, because the subject waits for others or the run is paused
#     the clock goes on while `look` is not called, because this process itself is suspended
#
# `Clocks` makes none of these mistakes. A subject has no clock before `begin` says that it has arrived, and a subject
# without a clock has not been waited for. Time passes only from one `look` to the next, and not while the run has
# paused.

K = TypeVar("K", bound=Hashable)

RESOLUTION_S = 1e-4  # times that differ by less count as equal, since conversions may round differently


class Clocks(Generic[K]):
    """One clock for each subject that is waited for. Times are in seconds, on any clock that does not run backwards.

    One thread calls `look`. Other threads may call all methods except `look`.

    Args:
        now_s: the current time.
        gap_s: the longest time between two calls of `look` that counts in full. If more time passes, the process was
            suspended, and only `gap_s` counts.

    Example:
        >>> clocks: Clocks[str] = Clocks(0.0, gap_s=1.0)
        >>> clocks.look(0.5)
        >>> clocks.begin("worker 0", 0.5)
        >>> clocks.look(1.0)
        >>> clocks.look(61.0)                # this process was suspended for a minute
        >>> clocks.look(90.0, counts=False)  # the run was paused
        >>> clocks.waited_s("worker 0", 90.0), clocks.waited_s("worker 1", 90.0)
        (1.5, None)
    """

    def __init__(self, now_s: float, *, gap_s: float) -> None:
        self._gap_s = gap_s
        self._passed_s = now_s, 0.0  # the time of the last look, and how much time had counted until then
        self._begun_s: dict[K, float] = {}  # subject -> the time that had counted when its clock began

    def look(self, now_s: float, *, counts: bool = True) -> None:
        """Let time pass until now.

        Args:
            now_s: the current time.
            counts: False if no process could act since the last call, because the run has paused.
        """
        self._passed_s = now_s, self.counted_s(now_s) if counts else self._passed_s[1]

    def counted_s(self, at_s: float) -> float:
        """Return the time that has counted until `at_s`, which may lie before or after the last look."""
        looked_s, counted_s = self._passed_s
        return counted_s + min(at_s - looked_s, self._gap_s)

    def begin(self, subject: K, now_s: float) -> None:
        """Begin the clock of a subject: it has arrived, shows a sign of life, or was kept from acting until now."""
        self._begun_s[subject] = self.counted_s(now_s)

    def renew(self, subject: K, now_s: float) -> None:
        """Begin the clock of a subject anew, unless there is no such clock, or it has begun at `now_s` or later."""
        begun_s, new_s = self._begun_s.get(subject), self.counted_s(now_s)
        if begun_s is not None and new_s > begun_s + RESOLUTION_S:
            self._begun_s[subject] = new_s

    def hold(self, subject: K, now_s: float, *, holds: bool) -> float | None:
        """Return for how long a condition has held; None if the condition does not hold.

        The clock of the condition runs while the condition holds.
        """
        if not holds:
            self.end(subject)
        elif subject not in self._begun_s:
            self.begin(subject, now_s)
        return self.waited_s(subject, now_s)

    def end(self, subject: K) -> None:
        """End the clock of a subject that is no longer waited for: the subject has done its part, or has left."""
        self._begun_s.pop(subject, None)

    def waited_s(self, subject: K, now_s: float) -> float | None:
        """Return for how long a subject has been waited for; None if it has not arrived, or is not waited for."""
        begun_s = self._begun_s.get(subject)
        return None if begun_s is None else max(0.0, self.counted_s(now_s) - begun_s)

    def began_s(self, subject: K) -> float | None:
        """Return the counted time at which a subject's clock began. If the clock begins anew, this time changes."""
        return self._begun_s.get(subject)

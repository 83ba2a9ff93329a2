"""The agent's side of the heartbeats: when one is due, and what the answers say about the clock.

The agent calls `due` about every `LOOK_S` with the states of its processes, and sends the heartbeat that it returns,
if any. It passes each answer to `answered`. The coordinator answers with `answer`, and passes the states to
`Liveness`.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...sync.ticks import TICKS_PER_S, in_ticks
from ..protocol.messages import Heartbeat, HeartbeatAnswered, ProcessState
from .clock_offset import ClockEstimate
from .liveness import HEARTBEAT_S

__all__ = ["Heartbeats", "answer"]

MOST_UNANSWERED = 20


class Heartbeats:
    """The heartbeats of one machine.

    All times are on the machine's own clock.

    While the coordinator's host is suspended, it reads nothing, so at most `MOST_UNANSWERED` heartbeats are sent
    without an answer.

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
        """Return a heartbeat that must be sent at once; None if none is due.

        Heartbeats are due at regular times, and when a state has changed. One that is late does not delay the next.

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
        """Handle the answer to a heartbeat. `now_ticks` is the time at which it has arrived."""
        self._unanswered = max(0, self._unanswered - 1)
        self.clock.exchanged(message.sent_ticks, message.received_ticks, message.answered_ticks, now_ticks)


def answer(heartbeat: Heartbeat, received_ticks: int, answered_ticks: int) -> HeartbeatAnswered:
    """Return the answer to a heartbeat.

    Args:
        heartbeat: the heartbeat.
        received_ticks: time on the coordinator's clock at which it arrived.
        answered_ticks: time on the coordinator's clock at which the answer is sent.
    """
    return HeartbeatAnswered(heartbeat.sent_ticks, received_ticks, answered_ticks)

"""The offset of the coordinator's clock to the clock of another machine, with a guaranteed bound on the error.

Durations and decisions always use the clock of one machine. The offset only serves to show the events of several
machines on one timeline.

An *exchange* consists of a message to the coordinator and its answer, with four times: t0 (sent) and t3 (answer
received) on the machine's clock, and t1 (received) and t2 (answered) on the coordinator's clock. No message arrives
before it was sent, so the offset, which is the coordinator's clock minus the machine's clock,

    was at most  t1 - t0  when the machine's clock showed t0, and
    was at least t2 - t3  when the machine's clock showed t3.

The middle of the two bounds is the well-known estimate of NTP [1], whose error is at most half the round trip,
however asymmetric the delays are. As the offset changes by at most `MOST_DRIFT_PPM`, the bounds of earlier exchanges
also bound the offset now, after they have been widened. The offset lies in the intersection of all these intervals.
So the exchanges with the least round trips determine the estimate, and old ones fade as their intervals are widened.

If the intersection is empty, one of the clocks has been set, or has not run while its machine was suspended. The
earlier exchanges are then forgotten. All times and bounds are whole ticks, and all rounding widens the interval.

[1] Mills: Internet time synchronization: the Network Time Protocol. IEEE Transactions on Communications, 1991.
"""

from __future__ import annotations

from collections import deque

import msgspec

from ...sync.ticks import TICKS_PER_S, in_ticks
from ..protocol.messages import ClockOffset

__all__ = ["MOST_DRIFT_PPM", "ClockEstimate", "OffsetBounds"]

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
        """Return the bounds that a statement of an offset contains."""
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
        """Return the bounds at the time of `other` that satisfy both; None if they contradict each other."""
        own = self.at(other.at_ticks)
        least_ticks = max(own.least_ticks, other.least_ticks)
        most_ticks = min(own.most_ticks, other.most_ticks)
        return None if least_ticks > most_ticks else OffsetBounds(other.at_ticks, least_ticks, most_ticks)


class ClockEstimate:
    """The offset of the coordinator's clock to the clock of one machine, estimated from exchanges.

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
        """Handle an exchange with the coordinator. One whose times contradict each other has no effect.

        Args:
            t0: time on the machine's clock at which the message was sent.
            t1: time on the coordinator's clock at which it was received.
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
    """Return the largest change of the offset within this time, rounded up."""
    return -(-abs(elapsed_ticks) * MOST_DRIFT_PPM // PPM)

"""The traffic between the machines of a run, from the totals of their connections."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

from ...sync.ticks import TICKS_PER_S, in_ticks

__all__ = ["Link", "LinkTraffic", "TrafficMeter"]

WINDOW_S = 3  # time over which rates are averaged
FORGET_S = 10  # time after which a connection without a new total is no longer counted


class Link(NamedTuple):
    """One direction between two machines, which are named."""

    sender: str
    receiver: str


class LinkTraffic(NamedTuple):
    """The traffic in one direction.

    Attributes:
        total_bytes: number of bytes on the connections that are open.
        bytes_per_s: bytes per second, on average over the last seconds; None if it is not known yet.
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
        ...     meter.note("connection 1", Link("a", "b"), 500 * second, second * TICKS_PER_S)
        ...     meter.note("connection 2", Link("a", "b"), 100 * second, second * TICKS_PER_S)
        >>> meter.links(2 * TICKS_PER_S)
        {Link(sender='a', receiver='b'): LinkTraffic(total_bytes=1200, bytes_per_s=600.0)}
    """

    def __init__(self, ticks_per_s: int = TICKS_PER_S) -> None:
        self._ticks_per_s = ticks_per_s
        self._window_ticks = in_ticks(WINDOW_S, ticks_per_s)
        self._forget_ticks = in_ticks(FORGET_S, ticks_per_s)
        # (connection, link) -> (time, total) of the last few totals
        self._totals: dict[tuple[Hashable, Link], deque[tuple[int, int]]] = {}
        self._closed: dict[Link, int] = {}  # bytes of connections that have been replaced or forgotten

    def note(self, connection: Hashable, link: Link, total_bytes: int, now_ticks: int) -> None:
        """Record the number of bytes that a connection has carried in one direction since it was opened.

        If the number has become smaller, the connection has been replaced by another one.
        """
        totals = self._totals.setdefault((connection, link), deque())
        if totals and total_bytes < totals[-1][1]:
            self._close(link, totals[-1][1])
            totals.clear()
        elif totals and now_ticks - totals[-1][0] > self._forget_ticks:
            totals.clear()
        totals.append((now_ticks, total_bytes))
        while len(totals) > 2 and now_ticks - totals[1][0] >= self._window_ticks:
            totals.popleft()

    def links(self, now_ticks: int) -> dict[Link, LinkTraffic]:
        """Return the traffic of each link, sorted by the names of the machines."""
        found: dict[Link, LinkTraffic] = {}
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

    def totals(self) -> dict[Link, int]:
        """Return the number of bytes of each link since the run began, sorted by the names of the machines.

        >>> meter = TrafficMeter()
        >>> for total_bytes in (500, 800, 200):  # the last one is that of a new connection
        ...     meter.note("connection", Link("a", "b"), total_bytes, 0)
        >>> meter.totals()
        {Link(sender='a', receiver='b'): 1000}
        """
        found = dict(self._closed)
        for (_, link), totals in list(self._totals.items()):
            found[link] = found.get(link, 0) + totals[-1][1]
        return dict(sorted(found.items()))

    def _close(self, link: Link, total_bytes: int) -> None:
        self._closed[link] = self._closed.get(link, 0) + total_bytes

"""The simulated network: every machine has one network interface, which all of its transfers share.

A network interface has two lanes, one for outgoing and one for incoming data. The transfers that use a lane at the
same time share its bandwidth evenly, as with TCP. A transfer uses the outgoing lane of its sender and, after the
latency, the incoming lane of its receiver. A transfer is complete when both lanes have transferred all of its bytes.
For example, simultaneous pushes from four workers to a single server take four times as long as a push from one
worker. With four servers, all four pushes take only as long as a push from one worker. The messages on a connection
arrive in the order in which they were sent. Each connection has a latency, which may vary from message to message. A
message without a payload takes only the latency of its connection.

Deviation from max-min fairness: if a transfer cannot use its share of a lane because the other end of the transfer is
slower, the unused part of the share is not given to the other transfers on the lane. The times are exact if all
transfers have the same bottleneck.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from ..sync.ticks import TICKS_PER_S
from .kernel import Kernel


class Lane:
    """One direction of a network interface. All transfers that use the lane share its bandwidth evenly.

    While n transfers share the lane, each of them gets 1/n of the bandwidth. So it is sufficient to store the
    progress of an imaginary transfer that is always active (`_passed_ticks`). A transfer ends when this progress
    reaches a mark that is known when the transfer begins. This takes O(log n) time per transfer, however many
    transfers begin and end in the meantime.
    """

    __slots__ = ("_bits_per_s", "_event", "_kernel", "_marks", "_now_ticks", "_number", "_passed_ticks")

    def __init__(self, kernel: Kernel, bits_per_s: int) -> None:
        self._kernel = kernel
        self._bits_per_s = bits_per_s
        self._marks: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        # Progress of the imaginary transfer: the number of bits transferred so far, divided by the lane's bandwidth.
        self._passed_ticks = 0.0
        # Virtual time at which `_passed_ticks` was last updated.
        self._now_ticks = 0
        self._number = 0
        # Number of the most recently scheduled event. Events with lower numbers are outdated and therefore ignored.
        self._event = 0

    def use(self, size_bytes: int, done: Callable[..., None], *arguments: object) -> None:
        """Transfer `size_bytes` bytes, then call `done(*arguments)`."""
        self._update()
        mark_ticks = self._passed_ticks + size_bytes * 8 * self._kernel.ticks_per_s / self._bits_per_s
        self._number += 1
        heapq.heappush(self._marks, (mark_ticks, self._number, done, arguments))
        self._schedule()

    def _update(self) -> None:
        """Advance `_passed_ticks` to the current time."""
        now_ticks = self._kernel.now_ticks
        if self._marks:
            self._passed_ticks += (now_ticks - self._now_ticks) / len(self._marks)
        else:
            self._passed_ticks = 0.0
        self._now_ticks = now_ticks

    def _schedule(self) -> None:
        """Schedule an event for the end of the transfer that ends first. A new transfer makes the event outdated."""
        self._event += 1
        left_ticks = (self._marks[0][0] - self._passed_ticks) * len(self._marks)
        self._kernel.after(max(0, math.ceil(left_ticks - ROUNDING_TICKS)), self._finish, self._event)

    def _finish(self, event: int) -> None:
        """End the transfer that ends first, unless the event is outdated."""
        if event != self._event:
            return
        self._update()
        _, _, done, arguments = heapq.heappop(self._marks)
        if self._marks:
            self._schedule()
        done(*arguments)


# This tolerance is larger than the rounding errors of sums of times, and smaller than the resolution of the clock.
ROUNDING_TICKS = 1e-3


class NetworkInterface:
    """The network interface of a machine, with one lane per direction.

    Args:
        kernel: the simulation kernel.
        bandwidth_bps: bandwidth in bits per second in each direction. With infinite bandwidth, there are no lanes.
    """

    __slots__ = ("inward", "outward")

    def __init__(self, kernel: Kernel, bandwidth_bps: float) -> None:
        bits_per_s = 0 if math.isinf(bandwidth_bps) else max(1, round(bandwidth_bps))
        self.inward = Lane(kernel, bits_per_s) if bits_per_s else None
        self.outward = Lane(kernel, bits_per_s) if bits_per_s else None


class Connection:
    """A connection from one machine to another, in one direction.

    Args:
        kernel: the simulation kernel.
        senders: the network interfaces through which a message leaves: the sender's own and, if there is one, its
            shared uplink. Interfaces of unlimited bandwidth have no effect.
        receivers: the network interfaces through which a message arrives.
        latency_ticks: latency of every message, or a function that returns the latency of the next message.
    """

    __slots__ = (
        "_kernel",
        "_last_ticks",
        "_latency_ticks",
        "_receivers",
        "_senders",
        "_steady_ticks",
        "_waiting",
    )

    def __init__(
        self,
        kernel: Kernel,
        senders: Sequence[NetworkInterface],
        receivers: Sequence[NetworkInterface],
        latency_ticks: int | Callable[[], int],
    ) -> None:
        self._kernel = kernel
        self._senders = [each.outward for each in senders if each.outward is not None]
        self._receivers = [each.inward for each in receivers if each.inward is not None]
        self._latency_ticks = latency_ticks if callable(latency_ticks) else lambda: latency_ticks
        unlimited = not (self._senders or self._receivers)
        # The time that every message takes; None if it varies. With a constant time, no message overtakes another.
        self._steady_ticks = None if callable(latency_ticks) or not unlimited else latency_ticks
        # Time at which the first byte of the most recent message arrives.
        self._last_ticks = 0
        # Transfers that have not arrived yet, in the order in which they were sent.
        self._waiting: list[_InFlight] = []

    def send(self, size_bytes: int, arrive: Callable[..., None], *arguments: object) -> None:
        """Send a message of `size_bytes` bytes, and call `arrive(*arguments)` when the whole message has arrived."""
        kernel = self._kernel
        if self._steady_ticks is not None:
            kernel.after(self._steady_ticks, arrive, *arguments)
            return
        self._last_ticks = first_ticks = max(kernel.now_ticks + self._latency_ticks(), self._last_ticks)
        if not size_bytes or not (self._senders or self._receivers):
            if not self._waiting:
                kernel.at(first_ticks, arrive, *arguments)
                return
            size_bytes = 0
        transfer = _InFlight(arrive, arguments)
        self._waiting.append(transfer)
        if size_bytes:
            transfer.parts += len(self._senders)
            for lane in self._senders:
                lane.use(size_bytes, self._left, transfer, first_ticks - kernel.now_ticks)
        kernel.at(first_ticks, self._enter, transfer, size_bytes)

    def _left(self, transfer: _InFlight, latency_ticks: int) -> None:
        """Schedule the arrival of the last byte, which has just left the sender, after the latency of the message."""
        self._kernel.after(latency_ticks, self._passed, transfer)

    def _enter(self, transfer: _InFlight, size_bytes: int) -> None:
        """Let a transfer use the incoming lanes from now on, because its first byte has arrived at the receiver."""
        if size_bytes and self._receivers:
            transfer.parts += len(self._receivers) - 1
            for lane in self._receivers:
                lane.use(size_bytes, self._passed, transfer)
        else:
            self._passed(transfer)

    def _passed(self, transfer: _InFlight) -> None:
        """Record that one end of a transfer is done. Deliver all messages that are now complete, in order."""
        transfer.parts -= 1
        while self._waiting and not self._waiting[0].parts:
            first = self._waiting.pop(0)
            first.arrive(*first.arguments)


class _InFlight:
    """A message on its way."""

    __slots__ = ("arguments", "arrive", "parts")

    def __init__(self, arrive: Callable[..., None], arguments: tuple[object, ...]) -> None:
        self.arrive = arrive
        self.arguments = arguments
        self.parts = 1  # number of ends of the connection (see `_left`, `_enter`) that are not done


# -- How long given transfers take in the simulated network, if each one begins at a given time --------------


class Transfer(NamedTuple):
    """A message that is transferred.

    Attributes:
        begun_s: time at which the transfer begins, in seconds.
        sender: the machine that sends the message.
        receiver: the machine that receives the message.
        size_bytes: size of the message in bytes.
    """

    begun_s: float
    sender: Hashable
    receiver: Hashable
    size_bytes: int


def ends_of(transfers: Sequence[Transfer], bandwidth_bps: float) -> list[float]:
    """Return the time in seconds at which each transfer ends if all messages have the latency 0.

    Args:
        transfers: the transfers, in any order.
        bandwidth_bps: bandwidth of each machine in each direction, in bits per second.

    >>> ends_of([Transfer(0.0, "a", "c", 125), Transfer(0.0, "b", "c", 125)], 1000.0)
    [2.0, 2.0]
    """
    kernel = Kernel()
    interfaces = {
        machine: NetworkInterface(kernel, bandwidth_bps)
        for transfer in transfers
        for machine in (transfer.sender, transfer.receiver)
    }
    connections: dict[tuple[Hashable, Hashable], Connection] = {}
    ends_s = [0.0] * len(transfers)

    def end(index: int) -> None:
        ends_s[index] = kernel.now_s

    for index, transfer in sorted(enumerate(transfers), key=lambda each: each[1].begun_s):
        pair = transfer.sender, transfer.receiver
        if pair not in connections:
            connections[pair] = Connection(kernel, [interfaces[pair[0]]], [interfaces[pair[1]]], 0)
        kernel.at(
            round(transfer.begun_s * TICKS_PER_S), connections[pair].send, transfer.size_bytes, end, index
        )
    kernel.run()
    return ends_s

"""The network in virtual time: every machine has one card, which all its transfers share.

A card has two lanes, in and out. Those who use a lane at one moment share its bandwidth evenly, as TCP does.
A transfer uses its sender's lane out and, one latency later, its receiver's lane in; it has arrived when both have
passed it. So four workers that push to one server take four times as long as one, and four servers relieve it.
Messages of one connection arrive in the order in which they were sent; a connection has one latency, which may vary
from message to message. Messages without a payload take their latency alone.

Deviation from max-min fairness: what a transfer cannot use of one lane, because the other end is slower, is not
given to its neighbours there. Where all transfers have the same narrow end, the times are exact.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from .kernel import SECOND_NS, Kernel

__all__ = ["Card", "Connection"]


class Lane:
    """One direction of one card: a resource that all who use it share evenly.

    While n transfers share the lane, each of them advances by 1/n of what the lane passes. So all that must be kept
    is how far a transfer would have come that had been there all the time (`_passed_ns`); each is due when that
    reaches a mark known at its beginning. That takes the logarithm of n per transfer, whatever comes and goes.
    """

    __slots__ = ("_bits_per_s", "_event", "_kernel", "_marks", "_now_ns", "_number", "_passed_ns")

    def __init__(self, kernel: Kernel, bits_per_s: int) -> None:
        self._kernel = kernel
        self._bits_per_s = bits_per_s
        self._marks: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._passed_ns = 0.0  # in time that the lane takes if it is used by one alone
        self._now_ns = 0  # when that was reckoned
        self._number = 0
        self._event = 0  # the number of the event at which the next one is due; older ones are void

    def use(self, size_bytes: int, done: Callable[..., None], *arguments: object) -> None:
        """Pass so many bytes, then have something happen."""
        self._reckon()
        mark_ns = self._passed_ns + size_bytes * 8 * SECOND_NS / self._bits_per_s
        self._number += 1
        heapq.heappush(self._marks, (mark_ns, self._number, done, arguments))
        self._expect()

    def _reckon(self) -> None:
        now_ns = self._kernel.now_ns
        if self._marks:
            self._passed_ns += (now_ns - self._now_ns) / len(self._marks)
        else:
            self._passed_ns = 0.0
        self._now_ns = now_ns

    def _expect(self) -> None:
        """Set an event for when the first one is due, if nothing comes in between."""
        self._event += 1
        left_ns = (self._marks[0][0] - self._passed_ns) * len(self._marks)
        self._kernel.after(max(0, math.ceil(left_ns - ROUNDING_NS)), self._come, self._event)

    def _come(self, event: int) -> None:
        if event != self._event:
            return
        self._reckon()
        _, _, done, arguments = heapq.heappop(self._marks)
        if self._marks:
            self._expect()
        done(*arguments)


ROUNDING_NS = 1e-3  # far more than sums of times are off by, far less than the clock's tick


class Card:
    """What connects a machine.

    Args:
        kernel: the clock.
        bandwidth_bps: bits per second in each direction; with infinity, there are no lanes to share.
    """

    __slots__ = ("inward", "outward")

    def __init__(self, kernel: Kernel, bandwidth_bps: float) -> None:
        bits_per_s = 0 if math.isinf(bandwidth_bps) else max(1, round(bandwidth_bps))
        self.inward = Lane(kernel, bits_per_s) if bits_per_s else None
        self.outward = Lane(kernel, bits_per_s) if bits_per_s else None


class Connection:
    """One direction between two machines.

    Args:
        kernel: the clock.
        sender: whose lane out it uses; None for a machine whose card is of no account.
        receiver: whose lane in it uses; likewise.
        latency_ns: of every message, or what draws that of the next one.
    """

    __slots__ = ("_kernel", "_last_ns", "_latency_ns", "_receiver", "_sender", "_steady_ns", "_waiting")

    def __init__(
        self, kernel: Kernel, sender: Card | None, receiver: Card | None, latency_ns: int | Callable[[], int]
    ) -> None:
        self._kernel = kernel
        self._sender = sender.outward if sender is not None else None
        self._receiver = receiver.inward if receiver is not None else None
        self._latency_ns = latency_ns if callable(latency_ns) else lambda: latency_ns
        free = self._sender is None and self._receiver is None
        self._steady_ns = (
            None if callable(latency_ns) or not free else latency_ns
        )  # nothing can overtake then
        self._last_ns = (
            0  # when the last message that is on its way will have arrived, or the first byte of it
        )
        self._waiting: list[_Transfer] = []  # those with a payload that have not arrived, in order

    def send(self, size_bytes: int, arrive: Callable[..., None], *arguments: object) -> None:
        """Send so many bytes; when all are there, have something happen."""
        kernel = self._kernel
        if self._steady_ns is not None:
            kernel.after(self._steady_ns, arrive, *arguments)
            return
        self._last_ns = first_ns = max(kernel.now_ns + self._latency_ns(), self._last_ns)
        if not size_bytes or (self._sender is None and self._receiver is None):
            if not self._waiting:
                kernel.at(first_ns, arrive, *arguments)
                return
            size_bytes = 0
        transfer = _Transfer(arrive, arguments)
        self._waiting.append(transfer)
        if size_bytes and self._sender is not None:
            transfer.parts += 1
            self._sender.use(size_bytes, self._left, transfer, first_ns - kernel.now_ns)
        kernel.at(first_ns, self._enter, transfer, size_bytes)

    def _left(self, transfer: _Transfer, latency_ns: int) -> None:
        """The last byte has left; the latency later it is there."""
        self._kernel.after(latency_ns, self._passed, transfer)

    def _enter(self, transfer: _Transfer, size_bytes: int) -> None:
        if size_bytes and self._receiver is not None:
            self._receiver.use(size_bytes, self._passed, transfer)
        else:
            self._passed(transfer)

    def _passed(self, transfer: _Transfer) -> None:
        """One end has passed it."""
        transfer.parts -= 1
        while self._waiting and not self._waiting[0].parts:
            first = self._waiting.pop(0)
            first.arrive(*first.arguments)


class _Transfer:
    __slots__ = ("arguments", "arrive", "parts")

    def __init__(self, arrive: Callable[..., None], arguments: tuple[object, ...]) -> None:
        self.arrive = arrive
        self.arguments = arguments
        self.parts = 1  # ends that have yet to pass it

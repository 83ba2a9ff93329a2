"""How long given transfers take in the simulated network, if each one begins at a given time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ..sync.ticks import TICKS_PER_S
from .kernel import Kernel
from .network_interfaces import Connection, NetworkInterface

__all__ = ["Transfer", "ends_of"]


class Transfer(NamedTuple):
    """A message that is transferred.

    Attributes:
        begun_s: time at which it begins, in seconds.
        sender: the machine that sends it.
        receiver: the machine that receives it.
        size_bytes: its size in bytes.
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

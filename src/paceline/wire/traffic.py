"""The number of bytes that a TCP connection has carried, as the kernel counts them.

Reading the counters takes one system call, and counting costs the processes nothing.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple, Protocol

__all__ = ["Sending", "Traffic", "sending_of", "traffic_of"]

# The fields tcpi_bytes_acked and tcpi_bytes_received of struct tcp_info, see linux/tcp.h.
COUNTERS = struct.Struct("=QQ")
COUNTERS_START = 120
BUSY = struct.Struct("=Q")  # the field tcpi_busy_time, in microseconds
BUSY_START = 168


class Traffic(NamedTuple):
    """The number of bytes that a connection has carried so far.

    Attributes:
        sent: number of bytes that were sent and that the other side has acknowledged. At the side that has opened the
            connection, the handshake counts as one byte.
        received: number of bytes that were received.
    """

    sent: int
    received: int


class Sending(NamedTuple):
    """What a connection has sent so far.

    Attributes:
        sent: number of bytes that were sent and that the other side has acknowledged.
        busy_s: number of seconds in which there were bytes that the other side had yet to acknowledge.
    """

    sent: int
    busy_s: float


class Optioned(Protocol):
    """A socket, or a TLS connection over one."""

    @property
    def family(self) -> int:
        """The address family of the socket."""
        ...

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        """Return an option of the socket."""
        ...


def traffic_of(sock: Optioned) -> Traffic | None:
    """Return the traffic of a connection; None if it is no TCP connection, or the kernel does not count it."""
    info = _info(sock, COUNTERS_START + COUNTERS.size)
    return None if info is None else Traffic(*COUNTERS.unpack_from(info, COUNTERS_START))


def sending_of(sock: Optioned) -> Sending | None:
    """Return what a connection has sent; None if it is no TCP connection, or the kernel does not measure it."""
    info = _info(sock, BUSY_START + BUSY.size)
    if info is None:
        return None
    sent, _ = COUNTERS.unpack_from(info, COUNTERS_START)
    [busy_us] = BUSY.unpack_from(info, BUSY_START)
    return Sending(sent, busy_us / 1e6)


def _info(sock: Optioned, size: int) -> bytes | None:
    """Return the beginning of a connection's struct tcp_info; None if it has not as many bytes."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    except OSError:  # the connection has been closed
        return None
    return info if len(info) == size else None

"""The preface of a TLS connection, which names the target process of the connection.

At the end of this module: a limit on the time for which a transfer may stand still, and the number of bytes that a
connection has carried.

A machine listens on one port for all of its processes. Each connection begins with a preface of fixed size, as plain
bytes, so that the listener can pass the socket to the target process, which then does the TLS handshake. The plain
preface is not authenticated. So the client sends the preface once more inside TLS, and the target process answers with
the preface of connections to itself. Both sides compare the two prefaces. So an attacker between the two sides cannot
redirect a connection to another process of the run.

A connection that cannot be passed on is refused with an alert of TLS (RFC 8446, section 6), which the TLS library of
the client reports. The alert is not authenticated: an attacker who could forge the alert could also cut the connection.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from ..errors import ProtocolError

VERSION = 1
FORMAT = struct.Struct("!4sBxH8s")
MAGIC = b"PCLC"

PREFACE_BYTES = FORMAT.size
"""Size of a preface in bytes."""

ANY_RUN = bytes(8)
"""The mark in the preface of a client that does not know the run yet."""

COORDINATOR = -1
"""The target of a connection to the coordinator. The target of a connection to server k is k."""


class Preface(NamedTuple):
    """The first bytes of a connection.

    Attributes:
        target: `COORDINATOR`, or the index of a server.
        mark: 8 bytes that distinguish the run from other runs with the same secret; `ANY_RUN` if the client does not
            know these bytes.
    """

    target: int
    mark: bytes = ANY_RUN

    def __str__(self) -> str:
        return "the coordinator" if self.target == COORDINATOR else f"server {self.target}"

    def encode(self) -> bytes:
        """Return the preface in the format in which it is sent."""
        return FORMAT.pack(MAGIC, VERSION, self.target + 1, self.mark)

    @classmethod
    def decode(cls, data: bytes) -> Preface | None:
        """Return the preface that has been received; None if it has another version of the protocol.

        Raises:
            ProtocolError: the data is not a preface.

        >>> Preface.decode(Preface(3).encode()).target
        3
        """
        magic, version, number, mark = FORMAT.unpack(data)
        if magic != MAGIC:
            raise ProtocolError("the connection does not begin with a preface")
        return cls(number - 1, mark) if version == VERSION else None

    def is_for(self, process: Preface) -> bool:
        """Return True if a connection with this preface is for the given process.

        Args:
            process: the preface of connections to the process.

        >>> Preface(COORDINATOR).is_for(Preface(COORDINATOR, b"run no 2"))
        True
        >>> Preface(1, b"run no 1").is_for(Preface(1, b"run no 2"))
        False
        """
        return self.target == process.target and self.mark in (process.mark, ANY_RUN)


class Refusal(NamedTuple):
    """A reason for which a connection is refused.

    Attributes:
        words: the reason.
        alert: number of the TLS alert that is sent.
        name: name that OpenSSL has for this alert.
    """

    words: str
    alert: int
    name: str

    def encode(self) -> bytes:
        """Return the refusal in the format in which it is sent: a TLS record with a fatal alert."""
        return bytes([21, 3, 3, 0, 2, 2, self.alert])


BUSY = Refusal("the target process accepts no more connections at present", 80, "TLSV1_ALERT_INTERNAL_ERROR")
ENDED = Refusal("the target process has ended", 111, "TLSV1_CERTIFICATE_UNOBTAINABLE")
UNKNOWN = Refusal("the target process is not on the machine that was reached", 112, "TLSV1_UNRECOGNIZED_NAME")
OTHER_RUN = Refusal("another run is served there", 49, "TLSV1_ALERT_ACCESS_DENIED")
OTHER_VERSION = Refusal("another version of Paceline is running there", 70, "TLSV1_ALERT_PROTOCOL_VERSION")

REFUSALS = {refusal.name: refusal for refusal in (BUSY, ENDED, UNKNOWN, OTHER_RUN, OTHER_VERSION)}
"""OpenSSL's name for an alert -> the meaning of this alert in a run."""


# -- The only rule by which this package gives up a transfer: nothing has moved for too long -----------------
#
# A transfer takes as long as its size and the link require. So its duration is not limited. The time between two
# messages is not limited either, because a message may be large. Progress is counted in bytes: as long as bytes
# move in either direction, the other side is alive and the link works.

SILENCE_S = 30.0
"""Time in seconds for which a transfer may stand still.

After a link was down, TCP sends lost data again at growing intervals. With this limit, a transfer survives a link
that was down for 15 s.
"""

LOOK_INTERVAL_S = 0.5
"""Interval in seconds at which the bytes of a transfer are counted."""


class Patience:
    """Measures for how long no byte of a transfer has moved. Call `look` at least every `LOOK_INTERVAL_S`.

    If the time between two calls is longer than two such intervals, only two intervals count as silence: this process
    was probably suspended, and could not notice that bytes moved.

    Args:
        moved_bytes: function that returns the number of bytes that have moved so far, in both directions.
        limit_s: longest permitted time without a moved byte, in seconds. Default: `SILENCE_S`.

    Attributes:
        quiet_s: number of seconds without a moved byte, as of the last call of `look`.

    """

    def __init__(self, moved_bytes: Callable[[], int], limit_s: float | None = None) -> None:
        self.quiet_s = 0.0
        self._limit_s = SILENCE_S if limit_s is None else limit_s
        self._moved_bytes = moved_bytes
        self._moved, self._looked_s = moved_bytes(), time.monotonic()

    def look(self) -> bool:
        """Count the bytes. Return True if any bytes have moved since the previous call."""
        before, before_s = self._moved, self._looked_s
        self._moved, self._looked_s = self._moved_bytes(), time.monotonic()
        if self._moved != before:
            self.quiet_s = 0.0
            return True
        self.quiet_s += min(self._looked_s - before_s, 2 * LOOK_INTERVAL_S)
        return False

    @property
    def over(self) -> bool:
        """True if nothing has moved for too long."""
        return self.quiet_s >= self._limit_s

    @property
    def wait_s(self) -> float:
        """Number of seconds after which `look` must be called again."""
        return max(0.0, min(LOOK_INTERVAL_S, self._limit_s - self.quiet_s))


# -- The number of bytes that a TCP connection has carried, as the kernel counts them ------------------------
#
# Reading the counters takes one system call, and counting costs the processes nothing.

# The fields tcpi_bytes_acked and tcpi_bytes_received of struct tcp_info, see linux/tcp.h.
COUNTERS = struct.Struct("=QQ")
COUNTERS_START = 120
BUSY_TIME = struct.Struct("=Q")  # the field tcpi_busy_time, in microseconds
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
    """The bytes that a connection has sent so far, and the time for which it has been busy.

    Attributes:
        sent: number of bytes that were sent and that the other side has acknowledged.
        busy_s: number of seconds in which there were bytes that the other side had yet to acknowledge.
    """

    sent: int
    busy_s: float


class Optioned(Protocol):
    """A socket, or a TLS connection over a socket."""

    @property
    def family(self) -> int:
        """The address family of the socket."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        """Return an option of the socket."""


def traffic_of(sock: Optioned) -> Traffic | None:
    """Return the traffic of a connection; None if it is no TCP connection, or if the kernel does not count bytes."""
    info = _info(sock, COUNTERS_START + COUNTERS.size)
    return None if info is None else Traffic(*COUNTERS.unpack_from(info, COUNTERS_START))


def sending_of(sock: Optioned) -> Sending | None:
    """Return what a connection has sent; None if it is no TCP connection, or if the kernel does not measure this."""
    info = _info(sock, BUSY_START + BUSY_TIME.size)
    if info is None:
        return None
    sent, _ = COUNTERS.unpack_from(info, COUNTERS_START)
    [busy_us] = BUSY_TIME.unpack_from(info, BUSY_START)
    return Sending(sent, busy_us / 1e6)


def _info(sock: Optioned, size: int) -> bytes | None:
    """Return the first `size` bytes of a connection's struct tcp_info; None if the kernel returns fewer bytes."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    except OSError:  # the connection has been closed
        return None
    return info if len(info) == size else None

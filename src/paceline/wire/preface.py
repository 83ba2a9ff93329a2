"""The preface of a TLS connection, which names the process that the connection is for.

A machine listens on one port for all of its processes. Each connection begins with a preface of fixed size, as plain
bytes, so that the listener can pass the socket to the right process, which then does the TLS handshake. Nobody has
authenticated the plain preface. So the client sends it again inside TLS, and the process answers with the preface of
connections to itself. Both sides compare them: nobody in between can redirect a connection to another process of the
run.

A connection that cannot be passed on is refused with an alert of TLS (RFC 8446, section 6), which the TLS library of
the client reports. It is not authenticated: whoever could forge it could also cut the connection.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ..errors import ProtocolError

__all__ = [
    "ANY_RUN",
    "BUSY",
    "COORDINATOR",
    "ENDED",
    "OTHER_RUN",
    "OTHER_VERSION",
    "PREFACE_BYTES",
    "REFUSALS",
    "UNKNOWN",
    "Preface",
    "Refusal",
]

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
    """What a connection begins with.

    Attributes:
        target: `COORDINATOR`, or the index of a server.
        mark: the mark of the run, 8 bytes; `ANY_RUN` if the client does not know it.
    """

    target: int
    mark: bytes = ANY_RUN

    def __str__(self) -> str:
        return "the coordinator" if self.target == COORDINATOR else f"server {self.target}"

    def encode(self) -> bytes:
        """Return the preface as it is sent."""
        return FORMAT.pack(MAGIC, VERSION, self.target + 1, self.mark)

    @classmethod
    def decode(cls, data: bytes) -> Preface | None:
        """Return the preface that has been received; None if it is one of another version of the protocol.

        Raises:
            ProtocolError: the data are not a preface.

        >>> Preface.decode(Preface(3).encode()).target
        3
        """
        magic, version, number, mark = FORMAT.unpack(data)
        if magic != MAGIC:
            raise ProtocolError("the connection does not begin with a preface")
        return cls(number - 1, mark) if version == VERSION else None

    def is_for(self, process: Preface) -> bool:
        """Return True if a connection with this preface is for the process that has the other one.

        >>> Preface(COORDINATOR).is_for(Preface(COORDINATOR, b"run no 2"))
        True
        >>> Preface(1, b"run no 1").is_for(Preface(1, b"run no 2"))
        False
        """
        return self.target == process.target and self.mark in (process.mark, ANY_RUN)


class Refusal(NamedTuple):
    """Why a connection is refused.

    Attributes:
        words: the reason.
        alert: number of the TLS alert that is sent.
        name: name that OpenSSL has for this alert.
    """

    words: str
    alert: int
    name: str

    def encode(self) -> bytes:
        """Return the refusal as it is sent: a TLS record with a fatal alert."""
        return bytes([21, 3, 3, 0, 2, 2, self.alert])


BUSY = Refusal("it accepts no more connections at present", 80, "TLSV1_ALERT_INTERNAL_ERROR")
ENDED = Refusal("it has ended", 111, "TLSV1_CERTIFICATE_UNOBTAINABLE")
UNKNOWN = Refusal("there is no such process on this machine", 112, "TLSV1_UNRECOGNIZED_NAME")
OTHER_RUN = Refusal("another run is served there", 49, "TLSV1_ALERT_ACCESS_DENIED")
OTHER_VERSION = Refusal("another version of Paceline is running there", 70, "TLSV1_ALERT_PROTOCOL_VERSION")

REFUSALS = {refusal.name: refusal for refusal in (BUSY, ENDED, UNKNOWN, OTHER_RUN, OTHER_VERSION)}
"""OpenSSL's name for an alert -> what it means here."""

"""A peer that a host has expelled, and waiting until a connection is closed."""

from __future__ import annotations

import contextlib
import socket

__all__ = ["Expelled", "until_closed"]

TIMEOUT_S = 30.0


class Expelled(Exception):
    """A hostile worker's connection was closed, as it should be."""


def until_closed(sock: socket.socket) -> bytes:
    """All that the other end sends before it closes the connection."""
    sock.settimeout(TIMEOUT_S)
    heard = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(1 << 16):
            heard += part
    return heard

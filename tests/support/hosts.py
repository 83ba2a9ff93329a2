"""A peer that a host has expelled, waiting until a connection is closed, and the connection of an agent."""

from __future__ import annotations

import contextlib
import socket

from paceline.core.messages import Hello, Message, first_phase
from paceline.run.coordinator import CoordinatorHost
from paceline.wire.stream import Stream
from paceline.wire.transports import connect

__all__ = ["Expelled", "agent_of", "until_closed"]

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


def agent_of(coordinator: CoordinatorHost) -> Stream[Message]:
    """The connection of a machine that has greeted a coordinator in this process."""
    stream: Stream[Message] = Stream(connect(coordinator.address), first_phase("coordinator", "agent"))
    stream.send(Hello(coordinator.job.token, "agent", 0))
    return stream

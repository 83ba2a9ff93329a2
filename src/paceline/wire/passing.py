"""Passes connected sockets to another process, over a pair of Unix sockets.

The process that listens has one end of the pair, and the process that the connections are for has the other one. A
socket that is under way belongs to nobody: if the process ends before it has received the socket, the system closes
the connection.
"""

from __future__ import annotations

import errno
import socket
from typing import Protocol

__all__ = ["PassedSockets", "Source", "pass_on", "socket_pair"]

MARK = b"+"


class Source(Protocol):
    """Where a host gets its connections from: a listening socket, or the sockets that another process passes on."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when a connection is waiting."""
        ...

    def accept(self) -> tuple[socket.socket, object]:
        """Return the next connection, and the address of the peer.

        Raises:
            BlockingIOError: no connection is waiting.
            OSError: the next connection is lost, or cannot be accepted.
        """
        ...

    def close(self) -> None:
        """Stop accepting connections."""
        ...


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the end that passes sockets on, and the end that receives them. The first one never blocks."""
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender.setblocking(False)
    return sender, receiver


def pass_on(sock: socket.socket, sender: socket.socket) -> None:
    """Pass a socket to the process at the other end. The caller must close its own descriptor.

    Raises:
        BlockingIOError: the process has not received the earlier ones yet, and there is no room for more.
        BrokenPipeError: the process has ended.
    """
    try:
        socket.send_fds(sender, [MARK], [sock.fileno()])
    except OSError as error:
        if error.errno in (errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS):
            raise BlockingIOError(error.errno, error.strerror) from error
        if error.errno == errno.ECONNRESET:
            raise BrokenPipeError(error.errno, error.strerror) from error
        raise


class PassedSockets:
    """Receives the sockets that another process passes on. See `Source`.

    Args:
        receiver: an end of a pair of sockets, of which this object takes ownership.
    """

    def __init__(self, receiver: socket.socket) -> None:
        receiver.setblocking(False)
        self._receiver = receiver

    def fileno(self) -> int:
        return self._receiver.fileno()

    def accept(self) -> tuple[socket.socket, object]:
        data, descriptors, _, _ = socket.recv_fds(self._receiver, len(MARK), 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise OSError(errno.ESHUTDOWN, "the process that listens has ended")
        if not descriptors:  # the system has closed the connection
            raise ConnectionAbortedError(errno.ECONNABORTED, "there was no descriptor for a connection")
        return socket.socket(fileno=descriptors[0]), None

    def close(self) -> None:
        self._receiver.close()

"""Listening and connecting, by address, with one notation for both kinds of socket.

unix:@name        an abstract AF_UNIX socket: no file, nothing left behind after SIGKILL
tcp:host:port     TCP
"""

from __future__ import annotations

import errno
import secrets
import socket
import time

from ..errors import ConfigurationError, PeerLostError

__all__ = ["connect", "is_local", "listen_tcp", "listen_unix"]

BACKLOG = 1024
QUEUE_INTERVAL_S = 0.01  # between two tries to get into a full one


def listen_unix() -> tuple[socket.socket, str]:
    """A new listening socket of this machine's, and its address."""
    name = f"paceline-{secrets.token_hex(8)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(f"\0{name}")
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock, f"unix:@{name}"


def listen_tcp(host: str = "127.0.0.1", port: int = 0) -> tuple[socket.socket, str]:
    """A new listening TCP socket, and its address. Loopback unless told otherwise; port 0 picks a free one.

    Raises:
        ConfigurationError: the port is in use or may not be used, or the host is not one of this machine's.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        why = "it is in use" if in_use else str(error)
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {why}. Choose another port, or 0 for any free one."
        ) from error
    sock.setblocking(False)
    bound_host, bound_port = sock.getsockname()
    return sock, f"tcp:{bound_host}:{bound_port}"


def is_local(address: str) -> bool:
    """True for an address that leads back to this machine without a link in between."""
    return address.startswith("unix:") or address.startswith("tcp:127.")


def connect(address: str, timeout_s: float = 10.0) -> socket.socket:
    """Connect to an address.

    Raises:
        PeerLostError: nobody listens there.
    """
    kind, _, rest = address.partition(":")
    try:
        if kind == "tcp":
            host, _, port = rest.rpartition(":")
            return socket.create_connection((host, int(port)), timeout=timeout_s)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            _connect_unix(sock, "\0" + rest.removeprefix("@"), time.monotonic() + timeout_s)
        except BaseException:
            sock.close()
            raise
        return sock
    except OSError as error:
        raise PeerLostError(f"nobody answers at {address}: {error}") from error


def _connect_unix(sock: socket.socket, name: str, deadline_s: float) -> None:
    while True:
        try:
            sock.connect(name)
            return
        except BlockingIOError:  # the listener's queue is full; over TCP the system itself would try again
            if time.monotonic() > deadline_s:
                raise
            time.sleep(QUEUE_INTERVAL_S)

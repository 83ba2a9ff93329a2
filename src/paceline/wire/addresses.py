"""Listening sockets and connections. AF_UNIX and TCP addresses share one notation.

unix:@name        an abstract AF_UNIX socket, which needs no file, so SIGKILL leaves nothing behind
tcp:host:port     a TCP socket
"""

from __future__ import annotations

import errno
import secrets
import socket
import time

from ..errors import ConfigurationError, PeerLostError

__all__ = ["connect", "is_local", "listen_tcp", "listen_unix"]

BACKLOG = 1024
QUEUE_INTERVAL_S = 0.01  # time between two attempts to connect while the listener's queue is full


def listen_unix() -> tuple[socket.socket, str]:
    """Return a new listening AF_UNIX socket and its address."""
    name = f"paceline-{secrets.token_hex(8)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(f"\0{name}")
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock, f"unix:@{name}"


def listen_tcp(host: str = "127.0.0.1", port: int = 0) -> tuple[socket.socket, str]:
    """Return a new listening TCP socket and its address. Port 0 picks any free port.

    Raises:
        ConfigurationError: the port is in use or not permitted, or the host is not an address of this machine.
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
            f"cannot listen on {host}:{port}: {why}. Choose another port, or 0 for any free port."
        ) from error
    sock.setblocking(False)
    bound_host, bound_port = sock.getsockname()
    return sock, f"tcp:{bound_host}:{bound_port}"


def is_local(address: str) -> bool:
    """Return True for an AF_UNIX or loopback address, which can be reached only from this machine."""
    return address.startswith("unix:") or address.startswith("tcp:127.")


def connect(address: str, timeout_s: float = 10.0) -> socket.socket:
    """Return a socket that is connected to an address.

    Raises:
        PeerLostError: no connection was made within `timeout_s`, for example because no process listens there.
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
        raise PeerLostError(f"cannot connect to {address}: {error}") from error


def _connect_unix(sock: socket.socket, name: str, deadline_s: float) -> None:
    while True:
        try:
            sock.connect(name)
            return
        except BlockingIOError:
            # The listener's queue is full. Unlike with TCP, the kernel does not retry the connection.
            if time.monotonic() > deadline_s:
                raise
            time.sleep(QUEUE_INTERVAL_S)

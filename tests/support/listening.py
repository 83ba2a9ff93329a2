"""Where a host of this process listens, as seen from a connection to it."""

from __future__ import annotations

import functools
import gc
import socket
from typing import Any

from paceline.wire.transports import UnixListener

__all__ = ["place_of"]


def place_of(peer: socket.socket) -> Any:
    """Return what another socket can be connected to, so as to reach the same host as this connection.

    The name of an AF_UNIX socket has been removed, so it is only good for finding the listener.
    """
    name = peer.getpeername()
    return name if peer.family != socket.AF_UNIX else _path_of(name)


@functools.cache  # a test may call hundreds of times, and a process has millions of objects
def _path_of(name: str) -> str:
    """Return the path of the listener whose AF_UNIX socket has this name. Each name is used once."""
    listeners = [each for each in gc.get_objects() if type(each) is UnixListener and each.fileno() >= 0]
    [path] = [each.path for each in listeners if each.getsockname() == name]
    return str(path)

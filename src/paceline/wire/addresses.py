"""The transports of a run, and their addresses, which share one notation: a kind, a colon and the rest.

The kind says which transport an address belongs to; see `unix` and `tcp` for what follows it.
"""

from __future__ import annotations

import socket
from typing import overload

from ..errors import PeerLostError, ProtocolError
from .secure import SecureSocket
from .shm import SHM
from .tcp import TCP
from .tls import Contexts
from .transport import Transport
from .unix import UNIX

__all__ = ["TRANSPORTS", "best_transport", "connect", "is_here", "seen_from"]

TRANSPORTS: dict[str, Transport] = {each.name: each for each in (SHM, UNIX, TCP)}
"""Name -> transport, the best one first."""


def best_transport() -> Transport:
    """Return the best transport that this system has."""
    return next(each for each in TRANSPORTS.values() if each.available())


@overload
def connect(address: str, timeout_s: float = ..., known: None = ...) -> socket.socket: ...


@overload
def connect(
    address: str, timeout_s: float = ..., known: Contexts | None = ...
) -> socket.socket | SecureSocket: ...


def connect(
    address: str, timeout_s: float = 10.0, known: Contexts | None = None
) -> socket.socket | SecureSocket:
    """Return a connection to an address.

    Args:
        address: the address.
        timeout_s: maximum time in seconds.
        known: the TLS contexts of the run, if the address uses TLS.

    Raises:
        PeerLostError: no connection was made within `timeout_s`, for example because no process listens there.
        ProtocolError: the process that listens there does not have the key of the run, or the address is not that of
            the process that was reached.
    """
    try:
        return _transport_of(address).connect(address, timeout_s, known)
    except OSError as error:
        raise PeerLostError(f"cannot connect to {address}: {error}") from error


def is_here(address: str) -> bool:
    """Return True if an address belongs to this machine. It may also be the end of a tunnel to another one."""
    return _transport_of(address).is_here(address)


def seen_from(address: str, reached: str) -> str:
    """Return the address of a process as another machine sees it.

    A process that listens on all addresses of its machine does not know which of them the other machine can reach. If
    the other machine reaches the coordinator through a tunnel, it reaches the servers through the same one.

    Args:
        address: the address on which the process listens.
        reached: the address at which the other machine has reached the coordinator, on the same machine.

    >>> seen_from("tcp:0.0.0.0:4000", "tcp:10.0.0.1:29600")
    'tcp:10.0.0.1:4000'
    >>> seen_from("tls:/1", "tls:10.0.0.1:29600")
    'tls:10.0.0.1:29600/1'
    """
    return _transport_of(address).seen_from(address, reached)


def _transport_of(address: str) -> Transport:
    """Return the transport of an address. Raise `ProtocolError` if no transport has such addresses."""
    kind, _, _ = address.partition(":")
    for transport in TRANSPORTS.values():
        if kind in transport.kinds:
            return transport
    raise ProtocolError(f"the address {address!r} is of an unknown kind")

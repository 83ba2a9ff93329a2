"""Calls to the coordinator of a run that a user has named, with the secret that the user has given.

If the secret or the address is wrong, the user has to correct it, so the error is a `ConfigurationError`. A
coordinator that cannot be reached may be reached later.
"""

from __future__ import annotations

import socket

from ..errors import ConfigurationError, ProtocolError
from ..wire.addresses import connect
from ..wire.secure import SecureSocket
from ..wire.tls import Contexts

__all__ = ["call"]


def call(address: str, timeout_s: float, known: Contexts) -> socket.socket | SecureSocket:
    """Return a connection to the coordinator of a run.

    Args:
        address: address of the coordinator, for example "tls:10.0.0.1:29600".
        timeout_s: maximum time in seconds.
        known: the TLS contexts that belong to the secret.

    Raises:
        ConfigurationError: the secret is not that of the run, or no run is served at the address.
        PeerLostError: the coordinator cannot be reached.
    """
    try:
        return connect(address, timeout_s, known)
    except ProtocolError as error:
        raise ConfigurationError(
            f"the run at {address.removeprefix('tls:')} cannot be joined or watched: {error}."
        ) from error

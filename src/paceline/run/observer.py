"""A client that asks the coordinator of a run for the state of the job, without disturbing the run."""

from __future__ import annotations

import socket

import msgspec

from ..core.messages import FetchStatus, Hello, StatusReported, first_phase
from ..core.status import JobStatus
from ..errors import ConfigurationError, ProtocolError
from ..wire.secure import Contexts, SecureSocket, contexts
from ..wire.stream import Stream
from ..wire.transports import connect


class Observer:
    """A connection to the coordinator of a run.

    Args:
        address: address of the coordinator, for example "tls:10.0.0.1:29600".
        token: the secret of the run.
        timeout_s: maximum time in seconds to connect.

    Raises:
        PeerLostError: the coordinator cannot be reached.
        ConfigurationError: the secret is wrong, or no run is served at the address.
    """

    def __init__(self, address: str, token: str, timeout_s: float = 10.0) -> None:
        self._stream: Stream[StatusReported] = Stream(
            call(address, timeout_s, contexts(token)), first_phase("coordinator", "observer")
        )
        self._stream.send(Hello(token, "observer", 0))

    def fetch(self) -> JobStatus:
        """Return the state of the job.

        Raises:
            PeerLostError: the run is over, or the connection was lost.
            DeadlineError: the coordinator does not answer.
        """
        self._stream.send(FetchStatus())
        return msgspec.msgpack.decode(self._stream.wait().status, type=JobStatus)

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()


# -- Calls to the coordinator of a run that a user has named, with the secret that the user has given --------
#
# If the secret or the address is wrong, the user has to correct this, so the error is a `ConfigurationError`. If the
# coordinator cannot be reached, the error is a `PeerLostError`, because a later attempt may succeed.


def call(address: str, timeout_s: float, known: Contexts) -> socket.socket | SecureSocket:
    """Return a connection to the coordinator of a run.

    Args:
        address: address of the coordinator, for example "tls:10.0.0.1:29600".
        timeout_s: maximum time in seconds to connect.
        known: the TLS contexts that belong to the secret.

    Raises:
        ConfigurationError: the secret is wrong, or no run is served at the address.
        PeerLostError: the coordinator cannot be reached.
    """
    try:
        return connect(address, timeout_s, known)
    except ProtocolError as error:
        raise ConfigurationError(
            f"the run at {address.removeprefix('tls:')} cannot be joined or watched: {error}."
        ) from error

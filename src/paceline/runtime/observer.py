"""A client that asks the coordinator of a run for the state of the job, without disturbing the run."""

from __future__ import annotations

import msgspec

from ..core.protocol.messages import FetchStatus, Hello, StatusReported, first_phase
from ..core.status.job_status import JobStatus
from ..wire.stream import Stream
from ..wire.tls import contexts
from .calling import call

__all__ = ["Observer"]


class Observer:
    """A connection to the coordinator of a run.

    Args:
        address: address of the coordinator, for example "tls:10.0.0.1:29600".
        token: the secret of the run.
        timeout_s: maximum time in seconds to connect.

    Raises:
        PeerLostError: the coordinator cannot be reached.
        ConfigurationError: the secret is not that of the run, or no run is served at the address.
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

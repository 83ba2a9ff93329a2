"""The one port on which a machine listens for all of its processes.

Each connection begins with a preface, which names the process that it is for (see `wire.preface`). The listener reads
exactly the preface, and passes the socket on to this process, which does everything else. So the listener holds
no secret, and a process does not notice the connections that never send a preface. Their number and lifetime are
limited as those of all strangers are (see `strangers`).

The listener has a thread of its own, and never waits for a process. If a process has ended, or does not keep up, the
connection is refused, and the client is told why.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from types import TracebackType

from ..errors import ProtocolError
from ..wire.forks import close_in_forks
from ..wire.passing import Source, pass_on, socket_pair
from ..wire.preface import (
    ANY_RUN,
    BUSY,
    ENDED,
    OTHER_RUN,
    OTHER_VERSION,
    PREFACE_BYTES,
    UNKNOWN,
    Preface,
    Refusal,
)
from .strangers import Acceptor, Entrance, Strangers

__all__ = ["Listener"]

log = logging.getLogger("paceline.listener")


class Arrival:
    """A connection whose preface has not been received completely.

    Attributes:
        sock: the connection.
        received: the part of the preface that has been received.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.received = b""


class Listener:
    """A context manager that listens on a port, and passes each connection to the process that it is for.

    Args:
        sock: what accepts connections, of which the listener takes ownership.
        mark: the mark of the run, see `Preface`.
    """

    def __init__(self, sock: Source, mark: bytes) -> None:
        self._mark = mark
        self._acceptor = Acceptor(sock)
        self._strangers: Strangers[Arrival] = Strangers("the listener")
        # target -> socket over which connections are passed to it
        self._senders: dict[int, socket.socket] = {}
        self._bell, self._bell_end = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell_end, selectors.EVENT_READ)
        self._entrance = Entrance(
            "the listener",
            self._acceptor,
            self._strangers,
            self._selector,
            admit=self._register,
            drop=self._drop,
            serve=self._read,
        )
        self._thread = threading.Thread(target=self._run, name="paceline-listener", daemon=True)
        close_in_forks(self)

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop listening, and close the connections that have not been passed on."""
        self._bell.close()
        self._thread.join()
        self.close_in_fork()

    def receiver(self, target: int) -> socket.socket:
        """Return the end of a new pair of sockets over which a process receives its connections.

        The caller must close its descriptor as soon as the process has it. Otherwise, the end of the process is not
        noticed.

        Args:
            target: see `Preface`. If there has been a receiver for this target, it receives nothing more.
        """
        sender, receiver = socket_pair()
        former, self._senders[target] = self._senders.get(target), sender
        if former is not None:
            former.close()
        return receiver

    def close_in_fork(self) -> None:
        """See `close_in_forks`."""
        self._acceptor.close()
        for sock in (self._bell, self._bell_end, *self._senders.values()):
            sock.close()
        for key in list((self._selector.get_map() or {}).values()):
            if isinstance(key.data, Arrival):
                key.data.sock.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(self._strangers.left_s(None)):
                if key.fileobj is self._bell_end:
                    self._strangers.close()
                    return
                if not isinstance(key.data, Arrival):
                    self._entrance.accept()
                elif key.data.sock.fileno() >= 0:  # an earlier iteration of this loop may have dropped it
                    self._read(key.data)
            for arrival in self._strangers.late():
                self._drop(arrival, "it has not sent a preface in time")
            self._entrance.watch()

    def _register(self, sock: socket.socket) -> Arrival:
        """Start reading the preface of a new connection. Raise `OSError` if this is not possible."""
        arrival = Arrival(sock)
        try:
            self._selector.register(sock, selectors.EVENT_READ, arrival)
        except OSError:
            sock.close()
            raise
        self._strangers.add(arrival)
        return arrival

    def _read(self, arrival: Arrival) -> None:
        """Receive the rest of a preface. If it is complete, pass the connection on, or refuse it."""
        try:
            part = arrival.sock.recv(PREFACE_BYTES - len(arrival.received))
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(arrival, str(error))
            return
        arrival.received += part
        if not part:
            self._drop(arrival, "the connection ended")
        elif len(arrival.received) == PREFACE_BYTES:
            try:
                refusal = self._pass_on(arrival)
            except (ProtocolError, OSError) as error:
                self._strangers.note(f"the listener refused a connection: {error}")
            else:
                if refusal is not None:
                    self._strangers.note(f"the listener refused a connection: {refusal.words}")
                    with contextlib.suppress(OSError):
                        arrival.sock.send(refusal.encode())
            self._drop(arrival, "")

    def _pass_on(self, arrival: Arrival) -> Refusal | None:
        """Pass a connection to the process that its preface names. Return why it is refused; None if it is not."""
        preface = Preface.decode(arrival.received)
        if preface is None:
            return OTHER_VERSION
        if preface.mark not in (self._mark, ANY_RUN):
            return OTHER_RUN
        sender = self._senders.get(preface.target)
        if sender is None:
            return UNKNOWN
        try:
            pass_on(arrival.sock, sender)
        except BlockingIOError:
            return BUSY
        except BrokenPipeError:
            return ENDED
        return None

    def _drop(self, arrival: Arrival, reason: str) -> None:
        """Close this process's descriptor of a connection."""
        if reason:
            log.debug("the listener closes a connection: %s", reason)
        self._strangers.discard(arrival)
        self._selector.unregister(arrival.sock)
        arrival.sock.close()

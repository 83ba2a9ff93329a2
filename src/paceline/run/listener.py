"""The one port on which a machine listens for all of its processes, and the limits for callers without the token.

Each connection begins with a preface, which names the target process of the connection (see `wire.preface`). The
listener reads only the preface, and passes the socket on to the target process, which does everything else. So the
listener holds no secret, and no target process has to handle connections that never send a preface. The number and
lifetime of such connections are limited, like those of all pending connections (see `PendingConnections`).

The listener has a thread of its own, and never waits for a process. If the target process has ended, or accepts
connections too slowly, the connection is refused, and the client is told the reason.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

from ..errors import ProtocolError
from ..wire.follow import close_in_forks
from ..wire.memory import ConnectionSource, pass_on, socket_pair
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
    """A context manager that listens on a port, and passes each connection to its target process.

    Args:
        sock: the source of connections, such as a listening socket. The listener takes ownership.
        mark: the mark of the run, see `Preface`.
    """

    def __init__(self, sock: ConnectionSource, mark: bytes) -> None:
        self._mark = mark
        self._acceptor = Acceptor(sock)
        self._pending: PendingConnections[Arrival] = PendingConnections("the listener")
        # target -> socket over which connections are passed to the target
        self._senders: dict[int, socket.socket] = {}
        self._bell, self._bell_end = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell_end, selectors.EVENT_READ)
        self._entrance = Entrance(
            "the listener",
            self._acceptor,
            self._pending,
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
        """Return one end of a new pair of sockets. A process receives its connections over this end.

        The caller must close its own descriptor of the socket as soon as the process has a copy. With this
        descriptor still open, the listener cannot notice the end of the process.

        Args:
            target: see `Preface`. If there already is a receiver for this target, the old one receives nothing more.
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
            for key, _ in self._selector.select(self._pending.left_s()):
                if key.fileobj is self._bell_end:
                    self._pending.close()
                    return
                if not isinstance(key.data, Arrival):
                    self._entrance.accept()
                elif key.data.sock.fileno() >= 0:  # an earlier iteration may have dropped this connection
                    self._read(key.data)
            for arrival in self._pending.late():
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
        self._pending.add(arrival)
        return arrival

    def _read(self, arrival: Arrival) -> None:
        """Receive the rest of a preface. If the preface is complete, pass on or refuse the connection."""
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
                self._pending.note(f"the listener refused a connection: {error}")
            else:
                if refusal is not None:
                    self._pending.note(f"the listener refused a connection: {refusal.words}")
                    with contextlib.suppress(OSError):
                        arrival.sock.send(refusal.encode())
            self._drop(arrival, "")

    def _pass_on(self, arrival: Arrival) -> Refusal | None:
        """Pass a connection to its target process. Return the refusal if the connection is refused, else None."""
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
        self._pending.discard(arrival)
        self._selector.unregister(arrival.sock)
        arrival.sock.close()


# -- Limits for pending connections, which are connections that have not sent the run's token yet ----------------------
#
# Any process on this machine can connect to a server or to the coordinator as often as the system permits. So
# the number of pending connections is limited to `MOST`. The limit is lower if the process may open only a
# few descriptors, so that enough descriptors remain for the run. When the limit is reached, the next
# connection replaces the oldest pending connection, but only after the oldest connection has had enough
# time to send its greeting. Until then, new connections wait in the system's queue. The first few messages
# about pending connections are logged; further messages are only counted.
#
# If the process nevertheless runs out of descriptors, a spare descriptor is closed temporarily, so that the
# next connection can be accepted and closed. Without the spare descriptor, that connection would stay in the
# queue and keep the selector busy.

hub_log = logging.getLogger("paceline.hub")

LEAST, MOST = 4, 256
# Maximum number of connections that are accepted before the existing connections are served again.
ACCEPTED_AT_ONCE = 8
SHARE_OF_DESCRIPTORS = 8  # pending connections may use one eighth of the descriptors of this process
GREETING_TIMEOUT_S = 10.0
# A pending connection that has been silent for this time may be dropped: peers send their greeting immediately.
GREETING_S = 0.25
LOGGED_IN_FULL = 5  # number of messages about pending connections that are logged in full
COUNT_INTERVAL_S = 10.0  # minimum time between two log lines that state how many messages were omitted
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
GONE = (errno.ECONNABORTED, errno.EPROTO)  # the peer closed the connection before it was accepted

P = TypeVar("P")


class Acceptor:
    """A listening socket that can reject connections even when the process has run out of file descriptors.

    For this purpose, an acceptor keeps a spare file descriptor.

    Args:
        listener: the listening socket, or another source of connections. The acceptor takes ownership.

    Attributes:
        stuck: True if the last attempt to accept a connection failed and left the connection in the queue.
    """

    def __init__(self, listener: ConnectionSource) -> None:
        self.stuck = False
        self._listener = listener
        self._reserve: int | None = None
        self._take_reserve()

    def fileno(self) -> int:
        """Return the descriptor of the listening socket. Selectors call this method."""
        return self._listener.fileno()

    def accept(self) -> socket.socket | None:
        """Return the next connection; None if no connection is waiting.

        Raises:
            OSError: the peer has already closed the connection, or no file descriptor is free.
        """
        try:
            self.stuck = False
            return self._listener.accept()[0]
        except BlockingIOError:
            return None
        except OSError as error:
            out_of_descriptors = error.errno in OUT_OF_DESCRIPTORS
            self.stuck = error.errno not in GONE and not (out_of_descriptors and self._turn_away())
            raise

    def close(self) -> None:
        """Close the listener and the spare descriptor. It is safe to call this more than once."""
        self._listener.close()
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _turn_away(self) -> bool:
        """Accept and close the next connection, using the spare descriptor. Return False if this failed."""
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None
        try:
            self._listener.accept()[0].close()
        except OSError:
            # Another thread has taken the descriptor that was freed.
            return False
        finally:
            self._take_reserve()
        return True

    def _take_reserve(self) -> None:
        with contextlib.suppress(OSError):
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


class PendingConnections(Generic[P]):
    """Stores the connections that have not sent the token yet, oldest first, and limits their number and lifetime.

    Args:
        host: name of the server or of the coordinator in log messages.
    """

    def __init__(self, host: str) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = (
            MOST if limit == resource.RLIM_INFINITY else max(LEAST, min(MOST, limit // SHARE_OF_DESCRIPTORS))
        )
        self._host = host
        self._since_s: dict[P, float] = {}
        self._logged = 0
        self._omitted = 0
        self._last = ""
        self._count_due_s = 0.0
        self._rests_until_s = -math.inf

    @property
    def room(self) -> bool:
        """True if another connection may be accepted, possibly in place of a pending connection."""
        if time.monotonic() < self._rests_until_s:
            return False
        return len(self._since_s) < self._most or self._oldest_s() > GREETING_S

    def add(self, peer: P) -> None:
        """Add a new connection."""
        self._since_s[peer] = time.monotonic()

    def discard(self, peer: P) -> None:
        """Remove a connection that has sent the token or has been closed."""
        self._since_s.pop(peer, None)

    def to_make_room(self) -> P | None:
        """Return the pending connection to drop in favor of a new connection; None if there is enough room."""
        return next(iter(self._since_s)) if len(self._since_s) >= self._most else None

    def rest(self) -> None:
        """Stop accepting connections for a short time, because an attempt to accept a connection has failed."""
        self._rests_until_s = time.monotonic() + GREETING_S

    def late(self) -> Iterator[P]:
        """Yield the connections whose token is late.

        The caller must drop each connection before it requests the next connection.
        """
        self._log_count()
        while self._since_s and self._oldest_s() > GREETING_TIMEOUT_S:
            yield next(iter(self._since_s))

    def left_s(self, left_s: float = math.inf) -> float | None:
        """Return the maximum time in seconds that a host may block, up to `left_s`; None if there is no limit."""
        if self._since_s:
            # If there is no room, the host must wake up when the oldest pending connection may be dropped.
            is_full = len(self._since_s) >= self._most and self._oldest_s() <= GREETING_S
            patience_s = GREETING_S if is_full else GREETING_TIMEOUT_S
            left_s = min(left_s, max(0.0, patience_s - self._oldest_s()) + 1e-3)
        if self._omitted:
            left_s = min(left_s, max(0.0, self._count_due_s - time.monotonic()))
        if self._rests_until_s > time.monotonic():
            left_s = min(left_s, GREETING_S)
        return None if left_s == math.inf else left_s

    def note(self, text: str) -> None:
        """Log a message about a pending connection. After the first few messages, only count further messages."""
        if self._logged < LOGGED_IN_FULL:
            self._logged += 1
            self._count_due_s = time.monotonic() + COUNT_INTERVAL_S
            hub_log.warning("%s", text)
        else:
            self._omitted += 1
            self._last = text
            self._log_count()

    def close(self) -> None:
        """Log the number of omitted messages."""
        self._log_count(final=True)

    def _oldest_s(self) -> float:
        """Return the age of the oldest pending connection in seconds."""
        return time.monotonic() - next(iter(self._since_s.values()))

    def _log_count(self, *, final: bool = False) -> None:
        """Log the number of omitted messages, at most once per `COUNT_INTERVAL_S` unless `final` is True."""
        if self._omitted and (final or time.monotonic() >= self._count_due_s):
            hub_log.warning(
                "%s omitted %d similar messages; the last one: %s", self._host, self._omitted, self._last
            )
            self._omitted = 0
            self._count_due_s = time.monotonic() + COUNT_INTERVAL_S


class Entrance(Generic[P]):
    """Accepts the connections to a host while there is room for more connections.

    Args:
        host: name of the host in log messages.
        acceptor: accepts a connection.
        pending: the pending connections of the host.
        selector: the host's selector. It reports waiting connections with `accept` as the data.
        admit: function that starts watching a new connection, and returns it. It raises `OSError` if the
            peer has already closed the connection.
        drop: function that closes a pending connection for the given reason.
        serve: function that handles the data that a new pending connection has already sent.
    """

    def __init__(
        self,
        host: str,
        acceptor: Acceptor,
        pending: PendingConnections[P],
        selector: selectors.BaseSelector,
        *,
        admit: Callable[[socket.socket], P],
        drop: Callable[[P, str], None],
        serve: Callable[[P], None],
    ) -> None:
        self._host = host
        self._acceptor = acceptor
        self._pending = pending
        self._selector = selector
        self._admit = admit
        self._drop = drop
        self._serve = serve
        self._watching = False
        self.watch()

    def watch(self) -> None:
        """Let the selector report waiting connections if there is room for pending connections."""
        if not self._watching and self._pending.room:
            self._selector.register(self._acceptor, selectors.EVENT_READ, self.accept)
            self._watching = True

    def accept(self) -> None:
        """Accept waiting connections. If no room is left, the selector stops reporting waiting connections."""
        for _ in range(ACCEPTED_AT_ONCE):
            if not self._pending.room:
                break
            try:
                sock = self._acceptor.accept()
                if sock is None:
                    return
                if (silent := self._pending.to_make_room()) is not None:
                    self._drop(silent, "it was silent while other connections were waiting")
                arrived = self._admit(sock)
            except OSError as error:
                # There are no descriptors left, or the peer has already closed the connection.
                self._pending.note(f"{self._host} could not accept a connection: {error}")
                if self._acceptor.stuck:
                    self._pending.rest()
                continue
            self._serve(arrived)  # the greeting has usually arrived already
        if not self._pending.room:
            self._selector.unregister(self._acceptor)
            self._watching = False

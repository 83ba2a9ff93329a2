"""Connection management for the event loops of the servers and the coordinator, which are called *hosts* here.

A peer is accepted when its first message contains the run's token. Until then, its connection is a *pending connection*
(see `listener`): the host receives only a small greeting and at most one descriptor, and sends nothing. A pending
connection is dropped if the peer remains silent for too long, and earlier if other peers are waiting to connect.

If a peer violates the protocol, the violation is logged, the peer's connection is closed, and the host continues.
The code that handles a message checks the message before it changes any state, and raises `ProtocolError` if the
message violates a rule. If a message causes any other exception, the traceback is logged and the connection of the
sender is closed. The host stops only after errors that the sender did not cause: a violated invariant of Paceline
(`InternalError`), a lack of resources (`OSError`, `MemoryError`), or a failure after the message was accepted
(`HostError`).

Sending never blocks and never calls a method of the host. If sending reveals that a connection is broken, or that the
peer does not read its messages, the connection is dropped after the current message has been handled.
"""

from __future__ import annotations

import contextlib
import heapq
import hmac
import itertools
import logging
import math
import os
import selectors
import socket
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ..core.messages import Hello, Message, Role, first_phase, greeted
from ..errors import DeadlineError, InternalError, PeerLostError, ProtocolError, UserCodeError
from ..sync.ticks import TICKS_PER_S
from ..wire.follow import close_in_forks
from ..wire.memory import ConnectionSource
from ..wire.preface import COORDINATOR, Preface
from ..wire.secure import Contexts, SecureSocket
from ..wire.stream import Stream
from .listener import Acceptor, Entrance, PendingConnections

log = logging.getLogger("paceline.hub")


class HostError(Exception):
    """The error that ends a host if it cannot carry out what follows from a message that it has accepted.

    It is raised from the error that has occurred.
    """


# If a process ends but its connection stays open, this is the silence after which the connection is dropped.
ENDED_TIMEOUT_S = 1.0
# Maximum number of message parts that are queued for a peer. If a peer reads its messages, the queue stays short.
MOST_UNSENT = 1 << 14
# Maximum number of characters in a logged reason, which may contain data that a peer sent.
LONGEST_REASON = 1000
# Errors that may occur while a message is handled, but that the sender of the message has not caused.
OUR_FAULT = (HostError, InternalError, UserCodeError, OSError, MemoryError)
# Minimum time between two checks of the sockets while messages arrive in rings.
SOCKETS_INTERVAL_S = 1e-3
# Maximum time to block if there are rings. If a wake-up is lost, this is also the maximum delay.
LONGEST_SLEEP_S = 0.1
# An additional event flag, which the selector never reports: the peer's ring contains messages.
IN_RING = 1 << 8


class Caller:
    """One connection of a hub, with information about the peer.

    Attributes:
        stream: the stream that sends and receives messages on the connection.
        role: the role of the peer, such as "worker" or "reader", once the peer has been accepted; "" until then.
        index: index of the worker or server.
        moved_s: time at which data was last received from the peer or sent to the peer, on the monotonic clock.
        adopted: True if the host itself opened the connection.
        writing: True while the selector also watches for room to send, because messages are queued.
    """

    def __init__(self, stream: Stream[Message]) -> None:
        self.stream = stream
        self.role = ""
        self.index = -1
        self.adopted = False
        self.writing = False
        self.moved_s = time.monotonic()
        # Time at which the end of the peer's process was reported while the connection was still open.
        self.ended_s = math.inf

    @property
    def host(self) -> str:
        """The address of the peer's machine.

        Raises:
            PeerLostError: the connection is lost. Messages that the peer has sent may still be read.
        """
        return self._address_at(self.stream.sock.getpeername)

    @property
    def reached(self) -> str:
        """The address of this machine at which the peer has reached it.

        Raises:
            PeerLostError: the connection is lost.
        """
        return self._address_at(self.stream.sock.getsockname)

    def _address_at(self, end: Callable[[], Any]) -> str:
        try:
            return str(end()[0])
        except OSError as error:
            raise PeerLostError(f"connection lost: {error}") from error

    def __str__(self) -> str:
        if not self.role:
            return "an unknown connection"
        return f"{self.role} {self.index}"


P = TypeVar("P", bound=Caller)
P_contra = TypeVar("P_contra", bound=Caller, contravariant=True)


class _HubHost(Protocol[P_contra]):
    """The methods that a hub calls on its host. All methods except `gone` may raise `ProtocolError`."""

    def greeted(self, peer: P_contra, hello: Hello) -> None:
        """Accept a peer that has sent the token, and set its `role` and `index`."""

    def received(self, peer: P_contra, message: Message) -> None:
        """Handle a complete message."""

    def payload_targets(self, peer: P_contra, message: Message, size_bytes: int) -> Sequence[memoryview]:
        """Return the memory into which a message's payload is received. Called only for accepted peers."""

    def gone(self, peer: P_contra, reason: str) -> None:
        """Record that the connection to an accepted or adopted peer has been closed."""


class Hub(Generic[P]):
    """Manages the connections of one host: accepts and drops peers, and receives and sends messages.

    Args:
        name: name of the host in log messages.
        token: the secret that peers must send.
        listener: a listening socket, or another source of connections. The hub takes ownership.
        role: role of the host.
        make_peer: function that returns the object for a new connection, an instance of `Caller` or of a subclass.
        host: the object that handles the messages and the closed connections.
        known: the TLS contexts of the run, if the connections that the listener accepts use TLS. The plain prefaces of
            such connections must already have been received.
        target: the target in the prefaces of connections to this host, see `Preface`.

    Attributes:
        peers: all open connections.
    """

    def __init__(
        self,
        name: str,
        token: str,
        listener: ConnectionSource,
        role: Role,
        make_peer: Callable[[Stream[Message]], P],
        host: _HubHost[P],
        known: Contexts | None = None,
        target: int = COORDINATOR,
    ) -> None:
        self.peers: set[P] = set()
        self._known = known
        self._target = target
        self._name = name
        self._token = token.encode()
        self._acceptor = Acceptor(listener)
        self._pending: PendingConnections[P] = PendingConnections(name)
        self._role = role
        self._make_peer = make_peer
        self._host = host
        # (peer, error) for each peer to which sending has failed. These peers are dropped after the current message.
        self._broken: list[tuple[P, PeerLostError | ProtocolError]] = []
        # Stream -> peer, for the peers that have a ring.
        self._ringed: dict[Stream[Any], P] = {}
        # The peers whose processes have ended while their connections are still open.
        self._ending: set[P] = set()
        # Time at which the sockets were last checked.
        self._checked_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._entrance = Entrance(
            name,
            self._acceptor,
            self._pending,
            self._selector,
            admit=self._register,
            drop=self.drop,
            serve=self._serve_new,
        )
        close_in_forks(self)

    def watch(self, source: socket.socket | Stream[Any], readable: Callable[[], None]) -> None:
        """Make `poll` also watch a socket or stream, and call `readable` when there is data to read."""
        self._selector.register(source, selectors.EVENT_READ, readable)

    def poll(self, timeout_s: float | None = None, *, spins: bool = True) -> None:
        """Wait for events and handle them.

        Args:
            timeout_s: maximum time to wait, in seconds. None means no time limit.
            spins: False if the next message is expected on a socket, so that polling the rings first is useless.
        """
        left_s = math.inf if timeout_s is None else timeout_s
        if self._ringed:
            if self._serve_rings(spins):
                if time.monotonic() - self._checked_s < SOCKETS_INTERVAL_S:
                    return
                left_s = 0.0
            elif not fall_asleep(self._ringed):
                return
            left_s = min(left_s, LONGEST_SLEEP_S)
        if self._ending:
            left_s = min(left_s, ENDED_TIMEOUT_S)
        ready = self._selector.select(self._pending.left_s(left_s))
        self._checked_s = time.monotonic()
        wake_up(self._ringed)
        for key, events in ready:
            if isinstance(key.data, Caller):
                # An earlier iteration of this loop may have dropped the peer.
                if key.data in self.peers:
                    self._serve(key.data, events)
            else:
                key.data()
            self._drop_broken()
        for peer in self._pending.late():
            self.drop(peer, "it has not sent the run's token in time")
        self._entrance.watch()
        for peer in list(self._ending):
            if time.monotonic() - max(peer.ended_s, peer.moved_s) > ENDED_TIMEOUT_S:
                self.drop(peer, "its process has ended")

    def adopt(self, peer: P) -> None:
        """Make `poll` also serve a connection that the host itself has opened to a trusted peer.

        If a message from this peer causes an exception, `poll` raises it.
        """
        peer.adopted = True
        self.peers.add(peer)
        self._selector.register(peer.stream, selectors.EVENT_READ, peer)

    def drain(self, peer: P, silence_s: float | None = None) -> None:
        """Send all messages that are queued for a peer.

        If the connection is lost or silent, give up. See `Stream.drain`.
        """
        if peer in self.peers:
            with contextlib.suppress(PeerLostError, DeadlineError):
                peer.stream.drain(silence_s)

    def expect_end(self, peer: P) -> None:
        """Drop a peer whose process has ended, but only after its last messages have been received.

        Usually, the connection ends together with the process. If a forked child of the process keeps the connection
        open, `poll` closes the connection.
        """
        if peer in self.peers and peer not in self._ending:
            peer.ended_s = time.monotonic()
            self._ending.add(peer)

    def watch_ring(self, peer: P) -> None:
        """Make `poll` also read a peer's ring."""
        self._ringed[peer.stream] = peer

    def send(
        self,
        peer: P,
        message: Message,
        payload: Sequence[memoryview] = (),
        descriptors: Sequence[int] = (),
        *,
        lent: Hashable = None,
    ) -> None:
        """Send a message as `Stream.send` does, but do not raise an exception if sending fails."""
        try:
            peer.stream.send(message, payload, descriptors, lent=lent)
            if peer.stream.unsent > MOST_UNSENT:
                raise ProtocolError("it does not read the messages sent to it")
            self._watch_peer(peer)
        except PeerLostError as error:
            self._broken.append((peer, error))
        except ProtocolError as error:
            self._refuse(peer, error)
            self._broken.append((peer, error))

    def close_in_fork(self) -> None:
        """See `close_in_forks`."""
        self._acceptor.close()
        self._selector.close()

    def close(self) -> None:
        """Close every connection and the listening socket."""
        for peer in self.peers:
            peer.stream.close()
        self._pending.close()
        self._acceptor.close()
        self._selector.close()

    def _serve_rings(self, spins: bool) -> bool:
        """Handle the messages in the rings. Return False if there were no messages."""
        ready = spin(self._ringed, SPIN_S if spins else 0.0)
        for stream in ready:
            # An earlier iteration of this loop may have dropped the peer.
            if (peer := self._ringed.get(stream)) is not None:
                self._serve(peer, IN_RING)
            self._drop_broken()
        return bool(ready)

    def _drop_broken(self) -> None:
        while self._broken:
            peer, error = self._broken.pop()
            # Read the messages that the peer may have sent before it closed the connection.
            if peer in self.peers and isinstance(error, PeerLostError):
                self._serve(peer, selectors.EVENT_READ)
            self.drop(peer, str(error))

    def _serve_new(self, peer: P) -> None:
        """Handle the messages that a new peer has already sent."""
        self._serve(peer, selectors.EVENT_READ)
        self._drop_broken()

    def _register(self, sock: socket.socket) -> P:
        """Start watching a new connection. Raise `OSError` if the peer has already closed the connection."""
        try:
            stream: Stream[Message] = Stream(
                sock if self._known is None else self._secured(sock, self._known),
                first_phase("", self._role),
                trusted=False,
                takes_descriptor=sock.family == socket.AF_UNIX,
            )
            peer = self._make_peer(stream)
            self._selector.register(stream, selectors.EVENT_READ, peer)
        except OSError:
            sock.close()
            raise
        stream.sink = lambda message, size_bytes: (
            self._host.payload_targets(peer, message, size_bytes) if peer.role else []
        )
        self.peers.add(peer)
        self._pending.add(peer)
        return peer

    def _secured(self, sock: socket.socket, known: Contexts) -> SecureSocket:
        return SecureSocket(sock, known, Preface(self._target, known.mark), server_side=True)

    def _serve(self, peer: P, events: int) -> None:
        peer.moved_s = time.monotonic()
        try:
            if events & selectors.EVENT_WRITE:
                peer.stream.flush()
                self._watch_peer(peer)
            if events & (selectors.EVENT_READ | IN_RING):
                for message in peer.stream.receive(from_socket=events != IN_RING):
                    if peer.role:
                        self._host.received(peer, message)
                    else:
                        self._greet(peer, message)
        except PeerLostError as error:
            self.drop(peer, str(error))
        except OUR_FAULT:
            raise
        except Exception as error:
            if peer.adopted:
                raise
            if isinstance(error, ProtocolError):
                self._refuse(peer, error)
            else:
                log.exception("%s could not handle a message from %s", self._name, peer)
            self.drop(peer, str(error))

    def _greet(self, peer: P, message: Message) -> None:
        assert isinstance(message, Hello)  # a pending connection may send nothing else
        if not hmac.compare_digest(message.token.encode(), self._token):
            raise ProtocolError("it did not send the run's token")
        phase = greeted(message.role, self._role)
        self._host.greeted(peer, message)
        peer.stream.expect(phase)
        self._pending.discard(peer)
        # Readers remain limited to small headers: they need no larger headers, and there may be many readers.
        peer.stream.trusted, peer.stream.takes_descriptor = peer.role != "reader", False

    def _refuse(self, peer: P, error: ProtocolError) -> None:
        text = f"{self._name} refused {peer}: {str(error)[:LONGEST_REASON]}"
        # Each worker and server can be refused only once, so there is no need to limit these log messages.
        if peer.role in ("worker", "server"):
            log.warning("%s", text)
        else:
            self._pending.note(text)

    def drop(self, peer: P, reason: str) -> None:
        """Close a connection and notify the host."""
        if peer not in self.peers:
            return
        level = logging.INFO if peer.role else logging.DEBUG
        log.log(level, "%s closes the connection to %s: %s", self._name, peer, reason)
        self.peers.remove(peer)
        self._ending.discard(peer)
        self._pending.discard(peer)
        self._ringed.pop(peer.stream, None)
        self._selector.unregister(peer.stream)
        peer.stream.close()
        if not peer.role:
            return
        try:
            self._host.gone(peer, reason)
        except OUR_FAULT:
            raise
        except Exception:
            log.exception("%s could not handle the disconnection of %s", self._name, peer)

    def _watch_peer(self, peer: P) -> None:
        """Set the events for which the selector watches the peer's stream."""
        if peer.stream.backlog != peer.writing:
            peer.writing = not peer.writing
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.writing else 0)
            self._selector.modify(peer.stream, events, peer)


# -- Waiting for a message in a ring: poll for a short time, then block --------------------------------------
#
# Blocking and waking up takes tens of microseconds, longer than all other work in an iteration of a small
# model. So a process polls first, and yields its CPU core after each poll so that other processes can run if
# there are few cores.

SPIN_S = 200e-6


def spin(streams: Collection[Stream[Any]], most_s: float = SPIN_S) -> list[Stream[Any]]:
    """Poll until a ring contains a message or `most_s` has passed. Return the streams whose rings have messages."""
    until_s = time.perf_counter() + most_s
    while True:
        ready = [stream for stream in streams if stream.ring_ready]
        if ready or time.perf_counter() > until_s:
            return ready
        os.sched_yield()


def fall_asleep(streams: Collection[Stream[Any]]) -> bool:
    """Announce to all peers that this process will block. Return False if a message has already arrived."""
    for stream in streams:
        if not stream.fall_asleep():
            wake_up(streams)
            return False
    return True


def wake_up(streams: Collection[Stream[Any]]) -> None:
    """Announce to all peers that this process is polling the rings again."""
    for stream in streams:
        stream.wake_up()


# -- A queue of timers, ordered by the time at which they are due --------------------------------------------

T = TypeVar("T")


class Timers(Generic[T]):
    """A queue of objects, each due at a time on the run's clock, in ticks."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, T]] = []
        self._number = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def set(self, due_ticks: int, item: T) -> None:
        """Add an object that is due at `due_ticks`. Objects that are due at the same time keep their order."""
        heapq.heappush(self._heap, (due_ticks, next(self._number), item))

    def left_s(self, now_ticks: int) -> float | None:
        """Return the time until the next object is due, in seconds; None if the queue is empty."""
        return max(0, self._heap[0][0] - now_ticks) / TICKS_PER_S if self._heap else None

    def take_due(self, now_ticks: int) -> list[T]:
        """Remove and return the objects that are due."""
        due = []
        while self._heap and self._heap[0][0] <= now_ticks:
            due.append(heapq.heappop(self._heap)[2])
        return due

"""One listening socket and everybody who calls: what the server's and the coordinator's loops have in common.

A caller is let in when its first message shows the run's token. Until then only a small greeting is read from it,
at most one descriptor is taken, nothing is sent, and it is dropped if it stays silent. A caller that breaks the
rules is logged and its connection closed; the host goes on. Sending never blocks and never calls back: a connection
that turns out to be broken while something is sent is dropped when the message at hand is done with.
"""

from __future__ import annotations

import hmac
import logging
import math
import selectors
import socket
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ..errors import PeerLostError, ProtocolError
from ..wire.messages import Hello, Message
from ..wire.stream import Stream
from .spin import fall_asleep, spin, wake_up

__all__ = ["GREETING_TIMEOUT_S", "Host", "Hub", "Peer"]

log = logging.getLogger("paceline.hub")

GREETING_TIMEOUT_S = 10.0
SOCKETS_INTERVAL_S = 1e-3  # while rings are busy
LONGEST_SLEEP_S = 0.1  # with rings: what a wake-up would cost at most, should one ever be lost
IN_RING = 1 << 8  # beside the events of a selector


class Peer:
    """One connection.

    Attributes:
        stream: its stream.
        role: "worker", "server" or "reader", once it has been let in; "" until then.
        index: the worker's or server's number.
    """

    def __init__(self, stream: Stream[Message]) -> None:
        self.stream = stream
        self.role = ""
        self.index = -1
        self.since_s = time.monotonic()

    def __str__(self) -> str:
        if not self.role:
            return "a connection that has not shown the run's token"
        return f"{self.role} {self.index}"


P = TypeVar("P", bound=Peer)
P_contra = TypeVar("P_contra", bound=Peer, contravariant=True)


class Host(Protocol[P_contra]):
    """What a hub asks of whoever runs it. Each of these may raise `ProtocolError` to refuse, but `gone`."""

    def greeted(self, peer: P_contra, hello: Hello) -> None:
        """A caller has shown the token; `role` and `index` are set when this returns."""
        ...

    def received(self, peer: P_contra, message: Message) -> None:
        """A message has arrived whole."""
        ...

    def payload_targets(self, peer: P_contra, message: Message, size_bytes: int) -> Sequence[memoryview]:
        """Where a message's payload goes; only asked of callers that were let in."""
        ...

    def gone(self, peer: P_contra, reason: str) -> None:
        """A connection that had been let in has ended."""
        ...


class Hub(Generic[P]):
    """Accepts, reads, sends, drops.

    Args:
        name: of the host, for the log.
        token: what callers must show.
        listener: a listening socket; owned by the hub.
        accepts: the union of messages that callers may send.
        make_peer: makes a connection's record, usually a subclass of `Peer`.
        host: is told what happens.

    Attributes:
        peers: the connections that there are.
    """

    def __init__(
        self,
        name: str,
        token: str,
        listener: socket.socket,
        accepts: object,
        make_peer: Callable[[Stream[Message]], P],
        host: Host[P],
    ) -> None:
        self.peers: set[P] = set()
        self._name = name
        self._token = token.encode()
        self._listener = listener
        self._accepts = accepts
        self._make_peer = make_peer
        self._host = host
        self._broken: list[
            tuple[P, str]
        ] = []  # found while sending: dropped when the message at hand is done with
        self._ringed: dict[Stream[Any], P] = {}  # those that have a ring
        self._looked_s = 0.0  # at the sockets
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def watch(self, source: socket.socket | Stream[Any], heard: Callable[[], None]) -> None:
        """Have `poll` also look at this, and call `heard` when there is something to read."""
        self._selector.register(source, selectors.EVENT_READ, heard)

    def poll(self, timeout_s: float | None = None) -> None:
        """Wait until something happens, for `timeout_s` at most, and handle it."""
        if self._ringed:
            if self._hear_rings():
                if time.monotonic() - self._looked_s < SOCKETS_INTERVAL_S:
                    return
                timeout_s = 0.0
            elif not fall_asleep(self._ringed):
                return
            else:
                timeout_s = min(LONGEST_SLEEP_S, math.inf if timeout_s is None else timeout_s)
        silent = [peer for peer in self.peers if not peer.role]
        if silent:
            timeout_s = min(GREETING_TIMEOUT_S, math.inf if timeout_s is None else timeout_s)
        ready = self._selector.select(timeout_s)
        self._looked_s = time.monotonic()
        wake_up(self._ringed)
        for key, events in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, Peer):
                if key.data in self.peers:  # else it was dropped a moment ago
                    self._serve(key.data, events)
            else:
                key.data()
            self._drop_broken()
        for peer in silent:
            if not peer.role and time.monotonic() - peer.since_s > GREETING_TIMEOUT_S:
                self._drop(peer, "it has not shown the run's token in time")

    def watch_ring(self, peer: P) -> None:
        """Have `poll` also look into a peer's ring."""
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
        """Send a message, see `Stream.send`; never blocks, never raises."""
        try:
            peer.stream.send(message, payload, descriptors, lent=lent)
            self._watch_peer(peer)
        except PeerLostError as error:
            self._broken.append((peer, str(error)))

    def close(self) -> None:
        """Close every connection and the listening socket."""
        for peer in self.peers:
            peer.stream.close()
        self._listener.close()
        self._selector.close()

    def _hear_rings(self) -> bool:
        """Handle what the rings have. False if that was nothing."""
        ready = spin(self._ringed)
        for stream in ready:
            if (peer := self._ringed.get(stream)) is not None:  # else it was dropped a moment ago
                self._serve(peer, IN_RING)
            self._drop_broken()
        return bool(ready)

    def _drop_broken(self) -> None:
        while self._broken:
            self._drop(*self._broken.pop())

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # out of descriptors, or the caller has gone already
            log.warning("%s could not accept a connection: %s", self._name, error)
            return
        stream: Stream[Message] = Stream(
            sock, self._accepts, trusted=False, takes_descriptor=sock.family == socket.AF_UNIX
        )
        peer = self._make_peer(stream)
        stream.sink = lambda message, size_bytes: (
            self._host.payload_targets(peer, message, size_bytes) if peer.role else []
        )
        self.peers.add(peer)
        self._selector.register(stream, selectors.EVENT_READ, peer)

    def _serve(self, peer: P, events: int) -> None:
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
            self._drop(peer, str(error))
        except ProtocolError as error:
            log.warning("%s refused %s: %s", self._name, peer, error)
            self._drop(peer, str(error))

    def _greet(self, peer: P, message: Message) -> None:
        if not isinstance(message, Hello) or not hmac.compare_digest(message.token.encode(), self._token):
            raise ProtocolError("it did not show the run's token")
        self._host.greeted(peer, message)
        peer.stream.trusted, peer.stream.takes_descriptor = True, False

    def _drop(self, peer: P, reason: str) -> None:
        if peer not in self.peers:
            return
        log.info("%s closes the connection of %s: %s", self._name, peer, reason)
        self.peers.remove(peer)
        self._ringed.pop(peer.stream, None)
        self._selector.unregister(peer.stream)
        peer.stream.close()
        if peer.role:
            self._host.gone(peer, reason)

    def _watch_peer(self, peer: P) -> None:
        """Have the selector look for what the peer's stream needs now."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.stream.backlog else 0)
        if self._selector.get_key(peer.stream).events != wanted:
            self._selector.modify(peer.stream, wanted, peer)

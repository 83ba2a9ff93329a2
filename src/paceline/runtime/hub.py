"""One listening socket and everybody who calls: what the server's and the coordinator's loops have in common.

A caller is let in when its first message shows the run's token. Until then it is a *stranger* (see `strangers`): only
a small greeting is read from it, at most one descriptor is taken, nothing is sent, and it is dropped if it stays
silent, or if it has been silent for a moment and others want its place.

A caller that breaks the rules is logged and its connection closed; the host goes on. Rules are checked where they are
known, before anything changes, and broken with a `ProtocolError`. Should a message bring about any other exception,
that costs its sender its connection too, and the traceback is logged. What is not the sender's fault ends the host,
with its own message: a broken invariant of our own (`InternalError`), and what the machine lacks (`OSError`,
`MemoryError`).

Sending never blocks and never calls back: a connection that turns out to be broken while something is sent is dropped
when the message at hand is done with, and so is one whose peer does not read what it is sent.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import selectors
import socket
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ..core.messages import Hello, Message
from ..errors import DeadlineError, InternalError, PeerLostError, ProtocolError
from ..wire.forks import close_in_forks
from ..wire.stream import Stream
from .spin import fall_asleep, spin, wake_up
from .strangers import Door, Strangers

__all__ = ["Host", "Hub", "Peer"]

log = logging.getLogger("paceline.hub")

LAST_WORDS_S = 1.0  # without a word of a process that has ended, where its connection does not end with it
ACCEPTED_AT_ONCE = 8  # callers, before the others are heard again
MOST_UNSENT = 1 << 14  # parts of messages that wait for one peer; one that reads leaves a few per shard
LONGEST_REASON = 1000  # characters of what a peer sent may be in it
OUR_FAULT = (
    InternalError,
    OSError,
    MemoryError,
)  # not the sender's, although its message brought it to light
SOCKETS_INTERVAL_S = 1e-3  # while rings are busy
LONGEST_SLEEP_S = 0.1  # with rings: what a wake-up would cost at most, should one ever be lost
IN_RING = 1 << 8  # beside the events of a selector


class Peer:
    """One connection.

    Attributes:
        stream: its stream.
        role: "worker", "server" or "reader", once it has been let in; "" until then.
        index: the worker's or server's number.
        heard_s: when something came from it last, on the monotonic clock.
        adopted: True if this host has made the connection itself.
    """

    def __init__(self, stream: Stream[Message]) -> None:
        self.stream = stream
        self.role = ""
        self.index = -1
        self.adopted = False
        self.heard_s = time.monotonic()
        self.ended_s = math.inf  # when its process was found to have ended, though its connection had not

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
        """A connection that had been let in, or adopted, has ended."""
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
        self._door = Door(listener)
        self._strangers: Strangers[P] = Strangers(name)
        self._accepts = accepts
        self._make_peer = make_peer
        self._host = host
        # Found while sending, with the reason: dropped when the message at hand is done with.
        self._broken: list[tuple[P, PeerLostError | ProtocolError]] = []
        self._ringed: dict[Stream[Any], P] = {}  # those that have a ring
        self._ending: set[P] = set()  # whose processes have ended, while their connections have not
        self._looked_s = 0.0  # at the sockets
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ, self._accept)
        self._accepting = True
        close_in_forks(self)

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
        timeout_s = self._strangers.left_s(timeout_s)
        if self._ending:
            timeout_s = min(LAST_WORDS_S, math.inf if timeout_s is None else timeout_s)
        ready = self._selector.select(timeout_s)
        self._looked_s = time.monotonic()
        wake_up(self._ringed)
        for key, events in ready:
            if isinstance(key.data, Peer):
                if key.data in self.peers:  # else it was dropped a moment ago
                    self._serve(key.data, events)
            else:
                key.data()
            self._drop_broken()
        for peer in self._strangers.late():
            self.drop(peer, "it has not shown the run's token in time")
        if not self._accepting and self._strangers.room:
            self._selector.register(self._door, selectors.EVENT_READ, self._accept)
            self._accepting = True
        for peer in list(self._ending):
            if time.monotonic() - max(peer.ended_s, peer.heard_s) > LAST_WORDS_S:
                self.drop(peer, "its process has ended")

    def adopt(self, peer: P) -> None:
        """Have `poll` also serve a connection that this host has made itself, to somebody it trusts.

        What goes wrong with a message of such a peer goes wrong here, and is raised by `poll`.
        """
        peer.adopted = True
        self.peers.add(peer)
        self._selector.register(peer.stream, selectors.EVENT_READ, peer)

    def drain(self, peer: P, timeout_s: float) -> None:
        """Send what is queued for a peer; give up when it takes longer, or the connection ends."""
        if peer in self.peers:
            with contextlib.suppress(PeerLostError, DeadlineError):
                peer.stream.drain(timeout_s)

    def expect_end(self, peer: P) -> None:
        """Hear what a peer whose process has ended has still sent, then drop it.

        Its connection ends by itself, unless a child that it has forked holds it open.
        """
        if peer in self.peers and peer not in self._ending:
            peer.ended_s = time.monotonic()
            self._ending.add(peer)

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
            if peer.stream.unsent > MOST_UNSENT:
                raise ProtocolError("it does not read what it is sent")
            self._watch_peer(peer)
        except PeerLostError as error:
            self._broken.append((peer, error))
        except ProtocolError as error:
            self._refuse(peer, error)
            self._broken.append((peer, error))

    def close_in_fork(self) -> None:
        """See `close_in_forks`."""
        self._door.close()
        self._selector.close()

    def close(self) -> None:
        """Close every connection and the listening socket."""
        for peer in self.peers:
            peer.stream.close()
        self._strangers.close()
        self._door.close()
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
            peer, error = self._broken.pop()
            if peer in self.peers and isinstance(error, PeerLostError):
                self._serve(peer, selectors.EVENT_READ)  # it may have said goodbye before it left
            self.drop(peer, str(error))

    def _accept(self) -> None:
        """Let some of those in who have called, as far as there are places, and hear what they say."""
        for _ in range(ACCEPTED_AT_ONCE):
            if not self._strangers.room:
                break
            try:
                sock = self._door.accept()
                if sock is None:
                    return
                if (silent := self._strangers.to_make_room()) is not None:
                    self.drop(silent, "others want its place")
                peer = self._welcome(sock)
            except OSError as error:  # out of descriptors, or the caller has gone already
                self._strangers.note(f"{self._name} could not accept a connection: {error}")
                if self._door.stuck:
                    self._strangers.rest()
                continue
            self._serve(peer, selectors.EVENT_READ)  # most often its greeting is here, too
            self._drop_broken()
        if not self._strangers.room:
            self._selector.unregister(self._door)
            self._accepting = False

    def _welcome(self, sock: socket.socket) -> P:
        """Watch a caller. Raises `OSError` if it is gone already."""
        try:
            stream: Stream[Message] = Stream(
                sock, self._accepts, trusted=False, takes_descriptor=sock.family == socket.AF_UNIX
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
        self._strangers.add(peer)
        return peer

    def _serve(self, peer: P, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                peer.stream.flush()
                self._watch_peer(peer)
            if events & (selectors.EVENT_READ | IN_RING):
                peer.heard_s = time.monotonic()
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
                log.exception("%s tripped over what %s sent", self._name, peer)
            self.drop(peer, str(error))

    def _greet(self, peer: P, message: Message) -> None:
        if not isinstance(message, Hello) or not hmac.compare_digest(message.token.encode(), self._token):
            raise ProtocolError("it did not show the run's token")
        self._host.greeted(peer, message)
        self._strangers.discard(peer)
        # What a reader asks is small, and there may be many of them.
        peer.stream.trusted, peer.stream.takes_descriptor = peer.role != "reader", False

    def _refuse(self, peer: P, error: ProtocolError) -> None:
        text = f"{self._name} refused {peer}: {str(error)[:LONGEST_REASON]}"
        if peer.role in ("worker", "server"):  # each can be expelled but once
            log.warning("%s", text)
        else:
            self._strangers.note(text)

    def drop(self, peer: P, reason: str) -> None:
        """Close a connection, and tell the host."""
        if peer not in self.peers:
            return
        level = logging.INFO if peer.role else logging.DEBUG
        log.log(level, "%s closes the connection of %s: %s", self._name, peer, reason)
        self.peers.remove(peer)
        self._ending.discard(peer)
        self._strangers.discard(peer)
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
            log.exception("%s tripped over the end of %s", self._name, peer)

    def _watch_peer(self, peer: P) -> None:
        """Have the selector look for what the peer's stream needs now."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.stream.backlog else 0)
        if self._selector.get_key(peer.stream).events != wanted:
            self._selector.modify(peer.stream, wanted, peer)

"""The server's host loop: connections on one side, what the server holds on the other.

One thread, one selector. It reads messages, has `Holdings` turn each into an event for a shard, and sends the
answers. A peer that breaks the rules is logged and its connection closed; the run goes on. The server waits for
nobody: sending is queued, and a worker whose connection ends without a word is lost.
"""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import time
from collections.abc import Sequence

from ..errors import PeerLostError, ProtocolError
from ..shard import SliceTensors
from ..sync.actions import AnswerPull
from ..wire.addresses import connect, listen_tcp, listen_unix
from ..wire.memory import Inbox
from ..wire.messages import (
    Answer,
    Commit,
    CreateShards,
    FetchSnapshot,
    FetchState,
    Finished,
    FromCoordinatorToServer,
    FromPeerToServer,
    Hello,
    InitialState,
    InitialWeights,
    Message,
    Ready,
    Shutdown,
    Snapshot,
    State,
    WorkerGone,
)
from ..wire.stream import Stream
from .holdings import Holdings, byte_views
from .job import Place

__all__ = ["Server", "serve"]

log = logging.getLogger("paceline.server")

GREETING_TIMEOUT_S = 10.0


class Peer:
    """One connection."""

    def __init__(self, stream: Stream[Message]) -> None:
        self.stream = stream
        self.since_s = time.monotonic()
        self.role = ""  # until it has greeted
        self.worker = -1
        self.inboxes: dict[int, tuple[Inbox, SliceTensors]] = {}  # shard -> where this worker's pushes lie
        self.payload: list[bytearray] = []  # of the message being received, besides what goes to an inbox

    def __str__(self) -> str:
        if not self.role:
            return "a connection that has not shown the job's token"
        return f"worker {self.worker}" if self.role == "worker" else f"a {self.role}"


class Server:
    """One server process.

    Args:
        place: which one, of which run.
        listener: a listening socket; owned by the server.
        coordinator: a connection to the coordinator, greeted; owned by the server.
    """

    def __init__(
        self, place: Place, listener: socket.socket, coordinator: Stream[FromCoordinatorToServer]
    ) -> None:
        self._index = place.index
        self._job = place.job
        self._listener = listener
        self._coordinator = coordinator
        self._peers: set[Peer] = set()
        self._workers: dict[int, Peer] = {}  # the connection of each worker that has greeted and not left
        self._holdings: Holdings | None = None  # until training begins
        self._broken: list[
            tuple[Peer, str]
        ] = []  # found out while sending: dropped when the event is done with
        self._running = True
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(coordinator, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until told to stop, or until the coordinator is gone."""
        try:
            while self._running:
                for key, events in self._selector.select():
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._coordinator:
                        self._hear_coordinator()
                    elif key.data in self._peers:
                        self._serve(key.data, events)
                    while self._broken:
                        self._drop(*self._broken.pop())
        finally:
            if self._holdings is not None:
                self._holdings.close()
            for peer in self._peers:
                peer.stream.close()
            self._coordinator.close()
            self._listener.close()
            self._selector.close()

    def _hear_coordinator(self) -> None:
        try:
            for message in self._coordinator.receive():
                match message:
                    case CreateShards():
                        self._holdings = Holdings(message, self._job)
                        self._coordinator.send(Ready())
                    case WorkerGone() if message.worker not in self._workers:
                        self._leave(message.worker, finished=False)
                    case Shutdown():
                        self._running = False
        except PeerLostError:
            self._running = False  # the run is over, whether it said so or not

    # -- connections --------------------------------------------------------------------------------------

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        stream: Stream[Message] = Stream(sock, FromPeerToServer, trusted=False)
        peer = Peer(stream)
        stream.sink = lambda message, size_bytes: self._payload_targets(peer, message, size_bytes)
        self._peers.add(peer)
        self._selector.register(stream, selectors.EVENT_READ, peer)
        silent = [p for p in self._peers if not p.role and peer.since_s - p.since_s > GREETING_TIMEOUT_S]
        for other in silent:
            self._drop(other, "it has not shown the job's token in time")

    def _serve(self, peer: Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                peer.stream.flush()
                self._watch(peer)
            if events & selectors.EVENT_READ:
                for message in peer.stream.receive():
                    if peer.role:
                        self._handle(peer, message)
                    else:
                        self._greet(peer, message)
        except PeerLostError as error:
            self._drop(peer, str(error))
        except ProtocolError as error:
            log.warning("server %d refused %s: %s", self._index, peer, error)
            self._drop(peer, str(error))

    def _drop(self, peer: Peer, reason: str) -> None:
        """Close a connection; a worker that it belonged to is lost."""
        if peer not in self._peers:
            return
        log.info("server %d closes the connection of %s: %s", self._index, peer, reason)
        self._peers.remove(peer)
        self._selector.unregister(peer.stream)
        peer.stream.close()
        if self._workers.get(peer.worker) is peer:
            self._leave(peer.worker, finished=False)

    def _send(self, peer: Peer, message: Message, payload: Sequence[memoryview] = ()) -> None:
        try:
            peer.stream.send(message, payload)
            self._watch(peer)
        except PeerLostError as error:
            self._broken.append((peer, str(error)))

    def _watch(self, peer: Peer) -> None:
        """Have the selector look for what the peer's stream needs now."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.stream.backlog else 0)
        if self._selector.get_key(peer.stream).events != wanted:
            self._selector.modify(peer.stream, wanted, peer)

    # -- messages -----------------------------------------------------------------------------------------

    def _greet(self, peer: Peer, message: Message) -> None:
        token = self._job.token
        if not isinstance(message, Hello) or not hmac.compare_digest(message.token.encode(), token.encode()):
            raise ProtocolError("it did not show the job's token")
        if message.role == "worker":
            holdings = self._require_holdings()
            if message.index not in holdings.expected or message.index in self._workers:
                raise ProtocolError(f"worker {message.index} is not expected, or here already")
            region = None
            if message.memory_bytes:
                if not peer.stream.descriptors:
                    raise ProtocolError("it announced shared memory and passed none")
                region = holdings.attach(peer.stream.descriptors.pop())
            peer.inboxes = holdings.inboxes(region)
            peer.worker = message.index
            self._workers[message.index] = peer
        peer.role = message.role
        peer.stream.trusted = True
        if message.role == "worker":
            for index in holdings.shards:
                self._answer(index, AnswerPull(peer.worker, -1))

    def _handle(self, peer: Peer, message: Message) -> None:
        holdings = self._require_holdings()
        payload = peer.payload
        match message:
            case Commit() if peer.role == "worker" and message.shard in peer.inboxes:
                _, gradient = peer.inboxes[message.shard]
                holdings.commit(peer.worker, message, gradient, payload, self._answer)
            case FetchSnapshot() if not peer.stream.backlog:  # one at a time, so that the queue stays bounded
                parts = holdings.snapshot(message.shard)
                self._send(peer, Snapshot(message.shard, holdings.shard(message.shard).version), parts)
            case FetchState() if not peer.stream.backlog:
                blob = holdings.optimizer_state(message.shard)
                self._send(peer, State(message.shard), [memoryview(blob)])
            case InitialState() if peer.worker == holdings.publisher and payload:
                holdings.start_state(message, bytes(payload[0]))
            case InitialWeights() if peer.worker == holdings.publisher:
                holdings.start(message, payload)
                for worker in list(self._workers):
                    self._answer(message.shard, AnswerPull(worker, -1))
            case Finished() if peer.role == "worker":
                self._leave(peer.worker, finished=True)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not expected from {peer} now")
        peer.payload = []

    def _payload_targets(self, peer: Peer, message: Message, size_bytes: int) -> list[memoryview]:
        if not peer.role:
            raise ProtocolError("it sent a payload before it had shown the job's token")
        peer.payload = [
            bytearray(size) for size in self._require_holdings().payload_sizes(message, size_bytes)
        ]
        targets = [memoryview(part) for part in peer.payload]
        if isinstance(message, Commit) and not message.empty and message.shard in peer.inboxes:
            inbox, _ = peer.inboxes[message.shard]
            return [*inbox.sinks(), *targets]
        return targets

    def _answer(self, shard: int, pull: AnswerPull) -> None:
        """Send a worker a shard's weights as they are now."""
        assert self._holdings is not None
        peer = self._workers.get(pull.worker)
        if peer is None:
            return  # expected, but it has not called yet or its connection has ended
        inbox, _ = peer.inboxes[shard]
        held = self._holdings.shards[shard]
        payload = inbox.deliver(byte_views(held.weights))
        self._send(peer, Answer(shard, pull.iteration, held.version), payload)

    def _leave(self, worker: int, *, finished: bool) -> None:
        if not finished:
            self._workers.pop(worker, None)
        if self._holdings is not None:
            self._holdings.leave(worker, finished=finished, answer=self._answer)

    def _require_holdings(self) -> Holdings:
        if self._holdings is None:
            raise ProtocolError("training has not begun")
        return self._holdings


def serve(place: Place) -> None:
    """Be a server: listen, tell the coordinator where, and run."""
    job = place.job
    listener, address = listen_unix() if job.transport == "shm" else listen_tcp()
    coordinator: Stream[FromCoordinatorToServer] = Stream(connect(place.coordinator), FromCoordinatorToServer)
    coordinator.send(Hello(token=job.token, role="server", index=place.index, address=address))
    Server(place, listener, coordinator).run()

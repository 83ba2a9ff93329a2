"""The server's host loop: connections on one side, what the server holds on the other.

One thread. It reads messages, has `Holdings` turn each into an event for a shard, and sends the answers. It waits
for nobody: a worker whose connection ends without a word is lost.
"""

from __future__ import annotations

import logging
import math
import socket
import traceback
from collections.abc import Sequence
from typing import Any

from ..core.layout import Layout
from ..core.messages import (
    Answer,
    Bell,
    Commit,
    Committed,
    CreateShards,
    Failed,
    Faulted,
    FetchSnapshot,
    FetchState,
    FetchWaits,
    Finished,
    FromCoordinatorToServer,
    FromPeerToServer,
    Hello,
    InitialState,
    InitialWeights,
    Message,
    Pull,
    PullAgain,
    Ready,
    Shutdown,
    Snapshot,
    Stage,
    State,
    Waits,
    Warned,
    WorkerGone,
)
from ..errors import ProtocolError, first_line
from ..shard.store import ForHost, Vectors
from ..sync.actions import AnswerPull, SetTimer
from ..wire.addresses import connect, listen_tcp, listen_unix
from ..wire.memory import MASTER, Inbox, Region
from ..wire.ring import Ring
from ..wire.stream import Stream
from .holdings import Holdings
from .hub import Hub, Peer
from .job import Assignment
from .timers import Timers

__all__ = ["Server", "serve"]

log = logging.getLogger("paceline.server")

GOODBYE_TIMEOUT_S = 5.0
READERS_PER_SHARD = 32  # connections; each may have a snapshot of the shard under way


class Caller(Peer):
    """A connection to a server."""

    def __init__(self, stream: Stream[Message]) -> None:
        super().__init__(stream)
        self.inboxes: dict[int, tuple[Inbox, Vectors]] = {}  # shard -> where this worker's pushes lie
        self.follows = False  # it can read the weights in place
        self.payload: list[bytearray] = []  # of the message being received, besides what goes to an inbox

    @classmethod
    def coordinator(cls, stream: Stream[Any]) -> Caller:
        """The connection that a server has made to its coordinator."""
        peer = cls(stream)
        peer.role = "coordinator"
        return peer

    def __str__(self) -> str:
        return "the coordinator" if self.role == "coordinator" else super().__str__()


class Server:
    """One server process.

    Args:
        place: which one, of which run.
        listener: a listening socket; owned by the server.
        coordinator: a connection to the coordinator, greeted; owned by the server.
    """

    def __init__(
        self, place: Assignment, listener: socket.socket, coordinator: Stream[FromCoordinatorToServer]
    ) -> None:
        self._job = place.job
        self._coordinator = Caller.coordinator(coordinator)
        self._workers: dict[int, Caller] = {}  # those that have called and whose connection has not ended
        self._holdings: Holdings | None = None  # until training begins
        self._timers: Timers[tuple[int, SetTimer]] = Timers()  # (shard, what it has set)
        self._running = True
        self._hub: Hub[Caller] = Hub(
            f"server {place.index}", place.job.token, listener, FromPeerToServer, Caller, self
        )
        self._hub.adopt(self._coordinator)

    @classmethod
    def connect(cls, place: Assignment) -> Server:
        """A server that listens, and whose coordinator knows where. Raises `PeerLostError`."""
        job = place.job
        listener, address = listen_tcp(place.host) if job.transport == "tcp" else listen_unix()
        coordinator: Stream[FromCoordinatorToServer] = Stream(
            connect(place.coordinator), FromCoordinatorToServer, takes_descriptor=job.transport == "shm"
        )
        coordinator.send(Hello(token=job.token, role="server", index=place.index, address=address))
        return cls(place, listener, coordinator)

    def run(self) -> None:
        """Serve until told to stop, or until the coordinator is gone."""
        try:
            while self._running:
                self._hub.poll(self._timers.left_s(self._job.now_s()))
                for shard, timer in self._timers.take_due(self._job.now_s()):
                    self._require_holdings().fire(timer.worker, shard, timer.iteration, self._perform)
        except BaseException as error:
            # Said before any connection ends: what the workers will report then is only its consequence.
            failed = Failed(first_line(error), "".join(traceback.format_exception(error)))
            self._hub.send(self._coordinator, failed)
            raise
        finally:
            if self._holdings is not None:
                self._holdings.close()
            self._hub.drain(self._coordinator, GOODBYE_TIMEOUT_S)
            self._hub.close()

    def _hear_coordinator(self, message: Message) -> None:
        match message:
            case CreateShards():
                master = self._attach_master(message.model.layout)
                self._holdings = Holdings(message, self._job, master, self._keep, self._warn)
                self._hub.send(self._coordinator, Ready())
            case WorkerGone() if message.worker in self._workers:
                self._hub.expect_end(self._workers[message.worker])
            case WorkerGone():
                self._leave(message.worker, finished=False)
            case FetchSnapshot():
                self._send_snapshot(self._coordinator, message.shard)
            case FetchWaits():
                waits = self._holdings.waits() if self._holdings is not None else ()
                self._hub.send(self._coordinator, Waits(waits, bool(self._timers)))
            case Shutdown():
                self._running = False

    def _warn(self, words: str) -> None:
        """Tell the user what has gone wrong without ending the run."""
        log.warning("%s", words)
        self._hub.send(self._coordinator, Warned(words))

    # -- what the hub asks --------------------------------------------------------------------------------

    def greeted(self, peer: Caller, hello: Hello) -> None:
        if hello.role != "worker":
            most = READERS_PER_SHARD * math.ceil(self._job.shards / self._job.servers)
            if sum(other.role not in ("", "worker") for other in self._hub.peers) >= most:
                raise ProtocolError(f"there are {most} readers already")
            peer.role, peer.index = hello.role, hello.index
            return
        holdings = self._require_holdings()
        if hello.index not in holdings.expected or hello.index in self._workers:
            raise ProtocolError(f"worker {hello.index} is not expected, or here already")
        region = None
        if hello.memory_bytes:
            if not peer.stream.descriptors:
                raise ProtocolError("it announced shared memory and passed none")
            region = holdings.attach(peer.stream.descriptors.pop(), hello.channels)
        peer.role, peer.index = hello.role, hello.index
        peer.inboxes = holdings.inboxes(region)
        peer.follows = hello.follows
        self._workers[peer.index] = peer
        if region is not None and 0 <= hello.channel < hello.channels:
            incoming, outgoing = map(Ring, region.channels[hello.channel])
            peer.stream.use_rings(outgoing, incoming)
            self._hub.watch_ring(peer)
        for index in holdings.shards:
            self._perform(index, AnswerPull(peer.index, -1))

    def received(self, peer: Caller, message: Message) -> None:
        if peer is self._coordinator:
            self._hear_coordinator(message)
            return
        holdings = self._require_holdings()
        publishes = self._publishes(peer)
        match message:
            case Commit() | Pull() | PullAgain() if peer.stream.backlog and peer.stream.owes(message.shard):
                # Else what is queued for it would grow without limit.
                raise ProtocolError(
                    f"{type(message).__name__} came before shard {message.shard}'s last answer was read"
                )
            case Stage() if message.shard in peer.inboxes:
                peer.inboxes[message.shard][0].take(message.pieces)
            case Commit() if message.shard in peer.inboxes:
                inbox, gradient = peer.inboxes[message.shard]
                inbox.take(message.pieces)
                inbox.close(empty=message.empty)
                holdings.commit(peer.index, message, gradient, peer.payload, self._perform)
                if not message.pulls:
                    self._hub.send(peer, Committed(message.shard, message.iteration), lent=message.shard)
            case Pull() if message.shard in peer.inboxes:
                holdings.pull(peer.index, message.shard, message.iteration, self._perform)
            case PullAgain() if message.shard in peer.inboxes:
                holdings.pull_again(peer.index, message.shard, message.iteration, self._perform)
            case FetchSnapshot() if not peer.stream.backlog:  # one at a time, so that the queue stays bounded
                self._send_snapshot(peer, message.shard)
            case FetchState() if not peer.stream.backlog:
                blob = holdings.optimizer_state(message.shard)
                self._hub.send(peer, State(message.shard), [memoryview(blob)])
            case InitialState() if publishes:
                holdings.start_state(message, b"".join(peer.payload))
            case InitialWeights() if publishes:
                holdings.start(message, peer.payload)
                for worker in list(self._workers):
                    self._perform(message.shard, AnswerPull(worker, -1))
            case Finished() if peer.role == "worker":
                self._leave(peer.index, finished=True)
            case Bell():
                pass
            case _:
                raise ProtocolError(f"{type(message).__name__} is not expected from {peer} now")
        peer.payload = []

    def payload_targets(self, peer: Caller, message: Message, size_bytes: int) -> Sequence[memoryview]:
        if self._holdings is None or peer.role != "worker":
            return []
        if isinstance(message, InitialState | InitialWeights) and not self._publishes(peer):
            return []
        peer.payload = [bytearray(size) for size in self._holdings.payload_sizes(message, size_bytes)]
        targets = [memoryview(part) for part in peer.payload]
        if isinstance(message, Stage | Commit) and message.pieces and message.shard in peer.inboxes:
            inbox, _ = peer.inboxes[message.shard]
            return [*inbox.places(message.pieces), *targets]
        return targets

    def gone(self, peer: Caller, reason: str) -> None:
        if peer is self._coordinator:
            self._running = False  # the run is over, whether it said so or not
        elif self._workers.get(peer.index) is peer:
            del self._workers[peer.index]
            self._leave(peer.index, finished=False)

    def _send_snapshot(self, peer: Caller, shard: int) -> None:
        holdings = self._require_holdings()
        parts = holdings.snapshot(shard)
        self._hub.send(peer, Snapshot(shard, holdings.shard(shard).version), parts)

    # -- workers ------------------------------------------------------------------------------------------

    def _perform(self, shard: int, action: ForHost) -> None:
        """Do what a shard asks of its host."""
        match action:
            case AnswerPull():
                self._answer(shard, action)
            case SetTimer():
                self._timers.set(action.due_s, (shard, action))
            case _:
                faulted = Faulted(shard, action.reason, action.traceback, action.sync)
                self._hub.send(self._coordinator, faulted)

    def _answer(self, shard: int, pull: AnswerPull) -> None:
        """Let a worker have a shard's weights as they are now."""
        holdings = self._require_holdings()
        peer = self._workers.get(pull.worker)
        if peer is None:
            return  # expected, but it has not called yet or its connection has ended
        inbox, _ = peer.inboxes[shard]
        in_place = peer.follows and holdings.in_place(shard)
        payload: Sequence[memoryview] = ()
        if not in_place:
            weights = holdings.weights[shard]
            if inbox.weights is None:
                payload = list(weights.values())
            else:
                for dtype, place in inbox.weights.items():
                    place[:] = weights[dtype]
        answer = Answer(shard, pull.iteration, holdings.shards[shard].version, pull.v_train, in_place)
        self._hub.send(peer, answer, payload, lent=shard)

    def _keep(self, shard: int) -> None:
        """A shard's weights are about to change: what is still on its way of them must not."""
        for peer in self._workers.values():
            if peer.stream.backlog:
                peer.stream.keep(shard)

    def _attach_master(self, layout: Layout) -> Region | None:
        if self._job.transport != "shm":
            return None
        if not self._coordinator.stream.descriptors:
            raise ProtocolError("the coordinator did not pass the weights' memory")
        return Region.attach(layout, self._coordinator.stream.descriptors.pop(), MASTER)

    def _leave(self, worker: int, *, finished: bool) -> None:
        if self._holdings is not None:
            self._holdings.leave(worker, finished=finished, perform=self._perform)

    def _publishes(self, peer: Caller) -> bool:
        publisher = self._require_holdings().publisher
        return peer.role == "worker" and peer.index == publisher

    def _require_holdings(self) -> Holdings:
        if self._holdings is None:
            raise ProtocolError("training has not begun")
        return self._holdings


def serve(place: Assignment) -> None:
    """Be a server: listen, tell the coordinator where, and run."""
    Server.connect(place).run()

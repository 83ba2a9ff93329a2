"""The event loop of a server: it receives messages, passes them to the core and performs the core's requests.

The loop runs on one thread. The core, `paceline.core.server`, returns requests for each message. The payload of the
message is stored in `ServerMemory`, and then the requests are performed in order. The loop never blocks on a single
peer. If the connection to a worker ends before the worker has finished, the worker is treated as lost.
"""

from __future__ import annotations

import logging
import math
import socket
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import IO, Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import msgspec
import torch
from msgspec.structs import replace

from ..checkpoints.reading import Checkpoint
from ..core import server as core
from ..core.layout import Layout, ModelSpec, ShardSlice, WireFormat, of_set
from ..core.messages import (
    Answer,
    BaseRequested,
    Bell,
    Commit,
    ConnectionTraffic,
    CreateShards,
    CutCopied,
    CutPiece,
    ExtendShards,
    Failed,
    FetchBuffers,
    FetchCut,
    FetchFrozen,
    FetchInitialBuffers,
    FetchOptimizerState,
    FetchSnapshot,
    FetchStates,
    FetchWaits,
    FrozenTensors,
    Hello,
    InitialBuffers,
    InitialState,
    InitialWeights,
    JoinProposed,
    KeepStates,
    KeptStates,
    MemoryAttached,
    Message,
    ModelExtended,
    OptimizerState,
    PooledBuffers,
    PullRepeated,
    PullRequested,
    ReserveCopies,
    Shutdown,
    Snapshot,
    Stage,
    StepsTimed,
    StepTime,
    TracePart,
    Warned,
    WorkerLost,
    WriteCut,
    first_phase,
)
from ..core.requests import (
    COORDINATOR,
    Apply,
    Host,
    LeaveOut,
    Peer,
    Request,
    TakeCut,
    Timer,
    worker_peer,
)
from ..errors import ConfigurationError, PacelineError, ProtocolError, UserCodeError, first_line
from ..files import PatientWriter, Unfinished
from ..shard.foreign import class_of
from ..shard.store import Push
from ..shard.vectors import Vectors, decode_states
from ..trace.keyframes import keyframe_of
from ..trace.recording import Header, Recorder
from ..wire.memory import MASTER, ConnectionSource, PassedSockets, Region
from ..wire.preface import Traffic, traffic_of
from ..wire.ring import Ring
from ..wire.stream import Stream
from ..wire.transports import connect
from .checkpointing import ShardCopies
from .compute_devices import CPU
from .footprint import available_bytes, served_shortage, vectors_of
from .hub import OUR_FAULT, Caller, HostError, Hub, Timers
from .job import Assignment
from .server_memory import Inbox, ServerMemory
from .traces import TEND_S, TEND_TICKS, SegmentedFile, parts_of, segmenting, trace_path

log = logging.getLogger("paceline.server")

# Maximum number of connections from readers, per shard. Each connection may hold a copy of a snapshot that is being
# sent.
READERS_PER_SHARD = 32

Fetch = FetchSnapshot | FetchOptimizerState | FetchBuffers | FetchInitialBuffers | FetchFrozen | FetchStates
"""The messages that a server answers without its core: one at a time for each peer, so that the queue stays short."""


class ServerCaller(Caller):
    """A connection of a server, with the memory into which the peer's payloads are received.

    Attributes:
        inboxes: shard -> (memory for this worker's pushes, the gradient in this memory as tensors).
        payload: the parts of the payload of the current message that are not stored in an inbox.
        pulls: shard -> the parameter set that the worker has pulled last; None for all sets, as in the first pull.
        answers: shard -> the last answer with a base of the weights.
    """

    def __init__(self, stream: Stream[Message]) -> None:
        super().__init__(stream)
        self.inboxes: dict[int, tuple[Inbox, Vectors]] = {}
        self.payload: list[bytearray] = []
        self.pulls: dict[int, int | None] = {}
        self.answers: dict[int, Answer] = {}

    @classmethod
    def coordinator(cls, stream: Stream[Any]) -> ServerCaller:
        """Return the caller object for the connection that a server has opened to its coordinator."""
        peer = cls(stream)
        peer.role = "coordinator"
        return peer

    def __str__(self) -> str:
        return "the coordinator" if self.role == "coordinator" else super().__str__()


class ServerHost(Host):
    """One server process, which stores shards of the model, applies pushes to them and answers pulls.

    Args:
        place: the role of the process in its run.
        listener: a listening socket, or another source of connections. The server takes ownership.
        coordinator: a connection to the coordinator on which the greeting has been sent. The server takes ownership.
    """

    def __init__(self, place: Assignment, listener: ConnectionSource, coordinator: Stream[Message]) -> None:
        self._job = place.job
        self._machine = place.machine or msgspec.UNSET
        self._device = CPU.own_name if place.device is None else place.device.own_name
        self._coordinator = ServerCaller.coordinator(coordinator)
        self._workers: dict[int, ServerCaller] = {}  # connected workers
        self._carried: dict[int, Traffic] = {}  # worker -> traffic of its connection that ended last
        self._recorders: dict[int, tuple[SegmentedFile, Recorder]] = {}  # shard -> its trace
        self._tend_ticks = 0  # time at which the traces are tended next
        self._core = core.Server(
            place.job.seed,
            place.job.read_sync,
            self._recorder_of,
            translated=place.job.translated,
            wire=WireFormat() if place.job.carrier.shares_memory else place.job.wire,
        )
        self._memory: ServerMemory | None = None  # None until training begins
        self._steps = StepMeter()
        self._frozen: FrozenValues[ServerCaller] = FrozenValues()  # empty unless this server holds shard 0
        self._copies = ShardCopies()
        # True if the checkpoint with which the run begins lacks parameters of the model
        self._lacking = False
        self._timers: Timers[Timer] = Timers()
        self._running = True
        self._told_to_end = False  # True once `Shutdown` has arrived
        self._hub: Hub[ServerCaller] = Hub(
            f"server {place.index}",
            place.job.token,
            listener,
            "server",
            ServerCaller,
            self,
            place.job.contexts,
            place.index,
        )
        self._hub.adopt(self._coordinator)
        self._hub.watch(self._copies.bell, self._tell_reports)

    @classmethod
    def connect(cls, place: Assignment, passed: socket.socket | None = None) -> ServerHost:
        """Return a server that listens and has sent its address to the coordinator.

        Args:
            place: the role of the process in its run.
            passed: the socket over which the server receives its connections, if a listener passes them to it.

        Raises:
            PeerLostError: the coordinator cannot be reached.
        """
        job = place.job
        listener: ConnectionSource
        if passed is not None:
            listener, address = PassedSockets(passed), place.address
        else:
            listener, address = job.carrier.listen(place.host)
        try:
            coordinator: Stream[Message] = Stream(
                connect(place.coordinator, known=job.contexts),
                first_phase("coordinator", "server"),
                takes_descriptor=job.carrier.shares_memory,
            )
            coordinator.send(Hello(token=job.token, role="server", index=place.index, address=address))
        except PacelineError:
            listener.close()
            raise
        return cls(place, listener, coordinator)

    def run(self) -> None:
        """Handle messages until the coordinator sends `Shutdown` or the connection to the coordinator ends."""
        try:
            now_ticks = self._job.now_ticks()
            while self._running:
                left_s = self._timers.left_s(now_ticks)
                self._hub.poll(
                    TEND_S if left_s is None else min(left_s, TEND_S), spins=not self._core.awaits_factor
                )
                now_ticks = self._job.now_ticks()
                if now_ticks >= self._tend_ticks:
                    self._tend_traces(now_ticks)
                for timer in self._timers.take_due(now_ticks):
                    self.carry_out(self._core.fire(timer, self._job.now_ticks()))
            if self._told_to_end and self._machine is not msgspec.UNSET:
                self._send_traces()
        except BaseException as error:
            # Send the report before any connection is closed, so that the report arrives before the workers report the
            # loss of this server.
            self._hub.send(self._coordinator, _report_of(error))
            raise
        finally:
            for _, recorder in self._recorders.values():
                recorder.close()
            self._hub.drain(self._coordinator)
            self._hub.close()
            self._copies.close()

    # -- called by the hub --------------------------------------------------------------------------------

    def greeted(self, peer: ServerCaller, hello: Hello) -> None:
        if hello.role != "worker":
            most = READERS_PER_SHARD * math.ceil(self._job.shards / self._job.servers)
            if sum(other.role == "reader" for other in self._hub.peers) >= most:
                raise ProtocolError(f"there are already {most} readers")
            peer.role, peer.index = hello.role, hello.index
            return
        self._core.require_expected(hello.index, hello.extension, hello.incarnation)
        memory = self._require_memory()
        if hello.extension > self._core.extension:
            self._extend()
        region = None
        if hello.memory_bytes:
            if not peer.stream.descriptors:
                raise ProtocolError("it announced shared memory but did not send its file descriptor")
            region = memory.attach(peer.stream.descriptors.pop(), hello.channels)
        elif hello.place is not None:
            region = memory.find(hello.place)
        peer.role, peer.index = hello.role, hello.index
        if region is not None and hello.place is not None:
            self._hub.send(peer, MemoryAttached(memory.shards))
        peer.inboxes = memory.inboxes(region)
        self._frozen.gone(peer.index)
        self._workers[peer.index] = peer
        if peer.index in self._core.ending:  # this greeting is one of the last messages of a lost worker
            self._expect_end(peer.index)
        if region is not None and 0 <= hello.channel < hello.channels:
            incoming, outgoing = map(Ring, region.channels[hello.channel])
            peer.stream.use_rings(outgoing, incoming)
            self._hub.watch_ring(peer)
        in_place = hello.follows and memory.in_shared_memory
        connected = self._core.connected(
            peer.index,
            self._job.now_ticks(),
            hello.extension,
            hello.incarnation,
            reads_in_place=in_place,
        )
        self.carry_out(connected)
        self._pass_on_frozen()

    def received(self, peer: ServerCaller, message: Message) -> None:
        if peer is self._coordinator:
            self._handle_coordinator(message)
            return
        memory = self._require_memory()
        match message:
            case Commit() | PullRequested() | PullRepeated() if peer.stream.backlog and peer.stream.owes(
                message.shard
            ):
                # Accepting this message would let the queue of messages to this peer grow without limit.
                raise ProtocolError(
                    f"{type(message).__name__} arrived before the previous answer of shard {message.shard} was read"
                )
            case Stage() | Commit() if message.shard not in peer.inboxes:
                raise ProtocolError(f"shard {message.shard} is not at this server")
            case Commit():
                self._commit(peer, message, memory)
            case Stage():
                peer.inboxes[message.shard][0].take(message.pieces, message.codec(self._job.wire))
            case PullRepeated():
                peer.pulls[message.shard] = None
                self._pass_on(peer, message)
            case BaseRequested():
                self._repeat_base(peer, message.shard)
            case InitialState():
                self._core.require_beginning(message.shard, peer.index)
                memory.keep_state(message, b"".join(peer.payload))
            case InitialWeights():
                self._core.require_beginning(message.shard, peer.index)
                if self._lacking:
                    memory.load(message.shard, self._resumed_checkpoint(), peer.payload)
                else:
                    memory.begin(message.shard, peer.payload)
                self._pass_on(peer, message)
            case FrozenTensors():
                self._frozen.arrived(peer.index, message.digests, peer.payload)
                self._pass_on_frozen()
            case KeepStates() if peer.payload:
                self._core.shard(message.shard)
                memory.states = message.position, peer.payload[0]
            case Bell():
                pass
            case _ if isinstance(message, Fetch):
                self._fetch(peer, message, memory)
            case _:
                self._pass_on(peer, message)
        peer.payload = []

    def payload_targets(self, peer: ServerCaller, message: Message, size_bytes: int) -> Sequence[memoryview]:
        if self._memory is None:
            return []
        if isinstance(message, InitialState | InitialWeights):
            self._core.require_beginning(message.shard, peer.index)
        if isinstance(message, FrozenTensors):
            sizes = self._frozen.sizes(message.digests)
        else:
            sizes = self._memory.payload_sizes(message, size_bytes)
        peer.payload = [bytearray(size) for size in sizes]
        targets = [memoryview(part) for part in peer.payload]
        if isinstance(message, Stage | Commit) and message.pieces and message.shard in peer.inboxes:
            inbox, _ = peer.inboxes[message.shard]
            return [*inbox.places(message.pieces, message.codec(self._job.wire)), *targets]
        return targets

    def gone(self, peer: ServerCaller, reason: str) -> None:
        if peer is self._coordinator:
            self._running = False  # the run is over, although no `Shutdown` has arrived
            return
        self._frozen.forget(peer)
        if self._workers.get(peer.index) is peer:
            del self._workers[peer.index]
            if (traffic := traffic_of(peer.stream.sock)) is not None:
                self._carried[peer.index] = traffic
            self._frozen.gone(peer.index)
            self._pass_on_frozen()
            self.carry_out(self._core.disconnected(peer.index, self._job.now_ticks()))

    # -- messages -----------------------------------------------------------------------------------------

    def _fetch(self, peer: ServerCaller, message: Fetch, memory: ServerMemory) -> None:
        """Answer a request for a part of the state."""
        if peer.stream.backlog:
            raise ProtocolError(f"{type(message).__name__} arrived before the previous answer was read")
        self._core.shard(message.shard)
        match message:
            case FetchSnapshot():
                self._send_snapshot(peer, message.shard)
            case FetchOptimizerState():
                blob = memory.optimizer_state(message.shard)
                self._hub.send(peer, OptimizerState(message.shard), [memoryview(blob)])
            case FetchBuffers():
                self._hub.send(peer, PooledBuffers(0), memory.pooled_buffers())
            case FetchInitialBuffers():
                initial = memory.initial_buffers(unless=message.checksum)
                self._hub.send(peer, InitialBuffers(0, equal=initial is None), initial or ())
            case FetchFrozen():
                self._frozen.request(peer, message.digests, memory.frozen_sizes())
                self._pass_on_frozen()
            case FetchStates():
                kept, states = memory.states or (None, b"")
                # The bytes do not change: later states are kept in other memory.
                self._hub.send(peer, KeptStates(0, kept), [memoryview(states)], lent=KeptStates)

    def _handle_coordinator(self, message: Message) -> None:
        match message:
            case CreateShards(model, shards) | ExtendShards(model, shards):
                _load_classes(model)
                if isinstance(message, CreateShards):
                    self._require_room(model, shards, len(message.workers))
                    master = self._attach_master(model.layout)
                    self._memory = ServerMemory(
                        model, shards, self._job.servers, master, self._keep, self._job.wire, self._device
                    )
                    self.stores = self._memory.stores
                else:
                    self._require_memory().prepare(model, shards, self._attach_master(model.layout))
                self._lacking = message.lacking
                if message.resumed and not message.lacking:
                    self._load(shards)
            case ModelExtended():
                self._extend()
            case WorkerLost(worker, at_once=at_once):
                peer = self._workers.get(worker)
                if at_once and peer is not None:
                    self._hub.drop(peer, "the worker was taken out of the run")
                else:
                    self._expect_end(worker)
            case FetchSnapshot():
                for worker in self._core.expected.intersection(message.left):
                    self._expect_end(worker)
            case JoinProposed():
                for worker in {*self._core.expected.intersection(message.left), message.worker}:
                    self._expect_end(worker)
            case FetchWaits():
                waits = self._core.waits(timers=bool(self._timers))
                moved = tuple((w, self._job.ticks_of(peer.moved_s)) for w, peer in self._workers.items())
                waits = replace(waits, traffic=self._traffic(), moved_ticks=moved)
                return self._hub.send(self._coordinator, waits)
            case ReserveCopies():
                return self._copies.reserve(self._require_memory().stores)
            case WriteCut():
                return self._copies.write(message)
            case FetchCut():
                piece = CutPiece(message.number, message.shard)
                return self._hub.send(self._coordinator, piece, [self._copies.piece(message)], lent=CutPiece)
            case Shutdown():
                self._running, self._told_to_end = False, True
                return self._save_states()
        self._pass_on(self._coordinator, message)

    def _require_room(self, model: ModelSpec, shards: Sequence[ShardSlice], workers: int) -> None:
        """Raise `ConfigurationError` if this machine has too little memory for the shards of this server.

        For the servers on the coordinator's machine, the coordinator has made this check. Other servers on this machine
        are not counted.
        """
        if self._machine is msgspec.UNSET:
            return
        held_bytes = sum(shard.size_bytes for shard in shards)
        vectors = vectors_of(model, fractions=self._job.takes_fractions)
        if reason := served_shortage(held_bytes, vectors, workers, available_bytes(), wire=self._job.wire):
            raise ConfigurationError(reason)

    def _traffic(self) -> tuple[ConnectionTraffic, ...]:
        """Return the traffic of the TCP connections to the workers, including connections that have ended."""
        found: dict[int, Traffic | None] = {**self._carried}
        found |= {worker: traffic_of(peer.stream.sock) for worker, peer in self._workers.items()}
        return tuple(
            ConnectionTraffic(worker, *traffic) for worker, traffic in found.items() if traffic is not None
        )

    def _expect_end(self, worker: int) -> None:
        """If a worker that has left the run is connected, drop its connection after its last messages."""
        if (peer := self._workers.get(worker)) is not None:
            self._hub.expect_end(peer)

    def _pass_on(self, peer: ServerCaller, message: Message) -> None:
        """Pass a message to the core and perform the core's requests."""
        sender = COORDINATOR if peer is self._coordinator else worker_peer(peer.index)
        self.carry_out(self._core.handle(sender, message, self._job.now_ticks()))

    def _commit(self, peer: ServerCaller, commit: Commit, memory: ServerMemory) -> None:
        inbox, gradient = peer.inboxes[commit.shard]
        push: Push | None = memory.read(commit, gradient)
        inbox.take(commit.pieces, commit.codec(self._job.wire))
        inbox.close(empty=commit.empty, set_index=commit.set_index)
        peer.pulls[commit.shard] = commit.set_index
        requests = self._core.handle(worker_peer(peer.index), commit, self._job.now_ticks())
        memory.keep(peer.index, commit, push, peer.payload)
        self.carry_out(requests)

    # -- requests of the core -----------------------------------------------------------------------------

    def carry_out(self, requests: Iterable[Request]) -> None:
        """Carry out the requests of the core. If a request fails, this ends the server.

        The core has already counted the requested updates and answers as done. So if the server went on without them,
        workers would wait for ever. Dropping the sender of the message would not help, because the sender has not
        caused the failure.
        """
        try:
            super().carry_out(requests)
        except OUR_FAULT:
            raise
        except Exception as error:
            raise HostError(first_line(error)) from error

    def send(self, to: Peer, message: Message) -> None:
        """Send a message to the coordinator, or to a worker if it is connected."""
        peer = self._coordinator if to is COORDINATOR else self._workers.get(to.index)
        if peer is not None:
            self._hub.send(peer, message)

    def set_timer(self, timer: Timer) -> None:
        self._timers.set(timer.due_ticks, timer)

    def apply(self, update: Apply) -> None:
        sets = self._require_memory().stores[update.shard].sets_of(update.pushes)
        begun_s = time.perf_counter()
        super().apply(update)
        ended_s = time.perf_counter()
        if (timed := self._steps.note(update.shard, sets, begun_s, ended_s)) is not None:
            self._hub.send(self._coordinator, timed)

    def leave_out(self, request: LeaveOut) -> None:
        self._require_memory().leave_out(request.worker)

    def take_cut(self, request: TakeCut) -> None:
        memory = self._require_memory()
        entries = self._copies.take(request, memory.stores[request.shard])
        buffers = memory.pooled_buffers() if request.shard == 0 else []
        self._hub.send(self._coordinator, CutCopied(request.number, request.shard, entries), buffers)

    def _tell_reports(self) -> None:
        """Report to the coordinator what has happened to the copies of shards."""
        for report in self._copies.take_reports():
            self._hub.send(self._coordinator, report)

    def _answer(self, to: Peer, answer: Answer) -> None:
        """Send the current weights of a shard to a worker."""
        peer = self._workers.get(to.index)
        if peer is None:
            return  # the worker's connection has ended
        payload: Sequence[memoryview] = ()
        if not answer.in_place:
            memory = self._require_memory()
            inbox, _ = peer.inboxes[answer.shard]
            # Until the worker has connected once more, its memory has no room for parameters that were added.
            pulled = of_set(inbox.gradient, peer.pulls.get(answer.shard))
            if inbox.weights is None:
                part = peer.pulls.get(answer.shard)
                payload, checksum = memory.weights_to_send(answer, part, pulled)
                if answer.base:
                    answer = replace(answer, checksum=checksum)
                    peer.answers[answer.shard] = answer
            else:
                for vector in pulled:
                    inbox.weights[vector][:] = memory.weights[answer.shard][vector]
        self._hub.send(peer, answer, payload, lent=answer.shard)

    def _repeat_base(self, peer: ServerCaller, shard: int) -> None:
        """Send a worker the latest base again, as a whole, because the base that the worker has computed differs."""
        answer = peer.answers.pop(shard, None)
        if answer is None:
            raise ProtocolError(f"it asks for the base of shard {shard}, which was not sent")
        self._answer(worker_peer(peer.index), replace(answer, codec="float32"))
        del peer.answers[shard]  # repeat a base only once: repeated requests would let the queue grow

    def _send_to_coordinator(self, to: Peer, message: Snapshot) -> None:
        """Send the coordinator the current weights of a shard."""
        self._send_snapshot(self._coordinator, message.shard)

    senders: ClassVar = {Answer: _answer, Snapshot: _send_to_coordinator}

    def _keep(self, shard: int) -> None:
        """Copy the queued parts of a shard's weights, because the weights are about to change."""
        for peer in self._hub.peers:
            if peer.stream.backlog:
                peer.stream.keep(shard)

    def _send_snapshot(self, peer: ServerCaller, index: int) -> None:
        # The weights are lent, because a copy would have to be complete before its first bytes could be sent.
        version, memory = self._core.shard(index).version, self._require_memory()
        frozen = self._frozen.kept if index == 0 else {}
        payload = [*memory.snapshot(index), *(memoryview(value) for value in frozen.values())]
        self._hub.send(peer, Snapshot(index, version, tuple(frozen)), payload, lent=index)

    def _pass_on_frozen(self) -> None:
        """Answer the peers that wait for values of frozen parameters, or request the values from a worker."""
        workers = sorted(self._workers, key=lambda worker: (worker != self._core.initializer, worker))
        for to, message, payload in self._frozen.due(workers):
            peer = self._workers[to] if isinstance(to, int) else to
            self._hub.send(peer, message, payload, lent=FrozenTensors)  # the values do not change

    def _extend(self) -> None:
        """Store the extended model from now on, unless this server already stores it."""
        memory = self._require_memory()
        memory.extend()
        for reader in self._frozen.retain(memory.frozen_sizes()):  # it must read the extended model
            self._hub.drop(reader, "it waits for a parameter that is no longer frozen")

    def _save_states(self) -> None:
        """If this server has states of tracked objects, write the latest states to the run directory."""
        if self._memory is None or self._memory.states is None:
            return
        position, data = self._memory.states
        path = Path(self._job.run_dir, "tracked.pt")
        try:
            states = {name: each["state"] for name, each in decode_states(data, arrays=False).items()}
            with Unfinished(path) as place, place.open("wb") as file:
                writer = cast(IO[bytes], PatientWriter(file, self._show_life))
                torch.save({"epoch": position.epoch, "states": states}, writer)
        except (OSError, RuntimeError, ProtocolError, LookupError, TypeError) as error:
            self._warn(f"the states of tracked objects cannot be saved to {path}: {first_line(error)}")

    def _show_life(self) -> None:
        """Send a message to the coordinator, which waits as long as messages arrive."""
        self._hub.send(self._coordinator, Bell())

    def _warn(self, text: str) -> None:
        """Report a problem that does not end the run."""
        log.warning("%s", text)
        self._hub.send(self._coordinator, Warned(text))

    # -- start of training --------------------------------------------------------------------------------

    def _load(self, shards: Sequence[ShardSlice]) -> None:
        """Load the weights and the optimizer state of shards from the checkpoint with which the run begins."""
        checkpoint = self._resumed_checkpoint()
        for bounds in shards:
            self._require_memory().load(bounds.index, checkpoint)

    def _resumed_checkpoint(self) -> Checkpoint:
        """Return the checkpoint with which the run begins."""
        assert self._job.resumed is not None
        return Checkpoint(Path(self._job.resumed.path), checked=False)

    def _recorder_of(self, shard: int) -> Recorder | None:
        job = self._job
        if job.traces.kept == "off":
            return None
        header = Header(
            sync=job.schedule.steps[0].sync,
            host="shard",
            index=shard,
            seed=job.seed,
            emulated=job.emulated,
            machine=self._machine,
            imports=job.imports or msgspec.UNSET,
            hyperparameters="translated" if job.translated else msgspec.UNSET,
        )
        path = trace_path(Path(job.run_dir), shard)
        file = SegmentedFile(path, self._warn, segmenting(job, "shard", header.recorded_on))
        self._recorders[shard] = file, Recorder(file, header)
        return self._recorders[shard][1]

    def _tend_traces(self, now_ticks: int) -> None:
        """Write the buffered parts of the traces, and begin new segments.

        Call this method only while no core handles an event.
        """
        self._tend_ticks = now_ticks + TEND_TICKS
        for shard, (file, recorder) in self._recorders.items():
            if file.tend():
                recorder.begin_segment(keyframe_of(self._core.shards[shard], self._job.imports))

    def _send_traces(self) -> None:
        """Send the traces of all shards to the coordinator, which is on another machine."""
        for _, recorder in self._recorders.values():
            recorder.close()
        for shard in self._recorders:
            try:
                for part, last in parts_of(trace_path(Path(self._job.run_dir), shard)):
                    self._hub.send(self._coordinator, TracePart(shard, last), [memoryview(part)])
                    self._hub.drain(self._coordinator)
                    if self._coordinator.stream.backlog:
                        return  # the coordinator no longer waits for the trace
            except OSError as error:
                self._warn(f"the trace of shard {shard} cannot be read: {error}")

    def _attach_master(self, layout: Layout) -> Region | None:
        if not self._job.carrier.shares_memory:
            return None
        if not self._coordinator.stream.descriptors:
            raise ProtocolError("the coordinator did not pass the shared memory for the weights")
        return Region.attach(layout, self._coordinator.stream.descriptors.pop(), MASTER)

    def _require_memory(self) -> ServerMemory:
        if self._memory is None:
            raise ProtocolError("training has not begun")
        return self._memory


def _report_of(error: BaseException) -> Failed:
    """Return the message that reports the exception with which a server ends."""
    match error:
        case HostError(__cause__=BaseException() as cause):
            return _report_of(cause)
        case ConfigurationError():
            return Failed(str(error), "")  # a sentence for users
        case UserCodeError():
            return Failed(error.reason, error.traceback)
        case _:
            return Failed(first_line(error), "".join(traceback.format_exception(error)))


def _load_classes(model: ModelSpec) -> None:
    """Load the classes of optimizers that are not torch's, so that an import that fails is noticed before training."""
    for optimizer in model.optimizers:
        if ":" in optimizer.name:
            class_of(optimizer.name)


# -- The times of the optimizers' steps, from which the cost of a step follows: see `look.step_cost` -----------

REPORTED_STEPS = 5
"""Number of steps of one optimizer at one shard before the first report."""

MOST_STEPS = 625
"""Maximum number of steps between two reports."""


class StepMeter:
    """Measures the steps of a server, and reports them at increasing intervals.

    >>> meter = StepMeter()
    >>> meter.note(0, {0}, 0.0, 5.0)  # not measured: the first step prepares what later steps use
    >>> [meter.note(0, {0}, 10.0 * number, 10.0 * number + 2.0) for number in range(1, 5)]
    [None, None, None, None]
    >>> report = meter.note(0, {0}, 50.0, 52.0)
    >>> report.steps[0].typical_s, round(report.share, 3)
    (2.0, 0.213)
    """

    def __init__(self) -> None:
        self._until = REPORTED_STEPS  # number of steps before the next report
        self._since_s: float | None = None  # end of the last step that was reported
        self._busy_s = 0.0
        # (shard, parameter set) -> the times of the steps
        self._took_s: defaultdict[tuple[int, int], list[float]] = defaultdict(list)

    def note(self, shard: int, sets: Iterable[int], begun_s: float, ended_s: float) -> StepsTimed | None:
        """Note an update of a shard. Return a report if one is due, else None.

        Args:
            shard: index of the shard.
            sets: the parameter sets that were updated. If there are several, the time of the update is not assigned to
                any set.
            begun_s: time at which the update has begun, in seconds.
            ended_s: time at which the update has ended, in seconds.
        """
        if self._since_s is None:
            self._since_s = ended_s
            return None
        self._busy_s += ended_s - begun_s
        first, *others = sets
        if others:
            return None
        took_s = self._took_s[shard, first]
        took_s.append(ended_s - begun_s)
        if len(took_s) < self._until:
            return None
        steps = tuple(StepTime(*key, median(times_s)) for key, times_s in sorted(self._took_s.items()))
        report = StepsTimed(steps, self._busy_s / (ended_s - self._since_s))
        self._until = min(self._until * REPORTED_STEPS, MOST_STEPS)
        self._since_s, self._busy_s = ended_s, 0.0
        self._took_s.clear()
        return report


# -- The values of frozen parameters at the server of shard 0, which passes the values from one worker to others
#
# Every worker loads the frozen parameters itself, so a server has only their digests. A worker whose values differ
# from those of the run requests the values of the run. The server then requests them from a worker that has them:
# the initializer or, if the initializer is gone, any other worker. The server keeps the values, because several
# workers may request the same values.

Waiter = TypeVar("Waiter")


class FrozenSend(NamedTuple, Generic[Waiter]):
    """A message that the server must send.

    Attributes:
        to: a peer that has requested values, or the index of a worker.
        message: the message.
        payload: the payload of the message, which does not change.
    """

    to: Waiter | int
    message: FetchFrozen | FrozenTensors
    payload: list[memoryview]


class FrozenValues(Generic[Waiter]):
    """The values of frozen parameters that have been requested, and the peers that wait for such values.

    Attributes:
        kept: digest -> value, for the values that have arrived.
    """

    def __init__(self) -> None:
        self.kept: dict[str, bytearray] = {}
        self._sizes: dict[str, int] = {}  # digest -> size in bytes, for the values that were requested
        self._dropped: set[str] = set()  # digests of values that may still arrive, but are no longer needed
        self._waiting: dict[Waiter, tuple[str, ...]] = {}
        self._source = -1  # the worker that has been asked and has not answered yet; -1 for none
        # digest -> the workers that were asked for the value
        self._tried: defaultdict[str, set[int]] = defaultdict(set)

    def request(self, peer: Waiter, digests: tuple[str, ...], sizes: Mapping[str, int]) -> None:
        """Note the request of a peer. `sizes` contains the size in bytes of each frozen parameter, by its digest.

        Raises:
            ProtocolError: the model does not have these parameters, or the peer is already waiting for values.
        """
        if peer in self._waiting or len(set(digests)) != len(digests) or not sizes.keys() >= set(digests):
            raise ProtocolError("it requested values of frozen parameters that the model does not have")
        self._sizes |= {digest: sizes[digest] for digest in digests}
        self._waiting[peer] = digests

    def sizes(self, digests: Sequence[str]) -> list[int]:
        """Return the sizes of the values that a worker is about to send.

        Raises:
            ProtocolError: the values were not requested.
        """
        if len(set(digests)) != len(digests) or not self._sizes.keys() >= set(digests):
            raise ProtocolError("it sent values of frozen parameters that were not requested")
        return [self._sizes[digest] for digest in digests]

    def arrived(self, worker: int, digests: Sequence[str], values: Sequence[bytearray]) -> None:
        """Keep the values that a worker has sent. The worker does not have the other values that it was asked for."""
        for digest, value in zip(digests, values, strict=True):
            if digest not in self._dropped:
                self.kept.setdefault(digest, value)  # an earlier value may be on its way to a peer
        if worker == self._source:
            self._source = -1

    def gone(self, worker: int) -> None:
        """Record that the connection to a worker has ended, perhaps because the worker has a new connection."""
        for tried in self._tried.values():
            tried.discard(worker)
        if worker == self._source:
            self._source = -1

    def forget(self, peer: Waiter) -> None:
        """Record that a peer no longer waits."""
        self._waiting.pop(peer, None)

    def retain(self, digests: Iterable[str]) -> list[Waiter]:
        """Drop all values except those with these digests. Return the peers that wait for a dropped value."""
        self._dropped = self._sizes.keys() - set(digests)
        for digest in self._dropped:
            self.kept.pop(digest, None)
        return [peer for peer, awaited in self._waiting.items() if not self._dropped.isdisjoint(awaited)]

    def due(self, workers: Sequence[int]) -> list[FrozenSend[Waiter]]:
        """Return the messages that must be sent now.

        Args:
            workers: the connected workers, in the order in which they are to be asked for missing values.
        """
        missing = [
            digest
            for digest in dict.fromkeys(each for digests in self._waiting.values() for each in digests)
            if digest not in self.kept
        ]
        sends: list[FrozenSend[Waiter]] = []
        if self._source < 0:
            for worker in workers:
                if asked := tuple(digest for digest in missing if worker not in self._tried[digest]):
                    self._source = worker
                    for digest in asked:
                        self._tried[digest].add(worker)
                    sends.append(FrozenSend(worker, FetchFrozen(0, asked), []))
                    break
        for peer, digests in list(self._waiting.items()):
            known = tuple(digest for digest in digests if digest in self.kept)
            if len(known) == len(digests) or self._source < 0:
                del self._waiting[peer]
                payload = [memoryview(self.kept[digest]) for digest in known]
                sends.append(FrozenSend(peer, FrozenTensors(0, known), payload))
        if not self._waiting and self._source < 0:
            self._tried.clear()
        return sends

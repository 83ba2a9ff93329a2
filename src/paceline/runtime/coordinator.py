"""The coordinator's host loop: moves bytes between the connections and the core of the coordinator.

A message goes to `paceline.core.coordinator`, which says what is to be done. What is here besides is what needs a
clock, memory or another thread: when each peer was heard last, the weights' shared memory, the collection of the
weights at the end. The thread belongs to the launcher of the run; everything under "for other threads" is safe to use
from there.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..core import coordinator as core
from ..core.messages import (
    CreateShards,
    FetchSnapshot,
    FetchWaits,
    FromPeerToCoordinator,
    Hello,
    Message,
    Register,
    Shutdown,
    Snapshot,
    Started,
    Status,
    Waits,
)
from ..core.model_spec import ModelSpec
from ..core.requests import Fail, Report, Request, Send, Timer, server_peer, worker_peer
from ..core.requests import Peer as Party
from ..errors import InternalError, ProtocolError, RunFailedError
from ..sync.notation import notation
from ..trace.recording import Header, Recorder
from ..wire.addresses import listen_tcp, listen_unix
from ..wire.memory import MASTER, Region
from ..wire.stream import no_payload
from .best_effort import BestEffortFile
from .collection import Collection
from .footprint import available_bytes, footprint, shortage, state_vectors
from .hub import Hub, Peer
from .job import LOOPBACK, Job
from .registration import require_sound
from .timers import Timers

__all__ = ["Coordinator"]

log = logging.getLogger("paceline.coordinator")

STOP_GRACE_S = 10.0
STOP_POLL_S = 0.05
PACE_SPAN = 8  # number of iterations, roughly, that a worker's usual pace is the mean of


class Coordinator:
    """The coordinator of one run.

    Args:
        job: the run.
        listener: a listening socket; owned by the coordinator.
        address: the address of that socket.

    Attributes:
        job: the run.
        address: where it listens.
        core: members, plans and changes. Other threads may read its public attributes.
        started: set when the first worker has its first weights: every shard has them then.
        started_s: when that was, in the time of the run.
        over: set when no worker is left, or something has failed.
        failure: the first failure, or None.
        gone_servers: servers whose connection has ended before the run was over, in order.
        heard_s: (role, index) -> when a message came from it last. This and the next three are of `time.monotonic`.
        usual_s: worker -> how long its iterations have taken lately, waiting included, in seconds.
        registered_s: worker -> when it reached its first step.
        asked_s: server -> when it was asked which workers wait there, while it owes the answer.
    """

    def __init__(self, job: Job, listener: socket.socket, address: str) -> None:
        self.job = job
        self.address = address
        self.started = threading.Event()
        self.started_s = 0.0
        self.over = threading.Event()
        self.failure: RunFailedError | None = None
        self.gone_servers: list[int] = []
        self.heard_s: dict[tuple[str, int], float] = {}
        self.usual_s: dict[int, float] = {}
        self.registered_s: dict[int, float] = {}
        self.asked_s: dict[int, float] = {}
        self._paced: dict[int, tuple[int, float]] = {}  # worker -> an iteration, and when it began
        header = Header(
            sync=notation(job.schedule.first), host="coordinator", seed=job.seed, emulated=job.emulated
        )
        path = Path(job.run_dir, "trace-coordinator.jsonl")
        self._recorder = Recorder(BestEffortFile(path, lambda words: self.core.faults.append(words)), header)
        self.core = core.Coordinator(
            job.schedule,
            workers=job.workers,
            servers=job.servers,
            shards=job.shards,
            slicing=job.slicing,
            overlap=job.overlap == "shards",
            seed=job.seed,
            read_sync=job.read_sync,
            shortage=self._shortage,
            recorder=self._recorder,
        )
        self._timers: Timers[Timer] = Timers()
        self._master: Region | None = None  # over shared memory, the weights that the servers update
        self._collection: Collection | None = None  # of the weights, once they have been asked for
        self._stops_s: float | None = None  # when the loop ends, at the latest; None while the run goes on
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # from other threads
        self._bell, self._bell_end = socket.socketpair()
        self._bell_end.setblocking(False)
        self._hub: Hub[Peer] = Hub("the coordinator", job.token, listener, FromPeerToCoordinator, Peer, self)
        self._hub.watch(self._bell_end, self._take_calls)
        self._thread = threading.Thread(target=self._run, name="paceline-coordinator", daemon=True)

    @classmethod
    def listen(cls, job: Job, host: str = LOOPBACK) -> Coordinator:
        """A coordinator that listens on a new socket; see `listen_for`."""
        return cls(job, *cls.listen_for(job, host))

    @staticmethod
    def listen_for(job: Job, host: str = LOOPBACK) -> tuple[socket.socket, str]:
        """A new listening socket for a run's coordinator, and its address; over TCP, at one of this machine's.

        Raises:
            ConfigurationError: the port cannot be listened on.
        """
        return listen_tcp(host, job.port) if job.transport == "tcp" else listen_unix()

    # -- for other threads --------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def fail(self, failure: RunFailedError) -> None:
        """Report a failure seen from outside, such as a process that died. The first one is kept."""
        self.failure = self.failure or failure
        self.over.set()

    def ending(self, worker: int) -> str:
        """Return how a lost worker has ended, as far as that is known."""
        return self.core.endings.get(worker, "its connection ended")

    def worker_ended(self, worker: int, how: str) -> None:
        """Report that a worker's process has ended, however and whenever, with how in words.

        What it has still said is heard first; unless that was its goodbye, it is lost.
        """

        def note() -> None:
            self.core.endings.setdefault(worker, how)
            if (member := self._member("worker", worker)) is not None:
                self._hub.expect_end(member)
            else:
                self._perform(self.core.ended(worker, self.job.now_s()))

        self._call(note)

    def collect(self) -> Collection:
        """Have the servers send their weights. Wait for the `finished` of what is returned."""
        assert self.core.model is not None
        collection = Collection(self.core.model, self.core.slices, self._master)

        def begin() -> None:
            self._collection = collection
            for server in range(self.job.servers):
                self._collect_from(server)

        self._call(begin)
        return collection

    def end_collection(self, servers: Sequence[int]) -> None:
        """Receive no more of what is collected; drop the connections of servers that have not sent all of it."""
        ended = threading.Event()

        def end() -> None:
            for server in servers:
                if (member := self._member("server", server)) is not None:
                    self._hub.drop(member, "it has not sent its weights")
            self._collection = None
            ended.set()

        self._call(end)
        if self._thread.is_alive():
            ended.wait(STOP_GRACE_S)

    def ask_servers(self) -> None:
        """Ask every server that owes no answer which workers wait there; see `core.waits`."""

        self.core.waits.clear()

        def ask() -> None:
            for server in self._of_role("server"):
                if server.index not in self.asked_s:
                    self.asked_s[server.index] = time.monotonic()
                    self._hub.send(server, FetchWaits())

        self._call(ask)

    def stop(self, grace_s: float = STOP_GRACE_S, hurried: Callable[[], bool] = lambda: False) -> None:
        """Tell the servers to write their traces and exit; end the thread when they have hung up.

        Args:
            grace_s: how long to wait for that.
            hurried: looked at often; as soon as it is true, nothing is waited for.
        """

        def end() -> None:
            self._stops_s = time.monotonic() + grace_s
            for server in self._of_role("server"):
                self._hub.send(server, Shutdown())

        self._call(end)
        while self._thread.is_alive():
            self._thread.join(STOP_POLL_S)
            if hurried():
                self._stops_s = 0.0

    def _call(self, call: Callable[[], None]) -> None:
        """Have the loop's thread make a call."""
        self._calls.put(call)
        with contextlib.suppress(OSError):  # the thread has ended already and closed it
            self._bell.send(b"x")

    # -- the loop -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._stops_s is None or (self._of_role("server") and time.monotonic() < self._stops_s):
                timeout_s = self._timers.left_s(self.job.now_s())
                if self._stops_s is not None:
                    timeout_s = STOP_POLL_S
                self._hub.poll(timeout_s)
                for timer in self._timers.take_due(self.job.now_s()):
                    self._perform(self.core.fire(timer, self.job.now_s()))
        except Exception as error:  # whatever it is, the run must end and say so
            log.exception("the coordinator failed")
            self.fail(RunFailedError("the coordinator", str(InternalError(repr(error)))))
        finally:
            self._recorder.close()
            self._hub.close()
            self._master = None  # its mapping holds a descriptor too
            self._bell.close()
            self._bell_end.close()

    # -- what the hub asks --------------------------------------------------------------------------------

    def greeted(self, peer: Peer, hello: Hello) -> None:
        party = Party("server" if hello.role == "server" else "worker", hello.index)
        if hello.role == "reader":
            raise ProtocolError("a reader is not expected")
        self.core.require_expected(party)
        peer.role, peer.index = hello.role, hello.index
        self.heard_s[peer.role, peer.index] = time.monotonic()
        self._perform(self.core.connected(party, self.job.now_s(), hello.address))

    def payload_targets(self, peer: Peer, message: Message, size_bytes: int) -> Sequence[memoryview]:
        if isinstance(message, Snapshot) and peer.role == "server" and self._collection is not None:
            return self._collection.targets(message, peer.index, self.job.servers)
        return no_payload(message, size_bytes)

    def gone(self, peer: Peer, reason: str) -> None:
        party = server_peer(peer.index) if peer.role == "server" else worker_peer(peer.index)
        self._perform(self.core.disconnected(party, self.job.now_s()))
        if peer.role == "server" and self._stops_s is None:
            self.gone_servers.append(peer.index)
            if self._collection is not None:
                self._collect_from(peer.index)
            self.over.set()

    def received(self, peer: Peer, message: Message) -> None:
        self.heard_s[peer.role, peer.index] = time.monotonic()
        if isinstance(message, Snapshot) and peer.role == "server" and self._collection is not None:
            self._collection.arrived(message)
            self._collect_from(peer.index)
            return
        party = server_peer(peer.index) if peer.role == "server" else worker_peer(peer.index)
        if isinstance(message, Register) and self.core.expects_model(party):
            require_sound(message.model)
        self._perform(self.core.handle(party, message, self.job.now_s()))
        match message:
            case Register():
                self.registered_s[peer.index] = time.monotonic()
            case Waits():
                self.asked_s.pop(peer.index, None)
            case Status():
                self._note_pace(peer.index, message)
                if not self.started.is_set():
                    self.started_s = self.job.now_s()
                    self.started.set()

    def _note_pace(self, worker: int, now: Status) -> None:
        """Keep how long the iterations of this worker take: a mean in which the latest ones count most."""
        now_s = time.monotonic()
        before = self._paced.get(worker)
        if before is not None and now.iteration > before[0]:
            each_s = (now_s - before[1]) / (now.iteration - before[0])
            usual_s = self.usual_s.get(worker, each_s)
            self.usual_s[worker] = usual_s + (each_s - usual_s) / PACE_SPAN
        if before is None or now.iteration > before[0]:
            self._paced[worker] = now.iteration, now_s

    # -- what the core asks for ---------------------------------------------------------------------------

    def _perform(self, requests: Sequence[Request]) -> None:
        started = False
        for request in requests:
            match request:
                case Send(to, CreateShards() as message):
                    if self._master is None and self.job.transport == "shm":
                        self._master = Region.create(message.model.layout, MASTER, shared=True)
                    self._send(to, message, self._descriptors)
                case Send(to, Started() as message):
                    started = True
                    self._send(to, message, self._descriptors)
                case Send(to, message):
                    self._send(to, message)
                case Timer():
                    self._timers.set(request.due_s, request)
                case Report(words):
                    log.error("%s", words)
                case Fail(where, reason, traceback):
                    self.fail(RunFailedError(where, reason, traceback))
                case _:
                    raise InternalError(f"a coordinator cannot {request}")
        if started and self._master is not None:
            self._master.close()  # every peer has its descriptor, or finds it in a message that has left
        if self.core.everybody_left:
            self.over.set()

    def _send(self, to: Party, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send to a worker or server, if it is connected."""
        if (member := self._member(to.role, to.index)) is not None:
            self._hub.send(member, message, descriptors=descriptors)

    @property
    def _descriptors(self) -> list[int]:
        """The descriptor of the weights' memory, over shared memory."""
        descriptor = self._master.descriptor if self._master is not None else None
        return [] if descriptor is None else [descriptor]

    def _shortage(self, model: ModelSpec, workers: int) -> str:
        """Return why there is too little memory on this machine, where all processes run; "" if there is enough."""
        job, optimizer, layout = self.job, model.optimizer, model.layout
        vectors = state_vectors(optimizer.name, optimizer.groups, layout.sizes)
        needed = footprint(layout.size_bytes, vectors, workers, job.servers, job.transport)
        return shortage(needed, available_bytes(), f"{workers} workers over {job.transport}")

    # -- the weights, at the end of the run ----------------------------------------------------------------

    def _collect_from(self, server: int) -> None:
        """Ask a server for the next of its shards that has not come; give its shards up if it is gone."""
        assert self._collection is not None
        owed = self._collection.owed_by(server, self.job.servers)
        member = self._member("server", server)
        if member is None:
            self._collection.give_up(owed)
        elif owed:  # one at a time: a server has one bulk message under way to each peer
            self._hub.send(member, FetchSnapshot(owed[0]))

    def _take_calls(self) -> None:
        """The bell has rung: make the calls that other threads have asked for."""
        with contextlib.suppress(BlockingIOError):
            self._bell_end.recv(4096)
        while not self._calls.empty():
            self._calls.get_nowait()()

    def _member(self, role: str, index: int) -> Peer | None:
        """Return the connection of a server or worker; None if there is none."""
        return next((m for m in self._hub.peers if (m.role, m.index) == (role, index)), None)

    def _of_role(self, role: str) -> list[Peer]:
        return sorted((m for m in self._hub.peers if m.role == role), key=lambda member: member.index)

"""The event loop of the coordinator: it receives messages, passes them to the core and performs the core's requests.

The core is the state machine in `paceline.core.coordinator`. This module contains everything that needs a clock,
shared memory or another thread: the time of each peer's last message, the memory for the weights, and the collection
of the weights at the end of the run. The loop runs on a thread in the launcher's process. Other threads of this
process may call only the methods in the section "for other threads".
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
from ..core.layout import dtype_of
from ..core.messages import (
    Contributed,
    CreateShards,
    ExtendShards,
    FetchWaits,
    FromPeerToCoordinator,
    Hello,
    Message,
    ModelExtended,
    Register,
    Shutdown,
    Snapshot,
    Started,
    Status,
    Waits,
)
from ..core.model_spec import ModelSpec
from ..core.requests import Fail, Peer, Request, Send, Timer, Warn, server_peer, worker_peer
from ..errors import InternalError, ProtocolError, RunFailedError
from ..sync.notation import notation
from ..trace.recording import Header, Recorder
from ..wire.addresses import listen_tcp, listen_unix
from ..wire.memory import MASTER, Region
from ..wire.stream import no_payload
from .best_effort import BestEffortFile
from .collection import Collection
from .footprint import available_bytes, footprint, shortage, state_vectors
from .hub import Caller, Hub
from .job import LOOPBACK, Job
from .registration import require_sound
from .timers import Timers

__all__ = ["CoordinatorHost"]

log = logging.getLogger("paceline.coordinator")

STOP_GRACE_S = 10.0
STOP_POLL_S = 0.05
DRAIN_TIMEOUT_S = 1.0  # maximum time to wait until a peer has received earlier messages
PACE_SPAN = 8  # approximate number of recent iterations over which a worker's iteration time is averaged


class CoordinatorHost:
    """The coordinator of one run: starts training, tracks the workers and servers, and ends the run.

    Args:
        job: the configuration of the run.
        listener: a listening socket, of which the coordinator takes ownership.
        address: the address of the listening socket.

    Attributes:
        job: the configuration of the run.
        address: the address on which the coordinator listens.
        core: the state machine of the coordinator, whose public attributes other threads may read.
        started: event that is set once any worker has received its first weights from all shards.
        started_s: time at which `started` was set, in seconds since the run began.
        over: event that is set when all workers have left, a server is lost, or the run has failed.
        failure: the first failure that was reported, or None.
        gone_servers: servers that disconnected before the run was over, in order of disconnection.
        heard_s: (role, index) -> time of the last message from this peer, on the clock of `time.monotonic`.
        usual_s: worker -> moving average of the worker's iteration time in seconds, including waiting.
        registered_s: worker -> time at which the worker registered its model, on the clock of `time.monotonic`.
        asked_s: server -> time on the monotonic clock at which the server was asked which workers are waiting.
            Contains only servers that have not answered yet.
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
        # worker -> (its latest iteration, time at which this iteration was first reported)
        self._paced: dict[int, tuple[int, float]] = {}
        header = Header(
            sync=notation(job.schedule.first), host="coordinator", seed=job.seed, emulated=job.emulated
        )
        path = Path(job.run_dir, "trace-coordinator.jsonl")
        self._recorder = Recorder(BestEffortFile(path, lambda text: self.core.faults.append(text)), header)
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
        self._members: dict[tuple[str, int], Caller] = {}  # (role, index) -> its connection
        self._timers: Timers[Timer] = Timers()
        self._master: Region | None = None  # shared memory in which the servers update the weights
        self._new_master: Region | None = None  # the same until it has been passed to all processes
        self._collection: Collection | None = None  # None except while the final weights are collected
        self._stops_s: float | None = None  # latest time at which the loop ends; None while the run continues
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # see `_call`
        self._bell, self._bell_end = socket.socketpair()
        self._bell_end.setblocking(False)
        self._hub: Hub[Caller] = Hub(
            "the coordinator", job.token, listener, FromPeerToCoordinator, Caller, self
        )
        self._hub.watch(self._bell_end, self._take_calls)
        self._thread = threading.Thread(target=self._run, name="paceline-coordinator", daemon=True)

    @classmethod
    def listen(cls, job: Job, host: str = LOOPBACK) -> CoordinatorHost:
        """Return a coordinator that listens on a new socket. See `listen_for`."""
        return cls(job, *cls.listen_for(job, host))

    @staticmethod
    def listen_for(job: Job, host: str = LOOPBACK) -> tuple[socket.socket, str]:
        """Return a new listening socket for the coordinator of a run, and its address.

        With TCP, the socket listens on `host`, an address of this machine.

        Raises:
            ConfigurationError: the socket cannot listen on the port.
        """
        return listen_tcp(host, job.port) if job.transport == "tcp" else listen_unix()

    # -- for other threads --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread of the event loop."""
        self._thread.start()

    def fail(self, failure: RunFailedError) -> None:
        """Report a failure that another thread has detected, such as a crash. Later failures are ignored."""
        self.failure = self.failure or failure
        self.over.set()

    def ending(self, worker: int) -> str:
        """Return a phrase that says how a lost worker's process ended; "its connection ended" if unknown."""
        return self.core.endings.get(worker, "its connection ended")

    def worker_ended(self, worker: int, how: str) -> None:
        """Report that the process of a worker has ended. This method may be called at any time.

        Messages that the process has already sent are handled first. Then the worker is recorded as lost, unless it
        has finished.

        Args:
            worker: index of the worker.
            how: a phrase that says how the process ended.
        """

        def note() -> None:
            self.core.endings.setdefault(worker, how)
            if (member := self._member("worker", worker)) is not None:
                self._hub.expect_end(member)
            else:
                self._perform(self.core.ended(worker, self.job.now_ticks()))

        self._call(note)

    def collect(self) -> Collection:
        """Start collecting the weights. The caller must wait until `finished` of the returned object is set."""
        assert self.core.model is not None
        collection = Collection(self.core.model, self.core.slices, self._master)

        def begin() -> None:
            self._collection = collection
            for server in range(self.job.servers):
                self._collect_from(server)

        self._call(begin)
        return collection

    def end_collection(self, servers: Sequence[int]) -> None:
        """End the collection, and close the connections to `servers`, which have not sent all of their weights."""
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
        """Ask the servers which workers are waiting. The answers arrive in `core.waits`.

        A server that has not answered an earlier request is not asked again.
        """

        self.core.waits.clear()

        def ask() -> None:
            for server in self._of_role("server"):
                if server.index not in self.asked_s:
                    self.asked_s[server.index] = time.monotonic()
                    self._hub.send(server, FetchWaits())

        self._call(ask)

    def stop(self, grace_s: float = STOP_GRACE_S, hurried: Callable[[], bool] = lambda: False) -> None:
        """Order the servers to write their traces and exit, and end the thread when the servers have disconnected.

        Args:
            grace_s: maximum time in seconds to wait for the servers.
            hurried: function that is called repeatedly. Once it returns True, `stop` no longer waits for the servers.
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
        """Schedule a function call on the thread of the event loop."""
        self._calls.put(call)
        with contextlib.suppress(OSError):  # the thread has already ended and closed the socket
            self._bell.send(b"x")

    # -- the loop -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._stops_s is None or (self._of_role("server") and time.monotonic() < self._stops_s):
                timeout_s = self._timers.left_s(self.job.now_ticks())
                if self._stops_s is not None:
                    timeout_s = STOP_POLL_S
                self._hub.poll(timeout_s)
                for timer in self._timers.take_due(self.job.now_ticks()):
                    self._perform(self.core.fire(timer, self.job.now_ticks()))
        except Exception as error:  # any exception must end the run and be reported
            log.exception("the coordinator failed")
            self.fail(RunFailedError("the coordinator", str(InternalError(repr(error)))))
        finally:
            self._recorder.close()
            self._hub.close()
            self._master = self._new_master = None  # releases the mappings, which keep file descriptors open
            self._bell.close()
            self._bell_end.close()

    # -- called by the hub --------------------------------------------------------------------------------

    def greeted(self, peer: Caller, hello: Hello) -> None:
        party = Peer("server" if hello.role == "server" else "worker", hello.index)
        if hello.role == "reader":
            raise ProtocolError("the coordinator does not accept readers")
        self.core.require_expected(party)
        peer.role, peer.index = hello.role, hello.index
        self._members[peer.role, peer.index] = peer
        self.heard_s[peer.role, peer.index] = time.monotonic()
        self._perform(self.core.connected(party, self.job.now_ticks(), hello.address))

    def payload_targets(self, peer: Caller, message: Message, size_bytes: int) -> Sequence[memoryview]:
        if isinstance(message, Snapshot) and peer.role == "server" and self._collection is not None:
            return self._collection.targets(message, peer.index, self.job.servers)
        return no_payload(message, size_bytes)

    def gone(self, peer: Caller, reason: str) -> None:
        self._members.pop((peer.role, peer.index), None)
        party = server_peer(peer.index) if peer.role == "server" else worker_peer(peer.index)
        self._perform(self.core.disconnected(party, self.job.now_ticks()))
        if peer.role == "server" and self._stops_s is None:
            self.gone_servers.append(peer.index)
            if self._collection is not None:
                self._collect_from(peer.index)
            self.over.set()

    def received(self, peer: Caller, message: Message) -> None:
        self.heard_s[peer.role, peer.index] = time.monotonic()
        if isinstance(message, Snapshot) and peer.role == "server" and self._collection is not None:
            self._collection.arrived(message)
            self._collect_from(peer.index)
            return
        party = server_peer(peer.index) if peer.role == "server" else worker_peer(peer.index)
        model = message.model if isinstance(message, Register | Contributed) else None
        if model is not None and (isinstance(message, Contributed) or self.core.expects_model(party)):
            require_sound(model, self.job.optimizers)
        self._perform(self.core.handle(party, message, self.job.now_ticks()))
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
        """Update the moving average of a worker's iteration time."""
        now_s = time.monotonic()
        before = self._paced.get(worker)
        if before is not None and now.iteration > before[0]:
            each_s = (now_s - before[1]) / (now.iteration - before[0])
            usual_s = self.usual_s.get(worker, each_s)
            self.usual_s[worker] = usual_s + (each_s - usual_s) / PACE_SPAN
        if before is None or now.iteration > before[0]:
            self._paced[worker] = now.iteration, now_s

    # -- requests of the core -----------------------------------------------------------------------------

    def _perform(self, requests: Sequence[Request]) -> None:
        passed = False
        for request in requests:
            match request:
                case Send(to, CreateShards() | ExtendShards() as message):
                    if self._new_master is None and self.job.transport == "shm":
                        self._new_master = Region.create(message.model.layout, MASTER, shared=True)
                    self._send(to, message, self._descriptors)
                case Send(to, Started() | ModelExtended() as message):
                    passed = True
                    self._send(to, message, self._descriptors if to.role == "worker" else ())
                case Send(to, message):
                    self._send(to, message)
                case Timer():
                    self._timers.set(request.due_ticks, request)
                case Warn(text):
                    log.error("%s", text)
                case Fail(where, reason, traceback):
                    self.fail(RunFailedError(where, reason, traceback))
                case _:
                    raise InternalError(f"a coordinator cannot carry out {request}")
        if passed and self._new_master is not None:
            # The descriptor has already been sent to every peer, so this process need not keep it open.
            self._new_master.close()
            self._master, self._new_master = self._new_master, None
        if self.core.everybody_left:
            self.over.set()

    def _send(self, to: Peer, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message to a worker or server if it is connected."""
        if (member := self._member(to.role, to.index)) is not None:
            if descriptors:  # they cannot be queued
                self._hub.drain(member, DRAIN_TIMEOUT_S)
            self._hub.send(member, message, descriptors=descriptors)

    @property
    def _descriptors(self) -> list[int]:
        """A list with the file descriptor of the new shared memory for the weights; [] if there is none."""
        descriptor = self._new_master.descriptor if self._new_master is not None else None
        return [] if descriptor is None else [descriptor]

    def _shortage(self, model: ModelSpec, workers: int) -> str:
        """Return an error message if this machine has too little memory for all processes of the run, else ""."""
        job, layout = self.job, model.layout
        dtypes = {dtype_of(vector) for vector in layout.sizes}
        vectors = max(state_vectors(each.name, each.groups, dtypes) for each in model.optimizers)
        needed = footprint(layout.size_bytes, vectors, workers, job.servers, job.transport)
        return shortage(needed, available_bytes(), f"{workers} workers over {job.transport}")

    # -- collection of the weights at the end --------------------------------------------------------------

    def _collect_from(self, server: int) -> None:
        """Request the next missing shard from a server, or give up its shards if the server is not connected."""
        assert self._collection is not None
        owed = self._collection.owed_by(server, self.job.servers)
        member = self._member("server", server)
        if member is None:
            self._collection.give_up(owed)
        elif owed:  # a server sends each peer only one bulk message at a time
            self._perform(self.core.fetch(owed[0]))

    def _take_calls(self) -> None:
        """Call the functions that other threads have passed to `_call`."""
        with contextlib.suppress(BlockingIOError):
            self._bell_end.recv(4096)
        while not self._calls.empty():
            self._calls.get_nowait()()

    def _member(self, role: str, index: int) -> Caller | None:
        """Return the connection to a server or worker; None if it is not connected."""
        return self._members.get((role, index))

    def _of_role(self, role: str) -> list[Caller]:
        return [member for (kind, _), member in sorted(self._members.items()) if kind == role]

"""Light workers: many workers and one server in one process, which exchange messages but do not train.

Workers and server use the cores of `paceline.core`, so the coordinator receives the same messages as from real workers
and servers. The messages reach the coordinator over one connection per worker, one per machine, and one for the server.
Messages between the workers and the server stay in this process.
"""

from __future__ import annotations

import heapq
import multiprocessing
import random
import resource
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec

from paceline.core.layout import ModelSpec
from paceline.core.liveness import Heartbeats
from paceline.core.messages import (
    EntryRequested,
    HeartbeatAnswered,
    Hello,
    LoopEntered,
    MachineAdmitted,
    MachineJoined,
    Message,
    Phase,
    ProcessState,
    Status,
    TakenOut,
    first_phase,
)
from paceline.core.requests import (
    COORDINATOR,
    Abort,
    Host,
    Peer,
    Proceed,
    Request,
    Timer,
    server_peer,
    worker_peer,
)
from paceline.core.server import Server
from paceline.core.worker import Worker
from paceline.errors import ConfigurationError
from paceline.sim.simulate import NullStore
from paceline.sync.schedule import read_schedule
from paceline.wire.secure import contexts
from paceline.wire.stream import Stream
from paceline.wire.transports import connect

TIMEOUT_S = 60.0
SPARE_DESCRIPTORS = 100
LOOK_S = 0.1  # time between two checks whether a heartbeat is due
ASKS_EVERY = 10  # a worker measures the coordinator's response time once in this many iterations
JITTER = 0.2  # computing times are uniformly distributed between 1 - JITTER and 1 + JITTER times their mean

NO_TENSORS = [NullStore()]  # the stores of the server: one, because there is only one shard


def allow_descriptors(needed: int) -> None:
    """Let this process open as many file descriptors as a benchmark needs for its connections, and some more."""
    needed += SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigurationError(
            f"this process may open {hard} files, but the benchmark needs {needed}. Raise the limit with ulimit -Hn."
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def beside(stack: ExitStack, function: Callable[..., object], *arguments: object) -> Connection:
    """Call a function in a process of its own, and return one end of a pipe. The process ends when the pipe is closed.

    The last argument of the function is the other end of the pipe. The pipe is closed with the stack.
    """
    spawn = multiprocessing.get_context("spawn")
    pipe, end = spawn.Pipe()
    process = spawn.Process(target=function, args=(*arguments, end), daemon=True)
    process.start()
    end.close()
    stack.callback(process.join)
    stack.callback(pipe.close)
    return pipe


class Load(NamedTuple):
    """The load of a thread: its processor time and the time that has passed, both in seconds."""

    used_s: float
    elapsed_s: float


def load_of(thread: threading.Thread, seconds: float) -> Load:
    """Return the load of a running thread, measured over the given number of seconds."""
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    begun_s, used_s = time.monotonic(), time.clock_gettime(clock)
    time.sleep(seconds)
    return Load(time.clock_gettime(clock) - used_s, time.monotonic() - begun_s)


class Place(msgspec.Struct, frozen=True):
    """Where the coordinator is, and who joins it."""

    address: str  # of the coordinator
    token: str  # the secret of the run
    secure: bool  # True if the connections use TLS
    version: str  # of Paceline
    sync: str
    workers: int
    machines: int  # number of machines, among which the workers are divided
    interval_s: float  # mean computing time of an iteration
    model: ModelSpec  # the model that the workers register


class CrowdReport(msgspec.Struct, frozen=True):
    """What the light workers have done and seen since the last report."""

    iterations: list[int]  # of each worker
    notifications: int  # number of messages that the workers have sent to the coordinator
    response_s: list[float]  # times between a worker's question to the coordinator and the answer
    taken_out: int  # number of workers that were taken out of the run


class Crowd:
    """The workers, machines and the server, with their connections. Use the object as a context manager.

    Args:
        place: where the coordinator is, and who joins it.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        schedule = read_schedule(place.sync)
        self._server = Server(0)
        self._cores = [
            Worker(schedule, workers=place.workers, shards=1, servers=1) for _ in range(place.workers)
        ]
        self._waiting = [False] * place.workers  # True while the worker waits for an answer
        self._connected: set[int] = set()  # workers that are connected to the server
        self._streams: dict[Peer, Stream[Any]] = {}
        self._agents: dict[int, Stream[Any]] = {}
        self._states: dict[int, list[ProcessState]] = {}  # machine -> the states of its processes
        self._heartbeats: dict[int, Heartbeats] = {}
        self._began: dict[int, int] = {}  # worker -> number of the event that ends its iteration
        self._mail: deque[tuple[Peer, Peer, Message]] = deque()
        self._delivers = False  # True while messages in `_mail` are delivered
        self._asked_s: dict[int, float] = {}
        self._iterations = [0] * place.workers
        self._notifications = 0
        self._response_s: list[float] = []
        self._taken_out = 0
        self._draws = random.Random(0)
        # (time, number, function to call at this time)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._stack = ExitStack()
        self._selector = self._stack.enter_context(closing(selectors.DefaultSelector()))

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def join(self) -> None:
        """Connect all machines, workers and the server, and register the workers' models."""
        place = self._place
        self._connect(server_peer(0), first_phase("coordinator", "server"), address="tcp:127.0.0.1:1")
        for machine in range(place.machines):
            agent: Stream[Any] = self._open(
                first_phase("coordinator", "agent"), Hello(place.token, "agent", 0)
            )
            share = len(range(machine, place.workers, place.machines))
            agent.send(MachineJoined(place.version, share))
            admitted = agent.wait(TIMEOUT_S)
            assert isinstance(admitted, MachineAdmitted), admitted
            self._agents[machine] = agent
            self._heartbeats[machine] = Heartbeats()
            self._states[machine] = [
                ProcessState("worker", worker, "running", incarnation)
                for worker, incarnation in admitted.workers.items()
            ]
            self._selector.register(agent, selectors.EVENT_READ, machine)
            self._at(0.0, partial(self._look, machine))
            for worker in admitted.workers:
                self._connect(worker_peer(worker), first_phase("coordinator", "worker"))
            self.work(0.0)
        for worker, core in enumerate(self._cores):
            self._perform(worker_peer(worker), core.register(place.model))
            if worker % 50 == 0:
                self.work(0.0)

    def work(self, seconds: float, also: Any = None) -> bool:
        """Let the workers work for some time. Return early, with True, if the pipe `also` has something to read."""
        end_s = time.monotonic() + seconds
        while True:
            now_s = time.monotonic()
            while self._due and self._due[0][0] <= now_s:
                heapq.heappop(self._due)[2]()
            next_s = min(end_s, self._due[0][0] if self._due else end_s)
            for key, _ in self._selector.select(max(0.0, next_s - time.monotonic())):
                if isinstance(key.data, int):
                    self._hear_agent(key.data)
                else:
                    self._hear(key.data)
            if also is not None and also.poll():
                return True
            if time.monotonic() >= end_s:
                return False

    def report(self) -> CrowdReport:
        """Return what has happened since the last report."""
        report = CrowdReport(self._iterations, self._notifications, self._response_s, self._taken_out)
        self._iterations, self._notifications, self._response_s = [0] * self._place.workers, 0, []
        return report

    # -- connections --------------------------------------------------------------------------------------

    def _open(self, phase: Phase, hello: Hello) -> Stream[Any]:
        known = contexts(self._place.token) if self._place.secure else None
        stream: Stream[Any] = Stream(connect(self._place.address, TIMEOUT_S, known), phase)
        self._stack.callback(stream.close)
        stream.send(hello)
        return stream

    def _connect(self, peer: Peer, phase: Phase, address: str = "") -> None:
        assert peer.role in ("worker", "server")
        stream = self._open(phase, Hello(self._place.token, peer.role, peer.index, address))
        self._streams[peer] = stream
        self._selector.register(stream, selectors.EVENT_READ, peer)

    def _hear(self, peer: Peer) -> None:
        for message in self._streams[peer].receive():
            if isinstance(message, LoopEntered):
                self._response_s.append(time.monotonic() - self._asked_s.pop(peer.index))
            elif isinstance(message, TakenOut):
                self._taken_out += 1
                self._selector.unregister(self._streams[peer])
                return
            else:
                self._deliver(COORDINATOR, peer, message)

    def _hear_agent(self, machine: int) -> None:
        for message in self._agents[machine].receive():
            if isinstance(message, HeartbeatAnswered):
                self._heartbeats[machine].answered(message, time.monotonic_ns())

    # -- the cores ----------------------------------------------------------------------------------------

    def _deliver(self, sender: Peer, to: Peer, message: Message) -> None:
        """Pass a message to the core of the server or of a worker, and carry out its requests."""
        if to.role == "server":
            self._perform(to, self._server.handle(sender, message, time.monotonic_ns()))
            return
        core = self._cores[to.index]
        self._perform(to, core.handle(message))
        if core.started is not None and to.index not in self._connected:
            self._connected.add(to.index)
            if core.started.initializer == to.index:
                self._perform(to, core.initialize())
            self._perform(server_peer(0), self._server.connected(to.index, time.monotonic_ns()))
        elif not core.waiting_for and (self._waiting[to.index] or core.last_commit is None):
            self._waiting[to.index] = False
            self._begin(to.index)

    def _perform(self, sender: Peer, requests: list[Request]) -> None:
        """Carry out the requests of a core, and then deliver the messages to other cores in this process."""
        _LightHost(self, sender).carry_out(requests)
        if not self._delivers:
            self._delivers = True
            while self._mail:
                self._deliver(*self._mail.popleft())
            self._delivers = False

    def _notify(self, sender: Peer, message: Message) -> None:
        self._notifications += 1
        self._streams[sender].send(message)

    def _begin(self, worker: int) -> None:
        """Let a worker begin an iteration."""
        core = self._cores[worker]
        self._notify(worker_peer(worker), Status(core.iteration, None, "computing"))
        factor = self._draws.uniform(1 - JITTER, 1 + JITTER)
        self._began[worker] = number = next(self._numbers)
        self._at(
            time.monotonic() + self._place.interval_s * factor, partial(self._end_iteration, worker, number)
        )

    def _at(self, due_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (due_s, next(self._numbers), call))

    def _fire(self, timer: Timer) -> None:
        self._perform(server_peer(0), self._server.fire(timer, time.monotonic_ns()))

    def _look(self, machine: int) -> None:
        """Send a machine's heartbeat if it is due."""
        heartbeat = self._heartbeats[machine].due(self._states[machine], time.monotonic_ns())
        if heartbeat is not None:
            self._agents[machine].send(heartbeat)
        self._at(time.monotonic() + LOOK_S, partial(self._look, machine))

    def _end_iteration(self, worker: int, number: int) -> None:
        """Let a worker push, unless the iteration has been aborted meanwhile."""
        if self._began[worker] != number or self._waiting[worker]:
            return
        core, peer = self._cores[worker], worker_peer(worker)
        self._iterations[worker] += 1
        self._waiting[worker] = True
        if core.iteration % ASKS_EVERY == worker % ASKS_EVERY and worker not in self._asked_s:
            self._asked_s[worker] = time.monotonic()
            self._notify(peer, EntryRequested(0))
        self._perform(peer, core.push())


class _LightHost(Host):
    """Carries out the requests of a light worker, or of the server, which has no tensors."""

    def __init__(self, crowd: Crowd, peer: Peer) -> None:
        self._crowd = crowd
        self._peer = peer
        self.stores = NO_TENSORS

    def send(self, to: Peer, message: Message) -> None:
        if to is COORDINATOR:
            self._crowd._notify(self._peer, message)
        else:
            self._crowd._mail.append((self._peer, to, message))

    def set_timer(self, timer: Timer) -> None:
        self._crowd._at(timer.due_ticks / 1e9, partial(self._crowd._fire, timer))

    def proceed(self, request: Proceed) -> None:
        """Do nothing: `Crowd._deliver` finds out that the worker no longer waits."""

    def abort(self, request: Abort) -> None:
        worker = self._peer.index
        self._crowd._waiting[worker] = True
        self._crowd._perform(self._peer, self._crowd._cores[worker].pull_again())

"""The coordinator's host loop: who takes part, who is alive, and the plans for the whole job.

It compares what the workers are about to train, tells the servers and then the workers that training begins,
hosts the sync model's part for the whole job (plans, restarts, changes of model), and hears what each worker is
doing. It is never on the path of a push or a pull. Its thread belongs to whoever started the run; the few things
that others ask of it go through `Coordinator`'s public names, all of which are safe to use from another thread.
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

from ..core.job_sync import JobSync
from ..core.layout import Layout, ShardSlice
from ..core.messages import (
    AllCommitted,
    Begun,
    Changing,
    CreateShards,
    Failed,
    Faulted,
    FetchSnapshot,
    FetchWaits,
    Finished,
    FromPeerToCoordinator,
    Hello,
    MayPull,
    Message,
    Notify,
    Ready,
    Refused,
    Register,
    RequestSync,
    Restart,
    Shutdown,
    Snapshot,
    Started,
    Status,
    Stopping,
    Waits,
    Warned,
    WorkerGone,
)
from ..core.model_spec import ModelSpec
from ..errors import ConfigurationError, InternalError, ProtocolError, RunFailedError
from ..sync.actions import AnyAction, PublishChange, PublishPlan, RestartWorker, SetTimer
from ..sync.events import (
    AnyEvent,
    IterationFinished,
    IterationStarted,
    Stop,
    SyncRequested,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from ..sync.notation import notation
from ..trace.recording import Entry, Header, Recorder
from ..wire.addresses import listen_tcp, listen_unix
from ..wire.memory import MASTER, Region
from ..wire.stream import Stream, no_payload
from .best_effort import BestEffortFile
from .collection import Collection
from .footprint import available_bytes, footprint, shortage, state_vectors
from .hub import Hub, Peer
from .job import LOOPBACK, Job
from .registration import require_sound
from .timers import Timers

__all__ = ["SLICE", "Coordinator", "first_difference"]

log = logging.getLogger("paceline.coordinator")

STOP_GRACE_S = 10.0
STOP_POLL_S = 0.05
MOST_FAULTS = 100
PACE_SPAN = 8  # iterations, or so, that a worker's usual pace is the mean of

SLICE = {"even": Layout.slice_evenly, "by-parameter": Layout.slice_by_parameter}


class Member(Peer):
    """A connection to the coordinator: a server's or a worker's."""

    def __init__(self, stream: Stream[Message]) -> None:
        super().__init__(stream)
        self.address = ""  # where a server listens
        self.ready = False  # a server that knows its shards
        self.model: ModelSpec | None = None  # what a worker has registered


class Coordinator:
    """The coordinator of one run.

    Args:
        job: the run.
        listener: a listening socket; owned by the coordinator.
        address: where that is.

    Attributes:
        address: where it listens.
        board: worker -> what it said last about itself.
        model: what is trained, once all workers have said so.
        shards: the slices and the addresses of their servers, likewise.
        started: set when the first worker has its first weights: every shard has them then.
        started_s: when that was, in the run's time.
        over: set when no worker is left, or something has failed.
        failure: the first thing that failed, or None.
        lost: workers that were lost, in order.
        endings: worker that was lost -> how that came about, in words, where it is known.
        finished: workers that have done their work, in order.
        cut_off: workers that were lost because, as they say, somebody else was gone.
        gone_servers: servers whose connection has ended before the run was over, in order.
        faults: what went wrong without ending the run, in words, in order.
        heard_s: (role, index) -> when something came from it last. This and the next three are of `time.monotonic`.
        usual_s: worker -> how long its iterations have taken lately, waiting included, in seconds.
        registered_s: worker -> when it came to its first step.
        asked_s: server -> when it was asked who waits for what, while it owes the answer.
        waits: server -> what it has answered last.
    """

    def __init__(self, job: Job, listener: socket.socket, address: str) -> None:
        self.job = job
        self.address = address
        self.board: dict[int, Status] = {}
        self.model: ModelSpec | None = None
        self.shards: list[tuple[ShardSlice, str]] = []
        self.started = threading.Event()
        self.started_s = 0.0
        self.over = threading.Event()
        self.failure: RunFailedError | None = None
        self.lost: list[int] = []
        self.endings: dict[int, str] = {}
        self.finished: list[int] = []
        self.cut_off: list[int] = []
        self.gone_servers: list[int] = []
        self.faults: list[str] = []
        self.heard_s: dict[tuple[str, int], float] = {}
        self.usual_s: dict[int, float] = {}
        self.registered_s: dict[int, float] = {}
        self.asked_s: dict[int, float] = {}
        self.waits: dict[int, Waits] = {}
        self._left: set[int] = set()  # workers that have finished or were lost
        self._training: set[int] = set()  # workers that have begun, whether they have left or not
        self._paced: dict[int, tuple[int, float]] = {}  # worker -> an iteration, and when it began
        sync = notation(job.sync.first)
        self._sync = JobSync(sync, job.seed)
        self._timers: Timers[SetTimer] = Timers()
        header = Header(sync=sync, host="coordinator", seed=job.seed, emulated=job.emulated)
        trace = BestEffortFile(Path(job.run_dir, "trace-coordinator.jsonl"), self.faults.append)
        self._recorder = Recorder(trace, header)
        self._begun = False  # the servers have been told of their shards
        self._publisher = -1  # the worker whose weights are everybody's, once training has begun
        self._master: Region | None = None  # over shared memory, the weights that the servers update
        self._committed: dict[int, int] = {}  # without overlap: worker -> the iteration that it waits to pull
        self._collection: Collection | None = None  # of the weights, once they have been asked for
        self._stops_s: float | None = None  # when the loop ends, at the latest; None while the run goes on
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # from other threads
        self._bell, self._bell_end = socket.socketpair()
        self._bell_end.setblocking(False)
        self._hub: Hub[Member] = Hub(
            "the coordinator", job.token, listener, FromPeerToCoordinator, Member, self
        )
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

    def fate(self, worker: int) -> str:
        """Whether a worker is "finished" or "lost"; "" if it takes part."""
        if worker in self.lost:
            return "lost"
        return "finished" if worker in self._left else ""

    def ending(self, worker: int) -> str:
        """How a worker that was lost has ended, in words, as far as that is known."""
        return self.endings.get(worker, "its connection ended")

    @property
    def everybody_left(self) -> bool:
        """True if no worker is left, finished or lost."""
        return len(self._left) == self.job.workers

    @property
    def publisher(self) -> int:
        """The worker whose weights are everybody's; -1 before training begins."""
        return self._publisher

    @property
    def awaiting_turn(self) -> set[int]:
        """Without overlap: the workers that have pushed, and wait for the others' pushes before they pull."""
        return set(self._committed)

    @property
    def sync(self) -> str:
        """The sync model in force, or the next one while it is being changed."""
        return self._sync.sync

    def worker_ended(self, worker: int, how: str) -> None:
        """Report that a worker's process has ended, however and whenever, with how in words.

        What it has still said is heard first; unless that was its goodbye, it is lost.
        """

        def note() -> None:
            self.endings.setdefault(worker, how)
            if (member := self._member("worker", worker)) is not None:
                self._hub.expect_end(member)
            else:
                self._leave(worker, finished=False)

        self._call(note)

    def collect(self) -> Collection:
        """Have the servers send their weights. Wait for the `finished` of what is returned."""
        assert self.model is not None
        collection = Collection(self.model, [shard for shard, _ in self.shards], self._master)

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
        """Ask every server that owes no answer who waits for what; see `waits`."""

        self.waits.clear()

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
                    now_s = self.job.now_s()
                    self._tell(TimerFired(now_s=now_s, worker=timer.worker, iteration=timer.iteration))
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

    def greeted(self, peer: Member, hello: Hello) -> None:
        count = {"server": self.job.servers, "worker": self.job.workers}.get(hello.role, 0)
        taken = {other.index for other in self._of_role(hello.role)}
        if hello.role == "worker":
            taken |= self._left
        if not 0 <= hello.index < count or hello.index in taken:
            raise ProtocolError(f"{hello.role} {hello.index} is not expected")
        peer.role, peer.index, peer.address = hello.role, hello.index, hello.address
        self.heard_s[peer.role, peer.index] = time.monotonic()
        self._begin_if_complete()

    def payload_targets(self, peer: Member, message: Message, size_bytes: int) -> Sequence[memoryview]:
        if isinstance(message, Snapshot) and peer.role == "server" and self._collection is not None:
            return self._collection.targets(message, peer.index, self.job.servers)
        return no_payload(message, size_bytes)

    def gone(self, peer: Member, reason: str) -> None:
        if peer.role == "worker":
            self._leave(peer.index, finished=False)
        elif peer.role == "server" and self._stops_s is None:
            self.gone_servers.append(peer.index)
            if self._collection is not None:
                self._collect_from(peer.index)
            self.over.set()

    def received(self, peer: Member, message: Message) -> None:
        self.heard_s[peer.role, peer.index] = time.monotonic()
        match message:
            case Ready() if peer.role == "server":
                peer.ready = True
                self._start_if_ready()
            case Register() if peer.role == "worker" and peer.model is None and not self._begun:
                require_sound(message.model)
                peer.model = message.model
                self.registered_s[peer.index] = time.monotonic()
                self._begin_if_complete()
            case AllCommitted() if peer.role == "worker" and self.job.overlap == "off":
                self._committed[peer.index] = message.iteration
                self._release_if_complete()
            case Notify() | Begun() | RequestSync() if peer.role == "worker":
                self._tell(self._event(peer.index, message))
            case Faulted() if peer.role == "server":
                words = f"shard {message.shard}: {message.reason}. It goes on with {message.sync}."
                self.faults.append(f"{words}\n{message.traceback}".strip())
                log.error("%s", self.faults[-1])
            case Warned() if len(self.faults) < MOST_FAULTS:
                self.faults.append(f"{peer}: {message.words}")
            case Warned():
                pass  # whoever sends so much has been heard
            case Waits() if peer.role == "server":
                self.waits[peer.index] = message
                self.asked_s.pop(peer.index, None)
            case Snapshot() if peer.role == "server" and self._collection is not None:
                self._collection.arrived(message)
                self._collect_from(peer.index)
            case Status() if peer.role == "worker":
                self._note_pace(peer.index, message)
                self.board[peer.index] = message
                if not self.started.is_set():
                    self.started_s = self.job.now_s()
                    self.started.set()
            case Finished() if peer.role == "worker":
                self._leave(peer.index, finished=True)
            case Failed() if message.consequence and peer.role == "worker":
                self.endings[peer.index] = message.reason
                self.cut_off.append(peer.index)
                self._leave(peer.index, finished=False)
            case Failed():
                self.fail(RunFailedError(str(peer), message.reason, message.traceback))
            case _:
                raise ProtocolError(f"{type(message).__name__} is not expected from {peer} now")

    def _note_pace(self, worker: int, now: Status) -> None:
        """Keep how long this worker's iterations take: a mean in which the latest count most."""
        now_s = time.monotonic()
        before = self._paced.get(worker)
        if before is not None and now.iteration > before[0]:
            each_s = (now_s - before[1]) / (now.iteration - before[0])
            usual_s = self.usual_s.get(worker, each_s)
            self.usual_s[worker] = usual_s + (each_s - usual_s) / PACE_SPAN
        if before is None or now.iteration > before[0]:
            self._paced[worker] = now.iteration, now_s

    def _leave(self, worker: int, *, finished: bool) -> None:
        if worker in self._left:
            return
        self._left.add(worker)
        if finished:
            self.finished.append(worker)
        else:
            self.lost.append(worker)
            if worker == self._publisher and not self.started.is_set():
                lost = "it was lost before it had given the first weights"
                self.fail(RunFailedError(f"worker {worker}", lost))
            for server in self._of_role("server"):
                self._hub.send(server, WorkerGone(worker))
        if worker in self._training:
            kind = WorkerFinished if finished else WorkerLost
            self._tell(kind(now_s=self.job.now_s(), worker=worker))
        if self.everybody_left:
            self.over.set()
        self._begin_if_complete()
        self._release_if_complete()

    # -- the weights, when somebody asks for them ---------------------------------------------------------

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

    # -- the beginning ------------------------------------------------------------------------------------

    def _begin_if_complete(self) -> None:
        """When all servers are here and every worker has registered or left, give the servers their shards."""
        servers = self._of_role("server")
        workers = self._of_role("worker")
        registered = [
            worker for worker in workers if worker.model is not None and worker.index not in self._left
        ]
        absent = self.job.workers - len(registered) - len(self._left)
        if self._begun or absent or not registered or len(servers) < self.job.servers:
            return
        first = registered[0].model
        assert first is not None
        for worker in registered[1:]:
            assert worker.model is not None
            difference = first_difference(first, worker.model)
            if difference:
                self._refuse(worker, f"its model differs from {registered[0]}'s: {difference}")
                return
        try:
            slices = SLICE[self.job.slicing](first.layout, self.job.shards)
        except ConfigurationError as error:
            self._refuse(registered[0], str(error))
            return
        if reason := self._shortage(first, len(registered)):
            self.fail(RunFailedError("the run", reason))
            for worker in registered:
                worker.model = None  # were only some refused, the rest would begin when those have left
                self._hub.send(worker, Refused(reason))
            return
        self._begun = True
        self._publisher = registered[0].index
        self.model = first
        if self.job.transport == "shm":
            self._master = Region.create(first.layout, MASTER, shared=True)
        count = len(servers)
        self.shards = [(shard, servers[shard.index % count].address) for shard in slices]
        members = tuple(worker.index for worker in registered)
        self._training = set(members)
        for index, server in enumerate(servers):
            mine = slices[index::count]
            syncs = tuple(self.job.sync.at_shard(shard.index) for shard in mine)
            self._hub.send(
                server,
                CreateShards(first, mine, syncs, members, self._publisher),
                descriptors=self._descriptors,
            )
        for worker in registered:
            self._tell(WorkerJoined(now_s=self.job.now_s(), worker=worker.index))

    def _shortage(self, model: ModelSpec, workers: int) -> str:
        """Why there is too little memory on this machine, where all processes run so far; "" if there is enough."""
        job, optimizer, layout = self.job, model.optimizer, model.layout
        vectors = state_vectors(optimizer.name, optimizer.groups, layout.sizes)
        needed = footprint(layout.size_bytes, vectors, workers, job.servers, job.transport)
        return shortage(needed, available_bytes(), f"{workers} workers over {job.transport}")

    def _start_if_ready(self) -> None:
        if not all(server.ready for server in self._of_role("server")):
            return
        workers = [worker for worker in self._of_role("worker") if worker.index not in self._left]
        for worker in workers:
            slices = tuple(shard for shard, _ in self.shards)
            addresses = tuple(address for _, address in self.shards)
            started = Started(slices, addresses, self._publisher)
            self._hub.send(worker, started, descriptors=self._descriptors)
        if self._master is not None:
            self._master.close()  # everybody has its descriptor, or will find it in a message that has left

    @property
    def _descriptors(self) -> list[int]:
        """What comes with the word to begin: the master, over shared memory."""
        descriptor = self._master.descriptor if self._master is not None else None
        return [] if descriptor is None else [descriptor]

    def _refuse(self, worker: Member, reason: str) -> None:
        self._hub.send(worker, Refused(reason))
        self.fail(RunFailedError(str(worker), reason))

    # -- without overlap ----------------------------------------------------------------------------------

    def _release_if_complete(self) -> None:
        """Without overlap: when every worker's push of an iteration has been taken everywhere, all may pull."""
        training = self._training - self._left
        waiting = {worker: done for worker, done in self._committed.items() if worker in training}
        if training and waiting.keys() == training:
            self._committed.clear()
            for worker, iteration in waiting.items():
                self._send(worker, MayPull(iteration))

    # -- the sync model -----------------------------------------------------------------------------------

    def _event(self, worker: int, message: Notify | Begun | RequestSync) -> AnyEvent:
        now_s = self.job.now_s()
        match message:
            case Notify():
                return IterationFinished(
                    now_s=now_s,
                    worker=worker,
                    iteration=message.iteration,
                    superstep=message.superstep,
                    change=message.change,
                )
            case Begun():
                return IterationStarted(now_s=now_s, worker=worker, iteration=message.iteration)
            case RequestSync():
                try:
                    self.job.read_sync(message.sync)
                except ConfigurationError as error:
                    raise ProtocolError(f"it asks for a sync model that cannot run here: {error}") from error
                return SyncRequested(
                    now_s=now_s,
                    worker=worker,
                    source=message.source,
                    number=message.number,
                    sync=message.sync,
                )

    def _tell(self, event: AnyEvent) -> None:
        """Hand an event to the sync model's part here, and carry its actions out."""
        try:
            actions = self._sync.handle(event)
        except ProtocolError as error:
            self._recorder.record(Entry(event, refused=str(error)))
            raise
        self._recorder.record(Entry(event, list(actions)))
        for action in actions:
            self._perform(action)

    def _perform(self, action: AnyAction) -> None:
        match action:
            case PublishPlan():
                stop = Stop(superstep=action.plan.superstep, members=action.plan.members)
                for worker, iteration in action.plan.stops:
                    self._send(worker, Stopping(stop, iteration))
            case RestartWorker():
                self._send(action.worker, Restart(action.iteration))
            case PublishChange():
                for worker in action.change.members:
                    self._send(worker, Changing(action.change))
            case SetTimer():
                self._timers.set(action.due_s, action)
            case _:
                raise InternalError(f"a coordinator cannot {action}")

    def _send(self, worker: int, message: Message) -> None:
        """Send to a worker, if it is connected."""
        if (member := self._member("worker", worker)) is not None:
            self._hub.send(member, message)

    def _member(self, role: str, index: int) -> Member | None:
        """The connection of a server or worker; None if there is none."""
        return next((m for m in self._hub.peers if (m.role, m.index) == (role, index)), None)

    def _of_role(self, role: str) -> list[Member]:
        return sorted((m for m in self._hub.peers if m.role == role), key=lambda member: member.index)


def first_difference(one: ModelSpec, other: ModelSpec) -> str:
    """The first thing in which two workers' models differ, in words; "" if they are the same."""
    pairs = zip(one.layout.parameters, other.layout.parameters, strict=False)
    for mine, theirs in pairs:
        if mine != theirs:
            return f"{theirs} where the other has {mine}"
    counts = len(one.layout.parameters), len(other.layout.parameters)
    if counts[0] != counts[1]:
        return f"{counts[1]} parameters where the other has {counts[0]}"
    if one.optimizer.name != other.optimizer.name:
        return f"optimizer {other.optimizer.name} where the other has {one.optimizer.name}"
    counts = len(one.optimizer.groups), len(other.optimizer.groups)
    if counts[0] != counts[1]:
        return f"{counts[1]} parameter groups where the other has {counts[0]}"
    if one.optimizer.group_of != other.optimizer.group_of:
        return "its parameter groups are made of other parameters"
    for own, others in zip(one.buffers, other.buffers, strict=False):
        if own != others:
            return f"buffer {others} where the other has {own}"
    if len(one.buffers) != len(other.buffers):
        return f"{len(other.buffers)} buffers where the other has {len(one.buffers)}"
    return ""

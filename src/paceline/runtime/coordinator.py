"""The coordinator's host loop: who takes part, who is alive, and the plans for the whole job.

It compares what the workers are about to train, tells the servers and then the workers that training begins,
hosts the sync model's part for the whole job (plans, restarts, changes of model), and hears what each worker is
doing. It is never on the path of a push or a pull. Its thread belongs to whoever started the run; the few things
that others ask of it go through `Coordinator`'s public names, all of which are safe to use from another thread.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigurationError, InternalError, ProtocolError, RunFailedError
from ..footprint import available_bytes, footprint, shortage, state_vectors
from ..layout import Layout, ShardSlice
from ..sync.actions import AnyAction, PublishChange, PublishPlan, RestartWorker, SetTimer
from ..sync.changes import JobSync
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
from ..sync.notation import notation, parse_shards, require_shards
from ..trace import Entry, Header, Recorder
from ..wire.addresses import listen_tcp, listen_unix
from ..wire.memory import MASTER, Region
from ..wire.messages import (
    AllCommitted,
    Begun,
    Changing,
    CreateShards,
    Failed,
    Faulted,
    Finished,
    FromPeerToCoordinator,
    Hello,
    MayPull,
    Message,
    ModelSpec,
    Notify,
    Ready,
    Refused,
    Register,
    RequestSync,
    Restart,
    Shutdown,
    Started,
    Status,
    Stopping,
    WorkerGone,
)
from ..wire.stream import Stream, no_payload
from .hub import Hub, Peer
from .job import LOOPBACK, Job
from .timers import Timers

__all__ = ["SLICE", "Coordinator", "first_difference"]

log = logging.getLogger("paceline.coordinator")

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
        lost: workers that were lost.
        faults: what went wrong without ending the run, in words, in order.
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
        self._left: set[int] = set()  # workers that have finished or were lost
        self.faults: list[str] = []
        sync = notation(job.sync.first)
        self._sync = JobSync(sync, job.seed)
        self._timers: Timers[SetTimer] = Timers()
        header = Header(sync=sync, host="coordinator", seed=job.seed, emulated=job.emulated)
        self._recorder = Recorder.to_path(Path(job.run_dir, "trace-coordinator.jsonl"), header)
        self._begun = False  # the servers have been told of their shards
        self._publisher = -1  # the worker whose weights are everybody's, once training has begun
        self._master: Region | None = None  # over shared memory, while training begins
        self._committed: dict[int, int] = {}  # without overlap: worker -> the iteration that it waits to pull
        self._running = True
        self._bell, self._bell_end = socket.socketpair()
        self._hub: Hub[Member] = Hub(
            "the coordinator", job.token, listener, FromPeerToCoordinator, Member, self
        )
        self._hub.watch(self._bell_end, lambda: None)  # `stop` rings: `_running` says the rest
        self._thread = threading.Thread(target=self._run, name="paceline-coordinator", daemon=True)

    @classmethod
    def listen(cls, job: Job, host: str = LOOPBACK) -> Coordinator:
        """A coordinator that listens on a new socket; over TCP, at one of this machine's addresses.

        Raises:
            ConfigurationError: the port cannot be listened on.
        """
        return cls(job, *(listen_tcp(host, job.port) if job.transport == "tcp" else listen_unix()))

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

    @property
    def sync(self) -> str:
        """The sync model in force, or the next one while it is being changed."""
        return self._sync.sync

    def stop(self) -> None:
        """Tell the servers to write their traces and exit; end the thread."""
        self._running = False
        with contextlib.suppress(OSError):  # the thread has ended already and closed it
            self._bell.send(b"x")
        if self._thread.is_alive():
            self._thread.join()

    # -- the loop -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._running:
                self._hub.poll(self._timers.left_s(self.job.now_s()))
                for timer in self._timers.take_due(self.job.now_s()):
                    now_s = self.job.now_s()
                    self._tell(TimerFired(now_s=now_s, worker=timer.worker, iteration=timer.iteration))
            for server in self._of_role("server"):
                self._hub.send(server, Shutdown())
        except Exception as error:  # whatever it is, the run must end and say so
            log.exception("the coordinator failed")
            self.fail(RunFailedError("the coordinator", str(InternalError(repr(error)))))
        finally:
            self._recorder.close()
            self._hub.close()
            self._forget_master()
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
        self._begin_if_complete()

    def payload_targets(self, peer: Member, message: Message, size_bytes: int) -> Sequence[memoryview]:
        return no_payload(message, size_bytes)

    def gone(self, peer: Member, reason: str) -> None:
        if peer.role == "worker":
            self._leave(peer, finished=False)

    def received(self, peer: Member, message: Message) -> None:
        match message:
            case Ready() if peer.role == "server":
                peer.ready = True
                self._start_if_ready()
            case Register() if peer.role == "worker" and peer.model is None and not self._begun:
                peer.model = message.model
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
            case Status() if peer.role == "worker":
                self.board[peer.index] = message
                if not self.started.is_set():
                    self.started_s = self.job.now_s()
                    self.started.set()
            case Finished() if peer.role == "worker":
                self._leave(peer, finished=True)
            case Failed() if peer.role == "worker":
                self.fail(RunFailedError(str(peer), message.reason, message.traceback))
            case _:
                raise ProtocolError(f"{type(message).__name__} is not expected from {peer} now")

    def _leave(self, member: Member, *, finished: bool) -> None:
        if member.index in self._left:
            return
        self._left.add(member.index)
        if not finished:
            self.lost.append(member.index)
            if member.index == self._publisher and member.index not in self.board:
                self.fail(RunFailedError(str(member), "it was lost before it had given the first weights"))
            for server in self._of_role("server"):
                self._hub.send(server, WorkerGone(member.index))
        if self._begun and member.model is not None:
            kind = WorkerFinished if finished else WorkerLost
            self._tell(kind(now_s=self.job.now_s(), worker=member.index))
        if len(self._left) == self.job.workers:
            self.over.set()
        self._begin_if_complete()
        self._release_if_complete()

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
        self._forget_master()  # everybody has its descriptor, or will find it in a message that has left

    def _forget_master(self) -> None:
        if self._master is not None:
            self._master.close()
            self._master = None  # its mapping holds a descriptor too

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
        training = {w.index for w in self._of_role("worker") if w.model is not None} - self._left
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
                    require_shards(parse_shards(message.sync), self.job.shards)
                except ConfigurationError as error:
                    raise ProtocolError(f"it asks for a sync model that there is not: {error}") from error
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
        for member in self._hub.peers:
            if member.role == "worker" and member.index == worker:
                self._hub.send(member, message)

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

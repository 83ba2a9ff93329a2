"""The coordinator's host loop: who takes part, who is alive, and the plans for the whole job.

It compares what the workers are about to train, tells the servers and then the workers that training begins,
hosts the sync model's machine where the model has one, and hears what each worker is doing. It is never on the
path of a push or a pull. Its thread belongs to whoever started the run; the few things that others ask of it
go through `Coordinator`'s public names, all of which are safe to use from another thread.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import selectors
import socket
import threading
from pathlib import Path

from ..errors import InternalError, PeerLostError, ProtocolError, RunFailedError
from ..layout import ShardSlice
from ..sync import Machine
from ..sync.actions import PublishPlan
from ..sync.events import AnyEvent, IterationFinished, Stop, WorkerFinished, WorkerJoined, WorkerLost
from ..trace import Entry, Header, Recorder
from ..wire.addresses import listen_tcp, listen_unix
from ..wire.messages import (
    CreateShards,
    Failed,
    Finished,
    FromPeerToCoordinator,
    Hello,
    Message,
    ModelSpec,
    Notify,
    Ready,
    Refused,
    Register,
    Shutdown,
    Started,
    Status,
    Stopping,
    WorkerGone,
)
from ..wire.stream import Stream
from .job import Job

__all__ = ["Coordinator", "first_difference"]

log = logging.getLogger("paceline.coordinator")


class Member:
    """One connection: a server's or a worker's."""

    def __init__(self, stream: Stream[FromPeerToCoordinator]) -> None:
        self.stream = stream
        self.role = ""  # until it has greeted
        self.index = -1
        self.address = ""  # where a server listens
        self.ready = False  # a server that knows its shards
        self.model: ModelSpec | None = None  # what a worker has registered

    def __str__(self) -> str:
        return f"{self.role} {self.index}" if self.role else "a connection that has not shown the job's token"


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
    """

    def __init__(self, job: Job, listener: socket.socket, address: str) -> None:
        self.job = job
        self.address = address
        self._listener = listener
        self.board: dict[int, Status] = {}
        self.model: ModelSpec | None = None
        self.shards: list[tuple[ShardSlice, str]] = []
        self.started = threading.Event()
        self.started_s = 0.0
        self.over = threading.Event()
        self.failure: RunFailedError | None = None
        self.lost: list[int] = []
        self._members: set[Member] = set()
        self._left: set[int] = set()  # workers that have finished or were lost
        self._machine: Machine | None = job.sync.at_coordinator()
        self._recorder: Recorder | None = None
        if self._machine is not None:
            header = Header(sync=job.sync, host="coordinator", emulated=job.emulated)
            self._recorder = Recorder.to_path(Path(job.run_dir, "trace-coordinator.jsonl"), header)
        self._begun = False  # the servers have been told of their shards
        self._publisher = -1  # the worker whose weights are everybody's, once training has begun
        self._running = True
        self._bell, self._bell_end = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell_end, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="paceline-coordinator", daemon=True)

    @classmethod
    def listen(cls, job: Job, port: int = 0) -> Coordinator:
        """A coordinator that listens on a new socket, with transport "tcp" on this port (0: any free one).

        Raises:
            ConfigurationError: the port cannot be listened on.
        """
        return cls(job, *(listen_unix() if job.transport == "shm" else listen_tcp(port=port)))

    # -- for other threads --------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def fail(self, failure: RunFailedError) -> None:
        """Report a failure seen from outside, such as a process that died. The first one is kept."""
        self.failure = self.failure or failure
        self.over.set()

    def gone(self, worker: int) -> str:
        """ "finished" or "lost"; "" for a worker that takes part."""
        if worker in self.lost:
            return "lost"
        return "finished" if worker in self._left else ""

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
                for key, events in self._selector.select():
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._members:
                        self._serve(key.data, events)
            for server in self._of_role("server"):
                self._send(server, Shutdown())
        except Exception as error:  # whatever it is, the run must end and say so
            log.exception("the coordinator failed")
            self.fail(RunFailedError("the coordinator", str(InternalError(repr(error)))))
        finally:
            if self._recorder is not None:
                self._recorder.close()
            for member in self._members:
                member.stream.close()
            self._listener.close()
            self._selector.close()
            self._bell.close()
            self._bell_end.close()

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        member = Member(Stream(sock, FromPeerToCoordinator, trusted=False))
        self._members.add(member)
        self._selector.register(member.stream, selectors.EVENT_READ, member)

    def _serve(self, member: Member, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                member.stream.flush()
                self._watch(member)
            if events & selectors.EVENT_READ:
                for message in member.stream.receive():
                    self._handle(member, message)
        except PeerLostError:
            self._drop(member)
        except ProtocolError as error:
            log.warning("the coordinator refused %s: %s", member, error)
            self._drop(member)

    def _drop(self, member: Member) -> None:
        if member not in self._members:
            return
        self._members.remove(member)
        self._selector.unregister(member.stream)
        member.stream.close()
        if member.role == "worker":
            self._leave(member, finished=False)

    def _send(self, member: Member, message: Message) -> None:
        try:
            member.stream.send(message)
            self._watch(member)
        except PeerLostError:
            log.info("%s is gone; its connection will say so", member)

    def _watch(self, member: Member) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if member.stream.backlog else 0)
        self._selector.modify(member.stream, wanted, member)

    # -- messages -----------------------------------------------------------------------------------------

    def _handle(self, member: Member, message: Message) -> None:
        match message:
            case Hello() if not member.role:
                self._greet(member, message)
            case _ if not member.role:
                raise ProtocolError("it did not show the job's token")
            case Ready() if member.role == "server":
                member.ready = True
                self._start_if_ready()
            case Register() if member.role == "worker" and member.model is None and not self._begun:
                member.model = message.model
                self._begin_if_complete()
            case Notify() if member.role == "worker":
                self._tell(
                    IterationFinished(
                        now_s=self.job.now_s(),
                        worker=member.index,
                        iteration=message.iteration,
                        superstep=message.superstep,
                    )
                )
            case Status() if member.role == "worker":
                self.board[member.index] = message
                if not self.started.is_set():
                    self.started_s = self.job.now_s()
                    self.started.set()
            case Finished() if member.role == "worker":
                self._leave(member, finished=True)
            case Failed() if member.role == "worker":
                self.fail(RunFailedError(str(member), message.reason, message.traceback))
            case _:
                raise ProtocolError(f"{type(message).__name__} is not expected from {member} now")

    def _greet(self, member: Member, message: Hello) -> None:
        if not hmac.compare_digest(message.token.encode(), self.job.token.encode()):
            raise ProtocolError("it did not show the job's token")
        count = {"server": self.job.servers, "worker": self.job.workers}.get(message.role, 0)
        taken = {other.index for other in self._of_role(message.role)}
        if not 0 <= message.index < count or message.index in taken | self._left:
            raise ProtocolError(f"{message.role} {message.index} is not expected")
        member.role, member.index, member.address = message.role, message.index, message.address
        member.stream.trusted = True
        self._begin_if_complete()

    def _leave(self, member: Member, *, finished: bool) -> None:
        if member.index in self._left:
            return
        self._left.add(member.index)
        if not finished:
            self.lost.append(member.index)
            if member.index == self._publisher and member.index not in self.board:
                self.fail(RunFailedError(str(member), "it was lost before it had given the first weights"))
            for server in self._of_role("server"):
                self._send(server, WorkerGone(member.index))
        if self._begun and member.model is not None:
            kind = WorkerFinished if finished else WorkerLost
            self._tell(kind(now_s=self.job.now_s(), worker=member.index))
        if len(self._left) == self.job.workers:
            self.over.set()
        self._begin_if_complete()

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
                reason = f"its model differs from {registered[0]}'s: {difference}"
                self._send(worker, Refused(reason))
                self.fail(RunFailedError(str(worker), reason))
                return
        self._begun = True
        self._publisher = registered[0].index
        self.model = first
        slices = first.layout.slice_evenly(self.job.servers)
        self.shards = [(shard, server.address) for shard, server in zip(slices, servers, strict=True)]
        for shard, server in zip(slices, servers, strict=True):
            self._send(
                server,
                CreateShards(
                    first, (shard,), self.job.sync, tuple(w.index for w in registered), self._publisher
                ),
            )
        for worker in registered:
            self._tell(WorkerJoined(now_s=self.job.now_s(), worker=worker.index))

    def _start_if_ready(self) -> None:
        if not all(server.ready for server in self._of_role("server")):
            return
        workers = [worker for worker in self._of_role("worker") if worker.index not in self._left]
        for worker in workers:
            slices = tuple(shard for shard, _ in self.shards)
            addresses = tuple(address for _, address in self.shards)
            self._send(worker, Started(slices, addresses, self._publisher))

    # -- the sync model -----------------------------------------------------------------------------------

    def _tell(self, event: AnyEvent) -> None:
        """Hand an event to the sync model's machine, if it has one here, and carry its actions out."""
        if self._machine is None or self._recorder is None:
            return
        try:
            actions = self._machine.handle(event)
        except ProtocolError as error:
            self._recorder.record(Entry(event, refused=str(error)))
            raise
        self._recorder.record(Entry(event, list(actions)))
        for action in actions:
            if not isinstance(action, PublishPlan):
                raise InternalError(f"a coordinator cannot {action}")
            plan = action.plan
            stop = Stop(superstep=plan.superstep, members=plan.members)
            iterations = dict(plan.stops)
            for worker in self._of_role("worker"):
                if worker.index in iterations:
                    self._send(worker, Stopping(stop, iterations[worker.index]))

    def _of_role(self, role: str) -> list[Member]:
        return sorted((m for m in self._members if m.role == role), key=lambda member: member.index)


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
    if one.optimizer.group_of != other.optimizer.group_of:
        return "its parameter groups are made of other parameters"
    for own, others in zip(one.buffers, other.buffers, strict=False):
        if own != others:
            return f"buffer {others} where the other has {own}"
    if len(one.buffers) != len(other.buffers):
        return f"{len(other.buffers)} buffers where the other has {len(one.buffers)}"
    return ""

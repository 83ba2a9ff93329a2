"""The event loop of the coordinator: it receives messages, passes them to the core and performs the core's requests.

The core is the state machine in `paceline.core.coordinator`. This module contains everything that needs a clock,
shared memory or another thread: the time of each peer's last message, the memory for the weights, and the collection
of the weights at the end of the run. The loop runs on a thread in the launcher's process. Only this thread reads and
changes the core. The loop regularly publishes a `report`, which other threads of the process read. Other threads may
call only the methods in the section "for other threads".
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, ParamSpec, TypeVar

import msgspec

from ..core import coordinator as core
from ..core.auto import ModelChoice, Prospect
from ..core.guard import Guard
from ..core.layout import ModelSpec, ShardSlice
from ..core.members import Fate
from ..core.messages import (
    Bell,
    CheckpointRequested,
    Contributed,
    CopiesReserved,
    CreateShards,
    CutCopied,
    CutPiece,
    CutWritten,
    ExtendShards,
    FetchWaits,
    Hello,
    KeepWorkerState,
    Message,
    ModelExtended,
    Refused,
    Register,
    Shutdown,
    Snapshot,
    Started,
    Status,
    StatusReported,
    StepsTimed,
    TracePart,
    Waits,
)
from ..core.requests import (
    AbandonCut,
    CompleteCut,
    EndWithout,
    Fail,
    Host,
    Peer,
    Rehearse,
    Request,
    SaveCut,
    Situation,
    TakeOut,
    Timer,
    Warn,
    server_peer,
    worker_peer,
)
from ..core.status import JobStatus
from ..errors import (
    ConfigurationError,
    InternalError,
    ProtocolError,
    RunFailedError,
    UserCodeError,
    refused_by_system,
)
from ..sync.model import Samples
from ..sync.notation import notation
from ..sync.ticks import TICKS_PER_S
from ..trace.keyframes import keyframe_of
from ..trace.recording import Header, Recorder
from ..wire.memory import ConnectionSource, Region, file_limit, shared_memory_available
from ..wire.preface import Patience
from ..wire.stream import Stream, no_payload
from .agents import Agents, AwaitedProcess, JobWatch, Machines, MachinesLeft, StallWatch
from .checkpointing import STATES_S, Checkpoints, Completion
from .compute_devices import CPU
from .footprint import available_bytes, file_shortage, footprint, served_shortage, shortage, vectors_of
from .hub import Caller, Hub, Timers
from .job import LOOPBACK, Job
from .readers import Collection
from .registration import require_sound
from .resuming import cut_of
from .server_memory import SharedWeights
from .traces import TEND_TICKS, MetricsWriter, SegmentedFile, TraceFiles, segmenting

log = logging.getLogger("paceline.coordinator")

STOP_POLL_S = 0.05
MOST_OBSERVERS = 32
# A descriptor can be sent only after all earlier messages. This is the maximum time for which the peer may read none of
# these messages.
DRAIN_SILENCE_S = 1.0
REPORT_INTERVAL_S = 0.05  # minimum time between two reports
LOOK_INTERVAL_TICKS = TICKS_PER_S // 2  # minimum time between two requests of `refresh` to the servers


class LateCheckpoint(NamedTuple):
    """A checkpoint that waits for the states of some workers' scripts.

    Attributes:
        number: number of the checkpoint.
        workers: the workers for which the checkpoint waits.
        waits_s: number of seconds for which the checkpoint has waited.
    """

    number: int
    workers: tuple[int, ...]
    waits_s: float

    @property
    def words(self) -> str:
        """The message to the user."""
        names = ", ".join(f"worker {worker}" for worker in self.workers)
        return (
            f"Checkpoint {self.number} has waited {self.waits_s:.0f} s for these workers to ask for the next batch: "
            f"{names}. Training goes on meanwhile."
        )


class Departed(NamedTuple):
    """An incarnation of a worker that has left the run. See `Departure` for the first three attributes.

    Attributes:
        cause: a phrase that says why the worker has left.
        returned: True if a later incarnation takes part in the run, or has taken part.
        explained: False if it is not yet known how the worker's process has ended.
    """

    worker: int
    incarnation: int
    fate: Fate
    cause: str
    returned: bool
    explained: bool


class StateReport(msgspec.Struct, frozen=True):
    """The state of a run at one moment. The run's coordinator regularly publishes a new report.

    Attributes:
        model: the model that is trained; None before training begins.
        shards: the slice of each shard, with the address of the shard's server.
        samples: see `Coordinator.samples`.
        started: True once a worker has received its first weights.
        main: the main worker.
        hindrance: why batches are not balanced, if the run chooses its sync models; else "".
        choices: the sync models that the run has chosen.
        live: the live workers.
        departed: the workers that have left the run.
        cut_off: True if a lost worker has reported that another process had ended.
        everybody_left: True if all workers have left, so that the run must end.
        shortage: see `Coordinator.shortage`.
        vacant: the servers that machines have yet to bring.
        faults: problems that did not end the run.
        findings: see `Coordinator.findings`.
        repeated_bases: see `Coordinator.repeated_bases`.
        silent: process that has ever been awaited, and has not left -> its incarnation, and the time at which its
            silence began, which changes when the process sends a message.
        awaited: the processes for which the run has been waiting for an unusually long time.
        standstill: see `StallWatch`.
        late_checkpoint: the checkpoint that has waited for the states of scripts for a long time; None if there is
            none.
        steps: server -> the times of the server's steps, from its latest report.
    """

    model: ModelSpec | None
    shards: tuple[tuple[ShardSlice, str], ...]
    samples: Samples | None
    started: bool
    main: int
    hindrance: str
    choices: tuple[ModelChoice, ...]
    live: frozenset[int]
    departed: tuple[Departed, ...]
    cut_off: bool
    everybody_left: bool
    shortage: str
    vacant: tuple[int, ...]
    faults: tuple[str, ...]
    findings: tuple[str, ...]
    repeated_bases: int
    silent: Mapping[tuple[str, int], tuple[int, float]]
    awaited: tuple[AwaitedProcess, ...]
    standstill: str
    late_checkpoint: LateCheckpoint | None
    steps: Mapping[int, StepsTimed]

    @classmethod
    def of(cls, host: CoordinatorHost) -> StateReport:
        """Return the current state of a run. Call this method on the thread of the run's coordinator."""
        members, auto, clocks = host.core.members, host.core.auto, host.watch.clocks
        return cls(
            host.core.model,
            tuple(host.core.shards),
            host.core.samples,
            host.core.started,
            host.core.main.worker,
            "" if auto is None else auto.hindrance,
            () if auto is None else tuple(auto.choices),
            frozenset(members.live),
            tuple(
                Departed(
                    *each, host.core.cause(each), members.has_returned(each), each[:2] in host.core.endings
                )
                for each in members.departures
            ),
            bool(host.core.cut_off),
            host.core.everybody_left,
            host.core.shortage,
            tuple(host.core.servers.vacant),
            tuple(host.core.faults),
            tuple(host.core.findings),
            host.core.repeated_bases,
            {
                (role, index): (members.incarnation(index) if role == "worker" else 0, clock)
                for role, index in host.stalls.ever_awaited
                if (clock := clocks.began_s(("silent", role, index))) is not None
            },
            host.stalls.awaited,
            host.stalls.standstill,
            host.late_checkpoint(),
            host.steps,
        )

    def has_left(self, *fates: Fate) -> bool:
        """Return True if any worker has left in one of these ways."""
        return any(each.fate in fates for each in self.departed)


Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")

Rehearsal = Callable[[Situation, Callable[[Sequence[Prospect]], None]], None]
"""A function that starts a simulation and returns immediately. The second argument is called with the results."""


class CoordinatorHost(Host):
    """The coordinator of one run: starts training, tracks the workers and servers, and ends the run.

    Args:
        job: the configuration of the run.
        listener: a listening socket, of which the coordinator takes ownership.
        address: the address of the listening socket.
        rehearse: function that takes observations of the run and a callback, and starts a simulation. When the
            simulation has ended, the callback is called with the results, on any thread. Needed if the run chooses its
            sync models (`--sync auto`).

    Attributes:
        job: the configuration of the run.
        address: the address on which the coordinator listens.
        core: the state machine of the coordinator. Only the coordinator's thread may use it.
        report: a recent state of the run.
        started: event that is set once any worker has received its first weights from all shards.
        started_s: time at which `started` was set, in seconds since the run began.
        over: event that is set when all workers have left, a server is lost, or the run has failed.
        failure: the first failure that was reported, or the cause of this failure; None if there is none.
        gone_servers: server -> why its connection ended, in order of disconnection. Contains the servers that
            disconnected before they were told to end, and the servers that sent nothing for too long.
        asked: the servers that were asked which workers are waiting, and have not answered yet.
        machines: the machines that have joined the run.
        agents: handles the reports of the agents of these machines.
        watch: what is known of the processes.
        checkpoints: writes the checkpoints.
        status: the state of the job that was computed for the last call of `refresh`; None before the first call.
        steps: server -> the times of the server's steps, from its latest report.
    """

    def __init__(
        self, job: Job, listener: ConnectionSource, address: str, rehearse: Rehearsal | None = None
    ) -> None:
        self._rehearse = rehearse
        self.job = job
        self.address = address
        self.started = threading.Event()
        self.started_s = 0.0
        self.over = threading.Event()
        self.failure: RunFailedError | None = None
        self.gone_servers: dict[int, str] = {}
        self.asked: set[int] = set()
        self.steps: Mapping[int, StepsTimed] = {}
        self._observers: set[Caller] = set()
        self.status: JobStatus | None = None
        self._refreshing = False  # True from a call of `refresh` until the state has been computed
        self._looked_ticks = -LOOK_INTERVAL_TICKS
        header = Header(
            sync=notation(job.schedule.first),
            host="coordinator",
            seed=job.seed,
            emulated=job.emulated,
            imports=job.imports or msgspec.UNSET,
        )
        self._trace: SegmentedFile | None = None
        self._recorder: Recorder | None = None
        if job.traces.kept != "off":
            path = Path(job.run_dir, "trace-coordinator.jsonl")
            segments = segmenting(job, "coordinator")
            self._trace = SegmentedFile(path, lambda text: self.core.faults.append(text), segments)
            self._recorder = Recorder(self._trace, header)
        self._tend_ticks = 0  # time at which the trace is tended next
        self.core = core.Coordinator(
            job.schedule,
            workers=job.workers,
            servers=job.servers,
            shards=job.shards,
            slicing=job.slicing,
            block=job.wire.block,
            overlap=job.overlap == "shards",
            seed=job.seed,
            late=range(job.workers) if job.joined else (),
            late_servers=range(job.local_servers, job.servers),
            least=job.least if job.joined else 1,
            pause_below=job.pause_below,
            read_sync=job.read_sync,
            shortage=self._shortage,
            recorder=self._recorder,
            guard=Guard(job.guard, skips_nan=job.on_nan == "skip"),
            relaxes=job.translated,
            resumed=None if job.resumed is None else cut_of(job.resumed),
            cuts=0 if job.resumed is None else job.resumed.highest,
        )
        self._metrics = MetricsWriter(self.core.history, Path(job.run_dir), self.core.faults.append)
        self._members: dict[tuple[str, int], Caller] = {}  # (role, index) -> connection to this process
        self.machines = Machines()
        self.watch = JobWatch(job, self.core, self.machines)
        self.stalls = StallWatch(job, self.core, self.watch, self.asked, self._ask_anew)
        self._reported_s = time.monotonic()
        self._timers: Timers[Timer] = Timers()
        self._shared = SharedWeights()
        # the traces of servers on other machines
        self._traces = TraceFiles(Path(job.run_dir), self.core.placement, self.core.faults.append)
        self.checkpoints = Checkpoints(
            job,
            lambda server, message: self.send(server_peer(server), message),
            lambda: self._perform(self.core.cut()),
            self.call,
            self.core.faults.append,
        )
        self._collection: Collection | None = None  # None except while the final weights are collected
        # Server from which data is awaited at the end of the run -> for how long it may be silent.
        self._awaited: dict[int, Patience] = {}
        self._stopping = False  # True once the servers have been told to end
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()  # see `call`
        self._bell, self._bell_end = socket.socketpair()
        self._hub: Hub[Caller] = Hub(
            "the coordinator", job.token, listener, "coordinator", Caller, self, job.contexts
        )
        self._hub.watch(self._bell_end, self._take_call)
        self.agents = Agents(
            job,
            self.core,
            self._hub,
            self._members,
            self.machines,
            self.watch,
            self._perform,
            self._give_up,
        )
        self._thread = threading.Thread(target=self._run, name="paceline-coordinator", daemon=True)
        self.report = StateReport.of(self)

    @classmethod
    def listen(cls, job: Job, host: str = LOOPBACK) -> CoordinatorHost:
        """Return a coordinator that listens on a new socket. See `listen_for`."""
        return cls(job, *cls.listen_for(job, host))

    @staticmethod
    def listen_for(job: Job, host: str = LOOPBACK) -> tuple[ConnectionSource, str]:
        """Return a new listening socket for the coordinator of a run, and its address.

        If the transport spans machines, the socket listens on `host`, an address of this machine.

        Raises:
            ConfigurationError: the socket cannot listen on the port.
        """
        return job.carrier.listen(host, job.port, secure=job.secure)

    # -- for other threads --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread of the event loop, and the thread that writes the metrics."""
        self._thread.start()
        self._metrics.start()

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """Return the result of a function.

        The coordinator's thread calls the function. If that thread has ended, the caller's thread calls the function.
        """
        found: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.call(lambda: found.put(question()))
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                return found.get(timeout=STOP_POLL_S)
        return question()

    def conclude(self, endings: Mapping[int, str]) -> None:
        """Publish the final report of a run whose coordinator has stopped.

        Args:
            endings: worker -> how its process has ended.
        """
        for worker, how in endings.items():
            self.core.note_ending(worker, how)
        self._publish()

    @property
    def cause_may_follow(self) -> bool:
        """True if a worker was lost before it had sent the initial weights, perhaps because a server has ended.

        If a server has ended, a report about the end of this server will follow soon.
        """
        return self.failure is not None and self.failure.reason == core.LOST_TOO_EARLY

    def fail(self, failure: RunFailedError) -> None:
        """Report a failure that another thread has detected, such as a crash.

        Later failures are ignored, except for the cause of the first failure.
        """
        if self.failure is None or self.cause_may_follow:
            self.failure = failure
        self.over.set()

    def settle(self) -> MachinesLeft:
        """After a server was lost, give up the checkpoint that is being written.

        From then on, `checkpoints.saved` does not change, unless the disk is so slow that the checkpoint has not been
        given up yet. See `Checkpoints.close`.

        Returns:
            What the remaining machines bring if the run continues.
        """
        self.ask(self.checkpoints.close)
        # The thread makes calls in order, so `saved` has its final value before the following call is made.
        return self.ask(self.agents.left)

    def collect(self) -> Collection:
        """Start collecting the weights. The caller must wait until `finished` of the returned object is set.

        A server is given up only if its connection ends, or carries nothing for `SILENCE_S`. `gone_servers` then
        contains the server. If the coordinator's thread has ended or ends, all connections are closed, so no further
        shard arrives.
        """
        assert self.core.model is not None
        collection = Collection(self.core.model, self.core.slices, self.core.placement, self._shared.master)

        def begin() -> None:
            self.watch.note_own_traffic(self._streams())
            if self.job.joined:  # the answers contain the traffic between servers and machines
                self._ask_servers()
            self._collection = collection
            for server in range(self.job.servers):
                self._collect_from(server)

        self.ask(begin)
        return collection

    def end_collection(self, why: str) -> None:
        """End the collection. If servers are still awaited, give them up, with `why` as the reason."""

        def end() -> None:
            for server in list(self._awaited):
                self._give_up(server, why)
            self._collection = None

        self.ask(end)

    def quiet_s(self) -> dict[int, float]:
        """Return, for each server from which data is awaited, for how many seconds it has sent nothing."""
        return {server: patience.quiet_s for server, patience in self._awaited.copy().items()}

    def refresh(self) -> None:
        """Compute the state of the job. The result appears in `status`, immediately or after a short time.

        For later states, this method also asks the servers which workers wait, at most twice per second.
        """

        def compute() -> None:
            self._refreshing = False
            if self._stopping:
                return
            now_ticks = self.job.now_ticks()
            if now_ticks >= self._looked_ticks + LOOK_INTERVAL_TICKS:
                self._looked_ticks = now_ticks
                self._ask_servers()
            self.status = self.watch.status()

        if not self._refreshing:
            self._refreshing = True
            self.call(compute)

    def stop(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """Order the servers to write their traces and exit, and end the thread when the servers have disconnected.

        A server that sends nothing for `SILENCE_S` is no longer awaited. `gone_servers` then contains the server.

        Args:
            hurried: function that is called repeatedly. Once it returns True, `stop` no longer waits for the servers.
        """

        def end() -> None:
            self._stopping = self.agents.stopping = True
            for server in self._of_role("server"):
                self._hub.send(server, Shutdown())
                self._awaited[server.index] = server.stream.patience()

        self.call(end)
        while self._thread.is_alive():
            self._thread.join(STOP_POLL_S)
            if hurried():
                self.call(self._awaited.clear)

    def call(
        self, function: Callable[Arguments, object], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> None:
        """Let the coordinator's thread call a function, such as a method of `agents`, as soon as the thread is free."""
        self._calls.put(lambda: function(*arguments, **options))
        with contextlib.suppress(OSError):  # the thread has already ended and closed the socket
            self._bell.send(b"x")

    def _publish(self) -> None:
        self.report = StateReport.of(self)

    def late_checkpoint(self) -> LateCheckpoint | None:
        """Return the checkpoint that has waited for the states of scripts for a long time; None if there is none."""
        waits_s, giving = self.checkpoints.waits_s, self.core.reconfigurations.giving
        if waits_s < STATES_S or giving is None or not (awaited := giving.awaited):
            return None
        return LateCheckpoint(giving.number, tuple(awaited), waits_s)

    # -- the loop -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._awaited or not self._stopping:
                try:
                    self._step()
                except UserCodeError as error:  # the loop continues, so that the weights can be collected
                    self.fail(RunFailedError("the coordinator", error.reason, error.traceback))
        except OSError as error:  # the disk is full, or this process has reached a limit; this is not a bug
            log.warning("the coordinator failed", exc_info=True)
            self.fail(RunFailedError("the coordinator", refused_by_system(error)))
        except Exception as error:  # any exception must end the run and be reported
            log.exception("the coordinator failed")
            self.fail(RunFailedError("the coordinator", str(InternalError(repr(error)))))
        finally:
            if self._recorder is not None:
                self._recorder.close()
            self.checkpoints.close()
            self._metrics.close()
            self.agents.close()
            self._traces.close()
            self._hub.close()
            self._members.clear()
            self._awaited.clear()
            if self._collection is not None:  # otherwise, the collection would never end
                for server in range(self.job.servers):
                    self._collect_from(server)
            self._shared.release()
            self._bell.close()
            self._bell_end.close()
            self._publish()

    def _step(self) -> None:
        """Wait for messages, handle them, and carry out everything that is due."""
        self._hub.poll(self._patience_s())
        self.watch.note_states()
        self._look_for_progress()
        if not self._stopping:
            self.agents.look()
        now_ticks = self.job.now_ticks()
        if self.started.is_set() and not self._stopping and self.checkpoints.due(self.job.now_s()):
            self.checkpoints.begin()
        for timer in self._timers.take_due(now_ticks):
            self._perform(self.core.fire(timer, self.job.now_ticks()))
        self._tend_trace(now_ticks)
        if (now_s := time.monotonic()) >= self._reported_s + REPORT_INTERVAL_S:
            self._reported_s = now_s
            if not self.over.is_set():
                self.stalls.look()
            self._publish()

    def _tend_trace(self, now_ticks: int) -> None:
        """Write the buffered part of the trace.

        If the segment is large enough, begin a new one. Call this method only while the core is idle.
        """
        if self._trace is None or self._recorder is None or now_ticks < self._tend_ticks:
            return
        self._tend_ticks = now_ticks + TEND_TICKS
        if self._trace.tend():
            self._recorder.begin_segment(keyframe_of(self.core, self.job.imports))

    def _ask_anew(self) -> None:
        """Forget the earlier answers of the servers, and ask the servers again."""
        self.core.waits.clear()
        self._ask_servers()

    def _ask_servers(self) -> None:
        for server in self._of_role("server"):
            if server.index not in self.asked:
                self.asked.add(server.index)
                self.watch.clocks.begin(("asked", "server", server.index), time.monotonic())
                self._hub.send(server, FetchWaits())

    def _patience_s(self) -> float:
        """Return the maximum time to wait for messages."""
        if self._stopping:
            return STOP_POLL_S
        now_ticks = self.job.now_ticks()
        limits_s = [REPORT_INTERVAL_S]
        if (left_s := self._timers.left_s(now_ticks)) is not None:
            limits_s.append(left_s)
        if self.started.is_set() and (next_s := self.checkpoints.next_s) is not None:
            limits_s.append(max(0.0, next_s - self.job.now_s()))
        limits_s += [patience.wait_s for patience in self._awaited.values()]
        if (look_ticks := self.machines.liveness.next_ticks) is not None:
            limits_s.append(max(0.0, (look_ticks - now_ticks) / TICKS_PER_S))
        return min(limits_s)

    def _look_for_progress(self) -> None:
        """Give up the awaited servers whose connections have carried nothing for too long."""
        for server, patience in list(self._awaited.items()):
            if patience.look():
                for agent in self.machines.agents_of("server", server):
                    self.machines.liveness.moved(agent, self.job.now_ticks())
            elif patience.over:
                task = "write its traces" if self._stopping else "send its weights"
                self._give_up(server, f"it had to {task}, but sent nothing for {patience.quiet_s:.0f} s")

    def _give_up(self, server: int, why: str) -> None:
        """Close the connection to a server for the given reason, and record the reason."""
        self.gone_servers.setdefault(server, why)
        if (member := self._member("server", server)) is not None:
            self._hub.drop(member, why)

    # -- called by the hub --------------------------------------------------------------------------------

    def greeted(self, peer: Caller, hello: Hello) -> None:
        if hello.role == "observer":
            if len(self._observers) >= MOST_OBSERVERS:
                raise ProtocolError(f"there are already {MOST_OBSERVERS} observers")
            peer.role = "observer"
            self._observers.add(peer)
            return
        if hello.role == "agent":
            peer.role, peer.index = "agent", self.machines.add()
            self._members["agent", peer.index] = peer
            return
        party = Peer("server" if hello.role == "server" else "worker", hello.index)
        self.core.require_expected(party, hello.incarnation)
        peer.role, peer.index = hello.role, hello.index
        self._members[peer.role, peer.index] = peer
        self.watch.heard(peer.role, peer.index)
        if hello.role == "worker":
            self.watch.devices[hello.index] = hello.device or CPU.label
        self._perform(self.core.connected(party, self.job.now_ticks(), hello.address, hello.incarnation))

    def payload_targets(self, peer: Caller, message: Message, size_bytes: int) -> Sequence[memoryview]:
        if isinstance(message, Snapshot) and self._collection is not None:
            return self._collection.targets(message, peer.index)
        if isinstance(message, CutCopied | CutPiece | KeepWorkerState) and self.core.model is not None:
            return self.checkpoints.targets(peer.index, message, size_bytes, self.core.model)
        if isinstance(message, TracePart) and self._stopping:
            return self._traces.targets(message, peer.index, size_bytes)
        return no_payload(message, size_bytes)

    def gone(self, peer: Caller, reason: str) -> None:
        if peer.role == "observer":
            self._observers.discard(peer)
            return
        self._members.pop((peer.role, peer.index), None)
        if peer.role == "agent":
            self.agents.gone(peer)
            return
        self.watch.left(peer.role, peer.index)
        party = server_peer(peer.index) if peer.role == "server" else worker_peer(peer.index)
        self._perform(self.core.disconnected(party, self.job.now_ticks()))
        if peer.role != "server":
            self.checkpoints.worker_gone(peer.index)
            return
        self.asked.discard(peer.index)
        self._awaited.pop(peer.index, None)
        self.checkpoints.server_gone(peer.index)
        if not self._stopping:
            begun = self.core.model is not None or self.job.resumed is not None
            if not begun and peer.index >= self.job.local_servers:
                for agent in self.machines.agents_of("server", peer.index):
                    self.agents.lose_server(agent, peer.index, "its connection ended")
                return
            self._perform(self.core.server_lost(peer.index, "its connection ended"))
            if self._collection is not None:
                self._collect_from(peer.index)

    def received(self, peer: Caller, message: Message) -> None:
        if peer.role == "agent":
            self.agents.hear(peer, message)
            return
        if peer.role == "observer":
            if peer.stream.backlog:
                raise ProtocolError(f"{type(message).__name__} arrived before the previous answer was read")
            self._ask_servers()  # for the next report
            self.watch.note_own_traffic(self._streams())
            self._hub.send(peer, StatusReported(msgspec.msgpack.encode(self.watch.status())))
            return
        self.watch.heard(peer.role, peer.index)
        if isinstance(message, Snapshot) and self._collection is not None:
            self._collection.arrived(message)
            self._collect_from(peer.index)
            return
        if isinstance(message, TracePart) and self._stopping:
            self._traces.arrived(message)
            return
        match message:
            case Bell():
                return
            case CutCopied():
                return self.checkpoints.copied(message)
            case CopiesReserved():
                return self.checkpoints.reserved(peer.index, message)
            case CutPiece():
                return self.checkpoints.arrived(peer.index, message)
            case CutWritten():
                return self.checkpoints.written(peer.index, message)
            case StepsTimed():
                sets = 0 if self.core.model is None else len(self.core.model.optimizers)
                if any(each.set_index >= sets for each in message.steps):
                    raise ProtocolError("it reports steps of a parameter set that the model does not have")
                # Make a new dict, because other threads may read the earlier one.
                self.steps = {**self.steps, peer.index: message}
                return
            case CheckpointRequested():
                if self.core.request_checkpoint(peer.index, message.number):
                    self.checkpoints.request()
                return
            case KeepWorkerState():
                self.checkpoints.keep(peer.index, message)
        party = server_peer(peer.index) if peer.role == "server" else worker_peer(peer.index)
        if isinstance(message, Waits):
            self.watch.note_traffic_of(peer.index, message)
            message = msgspec.structs.replace(message, traffic=(), moved_ticks=())
        model = message.model if isinstance(message, Register | Contributed) else None
        if model is not None and (isinstance(message, Contributed) or self.core.expects_model(party)):
            try:
                require_sound(model, self.job.optimizers)
            except ConfigurationError as error:  # the worker's version of torch differs from the version here
                if not isinstance(message, Register):
                    raise ProtocolError(str(error)) from error
                # The worker's script fails with this error, and reports the error.
                self._hub.send(peer, Refused(str(error)))
                return
        self._perform(self.core.handle(party, message, self.job.now_ticks()))
        match message:
            case Register():
                self.watch.prepared(peer.index)
            case Waits():
                self.asked.discard(peer.index)
                self.watch.clocks.end(("asked", "server", peer.index))
                if not self.asked and len(self.core.waits) == self.job.servers:
                    self.watch.progress.look(self.core, self.job.now_ticks())
            case Status():
                self.watch.note_pace(peer.index, message)
                if not self.started.is_set():
                    self.started_s = self.job.now_s()
                    self._publish()
                    self.started.set()

    # -- requests of the core -----------------------------------------------------------------------------

    def _perform(self, requests: Sequence[Request]) -> None:
        self.carry_out(requests)
        self._shared.settle()
        if self.core.everybody_left:
            self._end()
        self.agents.name_main()

    def send(self, to: Peer, message: Message) -> None:
        """If a worker or server is connected, send a message to it."""
        if (member := self._member(to.role, to.index)) is not None:
            self._hub.send(member, message)

    def _share(self, to: Peer, message: CreateShards | ExtendShards) -> None:
        """Send a server the new model, with the shared memory for its weights."""
        if self.job.carrier.shares_memory:
            self._shared.create(message.model.layout)
        self._send_descriptor(to, message)

    def _pass(self, to: Peer, message: Started | ModelExtended) -> None:
        """Tell a server or a worker that the new model is in force. A worker also receives the shared memory."""
        self._shared.passed = True
        if to.role == "worker":
            self._send_descriptor(to, message)
        else:
            self.send(to, message)

    def _send_descriptor(self, to: Peer, message: Message) -> None:
        """Send a message.

        If there is new shared memory for the weights, also send the file descriptor of this memory.
        """
        if (descriptor := self._shared.descriptor) is None:
            self.send(to, message)
        elif (member := self._member(to.role, to.index)) is not None:
            self._hub.drain(member, DRAIN_SILENCE_S)  # a descriptor cannot be queued
            self._hub.send(member, message, descriptors=[descriptor])

    senders: ClassVar = {
        CreateShards: _share,
        ExtendShards: _share,
        Started: _pass,
        ModelExtended: _pass,
    }

    def set_timer(self, timer: Timer) -> None:
        self._timers.set(timer.due_ticks, timer)

    def rehearse(self, request: Rehearse) -> None:
        if self._rehearse is not None:
            self._rehearse(request.situation, self._take_prospects)

    def save_cut(self, request: SaveCut) -> None:
        self.checkpoints.save(request.cut)

    def complete_cut(self, request: CompleteCut) -> None:
        self.checkpoints.complete(request.number, Completion("", request.states, request.loop))

    def abandon_cut(self, request: AbandonCut) -> None:
        self.checkpoints.complete(request.number, Completion(request.reason))

    def warn(self, warning: Warn) -> None:
        log.error("%s", warning.words)

    def take_out(self, request: TakeOut) -> None:
        self.agents.take_out_for_good(request.worker, request.reason)

    def _end(self) -> None:
        """Publish a report for all threads that wait for the end of the run, and then end the run."""
        if not self.over.is_set():
            self._publish()
            self.over.set()

    def end_run(self, failure: Fail) -> None:
        self._publish()
        machine = self.machines.name_of(failure.where)
        self.fail(RunFailedError(failure.where, failure.reason, failure.traceback, machine))

    def end_without(self, loss: EndWithout) -> None:
        self.gone_servers.setdefault(loss.server, loss.reason)
        self._end()

    def _take_prospects(self, prospects: Sequence[Prospect]) -> None:
        """Take the results of a simulation. This method is called on another thread."""
        self.call(lambda: self._perform(self.core.rehearsed(prospects, self.job.now_ticks())))

    def _shortage(self, model: ModelSpec, workers: int) -> str:
        """Return an error message if this machine has too little memory for all processes of the run, else ""."""
        job, size_bytes = self.job, model.layout.size_bytes
        vectors = vectors_of(model, fractions=job.takes_fractions)
        if job.joined:
            held_bytes = size_bytes * job.local_servers // job.servers
            return served_shortage(
                held_bytes, vectors, workers, available_bytes(), read_bytes=size_bytes, wire=job.wire
            )
        shared = job.carrier.shares_memory
        if shared:
            region_bytes = Region.size_of(model.layout, channels=job.servers)
            if reason := file_shortage(region_bytes, file_limit()):
                return reason
        return shortage(
            size_bytes,
            footprint(size_bytes, vectors, workers, shared=shared, wire=job.wire),
            available_bytes(),
            f"{workers} workers over {job.transport}",
            could_share=not shared and shared_memory_available(),
        )

    # -- collection of the weights at the end of the run ---------------------------------------------------

    def _collect_from(self, server: int) -> None:
        """Request the next missing shard from a server, or give up its shards if the server is not connected."""
        assert self._collection is not None
        owed = self._collection.owed_by(server)
        member = self._member("server", server)
        if member is None or not owed:
            self._awaited.pop(server, None)
            self._collection.give_up(owed)
            return
        if server not in self._awaited:
            self._awaited[server] = member.stream.patience()
        self._perform(self.core.fetch(owed[0]))  # a server sends each peer only one bulk message at a time

    def _take_call(self) -> None:
        """Call the next function that another thread has passed to `call`. The bell has one byte for each function."""
        self._bell_end.recv(1)
        self._calls.get_nowait()()

    def _member(self, role: str, index: int) -> Caller | None:
        """Return the connection to a server or worker; None if the process is not connected."""
        return self._members.get((role, index))

    def _streams(self) -> dict[tuple[str, int], Stream[Any]]:
        """Return the connections to all agents, workers and servers."""
        return {party: member.stream for party, member in self._members.items()}

    def _of_role(self, role: str) -> list[Caller]:
        return [member for (kind, _), member in sorted(self._members.items()) if kind == role]

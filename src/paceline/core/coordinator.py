"""The protocol of the coordinator, without I/O: how a run starts and ends, and what the workers are told.

    start     all servers connect and all workers register; then every server receives CreateShards; when all servers
              are Ready, every worker receives Started
    run       IterationFinished, IterationStarted and SyncRequested are passed to the coordinator's part of the sync
              model; its plans, restarts and changes are sent to the workers; with overlap off, the coordinator also
              tells the workers when they may pull
    data      a worker sends DataRequested when it needs data, and receives DataGranted
    calls     a worker sends Contributed when its script calls barrier or reduce, and receives Combined; if the script
              has added parameters, all servers receive ExtendShards and then, like all workers, ModelExtended
    end       a worker sends WorkerFinished, or its connection is lost; every server is notified of a lost worker

No push or pull goes through the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache

from ..errors import ConfigurationError, InternalError, ProtocolError
from ..sync import SyncModel
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
from ..sync.notation import notation, parse_shards
from ..sync.schedule import Schedule
from ..sync.ticks import TICKS_PER_S
from . import messages
from .collectives import Collectives
from .data_ledger import DataLedger
from .entry import Entry, EntryRecorder
from .extension import Extension
from .fingerprints import Fingerprints
from .job_sync import JobSync
from .joint_norms import JointNorms
from .layout import ShardSlice
from .messages import (
    AllCommitted,
    ChangePublished,
    Combined,
    Contributed,
    CreateShards,
    DataGranted,
    DataRequested,
    ExtensionReady,
    Failed,
    FaultReported,
    FetchSnapshot,
    GradientHashed,
    MeanMeasured,
    MeanMissing,
    Message,
    PlanPublished,
    PullAllowed,
    PushesReported,
    Ready,
    Refused,
    Register,
    RestartOrdered,
    StandInAllowed,
    Started,
    Status,
    StoodIn,
    StopRequested,
    TrainingStopped,
    Waits,
    Warned,
    WorkerWelcomed,
)
from .model_spec import ModelSpec, first_difference, require_extension
from .requests import Fail, Peer, Request, Send, Timer, Warn, server_peer, worker_peer

__all__ = ["Coordinator", "fault_report"]

MOST_WARNINGS = 100


class Coordinator:
    """The coordinator of a run: it starts the run, tracks the workers, and uses a `JobSync` to run the sync model.

    Args:
        schedule: the sync models of the job, and when they change.
        workers: number of workers.
        servers: number of servers. Shard k is at server k modulo the number of servers.
        shards: number of shards.
        slicing: how the parameters are sliced: "even" or "by-parameter".
        overlap: False if no worker may pull until all workers have pushed to all shards.
        seed: random seed for the run, used by the sync models.
        read_sync: function that parses the sync model that a worker requests. It raises `ConfigurationError` if the
            run cannot use the model.
        late: workers that are absent at the start. `admit` lets them join later.
        shortage: function of the model and the number of workers. It returns the reason why the run cannot start on
            this machine, or "" if the run can start.
        recorder: receives each event for the sync model, and the resulting actions; None to record nothing.
        ticks_per_s: number of ticks per second (see `paceline.sync.ticks`).

    Attributes:
        model: the model to train, including the parameters added so far; None until the shards are created.
        slices: the slices of the parameters; empty until the shards are created.
        addresses: for each shard, the address of its server; empty until the shards are created.
        initializer: the worker that sends the initial weights; -1 before the shards are created.
        started: True once at least one worker has reported that its first weights have arrived.
        present: the workers that have joined and have not left.
        finished: workers that have finished their work, in the order in which they finished.
        lost: lost workers, in the order in which they were lost.
        cut_off: lost workers whose last report says that they failed only because another process had ended.
        endings: worker -> the error that the worker reported, or how its process ended, once this is known.
        faults: descriptions of the problems that did not end the run, in order of occurrence.
        board: worker -> the last status that the worker reported.
        waits: server -> the last list of waiting workers that the server sent.
        data: the ledger of the data that the workers use.
        collectives: the barrier, the reduction or the extension in which workers wait.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        workers: int,
        servers: int,
        shards: int,
        slicing: str = "even",
        overlap: bool = True,
        seed: int = 0,
        read_sync: Callable[[str], Sequence[SyncModel]] = parse_shards,
        late: Collection[int] = (),
        shortage: Callable[[ModelSpec, int], str] = lambda model, workers: "",
        recorder: EntryRecorder | None = None,
        ticks_per_s: int = TICKS_PER_S,
    ) -> None:
        self.model: ModelSpec | None = None
        self.slices: tuple[ShardSlice, ...] = ()
        self.addresses: tuple[str, ...] = ()
        self.initializer = -1
        self.started = False
        self.present: set[int] = set()
        self.finished: list[int] = []
        self.lost: list[int] = []
        self.cut_off: list[int] = []
        self.endings: dict[int, str] = {}
        self.faults: list[str] = []
        self.board: dict[int, Status] = {}
        self.waits: dict[int, Waits] = {}
        self.data = DataLedger()
        self.collectives = Collectives(self._extend)
        self._workers = workers
        self._servers = servers
        self._shards = shards
        self._slicing = slicing
        self._overlap = overlap
        self._norms = JointNorms(shards, servers)
        self._read_sync = read_sync
        self._shortage = shortage
        self._recorder = recorder
        self._first = notation(schedule.first)
        self._sync = JobSync(self._first, seed, ticks_per_s)
        self._ticks_per_s = ticks_per_s
        self._connected: set[int] = set()  # workers
        # Worker that has registered and has not left -> its message.
        self._registered: dict[int, Register] = {}
        self._addresses: dict[int, str] = {}  # connected server -> its address
        self._ready: set[int] = set()  # servers that have received their shards
        self._left = set(late)  # workers that have finished, were lost, or will be admitted later
        self._live = set(range(workers)) - self._left  # all other workers
        self._fingerprints = Fingerprints()
        self._uneven = False  # True once a worker has pushed in lockstep while its script was not training
        self._stopped: set[int] = set()  # training loops that a worker has stopped
        # Lost worker -> the reports of its pushes that have arrived, and the servers that have yet to send theirs.
        self._reports: dict[int, tuple[list[tuple[int, ...]], set[int]]] = {}
        # Worker that joins a run in progress -> the message to the servers, and the servers yet to acknowledge it.
        self._admitted: dict[int, tuple[messages.WorkerJoined, set[int]]] = {}
        self._extension: Extension | None = None  # the extension of the model that is in progress
        self._extended = 0  # number of extensions that have taken effect
        # With overlap off: worker that waits for permission to pull -> the iteration that the worker has just pushed.
        self._committed: dict[int, int] = {}

    @property
    def everybody_left(self) -> bool:
        """True if every worker has finished, was lost, or has yet to be admitted."""
        return len(self._left) == self._workers

    @property
    def shards(self) -> list[tuple[ShardSlice, str]]:
        """The slice of each shard, with the address of the shard's server."""
        return list(zip(self.slices, self.addresses, strict=True))

    @property
    def awaiting_turn(self) -> set[int]:
        """With overlap off: the workers that have pushed and may not pull until all other workers have pushed."""
        return set(self._committed)

    @property
    def unable_to_begin(self) -> bool:
        """True if training cannot begin, because some workers wait for it and the others wait for them in a call."""
        gathered = set(self.collectives.waiting.copy())
        registered = set(self._registered.copy()) - gathered
        return self.model is None and bool(registered and gathered) and self._live <= registered | gathered

    @property
    def sync(self) -> str:
        """The sync model in force, or the next one while a change is in progress; "" if the model is unknown."""
        return self._sync.sync

    def fate(self, worker: int) -> str:
        """Return "finished" or "lost" for a worker that has left, and "" for any other worker."""
        return "lost" if worker in self.lost else "finished" if worker in self.finished else ""

    # -- connections --------------------------------------------------------------------------------------

    def require_expected(self, peer: Peer) -> None:
        """Raise `ProtocolError` unless this worker or server may connect now."""
        index = peer.index
        match peer.role:
            case "worker":
                expected = (
                    0 <= index < self._workers and index not in self._connected and index not in self._left
                )
            case "server":
                expected = 0 <= index < self._servers and index not in self._addresses
            case _:
                expected = False
        if not expected:
            raise ProtocolError(f"{peer} is not expected")

    def expects_model(self, peer: Peer) -> bool:
        """Return True if the run has not begun and this peer is a connected worker that has not registered."""
        unregistered = peer.index in self._connected and peer.index not in self._registered
        return peer.role == "worker" and unregistered and self.model is None and peer.index not in self._left

    def connected(self, peer: Peer, now_ticks: int, address: str = "") -> list[Request]:
        """Handle a worker that has connected, or a server that has connected and listens at `address`."""
        self.require_expected(peer)
        if peer.role == "worker":
            self._connected.add(peer.index)
        else:
            self._addresses[peer.index] = address
        return self._begin_if_complete(now_ticks)

    def disconnected(self, peer: Peer, now_ticks: int) -> list[Request]:
        """Handle a closed connection to a worker or server. If the worker has not finished, it is lost."""
        if peer.role == "worker":
            self._connected.discard(peer.index)
            return self._leave(peer.index, WorkerLost, now_ticks)
        self._addresses.pop(peer.index, None)
        return []

    def ended(self, worker: int, now_ticks: int) -> list[Request]:
        """Handle the exit of a worker's process whose connection is already closed or was never made."""
        return self._leave(worker, WorkerLost, now_ticks)

    # -- messages -----------------------------------------------------------------------------------------

    def handle(self, sender: Peer, message: Message, now_ticks: int) -> list[Request]:
        """Process a message and return the requests to the host.

        Raises:
            ProtocolError: the message is not allowed now. The state is unchanged.
        """
        return (
            self._handle_worker(sender, message, now_ticks)
            if sender.role == "worker"
            else self._handle_server(sender, message, now_ticks)
        )

    def fire(self, timer: Timer, now_ticks: int) -> list[Request]:
        """Process a timer that is due, and return the requests to the host."""
        return self.take(TimerFired(now_ticks=now_ticks, worker=timer.worker, iteration=timer.iteration))

    def admit(self, worker: int, iteration: int, count: int | None, now_ticks: int) -> list[Request]:
        """Let a worker join a run in progress. The worker starts once every server has acknowledged the new member.

        Args:
            worker: index of the worker. A worker that has left the run may join again.
            iteration: label of the worker's first iteration.
            count: the worker's initial c_p, which must be the same at all shards and close to the c_p of the slowest
                live worker. None if there is only one shard.
            now_ticks: current time.
        """
        superstep, change = self._sync.next_superstep, self._sync.changes
        joined = messages.WorkerJoined(worker, iteration, count, superstep, change)
        self._left.discard(worker)
        self._live.add(worker)
        self._admitted[worker] = joined, set(range(self._servers))
        return [Send(server_peer(server), joined) for server in range(self._servers)]

    def fetch(self, shard: int) -> list[Request]:
        """Request the final weights of a shard, including the effects of the departure of all workers that have left.

        A worker says goodbye to the coordinator and to each server on separate connections, so a server may receive
        this request before the goodbyes.
        """
        return [Send(server_peer(shard % self._servers), FetchSnapshot(shard, tuple(sorted(self._left))))]

    def validate(self) -> None:
        """Check that the collections of workers are consistent; raise `InternalError` if they are not."""
        self._sync.validate()
        if self.present & self._left or not self._committed.keys() <= self.present:
            raise InternalError(
                f"the sets of workers are inconsistent: {self.present} are present, {self._left} have left, and "
                f"{self._committed} wait to pull"
            )

    def _handle_worker(self, sender: Peer, message: Message, now_ticks: int) -> list[Request]:
        worker = sender.index
        match message:
            case messages.IterationFinished():
                return self.take(
                    IterationFinished(
                        now_ticks=now_ticks,
                        worker=worker,
                        iteration=message.iteration,
                        superstep=message.superstep,
                        change=message.change,
                        attempt=message.attempt,
                    )
                )
            case messages.IterationStarted():
                return self.take(
                    IterationStarted(now_ticks=now_ticks, worker=worker, iteration=message.iteration)
                )
            case messages.SyncRequested():
                return self._request_sync(worker, message, now_ticks)
            case DataRequested():
                return self._hand_out(worker, message, now_ticks)
            case StopRequested():
                return self._stop(message.loop)
            case StoodIn():
                return self._allow_stand_ins()
            case GradientHashed():
                return self._compare(worker, message)
            case Contributed() if worker in self._live and worker not in self.collectives.waiting:
                if message.model is not None:
                    self._require_extension(message.model)
                return self.collectives.contributed(worker, message, self._live)
            case AllCommitted() if not self._overlap and worker in self.present:
                self._committed[worker] = message.iteration
                return self._allow_pulls()
            case Status():
                self.started = True
                self.board[worker] = message
            case Register() if self.expects_model(sender):
                self._registered[worker] = message
                return self._begin_if_complete(now_ticks)
            case messages.WorkerFinished():
                return self._leave(worker, WorkerFinished, now_ticks, message.drawn)
            case Failed() if message.consequence:
                self.endings[worker] = message.reason
                self.cut_off.append(worker)
                return self._leave(worker, WorkerLost, now_ticks)
            case _:
                return self._handle_any(sender, message)
        return []

    def _handle_server(self, sender: Peer, message: Message, now_ticks: int) -> list[Request]:
        match message:
            case Ready():
                self._ready.add(sender.index)
                return self._start_if_ready()
            case ExtensionReady() if self._extension is not None:
                return self._complete_extension(sender.index, message)
            case WorkerWelcomed() if message.worker in self._admitted:
                return self._welcome(sender.index, message.worker, now_ticks)
            case PushesReported() if message.worker in self._reports:
                self._report(sender.index, message)
                return []
            case MeanMeasured():
                return self._norms.measured(message)
            case MeanMissing():
                return self._norms.missing(message)
            case FaultReported():
                self.faults.append(fault_report(message))
                return [Warn(self.faults[-1])]
            case Waits():
                self.waits[sender.index] = message
                return []
            case _:
                return self._handle_any(sender, message)

    def _handle_any(self, sender: Peer, message: Message) -> list[Request]:
        match message:
            case Warned():
                if len(self.faults) < MOST_WARNINGS:  # otherwise, a faulty sender could fill the memory
                    self.faults.append(f"{sender}: {message.words}")
                return []
            case Failed():
                return [Fail(str(sender), message.reason, message.traceback)]
            case _:
                raise ProtocolError(f"{type(message).__name__} is not expected from {sender} now")

    # -- start of the run ---------------------------------------------------------------------------------

    def _begin_if_complete(self, now_ticks: int) -> list[Request]:
        """Send the servers their shards if all servers are connected and every worker has registered or left."""
        absent = self._workers - len(self._registered) - len(self._left)
        if self.model is not None or absent or not self._registered or len(self._addresses) < self._servers:
            return []
        models = {worker: self._registered[worker].model for worker in sorted(self._registered)}
        initializer = next(iter(models))
        model = models[initializer]
        for worker, other in models.items():
            if difference := first_difference(model, other):
                reason = f"its model differs from the model of worker {initializer}: {difference}"
                return self._refuse([worker], reason, f"worker {worker}")
        try:
            slices = model.layout.sliced(self._shards, self._slicing)
        except ConfigurationError as error:
            return self._refuse([initializer], str(error), f"worker {initializer}")
        if reason := self._shortage(model, len(models)):
            # Refuse all workers: otherwise, the other workers would begin once the refused workers had left.
            self._registered.clear()
            return self._refuse(list(models), reason, "the run")
        self.model, self.slices, self.initializer = model, slices, initializer
        servers = sorted(self._addresses)
        self.addresses = tuple(self._addresses[k % self._servers] for k in range(self._shards))
        requests: list[Request] = [
            Send(
                server_peer(server),
                CreateShards(
                    model,
                    slices[server :: self._servers],
                    self._first,
                    tuple(models),
                    initializer,
                    self._registered[initializer].samples,
                ),
            )
            for server in servers
        ]
        for worker in models:
            requests += self._join(WorkerJoined(now_ticks=now_ticks, worker=worker))
        return requests

    def _start_if_ready(self) -> list[Request]:
        if len(self._ready) < self._servers:
            return []
        started = Started(self.slices, self.addresses, self.initializer)
        return [
            Send(worker_peer(worker), started)
            for worker in sorted(self._connected)
            if worker not in self._left
        ]

    # -- extension of the model ---------------------------------------------------------------------------

    def _require_extension(self, model: ModelSpec) -> None:
        """Raise `ProtocolError` unless a worker may extend the model to this one."""
        if self.model is None or self._extension is not None:
            raise ProtocolError("the model cannot be extended now")
        require_extension(self.model, model)

    def _extend(self, models: Mapping[int, ModelSpec]) -> list[Request]:
        """Begin to extend the model. All live workers wait for it; `models` contains their extended models."""
        first, *others = models
        for worker in others:
            if difference := first_difference(models[first], models[worker]):
                differ = Combined(
                    refused=f"the new parameters of worker {worker} differ from those of worker {first}: "
                    f"{difference}. All workers must add the same parameters in the same order."
                )
                return [Send(worker_peer(each), differ) for each in models]
        model = models[first]
        if reason := self._shortage(model, len(models)):
            return self._refuse(list(models), reason, "the run")
        self._extension = Extension(
            model,
            model.layout.sliced(self._shards, self._slicing),
            models,
            self._servers,
            self._extended + 1,
        )
        return self._extension.begin()

    def _complete_extension(self, server: int, message: ExtensionReady) -> list[Request]:
        """Handle a server's report. After the last report, the extended model is the model of the run."""
        assert self._extension is not None
        requests = self._extension.ready(server, message)
        if self._extension.complete:
            self.model, self.slices = self._extension.model, self._extension.slices
            self._extension = None
            self._extended += 1
        return requests

    def _refuse(self, workers: Sequence[int], reason: str, where: str) -> list[Request]:
        return [*(Send(worker_peer(worker), Refused(reason)) for worker in workers), Fail(where, reason)]

    # -- members ------------------------------------------------------------------------------------------

    def _welcome(self, server: int, worker: int, now_ticks: int) -> list[Request]:
        """Handle a server's acknowledgment of a joining worker. The last acknowledgment starts the worker."""
        joined, unacknowledged = self._admitted[worker]
        unacknowledged.discard(server)
        if unacknowledged:
            return []
        del self._admitted[worker]
        iteration, sync = joined.iteration, self._sync.sync
        event = WorkerJoined(
            now_ticks=now_ticks,
            worker=worker,
            iteration=iteration,
            count=joined.count,
            superstep=joined.superstep,
            change=joined.change,
        )
        started = Started(self.slices, self.addresses, self.initializer, iteration, sync, self._extended)
        stopped = [Send(worker_peer(worker), TrainingStopped(loop)) for loop in sorted(self._stopped)]
        if self._uneven:
            stopped.append(Send(worker_peer(worker), StandInAllowed()))
        return [Send(worker_peer(worker), started), *stopped, *self._join(event)]

    def _join(self, event: WorkerJoined) -> list[Request]:
        self.present.add(event.worker)
        return self.take(event)

    def _leave(
        self,
        worker: int,
        kind: type[WorkerFinished] | type[WorkerLost],
        now_ticks: int,
        drawn: Sequence[int] = (),
    ) -> list[Request]:
        """Handle a worker that has left. If the departure is reported twice, the second report has no effect."""
        if worker in self._left:
            return []
        self._left.add(worker)
        self._live.discard(worker)
        self._registered.pop(worker, None)
        self._committed.pop(worker, None)
        self._admitted.pop(worker, None)
        requests: list[Request] = []
        if kind is WorkerLost:
            self.lost.append(worker)
            if worker == self.initializer and not self.started:
                requests.append(
                    Fail(f"worker {worker}", "it was lost before it had sent the initial weights")
                )
            report = bool(self._addresses) and self.data.has_leases(worker)
            if report:
                self._reports[worker] = [], set(self._addresses)
            else:
                self.data.leave(worker, (), self._live, lost=True)
            lost = messages.WorkerLost(worker, report)
            requests += [Send(server_peer(server), lost) for server in sorted(self._addresses)]
            requests += self._norms.lost(worker)
        else:
            self.finished.append(worker)
            self.data.leave(worker, [(batches, batches) for batches in drawn], self._live, lost=False)
        if worker in self.present:
            self.present.remove(worker)
            requests += self.take(kind(now_ticks=now_ticks, worker=worker))
        if self._extension is not None:
            requests += self._extension.left(worker)
        requests += self.collectives.left(worker, self._live)
        return requests + self._begin_if_complete(now_ticks) + self._allow_pulls()

    def _allow_pulls(self) -> list[Request]:
        """With overlap off: let all workers pull if every shard has received every worker's push."""
        if not self.present or self._committed.keys() != self.present:
            return []
        committed, self._committed = self._committed, {}
        return [Send(worker_peer(worker), PullAllowed(committed[worker])) for worker in sorted(committed)]

    # -- data ---------------------------------------------------------------------------------------------

    def _hand_out(self, worker: int, message: DataRequested, now_ticks: int) -> list[Request]:
        if worker in self._left:
            raise ProtocolError(f"worker {worker} has left, but requests data")
        try:
            grant = self.data.request(
                worker,
                message.loader,
                message.name,
                message.epoch,
                message.order,
                drawn=message.drawn,
                committed=message.committed,
                now_s=now_ticks / self._ticks_per_s,
                live=self._live,
                lockstep=_is_lockstep(self._sync.sync),
                end=message.end,
                times=message.times,
                least=message.least,
            )
        except ConfigurationError as error:
            return self._refuse([worker], str(error), f"worker {worker}")
        granted = DataGranted(message.loader, message.epoch, grant.leases, grant.last)
        return [Send(worker_peer(worker), granted)]

    def _compare(self, worker: int, message: GradientHashed) -> list[Request]:
        """Warn once if workers compute the same gradients."""
        # The first iterations are those under the first sync model.
        lockstep = _is_lockstep(self._first)
        warning = self._fingerprints.take(worker, message, self._live, lockstep=lockstep)
        if not warning:
            return []
        self.faults.append(warning)
        return [Warn(warning)]

    def _allow_stand_ins(self) -> list[Request]:
        """Let workers push without a gradient while they wait in a call, unless this has been done already."""
        if self._uneven:
            return []
        self._uneven = True
        self.collectives.allow_pushes()
        return [Send(worker_peer(worker), StandInAllowed()) for worker in sorted(self._live)]

    def _stop(self, loop: int) -> list[Request]:
        """Stop a training loop in all workers, unless this has been done already."""
        if loop in self._stopped:
            return []
        self._stopped.add(loop)
        stopped = TrainingStopped(loop)
        return [Send(worker_peer(worker), stopped) for worker in sorted(self._live)]

    def _report(self, server: int, message: PushesReported) -> None:
        """Store a server's report of a lost worker's pushes. After the last report, take back the unused data."""
        reports, missing = self._reports[message.worker]
        reports += message.drawn
        missing.discard(server)
        if missing:
            return
        del self._reports[message.worker]
        loaders = max(map(len, reports), default=0)
        padded = [(*drawn, *[0] * (loaders - len(drawn))) for drawn in reports]
        bounds = [(min(each), max(each)) for each in zip(*padded, strict=True)]
        self.data.leave(message.worker, bounds, self._live, lost=True)

    # -- the sync model -----------------------------------------------------------------------------------

    def _request_sync(self, worker: int, message: messages.SyncRequested, now_ticks: int) -> list[Request]:
        try:
            self._read_sync(message.sync)
        except ConfigurationError as error:
            raise ProtocolError(
                f"it requested a sync model that cannot be used in this run: {error}"
            ) from error
        return self.take(
            SyncRequested(
                now_ticks=now_ticks,
                worker=worker,
                source=message.source,
                number=message.number,
                sync=message.sync,
            )
        )

    def take(self, event: AnyEvent) -> list[Request]:
        """Pass an event to the coordinator's part of the sync model, and return the resulting requests."""
        try:
            actions = self._sync.handle(event)
        except ProtocolError as error:
            if self._recorder is not None:
                self._recorder.record(Entry(event, refused=str(error)))
            raise
        if self._recorder is not None:
            self._recorder.record(Entry(event, list(actions)))
        return [request for action in actions for request in _requests(action)] if actions else []


@cache
def _is_lockstep(sync: str) -> bool:
    """Return True if every model in `sync` keeps all workers in lockstep; False if `sync` is empty."""
    return bool(sync) and all(model.lockstep for model in parse_shards(sync))


def _requests(action: AnyAction) -> list[Request]:
    """Translate one action of the sync model into requests to the host."""
    match action:
        case PublishPlan(plan):
            stop = Stop(superstep=plan.superstep, members=plan.members)
            return [Send(worker_peer(w), PlanPublished(stop, iteration)) for w, iteration in plan.stops]
        case RestartWorker():
            return [Send(worker_peer(action.worker), RestartOrdered(action.iteration, action.attempt))]
        case PublishChange(change):
            published = ChangePublished(change)
            return [Send(worker_peer(worker), published) for worker in change.members]
        case SetTimer():
            return [Timer(action.due_ticks, action.worker, action.iteration)]
        case _:
            raise InternalError(f"a coordinator cannot carry out {action}")


def fault_report(message: FaultReported) -> str:
    """Return the warning that a user-defined condition has failed at a shard."""
    report = f"shard {message.shard}: {message.reason}. The shard continues with {message.sync}."
    return f"{report}\n{message.traceback}".strip()

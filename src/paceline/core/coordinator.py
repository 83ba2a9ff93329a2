"""The protocol of the coordinator, without I/O: how a run starts and ends, and what the workers are told.

    start     all servers connect and all workers register; then every server receives CreateShards; when all servers
              are Ready, every worker receives Started
    run       IterationFinished, IterationStarted and SyncRequested are passed to the coordinator's part of the sync
              model; the plans, restarts and changes that the model orders are sent to the workers; with overlap off,
              the coordinator also tells the workers when they may pull
    join      a worker that has been invited connects and registers; when all servers have accepted it (see
              `core.reconfiguration`), the worker receives Started. Before that, the worker may send ModelRequested, and
              receives ModelDescribed, with which it can read the model from the servers
    data      a worker sends DataRequested when it needs data, and receives DataGranted
    metrics   a worker sends MetricsLogged with what its script has logged
    main      the workers that take part receive MainChosen when another worker has become the main worker (see
              `core.members`); a worker that sends MainRequested receives MainChosen as the answer
    loops     a worker sends EpochReached in its training loop, and StatesDecided tells it whether to send the states
              of its tracked objects to a server; a worker that joins late, or resumes a run, sends EntryRequested, and
              receives TrainingStopped for each loop that was stopped, and the job's position in LoopEntered
    calls     a worker sends Contributed when its script calls barrier or reduce, and receives Combined; if the script
              has added parameters, all servers receive ExtendShards and then, like all workers, ModelExtended
    end       a worker sends WorkerFinished, or its connection is lost; every server is notified of a lost worker

No push or pull goes through the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import structs

from ..errors import ConfigurationError, InternalError, ProtocolError
from ..state import stateful
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
    maker,
)
from ..sync.model import Samples
from ..sync.notation import notation, parse_shards, require_shards
from ..sync.plugins import blame
from ..sync.schedule import Schedule
from ..sync.ticks import TICKS_PER_S
from . import messages
from .agreement import Oversight
from .auto import Auto, Prospect
from .data_ledger import DataLedger, LoopPositions
from .guard import Guard
from .job_cut import JobCut, LoopCut, WorkerCut
from .job_sync import JobSync
from .joint_batch import Collectives, JointNorms, combine
from .layout import ModelSpec, ShardSlice, first_difference, round_robin
from .lease import DataOrder, PackedPushed
from .members import Departure, Losses, MainWorker, Members, Quorum, ScriptRequests, ServerRoster
from .messages import (
    AllCommitted,
    BaseRequested,
    ChangePublished,
    Combined,
    Contributed,
    CreateShards,
    CutOffered,
    CutTaken,
    DataGranted,
    DataRequested,
    EntryRequested,
    EpochReached,
    ExtensionReady,
    Failed,
    FaultReported,
    FetchSnapshot,
    GradientHashed,
    HyperParametersReported,
    JoinOffered,
    KeepWorkerState,
    LoopEntered,
    MainChosen,
    MainRequested,
    MeanMeasured,
    MeanMissing,
    Message,
    MetricsLogged,
    ModelDescribed,
    ModelRequested,
    PacesObserved,
    Paused,
    PlanPublished,
    PushesObserved,
    PushesReported,
    Ready,
    Refused,
    Register,
    RestartOrdered,
    StandInAllowed,
    Started,
    StateWanted,
    Status,
    StoodIn,
    StopRequested,
    TimeSpent,
    TrainingStopped,
    Waits,
    Warned,
    WorkerWelcomed,
)
from .metrics import History, MetricIntake, TimeLedger
from .paces import PullBarrier
from .reconfiguration import Reconfigurations, cut_pushes
from .requests import (
    AbandonCut,
    EndWithout,
    Entry,
    EntryRecorder,
    Fail,
    Peer,
    Rehearse,
    Request,
    SaveCut,
    Send,
    Timer,
    Warn,
    server_peer,
    worker_peer,
)

LOST_TOO_EARLY = "it was lost before it had sent the initial weights"
"""The reason why a run fails if it loses the worker that would send the initial weights."""

_iteration_finished = maker(IterationFinished, messages.IterationFinished)
_iteration_started = maker(IterationStarted, messages.IterationStarted)

MOST_WARNINGS = 100


@stateful(
    history="cut_off endings faults board waits time_ledger samples repeated_bases",
    fixed="resumed placement _seed _workers _shards _slicing _block _overlap _read_sync _shortage _recorder _first "
    "_ticks_per_s",
    about={"main": "scripts", "_connected": "connections"},
)
class Coordinator:
    """The coordinator of a run: it starts the run, tracks the workers, and uses a `JobSync` to run the sync model.

    Args:
        schedule: the sync models of the job, and when they change.
        workers: number of workers.
        servers: number of servers. See `layout.round_robin`.
        shards: number of shards.
        slicing: how the parameters are sliced; see `ModelSpec.sliced`.
        block: number of values that a codec encodes together; see `Layout.slice_evenly`.
        overlap: False if no worker may pull until all workers have pushed to all shards.
        seed: random seed for the run, used by the sync models.
        read_sync: function that parses the sync model that a worker requests. It raises `ConfigurationError` if the
            run cannot use the model.
        late: workers that are absent at the start, and may join later; see `invite`.
        late_servers: servers that are absent at the start, because machines that join bring them. The run begins when
            all of them are there; see `ServerRoster.invite`.
        least: minimum number of workers with which the run begins. The run also waits for all workers that are not
            absent at the start.
        pause_below: number of workers below which the run pauses until other workers join. Once a worker has finished,
            the run no longer pauses. Default: 0; the run then never pauses, and ends when all workers are lost.
        shortage: function of the model and the number of workers. It returns the reason why the run cannot start on
            this machine, or "" if the run can start.
        recorder: receives each event for the sync model, and the resulting actions; None to record nothing.
        relaxes: False if `auto` must not choose a model with stale gradients, because hyper-parameters are not
            translated.
        ticks_per_s: number of ticks per second (see `paceline.sync.ticks`).
        guard: judges the workers' reports about their pushes. Default: a guard in the mode "off".
        resumed: the cut with which the run begins, and whose weights the hosts of the servers have; None to begin with
            the initial weights of a worker.
        cuts: the highest number that earlier runs are known to have used for a cut. The cuts of this run get higher
            numbers.

    Attributes:
        resumed: the cut with which the run has begun; None if the run has begun with initial weights.
        model: the model to train, including the parameters added so far; None until the shards are created.
        slices: the slices of the parameters; empty until the shards are created.
        addresses: for each shard, the address of its server; empty until the shards are created.
        initializer: the worker that sends the initial weights; -1 before the shards are created.
        samples: the values that determine the number of samples in an update, as they were when the shards were
            created; None until the shards are created.
        started: True once at least one worker has reported that its first weights have arrived.
        placement: the servers of the shards.
        servers: the servers: which are vacant, which are connected, and which are lost.
        job_sync: the coordinator's part of the sync model, which handles all events that are recorded.
        reconfigurations: the joins, changes of the sync model and extensions that are in progress or waiting.
        members: the workers: which are expected, which take part, and which are gone.
        main: the main worker.
        quorum: decides whether the run has enough workers.
        losses: the lost workers whose pushes some servers have yet to report.
        cut_off: lost workers whose last report says that they failed only because another process had ended.
        endings: (worker, incarnation) -> a phrase that says why this incarnation has ended: the error that the worker
            reported, the reason why it was taken out, or how its process ended. See `cause`.
        faults: descriptions of the problems that did not end the run, in order of occurrence.
        repeated_bases: number of times that a worker has asked for a whole base, because the checksum of its own base
            differed from that of the server's base (see `messages.BaseRequested`).
        board: worker -> the last status that the worker reported.
        waits: server -> the last list of waiting workers that the server sent.
        data: the ledger of the data that the workers use.
        loops: how far the workers have come in their training loops.
        collectives: the barrier, the reduction or the extension in which workers wait.
        time_ledger: what the workers have spent their time on.
        oversight: watches the workers in order to warn the user.
        history: the metrics that the scripts of the workers have logged.
        auto: chooses the sync models of the run; None if the user has chosen them.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        workers: int,
        servers: int,
        shards: int,
        slicing: str = "auto",
        block: int = 1,
        overlap: bool = True,
        seed: int = 0,
        read_sync: Callable[[str], Sequence[SyncModel]] = parse_shards,
        late: Collection[int] = (),
        late_servers: Collection[int] = (),
        least: int = 1,
        pause_below: int = 0,
        shortage: Callable[[ModelSpec, int], str] = lambda model, workers: "",
        recorder: EntryRecorder | None = None,
        relaxes: bool = True,
        ticks_per_s: int = TICKS_PER_S,
        guard: Guard | None = None,
        resumed: JobCut | None = None,
        cuts: int = 0,
    ) -> None:
        self.resumed = resumed
        self.model: ModelSpec | None = None
        self.slices: tuple[ShardSlice, ...] = ()
        self.addresses: tuple[str, ...] = ()
        self.initializer = -1
        self.samples: Samples | None = None
        self.started = False
        self.placement = round_robin(shards, servers)
        self.servers = ServerRoster(self.placement, late_servers)
        self.members = Members(workers, late)
        self.main = MainWorker()
        self.quorum = Quorum(self.members, least=least, pause_below=pause_below)
        self.losses = Losses()
        self.cut_off: list[int] = []
        self.endings: dict[tuple[int, int], str] = {}
        self.faults: list[str] = []
        self.repeated_bases = 0
        self.board: dict[int, Status] = {}
        self.waits: dict[int, Waits] = {}
        self.data = DataLedger(() if resumed is None else resumed.loaders)
        self.collectives = Collectives(self._extend)
        self.time_ledger = TimeLedger()
        self.oversight = Oversight(guard or Guard())
        if resumed is not None:
            self.oversight.guard.resume(resumed.guard)
        self.history = History()
        self._metrics = MetricIntake(self.history)
        self.auto = Auto(self._may_use, stale=relaxes) if schedule.auto else None
        self.loops = LoopPositions(LoopCut() if resumed is None else resumed.loop, ticks_per_s)
        self._workers = workers
        self._shards = shards
        self._slicing = slicing
        self._block = block
        self._overlap = overlap
        self._norms = JointNorms(self.placement)
        self._read_sync = read_sync
        self._shortage = shortage
        self._recorder = recorder
        self._first = notation(schedule.first)
        self.job_sync = JobSync(self._first, seed, ticks_per_s)
        self.reconfigurations = Reconfigurations(self.placement, self.job_sync)
        self.reconfigurations.cuts = max(cuts, self._resumed_number)
        self._seed = seed
        self._ticks_per_s = ticks_per_s
        self._connected: set[int] = set()  # workers
        # Worker that has registered and has not left -> its message.
        self._registered: dict[int, Register] = {}
        # Requests for data that have arrived while the run had too few workers to begin: (worker, loader) -> message.
        self._early: dict[tuple[int, int], DataRequested] = {}
        self._turns = PullBarrier()
        self._checkpoints = ScriptRequests()
        self._changes = ScriptRequests()
        self._earlier_models: list[ModelSpec] = []  # the model before each extension
        # True if the cut with which the run has begun lacks parameters of its first model
        self._lacking = False

    @property
    def shards(self) -> list[tuple[ShardSlice, str]]:
        """The slice of each shard, with the address of the shard's server."""
        return list(zip(self.slices, self.addresses, strict=True))

    @property
    def guard(self) -> Guard:
        """The guard, which judges the workers' reports about their pushes."""
        return self.oversight.guard

    @property
    def findings(self) -> list[str]:
        """Sentences that each describe a reason why the result of the run may be worse than it could be."""
        return self.oversight.findings

    @property
    def awaiting_turn(self) -> set[int]:
        """With overlap off: the workers that have pushed and may not pull until all other workers have pushed."""
        return set(self._turns.committed)

    @property
    def standing_in(self) -> set[int]:
        """The workers that wait in a call and meanwhile push without a gradient, so that other workers can go on.

        If a change of the sync model is published after a worker has made its call, the worker also pushes until it has
        passed the boundary of the change.
        """
        waiting = self.collectives.waiting.copy()
        return {each for each, made in waiting.items() if made.may_push or self.job_sync.awaits(each)}

    @property
    def unable_to_begin(self) -> bool:
        """True if training cannot begin: some workers wait for the start, and all other workers wait in a call.

        The call cannot end before all workers have made it.
        """
        gathered = set(self.collectives.waiting.copy())
        registered = set(self._registered.copy()) - gathered
        return (
            self.model is None
            and bool(registered and gathered)
            and self.members.live <= registered | gathered
        )

    @property
    def sync(self) -> str:
        """The sync model in force, or the next one while a change is in progress; "" if the model is unknown."""
        return self.job_sync.sync

    @property
    def shortage(self) -> str:
        """A text that says how many workers or servers the run has and needs, if they are too few to go on; else ""."""
        if self.model is None:
            parts = []
            if self._is_too_small:
                parts.append(f"{self.members.live_count} of at least {self.quorum.least} workers")
            if self.servers.shortage:
                parts.append(self.servers.shortage)
            return " and ".join(parts)
        if not self.quorum.paused:
            return ""
        return f"{len(self.members.present)} of at least {self.quorum.pause_below} workers"

    @property
    def _resumed_number(self) -> int:
        """Number of the cut with which the run has begun; 0 if there is no such cut."""
        return 0 if self.resumed is None else self.resumed.number

    @property
    def awaits_initial_weights(self) -> bool:
        """True if the initializer sends initial weights: the run begins without a cut, or the cut lacks parameters."""
        return self.resumed is None or self._lacking

    @property
    def _is_too_small(self) -> bool:
        """True if the run has too few workers to begin."""
        return self.model is None and self.quorum.too_small

    def note_ending(self, worker: int, how: str) -> None:
        """Record how the current incarnation of a worker has ended, unless this has been recorded already.

        Args:
            worker: index of the worker.
            how: a phrase that says how the incarnation has ended.
        """
        self.endings.setdefault((worker, self.members.incarnation(worker)), how)

    def cause(self, departure: Departure) -> str:
        """Return a phrase that says why an incarnation of a worker has left the run."""
        if departure.fate == "left":
            return "it was asked to leave"
        return self.endings.get((departure.worker, departure.incarnation), "its connection ended")

    def invite(self, count: int, wanted: Collection[int] = ()) -> dict[int, int]:
        """Expect `count` more workers. Return their indices and incarnations. See `Members.invite`.

        If the run is in progress, the workers take no part in it until they have connected and registered.

        Raises:
            ConfigurationError: there are not enough free indices.
        """
        # The index of a worker that has left becomes free when the worker's connection has ended and, if the worker was
        # lost, all servers have reported its pushes. If the main worker has finished, its index does not become free.
        reserved = {*self.losses.open, *self._connected}
        if self.members.fate(self.main.worker) == "finished":
            reserved.add(self.main.worker)
        invited = self.members.invite(count, wanted, reserved)
        for worker in invited:
            self.board.pop(worker, None)
            if self.model is None:
                self.members.admit(worker)
        return invited

    # -- connections --------------------------------------------------------------------------------------

    def require_expected(self, peer: Peer, incarnation: int = 0) -> None:
        """Raise `ProtocolError` unless this incarnation of a worker, or this server, may connect now."""
        index = peer.index
        match peer.role:
            case "worker":
                expected = index not in self._connected and self.members.expects(index, incarnation)
            case "server":
                expected = self.servers.expects(index)
            case _:
                expected = False
        if not expected:
            raise ProtocolError(f"{peer} is not expected")

    def first_samples(self, worker: int) -> int | None:
        """Return the number of samples in a worker's first push; None if it is unknown."""
        registered = self._registered.get(worker)
        return None if registered is None else registered.samples

    def expects_model(self, peer: Peer) -> bool:
        """Return True if this peer is a connected worker that has yet to register its model."""
        unregistered = peer.index in self._connected and peer.index not in self._registered
        expected = self.model is None or peer.index in self.members.invited
        return peer.role == "worker" and unregistered and expected and peer.index not in self.members.gone

    def connected(self, peer: Peer, now_ticks: int, address: str = "", incarnation: int = 0) -> list[Request]:
        """Record that a worker has connected, or that a server has connected and listens at `address`."""
        self.require_expected(peer, incarnation)
        if peer.role == "worker":
            self._connected.add(peer.index)
        else:
            self.servers.addresses[peer.index] = address
        return self._begin_if_complete(now_ticks) + self._hand_out_early(now_ticks)

    def disconnected(self, peer: Peer, now_ticks: int) -> list[Request]:
        """Record that the connection to a worker or server is closed. A worker that has not finished is then lost."""
        if peer.role == "worker":
            self._connected.discard(peer.index)
            return self._leave(peer.index, WorkerLost, now_ticks)
        self.servers.addresses.pop(peer.index, None)
        return []

    def server_lost(self, server: int, how: str, output: str = "", *, certain: bool = False) -> list[Request]:
        """Record that a server is lost. A run in progress ends, because it cannot continue without the server.

        If this server was brought by a machine that joined, and the run has not begun yet, another machine may bring
        the server instead. In this case, the server becomes vacant, and the result is empty. A resumed run counts as
        begun.

        Args:
            server: index of the server.
            how: a clause that says why the server is lost.
            output: the last lines of the server's output, if they tell more than `how`.
            certain: False if the host has seen only the end of the server's connection. How the process ends may then
                tell more about the cause.
        """
        if not self.servers.lose(server, how, begun=self.model is not None or self.resumed is not None):
            return []
        requests, settled = self.losses.lose_server(server)
        requests += self._norms.lose_server(server)
        for worker, drawn in settled.items():
            self.data.leave(worker, drawn, self.members.live, early=True)
        return [*requests, Fail(f"server {server}", how, output) if certain else EndWithout(server, how)]

    def ended(
        self, worker: int, now_ticks: int, incarnation: int = 0, *, asked: bool = False
    ) -> list[Request]:
        """Record that a worker's process has ended whose connection is already closed or was never made.

        A worker that was `asked` to leave, and has never taken part in the run, counts as having left, not as lost.
        """
        if incarnation != self.members.incarnation(worker):
            return []
        if asked and worker not in self.members.present:
            return self._leave(worker, WorkerFinished, now_ticks, early=True)
        return self._leave(worker, WorkerLost, now_ticks)

    def take_out(self, worker: int, now_ticks: int) -> list[Request]:
        """Continue without a worker whose process may still run. The host closes the worker's connection afterwards."""
        return self._leave(worker, WorkerLost, now_ticks, at_once=True)

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

    def admit(self, worker: int, now_ticks: int) -> list[Request]:
        """Let a worker join a run in progress: one that was absent at the start, or one that has left the run.

        The worker receives `Started` when all servers have accepted it. Until then, no change of the sync model and
        no extension of the model begins. The worker joins later if a change, an extension or the join of another worker
        is in progress. In a live run, a worker is admitted when it registers; this method is for hosts whose workers do
        not register.
        """
        self.members.admit(worker)
        self.reconfigurations.joining.append(worker)
        return self._join_next()

    def fetch(self, shard: int) -> list[Request]:
        """Request the final weights of a shard, as they are once the shard has noticed the departure of all workers.

        A worker says goodbye to the coordinator and to each server on separate connections, so a server may receive
        this request before the goodbyes.
        """
        return [
            Send(
                server_peer(self.placement.server_of[shard]),
                FetchSnapshot(shard, tuple(sorted(self.members.gone))),
            )
        ]

    def request_checkpoint(self, worker: int, number: int) -> bool:
        """Record that a worker's script has requested a checkpoint. Return True if the request is new.

        Args:
            worker: the worker.
            number: number of the worker's request, counted from 1.
        """
        if worker in self.members.gone:
            return False
        is_new = self._checkpoints.is_new(number)
        self._checkpoints.record(worker, number)
        return is_new

    def cut(self) -> list[Request]:
        """Cut the job, so that a later run can resume it.

        `SaveCut` follows when all shards have been cut, and `CompleteCut` when the workers have given their states.

        If a cut is in progress already, no other cut is made. See `paceline.core.reconfiguration`.
        """
        self.reconfigurations.wants_cut = True
        return self._join_next()

    def validate(self) -> None:
        """Check that the collections of workers are consistent; raise `InternalError` if they are not."""
        self.job_sync.validate()
        self.members.validate()
        self._turns.validate(self.members.present)

    def _handle_worker(self, sender: Peer, message: Message, now_ticks: int) -> list[Request]:
        worker = sender.index
        match message:
            case Status():  # first, because most messages are a `Status`, and the cases are tried in turn
                self.started = True
                self.board[worker] = message
                self._note_time(worker, message.spent, now_ticks)
            case messages.IterationFinished():
                return self.take(_iteration_finished(message, now_ticks, worker))
            case messages.IterationStarted():
                return self.take(_iteration_started(message, now_ticks, worker))
            case messages.SyncRequested():
                return self._request_sync(worker, message, now_ticks)
            case Register() if self.expects_model(sender) and self.model is not None:
                return self._register_late(worker, message, now_ticks)
            case DataRequested():
                return self._hand_out(worker, message, now_ticks)
            case StopRequested():
                return self.loops.stop(message.loop, self.members.live)
            case MainRequested():
                return [Send(sender, MainChosen(self.main.worker))]
            case ModelRequested():
                return [Send(sender, ModelDescribed(self.model, self.slices, self.addresses))]
            case EntryRequested():
                return self._enter(worker, message, now_ticks)
            case EpochReached():
                return self.loops.reached(worker, message, self.members.present, now_ticks)
            case BaseRequested():
                self.repeated_bases += 1
            case StoodIn():
                return self.collectives.allow_pushes(self.members.live)
            case GradientHashed():
                return self._compare(worker, message)
            case HyperParametersReported():
                return self.oversight.agree(worker, self.members.incarnation(worker), message)
            case PushesObserved():
                return self._observe(worker, message)
            case MetricsLogged():
                return self._keep_metrics(worker, message, now_ticks)
            case Contributed(model=None) if worker in self.members.invited:
                # The other workers have already made the calls that come before the first step, so this worker makes
                # these calls alone.
                return [Send(sender, combine({worker: message}))]
            case Contributed() if worker in self.members.live and worker not in self.collectives.waiting:
                if message.model is not None:
                    self.reconfigurations.require_extension(self.model, message.model)
                requests = self.collectives.contributed(worker, message, self.members.live)
                if self.collectives.grown:
                    requests += self.collectives.allow_pushes(self.members.live)
                return requests
            case KeepWorkerState():
                return self._note_state(worker, message, now_ticks)
            case AllCommitted() if not self._overlap and worker in self.members.present:
                return self._turns.pushed(worker, message, self.members.present)
            case Register() if self.expects_model(sender):
                self._registered[worker] = message
                return self._begin_if_complete(now_ticks)
            case messages.WorkerFinished():
                self._note_time(worker, message.spent, now_ticks)
                requests = self._lose_at(message.unreached, worker)
                return requests + self._leave(
                    worker, WorkerFinished, now_ticks, message.drawn, early=message.early
                )
            case Failed() if worker in self.members.invited or worker in self.members.gone:
                # The worker takes no part in the run yet, or has been refused, so the run does not fail.
                warned = self._warn(f"worker {worker} could not join the run: {message.reason}")
                return warned + self._leave(worker, WorkerLost, now_ticks)
            case Failed() if message.consequence:
                # The message gives a better reason than the exit code, which may have been reported before.
                self.endings[worker, self.members.incarnation(worker)] = message.reason
                self.cut_off.append(worker)
                return self._leave(worker, WorkerLost, now_ticks)
            case _:
                return self._handle_any(sender, message)
        return []

    def _handle_server(self, sender: Peer, message: Message, now_ticks: int) -> list[Request]:
        match message:
            case Ready():
                return self._start() if self.servers.ready(sender.index) else []
            case ExtensionReady():
                return self._complete_extension(sender.index, message, now_ticks)
            case JoinOffered():
                return self.reconfigurations.offered(sender.index, message)
            case PacesObserved() if self.auto is not None:
                situation = self.auto.observe(message, self.members.present)
                if situation is not None:
                    return [Rehearse(situation)]
                return self._choose(self.auto.periods, None, now_ticks) if self.auto.is_undecided else []
            case WorkerWelcomed():
                return self._welcome(sender.index, message, now_ticks)
            case PushesReported():
                return self._report(sender.index, message)
            case CutOffered():
                return self.reconfigurations.offered_cut(sender.index, message)
            case CutTaken():
                return self._take_cut(message, now_ticks)
            case MeanMeasured():
                return self._norms.measured(message)
            case MeanMissing():
                return self._norms.missing(message)
            case FaultReported():
                return self._warn(fault_report(message))
            case Waits():
                self.waits[sender.index] = message
                return []
            case _:
                return self._handle_any(sender, message)

    def _handle_any(self, sender: Peer, message: Message) -> list[Request]:
        match message:
            case Warned():
                # A faulty sender must not fill the memory.
                return self._warn(f"{sender}: {message.words}") if len(self.faults) < MOST_WARNINGS else []
            case Failed():
                return [Fail(str(sender), message.reason, message.traceback)]
            case _:
                raise ProtocolError(f"{type(message).__name__} is not expected from {sender} now")

    # -- start of the run ---------------------------------------------------------------------------------

    def _begin_if_complete(self, now_ticks: int) -> list[Request]:
        """Send the servers their shards if all servers are connected and every worker has registered or left."""
        absent = self._workers - len(self._registered) - len(self.members.gone)
        too_few = not self._registered or self.quorum.lacks(len(self._registered))
        if self.model is not None or absent or too_few or not self.servers.complete:
            return []
        models = {worker: self._registered[worker].model for worker in sorted(self._registered)}
        initializer = next(iter(models))
        model = models[initializer]
        for worker, other in models.items():
            if difference := first_difference(model, other):
                reason = f"its model differs from the model of worker {initializer}: {difference}"
                return self._refuse([worker], reason, f"worker {worker}")
        lacking = self.resumed is not None and not self.resumed.contains(model)
        if self.resumed is not None and lacking and not self.resumed.is_extended_by(model):
            difference = first_difference(self.resumed.models[0], model)
            reason = f"its model differs from the model of the run that is resumed: {difference}"
            return self._refuse(list(models), reason, f"worker {initializer}")
        try:
            slices = model.sliced(self._shards, self._slicing, self._block)
        except ConfigurationError as error:
            return self._refuse([initializer], str(error), f"worker {initializer}")
        if reason := self._shortage(model, len(models)):
            # Refuse all workers: otherwise, the other workers would begin once the refused workers had left.
            self._registered.clear()
            return self._refuse(list(models), reason, "the run")
        self.model, self.slices, self.initializer = model, slices, initializer
        self._lacking = lacking
        self.samples = self._samples_of(initializer, len(models))
        self.addresses = tuple(self.servers.addresses[server] for server in self.placement.server_of)
        states = () if self.resumed is None else self.resumed.states_of(self._shards)
        incarnations = self.members.incarnations
        requests: list[Request] = [
            Send(
                server_peer(server),
                CreateShards(
                    model,
                    self.placement.held_by(server, slices),
                    self._first,
                    tuple(models),
                    initializer,
                    self._registered[initializer].samples,
                    tuple((worker, incarnations[worker]) for worker in models if worker in incarnations),
                    self.auto is not None,
                    self.placement.held_by(server, states) if states else (),
                    lacking,
                ),
            )
            for server in sorted(self.servers.addresses)
        ]
        self.main.begin({worker: self._registered[worker].directory for worker in models})
        for worker in models:
            requests += self._add(WorkerJoined(now_ticks=now_ticks, worker=worker))
        return requests

    def _samples_of(self, worker: int, workers: int) -> Samples:
        """Return the values that determine the number of samples in an update at the beginning of the run.

        The worker has drawn its first batch from the loader that it has begun last, so it trains on this loader.
        """
        order, samples = self.data.newest_order(worker), self._registered[worker].samples
        if order is None:
            return Samples(workers, None, loader=False)
        whole = order.batch == 1 and samples != 1  # each position is a whole batch
        batch = samples if whole else order.batch
        return Samples(
            workers, batch, order.joint, order.balanced, divisible=order.size is not None and not whole
        )

    def _start(self) -> list[Request]:
        assert self.model is not None
        started = Started(
            self.slices,
            self.addresses,
            self.initializer if self.awaits_initial_weights else -1,
            main_worker=self.main.worker,
            digests=self.model.digests,
            resumed=self._resumed_number,
            directory=self.main.directory,
        )
        # A worker that has been invited since the shards were created is not present: it joins the run afterwards.
        return [Send(worker_peer(worker), started) for worker in sorted(self.members.present)]

    # -- extension of the model ---------------------------------------------------------------------------

    def _extend(self, models: Mapping[int, ModelSpec]) -> list[Request]:
        """Begin to extend the model, while all live workers wait. `models` has the extended model of each worker."""
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
        self._give_up_cut()
        slices = model.sliced(self._shards, self._slicing, self._block)
        assert self.model is not None
        known = "none" if self.resumed is None else self.resumed.has_of(self.model, model)
        resumed = self._resumed_number if known != "none" else 0
        return self.reconfigurations.extend(slices, models, resumed, lacking=known == "some")

    def _complete_extension(self, server: int, message: ExtensionReady, now_ticks: int) -> list[Request]:
        """Record that a server has extended its shards. After the last server, the extended model is the run's model.

        If a worker that waits to join has registered another model, the worker is refused.
        """
        requests, extension = self.reconfigurations.extended(server, message)
        if extension is None:
            return requests
        assert self.model is not None
        self._earlier_models.append(self.model)
        self.model, self.slices = extension.model, extension.slices
        for worker in list(self.reconfigurations.joining):
            registered = self._registered.get(worker)
            if registered is not None and (reason := self._difference(registered.model)):
                self.note_ending(worker, reason)
                requests += self._turn_away(worker, reason, now_ticks)
        return requests + self._join_next()

    def _difference(self, model: ModelSpec) -> str:
        """Return how a model differs from the model of the run; "" if they are equal."""
        assert self.model is not None
        difference = first_difference(self.model, model)
        return f"its model differs from the model of the run: {difference}" if difference else ""

    def _refuse(self, workers: Sequence[int], reason: str, where: str) -> list[Request]:
        return [*(Send(worker_peer(worker), Refused(reason)) for worker in workers), Fail(where, reason)]

    # -- members ------------------------------------------------------------------------------------------

    def _register_late(self, worker: int, message: Register, now_ticks: int) -> list[Request]:
        """Admit an invited worker before it computes its first gradient, or turn it away if its model differs."""
        if reason := self._difference(message.model):
            return self._turn_away(worker, reason, now_ticks)
        self._registered[worker] = message
        return self.admit(worker, now_ticks)

    def _turn_away(self, worker: int, reason: str, now_ticks: int) -> list[Request]:
        """Refuse a worker that takes no part in the run yet. The run goes on without this worker."""
        return [Send(worker_peer(worker), Refused(reason)), *self._leave(worker, WorkerLost, now_ticks)]

    def _join_next(self) -> list[Request]:
        """Begin the next join. If no worker is waiting to join, begin the cut that is wanted, if any."""
        requests = self.reconfigurations.begin_join(self.members)
        return requests + self._begin_cut() if self.reconfigurations.wants_cut else requests

    # -- cuts ---------------------------------------------------------------------------------------------

    def _begin_cut(self) -> list[Request]:
        """Begin a cut. If cuts have to wait at present, give up any cut in progress instead."""
        if self.model is None or self.losses.open or self._lacks_scripts or not self._model_is_whole:
            self._give_up_cut()
            return []
        lockstep = _is_lockstep(self.job_sync.sync)
        requests = self.reconfigurations.begin_cut(self.members, lockstep=lockstep)
        self.data.keeps = self.reconfigurations.cut is not None
        return requests

    @property
    def _lacks_scripts(self) -> bool:
        """True if no worker takes part, and no script has ended. A cut would then have no state of a script."""
        return not (self.members.present or self.members.some_have_finished)

    @property
    def _model_is_whole(self) -> bool:
        """True if the model has all parameters that the job has trained before.

        The script of a resumed run may add some of these parameters later. A cut before then would lose the trained
        values of these parameters.
        """
        return self.resumed is None or self.model is None or self.resumed.is_covered_by(self.model)

    @property
    def _models_before(self) -> tuple[ModelSpec, ...]:
        """All earlier models of the job, including those of its earlier runs."""
        if self.resumed is None or self.model is None:
            return tuple(self._earlier_models)
        before = self.resumed.models_before([*self._earlier_models, self.model])
        return (*before, *self._earlier_models)

    def _take_cut(self, message: CutTaken, now_ticks: int) -> list[Request]:
        """Record that a shard has been cut. When all shards have been cut, request that the cut is saved."""
        cut = self.reconfigurations.cut
        if cut is None or not cut.take(message):
            return []
        last = cut.last_pushes()
        if any(pushes.keys() != self.members.present for pushes in last):
            # A server has noticed that a worker is lost, and the coordinator has not noticed this yet. The cut begins
            # again when the coordinator notices it.
            self._give_up_cut()
            return []
        labels, drawn, torn = cut_pushes(last)
        assert self.model is not None
        before = self.resumed
        pushes = cut.taken[0].pushes
        states = [cut.taken[shard].state for shard in sorted(cut.taken)]
        at_once = max(state.at_once for state in states)
        saved = JobCut(
            number=cut.number,
            elapsed_s=now_ticks / self._ticks_per_s + (0.0 if before is None else before.elapsed_s),
            seed=self._seed,
            sync=self.job_sync.sync,
            model=self.model,
            extensions=self._models_before,
            slices=self.slices,
            shards=tuple(structs.replace(state, at_once=at_once) for state in states),
            pushes=pushes if before is None else before.pushes.plus(pushes),
            torn=torn + self.losses.torn + (0 if before is None else before.torn),
            workers=tuple(
                WorkerCut(worker, self.members.incarnation(worker), label) for worker, label in labels.items()
            ),
            loaders=self.data.cut(drawn),
            loop=self.loops.cut(now_ticks, self._ticks_per_s),
            guard=self.oversight.guard.cut(),
            main=self.main.worker,
        )
        self.reconfigurations.wants_cut = False
        giving = self.reconfigurations.giving
        assert giving is not None
        giving.begin(labels, self.main.worker, saved.loop)
        self._give_up_cut()
        wanted = [Send(worker_peer(worker), StateWanted(cut.number)) for worker in giving.awaited]
        return [SaveCut(saved), *wanted, *self._complete_cut()]

    def _note_state(self, worker: int, message: KeepWorkerState, now_ticks: int) -> list[Request]:
        """Record that a worker's script has given its state for the cut that awaits such states."""
        giving = self.reconfigurations.giving
        if giving is None or message.number != giving.number or worker not in self.members.present:
            return []
        giving.give(worker, message.iteration, self.loops.cut(now_ticks, self._ticks_per_s, worker))
        return self._complete_cut()

    def _complete_cut(self) -> list[Request]:
        """Return the request that completes a cut, if all states have been given."""
        giving = self.reconfigurations.giving
        if giving is None or (completed := giving.completed) is None:
            return []
        self.reconfigurations.giving = None
        return [completed]

    def _leave_cut(self, worker: int) -> list[Request]:
        """Go on with a cut without a worker that has left, or abandon the cut."""
        giving = self.reconfigurations.giving
        ended = self.members.some_have_finished and not self.members.present
        if giving is None or not giving.left(worker) or ended:
            return self._complete_cut()
        self.reconfigurations.giving = None
        self.reconfigurations.wants_cut = True
        reason = f"worker {worker} has left, and only it had the objects that the scripts track"
        return [AbandonCut(giving.number, reason)]

    def _give_up_cut(self) -> None:
        self.reconfigurations.give_up_cut()
        self.data.keeps = False

    def _welcome(self, server: int, message: WorkerWelcomed, now_ticks: int) -> list[Request]:
        """Record that a server has accepted a joining worker. When all servers have accepted it, start the worker."""
        joined = self.reconfigurations.welcomed(server, message)
        if joined is None:
            return []
        self.collectives.grown = True
        worker = joined.worker
        event = WorkerJoined.of(joined, now_ticks, worker, pulls=True)
        sync = self.job_sync.sync
        became_main = self.main.joined(worker)
        assert self.model is not None
        started = Started(
            self.slices,
            self.addresses,
            -1,  # the index of the initializer may have been used again, so no worker is named
            joined.iteration,
            sync,
            self.reconfigurations.extensions,
            self.main.worker,
            self.model.digests,
            directory=self.main.directory,
        )
        told = [started, *map(TrainingStopped, sorted(self.loops.stopped))]
        if self.collectives.uneven:
            told.append(StandInAllowed())
        requests = [*(Send(worker_peer(worker), each) for each in told), *self._add(event)]
        if not self._overlap:
            self._turns.joined(worker)
        if self.collectives.waiting:
            # Until the new worker makes the call in which the other workers wait, it may need their pushes.
            requests += self.collectives.allow_pushes(self.members.live)
        if became_main:
            requests += self._announce_main()
        if self.quorum.short:
            requests.append(Send(worker_peer(worker), Paused()))
        # Resume the run before the newcomer has weights: under BSP, its weights may wait for a push of a paused worker.
        return requests + self.quorum.pause_or_resume() + self._end_join(now_ticks)

    def _end_join(self, now_ticks: int) -> list[Request]:
        """Handle the requests that have arrived during a join, and begin the next join."""
        requests: list[Request] = []
        while (postponed := self.reconfigurations.next_change()) is not None:
            worker, message = postponed
            if worker in self.members.present:
                try:
                    requests += self._request_sync(worker, message, now_ticks)
                except ProtocolError as error:
                    # Only a warning: another worker may have sent the message that is being handled.
                    requests.append(Warn(f"worker {worker}: {error}"))
        return requests + self._join_next()

    def _add(self, event: WorkerJoined) -> list[Request]:
        self.members.present.add(event.worker)
        return self.take(event)

    def _leave(
        self,
        worker: int,
        kind: type[WorkerFinished] | type[WorkerLost],
        now_ticks: int,
        drawn: Sequence[PackedPushed] = (),
        *,
        early: bool = False,
        at_once: bool = False,
    ) -> list[Request]:
        """Record that a worker has left. If the departure is reported twice, the second report has no effect."""
        members = self.members
        if worker in members.gone:
            return []
        for made in (self._checkpoints, self._changes):
            made.left(worker, finished=kind is WorkerFinished and not early)
        self.loops.left(worker)
        if worker in members.invited:
            members.withdraw(worker)
            self.data.leave(worker, (), members.live, early=True)
            return []
        present = worker in members.present
        self._give_up_cut()
        self.time_ledger.leave(worker, now_ticks, lost=kind is WorkerLost)
        members.leave(worker, "lost" if kind is WorkerLost else "left" if early else "finished")
        self._registered.pop(worker, None)
        self.oversight.guard.left(worker)
        self._turns.left(worker)
        self._early = {key: message for key, message in self._early.items() if key[0] != worker}
        requests: list[Request] = []
        if kind is WorkerLost:
            requests += self._fail_without(worker)
            incarnation = members.incarnation(worker)
            if present:
                self.losses.begin(worker, incarnation, set(self.servers.addresses))
            else:
                self.data.leave(worker, (), members.live, early=True)
            lost = messages.WorkerLost(worker, incarnation, at_once)
            requests += [Send(server_peer(server), lost) for server in sorted(self.servers.addresses)]
            requests += self._norms.lost(worker)
        else:
            self.data.leave(worker, [(pushed, pushed) for pushed in drawn], members.live, early=early)
        if self.main.left(worker, finished=members.fate(worker) == "finished", others=self._others):
            requests += self._announce_main()
        if present:
            requests += self.take(kind(now_ticks=now_ticks, worker=worker)) + self.quorum.pause_or_resume()
        requests += self._leave_cut(worker)
        requests += self.reconfigurations.leave_extension(worker)
        requests += self.collectives.left(worker, members.live)
        requests += self._begin_if_complete(now_ticks) + self._hand_out_early(now_ticks)
        requests += self._turns.allow(members.present)
        if self.reconfigurations.left(worker):
            return requests + self._end_join(now_ticks)
        return requests + self._join_next()

    def _lose_at(self, unreached: Sequence[int], worker: int) -> list[Request]:
        """Tell the servers that a worker's goodbye did not reach to treat the worker as lost, and not to wait for it.

        Such a server fences the worker once their connection has ended. The server's report then leads to the verdict
        that the server's shards keep the pushes that they hold (see `Losses.reported`).
        """
        if not unreached:
            return []
        lost = messages.WorkerLost(worker, self.members.incarnation(worker))
        told = [Send(server_peer(each), lost) for each in unreached if each in self.servers.addresses]
        return [*self._fail_without(worker), *told, *self._norms.lost(worker)]

    def _fail_without(self, worker: int) -> list[Request]:
        """End the run if it lacks the initial weights, and this worker, which has left, was to send them."""
        if worker == self.initializer and self.awaits_initial_weights and not self.started:
            return [Fail(f"worker {worker}", LOST_TOO_EARLY)]
        return []

    @property
    def awaited(self) -> set[int]:
        """The workers for which the end of the run waits: the live workers, and the invited workers that hold data."""
        return self.members.live | set(filter(self.data.has_leases, self.members.invited))

    @property
    def everybody_left(self) -> bool:
        """True if the run is to end. See `Quorum.everybody_left`."""
        return self.quorum.everybody_left and not self.awaited

    @property
    def _others(self) -> set[int]:
        """The workers that can become the main worker if the present one leaves."""
        return self.members.live if self.model is None else self.members.present

    def _announce_main(self) -> list[Request]:
        """Tell the workers which worker has become the main worker."""
        return [Send(worker_peer(each), MainChosen(self.main.worker)) for each in sorted(self._others)]

    def _note_time(self, worker: int, spent: TimeSpent | None, now_ticks: int) -> None:
        """Record what a worker has spent its time on. If the worker has left, this has been recorded before."""
        if spent is not None and worker in self.members.present:
            self.time_ledger.report(worker, spent, now_ticks)

    # -- data ---------------------------------------------------------------------------------------------

    def _hand_out(self, worker: int, message: DataRequested, now_ticks: int) -> list[Request]:
        if worker in self.members.gone:
            raise ProtocolError(f"worker {worker} has left, but requests data")
        if self._is_too_small:
            # An equal split is made once for each epoch, so it must include all workers with which training begins.
            self._early[worker, message.loader] = message
            return []
        changes = [] if self.auto is None else self._begin_epoch(worker, message, now_ticks)
        lockstep = _is_lockstep(self.job_sync.sync)
        try:
            grant = self.data.request(
                worker,
                message,
                now_s=now_ticks / self._ticks_per_s,
                live=self.members.live | {worker},
                lockstep=lockstep,
            )
        except ConfigurationError as error:
            if worker in self.members.invited:
                return self._turn_away(worker, str(error), now_ticks)
            return self._refuse([worker], str(error), f"worker {worker}")
        granted = DataGranted(message.loader, message.epoch, grant.leases, grant.last)
        requests = [*changes, Send(worker_peer(worker), granted)]
        if grant.uneven and lockstep:
            # A worker with fewer batches may already wait in a call while the other workers still need its pushes.
            requests += self.collectives.allow_pushes(self.members.live)
        return requests

    def _hand_out_early(self, now_ticks: int) -> list[Request]:
        """Answer the requests for data that have arrived too early, once the run has enough workers to begin."""
        if self._is_too_small:
            return []
        requests: list[Request] = []
        early, self._early = self._early, {}
        for (worker, _), message in early.items():
            try:
                requests += self._hand_out(worker, message, now_ticks)
            except ProtocolError as error:
                # Only a warning: another worker may have sent the message that is being handled.
                requests.append(Warn(f"worker {worker}: {error}"))
        return requests

    def _compare(self, worker: int, message: GradientHashed) -> list[Request]:
        """Warn once if workers compute the same gradients."""
        # Only the first iterations are compared, and these run under the first sync model.
        lockstep = _is_lockstep(self._first)
        return self._warn(self.oversight.compare(worker, message, self.members.live, lockstep=lockstep))

    def _warn(self, warning: str) -> list[Request]:
        """Record a problem that does not end the run, and return the request to show it. Do nothing for ""."""
        if not warning:
            return []
        self.faults.append(warning)
        return [Warn(warning)]

    def _observe(self, worker: int, message: PushesObserved) -> list[Request]:
        """Let the guard judge what a worker reports of its pushes, and carry out the guard's verdicts."""
        requests: list[Request] = []
        for observed in message.observed:
            if worker not in self.members.present:
                break
            if self.auto is not None:
                self.auto.hear(observed)
            verdicts = self.oversight.guard.take(
                worker,
                observed,
                present=self.members.present,
                sync=self.job_sync.sync,
                lockstep=_is_lockstep(self.job_sync.sync),
            )
            requests += [request for verdict in verdicts for request in self.oversight.heed(verdict)]
        return requests

    def _keep_metrics(self, worker: int, message: MetricsLogged, now_ticks: int) -> list[Request]:
        """Add the metrics that a script has logged to the history of metrics."""
        if worker in self.members.gone:
            return []
        alone = self._workers > 1 and worker == self.main.worker
        return self._warn(self._metrics.take(worker, message, now_ticks / self._ticks_per_s, alone=alone))

    def _enter(self, worker: int, message: EntryRequested, now_ticks: int) -> list[Request]:
        """Return the answer to a worker that begins a training loop and has not trained yet."""
        self.loops.begun(message.loop, now_ticks, message.limits)
        entered = LoopEntered()
        if self.model is not None or self.resumed is not None:
            address = self.addresses[0] if self.addresses else ""
            entered = self.loops.entry(worker, message.loop, address, now_ticks, self._ticks_per_s)
        told = [*map(TrainingStopped, sorted(self.loops.stopped)), entered]
        return [Send(worker_peer(worker), each) for each in told]

    def _report(self, server: int, message: PushesReported) -> list[Request]:
        """Record a server's report of a lost worker's pushes. After the last report, take back the unused data."""
        requests, drawn = self.losses.reported(server, message)
        if drawn is None:
            return requests
        self.data.leave(message.worker, drawn, self.members.live, early=True)
        return requests + self._join_next() if self.reconfigurations.wants_cut else requests

    # -- the sync model -----------------------------------------------------------------------------------

    def _request_sync(self, worker: int, message: messages.SyncRequested, now_ticks: int) -> list[Request]:
        try:
            self._read_sync(message.sync)
        except ConfigurationError as error:
            raise ProtocolError(
                f"it requested a sync model that cannot be used in this run: {error}"
            ) from error
        if self.reconfigurations.postpones(worker, message):
            return []
        event = SyncRequested.of(message, now_ticks, worker)
        if message.source == "schedule":
            return self.take(event)
        if self._changes.is_new(message.number + 1):
            # The worker has not counted the requests of workers that are gone, so its number may be too small.
            event = structs.replace(event, number=max(message.number, self.job_sync.next_request))
        requests = self.take(event)
        self._changes.record(worker, message.number + 1)
        return requests

    def _may_use(self, sync: str) -> bool:
        """Return True if the run can change to a sync model."""
        try:
            models = self._read_sync(sync)
            require_shards(models, self._shards)
            for model in models:
                model.require_runnable(len(self.members.present))
        except ConfigurationError:
            return False
        return True

    def rehearsed(self, prospects: Sequence[Prospect], now_ticks: int) -> list[Request]:
        """Take the results of a simulation that was requested with `Rehearse`.

        The results take effect with the next epoch or, if the script distributes no loader, as soon as possible.
        """
        if self.auto is None:
            return []
        self.auto.rehearsed(prospects)
        return [] if self.auto.has_epochs else self._choose(self.auto.periods, None, now_ticks)

    def _begin_epoch(self, worker: int, message: DataRequested, now_ticks: int) -> list[Request]:
        """Let `auto` choose the sync model if this worker is the first to begin an epoch of the most used loader."""
        assert self.auto is not None
        self.auto.time(worker, message.times)
        if not self.auto.is_next(message.name, message.epoch, self.data.counts()):
            return []
        return self._choose(message.epoch, message.order, now_ticks)

    def _choose(self, epoch: int, order: DataOrder | None, now_ticks: int) -> list[Request]:
        """Let `auto` choose the sync model, unless a change or a join is in progress. The choice becomes an event."""
        assert self.auto is not None
        if not self.reconfigurations.in_progress.isdisjoint(("change", "join")) or (
            self.model is not None and not self.members.present
        ):
            return []
        choice = self.auto.begin(epoch, order)
        if choice is None:
            return []
        return self.take(
            SyncRequested(
                now_ticks=now_ticks,
                worker=min(self.members.present),
                source="auto",
                number=len(self.auto.choices) - 1,
                sync=choice.after,
            )
        )

    def take(self, event: AnyEvent) -> list[Request]:
        """Pass an event to the coordinator's part of the sync model, and return the resulting requests.

        Raises:
            UserCodeError: a sync model of the user failed, or returned actions that cannot be carried out.
        """
        try:
            actions = self.job_sync.handle(event)
            requests = [request for action in actions for request in _requests(action)] if actions else []
        except ProtocolError as error:
            if self._recorder is not None:
                self._recorder.record(Entry(event, refused=str(error)))
            raise
        except Exception as error:
            blame(self.job_sync.model, "the coordinator", event, error)
        if self._recorder is not None:
            self._recorder.record(Entry(event, list(actions)))
        return requests + self._join_next() if self.reconfigurations.waiting else requests


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

"""The protocol of a server, without I/O: which workers it serves, and how each message affects its shards.

    create      CreateShards from the coordinator; each shard begins when the initializer's initial weights arrive
    extend      ExtendShards from the coordinator; the initial weights of the new parameters arrive in the same way;
                then ModelExtended from the coordinator, and each worker connects again
    join        JoinProposed from the coordinator, and then WorkerJoined; when the worker connects, it pulls
    iteration   Commit = push + pull; with overlap off: Commit, Committed, PullRequested
    restart     PullRepeated
    end         WorkerFinished from the worker, WorkerLost from the coordinator, or the worker's connection is closed;
                FetchSnapshot from the coordinator, which is answered when the workers that it names have left

The host of this class transfers bytes and tensors, and reads the clock. The host stores the payload of a message
before it carries out the requests that `handle` returns. If a message is not allowed, `handle` raises `ProtocolError`
and does not change the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import structs

from ..errors import ConfigurationError, InternalError, ProtocolError
from ..state import stateful
from ..sync import SyncModel
from ..sync.events import (
    AnyEvent,
    MeanClipped,
    PullRepeated,
    PullRequested,
    PushReceived,
    TimerFired,
    WorkerFenced,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
    maker,
)
from ..sync.notation import parse_shards
from ..sync.ticks import TICKS_PER_S
from . import messages
from .layout import WireFormat
from .messages import (
    Commit,
    Committed,
    CreateShards,
    CutAgreed,
    CutOffered,
    CutProposed,
    ExtendShards,
    ExtensionReady,
    FetchSnapshot,
    InitialWeights,
    InitialWeightsRequested,
    JoinOffered,
    JoinProposed,
    LossSettled,
    MeanAwaited,
    Message,
    ModelExtended,
    PushesReported,
    Ready,
    ShardState,
    ShardWaits,
    Snapshot,
    Waits,
    WorkerWelcomed,
)
from .paces import PaceMeter
from .requests import COORDINATOR, EntryRecorder, LeaveOut, Peer, Request, Send, Timer, worker_peer
from .shard import Shard

RecorderOf = Callable[[int], EntryRecorder | None]
"""A function that returns the recorder for the shard with a given index; None to record nothing."""

_push_received = maker(PushReceived, Commit)


@stateful(
    fixed="_seed _read_sync _recorder_of _ticks_per_s _translated _wire",
    about={"_connected": "connections"},
    makes={"shards": "_new_shard"},
)
class Server:
    """A server of a run: it passes the workers' messages to its shards as events, and returns the shards' requests.

    Args:
        seed: random seed for the run, used by the sync models.
        read_sync: function that parses the sync model of a change. It raises `ConfigurationError` if the run cannot
            use the model.
        recorder_of: returns the recorder for a shard; called once for each shard, when its initial weights arrive.
        ticks_per_s: number of ticks per second (see `paceline.sync.ticks`).
        translated: True to translate the hyper-parameters of each update (see `paceline.sync.translation`).
        wire: the codec of each direction.

    Attributes:
        shards: index -> shard, for each shard that has received its initial weights.
        expected: the workers that have joined the run and have not left.
        initializer: the worker that sends the initial weights; -1 before the shards are created.
        extension: number of the extension in force; 0 if the model has not been extended.
        ending: connected worker that is lost, according to the coordinator -> the coordinator's message.
    """

    def __init__(
        self,
        seed: int = 0,
        read_sync: Callable[[str], Sequence[SyncModel]] = parse_shards,
        recorder_of: RecorderOf = lambda shard: None,
        ticks_per_s: int = TICKS_PER_S,
        translated: bool = False,
        wire: WireFormat = WireFormat(),
    ) -> None:
        self.expected: set[int] = set()
        self.initializer = -1
        self.extension = 0
        self.ending: dict[int, messages.WorkerLost] = {}
        self._seed = seed
        self._read_sync = read_sync
        self._recorder_of = recorder_of
        self._ticks_per_s = ticks_per_s
        self._translated = translated
        self._wire = wire
        self._models: tuple[SyncModel, ...] = ()
        self._usual_samples: int | None = None
        self._next = 0  # number of the last extension that was announced, which may not be in force yet
        self._to_begin: set[int] = set()  # shards that wait for initial weights
        # connected worker -> number of the extension for which it has memory
        self._connected: dict[int, int] = {}
        self._observes = False  # True if the coordinator needs to know how fast the workers are
        self._readers: set[int] = set()  # connected workers that can read the weights directly from memory
        self._states: dict[int, ShardState] = {}  # the progress of each shard when the run begins
        self.shards: dict[int, Shard] = {}  # made from the attributes above
        self._paces: PaceMeter | None = None  # at the server of shard 0, if `_observes`
        self._fetches: list[FetchSnapshot] = []  # the coordinator's requests that are not answered yet
        self._proposed: JoinProposed | None = None  # the proposal of a join, until the server has answered
        # lost workers of which a shard holds a push, until the coordinator has decided about the push
        self._fenced: set[int] = set()
        # worker -> its incarnation; 0 for workers that are not in this mapping
        self._incarnations: dict[int, int] = {}
        # the cut that this server makes as soon as it has noticed all departures before the cut
        self._cut: CutProposed | CutAgreed | None = None

    @property
    def awaits_factor(self) -> bool:
        """True if a shard has measured a mean, and the coordinator has not sent the factor of this mean yet."""
        return any(shard.clipped.measured for shard in self.shards.values())

    def is_connected(self, worker: int) -> bool:
        """Return True if a worker is connected."""
        return worker in self._connected

    def is_fenced(self, worker: int) -> bool:
        """Return True if a worker is lost, and has not left the shards yet, because a shard holds one of its pushes."""
        return worker in self._fenced

    def shard(self, index: int) -> Shard:
        """Return a shard. Raise `ProtocolError` if the shard is not at this server or has no weights yet."""
        if index not in self.shards:
            raise ProtocolError(f"shard {index} is not at this server, or has no weights yet")
        return self.shards[index]

    def require_beginning(self, index: int, worker: int) -> None:
        """Raise `ProtocolError` unless this shard waits for initial weights from this worker."""
        if worker != self.initializer:
            raise ProtocolError(
                f"the initial weights must come from worker {self.initializer}, not from worker {worker}"
            )
        if index not in self._to_begin:
            raise ProtocolError(f"initial weights for shard {index} are not expected")

    # -- connections --------------------------------------------------------------------------------------

    def require_expected(self, worker: int, extension: int = 0, incarnation: int = 0) -> None:
        """Raise `ProtocolError` unless this incarnation of a worker may connect now.

        The worker must have memory for this extension of the model.
        """
        if self.initializer < 0:
            raise ProtocolError("training has not begun")
        absent = worker not in self.expected or worker in self._fenced
        if absent or self._connected.get(worker, -1) >= extension:
            raise ProtocolError(f"worker {worker} is not expected, or is already connected")
        if incarnation != (newest := self._incarnations.get(worker, 0)):
            raise ProtocolError(f"incarnation {incarnation} of worker {worker} connects, expected {newest}")
        latest = self.extension if self._to_begin else self._next
        if not self.extension <= extension <= latest:
            raise ProtocolError(
                f"worker {worker} has memory for extension {extension} of the model, expected {self.extension}"
            )

    def connected(
        self,
        worker: int,
        now_ticks: int,
        extension: int = 0,
        incarnation: int = 0,
        *,
        reads_in_place: bool = False,
    ) -> list[Request]:
        """Record that a worker has connected, and send it the weights of all shards that have begun.

        If the worker joins a run in progress, the sync models may delay the weights. If the worker has memory for the
        next extension, the extension takes effect.
        """
        self.require_expected(worker, extension, incarnation)
        self.extension = extension
        self._connected[worker] = extension
        self._readers.discard(worker)
        if reads_in_place:
            self._readers.add(worker)
        return [
            request for shard in self.shards.values() for request in self._welcome(shard, worker, now_ticks)
        ]

    def disconnected(self, worker: int, now_ticks: int) -> list[Request]:
        """Record that the connection to a worker is closed. A worker that has not finished is then lost."""
        self._connected.pop(worker, None)
        self._readers.discard(worker)
        if (lost := self.ending.pop(worker, None)) is not None:
            return self._lose(lost, now_ticks) + self._answer_coordinator()
        return self._fence(worker, now_ticks) + self._answer_coordinator()

    # -- messages -----------------------------------------------------------------------------------------

    def handle(self, sender: Peer, message: Message, now_ticks: int) -> list[Request]:
        """Process a message and return the requests to the host.

        Raises:
            ProtocolError: the message is not allowed now. The state is unchanged.
        """
        worker = sender.index
        match message:
            case Commit():
                return self._commit(worker, message, now_ticks)
            case messages.PullRequested():
                pull = PullRequested(now_ticks=now_ticks, worker=worker, iteration=message.iteration)
                return self.shard(message.shard).handle(pull)
            case messages.PullRepeated():
                repeat = PullRepeated.of(message, now_ticks, worker)
                return self.shard(message.shard).handle(repeat)
            case messages.MeanClipped():
                clipped = self.shard(message.shard).handle(MeanClipped.of(message, now_ticks))
                return clipped + self._answer_coordinator()
            case MeanAwaited():
                return self.shard(message.shard).ask(message.pushes)
            case messages.WorkerFinished():
                finished = WorkerFinished(now_ticks=now_ticks, worker=worker)
                return self._leave(finished, early=message.early)
            case messages.WorkerLost():
                return self._lose(message, now_ticks)
            case JoinProposed():
                self._proposed = message
                if self._next > self.extension:  # this extension has been given up
                    self._next = self.extension
                    self._to_begin.clear()
                return self._answer_coordinator()
            case CutProposed() | CutAgreed():
                self._cut = message
                for shard in self.shards.values():
                    shard.give_up_cut()
                return self._answer_coordinator()
            case LossSettled():
                return self._settle(message, now_ticks)
            case messages.WorkerJoined():
                return self._join(message, now_ticks)
            case CreateShards():
                return self._create(message, now_ticks)
            case ExtendShards():
                return self._extend(message)
            case ModelExtended():
                self.extension = message.number
                return []
            case FetchSnapshot():
                self.shard(message.shard)
                self._fetches.append(message)
                return self._answer_coordinator()
            case InitialWeights():
                return self._begin(worker, message.shard, now_ticks)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not expected from {sender}")

    def fire(self, timer: Timer, now_ticks: int) -> list[Request]:
        """Process a timer that is due, and return the requests to the host."""
        event = TimerFired(now_ticks=now_ticks, worker=timer.worker, iteration=timer.iteration)
        return self.shards[timer.shard].handle(event)

    def waits(self, *, timers: bool) -> Waits:
        """Return the workers that wait at each shard. `timers` must be True if the host has a pending timer."""
        described = []
        for index, shard in sorted(self.shards.items()):
            reasons = dict(sorted(shard.waits().items()))
            pulls = tuple((worker, shard.sync.last_iteration(worker)) for worker in reasons)
            sync, staleness = str(shard.sync.sync), shard.staleness()
            described.append(ShardWaits(index, sync, pulls, tuple(reasons.values()), staleness))
        return Waits(tuple(described), timers)

    def validate(self) -> None:
        """Check that the collections of workers are consistent; raise `InternalError` if they are not."""
        for shard in self.shards.values():
            shard.sync.validate()
            if (live := shard.sync.order.phase.keys()) != self.expected:
                raise InternalError(f"shard {shard.index} has workers {set(live)}, expected {self.expected}")
        connected = self._connected.keys()
        if not (self._readers <= connected and self.ending.keys() <= connected):
            raise InternalError(
                f"workers {self._readers} read the server's memory and workers {set(self.ending)} are about to "
                f"disconnect, but only {set(connected)} are connected"
            )

    def _create(self, message: CreateShards, now_ticks: int) -> list[Request]:
        self.expected = set(message.workers)
        self._observes = message.observes
        self._incarnations.update(message.incarnations)
        self.initializer = message.initializer
        self._models = tuple(parse_shards(message.sync))
        # The usual number of samples is used only for SGD: the steps of other optimizers hardly depend on the scale of
        # the gradients.
        if all(optimizer.name == "SGD" for optimizer in message.model.optimizers):
            self._usual_samples = message.usual_samples
        # All servers receive this list of workers, so the number is the same at all shards, even if a worker is lost
        # before a shard begins.
        together = len(message.workers)
        indices = [bounds.index for bounds in message.shards]
        self._to_begin = set(indices)
        states = message.resumed or (ShardState(),) * len(indices)
        self._states = {
            index: structs.replace(state, at_once=max(state.at_once, together))
            for index, state in zip(indices, states, strict=True)
        }
        if message.resumed and not message.lacking:
            for index in indices:
                self._begin(message.initializer, index, now_ticks)
        return [Send(COORDINATOR, Ready())]

    def _begin(self, worker: int, index: int, now_ticks: int) -> list[Request]:
        """Record that the initial weights of a shard have arrived or, if it exists already, of its new parameters."""
        self.require_beginning(index, worker)
        self._to_begin.remove(index)
        if index in self.shards:
            return self._report_if_ready()
        shard = self.shards[index] = self._new_shard(index)
        for member in sorted(self.expected):
            shard.handle(WorkerJoined(now_ticks=now_ticks, worker=member))
        welcomed = [
            request
            for member in sorted(self._connected)
            for request in self._welcome(shard, member, now_ticks)
        ]
        return welcomed + self._answer_coordinator()

    def _new_shard(self, index: int) -> Shard:
        recorder = self._recorder_of(index)
        if self._observes and index == 0:
            recorder = self._paces = PaceMeter(recorder, self._ticks_per_s)
        return Shard(
            index,
            self._models,
            self._seed,
            self._readers,
            recorder,
            self._usual_samples,
            self._ticks_per_s,
            self._translated,
            self._states.get(index, ShardState()),
            wire=self._wire,
        )

    def _welcome(self, shard: Shard, worker: int, now_ticks: int) -> list[Request]:
        """Send a worker its first weights. A worker that joins a run in progress pulls them, so they may be delayed."""
        if shard.bases is not None:
            shard.bases.leave(worker)
        if shard.sync.order.phase[worker] != "pushed":
            return [shard.welcome(worker)]
        iteration = shard.sync.last_iteration(worker)
        return shard.handle(PullRequested(now_ticks=now_ticks, worker=worker, iteration=iteration))

    def _extend(self, message: ExtendShards) -> list[Request]:
        """Request the initial weights of the new parameters.

        If the weights are requested again from another worker, those that have already arrived are not used.
        """
        self.initializer, self._next = message.initializer, message.number
        complete = message.resumed and not message.lacking
        self._to_begin = set() if complete else {bounds.index for bounds in message.shards}
        initializer = worker_peer(message.initializer)
        requested = [Send(initializer, InitialWeightsRequested(shard)) for shard in sorted(self._to_begin)]
        return [*requested, *self._report_if_ready()]

    def _report_if_ready(self) -> list[Request]:
        if self._to_begin:
            return []
        return [Send(COORDINATOR, ExtensionReady(self.initializer, self._next))]

    def _commit(self, worker: int, commit: Commit, now_ticks: int) -> list[Request]:
        shard = self.shard(commit.shard)
        if commit.change is not None:
            try:  # check the model now, because the shard cannot undo the change later
                self._read_sync(commit.change.sync)
            except ConfigurationError as error:
                raise ProtocolError(
                    f"its push announces a change to a sync model that cannot be used in this run: {error}"
                ) from error
        if commit.edit is not None and (
            commit.empty or commit.samples is not None or commit.weight is not None or commit.clip is not None
        ):
            raise ProtocolError(
                "its push contains an edit, but has no values, or has properties of a gradient"
            )
        if commit.clip is not None and not shard.may_clip(worker):
            raise ProtocolError(
                f"its push clips the joint gradient, whose norm is not known under {shard.sync.sync}"
            )
        push = _push_received(commit, now_ticks, worker)
        requests = shard.handle(push, commit.drawn)
        if self._paces is not None and commit.shard == 0 and (report := self._paces.report()) is not None:
            requests.append(Send(COORDINATOR, report))
        if commit.pulls:
            pull = PullRequested(now_ticks=now_ticks, worker=worker, iteration=commit.iteration)
            return requests + shard.handle(pull)
        return [*requests, Send(worker_peer(worker), Committed(commit.shard, commit.iteration))]

    def _join(self, message: messages.WorkerJoined, now_ticks: int) -> list[Request]:
        """Let a worker join a run in progress at all shards, unless a shard has gone beyond the worker's c_p."""
        worker, count = message.worker, message.count
        requests: list[Request] = []
        if worker in self.expected:  # another server has refused the earlier c_p
            requests = self._leave(WorkerLost(now_ticks=now_ticks, worker=worker), early=False)
        if not all(shard.sync.may_join(count) for shard in self.shards.values()):
            return [*requests, self._offer(worker, message.incarnation)]
        event = WorkerJoined.of(message, now_ticks, worker, pulls=True)
        self.expected.add(worker)
        self._forget_drawn(worker)
        self._incarnations[worker] = message.incarnation
        requests += self._tell_all(event)
        return [*requests, Send(COORDINATOR, WorkerWelcomed(worker, message.incarnation, count))]

    def _offer(self, worker: int, incarnation: int) -> Send:
        """Return the request that tells the coordinator with which label and c_p a worker could join now."""
        entries = [shard.sync.entry(worker) for shard in self.shards.values()]
        iteration = max((iteration for iteration, _ in entries), default=0)
        count = max((count for _, count in entries), default=0)
        return Send(COORDINATOR, JoinOffered(worker, incarnation, iteration, count))

    def _lose(self, message: messages.WorkerLost, now_ticks: int) -> list[Request]:
        """Record that a worker is lost. While it is connected, more messages may still arrive, so wait."""
        worker, join = message.worker, self._proposed
        # A later incarnation may be proposed before the connection of the lost incarnation has ended.
        if join is not None and join.worker == worker and join.incarnation <= message.incarnation:
            self._proposed = None
        if worker in self._connected:
            self.ending[worker] = message
            return []
        requests = self._fence(worker, now_ticks)
        shards = sorted(self.shards.items())
        report = PushesReported(
            worker,
            message.incarnation,
            tuple(shard.sync.order.last_label(worker) for _, shard in shards),
            tuple(worker in self._fenced and shard.sync.holds(worker) for _, shard in shards),
            tuple(shard.drawn.last(worker) for _, shard in shards),
        )
        self._forget_drawn(worker)
        return [*requests, Send(COORDINATOR, report)]

    def _forget_drawn(self, worker: int) -> None:
        for shard in self.shards.values():
            shard.drawn.forget(worker)

    def _fence(self, worker: int, now_ticks: int) -> list[Request]:
        """Record that a worker is lost, and sends nothing more. If no shard holds its pushes, it leaves immediately."""
        if worker not in self.expected or worker in self._fenced:
            return []
        if not any(shard.sync.holds(worker) for shard in self.shards.values()):
            return self._leave(WorkerLost(now_ticks=now_ticks, worker=worker), early=True)
        self._fenced.add(worker)
        return self._tell_all(WorkerFenced(now_ticks=now_ticks, worker=worker))

    def _settle(self, message: LossSettled, now_ticks: int) -> list[Request]:
        """Carry out the coordinator's verdict about the held pushes of a lost worker."""
        worker = message.worker
        if worker not in self._fenced or message.incarnation != self._incarnations.get(worker, 0):
            return []
        self._fenced.remove(worker)
        return self._leave(WorkerLost(now_ticks=now_ticks, worker=worker, kept=message.kept), early=True)

    def _leave(self, event: WorkerFinished | WorkerLost, *, early: bool) -> list[Request]:
        """Record that a worker has left. If the departure is reported twice, the second report has no effect.

        Args:
            event: the departure.
            early: True if the worker had not finished its work.
        """
        if event.worker not in self.expected:
            return []
        self.expected.remove(event.worker)
        left_out = [LeaveOut(event.worker)] if early and 0 in self.shards else []
        return [*left_out, *self._tell_all(event), *self._answer_coordinator()]

    def _tell_all(self, event: AnyEvent) -> list[Request]:
        """Pass an event to all shards."""
        return [request for shard in self.shards.values() for request in shard.handle(event)]

    def _answer_coordinator(self) -> list[Request]:
        """Answer the coordinator's requests, except those that name workers that have not left yet.

        When all workers have left, the weights of a shard also wait for the factors of its last means.
        """
        due = [
            fetch
            for fetch in self._fetches
            if self.expected.isdisjoint(fetch.left)
            and (self.expected or not self.shards[fetch.shard].clipped.measured)
        ]
        self._fetches = [fetch for fetch in self._fetches if fetch not in due]
        answers: list[Request] = [
            Send(COORDINATOR, Snapshot(each.shard, self.shards[each.shard].version)) for each in due
        ]
        join = self._proposed
        if (
            join is not None
            and self.expected.isdisjoint((*join.left, join.worker))
            and join.worker not in self._connected
            and not self._to_begin
        ):
            self._proposed = None
            answers.append(self._offer(join.worker, join.incarnation))
        return answers + self._make_cut() if self._cut is not None else answers

    def _make_cut(self) -> list[Request]:
        """Make the cut that the coordinator has asked for, or say when it can be made."""
        cut = self._cut
        assert cut is not None
        if not self.expected.isdisjoint(cut.left) or self._to_begin:
            return []
        self._cut = None
        furthest = max(shard.round for shard in self.shards.values())
        if isinstance(cut, CutProposed) or (cut.round is not None and furthest >= cut.round):
            return [Send(COORDINATOR, CutOffered(cut.number, furthest))]
        return [request for shard in self.shards.values() for request in shard.cut(cut)]

"""The session of a worker in a live run: its connections, its memory, and the emulation of unequal machines.

The session runs on the script's thread. `paceline.core.worker` determines which messages are sent and awaited. This
module sends and receives the messages, together with the gradients and weights that belong to them. The session
writes the times of each iteration to `worker-<index>.jsonl` in the run directory.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import secrets
import select
import selectors
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeVar, cast

import msgspec
import safetensors.torch
import torch

from ..core import worker as core
from ..core.data_feed import DataFeed
from ..core.host import Host
from ..core.layout import Range, ShardSlice, of_set
from ..core.messages import (
    MOST_LABEL,
    Answer,
    Bell,
    Combined,
    Commit,
    Content,
    Failed,
    FetchBuffers,
    FetchFrozen,
    FetchInitialBuffers,
    FetchOptimizerState,
    FrozenTensors,
    Hello,
    InitialBuffers,
    InitialState,
    InitialWeights,
    KeepStates,
    LoopPosition,
    MemoryAttached,
    MemoryPlace,
    Message,
    ModelExtended,
    Observation,
    OptimizerState,
    PooledBuffers,
    Started,
    Status,
    TakenOut,
    Warned,
    first_phase,
)
from ..core.model_spec import BufferSpec, FrozenSpec, ModelSpec
from ..core.requests import COORDINATOR, Abort, Peer, Proceed, Request
from ..core.time_spent import Activity, Stopwatch
from ..core.unsent_metrics import Noted, Settled
from ..core.wire_format import Format
from ..errors import DeadlineError, PeerLostError, ProtocolError, TakenOutError
from ..frontend.metrics import metrics_of
from ..shard.buffers import checksum, pack, packed_bytes, unpack
from ..shard.rounding import Rounded
from ..shard.store import Vectors
from ..shard.vectors import sliced, tensors_over
from ..sync import SyncModel
from ..sync.events import Clip
from ..sync.schedule import read_schedule
from ..sync.ticks import TICKS_PER_S
from ..trace.records import IterationRecord
from ..wire.addresses import connect, is_here, seen_from
from ..wire.forks import close_in_forks
from ..wire.memory import Master, Region, cut, shared_memory_available
from ..wire.ring import Ring
from ..wire.ring import available as rings_available
from ..wire.stream import Stream
from ..wire.traffic import sending_of
from .frozen_files import write_frozen
from .frozen_values import require_complete
from .job import Assignment
from .outbox import Outbox
from .reader import Reader, read_states
from .repeating import Repeating
from .segmented import TEND_S, SegmentedFile, segmenting
from .server_memory import require_plausible_state
from .slow_link import SlowLink
from .spin import SPIN_S, fall_asleep, spin, wake_up

__all__ = ["WorkerSession"]

log = logging.getLogger("paceline.worker")

STATUS_INTERVAL_S = 0.1
# Minimum time between two checks for messages from the coordinator. Very short iterations skip most of these checks.
HEARING_INTERVAL_S = 200e-6
USUAL_ITERATIONS = 15  # number of iterations whose median is the usual computing time
COMBINING_S = 0.5  # minimum time in a barrier or a reduction before the worker pushes without a gradient
MOST_READ_ATTEMPTS, READ_AGAIN_S = 60, 1.0  # how often and after which pause the job's model is read again
LEAST_IDLE_S = 1e-3  # minimum time between two pushes while the script is not training
# Minimum times between two pushes that are observed, and between two reports of what was seen. They bound the cost of
# the guard: a push takes about 15 us to observe, and as long to judge (see `python -m benchmarks guard`).
OBSERVING_INTERVAL_S, REPORTING_INTERVAL_S = 2e-3, 10e-3
# Minimum time between two reports of what the script has logged.
LOGGING_INTERVAL_S = 0.1

# The payload of a commit need not be copied, because it does not change until the commit is answered.
LENT: Final = "until the answer"


Method = TypeVar("Method", bound=Callable[..., Any])
Found = TypeVar("Found")


def _exclusive(method: Method) -> Method:
    """Let only one thread at a time use the connections: a script may iterate over its loader on another thread.

    If a connection is lost because this worker was taken out of the run, the method raises `TakenOutError`.
    """

    @wraps(method)
    def call(self: WorkerSession, *args: Any, **options: Any) -> Any:
        with self._lock:
            try:
                return method(self, *args, **options)
            except TakenOutError as error:
                self._taken_out = error
                raise
            except PeerLostError as error:
                self._raise_if_taken_out(error)
                raise

    return cast(Method, call)


class Leaving(SystemExit):
    """Raised in the script when this worker has been asked to leave the run, at the end of its current iteration."""


class _Initial(NamedTuple):
    """What an initializer sends to the servers.

    Attributes:
        shards: the slices of all shards, in order.
        weights: the flat vectors of the initial weights.
        buffers: the initial values of the model's buffers.
        state_of: function that returns a shard's part of the initial optimizer state.
        frozen: the frozen parameters, which are written to files.
    """

    shards: Sequence[ShardSlice]
    weights: Vectors
    buffers: Sequence[torch.Tensor]
    state_of: Callable[[ShardSlice], Vectors]
    frozen: Sequence[FrozenSpec]


class WorkerSession:
    """The session of a worker in a live run. See `paceline.frontend.session.Session`."""

    def __init__(self, place: Assignment, coordinator: Stream[Message]) -> None:
        job = place.job
        self.worker = place.index
        self.workers = job.workers
        self.split = job.split
        self.batch = job.batch
        self.seed = job.seed
        self.device = torch.device("cpu" if place.device is None else place.device.own_name)
        self.skips_nan = job.on_nan == "skip"
        self.weights: Vectors = {}
        self.gradients: Vectors = {}
        self._job = job
        self._reached = place.coordinator
        self._incarnation = place.incarnation
        self._lock = threading.RLock()
        self.before_exchange: Callable[[], object] = lambda: None
        self.frozen: Callable[[str], Iterable[memoryview] | None] = lambda digest: None
        self.on_moved: Callable[[], object] = lambda: None
        self.on_finish: Callable[[], str] = str
        self._core = core.Worker(
            job.schedule,
            workers=job.workers,
            shards=job.shards,
            servers=job.servers,
            overlap=job.overlap == "shards",
        )
        self._host = _WorkerHost(self)
        # The times at which the current iteration was aborted and restarted; None if it was not aborted.
        self._restarted: tuple[float, float] | None = None
        self._stopwatch = Stopwatch(job.now_ticks())  # measures what this worker spends its time on
        self._computed_s = 0.0  # time at which the current gradient was complete
        self._supply_s = 0.0  # time that the script has waited for data in the current iteration
        # the computing times of the latest iterations
        self._computing_s: deque[float] = deque(maxlen=USUAL_ITERATIONS)
        self._jitter = random.Random(f"paceline jitter {job.seed} {place.index}")
        self._coordinator = coordinator
        self._selector = selectors.DefaultSelector()
        self._selector.register(coordinator, selectors.EVENT_READ)
        self._orders = select.poll()  # watches only the connection to the coordinator
        self._orders.register(coordinator, select.POLLIN)
        self._servers: list[Stream[Message]] = []
        self._writing: set[Stream[Any]] = set()  # the streams of which the selector also watches the writing
        self._slow_link: SlowLink | None = None  # set if the servers are on other machines
        self._ringed: list[Stream[Message]] = []  # the streams that use rings
        self._shards: tuple[ShardSlice, ...] = ()
        self._initial: _Initial | None = None  # what the servers receive if this worker is the initializer
        self._pulls: int | None = None  # the parameter set that is being pulled; None for all sets
        self._parameters = 0  # number of parameters of the model
        self._region: Region | None = None  # memory of this worker
        self._master: Master | None = None  # shared memory in which the servers update the weights
        self._outbox: Outbox | None = None  # sends the gradients; None if no server uses TCP
        # shard -> its slice of the weights, and memory for rounded weights; None if weights are not rounded
        self._rounded: dict[int, Rounded] | None = None
        # shards that use this worker's memory although their servers use TCP
        self._attached: set[int] = set()
        self._in_place = False  # True while `weights` refers to memory that the servers update
        self._states: dict[int, bytearray] = {}  # shard -> bytes of the optimizer state that is being fetched
        self._model: ModelSpec | None = None  # None until the worker takes part in the run
        self._frozen: dict[str, bytearray] | None = None  # memory for frozen parameters, like `_fetched`
        # Memory for the buffers that are being fetched; None if they are not, or have arrived.
        self._fetched: list[bytearray] | None = None
        self._fetching = -1  # the shard whose optimizer state is being received; -1 for none
        # The time at which the weights for the current iteration arrived; None before the first iteration.
        self._begun_s: float | None = None
        self._status_s = self._heard_s = self._logged_s = -math.inf
        # What was shown last; the state is "" before the first time.
        self._shown: Literal["", "computing", "waiting", "pulling", "paused"] = ""
        self._loss: float | None = None  # the last one that is known
        self._guessed = False  # True if it is a guess
        # the record of the last iteration, if the script logs the loss of an iteration after its step
        self._unwritten: IterationRecord | None = None
        self._observed_s = (
            self._reported_s
        ) = -math.inf  # when a push was last observed, and reported to the guard
        self._finished = False
        self.asked_to_leave = False
        self._taken_out: TakenOutError | None = None  # set once the coordinator has said that it is so
        self._machine = place.machine or msgspec.UNSET
        path = Path(job.run_dir, f"worker-{place.index}.jsonl")
        self._log: SegmentedFile | None = None  # the records; None if there are none
        if job.traces != "off":
            segments = segmenting(job, "worker", place.machine)
            self._log = SegmentedFile(path, self._warn, segments, append=place.incarnation > 0)
        self._encode = msgspec.json.Encoder().encode  # encodes records
        self._tend_s = 0.0  # time at which the records are tended next
        close_in_forks(self)

    @classmethod
    def connect(cls, place: Assignment) -> WorkerSession:
        """Return a session that has connected to the coordinator.

        Raises:
            PeerLostError: the coordinator cannot be reached.
        """
        stream: Stream[Message] = Stream(
            connect(place.coordinator, known=place.job.contexts),
            first_phase("coordinator", "worker"),
            takes_descriptor=place.job.transport == "shm",
        )
        label = "" if place.device is None else place.device.label[:MOST_LABEL]
        stream.send(
            Hello(place.job.token, "worker", place.index, incarnation=place.incarnation, device=label)
        )
        session = cls(place, stream)
        if place.index == 0 and place.job.joined:
            session.is_main_now()  # another worker is the main worker if the run has begun without worker 0
        return session

    # -- interface of a session ---------------------------------------------------------------------------

    @property
    def main_worker(self) -> int:
        return self._core.main_worker

    @_exclusive
    def is_main_now(self) -> bool:
        self._perform(self._core.request_main())
        while self._core.asks_for_main:
            self._leave_if_asked()
            self._hear(timeout_s=STATUS_INTERVAL_S)
        return self._core.main_worker == self.worker

    def fetch_model(self, digest: Callable[[FrozenSpec], str]) -> Mapping[str, torch.Tensor] | None:
        return self._read(partial(self._read_model, digest))

    def _read_model(self, digest: Callable[[FrozenSpec], str], reader: Reader) -> dict[str, torch.Tensor]:
        """Read the weights and buffers of the run, and those of its frozen parameters that this worker lacks."""
        snapshot = reader.read()
        differing = [spec for spec in snapshot.frozen if digest(spec) not in ("", spec.digest)]
        return snapshot.state_dict | reader.read_frozen(differing)

    @_exclusive
    def _read(self, read: Callable[[Reader], Found]) -> Found | None:
        """Read from the servers of a run in progress as a reader; return None if the run is only beginning.

        The servers serve a limited number of readers at a time, and the model may be extended meanwhile. So this is
        repeated if it fails. If the run is over, the connection to the coordinator has ended as well.
        """
        for attempt in range(MOST_READ_ATTEMPTS):
            self._perform(self._core.request_model())
            while (described := self._core.described) is None:
                self._leave_if_asked()
                self._hear(timeout_s=STATUS_INTERVAL_S)
            if described.model is None:
                return None
            addresses = [seen_from(address, self._reached) for address in described.addresses]
            shards = list(zip(described.shards, addresses, strict=True))
            try:
                reader = Reader.connect(described.model, shards, self._job.token, self._job.contexts)
                with contextlib.closing(reader):
                    return read(reader)
            except (PeerLostError, ProtocolError) as error:
                if attempt == MOST_READ_ATTEMPTS - 1:
                    raise
                log.info("the model of the job cannot be read yet: %s", error)
            self._hear_for(READ_AGAIN_S)
        raise AssertionError

    def _hear_for(self, time_s: float) -> None:
        """Handle messages for this time."""
        until_s = self._job.now_s() + time_s
        while self._job.now_s() < until_s:
            self._leave_if_asked()
            self._hear(timeout_s=STATUS_INTERVAL_S)

    @_exclusive
    def begin(self, model: ModelSpec) -> bool:
        self._perform(self._core.register(model))
        while self._core.started is None:
            self._hear(timeout_s=None)
        self._stopwatch = Stopwatch(self._job.now_ticks())  # the worker takes part in the run from now on
        started = self._core.started
        self._connect(model, started.shards)
        return started.initializer == self.worker

    def _connect(self, model: ModelSpec, shards: tuple[ShardSlice, ...]) -> None:
        """Connect to the servers, with memory for the model. Earlier connections stay open."""
        assert self._core.started is not None
        self._servers, self._ringed = [], []
        self._parameters = len(model.layout.parameters)
        self._model = model
        self._shards = shards
        self._in_place = False
        for memory in (self._region, self._master):
            if memory is not None:
                memory.close()
        shared = self._job.transport == "shm"
        # the addresses of the servers, in order
        addresses = [
            seen_from(address, self._reached) for address in dict.fromkeys(self._core.started.addresses)
        ]
        local = [is_here(address) for address in addresses]
        self._slow_link = None if all(local) else SlowLink(rounded=self._job.wire.gradients == "bf16")
        channels = len(addresses) if shared and rings_available() else 0
        self._attached.clear()
        # In a run that machines join, the user has not chosen TCP for connections within a machine.
        offered = self._job.joined and any(local) and shared_memory_available()
        name = f"paceline-{secrets.token_hex(16)}"
        self._region = region = Region.create(
            model.layout, shared=shared or offered, channels=channels, name=name
        )
        place = MemoryPlace(os.getpid(), region.descriptor, name) if offered and region.descriptor else None
        if shared:
            if not self._coordinator.descriptors:
                raise ProtocolError("the coordinator did not pass the shared memory for the weights")
            self._master = Master.follow(model.layout, self._coordinator.descriptors.pop())
        else:
            # Early sending uses the network during the backward pass. If all servers are on this machine, no network
            # is used, and early sending would only take CPU time from the backward pass.
            early = self._job.overlap == "shards" and not all(local)
            rounded = self._rounding(self._job.wire.gradients, region.gradients)
            self._outbox = Outbox(
                shards, region.gradients, self._stage, self._is_busy, early=early, rounded=rounded
            )
            self._rounded = self._rounding(self._job.wire.weights, region.weights)
        self.weights = tensors_over(region.weights)
        self.gradients = tensors_over(region.gradients)
        # With several parameter sets, another worker may push another set in the same round. In the servers' memory,
        # it would then change under a graph that the script still uses.
        follows = self._master is not None and not model.further
        descriptors = [region.descriptor] if shared and region.descriptor is not None else []
        size_bytes = region.size_bytes if descriptors else 0
        for channel, address in enumerate(addresses):
            stream: Stream[Message] = Stream(
                connect(address, known=self._job.contexts),
                first_phase("server", "worker"),
                self._payload_targets,
            )
            self._servers.append(stream)
            self._selector.register(stream, selectors.EVENT_READ)
            hello = Hello(
                self._job.token,
                "worker",
                self.worker,
                memory_bytes=size_bytes,
                channels=channels,
                channel=channel,
                follows=follows,
                extension=self._core.extension,
                incarnation=self._incarnation,
                place=place if local[channel] else None,
            )
            self._send(stream, hello, descriptors=descriptors)
            if channels:
                outgoing, incoming = map(Ring, region.channels[channel])
                stream.use_rings(outgoing, incoming)
                self._ringed.append(stream)

    def _rounding(self, chosen: Format, vectors: Mapping[str, memoryview]) -> dict[int, Rounded] | None:
        """Return, for each shard, its slice of the vectors with memory for rounded values; None without rounding."""
        if chosen == "float32":
            return None
        tensors = tensors_over(vectors)
        return {shard.index: Rounded(sliced(tensors, shard)) for shard in self._shards}

    @_exclusive
    def initialize(self, buffers: Sequence[torch.Tensor], state_of: Callable[[ShardSlice], Vectors]) -> None:
        assert self._model is not None
        self._initial = _Initial(self._shards, self.weights, buffers, state_of, self._model.frozen)
        self._perform(self._core.initialize())
        self.await_first_weights()
        self._initial = None

    @_exclusive
    def extend(
        self,
        model: ModelSpec,
        weights: Vectors,
        buffers: Sequence[torch.Tensor],
        state_of: Callable[[ShardSlice], Vectors],
    ) -> str:
        shards = model.layout.sliced(self._job.shards, self._job.slicing)
        self._initial = _Initial(shards, weights, buffers, state_of, model.frozen)
        self._coordinator.takes_descriptor = self._job.transport == "shm"
        self._perform(self._core.propose(model))
        with self._doing("outside"):
            self._wait_in_call(
                lambda: self._core.combined is not None or self._core.extended is not None, servers=True
            )
        self._initial = None
        if self._core.extended is None:
            assert self._core.combined is not None
            return self._core.combined.refused
        before = self._servers
        with self._doing("exchanging"):
            self._connect(model, self._core.extended.shards)
            self._core.await_extended_weights()
            self._await_answers()
        # only now, because a server that sees no connection of a worker considers the worker as lost
        for stream in before:
            self._selector.unregister(stream)
            self._writing.discard(stream)
            stream.close()
        return ""

    @_exclusive
    def await_first_weights(self) -> None:
        self._await_answers()
        self._stopwatch.enter("computing", self._job.now_ticks())
        self._begun_s = self._job.now_s()
        self._show("computing", self._begun_s)

    @property
    def iteration(self) -> int:
        return self._core.iteration

    @property
    def updates(self) -> int:
        return self._core.updates

    @property
    def samples(self) -> int:
        return self._core.samples

    @property
    def sends_early(self) -> bool:
        return self._outbox is not None and self._outbox.early

    @property
    def rounds_weights(self) -> bool:
        return self._rounded is not None and len(self._attached) < len(self._shards)

    def weights_edited(self) -> bool | None:
        return self._master.edited() if self._in_place and self._master is not None else None

    def gradient_ready(self, parameter: int) -> None:
        if self._outbox is not None:
            self._outbox.ready(parameter)

    def pushes_rows(self, parameter: int) -> bool:
        return False

    @property
    def needs_significance(self) -> bool:
        return self._core.needs_significance

    @property
    def may_restart(self) -> bool:
        return self._core.may_restart

    @property
    def lockstep(self) -> bool:
        return self._core.lockstep

    @property
    def observes(self) -> bool:
        return self._job.guard != "off" and self._job.now_s() - self._observed_s >= OBSERVING_INTERVAL_S

    def require_clippable(self) -> None:
        self._core.require_clippable()

    @_exclusive
    def restart_ordered(self) -> bool:
        self._hear_coordinator()
        return self._core.restart_ordered

    def hold_back(self, *, droppable: bool) -> bool:
        """Sleep until the emulated machine would have finished. Return False if the computation must be aborted."""
        assert self._begun_s is not None
        job = self._job
        droppable = droppable and self.may_restart
        self._computed_s = now_s = job.now_s()
        if job.pace_s or job.slowdown:
            begun_s = self._restarted[1] if self._restarted is not None else self._begun_s
            computed_s = now_s - begun_s
            factor = 1 + job.jitter * self._jitter.uniform(-1, 1)
            pace_s = job.pace_of(self.worker, self._core.data.work)
            slowdown = job.slowdown[self.worker] if job.slowdown else 1.0
            until_s = begun_s + max(computed_s, max(pace_s, computed_s * slowdown) * factor)
            while now_s < until_s:
                if not droppable:
                    time.sleep(until_s - now_s)
                elif self.restart_ordered():
                    return False
                else:
                    self._orders.poll((until_s - now_s) * 1000)
                now_s = job.now_s()
        return not (droppable and self.restart_ordered())

    @_exclusive
    def pull_again(self) -> None:
        dropped_s = self._job.now_s()
        self._stopwatch.drop(self._job.now_ticks())
        if self._outbox is not None:
            self._outbox.begin()
        self._perform(self._core.pull_again())
        self._await_answers()
        self._stopwatch.enter("computing", self._job.now_ticks())
        self._restarted = dropped_s, self._job.now_s()

    @_exclusive
    def refresh(self) -> None:
        if self._outbox is not None:
            self._outbox.begin()
        with self._doing("exchanging"):
            self._perform(self._core.pull_again(restart=False))
            self._await_answers()
        self._begun_s, self._restarted = self._job.now_s(), None

    @_exclusive
    def begin_edit(self) -> bool:
        self._hear_coordinator()
        with self._doing("exchanging"):
            self._perform(self._core.begin_edit())
            self._await_answers()
        return self._core.edits

    @_exclusive
    def push_edit(self, present: bytes, *, buffers: Mapping[int, torch.Tensor]) -> None:
        self._hear_coordinator()
        if self._outbox is not None:
            self._outbox.begin()  # a part of a gradient may have been sent early; it will be sent again
        contents, payloads = self._contents(present, b"", buffers, empty=not self._core.edits, exact=True)
        self._computed_s = pushed_s = self._job.now_s()
        self._stopwatch.push(self._job.now_ticks())
        self._perform(self._core.push_edit(contents), payloads)
        self._await_answers()
        answered_ticks = self._job.now_ticks()
        self._stopwatch.enter("computing", answered_ticks)
        if self._outbox is not None:
            self._outbox.begin()
        self._end_iteration(pushed_s, answered_ticks)

    def cancel_edit(self) -> None:
        self._core.cancel_edit()

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        pushes = Repeating(self._stand_in, self._idle_interval_s, f"paceline worker {self.worker}")
        with self._doing("outside"), pushes:
            yield

    @contextlib.contextmanager
    def _doing(self, activity: Activity) -> Iterator[None]:
        """Return a context in which the worker spends its time on this activity.

        What takes the worker away from its training may take long, so the coordinator is told of it at once.
        """
        with self._lock:
            before = self._stopwatch.enter(activity, self._job.now_ticks())
            if activity == "outside":
                with contextlib.suppress(PeerLostError):  # the next exchange notices it, and knows the reason
                    self._report()
        try:
            yield
        finally:
            with self._lock:
                self._stopwatch.enter(before, self._job.now_ticks())

    @property
    def _idle_interval_s(self) -> float:
        """Time between two pushes while the script is not training."""
        interval_s = statistics.median(self._computing_s) if self._computing_s else STATUS_INTERVAL_S
        return max(interval_s, LEAST_IDLE_S)

    @_exclusive
    def combine(
        self, call: str, op: Literal["mean", "sum"] = "sum", numbers: bytes = b"", weight: float = 1.0
    ) -> Combined:
        self._perform(self._core.contribute(call, op, numbers, weight))
        with self._doing("outside"):
            self._wait_in_call(lambda: self._core.combined is not None)
        assert self._core.combined is not None
        return self._core.combined

    def _wait_in_call(self, ended: Callable[[], bool], *, servers: bool = False) -> None:
        """Wait for a call that all workers make to end. Meanwhile, push without a gradient if others may wait.

        Args:
            ended: function that returns True once the call has ended.
            servers: True if servers take part in the call.
        """
        interval_s = self._idle_interval_s
        due_s = self._job.now_s() + max(interval_s, COMBINING_S)
        while not ended():
            self._leave_if_asked()
            wait_s = min(max(due_s - self._job.now_s(), LEAST_IDLE_S), STATUS_INTERVAL_S)
            if servers:
                self._hear(timeout_s=wait_s)
            else:
                self._hear_coordinator_first(wait_s)
            if not ended() and self._core.may_stand_in and self._job.now_s() >= due_s:
                self._stand_in()
                due_s = self._job.now_s() + interval_s
        if self._begun_s is not None and self._restarted is None:
            self._begun_s = self._job.now_s()

    @property
    def now_s(self) -> float:
        return self._job.now_s()

    @property
    def data(self) -> DataFeed:
        return self._core.data

    @_exclusive
    def exchange(self, ask: Callable[[], Sequence[Request]]) -> None:
        began_s = self._job.now_s()
        with self._doing("exchanging"):
            self._perform(ask())
            while self._core.data.waiting:
                self._leave_if_asked()
                self._hear_coordinator_first(STATUS_INTERVAL_S)
        self._supply_s += self._job.now_s() - began_s

    def epoch_begins(self, epoch: int) -> None:
        self._core.reach_epoch(epoch)

    @_exclusive
    def request_sync(self, sync: str | SyncModel | Sequence[SyncModel], shard: int | None) -> None:
        models = read_schedule(sync).first
        self._job.require_runnable(models)
        self._perform(self._core.request_sync(models, shard))

    @_exclusive
    def commit(
        self,
        present: bytes,
        groups: bytes,
        *,
        empty: bool,
        significance: float | None,
        buffers: Mapping[int, torch.Tensor],
        logged: Settled,
        clip: Clip | None = None,
        clipped: bool = False,
        set_index: int | None = None,
        observed: Observation | None = None,
    ) -> None:
        assert self._region is not None
        assert self._begun_s is not None
        now_s = self._job.now_s()
        if now_s - self._heard_s > HEARING_INTERVAL_S:
            self._heard_s = now_s
            if self._orders.poll(0):  # costs less than an attempt to receive
                self._hear_coordinator()
        self._note_loss(logged)
        pushed_ticks = self._job.now_ticks()
        pushed_s = pushed_ticks / TICKS_PER_S
        self._stopwatch.push(pushed_ticks)
        self._computing_s.append(pushed_s - self._begun_s)
        if self._slow_link is not None:
            self._watch_link(self._slow_link)
        contents, payloads = self._contents(present, groups, buffers, empty=empty, set_index=set_index)
        begun_s = self._restarted[1] if self._restarted is not None else self._begun_s
        # The script computed the first gradient before the session began to measure the time.
        first = self._core.last_commit is None
        busy_s = None if first else max(0.0, pushed_s - begun_s - self._supply_s)
        self._supply_s = 0.0
        requests = self._core.push(
            contents,
            empty=empty,
            significance=significance,
            busy_s=busy_s,
            clip=clip,
            clipped=clipped,
            set_index=set_index,
        )
        self._pulls = set_index
        self._perform(requests, payloads)
        if observed is not None:
            self._observed_s = pushed_s
            due = pushed_s - self._reported_s >= REPORTING_INTERVAL_S or bool(observed.parameter)
            self._reported_s = pushed_s if due else self._reported_s
            self._perform(self._core.observe(observed, report=due))
        due = pushed_s - self._logged_s >= LOGGING_INTERVAL_S
        self._logged_s = pushed_s if due else self._logged_s
        if due or logged.noted:
            self._perform(self._core.log(logged.noted, pushed_s, report=due))
        self._leave_if_asked()
        self._await_answers()
        self._wait_while_paused()
        answered_ticks = self._job.now_ticks()
        self._stopwatch.enter("computing", answered_ticks)
        self._pulls = None
        if self._outbox is not None:
            self._outbox.committed()
        self._end_iteration(pushed_s, answered_ticks, logged.loss, follows=logged.follows)

    @_exclusive
    def observe(self, observed: Observation, noted: Sequence[Noted] = ()) -> None:
        self._perform(self._core.observe(observed))
        self._perform(self._core.log(noted, self._job.now_s(), ended=True))

    def _watch_link(self, watch: SlowLink) -> None:
        """Report a link to the servers that is too slow for the model."""
        sendings = [sending for server in self._servers if (sending := sending_of(server.sock)) is not None]
        if warning := watch.iterated(sendings, self._computing_s[-1]):
            self._warn(warning)
        if watch.over:
            self._slow_link = None

    def _contents(
        self,
        present: bytes,
        groups: bytes,
        buffers: Mapping[int, torch.Tensor],
        *,
        empty: bool,
        set_index: int | None = None,
        exact: bool = False,
    ) -> tuple[list[Content], dict[int, list[memoryview]]]:
        """Return, for each shard, the content and the payload of a push. See `Outbox.rest` for `exact`."""
        contents: list[Content] = []
        payloads: dict[int, list[memoryview]] = {}
        for shard in self._shards:
            changed = buffers if shard.index == 0 else {}
            pieces: tuple[int, ...] = ()
            payload: list[memoryview] = []
            if self._outbox is not None and not empty:
                pieces, payload = self._outbox.rest(shard.index, set_index, exact=exact)
            contents.append(Content(present, groups, pieces, tuple(changed)))
            payloads[shard.index] = payload + pack(list(changed.values())) if changed else payload
        return contents, payloads

    @_exclusive
    def _stand_in(self) -> None:
        """While the script is not training, push without a gradient if other workers may be waiting for a push."""
        self._hear_coordinator()
        if not self._core.is_awaited:
            self._hear(timeout_s=0.0)  # a server may request a frozen parameter
            return
        if self._outbox is not None:
            self._outbox.begin()
        content = Content(bytes(self._parameters), b"")
        payloads: dict[int, list[memoryview]] = {shard.index: [] for shard in self._shards}
        self._computed_s = pushed_s = self._job.now_s()
        with self._doing("exchanging"):
            self._perform(self._core.stand_in([content] * len(self._shards)), payloads)
            self._await_answers()
        self._end_iteration(pushed_s, self._job.now_ticks())

    def _end_iteration(
        self, pushed_s: float, answered_ticks: int, loss: float | None = None, *, follows: bool = False
    ) -> None:
        """Record the iteration that has ended, and begin the next one.

        Args:
            pushed_s: when its push began.
            answered_ticks: when it ended.
            loss: its loss, if that is known.
            follows: True if the loss may become known before the next push. The record is then written after that.
        """
        answered_s = answered_ticks / TICKS_PER_S
        if self._log is not None:
            self._write_unwritten()
            record = self._record(pushed_s, answered_s, loss)
            if follows:
                self._unwritten = record
            else:
                self._write(self._log, record)
        self._begun_s, self._restarted = answered_s, None
        self._show("computing", answered_s)

    def _record(self, pushed_s: float, answered_s: float, loss: float | None) -> IterationRecord:
        """Return the record of the iteration that has ended."""
        assert self._begun_s is not None
        dropped_s, restarted_s = self._restarted or (None, None)
        commit = self._core.last_commit
        assert commit is not None
        return IterationRecord(
            iteration=commit.iteration,
            begun_s=self._begun_s,
            computed_s=self._computed_s,
            pushed_s=pushed_s,
            answered_s=answered_s,
            loss=loss,
            superstep=commit.stop.superstep if commit.stop is not None else None,
            change=commit.change.number if commit.change is not None else None,
            dropped_s=dropped_s,
            restarted_s=restarted_s,
            machine=self._machine,
        )

    def _write_unwritten(self, loss: float | None = None) -> None:
        """Write the record that has waited for its loss, if there is one."""
        record, self._unwritten = self._unwritten, None
        if record is not None and self._log is not None:
            if loss is not None:
                record = msgspec.structs.replace(record, loss=loss)
            self._write(self._log, record)

    def _write(self, log: SegmentedFile, record: IterationRecord) -> None:
        """Write a record."""
        log.write(self._encode(record) + b"\n")
        if record.answered_s >= self._tend_s:
            self._tend_s = record.answered_s + TEND_S
            log.tend()

    def _note_loss(self, logged: Settled) -> None:
        """Keep the last loss that is known."""
        self._write_unwritten(logged.earlier_loss)
        if logged.shown is not None:
            self._loss, self._guessed = logged.shown, logged.guessed

    def _send_rest(self) -> None:
        """Send what the script has logged since the last push, because no other push follows."""
        logged = metrics_of(self).settle_rest()
        self._note_loss(logged)
        self._perform(self._core.log(logged.noted, self._job.now_s(), ended=True))

    @_exclusive
    def fetch_state(self) -> list[tuple[ShardSlice, Vectors]]:
        if self._core.started is None:
            return self._read(Reader.read_optimizer_state) or []
        # Fetch one state at a time, because a server sends each peer only one bulk message at a time.
        for shard in self._shards:
            self._fetching = shard.index
            self._send_to_shard(shard.index, FetchOptimizerState(shard.index))
            while self._fetching >= 0:
                self._hear(timeout_s=None)
        fetched = [
            (shard, safetensors.torch.load(bytes(self._states[shard.index]))) for shard in self._shards
        ]
        self._states = {}
        return fetched

    @_exclusive
    def fetch_buffers(self) -> dict[str, torch.Tensor]:
        assert self._model is not None
        return self._fetch_buffers(self._model.buffers, FetchBuffers(0))

    @_exclusive
    def fetch_initial_buffers(
        self, specs: Sequence[BufferSpec], own: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        if self._core.joined_late and self._core.extended is None:
            return self._fetch_buffers(specs, FetchBuffers(0))
        return self._fetch_buffers(specs, FetchInitialBuffers(0, checksum(own)))

    def _fetch_buffers(self, specs: Sequence[BufferSpec], request: Message) -> dict[str, torch.Tensor]:
        """Request these buffers. Return them, or {} if the answer says that this worker's own are equal."""
        received = self._fetched = [bytearray(packed_bytes(spec)) for spec in specs]
        self._send_to_shard(0, request)
        while self._fetched is not None:
            self._hear(timeout_s=None)
        return {spec.name: unpack(spec, data) for spec, data in zip(specs, received, strict=False)}

    @_exclusive
    def fetch_frozen(self, specs: Sequence[FrozenSpec]) -> dict[str, torch.Tensor]:
        core, model = self._core, self._model
        assert core.started is not None
        assert model is not None
        digests = core.started.digests if core.extended is None else core.extended.digests
        of_run = dict(zip((spec.name for spec in model.frozen), digests, strict=True))
        differing = {spec: of_run[spec.name] for spec in specs if of_run[spec.name] != spec.digest}
        if not differing:
            return {}
        received = {digest: bytearray(packed_bytes(spec)) for spec, digest in differing.items()}
        self._frozen = received
        self._send_to_shard(0, FetchFrozen(0, tuple(received)))
        while self._frozen is not None:
            self._leave_if_asked()
            self._hear(timeout_s=STATUS_INTERVAL_S)
        require_complete({digest: spec.name for spec, digest in differing.items()}, received)
        return {spec.name: unpack(spec, received[digest]) for spec, digest in differing.items()}

    def _send_frozen(self, digests: Sequence[str]) -> None:
        """Send the server of shard 0 the values of frozen parameters, as far as this worker has them."""
        found = {digest: parts for digest in digests if (parts := self.frozen(digest)) is not None}
        payload = [part for parts in found.values() for part in parts]
        self._send_to_shard(0, FrozenTensors(0, tuple(found)), payload, lent=FrozenTensors)

    def _write_frozen(self, specs: Sequence[FrozenSpec]) -> None:
        """Write the frozen parameters to the run directory, if it is the launcher's."""
        if self._job.joined:
            return
        try:
            for spec in specs:
                if (parts := self.frozen(spec.digest)) is not None:
                    write_frozen(Path(self._job.run_dir), spec, parts)
        except OSError as error:
            self._warn(
                f"the frozen parameters cannot be written to {self._job.run_dir}, so the saved weights will lack "
                f"them: {error.strerror or error}"
            )

    @_exclusive
    def keep_states(self, position: LoopPosition, states: Sequence[memoryview]) -> None:
        self._send_to_shard(0, KeepStates(0, position), states, lent=KeepStates)
        stream = self._servers[0]
        while stream.backlog:  # the memory of the states may change when this method has returned
            self._leave_if_asked()
            self._hear(timeout_s=STATUS_INTERVAL_S)

    def fetch_states(self, address: str) -> tuple[LoopPosition, bytes | bytearray] | None:
        try:
            return read_states(seen_from(address, self._reached), self._job.token, self._job.contexts)
        except DeadlineError as error:
            raise PeerLostError(f"the server with the states does not answer: {error}") from error

    @_exclusive
    def finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        # A pull that a leaving worker or a lost server has not finished may have changed weights, which is no edit.
        unfinished = self.asked_to_leave or bool(self._core.waiting_for)
        if not unfinished and (warning := self.on_finish()):
            self._warn(warning)
        if self._in_place and self._master is not None and self._region is not None:
            # Copy the shared weights, because the servers may change them while the script still reads them.
            for dtype, target in self._region.weights.items():
                target[:] = self._master.weights[dtype]
            self._move(in_place=False)
        with contextlib.suppress(PeerLostError, DeadlineError):  # a lost coordinator keeps no metrics
            self._send_rest()
        if self._log is not None:
            self._log.flush()
        spent = self._stopwatch.read(self._job.now_ticks())
        _LeavingHost(self).carry_out(self._core.finish(early=self.asked_to_leave, spent=spent))

    # -- called by the process that runs the script -------------------------------------------------------

    def leave(self) -> None:
        """Leave the run as soon as the current gradient has been pushed. A signal handler may call this method.

        The script then receives the exception `Leaving`, so that its own cleanup is carried out.
        """
        self.asked_to_leave = True

    def _leave_if_asked(self) -> None:
        if self.asked_to_leave and not self._finished:
            raise Leaving(0)

    def fail(self, reason: str, traceback: str, *, consequence: bool = False) -> None:
        """Report that the script raised an exception.

        This ends the run, unless the exception is only a `consequence` of the loss of another process.
        """
        with contextlib.suppress(PeerLostError, DeadlineError):  # a lost coordinator cannot be notified
            with contextlib.suppress(RuntimeError):  # a device that has failed is no longer read
                self._send_rest()
            self._coordinator.send(Failed(reason, traceback, consequence))
            self._coordinator.drain()

    def close_in_fork(self) -> None:
        """Close the selector in a forked process. Streams and regions close themselves. See `close_in_forks`."""
        self._selector.close()

    def close(self) -> None:
        """Close the connections."""
        self._write_unwritten()
        if self._log is not None:
            self._log.close()
        for stream in self._streams():
            stream.close()
        self._selector.close()
        for region in (self._region, self._master):
            if region is not None:
                region.close()

    def _warn(self, text: str) -> None:
        """Report a problem that does not end the run."""
        with contextlib.suppress(PeerLostError):  # the run is already over
            self._send(self._coordinator, Warned(text))

    # -- connections --------------------------------------------------------------------------------------

    def _perform(
        self, requests: Iterable[Request], payloads: Mapping[int, Sequence[memoryview]] | None = None
    ) -> None:
        """Carry out requests of the core. `payloads` maps each shard to the payload of its commit."""
        if payloads is not None:
            self._host.payloads = payloads
        self._host.carry_out(requests)

    def _stream_to(self, to: Peer) -> Stream[Any] | None:
        """Return the connection to the coordinator or to a server; None if there is none to the server yet."""
        if to is COORDINATOR:
            return self._coordinator
        return self._servers[to.index] if self._servers else None

    def _await_answers(self) -> None:
        """Wait until every shard has answered."""
        while self._core.waiting_for:
            self._leave_if_asked()
            if not self._hear(timeout_s=STATUS_INTERVAL_S) and self._begun_s is not None:
                self._show("pulling" if self._core.partly_served else "waiting", self._job.now_s())
        if self._core.in_place != self._in_place:
            self._move(in_place=self._core.in_place)

    def _wait_while_paused(self) -> None:
        """Wait while the run has too few workers."""
        if not self._core.paused:
            return
        log.warning("the run is paused, because it has too few workers; it continues when others have joined")
        with self._doing("paused"):
            while self._core.paused:
                self._leave_if_asked()
                self._hear(timeout_s=STATUS_INTERVAL_S)
                self._show("paused", self._job.now_s())
        log.warning("the run continues")

    def _move(self, *, in_place: bool) -> None:
        """Make `weights` refer to the servers' memory if `in_place` is True, else to the memory of this worker."""
        memory = self._master if in_place else self._region
        assert memory is not None
        self._in_place = in_place
        self.weights = tensors_over(memory.weights)
        self.on_moved()

    def _hear(self, timeout_s: float | None) -> bool:
        """Wait for messages for at most `timeout_s`, and handle them. Return False if this time has passed."""
        if self._ringed:
            streams = spin(self._ringed, SPIN_S if timeout_s != 0 else 0.0)
            for ringed in streams:
                self._hear_server(ringed.receive(from_socket=False))
            if streams or not fall_asleep(self._ringed):
                return True
        ready = self._selector.select(timeout_s)
        wake_up(self._ringed)
        for key, events in ready:
            stream = key.fileobj
            assert isinstance(stream, Stream)
            if events & selectors.EVENT_WRITE:
                stream.flush()
                self._watch(stream)
            if events & selectors.EVENT_READ:
                if stream is self._coordinator:
                    self._hear_coordinator()
                else:
                    self._hear_server(stream.receive())
        return bool(ready)

    def _hear_coordinator_first(self, timeout_s: float) -> None:
        """Wait for messages of the coordinator for at most `timeout_s`; then handle those of the servers, too.

        A server may request a frozen parameter, for a worker without which this worker's wait does not end.
        """
        if not self._coordinator.backlog and self._orders.poll(1000 * timeout_s):
            self._hear_coordinator()
        else:
            self._hear(timeout_s=timeout_s if self._coordinator.backlog else 0.0)

    def _raise_if_taken_out(self, error: PeerLostError) -> None:
        """If this worker was taken out of the run, raise an exception that says why.

        The coordinator says it once. A script may call the session again after that, for example when it leaves an
        `with paceline.evaluating():`, and must not see the closed connections instead of the reason.
        """
        if self._taken_out is None:
            try:
                for message in self._coordinator.receive():
                    if type(message) is TakenOut:  # no other message can be carried out
                        self._core.handle(message)
            except TakenOutError as reason:
                self._taken_out = reason
            except PeerLostError:
                return  # the coordinator has not said why
        if self._taken_out is not None:
            raise TakenOutError(*self._taken_out.args) from error

    def _hear_server(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if type(message) is OptimizerState:
                self._fetching = -1
            elif type(message) is PooledBuffers or type(message) is InitialBuffers:
                if self._fetched is not None and type(message) is InitialBuffers and message.equal:
                    self._fetched.clear()
                self._fetched = None
            elif type(message) is FetchFrozen:
                self._send_frozen(message.digests)
            elif type(message) is FrozenTensors:
                for digest in (self._frozen or {}).keys() - set(message.digests):
                    del self._frozen[digest]  # type: ignore[union-attr]
                self._frozen = None
            elif type(message) is MemoryAttached:
                self._attached.update(message.shards)
                if self._outbox is not None:
                    self._outbox.leave_out(message.shards)
            elif type(message) is not Bell:
                if type(message) is Answer and message.rounded and self._rounded is not None:
                    self._rounded[message.shard].widen(self._pulled(message.shard))
                self._perform(self._core.handle(message))

    def _pulled(self, shard: int) -> list[Range]:
        """Return the ranges of the weights that a shard sends as the answer to the current pull."""
        bounds = of_set(self._shards[shard].bounds, self._pulls)
        return [(vector, 0, stop - start) for vector, (start, stop) in bounds.items()]

    def _hear_coordinator(self) -> None:
        for message in self._coordinator.receive():
            if type(message) is Started or type(message) is ModelExtended:
                self._coordinator.takes_descriptor = False
            self._perform(self._core.handle(message))

    def _send(
        self,
        stream: Stream[Any],
        message: Message,
        payload: Sequence[memoryview] = (),
        descriptors: Sequence[int] = (),
        *,
        lent: Hashable = LENT,
    ) -> None:
        stream.send(message, payload, descriptors, lent=lent)
        self._watch(stream)

    def _send_to_shard(
        self, shard: int, message: Message, payload: Sequence[memoryview] = (), *, lent: Hashable = LENT
    ) -> None:
        self._send(self._servers[self._core.placement.server_of[shard]], message, payload, lent=lent)

    def _send_initial(self, message: InitialWeights) -> None:
        """Send a shard its initial weights, preceded by the initial optimizer state if there is one."""
        assert self._initial is not None
        shards, vectors, buffers, state_of, frozen = self._initial
        shard = shards[message.shard]
        if shard.index == 0:
            self._write_frozen(frozen)
        if state := state_of(shard):
            blob = safetensors.torch.save({key: value.contiguous() for key, value in state.items()})
            self._send_to_shard(shard.index, InitialState(shard.index), [memoryview(blob)])
        weights = [vectors[name][a:b] for name, (a, b) in shard.bounds.items() if name in vectors]
        self._send_to_shard(shard.index, message, pack([*weights, *(buffers if shard.index == 0 else ())]))

    def _stage(self, shard: int, message: Message, payload: Sequence[memoryview]) -> None:
        """Send a piece of a gradient. The gradient may change as soon as this method returns."""
        self._send_to_shard(shard, message, payload, lent=None)

    def _is_busy(self, shard: int) -> bool:
        """Return True if earlier messages to a shard's server have not been sent completely."""
        stream = self._servers[self._core.placement.server_of[shard]]
        stream.flush()
        return stream.backlog

    def _payload_targets(self, message: Message, size_bytes: int) -> list[memoryview]:
        assert self._region is not None
        match message:
            case Answer() if self._core.awaits(message.shard):
                if self._job.transport == "shm" or message.shard in self._attached:
                    return []
                if message.rounded:
                    if self._rounded is None:
                        raise ProtocolError("a server sent rounded weights although weights are not rounded")
                    return self._rounded[message.shard].memory(self._pulled(message.shard))
                weights = cut(self._region.weights, self._shards[message.shard])
                return list(of_set(weights, self._pulls).values())
            case OptimizerState() if message.shard == self._fetching:
                require_plausible_state(self._shards[message.shard], size_bytes)
                self._states[message.shard] = bytearray(size_bytes)
                return [memoryview(self._states[message.shard])]
            case PooledBuffers() | InitialBuffers(equal=False) if self._fetched is not None:
                return [memoryview(buffer) for buffer in self._fetched]
            case FrozenTensors() if self._frozen is not None and self._frozen.keys() >= set(message.digests):
                return [memoryview(self._frozen[digest]) for digest in message.digests]
            case _:
                return []

    def _streams(self) -> list[Stream[Any]]:
        return [*self._servers, self._coordinator]

    def _watch(self, stream: Stream[Any]) -> None:
        """Let the selector also watch the writing to a stream while there is a backlog."""
        backlog = stream.backlog
        if backlog != (stream in self._writing):
            (self._writing.add if backlog else self._writing.discard)(stream)
            self._selector.modify(stream, selectors.EVENT_READ | (selectors.EVENT_WRITE if backlog else 0))

    def _show(self, state: Literal["computing", "waiting", "pulling", "paused"], now_s: float) -> None:
        """Report the worker's state to the coordinator for display, at most once per `STATUS_INTERVAL_S`.

        A change to "computing" is always reported, so that the display does not keep showing "waiting".
        """
        due = now_s - self._status_s >= STATUS_INTERVAL_S
        if (state != self._shown and (due or state == "computing")) or (due and state == "computing"):
            self._status_s, self._shown = now_s, state
            self._report()

    def _report(self) -> None:
        """Send the state that is shown, and what the worker has spent its time on."""
        if not self._shown:
            return
        spent = self._stopwatch.read(self._job.now_ticks())
        core, (epoch, part) = self._core, self.data.place
        status = Status(
            self.iteration,
            self._loss,
            self._shown,
            spent,
            core.updates,
            core.samples,
            epoch,
            part,
            self._guessed,
        )
        self._send(self._coordinator, status)


class _WorkerHost(Host):
    """Carries out the requests of a live worker's core.

    Attributes:
        payloads: shard -> payload of the push that is being committed.
    """

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self.payloads: Mapping[int, Sequence[memoryview]] = {}

    def send(self, to: Peer, message: Message) -> None:
        session = self._session
        if to is COORDINATOR:
            session._send(session._coordinator, message)
        else:
            session.before_exchange()
            session._send(session._servers[to.index], message)

    def _commit(self, to: Peer, commit: Commit) -> None:
        session = self._session
        session.before_exchange()
        session._send(session._servers[to.index], commit, self.payloads[commit.shard])

    def _initialize(self, to: Peer, message: InitialWeights) -> None:
        self._session._send_initial(message)

    senders: ClassVar = {Commit: _commit, InitialWeights: _initialize}

    def proceed(self, request: Proceed) -> None:
        """Do nothing: the session reads the state of the core instead."""

    def abort(self, request: Abort) -> None:
        """Do nothing: the session reads the state of the core instead."""


class _LeavingHost(Host):
    """Sends the last messages of a worker, to those who still receive them."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session

    def send(self, to: Peer, message: Message) -> None:
        if (stream := self._session._stream_to(to)) is not None:
            with contextlib.suppress(PeerLostError, DeadlineError):  # a lost peer need not be notified
                stream.send(message)
                stream.drain()

"""Simulates a job in virtual time by running the protocol cores of the coordinator, the servers and the workers.

The cores are the same as in a live run (see `paceline.core`). This module sends the messages through the simulated
network, without encoding them, and advances virtual time. A `Driver` determines what a worker does between messages:
compute a gradient, or only let time pass.

Events at the same tick have a fixed order, which follows from the order in which they are scheduled (see `kernel`):

- Workers begin in the order of their indices. Of two computations that end at the same tick, the one that began
  earlier ends first. If both began at the same tick, the computation of the worker that received its last answer
  earlier ends first.
- A message without latency arrives at the tick at which it is sent, but after all events that were already scheduled
  for this tick.
- A worker sends its push to the shards in descending order, and then its report to the coordinator. If one event
  releases several answers, a shard sends these answers in the order of the actions of its sync model.
- If updates take time, a server handles a worker's message when the updates of all earlier messages have ended. The
  server handles a timer, a departure or a message of the coordinator immediately, but an update that this event causes
  begins only when the server has completed its earlier work. A message to a worker leaves the server when all updates
  that were begun earlier have ended.
- Timers come last, in the order in which they were set. Messages that are sent while a timer is handled precede the
  next timer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

import msgspec

from ..core.auto import Planner
from ..core.coordinator import Coordinator
from ..core.guard import Guard
from ..core.job_cut import JobCut
from ..core.layout import ModelSpec, WireFormat
from ..core.messages import (
    Activity,
    Answer,
    CheckpointRequested,
    Combined,
    Commit,
    DataGranted,
    LoopEntered,
    MainChosen,
    Message,
    ModelExtended,
    Observation,
    ShardWaits,
    Started,
    StatesDecided,
    Status,
    TrainingStopped,
)
from ..core.metrics import LOSS, Lap, Settled, Stopwatch
from ..core.requests import (
    COORDINATOR,
    AbandonCut,
    Abort,
    Apply,
    CompleteCut,
    EndWithout,
    Fail,
    Host,
    LeaveOut,
    Peer,
    Proceed,
    Rehearse,
    Request,
    SaveCut,
    Send,
    ShardStore,
    TakeCut,
    TakeOut,
    Timer,
    Warn,
    server_peer,
    worker_peer,
)
from ..core.server import Server
from ..core.standstill import held_for_ever, never_answered, standstill
from ..core.worker import Worker
from ..errors import RunFailedError
from ..sync import SyncModel
from ..sync.conditions import log as ln
from ..sync.draws import uniform
from ..sync.events import PushFlags
from ..sync.schedule import Schedule
from ..sync.ticks import Seconds
from ..trace.recording import IterationRecord
from .cluster import Cluster
from .kernel import MOST_AT_ONCE, TIMER, Kernel
from .network import Connection, NetworkInterface
from .result import Recorders
from .times import Constant, Distribution, Pauses, Presence, Sample, prolonged_s, times_of

log = logging.getLogger("paceline.sim")

NOTHING = Settled()

HEADER_BYTES = 64  # size of the header of each message, approximately as in a live run

KINDS = ("push", "pull", "pull again", "control")
"""Kinds of messages. "pull again" carries new weights after an abort; "control" carries no weights or gradients."""

AT_ONCE = {Started, Answer, DataGranted, TrainingStopped, LoopEntered, Combined}
"""Messages that a worker can receive before its first weights have arrived."""

COMPUTING, TO_SERVER, FROM_SERVER, ABSENCES, PAUSES, APPLYING, OUTSIDE, BETWEEN_EPOCHS, UPDATING = range(9)
"""Purposes of random draws. The key of each draw begins with (seed, index, purpose), where index is the index of the
worker, of the kind of pauses, or of the server."""


class VirtualJob:
    """Simulates a run: delivers the messages between the protocol cores, and carries out the cores' requests.

    Args:
        cluster: the machines and the network.
        schedule: the sync models of the run, and when they change.
        shards: number of shards.
        seed: random seed for the run.
        overlap: False if no worker pulls until all workers have pushed to all shards.
        recorders: recorders for the traces of the shards and the coordinator, and for the iterations of each worker.
        slicing: how the parameters are divided into shards; see `ModelSpec.sliced`.
        translated: True to translate the hyper-parameters of each update.
        guard: judges what the workers report about their pushes. See `Coordinator`.
        planner: simulates what the coordinator requests; needed if the schedule is `auto`.
        wire: the format in which gradients and weights travel.
        relaxes: False if `auto` must not choose a model with stale gradients, because the hyper-parameters are not
            translated.
        resumed: the cut with which the run begins; None to begin with the initial weights of a worker.
        cut_at_s: virtual times at which the job is cut.
        marks_outside: True if each push says how long the worker's script was outside of training before this push.
        has_epochs: True if the driver has epochs.

    Attributes:
        kernel: the virtual clock and the pending events.
        coordinator: the protocol core of the coordinator.
        workers: the state of each worker.
        bytes_sent: number of bytes sent, by kind of message.
        shard_bytes: by codec, the size of each shard in bytes.
        cut_off_ticks: virtual time at which the run was stopped early; None if every worker has finished.
        knows_loss: True once a worker's script has logged or returned a loss, or a loss was guessed.
    """

    def __init__(
        self,
        cluster: Cluster,
        schedule: Schedule,
        shards: int,
        seed: int,
        *,
        overlap: bool,
        recorders: Recorders,
        slicing: str = "auto",
        translated: bool = False,
        guard: Guard | None = None,
        planner: Planner = lambda situation: (),
        relaxes: bool = True,
        wire: WireFormat = WireFormat(),
        resumed: JobCut | None = None,
        cut_at_s: Sequence[float] = (),
        marks_outside: bool = True,
        has_epochs: bool = False,
    ) -> None:
        ticks_per_s = recorders.ticks_per_s
        # When all workers begin or go on together, each of them causes events at every shard at the same time. So the
        # limit of events at the same time grows with the workers and the shards.
        self.kernel = Kernel(ticks_per_s, MOST_AT_ONCE + 200 * cluster.workers * (shards + 4))
        self.bytes_sent = dict.fromkeys(KINDS, 0)
        self.cut_off_ticks: int | None = None
        self.knows_loss = False
        self._first = [w for w in range(cluster.workers) if not cluster.joins_late(w)]
        self.coordinator = Coordinator(
            schedule,
            workers=cluster.workers,
            servers=cluster.servers,
            shards=shards,
            slicing=slicing,
            block=wire.block,
            overlap=overlap,
            seed=seed,
            late=set(range(cluster.workers)) - set(self._first),
            recorder=recorders.job,
            relaxes=relaxes,
            ticks_per_s=ticks_per_s,
            guard=guard,
            resumed=resumed,
        )
        recorders.history = self.coordinator.history
        self._cluster = cluster
        self._planner = planner
        self._marks_outside = marks_outside
        self._schedule = schedule
        self._shards = shards
        self._wire = wire
        self.shard_bytes: Mapping[str, Sequence[int]] = {}
        self._seed = seed
        self._cut_at_s = cut_at_s
        self._overlap = overlap
        self._recorders = recorders
        self._servers = [
            Server(
                seed,
                recorder_of=recorders.shards.__getitem__,
                ticks_per_s=ticks_per_s,
                translated=translated,
                wire=wire,
            )
            for _ in range(cluster.servers)
        ]
        self._worker_hosts = [_WorkerHost(self, worker) for worker in range(cluster.workers)]
        self._coordinator_host = _CoordinatorHost(self)
        interfaces = [NetworkInterface(self.kernel, cluster.bandwidth_bps) for _ in range(cluster.servers)]
        self._to_come = 0  # number of joins that are scheduled or in progress
        self._changes = 0  # number of joins and losses of workers that are scheduled
        # Messages between the coordinator and the servers that are being delivered: (server, message, to_server).
        self._exchanged: deque[tuple[int, Message, bool]] = deque()
        pauses = [(pause, Pauses(pause, seed, n, PAUSES)) for n, pause in enumerate(cluster.pauses)]
        uplinks = [
            (uplink, NetworkInterface(self.kernel, uplink.bandwidth_bps)) for uplink in cluster.uplinks
        ]
        work = {APPLYING: times_of(cluster.apply_s), UPDATING: times_of(cluster.update_s)}
        self._server_queues = [
            _ServerQueue({purpose: times.sampler(seed, server, purpose) for purpose, times in work.items()})
            for server in range(cluster.servers)
        ]
        updates_take_time = work[UPDATING] != Constant(seconds=0.0)
        server_host = _UpdatingServerHost if updates_take_time else _ServerHost
        self._server_hosts = [server_host(self, index) for index in range(cluster.servers)]
        # Called with each message that arrives at a server.
        self._at_server = self._served if work[APPLYING] == Constant(seconds=0.0) else self._queued
        if updates_take_time:
            self._at_server = self._in_turn
        self.workers = []
        for worker in range(cluster.workers):
            state = VirtualWorker(worker, ticks_per_s)
            state.sample = cluster.compute(worker).sampler(seed, worker, COMPUTING)
            if worker in cluster.outside:
                outside_s, _ = cluster.outside_s(worker, has_epochs=has_epochs)
                state.outside = outside_s.sampler(seed, worker, OUTSIDE)
            to_server = self._delays(cluster.latency(worker, to_server=True), worker, TO_SERVER)
            from_server = self._delays(cluster.latency(worker, to_server=False), worker, FROM_SERVER)
            state.pauses = [each for pause, each in pauses if worker in pause.workers]
            own = [NetworkInterface(self.kernel, cluster.bandwidth_of(worker))]
            own += [interface for uplink, interface in uplinks if worker in uplink.workers]
            state.to_server = [Connection(self.kernel, own, [server], to_server) for server in interfaces]
            state.from_server = [Connection(self.kernel, [server], own, from_server) for server in interfaces]
            state.to_coordinator = Connection(self.kernel, (), (), to_server)
            state.from_coordinator = Connection(self.kernel, (), (), from_server)
            self.workers.append(state)
            self._new_core(worker)

    def run(
        self,
        driver: Driver,
        models: Callable[[int], ModelSpec],
        stores: Sequence[ShardStore],
        shard_bytes: Mapping[str, Sequence[int]],
        until_s: Seconds,
    ) -> None:
        """Run until every worker has finished, or until the virtual time `until_s`.

        Args:
            driver: determines what the workers do between messages.
            models: function that returns the model of a worker. It is called for each worker that is present from
                the beginning.
            stores: the store of each shard, in order.
            shard_bytes: by codec, the size of each shard in bytes.
            until_s: virtual time at which to stop.

        Raises:
            RunFailedError: a worker waits for a pull that will never be answered, or the workers' models differ.
        """
        self._driver = driver
        for host in self._server_hosts:
            host.stores = stores
        self.shard_bytes = shard_bytes
        for worker in range(len(self.workers)):
            if worker not in self._first:
                self._schedule_join(self.kernel.in_ticks(self._cluster.presence[worker].joins_at_s), worker)
        self._begin(models)
        for at_s in self._cut_at_s:
            self.kernel.in_background(self.kernel.in_ticks(at_s), self._cut)
        for act in (self._plan_absence, driver.joined):
            for worker in self._first:
                act(worker)
        self.kernel.run(until_s, lambda: self._stand_in() or not self._stuck)
        for state in self.workers:
            self._record(state)
        if self._stuck:
            raise RunFailedError("the run", standstill(self._waits(), self.coordinator.collectives.waiting))
        if not self.kernel.idle:  # stopped early
            stopped = self.kernel.stopped
            self.cut_off_ticks = self.kernel.now_ticks if stopped else self.kernel.in_ticks(until_s)
            for worker in self.coordinator.members.live:
                self._report_time(worker, self.cut_off_ticks)
            self._require_answers()

    @property
    def goes_on(self) -> bool:
        """True if any worker is present or will join later."""
        return bool(self.coordinator.members.present) or self._to_come > 0

    @property
    def _stuck(self) -> bool:
        """True if workers are present, but nothing is pending that could release them.

        A worker that joins or is lost may release others. A snapshot or a cut of the job releases nobody.
        """
        return self.kernel.at_rest and bool(self.coordinator.members.present) and not self._changes

    @property
    def versions(self) -> tuple[int, ...]:
        """The current version of each shard."""
        placed = enumerate(self.coordinator.placement.server_of)
        return tuple(self._servers[server].shards[shard].version for shard, server in placed)

    # -- called by drivers --------------------------------------------------------------------------------

    def epoch_sampler(self, worker: int) -> Sample | None:
        """Return a function that draws how long a worker's script is outside of training after an epoch.

        Return None if the cluster has no such times for this worker.
        """
        if worker not in self._cluster.outside:
            return None
        _, epoch_s = self._cluster.outside_s(worker, has_epochs=True)
        return epoch_s.sampler(self._seed, worker, BETWEEN_EPOCHS)

    def compute(self, worker: int, *, droppable: bool = True) -> None:
        """Let the compute time of the current iteration pass, then call `Driver.computed`.

        If the computation is droppable and is aborted before then, call `Driver.aborted` instead.
        """
        state = self.workers[worker]
        state.attempt += 1
        outside_ticks = 0
        if state.outside is not None and state.outside_of != state.core.iteration:
            state.outside_of = state.core.iteration
            outside_ticks = self.kernel.in_ticks(state.outside(state.core.iteration, self.kernel.now_s))
        if not outside_ticks:
            self._begin_computing(worker, droppable)
            return
        self._enter(worker, "outside")
        self.kernel.after(outside_ticks, self._return, worker, state.attempt, droppable)

    def _return(self, worker: int, attempt: int, droppable: bool) -> None:
        """Let a worker compute after its script was outside of training."""
        state = self.workers[worker]
        if attempt == state.attempt:
            self._begin_computing(worker, droppable)
            if state.core.restart_ordered:
                self._abort(worker)

    def _begin_computing(self, worker: int, droppable: bool) -> None:
        state = self.workers[worker]
        state.computing, state.droppable = True, droppable
        self._enter(worker, "computing")
        state.started_ticks = self.kernel.now_ticks
        length_s = state.sample(state.core.iteration, self.kernel.now_s)
        if state.core.data.used:
            factor = self._cluster.factor(worker, state.core.data.work)
            length_s = length_s if factor == 1 else float(length_s) * factor
        if state.pauses:
            length_s = prolonged_s(state.pauses, self.kernel.now_s, float(length_s))
        self.kernel.after(self.kernel.in_ticks(length_s), self._computed, worker, state.attempt)

    def push(
        self,
        worker: int,
        flags: PushFlags = PushFlags(),
        pushes: Sequence[object] = (),
        *,
        shares: Sequence[float] = (),
        logged: Settled = NOTHING,
        observed: Observation | None = None,
    ) -> None:
        """Push to every shard, then pull. `Driver.answered` is called when every shard has answered the pull.

        Args:
            worker: index of the worker.
            flags: what the push contains besides its gradient.
            pushes: one push for the store of each shard; () if there are no tensors or no gradient.
            shares: for each shard, which share of its bytes is pushed; () if all bytes are pushed.
            logged: what the script has logged since the last push.
            observed: what the worker has observed about the push, for the guard of the run.
        """
        state = self.workers[worker]
        self._record(state, logged.earlier_loss)
        state.pushed_s = self.kernel.now_s
        state.loss, state.loss_follows = logged.loss, logged.follows
        state.lap = state.stopwatch.push(self.kernel.now_ticks)
        busy_s = (self.kernel.now_ticks - state.started_ticks) / self.kernel.ticks_per_s
        if self._marks_outside and state.lap.outside:
            flags = msgspec.structs.replace(flags, outside_ticks=state.lap.outside)
        requests = state.core.push(flags, busy_s=busy_s)
        if observed is not None:
            requests += state.core.observe(observed)
        self.log(worker, logged)
        self._from_worker(worker, requests, pushes, shares)

    def log(self, worker: int, logged: Settled, *, ended: bool = False) -> None:
        """Tell the coordinator what a worker's script has logged, without a message.

        Args:
            worker: index of the worker.
            logged: what the worker's script has logged since the worker's last push.
            ended: True if the worker will not push what was logged, because its script has ended or fails.
        """
        state = self.workers[worker]
        if logged.noted and not self.knows_loss:
            self.knows_loss = any(each.name == LOSS for each in logged.noted)
        if ended:
            self._record(state, logged.earlier_loss)
        for request in state.core.log(logged.noted, self.kernel.now_s, ended=ended):
            assert type(request) is Send
            self._tell_coordinator(state.peer, request.message)

    def pull_again(self, worker: int) -> None:
        """Pull again after an aborted computation. `Driver.answered` is called when every shard has answered."""
        state = self.workers[worker]
        state.dropped_s = self.kernel.now_s
        state.stopwatch.drop(self.kernel.now_ticks)
        self._from_worker(worker, state.core.pull_again())

    def refresh(self, worker: int) -> None:
        """Pull without a push. `Driver.answered` is called when every shard has answered."""
        state = self.workers[worker]
        state.refreshing = True
        self._from_worker(worker, state.core.pull_again(restart=False))

    def begin_edit(self, worker: int) -> bool:
        """Begin an edit. Return True if the worker pulls; in this case, `Driver.answered` is called later."""
        state = self.workers[worker]
        requests = state.core.begin_edit()
        state.refreshing = bool(requests)
        self._from_worker(worker, requests)
        return state.refreshing

    def push_edit(self, worker: int, pushes: Sequence[object] = ()) -> None:
        """Push to every shard, then pull. The push contains the worker's edit unless another worker's edit is used.

        `Driver.answered` is called when every shard has answered.
        """
        self._push_besides(worker, self.workers[worker].core.push_edit(), pushes)

    def sit_out(self, worker: int) -> None:
        """Push without a gradient, because the worker has no part in a joint batch; then pull.

        `Driver.answered` is called when every shard has answered.
        """
        self._push_besides(worker, self.workers[worker].core.sit_out())

    def _push_besides(self, worker: int, requests: Sequence[Request], pushes: Sequence[object] = ()) -> None:
        """Send a push that does not end a computation."""
        state = self.workers[worker]
        state.pushed_s = self.kernel.now_s
        state.loss, state.loss_follows = None, False
        self._from_worker(worker, requests, pushes)

    def let_pass(self, worker: int, length_s: Seconds, activity: Activity | None = None) -> None:
        """Let time pass between two computations of a worker, then call `Driver.passed`.

        Args:
            worker: the worker.
            length_s: length of this time, in seconds.
            activity: what the worker does during this time; None if it continues its current activity.
        """
        state = self.workers[worker]
        state.attempt += 1
        if activity is not None:
            self._enter(worker, activity)
        self.kernel.after(self.kernel.in_ticks(length_s), self._passed, worker, state.attempt)

    def _passed(self, worker: int, attempt: int) -> None:
        if attempt == self.workers[worker].attempt:
            self._driver.passed(worker)

    def carry(self, worker: int, requests: Sequence[Request], *, at_once: bool) -> None:
        """Send a worker's requests for data. `Driver.supplied` is called each time an answer arrives.

        If `at_once` is True, because the worker has not joined yet, the requests are answered before this method
        returns, and `Driver.supplied` is not called.
        """
        if at_once:
            self._at_once(worker_peer(worker), requests)
        else:
            self._from_worker(worker, requests)

    def combine(
        self,
        worker: int,
        call: str,
        op: Literal["mean", "sum"],
        numbers: bytes,
        weight: float,
        *,
        at_once: bool,
    ) -> None:
        """Let a worker take part in a barrier or a reduction, at the end of which `Driver.combined` is called.

        If `at_once` is True, because the worker has not joined yet, the messages take no time, and `Driver.combined`
        is not called.
        """
        requests = self.workers[worker].core.contribute(call, op, numbers, weight)
        if not at_once:
            self._enter(worker, "outside")
        self.carry(worker, requests, at_once=at_once)

    def propose(self, worker: int, model: ModelSpec) -> None:
        """Let a worker propose an extended model.

        When all workers have proposed a model, `Driver.extended` and then `Driver.answered` are called. If the
        workers have made different calls, `Driver.combined` is called instead.
        """
        self._enter(worker, "outside")
        self._from_worker(worker, self.workers[worker].core.propose(model))

    def request_checkpoint(self, worker: int) -> None:
        """Cut the job because a script has requested a checkpoint, unless another worker has requested the same cut."""
        for request in self.workers[worker].core.request_checkpoint():
            assert isinstance(request, Send)
            assert isinstance(request.message, CheckpointRequested)
            if self.coordinator.request_checkpoint(worker, request.message.number):
                self._cut()

    def request_sync(self, worker: int, models: Sequence[SyncModel], shard: int | None) -> None:
        """Request a change of the sync model."""
        self._from_worker(worker, self.workers[worker].core.request_sync(models, shard))

    def finish(self, worker: int) -> None:
        """Let a worker leave the run after its last iteration."""
        state = self.workers[worker]
        state.attempt += 1
        spent = state.stopwatch.read(self.kernel.now_ticks)
        self._from_worker(worker, state.core.finish(spent=spent))

    def _enter(self, worker: int, activity: Activity) -> None:
        """Record that a worker begins an activity, which lasts until the worker's next activity begins."""
        self.workers[worker].stopwatch.enter(activity, self.kernel.now_ticks)

    def _report_time(self, worker: int, now_ticks: int) -> None:
        """Tell the coordinator what a worker has spent its time on, without a message."""
        spent = self.workers[worker].stopwatch.read(now_ticks)
        self.coordinator.time_ledger.report(worker, spent, now_ticks)

    # -- joining and leaving ------------------------------------------------------------------------------

    def _begin(self, models: Callable[[int], ModelSpec]) -> None:
        """Begin the run with the initial workers. The messages of this phase take no time and are not counted."""
        for index in range(len(self._servers)):
            self._at_once(server_peer(index), self.coordinator.connected(server_peer(index), 0))
        for worker in self._first:
            self._at_once(COORDINATOR, self.coordinator.connected(worker_peer(worker), 0))
        for worker in self._first:
            self._at_once(worker_peer(worker), self.workers[worker].core.register(models(worker)))
        initializer = worker_peer(self.coordinator.initializer)
        if self.coordinator.awaits_initial_weights:
            self._at_once(initializer, self.workers[initializer.index].core.initialize())
        self._at_once(initializer, [Send(COORDINATOR, Status(0, None, "computing"))])
        for worker in self._first:
            self._connect(worker)

    def _cut(self) -> None:
        """Cut the job. If the job has no model yet, or loses a worker during the cut, the cut is made later."""
        self._coordinator_host.carry_out(self.coordinator.cut())

    def _schedule_join(self, due_ticks: int, worker: int) -> None:
        self._to_come += 1
        self._schedule_change(due_ticks, self._join, worker)

    def _schedule_change(self, due_ticks: int, change: Callable[..., None], *arguments: int) -> None:
        """Schedule that a worker joins or is lost. `change` counts down the number of changes."""
        self._changes += 1
        self.kernel.in_background(due_ticks, change, *arguments)

    def _join(self, worker: int) -> None:
        """Let a worker join late or join again."""
        self._changes -= 1
        state = self.workers[worker]
        self._new_core(worker)
        state.joining = True
        state.stopwatch = Stopwatch(self.kernel.now_ticks)
        state.dropped_s = state.restarted = None
        state.refreshing = state.standing_in = False
        self._plan_absence(worker)
        self._coordinator_host.carry_out(self.coordinator.admit(worker, self.kernel.now_ticks))

    def _start(self, worker: int) -> None:
        """Let the servers send their weights to a worker that joins a run in progress or extends its model."""
        for index, server in enumerate(self._servers):
            core = self.workers[worker].core
            incarnation = self.coordinator.members.incarnation(worker)
            requests = server.connected(worker, self.kernel.now_ticks, core.extension, incarnation)
            self._server_hosts[index].carry_out(requests)

    def _joined(self, worker: int) -> None:
        """Let a worker that joins a run in progress begin its first iteration, because its weights have arrived."""
        self._to_come -= 1
        state = self.workers[worker]
        state.joining, state.begun_s = False, self.kernel.now_s
        self._driver.joined(worker)

    def _new_core(self, worker: int) -> None:
        self.workers[worker].core = Worker(
            self._schedule,
            workers=self._cluster.workers,
            shards=self._shards,
            servers=len(self._servers),
            overlap=self._overlap,
        )

    def _connect(self, worker: int) -> None:
        for index, server in enumerate(self._servers):
            self._at_once(server_peer(index), server.connected(worker, self.kernel.now_ticks))

    def _at_once(self, sender: Peer, requests: Sequence[Request]) -> None:
        """Deliver messages immediately, bypassing the network. Used before a worker's first weights have arrived."""
        _AtOnce(self, sender).carry_out(requests)

    def _plan_absence(self, worker: int) -> None:
        """Schedule the time at which a worker that has just joined is lost, if the cluster specifies one."""
        presence: Presence | None = self._cluster.presence.get(worker)
        if presence is None:
            return
        state = self.workers[worker]
        state.attempt += 1
        if presence.preempted_every_s is not None:
            draw = 1.0 - uniform(self._seed, worker, ABSENCES, state.life)
            after_ticks = self.kernel.in_ticks(-ln(draw) * presence.preempted_every_s)
            self._schedule_change(self.kernel.now_ticks + after_ticks, self._lose, worker, state.life)
        elif presence.lost_at_s is not None and not state.life:
            self._schedule_change(self.kernel.in_ticks(presence.lost_at_s), self._lose, worker, state.life)

    def _lose(self, worker: int, life: int) -> None:
        self._changes -= 1
        state = self.workers[worker]
        if state.life != life or state.core.left:
            return
        self._remove(worker)
        back_after_s = self._cluster.presence[worker].back_after_s
        if back_after_s is not None:
            self._schedule_join(self.kernel.now_ticks + self.kernel.in_ticks(back_after_s), worker)

    def lose_server(self, server: int) -> None:
        """Lose a server.

        Raises:
            RunFailedError: the run cannot continue without the server.
        """
        self._coordinator_host.carry_out(self.coordinator.server_lost(server, "it was lost"))

    def _remove(self, worker: int) -> None:
        """Continue without a worker, which is lost from now on."""
        state, now_ticks = self.workers[worker], self.kernel.now_ticks
        self._record(state)
        self._report_time(worker, now_ticks)
        state.computing = False
        self._to_come -= state.joining
        state.joining = False
        state.attempt += 1
        state.life += 1
        self._driver.lost(worker)
        for index, server in enumerate(self._servers):
            self._server_hosts[index].carry_out(server.disconnected(worker, now_ticks))
        self._coordinator_host.carry_out(self.coordinator.disconnected(worker_peer(worker), now_ticks))

    # -- computations -------------------------------------------------------------------------------------

    def _computed(self, worker: int, attempt: int) -> None:
        state = self.workers[worker]
        if attempt == state.attempt:
            state.computing = False
            self._enter(worker, "exchanging")
            self._driver.computed(worker)

    def _proceed(self, worker: int) -> None:
        """Let a worker continue after all shards have answered its pull."""
        state, now_s = self.workers[worker], self.kernel.now_s
        if state.refreshing:
            state.refreshing, state.begun_s = False, now_s
        elif state.dropped_s is not None:
            state.restarted, state.dropped_s = (state.dropped_s, now_s), None
        else:
            state.finished_s = now_s
            if self._recorders.takers:
                self._record(state)
                state.unrecorded = state.record(now_s)
                if not state.loss_follows:
                    self._record(state)
            state.restarted, state.begun_s = None, now_s
            state.lap = Lap()
            state.stopwatch.begin_iteration("exchanging", self.kernel.now_ticks)
        self._enter(worker, "exchanging")
        if not state.standing_in:
            self._driver.answered(worker)
            return
        state.standing_in = False
        if state.core.combined is not None:
            self._driver.combined(worker)
        elif state.core.extended is not None:
            self._extend(worker)
        else:
            self._enter(worker, "outside")

    def _record(self, state: VirtualWorker, loss: float | None = None) -> None:
        """If a record of a worker has waited for its loss, pass the record on to the recorders."""
        record, state.unrecorded = state.unrecorded, None
        if record is None:
            return
        if loss is not None:
            record = msgspec.structs.replace(record, loss=loss)
        for take in self._recorders.takers:
            take(state.peer.index, record)

    def _abort(self, worker: int) -> None:
        state = self.workers[worker]
        if state.computing and state.droppable:
            state.attempt += 1
            state.computing = False
            self._driver.aborted(worker)

    # -- arriving messages --------------------------------------------------------------------------------

    def _in_turn(self, server: int, worker: int, life: int, message: Message, push: object) -> None:
        """Let a server handle a message after all earlier messages and the updates that these messages cause."""
        # The length of these updates is known only when the earlier messages are handled. So the new message waits.
        waiting = self._server_queues[server].waiting
        waiting.append((worker, life, message, push))
        if len(waiting) == 1:
            self._queued(server, *waiting[0])

    def _queued(self, server: int, worker: int, life: int, message: Message, push: object) -> None:
        """Let a server handle a message after all earlier messages."""
        queue = self._server_queues[server]
        share = self._share(message.shard) if isinstance(message, Commit) and not message.empty else 0.0
        due_ticks = queue.done_ticks(self.kernel, APPLYING, share)
        self.kernel.at(due_ticks, self._served, server, worker, life, message, push)

    def _share(self, shard: int) -> float:
        """Return the part of the parameters that a shard holds."""
        sizes = self.shard_bytes["float32"]
        return sizes[shard] / sum(sizes) if any(sizes) else 1.0 / self._shards

    def _served(self, server: int, worker: int, life: int, message: Message, push: object) -> None:
        state = self.workers[worker]
        if state.life == life:  # else the message was sent before the worker was lost
            host = self._server_hosts[server]
            requests = self._servers[server].handle(state.peer, message, self.kernel.now_ticks)
            if push is not None:
                assert isinstance(message, Commit)
                host.stores[message.shard].put(worker, message.iteration, push)
            host.carry_out(requests)
        if waiting := self._server_queues[server].waiting:
            waiting.popleft()
            if waiting:
                self._queued(server, *waiting[0])

    def _at_coordinator(self, worker: int, life: int, message: Message) -> None:
        if self.workers[worker].life == life:
            self._tell_coordinator(worker_peer(worker), message)

    def _tell_coordinator(self, sender: Peer, message: Message) -> None:
        """Let the coordinator handle a message now."""
        self._coordinator_host.carry_out(self.coordinator.handle(sender, message, self.kernel.now_ticks))

    def _at_worker(self, worker: int, life: int, message: Message) -> None:
        state = self.workers[worker]
        if state.life != life:
            return
        requests = state.core.handle(message)
        if type(message) in (DataGranted, LoopEntered, StatesDecided):
            self._driver.supplied(worker)
        elif type(message) is Combined and not state.standing_in:
            self._enter(worker, "exchanging")
            self._driver.combined(worker)
        elif type(message) is ModelExtended and not state.standing_in:
            self._extend(worker)
        if type(message) is Started:
            self._start(worker)
        self._worker_hosts[worker].carry_out(requests)

    # -- requests from the cores --------------------------------------------------------------------------

    def _from_worker(
        self,
        worker: int,
        requests: Sequence[Request],
        pushes: Sequence[object] = (),
        shares: Sequence[float] = (),
    ) -> None:
        host = self._worker_hosts[worker]
        host.pushes, host.shares = pushes, shares
        host.carry_out(requests)

    def _exchange(self, server: int, message: Message, *, to_server: bool) -> None:
        """Deliver a message between the coordinator and a server without a delay.

        The receiver may send further messages. As on a connection, each message is delivered after all messages that
        were sent before it.
        """
        self._exchanged.append((server, message, to_server))
        if len(self._exchanged) > 1:
            return  # an outer call delivers the message
        while self._exchanged:
            server, message, to_server = self._exchanged[0]
            if to_server:
                requests = self._servers[server].handle(COORDINATOR, message, self.kernel.now_ticks)
                self._server_hosts[server].carry_out(requests)
                if type(message) is ModelExtended and server == 0:
                    self.shard_bytes = self._wire.sizes(self.coordinator.slices)
                    self._driver.model_extended(self._servers[0].initializer)
            else:
                self._tell_coordinator(server_peer(server), message)
            self._exchanged.popleft()

    # -- barriers and reductions --------------------------------------------------------------------------

    def _stand_in(self) -> bool:
        """Push without a gradient for the workers that wait in a barrier or a reduction.

        Called when the simulation is at rest, because other workers may wait for these pushes. Return False if there
        was nothing to push.
        """
        standing_in = False
        for worker in sorted(self.coordinator.collectives.waiting):
            state = self.workers[worker]
            core = state.core
            if not state.standing_in and core.is_awaited and core.may_stand_in:
                state.standing_in = standing_in = True
                self._enter(worker, "exchanging")
                self._push_besides(worker, core.stand_in())
        return standing_in

    # -- extension of the model ---------------------------------------------------------------------------

    def _extend(self, worker: int) -> None:
        """Let a worker take over the extended model: all shards send it their weights."""
        state = self.workers[worker]
        state.refreshing = True
        self._enter(worker, "exchanging")
        state.core.await_extended_weights()
        self._driver.extended(worker)
        self._start(worker)

    # -- latencies and standstills ------------------------------------------------------------------------

    def _delays(self, latency: Distribution, worker: int, purpose: int) -> int | Callable[[], int]:
        """Return the latency in ticks if it is constant, otherwise a function that draws each latency."""
        if isinstance(latency, Constant):
            return self.kernel.in_ticks(latency.seconds)
        sample = latency.sampler(self._seed, worker, purpose)
        drawn = 0

        def draw() -> int:
            nonlocal drawn
            drawn += 1
            return self.kernel.in_ticks(sample(drawn - 1, self.kernel.now_s))

        return draw

    def _require_answers(self) -> None:
        """Raise `RunFailedError` if a run that was stopped early has a pull that would never have been answered.

        The shards cannot be used afterwards.
        """
        waits = self._waits()
        timers: dict[int, list[Timer]] = {shard.shard: [] for shard in waits}
        for timer in self.kernel.pending(TIMER):
            assert isinstance(timer, Timer)
            if timer.shard in timers:
                timers[timer.shard].append(timer)
        held = {
            index: never_answered(shard, timers[index], self.kernel.now_ticks)
            for server in self._servers
            for index, shard in server.shards.items()
        }
        if report := held_for_ever(waits, held):
            raise RunFailedError("the run", report)

    def _waits(self) -> list[ShardWaits]:
        """Return the workers that wait at each shard."""
        return [shard for server in self._servers for shard in server.waits(timers=False).shards]


class _ServerQueue:
    """The queue of a server's work, if it takes time to apply pushes or to update the parameters.

    Args:
        samples: for each purpose, a function that draws how long the work takes for all parameters.

    Attributes:
        waiting: if updates take time, the messages that have arrived and are not handled yet, as (worker, life,
            message, push).
    """

    def __init__(self, samples: Mapping[int, Sample]) -> None:
        self._samples = samples
        self._drawn = dict.fromkeys(samples, 0)
        self._free_ticks = 0
        self.waiting: deque[tuple[int, int, Message, object]] = deque()

    def done_ticks(self, kernel: Kernel, purpose: int, share: float) -> int:
        """Add work to the end of the queue. Return the time at which this work will be done.

        Args:
            kernel: the virtual clock.
            purpose: the kind of work, `APPLYING` or `UPDATING`.
            share: part of the parameters to which the work is done; 0.0 if the work takes no time.
        """
        begun_ticks = max(kernel.now_ticks, self._free_ticks)
        if share:
            number = self._drawn[purpose]
            length_s = float(self._samples[purpose](number, begun_ticks / kernel.ticks_per_s)) * share
            self._drawn[purpose] = number + 1
            begun_ticks += kernel.in_ticks(length_s)
        self._free_ticks = begun_ticks
        return begun_ticks


class _WorkerHost(Host):
    """Carries out the requests of a simulated worker.

    Attributes:
        pushes: for the store of each shard, the push that is being sent; () if there are no tensors.
        shares: for each shard, which share of its bytes is being pushed; () if all bytes are pushed.
    """

    def __init__(self, job: VirtualJob, worker: int) -> None:
        self._job = job
        self._worker = worker
        self.pushes: Sequence[object] = ()
        self.shares: Sequence[float] = ()

    def send(self, to: Peer, message: Message) -> None:
        job, worker = self._job, self._worker
        state = job.workers[worker]
        job.bytes_sent["control"] += HEADER_BYTES
        if to is COORDINATOR:
            state.to_coordinator.send(0, job._at_coordinator, worker, state.life, message)
        else:
            state.to_server[to.index].send(0, job._at_server, to.index, worker, state.life, message, None)

    def _push(self, to: Peer, commit: Commit) -> None:
        job, worker = self._job, self._worker
        state = job.workers[worker]
        size_bytes = 0 if commit.empty else job.shard_bytes[commit.codec(job._wire)][commit.shard]
        if self.shares:
            size_bytes = round(size_bytes * self.shares[commit.shard])
        job.bytes_sent["push"] += HEADER_BYTES + size_bytes
        push = self.pushes[commit.shard] if self.pushes else None
        state.to_server[to.index].send(size_bytes, job._at_server, to.index, worker, state.life, commit, push)

    senders: ClassVar = {Commit: _push}

    def proceed(self, request: Proceed) -> None:
        if self._job.workers[self._worker].joining:
            self._job._joined(self._worker)
        else:
            self._job._proceed(self._worker)

    def abort(self, request: Abort) -> None:
        self._job._abort(self._worker)


class _ServerHost(Host):
    """Carries out the requests of a simulated server."""

    def __init__(self, job: VirtualJob, server: int) -> None:
        self._job = job
        self._server = server
        self._updated_ticks = -1  # end of the latest update, if updates take time

    def send(self, to: Peer, message: Message) -> None:
        if to is COORDINATOR:
            self._job._exchange(self._server, message, to_server=False)
        else:
            self._to_worker(to.index, "control", 0, message)

    def _answer(self, to: Peer, answer: Answer) -> None:
        job, worker = self._job, to.index
        state = job.workers[worker]
        kind = "pull" if state.dropped_s is None else "pull again"
        share = job._driver.sent(worker, answer)
        self._to_worker(worker, kind, round(job.shard_bytes[answer.codec][answer.shard] * share), answer)

    senders: ClassVar = {Answer: _answer}

    def _to_worker(self, worker: int, kind: str, size_bytes: int, message: Message) -> None:
        job = self._job
        state = job.workers[worker]
        job.bytes_sent[kind] += HEADER_BYTES + size_bytes
        send, life = state.from_server[self._server].send, state.life
        if self._updated_ticks < job.kernel.now_ticks:
            send(size_bytes, job._at_worker, worker, life, message)
        else:  # even if the update ends now: earlier messages that wait for this end may not have left yet
            job.kernel.at(self._updated_ticks, send, size_bytes, job._at_worker, worker, life, message)

    def take_cut(self, request: TakeCut) -> None:
        self._job._driver.take_cut(request.shard, request.number)

    def leave_out(self, request: LeaveOut) -> None:
        self._job._driver.leave_out(request.worker)

    def set_timer(self, timer: Timer) -> None:
        self._job.kernel.at(timer.due_ticks, self._fire, timer, priority=TIMER)

    def _fire(self, timer: Timer) -> None:
        self.carry_out(self._job._servers[self._server].fire(timer, self._job.kernel.now_ticks))


class _UpdatingServerHost(_ServerHost):
    """Carries out the requests of a simulated server whose updates take time."""

    def apply(self, update: Apply) -> None:
        super().apply(update)
        job = self._job
        queue = job._server_queues[self._server]
        self._updated_ticks = queue.done_ticks(job.kernel, UPDATING, job._share(update.shard))


class _CoordinatorHost(Host):
    """Carries out the requests of the simulated coordinator."""

    def __init__(self, job: VirtualJob) -> None:
        self._job = job

    def send(self, to: Peer, message: Message) -> None:
        job = self._job
        if to.role == "worker":
            job.bytes_sent["control"] += HEADER_BYTES
            state = job.workers[to.index]
            state.from_coordinator.send(0, job._at_worker, to.index, state.life, message)
        else:
            job._exchange(to.index, message, to_server=True)

    def _ignore(self, to: Peer, message: MainChosen) -> None:
        """Send nothing: the message concerns only scripts, whose sessions ask the coordinator directly."""

    senders: ClassVar = {MainChosen: _ignore}

    def set_timer(self, timer: Timer) -> None:
        self._job.kernel.at(timer.due_ticks, self._fire, timer, priority=TIMER)

    def _fire(self, timer: Timer) -> None:
        self.carry_out(self._job.coordinator.fire(timer, self._job.kernel.now_ticks))

    def rehearse(self, request: Rehearse) -> None:
        # In a live run, the planner works while training goes on. Here, it takes no virtual time.
        found = self._job._planner(request.situation)
        self.carry_out(self._job.coordinator.rehearsed(found, self._job.kernel.now_ticks))

    def save_cut(self, request: SaveCut) -> None:
        self._job._driver.save_cut(request.cut)

    def complete_cut(self, request: CompleteCut) -> None:
        self._job._driver.complete_cut(request)

    def abandon_cut(self, request: AbandonCut) -> None:
        """Do nothing: the job is cut again, and the next cut takes the place of this one."""

    def warn(self, warning: Warn) -> None:
        log.error("%s", warning.words)

    def take_out(self, request: TakeOut) -> None:
        self._job.coordinator.note_ending(request.worker, request.reason)
        self._job._remove(request.worker)

    def end_run(self, failure: Fail) -> None:
        raise RunFailedError(failure.where, failure.reason)

    def end_without(self, loss: EndWithout) -> None:
        raise RunFailedError(f"server {loss.server}", loss.reason)


class _AtOnce(_CoordinatorHost):
    """Delivers messages immediately, bypassing the network. Carries out other requests as `_CoordinatorHost` does."""

    def __init__(self, job: VirtualJob, sender: Peer) -> None:
        super().__init__(job)
        self._sender = sender

    def send(self, to: Peer, message: Message) -> None:
        job, now_ticks = self._job, self._job.kernel.now_ticks
        if to is COORDINATOR:
            requests = job.coordinator.handle(self._sender, message, now_ticks)
        elif to.role == "server":
            requests = job._servers[to.index].handle(self._sender, message, now_ticks)
        elif type(message) in AT_ONCE:
            if type(message) is Answer:
                job._driver.sent(to.index, message)
            requests = job.workers[to.index].core.handle(message)
        else:
            super().send(to, message)
            return
        _AtOnce(job, to).carry_out(requests)

    def take_cut(self, request: TakeCut) -> None:
        """Copy a shard: a script has requested a checkpoint before its first step."""
        self._job._driver.take_cut(request.shard, request.number)

    def proceed(self, request: Proceed) -> None:
        """Do nothing: the caller notifies the driver."""


# -- The state that a simulated job keeps for each worker, in addition to the worker's protocol core ---------


class VirtualWorker:
    """The state of one worker in a simulated job, and the times of its current iteration. All times are virtual.

    Attributes:
        core: the worker's protocol core, which is replaced each time the worker joins again.
        sample: function that draws the compute time of an iteration.
        outside: function that draws how long the script does something other than training before an iteration.
        outside_of: the last iteration for which `outside` was called.
        lap: what the worker did in the last iteration until its push.
        pauses: the pauses that strike the worker.
        to_server: connection to each server.
        from_server: connection from each server.
        to_coordinator: connection to the coordinator.
        from_coordinator: connection from the coordinator.
        peer: address of the worker in the protocol.
        life: number of times that the worker was lost. Messages and events with a lower number are ignored.
        attempt: number of the current computation. Events of earlier computations are ignored.
        computing: True while the worker computes.
        droppable: True if the current computation may be aborted.
        started_ticks: time at which the current computation began, in ticks.
        begun_s: time at which the weights for the current iteration arrived.
        pushed_s: time at which the last push was sent.
        loss: loss that was reported with the last push.
        loss_follows: True if the script logs the loss of the last push only after this push.
        unrecorded: the record of the last iteration, if this record still waits for its loss.
        dropped_s: time at which the current computation was aborted; None once the weights for its restart arrive.
        refreshing: True while the worker pulls without having pushed, because its script evaluates the model.
        standing_in: True if the worker has pushed while its script waits in a barrier or a reduction, and the new
            weights have not arrived yet.
        joining: True if the worker joins a run in progress, and its first weights have not arrived yet.
        restarted: pair (time of the abort, time of the restart) for the current iteration; None without a restart.
        finished_s: time at which the most recent iteration ended.
        ticks_per_s: number of ticks per second.
        stopwatch: measures what the worker has spent its time on since it joined.
    """

    def __init__(self, index: int, ticks_per_s: int) -> None:
        self.core: Worker
        self.ticks_per_s = ticks_per_s
        self.peer = worker_peer(index)
        self.sample: Sample
        self.outside: Sample | None = None
        self.outside_of = -1
        self.lap = Lap()
        self.pauses: list[Pauses] = []
        self.to_server: list[Connection]
        self.from_server: list[Connection]
        self.to_coordinator: Connection
        self.from_coordinator: Connection
        self.life = 0
        self.attempt = 0
        self.computing = False
        self.droppable = True
        self.started_ticks = 0
        self.begun_s = 0.0
        self.pushed_s = 0.0
        self.loss: float | None = None
        self.loss_follows = False
        self.unrecorded: IterationRecord | None = None
        self.dropped_s: float | None = None
        self.refreshing = False
        self.standing_in = False
        self.joining = False
        self.restarted: tuple[float, float] | None = None
        self.finished_s = 0.0
        self.stopwatch = Stopwatch(now_ticks=0)

    def record(self, now_s: float) -> IterationRecord:
        """Return the record of the iteration that ends now."""
        commit = self.core.last_commit
        assert commit is not None
        dropped_s, restarted_s = self.restarted or (None, None)
        return IterationRecord(
            commit.iteration,
            self.begun_s,
            self.pushed_s,
            self.pushed_s,
            now_s,
            self.loss,
            commit.stop.superstep if commit.stop is not None else None,
            commit.change.number if commit.change is not None else None,
            dropped_s,
            restarted_s,
            outside_s=self._noted(self.lap.outside),
            loading_s=self._noted(self.lap.loading),
            begins_pass=(self.core.data.begins_pass and not commit.empty) or msgspec.UNSET,
        )

    def _noted(self, ticks: int) -> float | msgspec.UnsetType:
        """Return a time in seconds; unset if it is zero."""
        return ticks / self.ticks_per_s if ticks else msgspec.UNSET


# -- What the workers of a simulated job do between messages -------------------------------------------------


class Driver:
    """Determines what the workers do between messages. `VirtualJob` calls the methods of its driver."""

    def joined(self, worker: int) -> None:
        """Called when the worker has joined and its weights have arrived."""

    def computed(self, worker: int) -> None:
        """Called when the compute time of the worker's iteration has passed."""

    def aborted(self, worker: int) -> None:
        """Called when the worker's computation must be aborted. The driver must then call `VirtualJob.pull_again`."""

    def answered(self, worker: int) -> None:
        """Called when every shard's answer to the worker's most recent pull has arrived."""

    def passed(self, worker: int) -> None:
        """Called when the time that was given to `VirtualJob.let_pass` has passed."""

    def supplied(self, worker: int) -> None:
        """Called when the coordinator's answer to one of the worker's requests for data has arrived."""

    def combined(self, worker: int) -> None:
        """Called when the barrier or the reduction in which the worker's script waits has ended."""

    def model_extended(self, initializer: int) -> None:
        """Called when the shards must be extended with initial weights from the worker `initializer`."""

    def extended(self, worker: int) -> None:
        """Called when the worker needs memory for the extended model. `answered` follows when the weights arrive."""

    def sent(self, worker: int, answer: Answer) -> float:
        """Called when a shard sends its current weights to the worker. Return which share of its bytes is sent."""
        return 1.0

    def take_cut(self, shard: int, number: int) -> None:
        """Called when a shard must be copied as it is now, for a cut of the job."""

    def save_cut(self, cut: JobCut) -> None:
        """Called when all shards have been copied for a cut."""

    def complete_cut(self, request: CompleteCut) -> None:
        """Called when the workers have given the states of their scripts for the cut that was saved last."""

    def leave_out(self, worker: int) -> None:
        """Called when the buffers of a worker that has left before it finished no longer count."""

    def lost(self, worker: int) -> None:
        """Called when the worker is lost. The worker's later actions have no effect."""

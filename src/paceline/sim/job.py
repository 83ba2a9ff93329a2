"""A job in virtual time: workers, shards and the coordinator, hosted by a heap of events.

The shards, the coordinator's part and each worker's part are those of a live run (`ShardSync` or a whole `Shard`,
`JobSync`, `WorkerSync`). What is here is what carries their messages and lets their time pass. What a worker does
between its messages is left to a `Driver`: it may only let time pass, or compute a gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from ..core.changes import JobSync
from ..core.shard import BareShard, ForHost
from ..core.worker import Flags, Request, WorkerSync
from ..errors import InternalError, RunFailedError
from ..sync.actions import AnswerPull, PublishChange, PublishPlan, ReportFault, RestartWorker, SetTimer
from ..sync.arithmetic import log as ln
from ..sync.draws import uniform
from ..sync.events import (
    AnyEvent,
    IterationFinished,
    IterationStarted,
    PullRepeated,
    PullRequested,
    PushReceived,
    Stop,
    SyncRequested,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from ..sync.notation import notation, parse_shards
from ..sync.schedule import Schedule
from ..trace.recording import Entry
from .cluster import Cluster
from .kernel import SECOND_NS, STILL, TIMER, Kernel, nanoseconds
from .machines import Presence
from .network import Connection, NetworkInterface
from .recording import Recorders
from .times import Constant, Distribution
from .worker_state import WorkerState

__all__ = ["Driver", "Job"]

log = logging.getLogger("paceline.sim")

HEADER_BYTES = 64  # of any message: about what the live ones have

KINDS = ("push", "pull", "pull again", "control")
"""Of messages: the third are answers after a restart, the last all small ones."""

COMPUTING, TO_SERVER, FROM_SERVER, ABSENCES = range(4)
"""What a worker's draws are for: the last part of their key but one."""


class Driver(Protocol):
    """What a worker does between its messages."""

    def joined(self, worker: int) -> None:
        """It takes part, and its weights are there."""

    def computed(self, worker: int) -> None:
        """The time of its computation is over."""

    def aborted(self, worker: int) -> None:
        """Its computation is to be dropped. What follows is `Job.pull_again`."""

    def answered(self, worker: int) -> None:
        """Every shard has answered what it asked for last."""

    def sent(self, worker: int, shard: int) -> None:
        """A shard sends it its weights, as they are now."""

    def lost(self, worker: int) -> None:
        """It is gone; nothing more that it does counts."""


class Job:
    """A run in virtual time.

    Args:
        cluster: the machines.
        schedule: the sync model and its changes.
        shards: the shards, in order; shard k is at server k modulo their number.
        shard_bytes: the size of each.
        seed: of the run.
        overlap: False if nobody pulls until everybody has pushed everything.
        recorders: where the coordinator's trace and the record of every iteration go.

    Attributes:
        kernel: the clock.
        workers: what is known of each.
        bytes_sent: by kind.
        cut_off_s: when the time was up; None if everybody has come to the end.
        faults: what went wrong without ending the run, in words, in order.
    """

    def __init__(
        self,
        cluster: Cluster,
        schedule: Schedule,
        shards: Sequence[BareShard],
        shard_bytes: Sequence[int],
        seed: int,
        *,
        overlap: bool,
        recorders: Recorders,
    ) -> None:
        self.kernel = Kernel(STILL + 200 * cluster.workers * (len(shards) + 4))
        self.shards = shards
        self.bytes_sent = dict.fromkeys(KINDS, 0)
        self.cut_off_s: float | None = None
        self.faults: list[str] = []
        self._cluster = cluster
        self._schedule = schedule
        self._shard_bytes = shard_bytes
        self._seed = seed
        self._overlap = overlap
        self._recorders = recorders
        self._sync = JobSync(notation(schedule.first), seed)
        servers = [NetworkInterface(self.kernel, cluster.bandwidth_bps) for _ in range(cluster.servers)]
        self._performs = [self._performer(shard) for shard in range(len(shards))]
        self._all_committed: set[int] = set()  # without overlap: workers that wait for the others' pushes
        self._present: set[int] = set()
        self._to_come = 0  # workers that will join
        self.workers = []
        for worker in range(cluster.workers):
            its = WorkerState()
            its.sample = cluster.compute(worker).sampler(seed, worker, COMPUTING)
            to_server = self._delays(cluster.latency(worker, to_server=True), worker, TO_SERVER)
            from_server = self._delays(cluster.latency(worker, to_server=False), worker, FROM_SERVER)
            card = NetworkInterface(self.kernel, cluster.bandwidth_of(worker))
            its.to_server = [Connection(self.kernel, card, server, to_server) for server in servers]
            its.from_server = [Connection(self.kernel, server, card, from_server) for server in servers]
            its.to_coordinator = Connection(self.kernel, None, None, to_server)
            its.from_coordinator = Connection(self.kernel, None, None, from_server)
            self.workers.append(its)

    def run(self, driver: Driver, until_s: float) -> None:
        """Run to the end, or until the time is up.

        Raises:
            RunFailedError: everybody waits, and nothing will release anybody.
        """
        self._driver = driver
        first = []
        for worker in range(len(self.workers)):
            presence = self._cluster.presence.get(worker)
            if presence is None or not presence.joins_at_s:
                first.append(worker)
            else:
                self._expect(nanoseconds(presence.joins_at_s), worker)
        for worker in first:
            self._welcome(worker)
        for worker in first:
            driver.joined(worker)
        self.kernel.run(until_s)
        if self._present and self.kernel.idle:
            raise RunFailedError("the run", self._standstill())
        if not self.kernel.idle:  # cut off: what is under way counts until then
            end_ns = self.kernel.now_ns if self.kernel.stopped else nanoseconds(until_s)
            self.cut_off_s = end_ns / SECOND_NS
            for its in self.workers:
                if its.computing:
                    its.computed_ns += end_ns - its.started_ns

    @property
    def goes_on(self) -> bool:
        """Is a worker there, or to come."""
        return bool(self._present) or self._to_come > 0

    # -- what a driver has a worker do --------------------------------------------------------------------

    def compute(self, worker: int, *, droppable: bool = True) -> None:
        """Let the time of the iteration at hand pass; then `Driver.computed`, or, if it is droppable,
        `Driver.aborted`."""
        its = self.workers[worker]
        its.attempt += 1
        its.computing, its.droppable = True, droppable
        its.started_ns = self.kernel.now_ns
        length_s = its.sample(its.sync.iteration, self.kernel.now_s)
        self.kernel.after(nanoseconds(length_s), self._computed, worker, its.attempt)

    def push(
        self,
        worker: int,
        pushes: Sequence[object | None],
        *,
        empty: bool = False,
        significance: float | None = None,
        loss: float | None = None,
    ) -> None:
        """Send every shard its part, and pull; then `Driver.answered`.

        Args:
            worker: who.
            pushes: for each shard, what it is sent; None where there are no tensors.
            empty: the gradient is left out.
            significance: of the gradient, if the model asks for it.
            loss: for the record.
        """
        its = self.workers[worker]
        for request in its.sync.due():
            self.request(worker, request)
        its.flags = flags = its.sync.push()
        its.pushed_s = self.kernel.now_s
        its.loss = loss
        its.awaited = len(self.shards)
        its.committed = len(self.shards)
        iteration = its.sync.iteration
        for shard in reversed(range(len(self.shards))):
            push = pushes[shard]
            self._to_shard(
                worker,
                shard,
                "push",
                self._take_commit,
                its.life,
                iteration,
                flags,
                push,
                empty,
                significance,
            )
        if flags.notify:
            self._to_coordinator(worker, self._take_notify, its.life, iteration, flags)

    def pull_again(self, worker: int) -> None:
        """Pull, after a computation was dropped; then `Driver.answered`."""
        its = self.workers[worker]
        its.sync.restarted()
        its.dropped_s = self.kernel.now_s
        its.awaited = len(self.shards)
        for shard in range(len(self.shards)):
            self._to_shard(worker, shard, "control", self._take_pull_again, its.life, its.sync.iteration)

    def request(self, worker: int, request: Request) -> None:
        """Ask for a change of the sync model."""
        its = self.workers[worker]
        self._to_coordinator(worker, self._take_request, its.life, request)

    def finish(self, worker: int) -> None:
        """Have a worker leave."""
        its = self.workers[worker]
        its.present = False
        its.attempt += 1
        for shard in range(len(self.shards)):
            self._to_shard(worker, shard, "control", self._leave_shard, WorkerFinished)
        self._to_coordinator(worker, self._leave_coordinator, WorkerFinished)

    # -- joining and leaving ------------------------------------------------------------------------------

    def _expect(self, due_ns: int, worker: int) -> None:
        self._to_come += 1
        self.kernel.at(due_ns, self._join, worker)

    def _join(self, worker: int) -> None:
        self._to_come -= 1
        self._welcome(worker)
        self._driver.joined(worker)

    def _welcome(self, worker: int) -> None:
        """Tell everybody of a worker that joins, at once: its first weights come with it."""
        its = self.workers[worker]
        now_s = self.kernel.now_s
        iteration = its.sync.iteration + 1 if its.life else 0  # a label is never used twice
        slowest = [shard.sync.ledger.slowest for shard in self.shards if shard.sync.ledger.live_count]
        joined = WorkerJoined(
            now_s=now_s,
            worker=worker,
            iteration=iteration,
            count=max(slowest) if len(self.shards) > 1 and slowest and max(slowest) else None,
            superstep=self._sync.next_superstep,
            change=self._sync.changes,
        )
        its.sync = WorkerSync(self._schedule, len(self.shards))
        in_force = self._sync.sync  # "" if nobody knows: then a change will tell
        its.sync.join(iteration, parse_shards(in_force) if in_force else self._schedule.first)
        its.present, its.begun_s = True, now_s
        its.dropped_s = its.restarted = None
        self._present.add(worker)
        for shard in range(len(self.shards)):
            self._at_shard(shard, joined)
        self._at_coordinator(joined)
        if (presence := self._cluster.presence.get(worker)) is not None:
            its.attempt += 1
            self._plan_absence(worker, presence)

    def _plan_absence(self, worker: int, presence: Presence) -> None:
        """Decide when a worker that has just joined is lost."""
        its = self.workers[worker]
        if presence.preempted_every_s is not None:
            draw = 1.0 - uniform(self._seed, worker, ABSENCES, its.life)
            after_ns = nanoseconds(-ln(draw) * presence.preempted_every_s)
            self.kernel.after(after_ns, self._lose, worker, its.life)
        elif presence.lost_at_s is not None and not its.life:
            self.kernel.at(nanoseconds(presence.lost_at_s), self._lose, worker, its.life)

    def _lose(self, worker: int, life: int) -> None:
        its = self.workers[worker]
        if not its.present or its.life != life:
            return
        if its.computing:
            its.wasted_s += self.kernel.now_s - its.started_ns / SECOND_NS
        its.present, its.computing = False, False
        its.attempt += 1
        its.life += 1
        self._driver.lost(worker)
        for shard in range(len(self.shards)):
            self._leave_shard(shard, worker, WorkerLost)
        self._leave_coordinator(worker, WorkerLost)
        back_after_s = self._cluster.presence[worker].back_after_s
        if back_after_s is not None:
            self._expect(self.kernel.now_ns + nanoseconds(back_after_s), worker)

    def _leave_shard(self, shard: int, worker: int, kind: type[WorkerFinished] | type[WorkerLost]) -> None:
        self._at_shard(shard, kind(now_s=self.kernel.now_s, worker=worker))

    def _leave_coordinator(self, worker: int, kind: type[WorkerFinished] | type[WorkerLost]) -> None:
        self._present.discard(worker)
        self._at_coordinator(kind(now_s=self.kernel.now_s, worker=worker))
        self._let_pull()

    # -- workers ------------------------------------------------------------------------------------------

    def _lives(self, worker: int, life: int) -> bool:
        """Is who sent this still there."""
        return worker in self._present and self.workers[worker].life == life

    def _computed(self, worker: int, attempt: int) -> None:
        its = self.workers[worker]
        if attempt == its.attempt:
            its.computing = False
            its.computed_ns += self.kernel.now_ns - its.started_ns
            self._driver.computed(worker)

    def _answered(self, worker: int, attempt: int, v_train: int | None) -> None:
        its = self.workers[worker]
        if attempt != its.attempt:
            return  # of a former life
        its.sync.hear_answer(v_train)
        its.awaited -= 1
        if its.awaited:
            return
        now_s = self.kernel.now_s
        if its.dropped_s is not None:  # the weights to start anew with
            its.restarted, its.dropped_s = (its.dropped_s, now_s), None
        else:
            its.finished_s = now_s
            self._end_iteration(worker, its, now_s)
        self._driver.answered(worker)

    def _end_iteration(self, worker: int, its: WorkerState, now_s: float) -> None:
        if its.restarted is not None:
            its.wasted_s += its.restarted[1] - its.begun_s
        if self._recorders.takers:
            record = its.record(now_s)
            for take in self._recorders.takers:
                take(worker, record)
        its.restarted, its.begun_s = None, now_s
        if its.sync.answered():
            self._to_coordinator(worker, self._take_start, its.life, its.sync.iteration)

    def _restart(self, worker: int, iteration: int) -> None:
        its = self.workers[worker]
        its.sync.order_restart(iteration)
        if its.present and its.computing and its.droppable and its.sync.restart_ordered:
            its.attempt += 1
            its.computing = False
            self._driver.aborted(worker)

    # -- messages -----------------------------------------------------------------------------------------

    def _delays(self, latency: Distribution, worker: int, what: int) -> int | Callable[[], int]:
        """The latency of every message, in nanoseconds, or what draws that of the next one."""
        if isinstance(latency, Constant):
            return nanoseconds(latency.seconds)
        sample = latency.sampler(self._seed, worker, what)
        which = 0

        def draw() -> int:
            nonlocal which
            which += 1
            return nanoseconds(sample(which - 1, self.kernel.now_ns / SECOND_NS))

        return draw

    def _to_shard(
        self, worker: int, shard: int, kind: str, arrive: Callable[..., None], *rest: object
    ) -> None:
        size_bytes = self._shard_bytes[shard] if kind == "push" else 0
        self.bytes_sent[kind] += HEADER_BYTES + size_bytes
        connections = self.workers[worker].to_server
        connections[shard % len(connections)].send(size_bytes, arrive, shard, worker, *rest)

    def _to_worker(
        self, shard: int, worker: int, kind: str, arrive: Callable[..., None], *rest: object
    ) -> None:
        size_bytes = self._shard_bytes[shard] if kind != "control" else 0
        self.bytes_sent[kind] += HEADER_BYTES + size_bytes
        connections = self.workers[worker].from_server
        connections[shard % len(connections)].send(size_bytes, arrive, worker, *rest)

    def _to_coordinator(self, worker: int, arrive: Callable[..., None], *rest: object) -> None:
        self.bytes_sent["control"] += HEADER_BYTES
        self.workers[worker].to_coordinator.send(0, arrive, worker, *rest)

    def _from_coordinator(self, worker: int, arrive: Callable[..., None], *rest: object) -> None:
        self.bytes_sent["control"] += HEADER_BYTES
        self.workers[worker].from_coordinator.send(0, arrive, *rest)

    # -- shards -------------------------------------------------------------------------------------------

    def _take_commit(
        self,
        shard: int,
        worker: int,
        life: int,
        iteration: int,
        flags: Flags,
        push: object | None,
        empty: bool,
        significance: float | None,
    ) -> None:
        if not self._lives(worker, life):
            return
        now_s = self.kernel.now_s
        event = PushReceived(
            now_s=now_s,
            worker=worker,
            iteration=iteration,
            empty=empty,
            stop=flags.stop,
            change=flags.change,
            significance=significance,
            progress=flags.progress,
        )
        self._at_shard(shard, event, push)
        if self._overlap:
            self._take_pull(shard, worker, life, iteration)
        else:
            self._to_worker(
                shard, worker, "control", self._confirmed, self.workers[worker].attempt, iteration
            )

    def _take_pull(self, shard: int, worker: int, life: int, iteration: int) -> None:
        if self._lives(worker, life):
            self._at_shard(shard, PullRequested(now_s=self.kernel.now_s, worker=worker, iteration=iteration))

    def _take_pull_again(self, shard: int, worker: int, life: int, iteration: int) -> None:
        if self._lives(worker, life):
            self._at_shard(shard, PullRepeated(now_s=self.kernel.now_s, worker=worker, iteration=iteration))

    def _performer(self, shard: int) -> Callable[[ForHost], None]:
        """What a shard asks of its host is done by this."""

        def perform(action: ForHost) -> None:
            if type(action) is AnswerPull:
                its = self.workers[action.worker]
                kind = "pull" if its.dropped_s is None else "pull again"
                self._driver.sent(action.worker, shard)
                self._to_worker(shard, action.worker, kind, self._answered, its.attempt, action.v_train)
            elif type(action) is SetTimer:
                due_ns = nanoseconds(action.due_s)
                self.kernel.at(due_ns, self._fire_at_shard, shard, action, priority=TIMER)
            elif type(action) is ReportFault:  # in the words of a live run's coordinator
                words = f"shard {shard}: {action.reason}. It goes on with {action.sync}."
                self.faults.append(f"{words}\n{action.traceback}".strip())
                log.error("%s", self.faults[-1])

        return perform

    def _at_shard(self, shard: int, event: AnyEvent, push: object | None = None) -> None:
        self.shards[shard].handle(event, push, self._performs[shard])

    def _fire_at_shard(self, shard: int, timer: SetTimer) -> None:
        now_s = max(self.kernel.now_s, timer.due_s)
        self._at_shard(shard, TimerFired(now_s=now_s, worker=timer.worker, iteration=timer.iteration))

    # -- without overlap ----------------------------------------------------------------------------------

    def _confirmed(self, worker: int, attempt: int, iteration: int) -> None:
        """A shard has a worker's push."""
        its = self.workers[worker]
        if attempt != its.attempt:
            return
        its.committed -= 1
        if not its.committed:
            self._to_coordinator(worker, self._take_all_committed, its.life)

    def _take_all_committed(self, worker: int, life: int) -> None:
        if self._lives(worker, life):
            self._all_committed.add(worker)
            self._let_pull()

    def _let_pull(self) -> None:
        """If everybody has pushed everything, let them all pull."""
        self._all_committed &= self._present
        if self._overlap or not self._all_committed or self._all_committed < self._present:
            return
        ready, self._all_committed = self._all_committed, set()
        for worker in sorted(ready):
            self._from_coordinator(worker, self._pull, worker, self.workers[worker].attempt)

    def _pull(self, worker: int, attempt: int) -> None:
        its = self.workers[worker]
        if attempt == its.attempt:
            for shard in range(len(self.shards)):
                self._to_shard(worker, shard, "control", self._take_pull, its.life, its.sync.iteration)

    # -- the coordinator ----------------------------------------------------------------------------------

    def _take_notify(self, worker: int, life: int, iteration: int, flags: Flags) -> None:
        if self._lives(worker, life):
            self._at_coordinator(
                IterationFinished(
                    now_s=self.kernel.now_s,
                    worker=worker,
                    iteration=iteration,
                    superstep=flags.stop.superstep if flags.stop is not None else None,
                    change=flags.change.number if flags.change is not None else None,
                )
            )

    def _take_start(self, worker: int, life: int, iteration: int) -> None:
        if self._lives(worker, life):
            self._at_coordinator(
                IterationStarted(now_s=self.kernel.now_s, worker=worker, iteration=iteration)
            )

    def _take_request(self, worker: int, life: int, request: Request) -> None:
        if self._lives(worker, life):
            source, number, sync = request
            self._at_coordinator(
                SyncRequested(now_s=self.kernel.now_s, worker=worker, source=source, number=number, sync=sync)
            )

    def _at_coordinator(self, event: AnyEvent) -> None:
        actions = self._sync.handle(event)
        self._recorders.job.record(Entry(event, actions))
        for action in actions:
            match action:
                case PublishPlan():
                    stop = Stop(superstep=action.plan.superstep, members=action.plan.members)
                    for worker, iteration in action.plan.stops:
                        self._from_coordinator(worker, self.workers[worker].sync.plan, stop, iteration)
                case PublishChange():
                    for worker in action.change.members:
                        self._from_coordinator(worker, self.workers[worker].sync.announce, action.change)
                case RestartWorker():
                    self._from_coordinator(action.worker, self._restart, action.worker, action.iteration)
                case SetTimer():
                    due_ns = nanoseconds(action.due_s)
                    self.kernel.at(due_ns, self._fire_at_coordinator, action, priority=TIMER)
                case _:
                    raise InternalError(f"a coordinator cannot {action}")

    def _fire_at_coordinator(self, timer: SetTimer) -> None:
        now_s = max(self.kernel.now_s, timer.due_s)
        self._at_coordinator(TimerFired(now_s=now_s, worker=timer.worker, iteration=timer.iteration))

    def _standstill(self) -> str:
        """Who waits for what."""
        lines = [
            f"  worker {worker}, after its iteration {shard.sync.last_iteration(worker)}, at shard {index} "
            f"({shard.sync.sync}): for {reason}"
            for index, shard in enumerate(self.shards)
            for worker, reason in shard.sync.waits().items()
        ]
        return "every worker waits, and no condition will release any of them:\n" + "\n".join(sorted(lines))

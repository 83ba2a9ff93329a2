"""A job in virtual time, its timing alone: no tensors, but the sync model's own machines at every place they belong.

Each worker computes for as long as it is told, pushes to every shard, and goes on when all have answered; every
message takes the same latency. Shards host `ShardSync`, the coordinator `JobSync`, a worker `WorkerSync`, as the live
hosts do. What comes out is what a live run leaves behind: a trace of each host, and each worker's records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ..errors import ConfigurationError, InternalError
from ..runtime.records import IterationRecord
from ..sync import SyncModel
from ..sync.actions import AnswerPull, PublishChange, PublishPlan, ReportFault, RestartWorker, SetTimer
from ..sync.changes import JobSync, ShardSync
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
)
from ..sync.following import Flags, WorkerSync
from ..sync.notation import notation
from ..sync.schedule import Schedule, read_schedule
from ..sync.versions import Versions
from ..trace import Entry, Header, Trace
from .kernel import TIMER, Kernel

__all__ = ["ComputeTime", "Rehearsal", "rehearse"]

ComputeTime = float | Callable[[int], float]
"""Seconds per iteration: a number, or a function of the iteration."""


class Rehearsal(msgspec.Struct, frozen=True):
    """What came of it.

    Attributes:
        traces: each shard's, then the coordinator's.
        records: each worker's iterations.
        time_s: the virtual time at its end.
    """

    traces: list[Trace]
    records: list[list[IterationRecord]]
    time_s: float


def rehearse(
    sync: str | SyncModel | Sequence[SyncModel] | Schedule,
    compute_s: Sequence[ComputeTime],
    *,
    iterations: int | None = None,
    until_s: float = math.inf,
    shards: int = 1,
    latency_s: float = 0.0,
    seed: int = 0,
) -> Rehearsal:
    """Run a job in virtual time.

    Args:
        sync: as for `paceline.launch`.
        compute_s: for each worker, how long an iteration takes.
        iterations: of each worker; None to go on until the time is up.
        until_s: when to stop.
        shards: how many.
        latency_s: of every message.
        seed: of the run.

    Raises:
        ConfigurationError: bad input.

    >>> rehearsal = rehearse("bsp", [1.0, 3.0], iterations=4)
    >>> rehearsal.time_s
    12.0
    """
    schedule = read_schedule(sync)
    schedule.require_runnable(len(compute_s), shards)
    if iterations is None and math.isinf(until_s):
        raise ConfigurationError("give iterations, or until_s, or both: otherwise this never ends.")
    job = _Job(schedule, compute_s, iterations, shards, latency_s, seed)
    job.kernel.run(until_s)
    return Rehearsal(
        traces=[*(host.trace for host in job.shards), job.coordinator.trace],
        records=[worker.records for worker in job.workers],
        time_s=job.kernel.now_s,
    )


class _Worker:
    def __init__(self, schedule: Schedule, shards: int, compute_s: ComputeTime) -> None:
        self.sync = WorkerSync(schedule, shards)
        self.compute_s = compute_s
        self.records: list[IterationRecord] = []
        self.awaited: set[int] = set()  # shards that have yet to answer
        self.attempt = 0  # counts computations: what a dropped one comes to is ignored
        self.computing = False
        self.begun_s = 0.0
        self.pushed_s = 0.0
        self.restarted: tuple[float, float] | None = None
        self.dropped_s: float | None = None
        self.flags = Flags(None, None, False)


class _Shard:
    def __init__(self, schedule: Schedule, index: int, seed: int) -> None:
        model = schedule.at_shard(index)
        self.sync = ShardSync(model, seed, index)
        self.versions = Versions()
        self.trace = Trace(Header(sync=str(model), host="shard", index=index, seed=seed), [])


class _Coordinator:
    def __init__(self, schedule: Schedule, seed: int) -> None:
        sync = notation(schedule.first)
        self.sync = JobSync(sync, seed)
        self.trace = Trace(Header(sync=sync, host="coordinator", seed=seed), [])


class _Job:
    def __init__(
        self,
        schedule: Schedule,
        compute_s: Sequence[ComputeTime],
        iterations: int | None,
        shards: int,
        latency_s: float,
        seed: int,
    ) -> None:
        self.kernel = Kernel()
        self.workers = [_Worker(schedule, shards, each) for each in compute_s]
        self.shards = [_Shard(schedule, index, seed) for index in range(shards)]
        self.coordinator = _Coordinator(schedule, seed)
        self._iterations = math.inf if iterations is None else iterations
        self._latency_s = latency_s
        for worker in range(len(compute_s)):
            joined = WorkerJoined(now_s=0.0, worker=worker)
            for shard in range(shards):
                self._at_shard(shard, joined)
            self._at_coordinator(joined)
        for worker in range(len(compute_s)):
            self._compute(worker)

    # -- workers ------------------------------------------------------------------------------------------

    def _compute(self, worker: int) -> None:
        its = self.workers[worker]
        if its.sync.iteration >= self._iterations:
            for shard in range(len(self.shards)):
                self._send(partial(self._leave_shard, shard, worker))
            self._send(lambda: self._at_coordinator(WorkerFinished(now_s=self.kernel.now_s, worker=worker)))
            return
        its.attempt += 1
        its.computing = True
        length_s = its.compute_s(its.sync.iteration) if callable(its.compute_s) else its.compute_s
        self.kernel.after(length_s, partial(self._push, worker, its.attempt))

    def _push(self, worker: int, attempt: int) -> None:
        its = self.workers[worker]
        if attempt != its.attempt:
            return
        its.computing = False
        for request in its.sync.due():
            self._send(partial(self._request, worker, *request))
        its.flags = its.sync.push()
        its.pushed_s = self.kernel.now_s
        its.awaited = set(range(len(self.shards)))
        for shard in range(len(self.shards)):
            self._send(partial(self._take_commit, shard, worker, its.sync.iteration, its.flags))
        if its.flags.notify:
            self._send(partial(self._take_notify, worker, its.sync.iteration, its.flags))

    def _answered(self, worker: int, shard: int, v_train: int | None) -> None:
        its = self.workers[worker]
        its.sync.hear_answer(v_train)
        its.awaited.discard(shard)
        if its.awaited:
            return
        now_s = self.kernel.now_s
        if its.dropped_s is not None:  # the weights to start anew with
            its.restarted, its.dropped_s = (its.dropped_s, now_s), None
            self._compute(worker)
            return
        stop, change, *_ = its.flags
        dropped_s, restarted_s = its.restarted or (None, None)
        its.records.append(
            IterationRecord(
                iteration=its.sync.iteration,
                begun_s=its.begun_s,
                computed_s=its.pushed_s,
                pushed_s=its.pushed_s,
                answered_s=now_s,
                loss=None,
                superstep=stop.superstep if stop is not None else None,
                change=change.number if change is not None else None,
                dropped_s=dropped_s,
                restarted_s=restarted_s,
            )
        )
        its.restarted, its.begun_s = None, now_s
        if its.sync.answered():
            self._send(partial(self._take_start, worker, its.sync.iteration))
        self._compute(worker)

    def _restart(self, worker: int, iteration: int) -> None:
        its = self.workers[worker]
        its.sync.order_restart(iteration)
        if not (its.computing and its.sync.restart_ordered):
            return
        its.sync.restarted()
        its.attempt += 1
        its.computing = False
        its.dropped_s = self.kernel.now_s
        its.awaited = set(range(len(self.shards)))
        for shard in range(len(self.shards)):
            self._send(partial(self._take_pull_again, shard, worker, iteration))

    # -- shards -------------------------------------------------------------------------------------------

    def _take_commit(self, shard: int, worker: int, iteration: int, flags: Flags) -> None:
        now_s = self.kernel.now_s
        self._at_shard(
            shard,
            PushReceived(
                now_s=now_s,
                worker=worker,
                iteration=iteration,
                stop=flags.stop,
                change=flags.change,
                progress=flags.progress,
            ),
        )
        self._at_shard(shard, PullRequested(now_s=now_s, worker=worker, iteration=iteration))

    def _take_pull_again(self, shard: int, worker: int, iteration: int) -> None:
        self._at_shard(shard, PullRepeated(now_s=self.kernel.now_s, worker=worker, iteration=iteration))

    def _leave_shard(self, shard: int, worker: int) -> None:
        self._at_shard(shard, WorkerFinished(now_s=self.kernel.now_s, worker=worker))

    def _at_shard(self, shard: int, event: AnyEvent) -> None:
        host = self.shards[shard]
        actions = host.sync.handle(event)
        host.versions.note(event)
        staleness: list[tuple[int, int, int]] = []
        for action in actions:
            staleness += host.versions.carry_out(action)
            match action:
                case AnswerPull():
                    self._send(partial(self._answered, action.worker, shard, action.v_train))
                case SetTimer():
                    self.kernel.at(action.due_s, partial(self._fire_at_shard, shard, action), TIMER)
                case ReportFault():
                    raise ConfigurationError(f"{action.reason}\n{action.traceback}".rstrip())
                case _:
                    pass
        host.trace.entries.append(Entry(event, list(actions), None, host.versions.version, staleness))

    def _fire_at_shard(self, shard: int, timer: SetTimer) -> None:
        self._at_shard(
            shard, TimerFired(now_s=self.kernel.now_s, worker=timer.worker, iteration=timer.iteration)
        )

    # -- the coordinator ----------------------------------------------------------------------------------

    def _take_notify(self, worker: int, iteration: int, flags: Flags) -> None:
        self._at_coordinator(
            IterationFinished(
                now_s=self.kernel.now_s,
                worker=worker,
                iteration=iteration,
                superstep=flags.stop.superstep if flags.stop is not None else None,
                change=flags.change.number if flags.change is not None else None,
            )
        )

    def _take_start(self, worker: int, iteration: int) -> None:
        self._at_coordinator(IterationStarted(now_s=self.kernel.now_s, worker=worker, iteration=iteration))

    def _request(self, worker: int, source: str, number: int, sync: str) -> None:
        self._at_coordinator(
            SyncRequested(
                now_s=self.kernel.now_s,
                worker=worker,
                source="schedule" if source == "schedule" else "script",
                number=number,
                sync=sync,
            )
        )

    def _at_coordinator(self, event: AnyEvent) -> None:
        actions = self.coordinator.sync.handle(event)
        self.coordinator.trace.entries.append(Entry(event, list(actions)))
        for action in actions:
            match action:
                case PublishPlan():
                    stop = Stop(superstep=action.plan.superstep, members=action.plan.members)
                    for worker, iteration in action.plan.stops:
                        self._send(partial(self.workers[worker].sync.plan, stop, iteration))
                case PublishChange():
                    for worker in action.change.members:
                        self._send(partial(self.workers[worker].sync.announce, action.change))
                case RestartWorker():
                    self._send(partial(self._restart, action.worker, action.iteration))
                case SetTimer():
                    self.kernel.at(action.due_s, partial(self._fire_at_coordinator, action), TIMER)
                case _:
                    raise InternalError(f"a coordinator cannot {action}")

    def _fire_at_coordinator(self, timer: SetTimer) -> None:
        self._at_coordinator(
            TimerFired(now_s=self.kernel.now_s, worker=timer.worker, iteration=timer.iteration)
        )

    def _send(self, arrive: Callable[[], None]) -> None:
        self.kernel.after(self._latency_s, arrive)

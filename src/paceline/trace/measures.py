"""Statistics of a run, computed from the traces of its shards.

    staleness   counted in updates: for each pair (push, shard), the number of updates that the shard applied between
                the worker's pull and the application of the push
    gap         counted in iterations: the number of iterations by which a worker is ahead of the slowest live worker
                when it starts an iteration, c_p - min c, where c_p is the number of iterations that the sync model
                counts for worker p. The traces contain the gap, because it cannot be computed from the iteration
                numbers: workers may join at any time, `drop-stragglers` advances the counts of slow workers, and a
                change of the sync model makes all counts equal
    waiting     time from the arrival of a pull to its answer, not including transfers; the maximum over the shards
    barriers    moments at which pulls that waited for other workers were answered: under BSP, the end of a round;
                under ElasticBSP, the end of a superstep; under SSP, a push of the slowest worker that lets others
                continue (a soft barrier). A pull that waited only for a timer does not count
    sync cost   c_sync of the ElasticBSP paper (Eq. 2): the sum, over the barriers, of the longest waiting time of any
                worker at the barrier. For the predicted cost, each barrier that was planned counts with the d_Z of
                its plan, which is the waiting time that the paper's section 4.1 predicts for it
    idle        time from when a worker finished until the last worker left
    updates     number of optimizer steps of a shard. An update contains one gradient under some sync models and one
                gradient of each worker under others, so updates per second are not a measure of speed
    gradients   number of pushes that a shard applied or held
    samples     number of samples from which these gradients were computed
    restarts    number of computations that were aborted and restarted
    pushes      what became of each push; see `PushCounts`

The functions have no side effects. A `Meter` processes the entries one by one and does not store them, so its memory
use does not grow with the number of entries.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from math import fsum

import msgspec

from ..sync.actions import AnswerPull, ApplyMean, ApplyPush, DropPush, PublishPlan
from ..sync.events import (
    AnyEvent,
    MeanClipped,
    PullRepeated,
    PullRequested,
    PushReceived,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from ..sync.ticks import TICKS_PER_S
from .recording import Entry, EntryRecorder, Trace

__all__ = ["Measures", "Meter", "PushCounts", "Wait", "measure", "waits"]


class Wait(msgspec.Struct, frozen=True):
    """The waiting time of one pull at the shard where it waited longest.

    Attributes:
        worker: index of the worker.
        iteration: number of the worker's iteration.
        asked_s: time at which the pull arrived at the shard with the longest waiting time.
        answered_s: time at which this shard answered the pull.
    """

    worker: int
    iteration: int
    asked_s: float
    answered_s: float

    @property
    def length_s(self) -> float:
        """The waiting time in seconds."""
        return self.answered_s - self.asked_s


class PushCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the pushes. Each push, identified by its worker and iteration, is in exactly one category.

    If the shards treated a push differently, the category is that of shard 0, except for lost pushes.

    Attributes:
        applied: number of pushes that were applied individually.
        averaged: number of pushes that were applied as part of the mean of several pushes.
        dropped: number of pushes that had no gradient, or that the sync model dropped, for example because they were
            late.
        refused: number of pushes that were refused because they violated the protocol.
        lost: number of pushes that only some of the shards had received when their worker was lost, and of pushes
            that were held to be averaged and were never applied.
    """

    applied: int
    averaged: int
    dropped: int
    refused: int
    lost: int


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of one run.

    Attributes:
        duration_s: time in seconds from when the first worker joined until the last worker left.
        present_s: time in seconds from when a worker joined until it left, summed over all workers.
        updates: number of optimizer steps of shard 0.
        updates_per_s: number of optimizer steps of shard 0 per second. Compare sync models by `samples_per_s` or
            `gradients_per_s` instead, because updates under different models contain different numbers of gradients.
        gradients: number of pushes that shard 0 did not drop.
        gradients_per_s: number of these pushes per second.
        sampled_gradients: number of these pushes that have samples of their own. A push has none if it is computed
            from the same batch as the worker's push before it, as in a script that steps two optimizers in turn.
        iterations: worker -> number of iterations in which the worker pushed.
        waiting_s: worker -> total waiting time of the worker, in seconds.
        waiting_share: total waiting time of all workers, divided by `present_s`.
        barriers: number of barriers of shard 0.
        sync_cost_s: c_sync, the sum over the barriers of the longest waiting time of any worker, in seconds; the
            maximum over the shards.
        predicted_sync_cost_s: sum of the waiting times that the plans have predicted for the barriers of shard 0, in
            seconds. None if no barrier was planned, because only ElasticBSP makes plans. If other models were in
            force during a part of the run, their barriers count in `sync_cost_s` only.
        idle_s: worker -> time in seconds from when the worker finished until the last worker left.
        idle_share: total idle time of all workers, divided by the sum of idle time and `present_s`.
        left_s: worker -> time at which the worker left for the last time, in seconds since the first worker joined;
            `duration_s` if it has not left.
        last_push_s: worker -> time at which the worker's last push arrived, in seconds since the first worker joined;
            no entry for a worker that has not pushed.
        samples: number of samples in the pushes that shard 0 did not drop; 0 if this number is unknown.
        samples_per_s: number of these samples per second.
        worker_samples: worker -> number of these samples that were in the worker's pushes.
        dropped_samples: number of samples in the pushes that shard 0 dropped.
        mean_staleness: mean staleness over all pairs (push, shard), in updates.
        max_staleness: maximum staleness over all pairs (push, shard), in updates.
        max_gap: largest gap c_p - min c of any worker at the start of an iteration, in iterations.
        delayed_pulls: number of pulls that were not answered on arrival, counted separately at each shard.
        dropped_pushes: number of pushes that had no gradient or were dropped, counted separately at each shard.
        restarts: number of computations that were aborted and restarted.
        pushes: what became of the pushes.
        unapplied: number of lost pushes that should have been applied. This excludes one push of each worker that was
            lost and, if workers are still present at the end, as many pushes as the largest update contains: those of
            a round in progress.
        clipped_alone: number of averaged pushes whose worker had clipped its own gradient with
            `torch.nn.utils.clip_grad_norm_`.
    """

    duration_s: float
    present_s: float
    updates: int
    updates_per_s: float
    gradients: int
    gradients_per_s: float
    sampled_gradients: int
    iterations: dict[int, int]
    waiting_s: dict[int, float]
    waiting_share: float
    barriers: int
    sync_cost_s: float
    predicted_sync_cost_s: float | None
    idle_s: dict[int, float]
    idle_share: float
    left_s: dict[int, float]
    last_push_s: dict[int, float]
    samples: int
    samples_per_s: float
    worker_samples: dict[int, int]
    dropped_samples: int
    mean_staleness: float
    max_staleness: int
    max_gap: int
    delayed_pulls: int
    dropped_pushes: int
    restarts: int
    pushes: PushCounts
    unapplied: int
    clipped_alone: int


def waits(shards: Sequence[Trace]) -> list[Wait]:
    """Return one `Wait` for each answered pull, sorted by worker and iteration."""
    longest: dict[tuple[int, int], Wait] = {}
    for trace in shards:
        asked: dict[tuple[int, int], float] = {}
        for entry in trace.entries:
            event = entry.event
            if isinstance(event, PullRequested) and entry.refused is None:
                asked[event.worker, event.iteration] = trace.time_s(entry)
            for action in entry.actions:
                if isinstance(action, AnswerPull) and not isinstance(event, PullRepeated):
                    key = action.worker, action.iteration
                    wait = Wait(*key, asked.pop(key), trace.time_s(entry))
                    if key not in longest or wait.length_s > longest[key].length_s:
                        longest[key] = wait
    return [longest[key] for key in sorted(longest)]


def measure(shards: Sequence[Trace], coordinator: Trace | None = None) -> Measures:
    """Return the statistics of a run, computed from the traces of all its shards.

    Args:
        shards: the traces of all shards, in order.
        coordinator: the trace of the coordinator. Without it, no predicted cost of synchronization is known.
    """
    meter = Meter(len(shards), shards[0].header.ticks_per_s if shards else TICKS_PER_S)
    traces = [(trace, meter.at_shard(index)) for index, trace in enumerate(shards)]
    if coordinator is not None:
        traces.insert(0, (coordinator, meter.at_coordinator()))
    # A plan is published before the pushes that stop for its barrier arrive.
    streams = [[(entry, recorder) for entry in trace.entries] for trace, recorder in traces]
    for entry, recorder in heapq.merge(*streams, key=lambda pair: pair[0].event.now_ticks):
        recorder.record(entry)
    return meter.measures()


class Meter:
    """Computes the statistics of a run while the run is in progress.

    The entries of each shard must be recorded in order, and each plan of the coordinator before shard 0 ends the
    superstep. Otherwise, entries of different traces may be interleaved in any way.

    Args:
        shards: number of shards.
        ticks_per_s: number of ticks per second (see `paceline.sync.ticks`).

    Attributes:
        staleness: staleness in updates -> number of pushes with this staleness, counted separately at each shard.
    """

    def __init__(self, shards: int, ticks_per_s: int = TICKS_PER_S) -> None:
        self.staleness: dict[int, int] = defaultdict(int)
        self._waiting = _Waiting(shards)
        self._plans = _Plans(ticks_per_s)
        self._shards = [_ShardMeter(self._waiting, self.staleness, ticks_per_s) for _ in range(shards)]
        self._shards[0].plans = self._plans

    def at_shard(self, index: int) -> EntryRecorder:
        """Return the recorder that processes the entries of one shard's trace."""
        return self._shards[index]

    def at_coordinator(self) -> EntryRecorder:
        """Return the recorder that processes the entries of the coordinator's trace."""
        return self._plans

    def measures(self, until_s: float | None = None) -> Measures:
        """Return the statistics of the entries recorded so far.

        Args:
            until_s: end of the measured time. There must be no events between the last entry and this time. Default:
                the time of the last entry.
        """
        first = self._shards[0]
        end_s = first.now_s if until_s is None else until_s
        waiting = self._waiting.totals_s()
        memberships = [*first.past, *first.current.values()]
        present_s = sum(member.until(end_s) - member.joined_s for member in memberships)
        joined_s = min((member.joined_s for member in memberships), default=0.0)
        duration_s = max((member.until(end_s) for member in memberships), default=0.0) - joined_s
        idle: dict[int, float] = defaultdict(float)
        for member in memberships:
            idle[member.worker] += joined_s + duration_s - member.until(end_s) if member.finished else 0.0
        idle_s = fsum(idle.values())
        iterations: dict[int, int] = defaultdict(int)
        left_s: dict[int, float] = {}
        last_push_s: dict[int, float] = {}
        for member in sorted(memberships, key=lambda member: member.number):
            iterations[member.worker] += member.iterations
            left_s[member.worker] = member.until(end_s) - joined_s
            if member.pushed_s is not None:
                last_push_s[member.worker] = member.pushed_s - joined_s
        applied = sum(self.staleness.values())
        total_staleness = sum(updates * count for updates, count in self.staleness.items())
        pushes = self._pushes()
        in_progress = first.largest_update if first.current else 0
        return Measures(
            duration_s=duration_s,
            present_s=present_s,
            updates=first.updates,
            updates_per_s=first.updates / duration_s if duration_s else 0.0,
            gradients=first.gradients,
            gradients_per_s=first.gradients / duration_s if duration_s else 0.0,
            sampled_gradients=first.sampled_gradients,
            iterations=dict(iterations),
            waiting_s={worker: waiting[worker] for worker in iterations},
            waiting_share=fsum(waiting.values()) / present_s if present_s else 0.0,
            barriers=first.barriers,
            sync_cost_s=max(shard.sync_cost_s for shard in self._shards),
            predicted_sync_cost_s=self._plans.predicted_s,
            idle_s={worker: idle[worker] for worker in iterations},
            idle_share=idle_s / (present_s + idle_s) if present_s else 0.0,
            left_s=left_s,
            last_push_s=last_push_s,
            samples=first.samples,
            samples_per_s=first.samples / duration_s if duration_s else 0.0,
            worker_samples={worker: first.worker_samples[worker] for worker in iterations},
            dropped_samples=first.dropped_samples,
            mean_staleness=total_staleness / applied if applied else 0.0,
            max_staleness=max(self.staleness, default=0),
            max_gap=max(shard.max_gap for shard in self._shards),
            delayed_pulls=sum(shard.delayed_pulls for shard in self._shards),
            dropped_pushes=sum(shard.dropped_pushes for shard in self._shards),
            restarts=first.restarts,
            pushes=pushes,
            unapplied=max(0, pushes.lost - in_progress - sum(member.lost for member in first.past)),
            clipped_alone=first.clipped_alone,
        )

    def _pushes(self) -> PushCounts:
        """Return what became of the pushes."""
        first = self._shards[0]
        counts = {"applied": first.applied, "averaged": first.averaged, "dropped": first.dropped_pushes}
        lost = first.received - sum(counts.values())  # the pushes that shard 0 holds
        shards = [shard.memberships for shard in self._shards]
        for key, member in shards[0].items():
            received = [shard[key].iterations if key in shard else 0 for shard in shards]
            if not member.lost or min(received) == max(received):
                continue
            # A worker pushes its next iteration only when every shard has answered the previous one. So the shards
            # differ by at most one push.
            if member.iterations == min(received):
                lost += 1
            elif member.fate in counts:
                counts[member.fate] -= 1
                lost += 1
        return PushCounts(**counts, refused=first.refused, lost=lost)


class _Membership:
    """One period in which a worker takes part in the run, from joining to leaving. A lost worker may join again."""

    __slots__ = (
        "asked_s",
        "fate",
        "finished",
        "iteration",
        "iterations",
        "joined_s",
        "left_s",
        "lost",
        "number",
        "pushed_s",
        "superstep",
        "worker",
    )

    def __init__(self, worker: int, joined_s: float, number: int) -> None:
        self.worker = worker
        self.joined_s = joined_s
        self.left_s: float | None = None
        self.finished = self.lost = False  # why the worker left
        self.iterations = 0
        self.iteration = -1  # label of the worker's last push
        self.fate = ""  # category of this push in `PushCounts`; "" while the shard holds the push
        self.number = number  # position in the order in which workers joined
        self.asked_s = 0.0  # time at which the worker's last pull arrived
        self.pushed_s: float | None = None  # time at which the worker's last push arrived
        # superstep for whose barrier the worker has stopped with its last push
        self.superstep: int | None = None

    def until(self, end_s: float) -> float:
        """Return the time at which the worker left, or `end_s` if it has not left."""
        return end_s if self.left_s is None else self.left_s


class _Waiting:
    """Adds up the waiting times of each worker. For each pull, only the longest waiting time at any shard counts."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        # Worker -> total waiting time of the pulls that all shards have answered.
        self._total_s: dict[int, float] = defaultdict(float)
        # (worker, iteration) of a pull that only some shards have answered -> (number of these shards, longest wait).
        self._open: dict[tuple[int, int], tuple[int, float]] = {}

    def answered(self, worker: int, iteration: int, wait_s: float) -> None:
        """Record that a shard has answered a pull after `wait_s` seconds."""
        if self._shards == 1:
            self._total_s[worker] += wait_s
            return
        key = worker, iteration
        answered, longest_s = self._open.pop(key, (0, 0.0))
        if wait_s < longest_s:
            wait_s = longest_s
        if answered + 1 == self._shards:
            self._total_s[worker] += wait_s
        else:
            self._open[key] = answered + 1, wait_s

    def totals_s(self) -> dict[int, float]:
        """Return the total waiting time of each worker, in seconds; 0 for a worker that has not waited."""
        totals_s = defaultdict(float, self._total_s)
        for (worker, _), (_, longest_s) in sorted(self._open.items()):
            totals_s[worker] += longest_s
        return totals_s


class _Plans:
    """Adds up the waiting times that were predicted for the barriers.

    Attributes:
        predicted_s: sum of the predictions for the barriers that have ended; None if no plan was published.
    """

    def __init__(self, ticks_per_s: int) -> None:
        self._ticks_per_s = ticks_per_s
        self.predicted_s: float | None = None
        # Superstep -> prediction for its barrier, which has not ended. The supersteps of the next model with plans
        # are counted from 0 again, and its plans replace those that were never reached.
        self._open: dict[int, float] = {}

    def record(self, entry: Entry) -> None:
        """Process one entry of the coordinator's trace."""
        for action in entry.actions:
            if type(action) is PublishPlan:
                self.predicted_s = self.predicted_s or 0.0
                self._open[action.plan.superstep] = action.plan.wait_ticks / self._ticks_per_s

    def ended(self, superstep: int) -> None:
        """Record that a worker that waited at the barrier of a superstep continues."""
        if self.predicted_s is not None:
            self.predicted_s += self._open.pop(superstep, 0.0)


class _ShardMeter:
    """Computes the statistics of one shard. It adds waiting times and staleness to those of the other shards."""

    def __init__(self, waiting: _Waiting, staleness: dict[int, int], ticks_per_s: int) -> None:
        self._waiting = waiting
        self._ticks_per_s = ticks_per_s
        self._staleness = staleness
        self.now_s = 0.0
        self.updates = 0
        self.gradients = 0
        self.max_gap = 0
        self.delayed_pulls = 0
        self.dropped_pushes = 0
        self.barriers = 0
        self.sync_cost_s = 0.0
        self.plans: _Plans | None = None  # set for shard 0 only
        self.restarts = 0
        self.received = self.applied = self.averaged = self.refused = 0  # push counts
        self.largest_update = 0  # largest number of pushes in one update
        self.samples = 0
        self.sampled_gradients = 0
        self.worker_samples: dict[int, int] = defaultdict(int)
        self.dropped_samples = 0
        self.clipped_alone = 0
        # Pushes that were clipped alone and are neither applied nor dropped.
        self._edits: set[tuple[int, int]] = set()  # pushes that are edits
        self._clipped: set[tuple[int, int]] = set()
        # (worker, iteration) of each push that is neither applied nor dropped -> its number of samples
        self._pending: dict[tuple[int, int], int] = {}
        self.past: list[_Membership] = []
        self.current: dict[int, _Membership] = {}

    @property
    def memberships(self) -> dict[tuple[int, int], _Membership]:
        """(worker, number of times that the worker had joined before) -> membership."""
        found: dict[tuple[int, int], _Membership] = {}
        times: dict[int, int] = defaultdict(int)
        for member in [*self.past, *self.current.values()]:  # a worker's memberships are in order
            found[member.worker, times[member.worker]] = member
            times[member.worker] += 1
        return found

    def record(self, entry: Entry) -> None:
        """Process one entry of the shard's trace."""
        event = entry.event
        kind = type(event)
        if entry.refused is not None:
            self.refused += kind is PushReceived
            return
        self.now_s = now_s = event.now_ticks / self._ticks_per_s
        if entry.gap > self.max_gap:
            self.max_gap = entry.gap
        if entry.version is not None:
            self.updates = entry.version
        if isinstance(event, MeanClipped):
            return
        if kind is PushReceived:
            self._receive(event)  # type: ignore[arg-type]
        elif kind is PullRequested:
            self.current[event.worker].asked_s = now_s
            self.delayed_pulls += 1  # decremented below if the pull is answered by this entry
        else:
            self._change(event)
        # longest waiting time of a worker that continues because of this event of another one
        longest_s = -1.0
        for action in entry.actions:
            if type(action) is AnswerPull:
                if kind is not PullRepeated:
                    worker = action.worker
                    member = self.current[worker]
                    wait_s = now_s - member.asked_s
                    self._waiting.answered(worker, action.iteration, wait_s)
                    if worker != event.worker:
                        longest_s = max(longest_s, wait_s)
                        if member.superstep is not None and self.plans is not None:
                            self.plans.ended(member.superstep)
                    elif kind is PullRequested:
                        self.delayed_pulls -= 1
            elif type(action) is ApplyPush:
                self.applied += 1
                self._decide((action.worker, action.iteration), "applied")
            elif type(action) is ApplyMean:
                self.largest_update = max(self.largest_update, len(action.pushes))
                fate = "averaged" if len(action.pushes) > 1 else "applied"
                self.averaged += len(action.pushes) if len(action.pushes) > 1 else 0
                self.applied += len(action.pushes) == 1
                for push in action.pushes:
                    self._decide(push, fate)
            elif type(action) is DropPush:
                self.dropped_pushes += 1
                key = action.worker, action.iteration
                self.gradients -= key not in self._edits
                dropped = self._decide(key, "dropped")
                self.samples -= dropped
                self.sampled_gradients -= dropped > 0
                self.worker_samples[action.worker] -= dropped
                self.dropped_samples += dropped
        if longest_s >= 0.0:
            self.barriers += 1
            self.sync_cost_s += longest_s
        for _, _, updates in entry.staleness:
            self._staleness[updates] += 1

    def _receive(self, push: PushReceived) -> None:
        member = self.current[push.worker]
        member.iterations += 1
        member.iteration, member.fate = push.iteration, ""
        member.pushed_s = self.now_s
        member.superstep = None if push.stop is None else push.stop.superstep
        self.received += 1
        self.gradients += push.edit is None  # decremented in `record` if the push is dropped
        if push.edit is not None:
            self._edits.add((push.worker, push.iteration))
        if push.clipped:
            self._clipped.add((push.worker, push.iteration))
        if push.samples is not None and not push.repeated:
            self.samples += push.samples
            self.sampled_gradients += push.samples > 0
            self.worker_samples[push.worker] += push.samples
            self._pending[push.worker, push.iteration] = push.samples

    def _change(self, event: AnyEvent) -> None:
        """Process a restart, or the arrival or departure of a worker."""
        kind = type(event)
        if kind is PullRepeated:
            self.restarts += event.restart  # type: ignore[union-attr]
        elif kind is WorkerJoined:
            number = len(self.past) + len(self.current)
            self.current[event.worker] = _Membership(event.worker, self.now_s, number)
        elif kind is WorkerLost or kind is WorkerFinished:
            member = self.current.pop(event.worker)
            member.left_s = self.now_s
            member.finished, member.lost = kind is WorkerFinished, kind is WorkerLost
            self.past.append(member)

    def _decide(self, push: tuple[int, int], fate: str) -> int:
        """Record what became of a push, and return its number of samples; 0 if this number is unknown.

        Only the fate of the last push of each membership matters.
        """
        worker, iteration = push
        if push in self._clipped:
            self._clipped.remove(push)
            self.clipped_alone += fate == "averaged"
        member = self.current.get(worker)
        if member is None:
            member = next((past for past in reversed(self.past) if past.worker == worker), None)
        if member is not None and member.iteration == iteration:
            member.fate = fate
        return self._pending.pop(push, 0) if self._pending else 0

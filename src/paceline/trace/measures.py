"""Statistics of a run, computed from the traces of its shards.

    staleness   counted in updates: for each pair (push, shard), the number of updates that the shard applied between
                the worker's pull and the application of the push
    gap         counted in iterations: the number of iterations by which a worker is ahead of the slowest live worker
                when it starts an iteration, c_p - min c, where c_p is the number of iterations that the sync model
                counts for worker p. The traces contain the gap, because it cannot be computed from the iteration
                numbers: workers may join at any time, `drop-stragglers` advances the counts of slow workers, and a
                change of the sync model makes all counts equal
    waiting     time from the arrival of a pull to its answer, not including transfers; the maximum over the shards. A
                pull that is not answered has waited until its worker was lost, or until the end of the run
    barriers    moments at which pulls that waited for other workers were answered: under BSP, the end of a round;
                under ElasticBSP, the end of a superstep; under SSP, a push of the slowest worker that lets others
                continue (a soft barrier). A pull that waited only for a timer does not count
    sync cost   c_sync of the ElasticBSP paper (Eq. 2): the sum, over the barriers, of the longest waiting time of any
                worker at the barrier. For the predicted cost, each planned barrier counts with the d_Z of its plan:
                the waiting time that the paper's section 4.1 predicts for this barrier
    idle        time from when a worker finished until the last worker left, or until its index was used again
    absent      time of the run in which an index had no worker, except for idle time
    updates     number of optimizer steps of a shard, without those before a resume. An update contains one gradient
                under some sync models and one gradient of each worker under others, so updates per second are not a
                measure of speed
    gradients   number of pushes that a shard applied or held
    samples     number of samples from which these gradients were computed
    restarts    number of computations that were aborted and restarted
    pushes      what became of each push; see `PushFates`

The functions have no side effects. A `Meter` processes the entries one by one and does not store them, so its memory
use does not grow with the number of entries.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import repeat
from typing import Literal, NamedTuple

import msgspec

from ..core.requests import Entry, EntryRecorder
from ..errors import ConfigurationError
from ..sync.actions import AnswerPull, ApplyMean, ApplyPush, DropPush, PublishPlan
from ..sync.events import (
    AnyEvent,
    OfShard,
    PullRepeated,
    PullRequested,
    PushReceived,
    TimerFired,
    WorkerFenced,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from ..sync.ticks import TICKS_PER_S
from .recording import AnyTrace

MOST_PLANS = 1000  # maximum number of plans that are kept because their barriers have not ended

LOOK_INTERVAL = 1000  # number of entries after which `meter_of` calls `hurried` again


Reason = Literal["push", "timer", "change", "joined", "finished", "lost", "left"]
"""The events that end a wait: a push or pull of the awaited worker; a timer; the end of a change of the model; the
awaited worker joins, finishes or is lost; or the waiting worker leaves without an answer."""

NOBODY = -1

ENDS: dict[type, Reason] = {
    TimerFired: "timer",
    WorkerJoined: "joined",
    WorkerFinished: "finished",
    WorkerLost: "lost",
    WorkerFenced: "lost",
}
"""Type of an event other than a push or a pull -> the reason of the waits that it ends."""

LEAVE = (WorkerLost, WorkerFinished)


class Wait(msgspec.Struct, frozen=True, gc=False):
    """The wait of one pull at one shard, in ticks on the clock of the shard.

    Attributes:
        worker: index of the worker.
        iteration: number of the worker's iteration.
        begin: time at which the pull arrived.
        end: time at which the pull was answered, or its worker left.
        reason: what ended the wait.
        awaited: the other worker whose event ended the wait; -1 if there is none.
    """

    worker: int
    iteration: int
    begin: int
    end: int
    reason: Reason = "push"
    awaited: int = NOBODY


class Pulls(msgspec.Struct):
    """Finds all waits in the entries of a shard. Statistics add these waits up, and timelines sort them into bins.

    Attributes:
        asked: worker -> the iteration and the arrival time of its unanswered pull.

    Example:
        >>> pulls = Pulls()
        >>> pulls.ended(Entry(PullRequested(now_ticks=3, worker=0, iteration=7)))
        []
        >>> answer = Entry(PushReceived(now_ticks=5, worker=1, iteration=7), [AnswerPull(0, 7)])
        >>> pulls.ended(answer)
        [Wait(worker=0, iteration=7, begin=3, end=5, reason='push', awaited=1)]
    """

    asked: dict[int, tuple[int, int]] = {}

    def ended(self, entry: Entry) -> list[Wait]:
        """Process an entry that was not refused. Return the waits that it ends."""
        event = entry.event
        waits = self.left(event.worker, event.now_ticks) if type(event) in LEAVE else []  # type: ignore[union-attr]
        if type(event) is PullRequested:
            self.asked[event.worker] = event.iteration, event.now_ticks
        if type(event) is not PullRepeated:  # the answer to it is never delayed, and answers no other pull
            waits += [self.answered(event, each) for each in entry.actions if type(each) is AnswerPull]
        return waits

    def answered(self, event: AnyEvent | OfShard, action: AnswerPull) -> Wait:
        """Return the wait that an answer ends, given the event that has caused the answer."""
        now, worker = event.now_ticks, action.worker
        _, begin = self.asked.pop(worker, (0, now))
        reason: Reason = "push"
        other = NOBODY
        if type(event) is PushReceived:
            reason, other = "push" if event.change is None else "change", event.worker
        elif type(event) is not PullRequested or event.worker != worker:
            reason = ENDS.get(type(event), "push")
            other = NOBODY if reason == "timer" else getattr(event, "worker", NOBODY)
        return Wait(worker, action.iteration, begin, now, reason, NOBODY if other == worker else other)

    def left(self, worker: int, now: int) -> list[Wait]:
        """Return the wait that ends because its worker leaves; [] if this worker does not wait."""
        asked = self.asked.pop(worker, None)
        return [] if asked is None else [Wait(worker, *asked, now, "left")]


class PushFates(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of pushes by their fates. Each push, identified by its worker and iteration, is in exactly one category.

    If the shards treated a push differently, the category is that of shard 0, except for lost pushes.

    Attributes:
        applied: number of pushes that were applied individually.
        averaged: number of pushes that were applied as part of the mean of several pushes.
        dropped: number of pushes that had no gradient, or that the sync model dropped, for example because they were
            late.
        refused: number of pushes that were refused because they violated the protocol.
        lost: number of pushes that were held to be averaged and were never applied, plus the number of pushes that
            only some of the shards had received when the worker was lost.
    """

    applied: int
    averaged: int
    dropped: int
    refused: int
    lost: int


class WorkerPresence(NamedTuple):
    """The times of one worker index in a run, in ticks. The run lasts until the last worker has left.

    Attributes:
        present: time from when a worker joined until it left, summed over all workers with this index.
        waiting: part of `present` in which the worker's pulls waited for an answer.
        idle: time after a worker had finished.
        absent: the rest of the run.
    """

    present: int
    waiting: int
    idle: int
    absent: int


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
        waiting_s: worker -> total waiting time of the worker, in seconds, including pulls that were never answered.
        awaited_s: worker -> total time in seconds for which other workers have waited for this worker. A pull has
            waited for the worker whose event led to its answer.
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
        worker_gradients: worker -> number of its pushes that shard 0 did not drop.
        dropped_samples: number of samples in the pushes that shard 0 dropped.
        mean_staleness: mean staleness over all pairs (push, shard), in updates.
        max_staleness: maximum staleness over all pairs (push, shard), in updates.
        max_gap: largest gap c_p - min c of any worker at the start of an iteration, in iterations.
        delayed_pulls: number of pulls that were not answered on arrival, counted separately at each shard.
        dropped_pushes: number of pushes that had no gradient or were dropped, counted separately at each shard.
        restarts: number of computations that were aborted and restarted.
        pushes: what became of the pushes.
        unapplied: number of lost pushes (see `PushFates.lost`) that should have been applied. One push of each lost
            worker is not counted. If workers are still present at the end, a round may be in progress. Then as many
            pushes as the largest update contains are not counted either.
        clipped_alone: number of averaged pushes whose worker had clipped its own gradient with
            `torch.nn.utils.clip_grad_norm_`.
        clips: True if the script clips the gradient that is applied, with `optimizer.clip_grad_norm`.
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
    awaited_s: dict[int, float]
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
    worker_gradients: dict[int, int]
    dropped_samples: int
    mean_staleness: float
    max_staleness: int
    max_gap: int
    delayed_pulls: int
    dropped_pushes: int
    restarts: int
    pushes: PushFates
    unapplied: int
    clipped_alone: int
    clips: bool


def measure(shards: Sequence[AnyTrace], coordinator: AnyTrace | None = None) -> Measures:
    """Return the statistics of a run, computed from the traces of all its shards.

    Args:
        shards: the traces of all shards, in order.
        coordinator: the trace of the coordinator. Without this trace, the predicted cost of synchronization is
            unknown.
    """
    meter = meter_of(shards, coordinator)
    assert meter is not None  # it was not hurried
    return meter.measures()


def meter_of(
    shards: Sequence[AnyTrace],
    coordinator: AnyTrace | None = None,
    hurried: Callable[[], bool] = lambda: False,
    left: Collection[int] = (),
) -> Meter | None:
    """Return a `Meter` that has processed these traces, without keeping their entries. See `measure`.

    Args:
        shards: the traces of all shards, in order.
        coordinator: the trace of the coordinator.
        hurried: called from time to time, because long traces take minutes. If it returns True, the rest is not read,
            and the result is None.
        left: see `Meter`.

    Raises:
        ConfigurationError: the beginning of a trace was deleted. `digest.Digest` knows the statistics of such a run.
    """
    for trace in shards:
        if not trace.header.is_whole:
            raise ConfigurationError(
                f"the beginning of the trace of {trace.header.recorded_by} was deleted, so the statistics of the whole "
                "run cannot be computed from it; see summary.json."
            )
    meter = Meter(len(shards), shards[0].header.ticks_per_s if shards else TICKS_PER_S, left)
    traces = [(trace, meter.at_shard(index)) for index, trace in enumerate(shards)]
    if coordinator is not None:
        traces.insert(0, (coordinator, meter.at_coordinator()))
    # At equal times, the coordinator's entries come first: a plan is published before the pushes that stop for its
    # barrier arrive.
    streams = [zip(trace.entries, repeat(recorder), strict=False) for trace, recorder in traces]
    merged = heapq.merge(*streams, key=lambda pair: pair[0].event.now_ticks)
    for number, (entry, recorder) in enumerate(merged):
        if number % LOOK_INTERVAL == 0 and hurried():
            return None
        recorder.record(entry)
    return meter


class Meter:
    """Computes the statistics of a run while the run is in progress.

    The entries of each shard must be recorded in order. Each plan of the coordinator must be recorded before shard 0
    ends the superstep of this plan. Apart from this, entries of different traces may be interleaved in any way.

    Args:
        shards: number of shards.
        ticks_per_s: number of ticks per second (see `paceline.sync.ticks`).
        left: the workers that left before their scripts had ended, once for each time. A shard counts these workers as
            finished, but they are not idle afterwards. Another worker with the same index may join and finish later.
        state: the state of another meter, from which this meter goes on. Default: the state of a new meter.

    Attributes:
        state: what has been recorded. It can be encoded as MessagePack.
        staleness: staleness in updates -> number of pushes with this staleness, counted separately at each shard.
    """

    def __init__(
        self,
        shards: int,
        ticks_per_s: int = TICKS_PER_S,
        left: Collection[int] = (),
        state: MeterState | None = None,
    ) -> None:
        self.state = state or MeterState(
            waiting=_Waiting(shards), plans=_Plans(ticks_per_s), shards=[_ShardMeter() for _ in range(shards)]
        )
        self.staleness = self.state.staleness
        self._ticks_per_s = ticks_per_s
        self._left = left
        self._waiting, self._plans, self._shards = self.state.waiting, self.state.plans, self.state.shards
        for shard in self._shards:
            shard.join(self._waiting, self.staleness)
        self._shards[0].plans = self._plans

    def at_shard(self, index: int) -> EntryRecorder:
        """Return the recorder that processes the entries of one shard's trace."""
        return self._shards[index]

    def at_coordinator(self) -> EntryRecorder:
        """Return the recorder that processes the entries of the coordinator's trace."""
        return self._plans

    def presences(self, until_ticks: int | None = None) -> dict[int, WorkerPresence]:
        """Return for each worker how long it took part in the run. See `measures` for `until_ticks`."""
        begun, left, end = self._span(until_ticks)
        present: dict[int, int] = defaultdict(int)
        idle: dict[int, int] = defaultdict(int)
        early = Counter(self._left)
        for member in self._shards[0].ordered:
            present[member.worker] += member.until(end) - member.joined
            early[member.worker] -= member.finished
            if member.finished and early[member.worker] < 0:
                idle[member.worker] += (left if member.again is None else member.again) - member.until(end)
        waiting = self._waiting.totals(self._shards, until_ticks)
        return {
            worker: WorkerPresence(time, waiting[worker], idle[worker], left - begun - time - idle[worker])
            for worker, time in present.items()
        }

    def measures(self, until_ticks: int | None = None) -> Measures:
        """Return the statistics of the entries recorded so far.

        Args:
            until_ticks: end of the measured time. There must be no events between the last entry and this time.
                Default: the time of the last entry of shard 0; for pulls that another shard has not answered, the time
                of the last entry of this shard.
        """
        first, ticks_per_s = self._shards[0], self._ticks_per_s
        presences = self.presences(until_ticks)
        begun, left, end = self._span(until_ticks)
        duration_s = (left - begun) / ticks_per_s
        present, waiting, idle, _ = map(sum, zip(*presences.values(), strict=True)) if presences else (0,) * 4
        iterations: dict[int, int] = defaultdict(int)
        left_s: dict[int, float] = {}
        last_push_s: dict[int, float] = {}
        for member in first.ordered:
            iterations[member.worker] += member.iterations
            left_s[member.worker] = (member.until(end) - begun) / ticks_per_s
            if member.pushed is not None:
                last_push_s[member.worker] = (member.pushed - begun) / ticks_per_s
        applied = sum(self.staleness.values())
        total_staleness = sum(updates * count for updates, count in self.staleness.items())
        pushes = self._pushes()
        in_progress = first.largest_update if first.current else 0
        own = ("updates", "gradients", "samples", "sampled_gradients", "barriers", "dropped_samples")
        return Measures(
            **{name: getattr(first, name) for name in (*own, "restarts", "clipped_alone", "clips")},
            **{f"{name}_per_s": getattr(first, name) / (duration_s or math.inf) for name in own[:3]},
            duration_s=duration_s,
            present_s=present / ticks_per_s,
            iterations=dict(iterations),
            waiting_s={worker: each.waiting / ticks_per_s for worker, each in presences.items()},
            awaited_s={worker: self._waiting.awaited.get(worker, 0) / ticks_per_s for worker in presences},
            waiting_share=waiting / present if present else 0.0,
            sync_cost_s=max(shard.sync_cost for shard in self._shards) / ticks_per_s,
            predicted_sync_cost_s=self._plans.predicted_s,
            idle_s={worker: each.idle / ticks_per_s for worker, each in presences.items()},
            idle_share=idle / (present + idle) if present else 0.0,
            left_s=left_s,
            last_push_s=last_push_s,
            worker_samples={worker: first.worker_samples.get(worker, 0) for worker in iterations},
            worker_gradients={w: count - first.without_gradient.get(w, 0) for w, count in iterations.items()},
            mean_staleness=total_staleness / applied if applied else 0.0,
            max_staleness=max(self.staleness, default=0),
            max_gap=max(shard.max_gap for shard in self._shards),
            delayed_pulls=sum(shard.delayed_pulls for shard in self._shards),
            dropped_pushes=sum(shard.dropped_pushes for shard in self._shards),
            pushes=pushes,
            unapplied=max(0, pushes.lost - in_progress - sum(member.lost for member in first.ordered)),
        )

    def _span(self, until_ticks: int | None) -> tuple[int, int, int]:
        """Return, in ticks, when the first worker joined, the last worker left, and the measured time ends."""
        first = self._shards[0]
        end = first.now if until_ticks is None else until_ticks
        begun = min((member.joined for member in first.ordered), default=0)
        return begun, max((member.until(end) for member in first.ordered), default=begun), end

    def _pushes(self) -> PushFates:
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
        return PushFates(**counts, refused=first.refused, lost=lost)


class _Membership(msgspec.Struct):
    """One period in which a worker takes part in the run, from joining to leaving. A lost worker may join again.

    All times are in ticks.
    """

    worker: int
    joined: int
    left: int | None = None
    again: int | None = None  # time at which a worker with the same index joined afterwards
    finished: bool = False  # True if the worker left because it had finished
    lost: bool = False
    iterations: int = 0
    iteration: int = -1  # iteration number of the worker's last push
    fate: str = ""  # category of this push in `PushFates`; "" while the shard holds the push
    asked: int = 0  # in states of earlier versions: arrival of the unanswered pull
    pulls: int | None = None  # in states of earlier versions: iteration number of the unanswered pull
    pushed: int | None = None  # time at which the worker's last push arrived
    superstep: int | None = None  # superstep for whose barrier the worker has stopped with its last push

    def until(self, end: int) -> int:
        """Return the time at which the worker left, or `end` if it has not left."""
        return end if self.left is None else self.left


class _Waiting(msgspec.Struct):
    """Adds up the waiting times of each worker. For each pull, only the longest waiting time at any shard counts."""

    shards: int
    # Worker -> total waiting time of the pulls that all shards have answered, in ticks.
    total: dict[int, int] = msgspec.field(default_factory=dict)
    # (worker, iteration) of a pull that only some shards have answered -> (number of these shards, longest wait).
    open: dict[tuple[int, int], tuple[int, int]] = msgspec.field(default_factory=dict)
    # Worker -> total time for which other workers have waited for this worker, in ticks.
    awaited: dict[int, int] = msgspec.field(default_factory=dict)
    # (worker, iteration) of a pull that only some shards have answered -> the worker that ended the longest wait.
    awaited_by: dict[tuple[int, int], int] = msgspec.field(default_factory=dict)

    def ended(self, wait: Wait) -> None:
        """Record that a wait at one of the shards has ended."""
        if self.shards == 1:
            self._add(wait.worker, wait.end - wait.begin, wait.awaited)
            return
        key = wait.worker, wait.iteration
        answered, longest = self.open.pop(key, (0, 0))
        awaited = self.awaited_by.pop(key, NOBODY) if self.awaited_by else NOBODY
        if wait.end - wait.begin > longest:
            longest, awaited = wait.end - wait.begin, wait.awaited
        if answered + 1 == self.shards:
            self._add(wait.worker, longest, awaited)
            return
        self.open[key] = answered + 1, longest
        if awaited != NOBODY:
            self.awaited_by[key] = awaited

    def forget(self, worker: int) -> None:
        """Add up the open pulls of a lost worker now: its index, and perhaps its iteration numbers, are used again."""
        for key in [key for key in self.open if key[0] == worker]:
            self._add(worker, self.open.pop(key)[1], self.awaited_by.pop(key, NOBODY))

    def totals(self, shards: Iterable[_ShardMeter], until_ticks: int | None) -> dict[int, int]:
        """Return the total waiting time of each worker in ticks; 0 for a worker that has not waited.

        Args:
            shards: the meters of all shards, with their unanswered pulls.
            until_ticks: the end of the measured time. None for the last entry of each shard, because shards on
                different machines have different clocks.
        """
        longest = {key: wait for key, (_, wait) in self.open.items()}
        for shard in shards:
            end = shard.now if until_ticks is None else until_ticks
            for worker, (iteration, asked) in shard.pulls.asked.items():
                longest[worker, iteration] = max(longest.get((worker, iteration), 0), end - asked)
        totals = defaultdict(int, self.total)
        for (worker, _), wait in longest.items():
            totals[worker] += wait
        return totals

    def _add(self, worker: int, wait: int, awaited: int) -> None:
        self.total[worker] = self.total.get(worker, 0) + wait
        if awaited != NOBODY:
            self.awaited[awaited] = self.awaited.get(awaited, 0) + wait


class _Plans(msgspec.Struct):
    """Adds up the waiting times that were predicted for the barriers.

    Attributes:
        predicted_s: sum of the predictions for the barriers that have ended; None if no plan was published.
    """

    ticks_per_s: int
    predicted_s: float | None = None
    # Superstep -> prediction for its barrier, for barriers that have not ended. If the sync model changes to another
    # model with plans, that model counts its supersteps from 0 again, so its plans replace plans whose barriers were
    # never reached. A barrier at which no worker waits never ends, so only the newest `MOST_PLANS` plans are kept.
    open: dict[int, float] = msgspec.field(default_factory=dict)

    def record(self, entry: Entry) -> None:
        """Process one entry of the coordinator's trace."""
        for action in entry.actions:
            if type(action) is PublishPlan:
                self.predicted_s = self.predicted_s or 0.0
                self.open.pop(action.plan.superstep, None)
                self.open[action.plan.superstep] = action.plan.wait_ticks / self.ticks_per_s
                if len(self.open) > MOST_PLANS:
                    del self.open[next(iter(self.open))]

    def ended(self, superstep: int) -> None:
        """Record that a worker that waited at the barrier of a superstep continues."""
        if self.predicted_s is not None:
            self.predicted_s += self.open.pop(superstep, 0.0)


class _ShardMeter(msgspec.Struct, dict=True):
    """Computes the statistics of one shard. It adds waiting times and staleness to those of the other shards."""

    now: int = 0  # time of the last entry in ticks
    earlier_updates: int = 0  # updates that the shard had made before this run, which has been resumed
    updates: int = 0
    gradients: int = 0
    max_gap: int = 0
    delayed_pulls: int = 0
    dropped_pushes: int = 0
    barriers: int = 0
    sync_cost: int = 0  # in ticks
    restarts: int = 0
    # push counts
    received: int = 0
    applied: int = 0
    averaged: int = 0
    refused: int = 0
    largest_update: int = 0  # largest number of pushes in one update
    samples: int = 0
    sampled_gradients: int = 0
    worker_samples: dict[int, int] = msgspec.field(default_factory=dict)
    # Worker -> number of its pushes that are edits (see `sync.events.Edit`) or were dropped.
    without_gradient: dict[int, int] = msgspec.field(default_factory=dict)
    dropped_samples: int = 0
    clipped_alone: int = 0
    clips: bool = False
    # (worker, iteration) of pushes that are neither applied nor dropped yet: of edits, of pushes with gradients that
    # their workers had clipped, and of all pushes whose number of samples is known.
    edits: set[tuple[int, int]] = msgspec.field(default_factory=set)
    clipped: set[tuple[int, int]] = msgspec.field(default_factory=set)
    pending: dict[tuple[int, int], int] = msgspec.field(default_factory=dict)
    # all memberships, in the order in which the workers joined
    ordered: list[_Membership] = msgspec.field(default_factory=list)
    pulls: Pulls = msgspec.field(default_factory=Pulls)

    def __post_init__(self) -> None:
        # The last membership of each worker, and the memberships that have not ended. Both follow from `ordered`.
        self._latest = {member.worker: member for member in self.ordered}
        self.current = {worker: member for worker, member in self._latest.items() if member.left is None}
        self.plans: _Plans | None = None  # set for shard 0 only
        for worker, member in self.current.items():
            if member.pulls is not None:
                self.pulls.asked[worker], member.pulls = (member.pulls, member.asked), None

    def join(self, waiting: _Waiting, staleness: dict[int, int]) -> None:
        """Set the objects to which the meters of all shards add."""
        self._waiting = waiting
        self._staleness = staleness

    @property
    def memberships(self) -> dict[tuple[int, int], _Membership]:
        """(worker, number of times that the worker had joined before) -> membership."""
        found: dict[tuple[int, int], _Membership] = {}
        times: dict[int, int] = defaultdict(int)
        for member in self.ordered:
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
        self.now = event.now_ticks
        if entry.gap > self.max_gap:
            self.max_gap = entry.gap
        if entry.version is not None:
            if not self.ordered:  # nobody has joined yet
                self.earlier_updates = entry.version
            self.updates = entry.version - self.earlier_updates
        # longest waiting time of a worker that continues because of this event, if it is another worker's event
        longest = -1
        if type(event) is PushReceived:
            self._receive(event)
        elif type(event) is PullRequested:
            self.pulls.asked[event.worker] = event.iteration, event.now_ticks
            self.delayed_pulls += 1  # decremented below if the pull is answered by this entry
        elif isinstance(event, OfShard):
            return
        else:
            self._change(event)
        for action in entry.actions:
            if type(action) is AnswerPull and kind is not PullRepeated:
                wait = self.pulls.answered(event, action)
                self._waiting.ended(wait)
                if wait.worker != event.worker:
                    longest = max(longest, wait.end - wait.begin)
                    superstep = self.current[wait.worker].superstep
                    if superstep is not None and self.plans is not None:
                        self.plans.ended(superstep)
                elif kind is PullRequested:
                    self.delayed_pulls -= 1
            elif type(action) is ApplyPush:
                self.applied += 1
                self._decide((action.worker, action.iteration), "applied")
            elif type(action) is ApplyMean:
                count = len(action.pushes)
                self.largest_update = max(self.largest_update, count)
                fate = "averaged" if count > 1 else "applied"
                setattr(self, fate, getattr(self, fate) + count)
                for push in action.pushes:
                    self._decide(push, fate)
            elif type(action) is DropPush:
                self.dropped_pushes += 1
                key = action.worker, action.iteration
                if key not in self.edits:
                    self.gradients -= 1
                    self.without_gradient[action.worker] = self.without_gradient.get(action.worker, 0) + 1
                dropped = self._decide(key, "dropped")
                self.samples -= dropped
                self.sampled_gradients -= dropped > 0
                self.worker_samples[action.worker] = self.worker_samples.get(action.worker, 0) - dropped
                self.dropped_samples += dropped
        if longest >= 0:
            self.barriers += 1
            self.sync_cost += longest
        for _, _, updates in entry.staleness:
            self._staleness[updates] = self._staleness.get(updates, 0) + 1

    def _receive(self, push: PushReceived) -> None:
        member = self.current[push.worker]
        member.iterations += 1
        member.iteration, member.fate = push.iteration, ""
        member.pushed = self.now
        member.superstep = None if push.stop is None else push.stop.superstep
        self.received += 1
        self.gradients += push.edit is None  # decremented in `record` if the push is dropped
        if push.edit is not None:
            self.edits.add((push.worker, push.iteration))
            self.without_gradient[push.worker] = self.without_gradient.get(push.worker, 0) + 1
        self.clips = self.clips or push.clip is not None
        if push.clipped:
            self.clipped.add((push.worker, push.iteration))
        if counted := push.counted:
            self.samples += counted
            self.sampled_gradients += 1
            self.worker_samples[push.worker] = self.worker_samples.get(push.worker, 0) + counted
            self.pending[push.worker, push.iteration] = counted

    def _change(self, event: AnyEvent) -> None:
        """Process a restart, or the arrival or departure of a worker."""
        kind = type(event)
        if kind is PullRepeated:
            self.restarts += event.restart  # type: ignore[union-attr]
        elif kind is WorkerJoined:
            if (before := self._latest.get(event.worker)) is not None:
                before.again = self.now
                self._waiting.forget(event.worker)
            member = self.current[event.worker] = self._latest[event.worker] = _Membership(
                event.worker, self.now
            )
            self.ordered.append(member)
        elif kind is WorkerLost or kind is WorkerFinished:
            for wait in self.pulls.left(event.worker, self.now):
                self._waiting.ended(wait)
            member = self.current.pop(event.worker)
            member.left = self.now
            member.finished, member.lost = kind is WorkerFinished, kind is WorkerLost

    def _decide(self, push: tuple[int, int], fate: str) -> int:
        """Record what became of a push, and return its number of samples; 0 if this number is unknown.

        Only the fate of the last push of each membership matters.
        """
        worker, iteration = push
        if push in self.clipped:
            self.clipped.remove(push)
            self.clipped_alone += fate == "averaged"
        self.edits.discard(push)
        member = self._latest.get(worker)
        if member is not None and member.iteration == iteration:
            member.fate = fate
        return self.pending.pop(push, 0) if self.pending else 0


class MeterState(msgspec.Struct):
    """The data that a `Meter` has recorded. Their size does not depend on the number of entries."""

    waiting: _Waiting
    plans: _Plans
    shards: list[_ShardMeter]
    staleness: dict[int, int] = msgspec.field(default_factory=dict)


# -- Says whether a run has applied the pushes of its workers. A fast run that applies nothing trains nothing
#
# A sync model may decide to drop pushes. But each push that a model holds must be applied later. Pushes can be lost
# without the model's fault if a worker is lost while it pushes, or if the run ends early, during a round.
#
# A model that drops many pushes may also make fewer updates than bsp from as many samples. Then an epoch moves the
# weights less far. The training loss does not show this, because it falls as usual, only more slowly.

MOST_SHARE = 0.01  # a larger share of pushes that were never applied is reported

LEAST_DROPPED = 0.25  # a smaller share of dropped samples is not reported
MOST_UPDATES = 0.75  # dropped samples are not reported if the run has more than this share of bsp's updates


def unapplied_pushes(pushes: PushFates, unapplied: int) -> str:
    """Return a sentence about pushes that were never applied; "" if the run has applied enough pushes.

    Where the results of a run are shown, this sentence comes first. The run's sync model is then never recommended.

    Args:
        pushes: what became of the pushes.
        unapplied: number of pushes that should have been applied; see `Measures.unapplied`.
    """
    received = pushes.applied + pushes.averaged + pushes.dropped + pushes.lost
    hint = " If the model is your own, test it with paceline.testing.check." if pushes.lost else ""
    if received and pushes.dropped + pushes.lost == received:
        return (
            f"Nothing was trained: none of the {received} pushes was applied. The sync model held {pushes.lost} of "
            f"them until the end, and {pushes.dropped} were dropped or had no usable gradient.{hint}"
        )
    if unapplied > MOST_SHARE * received:
        return (
            f"{pushes.lost} of {received} pushes ({pushes.lost / received:.0%}) were never applied: the sync model "
            f"held them until the end.{hint}"
        )
    return ""


def missing_updates(measures: Measures) -> str:
    """Return a sentence about updates that are missing because gradients were dropped; "" if few are missing.

    If the numbers of samples are unknown, the result is "". An update of bsp contains one gradient of each worker.
    Every worker that has ever taken part counts here, so that no updates seem to be missing only because workers come
    and go.

    Args:
        measures: the statistics of the run.
    """
    samples = measures.samples + measures.dropped_samples
    if not measures.samples or measures.dropped_samples < LEAST_DROPPED * samples:
        return ""
    # Empty pushes have no samples, so they do not count as gradients. A dropped gradient is assumed to have the mean
    # number of samples.
    gradients = measures.sampled_gradients * samples / measures.samples
    usual = gradients / len(measures.iterations)
    # A model that averages one push of each worker would make one more update at the end of the incomplete last
    # round.
    if measures.updates + 1 > MOST_UPDATES * usual:
        return ""
    return (
        f"{measures.dropped_samples / samples:.0%} of the samples were in gradients that were dropped, because they "
        f"were late or not usable. So the run has made {measures.updates} updates, while bsp makes about {usual:.0f} "
        f"with as many samples: an epoch has moved the weights about {measures.updates / usual:.1f} times as far, "
        "and training may not be finished. Train for more epochs, or use a sync model that applies every gradient."
    )

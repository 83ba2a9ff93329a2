"""Collects what each worker of a run did over time, and which workers it waited for, in bounded memory.

An `Activity` is fed with the entries of the shards' traces and with the records of the workers' iterations. An
iteration has these parts:

    outside     before the script asked for a batch
    loading     until it had the batch
    transfer    requests for data
    wasted      until the computation was restarted, if it was aborted
    computing   until the push began. The sleep that emulates a slower machine counts as computing
    transfer    until the push had arrived at all shards
    waiting     until all shards had answered the pull
    transfer    until the new weights had arrived at the worker

The worker measures when its iteration begins, restarts, pushes and ends. It also measures how long it was outside of
training and how long it loaded (see `core.metrics`). Only the totals of these times are known, so these parts are
shown at the beginning of the iteration. The shards measure when pushes and pulls arrive, and when pulls are answered.
If the machine of a worker has joined the run, the worker's records stay on that machine. Without records, an iteration
begins when all shards have answered the previous pull, and everything until the push has arrived counts as computing.

A pull has waited for the worker whose event led to its answer. If a pull waits at several shards, only the longest
wait counts.

All times are in seconds since the run began, on the coordinator's clock (see `clocks`). The entries and records may
be interleaved in any way, but should be fed approximately in the order of their times. An iteration is kept until
everything about it is known, or until too many iterations of its worker are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from ..core.requests import Entry, EntryRecorder
from ..sync.actions import ApplyMean
from ..sync.events import (
    OfShard,
    PullRequested,
    PushReceived,
    RateTempered,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from ..sync.ticks import TICKS_PER_S
from .activity_cells import KINDS, Boundary, Cells, Era, decoded, encoded
from .clocks import Converter, MachineClock
from .measures import NOBODY, Pulls, Reason, Wait
from .recording import IterationRecord

COMPUTING, TRANSFER, WAITING, WASTED, PAUSED, OUTSIDE, IDLE, LOADING = range(len(KINDS))

APART = (OUTSIDE, LOADING, TRANSFER)  # the parts of `IterationRecord.apart_s`

SPAN_UNITS_PER_S = 10_000
MOST_SPANS = 50_000  # number of iterations, over all workers, whose times are kept exactly
MOST_BARRIERS = 10_000
MOST_PROGRESS = 2_000
MOST_HAPPENINGS = 2_000
MOST_ERAS = 200
MOST_OPEN = 1_000  # number of iterations of one worker that may await an answer of a shard, or a record


class _Span(msgspec.Struct, frozen=True, array_like=True):
    """One iteration. All numbers but the worker indices are in units of 0.1 ms.

    Attributes:
        worker: the worker.
        begun: when the iteration began, after the time outside of training, loading and requests for data.
        lengths: wasted, computing, transfer to the shards, waiting, transfer back.
        awaited: the worker that was awaited; -1 for none.
    """

    worker: int
    begun: int
    lengths: tuple[int, int, int, int, int]
    awaited: int


class Happening(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened once at shard 0.

    Attributes:
        time_s: when.
        kind: a worker joined a run in progress, finished (or left) or was lost; the model changed to `text`; or the
            guard multiplied the learning rate by the factor `text`.
        worker: the worker, or -1.
        text: see above.
    """

    time_s: float
    kind: Literal["joined", "finished", "lost", "model", "rate"]
    worker: int = NOBODY
    text: str = ""


class Exchange(msgspec.Struct):
    """Data about one iteration's exchange with the shards: its push to all shards, and the pull after the push."""

    pushed: int = 0  # number of shards at which the push has arrived
    answered: int = 0  # number of shards that have answered the pull
    arrived_s: float = -1.0  # time of the last arrival so far
    released_s: float = -1.0  # time of the last answer so far
    longest_s: float = 0.0  # longest wait at a shard so far
    reason: Reason = "push"  # why the pull had this longest wait
    awaited: int = NOBODY
    era: int = 0
    empty: bool = False
    # Times of the iteration in the worker's record: begin, restart, push and end. If the computation was not restarted,
    # the time of the restart is that of the begin.
    record: tuple[float, float, float, float] | None = None
    # Seconds that were spent outside of training, on loading, and on exchanges before the push, as recorded.
    apart_s: tuple[float, float, float] = (0.0, 0.0, 0.0)


class WorkerActivity(msgspec.Struct):
    """The activity of one worker, summed over all incarnations of its index.

    Attributes:
        times_s: seconds for each of the `KINDS`.
        iterations: number of pushes at shard 0.
        samples: number of samples in these pushes; 0 if unknown.
        computations: number of pushes with a gradient.
        awaited_s: seconds for which other workers have waited for this worker, summed over the other workers.
        fate: "finished" or "lost", or "" while the worker is live.
        first_joined_s: when the worker joined for the first time; -1 if it has not joined.
        joined_s: when the worker joined for the last time.
        left_s: when the worker left for the last time.
        last_push_s: when the worker's last push arrived.
        asked_s: when the worker's last pull arrived at shard 0, if this pull was unanswered when the worker left;
            else -1.
        since_s: time until which it is known what the worker did; -1 before its first answer.
        open: iteration -> its exchange, for the iterations about which something is unknown.
    """

    times_s: list[float] = msgspec.field(default_factory=lambda: [0.0] * len(KINDS))
    iterations: int = 0
    samples: int = 0
    computations: int = 0
    awaited_s: float = 0.0
    fate: str = ""
    first_joined_s: float = -1.0
    joined_s: float = 0.0
    left_s: float = -1.0
    last_push_s: float = -1.0
    asked_s: float = -1.0
    since_s: float = -1.0
    open: dict[int, Exchange] = {}


class _ShardState(msgspec.Struct):
    """Data about one shard."""

    now_s: float = 0.0
    version: int = 0
    begun: bool = True  # False before the first entry; states of earlier versions do not contain this value
    boundary: Boundary = msgspec.field(default_factory=Boundary)
    pulls: Pulls = msgspec.field(default_factory=Pulls)
    machine: int = 0  # the machine with the clock of the times in `pulls`
    # In states of earlier versions, in place of `pulls`: worker -> arrival in seconds.
    asked: dict[int, float] = {}


class _State(msgspec.Struct):
    """The whole state of an `Activity`, from which it can be restored."""

    shards: list[_ShardState]
    ticks_per_s: int
    cells: Cells = msgspec.field(default_factory=Cells)
    workers: dict[int, WorkerActivity] = {}
    eras: dict[int, Era] = {}  # number of a change -> the era after it
    recorded: set[int] = set()
    spans: list[_Span] = []
    exact_from_s: float = 0.0
    barriers_s: list[float] = []
    progress: list[tuple[float, int, int]] = []
    progress_gap_s: float = 0.0
    samples: int = 0
    happenings: list[Happening] = []
    bound_s: float = 0.0
    kinds: int = 7  # number of kinds of time; states of earlier versions do not contain this number


class Activity:
    """The activity of each worker over time. See the description of this module.

    Args:
        shards: number of shards.
        sync: the first sync model, in the notation of the command line.
        clocks: machine -> its clock. Default: only the coordinator's clock. The times of a machine with an unknown
            clock are used as they are.
        ticks_per_s: number of ticks per second (see `paceline.sync.ticks`).

    Attributes:
        cells: what each worker did, in buckets.
        workers: worker -> its times and counts.
        spans: the newest iterations of all workers (see `MOST_SPANS`), in the order in which they became known.
        exact_from_s: from this time on, `spans` is complete.
        barriers_s: the newest times at which shard 0 has applied held pushes together (see `MOST_BARRIERS`).
        progress: (time in seconds, samples, updates of shard 0), at most 2,000 points.
        happenings: the newest single events (see `MOST_HAPPENINGS`), for example that a worker was lost.
        converter: converts the times of other machines; its attribute `clocks` may be replaced by newer clocks.
    """

    def __init__(
        self,
        shards: int,
        sync: str = "",
        clocks: Mapping[int, MachineClock] | None = None,
        ticks_per_s: int = TICKS_PER_S,
    ) -> None:
        eras = {0: Era(sync, 0.0, 0)}
        state = _State(
            [_ShardState(begun=False) for _ in range(shards)], ticks_per_s, eras=eras, kinds=len(KINDS)
        )
        self._begin(state, clocks)

    @classmethod
    def restored(cls, state: bytes, clocks: Mapping[int, MachineClock] | None = None) -> Activity:
        """Return an activity that continues another one, from the bytes that the method `state` has returned.

        Raises:
            msgspec.DecodeError: the bytes are not the state of an activity.
        """
        activity = cls.__new__(cls)
        found = msgspec.msgpack.decode(state, type=_State, dec_hook=decoded)
        if (missing := len(KINDS) - found.kinds) > 0:
            for row in found.cells.rows.values():
                row.add_kinds(missing)
            for own in found.workers.values():
                own.times_s += [0.0] * missing
            found.kinds = len(KINDS)
        activity._begin(found, clocks)
        return activity

    def state(self) -> bytes:
        """Return the whole state, for `restored`."""
        self._state.bound_s = self.converter.bound_s
        parts = {"spans": list(self.spans), "barriers_s": list(self.barriers_s)}
        parts |= {"happenings": list(self.happenings)}
        return msgspec.msgpack.encode(msgspec.structs.replace(self._state, **parts), enc_hook=encoded)

    def _begin(self, state: _State, clocks: Mapping[int, MachineClock] | None) -> None:
        self._state = state
        self.converter = Converter(clocks or {}, strict=False, ticks_per_s=state.ticks_per_s)
        self.converter.bound_s = state.bound_s
        self.cells = state.cells
        self.workers = state.workers
        self.spans = deque(state.spans, MOST_SPANS)
        self.barriers_s = deque(state.barriers_s, MOST_BARRIERS)
        self.happenings = deque(state.happenings, MOST_HAPPENINGS)

    # -- what is known so far -----------------------------------------------------------------------------

    @property
    def eras(self) -> list[Era]:
        """The eras in order, each with the sync model that was in force."""
        return list(self._state.eras.values())

    @property
    def progress(self) -> list[tuple[float, int, int]]:
        """(time in seconds, samples, updates of shard 0) of all workers together."""
        first = self._state.shards[0]
        return [*self._state.progress, (first.now_s, self._state.samples, first.version)]

    @property
    def exact_from_s(self) -> float:
        """From this time on, `spans` is complete."""
        return self._state.exact_from_s

    @property
    def now_s(self) -> float:
        """Time of the last entry of any shard."""
        return max((shard.now_s for shard in self._state.shards), default=0.0)

    @property
    def updates(self) -> int:
        """Number of updates of shard 0."""
        return self._state.shards[0].version

    @property
    def recorded(self) -> Collection[int]:
        """The workers whose records are, or will be, known."""
        return self._state.recorded

    def closed(self, now_s: float | None = None, left: Collection[int] = ()) -> Activity:
        """Return a copy that ends now: the current activities of the workers are counted until now.

        Args:
            now_s: the current time. Default: the time of the last entry.
            left: workers that left before their scripts had ended. After they have left, they do not count as idle.
        """
        end_s = self.now_s if now_s is None else now_s
        copy = Activity.restored(self.state(), self.converter.clocks)
        copy.converter.unknown = set(self.converter.unknown)
        first = self._state.shards[0]
        for worker, own in copy.workers.items():
            copy._finish_all(worker, own)
            if not own.fate:
                asked = first.pulls.asked.get(worker)
                asked_s = -1.0 if asked is None else copy._at_s(first.machine, asked[1])
                copy._add_rest(worker, own, COMPUTING, asked_s, end_s)
        departed = [own.left_s for own in copy.workers.values() if own.fate]
        last_s = max(departed, default=0.0) if len(departed) == len(copy.workers) else end_s
        for worker, own in copy.workers.items():
            copy._add_rest_of_departed(worker, own, last_s if worker not in left else own.left_s)
        return copy

    # -- input: the entries of traces, and records --------------------------------------------------------

    def at_shard(self, index: int, machine: int = 0) -> EntryRecorder:
        """Return the recorder that processes the entries of one shard's trace.

        Args:
            index: index of the shard.
            machine: the machine whose clock the times are on.
        """
        state = self._state.shards[index]
        state.machine = machine
        for worker, at_s in state.asked.items():
            added_s = self.converter.added_s(at_s, machine) if machine else 0.0
            state.pulls.asked[worker] = -1, round((at_s - added_s) * self._state.ticks_per_s)
        state.asked = {}
        return _AtShard(self, index)

    def expect_records(self, worker: int) -> None:
        """Let each iteration of this worker wait for its record. By default, iterations end without a record."""
        self._state.recorded.add(worker)

    def record(self, worker: int, record: IterationRecord) -> None:
        """Process the record of an iteration."""
        begun_s, restarted_s, pushed_s, answered_s = (
            record.begun_s,
            record.begun_s if record.restarted_s is None else record.restarted_s,
            record.pushed_s,
            record.answered_s,
        )
        if record.machine:
            added_s = self.converter.added_s(begun_s, record.machine)
            begun_s, restarted_s, pushed_s, answered_s = (
                max(0.0, at_s + added_s) for at_s in (begun_s, restarted_s, pushed_s, answered_s)
            )
        own = self._worker(worker)
        exchange = own.open.get(record.iteration) or self._opened(worker, own, record.iteration)
        exchange.record = begun_s, restarted_s, pushed_s, answered_s
        exchange.apart_s = record.apart_s
        if exchange.answered >= len(self._state.shards) or own.fate:
            self._finish(worker, own, record.iteration)

    def _worker(self, worker: int) -> WorkerActivity:
        own = self.workers.get(worker)
        if own is None:
            own = self.workers[worker] = WorkerActivity()
            self.cells.row(worker)
        return own

    def _opened(self, worker: int, own: WorkerActivity, iteration: int) -> Exchange:
        """Begin the exchange of an iteration."""
        if len(own.open) >= MOST_OPEN:
            self._finish(worker, own, next(iter(own.open)))
        exchange = own.open[iteration] = Exchange()
        return exchange

    def _at_s(self, machine: int, ticks: int) -> float:
        """Convert a time on a machine's clock to seconds on the coordinator's clock."""
        at_s = ticks / self._state.ticks_per_s
        return max(0.0, at_s + self.converter.added_s(at_s, machine)) if machine else at_s

    def _answered(self, wait: Wait, wait_s: float, at_s: float, era: int) -> None:
        """Process the answer of one shard. The times are on the coordinator's clock."""
        worker, iteration = wait.worker, wait.iteration
        own = self._worker(worker)
        exchange = own.open.get(iteration) or self._opened(worker, own, iteration)
        exchange.answered += 1
        if at_s > exchange.released_s:
            exchange.released_s = at_s
        if wait_s > exchange.longest_s:
            exchange.longest_s, exchange.reason = wait_s, wait.reason
            exchange.awaited, exchange.era = wait.awaited, era
        if exchange.answered < len(self._state.shards):
            return
        if exchange.longest_s > 0.0:
            self._era(exchange.era).waited(exchange.reason, exchange.awaited, exchange.longest_s)
            if exchange.awaited != NOBODY:
                self._worker(exchange.awaited).awaited_s += exchange.longest_s
        if exchange.record is not None or not exchange.pushed or worker not in self._state.recorded:
            self._finish(worker, own, iteration)

    def _finish(self, worker: int, own: WorkerActivity, iteration: int) -> None:
        """Add what is known about an iteration, and forget its exchange."""
        exchange = own.open.pop(iteration)
        if exchange.record is not None:
            begun_s, restarted_s, pushed_s, answered_s = exchange.record
            if 0.0 <= own.since_s < begun_s:
                self._spend(worker, own, OUTSIDE, own.since_s, begun_s)
            for kind, length_s in zip(APART, exchange.apart_s, strict=True):
                ended_s = min(begun_s + length_s, pushed_s)
                self._spend(worker, own, kind, begun_s, ended_s)
                begun_s = max(begun_s, ended_s)
            restarted_s = max(restarted_s, begun_s)
            # The shards may be on other machines, whose clocks are known only up to an error.
            released_s = min(max(exchange.released_s, pushed_s), answered_s)
            arrived_s = min(max(exchange.arrived_s, pushed_s), released_s)
        elif exchange.pushed:
            begun_s = restarted_s = own.since_s if own.since_s >= 0.0 else own.joined_s
            pushed_s = arrived_s = max(begun_s, exchange.arrived_s)
            released_s = answered_s = max(arrived_s, exchange.released_s)
        else:  # a worker that has joined pulls without a push
            if exchange.longest_s > 0.0:
                self._spend(
                    worker, own, WAITING, exchange.released_s - exchange.longest_s, exchange.released_s
                )
            own.since_s = max(own.since_s, exchange.released_s)
            return
        own.since_s = max(own.since_s, answered_s)
        computing = OUTSIDE if exchange.empty else COMPUTING
        if restarted_s > begun_s:
            self._spend(worker, own, WASTED, begun_s, restarted_s)
        self._spend(worker, own, computing, restarted_s, pushed_s)
        self._spend(worker, own, TRANSFER, pushed_s, arrived_s)
        self._spend(worker, own, TRANSFER, released_s, answered_s)
        if released_s > arrived_s:
            self._spend(worker, own, WAITING, arrived_s, released_s)
            self.cells.await_worker(worker, exchange.awaited, arrived_s, released_s)
        if len(self.spans) == MOST_SPANS:
            first = self.spans[0]
            ended_s = (first.begun + sum(first.lengths)) / SPAN_UNITS_PER_S
            self._state.exact_from_s = max(self._state.exact_from_s, ended_s)
        times = (begun_s, restarted_s, pushed_s, arrived_s, released_s, answered_s)
        begun, restarted, pushed, arrived, released, answered = (
            round(at_s * SPAN_UNITS_PER_S) for at_s in times
        )
        lengths = (
            restarted - begun,
            pushed - restarted,
            arrived - pushed,
            released - arrived,
            answered - released,
        )
        self.spans.append(_Span(worker, begun, lengths, exchange.awaited))

    def _spend(self, worker: int, own: WorkerActivity, kind: int, start_s: float, stop_s: float) -> None:
        if stop_s > start_s:
            own.times_s[kind] += stop_s - start_s
            self.cells.add(worker, kind, start_s, stop_s)

    def _finish_all(self, worker: int, own: WorkerActivity) -> None:
        for iteration in list(own.open):
            self._finish(worker, own, iteration)

    def _add_rest(self, worker: int, own: WorkerActivity, kind: int, asked_s: float, end_s: float) -> None:
        """Add what a worker did after its last iteration. Its unanswered pull arrived at `asked_s`, if that is >= 0."""
        computed_s = end_s if asked_s < 0.0 else min(max(asked_s, own.since_s), end_s)
        if own.since_s >= 0.0:
            self._spend(worker, own, kind, own.since_s, computed_s)
        self._spend(worker, own, WAITING, computed_s, end_s)

    def _add_rest_of_departed(self, worker: int, own: WorkerActivity, until_s: float) -> None:
        """For a worker that has left, add the time from its last iteration until its index is used again."""
        if own.fate:
            self._add_rest(worker, own, WASTED if own.fate == "lost" else OUTSIDE, own.asked_s, own.left_s)
        if own.fate == "finished":
            self._spend(worker, own, IDLE, own.left_s, until_s)

    def _era(self, number: int) -> Era:
        """Return the era after a change, or the last known era if shard 0 has not completed this change yet."""
        eras = self._state.eras
        return eras[number] if number in eras else next(reversed(eras.values()))

    # -- membership and changes, as shard 0 sees them -----------------------------------------------------

    def _joined(self, worker: int, at_s: float, event: WorkerJoined) -> None:
        own = self._worker(worker)
        self._finish_all(worker, own)
        self._add_rest_of_departed(worker, own, at_s)
        own.fate, own.joined_s, own.since_s = "", at_s, -1.0
        if own.first_joined_s < 0.0:
            own.first_joined_s = at_s
        if event.pulls:
            self.happenings.append(Happening(at_s, "joined", worker))
        else:
            own.since_s = at_s

    def _left(
        self, worker: int, at_s: float, fate: Literal["finished", "lost"], asked_s: float | None
    ) -> None:
        own = self._worker(worker)
        own.fate, own.left_s, own.asked_s = fate, at_s, -1.0 if asked_s is None else asked_s
        self.happenings.append(Happening(at_s, fate, worker))

    def _changed(self, number: int, sync: str, at_s: float, updates: int) -> None:
        """Begin the next era."""
        eras = self._state.eras
        if len(eras) < MOST_ERAS:
            eras[number] = Era(sync, at_s, updates)
        else:
            next(reversed(eras.values())).sync = "several models"
        self.happenings.append(Happening(at_s, "model", NOBODY, sync))

    def _advance(self, at_s: float, updates: int) -> None:
        """Record the progress of the run."""
        state = self._state
        progress = state.progress
        if progress and at_s - progress[-1][0] < state.progress_gap_s:
            return
        progress.append((at_s, state.samples, updates))
        if len(progress) >= MOST_PROGRESS:
            state.progress_gap_s = 2 * (progress[-1][0] - progress[0][0]) / MOST_PROGRESS
            del progress[1::2]


class _AtShard:
    """Processes the entries of the trace of one shard."""

    def __init__(self, activity: Activity, index: int) -> None:
        self._activity = activity
        self._first = index == 0
        self._state = activity._state.shards[index]

    def record(self, entry: Entry) -> None:
        """Process one entry."""
        if entry.refused is not None:
            return
        activity, state, event = self._activity, self._state, entry.event
        kind = type(event)
        state.now_s = at_s = activity._at_s(state.machine, event.now_ticks)
        if entry.version is not None:
            if self._first and not state.begun:
                activity._state.eras[0].from_updates = entry.version  # not 0 in a resumed run
            state.begun, state.version = True, entry.version
        if isinstance(event, OfShard):
            if self._first and isinstance(event, RateTempered):
                activity.happenings.append(Happening(at_s, "rate", text=f"{event.factor:g}"))
            return
        if isinstance(event, PushReceived):
            self._receive(event, at_s)
        elif isinstance(event, WorkerJoined) and self._first:
            activity._joined(event.worker, at_s, event)
        waits = state.pulls.ended(entry)
        if isinstance(event, WorkerLost | WorkerFinished) and self._first:
            asked_s = next((self._at_s(wait.begin) for wait in waits if wait.reason == "left"), None)
            activity._left(
                event.worker, at_s, "lost" if isinstance(event, WorkerLost) else "finished", asked_s
            )
        for wait in waits:
            if wait.reason != "left":
                activity._answered(wait, at_s - self._at_s(wait.begin), at_s, state.boundary.changed)
        if self._first:
            activity.barriers_s.extend(at_s for action in entry.actions if type(action) is ApplyMean)
        if entry.staleness:
            staleness = activity._era(state.boundary.changed).staleness
            for _, _, updates in entry.staleness:
                staleness[updates] = staleness.get(updates, 0) + 1
            if self._first:
                activity._advance(at_s, state.version)
        if (
            kind is not PullRequested
            and kind is not TimerFired
            and state.boundary.note(event)
            and self._first
        ):
            activity._changed(state.boundary.changed, state.boundary.sync, at_s, state.version)

    def _at_s(self, ticks: int) -> float:
        return self._activity._at_s(self._state.machine, ticks)

    def _receive(self, push: PushReceived, at_s: float) -> None:
        activity = self._activity
        own = activity._worker(push.worker)
        exchange = own.open.get(push.iteration) or activity._opened(push.worker, own, push.iteration)
        exchange.pushed += 1
        if at_s > exchange.arrived_s:
            exchange.arrived_s = at_s
        if self._first:
            exchange.empty = push.empty
            own.iterations += 1
            own.computations += not push.empty
            own.last_push_s = at_s
            own.samples += push.counted
            activity._state.samples += push.counted

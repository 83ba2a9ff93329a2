"""What the workers of a run spend their time on, as far as they know it themselves.

    Stopwatch     in a worker: measures the time of each activity
    TimeSpent     what a stopwatch shows; the worker reports it in a `Status` and in its `WorkerFinished`
    TimeLedger    at the coordinator: keeps the last report of each worker, and adds up the reports

These definitions hold everywhere: in the report, in `time_use`, for balanced batches, for `auto` and `advise`, and
for what models predict from intervals:

    loading      inside `next()` and `iter()` of a loader that the script distributes
    computing    from there until `step()` pushes
    outside      from the end of `step()` until the script asks for the next batch, wherever this is: evaluating,
                 saving, logging, at the end of an epoch or in the middle. So is the time inside `evaluating`,
                 `barrier` and `reduce`, at any place

Three cases need more than the calls in their order. A step that is not preceded by a batch of its own, as the second
step of two optimizers, or as any step of a script that distributes no loader, ends a computation that has begun with
the end of the step before. A pass over a distributed loader in which no gradient is accumulated, such as the loader
of an evaluation, is outside as a whole. And requests for data are exchanges, even inside `next()`.

A worker cannot tell how much of an exchange of pushes and pulls it waited for other workers: only the shards know
that. So an exchange is not reported at all; `trace.time_use` determines from the traces which part of it was waiting.

A worker that is lost makes no last report. Its *tail* is the time from its last report until its loss. In this time,
it was still in the activity of the last report, unless that was an exchange. A live worker reports at least ten times
per second while it iterates, so a tail is either short or spent on a single activity.

All times are in ticks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...state import stateful
from ..protocol.messages import Activity, TimeSpent

__all__ = ["STATES", "Lap", "PassMark", "Stopwatch", "TimeLedger", "WorkerTime"]

STATES = ("computing", "loading", "wasted", "paused", "outside")
"""The states whose times the workers know."""

STATE_OF: Mapping[Activity, str] = {
    "computing": "computing",
    "loading": "loading",
    "restarting": "wasted",
    "paused": "paused",
    "outside": "outside",
    "between": "outside",
}
"""The state to which the time of an activity belongs. Exchanges are missing."""


class Lap(NamedTuple):
    """What a worker has done in one iteration, from the arrival of its weights until its push.

    Attributes:
        loading: time in which the script asked for batches.
        computing: time of the computation that is pushed.
        outside: time in which the script did not train.
    """

    loading: int = 0
    computing: int = 0
    outside: int = 0

    @property
    def busy(self) -> int:
        """The time that the worker has needed for the push itself."""
        return self.loading + self.computing


class PassMark(NamedTuple):
    """What a stopwatch shows when a pass over a loader begins. See `Stopwatch.end_pass`."""

    trained: int
    loading: int
    computing: int


class Stopwatch:
    """Measures the time that one worker spends on each activity. It begins with an exchange.

    Args:
        now_ticks: the current time.

    Example:
        >>> watch = Stopwatch(now_ticks=0)
        >>> watch.begin_iteration("computing", now_ticks=10)
        >>> watch.drop(now_ticks=40)
        >>> watch.enter("computing", now_ticks=42)
        'restarting'
        >>> watch.push(now_ticks=142)
        Lap(loading=0, computing=100, outside=0)
        >>> watch.begin_iteration("between", now_ticks=150)
        >>> watch.ask(now_ticks=157)  # the script has evaluated the model
        >>> watch.draw(now_ticks=158)
        >>> watch.push(now_ticks=160)
        Lap(loading=1, computing=2, outside=7)
        >>> spent = watch.read(now_ticks=160)
        >>> spent.computing, spent.loading, spent.wasted, spent.outside
        (102, 1, 32, 7)
    """

    __slots__ = (
        "_activity",
        "_base",
        "_between",
        "_pushes",
        "_since_ticks",
        "_spent",
        "_unfinished",
        "loads",
    )

    def __init__(self, now_ticks: int) -> None:
        self.loads = False  # True once the script has asked a distributed loader for a batch
        self._activity: Activity = "exchanging"
        self._since_ticks = now_ticks
        self._spent = dict.fromkeys(STATES, 0)
        self._unfinished = 0  # of the computation that has been neither pushed nor aborted yet
        self._between = 0  # time since the last step that is computing or outside, depending on what follows
        self._base = (0, 0)  # the times of loading and outside when the iteration began
        self._pushes = 0

    @property
    def after_step(self) -> Activity:
        """What the script does after a step, as far as this is known then."""
        return "between" if self.loads else "computing"

    def enter(self, activity: Activity, now_ticks: int) -> Activity:
        """Begin an activity, and return the previous one."""
        previous, self._activity = self._activity, activity
        length, self._since_ticks = now_ticks - self._since_ticks, now_ticks
        if previous == "computing":
            self._unfinished += length
        elif previous == "between":
            self._between += length
        elif previous != "exchanging":
            self._spent[STATE_OF[previous]] += length
        return previous

    def ask(self, now_ticks: int) -> None:
        """Begin to load a batch: what the script has done since its last step was outside of training."""
        self.loads = True
        self.enter("loading", now_ticks)
        self._spent["outside"] += self._between
        self._between = 0

    def draw(self, now_ticks: int) -> None:
        """Begin to compute, because a loader has returned a batch."""
        self.enter("computing", now_ticks)

    def begin_pass(self, trained: int, now_ticks: int) -> PassMark:
        """Begin a pass over a loader, and to load its first batch.

        Args:
            trained: number of batches for which the script has accumulated a gradient so far.
            now_ticks: the current time.
        """
        self.ask(now_ticks)
        return PassMark(trained + self._pushes, self._spent["loading"], self._unfinished)

    def end_pass(self, mark: PassMark, trained: int, now_ticks: int) -> None:
        """End a pass over a loader. If nothing was trained in it, all of its time was outside of training."""
        self.enter("between", now_ticks)
        if trained + self._pushes == mark.trained:
            loaded = max(0, self._spent["loading"] - mark.loading)
            computed = max(0, self._unfinished - mark.computing)
            self._spent["loading"] -= loaded
            self._unfinished -= computed
            self._spent["outside"] += loaded + computed

    def begin_iteration(self, activity: Activity, now_ticks: int) -> None:
        """Begin the next iteration with an activity: the weights have arrived."""
        self.enter(activity, now_ticks)
        self._base = self._spent["loading"], self._spent["outside"]

    def lap(self, now_ticks: int) -> Lap:
        """Return what the worker has done in this iteration, if its computation ends now."""
        self.enter(self._activity, now_ticks)
        loading, outside = self._base
        return Lap(
            max(0, self._spent["loading"] - loading),
            self._unfinished + self._between,
            max(0, self._spent["outside"] - outside),
        )

    def push(self, now_ticks: int) -> Lap:
        """Begin the exchange after a computation. Return what the worker has done in the iteration."""
        lap = self.lap(now_ticks)
        self._end_computation("computing", "exchanging", now_ticks)
        self._pushes += 1
        return lap

    def drop(self, now_ticks: int) -> None:
        """Begin the pull after a computation that was aborted."""
        self._end_computation("wasted", "restarting", now_ticks)

    def read(self, now_ticks: int) -> TimeSpent:
        """Return what the worker has spent its time on."""
        self.enter(self._activity, now_ticks)
        spent = {**self._spent, "outside": self._spent["outside"] + self._between}
        return TimeSpent(**spent, unfinished=self._unfinished, activity=self._activity)

    def _end_computation(self, state: str, activity: Activity, now_ticks: int) -> None:
        self.enter(activity, now_ticks)
        self._spent[state] += self._unfinished + self._between
        self._unfinished = self._between = 0


class WorkerTime(NamedTuple):
    """What a worker has spent its time on, summed over all incarnations of its index.

    Attributes:
        reported: state -> time that the worker has reported.
        tails: state -> time from the last report until the worker was lost, or until now. This includes the time in
            which the worker waited, if it did not compute until the end.
        queued: part of the reported times in which the worker's main thread could run, but had no core.
    """

    reported: dict[str, int]
    tails: dict[str, int]
    queued: int = 0


@stateful(history="_last _left")
class TimeLedger:
    """Adds up what all workers report.

    What a computation counts as that was neither pushed nor aborted depends on how the worker has left: as wasted if
    the worker was lost, as outside of training if the worker has finished, since nothing came of it, and else as
    computing.

    Example:
        >>> ledger = TimeLedger()
        >>> ledger.report(0, TimeSpent(computing=100, activity="computing"), now_ticks=100)
        >>> ledger.leave(0, now_ticks=130, lost=True)
        >>> ledger.totals(now_ticks=200)[0].tails
        {'computing': 0, 'loading': 0, 'wasted': 30, 'paused': 0, 'outside': 0}
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[TimeSpent, int]] = {}  # worker -> its last report, and when it arrived
        self._left: dict[int, WorkerTime] = {}  # worker -> the times of its incarnations that have left

    def report(self, worker: int, spent: TimeSpent, now_ticks: int) -> None:
        """Handle the report of a worker."""
        self._last[worker] = spent, now_ticks

    def leave(self, worker: int, now_ticks: int, *, lost: bool) -> None:
        """Handle the departure of a worker."""
        if worker in self._last:
            self._left[worker] = self._total(worker, now_ticks, "wasted" if lost else "outside")
            del self._last[worker]

    def totals(self, now_ticks: int) -> dict[int, WorkerTime]:
        """Return, for each worker that has made a report, what it has spent its time on."""
        workers = sorted({*self._last, *self._left})
        return {worker: self._total(worker, now_ticks, "computing") for worker in workers}

    def _total(self, worker: int, now_ticks: int, unfinished: str) -> WorkerTime:
        """Return the times of a worker. Its unfinished computation belongs to the state `unfinished`."""
        before = self._left.get(worker) or WorkerTime(dict.fromkeys(STATES, 0), dict.fromkeys(STATES, 0))
        reported, tails, queued = dict(before.reported), dict(before.tails), before.queued
        if worker in self._last:
            spent, at_ticks = self._last[worker]
            queued += spent.queued
            for state in STATES:
                reported[state] += getattr(spent, state)
            reported[unfinished] += spent.unfinished
            if spent.activity != "exchanging":
                state = unfinished if spent.activity == "computing" else STATE_OF[spent.activity]
                tails[state] += now_ticks - at_ticks
        return WorkerTime(reported, tails, queued)

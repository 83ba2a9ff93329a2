"""What the workers of a run spend their time on, as far as they know it themselves.

    Stopwatch     in a worker: measures the time of each activity
    TimeSpent     what a stopwatch shows; the worker reports it in a `Status` and in its `WorkerFinished`
    TimeLedger    at the coordinator: keeps the last report of each worker, and adds up the reports

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

__all__ = ["STATES", "Stopwatch", "TimeLedger", "WorkerTime"]

STATES = ("computing", "wasted", "paused", "outside")
"""The states whose times the workers know."""

STATE_OF: Mapping[Activity, str] = {
    "computing": "computing",
    "restarting": "wasted",
    "paused": "paused",
    "outside": "outside",
}
"""The state to which the time of an activity belongs. Exchanges are missing."""


class Stopwatch:
    """Measures the time that one worker spends on each activity. It begins with an exchange.

    Args:
        now_ticks: the current time.

    Example:
        >>> watch = Stopwatch(now_ticks=0)
        >>> watch.enter("computing", now_ticks=10)
        'exchanging'
        >>> watch.drop(now_ticks=40)
        >>> watch.enter("computing", now_ticks=42)
        'restarting'
        >>> watch.push(now_ticks=142)
        >>> watch.read(now_ticks=150)
        TimeSpent(computing=100, wasted=32, paused=0, outside=0, unfinished=0, activity='exchanging')
    """

    __slots__ = ("_activity", "_since_ticks", "_spent", "_unfinished")

    def __init__(self, now_ticks: int) -> None:
        self._activity: Activity = "exchanging"
        self._since_ticks = now_ticks
        self._spent = dict.fromkeys(STATES, 0)
        self._unfinished = 0

    def enter(self, activity: Activity, now_ticks: int) -> Activity:
        """Begin an activity, and return the previous one."""
        previous, self._activity = self._activity, activity
        length, self._since_ticks = now_ticks - self._since_ticks, now_ticks
        if previous == "computing":
            self._unfinished += length
        elif previous != "exchanging":
            self._spent[STATE_OF[previous]] += length
        return previous

    def push(self, now_ticks: int) -> None:
        """Begin the exchange after a computation."""
        self._end_computation("computing", "exchanging", now_ticks)

    def drop(self, now_ticks: int) -> None:
        """Begin the pull after a computation that was aborted."""
        self._end_computation("wasted", "restarting", now_ticks)

    def read(self, now_ticks: int) -> TimeSpent:
        """Return what the worker has spent its time on."""
        self.enter(self._activity, now_ticks)
        return TimeSpent(**self._spent, unfinished=self._unfinished, activity=self._activity)

    def _end_computation(self, state: str, activity: Activity, now_ticks: int) -> None:
        self.enter(activity, now_ticks)
        self._spent[state] += self._unfinished
        self._unfinished = 0


class WorkerTime(NamedTuple):
    """What a worker has spent its time on, summed over all incarnations of its index.

    Attributes:
        reported: state -> time that the worker has reported.
        tails: state -> time from the last report until the worker was lost, or until now. This includes the time in
            which the worker waited, if it did not compute until the end.
    """

    reported: dict[str, int]
    tails: dict[str, int]


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
        {'computing': 0, 'wasted': 30, 'paused': 0, 'outside': 0}
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
        reported, tails = dict(before.reported), dict(before.tails)
        if worker in self._last:
            spent, at_ticks = self._last[worker]
            for state in STATES:
                reported[state] += getattr(spent, state)
            reported[unfinished] += spent.unfinished
            if spent.activity != "exchanging":
                state = unfinished if spent.activity == "computing" else STATE_OF[spent.activity]
                tails[state] += now_ticks - at_ticks
        return WorkerTime(reported, tails)

"""Statistics of a run, computed from the traces of its shards.

    staleness   number of updates applied between a worker's pull and the application of its push, in versions, for
                each pair (push, shard)
    gap         a worker's lead over the slowest live worker at the start of an iteration, in iterations: c_p - min c,
                as counted by the sync model. Each entry contains the gap, because the labels of the iterations do not
                determine it: workers join late, `drop-stragglers` advances late workers, and all counts are equal
                after a change of the model
    waiting     time from the arrival of a pull to its answer, without transfers; the maximum over the shards
    updates     number of optimizer steps of a shard
    restarts    number of computations that were aborted and restarted

The functions have no side effects. A `Meter` processes the entries one by one and does not store them, so the memory
that it uses does not grow with the number of entries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import fsum

import msgspec

from ..sync.actions import AnswerPull, DropPush
from ..sync.events import PullRepeated, PullRequested, PushReceived, WorkerFinished, WorkerJoined, WorkerLost
from .recording import Entry, Trace

__all__ = ["Measures", "Meter", "Wait", "measure", "waits"]


class Wait(msgspec.Struct, frozen=True):
    """The waiting time of one pull, at the shard at which it waited longest.

    Attributes:
        worker: index of the worker.
        iteration: number of the worker's iteration.
        asked_s: time at which the pull arrived.
        answered_s: time at which the pull was answered.
    """

    worker: int
    iteration: int
    asked_s: float
    answered_s: float

    @property
    def length_s(self) -> float:
        """The waiting time in seconds."""
        return self.answered_s - self.asked_s


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of one run.

    Attributes:
        duration_s: time from the first worker's join until the last worker left, in seconds.
        present_s: sum over the workers of the time from their join until they left, in seconds.
        updates: number of optimizer steps of shard 0.
        updates_per_s: number of optimizer steps of shard 0 per second.
        iterations: worker -> number of iterations that the worker pushed.
        waiting_s: worker -> total waiting time of the worker, in seconds.
        waiting_share: total waiting time of all workers, divided by `present_s`.
        mean_staleness: mean staleness over all pairs (push, shard), in versions.
        max_staleness: maximum staleness over all pairs (push, shard), in versions.
        max_gap: largest c_p - min c of any worker at the start of an iteration.
        delayed_pulls: number of pulls, counted per (worker, shard), that were not answered on arrival.
        dropped_pushes: number of pushes, counted per (worker, shard), that had no gradient or were dropped.
        restarts: number of computations that were aborted and restarted.
    """

    duration_s: float
    present_s: float
    updates: int
    updates_per_s: float
    iterations: dict[int, int]
    waiting_s: dict[int, float]
    waiting_share: float
    mean_staleness: float
    max_staleness: int
    max_gap: int
    delayed_pulls: int
    dropped_pushes: int
    restarts: int


def waits(shards: Sequence[Trace]) -> list[Wait]:
    """Return, for each answered pull, the longest wait over all shards, sorted by worker and iteration."""
    longest: dict[tuple[int, int], Wait] = {}
    for trace in shards:
        asked: dict[tuple[int, int], float] = {}
        for entry in trace.entries:
            event = entry.event
            if isinstance(event, PullRequested) and entry.refused is None:
                asked[event.worker, event.iteration] = event.now_s
            for action in entry.actions:
                if isinstance(action, AnswerPull) and not isinstance(event, PullRepeated):
                    key = action.worker, action.iteration
                    wait = Wait(*key, asked.pop(key), event.now_s)
                    if key not in longest or wait.length_s > longest[key].length_s:
                        longest[key] = wait
    return [longest[key] for key in sorted(longest)]


def measure(shards: Sequence[Trace]) -> Measures:
    """Return the statistics of a run from the traces of all its shards."""
    meter = Meter(len(shards))
    for index, trace in enumerate(shards):
        for entry in trace.entries:
            meter.record(index, entry)
    return meter.measures()


class Meter:
    """Computes the statistics of a run while the run is in progress.

    The entries of each shard must be recorded in order. Entries of different shards may be interleaved in any way.

    Attributes:
        staleness: staleness in versions -> number of pushes with this staleness, counted per shard.
    """

    def __init__(self, shards: int) -> None:
        self.staleness: dict[int, int] = defaultdict(int)
        self._shards = [_ShardMeter() for _ in range(shards)]
        # Worker -> total waiting time of the pulls that all shards have answered.
        self._waiting_s: dict[int, float] = defaultdict(float)
        # Pull that only some shards have answered -> number of these shards, and the longest wait so far.
        self._waits: dict[tuple[int, int], tuple[int, float]] = {}

    def record(self, shard: int, entry: Entry) -> None:
        """Process one entry of a shard's trace."""
        if entry.refused is not None:
            return
        for worker, iteration, wait_s in self._shards[shard].take(entry):
            if len(self._shards) == 1:
                self._waiting_s[worker] += wait_s
                continue
            answered, longest_s = self._waits.pop((worker, iteration), (0, 0.0))
            longest_s = max(longest_s, wait_s)
            if answered + 1 == len(self._shards):
                self._waiting_s[worker] += longest_s
            else:
                self._waits[worker, iteration] = answered + 1, longest_s
        for _, _, versions in entry.staleness:
            self.staleness[versions] += 1

    def measures(self, until_s: float | None = None) -> Measures:
        """Return the statistics of the entries recorded so far.

        Args:
            until_s: end of the measured time. There must be no events between the last entry and this time. Default:
                the time of the last entry.
        """
        first = self._shards[0]
        end_s = first.now_s if until_s is None else until_s
        waiting = defaultdict(float, self._waiting_s)
        for (worker, _), (_, longest_s) in sorted(self._waits.items()):
            waiting[worker] += longest_s
        memberships = [*first.past, *first.current.values()]
        present_s = sum(member.until(end_s) - member.joined_s for member in memberships)
        joined_s = min((member.joined_s for member in memberships), default=0.0)
        duration_s = max((member.until(end_s) for member in memberships), default=0.0) - joined_s
        iterations: dict[int, int] = defaultdict(int)
        for member in sorted(memberships, key=lambda member: member.number):
            iterations[member.worker] += member.iterations
        applied = sum(self.staleness.values())
        total_staleness = sum(versions * count for versions, count in self.staleness.items())
        return Measures(
            duration_s=duration_s,
            present_s=present_s,
            updates=first.updates,
            updates_per_s=first.updates / duration_s if duration_s else 0.0,
            iterations=dict(iterations),
            waiting_s={worker: waiting[worker] for worker in iterations},
            waiting_share=fsum(waiting.values()) / present_s if present_s else 0.0,
            mean_staleness=total_staleness / applied if applied else 0.0,
            max_staleness=max(self.staleness, default=0),
            max_gap=max(shard.max_gap for shard in self._shards),
            delayed_pulls=sum(shard.delayed_pulls for shard in self._shards),
            dropped_pushes=sum(shard.dropped_pushes for shard in self._shards),
            restarts=first.restarts,
        )


class _Membership:
    """One period of a worker in the run, from joining until leaving. A lost worker may join again."""

    __slots__ = ("asked_s", "iterations", "joined_s", "left_s", "number", "worker")

    def __init__(self, worker: int, joined_s: float, number: int) -> None:
        self.worker = worker
        self.joined_s = joined_s
        self.left_s: float | None = None
        self.iterations = 0
        self.number = number  # position in the order in which workers joined
        self.asked_s = 0.0  # time at which the worker's last pull arrived

    def until(self, end_s: float) -> float:
        """Return the time at which the worker left, or `end_s` if it has not left."""
        return end_s if self.left_s is None else self.left_s


class _ShardMeter:
    """The statistics of one shard."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.updates = 0
        self.max_gap = 0
        self.delayed_pulls = 0
        self.dropped_pushes = 0
        self.restarts = 0
        self.past: list[_Membership] = []
        self.current: dict[int, _Membership] = {}

    def take(self, entry: Entry) -> list[tuple[int, int, float]]:
        """Process one entry. Return (worker, iteration, waiting time in seconds) of each pull that was answered."""
        event = entry.event
        self.now_s = event.now_s
        self.max_gap = max(self.max_gap, entry.gap)
        if entry.version is not None:
            self.updates = entry.version
        kind = type(event)
        if kind is PushReceived:
            self.current[event.worker].iterations += 1
        elif kind is PullRequested:
            self.current[event.worker].asked_s = event.now_s
            self.delayed_pulls += 1  # decremented below if the pull is answered by this entry
        elif kind is PullRepeated:
            self.restarts += 1
        elif kind is WorkerJoined:
            number = len(self.past) + len(self.current)
            self.current[event.worker] = _Membership(event.worker, event.now_s, number)
        elif kind is WorkerLost or kind is WorkerFinished:
            member = self.current.pop(event.worker)
            member.left_s = event.now_s
            self.past.append(member)
        answered = []
        for action in entry.actions:
            if type(action) is AnswerPull and kind is not PullRepeated:
                asked_s = self.current[action.worker].asked_s
                answered.append((action.worker, action.iteration, event.now_s - asked_s))
                self.delayed_pulls -= kind is PullRequested and action.worker == event.worker
            elif type(action) is DropPush:
                self.dropped_pushes += 1
        return answered

"""What a run cost and how stale its gradients were: figures out of the traces of its shards.

    staleness   in versions, per (push, shard): updates applied between a worker's pull and its push's application
    gap         in iterations: how far ahead of the slowest live worker a worker started an iteration, c_p - min c as
                the sync model itself counts them. Each entry has it; labels do not tell, since workers join late, are
                moved on by `drop-stragglers`, and start level after a change of the model
    waiting     from the arrival of a pull to its release, the largest over the shards, without transfers
    updates     optimizer steps of a shard
    restarts    computations that were dropped and started anew

Pure: traces in, figures out. `Meter` takes the entries as they come and keeps none, however long a run.
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
    """One pull, at the shard that kept it waiting longest: from its arrival until its answer."""

    worker: int
    iteration: int
    asked_s: float
    answered_s: float

    @property
    def length_s(self) -> float:
        """How long the worker waited."""
        return self.answered_s - self.asked_s


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run.

    Attributes:
        duration_s: from the first worker's joining to the last one's leaving.
        present_s: of all workers together, from their joining to their leaving.
        updates: optimizer steps of shard 0.
        updates_per_s: the same by the second.
        iterations: worker -> iterations that it pushed.
        waiting_s: worker -> seconds that it waited.
        waiting_share: of all workers' time together, the share that they waited, from 0 to 1.
        mean_staleness: over (push, shard), in versions.
        max_staleness: likewise.
        max_gap: the largest c_p - min c with which a worker started an iteration.
        delayed_pulls: pulls, per (worker, shard), that were not answered on arrival.
        dropped_pushes: pushes, per (worker, shard), that brought no gradient or were left out.
        restarts: computations that were dropped and started anew.
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
    """Every answered pull of a run, in order of worker and iteration; of its shards, the longest wait."""
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
    """The figures of a run, from the traces of all its shards."""
    meter = Meter(len(shards))
    for index, trace in enumerate(shards):
        for entry in trace.entries:
            meter.record(index, entry)
    return meter.measures()


class Meter:
    """Measures a run while it goes on. The entries of one shard come in order; those of different shards may mix.

    Attributes:
        staleness: in versions -> how many pushes, per shard, were applied that stale.
    """

    def __init__(self, shards: int) -> None:
        self.staleness: dict[int, int] = defaultdict(int)
        self._shards = [_ShardMeter() for _ in range(shards)]
        self._waiting_s: dict[int, float] = defaultdict(
            float
        )  # worker -> of the pulls that all shards answered
        self._waits: dict[
            tuple[int, int], tuple[int, float]
        ] = {}  # pull -> shards that answered, longest wait

    def record(self, shard: int, entry: Entry) -> None:
        """Take one entry of a shard's trace."""
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
        """The figures so far; up to a time after the last entry, if it is known that nothing happened meanwhile."""
        first = self._shards[0]
        end_s = first.now_s if until_s is None else until_s
        waiting = defaultdict(float, self._waiting_s)
        for (worker, _), (_, longest_s) in sorted(self._waits.items()):
            waiting[worker] += longest_s
        lives = [*first.lives, *first.current.values()]
        present_s = sum(life.until(end_s) - life.joined_s for life in lives)
        joined_s = min((life.joined_s for life in lives), default=0.0)
        duration_s = max((life.until(end_s) for life in lives), default=0.0) - joined_s
        iterations: dict[int, int] = defaultdict(int)
        for life in sorted(lives, key=lambda life: life.number):
            iterations[life.worker] += life.iterations
        applied = sum(self.staleness.values())
        missed = sum(versions * count for versions, count in self.staleness.items())
        return Measures(
            duration_s=duration_s,
            present_s=present_s,
            updates=first.updates,
            updates_per_s=first.updates / duration_s if duration_s else 0.0,
            iterations=dict(iterations),
            waiting_s={worker: waiting[worker] for worker in iterations},
            waiting_share=fsum(waiting.values()) / present_s if present_s else 0.0,
            mean_staleness=missed / applied if applied else 0.0,
            max_staleness=max(self.staleness, default=0),
            max_gap=max(shard.max_gap for shard in self._shards),
            delayed_pulls=sum(shard.delayed_pulls for shard in self._shards),
            dropped_pushes=sum(shard.dropped_pushes for shard in self._shards),
            restarts=first.restarts,
        )


class _Life:
    """One worker's presence: one that was lost may join anew."""

    __slots__ = ("asked_s", "iterations", "joined_s", "left_s", "number", "worker")

    def __init__(self, worker: int, joined_s: float, number: int) -> None:
        self.worker = worker
        self.joined_s = joined_s
        self.left_s: float | None = None
        self.iterations = 0
        self.number = number  # counts the joins
        self.asked_s = 0.0  # when its last pull came

    def until(self, end_s: float) -> float:
        """When it left, or the end of the trace."""
        return end_s if self.left_s is None else self.left_s


class _ShardMeter:
    """What one shard's entries come to."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.updates = 0
        self.max_gap = 0
        self.delayed_pulls = 0
        self.dropped_pushes = 0
        self.restarts = 0
        self.lives: list[_Life] = []  # that are over
        self.current: dict[int, _Life] = {}

    def take(self, entry: Entry) -> list[tuple[int, int, float]]:
        """Take one entry. Of each pull that it answered: (worker, iteration, seconds since it had come)."""
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
            self.delayed_pulls += 1  # unless it is answered below
        elif kind is PullRepeated:
            self.restarts += 1
        elif kind is WorkerJoined:
            number = len(self.lives) + len(self.current)
            self.current[event.worker] = _Life(event.worker, event.now_s, number)
        elif kind is WorkerLost or kind is WorkerFinished:
            its = self.current.pop(event.worker)
            its.left_s = event.now_s
            self.lives.append(its)
        answered = []
        for action in entry.actions:
            if type(action) is AnswerPull and kind is not PullRepeated:
                asked_s = self.current[action.worker].asked_s
                answered.append((action.worker, action.iteration, event.now_s - asked_s))
                self.delayed_pulls -= kind is PullRequested and action.worker == event.worker
            elif type(action) is DropPush:
                self.dropped_pushes += 1
        return answered

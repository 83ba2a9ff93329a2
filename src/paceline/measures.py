"""What a run cost and how stale its gradients were: figures out of the traces of its shards.

    staleness   in versions, per (push, shard): updates applied between a worker's pull and its push's application
    gap         in iterations: how far ahead of the slowest live worker a worker started an iteration, c_p - min c
    waiting     from the arrival of a pull to its release, the largest over the shards, without transfers
    updates     optimizer steps of a shard
    restarts    computations that were dropped and started anew

Pure: traces in, figures out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

import msgspec

from .sync.actions import AnswerPull, DropPush
from .sync.events import (
    PullRepeated,
    PullRequested,
    PushReceived,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from .trace import Trace

__all__ = ["Measures", "Wait", "measure", "waits"]


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
    waiting: dict[int, float] = defaultdict(float)
    for wait in waits(shards):
        waiting[wait.worker] += wait.length_s
    lives = _lives(shards[0])
    present_s = sum(life.left_s - life.joined_s for life in lives)
    duration_s = max((life.left_s for life in lives), default=0.0) - min(
        (life.joined_s for life in lives), default=0.0
    )
    iterations: dict[int, int] = defaultdict(int)
    for life in lives:
        iterations[life.worker] += life.iterations
    staleness = [
        versions for trace in shards for entry in trace.entries for _, _, versions in entry.staleness
    ]
    updates = max((entry.version or 0 for entry in shards[0].entries), default=0)
    return Measures(
        duration_s=duration_s,
        updates=updates,
        updates_per_s=updates / duration_s if duration_s else 0.0,
        iterations=dict(iterations),
        waiting_s={worker: waiting[worker] for worker in iterations},
        waiting_share=sum(waiting.values()) / present_s if present_s else 0.0,
        mean_staleness=fmean(staleness) if staleness else 0.0,
        max_staleness=max(staleness, default=0),
        max_gap=max((_max_gap(trace) for trace in shards), default=0),
        delayed_pulls=sum(_delayed(trace) for trace in shards),
        dropped_pushes=sum(
            isinstance(action, DropPush)
            for trace in shards
            for entry in trace.entries
            for action in entry.actions
        ),
        restarts=sum(
            isinstance(entry.event, PullRepeated) and entry.refused is None for entry in shards[0].entries
        ),
    )


class _Life(msgspec.Struct):
    """One worker's presence, from joining to leaving (or to the end of the trace)."""

    worker: int
    joined_s: float
    left_s: float
    iterations: int = 0


def _lives(trace: Trace) -> list[_Life]:
    """Every presence of every worker, in order of joining: one that was lost may join anew."""
    end_s = trace.entries[-1].event.now_s if trace.entries else 0.0
    lives: list[_Life] = []
    current: dict[int, _Life] = {}
    for event in (entry.event for entry in trace.entries if entry.refused is None):
        match event:
            case WorkerJoined(now_s=now_s, worker=worker):
                current[worker] = _Life(worker, now_s, end_s)
                lives.append(current[worker])
            case WorkerLost(now_s=now_s, worker=worker) | WorkerFinished(now_s=now_s, worker=worker):
                current.pop(worker).left_s = now_s
            case PushReceived(worker=worker):
                current[worker].iterations += 1
            case _:
                pass
    return lives


def _max_gap(trace: Trace) -> int:
    """The largest lead over the slowest live worker with which an iteration was started."""
    count: dict[int, int] = {}
    largest = 0
    for entry in trace.entries:
        if entry.refused is not None:
            continue
        match entry.event:
            case WorkerJoined(worker=worker):
                count[worker] = min(count.values(), default=0)
            case WorkerLost(worker=worker) | WorkerFinished(worker=worker):
                del count[worker]
            case PushReceived(worker=worker):
                count[worker] += 1
            case _:
                pass
        for action in entry.actions:
            if isinstance(action, AnswerPull):
                largest = max(largest, count[action.worker] - min(count.values()))
    return largest


def _delayed(trace: Trace) -> int:
    """Pulls whose own event did not answer them."""
    return sum(
        isinstance(entry.event, PullRequested)
        and entry.refused is None
        and not any(isinstance(action, AnswerPull) for action in entry.actions)
        for entry in trace.entries
    )

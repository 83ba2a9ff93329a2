"""Who keeps the workers of a job waiting, according to the servers' answers to `FetchWaits`, without I/O.

A single answer shows one moment. If the workers wait for 40 ms in each iteration, as for a worker that is three times
slower, every other answer may find nobody waiting. So `Looks` keeps several answers: in the part of them in which
others waited for a worker, others wait for it for the same part of the time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ..coordinator import Coordinator
from ..protocol.messages import Waits

__all__ = ["Awaited", "Looks", "last_workers", "still_waiting", "waiting_for"]

MOST_LOOKS = 20
OLDEST_S = 30.0  # age of a look from which it is no longer used
LEAST_LOOKS = 2
LEAST_SHARE = 0.25
"""Part of the looks in which others must wait for a worker. Of equally fast workers, none is awaited as often."""

CLOSE = 0.8
"""Workers that are awaited this much less often than the one that is awaited most are named together with it."""


class Awaited(NamedTuple):
    """The workers that keep others waiting.

    Attributes:
        workers: their indices, in order; () if nobody is awaited.
        share: the part of the last seconds in which others have waited for them.
    """

    workers: tuple[int, ...] = ()
    share: float | None = None


class Looks:
    """What the last answers of the servers have shown.

    Args:
        ticks_per_s: number of ticks per second.
    """

    def __init__(self, ticks_per_s: int) -> None:
        self._oldest_ticks = round(OLDEST_S * ticks_per_s)
        self._looks: deque[tuple[int, frozenset[int]]] = deque(maxlen=MOST_LOOKS)

    def look(self, core: Coordinator, now_ticks: int) -> None:
        """Record who waits now. Call this when all servers have answered. Before training begins, it has no effect.

        The workers that are awaited are not noted if they are more than those that wait: the first workers at the end
        of a round wait for all others, and none of these is slow.
        """
        if not core.started:
            return
        waiting = still_waiting(core)
        last = last_workers(core, core.members.live - waiting)
        self._looks.append((now_ticks, frozenset(last if len(last) <= len(waiting) else ())))

    def awaited(self, now_ticks: int) -> Awaited:
        """Return the workers for which others have waited most often in the last seconds."""
        looks = [last for ticks, last in self._looks if now_ticks - ticks <= self._oldest_ticks]
        counts = Counter(worker for last in looks for worker in last)
        most = max(counts.values(), default=0)
        if len(looks) < LEAST_LOOKS or most < LEAST_SHARE * len(looks):
            return Awaited()
        workers = tuple(sorted(worker for worker, count in counts.items() if count >= CLOSE * most))
        return Awaited(workers, most / len(looks))


def still_waiting(core: Coordinator) -> set[int]:
    """Return the workers whose pulls are not answered, according to the servers' last answers.

    A worker that has reported since then that it computes a later iteration waits no longer.
    """
    pulled: dict[int, int] = {}
    for answer in core.waits.values():
        for shard in answer.shards:
            for worker, iteration in shard.pulls:
                pulled[worker] = max(iteration, pulled.get(worker, iteration))
    return {worker for worker, iteration in pulled.items() if not _computes_after(core, worker, iteration)}


def _computes_after(core: Coordinator, worker: int, iteration: int) -> bool:
    """Return True if a worker has reported that it computes an iteration after this one."""
    reported = core.board.get(worker)
    return reported is not None and reported.state == "computing" and reported.iteration > iteration


def waiting_for(answers: Collection[Waits]) -> dict[int, str]:
    """Return, for each worker that waits at a shard, whom it waits for and why.

    The shards are named only if the worker waits for something else at some of them.
    """
    shards = [shard for answer in answers for shard in answer.shards]
    found: dict[int, dict[str, list[int]]] = {}
    for shard in shards:
        for (worker, _), reason in zip(shard.pulls, shard.reasons, strict=True):
            found.setdefault(worker, {}).setdefault(reason, []).append(shard.shard)
    return {worker: "; ".join(_named(at, len(shards))) for worker, at in sorted(found.items())}


def _named(reasons: Mapping[str, list[int]], shards: int) -> list[str]:
    """Return the reasons, each with the shards for which it holds unless it holds for all."""
    return [
        reason if len(where) == shards else f"{reason} (shard {', '.join(map(str, sorted(where)))})"
        for reason, where in reasons.items()
    ]


def last_workers(core: Coordinator, workers: Collection[int]) -> tuple[int, ...]:
    """Return those of the workers that are in the earliest iteration, according to their last reports."""
    iterations = {worker: core.board[worker].iteration for worker in workers if worker in core.board}
    earliest = min(iterations.values(), default=0)
    return tuple(sorted(worker for worker, iteration in iterations.items() if iteration == earliest))

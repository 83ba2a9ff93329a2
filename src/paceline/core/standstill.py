"""Reports on runs in which no condition will release a waiting worker: all workers wait, or one waits for ever."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from ..sync.actions import SetTimer
from ..sync.events import TimerFired, WorkerFinished
from ..sync.plugins import blame
from .messages import Contributed, ShardWaits
from .requests import Timer
from .shard import Shard

MOST_TIMERS = 1000
"""Number of timers after which a model that always sets another timer is considered never to answer."""

SAME_PLACES = (
    "Workers wait for others in a call that all workers must make: paceline.barrier(), paceline.reduce(), or the "
    "first step with a new DistributedOptimizer or group. Let all workers make the same calls, after the same number "
    "of iterations."
)


def standstill(shards: Iterable[ShardWaits], gathered: Mapping[int, Contributed]) -> str:
    """Return a report that lists, for each worker and shard, what the worker waits for.

    Args:
        shards: the workers that wait at each shard.
        gathered: the workers that wait in a call of all workers. See `core.joint_batch`.
    """
    lines = [*_pulls(shards), *_calls(gathered)]
    report = "every worker waits, and no condition will release any of them:\n" + "\n".join(sorted(lines))
    return f"{report}\n{SAME_PLACES}" if gathered else report


def never_answered(shard: Shard, timers: Iterable[Timer], now_ticks: int) -> set[int]:
    """Return the workers whose pulls the sync model of a shard would never answer.

    A worker that has left blocks no other worker. So this function lets every worker that does not wait leave. If other
    pulls are answered because of this, their workers leave, too. The function repeats this until all remaining workers
    wait and all timers have fired. The remaining workers wait for ever. The shard and its model must not be used
    afterwards.

    Args:
        shard: the shard.
        timers: the timers that the model has set.
        now_ticks: the time in ticks.

    Raises:
        UserCodeError: a sync model of the user has failed.
    """
    sync, due = shard.sync, sorted(timers)
    fired = 0
    while "waiting" in sync.order.phase.values():
        events: list[WorkerFinished | TimerFired] = [
            WorkerFinished(now_ticks=now_ticks, worker=worker)
            for worker, phase in sync.order.phase.items()
            if phase != "waiting"
        ]
        if not events:
            if not due or fired == MOST_TIMERS:
                # A verdict about a lost worker may be on its way.
                return set() if sync.machine.frozen else set(sync.order.phase)
            timer = heapq.heappop(due)
            fired, now_ticks = fired + 1, max(now_ticks, timer.due_ticks)
            events = [TimerFired(now_ticks=now_ticks, worker=timer.worker, iteration=timer.iteration)]
        for event in events:
            try:
                for action in sync.handle(event):
                    if type(action) is SetTimer:
                        heapq.heappush(due, Timer(action.due_ticks, action.worker, action.iteration))
            except Exception as error:
                blame(sync.sync, f"shard {shard.index}", event, error)
    return set()


def held_for_ever(shards: Iterable[ShardWaits], held: Mapping[int, set[int]]) -> str:
    """Return a report that lists, for each pull that is never answered, what it waits for; "" if there is no such pull.

    Args:
        shards: the workers that wait at each shard.
        held: for each shard, the workers whose pulls are never answered. See `never_answered`.
    """
    lines = _pulls(shards, held)
    if not lines:
        return ""
    return "\n".join(
        [
            "a worker waits for ever, because its pull is not answered even when all other workers have finished:",
            *lines,
        ]
    )


def unable_to_begin(workers: Iterable[int], gathered: Mapping[int, Contributed]) -> str:
    """Return a report on a run that cannot begin, because some of its workers wait in a call of all workers.

    Args:
        workers: all live workers.
        gathered: the workers that wait in such a call.
    """
    lines = [
        f"  worker {worker}, which is about to train, waits for the models of the other workers"
        for worker in workers
        if worker not in gathered
    ]
    lines += _calls(gathered)
    return "no worker can begin to train:\n" + "\n".join(sorted(lines)) + f"\n{SAME_PLACES}"


def _pulls(shards: Iterable[ShardWaits], held: Mapping[int, set[int]] | None = None) -> list[str]:
    """Return a line for each delayed pull or, if `held` is given, for each delayed pull of the workers in `held`."""
    return [
        f"  worker {worker}, after its iteration {iteration}, waits at shard {shard.shard} ({shard.sync}) "
        f"for {reason}"
        for shard in shards
        for (worker, iteration), reason in zip(shard.pulls, shard.reasons, strict=True)
        if held is None or worker in held[shard.shard]
    ]


def _calls(gathered: Mapping[int, Contributed]) -> list[str]:
    return [
        f"  worker {worker} waits in {contribution.name} for the other workers"
        for worker, contribution in gathered.items()
    ]

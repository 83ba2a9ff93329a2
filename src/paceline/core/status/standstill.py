"""The report on a run in which every worker waits and no condition will release any of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..protocol.messages import Contributed, ShardWaits

__all__ = ["standstill", "unable_to_begin"]

SAME_PLACES = (
    "Workers wait for others in a call that all workers must make: paceline.barrier(), paceline.reduce(), or the "
    "first step with a new DistributedOptimizer or group. Let all workers make the same calls, after the same number "
    "of iterations."
)


def standstill(shards: Iterable[ShardWaits], gathered: Mapping[int, Contributed]) -> str:
    """Return a report that lists, for each worker and shard, what the worker waits for.

    Args:
        shards: the workers that wait at each shard.
        gathered: the workers that wait in a call of all workers. See `core.sync.joint_calls`.
    """
    lines = [
        f"  worker {worker}, after its iteration {iteration}, waits at shard {shard.shard} ({shard.sync}) "
        f"for {reason}"
        for shard in shards
        for (worker, iteration), reason in zip(shard.pulls, shard.reasons, strict=True)
    ]
    lines += _calls(gathered)
    report = "every worker waits, and no condition will release any of them:\n" + "\n".join(sorted(lines))
    return f"{report}\n{SAME_PLACES}" if gathered else report


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


def _calls(gathered: Mapping[int, Contributed]) -> list[str]:
    return [
        f"  worker {worker} waits in {contribution.name} for the other workers"
        for worker, contribution in gathered.items()
    ]

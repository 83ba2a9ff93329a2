"""The report on a run in which every worker waits and no condition will release any of them."""

from __future__ import annotations

from collections.abc import Iterable

from .messages import ShardWaits

__all__ = ["standstill"]


def standstill(shards: Iterable[ShardWaits]) -> str:
    """Return a report that lists, for each worker and shard, what the worker waits for."""
    lines = [
        f"  worker {worker}, after its iteration {iteration}, waits at shard {shard.shard} ({shard.sync}) "
        f"for {reason}"
        for shard in shards
        for (worker, iteration), reason in zip(shard.pulls, shard.reasons, strict=True)
    ]
    return "every worker waits, and no condition will release any of them:\n" + "\n".join(sorted(lines))

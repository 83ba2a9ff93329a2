"""Simulations of what helps if transfers take much of the time: servers on more machines, and larger pushes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ..core.protocol.lease import BatchSizing
from ..sim import Cluster, Dataset, Sum
from .process_pool import TellCount
from .ranking import Figures, Task, balanced_task, run_tasks
from .recommendation import WIRE_SHARE, WireVariant

__all__ = ["wire_variants"]

FACTORS = (2, 4, 8)  # by how many times the number of servers is multiplied
BATCHES = (2, 4)  # numbers of batches from which a push is computed


class _Change(NamedTuple):
    batch: BatchSizing
    servers: int
    batches_per_push: int = 1


def wire_variants(
    cluster: Cluster,
    rows: Sequence[Figures],
    *,
    seed: int,
    shards: int | None,
    data: Dataset | None,
    wire: str = "float32",
    tell: TellCount = lambda done, of, what: None,
) -> list[WireVariant]:
    """Simulate bsp with other numbers of servers and with larger pushes.

    Nothing is simulated unless transfers take much of the time under bsp. The number of servers is only changed if
    the cluster has a limited bandwidth, because the recorded times of messages do not tell how they depend on it. A
    change is compared with bsp and equal batches in `rows`, and only if the rows contain its own sizes of batches.

    Args:
        cluster: the cluster as it is.
        rows: the ranking of the models on this cluster.
        seed: random seed of the ranking.
        shards: number of shards in the ranking; None for one per server.
        data: data of the ranking, if any.
        wire: format in which gradients and weights travel in the ranking.
        tell: progress callback.
    """
    of_bsp = {row.batch: row for row in rows if row.sync == "bsp" and row.sound}
    if "equal" not in of_bsp or all(row.transfer_share < WIRE_SHARE for row in of_bsp.values()):
        return []
    limited = cluster.size_bytes and any(
        math.isfinite(cluster.bandwidth_of(worker)) for worker in range(cluster.workers)
    )
    servers = [factor * cluster.servers for factor in FACTORS if limited]
    changes = [
        change
        for batch in of_bsp
        for change in [
            *(_Change(batch, count) for count in servers if count <= cluster.workers),
            *(_Change(batch, cluster.servers, batches) for batches in BATCHES),
        ]
    ]
    tasks = [_task(change, cluster, of_bsp["equal"].until_s, seed, shards, data, wire) for change in changes]
    speed = of_bsp["equal"].speed
    return [
        WireVariant(
            batch=change.batch,
            servers=change.servers,
            batches_per_push=change.batches_per_push,
            # The gradients of a ranking without data are counted in pushes.
            times=row.speed * (change.batches_per_push if data is None else 1) / speed,
        )
        for change, row in zip(changes, run_tasks(tasks, tell), strict=True)
        if row.sound
    ]


def _task(
    change: _Change,
    cluster: Cluster,
    until_s: float,
    seed: int,
    shards: int | None,
    data: Dataset | None,
    wire: str,
) -> Task:
    """Return the simulation of a change. A push from several batches takes the sum of their compute times."""
    count = change.batches_per_push
    compute_s = [Sum(base=cluster.compute(worker), count=count) for worker in range(cluster.workers)]
    changed = dataclasses.replace(
        cluster, servers=change.servers, compute_s=cluster.compute_s if count == 1 else compute_s
    )
    shards = None if shards is None else max(shards, change.servers)
    if data is not None:
        larger = msgspec.structs.replace(data, batch_size=data.batch_size * count)
        return Task(changed, "bsp", None, math.inf, seed, shards, larger, change.batch, wire=wire)
    if change.batch == "balanced":
        return balanced_task(changed, until_s, seed, shards, wire)
    return Task(changed, "bsp", None, until_s, seed, shards, wire=wire)

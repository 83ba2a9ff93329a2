"""Random simulated jobs under every sync model, in which workers join, leave and are lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from paceline.sim import Cluster, Dataset, Presence, Uniform

__all__ = ["MODELS", "random_jobs"]

MODELS = (
    "bsp",
    "asp",
    "ssp:staleness=1",
    "ssp:staleness=2,execution=lazy",
    "dssp:lower=1,upper=4",
    "dsps:lower=1,upper=4",
    "pssp:staleness=1",
    "dynamic-pssp:staleness=1",
    "drop-stragglers:quorum=2",
    "naive-waiting:delay_s=0.25",
    "elastic-bsp:lookahead=5",
    "spec-sync",
    "spec-sync:abort_time_s=0.2,abort_rate=0.1",
    "ringmaster:threshold=2,stop=true",
    "rennala:batch=3",
    "bsp@0,elastic-bsp@4,spec-sync@9,ssp:staleness=1@14",
    "asp@0,bsp@7",
)

ONE_SHARD = ("ringmaster", "rennala")


def random_jobs(seed: int) -> Iterator[tuple[Cluster, str, dict[str, Any]]]:
    """Clusters whose workers join late, are lost and come back, and runs that end in different ways."""
    draw = random.Random(seed)
    for sync in MODELS:
        workers = draw.randint(3, 5)
        latencies: list[float | Uniform] = [0.0, 0.0, 0.125, Uniform(low=0.01, high=0.3)]
        latency_s = draw.choice(latencies)
        times: list[float | Uniform] = [1.0, 0.5, 3.0, 40.0, Uniform(low=0.5, high=2.0)]
        presence = {}
        for worker in range(1, workers):
            match draw.randrange(5):
                case 0:
                    presence[worker] = Presence(joins_at_s=draw.uniform(0.0, 9.0))
                case 1:
                    presence[worker] = Presence(
                        lost_at_s=draw.uniform(1.0, 20.0), back_after_s=draw.choice([None, 2.5])
                    )
                case 2:
                    presence[worker] = Presence(preempted_every_s=9.0, back_after_s=1.0)
        cluster = Cluster(
            compute_s=[draw.choice(times) for _ in range(workers)],
            servers=1 if sync.startswith(ONE_SHARD) else draw.randint(1, 3),
            latency_s=latency_s,
            bandwidth_bps=draw.choice([float("inf"), 1e9]) if latency_s else float("inf"),
            size_bytes=10_000_000 if latency_s else 0,
            presence=presence,
        )
        ends: list[dict[str, Any]] = [
            {"iterations": draw.randint(1, 25)},
            {"iterations": None, "until_s": draw.uniform(0.1, 45.0)},
            {"iterations": draw.randint(1, 25), "until_s": draw.uniform(5.0, 45.0)},
            {
                "data": Dataset(samples=draw.randint(20, 200), batch_size=4, epochs=2),
                "until_s": draw.uniform(3.0, 60.0),
            },
        ]
        yield cluster, sync, draw.choice(ends)

"""How fast a run would be under other sync models, from what has been observed of it. See `paceline.core.sync.auto`.

The observed cycles of the workers become a cluster: what a worker's cycles usually take longer than its computations
is the latency of its link, and the rest its compute times. Each candidate then uses up some epochs of the run's data
on this cluster. The cycles are used in the order in which they were observed, so pauses and other changes are as
frequent as in the run.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from statistics import median

from ..core.protocol.lease import BatchSizing
from ..core.protocol.requests import Situation
from ..core.sync.auto import Prospect
from ..errors import PacelineError
from .clockwork import Dataset
from .cluster import Cluster
from .recorded import compute_times
from .result import SimResult
from .worker_settings import Link

__all__ = ["cluster_of", "prospects"]

LENGTH = 64  # approximate number of iterations of each worker that are simulated
RECENT = 32  # number of latest cycles and computations whose medians are compared
LEAST_COMPUTED = 8  # number of known computations without which transfers are part of the compute times
NEGLIGIBLE = 0.02  # share of a cycle below which its transfers are noise

Simulate = Callable[..., SimResult]
"""The function `simulate`, which itself simulates runs that choose their model, and therefore imports this module."""


def prospects(situation: Situation, simulate: Simulate) -> list[Prospect]:
    """Return the speed of each candidate, except for those that cannot be simulated."""
    found = []
    for sync in situation.syncs:
        with contextlib.suppress(PacelineError):  # a candidate that does not fit is no candidate
            found.append(Prospect(sync, _speed(situation, sync, simulate)))
    return found


def cluster_of(situation: Situation) -> Cluster:
    """Return a cluster that describes the machines of a run."""
    times, shares, links = [], [], {}
    for worker, (cycles, computed) in enumerate(zip(situation.cycles, situation.computed, strict=True)):
        transfer_s = _transfer_s(cycles, computed)
        without = [
            (None if samples < 0 else samples, max(0.0, seconds - transfer_s)) for samples, seconds in cycles
        ]
        sized = situation.balanced or situation.joint
        recorded, share = compute_times(without, situation.batch_size if sized else None)
        times.append(recorded)
        shares.append(min(1.0, max(0.0, share)))
        links[worker] = Link(to_server_s=transfer_s / 2, from_server_s=transfer_s / 2)
    return Cluster(compute_s=times, fixed_share=shares, links=links)


def _transfer_s(cycles: Sequence[tuple[int, float]], computed: Sequence[tuple[int, float]]) -> float:
    """Return how much longer a worker's cycles usually take than its computations, in seconds."""
    if len(computed) < LEAST_COMPUTED:
        return 0.0
    cycle_s = median(seconds for _, seconds in cycles[-RECENT:])
    transfer_s = cycle_s - median(seconds for _, seconds in computed[-RECENT:])
    return transfer_s if transfer_s > NEGLIGIBLE * cycle_s else 0.0


def _speed(situation: Situation, sync: str, simulate: Simulate) -> float:
    """Return the applied samples per second, or gradients if the number of samples is unknown."""
    cluster = cluster_of(situation)
    if situation.samples is None:
        result = simulate(cluster, sync, LENGTH)
        applied = sum(result.measures.iterations.values()) - result.measures.dropped_pushes
        return applied / result.time_s if result.time_s else 0.0
    shown = LENGTH * situation.batch_size * (1 if situation.joint else cluster.workers)
    samples = min(situation.samples, shown)
    data = Dataset(
        samples=samples,
        batch_size=situation.batch_size,
        epochs=math.ceil(shown / samples),
        split=situation.split,
        pushes_per_batch=situation.pushes_per_batch,
        joint_batch=situation.joint,
    )
    batch: BatchSizing = "balanced" if situation.balanced else "equal"
    return simulate(cluster, sync, None, data=data, batch=batch).measures.samples_per_s

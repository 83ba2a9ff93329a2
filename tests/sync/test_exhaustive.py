"""Every interleaving of a small job, time abstracted away: nothing deadlocks, and the bounds hold.

What is checked in every state is in `cluster.py`. PACELINE_EXHAUSTIVE="workers,shards,iterations,losses" asks for
another size of the first test than 2,2,3,1; each step up costs about tenfold.
"""

from __future__ import annotations

import os

import pytest

from paceline.sync import ASP, BSP, SSP, ElasticBSP, Machine, SyncModel
from paceline.sync.actions import AnyAction
from paceline.sync.events import AnyEvent, WorkerLost

from .cluster import Cluster, MustWait, Seen, explore, more_ahead_than, nobody, stopped

MODELS: list[tuple[SyncModel, MustWait]] = [
    (BSP(), more_ahead_than(0)),
    (ASP(), nobody),
    (SSP(staleness=1), more_ahead_than(1)),
    (ElasticBSP(), stopped),
]


@pytest.mark.parametrize(("sync", "must_wait"), MODELS, ids=[str(sync) for sync, _ in MODELS])
def test_no_interleaving_with_a_loss_deadlocks_or_breaks_the_bound(
    sync: SyncModel, must_wait: MustWait
) -> None:
    size = os.environ.get("PACELINE_EXHAUSTIVE", "2,2,3,1")
    workers, shards, iterations, losses = map(int, size.split(","))
    cluster = Cluster(
        sync,
        must_wait,
        workers=workers,
        shards=shards,
        iterations=iterations,
        losses=losses,
        commits=sync.at_coordinator() is not None,  # where plans multiply the interleavings
        any_plan=True,
    )
    assert explore(cluster) > 100


def test_no_interleaving_of_two_supersteps_deadlocks() -> None:
    cluster = Cluster(ElasticBSP(), stopped, workers=2, shards=1, iterations=6, commits=True, any_plan=True)
    assert explore(cluster) > 10_000


def test_no_interleaving_with_a_late_worker_deadlocks_elastic_bsp() -> None:
    cluster = Cluster(
        ElasticBSP(),
        stopped,
        workers=1,
        late=1,
        shards=1,
        iterations=3,
        losses=1,
        commits=True,
        any_plan=True,
    )
    assert explore(cluster) > 1_000


@pytest.mark.parametrize("staleness", [0, 1])
def test_no_interleaving_with_a_late_worker_deadlocks_bsp_or_ssp(staleness: int) -> None:
    sync = SSP(staleness=staleness) if staleness else BSP()
    cluster = Cluster(
        sync,
        more_ahead_than(staleness),
        workers=2,
        late=1,
        shards=2,
        iterations=2,
        commits=True,
        agree=False,  # a late worker's first round may be another one at each shard
    )
    assert explore(cluster) > 1_000


def test_the_search_finds_a_deadlock() -> None:
    class Deaf:
        """BSP that does not hear of losses."""

        def __init__(self) -> None:
            self._machine = BSP().at_shard()

        def handle(self, event: AnyEvent) -> list[AnyAction]:
            return [] if isinstance(event, WorkerLost) else self._machine.handle(event)

        def validate(self) -> None:
            self._machine.validate()

    class DeafBSP(SyncModel, frozen=True):
        name = "deaf-bsp"

        def at_shard(self, seed: int = 0, shard: int = 0) -> Machine:
            return Deaf()

    def as_if_nobody_ever_left(seen: tuple[Seen, ...]) -> set[int]:
        slowest = min(its.pushed for its in seen)
        return {worker for worker, its in enumerate(seen) if its.asks and its.pushed > slowest}

    cluster = Cluster(DeafBSP(), as_if_nobody_ever_left, workers=2, shards=1, iterations=1, losses=1)
    with pytest.raises(AssertionError, match=r"(?s)worker \d is lost.*deadlock: worker \d is"):
        explore(cluster)


def test_the_search_finds_a_wrong_bound() -> None:
    with pytest.raises(AssertionError, match=r"\{\d\} wait and set\(\) must"):
        explore(Cluster(SSP(staleness=1), more_ahead_than(2), workers=2, shards=1, iterations=3))

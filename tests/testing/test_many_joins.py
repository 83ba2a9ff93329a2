"""A thousand joins and losses in random order: no worker, message or sample is lost track of."""

from __future__ import annotations

import random
from typing import Any

import pytest

import paceline.sim.simulated_job
from paceline.core.coordinator import Coordinator
from paceline.core.requests import Peer, Request
from paceline.sim import Cluster, LogNormal, Presence, simulate
from paceline.sim.clockwork import Dataset
from tests.support.choosers import Random
from tests.support.marks import thorough
from tests.support.network import Network

SLOTS = 50
JOINS = 1000


@pytest.mark.thorough
@pytest.mark.parametrize("sync", ["bsp", "asp", "elastic-bsp:lookahead=5", *thorough("ssp:staleness=2")])
def test_a_thousand_joins_and_losses(sync: str) -> None:
    """The workers only join and are lost. The first one initializes the weights, so it stays."""
    network = Network(sync, workers=1, servers=2, most=SLOTS)
    choose, draws = Random(3), random.Random(3)
    network.settle()
    known = {"w0"}
    while len(known) < JOINS:
        losable = sorted(network.workers.keys() - {"w0"})
        if draws.random() < 0.5 or not losable:
            network.take(("join",))
        else:
            lose(network, draws.choice(losable), draws)
        known |= network.workers.keys()
        network.advance(choose, draws.choice((5, 100)))
        network.validate()
    network.run(choose)
    network.validate()

    members = network.coordinator.members
    alive = {worker.index for worker in network.workers.values()}
    assert sum(" Started " in line for line in network.told) > JOINS / 4
    assert members.present == members.live == alive
    assert all(server.core.expected == alive for server in network.servers)
    assert {worker for worker in range(SLOTS) if members.fate(worker)} <= set(range(SLOTS)) - alive
    assert len(members.lost) + len(alive) <= JOINS
    for name in sorted(network.workers):
        lose(network, name, draws)
    network.run(choose)
    network.check_end()
    assert len(network.coordinator.invite(SLOTS)) == SLOTS  # no index has been lost


def lose(network: Network, name: str, draws: random.Random) -> None:
    """Let a process end, or be taken out although it goes on. A part of what it has sent may get lost."""
    if draws.random() < 0.3:
        network.take(("take-out", name))
    network.take(("crash", name, *(f"{receiver}:{draws.randrange(3)}" for receiver in ("c", "s0", "s1"))))


PRESENCE = Presence(preempted_every_s=20.0, back_after_s=5.0)


@pytest.mark.parametrize("sync", ["elastic-bsp:lookahead=5", *thorough("bsp", "asp")])
def test_no_sample_is_lost_track_of(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Coordinator] = []

    class Validated(Coordinator):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            jobs.append(self)

        def disconnected(self, peer: Peer, now_ticks: int) -> list[Request]:
            requests = super().disconnected(peer, now_ticks)
            self.validate()
            return requests

    monkeypatch.setattr(paceline.sim.simulated_job, "Coordinator", Validated)
    cluster = Cluster(
        compute_s=[LogNormal(median=1.0, sigma=0.3)] * 20,
        servers=2,
        latency_s=LogNormal(median=0.01, sigma=0.5),
        presence=dict.fromkeys(range(1, 20), PRESENCE),
    )
    data = Dataset(samples=40_000, batch_size=16, epochs=2, split="dynamic")
    result = simulate(cluster, sync, data=data, seed=1)

    [core] = jobs
    [counts] = core.data.counts().values()
    assert len(core.members.lost) > 100
    assert counts.used + counts.torn == data.samples * data.epochs
    assert (counts.left, counts.leased) == (0, 0)
    assert result.measures.samples <= data.samples * data.epochs

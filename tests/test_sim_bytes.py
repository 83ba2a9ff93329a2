"""What is simulated without gradients is the same on any machine, byte for byte."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from paceline.sim import Cluster, Drifting, LogNormal, Occasional, Pareto, Presence, Uniform, simulate

CLUSTER = Cluster(
    compute_s=[
        LogNormal(median=1.0, sigma=0.3),
        Pareto(least=0.8, alpha=3.0),
        Drifting(base=Uniform(low=0.9, high=1.1), factor=2.0, over=30.0),
        Occasional(base=1.0, factor=4.0, lasting=5.0, every=20.0),
        Uniform(low=2.0, high=3.0),
    ],
    servers=2,
    latency_s=LogNormal(median=0.002, sigma=0.5),
    bandwidth_bps=1e9,
    size_bytes=10_000_000,
    presence={1: Presence(preempted_every_s=20.0, back_after_s=3.0), 4: Presence(joins_at_s=5.0)},
)

DIGESTS = {
    "bsp": "fa566925456e28d0",
    "asp": "2655e161f4d7b258",
    "ssp:staleness=2,execution=lazy": "d1df247c8eec7c17",
    "dssp:lower=1,upper=5": "13ba2a5e07c57da9",
    "dsps:lower=1,upper=5": "8d0f65bfeaf15bf4",
    "pssp:staleness=1": "988bf8438528a911",
    "dynamic-pssp:staleness=1": "d250c4e40a04c1ae",
    "drop-stragglers:quorum=3": "9453acc8873c7317",
    "naive-waiting:delay_s=0.2": "915a5ed363c088f8",
    "elastic-bsp:lookahead=5": "deac0c8b406252e0",
    "spec-sync": "f08982ce48e0da5f",
    "bsp@0,elastic-bsp@10,spec-sync@20,ssp:staleness=1@30": "e39da0318b5d3da5",
}
"""Of all that `save` writes. They change with the rules of a model or of the simulation, and with nothing else."""


@pytest.mark.parametrize("sync", DIGESTS)
def test_the_bytes_of_a_simulated_run(sync: str, tmp_path: Path) -> None:
    folder = simulate(CLUSTER, sync, iterations=40, seed=1).save(tmp_path / "run")
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    assert digest.hexdigest()[:16] == DIGESTS[sync]

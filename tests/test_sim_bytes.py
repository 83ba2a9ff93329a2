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
    "bsp": "23a3a48f2fa6ce8d",
    "asp": "e52909024f0d00ab",
    "ssp:staleness=2,execution=lazy": "1a0f51e8b36633bc",
    "dssp:lower=1,upper=5": "ba9594dad1536251",
    "dsps:lower=1,upper=5": "109d4d70b6b9406d",
    "pssp:staleness=1": "c143d252c3493e3d",
    "dynamic-pssp:staleness=1": "314c367f058c5b5a",
    "drop-stragglers:quorum=3": "60d324496452adfb",
    "naive-waiting:delay_s=0.2": "3d1833cfdff4a8e1",
    "elastic-bsp:lookahead=5": "280fc7a77912f4d3",
    "spec-sync": "6953e356b491e9ab",
    "bsp@0,elastic-bsp@10,spec-sync@20,ssp:staleness=1@30": "f313e9ff4c14e876",
}
"""Of all that `save` writes. They change with the rules of a model or of the simulation, and with nothing else."""


@pytest.mark.parametrize("sync", DIGESTS)
def test_the_bytes_of_a_simulated_run(sync: str, tmp_path: Path) -> None:
    folder = simulate(CLUSTER, sync, iterations=40, seed=1).save(tmp_path / "run")
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    assert digest.hexdigest()[:16] == DIGESTS[sync]

"""What is simulated without gradients is the same on any machine, byte for byte."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
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
    "bsp": "fedad642829def14",
    "asp": "afae941b5f53b485",
    "ssp:staleness=2,execution=lazy": "c53da6c530971583",
    "dssp:lower=1,upper=5": "bfc1c07d5cddad87",
    "dsps:lower=1,upper=5": "913aac5485ae5a04",
    "pssp:staleness=1": "6b7fea5603313aa8",
    "dynamic-pssp:staleness=1": "8e97aff5293b0c1c",
    "drop-stragglers:quorum=3": "574d69729ab47d3e",
    "naive-waiting:delay_s=0.2": "7ed6b7c321d28772",
    "elastic-bsp:lookahead=5": "e31a28833703715f",
    "spec-sync": "dcec2bc88acc96f1",
    "bsp@0,elastic-bsp@10,spec-sync@20,ssp:staleness=1@30": "584cc4bff051f2fd",
}
"""Of all that `save` writes, except for `NEWER`. They change only with the rules of a model or of the simulation."""

NEWER = (
    "gradients",
    "gradients_per_s",
    "idle_s",
    "idle_share",
    "left_s",
    "last_push_s",
    "ledger",
    "samples",
    "samples_per_s",
    "worker_samples",
    "dropped_samples",
    "clipped_alone",
    "barriers",
    "sync_cost_s",
    "predicted_sync_cost_s",
)
"""Statistics that the summary has had only since these digests were taken."""


@pytest.mark.parametrize("sync", DIGESTS)
def test_the_bytes_of_a_simulated_run(sync: str, tmp_path: Path) -> None:
    folder = simulate(CLUSTER, sync, iterations=40, seed=1, record=True).save(tmp_path / "run")
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        if path.name == "summary.json":
            summary = msgspec.json.decode(content)
            kept = {name: value for name, value in summary.items() if name not in NEWER}
            content = msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n"
        digest.update(path.name.encode() + content)
    assert digest.hexdigest()[:16] == DIGESTS[sync]

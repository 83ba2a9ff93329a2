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
    "bsp": "1f9c3762ad4bf3e3",
    "asp": "447b809e139fc868",
    "ssp:staleness=2,execution=lazy": "c6aca8617feb3414",
    "dssp:lower=1,upper=5": "9bd2ed460a537e05",
    "dsps:lower=1,upper=5": "69577fb400af980f",
    "pssp:staleness=1": "f6e653b2fee0fa59",
    "dynamic-pssp:staleness=1": "f2ad85c0b179505a",
    "drop-stragglers:quorum=3": "1150f7b8b6994621",
    "naive-waiting:delay_s=0.2": "805789b21277f0fd",
    "elastic-bsp:lookahead=5": "b59be1f05b8ff97b",
    "spec-sync": "3af476db04499339",
    "bsp@0,elastic-bsp@10,spec-sync@20,ssp:staleness=1@30": "778d6246c6b6617d",
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

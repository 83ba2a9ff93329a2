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
    "bsp": "ed6553cb8e2fa8eb",
    "asp": "7f89198349893516",
    "ssp:staleness=2,execution=lazy": "1ebf217629a1ca3b",
    "dssp:lower=1,upper=5": "d04d3f49b17b310d",
    "dsps:lower=1,upper=5": "d1d6b8d74a717b2b",
    "pssp:staleness=1": "783e80f7f4b299b8",
    "dynamic-pssp:staleness=1": "41bbc91372d73b7e",
    "drop-stragglers:quorum=3": "9307faa8fc30a3f8",
    "naive-waiting:delay_s=0.2": "bc81cbd2eea6dd2f",
    "elastic-bsp:lookahead=5": "2718fd44ec44aa7e",
    "spec-sync": "6a4633890e233c06",
    "bsp@0,elastic-bsp@10,spec-sync@20,ssp:staleness=1@30": "6ee4d78502a13925",
}
"""Of all that `save` writes, except for `NEWER`. They change only with the rules of a model or of the simulation."""

NEWER = (
    "shard_bytes",
    "push_bytes",
    "pull_bytes",
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
    "worker_gradients",
    "dropped_samples",
    "clipped_alone",
    "clips",
    "barriers",
    "sync_cost_s",
    "predicted_sync_cost_s",
    "present_s",
    "waiting_s",
    "awaited_s",
    "waiting_share",
    "computing_share",
    "transfer_share",
    "loading_share",
    "wasted_s",
    "wasted_share",
    "paused_share",
    "outside_share",
    "time_use",
    "findings",
    "sampled_gradients",
    "unapplied",
    "imports",
)
"""Statistics that the summary has had, or has measured as it does now, only since these digests were taken."""


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

"""What the models do to the result of training, as they are described."""

from __future__ import annotations

import pytest

from paceline.sim import Cluster, simulate
from paceline.sim.times import LogNormal
from paceline.sync import parse
from paceline.sync.effects import effect_of

FRESH = ["bsp", "drop-stragglers:quorum=3", "rennala:batch=3"]
STALE = ["asp", "ssp:staleness=2", "elastic-bsp:lookahead=4", "spec-sync", "ringmaster:threshold=2"]


@pytest.mark.parametrize("sync", [*FRESH, *STALE])
def test_only_models_that_are_called_stale_apply_stale_gradients(sync: str) -> None:
    """The staleness of a push is recorded when it is applied."""
    cluster = Cluster(compute_s=[LogNormal(median=1.0, sigma=0.5)] * 4)
    measures = simulate(cluster, sync, 50).measures
    assert measures.updates > 0
    assert (effect_of([parse(sync)]) != "stale") == (measures.max_staleness == 0)

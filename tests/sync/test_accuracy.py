"""What the models do to the result of training, as they are described."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.sim import Cluster, simulate
from paceline.sim.times import LogNormal
from paceline.sync import parse
from paceline.sync.model import Samples, effect_of, samples_words
from paceline.sync.notation import parse_shards

FRESH = ["bsp", "drop-stragglers:quorum=3", "rennala:batch=3"]
STALE = ["asp", "ssp:staleness=2", "elastic-bsp:lookahead=4", "spec-sync", "ringmaster:threshold=2"]


@pytest.mark.parametrize("sync", [*FRESH, *STALE])
def test_only_models_that_are_called_stale_apply_stale_gradients(sync: str) -> None:
    """The staleness of a push is recorded when it is applied."""
    cluster = Cluster(compute_s=[LogNormal(median=1.0, sigma=0.5)] * 4)
    measures = simulate(cluster, sync, 50).measures
    assert measures.updates > 0
    assert (effect_of([parse(sync)]) != "stale") == (measures.max_staleness == 0)


KEEPS = "the script says 16: --joint-batch keeps 16"
REFERS = f"the hyper-parameters refer to 3 x 16 = 48 samples, {KEEPS}"


@pytest.mark.parametrize(
    ("sync", "changes", "words"),
    [
        ("bsp", {}, f"3 workers x 16 = 48 samples an update; {KEEPS}"),
        (
            "bsp",
            {"balanced": True},
            f"48 samples an update (3 workers x 16), divided in proportion to their speeds; {KEEPS}",
        ),
        ("bsp", {"joint": True, "batch": 48}, "48 samples an update, divided over 3 workers"),
        (
            "bsp",
            {"joint": True, "batch": 48, "balanced": True},
            "48 samples an update, divided over 3 workers, in proportion to their speeds",
        ),
        ("bsp", {"batch": 2}, "3 workers x 2 = 6 samples an update; the script says 2"),
        ("bsp", {"divisible": False}, "3 workers x 16 = 48 samples an update; the script says 16"),
        ("bsp", {"batch": None}, "3 batches of the loader an update, one of each worker"),
        (
            "bsp",
            {"batch": None, "loader": False},
            "3 batches of the script an update, one of each worker; the script has distributed no loader",
        ),
        (
            "asp",
            {"batch": None, "loader": False, "asked": True},
            "1 batch of the script an update, 3 under way at the same time; the script has distributed no loader, so "
            "--joint-batch divides nothing",
        ),
        ("bsp", {"workers": 1}, ""),
        ("asp", {}, f"16 samples an update, 3 under way at the same time; {REFERS}"),
        ("asp", {"translated": False}, "16 samples an update, 3 under way at the same time"),
        (
            "ssp:staleness=2",
            {"joint": True},
            "5 or 6 samples an update, 3 under way at the same time: 16, divided over 3 workers",
        ),
        ("asp", {"batch": None}, "1 batch of the loader an update, 3 under way at the same time"),
        ("drop-stragglers:quorum=2", {}, f"2 of 3 workers x 16 = 32 samples an update; {REFERS}"),
        (
            "drop-stragglers:quorum=2",
            {"joint": True},
            "about 11 samples an update: 16, divided over 3 workers, of which 2 count",
        ),
        (
            "rennala:batch=4",
            {"translated": False},
            "4 pushes x 16 = 64 samples an update; the script says 16",
        ),
        (
            "elastic-bsp:lookahead=5",
            {"joint": True, "batch": 18},
            "6 samples an update, and 18 at a barrier: 18, divided over 3 workers",
        ),
        (
            "bsp|asp",
            {"joint": True, "batch": 18},
            "bsp: 18 samples an update, divided over 3 workers; "
            "asp: 6 samples an update, 3 under way at the same time: 18, divided over 3 workers",
        ),
    ],
)
def test_the_samples_of_an_update_are_said(sync: str, changes: dict[str, Any], words: str) -> None:
    assert samples_words(parse_shards(sync), Samples(3, 16)._replace(**changes)) == words


@pytest.mark.parametrize("sync", [*FRESH, *STALE, "dssp", "dsps", "pssp:staleness=1,probability=0.5"])
def test_every_model_has_words_for_the_samples_of_an_update(sync: str) -> None:
    assert "samples an update" in samples_words(parse_shards(sync), Samples(4, 16))

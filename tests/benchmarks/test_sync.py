"""`python -m benchmarks sync`: every model is measured and shown. No test checks how fast anything is."""

from __future__ import annotations

import pytest

from benchmarks import sync
from paceline.sync import MODELS


def test_every_model_is_measured_with_few_and_with_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "GOALS_US", {10: 6.0, 300: 0.0})
    assert {type(model) for model in sync.MODELS} == set(MODELS.values())
    [figures] = sync.measure(lambda what, share, slow=False: None, pushes=300)
    assert [row.sync for row in figures.rows] == [str(model) for model in sync.MODELS]
    assert all(time_us > 0 for row in figures.rows for time_us in row.median_us.values())
    assert all(cells[-1].endswith(" !") for cells in figures.cells())

"""`python -m benchmarks sync`: every model is measured and shown. No test checks how fast anything is."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import commands, sync
from paceline.sync import MODELS


def test_every_model_is_measured_with_few_and_with_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "GOALS_US", {10: 6.0, 300: 12.0})
    assert {type(model) for model in sync.MODELS} == set(MODELS.values())
    rows = sync.measure(pushes=300)
    assert len(rows) == len(sync.MODELS) * len(sync.GOALS_US)
    assert all(row.median_us > 0 for row in rows)
    text = io.StringIO()
    Console(file=text, width=120).print(sync.cost_table(rows))
    for model in sync.MODELS:
        assert str(model) in text.getvalue()


def test_json_has_one_row_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    row = sync.CostRow("bsp", 10, 3.5, 6.0)
    monkeypatch.setattr(sync, "measure", lambda: [row])
    result = CliRunner().invoke(commands.app, ["sync", "--json"])
    assert result.exit_code == 0
    assert msgspec.json.decode(result.stdout, type=list[sync.CostRow]) == [row]

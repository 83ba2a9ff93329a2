"""SpecSync's grid search on the demo."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from paceline.errors import ConfigurationError
from paceline.lab.demo import DemoSetting
from paceline.sync import SpecSync, parse
from reproductions import cherry_pick
from tests.support.fake_trials import FakeTrials


def test_cherry_picking_tries_the_whole_grid_and_says_what_it_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeTrials()
    monkeypatch.setattr(cherry_pick, "run_trial", fake)
    text = io.StringIO()
    setting = DemoSetting("spec-sync:base=ssp:staleness=2", 0.1, 0.0)
    found = cherry_pick.cherry_pick(
        setting,
        console=Console(file=text, width=100),
        run_dir=tmp_path / "picked",
        abort_times_s=(0.01, 0.02),
        abort_rates=(0.0, 0.5, 1.0),
    )
    assert (found.trials, fake.count) == (6, 7)
    adaptive, *grid = [parse(outcome.sync) for outcome in found.outcomes]
    assert adaptive == parse(setting.sync)
    assert {(model.abort_time_s, model.abort_rate) for model in grid if isinstance(model, SpecSync)} == {
        (time_s, rate) for time_s in (0.01, 0.02) for rate in (0.0, 0.5, 1.0)
    }
    assert "6 trials: 2 abort times x 3 abort rates" in text.getvalue()
    assert (tmp_path / "picked" / "cherry-pick.json").exists()


def test_cherry_picking_refuses_an_impossible_point_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="abort_rate is -1"):
        cherry_pick.cherry_pick(
            DemoSetting("spec-sync", 0.1, 0.0),
            console=Console(file=io.StringIO()),
            run_dir=tmp_path / "picked",
            abort_rates=(-1.0,),
        )
    assert not (tmp_path / "picked").exists()

"""The search for the demo's settings: which points it measures, and that it continues where it was stopped."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from paceline.errors import ConfigurationError
from paceline.lab.demo import SETTINGS, DemoSetting, Problem
from reproductions import tune_demo
from reproductions.grid_search import Point, Score, learning_rate, search
from reproductions.result_file import append_results
from reproductions.tune_demo import STARTS, Measured, read_journal, tune
from tests.support.fake_trials import FakeTrials

NEVER = math.inf


# -- the search --------------------------------------------------------------------------------------------


class Valley:
    """A made-up measurement. Points far from the best step are slower, and each seed adds a little."""

    def __init__(self, best: dict[float, tuple[int, float]]) -> None:
        self.best = best  # the best step and the seconds there, by momentum
        self.calls: list[tuple[Point, int]] = []

    def __call__(self, point: Point, seed: int) -> Score:
        self.calls.append((point, seed))
        step, least_s = self.best[point.momentum]
        return Score(least_s + abs(point.step - step) + 0.01 * seed, 0.02)


def test_learning_rates_double_every_second_step() -> None:
    assert [learning_rate(step) for step in (-4, -2, 0, 2, 4)] == [0.025, 0.05, 0.1, 0.2, 0.4]


def test_search_finds_the_best_point_and_measures_it_with_all_seeds() -> None:
    valley = Valley({0.0: (3, 5.0), 0.9: (-5, 4.0)})
    finals = search(valley, {0.0: 2, 0.9: -4}, seeds=(0, 1, 2))
    assert next(iter(finals)) == Point(0.9, -5)
    assert finals[Point(0.9, -5)] == Score(4.01, 0.02)  # the median of three seeds
    assert {seed for point, seed in valley.calls if point == Point(0.9, -5)} == {0, 1, 2}
    assert len(valley.calls) == len(set(valley.calls))  # no point is measured twice with a seed


@pytest.mark.parametrize("best", [-15, 15])
def test_search_goes_on_while_the_best_point_is_the_last_of_its_grid(best: int) -> None:
    valley = Valley({0.0: (best, 5.0)})
    finals = search(valley, {0.0: 0}, seeds=(0,))
    steps = {point.step for point, _ in valley.calls}
    assert next(iter(finals)) == Point(0.0, best)
    assert min(steps) < best < max(steps)


def test_winner_has_won_against_both_neighbours_with_all_seeds() -> None:
    calls: set[tuple[Point, int]] = set()

    def measure(point: Point, seed: int) -> Score:
        """With the first seed step 0 is the best, with the others a step at the edge of the grid."""
        calls.add((point, seed))
        return Score(abs(point.step if seed == 0 else point.step + 5), 0.0)

    finals = search(measure, {0.0: 0}, seeds=(0, 1, 2))
    winner = next(iter(finals))
    assert winner == Point(0.0, -5)
    for neighbour in (Point(0.0, -6), Point(0.0, -4)):
        assert finals[neighbour] > finals[winner]
        assert {(neighbour, seed) for seed in (0, 1, 2)} <= calls


def test_bad_luck_of_one_seed_does_not_hide_the_best_point() -> None:
    def measure(point: Point, seed: int) -> Score:
        return Score(NEVER if (point.step, seed) == (0, 0) else 5 + abs(point.step), 0.0)

    assert next(iter(search(measure, {0.0: 0}, seeds=(0, 1, 2)))) == Point(0.0, 0)


def test_equal_times_are_decided_by_the_final_accuracy() -> None:
    finals = search(lambda point, seed: Score(5.0, abs(point.step - 1) / 100), {0.0: 0}, seeds=(0,))
    assert next(iter(finals)) == Point(0.0, 1)


def test_search_ends_where_nothing_ever_works() -> None:
    finals = search(lambda point, seed: Score(NEVER, 0.9), {0.0: 0, 0.9: 0}, seeds=(0, 1))
    assert all(score == Score(NEVER, 0.9) for score in finals.values())


# -- tuning ------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_trials(monkeypatch: pytest.MonkeyPatch) -> FakeTrials:
    fake = FakeTrials()
    monkeypatch.setattr(tune_demo, "run_trial", fake)
    return fake


def test_tuning_goes_on_where_it_stopped(tmp_path: Path, fake_trials: FakeTrials) -> None:
    console = Console(file=io.StringIO(), width=100)
    starts = {"bsp": {0.0: 0, 0.9: -2}, "asp": {0.0: 0}}
    best = tune(console=console, run_dir=tmp_path, starts=starts)
    assert best == [DemoSetting("bsp", 0.2, 0.0), DemoSetting("asp", 0.2, 0.0)]
    lines = (tmp_path / "tuning.jsonl").read_bytes().splitlines()
    assert len(lines) == fake_trials.count
    assert not list(tmp_path.glob("run-*"))  # the directories of the runs are removed

    (tmp_path / "tuning.jsonl").write_bytes(b"\n".join(lines[:5]) + b"\n")
    before = fake_trials.count
    assert tune(console=console, run_dir=tmp_path, starts=starts) == best
    assert fake_trials.count == before + len(lines) - 5
    assert tune(console=console, run_dir=tmp_path, starts=starts) == best
    assert fake_trials.count == before + len(lines) - 5


def test_tuning_prints_the_settings_to_be_kept(tmp_path: Path, fake_trials: FakeTrials) -> None:
    text = io.StringIO()
    tune(console=Console(file=text, width=100), run_dir=tmp_path, starts={"asp": {0.0: 0}})
    best = "Setting(sync='asp', learning_rate=0.2, momentum=0.0, batch='equal', hyperparameters='raw')"
    assert best in text.getvalue()


def test_journal_of_another_problem_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tuning.jsonl"
    record = Measured(
        problem=Problem(),
        setting=DemoSetting("bsp", 0.1, 0.0),
        seed=0,
        time_to_target_s=None,
        final_accuracy=0.5,
    )
    append_results(path, record)
    assert read_journal(path, Problem()) == {(DemoSetting("bsp", 0.1, 0.0), 0): record}
    with pytest.raises(ConfigurationError, match="another training task"):
        read_journal(path, Problem(target_accuracy=0.9))


def test_journal_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tuning.jsonl").write_text("hello\n")
    with pytest.raises(ConfigurationError, match="not a file of results"):
        read_journal(tmp_path / "tuning.jsonl", Problem())


def test_every_sync_model_of_the_demo_has_a_place_where_its_search_begins() -> None:
    assert set(STARTS) == {setting.sync for setting in SETTINGS}
    assert all(set(start) == {0.0, 0.9} for start in STARTS.values())

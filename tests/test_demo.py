"""The demo: its data, its rule for reaching the target, the search for settings, and the whole of it, small."""

from __future__ import annotations

import csv
import io
import math
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console

from paceline.errors import ConfigurationError
from paceline.report.accuracy import Curve
from paceline.report.comparison import TrialOutcome
from paceline.sync import MODELS, SpecSync, parse
from paceline.workloads import cherry_pick, demo, tuning
from paceline.workloads.demo import EVERY_SETTING, SETTINGS, run_demo
from paceline.workloads.digits import Digits, DigitsNet, Recipe, accuracy, load, train
from paceline.workloads.search import Point, Score, learning_rate, search
from paceline.workloads.trial import Problem, Setting, Trial, time_to_target
from paceline.workloads.tuning import STARTS, Journal, Measured, tune

NEVER = math.inf


# -- the data ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load()


def test_split_is_the_same_every_time(digits: Digits) -> None:
    again = load()
    assert torch.equal(digits.test_images, again.test_images)
    assert torch.equal(digits.train_labels, again.train_labels)


def test_split_is_disjoint_and_whole(digits: Digits) -> None:
    train_rows = {tuple(row) for row in digits.train_images.flatten(1).tolist()}
    test_rows = {tuple(row) for row in digits.test_images.flatten(1).tolist()}
    assert len(digits.train_labels) + len(digits.test_labels) == 1797
    assert len(train_rows) + len(test_rows) == 1797  # no image is there twice, so none is in both parts
    assert not train_rows & test_rows


def test_each_class_gives_a_fifth_to_the_test(digits: Digits) -> None:
    for digit in range(10):
        in_test = int((digits.test_labels == digit).sum())
        in_all = in_test + int((digits.train_labels == digit).sum())
        assert in_test == round(0.2 * in_all)


def test_missing_scikit_learn_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'paceline\[demo\]'"):
        load()


def test_training_alone_learns_and_stops_when_its_time_is_up(digits: Digits) -> None:
    recipe = Recipe(learning_rate=0.05, momentum=0.0, batch_size=16, duration_s=0.2, seed=0)
    train(digits, recipe)  # the network is its own; that it ends is what counts here


def test_equal_seeds_give_equal_initial_weights(digits: Digits) -> None:
    torch.manual_seed(3)
    one = DigitsNet().state_dict()
    torch.manual_seed(3)
    other = DigitsNet().state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert accuracy(one, digits) == accuracy(other, digits)


# -- the rule ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([0.1, 0.5, 0.95, 0.95], 1.5),  # at the target is enough; the second in a row counts
        ([0.1, 0.96, 0.94, 0.96, 0.97], 2.0),  # once is not enough
        ([0.1, 0.96, 0.94, 0.96], None),
        ([0.99, 0.99, 0.1], 0.5),  # what comes after does not count
        ([0.96], None),
        ([], None),
    ],
)
def test_target_is_reached_with_the_second_evaluation_in_a_row(
    accuracies: list[float], expected: float | None
) -> None:
    times_s = [0.5 * index for index in range(len(accuracies))]
    assert time_to_target(times_s, accuracies, target=0.95) == expected


# -- the search --------------------------------------------------------------------------------------------


class Valley:
    """A made-up measurement: the farther from the best step, the slower; each seed adds its own number."""

    def __init__(self, best: dict[float, tuple[int, float]]) -> None:
        self.best = best  # momentum -> (best step, seconds there)
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
    assert len(valley.calls) == len(set(valley.calls))  # nothing twice


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
        """The first seed likes step 0 best, the others one at the edge of what it had measured."""
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


class FakeTrials:
    """Stands in for live runs: best at step 2 without momentum."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(
        self,
        digits: Digits,
        problem: Problem,
        setting: Setting,
        seed: int,
        *,
        run_dir: Path,
        progress: bool | None,
    ) -> Trial:
        self.count += 1
        time_s = 5 + abs(math.log2(setting.learning_rate / 0.2)) + setting.momentum + 0.1 * seed
        plain = TrialOutcome(
            sync=setting.sync,
            learning_rate=setting.learning_rate,
            momentum=setting.momentum,
            seeds=(seed,),
            target_accuracy=problem.target_accuracy,
            time_to_target_s=time_s if time_s < 7.5 else None,
            final_accuracy=0.9,
            updates_per_s=1.0,
            waiting_share=0.0,
            mean_staleness=0.0,
            max_staleness=0,
            emulated="",
        )
        return Trial(plain, Curve(setting.sync, (), (), None), run_dir)


@pytest.fixture
def fake_trials(monkeypatch: pytest.MonkeyPatch) -> FakeTrials:
    fake = FakeTrials()
    monkeypatch.setattr(tuning, "run_trial", fake)
    return fake


def test_tuning_goes_on_where_it_stopped(tmp_path: Path, fake_trials: FakeTrials) -> None:
    console = Console(file=io.StringIO(), width=100)
    starts = {"bsp": {0.0: 0, 0.9: -2}, "asp": {0.0: 0}}
    best = tune(console=console, run_dir=tmp_path, starts=starts)
    assert best == [Setting("bsp", 0.2, 0.0), Setting("asp", 0.2, 0.0)]
    lines = (tmp_path / "tuning.jsonl").read_bytes().splitlines()
    assert len(lines) == fake_trials.count
    assert not list(tmp_path.glob("run-*"))  # the runs' own directories are gone

    (tmp_path / "tuning.jsonl").write_bytes(b"\n".join(lines[:5]) + b"\n")
    before = fake_trials.count
    assert tune(console=console, run_dir=tmp_path, starts=starts) == best
    assert fake_trials.count == before + len(lines) - 5
    assert tune(console=console, run_dir=tmp_path, starts=starts) == best
    assert fake_trials.count == before + len(lines) - 5


def test_tuning_prints_the_settings_to_be_kept(tmp_path: Path, fake_trials: FakeTrials) -> None:
    text = io.StringIO()
    tune(console=Console(file=text, width=100), run_dir=tmp_path, starts={"asp": {0.0: 0}})
    assert "Setting(sync='asp', learning_rate=0.2, momentum=0.0)" in text.getvalue()


def test_journal_of_another_problem_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tuning.jsonl"
    journal = Journal(path, Problem())
    record = Measured(
        problem=Problem(),
        setting=Setting("bsp", 0.1, 0.0),
        seed=0,
        time_to_target_s=None,
        final_accuracy=0.5,
    )
    journal.add(record)
    assert Journal(path, Problem()).get(Setting("bsp", 0.1, 0.0), 0) == record
    with pytest.raises(ConfigurationError, match="other paces"):
        Journal(path, Problem(target_accuracy=0.9))


def test_journal_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tuning.jsonl").write_text("hello\n")
    with pytest.raises(ConfigurationError, match="not a journal"):
        Journal(tmp_path / "tuning.jsonl", Problem())


def test_every_sync_model_of_the_demo_has_a_place_where_its_search_begins() -> None:
    assert set(STARTS) == {setting.sync for setting in SETTINGS}
    assert all(set(start) == {0.0, 0.9} for start in STARTS.values())


# -- the whole ---------------------------------------------------------------------------------------------

TINY = Problem(
    pace_s=(0.01, 0.03),
    servers=1,
    batch_size=16,
    duration_s=1.5,
    snapshot_every_s=0.25,
    target_accuracy=0.2,
)
TWO = (Setting("bsp", 0.1, 0.9), Setting("elastic-bsp:lookahead=5", 0.05, 0.0))


@pytest.mark.processes
def test_demo_trains_judges_and_leaves_table_curves_and_picture(tmp_path: Path) -> None:
    text = io.StringIO()
    console = Console(file=text, width=80)
    outcomes = run_demo(
        console=console, run_dir=tmp_path / "demo", settings=TWO, problem=TINY, progress=False
    )
    home = tmp_path / "demo"

    bsp, elastic = outcomes
    assert bsp.updates_per_s < elastic.updates_per_s
    assert bsp.waiting_share > elastic.waiting_share
    assert (bsp.mean_staleness, bsp.max_staleness) == (0.0, 0)
    assert elastic.max_staleness > 0
    assert all(outcome.final_accuracy > 0.2 for outcome in outcomes)

    summary = msgspec.json.decode((home / "summary.json").read_bytes())
    assert [row["sync"] for row in summary] == ["bsp", "elastic-bsp:lookahead=5"]
    assert msgspec.convert(summary, list[TrialOutcome]) == outcomes
    assert all("0.01, 0.03" in row["emulated"] for row in summary)

    with (home / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    times_s = [float(row["time_s"]) for row in rows if row["sync"] == "bsp"]
    assert times_s == sorted(set(times_s))
    assert all((time_s / 0.25).is_integer() for time_s in times_s)  # the grid
    assert times_s[-1] >= 1.0

    assert (home / "comparison.png").stat().st_size > 50_000
    for run in ("bsp-seed-0", "elastic-bsp-lookahead-5-seed-0"):
        assert (home / run / "worker-1.jsonl").exists()
        assert (home / run / "trace-shard-0.jsonl").exists()
    printed = text.getvalue().rstrip().splitlines()
    assert printed[-1].endswith(str(home))


def test_demo_without_matplotlib_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits: Digits
) -> None:
    monkeypatch.setattr(demo, "run_trial", FakeTrials())
    monkeypatch.setattr(demo, "read_timeline", lambda run_dir: None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = io.StringIO()
    run_demo(console=Console(file=text, width=80), run_dir=tmp_path / "demo", seeds=(0, 1, 2))
    assert "no picture: pictures are drawn with matplotlib" in text.getvalue()
    assert (tmp_path / "demo" / "summary.json").exists()
    assert text.getvalue().rstrip().endswith(str(tmp_path / "demo"))


def test_demo_with_several_seeds_gives_medians(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run_trial", FakeTrials())
    monkeypatch.setattr(demo, "_save_picture", lambda *anything: None)
    settings = (Setting("asp", 0.2, 0.0),)
    [outcome] = run_demo(
        console=Console(file=io.StringIO()), run_dir=tmp_path / "demo", settings=settings, seeds=(0, 1, 2)
    )
    assert outcome.seeds == (0, 1, 2)
    assert outcome.time_to_target_s == pytest.approx(5.1)
    trials = msgspec.json.decode((tmp_path / "demo" / "trials.json").read_bytes(), type=list[TrialOutcome])
    assert [trial.seeds for trial in trials] == [(0,), (1,), (2,)]


def test_demo_refuses_no_seeds_and_a_directory_that_is_taken(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    with pytest.raises(ConfigurationError, match="seeds is empty"):
        run_demo(console=console, run_dir=tmp_path, seeds=())
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="already contains a run"):
        run_demo(console=console, run_dir=tmp_path)


# -- every sync model, and SpecSync's grid search ------------------------------------------------------------


def test_the_comparison_of_all_has_every_sync_model() -> None:
    assert {type(parse(setting.sync)) for setting in EVERY_SETTING} == set(MODELS.values())
    assert set(SETTINGS) <= set(EVERY_SETTING)


def test_the_comparison_of_all_shows_delayed_pulls_and_aborts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "run_trial", FakeTrials())
    monkeypatch.setattr(demo, "_save_picture", lambda *anything: None)
    text = io.StringIO()
    run_demo(console=Console(file=text, width=110), run_dir=tmp_path / "demo", settings=EVERY_SETTING)
    printed = text.getvalue()
    assert "aborts" in printed
    assert "under 16 sync models" in printed
    assert len({path.name for path in (tmp_path / "demo").iterdir()} - {"demo"}) >= 3


def test_cherry_picking_tries_the_whole_grid_and_says_what_it_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeTrials()
    monkeypatch.setattr(cherry_pick, "run_trial", fake)
    text = io.StringIO()
    setting = Setting("spec-sync:base=ssp:staleness=2", 0.1, 0.0)
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
            Setting("spec-sync", 0.1, 0.0),
            console=Console(file=io.StringIO()),
            run_dir=tmp_path / "picked",
            abort_rates=(-1.0,),
        )
    assert not (tmp_path / "picked").exists()

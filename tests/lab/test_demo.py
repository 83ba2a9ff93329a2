"""The demo: its data, its rule for reaching the target, and a small run of all of it."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console

import paceline.lab.demo
from paceline.errors import ConfigurationError
from paceline.lab.demo import (
    EVERY_SETTING,
    OWN_BEST,
    QUICK,
    QUICK_SETTINGS,
    SETTINGS,
    TRANSLATED,
    DemoSetting,
    Digits,
    DigitsNet,
    Problem,
    Recipe,
    accuracy,
    draw,
    load,
    run_demo,
    time_to_target,
    train,
)
from paceline.look.tables import TrialOutcome
from paceline.sync import MODELS, Rennala, Ringmaster, parse
from paceline.trace.run_dir import read_metrics
from tests.support.fake_trials import FakeTrials

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


def test_generated_images_take_the_place_of_the_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the same each time, need no extra, and have as many images in each class."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    first, again = draw(), draw()
    assert torch.equal(first.train_images, again.train_images)
    assert (first.train_images.shape, first.test_images.shape) == ((1440, 1, 8, 8), (360, 1, 8, 8))
    assert first.test_labels.bincount().tolist() == [36] * 10
    assert 0.0 <= float(first.train_images.min()) < float(first.train_images.max()) <= 1.0


def test_generated_images_are_learned_within_the_time_of_the_quick_demo() -> None:
    """With equal batches, bsp makes about 65 updates in this time, each with a joint batch of 128 images."""
    images = draw()
    torch.manual_seed(0)
    model, generator = DigitsNet(), torch.Generator().manual_seed(0)
    bsp = QUICK_SETTINGS[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=bsp.learning_rate, momentum=bsp.momentum)
    for _ in range(int(QUICK.duration_s / max(QUICK.pace_s))):
        batch = torch.randint(len(images.train_labels), (4 * QUICK.batch_size,), generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            model(images.train_images[batch]), images.train_labels[batch]
        ).backward()
        optimizer.step()
    assert accuracy(model.state_dict(), images) > QUICK.target_accuracy


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
    assert time_to_target(list(zip(times_s, accuracies, strict=True)), target=0.95) == expected


# -- the whole ---------------------------------------------------------------------------------------------

TINY = Problem(
    pace_s=(0.01, 0.03),
    servers=1,
    batch_size=16,
    duration_s=1.5,
    snapshot_every_s=0.25,
    target_accuracy=0.2,
)
TWO = (DemoSetting("bsp", 0.1, 0.9), DemoSetting("elastic-bsp:lookahead=5", 0.05, 0.0))


@pytest.mark.processes
def test_demo_trains_judges_and_leaves_table_curves_and_page(tmp_path: Path) -> None:
    text = io.StringIO()
    console = Console(file=text, width=80)
    outcomes = run_demo(
        console=console, run_dir=tmp_path / "demo", settings=TWO, problem=TINY, progress=False
    )
    home = tmp_path / "demo"

    bsp, elastic = outcomes
    assert min(bsp.samples_per_s, elastic.samples_per_s) > 0
    assert 0 < bsp.waiting_share < 1
    assert (bsp.mean_staleness, bsp.max_staleness) == (0.0, 0)
    assert elastic.max_staleness > 0
    # How much is learned in so short a time depends on what else the machine does.
    assert all(0 < outcome.final_accuracy <= 1 for outcome in outcomes)

    summary = msgspec.json.decode((home / "summary.json").read_bytes())
    assert [row["sync"] for row in summary] == ["bsp", "elastic-bsp:lookahead=5"]
    assert msgspec.convert(summary, list[TrialOutcome]) == outcomes
    assert all("0.01,0.03" in row["emulated"] for row in summary)

    with (home / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    times_s = [float(row["time_s"]) for row in rows if row["sync"] == "bsp"]
    assert times_s == sorted(set(times_s))
    assert all((time_s / TINY.snapshot_every_s).is_integer() for time_s in times_s)  # the grid
    assert times_s[-1] >= TINY.duration_s / 3

    assert "bsp-seed-0" in (home / "comparison.html").read_text()
    shown = read_metrics(home / "bsp-seed-0")["accuracy"]
    assert list(shown.time_s) == times_s
    assert all(0 <= value <= 1 for value in shown.values)
    assert shown.updates[-1] > 0
    for run in ("bsp-seed-0", "elastic-bsp-lookahead-5-seed-0"):
        assert (home / run / "report.html").exists()
        assert (home / run / "worker-1.jsonl").exists()
        assert (home / run / "trace-shard-0.jsonl").exists()
    printed = text.getvalue().rstrip().splitlines()
    assert printed[-1].endswith(str(home))


def test_demo_needs_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits: Digits) -> None:
    monkeypatch.setattr(paceline.lab.demo, "run_trial", FakeTrials())
    monkeypatch.setattr(paceline.lab.demo, "_save_page", lambda *anything: None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = io.StringIO()
    run_demo(console=Console(file=text, width=80), run_dir=tmp_path / "demo", seeds=(0, 1, 2))
    assert (tmp_path / "demo" / "summary.json").exists()
    assert text.getvalue().rstrip().endswith(str(tmp_path / "demo"))


def test_demo_with_several_seeds_gives_medians(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paceline.lab.demo, "run_trial", FakeTrials())
    monkeypatch.setattr(paceline.lab.demo, "_save_page", lambda *anything: None)
    settings = (DemoSetting("asp", 0.2, 0.0),)
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


# -- every sync model ------------------------------------------------------------------------------------------


def test_the_comparison_of_all_has_every_sync_model() -> None:
    one_shard = {Rennala, Ringmaster}  # the demo has two servers
    assert {type(parse(setting.sync)) for setting in EVERY_SETTING} == set(MODELS.values()) - one_shard
    assert set(OWN_BEST) <= set(EVERY_SETTING)


def test_every_model_of_the_demo_has_the_hyper_parameters_of_bsp_and_its_own_best_ones() -> None:
    bsp = OWN_BEST[0]
    assert set(SETTINGS) == {*OWN_BEST, *TRANSLATED}
    assert {setting.sync for setting in TRANSLATED} == {setting.sync for setting in OWN_BEST} - {"bsp"}
    for setting in TRANSLATED:
        same = (setting.learning_rate, setting.momentum) == (bsp.learning_rate, bsp.momentum)
        assert same
        assert setting.hyperparameters == "translated"
    assert {setting.hyperparameters for setting in (*OWN_BEST, *EVERY_SETTING)} == {"raw"}
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)


def test_the_table_says_which_hyper_parameters_a_row_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paceline.lab.demo, "run_trial", FakeTrials())
    monkeypatch.setattr(paceline.lab.demo, "_save_page", lambda *anything: None)
    text = io.StringIO()
    run_demo(console=Console(file=text, width=80), run_dir=tmp_path / "demo")
    assert "elastic-bsp:lookahead=15" in text.getvalue()  # the table has its columns in full
    words = " ".join(text.getvalue().split())
    assert "asp 0.14, 0.9" in words
    assert words.count(" translated ") == len(TRANSLATED)
    assert "asp 0.14, 0 " in words
    assert "translated: with the learning rate and momentum of bsp, as if only --sync had changed" in words


def test_the_comparison_of_all_shows_delayed_pulls_and_aborts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paceline.lab.demo, "run_trial", FakeTrials())
    monkeypatch.setattr(paceline.lab.demo, "_save_page", lambda *anything: None)
    text = io.StringIO()
    run_demo(console=Console(file=text, width=110), run_dir=tmp_path / "demo", settings=EVERY_SETTING)
    printed = text.getvalue()
    assert "aborts" in printed
    assert "under each of 17 settings" in printed
    assert len({path.name for path in (tmp_path / "demo").iterdir()} - {"demo"}) >= 3

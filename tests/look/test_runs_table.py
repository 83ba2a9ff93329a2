"""Tables that fit the screen: no line is too long, and no word is cut."""

from __future__ import annotations

import re
from functools import cache

import pytest
from rich.table import Table

from paceline.lab.demo import EVERY_SETTING, SETTINGS
from paceline.lab.ranking import EVERY_MODEL, rank
from paceline.look.tables import Figures, TrialOutcome, comparison_table, ranking_table, runs_table
from paceline.sim import Cluster, Dataset
from paceline.start.terminal import plain_console

CLUSTER = Cluster(compute_s=[1.0, 1.0, 3.0], latency_s=0.01)


def printed(table: Table, width: int) -> str:
    console = plain_console(width=width)
    with console.capture() as capture:
        console.print(table)
    text = capture.get()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    return text


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z][\w=:-]*", text))


@cache
def ranked(data: Dataset | None) -> list[Figures]:
    return rank(CLUSTER, [*EVERY_MODEL, "drop-stragglers:quorum=2"], iterations=5, data=data)


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("data", [None, Dataset(samples=600, batch_size=8)], ids=["no data", "data"])
def test_a_ranking_fits_the_screen_without_cut_words(data: Dataset | None, width: int) -> None:
    rows = ranked(data)
    text = printed(ranking_table("a cluster", rows, "a caption of several words", width), width)
    whole = printed(ranking_table("a cluster", rows, "a caption of several words", 200), 200)
    assert words(text) - {"left", "out", "in", "columns:"} <= words(whole) | {"time", "pulls"}
    for row in rows:
        assert f"{row.mean_staleness:.1f}, {row.max_staleness}" in text
        assert (f"{row.epoch_s:.4g}" if row.epoch_s is not None else f"{row.speed:.4g}") in text
    assert ("left out" in " ".join(text.split())) == (width < 80)
    assert (" waited" in text.partition("─")[0]) == (width >= 60)


def outcome(name: str, batch: str, hyperparameters: str) -> TrialOutcome:
    return TrialOutcome(
        sync=name,
        batch=batch,
        hyperparameters=hyperparameters,
        learning_rate=0.0125,
        momentum=0.9,
        seeds=(0,),
        target_accuracy=0.95,
        time_to_target_s=12.34,
        final_accuracy=0.975,
        updates_per_s=16.0,
        gradients_per_s=64.0,
        samples_per_s=4742.4,
        waiting_share=0.5,
        mean_staleness=12.34,
        max_staleness=123,
        emulated="--pace 0.02,0.06 (minimum seconds per iteration)",
    )


@pytest.mark.parametrize("width", [40, 60, 80])
@pytest.mark.parametrize("every", [False, True])
def test_the_table_of_the_demo_fits_the_screen(every: bool, width: int) -> None:
    settings = EVERY_SETTING if every else SETTINGS
    found = [outcome(setting.sync, setting.batch, setting.hyperparameters) for setting in settings]
    text = printed(comparison_table(found, every=every, width=width), width)
    assert text.count("12.34") == len(found) if width > 40 else "12.34" in text
    assert "97.5%" in text


def test_the_least_important_columns_are_left_out_first_and_named() -> None:
    columns = {"first\ncolumn": ["1.5"], "second\ncolumn": ["2.5"], "third\ncolumn": ["3.5"]}
    table = runs_table(
        ["a name"],
        columns,
        expendable=("second\ncolumn", "third\ncolumn"),
        width=24,
        title="[title]",
        caption="[caption]",
    )
    text = printed(table, 24)
    assert {"1.5", "3.5", "[title]", "[caption]"} <= set(text.split())
    assert "2.5" not in text
    assert "left out in 24 columns: second column" in " ".join(text.split())


def test_a_word_that_is_longer_than_half_of_the_screen_is_continued_on_the_next_line() -> None:
    name = "conditions:pull=" + "x" * 60
    text = printed(runs_table([name], {"n": ["1"]}, expendable=(), width=40), 40)
    assert "".join(line.split()[0] for line in text.splitlines()[2:]) == name

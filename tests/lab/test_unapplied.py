"""Runs whose sync model holds or drops what it should apply: they say so first, and are never recommended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.lab.advice import advise
from paceline.lab.ranking import EVERY_MODEL, rank, sweep
from paceline.look.summary import summary_rows
from paceline.sim import Cluster, Dataset, Presence, Uniform, simulate
from paceline.trace.findings import find
from paceline.trace.measures import PushFates, missing_updates, unapplied_pushes
from tests.support.live import run_program
from tests.support.marks import thorough

UNEVEN = Cluster(compute_s=[Uniform(low=0.9, high=1.1)] * 3 + [3.0])
HELD = (
    "Nothing was trained: none of the {0} pushes was applied. The sync model held {0} of them until the end, and 0 "
    "were dropped or had no usable gradient. If the model is your own, test it with paceline.testing.check."
)
SCRIPT = """
import torch
import paceline

model = torch.nn.Linear(4, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
for _ in range(10):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""

WITH_LOSS = f"""
{SCRIPT.partition("    optimizer")[0]}
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss
    optimizer.step(closure)
"""


def paceline_exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr("sys.argv", ["paceline", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def counts(*, applied: int = 0, averaged: int = 0, dropped: int = 0, lost: int = 0) -> PushFates:
    return PushFates(applied=applied, averaged=averaged, dropped=dropped, refused=0, lost=lost)


@pytest.mark.parametrize(
    ("pushes", "unapplied", "words"),
    [
        (counts(), 0, ""),
        (counts(applied=100), 0, ""),
        (counts(averaged=96, lost=4), 0, ""),
        (counts(applied=1, dropped=99), 0, ""),
        (counts(averaged=99, lost=1), 1, ""),
        (
            counts(averaged=98, lost=2),
            2,
            "2 of 100 pushes (2%) were never applied: the sync model held them until ",
        ),
        (
            counts(dropped=7),
            0,
            "Nothing was trained: none of the 7 pushes was applied. The sync model held 0 ",
        ),
        (counts(lost=120), 120, HELD.format(120)),
    ],
)
def test_what_is_said_about_pushes_that_were_never_applied(
    pushes: PushFates, unapplied: int, words: str
) -> None:
    said = unapplied_pushes(pushes, unapplied)
    assert said.startswith(words) if words else said == ""
    assert ("paceline.testing.check" in said) == (bool(words) and pushes.lost > 0)


@pytest.mark.usefixtures("failing")
def test_a_model_that_holds_every_push_says_so_first() -> None:
    result = simulate(UNEVEN, "failing:how=holds", 30)
    assert result.measures.unapplied == result.measures.pushes.lost == 120
    assert result.findings == result.summary["findings"] == [HELD.format(120)]
    assert find(result.measures)[0] == HELD.format(120)
    rows = summary_rows({**result.summary, "ended": "finished"})
    assert next(iter(rows.items())) == ("warning", HELD.format(120))
    assert rows["updates"] == "0"


@pytest.mark.parametrize(
    "sync",
    [*EVERY_MODEL, "drop-stragglers:quorum=2", "rennala:batch=3", "ringmaster:threshold=2", "bsp@0,asp@10"],
)
@pytest.mark.parametrize("until_s", [4.7, 31.3])
def test_a_model_of_the_package_never_says_so_wherever_a_run_is_cut_off(sync: str, until_s: float) -> None:
    """A round in progress, and what lost workers had pushed, is not the model's fault."""
    lost = {1: Presence(lost_at_s=9.5, back_after_s=3.0), 2: Presence(lost_at_s=20.2)}
    cluster = Cluster(compute_s=UNEVEN.compute_s, servers=1, latency_s=0.2, presence=lost)
    cut = simulate(cluster, sync, None, until_s=until_s)
    assert cut.findings == []
    assert simulate(cluster, sync, 20).findings == []


DATA = Dataset(samples=2000, batch_size=10, epochs=2)


def test_a_run_that_makes_far_fewer_updates_than_bsp_says_so() -> None:
    cluster = Cluster(compute_s=UNEVEN.compute_s, servers=1, latency_s=0.02)
    result = simulate(cluster, "rennala:batch=4", data=DATA)
    measures = result.measures
    # As many samples are 400 gradients, of which bsp makes 100 updates.
    share = measures.dropped_samples / 4000
    assert 0.25 < share < 0.6
    assert measures.updates < 75
    [sentence] = result.findings
    assert sentence.startswith(f"{share:.0%} of the samples were in gradients that were dropped")
    assert f"has made {measures.updates} updates, while bsp makes about 100 with as many samples" in sentence
    assert f"about {measures.updates / 100:.1f} times as far" in sentence
    assert find(measures)[0] == sentence


DROPPING = ("drop-stragglers:quorum=2", "drop-stragglers:quorum=1", "ringmaster:threshold=4")
REPRESENTATIVES = (
    *("bsp", "ssp:staleness=3", "elastic-bsp:lookahead=15", "spec-sync"),
    *("drop-stragglers:quorum=2", "drop-stragglers:quorum=1"),
)
"""A barrier of all, one by staleness, one that is planned, restarts, and models that drop few and many pushes."""


@pytest.mark.parametrize(
    "sync",
    [
        *REPRESENTATIVES,
        *thorough(*(each for each in (*EVERY_MODEL, *DROPPING) if each not in REPRESENTATIVES)),
    ],
)
@pytest.mark.parametrize("until_s", [31.3, 1e6, *thorough(3.3)])
def test_models_that_make_up_for_what_they_drop_do_not_say_so(sync: str, until_s: float) -> None:
    lost = {1: Presence(lost_at_s=9.5, back_after_s=3.0), 2: Presence(lost_at_s=20.2)}
    for presence in ({}, lost):
        cluster = Cluster(compute_s=UNEVEN.compute_s, servers=1, latency_s=0.2, presence=presence)
        result = simulate(cluster, sync, until_s=until_s, data=DATA)
        assert missing_updates(result.measures) == ""


def test_nothing_is_said_if_the_numbers_of_samples_are_unknown() -> None:
    measures = simulate(UNEVEN, "rennala:batch=4", 100, shards=1).measures
    assert measures.pushes.dropped > 100
    assert not measures.samples
    assert missing_updates(measures) == ""


@pytest.mark.usefixtures("failing", "one_core")
def test_models_that_do_not_train_come_last_without_a_star() -> None:
    rows = rank(
        UNEVEN, ["failing:how=holds", "bsp", "failing:how=drops", "failing:how=pushed"], iterations=10
    )
    assert [row.sync for row in rows if row.sound] == ["bsp"] == [row.sync for row in rows[:1]]
    assert [row.sync for row in rows if row.front] == ["bsp"]
    by_name = {row.sync: row for row in rows}
    assert by_name["failing:how=holds"].speed == 0.0
    assert by_name["failing:how=holds"].unapplied.startswith("Nothing was trained: none of the ")
    assert by_name["failing:how=drops"].unapplied.startswith("Nothing was trained: none of the ")
    assert by_name["failing:how=pushed"].failure.startswith(
        "the sync model failing:how=pushed raised KeyError"
    )


@pytest.mark.usefixtures("failing", "one_core")
def test_a_model_that_stops_the_simulation_does_not_stop_the_others() -> None:
    rows = rank(UNEVEN, ["failing:how=blocks", "asp"], iterations=10)
    assert [row.sync for row in rows] == ["asp", "failing:how=blocks"]
    assert rows[1].failure.startswith("every worker waits, and no condition will release any of them:\n")
    assert "worker 3" in rows[1].failure
    assert "the sync model failing:how=blocks, which does not describe its delayed pulls" in rows[1].failure
    assert [
        row.failure == "" for _, row in sweep(UNEVEN, ["ssp"], "staleness", [1.0, 2.0], iterations=5)
    ] == [True] * 2


@pytest.mark.thorough
@pytest.mark.usefixtures("failing")
def test_a_comparison_marks_them_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sync = "failing:how=holds,bsp,failing:how=pushed,asp"
    arguments = ["--sync", sync, "--import", "failing_models", "--iterations", "10", "--out", "out"]
    assert paceline_exit_code(monkeypatch, "simulate", "elastic-bsp", *arguments) == 0
    printed = capsys.readouterr().out
    marks = [line[:1] for line in printed.splitlines() if line.startswith(("* ", "  bsp", "! "))]
    assert marks == ["*", "*", "*", "!", "!"]
    words = " ".join(printed.split())
    assert "!: this model is not recommended, for the reason below" in words
    assert "failing:how=holds: Nothing was trained: none of the " in words
    assert (
        "failing:how=pushed: the sync model failing:how=pushed raised KeyError: 'missing' at shard 0" in words
    )
    assert 'in look_up return names["missing"]' in words
    found = json.loads(Path("out", "ranking.json").read_text())
    assert [row["front"] for row in found["rows"]] == [True, True, True, False, False]
    assert "failing" not in found["recommendation"]["text"]
    assert Path("out", "ranking.png").exists()
    assert Path("out", "timelines.png").exists()


@pytest.mark.usefixtures("failing")
def test_if_every_model_fails_the_comparison_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--sync",
        "failing:how=pushed",
        "--import",
        "failing_models",
        "--iterations",
        "10",
        "--out",
        "out",
    ]
    assert paceline_exit_code(monkeypatch, "simulate", "elastic-bsp", *arguments) == 1
    assert "every simulation failed: failing:how=pushed: the sync model" in capsys.readouterr().err


@pytest.mark.chaos
@pytest.mark.usefixtures("failing")
def test_a_script_trains_under_the_models_that_do_not_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text(WITH_LOSS)
    Path("small.toml").write_text('[[workers]]\ncount = 2\ncompute = "1 s"\n')
    sync = "failing:how=pushed,bsp,failing:how=holds"
    options = ["--sync", sync, "--import", "failing_models", "--script", "train.py", "--out", "out"]
    assert paceline_exit_code(monkeypatch, "simulate", "small.toml", *options) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "The last loss of bsp is" in words
    assert "! failing: how=holds" in words
    assert "failing:how=pushed: the sync model failing:how=pushed raised KeyError: 'missing'" in words


@pytest.mark.usefixtures("failing", "one_core")
def test_they_are_never_advised(tmp_path: Path) -> None:
    run_dir = simulate(UNEVEN, "failing:how=holds", 60, record=True).save(tmp_path / "run")
    report = advise(run_dir, ["failing:how=holds", "failing:how=drops", "failing:how=pushed", "asp"])
    assert report.findings[0] == HELD.format(240)
    assert {advice.sync for advice in report.advice} == {"bsp", "asp"}


@pytest.mark.processes
@pytest.mark.usefixtures("mark")
def test_the_terminal_says_it_in_the_first_line_of_the_summary(failing: Path) -> None:
    (failing / "train.py").write_text(SCRIPT)
    options = [
        "--servers",
        "1",
        "--sync",
        "failing:how=holds",
        "--import",
        "failing_models",
        "--run-dir",
        "run",
    ]
    ended = run_program("-m", "paceline", "run", *options, "train.py")
    assert ended.returncode == 0
    words = " ".join(ended.stdout.split())
    assert words.startswith(f"warning {HELD.format(20)} sync failing:how=holds ")
    assert words.count("Nothing was trained") == 1
    assert json.loads(Path("run", "summary.json").read_text())["findings"][0] == HELD.format(20)

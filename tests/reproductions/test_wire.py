"""What codecs cost: short runs of the comparison, what is kept of them, and what it says of good and bad codecs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import paceline
from paceline.core.layout import CODECS
from paceline.shard.codecs import PACKERS, Int4
from reproductions import wire
from reproductions.commands import main
from reproductions.kept_runs import KeptRuns, key_of
from reproductions.wire import PLACES, WITHOUT_FEEDBACK, Run
from tests.support.marks import thorough

MLP = Run("digits-mlp", "adamw", "4 workers", "int4")

REPRESENTATIVES = ("4 workers", "4 workers, asp", "speeds 3:3:3:1, balanced")
"""These differ in the updates: means of equal parts, single pushes, and means of balanced parts."""


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are shorter, but not so short that no worker is replaced."""
    for name, place in PLACES.items():
        steps = 120 if "replaced" in name else 20
        monkeypatch.setitem(PLACES, name, place._replace(steps=steps))


def qualities(run: Run) -> list[float]:
    found: list[float] = wire.train(run)["values"]
    return found


def keep(path: Path, cell: Run, exact: list[float], coded: list[float]) -> None:
    """Write results of a cell to a file."""
    kept = KeptRuns(path)
    for codec, values in (("float32", exact), (cell.codec, coded)):
        for seed, value in enumerate(values):
            run = cell._replace(codec=codec, seed=seed)
            kept.keep({key_of(run.parameters): {"values": [value]}})


@pytest.mark.parametrize(
    "place", [*REPRESENTATIVES, *thorough(*(place for place in PLACES if place not in REPRESENTATIVES))]
)
def test_something_is_learned_at_each_place(place: str) -> None:
    codec = PLACES[place].codecs[-1]
    values = qualities(Run("digits-mlp", "sgd", place, codec))
    assert len(values) == wire.LAST
    assert all(value > 70 for value in values)


@pytest.mark.thorough
def test_each_codec_rounds_in_its_own_way_and_only_a_little() -> None:
    run = MLP._replace(problem="text-gpt")
    exact, *rounded = [qualities(run._replace(codec=codec)) for codec in ("float32", *wire.ALL)]
    assert len({values[-1] for values in (exact, *rounded)}) == 1 + len(wire.ALL)
    for values in rounded:
        assert values == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("problem", ["digits-mlp", *thorough("digits-cnn")])
def test_a_run_can_be_repeated(problem: str) -> None:
    run = MLP._replace(problem=problem, seed=3)
    values = qualities(run)
    assert values == qualities(run)
    assert values == pytest.approx(qualities(run._replace(codec="float32")), rel=0.1)


def test_the_feedback_is_back_after_a_run_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    simulate = paceline.simulate

    def watched(*arguments: Any, **settings: Any) -> object:
        seen.append(CODECS["int4"].feedback)
        return simulate(*arguments, **settings)

    monkeypatch.setattr(paceline, "simulate", watched)
    for codec in (WITHOUT_FEEDBACK, "int4"):
        wire.train(MLP._replace(codec=codec))
    assert seen == [False, True]
    assert CODECS["int4"].feedback


@pytest.mark.usefixtures("copied_pools")
def test_runs_that_are_kept_are_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "wire.jsonl"
    cells = wire.cells(["digits-mlp"], ["int8"])
    wanted = [cell for cell in cells if (cell.place, cell.optimizer) == ("4 workers", "sgd")]
    every = wire.missing(wanted, 2, path)
    assert len(every) == 4  # two codecs, two seeds
    assert [run.seed for run in every] == [0] * 2 + [1] * 2
    told: list[float] = []
    wire.make(every[:3], path, 1, lambda what, share: told.append(share))
    assert told[-1] == 1
    left = wire.missing(wanted, 2, path)
    assert left == every[3:]
    assert wire.found(wanted, 2, path) == {}, "one pair has no standard error"
    wire.make(left, path, 1, lambda what, share: None)
    assert wire.missing(wanted, 2, path) == []
    assert {verdict for _, _, verdict in wire.found(wanted, 2, path).values()} <= set(wire.VERDICTS)


@pytest.mark.usefixtures("copied_pools")
@pytest.mark.thorough
def test_a_codec_that_loses_gradients_misses_the_goal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(PACKERS, "int4", PACKERS["int4"])  # which the class replaces

    class Zeros(Int4, codec="int4"):
        def pack(self, values: torch.Tensor, packed: torch.Tensor, arriving: torch.Tensor) -> None:
            super().pack(torch.zeros_like(values), packed, arriving)

    path = tmp_path / "wire.jsonl"
    cell = MLP._replace(codec=WITHOUT_FEEDBACK)
    wire.make(wire.missing([cell], 2, path), path, 1, lambda what, share: None)
    mean, _, verdict = wire.found([cell], 2, path)[cell]
    assert mean > 50
    assert verdict == "missed"


@pytest.mark.parametrize(
    ("problem", "exact", "coded", "lost", "verdict"),
    [
        ("digits-mlp", [92.0, 93.0, 91.0], [91.9, 92.8, 91.0], 0.1, "met"),
        ("digits-mlp", [92.0, 93.0, 91.0], [94.0, 95.1, 93.0], -2.03, "met"),
        ("digits-mlp", [92.0, 93.0, 91.0], [91.0, 92.1, 90.0], 0.97, "missed"),
        ("digits-mlp", [92.0, 93.0, 91.0], [91.0, 93.0, 90.0], 0.67, "open"),
        ("text-gpt", [3.0, 3.1, 3.2], [3.015, 3.116, 3.217], 0.52, "met"),
        ("text-gpt", [3.0, 3.1, 3.2], [3.06, 3.162, 3.265], 2.01, "missed"),
        ("text-gpt", [3.0, 3.1, 3.2], [3.0, 3.1, float("inf")], float("inf"), "missed"),
    ],
)
def test_the_verdict_follows_from_the_paired_differences(
    problem: str, exact: list[float], coded: list[float], lost: float, verdict: str, tmp_path: Path
) -> None:
    cell = MLP._replace(problem=problem)
    keep(tmp_path / "wire.jsonl", cell, exact, coded)
    results = wire.found([cell], 3, tmp_path / "wire.jsonl")
    assert results[cell][0] == pytest.approx(lost, abs=0.01)
    assert results[cell][2] == verdict
    console = Console(width=120)
    with console.capture() as shown:
        console.print(*wire.result_tables(results))
    assert shown.get().split()[-1] == verdict


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--problem", "text-gtp"], "unknown problem 'text-gtp'; did you mean 'text-gpt'?"),
        (["--wire", "int5"], "unknown codec 'int5'; did you mean 'int"),
        (["--seeds", "1"], "seeds is 1, expected a whole number >= 2"),
    ],
)
def test_an_unknown_name_is_one_sentence_and_exit_code_2(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["reproductions", "wire", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("copied_pools")
def test_the_command_shows_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wire.jsonl"
    for cell in wire.cells(["digits-cnn"], ["int8"]):
        keep(path, cell, [93.0, 92.0], [92.9, 92.1])
    chosen = ["--problem", "digits-cnn", "--wire", "int8", "--seeds", "2", "--results", str(path)]
    monkeypatch.setattr("sys.argv", ["reproductions", "wire", *chosen])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    stdout, stderr = capsys.readouterr()
    assert "0 runs are missing" in stderr
    assert stdout.count(" met") == 8  # four places, two optimizers

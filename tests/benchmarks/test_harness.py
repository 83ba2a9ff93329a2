"""The harness of the benchmarks: turns, tables, JSON lines, and the comparison with another commit."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import harness
from benchmarks.commands import app_of
from benchmarks.harness import Figures, in_turns
from paceline.errors import ConfigurationError


class Row(msgspec.Struct, frozen=True):
    name: str
    time_ms: float


def text_of(figures: Figures[Any], width: int = 80) -> str:
    """Return a table as text."""
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(figures.table())
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_cases_take_turns() -> None:
    order: list[str] = []
    told: list[float] = []

    def measure(case: str) -> int:
        order.append(case)
        return len(order)

    found = in_turns(lambda what, share, slow=False: told.append(share), 2, {"a": "A", "b": "B"}, measure)
    assert order == ["A", "B", "A", "B"]
    assert found == {"a": [1, 3], "b": [2, 4]}
    assert told == [0, 0.25, 0.5, 0.75]


def test_a_table_has_a_column_for_each_function() -> None:
    columns: harness.Columns[Row] = {"name": lambda row: row.name, "ms": lambda row: f"{row.time_ms:.1f}"}
    text = text_of(Figures("Times", [Row("first", 1.5), Row("second", 20.0)], columns, "a caption"))
    assert [line.split() for line in text.splitlines() if line[0].isalpha()] == [
        ["Times"],
        ["name", "ms"],
        ["first", "1.5"],
        ["second", "20.0"],
        ["a", "caption"],
    ]


def test_what_other_programs_use_is_a_share() -> None:
    assert 0 <= harness.busy_share(0.05) <= 1


@pytest.mark.thorough
def test_json_lines_begin_with_the_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "busy_share", lambda: 0.7)
    result = CliRunner().invoke(app_of(["sync"]), ["sync", "--quick", "--json"])
    conditions, *rows = map(json.loads, result.stdout.splitlines())
    assert (conditions["benchmark"], conditions["busy_share"]) == ("sync", 0.7)
    assert len({row["sync"] for row in rows}) == len(rows) > 10
    assert "other programs use 70% of this machine's cores" in " ".join(result.stderr.split())


def test_an_unknown_commit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "sync"])
    with pytest.raises(ConfigurationError, match="there is no checkout of 'nowhere'"):
        CliRunner().invoke(app_of(["sync"]), ["sync", "--against", "nowhere"], catch_exceptions=False)


@pytest.mark.chaos
@pytest.mark.processes
def test_two_commits_are_measured_in_turn() -> None:
    if subprocess.run(["git", "-C", str(harness.ROOT), "rev-parse", "HEAD"], capture_output=True).returncode:
        pytest.skip("needs a git repository")
    command = [sys.executable, "-m", "benchmarks", "sync", "--quick", "--json", "--against", "HEAD"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=harness.ROOT)
    assert ended.returncode == 0, ended.stderr
    _, *rows = map(json.loads, ended.stdout.splitlines())
    assert rows
    assert all(row["low"] <= row["ratio"] <= row["high"] for row in rows)

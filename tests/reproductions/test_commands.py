"""`python -m reproductions`: names are those of exhibits, and two searches are commands of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from paceline.lab.demo import DemoSetting
from reproductions import cherry_pick, tune_demo
from reproductions.commands import main
from tests.support.marks import thorough

ROOT = Path(__file__).parents[2]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Return the exit code of a command."""
    monkeypatch.setattr("sys.argv", ["reproductions", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code if isinstance(ended.value.code, int) else 0


@pytest.mark.parametrize("arguments", [[], *thorough(["--list"], ["exhibits", "--list"])])
def test_exhibits_are_listed(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 0
    printed = capsys.readouterr().out
    for name in ("fluentps-table4", "specsync-table2", "elasticbsp-fig14"):
        assert name in printed


@pytest.mark.parametrize(
    "arguments",
    [
        ["exhibits", "zipline-fig6", "--quick", "zipline-fig4", "--out", "out"],
        *thorough(
            ["zipline-fig6", "zipline-fig4", "--quick", "--out", "out"],
            ["--quick", "--out", "out", "zipline-fig6", "zipline-fig4"],
        ),
    ],
)
def test_options_may_come_before_and_after_the_names(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *arguments) == 0
    assert {path.name for path in Path("out").iterdir()} == {
        f"zipline-fig{number}.{kind}" for number in (4, 6) for kind in ("json", "png", "txt")
    }


def test_an_unknown_name_is_one_sentence_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "zipline-fig99") == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.startswith("error: unknown exhibit 'zipline-fig99'; did you mean")
    assert stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_the_program_names_its_commands() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "reproductions", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    for words in ("python -m reproductions", "exhibits", "tune-demo", "cherry-pick", "wire"):
        assert words in ended.stdout


def test_the_searches_take_a_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, Path | None]] = []

    def tune(*, console: Console, run_dir: Path | None) -> None:
        called.append(("tune", run_dir))

    def pick(setting: DemoSetting, *, console: Console, run_dir: Path | None) -> None:
        called.append((setting.sync, run_dir))

    monkeypatch.setattr(tune_demo, "tune", tune)
    monkeypatch.setattr(cherry_pick, "cherry_pick", pick)
    assert run(monkeypatch, "tune-demo") == 0
    assert run(monkeypatch, "tune-demo", "--run-dir", str(tmp_path / "a")) == 0
    assert run(monkeypatch, "cherry-pick", "--run-dir", str(tmp_path / "b")) == 0
    assert called == [("tune", None), ("tune", tmp_path / "a"), ("spec-sync", tmp_path / "b")]

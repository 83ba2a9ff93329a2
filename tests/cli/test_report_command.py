"""`paceline report`: one page for one run or several, the causes in the terminal, and one sentence for bad input."""

from __future__ import annotations

import json
import os
import webbrowser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline import simulate
from paceline.cli import app
from paceline.errors import ConfigurationError
from paceline.sim import Cluster

CALLED = CliRunner()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, sync in (("one", "bsp"), ("two", "asp")):
        result = simulate(Cluster(compute_s=[1.0, 1.0, 3.0]), sync, iterations=20, record=True)
        result.save(Path("runs", name))
    return Path("runs")


def call(*arguments: str) -> str:
    ended = CALLED.invoke(app, ["report", *arguments])
    if ended.exception is not None:
        raise ended.exception
    return ended.stdout


def test_the_causes_are_printed_and_the_page_is_in_the_run_directory(runs: Path) -> None:
    shown = call("runs/one").replace("\n", " ")
    assert (
        "Workers 0 and 1 waited 67 % of their time (80 s together) for worker 2, whose batches take 3 times"
        in shown
    )
    assert shown.rstrip().endswith("report: runs/one/report.html")
    assert "</html>" in (runs / "one" / "report.html").read_text()


def test_several_runs_are_on_one_page(runs: Path) -> None:
    shown = call("runs/one", "runs/two", "--out", "both.html")
    assert "one:\n" in shown
    assert "two:\n" in shown
    page = Path("both.html").read_text()
    assert '"name":"one"' in page
    assert '"name":"two"' in page
    assert not (runs / "one" / "report.html").exists()


def test_the_report_can_be_read_by_programs(runs: Path) -> None:
    report = json.loads(call("runs/one", "--json"))
    assert report["name"] == "one"
    assert len(report["workers"]) == 3
    assert [each["name"] for each in json.loads(call("runs/one", "runs/two", "--json"))] == ["one", "two"]


def test_the_page_is_opened_if_asked(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    call("runs/one", "--open")
    assert opened == [(runs / "one" / "report.html").resolve().as_uri()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["runs"], "'runs' is not a run, but contains runs (newest first: runs/"),
        (["nothing"], "'nothing' does not exist; give the directory of a run."),
        (["empty"], "'empty' is not the directory of a run"),
        (["runs/one", "--out", "runs"], "--out is 'runs', which is not a file; name a file"),
        (["runs/one", "--out", "pipe"], "--out is 'pipe', which is not a file; name a file"),
        (["runs/one", "--out", "no/page.html"], "--out is 'no/page.html', but 'no' does not exist"),
        (["runs/one", "--json", "--open"], "--out and --open cannot be used with it"),
    ],
)
def test_bad_input_gets_one_sentence(arguments: list[str], words: str, runs: Path) -> None:
    Path("empty").mkdir()
    os.mkfifo("pipe")
    with pytest.raises(ConfigurationError) as caught:
        call(*arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert Path("pipe").is_fifo()


def test_a_link_to_the_page_stays_a_link(runs: Path) -> None:
    Path("link.html").symlink_to("page.html")
    assert "report: link.html" in call("runs/one", "--out", "link.html")
    assert Path("link.html").is_symlink()
    assert "<html" in Path("page.html").read_text()


@pytest.mark.parametrize("command", ["report", "advise"])
def test_the_runs_in_a_folder_are_named_with_the_command_for_the_newest(command: str, runs: Path) -> None:
    os.utime(runs / "one", (0.0, 0.0))
    error = str(CALLED.invoke(app, [command, "runs"]).exception)
    assert "contains runs (newest first: runs/two, runs/one); name one of them" in error
    assert error.endswith(f": paceline {command} runs/two")

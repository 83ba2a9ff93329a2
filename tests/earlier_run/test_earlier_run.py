"""A run directory that an earlier version of Paceline has written can be replayed, reported and resumed.

`run.tar.xz` holds a script and the directory of its run, which was interrupted before its end: two workers, a server
with two shards, elastic-bsp. The first segments of the shards' traces were deleted, so their replay begins with a
keyframe. The archive must stay as it is: what a new version writes differently, it must also read as it was.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.look.run_reading import read_report
from paceline.trace.recording import Trace, read_run
from paceline.trace.replay import replay
from tests.support.live import run_program

EPOCHS, SAMPLES = 60, 64


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(Path(__file__).with_name("run.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def by_host(traces: Sequence[Trace]) -> dict[str, int]:
    return {f"{trace.header.host} {trace.header.index}": len(trace.entries) for trace in traces}


def test_its_decisions_are_the_same(earlier: Path) -> None:
    traces = read_run(earlier)
    assert by_host(traces) == {"coordinator 0": 104, "shard 0": 114, "shard 1": 112}
    for trace in traces:
        assert bool(trace.header.keyframe) == (trace.header.host == "shard")
        assert replay(trace) == []


def test_it_has_a_report(earlier: Path) -> None:
    report = read_report(earlier)
    assert report.state == "interrupted"
    assert (report.samples["used"], report.samples["returned"]) == (800, 16)
    result = CliRunner().invoke(app, ["report", str(earlier)])
    assert result.exit_code == 0, result.output
    assert (earlier / "report.html").stat().st_size > 100_000


@pytest.mark.processes
def test_it_goes_on(earlier: Path, mark: str) -> None:
    Path("go").touch()  # the script need not be slow any more
    ended = run_program("-m", "paceline", "run", "--resume", "run", "--trust", "train.py")
    assert ended.returncode == 0, ended.stderr
    found = json.loads((earlier / "summary.json").read_text())
    samples = found["ledger"]["samples"]
    assert samples["used"] == sum(samples.values()) == EPOCHS * SAMPLES
    assert Path(found["resumptions"][0]["checkpoint"]).name == "000004"

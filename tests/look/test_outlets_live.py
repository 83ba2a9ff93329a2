"""Runs in real processes, which are looked at while they go on."""

from __future__ import annotations

import http.client
import json
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from paceline.look.show_process import open_outlets
from paceline.run.job_options import make_job
from paceline.start import beside as launched
from paceline.start.processes.interruption import Interruption
from tests.support.live import DEADLINE_S, await_that
from tests.support.shown import Shown

pytestmark = pytest.mark.processes


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    run = Shown(tmp_path)
    try:
        yield run
    finally:
        run.end()


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # of TensorBoard's own
def test_a_run_is_shown_until_its_end_has_been_seen(shown: Shown) -> None:
    status, page = shown.get("/")
    assert status == 200
    assert page.startswith("<!DOCTYPE html>")
    await_that(lambda: all(each["iteration"] for each in shown.workers()), "both workers train")
    assert shown.data()["state"] == "running"
    for path in ("/run.json", "/train.py", "/../train.py", "/data/"):
        assert shown.get(path)[0] == 404
    collector = http.client.HTTPConnection(shown.metrics.netloc, timeout=DEADLINE_S)
    collector.request("GET", shown.metrics.path, headers={"Accept": "application/openmetrics-text"})
    families = {f.name: f for f in text_string_to_metric_families(collector.getresponse().read().decode())}
    collector.close()
    assert sum(sample.value for sample in families["paceline_workers"].samples) == 2

    (shown.folder / "enough").touch()
    last = shown.data()
    while last["state"] == "running":
        time.sleep(0.2)
        last = shown.data()
    assert (last["state"], last["live"]) == ("finished", None)
    out, err = shown.process.communicate(timeout=DEADLINE_S)
    assert shown.process.returncode == 0, err
    assert not shown.listens()
    assert not (shown.folder / "run" / "outlets.log").exists()
    assert "note" not in out + err

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(shown.folder / "logs" / "run")).Reload()
    tags = events.Tags()
    assert {"loss", "samples per second", "updates per second"} <= set(tags["scalars"])
    assert "staleness (updates)" in tags["histograms"]
    samples = json.loads((shown.folder / "run" / "summary.json").read_text())["samples"]
    assert events.Scalars("loss")[-1].step <= samples


@pytest.mark.parametrize(
    ("program", "note", "log"),
    [
        ("", "", ""),
        ("sys.stderr.write('first\\nlast\\n'); sys.exit(1)", "note: last\n", "first\nlast\n"),
        ("sys.stderr.write('a warning\\n')", "", "a warning\n"),
        ("sys.exit(1)", "note: the process that shows the run has exited with code 1\n", ""),
        (
            "import time; time.sleep(60)",
            "note: the process that shows the run did not end within 0.5 s, and was killed\n",
            "",
        ),
    ],
)
def test_what_goes_wrong_in_the_process_that_shows_a_run_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str,
    note: str,
    log: str,
) -> None:
    monkeypatch.setattr(
        launched, "PROGRAM", ["-c", f"import sys; sys.stdin.readline(); sys.stdin.readline(); {program}"]
    )
    monkeypatch.setattr(launched, "END_TIMEOUT_S", 0.5 if "sleep" in program else DEADLINE_S)
    job = make_job(workers=1, run_dir=tmp_path)
    with launched.showing(open_outlets(dashboard=True), job, "unix:/nowhere", Interruption()):
        assert capsys.readouterr().err.startswith("dashboard: http://127.0.0.1:")
    assert capsys.readouterr().err == note
    file = tmp_path / launched.LOG
    assert (file.read_text() if file.exists() else "") == log


def test_without_outlets_no_process_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(workers=1, run_dir=tmp_path)
    monkeypatch.setattr("subprocess.Popen", pytest.fail)
    with launched.showing(open_outlets(), job, "unix:/nowhere", Interruption()) as page:
        assert page == ""


class SignalInTheWait(Interruption):
    """Counts a signal that arrives after the first look."""

    def hurried(self) -> bool:
        self.count += 1
        return False


def test_a_signal_ends_the_wait_for_the_process_that_shows_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launched, "PROGRAM", ["-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(launched, "END_TIMEOUT_S", math.inf)
    job = make_job(workers=1, run_dir=tmp_path)
    interruption = SignalInTheWait()
    with launched.showing(open_outlets(dashboard=True), job, "unix:/nowhere", interruption):
        assert interruption.count == 0
    assert interruption.count == 1
    assert "did not end" not in capsys.readouterr().err


@pytest.mark.thorough
def test_the_process_that_shows_a_run_ends_with_a_killed_launcher(shown: Shown) -> None:
    shown.data()
    shown.process.send_signal(signal.SIGKILL)
    shown.process.wait()
    await_that(lambda: not shown.listens(), "the end of the process")

"""Watching a run of this machine: its live table in a terminal, its lines in a pipe, and `paceline status`."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live import DEADLINE_S, await_that, mark, run_program, start_program
from tests.support.screens import Screen

__all__ = ["mark"]

pytestmark = pytest.mark.processes

# One epoch, and then as many as it takes until the test has seen enough.
SCRIPT = """
import pathlib
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline

data = TensorDataset(torch.randn(64, 3), torch.randn(64, 1))
loader = paceline.distribute(DataLoader(data, 4, shuffle=True))
model = torch.nn.Linear(3, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))

loop = paceline.epochs(1000)
for epoch in loop:
    for x, y in loader:
        def closure():
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss.item()
        optimizer.step(closure)
    if pathlib.Path("enough").exists():
        loop.stop()
"""
OPTIONS = ("--workers", "2", "--servers", "1", "--sync", "bsp", "--pace", "0.001,0.05")


@pytest.fixture
def script(mark: str) -> Iterator[str]:
    Path("train.py").write_text(SCRIPT)
    yield "train.py"
    Path("enough").touch()


def paceline(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program("-m", "paceline", *arguments)


def await_training() -> dict[str, object]:
    """Wait until the newest run has trained for a while, and return its state."""
    states: list[dict[str, object]] = []

    def trains() -> bool:
        watched = paceline("status", "--json")
        if watched.returncode == 0:
            states.append(json.loads(watched.stdout))
        return bool(states) and states[-1]["left_s"] is not None and bool(states[-1]["awaited"])

    await_that(trains, "training with progress")
    return states[-1]


@pytest.mark.thorough
def test_a_run_in_a_terminal_shows_its_progress_and_can_be_watched_from_another_process(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")  # the width of a dumb terminal is taken for 80
    monkeypatch.delenv("COLUMNS", raising=False)
    shown = Screen("-m", "paceline", "run", *OPTIONS, script, columns=100)
    try:
        shown.await_text("samples/s, loss ")
        [run] = Path("runs").iterdir()
        shown.await_text(" left; waiting for worker 1 (")
        state = await_training()
        by_name = paceline("status", str(run))
        watching = start_program("-m", "paceline", "status", str(run), "--watch")
        assert watching.stdout is not None
        first_line = watching.stdout.readline()
        Path("enough").touch()
        assert shown.end() == 0, shown.text
        _, problems = watching.communicate(timeout=DEADLINE_S)
    finally:
        shown.close()

    assert (state["epochs"], state["awaited"]) == (1000, [1])
    assert isinstance(state["progress"], float)
    assert 0.0 < state["progress"] < 0.9
    assert isinstance(state["epoch"], int)
    assert isinstance(state["samples_per_s"], float)
    assert state["samples_per_s"] > 0
    assert isinstance(state["loss"], float)
    assert by_name.stdout.startswith("bsp, 2 workers, 1 server, ")
    words = r"\d+ % \(epoch \d+ of 1000\), [\d,.]+ samples/s, loss [\d.e-]+, .* left"
    assert re.search(rf"^{words}; waiting for worker 1 \(\d+ % of the time\)$", by_name.stdout, re.MULTILINE)
    assert re.search(rf"{words}; waiting for worker 1", re.sub(r"\x1b\[[\d;]*m", "", shown.text))
    assert first_line.startswith("bsp, 2 workers, 1 server, "), problems
    assert watching.returncode == 0
    assert not (run / "running.json").exists()
    after = paceline("status", str(run))
    assert (after.returncode, after.stderr) == (
        1,
        f"error: the run in {run} has finished; its results are there\n",
    )
    none = paceline("status")
    assert none.returncode == 2
    assert none.stderr.startswith("error: no run is in progress in ./runs; ")


def test_a_run_whose_launcher_is_killed_was_cut_off(script: str) -> None:
    program = start_program("-m", "paceline", "run", "--workers", "1", script)
    await_that(lambda: list(Path("runs").glob("*/running.json")), "a run in progress")
    [run] = Path("runs").iterdir()
    program.kill()
    program.communicate()
    said = f"the run in {run} was cut off: its launcher, process {program.pid}, has ended without saving"
    for arguments in ((), (str(run),)):
        ended = paceline("status", *arguments)
        assert ended.returncode == 1
        assert ended.stderr.startswith(f"error: {said}")
        assert ended.stderr.count("\n") == 1


@pytest.mark.thorough
def test_in_a_pipe_the_progress_is_a_line_in_words(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("main.py").write_text(
        "from paceline.start import display\ndisplay.PLAIN_INTERVAL_S = 0.5\n"
        "from paceline.cli import main\nmain()\n"
    )
    with start_program("main.py", "run", *OPTIONS, script) as program:
        assert program.stderr is not None
        lines = []
        for line in program.stderr:
            lines.append(line.rstrip("\n"))
            if " left; waiting for worker 1 (" in line:
                break
        Path("enough").touch()
        program.communicate(timeout=DEADLINE_S)
    words = (
        r"\d+ % \(epoch \d+ of 1000\), [\d,.]+ samples/s, loss [\d.e-]+, .* left; waiting for worker 1 \(.*\)"
    )
    assert re.fullmatch(rf"bsp, 2 workers, 1 server, \d+ s: {words}", lines[-1])
    assert program.returncode == 0

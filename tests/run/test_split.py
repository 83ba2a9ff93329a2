"""The option `--split`, and what the summary says about samples that a static split moves to a later epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.options import as_options
from paceline.errors import ConfigurationError
from paceline.run.job import describe
from paceline.run.job_options import make_job
from paceline.trace.findings import find_moved
from tests.support.live import mark, run_program

__all__ = ["mark"]

# Worker 1 is killed in the second epoch. Each worker writes how many samples it has used in each epoch.
SCRIPT = """
import os
import signal
import time
from pathlib import Path
import torch
import paceline

model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.ones(120, 2))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for epoch in paceline.epochs(4):
    used = 0
    for number, (x,) in enumerate(loader):
        if (paceline.worker_index(), epoch, number) == (1, 1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        used += len(x)
        Path(f"used-{paceline.worker_index()}-{epoch}").write_text(str(used))
        time.sleep(0.02)
"""


def run(*options: str) -> tuple[str, dict[str, Any], list[int]]:
    """Run the script. Return its output, its summary, and the number of samples that were used in each epoch."""
    Path("train.py").write_text(SCRIPT)
    ended = run_program(
        *("-m", "paceline", "run", "-n", "3", "--sync", "bsp", *options, "--run-dir", "run", "train.py")
    )
    assert ended.returncode == 0, ended.stderr
    used = [sum(int(path.read_text()) for path in Path().glob(f"used-*-{epoch}")) for epoch in range(4)]
    return ended.stdout, json.loads(Path("run", "summary.json").read_text()), used


@pytest.mark.processes
def test_the_summary_says_that_a_lost_workers_samples_were_used_in_a_later_epoch(mark: str) -> None:
    stdout, summary, used = run()

    assert used[0] == 120
    assert used[1] < 120 < used[2]
    [moved] = (sentences for sentences in summary["findings"] if "of their samples" in sentences)
    assert f"had not used {used[2] - 120} of their samples" in moved
    assert moved in stdout


@pytest.mark.thorough
@pytest.mark.processes
def test_with_split_dynamic_they_are_used_in_the_same_epoch(mark: str) -> None:
    stdout, summary, used = run("--split", "dynamic")

    # The batch that the lost worker had pushed last may or may not have been counted by its script.
    assert all(abs(each - 120) <= 4 for each in used), used
    assert "later epochs" not in stdout
    assert summary["ledger"]["samples"]["returned"] == 0


def test_moved_samples_count_as_one_cause_with_its_remedy() -> None:
    assert find_moved(0) == []
    [said] = find_moved(7)
    assert said.startswith("Workers that were lost, or left early, had not used 7 of their samples")
    assert "add --split dynamic" in said
    [in_python] = find_moved(7, python=True)
    assert "add split='dynamic'" in in_python


def test_the_option_is_checked_described_and_passed_on() -> None:
    assert describe(make_job(workers=2, split="dynamic"))["data"] == "divided on demand (dynamic)"
    with pytest.raises(ConfigurationError, match="unknown split 'dynamc'; did you mean 'dynamic'"):
        make_job(workers=2, split="dynamc")
    settings = {"split": "static"}
    assert as_options(settings) == ["--split=static"]

"""Measures how long a training script takes from the start of its program to its first update.

The same script is run alone and under `paceline run`. The script imports torch and the digits of scikit-learn, creates
a small model and its optimizer, and writes down the time at which its first `optimizer.step()` has returned. In a run
with several workers, the first update is complete when the last worker's step has returned.

The processor time includes all processes until the program has ended. The script trains for three steps.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec

from paceline.cli.console import TellShare
from paceline.errors import RunFailedError

from .harness import Benchmark, Columns, Figures, goal_text, in_turns, program, require_success

SCRIPT = """
import os
import time

import torch
from sklearn.datasets import load_digits

import paceline

images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "PLAIN" not in os.environ:
    optimizer = paceline.DistributedOptimizer(optimizer, model=model)
for step in range(3):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images[:32]), labels[:32]).backward()
    optimizer.step()
    if step == 0:
        with open(f"updated-{os.getpid()}", "w") as file:
            file.write(str(time.monotonic()))
"""


class Case(msgspec.Struct, frozen=True):
    """A way to run the script."""

    name: str  # description of the case
    workers: int = 0  # number of workers; 0 if the script runs alone
    servers: int = 0  # number of servers
    plain: bool = False  # True if the script uses the optimizer of torch instead of `DistributedOptimizer`
    # The largest time to the first update that is acceptable on two cores, in seconds; None for no limit.
    goal_s: float | None = None
    # The largest acceptable difference from the script alone (the first case).
    goal_more_s: float | None = None


Times = tuple[float, float, float]

CASES = (
    Case("script alone, without Paceline", plain=True),
    Case("script alone"),
    Case("1 worker, 1 server", 1, 1, goal_more_s=1.0),
    Case("4 workers, 2 servers", 4, 2, goal_s=5.5),
)


class StartupRow(msgspec.Struct, frozen=True):
    """The times of one case in seconds: medians over the rounds."""

    name: str
    first_update_s: float  # from the start of the program to the end of the first update
    more_s: float  # the median of the differences from the script alone, without Paceline
    total_s: float  # from the start of the program to its end
    processor_s: float  # of all processes
    goal: str
    met: bool


@Benchmark(minutes=2, quick={"rounds": 1, "cases": (CASES[0], CASES[2])})
def measure(tell: TellShare, rounds: int = 5, cases: Sequence[Case] = CASES) -> list[Figures[StartupRow]]:
    """Measure the time from the start of a script to its first update, alone and in runs with one and four workers.

    Also checks the results against this project's goals.
    """
    # The first round, which fills the caches, is not counted.
    found = in_turns(tell, rounds + 1, {case.name: case for case in cases}, _run)
    alone, *_ = found.values()
    rows = [_row(case, found[case.name][1:], alone[1:]) for case in cases]
    return [Figures("Start to first update (seconds, medians)", rows, COLUMNS)]


COLUMNS: Columns[StartupRow] = {
    "": lambda row: row.name,
    "first update": lambda row: f"{row.first_update_s:.2f}",
    "more than alone": lambda row: f"{row.more_s:.2f}",
    "end": lambda row: f"{row.total_s:.2f}",
    "processor time": lambda row: f"{row.processor_s:.2f}",
    "goal": lambda row: goal_text(row.goal, row.met),
}


def _row(case: Case, times: Sequence[Times], alone: Sequence[Times]) -> StartupRow:
    first_s, total_s, processor_s = (median(column) for column in zip(*times, strict=True))
    more_s = median(ours[0] - theirs[0] for ours, theirs in zip(times, alone, strict=True))
    goal, met = "", True
    if case.goal_s is not None:
        goal, met = f"at most {case.goal_s:g} s", first_s <= case.goal_s
    if case.goal_more_s is not None:
        goal, met = f"at most {case.goal_more_s:g} s more", more_s <= case.goal_more_s
    return StartupRow(case.name, first_s, more_s, total_s, processor_s, goal, met)


def _run(case: Case) -> Times:
    """Return the time to the first update, the time to the end, and the processor time, in seconds."""
    with TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        command = ["train.py"]
        if case.workers:
            counts = ["--workers", str(case.workers), "--servers", str(case.servers)]
            command = ["-m", "paceline", "run", *counts, "--run-dir", "run", "train.py"]
        begun_s = time.monotonic()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        with program(*command, folder=folder, env={"PLAIN": "1"} if case.plain else {}) as running:
            _, errors = running.communicate()
        ended_s = time.monotonic()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        updated_s = [float(path.read_text()) for path in Path(folder).glob("updated-*")]
    require_success(case.name, running, errors)
    if len(updated_s) != max(1, case.workers):
        raise RunFailedError(case.name, f"only {len(updated_s)} workers have made an update")
    processor_s = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return max(updated_s) - begun_s, ended_s - begun_s, processor_s

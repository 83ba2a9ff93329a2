"""How long a training script takes from the start of its program to its first update.

The same script is run alone and under `paceline run`. It imports torch and the digits of scikit-learn, creates a
small model and its optimizer, and writes down the time at which its first `optimizer.step()` has returned. In a run
with several workers, the first update is complete when the last worker's step has returned.

The processor time includes all processes until the program has ended, in which the script trains for three steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
from rich.table import Table

from paceline.cli.progress_bar import TellShare
from paceline.errors import RunFailedError

__all__ = ["CASES", "Case", "StartupRow", "estimate_s", "measure", "table"]

ROUNDS = 5

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
    """A way to run the script.

    Attributes:
        name: description of the case.
        workers: number of workers; 0 if the script runs alone.
        servers: number of servers.
        plain: True if the script uses the optimizer of torch instead of `DistributedOptimizer`.
        goal_s: the largest time to the first update that is acceptable on two cores, in seconds; None for no limit.
        goal_more_s: the largest acceptable difference from the script alone (the first case).
    """

    name: str
    workers: int = 0
    servers: int = 0
    plain: bool = False
    goal_s: float | None = None
    goal_more_s: float | None = None


CASES = (
    Case("script alone, without Paceline", plain=True),
    Case("script alone"),
    Case("1 worker, 1 server", 1, 1, goal_more_s=1.0),
    Case("4 workers, 2 servers", 4, 2, goal_s=5.5),
)


class StartupRow(msgspec.Struct, frozen=True):
    """The times of one case. Each is the median over the rounds.

    Attributes:
        name: see `Case`.
        first_update_s: seconds from the start of the program to the end of the first update.
        more_s: the median over the rounds of the difference from the script alone, without Paceline, in seconds.
        total_s: seconds from the start of the program to its end.
        processor_s: processor time of all processes in seconds.
        goal: the goal in words; "" if there is none.
        met: True if the goal is met, or there is none.
    """

    name: str
    first_update_s: float
    more_s: float
    total_s: float
    processor_s: float
    goal: str
    met: bool


def estimate_s() -> float:
    """Estimate how long the measurement takes, in seconds."""
    return (ROUNDS + 1) * 22.0


def measure(tell: TellShare, rounds: int = ROUNDS, cases: tuple[Case, ...] = CASES) -> list[StartupRow]:
    """Run each case once per round, and return the times. The first round, which fills the caches, is not counted."""
    found: list[list[tuple[float, float, float]]] = [[] for _ in cases]
    total = (rounds + 1) * len(cases)
    for turn in range(rounds + 1):
        for index, case in enumerate(cases):
            tell(case.name, (turn * len(cases) + index) / total)
            times = _run(case)
            if turn:
                found[index].append(times)
    return [_row(case, times, found[0]) for case, times in zip(cases, found, strict=True)]


def _row(
    case: Case, times: list[tuple[float, float, float]], alone: list[tuple[float, float, float]]
) -> StartupRow:
    first_s, total_s, processor_s = (median(column) for column in zip(*times, strict=True))
    more_s = median(ours[0] - theirs[0] for ours, theirs in zip(times, alone, strict=True))
    goal, met = "", True
    if case.goal_s is not None:
        goal, met = f"at most {case.goal_s:g} s", first_s <= case.goal_s
    if case.goal_more_s is not None:
        goal, met = f"at most {case.goal_more_s:g} s more", more_s <= case.goal_more_s
    return StartupRow(case.name, first_s, more_s, total_s, processor_s, goal, met)


def _run(case: Case) -> tuple[float, float, float]:
    """Return the time to the first update, the time to the end, and the processor time, in seconds.

    Raises:
        RunFailedError: the program failed, or the script has not reached its first update.
    """
    with TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        command = ["train.py"]
        if case.workers:
            counts = ["--workers", str(case.workers), "--servers", str(case.servers)]
            command = ["-m", "paceline", "run", *counts, "--run-dir", "run", "train.py"]
        environment = {**os.environ, **({"PLAIN": "1"} if case.plain else {})}
        with Path(folder, "output").open("wb") as output:
            begun_s = time.monotonic()
            program = subprocess.Popen(
                [sys.executable, *command], cwd=folder, env=environment, stdout=output, stderr=output
            )
            try:
                _, status, used = os.wait4(program.pid, 0)
            except BaseException:
                program.kill()
                raise
            ended_s = time.monotonic()
        program.returncode = os.waitstatus_to_exitcode(status)
        updated_s = [float(path.read_text()) for path in Path(folder).glob("updated-*")]
        if program.returncode or len(updated_s) != max(1, case.workers):
            raise RunFailedError(
                case.name, f"exit code {program.returncode}", Path(folder, "output").read_text()
            )
        return max(updated_s) - begun_s, ended_s - begun_s, used.ru_utime + used.ru_stime


def table(rows: list[StartupRow]) -> Table:
    """Return the table of the results."""
    table = Table(title="Start to first update (seconds, medians)", title_justify="left")
    table.add_column("")
    for name in ("first update", "more than alone", "end", "processor time"):
        table.add_column(name, justify="right")
    table.add_column("goal")
    for row in rows:
        goal = f"{row.goal}: {'met' if row.met else 'not met'}" if row.goal else ""
        numbers = (row.first_update_s, row.more_s, row.total_s, row.processor_s)
        table.add_row(row.name, *(f"{number:.2f}" for number in numbers), goal)
    return table

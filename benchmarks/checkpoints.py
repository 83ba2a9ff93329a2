"""How much longer the steps of training are while a checkpoint is written.

A worker trains layers of equal size, and times each whole step. It asks for a checkpoint, and again when some steps
have passed since the last one was complete. The steps from the request until the checkpoint is complete are compared
with the other steps of the same run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
import torch
from rich.table import Table

import paceline
from paceline.checkpoints.directory import numbers_in
from paceline.cli.progress_bar import TellShare

__all__ = ["Case", "CheckpointRow", "Step", "cases_of", "estimate_s", "measure", "row_of", "table"]

FEATURES = 1024
BATCH = 16
APART = 12
"""Number of steps between the end of a checkpoint and the request for the next one."""

SETTLING = 3
"""Number of steps at the beginning, and after each checkpoint, that are not counted."""

MEDIAN_GOAL, LONGEST_GOAL = 1.1, 2.0


class Case(msgspec.Struct, frozen=True):
    """What is trained: the size of the weights in MB (2**20 bytes), the optimizer, and the transport."""

    size_mb: float
    optimizer: str
    transport: str


class Step(msgspec.Struct, frozen=True):
    """A step: its time in seconds, and the number of the checkpoint that was being written; 0 for none."""

    took_s: float
    checkpoint: int


class CheckpointRow(msgspec.Struct, frozen=True):
    """The steps of a run.

    Attributes:
        case: what was trained.
        checkpoints: number of checkpoints.
        step_ms: median time of a step while no checkpoint is written, in milliseconds.
        undisturbed: the longest of these steps, divided by their median.
        median: median of the steps while a checkpoint is written, divided by that of the others.
        longest: for each checkpoint, the longest step, divided by the median of the others.
        steps: for each checkpoint, the number of steps until it is complete.
        met: True if the median and the longest steps are within the goals.
    """

    case: Case
    checkpoints: int
    step_ms: float
    undisturbed: float
    median: float
    longest: list[float]
    steps: list[int]
    met: bool


def cases_of(sizes_mb: Sequence[float]) -> list[Case]:
    """Return all cases with these sizes."""
    return [Case(*case) for case in product(sizes_mb, ("SGD", "Adam"), ("shm", "tcp"))]


def estimate_s(rounds: int, cases: Sequence[Case]) -> float:
    """Estimate how long the measurement takes, in seconds."""
    return sum(6.0 + rounds * case.size_mb * (1.5 if case.optimizer == "Adam" else 1) / 8 for case in cases)


def measure(tell: TellShare, rounds: int, cases: Sequence[Case]) -> list[CheckpointRow]:
    """Write checkpoints in a run for each case, and return how long the steps were.

    Raises:
        RunFailedError: a process has failed.
    """
    rows = []
    for index, case in enumerate(cases):
        tell(f"{case.size_mb:g} MB, {case.optimizer}, {case.transport}", index / len(cases))
        with TemporaryDirectory(prefix="paceline-") as folder:
            rows.append(row_of(case, _steps(Path(folder), case, rounds)))
    return rows


def row_of(case: Case, steps: list[Step]) -> CheckpointRow:
    """Compare the steps during checkpoints with the others, after the first ones of each stretch of those."""
    others, since = [], 0
    by_checkpoint: dict[int, list[float]] = {}
    for step in steps:
        since = 0 if step.checkpoint else since + 1
        if step.checkpoint:
            by_checkpoint.setdefault(step.checkpoint, []).append(step.took_s)
        elif since > SETTLING:
            others.append(step.took_s)
    usual_s = median(others)
    middle = median(time_s for times_s in by_checkpoint.values() for time_s in times_s) / usual_s
    longest = [max(times_s) / usual_s for times_s in by_checkpoint.values()]
    return CheckpointRow(
        case=case,
        checkpoints=len(by_checkpoint),
        step_ms=1e3 * usual_s,
        undisturbed=max(others) / usual_s,
        median=middle,
        longest=longest,
        steps=[len(times_s) for times_s in by_checkpoint.values()],
        met=middle <= MEDIAN_GOAL and max(longest) <= LONGEST_GOAL,
    )


def table(rows: list[CheckpointRow]) -> Table:
    """Return the table of the results."""
    table = Table(
        title=f"Steps while a checkpoint is written, divided by the median of the others (goals: {MEDIAN_GOAL:g} for "
        f"the median, {LONGEST_GOAL:g} for the longest)",
        title_justify="left",
    )
    for name in (
        "weights",
        "optimizer",
        "transport",
        "step",
        "longest of the others",
        "median",
        "longest",
        "goals",
    ):
        table.add_column(name)
    for row in rows:
        table.add_row(
            f"{row.case.size_mb:g} MB",
            row.case.optimizer,
            row.case.transport,
            f"{row.step_ms:.0f} ms",
            f"{row.undisturbed:.2f}",
            f"{row.median:.2f}",
            ", ".join(f"{each:.2f}" for each in row.longest),
            "met" if row.met else "not met",
        )
    return table


def _steps(folder: Path, case: Case, rounds: int) -> list[Step]:
    """Train, and return all steps."""
    times = folder / "steps.json"
    paceline.launch(
        _train,
        args=(case, rounds, str(folder / "run" / "checkpoints"), str(times)),
        workers=1,
        servers=1,
        sync="bsp",
        transport=case.transport,
        checkpoint_every="off",
        keep=1,
        run_dir=str(folder / "run"),
        progress=False,
    )
    return msgspec.json.decode(times.read_bytes(), type=list[Step])


def _train(case: Case, rounds: int, directory: str, times: str) -> None:
    torch.set_num_threads(1)
    layers = max(1, round(case.size_mb * 2**20 / (4 * FEATURES**2)))
    model = torch.nn.Sequential(*(torch.nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(layers)))
    optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), lr=1e-6)
    data = torch.utils.data.TensorDataset(torch.randn(16 * BATCH, FEATURES))
    model, optimizer, loader = paceline.prepare(
        model, optimizer, torch.utils.data.DataLoader(data, batch_size=BATCH)
    )
    steps: list[Step] = []
    writing = complete = newest = since = 0
    began_s = time.perf_counter()
    for _ in paceline.epochs(10**6):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            now_s = time.perf_counter()
            steps.append(Step(now_s - began_s, writing))
            began_s, since = now_s, since + 1
            if (
                writing and (found := max([0, *numbers_in(Path(directory))])) > newest
            ):  # a number may be left out
                writing, complete, newest, since = 0, writing, found, 0
            if not writing and since == APART + SETTLING:
                if complete == rounds:
                    Path(times).write_bytes(msgspec.json.encode(steps))
                    return
                writing = complete + 1
                paceline.checkpoint()

"""Measures how much longer the steps of training are while a checkpoint is written.

A worker trains layers of equal size, and times each whole step. The worker requests a checkpoint. It requests the next
one when a fixed number of steps has passed since the previous checkpoint was complete. The steps from the request until
the checkpoint is complete are compared with the other steps of the same run.
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

import paceline
from paceline.checkpoints.manifest import numbers_in
from paceline.cli.console import TellShare

from .harness import Benchmark, Columns, Figures, Rounds, SizesMb, goal_text, in_turns, live

FEATURES = 1024
BATCH = 16
APART = 12  # number of steps between the end of a checkpoint and the request for the next one
SETTLING = 3  # number of steps at the beginning, and after each checkpoint, that are not counted
MEDIAN_GOAL, LONGEST_GOAL = 1.1, 2.0


class Case(msgspec.Struct, frozen=True):
    """A case to measure: the size of the weights in MB (2**20 bytes), the optimizer, and the transport."""

    size_mb: float
    optimizer: str
    transport: str


class Step(msgspec.Struct, frozen=True):
    """A step: its time in seconds, and the number of the checkpoint that was being written; 0 for none."""

    took_s: float
    checkpoint: int


class CheckpointRow(msgspec.Struct, frozen=True):
    """The times of the steps of a run."""

    case: Case
    checkpoints: int  # number of checkpoints
    step_ms: float  # median time of a step while no checkpoint is written
    undisturbed: float  # the longest step while no checkpoint is written, divided by `step_ms`
    median: float  # median time of a step while a checkpoint is written, divided by `step_ms`
    longest: list[float]  # for each checkpoint, the longest step, divided by `step_ms`
    steps: list[int]  # for each checkpoint, the number of steps until it is complete

    @property
    def met(self) -> bool:
        """True if the median and the longest steps are within the goals."""
        return self.median <= MEDIAN_GOAL and max(self.longest) <= LONGEST_GOAL


COLUMNS: Columns[CheckpointRow] = {
    "weights": lambda row: f"{row.case.size_mb:g} MB",
    "optimizer": lambda row: row.case.optimizer,
    "transport": lambda row: row.case.transport,
    "step": lambda row: f"{row.step_ms:.0f} ms",
    "longest of the others": lambda row: f"{row.undisturbed:.2f}",
    "median": lambda row: f"{row.median:.2f}",
    "longest": lambda row: ", ".join(f"{each:.2f}" for each in row.longest),
    "goals": lambda row: goal_text(f"{MEDIAN_GOAL:g} and {LONGEST_GOAL:g}", row.met),
}


@Benchmark(minutes=15, quick={"sizes_mb": (4.0,), "rounds": 1, "optimizers": ("SGD",)})
def measure(
    tell: TellShare,
    sizes_mb: SizesMb = (25.0, 400.0),
    rounds: Rounds = 3,
    optimizers: Sequence[str] = ("SGD", "Adam"),
) -> list[Figures[CheckpointRow]]:
    """Measure how much longer the steps of a worker are while a checkpoint is written, with SGD and with Adam.

    Each round is one checkpoint of the same run.
    """
    cases = [Case(*case) for case in product(sizes_mb, optimizers, ("shm", "tcp"))]
    found = in_turns(
        tell,
        1,
        {f"{case.size_mb:g} MB, {case.optimizer}, {case.transport}": case for case in cases},
        lambda case: row_of(case, _steps(case, rounds)),
        lambda case: 6.0 + rounds * case.size_mb * (1.5 if case.optimizer == "Adam" else 1) / 8,
    )
    title = "Steps while a checkpoint is written, divided by the median of the other steps"
    return [Figures(title, [row for rows in found.values() for row in rows], COLUMNS, labels=3)]


def _steps(case: Case, rounds: int) -> list[Step]:
    with TemporaryDirectory(prefix="paceline-") as folder:
        run_dir = Path(folder, "run")
        settings = {"transport": case.transport, "checkpoint_every": "off", "keep": 1, "run_dir": run_dir}
        checkpoints = str(run_dir / "checkpoints")
        _, [steps] = live(
            _train, case, rounds, checkpoints, kind=list[Step], workers=1, sync="bsp", **settings
        )
    return steps


def row_of(case: Case, steps: list[Step]) -> CheckpointRow:
    """Compare the steps during checkpoints with the other steps, without the first steps after each checkpoint."""
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
    )


def _train(case: Case, rounds: int, directory: str) -> list[Step]:
    """Train, and return all steps."""
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
            if writing and (found := _newest(directory)) > newest:  # the numbers of checkpoints may have gaps
                writing, complete, newest, since = 0, writing, found, 0
            if not writing and since == APART + SETTLING:
                if complete == rounds:
                    return steps
                writing = complete + 1
                paceline.checkpoint()
    raise AssertionError("there are enough epochs")


def _newest(directory: str) -> int:
    """Return the number of the newest checkpoint that is complete; 0 if there is none."""
    return max((n for lineage in Path(directory).glob("paceline-*") for n in numbers_in(lineage)), default=0)

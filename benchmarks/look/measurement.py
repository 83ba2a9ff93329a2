"""The runs of the benchmark, and what comes of them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
from rich import box
from rich.table import Table

from paceline.cli.progress import TellShare
from paceline.errors import RunFailedError
from paceline.outlets.wanted import open_outlets

__all__ = ["CASES", "SIEGE", "Case", "LookRow", "estimate_s", "measure", "require_packages", "table"]

STEP_S = 0.005
WARM_UP_S = 6.0  # until the process that shows the run has imported its packages
MEASURED_S = 10.0
START_S = 4.0  # approximate time until training begins, and from its end until the program ends
FLOOD_PER_S = 1000.0

SCRIPT = """
import json, sys, time
import torch
import paceline

logs, repeats, warm_up_s, measured_s = sys.argv[1] == "log", *map(float, sys.argv[2:])
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(32, 128)
model, optimizer = paceline.prepare(model, optimizer)
ends = [time.perf_counter()]
while ends[-1] - ends[0] < warm_up_s + measured_s:
    optimizer.zero_grad()
    for _ in range(int(repeats)):
        loss = model(x).square().mean()
        loss.backward()
    optimizer.step()
    if logs:
        paceline.log(loss=loss, norm=1.0)
    ends.append(time.perf_counter())
measured = [end for end in ends if end - ends[0] >= warm_up_s]
with open(f"steps-{paceline.worker_index()}.json", "w") as file:
    json.dump([end - begin for begin, end in zip(measured, measured[1:])], file)
"""

CALIBRATION = """
import time
import torch

torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
x = torch.randn(32, 128)
times = []
for _ in range(500):
    begun = time.perf_counter()
    model(x).square().mean().backward()
    times.append(time.perf_counter() - begun)
print(sorted(times)[250])
"""

ADDRESS = re.compile(r"(?:dashboard|metrics): (\S+)")


class Case(msgspec.Struct, frozen=True):
    """A way to look at a run.

    Attributes:
        name: description of the case.
        logs: True if the script calls `paceline.log` in each step.
        shown: True with the live page, which a client fetches as a browser does, TensorBoard and OpenMetrics.
        flood: "requests" for 1,000 requests per second without the token beside the run; "busy" for a process that
            uses as much of the processor without sending any; "" for neither.
        goal: the largest acceptable ratio; None for no limit.
    """

    name: str
    logs: bool = False
    shown: bool = False
    flood: str = ""
    goal: float | None = None


CASES = (
    Case("nothing"),
    Case("nothing, again"),
    Case("paceline.log", logs=True),
    Case("log, page, TensorBoard, metrics", logs=True, shown=True, goal=1.01),
)

SIEGE = (
    Case("live page, and a busy process", shown=True, flood="busy"),
    Case("live page, 1,000 requests/s", shown=True, flood="requests", goal=1 / 0.95),
)


class LookRow(msgspec.Struct, frozen=True):
    """The result of one case.

    Attributes:
        name: see `Case`.
        step_ms: median duration of a step over all rounds, in milliseconds.
        ratio: median over the rounds of the ratio to the first case.
        low: lowest ratio of a round.
        high: highest ratio of a round.
        requests_per_s: median number of requests per second that a flood has sent; 0 without a flood.
        goal: the goal in words; "" if there is none.
        met: True if the goal is met, or there is none.
    """

    name: str
    step_ms: float
    ratio: float
    low: float
    high: float
    requests_per_s: float
    goal: str
    met: bool


def require_packages() -> None:
    """Raise `ConfigurationError` if a package is missing that the measurement needs."""
    with TemporaryDirectory() as folder:
        open_outlets(True, folder, 0).close()


def estimate_s(rounds: int, cases: Sequence[Case] = CASES) -> float:
    """Estimate how long the measurement takes, in seconds."""
    return rounds * len(cases) * (WARM_UP_S + MEASURED_S + START_S)


def measure(
    tell: TellShare,
    rounds: int,
    cases: Sequence[Case] = CASES,
    warm_up_s: float = WARM_UP_S,
    measured_s: float = MEASURED_S,
) -> list[LookRow]:
    """Run each case once per round, and compare each round with its own first case."""
    pass_s = float(
        subprocess.run([sys.executable, "-c", CALIBRATION], capture_output=True, check=True).stdout
    )
    arguments = [str(max(1, round(STEP_S / pass_s))), str(warm_up_s), str(measured_s)]
    found: list[list[tuple[float, float]]] = [[] for _ in cases]
    order = list(range(len(cases)))
    generator = random.Random(0)
    for turn in range(rounds):
        generator.shuffle(order)
        for place, index in enumerate(order):
            tell(cases[index].name, (turn * len(cases) + place) / (rounds * len(cases)))
            found[index].append(_run(cases[index], arguments))
    return [_row(case, ours, found[0]) for case, ours in zip(cases, found, strict=True)]


def _row(case: Case, ours: Sequence[tuple[float, float]], first: Sequence[tuple[float, float]]) -> LookRow:
    ratios = [step_s / its_s for (step_s, _), (its_s, _) in zip(ours, first, strict=True)]
    step_s, requests_per_s = (median(column) for column in zip(*ours, strict=True))
    ratio = median(ratios)
    goal = "" if case.goal is None else f"at most {case.goal:.3f}"
    met = case.goal is None or ratio <= case.goal
    return LookRow(case.name, step_s * 1000, ratio, min(ratios), max(ratios), requests_per_s, goal, met)


def _run(case: Case, arguments: Sequence[str]) -> tuple[float, float]:
    """Return the median duration of a step of one run, in seconds, over all workers, and the rate of its flood.

    Raises:
        RunFailedError: the run has failed, or nobody has seen what it shows.
    """
    workers = max(1, (os.cpu_count() or 1) // 2)
    options = [f"-n{workers}", "--servers=1", "--run-dir=run"]
    if case.shown:
        options += ["--dashboard", "--tensorboard=tensorboard", "--metrics-port=0"]
    with TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        Path(folder, "train.py").write_text(SCRIPT)
        script = ["train.py", "log" if case.logs else "quiet", *arguments]
        run = stack.enter_context(_started(["-m", "paceline", "run", *options, *script], folder))
        visitors, requests_per_s = None, 0.0
        if case.shown:
            addresses = [_address(run) for _ in ("page", "metrics")]
            program = ["-m", "benchmarks.look.visitors", *addresses, case.flood, str(FLOOD_PER_S)]
            visitors = stack.enter_context(_started(program))
        _, errors = run.communicate()
        if run.returncode != 0:
            raise RunFailedError("the run", errors)
        if visitors is not None:
            visitors.terminate()
            counts = json.loads(visitors.communicate()[0])
            if not counts.get("data") or not counts.get("metrics"):
                raise RunFailedError("the benchmark", f"nobody has seen the run: {counts}")
            if case.flood:
                requests_per_s = counts["sent"] / max(1, counts["seconds"])
        files = sorted(Path(folder).glob("steps-*.json"))
        steps_s = [
            each for file in files for each in msgspec.json.decode(file.read_bytes(), type=list[float])
        ]
        return median(steps_s), requests_per_s


@contextlib.contextmanager
def _started(arguments: Sequence[str], folder: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run a Python program, and end it if it has not ended after the block."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def _address(run: subprocess.Popen[str]) -> str:
    """Return the next address that a run prints."""
    assert run.stderr is not None
    read = []
    for line in run.stderr:
        read.append(line)
        if (found := ADDRESS.match(line)) is not None:
            return found[1]
    raise RunFailedError("the run", "".join(read))


def table(rows: Sequence[LookRow], rounds: int) -> Table:
    """Return a table with one row for each case."""
    shown = Table(
        "what is shown",
        "step (ms)",
        "ratio",
        "lowest",
        "highest",
        "requests/s",
        "goal",
        box=box.SIMPLE,
        title="Looking at a run",
    )
    for row in rows:
        goal = f"{row.goal}{'' if row.met else ': not met'}"
        shown.add_row(
            row.name,
            f"{row.step_ms:.3f}",
            f"{row.ratio:.4f}",
            f"{row.low:.4f}",
            f"{row.high:.4f}",
            f"{row.requests_per_s:.0f}" if row.requests_per_s else "",
            goal,
        )
    shown.caption = f"Each ratio is the median over {rounds} rounds."
    return shown

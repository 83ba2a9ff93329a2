"""The runs of the benchmark, and what comes of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
from rich import box
from rich.table import Table

from paceline.cli.progress_bar import TellShare
from paceline.errors import RunFailedError
from paceline.outlets.wanted import open_outlets

__all__ = [
    "CASES",
    "SIEGE",
    "Case",
    "LookRow",
    "Times",
    "estimate_s",
    "measure",
    "require_packages",
    "table",
]

STEP_S = 0.005
FLOOD_PER_S = 1000.0

SCRIPT = """
import json, sys, time
import torch
import paceline

logs, repeats, rounds = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
block_s, settling_s, warm_up_s = map(float, sys.argv[4:])
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(32, 128)
model, optimizer = paceline.prepare(model, optimizer)
first = int((time.time() + warm_up_s) // (block_s * len(logs)) + 1) * len(logs)
steps = {}
end_s, block = time.perf_counter(), 0
while block < first + rounds * len(logs):
    optimizer.zero_grad()
    for _ in range(repeats):
        loss = model(x).square().mean()
        loss.backward()
    optimizer.step()
    if logs[block % len(logs)]:
        paceline.log(loss=loss, norm=1.0)
    begin_s, end_s = end_s, time.perf_counter()
    block, into_s = divmod(time.time(), block_s)
    block = int(block)
    if block >= first and into_s > settling_s + end_s - begin_s:
        steps.setdefault(block - first, []).append(end_s - begin_s)
with open(f"steps-{paceline.worker_index()}.json", "w") as file:
    json.dump(steps, file)
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
        visited: True if a client fetches the live page as a browser does, and another one the metrics.
        flood: "requests" for 1,000 requests per second without the token beside the run; "busy" for a process that
            uses as much of the processor without sending any; "" for neither.
        goal: the largest acceptable ratio; None for no limit.
    """

    name: str
    logs: bool = False
    visited: bool = False
    flood: str = ""
    goal: float | None = None


class Times(msgspec.Struct, frozen=True):
    """How long the cases take turns.

    Attributes:
        block_s: duration of a turn, in seconds.
        settling_s: time at the beginning of a turn that is not measured, because the turn before it has effects: what
            was logged is written a little later.
        warm_up_s: time until the processes that show the run have imported their packages.
    """

    block_s: float = 6.0
    settling_s: float = 2.0
    warm_up_s: float = 10.0


DEFAULT = Times()

CASES = (
    Case("nothing"),
    Case("paceline.log", logs=True),
    Case("nothing, again"),
    Case("log, page, TensorBoard, metrics", logs=True, visited=True, goal=1.01),
)

SIEGE = (
    Case("live page, and a busy process", visited=True, flood="busy"),
    Case("live page, 1,000 requests/s", visited=True, flood="requests", goal=1 / 0.95),
)


class LookRow(msgspec.Struct, frozen=True):
    """The result of one case.

    Attributes:
        name: see `Case`.
        step_ms: median duration of a step over all rounds, in milliseconds.
        ratio: median over the rounds of the ratio to the first case.
        low: lowest ratio of a round.
        high: highest ratio of a round.
        requests_per_s: number of requests per second that a flood has sent; 0 without a flood.
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


def estimate_s(rounds: int, cases: Sequence[Case] = CASES, times: Times = DEFAULT) -> float:
    """Estimate how long the measurement takes, in seconds."""
    return times.warm_up_s + (rounds + 1) * len(cases) * times.block_s


def measure(
    tell: TellShare, rounds: int, cases: Sequence[Case] = CASES, times: Times = DEFAULT
) -> list[LookRow]:
    """Let the cases take turns in one run, and compare each turn with that of the first case in the same round.

    Raises:
        RunFailedError: the run has failed, or nobody has seen what it shows.
    """
    pass_s = float(
        subprocess.run([sys.executable, "-c", CALIBRATION], capture_output=True, check=True).stdout
    )
    seconds = [str(times.block_s), str(times.settling_s), str(times.warm_up_s)]
    logs = json.dumps([case.logs for case in cases])
    script = ["train.py", logs, str(max(1, round(STEP_S / pass_s))), str(rounds), *seconds]
    workers = max(1, (os.cpu_count() or 1) // 2)
    options = [f"-n{workers}", "--servers=1", "--run-dir=run"]
    options += ["--dashboard", "--tensorboard=tensorboard", "--metrics-port=0"]
    with TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        Path(folder, "train.py").write_text(SCRIPT)
        run = stack.enter_context(_started(["-m", "paceline", "run", *options, *script], folder))
        addresses = [_address(run) for _ in ("page", "metrics")]
        visited = json.dumps([case.visited for case in cases])
        floods = json.dumps([case.flood for case in cases])
        program = [
            "-m",
            "benchmarks.look.visitors",
            *addresses,
            visited,
            floods,
            str(FLOOD_PER_S),
            seconds[0],
        ]
        visitors = stack.enter_context(_started(program))
        _wait(run, tell, estimate_s(rounds, cases, times))
        visitors.terminate()
        counts: dict[str, float] = json.loads(visitors.communicate()[0])
        if not counts.get("data") or not counts.get("metrics"):
            raise RunFailedError("the benchmark", f"nobody has seen the run: {counts}")
        taken = [
            msgspec.json.decode(file.read_bytes(), type=dict[int, list[float]])
            for file in sorted(Path(folder).glob("steps-*.json"))
        ]
    steps_s = [
        [median(step for each in taken for step in each[turn * len(cases) + place]) for turn in range(rounds)]
        for place in range(len(cases))
    ]
    return [_row(case, ours, steps_s[0], counts) for case, ours in zip(cases, steps_s, strict=True)]


def _row(case: Case, ours: Sequence[float], first: Sequence[float], counts: Mapping[str, float]) -> LookRow:
    ratios = [step_s / its_s for step_s, its_s in zip(ours, first, strict=True)]
    requests_per_s = counts[f"{case.flood} sent"] / counts[f"{case.flood} seconds"] if case.flood else 0.0
    ratio = median(ratios)
    goal = "" if case.goal is None else f"at most {case.goal:.3f}"
    met = case.goal is None or ratio <= case.goal
    return LookRow(case.name, median(ours) * 1000, ratio, min(ratios), max(ratios), requests_per_s, goal, met)


def _wait(run: subprocess.Popen[str], tell: TellShare, expected_s: float) -> None:
    """Wait for a run to end, and report the progress."""
    begun_s = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(run.communicate)
        while not wait([ending], timeout=1.0).done:
            tell("one run", min(1.0, (time.monotonic() - begun_s) / expected_s))
        _, errors = ending.result()
    if run.returncode != 0:
        raise RunFailedError("the run", errors)


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
    shown.caption = f"Each ratio is the median over {rounds} rounds of one run."
    return shown

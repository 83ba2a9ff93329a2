"""`python -m benchmarks look`: what it costs to look at a run while it goes on.

A script trains with steps of about 5 ms, which compute all the time. The run has a live page, TensorBoard's files and
metrics. The cases take turns within this run, for a few seconds each: in some cases the script logs, and in some
cases clients fetch the page and the metrics. In each round, every case has one turn. In two turns of each round, the
script logs nothing and no client fetches anything. The time of a step in a turn is divided by the time of a step in the
first of these two turns, and the result is the median of this ratio over the rounds. The ratio of the second of these
two turns shows the influence of chance. Turns are so short because a machine's speed may change by several percent
within a minute.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec
import typer

from paceline.cli.console import TellShare
from paceline.errors import RunFailedError
from paceline.look.show_process import open_outlets

from ..harness import (
    Benchmark,
    Columns,
    Figures,
    Rounds,
    goal_text,
    program,
    require_success,
    rounds_text,
    spread,
)

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
    """A way to look at a run."""

    name: str
    logs: bool = False  # True if the script calls `paceline.log` in each step
    visited: bool = (
        False  # True if a client fetches the page as a browser does, and another client fetches the metrics
    )
    # "requests" for 1,000 requests per second that lack the token; "busy" for a process that uses as much of the
    # processor as these requests, but sends none; "" for neither.
    flood: str = ""
    goal: float | None = None  # the largest acceptable ratio; None for no limit


class Times(msgspec.Struct, frozen=True):
    """The durations of a turn and of the warm-up."""

    block_s: float = 6.0  # duration of a turn
    # Time at the beginning of a turn that is not measured, because the previous turn still has effects: logged values
    # are written a little later.
    settling_s: float = 2.0
    warm_up_s: float = 10.0  # time until the processes that show the run have imported their packages


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
    """The result of one case."""

    name: str
    step_ms: float  # median duration of a step over all rounds
    ratio: float  # median over the rounds of the ratio to the first case
    low: float
    high: float
    requests_per_s: float  # number of requests that a flood has sent; 0 without a flood
    goal: str  # the goal in words; "" if there is no goal
    met: bool  # True if the goal is met, or if there is no goal


COLUMNS: Columns[LookRow] = {
    "what is shown": lambda row: row.name,
    "step (ms)": lambda row: f"{row.step_ms:.3f}",
    "ratio": lambda row: f"{row.ratio:.4f}",
    "lowest": lambda row: f"{row.low:.4f}",
    "highest": lambda row: f"{row.high:.4f}",
    "requests/s": lambda row: f"{row.requests_per_s:.0f}" if row.requests_per_s else "",
    "goal": lambda row: goal_text(row.goal, row.met),
}
Siege = Annotated[
    bool,
    typer.Option(
        "--siege", help="Instead, measure what 1,000 requests per second without a token cost the run."
    ),
]


@Benchmark(minutes=9, quick={"rounds": 1, "times": Times(warm_up_s=1.0)})
def measure(
    tell: TellShare, siege: Siege = False, rounds: Rounds = 20, times: Times = DEFAULT
) -> list[Figures[LookRow]]:
    """Measure what it costs to log and to look at a run with steps of 5 ms: live page, TensorBoard and OpenMetrics.

    In each round, every case has one turn.

    Needs paceline[tensorboard,metrics].
    """
    with TemporaryDirectory() as folder:
        open_outlets(True, folder, 0).close()  # raises an error if a package is missing
    cases = SIEGE if siege else CASES
    calibration = subprocess.run([sys.executable, "-c", CALIBRATION], capture_output=True, check=True)
    pass_s = float(calibration.stdout)
    seconds = [str(times.block_s), str(times.settling_s), str(times.warm_up_s)]
    logs = json.dumps([case.logs for case in cases])
    script = ["train.py", logs, str(max(1, round(STEP_S / pass_s))), str(rounds), *seconds]
    workers = max(1, (os.cpu_count() or 1) // 2)
    options = [f"-n{workers}", "--servers=1", "--run-dir=run"]
    options += ["--dashboard", "--tensorboard=tensorboard", "--metrics-port=0"]
    with TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        Path(folder, "train.py").write_text(SCRIPT)
        run = stack.enter_context(program("-m", "paceline", "run", *options, *script, folder=folder))
        addresses = [_address(run) for _ in ("page", "metrics")]
        flags = [json.dumps([case.visited for case in cases]), json.dumps([case.flood for case in cases])]
        looks = ["-m", "benchmarks.look.visitors", *addresses, *flags, str(FLOOD_PER_S), seconds[0]]
        visitors = stack.enter_context(program(*looks))
        _wait(run, tell, times.warm_up_s + (rounds + 1) * len(cases) * times.block_s)
        visitors.terminate()
        counts: dict[str, float] = json.loads(visitors.communicate()[0])
        if not counts.get("data") or not counts.get("metrics"):
            raise RunFailedError("the benchmark", f"a client has received no data or metrics: {counts}")
        taken = [
            msgspec.json.decode(file.read_bytes(), type=dict[int, list[float]])
            for file in sorted(Path(folder).glob("steps-*.json"))
        ]
    steps_s = [
        [median(step for each in taken for step in each[turn * len(cases) + place]) for turn in range(rounds)]
        for place in range(len(cases))
    ]
    rows = [_row(case, ours, steps_s[0], counts) for case, ours in zip(cases, steps_s, strict=True)]
    return [Figures("Looking at a run", rows, COLUMNS, f"ratios: {rounds_text(rounds)} of one run")]


def _row(case: Case, ours: Sequence[float], first: Sequence[float], counts: Mapping[str, float]) -> LookRow:
    ratios = spread(step_s / its_s for step_s, its_s in zip(ours, first, strict=True))
    requests_per_s = counts[f"{case.flood} sent"] / counts[f"{case.flood} seconds"] if case.flood else 0.0
    goal = "" if case.goal is None else f"at most {case.goal:.3f}"
    met = case.goal is None or ratios.median <= case.goal
    return LookRow(case.name, median(ours) * 1000, *ratios, requests_per_s, goal, met)


def _wait(run: subprocess.Popen[str], tell: TellShare, expected_s: float) -> None:
    """Wait for a run to end, and report the progress."""
    begun_s = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(run.communicate)
        while not wait([ending], timeout=1.0).done:
            tell("one run", min(1.0, (time.monotonic() - begun_s) / expected_s))
        _, errors = ending.result()
    require_success("the run", run, errors)


def _address(run: subprocess.Popen[str]) -> str:
    """Return the next address that a run prints."""
    assert run.stderr is not None
    read = []
    for line in run.stderr:
        read.append(line)
        if (found := ADDRESS.match(line)) is not None:
            return found[1]
    raise RunFailedError("the run", "".join(read))

"""Measures how much later the first update of a run is on a warm Ray cluster than with the local engine.

The cluster has one node, which is this machine, and has been used before, so Ray's processes are running. The same
training function is run with both engines in turn by a program that has imported torch and ray. The time is measured
from the call of `launch` to the end of the first `optimizer.step()` of the last worker.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec

from paceline.cli.console import TellShare
from paceline.errors import ConfigurationError
from paceline.start.ray import import_ray

from .harness import Benchmark, Columns, Figures, goal_text, program, require_success

GOAL_MORE_S = 3.0

PROGRAM = """
import os
import sys
import time
from pathlib import Path

import ray
import torch

import paceline

def train():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(paceline.worker_index()))
    for step in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if step == 0:
            print(f"updated {time.monotonic()}", flush=True)

ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
for turn in range(int(sys.argv[1]) + 1):
    for engine in ("local", "ray"):
        run_dir = f"{engine}-{turn}"
        begun_s = time.monotonic()
        paceline.launch(train, workers=2, servers=1, engine=engine, run_dir=run_dir, progress=False)
        lines = [line for log in Path(run_dir).glob("worker-*.log") for line in log.read_text().splitlines()]
        updated_s = [float(line.split()[1]) for line in lines if line.startswith("updated")]
        assert len(updated_s) == 2, lines
        print("measured", turn, engine, max(updated_s) - begun_s, flush=True)
ray.shutdown()
"""


class RayRow(msgspec.Struct, frozen=True):
    """The times with one engine: seconds from the call of `launch` to the first update."""

    engine: str
    seconds: list[float]  # without the first round, which fills the caches
    more_s: float  # the median of the differences from the local engine

    @property
    def met(self) -> bool:
        """True if `more_s` is at most the goal."""
        return self.more_s <= GOAL_MORE_S


COLUMNS: Columns[RayRow] = {
    "engine": lambda row: row.engine,
    "median": lambda row: f"{median(row.seconds):.2f}",
    "all rounds": lambda row: ", ".join(f"{time_s:.2f}" for time_s in row.seconds),
    "difference": lambda row: f"{row.more_s:.2f}",
    "goal": lambda row: goal_text(f"at most {GOAL_MORE_S:g} s more", row.met),
}


@Benchmark(minutes=1, quick={"rounds": 1})
def measure(tell: TellShare, rounds: int = 5) -> list[Figures[RayRow]]:
    """Measure the time from the call of `launch` to the first update on a warm Ray cluster and on the local engine.

    Needs paceline[ray].
    """
    try:
        import_ray()
    except ConfigurationError as error:
        raise ConfigurationError("ray is not installed: pip install paceline[ray]") from error
    found: dict[str, list[float]] = {"local": [], "ray": []}
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, Path(folder, "output").open("wb") as output:
        Path(folder, "program.py").write_text(PROGRAM)
        env = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        with program("program.py", str(rounds), folder=folder, env=env, errors=output) as running:
            assert running.stdout is not None
            for done, line in enumerate(line for line in running.stdout if line.startswith("measured")):
                _, turn, engine, seconds = line.split()
                tell(f"{engine} engine", (done + 1) / (2 * rounds + 2))
                if int(turn):
                    found[engine].append(float(seconds))
            running.wait()
        require_success("the program", running, Path(folder, "output").read_text())
    rows = [
        RayRow(engine, times_s, median(a - b for a, b in zip(times_s, found["local"], strict=True)))
        for engine, times_s in found.items()
    ]
    return [Figures("From launch to first update, 2 workers and 1 server (seconds)", rows, COLUMNS)]

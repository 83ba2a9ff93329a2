"""How much later the first update of a run is on a warm Ray cluster than with the local engine.

The cluster has one node, which is this machine, and has been used before, so Ray's processes are running. The same
training function is run with both engines in turn by a program that has imported torch and ray. The time is measured
from the call of `launch` to the end of the first `optimizer.step()` of the last worker.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
from rich.table import Table

from paceline.cli.progress_bar import TellShare
from paceline.errors import ConfigurationError, RunFailedError
from paceline.launcher.clusters.ray_run import import_ray

__all__ = ["RayStartup", "estimate_s", "measure", "table"]

ROUNDS = 5
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


class RayStartup(msgspec.Struct, frozen=True):
    """The times of one round each, without the first round, which fills the caches.

    Attributes:
        local_s: seconds from the call of `launch` to the first update, with the local engine.
        ray_s: the same, on the Ray cluster.
        more_s: the median of their differences.
        met: True if this is at most `GOAL_MORE_S`.
    """

    local_s: list[float]
    ray_s: list[float]
    more_s: float
    met: bool


def estimate_s() -> float:
    """Estimate how long the measurement takes, in seconds."""
    return 10.0 + (ROUNDS + 1) * 8.0


def measure(tell: TellShare, rounds: int = ROUNDS) -> RayStartup:
    """Run the function with both engines once per round, and return the times.

    Raises:
        ConfigurationError: ray is not installed, or the processes of the benchmark do not fit on this machine.
        RunFailedError: the program has failed.
    """
    try:
        import_ray()
    except ConfigurationError as error:
        raise ConfigurationError("ray is not installed: pip install paceline[ray]") from error
    found: dict[str, list[float]] = {"local": [], "ray": []}
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        Path(folder, "program.py").write_text(PROGRAM)
        with (
            Path(folder, "output").open("wb") as output,
            subprocess.Popen(
                [sys.executable, "program.py", str(rounds)],
                cwd=folder,
                env={**os.environ, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"},
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            ) as program,
        ):
            assert program.stdout is not None
            for done, line in enumerate(line for line in program.stdout if line.startswith("measured")):
                _, turn, engine, seconds = line.split()
                tell(f"{engine} engine", (done + 1) / (2 * rounds + 2))
                if int(turn):
                    found[engine].append(float(seconds))
        if program.returncode:
            raise RunFailedError(
                "the program", f"exit code {program.returncode}", Path(folder, "output").read_text()
            )
    more_s = median(ray_s - local_s for local_s, ray_s in zip(found["local"], found["ray"], strict=True))
    return RayStartup(found["local"], found["ray"], more_s, more_s <= GOAL_MORE_S)


def table(found: RayStartup) -> Table:
    """Return the table of the results."""
    table = Table(title="From launch to first update, 2 workers and 1 server (seconds)", title_justify="left")
    for name in ("engine", "median", "all rounds", "goal"):
        table.add_column(name)
    for engine, times in (("local", found.local_s), ("ray", found.ray_s)):
        table.add_row(engine, f"{median(times):.2f}", ", ".join(f"{time_s:.2f}" for time_s in times), "")
    goal = f"at most {GOAL_MORE_S:g} s more: {'met' if found.met else 'not met'}"
    table.add_row("difference", f"{found.more_s:.2f}", "", goal)
    return table

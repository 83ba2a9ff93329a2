"""`python -m benchmarks unequal`: how much faster other sync models are than BSP if one of four workers is slow.

The loop is that of the README: a number of epochs over a distributed loader. One worker takes three times as long for
a batch as the others. The time under each sync model, and under BSP with balanced batches, is measured live and in a
simulation of the cluster that was recorded in an additional live run under BSP.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.cli.console import TellShare
from paceline.core.lease import BatchSizing
from paceline.sim import simulate
from paceline.train.data import distribute
from paceline.train.optimizer import DistributedOptimizer

from .harness import Benchmark, Columns, Figures, live, marked, recorded

MODELS: tuple[tuple[str, BatchSizing], ...] = (
    ("bsp", "equal"),
    ("asp", "equal"),
    ("elastic-bsp:lookahead=15", "equal"),
    ("bsp", "balanced"),
    ("elastic-bsp:lookahead=15", "balanced"),
)
"""Sync models and the sizes of the workers' batches. The first pair is the baseline."""

SCENARIOS = {"pace": "--pace .05,.05,.05,.15", "slowdown": "--slowdown 1,1,1,3"}
"""How the unequal machines are emulated: a minimum time per iteration, or a factor for the measured compute time."""

PACE_S = (0.05, 0.05, 0.05, 0.15)
SLOWDOWN = (1.0, 1.0, 1.0, 3.0)
COMPUTE_S = 0.05  # in the scenario "slowdown": minimum compute time of a full batch, without the slowdown
BATCH = 16
BATCHES = 64  # number of batches in an epoch
EPOCHS = 10
SPEEDUP_GOAL = 2.2
BALANCED_GOAL = 2.0
ERROR_GOAL = 0.05


class UnequalRow(msgspec.Struct, frozen=True):
    """The time that the training loop takes under one sync model."""

    scenario: str  # how the unequal machines are emulated: a key of `SCENARIOS`
    sync: str
    batch: BatchSizing
    live_s: float
    simulated_s: float
    speedup: float  # time of the live run under BSP with equal batches, divided by `live_s`

    @property
    def error(self) -> float:
        """Relative error of the simulated time."""
        return self.simulated_s / self.live_s - 1

    @property
    def goal(self) -> float:
        """The speedup that the run should have at least; 0 for the baseline."""
        if self.sync == "bsp":
            return BALANCED_GOAL if self.batch == "balanced" else 0.0
        return SPEEDUP_GOAL


COLUMNS: Columns[UnequalRow] = {
    "emulated by": lambda row: SCENARIOS[row.scenario],
    "sync": lambda row: row.sync,
    "batches": lambda row: row.batch,
    "live": lambda row: f"{row.live_s:.1f} s",
    "speedup": lambda row: marked(f"{row.speedup:.2f}", row.speedup >= row.goal),
    "simulated": lambda row: f"{row.simulated_s:.1f} s",
    "error": lambda row: marked(f"{row.error:+.1%}", abs(row.error) <= ERROR_GOAL),
}
CAPTION = (
    f"goals: speedup of at least {SPEEDUP_GOAL} under models without a barrier in every iteration, and of at "
    f"least {BALANCED_GOAL} under bsp with balanced batches; error of the simulation of at most {ERROR_GOAL:.0%}; "
    "!: goal missed"
)


@Benchmark(minutes=6, quick={"models": (("bsp", "equal"), ("bsp", "balanced")), "epochs": 1})
def measure(
    tell: TellShare, models: Sequence[tuple[str, BatchSizing]] = MODELS, epochs: int = EPOCHS
) -> list[Figures[UnequalRow]]:
    """Compare the time of 10 epochs under several sync models if one of four workers is 3 times slower.

    Each sync model is measured live and simulated.
    """
    rows = []
    runs = len(SCENARIOS) * (len(models) + 1)
    for number, scenario in enumerate(SCENARIOS):
        done = number * (len(models) + 1)
        tell(f"{scenario}: live run under bsp, to record the cluster", done / runs)
        arguments, machines = _emulated(scenario, epochs)
        cluster = recorded(train, *arguments, sync="bsp", batch="equal", **machines)
        bsp_s = 0.0
        for position, (sync, batch) in enumerate(models):
            name = f"{sync} with {batch} batches"
            tell(f"{scenario}: live run and simulation under {name}", (done + position + 1) / runs)
            result, _ = live(train, *arguments, sync=sync, batch=batch, **machines)
            live_s = result.summary["duration_s"]
            simulated = simulate(cluster, sync, train_fn=train, args=(epochs, 0.0), batch=batch)
            bsp_s = bsp_s or live_s
            simulated_s = simulated.measures.duration_s
            rows.append(UnequalRow(scenario, sync, batch, live_s, simulated_s, bsp_s / live_s))
    title = f"{epochs} epochs of {BATCHES} batches on 4 workers, one of which is 3 times slower"
    return [Figures(title, rows, COLUMNS, CAPTION, labels=3)]


def train(epochs: int, compute_s: float) -> None:
    """Train a small network on random data. The gradient of a full batch takes at least `compute_s` to compute."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
    data = TensorDataset(torch.randn(BATCH * BATCHES, 64), torch.randint(0, 10, (BATCH * BATCHES,)))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    for _ in range(epochs):
        for x, y in distribute(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            time.sleep(compute_s * len(x) / BATCH)
            optimizer.step()


def _emulated(scenario: str, epochs: int) -> tuple[tuple[int, float], dict[str, Any]]:
    """Return the arguments of `train` and the settings of a live run."""
    slowed = scenario == "slowdown"
    emulated = {"slowdown": SLOWDOWN} if slowed else {"pace": PACE_S}
    return (epochs, COMPUTE_S if slowed else 0.0), {"workers": len(PACE_S), **emulated}

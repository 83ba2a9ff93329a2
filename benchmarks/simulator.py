"""`python -m benchmarks simulator`: the accuracy and the speed of simulations.

Accuracy: four workers train live under every sync model. The minimum duration of an iteration differs between
workers. Each live run is compared with a simulation. All simulations use the cluster that was recorded in one
additional run under BSP.

Speed: the number of events per second, the time and peak memory of a simulation with 10,000 workers, and the ratio of
the training time in a simulation to that of a handwritten training loop.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec
import torch
from torch import nn

from paceline.cli.console import TellShare
from paceline.sim import Cluster, Uniform, simulate
from paceline.train.optimizer import DistributedOptimizer

from .harness import Benchmark, Columns, Figures, live, marked, recorded

MODELS = (
    "bsp asp ssp:staleness=2 ssp:staleness=2,execution=lazy dssp:lower=1,upper=5 dsps:lower=1,upper=5 "
    "pssp:staleness=1,probability=0.5 dynamic-pssp:staleness=1 drop-stragglers:quorum=3 elastic-bsp:lookahead=5 "
    "spec-sync spec-sync:base=ssp:staleness=2 naive-waiting:delay_s=0.05"
)
PACE_S = (0.10, 0.12, 0.15, 0.30)
JITTER = 0.1
LIVE_S = 15.0

FIDELITY_GOALS = (0.10, 0.15)
"""Goals: upper bounds on the relative errors of the simulated gradients per second and simulated mean staleness."""


class FidelityRow(msgspec.Struct, frozen=True):
    """Gradients per second and mean staleness under one sync model, in a live run and in its simulation."""

    sync: str
    live_gradients_per_s: float
    simulated_gradients_per_s: float
    live_staleness: float
    simulated_staleness: float

    @property
    def gradients_off(self) -> float:
        """Relative error of the simulated gradients per second."""
        return self.simulated_gradients_per_s / self.live_gradients_per_s - 1

    @property
    def staleness_off(self) -> float:
        """Relative error of the simulated mean staleness."""
        if not self.live_staleness:
            return 0.0 if not self.simulated_staleness else float("inf")
        return self.simulated_staleness / self.live_staleness - 1


class SpeedRow(msgspec.Struct, frozen=True):
    """A measurement of the simulator's speed, and its goal: an upper bound or, with `at_least`, a lower bound."""

    what: str
    value: float
    goal: float
    unit: str
    at_least: bool = False

    @property
    def reached(self) -> bool:
        """True if the goal is met."""
        return self.value >= self.goal if self.at_least else self.value <= self.goal


COLUMNS: Columns[FidelityRow] = {
    "sync": lambda row: row.sync,
    "gradients per s, live": lambda row: f"{row.live_gradients_per_s:.2f}",
    "simulated": lambda row: f"{row.simulated_gradients_per_s:.2f}",
    "error": lambda row: marked(f"{row.gradients_off:+.1%}", abs(row.gradients_off) <= FIDELITY_GOALS[0]),
    "staleness (updates), live": lambda row: f"{row.live_staleness:.2f}",
    "simulated ": lambda row: f"{row.simulated_staleness:.2f}",
    "error ": lambda row: marked(f"{row.staleness_off:+.1%}", abs(row.staleness_off) <= FIDELITY_GOALS[1]),
}
SPEED_COLUMNS: Columns[SpeedRow] = {
    "what": lambda row: row.what,
    "measured": lambda row: marked(f"{row.value:,.3g} {row.unit}", row.reached),
    "goal": lambda row: f"{'>=' if row.at_least else '<='} {row.goal:,g} {row.unit}",
}


@Benchmark(minutes=8, quick={"models": ("asp",), "live_s": 1.0, "speed": False})
def measure(
    tell: TellShare, models: Sequence[str] = MODELS.split(), live_s: float = LIVE_S, speed: bool = True
) -> list[Figures[Any]]:
    """Compare simulations with live runs under every sync model, and measure how fast simulations are."""
    title = "accuracy: live runs compared with simulations of a cluster recorded under bsp"
    caption = "goals: errors of at most {:.0%} (gradients per s) and {:.0%} (staleness); !: goal missed"
    accuracy = Figures(title, _fidelity(tell, models, live_s), COLUMNS, caption.format(*FIDELITY_GOALS))
    return [accuracy, Figures("speed", _speed(tell), SPEED_COLUMNS)] if speed else [accuracy]


# -- accuracy --------------------------------------------------------------------------------------------------


def train(duration_s: float) -> None:
    """Train a small network on random data for a given time.

    The function reads the real clock, so it cannot run in a simulation.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        optimizer.step(closure)


def _fidelity(tell: TellShare, models: Sequence[str], live_s: float) -> list[FidelityRow]:
    rows = []
    machines = {"workers": len(PACE_S), "pace": PACE_S, "jitter": JITTER}
    tell("live run under bsp, to record the cluster", 0.0)
    cluster = recorded(train, live_s, sync="bsp", seed=1, **machines)
    for number, sync in enumerate(models):
        tell(f"live run and simulation under {sync}", (number + 1) / (len(models) + 4))
        found = live(train, live_s, sync=sync, seed=2, **machines)[0].summary
        simulated = simulate(cluster, sync, None, seed=2, until_s=found["duration_s"]).measures
        gradients_per_s = simulated.gradients / found["duration_s"]
        live_ones = (found["gradients_per_s"], gradients_per_s, found["mean_staleness"])
        rows.append(FidelityRow(sync, *live_ones, simulated.mean_staleness))
    return rows


# -- speed -----------------------------------------------------------------------------------------------------


def jittery(workers: int) -> Cluster:
    """Return a cluster with iterations of about one second. Each worker is slightly slower than the previous worker."""
    return Cluster(
        compute_s=[Uniform(low=0.9 + 0.3 * k / workers, high=1.1 + 0.3 * k / workers) for k in range(workers)]
    )


def _speed(tell: TellShare) -> list[SpeedRow]:
    tell("events per second", 0.85)
    few, many = (median(_cost_us(n, 200_000 // n) for _ in range(3)) for n in (100, 10_000))
    tell("10,000 workers x 100 iterations under elastic-bsp:lookahead=15", 0.9)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        took_s, peak_mib = pool.apply(_ten_thousand)
    tell("training in virtual time", 0.95)
    lighter, heavier = (median(training_ratio(batch) for _ in range(3)) for batch in (128, 512))
    return [
        SpeedRow("events per second, 100 workers under asp", 1e6 / few, 100_000, "1/s", at_least=True),
        # The time per event grows with the logarithm of the number of workers; the goal is log 10^4 / log 10^2 = 2.
        SpeedRow("time per event, 10,000 workers compared with 100", many / few, 2.0, "x"),
        SpeedRow("10,000 workers x 100 iterations under elastic-bsp:lookahead=15", took_s, 60.0, "s"),
        SpeedRow("peak memory of the simulation of 10,000 workers", peak_mib, 1024.0, "MiB"),
        SpeedRow(
            "training time compared with a handwritten loop, 2 to 3 ms per gradient", lighter, 1.15, "x"
        ),
        SpeedRow("training time compared with a handwritten loop, 10 ms per gradient", heavier, 1.15, "x"),
    ]


def _cost_us(workers: int, iterations: int) -> float:
    begun_s = time.perf_counter()
    result = simulate(jittery(workers), "asp", iterations)
    return (time.perf_counter() - begun_s) / result.events * 1e6


def _ten_thousand() -> tuple[float, float]:
    """Simulate 10,000 workers. Return the duration in seconds and the peak memory of this process in MiB."""
    begun_s = time.perf_counter()
    simulate(jittery(10_000), "elastic-bsp:lookahead=15", 100)
    return time.perf_counter() - begun_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def training_ratio(batch: int, workers: int = 4, iterations: int = 60) -> float:
    """Return the wall-clock time of training in a simulation, divided by that of a handwritten loop.

    For each replica of the model in turn, an iteration of the handwritten loop computes a gradient on the replica,
    applies it to the master copy of the weights, and copies the new weights back to the replica.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        bare_s = _by_hand(batch, workers, iterations)
        times: list[float] = []
        # Raw hyper-parameters: the simulated workers take whole steps, as the handwritten loop does.
        arguments = batch, iterations, times
        simulate(jittery(workers), "asp", train_fn=_timed, args=arguments, hyperparameters="raw")
        return (times[-1] - times[0]) / bare_s
    finally:
        torch.set_num_threads(threads)


def _by_hand(batch: int, workers: int, iterations: int) -> float:
    """Return the duration of the handwritten loop in seconds. The first pass over the replicas is not timed."""
    master, _, _ = _problem(batch)
    replicas = [_problem(batch) for _ in range(workers)]
    optimizer = torch.optim.SGD(master.parameters(), lr=0.01, momentum=0.9)
    begun_s = 0.0
    for iteration in range(iterations + 1):
        if iteration == 1:
            begun_s = time.perf_counter()
        for model, x, y in replicas:
            for parameter in model.parameters():
                parameter.grad = None
            nn.functional.cross_entropy(model(x), y).backward()
            for own, parameter in zip(master.parameters(), model.parameters(), strict=True):
                own.grad = parameter.grad
            optimizer.step()
            with torch.no_grad():
                for own, parameter in zip(master.parameters(), model.parameters(), strict=True):
                    parameter.copy_(own)
    return time.perf_counter() - begun_s


def _problem(batch: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return model, torch.randn(batch, 256), torch.randint(0, 10, (batch,))


def _timed(batch: int, iterations: int, times: list[float]) -> None:
    """Train as one worker of a simulation.

    The function appends wall-clock times to `times`: the earliest time at which a worker begins its second iteration,
    followed by the times at which the workers finish.
    """
    model, x, y = _problem(batch)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model=model)
    for iteration in range(iterations + 1):
        if iteration == 1 and not times:
            times.append(time.perf_counter())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    times.append(time.perf_counter())

"""The plan of the measurements: systems, sizes, processes, iterations, and an estimate of the total time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch

from paceline.core.protocol.layout import ALIGNMENT_BYTES, ITEM_BYTES
from paceline.errors import ConfigurationError, unknown_name

__all__ = [
    "FEWEST",
    "FLOOR",
    "GLOO",
    "LR",
    "OPTIMIZER",
    "OPTIMIZERS",
    "OPTIMIZER_SIZES_MB",
    "SECONDS",
    "SHM_ASP",
    "SHM_BSP",
    "SIZES_MB",
    "SMALLEST_MB",
    "SOCKET_ASP",
    "SOCKET_BSP",
    "SYSTEMS",
    "TCP_ASP",
    "TCP_BSP",
    "TURNS",
    "WARM_UP",
    "WORKERS",
    "Case",
    "Figures",
    "TransportPlan",
    "TransportRow",
    "Turn",
    "elements",
    "estimate_s",
    "lengths",
    "turns_of",
    "work_s",
]

SIZES_MB = (0.004, 1.0, 25.0, 100.0)
WORKERS = (2, 4)
SERVERS = 2
ROUNDS = 3

TENSORS = 8  # number of tensors in a model; more than one, as in real models
ONE_TENSOR_BELOW_KB = 64
SMALLEST_MB = 0.001
OPTIMIZER_SIZES_MB = (25.0, 100.0)  # of the models whose updates are measured

SECONDS = 0.5  # approximate time of the iterations for one result in one round
WARM_UP = 2  # iterations that are not measured
FEWEST, MOST = 8, 1500  # limits for the number of measured iterations
LR = 1e-3


class Case(NamedTuple):
    """What is measured: a system with a transport and a mode."""

    system: str
    transport: str
    mode: str


FLOOR = Case("floor", "shm", "asp")
SOCKET_ASP, SOCKET_BSP = Case("socket", "tcp", "asp"), Case("socket", "tcp", "bsp")
GLOO = Case("gloo", "tcp", "bsp")
SHM_ASP, SHM_BSP = Case("paceline", "shm", "asp"), Case("paceline", "shm", "bsp")
TCP_ASP, TCP_BSP = Case("paceline", "tcp", "asp"), Case("paceline", "tcp", "bsp")

# Each group contains the cases that are measured in the same processes.
TURNS: tuple[tuple[Case, ...], ...] = (
    (FLOOR,),
    (SOCKET_ASP,),
    (SOCKET_BSP,),
    (GLOO,),
    (SHM_ASP, SHM_BSP),
    (TCP_ASP, TCP_BSP),
)
OPTIMIZER = Case("optimizer", "shm", "asp")
SYSTEMS = (*dict.fromkeys(turn[0].system for turn in TURNS), OPTIMIZER.system)


class Updated(NamedTuple):
    """An optimizer and the memory traffic of its updates.

    Attributes:
        make: creates the optimizer.
        copies: number of copy operations that move as many bytes as one update. A copy reads one vector and writes
            one. An update reads the gradient, and reads and writes the weights and the optimizer's state.
    """

    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
    copies: float


OPTIMIZERS: dict[str, Updated] = {
    "SGD": Updated(lambda p: torch.optim.SGD(p, lr=LR), 1.5),
    "SGD momentum": Updated(lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9), 2.5),
    "Adam": Updated(lambda p: torch.optim.Adam(p, lr=LR), 3.5),
    "AdamW": Updated(lambda p: torch.optim.AdamW(p, lr=LR), 3.5),
}


class TransportPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of the benchmark. Call `require_sound` to check them before anything starts.

    Attributes:
        sizes_mb: model sizes in MB (2**20 bytes).
        workers: the numbers of workers to measure with.
        servers: number of servers.
        rounds: number of rounds.
        systems: names of the systems to measure, see `SYSTEMS`.
    """

    sizes_mb: tuple[float, ...] = SIZES_MB
    workers: tuple[int, ...] = WORKERS
    servers: int = SERVERS
    rounds: int = ROUNDS
    systems: tuple[str, ...] = SYSTEMS

    def require_sound(self) -> None:
        """Check the plan.

        Raises:
            ConfigurationError: a parameter is invalid. The message contains its value and what was expected.
        """
        for system in self.systems:
            if system not in SYSTEMS:
                raise unknown_name("system", system, SYSTEMS)
        counts = [("servers", self.servers), ("rounds", self.rounds), *(("workers", n) for n in self.workers)]
        for name, value in counts:
            if value < 1:
                raise ConfigurationError(f"{name} is {value}, expected a whole number >= 1.")
        for size_mb in self.sizes_mb:
            if not (math.isfinite(size_mb) and size_mb >= SMALLEST_MB):
                raise ConfigurationError(
                    f"size is {size_mb:g} MB, expected a number >= {SMALLEST_MB:g}, "
                    f"for example {', '.join(f'{size:g}' for size in SIZES_MB)}."
                )
            most = elements(size_mb) * ITEM_BYTES["float32"] // ALIGNMENT_BYTES
            if self.servers > most:
                raise ConfigurationError(
                    f"servers is {self.servers}, expected at most {most}: a model of {size_mb:g} MB cannot be cut "
                    "into more slices."
                )


class Turn(msgspec.Struct, frozen=True):
    """One measurement in a round: all cases that one set of processes measures.

    A turn is sent to the fork server as JSON.

    Attributes:
        cases: cases to measure, one after another in the same processes.
        size_mb: model size in MB (2**20 bytes).
        workers: number of workers.
        servers: number of servers.
        iterations: number of measured iterations.
        optimizer: key in `OPTIMIZERS` if updates are measured; None if training steps are measured.
    """

    cases: tuple[Case, ...]
    size_mb: float
    workers: int
    servers: int
    iterations: int
    optimizer: str | None = None

    @property
    def name(self) -> str:
        """Name of the measurement, for the progress display and error messages."""
        system, transport, _ = self.cases[0]
        if self.optimizer is not None:
            return f"update by {self.optimizer}, {self.size_mb:g} MB"
        modes = " and ".join(case.mode for case in self.cases)
        return f"{self.size_mb:g} MB, {self.workers} workers, {system} {transport} {modes}"


class TransportRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One result of the benchmark.

    Attributes:
        system: name of the system, see `SYSTEMS`.
        transport: "shm" or "tcp".
        mode: "asp" or "bsp".
        size_mb: model size in MB (2**20 bytes).
        workers: number of workers.
        median_ms: time of a step or an update, median over the rounds.
        low_ms: smallest time in any round.
        high_ms: largest time in any round.
        optimizer: key in `OPTIMIZERS` if the result is for an update; None if it is for a training step.
        traffic_ms: time to copy as many bytes as the update reads and writes; None for a training step.
        fastest_ms: time of the fastest update in any round; None for a training step.
    """

    system: str
    transport: str
    mode: str
    size_mb: float
    workers: int
    median_ms: float
    low_ms: float
    high_ms: float
    optimizer: str | None = None
    traffic_ms: float | None = None
    fastest_ms: float | None = None


Figures = dict[str, float]
"""Mode, or "traffic" for the memory traffic of an update, or "fastest" for the fastest one -> time in seconds."""


def estimate_s(plan: TransportPlan) -> float:
    """Estimate how long the measurements take on two cores, in seconds."""
    return plan.rounds * sum(work_s(turn) for turn in turns_of(plan))


def turns_of(plan: TransportPlan) -> list[Turn]:
    """Return the measurements of one round."""
    turns = [
        Turn(cases, size_mb, workers, plan.servers, _iterations(size_mb, workers))
        for size_mb in dict.fromkeys(plan.sizes_mb)
        for workers in dict.fromkeys(plan.workers)
        for cases in TURNS
        if cases[0].system in plan.systems
    ]
    if OPTIMIZER.system in plan.systems:
        turns += [
            Turn((OPTIMIZER,), size_mb, 1, 1, _iterations(size_mb, 1), name)
            for size_mb in OPTIMIZER_SIZES_MB
            for name in OPTIMIZERS
        ]
    return turns


def _guess_s(size_mb: float, workers: int) -> float:
    """Estimate the time of one step, in seconds."""
    return max(1.0, workers / 2) * (0.0003 + 0.002 * size_mb)


def _iterations(size_mb: float, workers: int) -> int:
    """Return how many iterations each process measures: as many as fit into `SECONDS`, from `FEWEST` to `MOST`."""
    return max(FEWEST, min(MOST, int(SECONDS / _guess_s(size_mb, workers))))


def work_s(turn: Turn) -> float:
    """Estimate how long a measurement takes, in seconds."""
    system = turn.cases[0].system
    steps_s = len(turn.cases) * (WARM_UP + turn.iterations) * _guess_s(turn.size_mb, turn.workers)
    # The overhead of a Paceline run on two cores includes importing torch in each process and saving the weights.
    launching_s = 0.8 + (turn.workers + turn.servers) * (1.0 + turn.size_mb / 200)
    start_s = launching_s if system == "paceline" else 0.2
    return start_s + steps_s


def elements(size_mb: float) -> int:
    """Return the number of float32 elements in a model of this size."""
    return round(size_mb * 1024) * (1024 // ITEM_BYTES["float32"])


def lengths(size_mb: float) -> list[int]:
    """Return the number of elements in each tensor of a model of this size."""
    count = 1 if round(size_mb * 1024) < ONE_TENSOR_BELOW_KB else TENSORS
    return [elements(size_mb) // count] * count

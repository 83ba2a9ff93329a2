"""What is measured: the cases, the sizes, which processes take their turn together, and how long it may take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch

from paceline.core.layout import ALIGNMENT_BYTES, ITEM_BYTES
from paceline.errors import ConfigurationError, unknown_name

__all__ = [
    "FEWEST",
    "FLOOR",
    "GLOO",
    "LR",
    "OPTIMIZER",
    "OPTIMIZERS",
    "OPTIMIZER_MB",
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
    "Plan",
    "Row",
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

TENSORS = 8  # of equal size: a model is rarely one tensor
ONE_TENSOR_BELOW_KB = 64
SMALLEST_MB = 0.001
OPTIMIZER_MB = 100.0

SECONDS = 0.5  # of iterating, roughly, per figure and round
WARM_UP = 2
FEWEST, MOST = 8, 1500  # iterations
LR = 1e-3


class Case(NamedTuple):
    """What a figure is of."""

    system: str
    transport: str
    mode: str


FLOOR = Case("floor", "shm", "asp")
SOCKET_ASP, SOCKET_BSP = Case("socket", "tcp", "asp"), Case("socket", "tcp", "bsp")
GLOO = Case("gloo", "tcp", "bsp")
SHM_ASP, SHM_BSP = Case("paceline", "shm", "asp"), Case("paceline", "shm", "bsp")
TCP_ASP, TCP_BSP = Case("paceline", "tcp", "asp"), Case("paceline", "tcp", "bsp")

# What takes its turn: those that share their processes go together.
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
    """An optimizer, and how many copies of its vector move as many bytes as one update must."""

    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
    copies: float  # a copy reads one vector and writes one; any update reads g, and reads and writes w


OPTIMIZERS: dict[str, Updated] = {
    "SGD": Updated(lambda p: torch.optim.SGD(p, lr=LR), 1.5),
    "SGD momentum": Updated(lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9), 2.5),
    "Adam": Updated(lambda p: torch.optim.Adam(p, lr=LR), 3.5),
    "AdamW": Updated(lambda p: torch.optim.AdamW(p, lr=LR), 3.5),
}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `require_sound` before anything starts."""

    sizes_mb: tuple[float, ...] = SIZES_MB
    workers: tuple[int, ...] = WORKERS
    servers: int = SERVERS
    rounds: int = ROUNDS
    systems: tuple[str, ...] = SYSTEMS

    def require_sound(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            ConfigurationError: names the value and what was expected.
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
                    f"servers is {self.servers}, expected at most {most}: of {size_mb:g} MB no more get a slice."
                )


class Turn(msgspec.Struct, frozen=True):
    """What is measured by one set of processes; also what they are told."""

    cases: tuple[Case, ...]
    size_mb: float
    workers: int
    servers: int
    iterations: int
    optimizer: str | None = None

    @property
    def name(self) -> str:
        """For the progress, and for errors."""
        system, transport, _ = self.cases[0]
        if self.optimizer is not None:
            return f"update by {self.optimizer}, {self.size_mb:g} MB"
        modes = " and ".join(case.mode for case in self.cases)
        return f"{self.size_mb:g} MB, {self.workers} workers, {system} {transport} {modes}"


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One figure.

    Attributes:
        system: in `SYSTEMS`.
        transport: "shm" or "tcp".
        mode: "asp" or "bsp".
        size_mb: of the model.
        workers: how many.
        median_ms: of a step, or of an update; over the rounds.
        low_ms: the least of a round.
        high_ms: the most.
        optimizer: in `OPTIMIZERS`, if it is of an update.
        traffic_ms: what the update's memory traffic takes at the speed of a copy.
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


Figures = dict[str, float]
"""Mode, or "traffic" -> seconds."""


def estimate_s(plan: Plan) -> float:
    """How long it will take on two cores, roughly."""
    return plan.rounds * sum(work_s(turn) for turn in turns_of(plan))


def turns_of(plan: Plan) -> list[Turn]:
    """Everything that one round does."""
    turns = [
        Turn(cases, size_mb, workers, plan.servers, _iterations(size_mb, workers))
        for size_mb in dict.fromkeys(plan.sizes_mb)
        for workers in dict.fromkeys(plan.workers)
        for cases in TURNS
        if cases[0].system in plan.systems
    ]
    if OPTIMIZER.system in plan.systems:
        iterations = _iterations(OPTIMIZER_MB, 1)
        turns += [Turn((OPTIMIZER,), OPTIMIZER_MB, 1, 1, iterations, name) for name in OPTIMIZERS]
    return turns


def _guess_s(size_mb: float, workers: int) -> float:
    """Of one step."""
    return max(1.0, workers / 2) * (0.0003 + 0.002 * size_mb)


def _iterations(size_mb: float, workers: int) -> int:
    """As many as fit into the time, by a guess, so that all processes do equally many."""
    return max(FEWEST, min(MOST, int(SECONDS / _guess_s(size_mb, workers))))


def work_s(turn: Turn) -> float:
    """How long a turn takes, by a guess."""
    system = turn.cases[0].system
    series = len(turn.cases) + (system in ("gloo", "paceline"))  # one of the bare backward
    steps_s = series * (WARM_UP + turn.iterations) * _guess_s(turn.size_mb, turn.workers)
    # Two cores import torch in so many processes, and a run keeps its weights at the end.
    launching_s = 0.8 + (turn.workers + turn.servers) * (1.0 + turn.size_mb / 200)
    start_s = launching_s if system == "paceline" else 0.2
    return start_s + steps_s


def elements(size_mb: float) -> int:
    """Of a model of this size, in float32."""
    return round(size_mb * 1024) * (1024 // ITEM_BYTES["float32"])


def lengths(size_mb: float) -> list[int]:
    """Of its tensors, in elements."""
    count = 1 if round(size_mb * 1024) < ONE_TENSOR_BELOW_KB else TENSORS
    return [elements(size_mb) // count] * count

"""The plan of the measurements: systems, their model, sizes, processes and iterations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import nn

from paceline.core.layout import ITEM_BYTES

from ..harness import WARM_UP

TENSORS = 8  # number of tensors in a model; more than one, as in real models
ONE_TENSOR_BELOW_KB = 64
SMALLEST_MB = 0.001

SECONDS = 0.5  # approximate time of the iterations for one result in one round
FEWEST, MOST = 8, 1500  # limits for the number of measured iterations
LR = 1e-3


class Case(NamedTuple):
    """A case to measure: a system with a transport and a mode."""

    system: str
    transport: str
    mode: str


FLOOR = Case("floor", "shm", "asp")
SOCKET_ASP, SOCKET_BSP = Case("socket", "tcp", "asp"), Case("socket", "tcp", "bsp")
GLOO = Case("gloo", "tcp", "bsp")
SHM_ASP, SHM_BSP = Case("paceline", "shm", "asp"), Case("paceline", "shm", "bsp")
TCP_ASP, TCP_BSP = Case("paceline", "tcp", "asp"), Case("paceline", "tcp", "bsp")
MXNET_ASP, MXNET_BSP = Case("mxnet", "tcp", "asp"), Case("mxnet", "tcp", "bsp")

# Each group contains the cases that are measured in the same processes.
TURNS: tuple[tuple[Case, ...], ...] = (
    (FLOOR,),
    (SOCKET_ASP,),
    (SOCKET_BSP,),
    (GLOO,),
    (SHM_ASP, SHM_BSP),
    (TCP_ASP, TCP_BSP),
)
# Only measured on request, because MXNet must be installed separately.
MXNET_TURNS: tuple[tuple[Case, ...], ...] = ((MXNET_ASP,), (MXNET_BSP,))
OPTIMIZER = Case("optimizer", "shm", "asp")
SYSTEMS = (*dict.fromkeys(turn[0].system for turn in TURNS), OPTIMIZER.system)


class Updated(NamedTuple):
    """An optimizer and the memory traffic of its updates."""

    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]  # creates the optimizer
    # Number of copy operations that move as many bytes as one update. A copy reads one vector and writes one. An
    # update reads the gradient, and reads and writes the weights and the optimizer's state.
    copies: float


OPTIMIZERS: dict[str, Updated] = {
    "SGD": Updated(lambda p: torch.optim.SGD(p, lr=LR), 1.5),
    "SGD momentum": Updated(lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9), 2.5),
    "Adam": Updated(lambda p: torch.optim.Adam(p, lr=LR), 3.5),
    "AdamW": Updated(lambda p: torch.optim.AdamW(p, lr=LR), 3.5),
}


class Turn(msgspec.Struct, frozen=True):
    """One measurement in a round: all cases that one set of processes measures."""

    cases: tuple[Case, ...]  # cases to measure, one after another in the same processes
    size_mb: float  # model size in MB (2**20 bytes)
    workers: int  # number of workers
    servers: int  # number of servers
    iterations: int  # number of measured iterations
    # Key in `OPTIMIZERS` if updates are measured; None if training steps are measured.
    optimizer: str | None = None
    mxnet: str | None = None  # the Python of an environment with MXNet, if MXNet is measured

    @property
    def name(self) -> str:
        """Name of the measurement, for the progress display and error messages."""
        system, transport, _ = self.cases[0]
        if self.optimizer is not None:
            return f"update by {self.optimizer}, {self.size_mb:g} MB"
        modes = " and ".join(case.mode for case in self.cases)
        return f"{self.size_mb:g} MB, {self.workers} workers, {system} {transport} {modes}"


Times = dict[str, float]
"""Mode, or "traffic" for the memory traffic of an update, or "fastest" for the fastest update -> time in seconds."""


def turns_of(
    sizes_mb: Sequence[float],
    workers: Sequence[int],
    servers: int,
    systems: Sequence[str],
    updated_mb: Sequence[float],
    mxnet: str | None = None,
) -> list[Turn]:
    """Return the measurements of one round. Updates are measured with models of the sizes `updated_mb`."""
    turns = [
        Turn(cases, size_mb, count, servers, _iterations(size_mb, count), mxnet=mxnet)
        for size_mb in dict.fromkeys(sizes_mb)
        for count in dict.fromkeys(workers)
        for cases in (*TURNS, *MXNET_TURNS)
        if cases[0].system in systems
    ]
    if OPTIMIZER.system in systems:
        turns += [
            Turn((OPTIMIZER,), size_mb, 1, 1, _iterations(size_mb, 1), name)
            for size_mb in updated_mb
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
    start_s = launching_s if system in ("paceline", "mxnet") else 0.2
    return start_s + steps_s


def elements(size_mb: float) -> int:
    """Return the number of float32 elements in a model of this size."""
    return round(size_mb * 1024) * (1024 // ITEM_BYTES["float32"])


def lengths(size_mb: float) -> list[int]:
    """Return the number of elements in each tensor of a model of this size."""
    count = 1 if round(size_mb * 1024) < ONE_TENSOR_BELOW_KB else TENSORS
    return [elements(size_mb) // count] * count


class Flat(nn.Module):
    """A model whose backward pass makes only one pass over its parameters.

    Args:
        size_mb: size of the parameters in MB (2**20 bytes).
        worker: index of the worker. The gradients differ between workers, as if the workers had different data.
    """

    def __init__(self, size_mb: float, worker: int) -> None:
        super().__init__()
        self.factor = float(worker + 1)
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(length)) for length in lengths(size_mb))

    def forward(self) -> torch.Tensor:
        return torch.stack([layer.sum() for layer in self.layers]).sum() * self.factor

    def compute(self) -> None:
        """Compute new gradients: the part of a step that is the same in all systems."""
        self.zero_grad()
        self().backward()

    def copy_gradients(self, places: Sequence[torch.Tensor]) -> None:
        """Copy the gradients of the layers into parts of a flat vector, as DDP does."""
        for layer, place in zip(self.layers, places, strict=True):
            assert layer.grad is not None
            place.copy_(layer.grad)
            layer.grad = place

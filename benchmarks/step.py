"""The processor time that a step costs a worker, without the processor time of the script itself.

The models have tensors of 64 numbers, whose gradients come from one autograd function, so that the script's own share
is small. Each case is measured in processes of its own, and its result is the time of the fastest block of iterations.
The time for which a worker polls for an answer is left out, because it depends on the servers.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from torch import distributed, nn

import paceline
from paceline.cli.console import TellShare
from paceline.run import worker_links

from .harness import Benchmark, Columns, Figures, Rounds, goal_text, in_turns, live

ITERATIONS = 20  # in a block
TENSORS = (1, 10, 100, 400)
KINDS = ("script", "1 worker", "2 workers", "ddp")

GOAL_US, GOAL_PER_TENSOR_US = 200.0, 3.0


class StepRow(msgspec.Struct, frozen=True):
    """The processor time of an iteration in microseconds. Each time is the best of the rounds."""

    tensors: int  # number of tensors of the model
    script_us: float  # time of the script without a step
    one_us: float  # what Paceline adds in the only worker of a run
    two_us: float  # what Paceline adds in one of two workers
    ddp_us: float  # what DistributedDataParallel adds in one process, with gloo
    met: bool  # True if `one_us` and `two_us` both meet the goal


@Benchmark(minutes=4, quick={"rounds": 1, "blocks": 2, "sizes": (1, 10)})
def measure(
    tell: TellShare, rounds: Rounds = 3, blocks: int = 40, sizes: Sequence[int] = TENSORS
) -> list[Figures[StepRow]]:
    """Measure the processor time that a step of Paceline, or of DistributedDataParallel, adds to an iteration."""
    cases = {f"{tensors} tensors, {kind}": (tensors, kind, blocks) for tensors in sizes for kind in KINDS}
    found = in_turns(tell, rounds, cases, _run)
    return [Figures("Processor time of a step beyond the script's own (us)", _rows(sizes, found), COLUMNS)]


COLUMNS: Columns[StepRow] = {
    "tensors": lambda row: row.tensors,
    "script": lambda row: f"{row.script_us:.0f}",
    "1 worker": lambda row: f"{row.one_us:.0f}",
    "2 workers": lambda row: f"{row.two_us:.0f}",
    "DDP": lambda row: f"{row.ddp_us:.0f}",
    "goal": lambda row: goal_text(f"at most {_goal_us(row.tensors):.0f}", row.met),
}


def _goal_us(tensors: int) -> float:
    return GOAL_US + GOAL_PER_TENSOR_US * tensors


def _rows(sizes: Sequence[int], found: dict[str, list[float]]) -> list[StepRow]:
    rows = []
    for tensors in sizes:
        script_us, *others_us = (min(found[f"{tensors} tensors, {kind}"]) for kind in KINDS)
        one_us, two_us, ddp_us = (each_us - script_us for each_us in others_us)
        met = max(one_us, two_us) <= _goal_us(tensors)
        rows.append(StepRow(tensors, script_us, one_us, two_us, ddp_us, met))
    return rows


def _run(case: tuple[int, str, int]) -> float:
    """Return the processor time of an iteration in microseconds."""
    tensors, kind, blocks = case
    if kind.endswith(("worker", "workers")):
        _, [took_us, *_] = live(_train, tensors, blocks, kind=float, workers=int(kind[0]))
        return took_us
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_alone, tensors, kind, blocks).result()


class _Gradients(torch.autograd.Function):
    """A loss that does not depend on the weights. All elements of its gradients are `slope`, one number per worker."""

    @staticmethod
    def forward(ctx: Any, slope: float, *weights: torch.Tensor) -> torch.Tensor:
        ctx.slope, ctx.tensors = slope, len(weights)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *torch.full((64 * ctx.tensors,), ctx.slope).split(64)


class _Model(nn.Module):
    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.slope = 1e-3 * (1 + paceline.worker_index())
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(64)) for _ in range(tensors))

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = _Gradients.apply(self.slope, *self.weights)  # type: ignore[no-untyped-call]
        return loss


def _best_us(
    model: nn.Module, optimizer: torch.optim.Optimizer, blocks: int, *, steps: bool, waited: list[float]
) -> float:
    """Return the processor time of an iteration in microseconds, without the time that is appended to `waited`."""
    best_s = float("inf")
    for _ in range(blocks):
        waited.clear()
        begun_s = time.process_time()
        for _ in range(ITERATIONS):
            optimizer.zero_grad()
            model().backward()
            if steps:
                optimizer.step()
        best_s = min(best_s, time.process_time() - begun_s - sum(waited))
    return best_s / ITERATIONS * 1e6


def _train(tensors: int, blocks: int) -> float:
    """Measure the iterations of a worker."""
    waited: list[float] = []
    spin = vars(worker_links)["spin"]

    def measured(*arguments: Any) -> Any:
        begun_s = time.thread_time()
        found = spin(*arguments)
        waited.append(time.thread_time() - begun_s)
        return found

    vars(worker_links)["spin"] = measured
    torch.set_num_threads(1)
    model = _Model(tensors)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
    return _best_us(model, optimizer, blocks, steps=True, waited=waited)


def _alone(tensors: int, kind: str, blocks: int) -> float:
    """Measure the iterations of the script alone, or with DDP, which exchanges gradients during backward."""
    torch.set_num_threads(1)
    model: nn.Module = _Model(tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with TemporaryDirectory() as folder:
        if kind == "ddp":
            distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
            model = nn.parallel.DistributedDataParallel(model)
        return _best_us(model, optimizer, blocks, steps=False, waited=[])

"""`python -m benchmarks.step`: what a step costs a worker in processor time, beyond what the script itself costs.

The models have tensors of 64 numbers, whose gradients come from one autograd function, so that the script's own share
is small. Processes with and without Paceline, and with DDP, take turns, and each counts its best iterations. The time
for which a worker polls for an answer is left out, because it depends on the servers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed, nn

import paceline
from paceline.runtime import worker_links

ITERATIONS, BLOCKS = 20, 40  # in a block; the best of so many blocks counts
ROUNDS = 3
TENSORS = (1, 10, 100, 400)


class _Gradients(torch.autograd.Function):
    """A loss that does not depend on the weights, but has a gradient for each of them."""

    @staticmethod
    def forward(ctx: Any, *weights: torch.Tensor) -> torch.Tensor:
        ctx.tensors = len(weights)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.full((64 * ctx.tensors,), 1e-3).split(64)


class _Model(nn.Module):
    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(64)) for _ in range(tensors))

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = _Gradients.apply(*self.weights)  # type: ignore[no-untyped-call]
        return loss


def _best_us(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: bool, waited: list[float]
) -> float:
    """Return the processor time of an iteration in microseconds, without the time that is appended to `waited`."""
    best_s = float("inf")
    for _ in range(BLOCKS):
        waited.clear()
        begun_s = time.process_time()
        for _ in range(ITERATIONS):
            optimizer.zero_grad()
            model().backward()
            if steps:
                optimizer.step()
        best_s = min(best_s, time.process_time() - begun_s - sum(waited))
    return best_s / ITERATIONS * 1e6


def _train(tensors: int, out: Path) -> None:
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
    took_us = _best_us(model, optimizer, steps=True, waited=waited)
    if paceline.is_main():
        out.write_text(json.dumps(took_us))


def _measure(kind: str, tensors: int) -> float:
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        if kind.startswith("paceline"):
            out = Path(folder, "result")
            workers = int(kind.partition(" ")[2])
            paceline.launch(_train, args=(tensors, out), workers=workers, run_dir=Path(folder, "run"))
            return float(out.read_text())
        model: nn.Module = _Model(tensors)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-6)
        if kind == "ddp":
            distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
            model = nn.parallel.DistributedDataParallel(model)
        return _best_us(model, sgd, steps=False, waited=[])


def main() -> None:
    """Print the processor time that each kind of process adds to an iteration of the script."""
    if len(sys.argv) == 3:
        print(_measure(sys.argv[1], int(sys.argv[2])))
        return
    kinds = ("script", "paceline 1", "paceline 2", "ddp")
    print("tensors  " + "  ".join(f"{kind:>12}" for kind in kinds) + "   (us; beyond the script's own)")
    for tensors in TENSORS:
        best = dict.fromkeys(kinds, float("inf"))
        for _ in range(ROUNDS):
            for kind in kinds:
                command = [sys.executable, "-m", "benchmarks.step", kind, str(tensors)]
                printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                best[kind] = min(best[kind], float(printed.split()[-1]))
        own = best["script"]
        print(f"{tensors:7}  " + "  ".join(f"{us - own if us != own else us:12.0f}" for us in best.values()))


if __name__ == "__main__":
    main()

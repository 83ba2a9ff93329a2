"""How long a step takes: Paceline against gloo all-reduce and against a plain copy in memory.

Everything is measured in this one run, one after another, each process with one thread; figures are medians
over many iterations, then over rounds, and what is compared is ratios. A step is what a script calls, from
`zero_grad()` to the end of `step()`, less a bare `zero_grad()` and backward of the same model.

    python benchmarks/step.py                    # 1, 25 and 100 MB, 2 workers, about 3 minutes
    python benchmarks/step.py --sizes 1 --rounds 1 --json

Run it on a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import paceline

LAYERS = 8  # of equal size: a model is rarely one tensor
WARM_UP = 5
SECONDS = 3.0  # of measuring, per system, size and round


class Flat(nn.Module):
    """A model that is all parameters: its backward costs one pass over them."""

    def __init__(self, size_mb: float) -> None:
        super().__init__()
        length = int(size_mb * 2**20) // 4 // LAYERS
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(length)) for _ in range(LAYERS))

    def forward(self) -> torch.Tensor:
        return torch.stack([layer.sum() for layer in self.layers]).sum()


def iterations_for(size_mb: float) -> int:
    """As many as fit into the time, by a rough guess, so that all processes do equally many."""
    return max(10, min(2000, int(SECONDS / (0.0003 + 0.0012 * size_mb))))


def median_s(step: Callable[[], object], iterations: int) -> float:
    """The median time of one call."""
    times = []
    for index in range(WARM_UP + iterations):
        begun = time.perf_counter()
        step()
        if index >= WARM_UP:
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def bare_backward_s(model: Flat) -> float:
    """What a backward costs without any step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model().backward()

    return median_s(step, 20)


def train_with_paceline(size_mb: float, out: str) -> None:
    """One worker of Paceline's."""
    torch.set_num_threads(1)
    backward_s = bare_backward_s(Flat(size_mb))
    model = Flat(size_mb)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model=model)

    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    total_s = median_s(step, iterations_for(size_mb))
    Path(out, f"{paceline.worker_index()}.json").write_text(json.dumps(total_s - backward_s))


def train_with_gloo(rank: int, workers: int, size_mb: float, out: str) -> None:
    """One process of what DDP does on a CPU: all-reduce of the flat gradient, then SGD."""
    torch.set_num_threads(1)
    import torch.distributed as dist

    backward_s = bare_backward_s(Flat(size_mb))
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=workers)
    model = Flat(size_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    flat = torch.zeros(sum(layer.numel() for layer in model.layers))
    places = flat.split([layer.numel() for layer in model.layers])

    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        for layer, place in zip(model.layers, places, strict=True):
            assert layer.grad is not None
            place.copy_(layer.grad)  # a bucket, as DDP keeps them
            layer.grad = place
        dist.all_reduce(flat)
        flat.div_(workers)
        optimizer.step()

    total_s = median_s(step, iterations_for(size_mb))
    dist.destroy_process_group()
    Path(out, f"{rank}.json").write_text(json.dumps(total_s - backward_s))


def copy_s(size_mb: float) -> float:
    """A plain copy of as many bytes, in one process."""
    source = torch.ones(int(size_mb * 2**20) // 4)
    target = torch.zeros_like(source)
    return median_s(lambda: target.copy_(source), iterations_for(size_mb))


def mean_of_workers(out: str) -> float:
    """The mean of what the workers wrote down."""
    return statistics.fmean(json.loads(path.read_text()) for path in Path(out).glob("*.json"))


def measure_paceline(size_mb: float, workers: int, servers: int, sync: str, transport: str) -> float:
    """The time of a step under Paceline."""
    with tempfile.TemporaryDirectory() as out:
        paceline.launch(
            train_with_paceline,
            args=(size_mb, out),
            workers=workers,
            servers=servers,
            sync=sync,
            transport=transport,
            run_dir=Path(out, "run"),
            progress=False,
        )
        return mean_of_workers(out)


def measure_gloo(size_mb: float, workers: int) -> float:
    """The time of a step with gloo."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as out:
        processes = [
            spawn.Process(target=train_with_gloo, args=(rank, workers, size_mb, out))
            for rank in range(workers)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                raise SystemExit(f"a gloo process ended with exit code {process.exitcode}")
        return mean_of_workers(out)


def systems(size_mb: float, workers: int, servers: int) -> dict[str, Callable[[], float]]:
    """Everything that is measured for one size: name -> how."""
    table: dict[str, Callable[[], float]] = {
        "memory copy": lambda: copy_s(size_mb),
        "gloo all-reduce + SGD": lambda: measure_gloo(size_mb, workers),
    }
    for sync in ("bsp", "asp"):
        for transport in ("shm", "tcp"):
            table[f"paceline {sync} {transport}"] = lambda sync=sync, transport=transport: measure_paceline(  # type: ignore[misc]
                size_mb, workers, servers, sync, transport
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 25, 100], metavar="MB")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="of everything; medians over them are printed")
    parser.add_argument("--json", action="store_true", help="print rows as JSON instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    progress = Console(stderr=True)
    rows = []
    for size_mb in options.sizes:
        taken: dict[str, list[float]] = {}
        for number in range(options.rounds):
            for name, run in systems(size_mb, options.workers, options.servers).items():
                progress.print(f"{size_mb:g} MB, round {number + 1} of {options.rounds}: {name}", style="dim")
                taken.setdefault(name, []).append(run())
        medians = {name: statistics.median(values) for name, values in taken.items()}
        for name, value in medians.items():
            rows.append(
                {
                    "system": name,
                    "size_mb": size_mb,
                    "workers": options.workers,
                    "median_ms": round(value * 1e3, 4),
                    "times_copy": round(value / medians["memory copy"], 3),
                    "gloo_over_it": round(medians["gloo all-reduce + SGD"] / value, 3),
                }
            )
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("MB", "system", "ms per step", "x a memory copy", "gloo / this")
    for row in rows:
        table.add_row(
            f"{row['size_mb']:g}",
            str(row["system"]),
            f"{row['median_ms']:.3f}",
            f"{row['times_copy']:.2f}",
            f"{row['gloo_over_it']:.2f}",
        )
    Console().print(table)
    print(f"{options.workers} workers, {options.servers} servers, medians of {options.rounds} rounds")


if __name__ == "__main__":
    main()

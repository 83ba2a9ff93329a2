"""Many pulls under many pushes, and many steps: nothing is torn, nothing grows.

`make stress` does 100,000 pulls on each transport and a million steps, which takes about half an hour; without
PACELINE_STRESS the same tests do a hundred or two, over TCP and over shared memory.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline

LARGE = bool(os.environ.get("PACELINE_STRESS"))
WORKERS, SHARDS = 3, 2


class Ones(nn.Module):
    """Its gradient is 1 everywhere: with SGD at a rate of 1, each weight of a shard is minus the shard's version."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def pull_many(pulls: int, size: int) -> None:
    """Each pull must be of one version of each shard: every element equal, and no larger than before."""
    torch.set_num_threads(1)
    model = Ones(size)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
    before = [0.0] * SHARDS
    for _ in range(pulls):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        for shard, part in enumerate(model.weight.detach().chunk(SHARDS)):
            low, high = float(part.min()), float(part.max())
            assert low == high, f"torn: elements of one shard are from {low} to {high}"
            assert low < before[shard], f"after version {-before[shard]} came {-low}"
            before[shard] = low


TRANSPORTS = [("tcp", 1 << 19), ("shm", 1 << 16), ("unix", 1 << 16)]


@pytest.mark.parametrize(("transport", "size"), TRANSPORTS if LARGE else TRANSPORTS[:1])
def test_no_pull_is_torn_under_concurrent_pushes(transport: str, size: int, tmp_path: Path) -> None:
    pulls = (100_000 if LARGE else 120) // WORKERS
    run = paceline.launch(
        pull_many,
        args=(pulls, size),
        workers=WORKERS,
        servers=SHARDS,
        sync="asp",
        hyperparameters="raw",
        transport=transport,
        run_dir=tmp_path / "run",
        progress=False,
        snapshot_every_s=0.05,
    )
    assert torch.equal(run.state_dict["weight"], torch.full((size,), -float(pulls * WORKERS)))
    assert len(run.snapshots) > 3
    for _, snapshot in run.snapshots:  # a reader's, while all this went on
        for shard, part in enumerate(snapshot.state_dict["weight"].chunk(SHARDS)):
            assert float(part.min()) == float(part.max()) == -snapshot.versions[shard]


def step_many(steps: int, out: str) -> None:
    """Write down what this process holds, early and at the end."""
    torch.set_num_threads(1)
    model = Ones(1024)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-9), model=model)
    held = []
    for step in range(steps):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        if step in (steps // 10, steps - 1):
            servers = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_server(pid)]
            held.append([holds(pid) for pid in [os.getpid(), *servers]])
    Path(out, f"{paceline.worker_index()}.txt").write_text(repr(held))


def is_server(pid: int) -> bool:
    """A sibling of this process that runs no function."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False
    return parent == os.getppid() and command.startswith(b"paceline server")


def holds(pid: int) -> tuple[int, int]:
    """Kilobytes of memory, and descriptors."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    private_kb = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_"))
    return private_kb, len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("transport", ["shm", "tcp"] if LARGE else ["shm"])
def test_many_small_steps_grow_neither_memory_nor_descriptors(transport: str, tmp_path: Path) -> None:
    paceline.launch(
        step_many,
        args=(500_000 if LARGE else 200, str(tmp_path)),
        workers=2,
        servers=1,
        sync="asp",
        transport=transport,
        run_dir=tmp_path / "run",
        progress=False,
    )
    for file in tmp_path.glob("*.txt"):
        early, late = eval(file.read_text())
        assert len(early) == len(late) == 2  # the worker and the server
        for (early_kb, early_open), (late_kb, late_open) in zip(early, late, strict=True):
            assert late_kb - early_kb < 2048, f"from {early_kb} kB to {late_kb} kB"
            assert late_open <= early_open

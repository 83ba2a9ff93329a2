"""Many pulls under many pushes, and many steps: nothing is torn, nothing grows.

`make stress` does 100,000 pulls on each transport and a million steps, which takes about half an hour; without
PACELINE_STRESS the same tests do a hundred or two, over TCP and over shared memory. It also watches the directory of
a run of a million iterations.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from tests.support.live import is_server, mark, processes

__all__ = ["mark"]

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


def step_alone(steps: int) -> None:
    """Step as fast as possible."""
    torch.set_num_threads(1)
    model = Ones(64)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-9), model=model)
    for _ in range(steps):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()


class Watch:
    """Looks at a run in progress: the size of its directory, and the memory of its processes.

    Attributes:
        sizes: the sizes, in bytes.
        memory_kb: process -> its private memory each time, in KB.
    """

    def __init__(self, run_dir: Path, mark: str, interval_s: float) -> None:
        self.sizes: list[int] = []
        self.memory_kb: dict[str, list[int]] = {}
        self._run_dir, self._mark, self._interval_s = run_dir, mark, interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._interval_s):
            self.sizes.append(size_bytes(self._run_dir))
            found = {**processes(self._mark), "this one": os.getpid()}
            if (digester := digester_of(self._run_dir)) is not None:
                found["digester"] = digester
            for name, pid in found.items():
                if name not in ("launcher", "fork server"):
                    with contextlib.suppress(OSError):  # it has ended
                        self.memory_kb.setdefault(name, []).append(holds(pid)[0])
            print(
                f"{self.sizes[-1] / 1e6:.0f} MB",
                {n: each[-1] for n, each in self.memory_kb.items()},
                flush=True,
            )


def size_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it was deleted a moment ago
            total += path.stat().st_size
    return total


def digester_of(run_dir: Path) -> int | None:
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                folder.name.isdigit()
                and b"paceline.trace.digest\0" + os.fsencode(run_dir) in (folder / "cmdline").read_bytes()
            ):
                return int(folder.name)
    return None


@pytest.mark.skipif(
    not LARGE, reason="takes 10 minutes on an idle machine; set PACELINE_STRESS=1 (`make stress`)"
)
def test_a_million_iterations_stay_under_200_megabytes(mark: str, tmp_path: Path) -> None:
    steps = int(os.environ.get("PACELINE_STRESS_STEPS", "1000000")) // 4
    with Watch(tmp_path / "run", mark, interval_s=10.0) as watch:
        run = paceline.launch(
            step_alone,
            args=(steps,),
            workers=4,
            servers=1,
            sync="asp",
            run_dir=tmp_path / "run",
            progress=False,
        )
    assert run.summary["gradients"] == 4 * steps
    assert sum(run.summary["iterations"].values()) == 4 * steps
    assert max([*watch.sizes, size_bytes(run.run_dir)]) < 200e6
    for name, each in watch.memory_kb.items():
        # In the last sample, the launcher may be reading what the run has left, for the summary and the report.
        settled = each[len(each) // 3 : -1]
        assert max(settled) - settled[0] < 8192, f"{name}: {each}"
    assert "digester" in watch.memory_kb

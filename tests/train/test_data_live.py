"""Data that is handed out in real runs, whose workers are killed in the middle of an epoch."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.live import run_program
from tests.support.marks import thorough

pytestmark = [
    pytest.mark.processes,
    pytest.mark.usefixtures("mark"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
]

ITEMS = 203
EPOCHS = 3

SCRIPT = f"""
import os, signal, sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
dataset = TensorDataset(torch.arange(float({ITEMS})))
loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=int(sys.argv[1]))
steps = 0
paceline.barrier()  # so that nobody uses all of the data before the others are there
with open(f"used-{{paceline.worker_index()}}", "w") as used:
    for epoch in range({EPOCHS}):
        for (x,) in paceline.distribute(loader):
            if paceline.worker_index() == 1 and steps == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(x[:, None]).mean().backward()
            optimizer.step()
            steps += 1
            print(*x.int().tolist(), file=used, flush=True)
"""


@pytest.mark.parametrize(
    ("sync", "processes"), [("asp", 2), *thorough(("bsp", 0), ("asp", 0), ("ssp:staleness=2", 0))]
)
def test_a_killed_workers_data_is_used_by_the_others(sync: str, processes: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = run_program(
        *("-m", "paceline", "run", "--workers", "3", "--servers", "2", "--pace", "0.01,0.01,0.02"),
        *("--sync", sync, "--run-dir", "run", "train.py", str(processes)),
    )

    assert "worker 1 was lost" in ended.stderr
    used = Counter(item for worker in range(3) for item in (tmp_path / f"used-{worker}").read_text().split())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    samples = summary["ledger"]["samples"]
    assert summary["lost_workers"] == [1]
    assert samples["torn"] == samples["dropped"] == 0
    assert samples["used"] == used.total() == summary["samples"]
    assert max(used.values()) == EPOCHS
    assert sum(samples.values()) == EPOCHS * ITEMS
    pushes = summary["ledger"]["pushes"]
    assert sum(pushes.values()) == sum(summary["iterations"].values())
    assert pushes["dropped"] == pushes["refused"] == pushes["lost"] == 0
    assert pushes["averaged" if sync == "bsp" else "applied"] > 0
    if sync != "bsp":
        assert samples["used"] == EPOCHS * ITEMS
    else:  # what cannot be divided equally is left out
        assert samples["returned"] + samples["left_out"] < 3 * EPOCHS

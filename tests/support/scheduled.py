"""A script whose workers divide each batch among them, and what jobs of schedulers have in common."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from .live import run_program

SCRIPT = """
import os
import sys
import time
import torch
import paceline

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5))
x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
worker, workers = paceline.worker_index(), paceline.worker_count()
again = any(os.environ.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
pause_s = float(sys.argv[2]) if len(sys.argv) > 2 and not again else 0.0
if sys.argv[3:] == ["loader"]:  # with a process that a scheduler also signals
    loaded = iter(torch.utils.data.DataLoader(range(1000), num_workers=1))
for iteration in range(int(sys.argv[1])):
    rows = x[iteration % 8 * 12 :][:12][worker::workers]
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(rows), rows.sum(dim=1, keepdim=True)).backward()
    optimizer.step()
    time.sleep(pause_s)
    if sys.argv[3:] == ["fail"] and not again:
        raise RuntimeError("the first attempt")
rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
print(f"worker {worker} was started as rank {rank}")
if rank is None:
    torch.save(model.state_dict(), "alone.pt")
"""


def program(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let shells find a program that runs a module."""
    file = Path("bin", name)
    file.parent.mkdir(exist_ok=True)
    file.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent.absolute()}:{os.environ['PATH']}")


def summary(run_dir: str) -> dict[str, Any]:
    """Return the summary of a run."""
    found: dict[str, Any] = json.loads(Path(run_dir, "summary.json").read_text())
    return found


def assert_trained_as_alone(run_dir: str, iterations: int) -> None:
    """Check that a job has trained the same model as the script in one process."""
    Path("train.py").write_text(SCRIPT)
    alone = run_program("train.py", str(iterations))
    assert alone.returncode == 0, alone.stderr
    weights = load_file(Path(run_dir, "weights.safetensors"))
    for name, expected in torch.load("alone.pt").items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-12)


SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
}

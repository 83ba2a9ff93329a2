"""What `paceline advise` says after live runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .live import run_program

TWO_OPTIMIZERS = """
import time
import torch
import paceline

torch.manual_seed(0)
critic, generator = torch.nn.Linear(4, 1), torch.nn.Linear(4, 4)
x = torch.randn(96, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
first = paceline.DistributedOptimizer(torch.optim.SGD(critic.parameters(), lr=0.01), model=critic)
second = paceline.DistributedOptimizer(torch.optim.SGD(generator.parameters(), lr=0.01), model=generator)
for _ in range(5):
    for inputs, targets in paceline.distribute(torch.utils.data.DataLoader(data, batch_size=8)):
        first.zero_grad()
        second.zero_grad()
        time.sleep(0.02)
        (critic(generator(inputs)) - targets).square().mean().backward()
        first.step()
        second.step()
"""


def paceline(*arguments: str) -> str:
    """Return what a command prints; it must succeed."""
    ended = run_program("-m", "paceline", *arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.processes
@pytest.mark.usefixtures("mark")
def test_a_run_that_steps_two_optimizers_with_each_batch_is_simulated_with_as_many_gradients() -> None:
    Path("train.py").write_text(TWO_OPTIMIZERS)
    paceline("run", "--servers", "1", "--run-dir", "run", "train.py")
    report = json.loads(paceline("advise", "run", "--sync", "bsp", "--json"))
    assert report["data"]["pushes_per_batch"] == 2.0
    assert abs(report["deviation"]) < 0.25

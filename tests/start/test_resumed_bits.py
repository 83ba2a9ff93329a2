"""A run with one worker under `bsp` that is killed at random moments and resumed has the same bits in the end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from paceline.checkpoints.manifest import numbers_in
from tests.support.live import await_that, of_the_run, processes, run_program, start_program
from tests.support.marks import chaos, thorough

pytestmark = [
    pytest.mark.processes,
    pytest.mark.usefixtures("mark"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
]

EPOCHS, STEPS = 24, 32

# Until there is the file "go", the script goes on slowly, so that it does not end before the last kill.
SCRIPT = f"""
import time
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paceline

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
data = torch.utils.data.TensorDataset(torch.randn({8 * STEPS}, 4), torch.randint(0, 3, ({8 * STEPS},)))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
SETUP
paceline.track(average=average)
for epoch in paceline.epochs({EPOCHS}):
    for x, y in loader:
        STEP
        average.update_parameters(model)
        with open("steps", "a") as steps:
            steps.write(".")
        if not Path("go").exists():
            time.sleep(0.03)
torch.save(average.state_dict(), "average.pt")
"""

WHOLE_STEP = """
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""

SCRIPTS = {
    "dropout, SGD with momentum": (
        """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
""",
        WHOLE_STEP,
    ),
    "AdamW, OneCycle": (
        f"""
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps={EPOCHS * STEPS})
model, optimizer, loader, scheduler = paceline.prepare(model, optimizer, loader, scheduler)
""",
        WHOLE_STEP + "        scheduler.step()\n",
    ),
    "accumulation": (
        """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
""",
        """
        optimizer.zero_grad()
        for part in (slice(0, 4), slice(4, 8)):
            nn.functional.cross_entropy(model(x[part]), y[part], reduction="sum").div(len(x)).backward()
        optimizer.step()
""",
    ),
    "two optimizers": (
        """
first = torch.optim.SGD(model[0].parameters(), lr=0.05, momentum=0.9)
second = torch.optim.Adam(model[3].parameters(), lr=0.01)
model, first, second, loader = paceline.prepare(model, first, second, loader)
""",
        """
        for optimizer in (first, second):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
""",
    ),
    "Muon, and a class of one's own": (
        """
from own import Whitened

first = torch.optim.Muon([model[0].weight, model[3].weight], lr=0.02)
second = Whitened([model[0].bias, model[3].bias], lr=0.01)
model, first, second, loader = paceline.prepare(model, first, second, loader)
""",
        """
        first.zero_grad()
        second.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        first.step()
        second.step()
""",
    ),
    "schedule-free AdamW": (
        """
import schedulefree

optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01, warmup_steps=100, weight_decay=0.1)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
optimizer.eval()
""",
        """
        optimizer.train()
"""
        + WHOLE_STEP
        + """
        if epoch % 3 == 0:
            optimizer.eval()
""",
    ),
}
"""Name -> how the script sets itself up, and what it does with a batch."""

OWN = """
import torch


class Whitened(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["sides"] = [torch.eye(n) for n in parameter.shape]
                        state["seen"] = {"steps": 0}
                    state["seen"]["steps"] += 1
                    update = parameter.grad
                    for side in state["sides"]:
                        side.mul_(0.9).add_(torch.outer(update, update))
                        values, vectors = torch.linalg.eigh(side)
                        update = vectors @ (values.clamp(min=1e-6).rsqrt() * (vectors.T @ update))
                    parameter.sub_(update, alpha=group["lr"] * (1 + 1 / group["step"]) / state["seen"]["steps"] ** 0.1)
"""
"""A module with an optimizer that needs whole tensors, nests its state, and counts in its groups."""

KILLS = -(-int(os.environ.get("PACELINE_CHAOS", "4")) // len(SCRIPTS))
"""Number of times that each script is killed, one after the other."""

AT_START = 0.25
"""Share of the kills that do not wait until the script trains."""


@pytest.mark.parametrize(
    "name",
    thorough("AdamW, OneCycle", "Muon, and a class of one's own", "schedule-free AdamW") + chaos(*SCRIPTS),
)
def test_a_run_that_is_killed_again_and_again_ends_with_the_bits_of_a_whole_run(name: str, mark: str) -> None:
    setup, step = SCRIPTS[name]
    Path("train.py").write_text(SCRIPT.replace("SETUP", setup).replace("        STEP\n", step))
    Path("own.py").write_text(OWN)
    Path("go").touch()
    one = ["-n", "1", "--servers", "1"]
    whole = run_program("-m", "paceline", "run", *one, "--run-dir", "whole", "train.py")
    assert whole.returncode == 0, whole.stderr
    Path("average.pt").rename("whole/average.pt")
    Path("go").unlink()

    chance = random.Random(name)
    options = [*one, "--checkpoint-every", "0.3", "--run-dir", "run", "train.py"]
    program = start_program("-m", "paceline", "run", *options, stderr=subprocess.STDOUT)
    await_that(lambda: numbers_in(of_the_run(Path("run", "checkpoints"))), "a checkpoint is whole")
    for number in range(KILLS):
        kill(program, mark)
        before = steps()
        servers = str(2 - number % 2)
        resumed = ["--resume", "run", "--servers", servers]
        program = start_program("-m", "paceline", "run", *resumed, stderr=subprocess.STDOUT)
        if chance.random() > AT_START:
            await_that(lambda before=before: steps() > before, "it trains")  # type: ignore[misc]
        time.sleep(chance.random())
    Path("go").touch()
    output, _ = program.communicate()
    assert program.returncode == 0, output
    weights = safetensors.torch.load_file("run/weights.safetensors")
    for key, tensor in safetensors.torch.load_file("whole/weights.safetensors").items():
        assert torch.equal(weights[key], tensor), key
    average = torch.load("average.pt")
    for key, tensor in torch.load("whole/average.pt").items():
        assert torch.equal(average[key], tensor), key


def steps() -> int:
    return Path("steps").stat().st_size


def kill(program: subprocess.Popen[str], mark: str) -> None:
    """Kill all processes of a run, as a machine that loses its power does."""
    program.kill()
    while found := processes(mark):
        for process_id in found.values():
            os.kill(process_id, signal.SIGKILL)
        time.sleep(0.05)
    output, _ = program.communicate()
    assert program.returncode == -signal.SIGKILL, output

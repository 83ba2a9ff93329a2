"""No worker that is alive is taken out of a run, however loaded its machine is and however irregular its iterations.

`make stress` lets the run last ten minutes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.live import loaded, mark
from tests.support.served import Served, output

__all__ = ["mark"]

DURATION_S = 600 if os.environ.get("PACELINE_STRESS") else 20

SCRIPT = """
import random
import sys
import time
import torch
import paceline

draw = random.Random(paceline.worker_index())
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
model, optimizer = paceline.prepare(model, optimizer)
until_s = time.monotonic() + float(sys.argv[1])
iterations = 0
while time.monotonic() < until_s:
    optimizer.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    iterations += 1
    pause = 10 if draw.random() < 0.01 else 1  # a pause of ten iterations now and then
    busy_until_s = time.monotonic() + 0.05 * pause * draw.uniform(0.8, 1.2)
    while time.monotonic() < busy_until_s:  # holds the interpreter's lock, as a training thread may
        pass
print(iterations, "iterations")
"""


@pytest.mark.chaos
@pytest.mark.parametrize("sync", ["asp", "elastic-bsp:lookahead=8"])
def test_no_live_worker_is_taken_out_on_a_loaded_machine(sync: str, mark: str) -> None:
    served = Served("--workers", "3", "--sync", sync)
    Path("train.py").write_text(SCRIPT)
    with loaded(os.cpu_count() or 1):
        joined = [served.join(str(DURATION_S)) for _ in range(3)]
        ends = [output(program, timeout_s=DURATION_S + 300) for program in joined]
        summary = served.summary()

    assert [code for code, *_ in ends] == [0, 0, 0], ends
    assert (summary["lost_workers"], summary["left"]) == ([], [])
    iterations = re.findall(r"(\d+) iterations", "".join(stdout for _, stdout, _ in ends))
    assert len(iterations) == 3
    print(f"\n{sync}, {DURATION_S} s, {', '.join(iterations)} iterations: nobody was taken out")

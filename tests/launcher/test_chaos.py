"""Real runs in which a random process gets a random signal at a random moment.

Each run ends or goes on as docs/guide.md says, leaves nothing behind, and names the cause. `make chaos` does fifty
of them, with a line for each; the tests do one, and `make thorough` another one.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch

from paceline.wire.patience import SILENCE_S
from tests.support.live import await_that, processes, start_program
from tests.support.marks import chaos, thorough

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("mark")]

RUNS = os.environ.get("PACELINE_CHAOS", "")
FIRST_SEED = int(os.environ.get("PACELINE_CHAOS_SEED", "0"))

LIFETIME_S = {"launcher": 8.0, "server": 7.0, "worker": 7.0, "child": 3.5}  # or so, on two idle cores
STALL_TIMEOUT_S = 5
KNOWS_S = 15.0  # from the moment on at which it can be known: then the run has ended, or goes on
DEADLINE_S = 180.0  # a safety net

SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGSEGV", "SIGABRT", "SIGHUP", "SIGSTOP")
TARGETS = ("worker", "worker", "worker", "server", "server", "launcher", "child")

SCRIPT = """
import os, time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import paceline


class Data(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None:
            Path(f"child-{paceline.worker_index()}").write_text(str(os.getpid()))
        return torch.randn(6, generator=torch.Generator().manual_seed(index))


torch.manual_seed(0)
model = torch.nn.Linear(6, 6)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
loader = DataLoader(Data(), batch_size=8, num_workers=1)
for iteration, x in zip(range(50), loader):

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    Path(f"iteration-{paceline.worker_index()}").write_text(f"{iteration} {time.time()}")
"""


@dataclass
class Outcome:
    """What came of one run."""

    what: str
    code: int
    took_s: float  # from the signal to the end of the last process
    went_on_s: float  # from the signal to the last iteration of any worker
    said: str
    hit: bool  # the target was there still


def strike(seed: int, mark: str) -> Outcome:
    """One run, from its start to the end of its last process."""
    draw = random.Random(seed)
    workers, servers = draw.choice([2, 3]), draw.choice([1, 2])
    transport, sync = draw.choice(["shm", "unix", "tcp"]), draw.choice(["bsp", "asp", "ssp", "elastic-bsp"])
    target, name = draw.choice(TARGETS), draw.choice(SIGNALS)
    index = draw.randrange(servers if target == "server" else workers)
    moment_s = draw.uniform(0.0, LIFETIME_S[target])  # from when it is there
    Path("train.py").write_text(SCRIPT)
    with Path("said").open("w") as said:
        program = start_program(
            *("-P", "-m", "paceline", "run", "--run-dir", "run", "--workers", str(workers)),
            *("--servers", str(servers), "--transport", transport, "--sync", sync),
            *("--pace", ",".join(["0.06"] * workers), "--stall-timeout", str(STALL_TIMEOUT_S), "train.py"),
            stderr=said,
        )

    def process() -> int | None:
        """The target's id, once it is there."""
        if target == "launcher":
            return program.pid
        if target != "child":
            return processes(mark).get(f"{target} {index}")
        file = Path(f"child-{index}")
        return int(file.read_text()) if file.exists() and file.read_text() else None

    await_that(process, f"{target} {index} is there")
    time.sleep(moment_s)  # the moment is what this is about
    struck_s = time.time()
    hit = (struck := process()) is not None
    if struck is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(struck, signal.Signals[name])
    if target == "launcher" and name == "SIGSTOP":
        time.sleep(1.0)  # nobody can know; it goes on where it was
        program.send_signal(signal.SIGCONT)
    try:
        program.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        program.kill()
        program.communicate()
    await_that(lambda: not processes(mark), "every process has ended")
    for left in Path(os.environ["TMPDIR"]).glob("pymp-*"):
        shutil.rmtree(left)  # multiprocessing's, of loaders whose processes were killed
    last_s = max(
        (float(path.read_text().split()[1]) for path in Path().glob("iteration-*") if path.read_text()),
        default=0.0,
    )
    who = target if target == "launcher" else f"{target} {index}"
    job = f"{workers} workers, {servers} servers, {transport}, {sync}"
    what = f"{name} to {who} {moment_s:.2f} s after its start ({job})"
    code = program.returncode
    return Outcome(what, code, time.time() - struck_s, last_s - struck_s, Path("said").read_text(), hit)


def expected(outcome: Outcome) -> str:
    """What is wrong with an outcome; "" if it is as documented."""
    name, _, target, *_ = outcome.what.split()
    # Weights are awaited from a stopped server until it has been silent for as long as a link may be down.
    stopped_s = SILENCE_S if target == "server" else STALL_TIMEOUT_S
    late = outcome.took_s > KNOWS_S + max(0.0, outcome.went_on_s) + (stopped_s if name == "SIGSTOP" else 0.0)
    if late:
        return f"it took {outcome.took_s:.1f} s"
    if "Traceback" in outcome.said and target in ("launcher", "server"):
        return "a traceback"
    codes, words = {
        "launcher": ({0, -signal.Signals[name], 128 + signal.Signals[name]}, ""),
        "worker": ({0, 1, 3}, rf"worker \d.*{name}|stall-timeout|KeyboardInterrupt|every worker was lost"),
        # If the server is stopped when all workers have finished, it does not answer with the final weights.
        "server": ({0, 1, 3}, rf"server \d.*({name}|stall-timeout|KeyboardInterrupt|its process is stopped)"),
        # If the child dies while it passes on a batch, torch's loader raises another error.
        "child": (
            {0, 1, 3},
            r"DataLoader worker|stall-timeout|is killed by|exited unexpectedly|dataloader\.py",
        ),
    }[target]
    if outcome.code not in codes:
        return f"exit code {outcome.code}"
    if outcome.code in (1, 3) and not re.search(words, outcome.said):
        return "the cause is not named"
    if outcome.code == 0 and target == "launcher" and name not in ("SIGSTOP",) and outcome.went_on_s > 1.0:
        return "it went on"
    saved = list(Path("run").glob("weights*.safetensors"))
    if outcome.code in (0, 3) and not saved:
        return "no weights"
    if saved and not safetensors.torch.load_file(saved[0]):
        return "no weights in their file"
    return ""


@pytest.mark.parametrize(
    "seed", chaos(*range(FIRST_SEED, FIRST_SEED + int(RUNS))) if RUNS else thorough(0, 1)
)
def test_a_random_signal_at_a_random_moment_ends_as_documented(seed: int, mark: str) -> None:
    outcome = strike(seed, mark)
    wrong = expected(outcome)
    if RUNS:
        last = outcome.said.strip().splitlines()[-1:] or [""]
        print(
            f"\n{seed}: {outcome.what}{'' if outcome.hit else ' (it had ended)'}: exit code {outcome.code}, "
            f"{outcome.took_s:.1f} s: {wrong or 'as documented'}\n    {last[0][:150]}"
        )
    assert not wrong, f"{outcome.what}: {wrong}\nexit code {outcome.code}\n{outcome.said}"

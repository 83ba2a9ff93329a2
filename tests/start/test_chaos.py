"""Real runs in which a random process gets a random signal at a random moment.

Each run ends or goes on as docs/reference/problems.md says, leaves nothing behind, and names the cause. `make chaos`
does fifty of them, with a line for each; the tests do one, and `make thorough` another one.

Then four runs, which have one directory for their checkpoints, are killed and resumed again and again. `make chaos`
kills each of them once, and PACELINE_KILLS=40 all of them 40 times together.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from paceline.checkpoints.manifest import is_lineage, numbers_in
from paceline.checkpoints.reading import Checkpoint
from paceline.core.layout import CODECS
from paceline.wire.preface import SILENCE_S
from tests.support.live import MARK, await_that, processes, start_program, started
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
    codec = draw.choice([*CODECS])
    Path("train.py").write_text(SCRIPT)
    with Path("said").open("w") as said:
        program = start_program(
            *("-P", "-m", "paceline", "run", "--run-dir", "run", "--workers", str(workers)),
            *("--servers", str(servers), "--transport", transport, "--sync", sync, "--wire", codec),
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
    job = f"{workers} workers, {servers} servers, {transport}, {codec}, {sync}"
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
    if (summary := Path("run/summary.json")).exists() and json.loads(summary.read_text())["repeated_bases"]:
        return "a worker has come to another base than its server"
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


# -- runs that share a directory for their checkpoints --------------------------------------------------------------

KILLS = int(os.environ.get("PACELINE_KILLS", "0"))
SHARING = 4  # number of runs
EPOCHS, SAMPLES = 40, 256
MODELS = (
    "bsp",
    "asp",
    "ssp:staleness=2",
    "elastic-bsp:lookahead=5",
    "dssp:lower=1,upper=3",
    "dsps:lower=1,upper=4",
)

LOOP = f"""
import sys, time
from pathlib import Path

import torch

import paceline

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.randn({SAMPLES}, 4), torch.randint(0, 3, ({SAMPLES},)))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for epoch in paceline.epochs({EPOCHS}):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if not Path(sys.argv[1]).exists():
            time.sleep(0.1)
"""


def what_is_not_ours(directory: Path) -> dict[str, object]:
    """Return all that is in a directory outside of the folders of runs, with contents and times."""
    found: dict[str, object] = {}
    for path in sorted(directory.rglob("*")):
        if not is_lineage(path.relative_to(directory).parts[0]) or OTHERS in path.parts:
            state = path.lstat()
            found[str(path)] = state.st_mtime_ns, state.st_mode, path.read_bytes() if path.is_file() else b""
    return found


OTHERS = "paceline-00000000000000ff"
"""A run that is not one of these. It may be on another machine."""


def put_what_is_not_ours(directory: Path) -> None:
    names = [
        *(f"47110{number:02}" for number in range(20)),
        "20240101",
        "20261128",
        "000001",
        "000002",
        "000999",
    ]
    names += [
        "20240101.partial",
        "000003.partial",
        "4711099.partial",
        "data",
        "checkpoints",
        f"{OTHERS}/000001",
    ]
    names += [f"{OTHERS}/000007.partial", "paceline-0123", "paceline-FFFFFFFFFFFFFFFF"]
    for name in names:
        (directory / name / "deep").mkdir(parents=True)
        (directory / name / "deep" / "model.safetensors").write_text(name)
    for name in (
        "4711100",
        "000004",
        "notes.txt",
        "000005.partial",
        "manifest.json",
        "draft.json",
        "._000001",
    ):
        (directory / name).write_text(name)
    (directory / "4711101").symlink_to(directory / "4711000")


class SharingRun:
    """A run that is killed and resumed again and again, while others use the same directory for their checkpoints."""

    def __init__(self, index: int, seed: int, shared: Path) -> None:
        self.run_dir, self.go = Path(f"run-{index}"), Path(f"go-{index}")
        self.mark = f"{os.environ[MARK]}-{index}"
        self.shared = shared
        self.chance = random.Random(seed)
        self.log: list[str] = []

    @property
    def lineage(self) -> str:
        try:
            return str(json.loads((self.run_dir / "run.json").read_text())["lineage"])
        except (OSError, ValueError):
            return ""

    def newest(self) -> int:
        """Return the number of the newest complete checkpoint; 0 if there is none."""
        return max(numbers_in(self.shared / self.lineage), default=0) if self.lineage else 0

    def start(self, *more: str) -> subprocess.Popen[str]:
        """Start the run or resume it, with a random model and codec, and random numbers of workers and servers."""
        chance = self.chance
        options = ["-n", str(chance.randint(1, 2)), "--servers", str(chance.randint(1, 2))]
        options += ["--sync", chance.choice(MODELS), "--transport", chance.choice(["tcp", "unix"])]
        options += ["--wire", chance.choice([*CODECS]), *more]
        self.log.append(" ".join(options))
        return start_program(
            *(
                "-m",
                "paceline",
                "run",
                "--checkpoint-every",
                "0.5",
                "--checkpoint-dir",
                str(self.shared),
            ),
            *options,
            *("train.py", str(self.go)),
            stderr=subprocess.STDOUT,
            prefix=("env", f"{MARK}={self.mark}"),
        )

    def kill(self, program: subprocess.Popen[str]) -> None:
        """Kill the launcher, or all processes as a machine that loses its power does."""
        at_once = self.chance.random() < 0.5
        program.kill()
        if at_once:
            for folder in started(self.mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(folder.name), signal.SIGKILL)
        said, _ = program.communicate()
        self.log.append(f"killed {'at once' if at_once else 'the launcher'}\n{said}")
        if self.chance.random() < 0.5:  # else the next run begins while processes of this one are ending
            self.await_that(lambda: not list(started(self.mark)), "all processes have ended")

    def lose_a_server(self, program: subprocess.Popen[str]) -> None:
        """Kill a server. The run goes on by itself."""
        before = len(list((self.run_dir / "before").glob("*")))
        if (process_id := processes(self.mark).get("server 0")) is not None:
            os.kill(process_id, signal.SIGKILL)
            self.await_that(
                lambda: program.poll() is not None or len(list((self.run_dir / "before").glob("*"))) > before,
                "the run goes on",
            )
            self.log.append("a server was killed")

    def await_checkpoint(self, program: subprocess.Popen[str]) -> None:
        before = self.newest()
        self.await_that(lambda: self.newest() > before or program.poll() is not None, "a checkpoint is whole")

    def await_that(self, condition: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + 3 * DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"never happened: {what}\n" + "\n".join(self.log)
            time.sleep(0.05)

    def carry_out(self, kills: int) -> dict[str, Any]:
        """Kill and resume the run, let it end, and return its summary."""
        program = self.start("--run-dir", str(self.run_dir))
        self.await_checkpoint(program)
        lineage = self.lineage
        for _ in range(kills):
            if self.chance.random() < 0.7:
                self.await_checkpoint(program)
            time.sleep(self.chance.uniform(0.0, 1.0))  # the moment is what this is about
            if self.chance.random() < 0.25:
                self.lose_a_server(program)
                time.sleep(self.chance.uniform(0.0, 1.0))
            assert program.poll() is None, program.communicate()[0]
            self.kill(program)
            program = self.start("--resume", str(self.run_dir))
        self.go.touch()
        said, _ = program.communicate(timeout=3 * DEADLINE_S)
        assert program.returncode in (0, 3), said + "\n".join(self.log)
        self.await_that(lambda: not list(started(self.mark)), "all processes have ended")
        assert self.lineage == lineage
        found: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return found


@pytest.mark.parametrize("kills", chaos(KILLS or SHARING))
def test_runs_that_are_killed_share_a_directory_with_one_another_and_with_others(kills: int) -> None:
    """Each run uses each sample of each epoch once, whatever is killed when, and touches only what is its own."""
    shared = Path("shared").absolute()
    put_what_is_not_ours(shared)
    Path("train.py").write_text(LOOP)
    before = what_is_not_ours(shared)
    runs = [SharingRun(index, FIRST_SEED + index, shared) for index in range(SHARING)]
    with ThreadPoolExecutor(SHARING) as threads:
        shares = [kills // SHARING + (index < kills % SHARING) for index in range(SHARING)]
        ends = [threads.submit(run.carry_out, share) for run, share in zip(runs, shares, strict=True)]
    for run, share, end in zip(runs, shares, ends, strict=True):
        found = end.result()
        samples = found["ledger"]["samples"]
        print(f"\n{run.run_dir}: {share} kills, {len(found['resumptions'])} resumptions: {samples}")
        assert samples["used"] + samples["torn"] == EPOCHS * SAMPLES, (samples, run.log)
        assert sum(samples.values()) == EPOCHS * SAMPLES, (samples, run.log)
        assert found["repeated_bases"] == 0
        assert found["resumptions"]  # one that is killed before it has described itself is not among them
        own = run.shared / run.lineage
        numbers = numbers_in(own)
        assert 1 <= len(numbers) <= 4, numbers  # three, and perhaps that with which the run has gone on
        assert {Checkpoint(own / f"{number:06d}").manifest.lineage for number in numbers} == {run.lineage}
    assert what_is_not_ours(shared) == before
    theirs = {path.name for path in shared.iterdir() if is_lineage(path.name)} - {OTHERS}
    assert theirs == {run.lineage for run in runs}

"""Runs that are killed and resumed learn on average what undisturbed runs learn, under models without lockstep.

`make chaos` prints a line for each model.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn

from paceline.checkpoints.manifest import numbers_in
from paceline.core.job_cut import JobCut
from paceline.studies.statistics import difference
from paceline.sync.actions import DropPush
from paceline.trace.recording import trace_files
from tests.support.live import await_that, of_the_run, processes, run_program, start_program

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.processes,
    pytest.mark.usefixtures("mark"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
]

RUNS = max(2, int(os.environ.get("PACELINE_CHAOS", "50")) // 12)
"""Number of runs that are killed under each model, and of runs that are not."""

FIRST_SEED = int(os.environ.get("PACELINE_CHAOS_SEED", "0"))

SYNCS = ["asp", "ssp:staleness=2", "elastic-bsp:lookahead=5", "spec-sync", "drop-stragglers:quorum=1"]

EPOCHS, SAMPLES, BATCH = 8, 1200, 16
PUSHES = EPOCHS * SAMPLES // BATCH

FARTHEST = 0.03
"""The most by which the accuracy of a resumed run may differ from the mean of the undisturbed runs."""

LEVEL = 0.001
"""The means differ if Student's t-test finds a difference at this level, as it does by chance in 1 of 1000 tests."""

# The workers have different speeds. They begin the last epoch only when there is the file "go", so that a run does
# not end before it is killed.
SCRIPT = f"""
import sys
import time
from pathlib import Path

import torch
from torch import nn

import paceline

torch.manual_seed(int(sys.argv[1]))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.6)
data = torch.utils.data.TensorDataset(*torch.load("../digits.pt"))
loader = torch.utils.data.DataLoader(data, batch_size={BATCH}, shuffle=True)
model, optimizer, loader, scheduler = paceline.prepare(model, optimizer, loader, scheduler)
for epoch in paceline.epochs({EPOCHS}):
    while epoch == {EPOCHS - 1} and not Path("go").exists():
        Path("waits").touch()
        time.sleep(0.01)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        with open("steps", "a") as steps:
            steps.write(".")
        time.sleep(0.002 * (1 + paceline.worker_index()))
    scheduler.step()
"""


class Resumed(NamedTuple):
    """What has become of a run that was killed.

    Attributes:
        accuracy: its accuracy in the end.
        victims: the processes that were killed.
        torn: number of its pushes that are in the weights of some shards only.
        unseen: number of checkpoints from which it went on, and whose torn pushes no trace shows.
    """

    accuracy: float
    victims: list[str]
    torn: int
    unseen: int


@pytest.mark.parametrize("sync", SYNCS)
def test_runs_that_are_killed_and_resumed_learn_on_average_what_undisturbed_runs_learn(
    sync: str, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]
    torch.save((x[:SAMPLES], y[:SAMPLES]), "digits.pt")
    unseen_digits = x[SAMPLES:], y[SAMPLES:]
    undisturbed, resumed = [], []
    for seed in range(FIRST_SEED, FIRST_SEED + RUNS):
        begin(tmp_path / f"undisturbed-{seed}", monkeypatch)
        Path("go").touch()
        ended = run_program(*command(sync, seed))
        assert ended.returncode == 0, ended.stderr
        undisturbed.append(accuracy(*unseen_digits))
        begin(tmp_path / f"resumed-{seed}", monkeypatch)
        victims = kill_and_resume(sync, seed, mark)
        resumed.append(Resumed(accuracy(*unseen_digits), victims, *check_ledger(sync)))
    print("\n" + row(sync, undisturbed, resumed))
    assert min(undisturbed) > 0.93
    assert difference([run.accuracy for run in resumed], undisturbed, paired=False).p > LEVEL
    for seed, run in enumerate(resumed, FIRST_SEED):
        assert abs(run.accuracy - fmean(undisturbed)) <= FARTHEST, f"seed {seed}: {run}"


def begin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to the folder of a run."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("train.py").write_text(SCRIPT)
    Path("steps").touch()


def command(sync: str, seed: int) -> list[str]:
    options = ["-n", "2", "--servers", "2", "--sync", sync, "--seed", str(seed), "--run-dir", "run"]
    checkpoints = ["--checkpoint-every", "0.1", "--keep", "1000"]
    return ["-m", "paceline", "run", *options, *checkpoints, "train.py", str(seed)]


def kill_and_resume(sync: str, seed: int, mark: str) -> list[str]:
    """Kill processes of a run at random moments, and let it go on to its end. Return what was killed."""
    chance = random.Random(f"{sync} {seed}")
    program = start_program(*command(sync, seed), stderr=subprocess.STDOUT)
    victims = chance.choices(["launcher", "server 0", "server 1"], [6, 1, 1], k=chance.choice([1, 1, 1, 2]))
    for index, victim in enumerate(victims):
        await_steps(steps() + chance.randint(1, PUSHES // (4 if index else 2)))
        if victim == "launcher":
            program.kill()
            output, _ = program.communicate()
            assert program.returncode == -signal.SIGKILL, output
            await_that(lambda: not processes(mark), "all processes have ended")
            Path("waits").unlink(missing_ok=True)
            program = start_program("-m", "paceline", "run", "--resume", "run", stderr=subprocess.STDOUT)
        else:
            lives = begun()
            os.kill(processes(mark)[victim], signal.SIGKILL)
            await_that(lambda lives=lives: begun() > lives, "the run begins again")  # type: ignore[misc]
            Path("waits").unlink(missing_ok=True)
    Path("go").touch()
    output, _ = program.communicate()
    assert program.returncode == 0, output
    return victims


def await_steps(least: int) -> None:
    """Wait until the workers have made some steps, or wait for the last epoch, and a checkpoint is whole."""
    await_that(
        lambda: (
            numbers_in(of_the_run(Path("run", "checkpoints")))
            and (steps() >= least or Path("waits").exists())
        ),
        f"the workers have made {least} steps",
    )


def steps() -> int:
    return Path("steps").stat().st_size


def begun() -> int:
    """Return how often the run has been resumed."""
    return len(list(Path("run").glob("before/*")))


def accuracy(images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of images that the weights of the run classify correctly."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model.load_state_dict(load_file(Path("run", "weights.safetensors")))
    with torch.inference_mode():
        return float((model(images).argmax(dim=1) == labels).float().mean())


def check_ledger(sync: str) -> tuple[int, int]:
    """Check that the ledger of the run closes, and that each torn push is counted.

    Returns:
        The number of torn pushes, and of checkpoints whose torn pushes no trace shows, because a server was killed
        before it had written the end of its trace.
    """
    summary: dict[str, Any] = json.loads(Path("run", "summary.json").read_text())
    samples, pushes = summary["ledger"]["samples"], summary["ledger"]["pushes"]
    assert sum(samples.values()) == EPOCHS * SAMPLES
    assert samples["returned"] == samples["left"] == samples["left_out"] == 0
    torn, unseen = 0, 0
    for checkpoint in dict.fromkeys(resumption["checkpoint"] for resumption in summary["resumptions"]):
        cut = msgspec.json.decode(Path(checkpoint, "job.json").read_bytes(), type=JobCut)
        versions = [shard.version for shard in cut.shards]
        assert max(versions) - min(versions) <= cut.torn
        found = torn_in(Path("run", "before", Path(checkpoint).name), versions)
        if found is None:
            unseen += 1
        elif "drop-stragglers" in sync:  # the traces do not show whether a push was dropped before the cut
            assert found <= cut.torn - torn
        else:
            assert found == cut.torn - torn
        torn = cut.torn
    assert samples["torn"] == BATCH * torn
    # Of the pushes that were held at a cut, the data was handed out again.
    assert PUSHES - torn <= sum(pushes.values()) - pushes["lost"] <= PUSHES
    return torn, unseen


def torn_in(run_dir: Path, versions: list[int]) -> int | None:
    """Return how many pushes some shards have applied before they were cut, and others have not received by then.

    Args:
        run_dir: what the run has written until it was killed.
        versions: the version of each shard at the cut.

    Returns:
        The number of pushes; None if the trace of a shard ends before the cut.
    """
    applied: list[set[tuple[int, int]]] = []
    settled: list[set[tuple[int, int]]] = []
    for trace, version in zip(trace_files(run_dir)[: len(versions)], versions, strict=True):
        entries = [(entry.version or 0, entry) for entry in trace.entries]
        if not entries or entries[-1][0] < version:
            return None
        before = [entry for reached, entry in entries if reached <= version]
        applied.append({push[:2] for entry in before for push in entry.staleness})
        dropped = (action for entry in before for action in entry.actions if isinstance(action, DropPush))
        settled.append(applied[-1] | {(action.worker, action.iteration) for action in dropped})
    return len(applied[0].union(*applied) - settled[0].intersection(*settled))


def row(sync: str, undisturbed: list[float], resumed: list[Resumed]) -> str:
    """Return what the runs under a model have shown: accuracies in per cent, differences in points."""
    ours, others = [100 * run.accuracy for run in resumed], [100 * each for each in undisturbed]
    found = difference(ours, others, paired=False)
    farthest = max((each - fmean(others) for each in ours), key=abs)
    victims = [victim for run in resumed for victim in run.victims]
    servers = len(victims) - victims.count("launcher")
    return (
        f"{sync:25} {len(resumed)} runs: {fmean(ours):.2f} ({stdev(ours):.2f}), undisturbed {fmean(others):.2f} "
        f"({stdev(others):.2f}), difference {found.value:+.2f} [{found.low:+.2f}, {found.high:+.2f}], p "
        f"{found.p:.2f}, farthest run {farthest:+.2f}; killed: {victims.count('launcher')} launchers, {servers} "
        f"servers; {sum(run.torn for run in resumed)} torn pushes, {sum(run.unseen for run in resumed)} cuts unseen"
    )

"""Runs that go on from a checkpoint: after the launcher was killed, after Ctrl-C, and after the loss of a server."""

from __future__ import annotations

import importlib
import json
import linecache
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import paceline
from paceline.checkpoints.manifest import numbers_in
from paceline.errors import ConfigurationError, RunFailedError
from paceline.run.job_options import make_job
from paceline.start.run import begins_anew
from tests.support.emulated import why_not_emulated
from tests.support.live import await_that, kill_all, of_the_run, processes, run_program, start_program
from tests.support.marks import chaos, thorough
from tests.support.served import Served, output
from tests.support.small_disk import fill, small_disk

pytestmark = [
    pytest.mark.processes,
    pytest.mark.usefixtures("mark"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
]

EPOCHS, SAMPLES = 12, 256

LOOP = "    for numbers, x, y in loader:"

# The script writes the numbers of its samples, which shows what is used in which epoch. Until there is the file "go",
# it goes on slowly, so that whatever a test awaits happens before its end.
SCRIPT = f"""
import time
from pathlib import Path

import torch
from torch import nn

import paceline

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
generator = torch.Generator().manual_seed(1)
x, y = torch.randn({SAMPLES}, 4, generator=generator), torch.randint(0, 3, ({SAMPLES},), generator=generator)
data = torch.utils.data.TensorDataset(torch.arange({SAMPLES}), x, y)
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for epoch in paceline.epochs({EPOCHS}):
{LOOP}
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if not Path("go").exists():
            time.sleep(0.05)
"""


def options(*more: str) -> list[str]:
    return ["-m", "paceline", "run", "--checkpoint-every", "0.3", "--run-dir", "run", *more]


@pytest.fixture(autouse=True)
def script(tmp_path: Path, mark: str) -> None:
    Path("train.py").write_text(SCRIPT)


def checkpoints() -> list[int]:
    return numbers_in(of_the_run(Path("run", "checkpoints")))


def await_checkpoints(least: int = 2) -> None:
    await_that(lambda: checkpoints()[-1:] >= [least], "a checkpoint is whole")


def await_another_checkpoint() -> None:
    """Return when a checkpoint is whole that is not yet. A number is left out if its cut was begun again."""
    newest = checkpoints()[-1:]
    await_that(lambda: checkpoints()[-1:] > newest, "another checkpoint is whole")


def started(*more: str, within: Path = Path("run", "checkpoints")) -> subprocess.Popen[str]:
    """Start a run, and return its launcher when the run has written checkpoints to a directory."""
    program = start_program(*options(*more), "train.py", stderr=subprocess.STDOUT)
    await_that(lambda: len(numbers_in(of_the_run(within))) >= 2, "two checkpoints are whole")
    return program


def killed(program: subprocess.Popen[str], mark: str) -> None:
    """Kill all processes of a run, as a machine that loses its power does."""
    kill_all(mark)
    program.communicate()
    await_that(lambda: not processes(mark), "all processes have ended")


def resumed(*more: str) -> subprocess.CompletedProcess[str]:
    Path("go").touch()
    ended = run_program("-m", "paceline", "run", "--resume", "run", *more)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def summary() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("run", "summary.json").read_text())
    return found


def require_closed(found: dict[str, Any]) -> None:
    """Check that the ledger has each sample of each epoch once, and each push."""
    assert sum(found["ledger"]["samples"].values()) == EPOCHS * SAMPLES
    samples = found["ledger"]["samples"]
    assert samples["returned"] == samples["left"] == samples["left_out"] == 0


def final_weights() -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = safetensors.torch.load_file(Path("run", "weights.safetensors"))
    return weights


def damage(checkpoint: int) -> None:
    with (of_the_run(Path("run", "checkpoints")) / f"{checkpoint:06d}" / "model.safetensors").open(
        "r+b"
    ) as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")


def test_a_killed_run_goes_on_with_the_same_bits_from_its_last_whole_checkpoint(mark: str) -> None:
    killed(started("-n", "1", "--servers", "1"), mark)
    *_, before, newest = checkpoints()
    damage(newest)
    ended = resumed()
    words = " ".join(ended.stderr.split())
    found = summary()
    (resumption,) = found["resumptions"]
    assert Path(resumption["checkpoint"]).name == f"{before:06d}"
    assert resumption["lost_updates"] >= 0
    assert f"Checkpoint {newest} is not used: model.safetensors is damaged: its checksum is wrong." in words
    assert f"The run goes on from checkpoint {before:06d} (update {resumption['updates']})." in words
    require_closed(found)
    assert sum(found["ledger"]["pushes"].values()) == EPOCHS * SAMPLES / 8
    assert (Path("run", "before") / f"{before:06d}" / "trace-shard-0.jsonl").exists()
    weights = final_weights()
    whole = run_program(
        "-m", "paceline", "run", "-n", "1", "--servers", "1", "--run-dir", "whole", "train.py"
    )
    assert whole.returncode == 0
    for name, tensor in safetensors.torch.load_file(Path("whole", "weights.safetensors")).items():
        assert torch.equal(weights[name], tensor), name


def test_one_of_several_runs_has_the_directory_until_it_ends_or_another_takes_it_by_force(mark: str) -> None:
    first = [start_program(*options("-n", "1", "--servers", "1"), "train.py") for _ in range(2)]
    await_that(lambda: any(each.poll() is not None for each in first), "one of them has ended")
    [refused] = [each for each in first if each.poll() is not None]
    [program] = [each for each in first if each is not refused]
    words = " ".join(refused.communicate()[1].split())
    assert refused.returncode == 2
    # It is told who holds the directory or, if it has come so late that the other one trains, what is there.
    holds = f"is still in progress: process {program.pid} on {socket.gethostname()} holds the directory"
    assert holds in words or "the run directory run already contains a run; choose another" in words
    await_checkpoints(1)
    refused_resume = run_program("-m", "paceline", "run", "--resume", "run")
    assert refused_resume.returncode == 2
    assert "--force (force=True) ends it from here" in " ".join(refused_resume.stderr.split())
    taken = start_program("-m", "paceline", "run", "--resume", "run", "--force")
    _, lost = program.communicate()
    Path("go").touch()
    assert program.returncode == 1
    assert f"process {taken.pid} on {socket.gethostname()} has taken the directory" in " ".join(lost.split())
    _, words = taken.communicate()
    assert taken.returncode == 0, words
    assert f"the run of process {program.pid} on" in " ".join(words.split())
    found = summary()
    assert found["ended"] == "finished"
    require_closed(found)


@pytest.mark.thorough
@pytest.mark.skipif(bool(why_not_emulated()), reason=f"a process namespace needs {why_not_emulated()}")
def test_a_run_in_progress_is_not_taken_for_one_that_was_cut_off_from_another_process_namespace() -> None:
    program = started("-n", "1", "--servers", "1")
    elsewhere = ("unshare", "--pid", "--fork", "--mount-proc")
    status = start_program("-m", "paceline", "status", "run", prefix=elsewhere)
    told = " ".join("".join(status.communicate()).split())
    Path("go").touch()
    output, _ = program.communicate()
    assert program.returncode == 0, output
    assert "is in progress: its launcher, process" in told
    assert "cut off" not in told


ADDING = (
    SCRIPT.replace("nn.Linear(16, 3))", "nn.Linear(16, 3), nn.Linear(3, 3))\nadded = []")
    .replace("SGD(model.parameters()", "SGD(model[:4].parameters()")
    .replace(
        LOOP,
        "    if not added and epoch >= 1:\n"
        "        added += model[4].parameters()\n"
        '        optimizer.add_param_group({"params": added})\n'
        '        Path("added").touch()\n' + LOOP,
    )
    .replace("time.sleep(0.05)", "time.sleep(0.2 if added else 0.02)")
)
"""The script adds parameters in the second epoch. It has three workers, and then goes on so much the more slowly."""


@pytest.mark.parametrize("sync", ["bsp", *thorough("asp", "ssp:staleness=2", "elastic-bsp:lookahead=5")])
def test_a_run_goes_on_with_other_workers_and_servers_and_with_added_parameters(mark: str, sync: str) -> None:
    Path("train.py").write_text(ADDING)
    program = started("-n", "3", "--servers", "1", "--sync", sync)
    await_that(lambda: Path("added").exists(), "parameters have been added")
    await_checkpoints(checkpoints()[-1] + 2)
    killed(program, mark)
    ended = resumed("-n", "2", "--servers", "2")
    words = " ".join(ended.stderr.split())
    assert "Changed: --workers 3 -> 2, --servers 1 -> 2, --shards 1 -> 2." in words
    require_closed(summary())


EVALUATING = """
import time
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel

import paceline

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(64, 4, generator=generator), torch.randint(0, 3, (64,), generator=generator)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8, shuffle=True)
model, optimizer, loader, scheduler = paceline.prepare(model, optimizer, loader, scheduler)
ema = AveragedModel(model)
paceline.track(ema=ema)
for epoch in paceline.epochs(4):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
    steps = int(ema.n_averaged)
    if paceline.worker_index() == 0:
        with Path("seen").open("a") as seen:
            print(epoch, steps, sum(float(p.double().sum()) for p in ema.parameters()), file=seen)
        with paceline.evaluating(model):
            Path(f"evaluating-{epoch}").touch()
            while epoch == 1 and not Path("go").exists():
                time.sleep(0.02)
    assert loss.isfinite() and x.shape[1] == 4
    scheduler.step()
    assert scheduler.last_epoch == epoch + 1
"""
"""The main worker evaluates after each epoch. In the second evaluation, it waits for the file "go"."""


@pytest.mark.parametrize(
    ("sync", "workers"), [("bsp", "2"), *thorough(("asp", "2"), ("asp", "1"), ("ssp:staleness=2", "3"))]
)
def test_a_cut_during_an_evaluation_loses_nothing(mark: str, sync: str, workers: str) -> None:
    Path("train.py").write_text(EVALUATING)
    program = start_program(
        *options("-n", workers, "--servers", "1", "--sync", sync), "train.py", stderr=subprocess.STDOUT
    )
    await_that(lambda: Path("evaluating-1").exists(), "the main worker evaluates")
    for _ in range(3):  # the first two may have been begun before the evaluation
        await_another_checkpoint()
    killed(program, mark)
    before = Path("seen").read_text().splitlines()
    states = {
        path.name
        for path in (
            of_the_run(Path("run", "checkpoints")) / f"{checkpoints()[-1]:06d}" / "workers"
        ).iterdir()
    }
    assert "0.bin" in states
    resumed()
    after = Path("seen").read_text().splitlines()[len(before) :]
    assert after[0] == before[1]  # the evaluation is repeated with the very average
    assert [line.split()[0] for line in after] == ["1", "2", "3"]
    samples = summary()["ledger"]["samples"]
    assert sum(samples.values()) == samples["used"] + samples["torn"] == 4 * 64


def test_a_signal_before_the_first_checkpoint_leaves_a_run_that_can_be_resumed(mark: str) -> None:
    Path("train.py").write_text(EVALUATING)
    program = start_program(
        "-m", "paceline", "run", "--run-dir", "run", "-n", "2", "train.py", stderr=subprocess.STDOUT
    )
    await_that(lambda: Path("evaluating-1").exists(), "the main worker evaluates")
    program.terminate()
    output, _ = program.communicate()
    assert program.returncode == 143
    words = " ".join(output.split())
    assert f"checkpoint {checkpoints()[-1]:06d} is whole; to go on from it: paceline run --resume" in words
    assert final_weights()
    before = Path("seen").read_text().splitlines()
    resumed()
    after = Path("seen").read_text().splitlines()[len(before) :]
    assert after[0] == before[1]
    samples = summary()["ledger"]["samples"]
    assert sum(samples.values()) == samples["used"] == 4 * 64


def test_a_second_signal_ends_a_run_that_awaits_its_last_checkpoint(mark: str) -> None:
    slow = 'if epoch == 2:\n            Path("slow").touch()\n            time.sleep(600)\n        optimizer.step()'
    Path("train.py").write_text(SCRIPT.replace("time.sleep(0.05)", "pass").replace("optimizer.step()", slow))
    program = start_program(
        "-m", "paceline", "run", "--run-dir", "run", "-n", "1", "train.py", stderr=subprocess.STDOUT
    )
    await_that(lambda: Path("slow").exists(), "the worker computes for long")
    program.send_signal(signal.SIGINT)
    await_that(lambda: Path("run", "report.html").exists(), "the results have been written")
    assert final_weights()
    assert summary()["ended"] == "interrupted"
    program.send_signal(signal.SIGINT)
    output, _ = program.communicate()
    assert program.returncode == 130, output
    assert not checkpoints()


@pytest.mark.parametrize("interruptions", [1, 3])
@pytest.mark.thorough
def test_a_run_can_be_interrupted_and_resumed_again_and_again(mark: str, interruptions: int) -> None:
    program = started("-n", "1", "--servers", "1")
    for times in range(interruptions):
        program.send_signal(signal.SIGINT)
        output, _ = program.communicate()
        newest = checkpoints()[-1]
        assert f"to go on from it: paceline run --resume {Path('run').absolute()}" in output.replace(
            "\n", " "
        )
        assert len(summary()["resumptions"]) == times
        program = start_program("-m", "paceline", "run", "--resume", "run", stderr=subprocess.STDOUT)
        await_checkpoints(newest + 1)
        shown = " ".join(run_program("-m", "paceline", "status", "run").stdout.split())
        assert f"The run goes on from checkpoint {newest:06d} (update " in shown
    Path("go").touch()
    output, _ = program.communicate()
    assert program.returncode == 0, output
    require_closed(summary())
    assert len(summary()["resumptions"]) == interruptions
    assert json.loads(Path("run", "run.json").read_text())["command"].endswith("train.py")


LAUNCHED = """
import time
from pathlib import Path

import torch

import paceline


def train(rate):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    data = torch.utils.data.TensorDataset(torch.arange(16), torch.randn(16, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    for epoch in paceline.epochs(200):
        for numbers, x in loader:
            with Path("used").open("a") as used:
                print(epoch, *numbers.tolist(), file=used)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if epoch == 1 and numbers[0] == 0:  # once
                paceline.checkpoint()
            if not Path("go").exists():
                time.sleep(0.02 if epoch < 20 else 0.5)  # the checkpoint is whole long before the last epoch
                if list(Path("run", "checkpoints").glob("*/0?????")):
                    raise RuntimeError("not today")
"""


def launched(**settings: Any) -> paceline.RunResult:
    """Launch the function `train` of a module, as it is now."""
    sys.modules.pop("launched", None)
    linecache.checkcache()
    importlib.invalidate_caches()
    train = importlib.import_module("launched").train
    return paceline.launch(
        train, args=(0.1,), workers=1, servers=1, checkpoint_every="off", progress=False, **settings
    )


def test_a_function_goes_on_from_a_checkpoint_unless_it_has_changed(caplog: pytest.LogCaptureFixture) -> None:
    Path("launched.py").write_text(LAUNCHED)
    with pytest.raises(RunFailedError, match="not today") as failure:
        launched(run_dir="run")
    # The first one, or the second if the first was given up.
    (checkpoint,) = Path("run", "checkpoints").glob("*/0?????")
    number = checkpoint.name
    resume = f'checkpoint {number} is whole; to go on from it: paceline.launch(..., resume="{Path("run").absolute()}")'
    assert resume in failure.value.__notes__
    Path("go").touch()
    Path("launched.py").write_text(LAUNCHED.replace("batch_size=4", "batch_size=2"))
    with pytest.raises(ConfigurationError) as refusal:
        launched(resume="run")
    assert str(refusal.value) == (
        "the training function has changed since the run began: line 6 was 'loader = "
        "torch.utils.data.DataLoader(data, batch_size=4)', and is now 'loader = torch.utils.data.DataLoader(data, "
        "batch_size=2)'. Restore it, or add accept_changes=True to resume with it as it is."
    )
    Path("launched.py").write_text("# What surrounds the function may change.\n" + LAUNCHED)
    result = launched(resume="run")
    assert sum(result.summary["ledger"]["samples"].values()) == 200 * 16
    assert len(result.summary["resumptions"]) == 1
    used = Path("used").read_text().splitlines()
    assert {*used} == {
        f"{epoch} {n} {n + 1} {n + 2} {n + 3}" for epoch in range(200) for n in range(0, 16, 4)
    }
    (message,) = caplog.messages
    assert message.startswith(f"The run goes on from checkpoint {number}")


@pytest.mark.parametrize("victim", ["server 0", *thorough("server 1")])
def test_a_lost_server_ends_nothing(mark: str, victim: str) -> None:
    """What the server has printed is not why it was lost."""
    Path("noisy.py").write_text('print("a warning")')
    program = started("-n", "2", "--servers", "2", "--import", "noisy")
    os.kill(processes(mark)[victim], signal.SIGKILL)
    await_that(lambda: Path("run", "before").exists(), "the run begins again")
    Path("go").touch()
    output, _ = program.communicate()
    assert program.returncode == 0, output
    found = summary()
    (resumption,) = found["resumptions"]
    assert resumption["why"] == f"{victim} failed: it was terminated by signal SIGKILL."
    assert resumption["why"] in " ".join(output.split())
    require_closed(found)
    assert sum(found["ledger"]["pushes"].values()) == EPOCHS * SAMPLES / 8


@pytest.mark.thorough
def test_a_lost_server_and_a_damaged_checkpoint_cost_the_updates_since_the_one_before(mark: str) -> None:
    """One of them has a flipped bit, one is truncated, and one lacks a file. The run goes on from the one before."""
    program = started("-n", "1", "--servers", "1", "--keep", "4", "--sync", "bsp")
    used: list[tuple[int, int]] = []
    reasons: dict[Callable[[Path], None], str] = {
        flip_bit: "is damaged: its checksum is wrong",
        truncate: "bytes, expected",
        Path.unlink: "No such file",
    }
    for times, damaging in enumerate(reasons):
        for _ in range(2):  # also the one before is not one that was damaged
            await_another_checkpoint()
        program.send_signal(signal.SIGSTOP)  # so that no newer checkpoint becomes whole
        *_, before, newest = checkpoints()
        folder = of_the_run(Path("run", "checkpoints")) / f"{newest:06d}"
        damaging(folder / "model.safetensors")
        os.kill(processes(mark)["server 0"], signal.SIGKILL)
        program.send_signal(signal.SIGCONT)
        await_that(lambda times=times: begun_again() > times, "the run begins again")  # type: ignore[misc]
        used.append((newest, before))
    Path("go").touch()
    output, _ = program.communicate()
    assert program.returncode == 0, output
    found = summary()
    require_closed(found)
    assert sum(found["ledger"]["pushes"].values()) == EPOCHS * SAMPLES / 8
    words = " ".join(output.split())
    for (newest, before), resumption, why in zip(used, found["resumptions"], reasons.values(), strict=True):
        [fault] = [
            each for each in resumption["faults"] if each.startswith(f"Checkpoint {newest} is not used: ")
        ]
        assert why in fault
        assert fault in words
        assert Path(resumption["checkpoint"]).name == f"{before:06d}"


def begun_again() -> int:
    """Return how often the run has gone on."""
    return len(list(Path("run", "before").glob("*")))


def flip_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-2] ^= 0x40
    file.write_bytes(data)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4)


def test_a_lost_server_ends_the_run_if_the_user_wants_it_so_and_a_script_can_ask_for_a_checkpoint(
    mark: str,
) -> None:
    """The requests of both workers are one request."""
    asks = "    paceline.checkpoint() if epoch == 1 else Path(f'epoch-{epoch}').touch()\n"
    quickly = SCRIPT.replace("time.sleep(0.05)", "time.sleep(0.05 if epoch else 0.01)")
    Path("train.py").write_text(quickly.replace(LOOP, asks + LOOP))
    options = ["-n", "2", "--servers", "2", "--on-server-loss", "stop", "--checkpoint-every", "off"]
    program = start_program(
        "-m", "paceline", "run", *options, "--run-dir", "run", "train.py", stderr=subprocess.STDOUT
    )
    await_checkpoints(1)
    await_that(Path("epoch-2").exists, "both workers have asked")
    os.kill(processes(mark)["server 1"], signal.SIGKILL)
    output, _ = program.communicate()
    assert program.returncode == 1
    assert "server 1 failed: it was terminated by signal SIGKILL" in output
    assert "paceline run --resume" in output
    assert len(checkpoints()) == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sync", "before", "differs"),
    [
        ("bsp@0,asp@1000", "asp", True),
        ("bsp", "ssp:staleness=2", True),  # the script has chosen it
        ("bsp@0,asp@epoch:5", "asp", False),  # the epoch has begun, so the change follows at once
        ("bsp@0,asp@1000", "bsp", False),
        ("asp", "", False),
        ("auto", "asp", False),
    ],
)
def test_a_run_says_whether_it_begins_with_another_model_than_its_checkpoint_has(
    sync: str, before: str, differs: bool
) -> None:
    told = begins_anew(make_job(workers=2, servers=1, sync=sync, dry_run=True), before)
    assert bool(told) == differs
    assert f"resume it with --sync '{before}'." in told or not differs


def test_a_changed_script_or_model_is_refused_with_the_first_difference(mark: str) -> None:
    killed(started("-n", "1", "--servers", "1"), mark)
    Path("train.py").write_text(SCRIPT.replace("lr=0.05", "lr=0.01"))
    refused = run_program("-m", "paceline", "run", "--resume", "run")
    words = " ".join(refused.stderr.split())
    assert refused.returncode == 2
    assert "train.py has changed since the run began: line" in words
    assert "lr=0.01" in words
    assert "add --accept-changes" in words
    Path("train.py").write_text(SCRIPT.replace("nn.Linear(16, 3)", "nn.Linear(16, 4)"))
    refused = run_program("-m", "paceline", "run", "--resume", "run", "--accept-changes")
    assert refused.returncode == 1
    words = " ".join(refused.stderr.split())
    assert "its model differs from the model of the run that is resumed" in words
    Path("train.py").write_text(SCRIPT.replace("lr=0.05", "lr=0.01"))
    resumed("--accept-changes")
    require_closed(summary())


@pytest.mark.thorough
def test_a_job_that_its_scheduler_starts_again_resumes_itself(mark: str, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "paceline.join"]
    again = [*torchrun, *options()[3:], "train.py"]
    program = start_program(*again, stderr=subprocess.STDOUT)
    await_checkpoints()
    killed(program, mark)
    before = checkpoints()[-1]
    Path("go").touch()
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
        refused = run_program(*again)
        assert "would decide about the secret in" in " ".join(refused.stderr.split())
        ended = run_program(*again[:-1], "--trust", again[-1])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (resumption,) = summary()["resumptions"]
    assert Path(resumption["checkpoint"]).name == f"{before:06d}"
    require_closed(summary())


@pytest.mark.thorough
def test_machines_join_a_run_again_that_its_serving_machine_resumes(mark: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    served = Served("--workers", "2", "--port", port, "--sync", "asp", "--checkpoint-every", "0.3")
    secret = served.secret
    Path("train.py").write_text(SCRIPT)
    joined = [served.join(options=["--run-dir", f"machine-{index}"]) for index in range(2)]
    await_checkpoints()
    killed_id = served.program.pid
    for name, process_id in processes(mark).items():
        if process_id == killed_id or name.startswith("server"):
            os.kill(process_id, signal.SIGKILL)
    served.failure(code=-signal.SIGKILL)
    newest = checkpoints()[-1]
    served = Served("--resume", "run")
    assert (served.port, served.secret) == (port, secret)
    Path("go").touch()
    for machine in joined:
        code, _, stderr = output(machine)
        assert code == 0, stderr
        assert "joining again in 1 s" in stderr
    served.summary()
    assert f"The run goes on from checkpoint {newest:06d}" in " ".join(served.messages.split())
    require_closed(summary())


@pytest.mark.thorough
def test_machines_join_a_run_again_that_has_lost_a_server(mark: str) -> None:
    served = Served("--workers", "2", "--servers", "2", "--sync", "asp", "--checkpoint-every", "0.3")
    Path("train.py").write_text(SCRIPT)
    joined = [served.join(options=["--run-dir", f"machine-{index}"]) for index in range(2)]
    await_checkpoints()
    os.kill(processes(mark)["server 1"], signal.SIGKILL)
    await_that(lambda: Path("run", "before").exists(), "the run begins again")
    Path("go").touch()
    ends = [output(machine) for machine in joined]
    served.summary()
    require_closed(summary())
    (resumption,) = summary()["resumptions"]
    checkpoint = Path(resumption["checkpoint"]).name
    for code, _, stderr in ends:
        assert code == 0, stderr
        assert "server 1 failed: it was terminated by signal SIGKILL; the run goes on from" in stderr
        assert f"checkpoint {checkpoint}, and the script begins again; joining again in 1 s" in stderr


REMOTE = (
    "--workers",
    "2",
    "--servers",
    "2",
    "--remote-servers",
    "1",
    "--sync",
    "asp",
    "--checkpoint-every",
    "0.3",
)


def served_by_two(*more: str, wait_s: int = 60) -> tuple[Served, list[subprocess.Popen[str]]]:
    """Return a run that has written checkpoints, and its two machines. The last one has brought server 1."""
    served = Served(*REMOTE, *more)
    Path("train.py").write_text(SCRIPT)
    options = [["--run-dir", f"machine-{index}", "--wait", str(wait_s)] for index in range(2)]
    joined = [served.join(options=options[0]), served.join(options=["--servers", "1", *options[1]])]
    await_checkpoints()
    return served, joined


@pytest.mark.parametrize("victim", ["machine", *thorough("server 1")])
def test_a_run_goes_on_when_it_loses_a_server_of_another_machine(mark: str, victim: str) -> None:
    """A machine that is left starts the server again. Otherwise, the machine that serves the run does."""
    served, (stays, brings) = served_by_two()
    os.kill(brings.pid if victim == "machine" else processes(mark)[victim], signal.SIGKILL)
    await_that(lambda: Path("run", "before").exists(), "the run begins again")
    Path("go").touch()
    ends = [output(stays), output(brings)]
    served.summary()
    found = summary()

    (resumption,) = found["resumptions"]
    notice = (
        f"the run goes on from checkpoint {Path(resumption['checkpoint']).name}, and the script begins again"
    )
    if victim == "machine":
        assert resumption["why"].startswith("server 1 on 127.0.0.1")
        assert "failed: the connection to its machine ended" in resumption["why"]
        assert resumption["why"].endswith("The machine that serves the run takes over 1 server.")
        assert "--remote-servers 1 -> 0" in resumption["changes"]
        ends.pop()
    else:
        assert resumption["why"].startswith("server 1 on 127.0.0.1")
        assert "failed: it was terminated by signal SIGKILL" in resumption["why"]
        assert not resumption["changes"]
    for code, _, stderr in ends:
        assert code == 0, stderr
        assert notice in stderr
    require_closed(found)


@pytest.mark.thorough
def test_ctrl_c_while_a_run_begins_again_ends_the_run(mark: str) -> None:
    """Machines that call the run at that moment give up after their `--wait`."""
    served, joined = served_by_two(wait_s=5)
    os.kill(processes(mark)["server 1"], signal.SIGKILL)
    await_that(lambda: Path("run", "before").exists(), "the run begins again")
    served.program.send_signal(signal.SIGINT)
    messages = served.failure(code=130)
    assert [output(machine)[0] for machine in joined] == [1, 1]
    assert f"to go on from it: paceline serve --resume {Path('run').absolute()}" in " ".join(messages.split())
    assert summary()["ended"] == "interrupted"
    await_that(lambda: not processes(mark), "all processes have ended")


@pytest.mark.thorough
def test_a_run_goes_on_without_a_machine_with_servers_that_is_asked_to_leave(mark: str) -> None:
    served, (stays, leaves) = served_by_two()
    leaves.terminate()
    code, _, left = output(leaves)
    assert code == 143
    assert (
        "a run in progress goes on from its newest checkpoint; if it has none, it saves its weights" in left
    )
    Path("go").touch()
    code, _, stderr = output(stays)
    assert code == 0, stderr
    served.summary()
    (resumption,) = summary()["resumptions"]
    assert "its machine was asked to leave the run" in resumption["why"]
    require_closed(summary())


@pytest.mark.thorough
def test_a_lost_server_of_another_machine_ends_the_run_if_the_user_wants_it_so(mark: str) -> None:
    served, joined = served_by_two("--on-server-loss", "stop")
    os.kill(processes(mark)["server 1"], signal.SIGKILL)
    messages = " ".join(served.failure().split())
    assert "failed: it was terminated by signal SIGKILL" in messages
    assert f"to go on from it: paceline serve --resume {Path('run').absolute()}" in messages
    assert [output(machine)[0] for machine in joined] == [1, 1]


# Writing a checkpoint takes a while.
LARGE = SCRIPT.replace("nn.Linear(16, 3))", "nn.Linear(16, 2000), nn.Linear(2000, 2000), nn.Linear(2000, 3))")
LARGE = LARGE.replace("lr=0.05", "lr=0.0001")


def await_draft(directory: Path) -> None:
    await_that(lambda: list(directory.glob("*/*.partial")), "a checkpoint is being written")


@pytest.mark.thorough
@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGKILL"])
def test_a_run_that_is_ended_while_it_writes_a_checkpoint_goes_on_from_the_one_before(
    mark: str, signal_name: str
) -> None:
    Path("train.py").write_text(LARGE)
    program = started("-n", "1", "--servers", "2")
    await_draft(Path("run", "checkpoints"))
    if signal_name == "SIGKILL":
        killed(program, mark)
    else:
        program.terminate()
        output, _ = program.communicate()
        assert program.returncode == 143
        assert f"checkpoint {checkpoints()[-1]:06d} is whole; to go on from it: " in " ".join(output.split())
        assert not list(Path("run", "checkpoints").glob("*/*.partial"))
    newest = checkpoints()[-1]
    ended = resumed()
    assert f"The run goes on from checkpoint {newest:06d}" in " ".join(ended.stderr.split())
    require_closed(summary())


@pytest.mark.thorough
def test_a_disk_that_fills_up_while_a_checkpoint_is_written_costs_checkpoints_alone(mark: str) -> None:
    Path("train.py").write_text(LARGE)
    with small_disk(Path("disk"), 300 * 2**20) as disk:
        program = started("-n", "1", "--servers", "2", "--checkpoint-dir", str(disk), within=disk)
        await_draft(disk)
        fill(disk)
        Path("go").touch()
        output, _ = program.communicate()
        assert program.returncode == 0, output
        words = " ".join(output.split())
        assert len(re.findall(r"(?<!note: )Checkpoint \d+ was not written", words)) == 1
        assert not list(disk.glob("*/*.partial"))
        require_closed(summary())
        (disk / "filler").unlink()
        newest = numbers_in(of_the_run(disk))[-1]
        ended = resumed("train.py")
        assert f"The run goes on from checkpoint {newest:06d}" in " ".join(ended.stderr.split())
        require_closed(summary())


VICTIMS = ["launcher", "server 0", "server 1", "worker 0", "worker 1"]
KILLS = int(os.environ.get("PACELINE_CHAOS", "0"))
FIRST_SEED = int(os.environ.get("PACELINE_CHAOS_SEED", "0"))


@pytest.mark.parametrize("seed", chaos(*range(FIRST_SEED, FIRST_SEED + KILLS)) if KILLS else thorough(0))
def test_whatever_is_killed_the_job_ends_with_its_ledger_closed(mark: str, seed: int) -> None:
    """Some processes are killed one after the other. Then the job is resumed, unless it goes on by itself."""
    chance = random.Random(seed)
    sync = chance.choice(["bsp", "asp", "ssp:staleness=2"])
    program = started("-n", "2", "--servers", "2", "--sync", sync)
    for victim in chance.sample(VICTIMS, chance.randint(1, 2)):
        if (process_id := processes(mark).get(victim)) is not None:
            os.kill(process_id, signal.SIGKILL)
        time.sleep(chance.random())
    Path("go").touch()
    program.communicate()
    await_that(lambda: not processes(mark), "all processes have ended")
    if program.returncode not in (0, 3):
        resumed("-n", str(chance.randint(1, 3)), "--servers", str(chance.randint(1, 2)))
    require_closed(summary())


@pytest.mark.parametrize("seed", chaos(*range(FIRST_SEED, FIRST_SEED + (KILLS or 1))))
def test_whatever_is_killed_on_several_machines_the_run_ends_with_its_ledger_closed(
    mark: str, seed: int
) -> None:
    """Servers, and the machine that has brought one, are killed one after the other, perhaps while the run begins."""
    chance = random.Random(seed)
    served, (stays, brings) = served_by_two()
    for victim in chance.sample(["server 0", "server 1", "machine"], chance.randint(1, 3)):
        process_id = brings.pid if victim == "machine" else processes(mark).get(victim)
        if process_id is not None:
            os.kill(process_id, signal.SIGKILL)
        time.sleep(3 * chance.random())
    Path("go").touch()
    served.summary()
    assert output(stays)[0] == 0
    output(brings)
    await_that(lambda: not processes(mark), "all processes have ended")
    require_closed(summary())

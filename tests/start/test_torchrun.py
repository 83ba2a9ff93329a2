"""`torchrun -m paceline.join`: torchrun starts the processes of a job, on one machine or on two."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from benchmarks.overlap.namespaces import why_not
from paceline.start.beside import serving
from tests.support.live import await_that, mark, processes, run_program, start_program
from tests.support.marks import chaos
from tests.support.scheduled import SCRIPT, assert_trained_as_alone, program, summary
from tests.support.served import two_machines

__all__ = ["mark", "two_machines"]

ROOT = Path(__file__).parents[2]


def torchrun(*arguments: str) -> subprocess.Popen[str]:
    """Start torchrun, which runs the script in the current directory."""
    Path("train.py").write_text(SCRIPT)
    return start_program("-m", "torch.distributed.run", *arguments)


def output(program: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a program, and return its exit code and its output."""
    stdout, stderr = program.communicate(timeout=120)
    return program.returncode, stdout + stderr


def test_the_processes_of_a_job_train_what_one_process_trains(mark: str) -> None:
    """`paceline join --slurm` does the same, except for how a process finds the one that serves the job."""
    job = torchrun(
        *("--nproc-per-node", "2", "-m", "paceline.join", "--sync", "bsp", "--run-dir", "run"),
        *("train.py", "24"),
    )
    code, said = output(job)

    assert code == 0, said
    assert all(f"worker {rank} was started as rank {rank}" in said for rank in range(2)), said
    assert_trained_as_alone("run", 24)


@pytest.mark.thorough
@pytest.mark.usefixtures("machines_alone")
@pytest.mark.skipif(bool(why_not()), reason=f"creating network namespaces needs {why_not()}")
def test_the_commands_of_the_documentation_train_what_one_process_trains(
    mark: str, two_machines: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = ROOT.joinpath("docs", "how-to", "torchrun.md").read_text()
    [first] = re.findall(r"```sh\n# torchrun on 10.0.0.1\n(.*?)```", page, re.DOTALL)
    [second] = re.findall(r"```sh\n# torchrun on 10.0.0.2\n(.*?)```", page, re.DOTALL)
    [secret] = re.findall(r"```sh\n(\(umask.*?)```", page, re.DOTALL)
    program("torchrun", "torch.distributed.run", monkeypatch)
    Path("train.py").write_text(SCRIPT.replace("int(sys.argv[1])", "24"))
    subprocess.run(secret, shell=True, check=True)
    # The file in the examples runs the same command.
    monkeypatch.setenv("PACELINE_OPTIONS", "--sync bsp")
    assert second.split()[0] == "torchrun"
    commands = [["sh", "-c", first], [str(ROOT / "examples" / "cluster" / "torchrun.sh"), "1", "train.py"]]
    agents = [
        subprocess.Popen(
            [*prefix, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for prefix, command in zip(two_machines.values(), commands, strict=True)
    ]
    ends = [output(agent) for agent in agents]

    assert [code for code, _ in ends] == [0, 0], ends
    said = "".join(text for _, text in ends)
    assert all(f"worker {rank} was started as rank {rank}" in said for rank in range(4)), said
    [run] = Path("runs").iterdir()
    assert_trained_as_alone(str(run), 24)
    key = Path("paceline-secret").read_text().strip()
    assert not [file for file in run.iterdir() if key.encode() in file.read_bytes()]
    assert key not in said


@pytest.mark.thorough
def test_the_others_continue_without_a_worker_that_is_killed(mark: str) -> None:
    job = torchrun(
        *("--nproc-per-node", "2", "-m", "paceline.join", "--sync", "asp", "--run-dir", "run"),
        *("train.py", "300", "0.01"),
    )
    await_that(lambda: Path("run", "trace-shard-0.jsonl").exists(), "training has begun")
    os.kill(processes(mark)["worker 1"], signal.SIGKILL)
    code, said = output(job)

    assert code == 0, said
    assert summary("run")["lost_workers"] == [1]
    assert "worker 0 was started as rank 0" in said


@pytest.mark.thorough
def test_the_process_that_serves_a_job_counts_one_ctrl_c_once(mark: str) -> None:
    """torchrun signals the process group of rank 0, and rank 0 then interrupts the process that serves the job."""
    with serving(["--run-dir", "run"], {}) as (_, announced):
        assert announced() is not None
        await_that(lambda: Path("run", "running.json").exists(), "the run says which process serves it")
        launcher = json.loads(Path("run", "running.json").read_text())["launcher"]["process"]["process_id"]
        assert os.getpgid(launcher) != os.getpgrp()
        [ignored] = re.findall(r"SigIgn:\s+(\w+)", Path(f"/proc/{launcher}/status").read_text())
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            assert int(ignored, 16) & (1 << (number - 1)), number


@pytest.mark.thorough
def test_torchrun_starts_a_failed_job_again_as_another_job(mark: str) -> None:
    job = torchrun(
        *("--nproc-per-node", "1", "--max-restarts", "1", "-m", "paceline.join"),
        *("train.py", "2", "0", "fail"),
    )
    code, said = output(job)

    assert code == 0, said
    assert "RuntimeError: the first attempt" in said, said
    summaries = sorted(Path("runs").glob("*/summary.json"))
    assert sorted(summary(str(path.parent))["ended"] for path in summaries) == ["failed", "finished"]


@pytest.mark.parametrize(
    ("variables", "options", "words"),
    [
        ({}, [], "torchrun has not started this process"),
        ({"WORLD_SIZE": "2"}, [], "the secret of the job is unknown. Write a secret to a file"),
        ({}, ["--sync", "bps"], "'bps'"),
        *chaos(({}, ["--workers", "4:2"], "which is more than the largest number, 2")),
    ],
)
def test_mistakes_are_named_before_anything_starts(
    variables: dict[str, str], options: list[str], words: str, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("train.py").write_text(SCRIPT)
    if variables or options:
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "1")
        for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"):
            monkeypatch.setenv(name, "0")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "29500")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        for name, text in variables.items():
            monkeypatch.setenv(name, text)

    ended = run_program("-m", "paceline.join", *options, "train.py", "1")

    assert ended.returncode == 2
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not Path("runs").exists()

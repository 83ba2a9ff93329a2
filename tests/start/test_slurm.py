"""`paceline join --slurm`: the tasks of a job step, in a real Slurm cluster with two nodes on this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.live import await_that, mark, processes, run_program
from tests.support.marks import chaos
from tests.support.scheduled import SCRIPT, assert_trained_as_alone, program, summary
from tests.support.slurm import EXAMPLES, MISSING, PROGRAMS, Batch, Cluster, call, cluster

__all__ = ["cluster", "mark"]


pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        bool(MISSING or os.geteuid()),
        reason=f"a Slurm cluster needs root and these programs, some of which are missing: {', '.join(PROGRAMS)}",
    ),
]


@pytest.fixture(autouse=True)
def options(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the nodes stand for no addresses, so the tests choose the loopback interface."""
    monkeypatch.setenv("PACELINE_OPTIONS", "--sync bsp --listen 127.0.0.1")
    program("paceline", "paceline", monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.thorough
@pytest.mark.usefixtures("cluster")
def test_two_nodes_train_what_one_process_trains(mark: str) -> None:
    job = Batch("slurm.sbatch", "24", options=("--ntasks-per-node=1",))

    assert job.await_end() == "COMPLETED", job.output
    assert all(f"worker {rank} was started as rank {rank}" in job.output for rank in range(2)), job.output
    assert_trained_as_alone(f"runs/slurm-{job.id}-0", 24)
    assert not list(Path("runs").rglob("*secret*"))


@pytest.mark.thorough
@pytest.mark.usefixtures("cluster")
def test_a_heterogeneous_job_trains_what_one_process_trains(mark: str) -> None:
    job = Batch("slurm-heterogeneous.sbatch", "24", options=("--nodelist=n2", ":", "--nodelist=n1"))

    assert job.await_end() == "COMPLETED", job.output
    assert all(f"worker {rank} was started as rank {rank}" in job.output for rank in range(3)), job.output
    assert_trained_as_alone(f"runs/slurm-{job.id}", 24)


@pytest.mark.thorough
@pytest.mark.usefixtures("cluster")
def test_the_others_continue_without_a_task_that_is_killed(mark: str) -> None:
    job = Batch("slurm.sbatch", "400", "0.01", options=("--ntasks-per-node=1",))
    await_that(lambda: Path(f"runs/slurm-{job.id}-0", "trace-shard-0.jsonl").exists(), "training has begun")
    os.kill(job.tasks(mark)["1"], signal.SIGKILL)

    assert job.await_end() == "COMPLETED", job.output
    assert summary(f"runs/slurm-{job.id}-0")["lost_workers"] == [1]
    assert "worker 0 was started as rank 0" in job.output


@pytest.mark.thorough
def test_workers_leave_when_slurm_warns_and_a_requeued_job_is_another_run(
    cluster: Cluster, mark: str
) -> None:
    job = Batch("slurm.sbatch", "2000", "0.01", "loader", options=("--ntasks-per-node=1",))
    await_that(lambda: Path(f"runs/slurm-{job.id}-0", "trace-shard-0.jsonl").exists(), "training has begun")
    call("scancel", "--signal=TERM", job.id)  # as --signal=TERM@120 does two minutes before the end
    await_that(lambda: Path(f"runs/slurm-{job.id}-0", "summary.json").exists(), "the first run has ended")
    first = summary(f"runs/slurm-{job.id}-0")

    assert (sorted(first["left"]), first["lost_workers"]) == ([0, 1], []), job.output
    hasten(job, cluster)
    await_that(lambda: Path(f"runs/slurm-{job.id}-1").exists(), "the job has begun again")
    assert job.await_end() == "COMPLETED", job.output
    second = summary(f"runs/slurm-{job.id}-1")
    assert (second["left"], second["lost_workers"]) == ([], [])


@pytest.mark.thorough
def test_a_requeued_job_resumes_its_run_if_all_attempts_have_one_run_directory(
    cluster: Cluster, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_OPTIONS", f"{os.environ['PACELINE_OPTIONS']} --checkpoint-every 1")
    text = (EXAMPLES / "slurm.sbatch").read_text()
    assert "-${SLURM_RESTART_COUNT:-0}\n" in text
    Path("resuming.sbatch").write_text(text.replace("-${SLURM_RESTART_COUNT:-0}\n", "\n"))
    file = str(Path("resuming.sbatch").absolute())
    job = Batch(file, "2000", "0.01", options=("--ntasks-per-node=1",))
    run = Path(f"runs/slurm-{job.id}")
    await_that(lambda: list(run.rglob("manifest.json")), "the first attempt has written a checkpoint")
    call("scancel", "--signal=TERM", job.id)
    hasten(job, cluster)
    await_that(lambda: (run / "before").exists(), "the job goes on")

    assert job.await_end() == "COMPLETED", job.output
    assert summary(str(run))["left"] == []
    assert not list(Path("runs").rglob("*secret*"))


def hasten(job: Batch, cluster: Cluster) -> None:
    """Wait until a job has been put back into the queue, and let it begin soon."""
    await_that(lambda: job.state == "PENDING", "the job waits to begin again", every_s=0.2)
    await_that(lambda: not list(cluster.folder.glob("spool-*/job*")), "Slurm has cleaned up the first run")
    # Otherwise, it begins after two minutes; a node refuses it in the second in which it has ended there.
    call("scontrol", "update", f"JobId={job.id}", "StartTime=now+3seconds")


@pytest.mark.thorough
@pytest.mark.parametrize("file", ["slurm.sbatch", *chaos("slurm-heterogeneous.sbatch")])
def test_a_job_that_is_cancelled_leaves_no_secret(file: str, cluster: Cluster, mark: str) -> None:
    options = {
        "slurm.sbatch": ("--ntasks-per-node=1",),
        "slurm-heterogeneous.sbatch": ("--nodelist=n2", ":", "--nodelist=n1"),
    }
    job = Batch(file, "4000", "0.01", options=options[file])
    await_that(lambda: list(Path("runs").rglob("trace-shard-0.jsonl")), "training has begun")
    assert list(Path("runs").rglob("*secret*"))
    call("scancel", job.id)

    assert job.await_end() == "CANCELLED", job.output
    await_that(lambda: not list(Path("runs").rglob("*secret*")), "the secret is removed")
    await_that(lambda: not list(cluster.folder.glob("spool-*/job*")), "Slurm has cleaned up")


@pytest.mark.chaos
@pytest.mark.usefixtures("cluster")
def test_a_job_whose_servers_are_lost_ends_and_says_so(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_OPTIONS", f"{os.environ['PACELINE_OPTIONS']} --wait 3")
    job = Batch("slurm.sbatch", "2000", "0.01", options=("--ntasks-per-node=1",))
    await_that(lambda: Path(f"runs/slurm-{job.id}-0", "trace-shard-0.jsonl").exists(), "training has begun")
    os.kill(job.tasks(mark)["0"], signal.SIGKILL)

    assert job.await_end() == "FAILED", job.output
    assert "the connection to the coordinator was lost" in job.output
    assert "gave up after 3 s" in job.output


@pytest.mark.chaos
def test_the_others_continue_when_a_node_fails(cluster: Cluster, mark: str) -> None:
    job = Batch("slurm.sbatch", "4000", "0.01", options=("--ntasks-per-node=1",))
    await_that(lambda: Path(f"runs/slurm-{job.id}-0", "trace-shard-0.jsonl").exists(), "training has begun")
    cluster.fail_node(job.tasks(mark)["1"])

    assert job.await_end() == "COMPLETED", job.output
    assert summary(f"runs/slurm-{job.id}-0")["lost_workers"] == [1]
    assert "Node failure on n2" in job.output


FAKE = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
}


@pytest.mark.parametrize(
    ("variables", "arguments", "words"),
    [
        ({}, ["--slurm"], "this process is not a task of a Slurm job step. Use, for example, `srun"),
        (FAKE, ["--slurm"], "the secret of the job is unknown. Write a secret to a file"),
        (FAKE, ["--slurm", "--servers", "0"], "servers is 0"),
        (
            {**FAKE, "SLURM_PROCID": "0", "PACELINE_SECRET": "0" * 64},
            ["--slurm"],
            "the host 'n1' cannot be reached from this machine",
        ),
    ],
)
def test_mistakes_are_named_before_anything_starts(
    variables: dict[str, str], arguments: list[str], words: str, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("train.py").write_text(SCRIPT)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    ended = run_program("-m", "paceline", "join", *arguments, "train.py", "1")

    assert ended.returncode == 2
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert processes(mark) == {}

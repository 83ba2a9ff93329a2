"""A real Slurm cluster with two nodes on this machine, and batch jobs on it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live import MARK, await_that
from tests.support.scheduled import SCRIPT, program

__all__ = ["EXAMPLES", "MISSING", "Batch", "cluster"]

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue", "openssl")

MISSING = [program for program in PROGRAMS if shutil.which(program) is None]

CONFIGURATION = """
ClusterName=paceline
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=5
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={n1} CPUs=4
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={n2} CPUs=4
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class Cluster:
    """A Slurm cluster with two nodes, n1 and n2, on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("munge", "state", "spool-n1", "spool-n2"):
            (folder / name).mkdir(mode=0o700)
        controller, n1, n2 = free_ports(3)
        configuration = CONFIGURATION.format(folder=folder, controller=controller, n1=n1, n2=n2)
        (folder / "slurm.conf").write_text(configuration)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)

    def start(self) -> None:
        """Start the programs of the cluster, and wait until both nodes are idle."""
        munge = self.folder / "munge"
        self.run(
            "munged",
            *("--foreground", "--force", f"--socket={munge}/socket", f"--key-file={munge}/key"),
            *(f"--log-file={munge}/log", f"--pid-file={munge}/pid", f"--seed-file={munge}/seed"),
        )
        await_that((munge / "socket").exists, "munged listens")
        conf = str(self.folder / "slurm.conf")
        self.run("slurmctld", "-D", "-i", "-f", conf)
        for node in ("n1", "n2"):
            self.run("slurmd", "-D", "-f", conf, "-N", node)
        await_that(lambda: call("sinfo", "-h", "-o", "%T").split() == ["idle"], "the nodes are idle")

    def fail_node(self, task: int) -> None:
        """Kill all processes of n2, on which one task runs."""
        step = int(Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()[1])  # the task's parent
        for process in (self.programs["slurmd-3"].pid, step, task):
            os.kill(process, signal.SIGKILL)

    def run(self, *command: str) -> None:
        # The programs are not marked, because they outlive a test.
        environment = {name: text for name, text in os.environ.items() if name != MARK}
        name = f"{command[0]}-{len(self.programs)}"
        with open(self.folder / f"{name}.log", "wb") as log:
            self.programs[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def stop(self) -> None:
        for each in reversed(self.programs.values()):
            each.terminate()
        for each in self.programs.values():
            try:
                each.wait(10)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()


def call(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    return ended.stdout.strip()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A running Slurm cluster, whose programs end after the tests."""
    with tempfile.TemporaryDirectory(prefix="paceline-slurm-") as name, pytest.MonkeyPatch.context() as patch:
        cluster = Cluster(Path(name))
        patch.setenv("SLURM_CONF", str(cluster.folder / "slurm.conf"))
        try:
            cluster.start()
            yield cluster
        finally:
            call("scancel", "--user", "root", "--full")
            deadline_s = time.monotonic() + 20.0
            while call("squeue", "-h") and time.monotonic() < deadline_s:
                time.sleep(0.1)
            cluster.stop()


class Batch:
    """A job that sbatch has submitted, with a file of the examples."""

    def __init__(
        self, file: str, *arguments: str, options: tuple[str, ...] = (), script: str = SCRIPT
    ) -> None:
        Path("train.py").write_text(script)
        submitted = subprocess.run(
            ["sbatch", "--parsable", *options, EXAMPLES / file, "train.py", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert submitted.returncode == 0, submitted.stderr
        self.id = submitted.stdout.strip()

    @property
    def output(self) -> str:
        file = Path(f"slurm-{self.id}.out")
        return file.read_text() if file.exists() else ""

    def await_end(self) -> str:
        """Wait until the job has ended, and return its state."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        await_that(lambda: self.state in ends, "the job has ended", every_s=0.2)  # each look is a program
        return self.state

    @property
    def state(self) -> str:
        words = call("scontrol", "--oneliner", "show", "job", self.id).split()
        return next((word.removeprefix("JobState=") for word in words if word.startswith("JobState=")), "")

    def tasks(self, mark: str) -> dict[str, int]:
        """The rank of each task -> its process."""
        found: dict[str, int] = {}
        for folder in Path("/proc").iterdir():
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in variables and b"join\0--slurm" in command and b"-m\0" in command:
                [rank] = [v.split(b"=")[1] for v in variables if v.startswith(b"SLURM_PROCID=")]
                found[rank.decode()] = int(folder.name)
        return found


@pytest.fixture(autouse=True)
def options(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the nodes stand for no addresses, so the tests choose the loopback interface."""
    monkeypatch.setenv("PACELINE_OPTIONS", "--sync bsp --listen 127.0.0.1")
    program("paceline", "paceline", monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

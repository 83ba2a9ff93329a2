"""Machines that join a run: `paceline serve` and `paceline join`, as separate programs on the loopback interface."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec
import pytest
from safetensors.torch import load_file

from benchmarks.overlap.namespaces import NetworkLink, network, why_not
from paceline.core.messages import ClockOffset
from paceline.report.timeline import read_timeline
from paceline.sync.events import PushReceived, WorkerJoined, WorkerLost
from paceline.sync.ticks import TICKS_PER_S, in_ticks
from paceline.trace import read_run, replay
from paceline.trace.clocks import read_clocks
from paceline.trace.records import read_records
from paceline.wire.secret import new_secret, write_secret

from .live import await_that, chaos, mark, processes, run_program, start_program
from .test_secure import relay

__all__ = ["mark"]

SCRIPT = """
import sys
import time
import torch
import paceline

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for epoch in paceline.epochs(int(sys.argv[1])):
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
print(f"worker {paceline.worker_index()} has finished")
"""

# Each process trains until the file "enough" exists.
ENDLESS_SCRIPT = f"""
import os
from pathlib import Path
{SCRIPT.rpartition("        time.sleep")[0]}
        Path(f"stepped-{{os.getpid()}}").touch()
        time.sleep(0.01)
        if Path("enough").exists():
            break
    else:
        continue
    break
print(f"worker {{paceline.worker_index()}} has finished")
"""


def trained() -> int:
    """Return the number of processes that have trained."""
    return len(list(Path().glob("stepped-*")))


class Served:
    """A run that `paceline serve` has started in the current directory."""

    def __init__(self, *options: str) -> None:
        Path("train.py").write_text(SCRIPT)
        self._messages = open("serve.log", "w+")  # noqa: SIM115 - closed by `summary`
        self.program = start_program(
            "-m", "paceline", "serve", "--run-dir", "run", *options, stderr=self._messages
        )
        await_that(lambda: "paceline join" in self.messages, "serve says how to join")
        [self.address] = re.findall(r"paceline join (\S+) ", self.messages)
        self.port = self.address.rpartition(":")[2]
        self.secret = Path("run", "secret").read_text().strip()

    @property
    def messages(self) -> str:
        """What the program has written to standard error."""
        return Path("serve.log").read_text()

    def join(
        self,
        *arguments: str,
        secret: str | None = None,
        options: Sequence[str] = (),
        address: str = "",
        prefix: Sequence[str] = (),
        stderr: int | IO[str] = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start `paceline join`, perhaps in another network namespace."""
        os.environ["PACELINE_SECRET"] = self.secret if secret is None else secret
        command = ["-m", "paceline", "join", *options, address or self.address, "train.py", *arguments]
        try:
            return start_program(*command, prefix=prefix, stderr=stderr)
        finally:
            del os.environ["PACELINE_SECRET"]

    def wrong_secret(self) -> str:
        """Return the name of a file with the secret of another run."""
        write_secret(new_secret(), Path("wrong"))
        return "wrong"

    def failure(self, code: int = 1) -> str:
        """Wait until the run has failed with this exit code, and return its messages."""
        self.program.communicate(timeout=120)
        self._messages.close()
        assert self.program.returncode == code
        return self.messages

    def summary(self) -> dict[str, object]:
        """Wait until the run has finished, and return its summary."""
        stdout, _ = self.program.communicate(timeout=120)
        self._messages.close()
        assert self.program.returncode == 0, self.messages + stdout
        found: dict[str, object] = json.loads(Path("run", "summary.json").read_text())
        return found


def output(program: subprocess.Popen[str], timeout_s: float = 120.0) -> tuple[int, str, str]:
    """Wait for a program, and return its exit code and its output."""
    stdout, stderr = program.communicate(timeout=timeout_s)
    return program.returncode, stdout, stderr


@contextlib.contextmanager
def tunnel(port: int) -> Iterator[int]:
    """Return another port, whose connections are passed on to this one, as `ssh -L` does."""

    def pass_on(inner: socket.socket) -> None:
        with inner, socket.create_connection(("127.0.0.1", port)) as outer:
            back = threading.Thread(target=relay, args=(outer, inner, bytearray()))
            back.start()
            relay(inner, outer, bytearray())
            back.join()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=pass_on, args=(entrance.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as entrance:
        threading.Thread(target=accept, daemon=True).start()
        yield entrance.getsockname()[1]
        entrance.shutdown(socket.SHUT_RDWR)


def listening_ports(processes: Sequence[int]) -> list[int]:
    """Return the TCP ports on which any of these processes listens, in order."""
    ports: dict[str, int] = {}  # inode of each listening socket -> its port
    for table in ("tcp", "tcp6"):
        if (path := Path("/proc/net", table)).exists():
            for line in path.read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    ports[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    held = {
        os.readlink(descriptor).removeprefix("socket:[").removesuffix("]")
        for process in processes
        for descriptor in Path(f"/proc/{process}/fd").iterdir()
        if descriptor.is_symlink()
    }
    return sorted(port for inode, port in ports.items() if inode in held)


def assert_equal(one: str, other: str) -> None:
    """Check that two files contain the same weights."""
    weights, expected = load_file(one), load_file(other)
    assert weights.keys() == expected.keys()
    assert all(bool((weights[name] == expected[name]).all()) for name in weights)


# As sitecustomize.py, it lets every process of a machine read a clock with an offset and a drift.
OTHER_CLOCK = """
import os
import time

read_ns = time.monotonic_ns
offset_ns, drift_ppm = map(int, os.environ.get("TEST_CLOCK", "0 0").split())
time.monotonic_ns = lambda: (now_ns := read_ns()) + offset_ns + now_ns * drift_ppm // 1_000_000
time.monotonic = time.perf_counter = lambda: time.monotonic_ns() / 1e9
"""


def assert_timelines_agree(folders: Sequence[str]) -> None:
    """Check that pushes arrive after they were sent, and answers after that, within the stated bounds."""
    for folder in folders:
        for path in Path(folder).glob("worker-*.jsonl"):
            path.rename(Path("run", path.name))
    clocks = read_clocks(Path("run"))
    records = read_records(Path("run"))
    arrived = {
        (event.worker, event.iteration): event.now_ticks
        for entry in read_run(Path("run"))[0].entries
        if isinstance(event := entry.event, PushReceived)
    }
    assert len(arrived) == sum(map(len, records)) > 0
    for worker, each in enumerate(records):
        for record in each:
            assert isinstance(record.machine, int)
            clock = clocks[record.machine]
            pushed, answered = (
                clock.on_coordinator(in_ticks(at_s)) for at_s in (record.pushed_s, record.answered_s)
            )
            arrived_ticks = arrived[worker, record.iteration]
            assert pushed.ticks - pushed.bound_ticks <= arrived_ticks <= answered.ticks + answered.bound_ticks
    offsets = [
        msgspec.json.decode(line, type=ClockOffset)
        for path in Path("run").glob("clock-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert min(offset.bound_ticks for offset in offsets) < in_ticks(0.001)
    assert read_timeline(Path("run")).bound_s > 0


def test_two_machines_train_what_one_machine_trains(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their clocks differ by a minute, and drift apart. One of them reaches the run through a tunnel."""
    Path("clocks").mkdir()
    Path("clocks", "sitecustomize.py").write_text(OTHER_CLOCK)
    monkeypatch.setenv("PYTHONPATH", f"{Path('clocks').absolute()}:{os.environ['PYTHONPATH']}")
    served = Served("--workers", "3", "--servers", "2")
    monkeypatch.setenv("TEST_CLOCK", f"{30 * TICKS_PER_S} 100")
    first = served.join("2", options=["-n", "2", "--run-dir", "first"])
    monkeypatch.setenv("TEST_CLOCK", f"{-30 * TICKS_PER_S} -100")
    with tunnel(int(served.port)) as port:
        second = served.join("2", options=["--run-dir", "second"], address=f"127.0.0.1:{port}")
        monkeypatch.delenv("TEST_CLOCK")
        codes = [output(first), output(second)]
    summary = served.summary()
    alone = run_program(
        *("-m", "paceline", "run", "-n", "3", "--servers", "2", "--run-dir", "alone", "train.py", "2")
    )

    assert [code for code, *_ in codes] == [0, 0], codes
    shown = "".join(stdout for _, stdout, _ in codes)
    assert "worker 0 has finished" in shown
    assert (summary["workers"], summary["samples"], summary["lost_workers"]) == (3, 192, [])
    assert alone.returncode == 0, alone.stderr
    assert_equal("run/weights.safetensors", "alone/weights.safetensors")
    assert_timelines_agree(["first", "second"])


@pytest.mark.usefixtures("machines_alone")
@pytest.mark.skipif(bool(why_not()), reason=f"creating network namespaces needs {why_not()}")
def test_machines_on_a_network(mark: str) -> None:
    with network(2, NetworkLink()) as machines:
        served = Served("--workers", "2", "--servers", "2", "--listen", "0.0.0.0")
        address = f"{machines.host}:{served.port}"
        joined = [served.join("2", address=address, prefix=machine.prefix) for machine in machines.machines]
        codes = [output(program) for program in joined]
        summary = served.summary()
    alone = run_program("-m", "paceline", "run", "-n", "2", "--run-dir", "alone", "train.py", "2")

    assert [code for code, *_ in codes] == [0, 0], codes
    assert (summary["samples"], summary["lost_workers"]) == (192, [])
    assert alone.returncode == 0, alone.stderr
    assert_equal("run/weights.safetensors", "alone/weights.safetensors")


def test_anybody_with_the_secret_can_watch_a_run(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served("--workers", "2", "--servers", "2")
    joined = [served.join("60", "0.03"), served.join("60", "0.03")]
    await_that(lambda: Path("run", "trace-shard-0.jsonl").exists(), "training has begun")
    wrong = run_program("-m", "paceline", "status", served.address, "--secret-file", served.wrong_secret())
    monkeypatch.setenv("PACELINE_SECRET", served.secret)
    watched = run_program("-m", "paceline", "status", served.address, "--json")
    shown = run_program("-m", "paceline", "status", served.address)
    listening = listening_ports([served.program.pid, *processes(mark).values()])
    codes = [output(program)[0] for program in joined]
    summary = served.summary()

    assert (codes, summary["samples"], summary["lost_workers"]) == ([0, 0], 60 * 96, [])
    assert listening == [int(served.port)]
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "Traceback" not in wrong.stderr
    assert watched.returncode == 0, watched.stderr
    state = json.loads(watched.stdout)
    assert [worker["worker"] for worker in state["workers"]] == [0, 1]
    assert {worker["state"] for worker in state["workers"]} <= {"computing", "waiting", "pulling"}
    assert [machine["machine"] for machine in state["machines"]] == ["127.0.0.1", "127.0.0.1 (2)"]
    assert "bsp, 2 workers, 2 servers" in shown.stdout
    names = {"this machine", "127.0.0.1", "127.0.0.1 (2)"}
    links = {(link["sender"], link["receiver"]): link for link in state["links"]}
    assert set(links) == {
        (a, b) for a in names for b in names if (a == "this machine") != (b == "this machine")
    }
    assert all(link["total_bytes"] > 1000 and link["bytes_per_s"] > 0 for link in links.values())


@pytest.mark.usefixtures("machines_alone")
@pytest.mark.skipif(bool(why_not()), reason=f"creating network namespaces needs {why_not()}")
def test_a_link_that_is_too_slow_for_the_model_is_reported_with_the_arithmetic(mark: str) -> None:
    with network(1, NetworkLink("20mbit")) as machines:
        served = Served("--workers", "1", "--listen", "0.0.0.0")
        large = SCRIPT.replace("Linear(6, 8)", "Linear(6, 8000)").replace("8, 1)", "8000, 1)")
        Path("train.py").write_text(large.replace("lr=0.01", "lr=1e-6"))
        address = f"{machines.host}:{served.port}"
        joined = output(served.join("2", address=address, prefix=machines.machines[0].prefix))
        summary = served.summary()

    assert joined[0] == 0, joined
    faults = str(summary["faults"])
    found = re.search(r"a gradient of ([\d.]+) MB leaves at ([\d.]+) MB/s, which takes ([\d.]+) s", faults)
    assert found is not None, faults
    size_mb, rate_mb, time_s = map(float, found.groups())
    assert 0.24 < size_mb < 0.28  # 64,001 parameters
    assert 1.0 < rate_mb < 10.0  # 20 Mbit/s are 2.5 MB/s, but a burst of 0.13 MB is not delayed
    assert time_s == pytest.approx(size_mb / rate_mb, rel=0.3)


@pytest.mark.usefixtures("machines_alone")
@pytest.mark.skipif(bool(why_not()), reason=f"creating network namespaces needs {why_not()}")
def test_the_others_continue_without_a_machine_whose_link_swallows_everything(mark: str) -> None:
    with network(2, NetworkLink()) as machines:
        served = Served("--workers", "2", "--listen", "0.0.0.0")
        address = f"{machines.host}:{served.port}"
        stays, silent = (
            served.join("60", "0.01", address=address, prefix=machine.prefix) for machine in machines.machines
        )
        await_that(lambda: Path("run", "trace-shard-0.jsonl").exists(), "training has begun")
        _, _, _, name = machines.machines[1].prefix
        subprocess.run(["ip", "-n", name, "link", "set", "eth0", "down"], check=True)
        code, _, stderr = output(stays)
        summary = served.summary()
        silent.kill()
        silent.communicate()

    assert code == 0, stderr
    [loss] = summary["losses"].values()  # type: ignore[attr-defined]
    assert "no heartbeat of machine" in loss


def test_what_the_door_refuses(mark: str) -> None:
    served = Served("--workers", "1")
    wrong = output(served.join("1", secret="0" * 64))
    many = output(served.join("1", options=["-n", "2"]))
    missing = output(served.join("1", secret=""))
    code, *_ = output(served.join("1"))
    summary = served.summary()

    assert wrong[0] == 2
    assert "its secret is another one" in wrong[2]
    assert many[0] == 2
    assert "2 workers cannot join, because the run has at most 1 workers" in many[2]
    assert missing[0] == 2
    assert "set PACELINE_SECRET" in missing[2]
    assert (code, summary["lost_workers"]) == (0, [])


def test_the_others_continue_without_a_machine_that_is_killed(mark: str) -> None:
    served = Served("--workers", "2", "--sync", "asp")
    stays = served.join("40")
    killed = served.join("40")
    await_that(lambda: Path("run", "trace-shard-0.jsonl").exists(), "training has begun")
    killed.kill()
    killed.communicate()
    code, _, stderr = output(stays)
    summary = served.summary()

    assert code == 0, stderr
    assert len(summary["lost_workers"]) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("sync", ["bsp", "elastic-bsp:lookahead=5", *chaos("asp", "ssp:staleness=2")])
def test_a_worker_joins_in_mid_run(sync: str, mark: str) -> None:
    served = Served("--workers", "1:2", "--servers", "2", "--sync", sync)
    first = served.join("60", "0.02")
    await_that(lambda: Path("run", "trace-shard-0.jsonl").exists(), "training has begun")
    second = served.join("60", "0.02")
    codes = [output(first), output(second)]
    summary = served.summary()

    assert [code for code, *_ in codes] == [0, 0], codes
    assert "worker 1 has finished" in codes[1][1]
    assert summary["samples"] == 60 * 96
    assert (summary["left"], summary["lost_workers"]) == ([], [])
    traces = read_run(Path("run"))
    joined = [
        entry.event
        for trace in traces
        for entry in trace.entries
        if isinstance(entry.event, WorkerJoined) and entry.event.worker == 1
    ]
    pushed = {
        event.worker
        for entry in traces[0].entries
        if isinstance(event := entry.event, PushReceived) and not event.empty
    }
    assert len({(event.iteration, event.count) for event in joined}) == 1
    assert pushed == {0, 1}
    assert all(replay(trace) == [] for trace in traces)


def test_a_run_pauses_while_it_has_too_few_workers(mark: str) -> None:
    served = Served("--workers", "2:3")
    stays, killed = served.join("60", "0.02"), served.join("60", "0.02")
    await_that(lambda: Path("run", "trace-shard-0.jsonl").exists(), "training has begun")
    killed.kill()
    killed.communicate()
    await_that(lambda: "it has 1 of at least 2 workers" in served.messages, "the run is paused")
    stays.terminate()
    left = output(stays)
    await_that(lambda: ", paused: 0 of at least 2 workers" in served.messages, "everybody has left")
    others = [served.join("60"), served.join("60")]
    codes = [output(program) for program in others]
    summary = served.summary()

    assert left[0] == 143, left
    assert [code for code, *_ in codes] == [0, 0], codes
    assert "the run continues" in served.messages
    assert len(summary["left"]) == len(summary["lost_workers"]) == 1  # type: ignore[arg-type]
    assert summary["samples"] == 60 * 96


def test_a_run_that_nobody_joins_gives_up(mark: str) -> None:
    served = Served("--workers", "2", "--wait", "0.1")

    assert "it has 0 of at least 2 workers, and has waited for 0.1 s" in served.failure()


def test_a_machine_says_that_its_run_was_interrupted_on_another_one(mark: str) -> None:
    served = Served("--workers", "1")
    joined = served.join("1000", "0.02")
    await_that(lambda: Path("run", "trace-shard-0.jsonl").exists(), "training has begun")
    served.program.send_signal(signal.SIGINT)
    served.failure(code=130)
    code, _, stderr = output(joined)

    assert code == 1
    assert "it was interrupted on the machine that serves it" in stderr


def test_the_others_continue_while_a_worker_is_stopped(mark: str) -> None:
    served = Served("--workers", "2", "--sync", "bsp")
    joined = [served.join("60", "0.01"), served.join("60", "0.01")]
    await_that(lambda: Path("run", "trace-shard-0.jsonl").exists(), "training has begun")
    stopped = processes(mark)["worker 1"]
    os.kill(stopped, signal.SIGSTOP)
    summary = served.summary()
    os.kill(stopped, signal.SIGCONT)
    ends = [output(program) for program in joined]

    assert summary["lost_workers"] == [1]
    assert "has been stopped for" in summary["losses"]["1"]  # type: ignore[index]
    assert "Traceback" not in ends[0][2]


def assert_nothing_late_was_applied(worker: int) -> None:
    """Check that a shard has received no push of a lost worker until it has joined again, and that it has."""
    present, joins = True, 0
    trace = read_run(Path("run"))[0]
    for event in (entry.event for entry in trace.entries):
        if isinstance(event, WorkerJoined | WorkerLost) and event.worker == worker:
            present = isinstance(event, WorkerJoined)
            joins += present
        assert present or not isinstance(event, PushReceived) or event.worker != worker
    assert joins == 2
    assert replay(trace) == []


def test_a_worker_that_was_stopped_joins_again(mark: str) -> None:
    served = Served("--workers", "1:2", "--sync", "bsp")
    Path("train.py").write_text(ENDLESS_SCRIPT)
    with open("join.log", "w") as messages:
        stays = served.join("1000000")
        await_that(lambda: "worker 0" in processes(mark), "worker 0 has been started")
        again = served.join("1000000", options=["--run-dir", "again"], stderr=messages)
    await_that(lambda: trained() == 2, "both train")
    stopped = processes(mark)["worker 1"]
    os.kill(stopped, signal.SIGSTOP)
    await_that(lambda: "worker 1 is taken out" in served.messages, "the worker is taken out")
    os.kill(stopped, signal.SIGCONT)
    await_that(lambda: trained() == 3, "the worker trains again")
    Path("enough").touch()
    ends = [output(stays), output(again)]
    summary = served.summary()

    said = Path("join.log").read_text()
    assert [code for code, *_ in ends] == [0, 0], said
    assert "worker 1 was taken out of the run: the process of worker 1 on machine" in said
    assert "worker 1 was cut off from the run; joining again in 1 s\njoined as worker 1" in said
    log = Path("again", "worker-1.log").read_text()
    assert "TakenOutError: worker 1 was taken out of the run: the process of worker 1" in log
    assert "worker 1 has finished" in log
    assert summary["lost_workers"] == [1]
    assert "has been stopped for" in summary["losses"]["1"]  # type: ignore[index]
    assert_nothing_late_was_applied(1)


@pytest.mark.usefixtures("machines_alone")
@pytest.mark.skipif(bool(why_not()), reason=f"creating network namespaces needs {why_not()}")
def test_a_machine_whose_link_was_down_joins_again(mark: str) -> None:
    with network(2, NetworkLink()) as machines, open("join.log", "w") as messages:
        served = Served("--workers", "1:2", "--listen", "0.0.0.0", "--sync", "asp")
        Path("train.py").write_text(ENDLESS_SCRIPT)
        address = f"{machines.host}:{served.port}"
        one, other = machines.machines
        stays = served.join("1000000", address=address, prefix=one.prefix)
        await_that(lambda: "worker 0" in processes(mark), "worker 0 has been started")
        again = served.join("1000000", address=address, prefix=other.prefix, stderr=messages)
        await_that(lambda: trained() == 2, "both train")
        link = ["ip", "-n", other.prefix[3], "link", "set", "eth0"]
        subprocess.run([*link, "down"], check=True)
        await_that(lambda: "worker 1 is taken out" in served.messages, "the machine is taken out")
        subprocess.run([*link, "up"], check=True)
        await_that(lambda: trained() == 3, "the machine trains again")
        Path("enough").touch()
        ends = [output(stays), output(again)]
        summary = served.summary()

    said = Path("join.log").read_text()
    assert [code for code, *_ in ends] == [0, 0], said
    assert "the connection to the coordinator was lost" in said
    assert said.count("joined as worker 1") == 2
    assert summary["lost_workers"] == [1]
    assert_nothing_late_was_applied(1)


@pytest.mark.parametrize(
    "pause_s", ["6", *chaos("0")]
)  # 6 s are longer than any silence that a machine may keep
def test_a_machine_that_is_taken_away_leaves_and_loses_nothing(pause_s: str, mark: str) -> None:
    served = Served("--workers", "2", "--sync", "asp")
    stays = served.join("40", "0.01")  # at least 10 s, so that it can use what the other one has left
    leaves = served.join("40", pause_s)
    await_that(lambda: Path("run", "trace-shard-0.jsonl").exists(), "training has begun")
    leaves.terminate()
    left_code, _, left_stderr = output(leaves)
    code, _, stderr = output(stays)
    summary = served.summary()

    assert (left_code, code) == (143, 0), left_stderr + stderr
    assert "Traceback" not in left_stderr
    assert summary["left"] in ([0], [1])
    assert summary["lost_workers"] == []
    assert summary["samples"] == 40 * 96


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1", "expected HOST:PORT"),
        ("127.0.0.1:99999", "expected HOST:PORT"),
        ("127.0.0.1:1", "gave up after 0 s"),
    ],
)
def test_an_address_that_cannot_be_reached(
    address: str, words: str, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("train.py").write_text(SCRIPT)
    monkeypatch.setenv("PACELINE_SECRET", "0" * 64)

    ended = run_program("-m", "paceline", "join", "--wait", "0", address, "train.py")

    assert ended.returncode in (1, 2)
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_options_after_the_address_are_not_taken_for_the_script(mark: str) -> None:
    ended = run_program("-m", "paceline", "join", "127.0.0.1:1", "--wait", "0", "train.py")

    assert ended.returncode == 2
    assert "paceline join --wait ... 127.0.0.1:1 SCRIPT" in " ".join(ended.stderr.split())


@pytest.fixture
def two_machines() -> Iterator[dict[str, list[str]]]:
    """Two machines with the addresses in docs/cluster.md: address -> the command that runs a program there."""
    names = {f"10.0.0.{number}": f"paceline-doc-{os.getpid()}-{number}" for number in (1, 2)}
    one, other = names.values()

    def do(command: str) -> None:
        subprocess.run(command.split(), check=True)

    try:
        for name in names.values():
            do(f"ip netns add {name}")
            do(f"ip -n {name} link set lo up")
        do(f"ip -n {one} link add eth0 type veth peer name eth0 netns {other}")
        for address, name in names.items():
            do(f"ip -n {name} addr add {address}/24 dev eth0")
            do(f"ip -n {name} link set eth0 up")
        yield {address: ["ip", "netns", "exec", name] for address, name in names.items()}
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.mark.usefixtures("machines_alone")
@pytest.mark.skipif(bool(why_not()), reason=f"creating network namespaces needs {why_not()}")
def test_the_commands_of_the_documentation(
    mark: str, two_machines: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = Path(__file__).parent.parent.joinpath("docs", "cluster.md").read_text()
    blocks = re.findall(r"```sh\n# on (\S+)\n(.*?)```", page, re.DOTALL)
    Path("train.py").write_text(SCRIPT.replace("int(sys.argv[1])", "2"))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "paceline"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def start(address: str, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*two_machines[address], "sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    serving, *joining = blocks[:3]
    served = start(*serving)
    await_that(Path("first-run", "secret").exists, "serve has written the secret")
    ends = [output(program) for program in [*(start(*block) for block in joining), served]]
    assert [code for code, *_ in ends] == [0, 0, 0], ends
    assert json.loads(Path("first-run", "summary.json").read_text())["samples"] == 192
    assert [command.split()[:2] for _, command in blocks[3:]] == [["paceline", "serve"]]

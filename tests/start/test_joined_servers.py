"""Servers on machines that join a run: `paceline serve --remote-servers` and `paceline join --servers`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from benchmarks.overlap.namespaces import NetworkLink, network, why_not
from paceline.cli import main
from paceline.core.coordinator import Coordinator
from paceline.core.layout import round_robin
from paceline.core.messages import TracePart
from paceline.core.requests import EndWithout, Fail, server_peer
from paceline.errors import ConfigurationError, ProtocolError
from paceline.run.job_options import make_job
from paceline.run.traces import PART_BYTES, TraceFiles
from paceline.sync.schedule import read_schedule
from paceline.trace import read_run, replay
from tests.support.live import assert_equal, await_that, listening_ports, mark, processes, run_program
from tests.support.marks import chaos
from tests.support.served import ENDLESS_SCRIPT, Served, await_training, enough, output

__all__ = ["mark"]

TWO_SERVERS = ("--servers", "2", "--remote-servers", "1")
BRINGS_ONE = ("--servers", "1", "--run-dir", "brought")


def begun() -> bool:
    """Return True if training has begun."""
    return Path("run", "trace-shard-0.jsonl").exists()


def train_alone(workers: int, servers: int, sync: str, epochs: str) -> None:
    """Train on one machine, in the run directory "alone"."""
    options = ("-n", str(workers), "--servers", str(servers), "--sync", sync, "--run-dir", "alone")
    alone = run_program("-m", "paceline", "run", *options, "train.py", epochs)
    assert alone.returncode == 0, alone.stderr


def test_the_result_is_that_of_a_run_with_all_servers_on_one_machine(mark: str) -> None:
    served = Served("--workers", "2", "--servers", "3", "--remote-servers", "2")
    joined = [served.join("4", options=["--servers", "1", "--run-dir", name]) for name in ("one", "other")]
    ends = [output(program) for program in joined]
    summary = served.summary()
    train_alone(2, 3, "bsp", "4")

    assert [code for code, *_ in ends] == [0, 0], ends
    assert "waiting for 2 workers, and 2 servers" in served.messages
    assert "brings server 1, reached at tls:127.0.0.1:" in ends[0][2] + ends[1][2]
    assert (summary["samples"], summary["lost_workers"], summary["faults"]) == (4 * 96, [], [])
    assert "findings" in summary
    assert_equal("run/weights.safetensors", "alone/weights.safetensors")
    traces = read_run(Path("run"))
    assert [trace.machine for trace in traces] in ([0, 1, 2, 0], [0, 2, 1, 0])
    assert all(replay(trace) == [] for trace in traces)


@pytest.mark.thorough
def test_a_machine_may_have_only_servers(mark: str) -> None:
    served = Served("--workers", "1", "--sync", "asp", *TWO_SERVERS, "--listen", "0.0.0.0")
    worker = served.join("4", address=f"127.0.0.1:{served.port}")
    await_that(lambda: "waiting for 1 server: paceline join --servers 1" in served.messages, "it waits")
    os.environ["PACELINE_SECRET"] = served.secret
    try:
        brings = run_program(
            *("-m", "paceline", "join", "--workers", "0", *BRINGS_ONE, f"127.0.0.1:{served.port}")
        )
    finally:
        del os.environ["PACELINE_SECRET"]
    code, _, stderr = output(worker)
    summary = served.summary()
    train_alone(1, 2, "asp", "4")

    assert (brings.returncode, code) == (0, 0), brings.stderr + stderr
    assert "only workers on this machine can use them" in brings.stderr
    assert summary["samples"] == 4 * 96
    assert_equal("run/weights.safetensors", "alone/weights.safetensors")


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_a_machine_with_servers_listens_on_one_port(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served("--workers", "1", "--servers", "3", "--remote-servers", "2", "--listen", "::1")
    Path("train.py").write_text(ENDLESS_SCRIPT)  # both machines listen until the run ends
    with open("join.log", "w") as messages:
        joined = served.join("1000000", options=["--servers", "2"], stderr=messages)
        await_that(begun, "training has begun")
    monkeypatch.setenv("PACELINE_SECRET", served.secret)
    state = json.loads(run_program("-m", "paceline", "status", served.address, "--json").stdout)
    shown = run_program("-m", "paceline", "status", served.address).stdout
    listening = listening_ports(mark)
    enough()
    code, *_ = output(joined)
    summary = served.summary()

    [port] = re.findall(r"brings servers 1, 2, reached at tls:\[::1\]:(\d+)\n", Path("join.log").read_text())
    assert (code, summary["lost_workers"]) == (0, [])
    assert listening == sorted([int(port), int(served.port)])
    [machine] = state["machines"]
    assert (machine["machine"], machine["servers"]) == ("::1", [1, 2])
    assert "1, 2" in shown
    # The worker uses no link between machines to reach the servers of its own one.
    assert {(link["sender"], link["receiver"]) for link in state["links"]} == {
        ("this machine", "::1"),
        ("::1", "this machine"),
    }


# A module that lets the first worker send the initial weights only when the server is dead that is to receive them.
TOO_LATE = """
import time
from pathlib import Path

from paceline.run.worker import WorkerSession

initialize = WorkerSession.initialize


def await_the_kill(*arguments):
    Path("connected").touch()
    while not Path("killed").exists():
        time.sleep(0.02)
    initialize(*arguments)


WorkerSession.initialize = await_the_kill
"""


@pytest.mark.parametrize("killed", ["server 1", *chaos("agent")])
@pytest.mark.thorough
def test_a_run_ends_when_it_loses_a_server_of_another_machine(killed: str, mark: str) -> None:
    """The first worker is lost as a consequence, but the failure of the run is that of the server."""
    Path("too_late.py").write_text(TOO_LATE)
    served = Served("--workers", "2", *TWO_SERVERS, "--import", "too_late")
    stays, brings = served.join("1000", "0.01"), served.join("1000", "0.01", options=BRINGS_ONE)
    await_that(Path("connected").exists, "the first worker is connected to the servers")
    os.kill(brings.pid if killed == "agent" else processes(mark)["server 1"], signal.SIGKILL)
    Path("killed").touch()
    messages = served.failure()
    ends = [output(stays), output(brings)]

    assert "server 1 on 127.0.0.1" in messages
    assert "the log of server 1 is on the machine 127.0.0.1" in messages
    assert ends[0][0] == 1
    assert "server 1 on 127.0.0.1" in ends[0][2]
    assert killed == "agent" or "server 1 failed: it was terminated by signal SIGKILL" in ends[1][2], ends[1]
    assert "Traceback" not in messages + ends[0][2] + ends[1][2]


@pytest.mark.parametrize("number", [signal.SIGTERM, *chaos(signal.SIGINT)])
def test_a_run_keeps_its_weights_when_a_machine_with_servers_is_asked_to_leave(
    number: signal.Signals, mark: str
) -> None:
    served = Served("--workers", "2", *TWO_SERVERS)
    stays, leaves = served.join("1000", "0.01"), served.join("1000", "0.01", options=BRINGS_ONE)
    await_training(2)  # every server has weights
    leaves.send_signal(number)
    messages = served.failure()
    ends = [output(stays), output(leaves)]

    assert [code for code, *_ in ends] == [1, 128 + number], ends
    assert "failed: its machine was asked to leave the run" in messages
    assert (
        "without server 1, a run in progress goes on from its newest checkpoint; if it has none, it saves its weights "
        "and ends" in ends[1][2]
    )
    assert Path("run", "weights.safetensors").exists(), messages


@pytest.mark.thorough
def test_another_machine_may_bring_a_server_until_the_run_begins(mark: str) -> None:
    served = Served("--workers", "2", *TWO_SERVERS)
    leaves = served.join("2", options=BRINGS_ONE)
    await_that(lambda: "server 1" in processes(mark), "the server has been started")
    many = output(served.join("2", options=["--servers", "1"]))
    leaves.terminate()
    left = output(leaves)
    await_that(lambda: "server 1 of machine 127.0.0.1 has left" in served.messages, "the server has left")
    ends = [output(program) for program in (served.join("2", options=BRINGS_ONE), served.join("2"))]
    summary = served.summary()

    assert many[0] == 2
    assert (
        "but the run needs no more servers: of its 2 servers, the machine that serves the run has 1"
        in many[2]
    )
    assert left[0] == 143, left
    assert [code for code, *_ in ends] == [0, 0], ends
    assert summary["samples"] == 2 * 96


@pytest.mark.thorough
def test_servers_that_are_lost_with_the_serving_machine_end(mark: str) -> None:
    served = Served("--workers", "1", *TWO_SERVERS)
    brings = served.join("1000", "0.01", options=BRINGS_ONE)
    await_that(begun, "training has begun")
    served.program.kill()
    served.failure(code=-signal.SIGKILL)
    code, _, stderr = output(brings)

    assert code == 1
    assert "the connection to the coordinator was lost" in stderr
    assert "joining again" not in stderr
    assert processes(mark) == {}


@pytest.mark.thorough
def test_a_server_of_another_machine_that_hangs_is_killed_after_the_timeout(mark: str) -> None:
    served = Served("--workers", "1", *TWO_SERVERS, "--stall-timeout", "4")
    brings = served.join("1000", "0.01", options=BRINGS_ONE)
    await_that(begun, "training has begun")
    os.kill(processes(mark)["server 1"], signal.SIGSTOP)
    messages = served.failure()
    code, *_ = output(brings)

    assert code == 1
    assert "The run is waiting for server 1" in messages
    assert "failed: it was terminated by signal SIGKILL: it had sent nothing for" in messages


@pytest.mark.chaos
def test_a_server_that_cannot_start_says_why_on_both_machines(
    mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("here").mkdir()
    Path("here", "our_models.py").touch()
    with monkeypatch.context() as context:
        context.setenv("PYTHONPATH", f"{Path('here').absolute()}:{os.environ['PYTHONPATH']}")
        served = Served("--workers", "1", *TWO_SERVERS, "--import", "our_models")
    code, _, stderr = output(served.join("1", options=BRINGS_ONE))
    served.program.send_signal(signal.SIGINT)
    messages = served.failure(code=130)

    assert code == 1
    assert "our_models" in stderr
    assert "server 1 of machine 127.0.0.1 has left before the run has begun" in messages


@pytest.mark.chaos
@pytest.mark.usefixtures("machines_alone")
@pytest.mark.skipif(bool(why_not()), reason=f"creating network namespaces needs {why_not()}")
def test_servers_on_the_machines_of_a_network(mark: str) -> None:
    with network(3, NetworkLink()) as machines:
        served = Served("--workers", "2", "--servers", "3", "--remote-servers", "2", "--listen", "0.0.0.0")
        address = f"{machines.host}:{served.port}"
        options = [["--servers", "1"], ["--servers", "1", "--listen", "0.0.0.0", "--port", "29601"]]
        brings = [
            served.join("2", address=address, prefix=machine.prefix, options=[*each, "--workers", "0"])
            for machine, each in zip(machines.machines, options, strict=False)
        ]
        options = [[], []]
        trains = [
            served.join("2", address=address, prefix=machine.prefix) for machine in machines.machines[1:]
        ]
        ends = [output(program) for program in [*brings, *trains]]
        summary = served.summary()
    train_alone(2, 3, "bsp", "2")

    assert [code for code, *_ in ends] == [0, 0, 0, 0], ends
    assert f"reached at tls:{machines.machines[1].host}:29601" in ends[1][2]
    assert (summary["samples"], summary["lost_workers"], summary["faults"]) == (192, [], [])
    assert_equal("run/weights.safetensors", "alone/weights.safetensors")


@pytest.mark.chaos
@pytest.mark.usefixtures("machines_alone")
@pytest.mark.skipif(bool(why_not()), reason=f"creating network namespaces needs {why_not()}")
def test_a_run_ends_when_the_link_of_a_machine_with_servers_swallows_everything(mark: str) -> None:
    with network(2, NetworkLink()) as machines:
        served = Served("--workers", "2", *TWO_SERVERS, "--listen", "0.0.0.0")
        address = f"{machines.host}:{served.port}"
        stays, silent = (
            served.join("1000", "0.01", address=address, prefix=machine.prefix, options=options)
            for machine, options in zip(machines.machines, [(), BRINGS_ONE], strict=True)
        )
        await_that(begun, "training has begun")
        link = ["ip", "-n", machines.machines[1].prefix[3], "link", "set", "eth0", "down"]
        subprocess.run(link, check=True)
        messages = served.failure()
        ends = [output(stays), output(silent)]

    assert "failed: no heartbeat of machine" in messages
    assert [code for code, *_ in ends] == [1, 1], ends
    assert "failed: no heartbeat of machine" in ends[0][2]
    assert "the connection to the coordinator was lost" in ends[1][2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--remote-servers", "1"], "remote_servers is 1 and servers is 1, but at least one server"),
        (["join", "--workers", "0", "127.0.0.1:1"], "this machine has nothing to do"),
        (["join", "--servers", "1", "127.0.0.1:1"], "the script is missing"),
        (
            ["join", "--port", "29601", "127.0.0.1:1", "train.py"],
            "only servers on this machine use --port",
        ),
        (
            ["join", "--servers", "-1", "127.0.0.1:1", "train.py"],
            "servers is -1, expected a whole number >= 0.",
        ),
    ],
)
def test_bad_input(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setenv("PACELINE_SECRET", "0" * 64)
    monkeypatch.setattr("sys.argv", ["paceline", *arguments])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert words in " ".join(said.replace("│", " ").split())
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"]


@pytest.mark.thorough
def test_a_machine_with_too_little_memory_for_its_servers_says_so(mark: str) -> None:
    Path("small.py").write_text(
        "from paceline.run import server\nserver.available_bytes = lambda: 100\n"  # only at remote servers
    )
    served = Served("--workers", "1", *TWO_SERVERS, "--import", "small")
    joined = served.join("1", options=BRINGS_ONE)
    messages = served.failure()
    code, _, stderr = output(joined)

    assert "server 1 on 127.0.0.1 failed: not enough memory: servers with" in messages
    assert "but only 100 bytes is available on this machine" in messages
    assert "Traceback" not in messages
    assert code == 1, stderr


def coordinator() -> Coordinator:
    """Return the coordinator of a run with four servers, three of them on machines that join."""
    return Coordinator(
        read_schedule("bsp"), workers=1, servers=4, shards=4, late={0}, late_servers=[1, 2, 3], least=1
    )


def test_servers_are_assigned_in_order_and_may_be_released() -> None:
    core = coordinator()
    with pytest.raises(ConfigurationError, match="the run needs 3 more servers"):
        core.servers.invite(4)
    assert core.servers.vacant == {1, 2, 3}
    assert core.servers.invite(2) == (1, 2)
    core.servers.release(1)
    assert core.servers.invite(2) == (1, 3)
    assert core.servers.invite(0) == ()
    with pytest.raises(
        ConfigurationError,
        match="the run needs no more servers: of its 4 servers, the machine that serves the run has 1, ",
    ):
        core.servers.invite(1)


def test_a_server_that_no_machine_has_brought_is_not_expected() -> None:
    core = coordinator()
    assert core.shortage == "0 of at least 1 workers and 1 of 4 servers"
    with pytest.raises(ProtocolError):
        core.require_expected(server_peer(1))
    core.require_expected(server_peer(0))
    core.servers.invite(1)
    core.require_expected(server_peer(1))
    assert core.shortage == "0 of at least 1 workers and 2 of 4 servers"


def test_the_other_servers_run_on_the_serving_machine() -> None:
    job = make_job(workers=1, servers=3, remote_servers=2, dry_run=True)
    assert job.local_servers == 1


def test_a_trace_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    failures: list[str] = []
    traces = TraceFiles(tmp_path, round_robin(shards=8, servers=2), failed=failures.append)
    for part, shard, last in ((b"one ", 1, False), (b"and two", 1, True), (b"half", 3, False)):
        message = TracePart(shard, last)
        [target] = traces.targets(message, 1, len(part))
        target[:] = part
        traces.arrived(message)
    traces.close()

    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "trace-shard-1.jsonl": b"one and two"
    }
    assert failures == []


@pytest.mark.parametrize(
    ("shard", "server", "size_bytes"), [(1, 0, 10), (0, 1, 10), (1, 1, PART_BYTES + 1), (3, 1, 10)]
)
def test_parts_of_traces_that_are_refused(shard: int, server: int, size_bytes: int, tmp_path: Path) -> None:
    traces = TraceFiles(tmp_path, round_robin(shards=8, servers=2), failed=lambda text: None)
    traces.targets(TracePart(3, True), 1, 0)
    traces.arrived(TracePart(3, True))
    with pytest.raises(ProtocolError):
        traces.targets(TracePart(shard, False), server, size_bytes)


def test_a_machines_server_that_is_lost_before_the_run_begins_may_be_brought_by_another_machine() -> None:
    core = coordinator()
    core.servers.invite(3)
    core.connected(server_peer(2), 0, "address")
    assert core.server_lost(2, "its machine has left", certain=True) == []
    assert core.servers.vacant == {2}
    assert core.servers.lost == {}
    assert core.servers.invite(1) == (2,)


def test_a_server_of_the_run_that_is_lost_ends_the_run_and_is_named() -> None:
    core = coordinator()
    assert core.server_lost(0, "its connection ended") == [EndWithout(0, "its connection ended")]
    assert core.server_lost(0, "it was killed", "output", certain=True) == [
        Fail("server 0", "it was killed", "output")
    ]
    assert core.servers.lost == {0: "its connection ended"}

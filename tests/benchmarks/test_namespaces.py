"""Machines made of network namespaces: they talk at the rate of their links, and are always removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.overlap import namespaces
from benchmarks.overlap.namespaces import NetworkLink, network, rate_bps, why_not
from paceline.errors import ConfigurationError
from paceline.start.local import HostMachine

pytestmark = pytest.mark.usefixtures("machines_alone")
needs_machines = pytest.mark.skipif(bool(why_not()), reason=f"creating network namespaces needs {why_not()}")
DEADLINE_S = 60.0  # only reached if something hangs

SINK = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    while connection.recv(1 << 20):
        pass
    connection.sendall(b"all")
"""
SOURCE = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    begun_s = time.monotonic()
    connection.sendall(bytes(int(sys.argv[3])))
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(3) == b"all"
    print(time.monotonic() - begun_s)
"""
LAUNCHER = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # processes in the background ignore it
from benchmarks.overlap.namespaces import NetworkLink, network
with network(2, NetworkLink()) as machines:
    print("up", flush=True)
    {then}
"""


def names_of(process: int) -> list[str]:
    """Return the existing namespaces and devices that a process has created."""
    return [
        name
        for name in namespaces._present()
        if (match := namespaces.OURS.fullmatch(name)) and int(match[1]) == process
    ]


def mbit_per_s(source: HostMachine, sink: HostMachine, size_bytes: int) -> float:
    python = [sys.executable, "-c"]
    with subprocess.Popen([*sink.prefix, *python, SINK, sink.host], stdout=subprocess.PIPE) as listening:
        assert listening.stdout is not None
        port = listening.stdout.readline().decode().strip()
        command = [*source.prefix, *python, SOURCE, sink.host, port, str(size_bytes)]
        sent = subprocess.run(command, capture_output=True, check=True, timeout=DEADLINE_S)
    return size_bytes * 8 / float(sent.stdout) / 1e6


@needs_machines
@pytest.mark.thorough
def test_two_machines_talk_no_faster_than_their_links() -> None:
    with network(2, NetworkLink("200mbit")) as machines:
        one, other = machines.machines
        for source, sink in ((one, other), (other, one)):
            assert (
                mbit_per_s(source, sink, 20_000_000) < 220
            )  # how much slower they are depends on the processors


@needs_machines
def test_the_launcher_is_on_the_same_network() -> None:
    with network(1, NetworkLink("100mbit")) as machines:
        [machine] = machines.machines
        assert mbit_per_s(machine, HostMachine(machines.host), 5_000_000) < 120


@needs_machines
def test_everything_is_removed_afterwards() -> None:
    with network(3, NetworkLink()):
        mine = names_of(os.getpid())
        assert len(mine) == 1 + 1 + 3  # the launcher's device, the switch and the machines
    assert names_of(os.getpid()) == []
    with network(1, NetworkLink()):
        assert len(names_of(os.getpid())) == 3


@needs_machines
def test_a_failure_inside_removes_everything() -> None:
    with pytest.raises(ZeroDivisionError), network(2, NetworkLink()):
        raise ZeroDivisionError
    assert names_of(os.getpid()) == []


@needs_machines
def test_a_failure_midway_removes_what_exists_and_names_the_command() -> None:
    refused = NetworkLink(queue_s=-1.0)  # tc refuses a negative limit
    with (
        pytest.raises(ConfigurationError, match="creating network namespaces failed: 'tc -n paceline"),
        network(2, refused),
    ):
        pass
    assert names_of(os.getpid()) == []


@needs_machines
@pytest.mark.thorough
def test_ctrl_c_removes_everything() -> None:
    program = LAUNCHER.format(then="signal.pause()")
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"up\n"
        assert names_of(launcher.pid)
        launcher.send_signal(signal.SIGINT)
        launcher.wait(DEADLINE_S)
    assert names_of(launcher.pid) == []


@needs_machines
@pytest.mark.thorough
def test_what_a_killed_launcher_leaves_is_removed_by_the_next() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER.format(then="signal.pause()")], stdout=subprocess.PIPE
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"up\n"
        launcher.kill()
    assert names_of(launcher.pid)
    with network(1, NetworkLink()):
        assert names_of(launcher.pid) == []


@needs_machines
@pytest.mark.processes
@pytest.mark.thorough
def test_no_process_of_a_run_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import os, time
import paceline
from paceline.start.local import ProcessPlacement
from benchmarks.overlap.namespaces import NetworkLink as Link, network
def train():
    open(f"{tmp_path}/{{os.getpid()}}", "w").close()
    time.sleep(1000)
with network(2, Link()) as machines:
    server, worker = machines.machines
    placement = ProcessPlacement(machines.host, (server,), (worker,))
    paceline.launch(train, workers=1, servers=1, transport="tcp", run_dir="{tmp_path}/run", placement=placement)
"""
    with subprocess.Popen([sys.executable, "-c", program]) as launcher:
        await_that(lambda: any(path.name.isdigit() for path in tmp_path.iterdir()))
        machines = [name for name in names_of(launcher.pid) if "-" in name and not name.endswith("switch")]
        processes = {name: processes_in(name) for name in machines}
        assert [len(pids) for pids in processes.values()] == [1, 1], processes
        launcher.kill()
    await_that(lambda: not any(processes_in(name) for name in machines))
    with network(1, NetworkLink()):
        assert names_of(launcher.pid) == []


def processes_in(machine: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", machine], capture_output=True, text=True, check=True)
    return [int(pid) for pid in found.stdout.split()]


def await_that(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize("rate", ["", "fast", "1", "1gb", "1 gbit", "-1gbit", "0gbit", "0.1kbit", "1000gbit"])
def test_a_rate_that_no_link_can_have_is_refused(rate: str) -> None:
    with pytest.raises(ConfigurationError, match="expected a rate from 1mbit to 100gbit"):
        rate_bps(rate)
    with pytest.raises(ConfigurationError, match="rate is"), network(1, NetworkLink(rate)):
        pass


@pytest.mark.parametrize("count", [0, 251])
def test_a_number_of_machines_that_cannot_be_is_refused(count: int) -> None:
    with (
        pytest.raises(ConfigurationError, match=f"count is {count}, expected a number of machines"),
        network(count, NetworkLink()),
    ):
        pass


def test_what_is_missing_is_said_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "")
    with (
        pytest.raises(
            ConfigurationError, match=r"needs root \(try sudo\) and the command 'ip' and the command 'tc'\."
        ),
        network(1, NetworkLink()),
    ):
        pass

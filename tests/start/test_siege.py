"""Strangers beside a real run: thousands of connections that reset at once or say nothing, under few descriptors.

`make siege` does 10,000 resets and holds 2,000 connections open, over TCP and over shared memory, and compares the
run's speed with that of the same run in peace; without PACELINE_SIEGE the same test does a few hundred. It also lets
another user try to connect 2,000 times per second, and compares with processes that are as busy without connecting.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.marks import chaos, thorough

LARGE = bool(os.environ.get("PACELINE_SIEGE"))
RESETS = 10_000 if LARGE else 400
HELD = 2_000 if LARGE else 450
STEPS = 1_500 if LARGE else 100
DESCRIPTORS = 256 if LARGE else 96  # that each process of the run may open
PACE_S = 0.02
WORKERS = 2
TIMEOUT_S = 300.0

SCRIPT = """
import json, os, sys, paceline, torch
from paceline.train.session import current

def train(steps, out):
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
    for step in range(steps):
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()
        if step == 3 and paceline.worker_index() == 0:
            session = current()
            names = [session._place.coordinator, *dict.fromkeys(session.core.started.addresses)]
            with open(out + ".new", "w") as file:
                json.dump(names, file)
            os.rename(out + ".new", out)

if __name__ == "__main__":
    transport, steps, out, run_dir = sys.argv[1:]
    run = paceline.launch(train, args=(int(steps), out), workers=WORKERS, servers=2, sync="asp", run_dir=run_dir,
                          hyperparameters="raw", transport=transport, pace=[PACE_S] * WORKERS, progress=False)
    weight = run.state_dict["weight"]
    print(json.dumps([run.summary["updates_per_s"], float(weight.min()), float(weight.max())]))
"""


class Run:
    """A run in processes of its own, with few descriptors."""

    def __init__(self, folder: Path, transport: str) -> None:
        folder.mkdir()
        script = folder / "train.py"
        script.write_text(SCRIPT.replace("WORKERS", str(WORKERS)).replace("PACE_S", str(PACE_S)))
        self.names = folder / "names.json"
        command = [sys.executable, str(script), transport, str(STEPS), str(self.names), str(folder / "run")]
        self.process = subprocess.Popen(
            ["sh", "-c", f'ulimit -n {DESCRIPTORS} && exec "$@"', "sh", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.logs = folder / "run"
        self.output: tuple[str, str] | None = None

    def hosts(self) -> list[Any]:
        """Where the coordinator and the servers listen."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self.names.exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        names = json.loads(self.names.read_text())
        return [name_of(address) for address in names]

    def result(self) -> tuple[float, float, float]:
        """Updates per second, and the least and the largest weight."""
        self.reap()
        assert self.output is not None
        out, err = self.output
        assert self.process.returncode == 0, err
        speed, low, high = json.loads(out.splitlines()[-1])
        return speed, low, high

    def reap(self) -> None:
        """Wait for the end of the run."""
        if not self.output:
            self.output = self.process.communicate(timeout=TIMEOUT_S)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.reap()


@contextlib.contextmanager
def running(folder: Path, transport: str) -> Iterator[Run]:
    run = Run(folder, transport)
    try:
        yield run
    finally:
        run.end()


def name_of(address: str) -> Any:
    """Return what a socket is connected to in order to reach an address."""
    kind, _, name = address.partition(":")
    host, _, port = name.rpartition(":")
    return name if kind == "unix" else (host, int(port))


def call(name: Any) -> socket.socket | None:
    """A connection to a host; None if its queue is full."""
    family = socket.AF_UNIX if isinstance(name, str) else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(5.0)
    try:
        sock.connect(name)
    except (BlockingIOError, TimeoutError):
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    return sock


def besiege(run: Run, hosts: list[Any]) -> tuple[int, int]:
    """How many have reset at once, and how many were held until the run was over."""
    resets = held = 0
    with contextlib.ExitStack() as stack:
        while run.process.poll() is None and (resets < RESETS or held < HELD):
            with contextlib.suppress(ConnectionRefusedError):  # the run is over
                for name in hosts:
                    if held < HELD and (sock := call(name)) is not None:
                        stack.enter_context(sock)
                        held += 1
                    for _ in range(RESETS // HELD + 1):
                        if (sock := call(name)) is not None:
                            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                            sock.close()
                            resets += 1
            time.sleep(0.01)
        run.process.wait(TIMEOUT_S)
    return resets, held


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["tcp", "shm"] if LARGE else [*thorough("tcp"), *chaos("shm")])
def test_strangers_without_number_neither_end_a_run_nor_hold_it_up(tmp_path: Path, transport: str) -> None:
    weights = -float(STEPS * WORKERS)
    in_peace = 0.0
    if LARGE:
        with running(tmp_path / "peace", transport) as run:
            in_peace, *_ = run.result()
    with running(tmp_path / "siege", transport) as run:
        outcome: list[tuple[int, int]] = []
        hosts = run.hosts()
        thread = threading.Thread(target=lambda: outcome.append(besiege(run, hosts)))
        thread.start()
        speed, low, high = run.result()
        thread.join()
        left_out = -weights + low  # a worker that comes late may have its first gradient left out
        assert low == high
        assert 0 <= left_out <= WORKERS - 1
        [(resets, held)] = outcome
        lines = sum(len(log.read_text().splitlines()) for log in run.logs.glob("server-*.log"))
    assert lines < 100
    if LARGE:
        print(
            f"{transport}: {resets:,} resets, {held:,} held; {speed:.1f} updates per second, {speed / in_peace:.3f} "
            f"of {in_peace:.1f} in peace; the weights are there, {lines} lines in the servers' logs"
        )
        assert resets >= RESETS
        assert held >= HELD
        assert speed >= 0.9 * in_peace


RATE_PER_S = 2_000 if LARGE else 200  # attempts to connect, of all attackers together
NOBODY = 65534
ATTACKERS = 2

ATTACK = """
import json, os, socket, sys, time

names, rate, connects = json.loads(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "connect"
os.setgroups([])
os.setgid(NOBODY)
os.setuid(NOBODY)
refused = connected = 0
begun = time.monotonic()
busy_s = float(sys.argv[4])  # processor time of each attempt of a process that does not connect
try:
    while True:
        for name in names:
            if connects:
                sock = socket.socket(socket.AF_UNIX)
                try:
                    sock.connect(name)
                    connected += 1
                except OSError:  # permission denied, or the run has ended
                    refused += 1
                sock.close()
            else:
                until = time.thread_time() + busy_s
                while time.thread_time() < until:
                    pass
                refused += 1
        time.sleep(max(0.0, begun + refused / rate - time.monotonic()))
        if not os.path.exists("/proc/" + sys.argv[5]):
            break
finally:
    print(json.dumps([refused, connected, time.process_time(), time.monotonic() - begun]))
"""


def beside(run: Run, kind: str, busy_s: float = 0.0) -> list[list[float]]:
    """Let another user attack a run until it ends. Return what each attacker did, and its processor time."""
    names = json.dumps([name for name in run.hosts() if isinstance(name, str)])
    script = ATTACK.replace("NOBODY", str(NOBODY))
    rest = [str(RATE_PER_S / ATTACKERS), kind, str(busy_s), str(run.process.pid)]
    attackers = [
        subprocess.Popen([sys.executable, "-c", script, names, *rest], stdout=subprocess.PIPE, text=True)
        for _ in range(ATTACKERS)
    ]
    run.reap()
    return [json.loads(each.communicate(timeout=TIMEOUT_S)[0]) for each in attackers]


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.thorough
def test_strangers_of_another_user_are_refused_by_the_kernel(tmp_path: Path) -> None:
    with running(tmp_path / "siege", "shm") as run:
        attacks = beside(run, "connect")
        speed, low, high = run.result()
        logs = "".join(log.read_text() for log in run.logs.glob("server-*.log"))
    assert low == high
    refused = sum(attack[0] for attack in attacks)
    assert sum(attack[1] for attack in attacks) == 0
    assert refused > 100
    assert "refused a connection" not in logs
    if LARGE:
        used_s, lasted_s = (sum(attack[k] for attack in attacks) for k in (2, 3))
        with running(tmp_path / "control", "shm") as run:
            control = beside(run, "burn", used_s / refused)
            in_control, *_ = run.result()
        with running(tmp_path / "peace", "shm") as run:
            in_peace, *_ = run.result()
        print(
            f"another user: {refused / lasted_s * ATTACKERS:,.0f} attempts per second; {speed:.1f} updates per "
            f"second, {speed / in_control:.3f} of {in_control:.1f} beside processes that are as busy "
            f"({used_s:.1f} and {sum(attack[2] for attack in control):.1f} s), {speed / in_peace:.3f} of "
            f"{in_peace:.1f} in peace"
        )
        assert speed >= 0.9 * in_control

"""Strangers beside a real run: thousands of connections that reset at once or say nothing, under few descriptors.

`make siege` does 10,000 resets and holds 2,000 connections open, over TCP and over shared memory, and compares the
run's speed with that of the same run in peace; without PACELINE_SIEGE the same test does a few hundred.
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

from .live import chaos

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
from paceline.frontend.session import current

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
            socks = [session._coordinator.sock, *(stream.sock for stream in session._servers)]
            names = [sock.getpeername() for sock in socks]
            with open(out + ".new", "w") as file:
                json.dump([n.decode("latin-1") if isinstance(n, bytes) else n for n in names], file)
            os.rename(out + ".new", out)

if __name__ == "__main__":
    transport, steps, out, run_dir = sys.argv[1:]
    run = paceline.launch(train, args=(int(steps), out), workers=WORKERS, servers=2, sync="asp", run_dir=run_dir,
                          transport=transport, pace=[PACE_S] * WORKERS, progress=False)
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

    def hosts(self) -> list[Any]:
        """Where the coordinator and the servers listen."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self.names.exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        names = json.loads(self.names.read_text())
        return [name.encode("latin-1") if isinstance(name, str) else tuple(name) for name in names]

    def result(self) -> tuple[float, float, float]:
        """Updates per second, and the least and the largest weight."""
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        assert self.process.returncode == 0, err
        speed, low, high = json.loads(out.splitlines()[-1])
        return speed, low, high

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate()


@contextlib.contextmanager
def running(folder: Path, transport: str) -> Iterator[Run]:
    run = Run(folder, transport)
    try:
        yield run
    finally:
        run.end()


def call(name: Any) -> socket.socket | None:
    """A connection to a host; None if its queue is full."""
    family = socket.AF_UNIX if isinstance(name, bytes) else socket.AF_INET
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
@pytest.mark.parametrize("transport", ["tcp", *(["shm"] if LARGE else chaos("shm"))])
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

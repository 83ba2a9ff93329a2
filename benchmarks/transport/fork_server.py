"""A fork server: a process that has imported torch without computing anything, and forks the measured processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec
import torch

from paceline.errors import RunFailedError

from .plan import LR, Figures, Turn
from .rendezvous import publish
from .systems import SERVER_ROLES, WORKER_ROLES, launch_paceline

__all__ = ["ForkServer", "fork_server", "main", "measure_turn", "one_thread_each"]

LOG_LINES = 15  # number of log lines that are shown if a process fails
ROOT = Path(__file__).resolve().parents[2]  # directory that contains the package `benchmarks`


class ForkServer(NamedTuple):
    """A running fork server, which runs the processes of one `Turn` at a time and reports when they have exited.

    Attributes:
        process: the process of the fork server.
        log: file to which the process writes its standard error.
    """

    process: subprocess.Popen[bytes]
    log: Path

    def run(self, turn: Turn, out: Path) -> None:
        """Run the processes of a turn until they exit. The processes write their results into the directory `out`.

        Raises:
            RunFailedError: a process failed.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(msgspec.json.encode((turn, str(out))) + b"\n")
            self.process.stdin.flush()
            done = self.process.stdout.readline()
        except BrokenPipeError:
            done = b""
        if not done:
            tail = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            raise RunFailedError(turn.name, "a measured process failed", "\n".join(tail))


@contextmanager
def fork_server(home: Path) -> Iterator[ForkServer]:
    """Start a fork server with its log in the directory `home`. On exit, kill the server and its children."""
    log = home / "fork-server.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            process_group=0,  # Ctrl-C reaches only the parent, which then kills the fork server
        )
    try:
        yield ForkServer(process, log)
    finally:
        # The process group still exists, because `process.wait` has not been called yet.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(
                BrokenPipeError
            ):  # close() flushes the buffer, which fails if the process has exited
                pipe.close()


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Limit every process that is started in this context to one thread."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def measure_turn(turn: Turn, out: Path, server: ForkServer) -> Figures:
    """Measure a turn. Return the mean time over the workers, in seconds, for each mode (and for "traffic")."""
    run = launch_paceline if turn.cases[0].system == "paceline" else server.run
    run(turn, out)
    found = [json.loads(path.read_text()) for path in out.glob("figures-*")]
    assert len(found) == turn.workers, (
        f"{turn.name}: only {len(found)} of {turn.workers} workers have written their results"
    )
    return {mode: fmean(figures[mode] for figures in found) for mode in found[0]}


def main() -> None:
    """Run as the fork server: fork the processes of each turn that arrives on standard input."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=LR)  # imports many modules of torch before any process is forked
    for line in sys.stdin.buffer:
        turn, out = msgspec.json.decode(line, type=tuple[Turn, str])
        _fork(turn, Path(out))
        print("done", flush=True)


def _fork(turn: Turn, out: Path) -> None:
    """Run the processes of a turn until they exit. If one of them fails, exit too; this terminates the others."""
    fork = multiprocessing.get_context("fork")
    system = turn.cases[0].system
    servers = turn.servers if system in SERVER_ROLES else 0
    roles = [*((_run_server, i) for i in range(servers)), *((_run_worker, i) for i in range(turn.workers))]
    running = [fork.Process(target=role, args=(turn, index, out), daemon=True) for role, index in roles]
    for process in running:
        process.start()
    while running:
        connection.wait([process.sentinel for process in running])
        # A process may end between two looks, so each exit code is read once.
        codes = [(process, process.exitcode) for process in running]
        if any(code for _, code in codes):
            sys.exit(1)  # the traceback is in the log
        running = [process for process, code in codes if code is None]


def _run_server(turn: Turn, index: int, out: Path) -> None:
    SERVER_ROLES[turn.cases[0].system](turn, index, out)


def _run_worker(turn: Turn, index: int, out: Path) -> None:
    publish(out, f"figures-{index}", json.dumps(WORKER_ROLES[turn.cases[0].system](turn, index, out)))

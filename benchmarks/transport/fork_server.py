"""The processes of a turn: forked from one that has torch loaded and has computed nothing (*the crew*)."""

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

__all__ = ["be_the_crew", "crew_at", "measure_turn", "one_thread_each"]

LOG_LINES = 15


class Crew(NamedTuple):
    """The process from which the others are forked: a turn and a directory in, a line out when it is done."""

    process: subprocess.Popen[bytes]
    log: Path

    def run(self, turn: Turn, out: Path) -> None:
        """Have a turn measured.

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
            raise RunFailedError(turn.name, "a process of the measurement ended", "\n".join(tail))


@contextmanager
def crew_at(home: Path) -> Iterator[Crew]:
    """The crew, which no longer runs afterwards, nor anything that it has forked."""
    log = home / "crew.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import be_the_crew; be_the_crew()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            process_group=0,  # Ctrl-C reaches the launcher alone, which ends the crew
        )
    try:
        yield Crew(process, log)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # it has not been waited for, so the group is still its own
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what was not read
                pipe.close()


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Every process that is started here has one thread."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def measure_turn(turn: Turn, out: Path, crew: Crew) -> Figures:
    """Each figure: the mean of what the workers found."""
    run = launch_paceline if turn.cases[0].system == "paceline" else crew.run
    run(turn, out)
    found = [json.loads(path.read_text()) for path in out.glob("figures-*")]
    assert len(found) == turn.workers, f"{turn.name}: {len(found)} workers have written down what they found"
    return {mode: fmean(figures[mode] for figures in found) for mode in found[0]}


def be_the_crew() -> None:
    """Fork the processes of each turn that comes on standard input."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=LR)  # imports what is half of torch: once, not in each process
    for line in sys.stdin.buffer:
        turn, out = msgspec.json.decode(line, type=tuple[Turn, str])
        _fork(turn, Path(out))
        print("done", flush=True)


def _fork(turn: Turn, out: Path) -> None:
    """Start the processes of a turn and wait for their end; the first that fails is the end of all."""
    fork = multiprocessing.get_context("fork")
    system = turn.cases[0].system
    servers = turn.servers if system in SERVER_ROLES else 0
    places = [*((_be_server, i) for i in range(servers)), *((_be_worker, i) for i in range(turn.workers))]
    running = [fork.Process(target=be, args=(turn, index, out), daemon=True) for be, index in places]
    for process in running:
        process.start()
    while running:
        connection.wait([process.sentinel for process in running])
        if any(process.exitcode for process in running):
            sys.exit(1)  # its traceback is in the log
        running = [process for process in running if process.exitcode is None]


def _be_server(turn: Turn, index: int, out: Path) -> None:
    SERVER_ROLES[turn.cases[0].system](turn, index, out)


def _be_worker(turn: Turn, index: int, out: Path) -> None:
    publish(out, f"figures-{index}", json.dumps(WORKER_ROLES[turn.cases[0].system](turn, index, out)))

"""The local engine: every server and worker is a fresh interpreter on this machine, or on a part of it.

It starts processes, watches them, keeps what they print, and ends them. What a process prints goes to a file in
the run directory; worker 0's is shown as well.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec

from ..errors import ConfigurationError, RunFailedError
from ..runtime.job import JOB_VARIABLE, LOOPBACK, Job, Place

__all__ = ["LocalEngine", "Machine", "Placement", "Process"]

PAST_CACHE_BYTES = 1024 * 1024
"""From this size on `memcpy` writes past the cache, which makes a copy half as fast again. glibc takes three quarters
of the last cache for this, which in a virtual machine may be hundreds of megabytes that are shared with others."""

TERMINATE_TIMEOUT_S = 3.0
TAIL_LINES = 15


class Machine(msgspec.Struct, frozen=True):
    """Where a process is put.

    Attributes:
        host: the address at which it listens over TCP.
        prefix: what precedes its command line, for example `ip netns exec NAME`. It must end by *becoming* that
            command, not by waiting for it: the process has to stay a child of the engine's, to die with it.
    """

    host: str = LOOPBACK
    prefix: tuple[str, ...] = ()


class Placement(msgspec.Struct, frozen=True):
    """Where the processes of a run are put.

    Attributes:
        coordinator: the address at which it listens over TCP. It runs in the launcher, so its machine is this one.
        servers: a machine for each.
        workers: likewise.
    """

    coordinator: str
    servers: tuple[Machine, ...]
    workers: tuple[Machine, ...]

    @classmethod
    def on_loopback(cls, job: Job) -> Placement:
        """Everybody here."""
        return cls(LOOPBACK, (Machine(),) * job.servers, (Machine(),) * job.workers)

    def require_for(self, job: Job) -> None:
        """Refuse a run that cannot be put there. Raises `ConfigurationError`."""
        placed, wanted = (len(self.servers), len(self.workers)), (job.servers, job.workers)
        if placed != wanted:
            raise ConfigurationError(
                f"there are machines for {placed[0]} servers and {placed[1]} workers, expected {wanted[0]} and "
                f"{wanted[1]}."
            )
        if job.transport != "tcp":
            raise ConfigurationError(
                f"transport {job.transport!r} is for one machine; between machines use 'tcp'."
            )


class Process:
    """One process of a run.

    Attributes:
        name: "server 1", "worker 0".
        log: the file with what it prints.
    """

    def __init__(
        self, name: str, popen: subprocess.Popen[bytes], log: Path, show: Callable[[str], None]
    ) -> None:
        self.name = name
        self.log = log
        self._popen = popen
        assert popen.stdout is not None
        self._reader = threading.Thread(target=_copy_lines, args=(popen.stdout, log, show), daemon=True)
        self._reader.start()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative if a signal ended it."""
        return self._popen.poll()

    @property
    def id(self) -> int:
        """The system's process id."""
        return self._popen.pid

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False if it has not come in time."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(timeout_s)
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self._popen.poll() is None:
            self._popen.send_signal(number)

    def feed(self, data: bytes) -> None:
        """Write to its standard input, and close it."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(data)
            self._popen.stdin.close()
        except BrokenPipeError:
            pass  # it has ended; its exit code will say why

    def tail(self) -> str:
        """The last lines that it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


class LocalEngine:
    """The processes of one run.

    Args:
        job: the run.
        coordinator: where its coordinator listens.
        placement: on which machine each runs.
        show: called with each line that worker 0 prints.
    """

    def __init__(self, job: Job, coordinator: str, placement: Placement, show: Callable[[str], None]) -> None:
        self._job = job
        self._coordinator = coordinator
        self._placement = placement
        self._show = show
        self._threads = max(1, (os.cpu_count() or 1) // (job.workers + job.servers))  # of each process
        self.servers: list[Process] = []
        self.workers: list[Process] = []

    def start(
        self, worker_arguments: Sequence[str], worker_input: bytes = b"", server_input: bytes = b""
    ) -> None:
        """Start every process.

        Args:
            worker_arguments: what follows `python -m paceline.engines.child` for a worker.
            worker_input: what a worker finds on its standard input.
            server_input: what a server finds there.
        """
        for index, machine in enumerate(self._placement.servers):
            self.servers.append(self._spawn("server", index, machine, []))
        for index, machine in enumerate(self._placement.workers):
            self.workers.append(self._spawn("worker", index, machine, worker_arguments))
        for process in [*self.servers, *self.workers]:
            process.feed(worker_input if process in self.workers else server_input)

    def failed_server(self) -> RunFailedError | None:
        """A server that has ended; none may before the run is over."""
        for server in self.servers:
            if server.exit_code is not None:
                return RunFailedError(server.name, _ending(server.exit_code), server.tail())
        return None

    def failed_worker(self) -> RunFailedError | None:
        """A worker that has ended with an exit code of its own.

        One that a signal ended is lost, which is not a failure: the others go on.
        """
        for worker in self.workers:
            if worker.exit_code is not None and worker.exit_code > 0:
                return RunFailedError(worker.name, _ending(worker.exit_code), worker.tail())
        return None

    def end(self, *, grace_s: float) -> None:
        """End whatever still runs: after a grace, ask; then insist."""
        processes = [*self.workers, *self.servers]
        for number, timeout_s in (
            (None, grace_s),
            (signal.SIGTERM, TERMINATE_TIMEOUT_S),
            (signal.SIGKILL, None),
        ):
            for process in processes:
                if number is not None:
                    process.signal(number)
            deadline_s = time.monotonic() + (timeout_s if timeout_s is not None else 60.0)
            processes = [p for p in processes if not p.wait(max(0.0, deadline_s - time.monotonic()))]
            if not processes:
                return

    def _spawn(self, role: str, index: int, machine: Machine, arguments: Sequence[str]) -> Process:
        place = Place(
            job=self._job,
            role="server" if role == "server" else "worker",
            index=index,
            coordinator=self._coordinator,
            host=machine.host,
        )
        environment = {
            "OMP_NUM_THREADS": str(self._threads),  # unless the user has set it
            "GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={PAST_CACHE_BYTES}",  # likewise
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PACELINE_PARENT": str(os.getpid()),
            JOB_VARIABLE: msgspec.msgpack.encode(place).hex(),
        }
        popen = subprocess.Popen(
            [*machine.prefix, sys.executable, "-m", "paceline.engines.child", *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C reaches the launcher alone, which ends the run in order
        )
        name = f"{role} {index}"
        show = self._show if name == "worker 0" else lambda line: None
        return Process(name, popen, Path(self._job.run_dir, f"{role}-{index}.log"), show)


def _copy_lines(source: IO[bytes], log: Path, show: Callable[[str], None]) -> None:
    with log.open("wb") as file, source:
        for line in source:
            file.write(line)
            file.flush()
            show(line.decode(errors="replace").rstrip("\n"))


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        return f"it was ended by signal {signal.Signals(-exit_code).name}"
    return f"it ended with exit code {exit_code}"

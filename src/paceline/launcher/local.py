"""The local engine: every server and worker is a fresh interpreter on this machine, or on a part of it.

It starts processes, watches them, keeps what they print, and ends them. What a process prints goes to a file in
the run directory; worker 0's is shown as well.
"""

from __future__ import annotations

import contextlib
import logging
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
from . import boot
from .endings import EXIT_PEER_LOST, describe_ending, is_crash, out_of_memory_kills

__all__ = ["LocalEngine", "Machine", "Placement", "Process"]

notes = logging.getLogger("paceline.engine")

PAST_CACHE_BYTES = 1024 * 1024
"""From this size on `memcpy` writes past the cache, which makes a copy half as fast again. glibc takes three quarters
of the last cache for this, which in a virtual machine may be hundreds of megabytes that are shared with others."""

TERMINATE_TIMEOUT_S = 3.0
KILL_TIMEOUT_S = 10.0  # even SIGKILL waits for a system call that cannot be interrupted
OUTPUT_TIMEOUT_S = (
    1.0  # for the last output of a process that has ended: a child that it forked may hold the pipe
)
POLL_INTERVAL_S = 0.05
TAIL_LINES = 15

STATES = {
    "R": "is running",
    "S": "sleeps",
    "D": "waits for a disk or a device",
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "Z": "has ended",
}
"""The system's letters for the states of a process, see proc(5)."""


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
    """One process of a run, in a process group of its own.

    Three threads serve it: one hands it its input, one copies its output, and one waits for its end. So neither a
    process that hangs nor one that prints without end holds up its launcher.

    Args:
        name: "server 1", "worker 0".
        popen: the process, with pipes for its input and output.
        data: what it finds on its standard input.
        log: the file with what it prints.
        show: called with each line.
        ended: called with this when it has ended, before its exit code can be reused.

    Attributes:
        name: as given.
        log: as given.
        exit_code: None while it runs; negative if a signal ended it.
    """

    def __init__(
        self,
        name: str,
        popen: subprocess.Popen[bytes],
        data: bytes,
        log: Path,
        show: Callable[[str], None],
        ended: Callable[[Process], None],
    ) -> None:
        self.name = name
        self.log = log
        self.exit_code: int | None = None
        self._why_killed = ""
        self._popen = popen
        self._data = data
        self._ended = ended
        self._lock = threading.Lock()  # held while a signal is sent, and while the process is reaped
        self._over = threading.Event()
        self._kills_before = out_of_memory_kills()
        self._out_of_memory = False
        assert popen.stdout is not None
        self._threads = [
            threading.Thread(target=self._feed, daemon=True),
            threading.Thread(target=_copy_lines, args=(popen.stdout, log, show), daemon=True),
            threading.Thread(target=self._await_end, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def id(self) -> int:
        """The system's process id."""
        return self._popen.pid

    @property
    def ending(self) -> str:
        """How it ended, in words that follow its name; "" while it runs."""
        if self.exit_code is None:
            return ""
        how = describe_ending(self.exit_code, out_of_memory=self._out_of_memory)
        return f"{how}: {self._why_killed}" if self._why_killed else how

    @property
    def crashed(self) -> bool:
        """True if it has ended by its own doing. See `endings`."""
        if self.exit_code is None or self._why_killed:
            return False
        return is_crash(self.exit_code, out_of_memory=self._out_of_memory)

    @property
    def state(self) -> str:
        """What the system says that it does, in words that follow its name."""
        try:
            letter = Path(f"/proc/{self.id}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return "has ended"
        return STATES.get(letter, "is there")

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end and its last output; False if the end has not come in time."""
        if not self._over.wait(timeout_s):
            return False
        for thread in self._threads:
            thread.join(OUTPUT_TIMEOUT_S)
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        with self._lock:
            if self.exit_code is None:
                os.kill(self.id, number)

    def kill(self, why: str = "") -> None:
        """End it at once, with all that it has started. `why` is added to how it ended."""
        self._why_killed = why
        self.signal(signal.SIGKILL)

    def tail(self) -> str:
        """The last lines that it printed; "" if its log cannot be read."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        except OSError:
            return ""

    def _feed(self) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._popen.stdin as stdin:
            stdin.write(self._data)  # a process that has ended says why by its exit code

    def _await_end(self) -> None:
        """Wait for the end. Whoever was killed, or failed, takes along what it has started: nobody else would end it.

        The group is signalled while its leader has not been reaped, since only until then its number is its own.
        """
        end = None
        with contextlib.suppress(ChildProcessError):  # the program that launched has waited for it itself
            end = os.waitid(os.P_PID, self.id, os.WEXITED | os.WNOWAIT)
        self._out_of_memory = out_of_memory_kills() > self._kills_before
        with self._lock:
            if end is not None and (end.si_code, end.si_status) != (os.CLD_EXITED, 0):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.id, signal.SIGKILL)
            self.exit_code = self._popen.wait()
        self._ended(self)
        self._over.set()


class LocalEngine:
    """The processes of one run.

    Args:
        job: the run.
        coordinator: where its coordinator listens.
        placement: on which machine each runs.
        show: called with each line that worker 0 prints.
        worker_ended: called with the index of each worker whose process has ended, however and whenever, and with
            how it ended, in words. On a thread of its own.
    """

    def __init__(
        self,
        job: Job,
        coordinator: str,
        placement: Placement,
        show: Callable[[str], None],
        worker_ended: Callable[[int, str], None],
    ) -> None:
        self._job = job
        self._coordinator = coordinator
        self._placement = placement
        self._show = show
        self._worker_ended = worker_ended
        self._threads = max(1, (os.cpu_count() or 1) // (job.workers + job.servers))  # of each process
        self.servers: list[Process] = []
        self.workers: list[Process] = []

    def start(
        self, worker_arguments: Sequence[str], worker_input: bytes = b"", server_input: bytes = b""
    ) -> None:
        """Start every process.

        Args:
            worker_arguments: of a worker's process.
            worker_input: what a worker finds on its standard input.
            server_input: what a server finds there.
        """
        for index, machine in enumerate(self._placement.servers):
            self.servers.append(self._spawn("server", index, machine, [], server_input))
        for index, machine in enumerate(self._placement.workers):
            self.workers.append(self._spawn("worker", index, machine, worker_arguments, worker_input))

    def failed_server(self) -> RunFailedError | None:
        """A server that has ended; none may before the run is over."""
        for server in self.servers:
            if server.exit_code is not None:
                return RunFailedError(server.name, server.ending, server.tail())
        return None

    def failed_worker(self) -> RunFailedError | None:
        """A worker that has ended with an exit code of its own.

        One that a signal ended is lost, which is not a failure: the others go on. So is one that could not go on
        because somebody else was gone.
        """
        for worker in self.workers:
            if worker.exit_code is not None and worker.exit_code > 0 and worker.exit_code != EXIT_PEER_LOST:
                return RunFailedError(worker.name, worker.ending, worker.tail())
        return None

    def process(self, role: str, index: int) -> Process:
        """The process of a server or worker."""
        return (self.servers if role == "server" else self.workers)[index]

    def end(
        self, processes: Sequence[Process], *, grace_s: float, hurried: Callable[[], bool] = lambda: False
    ) -> list[Process]:
        """End some of the processes: give them a grace, ask them, insist. Return those that even then go on.

        Args:
            processes: which.
            grace_s: how long they may take to end by themselves.
            hurried: looked at often; as soon as it is true, nobody is given any more time.
        """
        left = list(processes)
        for number, timeout_s in (
            (None, grace_s),
            (signal.SIGTERM, TERMINATE_TIMEOUT_S),
            (signal.SIGKILL, KILL_TIMEOUT_S),
        ):
            if number is not None:
                for process in left:
                    process.signal(number)
            deadline_s = time.monotonic() + timeout_s
            while left and time.monotonic() < deadline_s and (number == signal.SIGKILL or not hurried()):
                left = [process for process in left if not process.wait(POLL_INTERVAL_S / len(left))]
        return left

    def _spawn(
        self, role: str, index: int, machine: Machine, arguments: Sequence[str], data: bytes
    ) -> Process:
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
            boot.PARENT_VARIABLE: str(os.getpid()),
            JOB_VARIABLE: msgspec.msgpack.encode(place).hex(),
        }
        popen = subprocess.Popen(
            [*machine.prefix, sys.executable, "-P", boot.__file__, *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C reaches the launcher alone, which ends the run in order
        )
        name = f"{role} {index}"
        show = self._show if name == "worker 0" else lambda line: None

        def ended(process: Process) -> None:
            if role == "worker":
                self._worker_ended(index, process.ending)

        return Process(name, popen, data, Path(self._job.run_dir, f"{role}-{index}.log"), show, ended)


def _copy_lines(source: IO[bytes], log: Path, show: Callable[[str], None]) -> None:
    """Copy what a process prints to its log and to whoever looks on, until it ends.

    Each of the two is given up at its first failure; the process is read on, for it would stop at a full pipe.
    """
    takers: dict[str, Callable[[bytes], object]] = {}
    with source, contextlib.ExitStack() as opened:
        try:
            takers["kept"] = opened.enter_context(log.open("wb", buffering=0)).write
        except OSError as error:
            notes.warning("what goes to %s cannot be kept: %s", log, error.strerror)
        takers["shown"] = lambda line: show(line.decode(errors="replace").rstrip("\n"))
        for line in source:
            for done, take in list(takers.items()):
                try:
                    take(line)
                except Exception as error:  # a full disk; whatever the caller's own output may raise
                    notes.warning("what goes to %s cannot be %s any more: %s", log, done, error)
                    del takers[done]

"""The local engine, which runs every server and worker as a process on this machine.

The engine starts the processes, monitors them, stores their output, and ends them. The output of each process is
written to a file in the run directory. The output of worker 0 is also shown.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from ..errors import ConfigurationError, RunFailedError
from ..run.compute_devices import Device
from ..run.job import LOOPBACK, Assignment, Job, Role
from ..run.listener import Listener
from .processes.orders import Descriptors, ProcessOrder
from .processes.program import (
    EXIT_INTERRUPTED,
    EXIT_PEER_LOST,
    describe_ending,
    file_of,
    is_crash,
    out_of_memory_kills,
)
from .processes.spawn import Child, Starter
from .terminal import Channels

TERMINATE_TIMEOUT_S = 3.0
# This time is long, because a process in an uninterruptible system call survives SIGKILL until the call returns.
KILL_TIMEOUT_S = 10.0
# Maximum time to wait for the last output of a process that has ended. A child process may keep the pipe open.
OUTPUT_TIMEOUT_S = 1.0
POLL_INTERVAL_S = 0.05
TAIL_LINES = 15
TAIL_BYTES = 2**16  # maximum size of the last lines

STATES = {
    "R": "is running",
    "S": "is sleeping",
    "D": "is waiting for a disk or another device",
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "Z": "has ended",
}
"""Descriptions of the process states, which the system reports as letters (see proc(5))."""


class HostMachine(msgspec.Struct, frozen=True):
    """The machine on which a process runs.

    Attributes:
        host: address on which the process listens for TCP connections.
        prefix: command that is put in front of the process's command line, for example `ip netns exec NAME`. This
            command must `exec` the process instead of starting a child, so that the process is a direct child of the
            engine and exits when the engine does.
    """

    host: str = LOOPBACK
    prefix: tuple[str, ...] = ()


class ProcessPlacement(msgspec.Struct, frozen=True):
    """The machines on which the processes of a run are started.

    Attributes:
        coordinator: address on which the coordinator listens for TCP connections. The coordinator runs in the
            launcher, on this machine.
        servers: the machine of each server.
        workers: the machine of each worker.
    """

    coordinator: str
    servers: tuple[HostMachine, ...]
    workers: tuple[HostMachine, ...]

    @classmethod
    def on_loopback(cls, job: Job) -> ProcessPlacement:
        """Return a placement of all processes on this machine, except for those on machines that join the run."""
        workers = 0 if job.joined else job.workers
        return cls(LOOPBACK, (HostMachine(),) * job.local_servers, (HostMachine(),) * workers)

    def for_servers(self, count: int) -> ProcessPlacement:
        """Return a placement with this number of servers. Additional servers are on the machine of the first server."""
        more = (self.servers[0],) * (count - len(self.servers))
        return msgspec.structs.replace(self, servers=(*self.servers, *more))

    def require_for(self, job: Job) -> None:
        """Raise `ConfigurationError` if this placement does not fit the job."""
        placed = len(self.servers), len(self.workers)
        wanted = job.local_servers, 0 if job.joined else job.workers
        if placed != wanted:
            raise ConfigurationError(
                f"the placement has machines for {placed[0]} servers and {placed[1]} workers, expected {wanted[0]} "
                f"servers and {wanted[1]} workers."
            )
        if not job.carrier.spans_machines:
            raise ConfigurationError(
                f"transport {job.transport!r} works on a single machine only; use 'tcp' between machines."
            )

    def prefixes(self) -> list[tuple[str, ...]]:
        """Return the prefix of each process. See `HostMachine`."""
        return [machine.prefix for machine in (*self.servers, *self.workers)]


class Process:
    """A server or worker process of a run, in its own process group.

    Two threads handle the process: one copies its output, and the other waits for its end. So a process that hangs, or
    that prints endlessly, does not block the launcher.

    Args:
        name: name of the process, such as "server 1" or "worker 0".
        child: the process.
        descriptors: the descriptors of the process. They are closed here as soon as the process has them.
        copy: a function that copies the output of the process, until the output ends.
        log: the file to which the output of the process is written.
        ended: called with this object when the process has ended.

    Attributes:
        name: name of the process.
        log: the file to which the output of the process is written.
        exit_code: exit code of the process; None while the process runs. If a signal terminated the process, this is
            minus the signal number.
    """

    def __init__(
        self,
        name: str,
        child: Child,
        descriptors: Descriptors,
        copy: Callable[[], None],
        log: Path,
        ended: Callable[[Process], None],
    ) -> None:
        self.name = name
        self.log = log
        self.exit_code: int | None = None
        self._why_killed = ""
        self._child = child
        self._ended = ended
        self._over = threading.Event()
        self._started = threading.Event()
        self._kills_before = out_of_memory_kills()
        self._out_of_memory = False
        self._threads = [
            threading.Thread(target=copy, daemon=True),
            threading.Thread(target=self._await_end, args=(descriptors,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def id(self) -> int:
        """The process id. Until a forked process exists, this is the id of its fork server."""
        return self._child.id

    @property
    def started(self) -> bool:
        """True once the process exists, even if it has ended."""
        return self._started.is_set()

    @property
    def ending(self) -> str:
        """A description of how the process ended; "" while the process runs."""
        if self.exit_code is None:
            return ""
        how = describe_ending(self.exit_code, out_of_memory=self._out_of_memory)
        return f"{how}: {self._why_killed}" if self._why_killed else how

    @property
    def crashed(self) -> bool:
        """True if the process has crashed. See `processes.program`."""
        if self.exit_code is None or self._why_killed:
            return False
        return is_crash(self.exit_code, out_of_memory=self._out_of_memory)

    @property
    def state(self) -> str:
        """The state of the process according to the system, as a verb phrase such as "is running"."""
        try:
            letter = Path(f"/proc/{self.id}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return "has ended"
        return STATES.get(letter, "is in an unknown state")

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process to end and for its last output. Return False if the process does not end in time."""
        if not self._over.wait(timeout_s):
            return False
        for thread in self._threads:
            thread.join(OUTPUT_TIMEOUT_S)
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it is still running."""
        self._child.signal(number)

    def kill(self, why: str = "") -> None:
        """Kill the process and all processes that it has started. `ending` then includes the reason `why`."""
        self._why_killed = why
        self.signal(signal.SIGKILL)

    @property
    def words(self) -> str:
        """The last lines of the output, if the process has failed by itself; "" if a signal has terminated it."""
        return self.tail() if self.exit_code is not None and self.exit_code > 0 else ""

    def tail(self) -> str:
        """Return the last lines of the output; "" if the log cannot be read."""
        if self.exit_code is not None:
            self._threads[0].join(OUTPUT_TIMEOUT_S)  # the last lines may not have been copied yet
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                return "\n".join(log.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
        except OSError:
            return ""

    def _await_end(self, descriptors: Descriptors) -> None:
        """Wait until the process has ended. If it failed or was killed, the rest of its process group is killed."""
        try:
            self._child.await_start()
            self._started.set()
        finally:
            for descriptor in set(descriptors.given):
                os.close(descriptor)
        exit_code = self._child.await_end()
        self._out_of_memory = out_of_memory_kills() > self._kills_before
        self.exit_code = exit_code
        self._ended(self)
        self._over.set()


class LocalEngine:
    """Starts, monitors and ends the processes of one run on this machine.

    Args:
        job: the configuration of the run.
        coordinator: the address of the coordinator.
        starter: starts the processes.
        channels: opens the standard streams of the processes.
        worker_ended: called on a separate thread when the process of a worker has ended for any reason, with the
            index of the worker and a description of how its process ended.
        machine: index of this machine; 0 for the machine with the coordinator.
        listener: passes connections to the servers of this machine, if they do not listen themselves.
        listens_at: address of the listener. Default: the address of the coordinator.
        imports: see `Assignment`.

    Attributes:
        servers: index of a server -> its process, for all servers that were started here.
        workers: index of a worker -> its process, for all workers that were started here.
    """

    def __init__(
        self,
        job: Job,
        coordinator: str,
        starter: Starter,
        channels: Channels,
        worker_ended: Callable[[int, str], None],
        machine: int = 0,
        listener: Listener | None = None,
        listens_at: str = "tls:",
        imports: Sequence[str] = (),
    ) -> None:
        self._job = job
        self._coordinator = coordinator
        self._starter = starter
        self._channels = channels
        self._worker_ended = worker_ended
        self._machine = machine
        self._listener = listener
        self._listens_at = listens_at
        self._imports = tuple(imports)
        self.servers: dict[int, Process] = {}
        self.workers: dict[int, Process] = {}

    @property
    def processes(self) -> list[Process]:
        """All processes: the workers, and then the servers."""
        return [*self.workers.values(), *self.servers.values()]

    def start(
        self,
        role: Role,
        index: int,
        machine: HostMachine,
        payload: bytes,
        arguments: Sequence[str] = (),
        incarnation: int = 0,
        device: Device | None = None,
    ) -> None:
        """Start a server or worker, to which the objects in `payload` are sent. See `ProcessOrder` for the arguments.

        Raises:
            OSError: the process cannot be started.
        """
        receiver = self._listener.receiver(index) if role == "server" and self._listener is not None else None
        assignment = Assignment(
            job=self._job,
            role=role,
            index=index,
            coordinator=self._coordinator,
            host=machine.host,
            incarnation=incarnation,
            machine=self._machine,
            address="" if receiver is None else f"{self._listens_at}/{index}",
            device=device,
            imports=self._imports if role == "worker" or device is not None else (),
        )
        name = f"{role} {index}"
        log = Path(self._job.run_dir, f"{role}-{index}.log")
        # If the run has gone on from a checkpoint, the log already contains the output of the process that had the same
        # name before.
        channel = self._channels.open(name, log, append=incarnation > 0 or log.exists())
        passed = None if receiver is None else receiver.detach()
        descriptors = Descriptors(channel.stdin, channel.stdout, channel.stdout, file_of(payload), passed)
        try:
            child = self._starter.start(
                machine.prefix, ProcessOrder(assignment, tuple(arguments)), descriptors
            )
        except OSError:
            channel.close()
            for descriptor in set(descriptors.given):
                os.close(descriptor)
            raise

        def ended(process: Process) -> None:
            if role == "worker":
                self._worker_ended(index, process.ending)

        started = self.servers if role == "server" else self.workers
        started[index] = Process(name, child, descriptors, channel.copy, log, ended)

    @property
    def finished(self) -> bool:
        """True if a worker has finished its script."""
        return any(worker.exit_code in (0, EXIT_INTERRUPTED) for worker in self.workers.values())

    @property
    def interrupted(self) -> list[int]:
        """The workers whose scripts have caught a SIGINT, and have ended because of it."""
        return [index for index, worker in self.workers.items() if worker.exit_code == EXIT_INTERRUPTED]

    def failed_server(self) -> RunFailedError | None:
        """Return the failure of a server that has ended during the run, or None if all servers are still running."""
        for server in self.servers.values():
            if server.exit_code is not None:
                return RunFailedError(server.name, server.ending, server.words)
        return None

    def failed_worker(self) -> RunFailedError | None:
        """Return the failure of a worker that has ended with a nonzero exit code, or None.

        A worker that was terminated by a signal is lost, which is not a failure: the other workers continue. The same
        applies to a worker that could not continue because another process was lost, and to a worker whose script was
        interrupted and has ended by itself.
        """
        for worker in self.workers.values():
            if (code := worker.exit_code or 0) > 0 and code not in (EXIT_PEER_LOST, EXIT_INTERRUPTED):
                return RunFailedError(worker.name, worker.ending, worker.tail())
        return None

    def process(self, role: str, index: int) -> Process | None:
        """Return the process of a server or worker; None if it runs on another machine."""
        return (self.servers if role == "server" else self.workers).get(index)

    def end(
        self, processes: Iterable[Process], *, grace_s: float, hurried: Callable[[], bool] = lambda: False
    ) -> list[Process]:
        """End processes, and return the processes that are still running afterwards.

        The processes are first given some time to exit on their own. Then they receive SIGTERM, and finally SIGKILL.

        Args:
            processes: the processes to end.
            grace_s: number of seconds to wait for the processes to exit by themselves.
            hurried: called repeatedly; as soon as it returns True, SIGKILL is sent without further waiting.
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


# -- When workers that were taken out of a run join it again -------------------------------------------------
#
# A worker is taken out if it was stopped, or if its machine was silent, while the other workers
# continued. When the worker runs again, its results are no longer used, so its process ends. Then the agent of its
# machine asks the coordinator to let the worker join again. The agent asks after a pause, which doubles each time, and
# asks only a limited number of times. A worker whose script has failed, or that was killed, does not join again.

MOST_REJOINS = 10
"""Default maximum number of times that workers of one machine try to join again."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class Rejoins:
    """Counts how often workers of one machine have tried to join again.

    Args:
        most: maximum number of attempts.

    Example:
        >>> rejoins = Rejoins(most=3)
        >>> [rejoins.pause_s() for _ in range(4)]
        [1.0, 2.0, 4.0, None]
    """

    def __init__(self, most: int = MOST_REJOINS) -> None:
        self._most = most
        self._count = 0
        self._next_s = FIRST_PAUSE_S

    def pause_s(self) -> float | None:
        """Return the time in seconds after which a worker may try to join again; None if it may never try again."""
        if self._count == self._most:
            return None
        self._count += 1
        self._next_s, pause_s = min(2 * self._next_s, LONGEST_PAUSE_S), self._next_s
        return pause_s

"""Starting the server and worker processes of a run.

`Starter` starts processes in one of two ways. Processes on one machine are forked by a fork server, which has
imported torch once for all of them (see `fork_server`). If there is only one process on a machine, or the system or
the fork server cannot fork, each process is a new program. Both kinds of processes have the same standard streams,
environment and process group, and end with the launcher.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol

from . import program
from .child import await_group_leader
from .fork_server import EXIT_THREADS, fork_here
from .orders import (
    Descriptors,
    ProcessOrder,
    await_end,
    await_ready,
    await_start,
    file_of,
    open_file,
    send_order,
)

logger = logging.getLogger("paceline.starting")

END_TIMEOUT_S = 1.0  # time after which a fork server that has nothing left to do is killed

Prefix = tuple[str, ...]


class Child(Protocol):
    """A process that has been started, or will be as soon as its fork server is ready."""

    @property
    def id(self) -> int:
        """The process id. Until a forked process exists, this is the id of its fork server."""
        ...

    def await_start(self) -> None:
        """Wait until the process has its descriptors, so that the caller may close them, or until it cannot start."""
        ...

    def await_end(self) -> int:
        """Wait until the process has ended, and return its exit code.

        If a signal has terminated the process, the exit code is minus the number of the signal.

        If the process failed or was killed, the rest of its process group is killed. The group is signaled before its
        leader is reaped, because the group's id may be reused afterwards.
        """
        ...

    def signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        ...


class Starter:
    """A context manager that starts the processes of one run, and ends its fork servers.

    The fork servers begin to import torch when this object is created.

    Args:
        prefixes: for each process, the command that is put in front of its command line. See `HostMachine`.
    """

    def __init__(self, prefixes: Iterable[Prefix]) -> None:
        counts = Counter(prefixes)
        self._environment = _environment(max(1, counts.total()))
        self._fork_servers: dict[Prefix, ForkServer] = {}
        try:
            for prefix, count in counts.items():
                if count > 1 and can_fork():
                    self._fork_servers[prefix] = ForkServer.executed(prefix, self._environment)
        except OSError:
            self.close()
            raise

    @classmethod
    def here(cls) -> Starter:
        """Import torch, and return a starter whose fork server this process has forked; see `fork_here`.

        All processes are on this machine. How many there will be need not be known.
        """
        starter = cls([])
        if can_fork() and (server := ForkServer.forked((), starter._environment)) is not None:
            starter._fork_servers[()] = server
        return starter

    def __enter__(self) -> Starter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the fork servers. Processes that are still running are killed."""
        while self._fork_servers:
            self._fork_servers.popitem()[1].close()

    def start(self, prefix: Prefix, order: ProcessOrder, descriptors: Descriptors) -> Child:
        """Start a process, with descriptors that stay open until `Child.await_start` has returned.

        Raises:
            OSError: the process cannot be started.
        """
        server = self._fork_servers.get(prefix)
        if server is None:
            return Executed(prefix, self._environment, order, descriptors)
        return Forked(server, order, descriptors)


def can_fork() -> bool:
    """Return True if this system has what a fork server needs, which is Linux 5.3."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


class Executed:
    """A process that is a new program. See `Child`.

    Args:
        prefix: see `Starter`.
        environment: environment of the process.
        order: what the process is to do.
        descriptors: the descriptors of the process.
    """

    def __init__(
        self, prefix: Prefix, environment: dict[str, str], order: ProcessOrder, descriptors: Descriptors
    ) -> None:
        # The process is reaped by `await_end` while this lock is held: the id of a reaped process may be reused.
        self._lock = threading.Lock()
        self._ended = False
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._popen = _execute(
                "process",
                prefix,
                environment,
                theirs,
                descriptors.stdout,
                descriptors.stderr,
                session=descriptors.terminal,
            )
            send_order(ours, order, descriptors, report=theirs)

    @property
    def id(self) -> int:
        return self._popen.pid

    def await_start(self) -> None:
        pass

    def await_end(self) -> int:
        # The program that called the launcher may have reaped the process.
        with contextlib.suppress(ChildProcessError):
            await_group_leader(self.id)
        with self._lock:
            self._ended = True
            return self._popen.wait()

    def signal(self, number: int) -> None:
        with self._lock:
            if not self._ended:
                os.kill(self.id, number)


class ForkServer:
    """A running fork server on one machine.

    Args:
        prefix: see `Starter`.
        environment: environment of the fork server and its children.
        process: the process of the fork server.
        control: the socket on which orders are sent to it.
        output: descriptor of the file for its standard output and its standard error.
    """

    def __init__(
        self,
        prefix: Prefix,
        environment: dict[str, str],
        process: subprocess.Popen[bytes] | ForkedHere,
        control: socket.socket,
        output: int,
    ) -> None:
        self._prefix = prefix
        self._environment = environment
        # Orders are sent one at a time, because the system limits the number of descriptors that are under way.
        self._lock = threading.Lock()
        self._ready = False
        self._process = process
        self._control = control
        self._output = output

    @classmethod
    def executed(cls, prefix: Prefix, environment: dict[str, str]) -> ForkServer:
        """Return a fork server that is a new program."""
        control, theirs = socket.socketpair()
        output = file_of(b"")
        with theirs:
            process = _execute("fork server", prefix, environment, theirs, output, output)
        return cls(prefix, environment, process, control, output)

    @classmethod
    def forked(cls, prefix: Prefix, environment: dict[str, str]) -> ForkServer | None:
        """Return a fork server that this process has forked; None if it cannot fork. See `fork_here`."""
        control, theirs = socket.socketpair()
        output = file_of(b"")
        with theirs:
            process_id = fork_here(theirs, output)
        if process_id is None:
            control.close()
            os.close(output)
            return None
        return cls(prefix, environment, ForkedHere(process_id), control, output)

    @property
    def id(self) -> int:
        """The process id."""
        return self._process.pid

    def fork(self, order: ProcessOrder, descriptors: Descriptors) -> _Started | Executed | None:
        """Start a process, as soon as the fork server is ready. If it cannot fork, start a new program.

        Return None if the fork server has ended.
        """
        report, theirs = socket.socketpair()
        with self._lock, theirs:
            self._ready = self._ready or await_ready(self._control)
            started = None
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                if self._ready:
                    send_order(self._control, order, descriptors, theirs)
                    theirs.close()
                    started = await_start(report)
        if started is not None:
            return _Started(*started, report)
        report.close()
        if self.await_end() != EXIT_THREADS:
            # Here its children write, too, so the log of the process says why it was not started.
            with open_file(os.dup(self._output)) as output, contextlib.suppress(OSError):
                os.write(descriptors.stderr, output.read())
            return None
        logger.warning(
            "a module has started threads while it was imported, so %s imports torch for itself, which takes longer "
            "(see 'How the processes start' in the guide)",
            order.title,
        )
        return Executed(self._prefix, self._environment, order, descriptors)

    def kill(self) -> None:
        """Kill the fork server, and so all processes that it has forked."""
        self._process.kill()

    def await_end(self) -> int:
        """Wait until the fork server has ended, and return its exit code."""
        return self._process.wait()

    def close(self) -> None:
        """End the fork server. If it is still importing, it is killed."""
        self._control.close()
        if not self._ready:
            self.kill()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        os.close(self._output)


class ForkedHere:
    """A child process that this process has forked, with the methods of `subprocess.Popen` that `ForkServer` uses.

    Args:
        pid: the process id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._lock = threading.Lock()
        self._handle = os.pidfd_open(pid)  # is never closed: this process has only one such child
        self._exit_code: int | None = None

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        ended = select.poll()
        ended.register(self._handle, select.POLLIN)
        if not ended.poll(None if timeout is None else timeout * 1000.0):
            raise subprocess.TimeoutExpired("fork server", timeout or 0.0)
        with self._lock:
            if self._exit_code is None:
                self._exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self._exit_code


class _Started:
    """A process that a fork server has forked.

    Args:
        id: the process id.
        handle: the pidfd of the process. A signal that is sent to it cannot reach another process.
        report: the socket on which the end of the process is reported.
    """

    def __init__(self, id: int, handle: int, report: socket.socket) -> None:
        self.id = id
        self._handle = handle
        self._report = report
        self._lock = threading.Lock()
        self._ended = False

    def await_end(self) -> int:
        """See `Child`."""
        with self._report:
            exit_code = await_end(self._report)
        # If the fork server was killed, then its children were, too. Nobody knows their exit codes.
        exists = select.poll()
        exists.register(self._handle, select.POLLIN)
        exists.poll()
        with self._lock:
            self._ended = True
            os.close(self._handle)
        return -signal.SIGKILL if exit_code is None else exit_code

    def signal(self, number: int) -> None:
        """See `Child`."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if not self._ended:
                signal.pidfd_send_signal(self._handle, number)


class Forked:
    """A process that a fork server forks when it is ready. See `Child`.

    Args:
        server: the fork server.
        order: what the process is to do.
        descriptors: the descriptors of the process.
    """

    def __init__(self, server: ForkServer, order: ProcessOrder, descriptors: Descriptors) -> None:
        self._server = server
        self._order = order
        self._descriptors = descriptors
        self._process: _Started | Executed | None = None

    @property
    def id(self) -> int:
        return self._server.id if self._process is None else self._process.id

    def await_start(self) -> None:
        self._process = self._server.fork(self._order, self._descriptors)

    def await_end(self) -> int:
        return self._server.await_end() if self._process is None else self._process.await_end()

    def signal(self, number: int) -> None:
        if self._process is None:
            # The processes of a run are signaled before they have started only to end them all.
            self._server.kill()
        else:
            self._process.signal(number)


def _environment(processes: int) -> dict[str, str]:
    """Return the environment of the programs that are executed for a run; see `program.environment`."""
    return {**program.environment(processes), program.PARENT_VARIABLE: str(os.getpid())}


def _execute(
    kind: str,
    prefix: Prefix,
    environment: dict[str, str],
    control: socket.socket,
    stdout: int,
    stderr: int,
    *,
    session: bool = False,
) -> subprocess.Popen[bytes]:
    """Execute `boot`, with the socket `control` as its standard input. See `boot` for `kind`."""
    return program.execute(
        [program.BOOT, kind],
        prefix=prefix,
        environment=environment,
        stdin=control.fileno(),
        stdout=stdout,
        stderr=stderr,
        # In its own process group, the process does not receive Ctrl-C. The launcher does, and ends the run.
        process_group=None if session else 0,
        start_new_session=session,
    )

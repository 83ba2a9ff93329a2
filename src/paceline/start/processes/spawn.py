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
from typing import NamedTuple

from . import program
from .fork_server import EXIT_THREADS
from .orders import Descriptors, ProcessOrder, await_end, await_ready, await_start, send_order
from .program import await_group_leader, file_of

logger = logging.getLogger("paceline.starting")

END_TIMEOUT_S = 1.0  # a fork server that has nothing left to do is killed after this time

EXIT_NOT_STARTED = 1  # exit code of a process that could not be started

MOST_OUTPUT_BYTES = 2**20  # more than a traceback

Prefix = tuple[str, ...]


class Starter:
    """A context manager that starts the processes of one run, and ends its fork servers.

    The fork servers begin to import torch when this object is created.

    Args:
        prefixes: for each process, the command that is put in front of its command line. See `HostMachine`.
    """

    def __init__(self, prefixes: Iterable[Prefix]) -> None:
        counts = Counter(prefixes)
        self._environment = {
            **program.environment(max(1, counts.total())),
            program.PARENT_VARIABLE: str(os.getpid()),
        }
        self._fork_servers: dict[Prefix, ForkServer] = {}
        try:
            for prefix, count in counts.items():
                if count > 1 and can_fork():
                    self._fork_servers[prefix] = ForkServer(prefix, self._environment)
        except OSError:
            self.close()
            raise

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
        return Child(prefix, self._environment, order, descriptors, self._fork_servers.get(prefix))


def can_fork() -> bool:
    """Return True if this system can run a fork server, which needs Linux 5.3 or later."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


class Child:
    """A process of a run: either a new program, or a process that a fork server forks as soon as the server is ready.

    Args:
        prefix: see `Starter`.
        environment: environment of the process.
        order: the task of the process.
        descriptors: the descriptors of the process, which stay open until `await_start` has returned.
        server: the fork server; None if there is none.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        prefix: Prefix,
        environment: dict[str, str],
        order: ProcessOrder,
        descriptors: Descriptors,
        server: ForkServer | None,
    ) -> None:
        # While this lock is held, the process is not reaped, so no other process has its id.
        self._lock = threading.Lock()
        self._ended = False
        self._failed = False  # True if the process could not be started; its fork server may be running
        self._asked = prefix, environment, order, descriptors
        self._server = server
        self._popen: subprocess.Popen[bytes] | None = None
        self._forked: Forked | None = None
        if server is None:
            self._execute()

    @property
    def id(self) -> int:
        """The process id. Until a forked process exists, this is the id of its fork server."""
        if self._popen is not None:
            return self._popen.pid
        assert self._server is not None
        return self._server.id if self._forked is None else self._forked.id

    def await_start(self) -> None:
        """Wait until the process has its descriptors or has failed to start.

        After that, the caller may close the descriptors.
        """
        if self._server is None:
            return
        _, _, order, descriptors = self._asked
        try:
            self._forked = self._server.fork(order, descriptors)
            if self._forked is not None:
                return
            if self._server.await_end() != EXIT_THREADS:
                self._say_why(self._server.words())
                return
            logger.warning(
                "a module has started threads while it was imported, so %s imports torch for itself, which takes "
                "longer (see 'How the processes start' in the guide)",
                order.title,
            )
            self._execute()
        except Exception as error:  # any, because the run waits for ever if this thread ends without a word
            self._failed = True
            self._say_why(f"{order.title} cannot be started: {error}\n".encode())

    def _say_why(self, words: bytes) -> None:
        """Write to the log of the process why it was not started."""
        with contextlib.suppress(OSError):
            os.write(self._asked[3].stderr, words)

    def await_end(self) -> int:
        """Wait until the process has ended, and return its exit code.

        If a signal has terminated the process, the exit code is minus the number of the signal.

        If the process failed or was killed, the rest of its process group is killed. The group is signaled before its
        leader is reaped, because the group's id may be reused afterwards.
        """
        if self._forked is not None:
            with self._forked.report as report:
                exit_code = await_end(report)
            # If the fork server was killed, its children were killed, too. Their exit codes are unknown.
            exists = select.poll()
            exists.register(self._forked.handle, select.POLLIN)
            exists.poll()
            with self._lock:
                self._ended = True
                os.close(self._forked.handle)
            return -signal.SIGKILL if exit_code is None else exit_code
        if self._popen is None:
            assert self._server is not None
            return EXIT_NOT_STARTED if self._failed else self._server.await_end()
        # The program that called the launcher may have reaped the process.
        with contextlib.suppress(ChildProcessError):
            await_group_leader(self.id)
        with self._lock:
            self._ended = True
            return self._popen.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._ended:
                return
            if self._forked is not None:
                signal.pidfd_send_signal(self._forked.handle, number)
            elif self._popen is not None:
                os.kill(self._popen.pid, number)
            elif self._server is not None and not self._failed:
                # A process that has not started gets a signal only if the whole run must end. So the server is killed.
                self._server.kill()

    def _execute(self) -> None:
        prefix, environment, order, descriptors = self._asked
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._popen = _boot(
                "process",
                prefix,
                environment,
                theirs,
                descriptors.stdout,
                descriptors.stderr,
                session=descriptors.terminal,
            )
            send_order(ours, order, descriptors, report=theirs)


class Forked(NamedTuple):
    """A process that a fork server has forked.

    Attributes:
        id: the process id.
        handle: the pidfd of the process. A signal that is sent to the pidfd cannot reach another process.
        report: the socket on which the end of the process is reported.
    """

    id: int
    handle: int
    report: socket.socket


class ForkServer:
    """A running fork server on one machine.

    Args:
        prefix: see `Starter`.
        environment: environment of the fork server and its children.
    """

    def __init__(self, prefix: Prefix, environment: dict[str, str]) -> None:
        # Orders are sent one at a time, because the system limits the number of descriptors that are under way.
        self._lock = threading.Lock()
        self._ready = False
        self._control, theirs = socket.socketpair()
        self._output = file_of(b"")
        with theirs:
            self._process = _boot("fork server", prefix, environment, theirs, self._output, self._output)

    @property
    def id(self) -> int:
        """The process id."""
        return self._process.pid

    def fork(self, order: ProcessOrder, descriptors: Descriptors) -> Forked | None:
        """Start a process, as soon as the fork server is ready. Return None if the fork server has ended."""
        report, theirs = socket.socketpair()
        started = None
        try:
            with self._lock, theirs, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._ready = self._ready or await_ready(self._control)
                if self._ready:
                    send_order(self._control, order, descriptors, theirs)
                    theirs.close()
                    started = await_start(report)
        finally:
            if started is None:
                report.close()
        return None if started is None else Forked(*started, report)

    def words(self) -> bytes:
        """Return the output of the fork server, after its end.

        The output includes what a child has written before the child had standard streams of its own.
        """
        return os.pread(self._output, MOST_OUTPUT_BYTES, 0)

    def kill(self) -> None:
        """Kill the fork server, and so all processes that it has forked."""
        self._process.kill()

    def await_end(self) -> int:
        """Wait until the fork server has ended, and return its exit code."""
        return self._process.wait()

    def close(self) -> None:
        """End the fork server. If it is still importing modules, kill it."""
        self._control.close()
        if not self._ready:
            self.kill()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        os.close(self._output)


def _boot(
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
        # In its own process group, the process does not receive Ctrl-C. The launcher receives Ctrl-C, and ends the run.
        process_group=None if session else 0,
        start_new_session=session,
    )

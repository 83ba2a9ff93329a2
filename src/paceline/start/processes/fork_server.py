"""The fork server: a process that has imported torch, NumPy and Paceline, and forks the servers and workers of a run.

Importing torch takes more than a second of CPU time. The fork server imports it once for all processes on a machine,
which then also share the memory of the imported modules.

Only the thread that calls `fork` exists in the child. So a library that has started threads, or that another thread has
locked, does not work in the child. The fork server therefore runs no tensor operation, and makes sure that it has no
other thread when it forks. OpenBLAS, which NumPy loads, starts threads when it is imported, but ends them before each
fork; so the fork server forks once before it counts its threads. If other threads remain, it exits with `EXIT_THREADS`,
and the launcher starts each process as a new program instead.

A forked process must not differ from a new program in anything that a script can observe, apart from the modules that
are already imported:

- The fork server is executed with the environment of its children, because `GLIBC_TUNABLES` and `OMP_NUM_THREADS` are
  read when a program or a library starts.
- Each child gets its own standard streams, process group, title, and random generators.
- A child is killed when the fork server exits, and the fork server is killed when the launcher exits.
- `begin` *returns* in each child, so that the script does not run below the fork server's frames. At the end, `leave`
  runs `atexit` handlers, waits for threads, and finalizes the objects that the script has left in its modules.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import sys
import termios
import weakref
from io import TextIOWrapper
from typing import NoReturn, cast

from .orders import (
    Descriptors,
    ProcessOrder,
    Received,
    leave,
    receive_order,
    report_end,
    report_ready,
    report_start,
)
from .program import await_group_leader, end_with_parent, importing, set_title

EXIT_THREADS = 76
"""Exit code of a fork server that cannot fork because it has several threads."""


def carry_out(kind: str) -> NoReturn:
    """Become a server or a worker, or fork servers and workers. The orders arrive on standard input, which is a socket.

    Args:
        kind: see `begin`.
    """
    # Schedulers send SIGTERM to all processes. The fork server ignores this signal, because all children would end with
    # the fork server.
    at_sigterm = signal.signal(signal.SIGTERM, signal.SIG_IGN) if kind == "fork server" else None
    order, descriptors = begin(kind)
    if kind == "fork server":
        signal.signal(signal.SIGTERM, at_sigterm)
    shared = frozenset(sys.modules)

    with importing():
        from .child import main

    status = main(order, descriptors)
    sys.stdout.flush()
    sys.stderr.flush()
    if kind == "fork server":
        leave(status, shared)
    sys.exit(status)


def begin(kind: str) -> tuple[ProcessOrder, Descriptors]:
    """Return the order of this process, and its descriptors.

    Args:
        kind: "fork server" if this process is to fork. Then this function returns in each child, and never in this
            process. Otherwise, this process carries out the first order itself.
    """
    control = socket.socket(fileno=os.dup(0))
    received = _next_child(control) if kind == "fork server" else receive_order(control)
    if received is None:
        sys.exit(1)  # the launcher has ended
    control.close()
    received.report.close()
    _take_over(received.descriptors)
    set_title(received.order.title)
    if kind == "fork server":
        _renew_generators()
    return received.order, received.descriptors


def _next_child(control: socket.socket) -> Received:
    """Fork a child for each order, and report how each ends. Return in each child, with its order."""
    _import_everything()
    if thread_count() > 1:
        _fork_nothing()
    _require_one_thread()
    report_ready(control)
    parent = os.getpid()
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    running: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> process id, and the socket for its report
    while True:
        for key, _ in selector.select():
            if key.fd != control.fileno():
                selector.unregister(key.fd)
                process_id, report = running.pop(key.fd)
                os.close(key.fd)
                with report, contextlib.suppress(OSError):
                    report_end(report, _reap(process_id))
                continue
            received = receive_order(control)
            if received is None:
                # All children are killed, because their parent exits. Nothing has to be cleaned up here.
                os._exit(0)
            _require_one_thread()
            process_id = os.fork()
            if process_id == 0:
                end_with_parent(parent)
                _leave_group(received.descriptors)
                selector.close()
                for handle, (_, report) in running.items():
                    os.close(handle)
                    report.close()
                return received
            if not received.descriptors.terminal:  # the leader of a group cannot begin a session
                with contextlib.suppress(OSError):
                    os.setpgid(process_id, process_id)  # before anybody can signal the group
            handle = os.pidfd_open(process_id)
            running[handle] = process_id, received.report
            selector.register(handle, selectors.EVENT_READ)
            with contextlib.suppress(OSError):
                report_start(received.report, process_id, handle)
            for descriptor in received.descriptors.given:
                os.close(descriptor)


def _import_everything() -> None:
    """Import modules that all processes use, so that the processes share memory. Run no tensor operation."""
    with importing():
        import numpy.random  # noqa: F401
        import torch  # noqa: F401

        from ...train import collectives, epochs, prepare  # noqa: F401
        from . import child  # noqa: F401
    keep_imported()


def keep_imported() -> None:
    """Keep children from finalizing shared objects at their end. Removing torch's operators alone would take 20 ms."""
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False


def thread_count() -> int:
    """Return the number of threads of this process, including those that Python does not know."""
    return len(os.listdir("/proc/self/task"))


def _fork_nothing() -> None:
    """Fork a child that exits immediately. Libraries that can restart their threads end them before the fork."""
    process_id = os.fork()
    if process_id == 0:
        os._exit(0)
    os.waitpid(process_id, 0)


def _require_one_thread() -> None:
    if (count := thread_count()) > 1:
        print(f"a fork server must have one thread, but this process has {count}", file=sys.stderr)
        sys.exit(EXIT_THREADS)


def _reap(process_id: int) -> int:
    """Return the exit code of a process that has ended. If it failed or was killed, kill the rest of its group."""
    await_group_leader(process_id)
    return os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])


def _leave_group(descriptors: Descriptors) -> None:
    """Begin a process group, and a session if this process gets a terminal."""
    if descriptors.terminal:
        os.setsid()
    else:
        os.setpgid(0, 0)


def _take_over(descriptors: Descriptors) -> None:
    """Make the given descriptors the standard streams of this process. Make a terminal its controlling terminal."""
    if descriptors.terminal:
        fcntl.ioctl(descriptors.stdout, termios.TIOCSCTTY, 0)
    for target, source in enumerate(descriptors[:3]):
        os.dup2(source, target)
        os.close(source)
    # Nothing has been written to these objects yet, so their buffers contain no text for the former descriptors.
    for stream in cast(list[TextIOWrapper], [sys.stdout, sys.stderr]):
        stream.reconfigure(line_buffering=stream.isatty())


def _renew_generators() -> None:
    """Give NumPy's and torch's generators new seeds, as in a new program. Python's own generator reseeds itself."""
    import numpy as np
    import torch

    np.random.seed()
    torch.default_generator.seed()

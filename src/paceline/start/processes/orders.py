"""The orders that the launcher sends to a process that becomes a server or a worker, and how they are sent.

The launcher starts a program (see `boot`) with a socket as its standard input, and sends *orders* over that socket.
An order consists of descriptors only: the standard streams of the new process, and two files without a name, which
contain the `ProcessOrder` and the payload. So an order may have any size, and is written once, however slowly it is
read. Each order also contains a socket on which the start and the end of the process are reported; see `report_start`
and `report_end`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import cloudpickle
import msgspec

from ...run.job import Assignment
from .program import file_of, open_file

REPORT = struct.Struct("<q")
MARK = b"+"


class ProcessOrder(msgspec.Struct, frozen=True):
    """The task of a new process.

    Attributes:
        assignment: role of the process, and the run that it belongs to.
        arguments: for a worker, ("function",) or ("script", path, arguments...) or
            ("module", name, arguments...); for a server, ().
    """

    assignment: Assignment
    arguments: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The title of the process, which `ps` shows."""
        place = self.assignment
        return f"paceline {place.role} {place.index} of {os.path.basename(place.job.run_dir)}"


class Descriptors(NamedTuple):
    """The descriptors of a new process.

    Attributes:
        stdin: its standard input.
        stdout: its standard output.
        stderr: its standard error.
        payload: a file with the objects that are sent to the process. The file is read from its start, whatever its
            offset is.
        passed: a socket over which the process receives its connections, or None. See `Listener`.
    """

    stdin: int
    stdout: int
    stderr: int
    payload: int
    passed: int | None = None

    @property
    def given(self) -> list[int]:
        """All descriptors except those that are None."""
        return [descriptor for descriptor in self if descriptor is not None]

    @property
    def terminal(self) -> bool:
        """True if the process gets a controlling terminal. This requires a session of its own."""
        return os.isatty(self.stdout)


class Received(NamedTuple):
    """An order as the new process receives it.

    Attributes:
        order: the order.
        descriptors: the descriptors of the process.
        report: the socket on which the start and the end of the process are reported.
    """

    order: ProcessOrder
    descriptors: Descriptors
    report: socket.socket


def payload_of_server(path: Sequence[str], conditions: Mapping[str, object]) -> bytes:
    """Return the payload of a server.

    Args:
        path: module search path from which the server imports user-defined sync models, conditions and optimizers.
        conditions: name -> condition, for the conditions that cannot be imported.
    """
    return bytes(cloudpickle.dumps(list(path)) + cloudpickle.dumps(dict(conditions)))


def send_order(
    control: socket.socket, order: ProcessOrder, descriptors: Descriptors, report: socket.socket
) -> None:
    """Send an order. The caller may close all descriptors afterwards."""
    file = file_of(msgspec.msgpack.encode(order))
    try:
        socket.send_fds(control, [MARK], [file, *descriptors.given, report.fileno()])
    finally:
        os.close(file)


def receive_order(control: socket.socket) -> Received | None:
    """Return the next order, or None if the launcher has closed its end of the socket."""
    mark, received = _receive(control, len(MARK), 2 + len(Descriptors._fields))
    if not mark:
        return None
    file, *standard, report = received
    with open_file(file) as reader:
        order = msgspec.msgpack.decode(reader.read(), type=ProcessOrder)
    return Received(order, Descriptors(*standard), socket.socket(fileno=report))


def report_ready(control: socket.socket) -> None:
    """Report that orders can be carried out."""
    control.sendall(MARK)


def report_start(report: socket.socket, process_id: int, handle: int) -> None:
    """Report that a process has been started, and pass on its pidfd."""
    socket.send_fds(report, [REPORT.pack(process_id)], [handle])


def report_end(report: socket.socket, exit_code: int) -> None:
    """Report the exit code of a process, or minus the number of the signal that terminated it."""
    report.sendall(REPORT.pack(exit_code))


def await_ready(control: socket.socket) -> bool:
    """Wait for `report_ready`. Return False if the other end of the socket has been closed instead."""
    with contextlib.suppress(ConnectionResetError):
        return bool(control.recv(len(MARK)))
    return False


def await_start(report: socket.socket) -> tuple[int, int] | None:
    """Return the id and the pidfd of the process, or None if it was not started."""
    data, handles = _receive(report, REPORT.size, 1)
    return (REPORT.unpack(data)[0], handles[0]) if data else None


def await_end(report: socket.socket) -> int | None:
    """Return the exit code of the process (see `report_end`), or None if the reporting process has ended."""
    data = report.recv(REPORT.size)
    return REPORT.unpack(data)[0] if data else None


def _receive(source: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """Return the next bytes and the descriptors that came with them, which are not inherited by other programs."""
    data, received, _, _ = socket.recv_fds(source, size, most)
    for descriptor in received:
        os.set_inheritable(descriptor, False)
    return data, received


# -- The end of a forked process -----------------------------------------------------------------------------
#
# The normal end of the interpreter takes all modules apart. A forked process shares the memory of the modules
# that the fork server has imported, so taking them apart would first copy more than 100 MiB, which takes half
# a second. `leave` does everything else that the interpreter does at its end, and leaves these modules alone.


def leave(status: int, kept: Collection[str]) -> NoReturn:
    """End this process.

    Threads are waited for, and `atexit` handlers are called. The modules that are not kept lose their contents, so
    that objects in them are finalized and files are closed. Then the process ends, without C's own `atexit` handlers.

    Args:
        status: the exit code.
        kept: names of the modules that are not taken apart.
    """
    # The interpreter calls these two functions at its end.
    cast(Any, threading)._shutdown()
    cast(Any, atexit)._run_exitfuncs()
    _take_apart([name for name in sys.modules if name not in kept])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(status)


def _take_apart(names: list[str]) -> None:
    """Remove modules, as the interpreter does at its end: first those that nothing refers to, then the others."""
    modules = []
    for name in names:
        with contextlib.suppress(TypeError):  # any object can be a module, even one without weak references
            modules.append(weakref.ref(sys.modules.pop(name)))
    # A file in a cycle of references would lose the data in its buffer, because the garbage collector may close its
    # descriptor before it flushes the file. `gc.get_objects` returns no objects from before the fork, which are frozen.
    for file in [each for each in gc.get_objects() if issubclass(type(each), io.IOBase)]:
        with contextlib.suppress(Exception):  # the file is closed, or its class is the script's
            file.flush()
    gc.collect()
    for reference in reversed(modules):
        contents = getattr(reference(), "__dict__", {})
        for name in contents:
            if name != "__builtins__":
                contents[name] = None

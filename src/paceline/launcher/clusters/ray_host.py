"""The actor with which a run takes part in a Ray cluster: it starts one program, and relays messages to and from it.

The program (see `ray_program`) serves the run, or joins it with one worker. It has a main thread of its own, so it
can handle signals, and its workers end with it. A parent-death signal could not end it with the actor, because the
kernel sends this signal when the *thread* ends that has created the process, and the methods of an actor run on
threads that come and go. Instead, the program reads from a pipe, whose other end is closed when the actor has ended
for whatever reason. When an actor ends, Ray kills its child processes. So the program is not a child of the actor:
otherwise, it could neither leave the run nor remove its files.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import struct
import tempfile
import threading
from pathlib import Path
from typing import IO

from ...checkpoints.manifest import files_in
from ..processes.program import CALL, environment, execute

__all__ = ["END_TIMEOUT_S", "RayHost", "read_frame", "write_frame"]

END_TIMEOUT_S = 25.0  # longer than the time after which the program kills itself

LENGTH = struct.Struct("<Q")

BOOT = f"""
import os
if os.fork():
    os._exit(0)
{CALL}"""


def write_frame(sink: IO[bytes], data: bytes) -> None:
    """Write bytes with their length."""
    sink.write(LENGTH.pack(len(data)))
    sink.write(data)
    sink.flush()


def read_frame(source: IO[bytes]) -> bytes | None:
    """Return the next bytes that `write_frame` has written; None at the end of the file."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    size = LENGTH.unpack(head)[0]
    data = source.read(size)
    return data if len(data) == size else None


class RayHost:
    """An actor that hosts a program. Several of its methods may run at the same time, on different threads.

    It must not be created with secrets as arguments: Ray stores the arguments with which an actor is created.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="paceline-")
        order_source, order_sink = os.pipe()
        report_source, report_sink = os.pipe()
        self._orders = open(order_sink, "wb")  # noqa: SIM115 - closed by `end`
        self._lock = threading.Lock()  # of `_orders`
        self._reports: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        try:
            execute(
                ["-c", BOOT, "paceline.launcher.clusters.ray_program", str(report_sink), self._folder],
                environment=environment(1),
                stdin=order_source,
                pass_fds=[report_sink],
                start_new_session=True,  # Ray also kills the process group of an actor
            ).wait()
        finally:
            os.close(order_source)
            os.close(report_sink)
        threading.Thread(target=self._read_reports, args=(report_source,), daemon=True).start()

    def place(self, mark: str = "") -> tuple[str, str, str]:
        """Return the id and the address of the node on which the actor runs, and the directory of its files there.

        Args:
            mark: path of a file in the run directory. If this node sees it, the program works in the run directory.
        """
        import ray

        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        folder = str(Path(mark).parent) if mark and Path(mark).exists() else self._folder
        return str(node), str(address), folder

    def order(self, order: bytes, payload: bytes) -> None:
        """Send an order to the program; see `ray_program`. If it has ended, nothing happens."""
        self._send(order, payload)

    def hear(self) -> bytes | None:
        """Wait for the next message of the program, and return it. Return None if it has ended."""
        return self._reports.get()

    def signal(self, number: int) -> None:
        """Send a signal to the program, which already has an order. If it has ended, nothing happens."""
        self._send(str(number).encode())

    def files(self) -> list[tuple[str, int]]:
        """Return the names and the sizes in bytes of the files that the program has written to its own directory."""
        return [
            (str(path.relative_to(self._folder)), path.stat().st_size)
            for path in files_in(Path(self._folder))
        ]

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return a part of a file."""
        with Path(self._folder, name).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def write(self, name: str, data: bytes) -> None:
        """Append data to a file, before the program has its order."""
        path = Path(self._folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)

    def end(self, hurried: bool) -> None:
        """Let the program leave the run and end, or kill it if this must happen immediately. Remove its files."""
        if hurried:
            self.signal(signal.SIGKILL)
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._orders.close()
        self._ended.wait(END_TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, *frames: bytes) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):
            for frame in frames:
                write_frame(self._orders, frame)

    def _read_reports(self, descriptor: int) -> None:
        with open(descriptor, "rb") as source:
            while (report := read_frame(source)) is not None:
                self._reports.put(report)
        self._ended.set()
        self._reports.put(None)

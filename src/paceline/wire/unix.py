"""AF_UNIX sockets, to which only processes of the same user on this machine can connect.

unix:path         the address of a socket
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time

from ..errors import ConfigurationError
from .tls import Contexts
from .transport import BACKLOG, QUEUE_INTERVAL_S, Transport

__all__ = ["UNIX", "Unix", "UnixListener"]

MEMORY = "/dev/shm"  # a file system in memory
NAME = "socket"


class UnixListener(socket.socket):
    """A listening AF_UNIX socket to which only processes of the same user, and root, can connect.

    The name of the socket is removed as soon as the socket exists, so nothing remains even after SIGKILL. The process
    keeps a descriptor of the name's inode, and others connect through this descriptor in /proc, which they may only
    follow if they run as the same user. For others, the kernel refuses to connect: this process does not notice them.

    Attributes:
        path: the path to which clients connect.
    """

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._process = os.getpid()
        self._place: int | None = None
        self._folder = ""  # the folder with the name, until it is removed
        try:
            self._folder = _private_folder()
            self.path = f"{self._folder}/{NAME}"
            self.bind(self.path)
            self._place = os.open(self.path, os.O_PATH | os.O_CLOEXEC)
            # A process that has changed its user without exec does not let others of its user look into /proc.
            if os.stat("/proc/self/fd").st_uid == os.geteuid():
                self.path = f"/proc/{self._process}/fd/{self._place}"
                self._remove_folder()
            self.listen(BACKLOG)
            self.setblocking(False)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        place, self._place = self._place, None
        if place is not None:
            os.close(place)
        if os.getpid() == self._process:  # a fork closes its own copy only
            self._remove_folder()

    def _remove_folder(self) -> None:
        folder, self._folder = self._folder, ""
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


class Unix(Transport):
    """AF_UNIX sockets. Gradients and weights travel through them."""

    name = "unix"
    words = "AF_UNIX sockets (unix)"
    kinds = ("unix",)

    def listen(self, host: str = "", port: int = 0, *, secure: bool = False) -> tuple[UnixListener, str]:
        try:
            listener = UnixListener()
        except OSError as error:
            raise ConfigurationError(
                f"cannot create a socket for the processes of the run: {error}. It needs /proc, and either /dev/shm "
                "or a directory for temporary files (TMPDIR) that you may write to. Or use --transport tcp."
            ) from error
        return listener, f"unix:{listener.path}"

    def connect(self, address: str, timeout_s: float, known: Contexts | None) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            _connect(sock, address.partition(":")[2], time.monotonic() + timeout_s)
        except BaseException:
            sock.close()
            raise
        return sock


UNIX = Unix()


def _private_folder() -> str:
    """Create a folder that only its owner may enter, in memory if possible: a full disk should not matter.

    Its name says which process has created it. So whoever finds what a killed process has left can tell whose it is.
    """
    prefix = f"paceline-{os.getpid()}-"
    try:
        return tempfile.mkdtemp(prefix=prefix, dir=MEMORY)
    except OSError:
        return tempfile.mkdtemp(prefix=prefix)


def _connect(sock: socket.socket, name: str, deadline_s: float) -> None:
    while True:
        try:
            sock.connect(name)
            return
        except BlockingIOError:
            # The listener's queue is full. Unlike with TCP, the kernel does not retry the connection.
            if time.monotonic() > deadline_s:
                raise
            time.sleep(QUEUE_INTERVAL_S)

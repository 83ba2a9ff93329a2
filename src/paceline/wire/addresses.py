"""Listening sockets and connections. AF_UNIX and TCP addresses share one notation.

unix:path         an AF_UNIX socket, to which only processes of the same user can connect (see `UnixListener`)
tcp:host:port     a TCP socket
tls:host:port     a TCP socket whose connections use TLS, for the coordinator
tls:host:port/k   the same socket, for server k of the machine (see `preface`)
tls:/k            the same, on the host and port at which the coordinator was reached

An IPv6 address is written in brackets, as in "tls:[::1]:29600".
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import struct
import tempfile
import time
from typing import overload

from ..errors import ConfigurationError, InternalError, PeerLostError
from .preface import COORDINATOR, Preface
from .secure import SecureSocket
from .tls import Contexts

__all__ = [
    "UnixListener",
    "connect",
    "interface_to",
    "is_here",
    "is_local",
    "listen_tcp",
    "listen_unix",
    "own_addresses",
    "seen_from",
]

BACKLOG = 1024
MEMORY = "/dev/shm"  # a file system in memory
NAME = "socket"
SIOCGIFADDR = 0x8915  # request for the address of an interface; see netdevice(7)
QUEUE_INTERVAL_S = 0.01  # time between two attempts to connect while the listener's queue is full


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


def listen_unix() -> tuple[socket.socket, str]:
    """Return a new listening AF_UNIX socket and its address.

    Raises:
        ConfigurationError: the socket cannot be created.
    """
    try:
        listener = UnixListener()
    except OSError as error:
        raise ConfigurationError(
            f"cannot create a socket for the processes of the run: {error}. It needs /proc, and either /dev/shm or a "
            "directory for temporary files (TMPDIR) that you may write to. Or use --transport tcp."
        ) from error
    return listener, f"unix:{listener.path}"


def _private_folder() -> str:
    """Create a folder that only its owner may enter, in memory if possible: a full disk should not matter."""
    try:
        return tempfile.mkdtemp(prefix="paceline-", dir=MEMORY)
    except OSError:
        return tempfile.mkdtemp(prefix="paceline-")


def listen_tcp(host: str = "127.0.0.1", port: int = 0, *, secure: bool = False) -> tuple[socket.socket, str]:
    """Return a new listening TCP socket and its address. Port 0 picks any free port.

    If `secure` is True, the address says that the connections use TLS. The socket itself does not encrypt anything.

    Raises:
        ConfigurationError: the port is in use or not permitted, or the host is not an address of this machine.
    """
    host = host.removeprefix("[").removesuffix("]")
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        if isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
            raise ConfigurationError(
                f"cannot listen on {_in_brackets(host)}:{port}, because {host!r} is not an address of this machine: "
                f"{error}. Its addresses are {', '.join(own_addresses())}; 0.0.0.0 stands for all of them."
            ) from error
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        why = "it is in use" if in_use else str(error)
        raise ConfigurationError(
            f"cannot listen on {_in_brackets(host)}:{port}: {why}. Choose another port, or 0 for any free port."
        ) from error
    sock.setblocking(False)
    bound_host, bound_port = sock.getsockname()[:2]
    return sock, f"{'tls' if secure else 'tcp'}:{_in_brackets(bound_host)}:{bound_port}"


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine, in the order of its interfaces."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # the interface has no IPv4 address
                continue
            found.append(socket.inet_ntoa(answer[20:24]))
    return found


def is_local(address: str) -> bool:
    """Return True for an AF_UNIX or loopback address, which can be reached only from this machine."""
    return address.startswith(("unix:", "tcp:127.", "tls:127.", "tcp:[::1]:", "tls:[::1]:"))


def is_here(address: str) -> bool:
    """Return True if an address belongs to this machine. It may also be the end of a tunnel to another one."""
    if is_local(address):
        return True
    try:
        own, its = _route_to(_parts(address)[1].removeprefix("[").removesuffix("]"))
        return own == its
    except OSError:
        return False


def interface_to(host: str) -> str:
    """Return the address of the interface over which this machine reaches a host, which may be this machine itself.

    Nothing is sent.

    Raises:
        ConfigurationError: the name of the host is unknown, or there is no route to it.
    """
    try:
        return _route_to(host)[0]
    except OSError as error:
        raise ConfigurationError(
            f"the host {host!r} cannot be reached from this machine: {error}. Name the address on which the other "
            "machines reach this one with --listen."
        ) from error


def seen_from(address: str, reached: str) -> str:
    """Return the address of a process as another machine sees it.

    A process that listens on all addresses of its machine does not know which of them the other machine can reach. If
    the other machine reaches the coordinator through a tunnel, it reaches the servers through the same one.

    Args:
        address: the address on which the process listens.
        reached: the address at which the other machine has reached the coordinator, on the same machine.

    >>> seen_from("tcp:0.0.0.0:4000", "tcp:10.0.0.1:29600")
    'tcp:10.0.0.1:4000'
    >>> seen_from("tls:/1", "tls:10.0.0.1:29600")
    'tls:10.0.0.1:29600/1'
    """
    kind, host, port = _parts(address)
    if not host and kind == "tls":
        return reached + port
    if kind == "unix" or host not in ("0.0.0.0", "[::]"):
        return address
    return f"{kind}:{_parts(reached)[1]}:{port}"


def _route_to(host: str) -> tuple[str, str]:
    """Return the address from which this machine reaches a host, and the address of the host."""
    family, kind, _, _, place = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(place)
        return str(sock.getsockname()[0]), str(sock.getpeername()[0])


def _in_brackets(host: str) -> str:
    """Return a host as it is written in an address."""
    return f"[{host}]" if ":" in host else host


def _parts(address: str) -> tuple[str, str, str]:
    """Return the kind, the host and the port of an address."""
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    return kind, host, port


@overload
def connect(address: str, timeout_s: float = ..., known: None = ...) -> socket.socket: ...


@overload
def connect(
    address: str, timeout_s: float = ..., known: Contexts | None = ...
) -> socket.socket | SecureSocket: ...


def connect(
    address: str, timeout_s: float = 10.0, known: Contexts | None = None
) -> socket.socket | SecureSocket:
    """Return a connection to an address.

    Args:
        address: the address.
        timeout_s: maximum time in seconds.
        known: the TLS contexts of the run, if the address uses TLS.

    Raises:
        PeerLostError: no connection was made within `timeout_s`, for example because no process listens there.
        ProtocolError: the process that listens there does not have the key of the run, or the address is not that of
            the process that was reached.
    """
    kind, host, port = _parts(address)
    try:
        if kind != "unix":
            named = host.removeprefix("[").removesuffix("]")
            if kind == "tls":
                return _connect_securely(named, port, known, time.monotonic() + timeout_s)
            return socket.create_connection((named, int(port)), timeout=timeout_s)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            _connect_unix(sock, port, time.monotonic() + timeout_s)
        except BaseException:
            sock.close()
            raise
        return sock
    except OSError as error:
        raise PeerLostError(f"cannot connect to {address}: {error}") from error


def _connect_securely(host: str, port: str, known: Contexts | None, deadline_s: float) -> SecureSocket:
    """Return a TLS connection to the process that the last part of an address names, after the handshake."""
    if known is None:
        raise InternalError("a connection uses TLS, but the contexts of the run are not known")
    number, _, server = port.partition("/")
    preface = Preface(int(server) if server else COORDINATOR, known.mark)
    while True:
        left_s = max(QUEUE_INTERVAL_S, deadline_s - time.monotonic())
        sock = socket.create_connection((host, int(number)), timeout=left_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(preface.encode())
            secure = SecureSocket(sock, known, preface, server_side=False)
        except BaseException:
            sock.close()
            raise
        try:
            secure.shake_hands(max(QUEUE_INTERVAL_S, deadline_s - time.monotonic()))
            return secure
        except BlockingIOError:
            secure.close()
            if time.monotonic() > deadline_s:
                raise
            time.sleep(QUEUE_INTERVAL_S)
        except BaseException:
            secure.close()
            raise


def _connect_unix(sock: socket.socket, name: str, deadline_s: float) -> None:
    while True:
        try:
            sock.connect(name)
            return
        except BlockingIOError:
            # The listener's queue is full. Unlike with TCP, the kernel does not retry the connection.
            if time.monotonic() > deadline_s:
                raise
            time.sleep(QUEUE_INTERVAL_S)

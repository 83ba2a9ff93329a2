"""The transports, which connect the processes of a run and determine where the memory of its workers lies.

A transport is a subclass of `Transport`: TCP, AF_UNIX sockets, or shared memory. `TRANSPORTS`, at the end, is the
table of all transports. No other code distinguishes transports by name: other code reads the attributes of `Transport`.
So a new transport is a class and a row of this table.

Messages travel over the connections in frames (see `stream`). The memory and the descriptors that a transport needs
follow from `shares_memory`; see `paceline.run.footprint`.
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
from abc import ABC, abstractmethod
from typing import ClassVar, overload

from ..core.layout import Layout
from ..errors import ConfigurationError, InternalError, PeerLostError, ProtocolError
from .memory import ConnectionSource, Region, shared_memory_available
from .preface import COORDINATOR, Preface
from .ring import available as rings_available
from .secure import Contexts, SecureSocket

BACKLOG = 1024
QUEUE_INTERVAL_S = 0.01
"""Time between two attempts to connect while the listener's queue is full."""


class Transport(ABC):
    """A way in which the processes of a run are connected.

    Attributes:
        name: the name by which users choose the transport.
        words: a description of the transport, for users.
        kinds: the kinds of the transport's addresses: the parts before the first colon.
        shares_memory: True if servers map the memory of workers, so that gradients and weights do not travel. The
            connections pass the descriptors of the memory.
        spans_machines: True if the processes may run on several machines, so that the addresses have hosts and ports.
        needs: the feature of the system that the transport needs, for users; "" if every system has it.
    """

    name: ClassVar[str]
    words: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    shares_memory: ClassVar[bool] = False
    spans_machines: ClassVar[bool] = False
    needs: ClassVar[str] = ""

    def available(self) -> bool:
        """Return True if this system has what the transport needs."""
        return True

    @abstractmethod
    def listen(
        self, host: str = "127.0.0.1", port: int = 0, *, secure: bool = False
    ) -> tuple[ConnectionSource, str]:
        """Return a source of new connections that never blocks, and its address.

        Args:
            host: address of this machine, if the transport spans machines.
            port: port, if the transport spans machines; 0 for any free port.
            secure: True if the returned address says that the connections use TLS. The source itself encrypts nothing.

        Raises:
            ConfigurationError: the port is in use or not permitted, the host is not an address of this machine, or
                this process cannot listen at all.
        """

    @abstractmethod
    def connect(self, address: str, timeout_s: float, known: Contexts | None) -> socket.socket | SecureSocket:
        """Return a connection to an address of this transport. See the function `connect`.

        Raises:
            OSError: no connection was made within `timeout_s`.
            ProtocolError: the process that listens at the address does not belong to the run.
        """

    def place(self, layout: Layout, *, servers: int, offered: bool, name: str) -> Region:
        """Return new memory for the weights and gradients of a worker.

        Args:
            layout: layout of the model.
            servers: number of servers. With some transports, the worker exchanges messages with each server through
                this memory.
            offered: True if servers on this machine may find the memory, although its descriptor is not passed.
            name: name of the memory, by which servers recognize the memory.
        """
        return Region.create(layout, shared=offered, name=name)

    def is_here(self, address: str) -> bool:
        """Return True if an address belongs to this machine."""
        return True

    def seen_from(self, address: str, reached: str) -> str:
        """Return an address as another process sees it. See the function `seen_from`."""
        return address


# -- TCP sockets on one or several machines. In a run with a secret, the connections use TLS (see `secure`)
#
# tcp:host:port     the address of a socket
# tls:host:port     a socket whose connections use TLS, for the coordinator
# tls:host:port/k   the same socket, for server k of the machine (see `preface`)
# tls:/k            a socket for server k, on the host and port at which the coordinator was reached
#
# An IPv6 address is written in brackets, as in "tls:[::1]:29600".

SIOCGIFADDR = 0x8915  # request for the address of an interface; see netdevice(7)


class Tcp(Transport):
    """TCP sockets on one or several machines. If the run has a secret, the connections use TLS."""

    name = "tcp"
    words = "TCP on loopback (tcp)"
    kinds = ("tcp", "tls")
    spans_machines = True

    def listen(
        self, host: str = "127.0.0.1", port: int = 0, *, secure: bool = False
    ) -> tuple[socket.socket, str]:
        host = host.strip("[]")
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(BACKLOG)
        except (OSError, OverflowError) as error:
            sock.close()
            if isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
                raise ConfigurationError(
                    f"cannot listen on {_in_brackets(host)}:{port}, because {host!r} is not an address of this "
                    f"machine: {error}. The addresses of this machine are {', '.join(own_addresses())}; 0.0.0.0 stands "
                    "for all of them."
                ) from error
            in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            why = "it is in use" if in_use else str(error)
            raise ConfigurationError(
                f"cannot listen on {_in_brackets(host)}:{port}: {why}. Choose another port, or 0 for any free port."
            ) from error
        sock.setblocking(False)
        bound_host, bound_port = sock.getsockname()[:2]
        return sock, f"{'tls' if secure else 'tcp'}:{_in_brackets(bound_host)}:{bound_port}"

    def connect(self, address: str, timeout_s: float, known: Contexts | None) -> socket.socket | SecureSocket:
        kind, host, port = _parts(address)
        named = host.strip("[]")
        if kind == "tls":
            return _connect_securely(named, port, known, time.monotonic() + timeout_s)
        return socket.create_connection((named, int(port)), timeout=timeout_s)

    def is_here(self, address: str) -> bool:
        if is_local(address):
            return True
        try:
            own, its = _route_to(_parts(address)[1].strip("[]"))
            return own == its
        except OSError:
            return False

    def seen_from(self, address: str, reached: str) -> str:
        kind, host, port = _parts(address)
        if not host and kind == "tls":
            return reached + port
        if host not in ("0.0.0.0", "[::]"):
            return address
        return f"{kind}:{_parts(reached)[1]}:{port}"


TCP = Tcp()


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
    """Return True for a loopback address, which can be reached only from this machine."""
    return address.startswith(("tcp:127.", "tls:127.", "tcp:[::1]:", "tls:[::1]:"))


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
            f"the host {host!r} cannot be reached from this machine: {error}. Use --listen to name the address on "
            "which the other machines reach this machine."
        ) from error


def _route_to(host: str) -> tuple[str, str]:
    """Return the address from which this machine reaches a host, and the address of the host."""
    family, kind, _, _, place = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(place)
        return str(sock.getsockname()[0]), str(sock.getpeername()[0])


def _in_brackets(host: str) -> str:
    """Return a host in the notation of an address."""
    return f"[{host}]" if ":" in host else host


def _parts(address: str) -> tuple[str, str, str]:
    """Return the kind, the host and the port of an address."""
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    return kind, host, port


def _connect_securely(host: str, port: str, known: Contexts | None, deadline_s: float) -> SecureSocket:
    """Return a TLS connection, after the handshake, to the process that the last part of an address names."""
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


# -- AF_UNIX sockets, to which only processes of the same user on this machine can connect -------------------
#
# unix:path         the address of a socket

MEMORY = "/dev/shm"  # a file system in memory
NAME = "socket"


class UnixListener(socket.socket):
    """A listening AF_UNIX socket to which only processes of the same user, and of root, can connect.

    If /proc permits it, the name of the socket is removed as soon as the socket exists, so no file remains even after
    SIGKILL. The process keeps a descriptor of the name's inode, and other processes connect through this descriptor in
    /proc. The kernel permits this only to processes of the same user and of root. This process does not notice refused
    attempts.

    Attributes:
        path: the path to which clients connect.
    """

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._process = os.getpid()
        self._place: int | None = None
        self._folder = ""  # the folder that contains the name; "" once the folder has been removed
        try:
            self._folder = _private_folder()
            self.path = f"{self._folder}/{NAME}"
            self.bind(self.path)
            self._place = os.open(self.path, os.O_PATH | os.O_CLOEXEC)
            # If this process has changed its user without exec, other processes of the new user cannot look into the
            # /proc entry of this process.
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
        if os.getpid() == self._process:  # a forked child closes only its own copy
            self._remove_folder()

    def _remove_folder(self) -> None:
        folder, self._folder = self._folder, ""
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


class Unix(Transport):
    """AF_UNIX sockets, through which gradients and weights travel."""

    name = "unix"
    words = "AF_UNIX sockets (unix)"
    kinds = ("unix",)

    def listen(self, host: str = "", port: int = 0, *, secure: bool = False) -> tuple[UnixListener, str]:
        try:
            listener = UnixListener()
        except OSError as error:
            raise ConfigurationError(
                f"cannot create a socket for the processes of the run: {error}. Such a socket needs /proc, and either "
                "/dev/shm or a directory for temporary files (TMPDIR) that you may write to. Or use --transport tcp."
            ) from error
        return listener, f"unix:{listener.path}"

    def connect(self, address: str, timeout_s: float, known: Contexts | None) -> socket.socket:
        deadline_s = time.monotonic() + timeout_s
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            while True:
                try:
                    sock.connect(address.partition(":")[2])
                    return sock
                except BlockingIOError:
                    # The listener's queue is full. Unlike with TCP, the kernel does not retry the connection.
                    if time.monotonic() > deadline_s:
                        raise
                    time.sleep(QUEUE_INTERVAL_S)
        except BaseException:
            sock.close()
            raise


UNIX = Unix()


def _private_folder() -> str:
    """Create a folder that only its owner may enter: in memory if possible, so that a full disk does not matter.

    The name of the folder contains the id of this process, so that the folders of killed processes can be recognized.
    """
    prefix = f"paceline-{os.getpid()}-"
    try:
        return tempfile.mkdtemp(prefix=prefix, dir=MEMORY)
    except OSError:
        return tempfile.mkdtemp(prefix=prefix)


# -- Shared memory: servers map the memory of the workers, and small messages pass through rings in it -------
#
# The connections are AF_UNIX sockets, which pass the descriptors of the memory. The sockets also carry messages that do
# not fit into a ring, wake a sleeping process, and show when the other process has ended.


class SharedMemory(Unix):
    """Shared memory (see `memory`), with a pair of rings for each server if the processor permits it (see `ring`)."""

    name = "shm"
    words = "shared memory (shm)"
    shares_memory = True
    needs = "memfd"

    def available(self) -> bool:
        return shared_memory_available()

    def place(self, layout: Layout, *, servers: int, offered: bool, name: str) -> Region:
        return Region.create(layout, shared=True, channels=servers if rings_available() else 0, name=name)


SHM = SharedMemory()


# -- The transports of a run, and their addresses, which share one notation: a kind, a colon and the rest ----
#
# The kind determines the transport to which an address belongs. The sections above describe the rest of an address.

TRANSPORTS: dict[str, Transport] = {each.name: each for each in (SHM, UNIX, TCP)}
"""Name -> transport, the best one first."""


def best_transport() -> Transport:
    """Return the best transport that this system has."""
    return next(each for each in TRANSPORTS.values() if each.available())


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
        timeout_s: maximum time in seconds to connect.
        known: the TLS contexts of the run, if the address uses TLS.

    Raises:
        PeerLostError: no connection was made within `timeout_s`, for example because no process listens at the address.
        ProtocolError: the process that was reached does not have the key of the run, or is not the process that the
            address names.
    """
    try:
        return _transport_of(address).connect(address, timeout_s, known)
    except OSError as error:
        raise PeerLostError(f"cannot connect to {address}: {error}") from error


def is_here(address: str) -> bool:
    """Return True if an address belongs to this machine.

    Even then, the process may be on another machine: the address may be the end of a tunnel.
    """
    return _transport_of(address).is_here(address)


def seen_from(address: str, reached: str) -> str:
    """Return the address of a process as another machine sees it.

    A process that listens on all addresses of its machine does not know which of these addresses the other machine can
    reach. If the other machine reaches the coordinator through a tunnel, it uses this tunnel for the servers, too.

    Args:
        address: the address on which the process listens.
        reached: the address at which the other machine has reached the coordinator. The process runs on the machine of
            the coordinator.

    >>> seen_from("tcp:0.0.0.0:4000", "tcp:10.0.0.1:29600")
    'tcp:10.0.0.1:4000'
    >>> seen_from("tls:/1", "tls:10.0.0.1:29600")
    'tls:10.0.0.1:29600/1'
    """
    return _transport_of(address).seen_from(address, reached)


def _transport_of(address: str) -> Transport:
    """Return the transport of an address. Raise `ProtocolError` if no transport has such addresses."""
    kind, _, _ = address.partition(":")
    for transport in TRANSPORTS.values():
        if kind in transport.kinds:
            return transport
    raise ProtocolError(f"the address {address!r} is of an unknown kind")

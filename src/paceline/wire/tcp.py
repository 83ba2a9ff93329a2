"""TCP sockets on one or several machines. TLS encrypts them in a run with a secret (see `tls` and `secure`).

tcp:host:port     the address of a socket
tls:host:port     a socket whose connections use TLS, for the coordinator
tls:host:port/k   the same socket, for server k of the machine (see `preface`)
tls:/k            the same, on the host and port at which the coordinator was reached

An IPv6 address is written in brackets, as in "tls:[::1]:29600".
"""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
import time

from ..errors import ConfigurationError, InternalError
from .preface import COORDINATOR, Preface
from .secure import SecureSocket
from .tls import Contexts
from .transport import BACKLOG, QUEUE_INTERVAL_S, Transport

__all__ = ["TCP", "Tcp", "interface_to", "is_local", "own_addresses"]

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
                    f"cannot listen on {_in_brackets(host)}:{port}, because {host!r} is not an address of this "
                    f"machine: {error}. Its addresses are {', '.join(own_addresses())}; 0.0.0.0 stands for all of "
                    "them."
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
        named = host.removeprefix("[").removesuffix("]")
        if kind == "tls":
            return _connect_securely(named, port, known, time.monotonic() + timeout_s)
        return socket.create_connection((named, int(port)), timeout=timeout_s)

    def is_here(self, address: str) -> bool:
        if is_local(address):
            return True
        try:
            own, its = _route_to(_parts(address)[1].removeprefix("[").removesuffix("]"))
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
            f"the host {host!r} cannot be reached from this machine: {error}. Name the address on which the other "
            "machines reach this one with --listen."
        ) from error


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

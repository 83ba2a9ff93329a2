"""A TLS connection with the interface of a non-blocking socket, as far as `Stream` uses it."""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Sequence

from ..errors import ProtocolError
from .preface import BUSY, ENDED, PREFACE_BYTES, REFUSALS, Preface
from .tls import Contexts, require_member

__all__ = ["SecureSocket"]

RECORD_BYTES = 16 * 1024  # maximum size of a TLS record
WRITE_BYTES = 4 * RECORD_BYTES  # maximum number of bytes that are encrypted before the socket is tried again
READ_BYTES = 64 * RECORD_BYTES  # maximum number of bytes that one call decrypts
WRONG_SECRET = (
    "the secret is not that of the run that is served there. Runs have different secrets; use the content of the "
    "file `secret` in the run directory, or the secret with which the run was started"
)
BLOCKED = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
LOST = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)  # the connection has ended


class SecureSocket:
    """One end of a TLS connection.

    The handshake takes place in the first calls of `recv_into` and `sendmsg`, or in `shake_hands`. Then the client
    sends its preface, and the server answers with its own, so that a connection cannot be redirected. The server has
    admitted the client when the client has received this answer.

    Args:
        sock: a connected TCP socket, of which this object takes ownership.
        known: the TLS contexts of the run.
        preface: at the server, the preface of connections to itself; at the client, the one that it has sent.
        server_side: True for the side that has accepted the connection.
    """

    def __init__(self, sock: socket.socket, known: Contexts, preface: Preface, *, server_side: bool) -> None:
        sock.setblocking(False)
        self.family = sock.family
        self._known = known
        self._tls = (known.server if server_side else known.client).wrap_socket(
            sock, server_side=server_side, do_handshake_on_connect=False
        )
        self._preface = preface
        self._server_side = server_side
        self._sent = False  # True after our preface has been sent
        self._received = b""  # what has been received of the other side's preface
        self._ready = False  # True after the handshake and the prefaces

    def shake_hands(self, timeout_s: float) -> None:
        """Wait until the handshake is complete.

        Raises:
            BlockingIOError: the other side accepts no more connections at present.
            OSError: the connection was lost, the handshake has taken longer than `timeout_s`, or the process that the
                connection is for has ended.
            ProtocolError: the other side does not have the key of the run, or is another process.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                self._shake()
                return
            except BlockingIOError as blocked:
                writes = isinstance(blocked.__cause__, ssl.SSLWantWriteError)
                poller = select.poll()
                poller.register(self._tls, select.POLLOUT if writes else select.POLLIN)
                if not poller.poll(1000 * max(0.0, deadline_s - time.monotonic())):
                    raise TimeoutError("the handshake was not answered in time") from blocked
            except ssl.SSLError as error:
                raise _meaning(error) from error

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._tls.fileno()

    def pending(self) -> int:
        """Return the number of bytes that have been decrypted, which a selector cannot see."""
        return self._tls.pending()

    def getpeername(self) -> tuple[str, int]:
        """Return the address of the other side."""
        name: tuple[str, int] = self._tls.getpeername()
        return name

    def getsockname(self) -> tuple[str, int]:
        """Return the address of this side."""
        name: tuple[str, int] = self._tls.getsockname()
        return name

    def setblocking(self, flag: bool) -> None:
        """Make sure that this socket is not blocking, as it always is."""
        assert not flag

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the socket."""
        self._tls.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """Return an option of the socket."""
        return self._tls.getsockopt(level, option, size)

    def recv_into(self, target: memoryview) -> int:
        """Receive data that is available, and return its size; 0 if the other side has closed the connection.

        Raises:
            BlockingIOError: no data is available.
            OSError: the connection is lost, or the other side was refused.
        """
        self._shake()
        target = target[:READ_BYTES]
        count = 0
        try:
            while count < target.nbytes:
                received = self._tls.recv_into(target[count:])
                count += received
                # Less than a full record usually means that nothing else has arrived, and asking costs a system call.
                if received < RECORD_BYTES and not self._tls.pending():
                    break
        except BLOCKED as blocked:
            if not count:
                raise BlockingIOError from blocked
        except OSError:
            if not count:  # otherwise, the next call raises the exception again
                raise
        return count

    def recvmsg_into(
        self, targets: Sequence[memoryview], ancillary_bytes: int, flags: int
    ) -> tuple[int, list[tuple[int, int, bytes]], int, None]:
        """Receive data into several buffers, one after another. See `recv_into`."""
        count = 0
        for target in targets:
            try:
                received = self.recv_into(target) if target.nbytes else 0
            except BlockingIOError:
                if not count:
                    raise
                break
            count += received
            if received < target.nbytes:
                break
        return count, [], 0, None

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Send as much of the parts as the socket accepts, and return the number of bytes.

        If it raises `BlockingIOError`, the next call must begin with the same bytes, which may have moved.
        """
        self._shake()
        count = 0
        left = list(parts)
        try:
            while left:
                sent = self._tls.send(_chunk(left))
                count += sent
                while left and sent >= left[0].nbytes:
                    sent -= left.pop(0).nbytes
                if sent:
                    left[0] = left[0][sent:]
        except BLOCKED as blocked:
            if not count:
                raise BlockingIOError from blocked
        except OSError:
            if not count:
                raise
        return count

    def close(self) -> None:
        """Close the connection."""
        self._tls.close()

    def _shake(self) -> None:
        if self._ready:
            return
        try:
            self._tls.do_handshake()
            require_member(self._tls, self._known)
            if not self._server_side:
                self._send_preface()
            while len(self._received) < PREFACE_BYTES:
                part = self._tls.recv(PREFACE_BYTES - len(self._received))
                if not part:
                    raise ConnectionResetError("the connection ended during the handshake")
                self._received += part
            self._send_preface()
        except BLOCKED as blocked:
            raise BlockingIOError from blocked
        other = Preface.decode(self._received)
        client, server = (other, self._preface) if self._server_side else (self._preface, other)
        if client is None or server is None:
            raise ProtocolError("the prefaces have different versions; install the same version of Paceline")
        if not client.is_for(server):
            run = " of another run" if client.target == server.target else ""
            raise ProtocolError(f"a connection to {client} was redirected to {server}{run}")
        self._ready = True

    def _send_preface(self) -> None:
        if not self._sent:
            self._tls.send(self._preface.encode())
            self._sent = True


def _meaning(error: ssl.SSLError) -> Exception:
    """Return the exception that says why a handshake has failed."""
    if isinstance(error, LOST):
        return ConnectionResetError("the connection ended during the handshake")
    refusal = REFUSALS.get(error.reason or "")
    if refusal is BUSY:
        return BlockingIOError(refusal.words)
    if refusal is ENDED:
        return ConnectionRefusedError(refusal.words)
    if refusal is not None:
        return ProtocolError(f"the handshake has failed: {refusal.words}")
    if isinstance(error, ssl.SSLCertVerificationError):
        return ProtocolError(WRONG_SECRET)
    return ProtocolError(f"the handshake has failed: {error.reason or error}; perhaps no run is served there")


def _chunk(parts: Sequence[memoryview]) -> bytes | memoryview:
    """Return the first bytes of the parts: a large part as it is, or small parts together."""
    if parts[0].nbytes >= RECORD_BYTES or len(parts) == 1:
        return parts[0][:WRITE_BYTES]
    small = bytearray()
    for part in parts:
        small += part[: RECORD_BYTES - len(small)]
        if len(small) == RECORD_BYTES:
            break
    return bytes(small)

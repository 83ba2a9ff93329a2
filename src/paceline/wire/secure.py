"""Encrypted connections between the machines of a run, with the interface of a socket, and the secret of the run."""

from __future__ import annotations

import ctypes
import datetime
import os
import re
import secrets
import select
import socket
import ssl
import stat
import time
from collections.abc import Mapping, MutableMapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

from ..errors import ConfigurationError, ProtocolError
from .preface import ANY_RUN, BUSY, ENDED, PREFACE_BYTES, REFUSALS, Preface

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

    The handshake takes place in the first calls of `recv_into` and `sendmsg`, or in `shake_hands`. After the handshake,
    the client sends its preface, and the server answers with its own preface, so that a connection cannot be
    redirected. When the client has received this answer, the server has admitted the client.

    Args:
        sock: a connected TCP socket, of which this object takes ownership.
        known: the TLS contexts of the run.
        preface: at the server, the preface of connections to this server; at the client, the preface that it has sent.
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
        self._received = b""  # the received part of the other side's preface
        self._ready = False  # True after the handshake and the prefaces

    def shake_hands(self, timeout_s: float) -> None:
        """Wait until the handshake is complete.

        Raises:
            BlockingIOError: the other side accepts no more connections at present.
            OSError: the connection was lost, the handshake has taken longer than `timeout_s`, or the target process of
                the connection has ended.
            ProtocolError: the other side does not have the key of the run, or is not the target process.
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
        """Return the number of bytes that have been decrypted but not read. A selector cannot see these bytes."""
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
        """Do nothing, because this socket never blocks."""
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
            OSError: the connection is lost, or the handshake has failed.
        """
        self._shake()
        target = target[:READ_BYTES]
        count = 0
        try:
            while count < target.nbytes:
                received = self._tls.recv_into(target[count:])
                count += received
                # If less than a full record was received, usually no more data has arrived. Another attempt to receive
                # would cost a system call.
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
            except OSError:
                if not count:  # otherwise, the next call raises the exception again
                    raise
                break
            count += received
            if received < target.nbytes:
                break
        return count, [], 0, None

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Send as much of the parts as the socket accepts, and return the number of bytes.

        If this method raises `BlockingIOError`, the next call must begin with the same bytes, at any address.
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
        except LOST as error:
            if not count:
                raise BrokenPipeError("the other side has closed it") from error
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
            raise ProtocolError(
                "the two sides have different versions of Paceline; install the same version on both machines"
            )
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
    """Return the first bytes of the parts: of one large part without copying, or of small parts joined together."""
    if parts[0].nbytes >= RECORD_BYTES or len(parts) == 1:
        return parts[0][:WRITE_BYTES]
    small = bytearray()
    for part in parts:
        small += part[: RECORD_BYTES - len(small)]
        if len(small) == RECORD_BYTES:
            break
    return bytes(small)


# -- Authenticated and encrypted connections between the machines of a run: TLS 1.3 with keys from the run's secret
#
# All processes of a run derive the same Ed25519 key pair from the secret, and they derive the same self-signed
# certificate from this key pair. Each side of a connection proves that it holds the key, and accepts only this
# certificate. So exactly those who know the secret can connect. There is no certificate authority, no file with
# a key, and nothing to renew.
#
# Time does not matter: a certificate is compared as a whole, so its dates are not checked, and a machine whose
# clock is wrong can join a run.
#
# The traffic is encrypted with keys that are new for each connection. An attacker who records the traffic and learns
# the secret later cannot decrypt the recording. There are no session tickets, so a connection cannot be resumed
# without the key.

PURPOSE = b"paceline tls 1"
"""Input of the derivation of the key. A new version of the protocol must use another value."""

BEGIN = datetime.datetime(2000, 1, 1)
END = datetime.datetime(9999, 12, 31)

NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which the ssl module does not name


class Contexts(NamedTuple):
    """The TLS contexts of both sides of a run's connections, and the values that both sides compare.

    Attributes:
        server: the context of the side that accepts a connection.
        client: the context of the side that opens a connection.
        certificate: the certificate of both sides in DER format.
        mark: the mark of the run, see `Preface`.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    certificate: bytes
    mark: bytes = ANY_RUN


@cache
def contexts(secret: str, job: str = "") -> Contexts:
    """Return the TLS contexts of a run.

    Args:
        secret: the secret of the run, as hexadecimal digits.
        job: name of the run. With the same secret, runs with different names cannot connect to each other.

    >>> one, other = contexts("ab" * 32, "first"), contexts("ab" * 32, "second")
    >>> one.certificate == other.certificate
    False
    """
    derived = HKDF(SHA256(), length=32, salt=job.encode(), info=PURPOSE).derive(bytes.fromhex(secret))
    key = Ed25519PrivateKey.from_private_bytes(derived)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "paceline")])
    # Ed25519 signatures are deterministic, and nothing here is random, so all processes obtain the same bytes.
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, BEGIN, END)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    both = pem + key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Contexts(
        _context(ssl.PROTOCOL_TLS_SERVER, pem, both),
        _context(ssl.PROTOCOL_TLS_CLIENT, pem, both),
        certificate.public_bytes(serialization.Encoding.DER),
    )


def require_member(connection: ssl.SSLSocket | ssl.SSLObject, known: Contexts) -> None:
    """After a handshake, raise `ProtocolError` unless the peer has shown the run's certificate."""
    if connection.version() != "TLSv1.3" or connection.getpeercert(binary_form=True) != known.certificate:
        raise ProtocolError("the peer has not shown the certificate of this run")


def _context(purpose: int, certificate: bytes, both: bytes) -> ssl.SSLContext:
    """Return a context that shows and requires the certificate; `both` is the certificate with the key, as PEM."""
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate names no host; it is compared as a whole
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    context.verify_flags = ssl.VerifyFlags(context.verify_flags | NO_CHECK_TIME)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET
    if purpose == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    # The ssl module reads a key only from a file. This file is in memory, and vanishes when it is closed.
    descriptor = os.memfd_create("paceline-key")
    try:
        os.write(descriptor, both)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context


# -- The secret of a run whose workers are on several machines. All who know the secret can join the run ----
#
# A secret consists of 32 random bytes, written as 64 hexadecimal digits. It is read from the environment or
# from a file, never from the command line, which other users of a machine can see. A passphrase is refused:
# an attacker who records the traffic could try many passphrases.
#
# A program that takes the secret from its environment removes the secret from the environment, so that programs
# which it starts do not inherit the secret. The kernel shows the memory of the initial environment in
# `/proc/PID/environ`, and would still show the secret after `unsetenv`. So this memory is overwritten.

VARIABLE = "PACELINE_SECRET"
"""The environment variable that contains the secret."""

SECRET = "secret"
"""Name of the file with the secret in the directory of a run."""

SIZE_BYTES = 32
FORMAT = re.compile(f"[0-9a-fA-F]{{{2 * SIZE_BYTES}}}")
HOW = f"expected {2 * SIZE_BYTES} hexadecimal digits, such as `openssl rand -hex {SIZE_BYTES}` prints"


def new_secret() -> str:
    """Return a new secret."""
    return secrets.token_hex(SIZE_BYTES)


def take_secret(environment: MutableMapping[str, str], file: Path | None = None) -> str:
    """Return the secret in a file or, without a file, in the environment; "" if there is none in the environment.

    In both cases, the environment does not contain a secret afterwards.

    Args:
        environment: the variables of the environment. If this is `os.environ`, the memory of this process's initial
            environment is overwritten as well, because the kernel shows it to the user.
        file: the file that contains the secret.

    Raises:
        ConfigurationError: the secret is not valid, or other users may read the file.

    >>> environment = {"PACELINE_SECRET": "AB" * 32, "HOME": "/root"}
    >>> take_secret(environment) == "ab" * 32, environment
    (True, {'HOME': '/root'})
    """
    if environment is os.environ:
        _overwrite(VARIABLE)
    text = environment.pop(VARIABLE, "")
    if file is not None:
        return read_secret(file)
    return _checked(text, f"the environment variable {VARIABLE}") if text else ""


def read_secret(file: Path) -> str:
    """Return the secret in a file.

    Raises:
        ConfigurationError: the secret is not valid, or other users may read the file.
    """
    return _checked(_content(file), f"the file {str(file)!r}")


def without_secret(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that must not know the secret."""
    return {name: value for name, value in environment.items() if name != VARIABLE}


def _checked(text: str, where: str) -> str:
    """Return the secret in a text that was found at `where`. The error message does not contain the text."""
    text = text.strip()
    if not FORMAT.fullmatch(text):
        raise ConfigurationError(f"{where} contains {len(text)} characters that are not a secret; {HOW}.")
    return text.lower()


def write_secret(secret: str, file: Path) -> None:
    """Write a secret to a new file that only its owner may read. If the disk is full, no file remains."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w") as target:
            target.write(f"{secret}\n")
    except OSError:
        file.unlink()
        raise


def _overwrite(variable: str) -> None:
    """Overwrite the memory with the value of a variable of this process's environment, if the variable is set."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    address = libc.getenv(variable.encode())
    if address:
        ctypes.memset(address, 0, len(ctypes.string_at(address)))


def _content(file: Path) -> str:
    """Return the text of a file that belongs to this user, and that no other user may read."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait until a process writes to it.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as source:
            status = os.fstat(source.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigurationError(f"the secret's file {str(file)!r} is not a regular file.")
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise ConfigurationError(
                    f"the secret's file {str(file)!r} may be read by others: its mode is "
                    f"{stat.S_IMODE(status.st_mode):o}, expected 600, and it must belong to you. Run `chmod 600` on "
                    "it and, if others could read it, use a new secret."
                )
            return source.read(4096)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigurationError(f"the secret's file {str(file)!r} cannot be read: {reason}.") from error

"""Authenticated and encrypted connections between the machines of a run: TLS 1.3 with keys from the run's secret.

All processes of a run derive the same Ed25519 key pair from the secret, and from it the same self-signed certificate,
bit by bit. Each side of a connection proves that it holds the key, and accepts only this certificate. So whoever
knows the secret can connect, and nobody else; there is no certificate authority, no file with a key, and nothing to
renew.

Time plays no part: a certificate is compared as a whole, so its dates say nothing, and a machine whose clock is wrong
can join a run.

The traffic is encrypted with keys that are new for each connection. Whoever records it and learns the secret later
cannot decrypt it. There are no session tickets, so a connection cannot be resumed without the key.
"""

from __future__ import annotations

import datetime
import os
import ssl
from functools import cache
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

from ..errors import ProtocolError
from .preface import ANY_RUN

__all__ = ["Contexts", "contexts", "require_member"]

PURPOSE = b"paceline tls 1"
"""Part of the derived key. A new version of the protocol uses another one."""

BEGIN = datetime.datetime(2000, 1, 1)
END = datetime.datetime(9999, 12, 31)

NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which the ssl module does not name


class Contexts(NamedTuple):
    """What the two sides of a connection use.

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
    """Raise `ProtocolError` unless the peer has shown the run's certificate, after the handshake."""
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
    # The ssl module reads a key only from a file. This one is in memory, and is gone when it is closed.
    descriptor = os.memfd_create("paceline-key")
    try:
        os.write(descriptor, both)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context

"""TLS between the machines of a run: who is let in, and that all processes derive the same certificate."""

from __future__ import annotations

import datetime
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from paceline.errors import ProtocolError
from paceline.wire.secure import Contexts, contexts, new_secret, require_member

SECRET = new_secret()


def talk(server: ssl.SSLContext, client: ssl.SSLContext, known: Contexts) -> tuple[str, str]:
    """Connect a client to a server that answers "welcome". Return what each of them has heard, or its error."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(20)
    heard = ["", ""]

    def serve() -> None:
        try:
            with server.wrap_socket(ours, server_side=True) as connection:
                require_member(connection, known)
                heard[0] = connection.recv(100).decode()
                connection.sendall(b"welcome")
        except (OSError, ProtocolError) as error:
            heard[0] = type(error).__name__
        finally:
            ours.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(theirs) as connection:
            connection.sendall(b"hello")
            heard[1] = connection.recv(100).decode() or "nothing"
    except OSError as error:
        heard[1] = type(error).__name__
    finally:
        theirs.close()
        thread.join()
    return heard[0], heard[1]


def test_members_talk() -> None:
    run = contexts(SECRET, "run")
    assert talk(run.server, run.client, run) == ("hello", "welcome")


@pytest.mark.parametrize(
    ("secret", "job"), [(new_secret(), "run"), (SECRET, "another run")], ids=["secret", "job"]
)
def test_nobody_with_another_secret_or_job_is_let_in(secret: str, job: str) -> None:
    run, other = contexts(SECRET, "run"), contexts(secret, job)
    served, heard = talk(run.server, other.client, run)
    assert served.startswith("SSL")
    assert heard not in ("", "welcome")


def test_nobody_without_a_certificate_is_let_in() -> None:
    run = contexts(SECRET, "run")
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname = False
    anybody.verify_mode = ssl.CERT_NONE
    served, heard = talk(run.server, anybody, run)
    assert served.startswith("SSL")
    assert heard != "welcome"


def test_nobody_with_an_older_protocol_is_let_in() -> None:
    run = contexts(SECRET, "run")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.verify_mode = ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    served, heard = talk(run.server, old, run)
    assert served.startswith("SSL")
    assert heard.startswith("SSL")


def test_nobody_with_a_certificate_that_only_looks_like_ours_is_let_in(tmp_path: Path) -> None:
    run = contexts(SECRET, "run")
    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "paceline")])
    begin, end = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)
    forged = x509.CertificateBuilder(name, name, key.public_key(), 1, begin, end).sign(key, None)
    file = tmp_path / "forged.pem"
    file.write_bytes(
        forged.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname = False
    stranger.verify_mode = ssl.CERT_NONE
    stranger.load_cert_chain(file)
    served, heard = talk(run.server, stranger, run)
    assert served.startswith("SSL")
    assert heard != "welcome"


def test_a_client_notices_a_server_that_does_not_know_the_secret() -> None:
    run, other = contexts(SECRET, "run"), contexts(new_secret(), "run")
    _, heard = talk(other.server, run.client, other)
    assert heard.startswith("SSL")


def test_all_processes_derive_the_same_certificate() -> None:
    code = f"from paceline.wire.secure import contexts; print(contexts({SECRET!r}, 'run').certificate.hex())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == contexts(SECRET, "run").certificate.hex()


def test_no_ticket_lets_a_client_resume_a_connection() -> None:
    run = contexts(SECRET, "run")
    assert run.server.num_tickets == 0
    assert run.server.options & ssl.OP_NO_TICKET

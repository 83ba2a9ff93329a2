"""The one port of a machine: which connections reach which process, and what happens to all others."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs
from rich.console import Console

from paceline.errors import PeerLostError, ProtocolError, RunFailedError
from paceline.run import listener as strangers
from paceline.run.job_options import make_job
from paceline.run.listener import Listener
from paceline.start.local import HostMachine, ProcessPlacement
from paceline.start.run import start
from paceline.wire.memory import PassedSockets, pass_on, socket_pair
from paceline.wire.preface import ANY_RUN, COORDINATOR, PREFACE_BYTES, Preface
from paceline.wire.secure import contexts, new_secret
from paceline.wire.transports import TCP, connect
from tests.support.closed_door import House
from tests.support.live import await_that

TIMEOUT_S = 20.0
RUN = b"this run"
KNOWN = contexts(new_secret())


class Port:
    """A listener with two processes behind it, the coordinator and server 0, whose ends are in this process."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        sock, self.address = TCP.listen(host, secure=True)
        self._place = sock.getsockname()[:2]
        self.listener = Listener(sock, RUN)
        self.receivers = {target: self.listener.receiver(target) for target in (COORDINATOR, 0)}
        for receiver in self.receivers.values():
            receiver.settimeout(TIMEOUT_S)
        self._callers = contextlib.ExitStack()

    def call(self, *said: bytes) -> socket.socket:
        """Connect, and send some bytes, each part by itself."""
        caller = self._callers.enter_context(socket.create_connection(self._place, TIMEOUT_S))
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in said:
            caller.sendall(part)
        return caller

    def passed(self, target: int) -> socket.socket:
        """Return the next connection that the listener passes to a process."""
        _, [descriptor], _, _ = socket.recv_fds(self.receivers[target], 1, 1)
        return self._callers.enter_context(socket.socket(fileno=descriptor))

    def close(self) -> None:
        self._callers.close()
        for receiver in self.receivers.values():
            receiver.close()


@pytest.fixture
def port() -> Iterator[Port]:
    with contextlib.closing(Port()) as made, made.listener:
        yield made


def is_closed(caller: socket.socket) -> bool:
    """Return True if the other side closes a connection without an answer."""
    caller.settimeout(TIMEOUT_S)
    try:
        return caller.recv(100) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("target", [COORDINATOR, 0])
def test_a_process_receives_everything_after_the_preface(target: int, port: Port) -> None:
    caller = port.call(Preface(target, RUN).encode() + b"a greeting")
    passed = port.passed(target)
    assert passed.recv(100) == b"a greeting"
    passed.sendall(b"an answer")
    assert caller.recv(100) == b"an answer"


def test_a_preface_may_arrive_in_parts_while_others_come_and_go(port: Port) -> None:
    slow = port.call()
    for byte in Preface(0).encode():
        slow.sendall(bytes([byte]))
        port.call().close()
        port.call(Preface(COORDINATOR).encode())
        port.passed(COORDINATOR).close()
    slow.sendall(b"x")
    assert port.passed(0).recv(100) == b"x"


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="this machine has no IPv6")
def test_an_ipv6_connection_is_passed_on() -> None:
    with contextlib.closing(Port("::1")) as port, port.listener:
        port.call(Preface(0).encode() + b"x")
        assert port.passed(0).recv(100) == b"x"


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(60), random.Random(0).randbytes(3000)]
)
def test_garbage_is_not_answered(said: bytes, port: Port) -> None:
    assert is_closed(port.call(said))
    port.call(Preface(0).encode() + b"x")
    assert port.passed(0).recv(100) == b"x"


def test_who_never_completes_a_preface_is_disconnected(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "GREETING_TIMEOUT_S", 0.2)
    callers = [port.call(Preface(0).encode()[:size]) for size in (0, 1, PREFACE_BYTES - 1)]
    assert all(is_closed(caller) for caller in callers)


def test_a_crowd_that_says_nothing_keeps_nobody_out(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "GREETING_S", 0.0)  # a stranger makes room at once
    for _ in range(400):
        port.call(b"PC")
    port.call(Preface(0).encode() + b"x")
    assert port.passed(0).recv(100) == b"x"


def test_who_had_to_make_room_is_not_read_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "LEAST", 1)
    monkeypatch.setattr(strangers, "MOST", 1)
    monkeypatch.setattr(strangers, "GREETING_S", 0.0)
    with contextlib.closing(Port()) as port:
        silent = port.call()
        port.listener._entrance.accept()  # its thread has not been started yet
        port.call(b"PC")  # takes the place of the silent one
        silent.sendall(b"PC")  # too late, but before the thread looks
        with port.listener:
            assert is_closed(silent)
            port.call(Preface(0).encode() + b"x")
            assert port.passed(0).recv(100) == b"x"


def test_a_process_that_does_not_keep_up_delays_nobody(port: Port) -> None:
    refused = 0
    while not refused:  # nobody receives the connections to server 0
        caller = port.call(Preface(0).encode())
        port.call(Preface(COORDINATOR).encode() + b"x")
        assert port.passed(COORDINATOR).recv(100) == b"x"
        caller.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            refused = len(caller.recv(100))
        if not refused:
            caller.detach()  # it stays open until the end of this process
    with pytest.raises(PeerLostError, match="accepts no more connections at present"):
        connect(f"{port.address}/0", 0.2, KNOWN)


@pytest.mark.parametrize(
    ("target", "mark", "error", "words"),
    [
        ("/7", ANY_RUN, ProtocolError, "the target process is not on the machine that was reached"),
        ("/0", b"that run", ProtocolError, "another run is served there"),
        ("", b"that run", ProtocolError, "another run is served there"),
    ],
)
def test_a_client_is_told_why_it_is_refused(
    target: str, mark: bytes, error: type[Exception], words: str, port: Port
) -> None:
    with pytest.raises(error, match=words):
        connect(port.address + target, TIMEOUT_S, KNOWN._replace(mark=mark))


def test_a_client_of_another_version_is_told_so(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    older = Preface(0).encode()
    monkeypatch.setattr(Preface, "encode", lambda self: older[:4] + b"\x63" + older[5:])
    with pytest.raises(ProtocolError, match="another version of Paceline"):
        connect(f"{port.address}/0", TIMEOUT_S, KNOWN)


def test_a_client_is_told_that_a_process_has_ended(port: Port) -> None:
    port.receivers[0].close()
    with pytest.raises(PeerLostError, match="the target process has ended"):
        connect(f"{port.address}/0", TIMEOUT_S, KNOWN)


def test_a_client_whose_process_ends_before_it_receives_the_connection_does_not_hang(port: Port) -> None:
    caller = port.call(Preface(0).encode())
    port.call(Preface(COORDINATOR).encode() + b"x")
    assert port.passed(COORDINATOR).recv(100) == b"x"  # so the first one has been passed on, too
    port.receivers[0].close()
    assert is_closed(caller)


def test_a_new_process_takes_the_place_of_one_that_has_ended(port: Port) -> None:
    port.receivers[0].close()
    port.receivers[0] = port.listener.receiver(0)
    port.call(Preface(0).encode() + b"x")
    assert port.passed(0).recv(100) == b"x"


def test_the_listener_keeps_no_descriptor_of_a_connection(port: Port) -> None:
    before = len(os.listdir("/proc/self/fd"))
    callers = [port.call(Preface(0).encode()) for _ in range(20)]
    for caller in callers:
        port.passed(0).close()
        assert is_closed(caller)
        caller.close()
    await_that(lambda: len(os.listdir("/proc/self/fd")) <= before, "all descriptors are closed")


@pytest.mark.parametrize(
    ("target", "named", "mark", "words"),
    [
        ("/3", 3, RUN, "a connection to server 3 was redirected to the coordinator"),
        ("", COORDINATOR, b"that run", "redirected to the coordinator of another run"),
    ],
)
def test_a_redirected_connection_is_refused(target: str, named: int, mark: bytes, words: str) -> None:
    """The listener passes it to another process, as if somebody had changed the plain preface."""
    with contextlib.closing(House(named, expected=RUN, mark=mark)) as house:
        known = house.known._replace(mark=RUN)
        with pytest.raises(ProtocolError, match=words):
            house.meanwhile(lambda: connect(house.address + target, TIMEOUT_S, known))
        house.poll_until(lambda: not house.hub.peers)
        assert house.heard == []


def test_sockets_arrive_in_order_and_the_end_of_the_listener_is_noticed() -> None:
    sender, receiver = socket_pair()
    passed = PassedSockets(receiver)
    with sender, contextlib.closing(passed):
        with pytest.raises(BlockingIOError):
            passed.accept()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            pass_on(theirs, sender)
            accepted, _ = passed.accept()
            with accepted:
                ours.sendall(b"x")
                assert accepted.recv(1) == b"x"
        sender.close()
        with pytest.raises(OSError, match="has ended"):
            passed.accept()


@pytest.mark.processes
def test_a_run_is_announced_when_its_listener_knows_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A scheduler's processes connect at once, and the listener refuses connections to an unknown process."""
    known: list[int] = []
    announced: list[list[int]] = []
    receiver = Listener.receiver

    def noted(listener: Listener, target: int) -> socket.socket:
        known.append(target)
        return receiver(listener, target)

    monkeypatch.setattr(Listener, "receiver", noted)
    job = make_job(workers=1, joined=True, transport="tcp", run_dir=str(tmp_path / "run"))
    job = structs.replace(job, token=new_secret(), secure=True)
    with pytest.raises(RunFailedError, match="no machine has joined"):
        start(
            job,
            [],
            b"",
            sys.path,
            console=Console(quiet=True),
            placement=ProcessPlacement("127.0.0.1", (HostMachine("127.0.0.1"),), ()),
            listening=lambda address, job: announced.append(known.copy()),
            patience_s=0.1,
        )
    assert announced == [[COORDINATOR]]

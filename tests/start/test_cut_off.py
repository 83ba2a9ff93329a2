"""Connections that cannot be made, or that are cut at any moment of the start: a machine then joins again."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec import structs
from rich.console import Console

from benchmarks.overlap.namespaces import NetworkLink, network, why_not
from paceline.core.messages import (
    CheckpointPiece,
    FetchCheckpoint,
    MachineAdmitted,
    MachineJoined,
    Message,
    Refused,
    first_phase,
)
from paceline.errors import ConfigurationError, PeerLostError
from paceline.run.coordinator import CoordinatorHost
from paceline.run.job import Assignment, ResumedFrom
from paceline.run.job_options import make_job
from paceline.run.observer import Observer
from paceline.shard import foreign
from paceline.start import join as calling
from paceline.start import local as rejoining
from paceline.start.join import fetch_checkpoint, join
from paceline.start.processes import child
from paceline.start.processes.orders import Descriptors, ProcessOrder, payload_of_server
from paceline.start.processes.program import EXIT_PEER_LOST, file_of
from paceline.wire.preface import COORDINATOR, PREFACE_BYTES, Preface
from paceline.wire.secure import SecureSocket, contexts, new_secret
from paceline.wire.stream import Stream
from paceline.wire.transports import TCP, connect
from tests.support.hosts import agent_of
from tests.support.live import await_that, mark
from tests.support.marks import chaos
from tests.support.served import ENDLESS_SCRIPT, Served, await_training, enough, output
from tests.support.sharded import Net, Shards, model_of

__all__ = ["mark"]

# If a connection is reset just before it is wrapped, `ssl` leaves it to the garbage collector to close the socket.


@pytest.fixture(autouse=True)
def optimizer_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which optimizer classes a process of a run may load, which is set for the rest of its life."""
    monkeypatch.setattr(foreign, "_sources", [])


pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. <ssl.SSLSocket")

SECRET = new_secret()
KNOWN = contexts(SECRET)
DEADLINE_S = 60.0
RESET = struct.pack("ii", 1, 0)  # as SO_LINGER, lets `close` reset the connection

ERRORS = [
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ETIMEDOUT,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
]


@contextlib.contextmanager
def answering(*answers: Callable[[socket.socket], None]) -> Iterator[str]:
    """Listen, and give each connection the next answer. Return the address."""
    sock, address = TCP.listen(secure=True)
    sock.settimeout(DEADLINE_S)

    def body() -> None:
        for answer in answers:
            with sock.accept()[0] as caller:
                caller.settimeout(DEADLINE_S)
                answer(caller)

    thread = threading.Thread(target=body)
    thread.start()
    with sock:
        yield address
        thread.join()


def closes(caller: socket.socket) -> None:
    caller.recv(PREFACE_BYTES)


def resets(caller: socket.socket) -> None:
    caller.recv(PREFACE_BYTES)
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def begins_the_handshake(caller: socket.socket) -> None:
    """Send the beginning of a record of TLS."""
    caller.recv(PREFACE_BYTES)
    caller.sendall(bytes([22, 3, 3, 0, 80, 2, 0]))


def breaks_off_the_handshake(caller: socket.socket) -> None:
    resets(caller)
    caller.sendall(bytes([22, 3, 3, 0, 80, 2, 0]))


def greets(caller: socket.socket) -> SecureSocket:
    """Finish the handshake, as a coordinator does."""
    caller.recv(PREFACE_BYTES, socket.MSG_WAITALL)
    secure = SecureSocket(
        socket.socket(fileno=caller.detach()), KNOWN, Preface(COORDINATOR), server_side=True
    )
    secure.shake_hands(DEADLINE_S)
    return secure


@contextlib.contextmanager
def offered(caller: socket.socket) -> Iterator[Stream[Message]]:
    """Read the offer of a machine, which asks first whether the run began with a checkpoint."""
    stream: Stream[Message] = Stream(greets(caller), first_phase("agent", "coordinator"))
    with contextlib.closing(stream):
        while not isinstance(message := stream.wait(DEADLINE_S), MachineJoined):
            if isinstance(message, FetchCheckpoint):
                stream.send(CheckpointPiece())
        yield stream


def hears_and_closes(caller: socket.socket) -> None:
    """Close the connection instead of answering the offer of a machine."""
    with offered(caller):
        pass


def refuses(caller: socket.socket) -> None:
    with offered(caller) as stream:
        stream.send(Refused("there is no room"))
        stream.drain(DEADLINE_S)


CUTS = [closes, resets, begins_the_handshake, breaks_off_the_handshake]


@pytest.mark.parametrize("code", ERRORS)
@pytest.mark.parametrize("address", ["tcp:10.0.0.1:1", "tls:10.0.0.1:1", "tls:10.0.0.1:1/0"])
def test_a_peer_that_cannot_be_reached_is_lost(
    code: int, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> socket.socket:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(socket, "create_connection", fails)
    with pytest.raises(PeerLostError, match=os.strerror(code)):
        connect(address, 1.0, KNOWN)


@pytest.mark.parametrize("cut", CUTS)
def test_a_peer_that_is_cut_off_during_the_handshake_is_lost(cut: Callable[[socket.socket], None]) -> None:
    with answering(cut) as address, pytest.raises(PeerLostError, match="cannot connect to tls:"):
        connect(address, DEADLINE_S, KNOWN)


def test_a_connection_that_is_lost_before_it_is_used_is_a_lost_peer() -> None:
    """It was made, and reset before the first byte was sent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        accepted = listener.accept()[0]
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        accepted.close()
    stream: Stream[Message] = Stream(caller, first_phase("coordinator", "agent"))
    with contextlib.closing(stream), pytest.raises(PeerLostError):
        stream.wait(DEADLINE_S)


def started(role: str, coordinator: str, tmp_path: Path) -> int:
    """Run what a process of a run runs, and return its exit code."""
    job = make_job(workers=1, servers=1, joined=True, transport="tcp", run_dir=tmp_path / "run", dry_run=True)
    place = Assignment(job=job, role=role, index=0, coordinator=coordinator)  # type: ignore[arg-type]
    arguments = () if role == "server" else ("script", "train.py")
    payload = file_of(payload_of_server(sys.path, {}) if role == "server" else b"")
    return child.main(ProcessOrder(place, arguments), Descriptors(0, 1, 2, payload))


@pytest.mark.parametrize("role", ["worker", "server"])
def test_a_process_that_does_not_reach_the_coordinator_says_so_without_a_traceback(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"tcp:127.0.0.1:{unused.getsockname()[1]}"
    assert started(role, address, tmp_path) == EXIT_PEER_LOST
    said = capsys.readouterr().err
    assert said.startswith(f"paceline: the coordinator was not reached: cannot connect to {address}: ")
    assert "Traceback" not in said


def joined(address: str, rejoins: int = 2) -> str:
    """Join a run with one worker, and return what is said. It raises why this machine does not join."""
    said = io.StringIO()
    with pytest.raises(ConfigurationError, match="there is no room"):
        join(
            address,
            SECRET,
            ["script", "train.py"],
            version="1",
            workers=1,
            console=Console(file=said, width=1000),
            patience_s=DEADLINE_S,
            rejoins=rejoins,
        )
    return said.getvalue()


@pytest.mark.parametrize("cut", CUTS)
def test_a_machine_calls_again_when_it_was_cut_off_during_the_handshake(
    cut: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "RETRY_INTERVAL_S", 0.0)
    with answering(cut, refuses) as address:
        assert "trying again for 60 s" in joined(address)


def test_a_machine_joins_again_when_its_offer_was_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejoining, "FIRST_PAUSE_S", 0.0)
    with answering(hears_and_closes, refuses) as address:
        said = joined(address)
    assert "was lost before it had answered" in said
    assert "joining again in 0 s" in said


def test_a_machine_whose_offers_are_not_answered_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(hears_and_closes) as address, pytest.raises(PeerLostError, match="before it had answered"):
        join(
            address,
            SECRET,
            ["script", "train.py"],
            version="1",
            workers=1,
            console=Console(quiet=True),
            rejoins=0,
        )


@pytest.mark.parametrize("cut", CUTS)
def test_an_observer_that_is_cut_off_has_lost_its_peer(cut: Callable[[socket.socket], None]) -> None:
    with answering(cut) as address, pytest.raises(PeerLostError):
        Observer(address, SECRET)


def test_a_machine_that_is_lost_while_it_joins_does_not_end_the_run(tmp_path: Path) -> None:
    job = make_job(workers=1, servers=1, joined=True, transport="tcp", run_dir=tmp_path / "run")
    coordinator = CoordinatorHost.listen(job)
    coordinator.start()

    busy, seen = threading.Event(), threading.Event()
    try:
        lost = agent_of(coordinator)
        # Its offer and its end arrive while the coordinator is busy.
        await_that(lambda: coordinator._of_role("agent"), "the coordinator knows the machine")

        def work() -> None:
            seen.set()
            busy.wait(DEADLINE_S)

        coordinator.call(work)
        assert seen.wait(DEADLINE_S)
        lost.send(MachineJoined(job.version, 1))
        lost.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        lost.close()
        busy.set()
        with contextlib.closing(agent_of(coordinator)) as other:
            other.send(MachineJoined(job.version, 1))
            answer = other.wait(DEADLINE_S)
    finally:
        busy.set()
        coordinator.stop()
    assert coordinator.failure is None
    assert isinstance(answer, MachineAdmitted), answer
    assert answer.workers == {0: 0}


def test_a_machine_that_joins_is_refused_if_the_checkpoint_of_the_run_is_gone(tmp_path: Path) -> None:
    net = Net()
    shards = Shards(model_of(net, [torch.optim.SGD(net.parameters(), lr=0.1)]), 1, net)
    checkpoint = shards.write(tmp_path)
    job = make_job(workers=1, servers=1, joined=True, transport="tcp", run_dir=tmp_path / "run")
    coordinator = CoordinatorHost.listen(structs.replace(job, resumed=ResumedFrom(str(checkpoint))))
    coordinator.start()
    shutil.rmtree(checkpoint)
    try:
        with contextlib.closing(agent_of(coordinator)) as stream:
            words = f"needs the checkpoint {checkpoint}, .* cannot be read: manifest.json: No such file"
            with pytest.raises(ConfigurationError, match=words):
                fetch_checkpoint(stream, lambda: str(tmp_path), lambda: None)
    finally:
        coordinator.stop()
    assert coordinator.failure is None


def test_the_first_answer_to_a_machine_is_that_to_its_offer(tmp_path: Path) -> None:
    job = make_job(workers=1, servers=1, joined=True, transport="tcp", run_dir=tmp_path / "run")
    coordinator = CoordinatorHost.listen(job)
    coordinator.start()
    try:
        with contextlib.closing(agent_of(coordinator)) as stream:
            await_that(lambda: coordinator._of_role("agent"), "the coordinator knows the machine")
            coordinator.call(coordinator.agents.dismiss, "")
            stream.send(MachineJoined(job.version, 1))
            answer = stream.wait(DEADLINE_S)
    finally:
        coordinator.stop()
    assert isinstance(answer, MachineAdmitted), answer


# Delays a worker before it connects, as long imports do.
SLOW = """
import os, time
from pathlib import Path

if "SLOW" in os.environ and not Path("go").exists():
    Path("starting").touch()
    while not Path("go").exists():
        time.sleep(0.01)
"""


@pytest.mark.processes
@pytest.mark.usefixtures("machines_alone")
@pytest.mark.skipif(bool(why_not()), reason=f"creating network namespaces needs {why_not()}")
@pytest.mark.parametrize("until", chaos("it was taken out", "its worker has ended"))
def test_a_machine_whose_link_is_down_while_its_worker_starts_joins_again(
    until: str, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("slow.py").write_text(SLOW)
    with network(2, NetworkLink()) as machines, open("join.log", "w") as messages:
        served = Served("--workers", "1:2", "--listen", "0.0.0.0", "--sync", "asp", "--import", "slow")
        Path("train.py").write_text(ENDLESS_SCRIPT)
        address = f"{machines.host}:{served.port}"
        one, other = machines.machines
        stays = served.join("1000000", address=address, prefix=one.prefix)
        await_training(1)
        monkeypatch.setenv("SLOW", "1")
        again = served.join("1000000", address=address, prefix=other.prefix, stderr=messages)
        await_that(Path("starting").exists, "the worker starts")
        link = ["ip", "-n", other.prefix[3], "link", "set", "eth0"]
        subprocess.run([*link, "down"], check=True)
        Path("go").touch()
        await_that(lambda: "was cut off from the run" in Path("join.log").read_text(), "it was cut off")
        if until == "it was taken out":
            await_that(lambda: "worker 1 is taken out" in served.messages, "the machine is taken out")
        subprocess.run([*link, "up"], check=True)
        await_training(2)
        enough()
        ends = [output(stays), output(again)]
        served.summary()

    said = Path("join.log").read_text()
    assert [code for code, *_ in ends] == [0, 0], said
    assert "Traceback" not in said + served.messages
    assert said.count("joined as worker 1") == 2, said
    assert "worker 1 has finished" in ends[1][1]

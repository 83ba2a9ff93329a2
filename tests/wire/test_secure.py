"""Streams over TLS, and a host whose door is closed to everybody who does not know the secret."""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.messages import Hello, Message, Snapshot, WorkerFinished
from paceline.errors import PeerLostError, ProtocolError
from paceline.run import listener as strangers
from paceline.wire import secure as tls
from paceline.wire.preface import COORDINATOR, Preface
from paceline.wire.secure import SecureSocket, contexts, new_secret
from paceline.wire.stream import Stream
from paceline.wire.transports import TCP, connect, is_local, seen_from
from tests.support.closed_door import DEADLINE_S, KNOWN, SNAPSHOTS, House, relay

HERE = Preface(COORDINATOR)


@pytest.fixture
def ends() -> Iterator[tuple[SecureSocket, SecureSocket]]:
    """Both ends of a TLS connection, after the handshake."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = SecureSocket(socket.create_connection(listener.getsockname()), KNOWN, HERE, server_side=False)
        other = SecureSocket(listener.accept()[0], KNOWN, HERE, server_side=True)
    thread = threading.Thread(target=other.shake_hands, args=(DEADLINE_S,))
    thread.start()
    one.shake_hands(DEADLINE_S)
    thread.join()
    yield one, other
    one.close()
    other.close()


@pytest.mark.parametrize("seed", range(4))
def test_messages_of_all_sizes_arrive_in_order(seed: int, ends: tuple[SecureSocket, SecureSocket]) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 100, 16_383, 16_384, 16_385, 70_000, 3_000_000]) for _ in range(40)]
    payloads = [draw.randbytes(size) for size in sizes]
    received: list[bytearray] = []

    def sink(message: Snapshot, size_bytes: int) -> list[memoryview]:
        received.append(bytearray(size_bytes))
        middle = size_bytes // 3
        whole = memoryview(received[-1])
        return [whole[:middle], whole[middle:]]

    sender: Stream[Message] = Stream(ends[0], SNAPSHOTS)
    receiver: Stream[Snapshot] = Stream(ends[1], SNAPSHOTS, sink)
    versions: list[int] = []
    for version, payload in enumerate(payloads):  # nobody reads yet, so most of it is queued
        middle = len(payload) // 2
        view = memoryview(payload)
        sender.send(Snapshot(0, version), [view[:middle], view[middle:]], lent=version)
    deadline_s = time.monotonic() + DEADLINE_S
    while len(versions) < len(payloads):
        sender.flush()
        versions += [message.version for message in receiver.receive()]
        assert time.monotonic() < deadline_s
    assert versions == list(range(len(payloads)))
    assert [bytes(part) for part in received] == payloads


def test_what_arrived_before_a_connection_was_reset_is_received(
    ends: tuple[SecureSocket, SecureSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = ends
    payload, rest = memoryview(bytearray(5)), memoryview(bytearray(100))
    one.sendmsg([memoryview(b"whole")])
    assert select.select([other.fileno()], [], [], DEADLINE_S)[0]
    receive = other._tls.recv_into

    def reset(target: memoryview) -> int:  # newer versions of Python raise this
        raise ConnectionResetError

    def receive_once(target: memoryview) -> int:
        monkeypatch.setattr(other._tls, "recv_into", reset)
        return receive(target)

    monkeypatch.setattr(other._tls, "recv_into", receive_once)
    assert other.recvmsg_into([payload, rest], 0, 0)[0] == 5
    assert bytes(payload) == b"whole"
    with pytest.raises(ConnectionResetError):
        other.recvmsg_into([rest], 0, 0)


def test_a_message_is_not_forgotten_where_no_selector_sees_it(
    ends: tuple[SecureSocket, SecureSocket],
) -> None:
    sender: Stream[Message] = Stream(ends[0], SNAPSHOTS)
    receiver: Stream[Snapshot] = Stream(ends[1], SNAPSHOTS)
    for version in range(5000):  # many messages in each record
        sender.send(Snapshot(0, version))
    versions: list[int] = []
    while len(versions) < 5000:
        sender.flush()
        versions += [receiver.wait(DEADLINE_S).version]
        versions += [message.version for message in receiver.receive()]
    assert versions == list(range(5000))


def test_a_peer_that_never_stops_sending_does_not_keep_the_receiver(
    ends: tuple[SecureSocket, SecureSocket],
) -> None:
    sender: Stream[Message] = Stream(ends[0], SNAPSHOTS)
    receiver: Stream[Snapshot] = Stream(ends[1], SNAPSHOTS)
    versions: list[int] = []
    sent = 0

    def refill() -> None:
        nonlocal sent
        sender.flush()
        while not sender.backlog:
            sender.send(Snapshot(0, sent))
            sent += 1

    refill()
    for message in receiver.receive():
        versions.append(message.version)
        refill()  # the socket never runs out of data
        assert len(versions) < 60_000, "one call reads from the same peer forever"
    while len(versions) < sent:
        sender.flush()
        versions.append(receiver.wait(DEADLINE_S).version)
    assert versions == list(range(sent))


def test_a_lost_connection_is_noticed(ends: tuple[SecureSocket, SecureSocket]) -> None:
    receiver: Stream[Snapshot] = Stream(ends[1], SNAPSHOTS)
    ends[0].close()
    with pytest.raises(PeerLostError):
        receiver.wait(DEADLINE_S)


def test_a_connection_that_is_lost_while_data_is_sent_is_described_in_words(
    ends: tuple[SecureSocket, SecureSocket],
) -> None:
    sender: Stream[Message] = Stream(ends[0], SNAPSHOTS)
    sender.send(Snapshot(0, 0))
    Stream[Snapshot](ends[1], SNAPSHOTS).wait(DEADLINE_S)  # the handshake is complete
    ends[1].close()

    def send_all() -> None:
        while True:
            sender.send(Snapshot(0, 1), [memoryview(bytes(100_000))])
            sender.flush()

    with pytest.raises(PeerLostError, match=r"the other side has closed it|Broken pipe"):
        send_all()


@pytest.fixture
def house() -> Iterator[House]:
    with contextlib.closing(House()) as made:
        yield made


def test_a_member_is_let_in(house: House) -> None:
    house.enter()
    house.poll_until(lambda: house.heard == [WorkerFinished()])


def test_a_client_with_another_secret_is_told_at_once(house: House) -> None:
    with pytest.raises(ProtocolError, match="the secret is not that of the run that is served there"):
        house.meanwhile(lambda: connect(house.address, 20, contexts(new_secret())))
    assert house.heard == []


@pytest.mark.parametrize("begin", [datetime.datetime(2090, 1, 1), datetime.datetime(1990, 1, 1)])
def test_a_machine_whose_clock_is_wrong_is_let_in(
    begin: datetime.datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate is not valid yet, or not valid any more, by the clock of either side."""
    monkeypatch.setattr(tls, "BEGIN", begin)
    monkeypatch.setattr(tls, "END", begin + datetime.timedelta(days=1))
    known = contexts(new_secret())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = SecureSocket(socket.create_connection(listener.getsockname()), known, HERE, server_side=False)
        other = SecureSocket(listener.accept()[0], known, HERE, server_side=True)
    thread = threading.Thread(target=other.shake_hands, args=(DEADLINE_S,))
    thread.start()
    with contextlib.closing(one), contextlib.closing(other):
        one.shake_hands(DEADLINE_S)
        thread.join()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"PCL1" + bytes(60), os.urandom(5000)])
def test_who_does_not_speak_tls_is_dropped_and_disturbs_nobody(said: bytes, house: House) -> None:
    callers = [house.knock(said) for _ in range(20)]
    house.enter()
    house.poll_until(lambda: house.heard == [WorkerFinished()])
    for caller in callers:
        caller.close()
    house.poll_until(lambda: len(house.hub.peers) == 1)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_is_reached_as_it_is_printed(host: str) -> None:
    listener, address = TCP.listen(host, secure=True)
    assert address.startswith("tls:[::1]:")
    assert is_local(address)
    with listener, contextlib.closing(connect(address.replace("tls:", "tcp:"), 20)) as caller:
        listener.settimeout(20)
        listener.accept()[0].close()
        assert caller.getpeername()[0] == "::1"


def test_all_ipv6_addresses_are_seen_as_the_one_that_was_reached() -> None:
    assert seen_from("tls:[::]:4000", "tls:[fd00::1]:29600") == "tls:[fd00::1]:4000"


def test_what_was_recorded_cannot_be_replayed(house: House) -> None:
    recorded = bytearray()
    _, host, port = house.address.split(":")
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as wire:  # somebody who passes on and records what a member sends

        def pass_on() -> None:
            inner, _ = wire.accept()
            with inner, socket.create_connection((host, int(port))) as outer:
                back = threading.Thread(target=relay, args=(outer, inner, bytearray()))
                back.start()
                relay(inner, outer, recorded)
                back.join()

        thread = threading.Thread(target=pass_on)
        thread.start()
        place = f"tls:127.0.0.1:{wire.getsockname()[1]}"
        member: Stream[Message] = Stream(house.meanwhile(lambda: connect(place, 20, KNOWN)), SNAPSHOTS)
        member.send(Hello("token", "worker", 0))
        member.send(WorkerFinished())
        house.poll_until(lambda: len(house.heard) == 1)
        member.close()
        house.poll_until(lambda: not house.hub.peers)
        thread.join()

    house.knock(bytes(recorded))
    house.enter(1)
    house.poll_until(lambda: len(house.heard) == 2)
    house.poll_until(lambda: len(house.hub.peers) == 1)
    assert house.heard == [WorkerFinished(), WorkerFinished()]


def test_five_hundred_half_open_connections_keep_nobody_out(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "GREETING_S", 0.0)  # a stranger makes room at once
    for number in range(500):
        house.knock(b"\x16\x03\x01" if number % 2 else b"")  # the beginning of a handshake
        house.hub.poll(0.0)
    house.enter()
    house.poll_until(lambda: house.heard == [WorkerFinished()])

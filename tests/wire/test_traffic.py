"""The traffic between machines: the counters of the kernel, and the rates that follow from them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from paceline.core.liveness import FORGET_S, Direction, LinkTraffic, TrafficMeter
from paceline.core.messages import Message, first_phase
from paceline.wire.preface import COORDINATOR, Preface, Traffic, sending_of, traffic_of
from paceline.wire.secure import SecureSocket, contexts, new_secret
from paceline.wire.stream import Stream
from paceline.wire.transports import TCP, connect
from tests.support.live import await_that

THERE, BACK = Direction("a", "b"), Direction("b", "a")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    listener, address = TCP.listen()
    with listener, connect(address) as one, listener.accept()[0] as other:
        yield one, other


def test_the_bytes_of_a_connection_are_counted_on_both_sides(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    one, other = pair
    assert (traffic_of(one), traffic_of(other)) == (Traffic(1, 0), Traffic(0, 0))
    one.sendall(bytes(1000))
    assert len(other.recv(1000, socket.MSG_WAITALL)) == 1000
    other.sendall(bytes(10))
    assert len(one.recv(10, socket.MSG_WAITALL)) == 10
    await_that(lambda: traffic_of(one) == Traffic(1001, 10), "all bytes are acknowledged")
    await_that(lambda: traffic_of(other) == Traffic(10, 1000), "all bytes are acknowledged")


def test_a_tls_connection_counts_what_is_on_the_wire() -> None:
    known = contexts(new_secret())
    listener, address = TCP.listen(secure=True)
    with listener:
        plain = socket.create_connection(listener.getsockname())
        accepted = SecureSocket(listener.accept()[0], known, Preface(COORDINATOR), server_side=True)
        stream: Stream[Message] = Stream(
            SecureSocket(plain, known, Preface(COORDINATOR), server_side=False),
            first_phase("server", "reader"),
        )
        assert address.startswith("tls:")
        assert traffic_of(stream.sock) == Traffic(1, 0)
        stream.close()
        accepted.close()


def test_other_sockets_have_no_counters() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert traffic_of(one) is None
    listener, address = TCP.listen()
    with listener:
        closed = connect(address)
        closed.close()
        assert traffic_of(closed) is None


def test_the_rate_is_unknown_until_there_are_two_totals() -> None:
    meter = TrafficMeter(ticks_per_s=1)
    meter.note(1, THERE, 500, 10)
    assert meter.links(10) == {THERE: LinkTraffic(500, None)}
    meter.note(1, THERE, 700, 12)
    assert meter.links(12) == {THERE: LinkTraffic(700, 100.0)}


def test_a_rate_is_an_average_over_the_last_seconds() -> None:
    meter = TrafficMeter(ticks_per_s=10)
    for tenths in range(0, 200, 5):
        meter.note(1, THERE, 0 if tenths < 100 else 8 * (tenths - 100), tenths)
    assert meter.links(195)[THERE].bytes_per_s == 80.0


def test_a_connection_that_was_replaced_counts_from_its_beginning() -> None:
    meter = TrafficMeter(ticks_per_s=1)
    meter.note(1, THERE, 500, 0)
    meter.note(1, THERE, 20, 1)
    meter.note(2, BACK, 5, 1)
    assert meter.links(1) == {THERE: LinkTraffic(20, None), BACK: LinkTraffic(5, None)}
    meter.note(1, THERE, 30, 2)
    assert meter.links(2)[THERE] == LinkTraffic(30, 10.0)


def test_a_connection_that_has_ended_is_forgotten() -> None:
    meter = TrafficMeter(ticks_per_s=1)
    meter.note(1, THERE, 500, 0)
    meter.note(2, THERE, 600, FORGET_S)
    assert meter.links(FORGET_S) == {THERE: LinkTraffic(1100, None)}
    assert meter.links(FORGET_S + 1) == {THERE: LinkTraffic(600, None)}
    meter.note(2, THERE, 700, 3 * FORGET_S)
    assert meter.links(3 * FORGET_S) == {THERE: LinkTraffic(700, None)}


def test_a_connection_is_busy_while_bytes_are_on_their_way(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    thread = threading.Thread(target=one.sendall, args=(bytes(2_000_000),))
    thread.start()
    time.sleep(0.3)  # the other side does not read
    received = 0
    while received < 2_000_000:
        received += len(other.recv(65536))
    thread.join()
    sending = sending_of(one)
    assert sending is not None
    assert sending.busy_s > 0.1
    with socket.socket(socket.AF_UNIX) as unix:
        assert sending_of(unix) is None

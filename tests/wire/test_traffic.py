"""The traffic between machines: the counters of the kernel, and the rates that follow from them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.core.liveness import FORGET_S, Direction, LinkTraffic, TrafficMeter
from paceline.core.messages import ConnectionTraffic, Message, Waits, first_phase
from paceline.core.status import LOCAL
from paceline.run.agents import JobWatch, Machines
from paceline.run.job_options import make_job
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


def test_a_link_is_one_link_however_often_its_machines_have_joined(tmp_path: Path) -> None:
    core: Any = None  # it has no part in this
    machines = Machines()
    watch = JobWatch(make_job(workers=4, servers=2, run_dir=tmp_path), core, machines)

    def joins(
        address: str, workers: dict[int, int], servers: Sequence[int] = (), reached: str = "10.0.0.1"
    ) -> None:
        machines.admit(machines.add(), address, reached, workers, servers, 0)

    def carries(server: int, worker: int, sent_bytes: int, received_bytes: int) -> None:
        traffic = (ConnectionTraffic(worker, sent_bytes, received_bytes),)
        watch.note_traffic_of(server, Waits((), timers=False, traffic=traffic))

    joins("10.0.0.1", {0: 0})  # the machine that serves the run
    joins("10.0.0.2", {1: 0}, servers=[1])
    carries(0, 0, 900, 900)
    carries(0, 1, 500, 50)
    carries(1, 0, 30, 7)
    joins("10.0.0.2", {1: 1})
    carries(0, 1, 500, 50)  # of the connection that has ended
    carries(0, 1, 200, 20)
    here, there = LOCAL, "10.0.0.2"
    assert watch.traffic.totals() == {
        Direction(there, here): 30 + 50 + 20,
        Direction(here, there): 7 + 500 + 200,
    }
    assert machines.hosts_of("worker") == {0: here, 1: there}

    # Each of these may be another machine, which has come through a tunnel.
    joins("127.0.0.1", {2: 0}, reached="127.0.0.1")
    joins("127.0.0.1", {3: 0}, reached="127.0.0.1")
    assert machines.hosts_of("worker") == {0: here, 1: there, 2: "127.0.0.1", 3: "127.0.0.1 (2)"}


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

"""The door of a host, polled by hand: strangers without number, peers that break it or do not listen."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import resource
import socket
import struct
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from paceline.core.messages import FetchOptimizerState, FetchStates, Hello, Message, ShardWaits, Waits
from paceline.errors import InternalError, ProtocolError
from paceline.run import listener as strangers
from paceline.run.hub import MOST_UNSENT, Caller, Hub
from paceline.wire.transports import TCP, UNIX, connect

TOKEN = "the token"
LISTEN = {"unix": UNIX.listen, "tcp": TCP.listen}


def framed(message: Message) -> bytes:
    header = msgspec.msgpack.encode(message)
    return struct.pack("<4sIQ", b"PCL1", len(header), 0) + header


GREETING = framed(Hello(TOKEN, "reader", 0))


class Clock:
    """In place of the module `time`."""

    now_ticks = 100.0

    def monotonic(self) -> float:
        return self.now_ticks


class Bench:
    """A host that does what a test says, its hub, and those who have called."""

    def __init__(self, kind: str = "unix") -> None:
        listener, self.address = LISTEN[kind]()
        self.hub: Hub[Caller] = Hub("the host", TOKEN, listener, "server", Caller, self)
        self.heard: list[Message] = []
        self.left: list[str] = []
        self.callers: list[socket.socket] = []
        self.trips: Callable[[], None] = lambda: None

    def greeted(self, peer: Caller, hello: Hello) -> None:
        peer.role, peer.index = hello.role, hello.index

    def received(self, peer: Caller, message: Message) -> None:
        self.heard.append(message)
        self.trips()

    def payload_targets(self, peer: Caller, message: Message, size_bytes: int) -> Sequence[memoryview]:
        return []

    def gone(self, peer: Caller, reason: str) -> None:
        self.left.append(reason)

    def call(self, said: bytes = b"") -> socket.socket:
        caller = connect(self.address)
        self.callers.append(caller)
        caller.sendall(said)
        return caller

    def poll(self, times: int = 20) -> None:
        for _ in range(times):
            self.hub.poll(0.0)

    @property
    def strangers(self) -> int:
        return sum(not peer.role for peer in self.hub.peers)

    def close(self) -> None:
        self.hub.close()
        for caller in self.callers:
            caller.close()


@pytest.fixture(params=LISTEN)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with contextlib.closing(Bench(request.param)) as made:
        yield made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(strangers, "time", clock)
    return clock


@pytest.fixture
def small(few: int, clock: Clock) -> Iterator[Bench]:
    """A host with few places for strangers."""
    with contextlib.closing(Bench()) as made:
        yield made


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    return 64 // strangers.SHARE_OF_DESCRIPTORS


def closed(sock: socket.socket) -> bool:
    """True if the other end has closed the connection; it has said nothing else."""
    sock.setblocking(False)
    try:
        assert sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


# -- strangers --------------------------------------------------------------------------------------------


def test_those_who_call_and_reset_at_once_cost_nothing(bench: Bench) -> None:
    for _ in range(300):
        reset(bench.call())
        bench.poll(1)
    bench.call(GREETING + framed(FetchOptimizerState(0)))
    bench.poll()
    assert bench.heard == [FetchOptimizerState(0)]
    assert len(bench.hub.peers) == 1


def test_a_greeting_that_is_there_is_read_with_the_call(bench: Bench) -> None:
    bench.call(GREETING + framed(FetchOptimizerState(0)))
    bench.hub.poll(1.0)
    assert bench.heard == [FetchOptimizerState(0)]


def test_only_so_many_pending_are_let_in_and_the_oldest_makes_room(
    small: Bench, clock: Clock, few: int
) -> None:
    silent = [small.call() for _ in range(few + 2)]
    small.poll()
    assert small.strangers == few  # and the others wait, for these may be about to greet
    assert not any(map(closed, silent))
    clock.now_ticks += strangers.GREETING_S + 0.01
    late = small.call(GREETING)
    small.poll()
    assert [closed(caller) for caller in silent] == [True] * 3 + [False] * (few - 1)
    assert not closed(late)
    assert [peer.role for peer in small.hub.peers if peer.role] == ["reader"]
    assert small.strangers <= few


def test_while_no_more_are_let_in_the_host_sleeps(small: Bench, clock: Clock, few: int) -> None:
    for _ in range(few + 1):
        small.call()
    small.poll()
    assert small.hub._acceptor not in [key.fileobj for key in small.hub._selector.get_map().values()]
    assert small.hub._pending.left_s(5.0) == pytest.approx(strangers.GREETING_S, abs=0.01)
    clock.now_ticks += 0.1
    assert small.hub._pending.left_s(5.0) == pytest.approx(strangers.GREETING_S - 0.1, abs=0.01)


def test_a_stranger_that_stays_silent_is_dropped_in_the_end(bench: Bench, clock: Clock) -> None:
    silent = bench.call(GREETING[:-1])
    bench.poll()
    assert bench.strangers == 1
    clock.now_ticks += strangers.GREETING_TIMEOUT_S + 0.1
    bench.poll()
    assert closed(silent)


def test_out_of_descriptors_callers_are_turned_away_and_the_host_serves_on(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    here = bench.call(GREETING)
    bench.poll()
    waiting = [bench.call() for _ in range(40)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    plug = [os.dup(0) for _ in range(highest)]  # whatever is free below
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(plug) + 1, limits[1]))
    try:
        bench.poll(50)
        here.sendall(framed(FetchOptimizerState(0)))
        bench.poll()
        assert bench.heard == [FetchOptimizerState(0)]
        assert all(map(closed, waiting))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in plug:
            os.close(descriptor)
    bench.call(GREETING + framed(FetchOptimizerState(0)))
    bench.poll()
    assert len(bench.heard) == 2
    assert "Too many open files" in caplog.text
    assert len(caplog.records) < 10


def test_without_a_descriptor_in_reserve_the_host_rests_and_does_not_spin(
    bench: Bench, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = itertools.count()

    class Exhausted:
        def accept(self) -> None:
            next(tried)
            raise OSError(24, "Too many open files")

        def close(self) -> None:
            pass

    listener, bench.hub._acceptor._listener = bench.hub._acceptor._listener, Exhausted()  # type: ignore[assignment]
    bench.hub._acceptor.fileno = listener.fileno  # type: ignore[method-assign]
    caller = bench.call(GREETING)
    bench.poll(1000)
    assert next(tried) < 40
    bench.hub._acceptor._listener = listener
    clock.now_ticks += 1.0
    bench.poll()
    assert not closed(caller)
    assert len(bench.hub.peers) == 1


def test_what_pending_do_is_logged_a_few_times_and_then_counted(
    bench: Bench, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    for _ in range(1000):
        bench.call(framed(Hello("another", "reader", 0))).close()
        bench.poll(2)
    assert bench.strangers == 0
    assert len(caplog.records) == strangers.LOGGED_IN_FULL
    clock.now_ticks += strangers.COUNT_INTERVAL_S + 1
    bench.poll()
    assert len(caplog.records) == strangers.LOGGED_IN_FULL + 1
    for _ in range(10):
        bench.call(framed(Hello("another", "reader", 0))).close()
        bench.poll(2)
    bench.hub._pending.close()
    counts = [int(count) for count in re.findall(r"omitted (\d+) similar messages", caplog.text)]
    assert sum(counts) + strangers.LOGGED_IN_FULL == 1010
    assert len(counts) == 2


# -- peers ------------------------------------------------------------------------------------------------


def test_whatever_a_message_brings_about_costs_its_sender_its_connection_alone(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def trip() -> None:
        raise KeyError("what nobody had thought of")

    other, culprit = bench.call(GREETING), bench.call(GREETING)
    bench.poll()
    bench.trips = trip
    culprit.sendall(framed(FetchStates(0)))
    bench.poll()
    assert closed(culprit)
    assert len(bench.left) == 1
    assert "what nobody had thought of" in caplog.text
    assert "Traceback" in caplog.text
    bench.trips = lambda: None
    other.sendall(framed(FetchOptimizerState(0)))
    bench.poll()
    assert bench.heard == [FetchStates(0), FetchOptimizerState(0)]


@pytest.mark.parametrize(
    "error", [InternalError("an invariant"), OSError(28, "No space left"), MemoryError()]
)
def test_what_is_not_the_senders_fault_ends_the_host(bench: Bench, error: Exception) -> None:
    def trip() -> None:
        raise error

    bench.trips = trip
    bench.call(GREETING + framed(FetchStates(0)))
    with pytest.raises(type(error)):
        bench.poll()


def test_a_peer_that_does_not_read_what_it_is_sent_is_dropped(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    deaf = bench.call(GREETING)
    bench.poll()
    [peer] = bench.hub.peers
    answer = Waits((ShardWaits(0, "bsp", (), ("x" * 1000,)),), False)
    for sent in itertools.count():
        bench.hub.send(peer, answer)
        bench.hub._drop_broken()
        if not bench.hub.peers:
            break
        assert sent < 2 * MOST_UNSENT
    assert sent >= MOST_UNSENT - 1
    assert "it does not read the messages sent to it" in caplog.text
    deaf.close()


def test_what_a_peer_said_before_it_left_is_heard_although_it_could_not_be_sent_an_answer(
    bench: Bench,
) -> None:
    caller = bench.call(GREETING)
    bench.poll()
    [peer] = bench.hub.peers

    def answer() -> None:
        bench.trips = lambda: None
        caller.sendall(framed(FetchStates(0)))
        caller.shutdown(socket.SHUT_RD)
        caller.close()
        for _ in range(3):  # over TCP, the first one tells that nobody is there
            bench.hub.send(peer, Waits((), False))

    bench.trips = answer
    caller.sendall(framed(FetchOptimizerState(0)))
    bench.poll()
    assert bench.heard == [FetchOptimizerState(0), FetchStates(0)]
    assert not bench.hub.peers


def test_a_reader_is_not_read_a_large_header_from(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caller = bench.call(GREETING + struct.pack("<4sIQ", b"PCL1", 1 << 20, 0))
    bench.poll()
    assert closed(caller)
    assert "too large" in caplog.text


def test_a_greeting_that_the_host_refuses_is_logged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def greeted(peer: Caller, hello: Hello) -> None:
        raise ProtocolError("not expected")

    bench.greeted = greeted  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        caller = bench.call(GREETING)
        bench.poll()
    assert closed(caller)
    assert "not expected" in caplog.text


def test_a_door_that_is_closed_twice_closes_nothing_of_somebody_else() -> None:
    door = strangers.Acceptor(UNIX.listen()[0])
    door.close()
    others = [
        os.open(os.devnull, os.O_RDONLY) for _ in range(4)
    ]  # one of them gets the number of the reserve
    door.close()
    for descriptor in others:
        os.fstat(descriptor)  # raises if it was closed
        os.close(descriptor)

"""Rings in shared memory: what goes in comes out, in order, whoever sleeps and however full they are."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import random
import select
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.messages import (
    Answer,
    InitialWeights,
    Message,
    Phase,
    PullRepeated,
    WorkerFinished,
    first_phase,
)
from paceline.errors import PeerLostError, ProtocolError
from paceline.wire import ring as rings
from paceline.wire.ring import DATA_BYTES, RING_BYTES, WORD_BYTES, Ring
from paceline.wire.stream import Stream

pytestmark = pytest.mark.skipif(
    not rings.available(), reason="this processor may reorder stores: no rings here"
)

TIMEOUT_S = 20.0


def pair() -> tuple[Ring, Ring]:
    """A writer's end and a reader's."""
    memory = memoryview(mmap.mmap(-1, RING_BYTES))
    return Ring(memory), Ring(memory)


@given(st.data())
def test_frames_come_out_as_they_went_in_whatever_their_sizes(data: st.DataObject) -> None:
    writer, reader = pair()
    expected: deque[bytes] = deque()
    for _ in range(data.draw(st.integers(1, 60))):
        if data.draw(st.booleans()):
            frame = bytes([data.draw(st.integers(0, 255))]) * data.draw(
                st.one_of(st.integers(0, 40), st.integers(0, DATA_BYTES // 3))
            )
            if writer.write(frame):
                expected.append(frame)
            else:
                assert expected, "an empty ring takes everything that fits into half of it"
        else:
            assert reader.ready == bool(expected)
            assert reader.read() == (expected.popleft() if expected else None)
    while expected:
        assert reader.read() == expected.popleft()
    assert reader.read() is None


def test_a_full_ring_takes_nothing_more_until_something_was_read() -> None:
    writer, reader = pair()
    count = 0
    while writer.write(b"x" * 1000):
        count += 1
    assert count == DATA_BYTES // (WORD_BYTES + 1000)
    assert reader.read() == b"x" * 1000
    assert not writer.write(b"y" * 1500)
    assert reader.read() == b"x" * 1000
    assert writer.write(b"y" * 1500)
    assert [reader.read() for _ in range(count - 1)] == [b"x" * 1000] * (count - 2) + [b"y" * 1500]


def test_who_falls_asleep_hears_of_what_came_at_the_last_moment() -> None:
    writer, reader = pair()
    assert reader.fall_asleep()
    assert writer.write(b"1")
    assert writer.reader_asleep
    reader.wake_up()
    assert not writer.reader_asleep
    assert not reader.fall_asleep()  # there is something to read
    assert not writer.reader_asleep
    assert reader.read() == b"1"
    assert reader.fall_asleep()


def set_word(ring: Ring, word: int, value: int) -> None:
    """Write into the shared memory, as a peer can at any time."""
    ring._words[word] = value


FIRST = rings.HEADER_BYTES // WORD_BYTES  # of the frames' words

# What a peer writes where, after it has written one frame of one byte; and whether that frame has been read by then.
LIES: dict[str, tuple[bool, list[tuple[int, int]]]] = {
    "a frame longer than the ring": (False, [(FIRST, DATA_BYTES)]),
    "a frame that ends behind what is written": (False, [(FIRST, 9)]),
    "a frame of nearly the largest length": (False, [(FIRST, rings.SKIP - 1)]),
    "the whole ring left out": (False, [(FIRST, rings.SKIP)]),
    "the whole ring left out, again and again": (False, [(FIRST, rings.SKIP), (rings.WRITTEN, 2**63)]),
    "more written than the ring holds": (False, [(rings.WRITTEN, DATA_BYTES + 8)]),
    "half a word written": (False, [(rings.WRITTEN, 12)]),
    "less written than before": (True, [(rings.WRITTEN, 8)]),
    "the rest left out, and nothing after it": (True, [(FIRST + 2, rings.SKIP), (rings.WRITTEN, 24)]),
}


@pytest.mark.parametrize("what", LIES)
def test_what_no_honest_writer_writes_is_an_error_and_never_read_for_ever(what: str) -> None:
    read_first, words = LIES[what]
    writer, reader = pair()
    writer.write(b"1")
    if read_first:
        reader.read()
    for word, value in words:
        set_word(reader, word, value)
    with pytest.raises(ValueError, match=r"in a ring|the writer reports"):
        reader.read()


@pytest.mark.parametrize("taken", [40, 2**64 - 8, 8])
def test_a_reader_that_has_read_what_was_not_written_or_goes_back_is_an_error(taken: int) -> None:
    writer, reader = pair()
    writer.write(b"1")
    reader.read()
    writer.write(b"2")
    set_word(reader, rings.READ, taken)
    with pytest.raises(ValueError, match="the reader reports that it has read"):
        writer.write(b"3")


def test_what_lay_in_the_memory_before_is_not_believed() -> None:
    memory = memoryview(mmap.mmap(-1, RING_BYTES))
    memory[:] = b"\xff" * RING_BYTES
    writer = Ring(memory)
    with pytest.raises(ValueError, match="the reader reports"):
        writer.write(b"1")
    with pytest.raises(ValueError, match="the writer reports"):
        Ring(memory).read()


def test_whatever_a_peer_writes_into_the_ring_both_ends_come_to_an_end() -> None:
    choice = random.Random(3)
    values = [0, 1, 7, 8, 16, 24, DATA_BYTES, DATA_BYTES - 8, rings.SKIP, rings.SKIP - 1, 2**63]
    for _ in range(3000):
        writer, reader = pair()
        for _ in range(choice.randrange(4)):
            writer.write(bytes(choice.randrange(40)))
        for _ in range(choice.randrange(1, 4)):
            word = choice.choice(
                [rings.WRITTEN, rings.READ, FIRST + choice.randrange(12), RING_BYTES // 8 - 1]
            )
            set_word(reader, word, choice.choice(values) if choice.random() < 0.8 else choice.getrandbits(64))
        with contextlib.suppress(ValueError):
            for _ in range(DATA_BYTES // WORD_BYTES + 1):  # no ring holds more frames
                if reader.read() is None:
                    break
            else:
                pytest.fail("more frames were read than a ring holds")
        with contextlib.suppress(ValueError):
            writer.write(b"more")


# -- two processes ----------------------------------------------------------------------------------------


def echo(memory: tuple[Any, Any], bell: Connection, other: Connection, count: int, seed: int) -> None:
    """Send back what comes; sleep whenever there is nothing to do, or now and then look for a while."""
    incoming, outgoing = (Ring(memoryview(part)) for part in memory)
    for _ in range(count):
        frame = wait_for(incoming, bell, random.Random(seed))
        while not outgoing.write(frame):
            pass
        if outgoing.reader_asleep:
            other.send_bytes(b"!")


def wait_for(ring: Ring, bell: Connection, choice: random.Random) -> bytes:
    looks = choice.randrange(3) * 50
    while True:
        if (frame := ring.read()) is not None:
            return frame
        if looks > 0:
            looks -= 1
        elif ring.fall_asleep():
            assert bell.poll(TIMEOUT_S), "it sleeps, and nobody has woken it"
            bell.recv_bytes()
            ring.wake_up()


def test_no_message_and_no_wake_up_is_lost_between_two_processes() -> None:
    count = 20_000
    fork = multiprocessing.get_context("fork")
    there, back = mmap.mmap(-1, RING_BYTES), mmap.mmap(-1, RING_BYTES)
    (our_bell, their_end), (their_bell, our_end) = fork.Pipe(False), fork.Pipe(False)
    process = fork.Process(target=echo, args=((there, back), their_bell, their_end, count, 1))
    process.start()
    outgoing, incoming = Ring(memoryview(there)), Ring(memoryview(back))
    choice = random.Random(2)
    sent: deque[bytes] = deque()
    for number in range(count):
        frame = number.to_bytes(4, "big") * choice.randrange(1, 30)
        assert outgoing.write(frame)
        if outgoing.reader_asleep:
            our_end.send_bytes(b"!")
        sent.append(frame)
        while len(sent) > choice.randrange(4):
            assert wait_for(incoming, our_bell, choice) == sent.popleft()
    while sent:
        assert wait_for(incoming, our_bell, choice) == sent.popleft()
    process.join(TIMEOUT_S)
    assert process.exitcode == 0


# -- streams with rings -----------------------------------------------------------------------------------


@contextlib.contextmanager
def streams() -> Iterator[tuple[Stream[Message], Stream[Message], bytearray]]:
    """A worker's end and a server's, and where the payloads of the latter go."""
    ours, theirs = socket.socketpair()
    payload = bytearray(200_000)

    def sink(message: Message, size_bytes: int) -> list[memoryview]:
        return [memoryview(payload)[:size_bytes]] if isinstance(message, InitialWeights) else []

    there, back = memoryview(mmap.mmap(-1, RING_BYTES)), memoryview(mmap.mmap(-1, RING_BYTES))
    worker: Stream[Message] = Stream(ours, first_phase("server", "worker"))
    server: Stream[Message] = Stream(theirs, Phase("worker", "server", "training"), sink)
    worker.use_rings(Ring(there), Ring(back))
    server.use_rings(Ring(back), Ring(there))
    try:
        yield worker, server, payload
    finally:
        worker.close()
        server.close()


def test_messages_with_a_payload_keep_their_place_among_those_in_the_ring() -> None:
    with streams() as (worker, server, payload):
        worker.send(PullRepeated(0, iteration=1))
        worker.send(InitialWeights(1), [memoryview(b"\7" * 1000)])
        worker.send(PullRepeated(0, iteration=2))
        assert list(server.receive(from_socket=False)) == [PullRepeated(0, iteration=1)]
        assert not server.ring_ready  # what comes next comes from the socket
        assert list(server.receive()) == [InitialWeights(1), PullRepeated(0, iteration=2)]
        assert payload[:1000] == b"\7" * 1000


def test_a_payload_that_comes_bit_by_bit_holds_up_what_follows_it() -> None:
    with streams() as (worker, server, payload):
        worker.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        worker.send(InitialWeights(0), [memoryview(bytes(range(200)) * 1000)])
        worker.send(PullRepeated(0, iteration=1))
        got: list[Message] = []
        while len(got) < 2:
            got += server.receive()
            worker.flush()
        assert got == [InitialWeights(0), PullRepeated(0, iteration=1)]
        assert payload == bytes(range(200)) * 1000


def test_a_sleeper_is_woken_through_the_socket_and_nobody_else() -> None:
    with streams() as (worker, server, _):
        worker.send(PullRepeated(0, iteration=1))
        assert not select.select([server], [], [], 0)[0]
        assert not server.fall_asleep()
        assert list(server.receive(from_socket=False)) == [PullRepeated(0, iteration=1)]
        assert server.fall_asleep()
        worker.send(PullRepeated(0, iteration=2))
        assert select.select([server], [], [], TIMEOUT_S)[0]
        server.wake_up()
        assert list(server.receive()) == [PullRepeated(0, iteration=2)]
        worker.send(PullRepeated(0, iteration=3))
        assert not select.select([server], [], [], 0)[0]


def test_what_was_said_before_the_connection_ended_is_heard() -> None:
    with streams() as (worker, server, _):
        worker.send(PullRepeated(0, iteration=1))
        worker.send(WorkerFinished())
        worker.sock.close()
        heard: list[Message] = []
        with pytest.raises(PeerLostError):
            heard.extend(server.receive())
        assert heard == [PullRepeated(0, iteration=1), WorkerFinished()]


def test_what_the_ring_has_no_room_for_waits_and_comes_in_order() -> None:
    with streams() as (worker, server, _):
        count = 5000
        for number in range(count):
            server.send(Answer(0, number, number))
        assert server.backlog
        got: list[Message] = []
        while len(got) < count:
            got += worker.receive(from_socket=False)
            server.flush()
        assert got == [Answer(0, number, number) for number in range(count)]
        assert not server.backlog


def test_a_frame_of_noise_is_refused() -> None:
    with streams() as (worker, server, _):
        assert worker._ring_out is not None
        worker._ring_out.write(b"\xc1 noise")
        with pytest.raises(ProtocolError, match="cannot be decoded"):
            list(server.receive(from_socket=False))


def test_a_message_whose_payload_was_left_out_is_refused() -> None:
    with streams() as (worker, server, payload):
        server.sink = lambda message, size_bytes: [memoryview(payload)]
        worker.send(PullRepeated(0, iteration=1))
        with pytest.raises(ProtocolError, match="without its payload"):
            list(server.receive(from_socket=False))


def test_a_ring_that_makes_no_sense_is_the_peers_fault_at_either_end() -> None:
    with streams() as (worker, server, _):
        assert worker._ring_out is not None
        set_word(worker._ring_out, rings.WRITTEN, 2**40)
        with pytest.raises(ProtocolError, match="cannot read from a ring"):
            list(server.receive(from_socket=False))
        assert worker._ring_in is not None
        set_word(worker._ring_in, rings.READ, 2**40)
        with pytest.raises(ProtocolError, match="cannot write to a ring"):
            server.send(Answer(0, 0, 0))


def test_one_call_handles_what_the_ring_held_when_it_began_and_no_more() -> None:
    with streams() as (worker, server, _):
        worker.send(PullRepeated(0, iteration=0))
        heard = 0
        for _ in server.receive(from_socket=False):
            heard += 1
            assert heard < 10, "a peer that goes on sending holds its host for ever"
            worker.send(PullRepeated(0, iteration=heard))
        assert heard == 1
        assert server.ring_ready


class FilledLate:
    """A ring that its writer fills right after its reader has first found it empty."""

    def __init__(self, ring: Any, sends: list[Callable[[], None]]) -> None:
        self._ring = ring
        self._sends = sends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)

    def read(self, *end: int) -> bytes | None:
        frame: bytes | None = self._ring.read(*end)
        while frame is None and self._sends:
            self._sends.pop(0)()
        return frame


def test_where_a_payload_goes_is_asked_when_all_that_comes_before_it_has_been_handed_out() -> None:
    """The socket may be heard before the ring: the order is the ring's all the same."""
    with streams() as (worker, server, payload):
        asked: list[Message] = []
        sink = server.sink

        def note(message: Message, size_bytes: int) -> Sequence[memoryview]:
            asked.append(message)
            return sink(message, size_bytes)

        server.sink = note
        server._ring_in = FilledLate(  # type: ignore[assignment]
            server._ring_in,
            [
                lambda: worker.send(PullRepeated(0, iteration=1)),
                lambda: worker.send(InitialWeights(0), [memoryview(b"x" * 100)]),
            ],
        )
        assert list(server.receive()) == [PullRepeated(0, iteration=1), InitialWeights(0)]
        assert asked == [PullRepeated(0, iteration=1), InitialWeights(0)]
        assert payload[:100] == b"x" * 100


def test_a_message_that_has_no_place_in_the_ring_is_not_heard_and_its_connection_not_taken_for_closed() -> (
    None
):
    with streams() as (worker, server, _):
        stray: Stream[Message] = Stream(worker.sock, first_phase("server", "worker"))  # without the ring
        for number in range(3):
            stray.send(InitialWeights(number), [memoryview(bytes(100_000))])
            assert list(server.receive()) == []

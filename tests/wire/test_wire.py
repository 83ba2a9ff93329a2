"""Bytes between processes: shared and streamed memory under one set of promises, frames, sockets."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.layout import ITEM_BYTES, Layout, Parameter, Piece, ShardSlice
from paceline.core.messages import (
    Answer,
    Commit,
    Content,
    FetchOptimizerState,
    FrozenTensors,
    Hello,
    IterationFinished,
    Message,
    Phase,
    Stage,
    Status,
    WorkerFinished,
    first_phase,
)
from paceline.errors import ConfigurationError, DeadlineError, PeerLostError, ProtocolError
from paceline.run.server_memory import Inbox, SharedInbox, StreamedInbox
from paceline.wire import stream as streams
from paceline.wire import transports as unix
from paceline.wire.memory import MASTER, PIECE_BYTES, Region, cut
from paceline.wire.stream import BUFFER_BYTES, GREETING_LIMIT_BYTES, HEADER_LIMIT_BYTES, Stream, no_payload
from paceline.wire.transports import TCP, TRANSPORTS, UNIX, connect
from tests.support.live import descriptors, left_in_memory

TIMEOUT_S = 30.0
SMALL_BUFFER_BYTES = 1 << 14  # of a socket's, so that much stays queued
MIXED = Layout.of(
    [
        Parameter(("a",), (7, 3), "float32"),
        Parameter(("b",), (), "float64"),
        Parameter(("c",), (33,), "bfloat16"),
        Parameter(("d",), (0, 5), "float32"),
        Parameter(("e",), (50,), "float16"),
        Parameter(("f",), (11,), "float64"),
    ]
)
LARGE = Layout.of([Parameter(("w",), (400_000,), "float64"), Parameter(("v",), (70_001,), "float16")])
LAYOUTS = {"several dtypes": MIXED, "more shards than blocks": MIXED, "larger than a socket's buffer": LARGE}
SHARDS = {"several dtypes": 2, "more shards than blocks": 7, "larger than a socket's buffer": 2}

ANYTHING = Phase("", "server", "training")
"""A phase in which nearly all messages to servers may be sent, and which goes on after any of them."""


@pytest.fixture(autouse=True)
def no_descriptor_is_leaked() -> Iterator[None]:
    before = descriptors()
    yield
    if descriptors().items() - before.items():
        gc.collect()  # memory that is mapped holds a descriptor until it is freed
    assert not descriptors().items() - before.items()


def fill(vectors: Any, seed: int) -> dict[str, bytes]:
    """Fill every vector with bytes of its own; return them."""
    content = {}
    for number, (dtype, view) in enumerate(vectors.items()):
        pattern = bytes((seed + 31 * number + 7 * i) % 251 for i in range(251))
        content[dtype] = (pattern * (view.nbytes // 251 + 1))[: view.nbytes]
        view[:] = content[dtype]
    return content


def expected(content: dict[str, bytes], shard: ShardSlice) -> dict[str, bytes]:
    whole = {dtype: memoryview(data) for dtype, data in content.items()}
    return {dtype: bytes(part) for dtype, part in cut(whole, shard).items()}


def bytes_of(vectors: dict[str, memoryview], piece: Piece) -> memoryview:
    size_bytes = ITEM_BYTES[piece.dtype]
    return vectors[piece.dtype][piece.start * size_bytes : piece.stop * size_bytes]


def contents(vectors: Any) -> dict[str, bytes]:
    return {dtype: bytes(view) for dtype, view in vectors.items()}


# -- one worker and its shards, over each transport -------------------------------------------------------


class Wire:
    """A worker's region and, for each shard, a connection with the shard's inbox at its other end."""

    def __init__(self, transport: str, layout: Layout, shards: int) -> None:
        shared = TRANSPORTS[transport].shares_memory
        self.shards = layout.slice_evenly(shards)
        self.region = TRANSPORTS[transport].place(layout, servers=0, offered=False, name="paceline")
        self.workers: list[Stream[Message]] = []
        self.servers: list[Stream[Message]] = []
        self.inboxes: list[Inbox] = []
        self.awaited = True
        listener, address = TRANSPORTS[transport].listen()
        with contextlib.closing(listener):
            for shard in self.shards:
                ours: Stream[Message] = Stream(
                    connect(address), first_phase("server", "worker"), self._incoming
                )
                select.select([listener], [], [], TIMEOUT_S)
                theirs: Stream[Message] = Stream(
                    listener.accept()[0],
                    first_phase("worker", "server"),
                    trusted=False,
                    takes_descriptor=shared,
                )
                descriptor = self.region.descriptor
                hello = Hello("token", "worker", 0, memory_bytes=self.region.size_bytes if shared else 0)
                ours.send(hello, descriptors=[descriptor] if descriptor is not None else [])
                assert theirs.wait(TIMEOUT_S) == hello
                theirs.trusted, theirs.takes_descriptor = True, False
                inbox: Inbox
                if shared:
                    inbox = SharedInbox(Region.attach(layout, theirs.descriptors.pop()), shard)
                else:
                    inbox = StreamedInbox(shard)
                theirs.sink = lambda message, size_bytes, inbox=inbox: inbox.places(message.pieces)  # type: ignore[misc]
                self.workers.append(ours)
                self.servers.append(theirs)
                self.inboxes.append(inbox)

    def _incoming(self, message: Message, size_bytes: int) -> Sequence[memoryview]:
        assert isinstance(message, Answer)
        shared = self.region.descriptor is not None
        return [] if shared else list(cut(self.region.weights, self.shards[message.shard]).values())

    def pieces(self, shard: ShardSlice) -> list[memoryview]:
        """What of a gradient travels: nothing over shared memory."""
        if self.region.descriptor is not None:
            return []
        mine = cut(self.region.gradients, shard)
        return [bytes_of(mine, piece) for piece in shard.pieces(PIECE_BYTES)]

    def stage(self, shard: ShardSlice, pieces: Sequence[int]) -> None:
        """Some pieces ahead of the commit, sent and received."""
        mine, message = self.pieces(shard), Stage(shard.index, tuple(pieces))
        sender, receiver = self.workers[shard.index], self.servers[shard.index]
        sender.send(message, [mine[piece] for piece in pieces], lent="worker")
        assert carry(sender, receiver) == message
        self.inboxes[shard.index].take(message.pieces)

    def push(
        self,
        shard: ShardSlice,
        iteration: int = 0,
        pieces: Sequence[int] | None = None,
        *,
        empty: bool = False,
    ) -> None:
        """One push, sent and received; of all pieces, or of some."""
        mine = self.pieces(shard)
        named = tuple(range(len(mine))) if pieces is None else tuple(pieces)
        message = Commit(shard.index, iteration, Content(b"\1", b"", named), empty=empty)
        sender, receiver = self.workers[shard.index], self.servers[shard.index]
        sender.send(message, [mine[piece] for piece in named], lent="worker")
        assert carry(sender, receiver) == message
        self.inboxes[shard.index].take(named)
        self.inboxes[shard.index].close(empty=empty)

    def answer(self, shard: ShardSlice, weights: dict[str, memoryview], iteration: int = 0) -> Answer:
        """Send an answer; what the socket does not take stays queued, lent by the shard."""
        message = Answer(shard.index, iteration, 1)
        payload: list[memoryview] = []
        places = self.inboxes[shard.index].weights
        if places is None:
            payload = list(weights.values())
        else:
            for dtype, place in places.items():
                place[:] = weights[dtype]
        self.servers[shard.index].send(message, payload, lent=shard.index)
        return message

    def close(self) -> None:
        for worker, server in zip(self.workers, self.servers, strict=True):
            worker.close()
            server.close()
        self.region.close()


def carry(sender: Stream[Any], receiver: Stream[Any]) -> Any:
    """Have what is queued flow until a message has arrived whole."""
    while True:
        for message in receiver.receive():
            return message
        sender.flush()


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
@pytest.mark.parametrize("what", LAYOUTS)
def test_pushes_and_answers_arrive_bit_by_bit(transport: str, what: str) -> None:
    with contextlib.closing(Wire(transport, LAYOUTS[what], SHARDS[what])) as wire:
        for iteration in range(3):
            gradients = fill(wire.region.gradients, seed=iteration)
            before = contents(wire.region.weights)
            for shard, inbox in zip(wire.shards, wire.inboxes, strict=True):
                wire.push(shard, iteration)
                assert contents(inbox.gradient) == expected(gradients, shard)
            assert contents(wire.region.weights) == before  # pushing is not pulling
            held = {dtype: memoryview(bytearray(view.nbytes)) for dtype, view in wire.region.weights.items()}
            weights = fill(held, seed=100 + iteration)
            for shard in reversed(wire.shards):
                message = wire.answer(shard, cut(held, shard), iteration)
                assert carry(wire.servers[shard.index], wire.workers[shard.index]) == message
            assert contents(wire.region.weights) == weights
            assert contents(wire.region.gradients) == gradients


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
def test_a_pull_is_not_torn_by_updates_that_come_right_after_the_answer(transport: str) -> None:
    """The worker reads late: the server's weights are other ones long before the answer has left."""
    with contextlib.closing(Wire(transport, LARGE, 2)) as wire:
        held = {dtype: memoryview(bytearray(view.nbytes)) for dtype, view in wire.region.weights.items()}
        weights = fill(held, seed=3)
        for shard in wire.shards:
            wire.servers[shard.index].sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER_BYTES)
            wire.answer(shard, cut(held, shard))
            assert wire.servers[shard.index].backlog == (transport != "shm")
            wire.servers[shard.index].keep(shard.index)
            fill(cut(held, shard), seed=77)
        for shard in wire.shards:
            carry(wire.servers[shard.index], wire.workers[shard.index])
        assert contents(wire.region.weights) == weights


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
def test_the_shards_of_a_region_do_not_touch_one_another(transport: str) -> None:
    with contextlib.closing(Wire(transport, MIXED, 3)) as wire:
        weights = fill(wire.region.weights, seed=9)
        shard = wire.shards[1]
        new = {dtype: memoryview(b"\xee" * view.nbytes) for dtype, view in wire.region.weights.items()}
        wire.answer(shard, cut(new, shard))
        carry(wire.servers[1], wire.workers[1])
        for other in (wire.shards[0], wire.shards[2]):
            assert contents(cut(wire.region.weights, other)) == expected(weights, other)
        assert set(b"".join(contents(cut(wire.region.weights, shard)).values())) == {0xEE}


STREAMS = ["unix", "tcp"]


@pytest.fixture(params=STREAMS)
def streamed(request: pytest.FixtureRequest) -> Iterator[Wire]:
    """Over a stream, with shards of several pieces."""
    with contextlib.closing(Wire(request.param, LARGE, 2)) as wire:
        assert [len(wire.pieces(shard)) for shard in wire.shards] == [3, 3]
        yield wire


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 2, 0), (2, 1, 0, 1, 2)], ids=str)
def test_pieces_may_come_in_any_order_and_more_than_once(streamed: Wire, order: tuple[int, ...]) -> None:
    for iteration in range(2):
        gradients = fill(streamed.region.gradients, seed=iteration)
        for shard, inbox in zip(streamed.shards, streamed.inboxes, strict=True):
            streamed.push(shard, iteration, order)  # all with the commit
            assert contents(inbox.gradient) == expected(gradients, shard)
        gradients = fill(streamed.region.gradients, seed=50 + iteration)
        for shard, inbox in zip(streamed.shards, streamed.inboxes, strict=True):
            for piece in order[:-1]:
                streamed.stage(shard, [piece])
            streamed.push(shard, iteration, order[-1:])
            assert contents(inbox.gradient) == expected(gradients, shard)


def test_a_piece_that_comes_again_counts_as_it_came_last(streamed: Wire) -> None:
    shard, inbox = streamed.shards[0], streamed.inboxes[0]
    fill(streamed.region.gradients, seed=1)
    streamed.stage(shard, [0, 1, 2])
    gradients = fill(streamed.region.gradients, seed=2)
    streamed.stage(shard, [1])
    streamed.push(shard, 0, [2, 0])
    assert contents(inbox.gradient) == expected(gradients, shard)


@pytest.mark.parametrize("staged", [(), (0,), (1, 2), (2, 2, 2)], ids=str)
def test_a_commit_without_all_of_its_pieces_is_refused(streamed: Wire, staged: tuple[int, ...]) -> None:
    shard = streamed.shards[1]
    streamed.push(shard)  # what came for one commit has not come for the next
    if staged:
        streamed.stage(shard, staged)
    lacking = 3 - len(set(staged))
    with pytest.raises(ProtocolError, match=f"without {lacking} of 3 pieces"):
        streamed.push(shard, 1, [])


@pytest.mark.parametrize("pieces", [(3,), (-1,), (0, 1, 2, 3), (2**63,), (-(2**63),)], ids=str)
@pytest.mark.parametrize("kind", [Stage, Commit])
def test_pieces_that_there_are_not_are_refused(streamed: Wire, kind: Any, pieces: tuple[int, ...]) -> None:
    before = contents(streamed.inboxes[0].gradient)
    message = Stage(0, pieces) if kind is Stage else Commit(0, 0, Content(b"\1", b"", pieces))
    streamed.workers[0].send(message, [memoryview(bytes(100))])
    with pytest.raises(ProtocolError, match=r"pieces|\$\.content\[2\]"):
        carry(streamed.workers[0], streamed.servers[0])
    assert contents(streamed.inboxes[0].gradient) == before


@pytest.mark.parametrize("change", [-1, 1])
def test_pieces_of_another_size_are_refused(streamed: Wire, change: int) -> None:
    size_bytes = streamed.pieces(streamed.shards[0])[1].nbytes
    streamed.workers[0].send(Stage(0, (1,)), [memoryview(bytes(size_bytes + change))])
    with pytest.raises(ProtocolError, match=f"Stage has a payload of {size_bytes + change} bytes"):
        carry(streamed.workers[0], streamed.servers[0])


def test_an_empty_commit_discards_what_was_staged(streamed: Wire) -> None:
    shard, inbox = streamed.shards[0], streamed.inboxes[0]
    fill(streamed.region.gradients, seed=1)
    streamed.stage(shard, [0, 2])
    streamed.push(shard, 0, [], empty=True)
    gradients = fill(streamed.region.gradients, seed=2)
    streamed.stage(shard, [1])
    with pytest.raises(ProtocolError, match="without 2 of 3 pieces"):
        streamed.push(shard, 1, [])
    streamed.push(shard, 1, [0, 2])
    assert contents(inbox.gradient) == expected(gradients, shard)


def test_a_shard_without_elements_has_no_pieces_and_its_commits_none() -> None:
    with contextlib.closing(Wire("unix", Layout.of([Parameter(("w",), (3,), "float32")]), 3)) as wire:
        empty = [shard for shard in wire.shards if not shard.size_bytes]
        assert len(empty) == 2
        for shard in wire.shards:
            wire.push(shard)


def test_over_shared_memory_pieces_are_refused_and_none_are_missed() -> None:
    with contextlib.closing(Wire("shm", LARGE, 2)) as wire:
        for empty in (False, True, False):
            wire.push(wire.shards[0], empty=empty)
        with pytest.raises(ProtocolError, match="shared memory"):
            wire.inboxes[0].places([0])


def test_a_master_is_weights_alone_and_the_same_for_all_who_map_it() -> None:
    with contextlib.closing(Region.create(MIXED, MASTER, shared=True)) as master:
        assert master.descriptor is not None
        mapped = [Region.attach(MIXED, os.dup(master.descriptor), MASTER) for _ in range(2)]
        assert [region.gradients for region in (master, *mapped)] == [{}, {}, {}]
        content = fill(mapped[0].weights, seed=4)
        assert contents(mapped[1].weights) == contents(master.weights) == content
        with pytest.raises(ProtocolError, match="shared memory"):
            Region.attach(MIXED, os.dup(master.descriptor))  # a worker's has gradients as well
    with contextlib.closing(Region.create(MIXED, shared=True)) as region:
        assert region.descriptor is not None
        with pytest.raises(ProtocolError, match="shared memory"):
            Region.attach(MIXED, os.dup(region.descriptor), MASTER)


@pytest.mark.parametrize("shared", [True, False])
def test_a_new_region_is_zero_and_its_vectors_do_not_overlap(shared: bool) -> None:
    with contextlib.closing(Region.create(MIXED, shared=shared)) as region:
        views = [*region.weights.values(), *region.gradients.values()]
        assert [view.nbytes for view in region.weights.values()] == [
            size * {"float64": 8, "float32": 4}.get(dtype, 2) for dtype, size in MIXED.sizes.items()
        ]
        assert not any(any(view) for view in views)
        for number, view in enumerate(views):
            view[:] = bytes([number + 1]) * view.nbytes
        assert [set(view) for view in views] == [{number + 1} for number in range(len(views))]


def test_a_region_lives_on_with_whoever_has_attached_it() -> None:
    created = Region.create(MIXED, shared=True)
    assert created.descriptor is not None
    attached = Region.attach(MIXED, os.dup(created.descriptor))
    content = fill(created.gradients, seed=5)
    created.close()
    created.close()  # twice does no harm
    assert created.descriptor is None
    del created
    assert contents(attached.gradients) == content


SEAL_ALL = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def memfd(size_bytes: int, seals: int) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize(
    ("change_bytes", "seals"),
    [
        (0, 0),
        (0, fcntl.F_SEAL_SHRINK),
        (0, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL),
        (0, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW),
        (0, SEAL_ALL | fcntl.F_SEAL_WRITE),
        (-1, SEAL_ALL),
        (1, SEAL_ALL),
        (1 << 20, SEAL_ALL),
    ],
)
def test_memory_that_could_change_its_size_or_has_another_one_is_refused(
    change_bytes: int, seals: int
) -> None:
    with contextlib.closing(Region.create(MIXED, shared=True)) as region:
        descriptor = memfd(region.size_bytes + change_bytes, seals)
    with pytest.raises(ProtocolError, match="shared memory"):
        Region.attach(MIXED, descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)  # it was taken over, and closed


def test_descriptors_of_anything_else_are_refused() -> None:
    with contextlib.closing(Region.create(MIXED, shared=True)) as region:
        size_bytes = region.size_bytes
        assert region.descriptor is not None
        read_only = os.open(f"/proc/self/fd/{region.descriptor}", os.O_RDONLY)
    with tempfile.TemporaryFile() as file:
        file.truncate(size_bytes)
        ends = os.pipe()
        for descriptor in (os.dup(file.fileno()), *ends, os.open("/dev/zero", os.O_RDWR), read_only):
            with pytest.raises(ProtocolError, match="shared memory"):
                Region.attach(MIXED, descriptor)


# -- frames -----------------------------------------------------------------------------------------------


def frame(header: bytes, payload: bytes = b"", *, magic: bytes = b"PCL1", size: int | None = None) -> bytes:
    prefix = struct.pack("<4sIQ", magic, len(header), len(payload) if size is None else size)
    return prefix + header + payload


def encoded(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


class Receiver:
    """A stream whose other end is a plain socket, and the payloads that came with its messages."""

    def __init__(self, *, trusted: bool = True, kind: str = "unix") -> None:
        self.peer, sock = socket.socketpair() if kind == "unix" else tcp_pair()
        self.peer.settimeout(TIMEOUT_S)
        self.stream: Stream[Any] = Stream(
            sock,
            ANYTHING,
            self._sink,
            trusted=trusted,
            takes_descriptor=not trusted,
        )
        self.payloads: list[bytearray] = []

    def _sink(self, message: Message, size_bytes: int) -> list[memoryview]:
        if not isinstance(message, Commit):
            return []
        self.payloads.append(bytearray(max(0, message.iteration)))  # tests say there how long it is
        view = memoryview(self.payloads[-1])
        half = len(view) // 2
        return [view[:half], view[half:half], view[half:]]

    def take(self, data: bytes) -> list[Message]:
        self.peer.sendall(data)
        return list(self.stream.receive())

    def take_in_segments(self, segments: Sequence[bytes]) -> list[Message]:
        """The same of any size: of each segment, as much as the socket holds is there before anything is read."""
        heard: list[Message] = []
        self.peer.setblocking(False)
        for segment in segments:
            view = memoryview(segment)
            while view:
                with contextlib.suppress(BlockingIOError):
                    while view:
                        view = view[self.peer.send(view) :]
                heard += list(self.stream.receive())
        self.peer.settimeout(TIMEOUT_S)
        return heard

    def read_out(self, size: int) -> bytes:
        """What the stream sends, as far as its queue leaves when the socket takes it."""
        heard = bytearray()
        while len(heard) < size:
            queued = [self.stream] if self.stream.backlog else []
            readable, writable, _ = select.select([self.peer], queued, [], TIMEOUT_S)
            assert readable or writable, f"{len(heard)} of {size} bytes came"
            if readable:
                heard += self.peer.recv(1 << 20)
            if writable:
                self.stream.flush()
        return bytes(heard)

    def close(self) -> None:
        self.peer.close()
        self.stream.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    listener, address = TCP.listen()
    with listener:
        listener.setblocking(True)
        sock = connect(address)
        return sock, listener.accept()[0]


@contextlib.contextmanager
def receiver(*, trusted: bool = True, kind: str = "unix") -> Iterator[Receiver]:
    with contextlib.closing(Receiver(trusted=trusted, kind=kind)) as made:
        yield made


def commit_of(payload: bytes | bytearray | memoryview) -> Commit:
    return Commit(0, len(payload), Content(b"\1\0", b"groups"))


MESSAGES = st.one_of(
    st.binary(max_size=300).map(lambda payload: (commit_of(payload), payload)),
    st.integers(0, 2**53).map(lambda shard: (FetchOptimizerState(shard), b"")),
    st.text(max_size=20).map(lambda token: (FrozenTensors(0, (token,)), b"")),
    st.just((WorkerFinished(), b"")),
)


@settings(max_examples=60)
@given(st.lists(MESSAGES, max_size=6), st.lists(st.integers(1, 40), max_size=40), st.booleans())
def test_messages_arrive_whole_and_in_order_however_their_bytes_are_chunked(
    messages: list[tuple[Message, bytes]], chunks: list[int], trusted: bool
) -> None:
    data = b"".join(frame(encoded(message), payload) for message, payload in messages)
    payloads = [payload for message, payload in messages if isinstance(message, Commit)]
    heard: list[Message] = []
    with receiver(trusted=trusted) as end:
        for size in [*chunks, len(data) + 1]:
            heard += end.take(data[:size]) if data[:size] else []
            data = data[size:]
            if (incoming := end.stream.incoming) is not None:
                payload, (message, missing_bytes) = payloads[len(end.payloads) - 1], incoming
                assert message == commit_of(payload)
                there = len(payload) - missing_bytes
                assert 0 <= there < len(payload)
                assert end.payloads[-1][:there] == payload[:there]
        assert end.stream.incoming is None
        assert heard == [message for message, _ in messages]
        assert [bytes(p) for p in end.payloads] == [p for m, p in messages if isinstance(m, Commit)]


@settings(max_examples=60)
@given(st.lists(MESSAGES, min_size=1, max_size=6), st.lists(st.integers(1, 60), max_size=30))
def test_what_a_stream_sends_another_one_receives(
    messages: list[tuple[Message, bytes]], cuts: list[int]
) -> None:
    ours, theirs = socket.socketpair()
    payloads: list[bytearray] = []

    def sink(message: Message, size_bytes: int) -> list[memoryview]:
        payloads.append(bytearray(size_bytes))
        return [memoryview(payloads[-1])]

    with (
        contextlib.closing(Stream[Any](ours, ANYTHING)) as sender,
        contextlib.closing(Stream[Any](theirs, ANYTHING, sink)) as getter,
    ):
        for message, payload in messages:
            view, parts, start = memoryview(payload), [], 0
            for size in cuts:
                parts.append(view[start : start + size])  # some of them empty
                start += size
            sender.send(message, [*parts, view[start:]])
        assert [getter.wait(TIMEOUT_S) for _ in messages] == [message for message, _ in messages]
        assert [bytes(payload) for payload in payloads] == [payload for _, payload in messages]


FEW: list[tuple[Message, bytes]] = [
    (FetchOptimizerState(1), b""),
    (commit_of(b"0123456789"), b"0123456789"),
    (WorkerFinished(), b""),
    (commit_of(b""), b""),
    (commit_of(b"x"), b"x"),
    (FrozenTensors(0, ("digest",)), b""),
]


def joined(messages: Sequence[tuple[Message, bytes]]) -> bytes:
    return b"".join(frame(encoded(message), payload) for message, payload in messages)


def assert_heard(end: Receiver, heard: list[Message], messages: Sequence[tuple[Message, bytes]]) -> None:
    assert heard == [message for message, _ in messages]
    assert [bytes(p) for p in end.payloads] == [p for m, p in messages if isinstance(m, Commit)]


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_frames_may_be_cut_at_any_byte(kind: str) -> None:
    data = joined(FEW)
    with receiver(kind=kind) as end:
        for where in range(len(data) + 1):
            end.payloads.clear()
            heard = []
            for part in (data[:where], data[where:]):
                heard += end.take(part) if part else []
            while len(heard) < len(FEW):  # TCP may take a moment
                heard.append(end.stream.wait(TIMEOUT_S))
            assert_heard(end, heard, FEW)


def test_frames_may_come_byte_by_byte() -> None:
    with receiver() as end:
        heard = [message for byte in joined(FEW) for message in end.take(bytes([byte]))]
        assert_heard(end, heard, FEW)


@pytest.mark.parametrize("change", [*range(-21, 5), 40, 3 * BUFFER_BYTES])
@pytest.mark.parametrize("before", [0, 1, 1500])
def test_a_header_may_be_larger_than_the_buffer_and_lie_anywhere_in_it(before: int, change: int) -> None:
    size = BUFFER_BYTES + change
    large = FrozenTensors(0, ("x" * (size - len(encoded(FrozenTensors(0, ("x" * 1000,)))) + 1000),))
    assert abs(len(encoded(large)) - size) <= 2  # longer text, longer length of it
    messages = [*[(FetchOptimizerState(7), b"")] * before, (large, b""), *FEW]
    with receiver() as end:
        assert_heard(end, end.take_in_segments([joined(messages)]), messages)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_many_small_frames_may_come_in_one_segment(kind: str) -> None:
    messages: list[tuple[Message, bytes]] = []
    for number in range(4000):  # of several sizes, so that the end of the buffer falls anywhere
        payload = bytes([number % 251]) * (number % 7)
        messages += [(FetchOptimizerState(number), b""), (commit_of(payload), payload)]
    with receiver(kind=kind) as end:
        heard = end.take_in_segments([joined(messages)])
        while len(heard) < len(messages):
            heard.append(end.stream.wait(TIMEOUT_S))
        assert_heard(end, heard, messages)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 3 * BUFFER_BYTES) | st.integers(0, 50), min_size=1, max_size=6),
    st.lists(st.integers(1, 2 * BUFFER_BYTES), max_size=8),
)
def test_the_end_of_a_payload_may_come_with_the_next_frames(sizes: list[int], cuts: list[int]) -> None:
    messages: list[tuple[Message, bytes]] = []
    for number, size in enumerate(sizes):
        payload = (bytes((number + 7 * i) % 251 for i in range(251)) * (size // 251 + 1))[:size]
        messages += [(commit_of(payload), payload), (FetchOptimizerState(number), b"")]
    data, segments = joined(messages), []
    for size in [*cuts, len(data)]:
        segments.append(data[:size])
        data = data[size:]
    with receiver() as end:
        assert_heard(end, end.take_in_segments(segments), messages)


def test_what_is_left_of_a_segment_is_heard_without_another_one() -> None:
    """`wait` gives one message; the others are in the buffer, where no poll sees them."""
    with receiver() as end:
        end.peer.sendall(joined(FEW))
        assert_heard(end, [end.stream.wait(TIMEOUT_S) for _ in FEW], FEW)


@settings(max_examples=150)
@given(st.binary(min_size=1, max_size=200), st.booleans(), st.booleans())
def test_noise_is_refused_or_waited_for_and_never_anything_else(
    noise: bytes, trusted: bool, framed: bool
) -> None:
    with receiver(trusted=trusted) as end, contextlib.suppress(ProtocolError):
        assert end.take(frame(noise) if framed else noise) == []


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_frame_never_does_more_than_be_refused(data: st.DataObject) -> None:
    payload = b"0123456789"
    whole = bytearray(frame(encoded(commit_of(payload)), payload))
    position = data.draw(st.integers(0, len(whole) - 1))
    whole[position] = data.draw(st.integers(0, 255))
    with receiver(trusted=False) as end, contextlib.suppress(ProtocolError):
        heard = end.take(bytes(whole))
        assert all(isinstance(message, Commit) for message in heard)


NESTED = b"\x82\xa4type\xa8Finished\xa1x" + b"\x91" * 4000 + b"\xc0"

BROKEN = {
    "another magic": frame(encoded(WorkerFinished()), magic=b"PCL2"),
    "magic in small letters": frame(encoded(WorkerFinished()), magic=b"pcl1"),
    "no header": frame(b""),
    "a header that is too large": struct.pack("<4sIQ", b"PCL1", HEADER_LIMIT_BYTES + 1, 0),
    "a header as large as there can be": struct.pack("<4sIQ", b"PCL1", (1 << 32) - 1, 0),
    "a header of noise": frame(b"\xc1\xff\x00noise"),
    "a header that ends too soon": frame(encoded(commit_of(b""))[:-4]),
    "a header with something after it": frame(encoded(WorkerFinished()) + b"\x00"),
    "a header that is a number": frame(msgspec.msgpack.encode(7)),
    "a header that is a list": frame(msgspec.msgpack.encode(["Finished"])),
    "a header without a type": frame(msgspec.msgpack.encode({"shard": 0})),
    "a field that lacks": frame(msgspec.msgpack.encode({"type": "FetchOptimizerState"})),
    "a field of another type": frame(msgspec.msgpack.encode({"type": "FetchOptimizerState", "shard": "0"})),
    "text that is none": frame(b"\x82\xa4type\xa5Hello\xa5token\xa2\xff\xfe"),
    "a list without end": frame(b"\xdd\xff\xff\xff\xff"),
    "lists in lists": frame(NESTED),
    "an unknown message": frame(msgspec.msgpack.encode({"type": "Surprise"})),
    "a message of another connection's": frame(encoded(Status(0, None, "computing"))),
    "another message of another connection's": frame(encoded(IterationFinished(iteration=0))),
    "a payload where there is none": frame(encoded(WorkerFinished()), b"x"),
    "a payload that is too large": frame(encoded(commit_of(b"12")), b"123"),
    "a payload that is too small": frame(encoded(commit_of(b"12")), b"1"),
    "a payload that is not there": frame(encoded(commit_of(b"12"))),
    "a payload as large as there can be": frame(encoded(commit_of(b"12")), size=(1 << 64) - 1),
}


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "untrusted"])
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_frame_is_a_protocol_error(what: str, trusted: bool) -> None:
    with receiver(trusted=trusted) as end:
        assert end.take(frame(encoded(FetchOptimizerState(3)))) == [FetchOptimizerState(3)]
        with pytest.raises(ProtocolError):
            end.take(BROKEN[what])


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("length", [0, 3, 16, 20, 60])
def test_the_end_of_a_connection_is_a_lost_peer_wherever_it_comes(kind: str, length: int) -> None:
    payload = bytes(200)
    with receiver(kind=kind) as end:
        end.peer.sendall(frame(encoded(commit_of(payload)), payload)[:length])
        end.peer.close()
        with pytest.raises(PeerLostError):
            end.stream.wait(TIMEOUT_S)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_what_came_before_the_end_is_still_heard(kind: str) -> None:
    with receiver(kind=kind) as end:
        end.peer.sendall(frame(encoded(FetchOptimizerState(1))) + frame(encoded(WorkerFinished())))
        end.peer.close()
        assert end.stream.wait(TIMEOUT_S) == FetchOptimizerState(1)
        assert end.stream.wait(TIMEOUT_S) == WorkerFinished()
        with pytest.raises(PeerLostError):
            end.stream.wait(TIMEOUT_S)


def send_until_it_fails(stream: Stream[Any]) -> None:
    """TCP learns that the peer is gone by the answer to what it sent first."""
    for _ in range(1000):
        stream.send(WorkerFinished(), [memoryview(bytes(1 << 16))])
        stream.flush()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_sending_to_a_peer_that_is_gone_is_a_lost_peer(kind: str) -> None:
    with receiver(kind=kind) as end:
        end.peer.close()
        with pytest.raises(PeerLostError):
            send_until_it_fails(end.stream)


def test_only_who_has_shown_the_token_may_send_a_large_header() -> None:
    """The bound is on what the prefix says: nothing of the header needs to have come."""
    for length, fits in [(GREETING_LIMIT_BYTES, True), (GREETING_LIMIT_BYTES + 1, False)]:
        prefix = struct.pack("<4sIQ", b"PCL1", length, 0)
        with receiver(trusted=True) as end:
            assert end.take(prefix) == []
        with receiver(trusted=False) as end:
            refused: Any = (
                contextlib.nullcontext() if fits else pytest.raises(ProtocolError, match="too large")
            )
            with refused:
                assert end.take(prefix) == []


def test_a_stranger_may_pass_one_descriptor_and_no_more() -> None:
    hello = frame(encoded(FetchOptimizerState(0)))
    with tempfile.TemporaryFile() as file:
        for passed, fits in [
            ([file.fileno()], True),
            ([file.fileno()] * 2, False),
            ([file.fileno()] * 9, False),
        ]:
            with receiver(trusted=False) as end:
                socket.send_fds(end.peer, [hello], passed)
                if not fits:
                    with pytest.raises(ProtocolError, match="descriptor"):
                        list(end.stream.receive())
                    continue
                assert list(end.stream.receive()) == [FetchOptimizerState(0)]
                assert len(end.stream.descriptors) == 1
                socket.send_fds(end.peer, [hello], passed)  # one more in a later message
                with pytest.raises(ProtocolError, match="descriptor"):
                    list(end.stream.receive())


def test_descriptors_that_come_after_the_greeting_are_not_taken_in() -> None:
    with tempfile.TemporaryFile() as file, receiver() as end:
        before = descriptors()
        socket.send_fds(end.peer, [frame(encoded(WorkerFinished()))], [file.fileno()] * 3)
        assert list(end.stream.receive()) == [WorkerFinished()]
        assert end.stream.descriptors == []
        assert descriptors() == before


# -- slow readers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lent", ["shard", 0, None])
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_slow_reader_holds_nobody_up(kind: str, lent: Hashable) -> None:
    payload = bytes(range(256)) * (1 << 12)  # 1 MiB
    changing = bytearray(payload)
    with receiver(kind=kind) as end:
        end.stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER_BYTES)
        assert not end.stream.backlog
        end.stream.send(commit_of(payload), [memoryview(changing)], lent=lent)
        end.stream.send(WorkerFinished())
        assert end.stream.backlog
        if lent is None:
            changing[:] = bytes(len(changing))
        data = frame(encoded(commit_of(payload)), payload) + frame(encoded(WorkerFinished()))
        assert end.read_out(len(data)) == data
        assert not end.stream.backlog
        end.stream.flush()  # of nothing


@contextlib.contextmanager
def clogged(kind: str = "unix") -> Iterator[tuple[Receiver, bytes]]:
    """A stream of which nothing more leaves until its other end reads; and what that has to read first."""
    filler = bytes(8 << 20)
    with receiver(kind=kind) as end:
        end.stream.send(WorkerFinished(), [memoryview(filler)], lent="filler")
        yield end, frame(encoded(WorkerFinished()), filler)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("first", ["a", "b"])
def test_keeping_copies_what_one_has_lent_and_nothing_of_the_others(kind: str, first: str) -> None:
    """Whoever changes its memory without asking to keep it sends what it has become: nobody has copied it."""
    memory = {"a": bytearray(b"a" * 5000), "b": bytearray(b"b" * 7000)}
    with clogged(kind) as (end, data):
        for lender in ("a", "b", "a", "b"):
            end.stream.send(commit_of(memory[lender]), [memoryview(memory[lender])], lent=lender)
        end.stream.keep(first)
        for lender in memory:
            memory[lender][:] = lender.upper().encode() * len(memory[lender])
        for lender in ("a", "b", "a", "b"):
            arrives = lender if lender == first else lender.upper()
            payload = arrives.encode() * len(memory[lender])
            data += frame(encoded(commit_of(payload)), payload)
        assert end.read_out(len(data)) == data


def test_keeping_twice_and_keeping_nothing_do_no_harm() -> None:
    memory = bytearray(b"1" * 3000)
    with clogged() as (end, data):
        end.stream.keep("nobody")
        for number in range(5):
            memory[:] = str(number).encode() * 3000
            end.stream.send(commit_of(memory), [memoryview(memory)[:1000], memoryview(memory)[1000:]], lent=1)
            end.stream.keep(1)
            end.stream.keep(1)
            data += frame(encoded(commit_of(memory)), bytes(memory))
        memory[:] = bytes(3000)
        assert end.read_out(len(data)) == data
        end.stream.keep(1)
        end.stream.send(commit_of(b"x"), [memoryview(b"x")], lent=1)
        assert end.read_out(1) == frame(encoded(commit_of(b"x")), b"x")


LENDERS: tuple[Hashable, ...] = (None, 0, 1, "worker")
LENT_BYTES = 30_000
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.sampled_from(LENDERS), st.integers(0, LENT_BYTES)),
        st.tuples(st.just("change"), st.sampled_from(LENDERS), st.integers(0, 255)),
        st.tuples(st.just("keep"), st.sampled_from(LENDERS), st.just(0)),
        st.tuples(st.just("read"), st.none(), st.integers(1, 20_000)),
        st.tuples(st.just("flush"), st.none(), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(STEPS)
def test_what_arrives_is_what_was_there_when_it_was_sent(steps: list[tuple[str, Hashable, int]]) -> None:
    memory = {lender: bytearray(bytes([i + 1]) * LENT_BYTES) for i, lender in enumerate(LENDERS)}
    sent, heard = bytearray(), bytearray()
    with receiver() as end:
        end.stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        end.peer.setblocking(False)
        for what, lender, number in steps:
            match what:
                case "send":
                    view = memoryview(memory[lender])[:number]
                    sent += frame(encoded(commit_of(view)), bytes(view))
                    parts = [view[: number // 3], view[number // 3 :]]
                    end.stream.send(commit_of(view), parts, lent=lender)
                case "change":
                    if lender is not None:
                        end.stream.keep(lender)
                    memory[lender][:] = bytes([number]) * LENT_BYTES
                case "keep":
                    end.stream.keep(lender)
                case "read":
                    with contextlib.suppress(BlockingIOError):
                        heard += end.peer.recv(number)
                case "flush":
                    end.stream.flush()
        heard += end.read_out(len(sent) - len(heard))
        assert heard == sent
        assert not end.stream.backlog


def test_a_peer_that_never_stops_sending_does_not_hold_its_host() -> None:
    """A call hears a few buffers full; what is left is the next one's."""
    with receiver() as end:
        flood = memoryview(frame(encoded(WorkerFinished())) * 100_000)
        sent = heard = 0
        end.peer.setblocking(False)
        for _ in itertools.chain([None], end.stream.receive()):
            with contextlib.suppress(BlockingIOError):
                sent += end.peer.send(flood[sent:])
            heard += 1
            assert sent < len(flood), "it hears for ever"
        assert heard > 1000
        assert (
            end.stream._end - end.stream._start < len(encoded(WorkerFinished())) + 16
        )  # nothing whole is left behind


def test_who_has_not_read_what_it_was_sent_is_known_by_what_it_was() -> None:
    with receiver() as end:
        sender: Stream[Any] = Stream(end.peer, first_phase("server", "worker"))
        assert not sender.owes(0)
        big = memoryview(bytes(1 << 22))
        sender.send(Answer(0, 0, 0), [big], lent=0)
        assert sender.owes(0)
        assert not sender.owes(1)
        sender.keep(0)
        assert sender.owes(0)
        assert sender.unsent == 1 or sender.unsent == 2
        while sender.backlog:
            end.stream.sock.recv(1 << 20)
            sender.flush()
        assert not sender.owes(0)
        assert sender.unsent == 0


def test_draining_waits_until_all_has_left_and_no_longer_than_told() -> None:
    with receiver() as end:
        end.stream.drain(0.0)  # nothing to wait for
        end.stream.send(WorkerFinished(), [memoryview(bytes(4 << 20))])
        with pytest.raises(DeadlineError):
            end.stream.drain(0.01)
        assert end.stream.backlog
        end.peer.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                end.peer.recv(1 << 20)
                end.stream.flush()
        end.stream.drain(TIMEOUT_S)
        assert not end.stream.backlog


def test_waiting_for_a_message_ends_in_time() -> None:
    with receiver() as end:
        end.peer.sendall(frame(encoded(WorkerFinished()))[:-1])
        with pytest.raises(DeadlineError):
            end.stream.wait(0.01)
        end.peer.sendall(encoded(WorkerFinished())[-1:])
        assert end.stream.wait(TIMEOUT_S) == WorkerFinished()


def test_descriptors_cannot_overtake_what_is_queued() -> None:
    with receiver() as end, tempfile.TemporaryFile() as file:
        end.stream.send(WorkerFinished(), [memoryview(bytes(4 << 20))])
        with pytest.raises(ProtocolError, match="queued"):
            end.stream.send(WorkerFinished(), descriptors=[file.fileno()])


@pytest.mark.parametrize("reads", [True, False])
def test_a_descriptor_waits_for_room_in_the_socket_and_is_never_left_out(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiver() as end, tempfile.TemporaryFile() as file:
        filled_bytes = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                filled_bytes += end.stream.sock.send(bytes(BUFFER_BYTES))
        if not reads:
            monkeypatch.setattr(streams, "ROOM_S", 0.01)
            with pytest.raises(ProtocolError, match="does not read"):
                end.stream.send(WorkerFinished(), descriptors=[file.fileno()])
            return
        end.peer.settimeout(TIMEOUT_S)

        def read() -> None:
            left_bytes = filled_bytes
            while left_bytes:
                left_bytes -= len(end.peer.recv(left_bytes))

        monkeypatch.setattr(streams, "ROOM_S", TIMEOUT_S)
        reader = threading.Thread(target=read)
        reader.start()
        end.stream.send(WorkerFinished(), descriptors=[file.fileno()])
        reader.join()
        data, received, _, _ = socket.recv_fds(end.peer, BUFFER_BYTES, 1)
        for descriptor in received:
            os.close(descriptor)
        assert (data, len(received)) == (frame(encoded(WorkerFinished())), 1)


def test_more_parts_than_one_call_to_the_system_takes_arrive_in_order() -> None:
    parts = [bytes([i % 251]) * (i % 5) for i in range(3000)]
    with receiver() as end:
        end.stream.send(WorkerFinished(), [memoryview(part) for part in parts])
        data = frame(encoded(WorkerFinished()), b"".join(parts))
        assert end.read_out(len(data)) == data


def test_a_connection_without_payloads_takes_none() -> None:
    assert no_payload(WorkerFinished(), 0) == []


# -- addresses --------------------------------------------------------------------------------------------


def test_a_port_in_use_is_refused_with_what_to_do() -> None:
    listener, address = TCP.listen()
    with listener:
        port = int(address.rpartition(":")[2])
        with pytest.raises(ConfigurationError, match=rf"127\.0\.0\.1:{port}: it is in use\. Choose another"):
            TCP.listen(port=port)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("127.0.0.1", -1), ("192.0.2.1", 0)])
def test_a_port_or_host_that_cannot_be_is_refused(host: str, port: int) -> None:
    with pytest.raises(ConfigurationError, match=f"cannot listen on {host}"):
        TCP.listen(host, port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_refused_with_those_of_this_one(host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not an address of this machine: .*127\.0\.0\.1[,;]"):
        TCP.listen(host)


def test_a_new_listener_is_on_loopback_only() -> None:
    listener, address = TCP.listen()
    with listener:
        assert address.startswith("tcp:127.0.0.1:")


@pytest.mark.parametrize("listen", [TCP.listen, UNIX.listen])
def test_nobody_answers_once_the_listener_is_closed(listen: Any) -> None:
    listener, address = listen()
    with listener, connect(address):
        pass
    with pytest.raises(PeerLostError, match="cannot connect to"):
        connect(address)


def test_every_listener_has_an_address_of_its_own() -> None:
    with contextlib.ExitStack() as stack:
        found = []
        for listen in (UNIX.listen, UNIX.listen, TCP.listen, TCP.listen):
            listener, address = listen()
            stack.enter_context(listener)
            found.append(address)
        assert len(set(found)) == 4


def test_no_other_user_can_connect_to_a_local_run() -> None:
    """The kernel refuses, so the host does not even notice the attempt."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    listener, address = UNIX.listen()
    with listener:
        ended = subprocess.run(
            [sys.executable, "-c", STRANGER, address.removeprefix("unix:"), str(NOBODY)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert ended.stdout.split() == ["PermissionError"]
        with pytest.raises(BlockingIOError):
            listener.accept()
        with connect(address):  # we can
            listener.accept()[0].close()


NOBODY = 65534
STRANGER = """
import os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except Exception as error:
    print(type(error).__name__)
"""


def test_a_socket_of_a_local_run_has_no_name_that_could_remain() -> None:
    listener, _ = UNIX.listen()
    with listener:
        name = Path(listener.getsockname())
        assert name.is_absolute()
        assert name.parent.name.startswith(f"paceline-{os.getpid()}-")
        assert not name.parent.exists()


def test_what_a_killed_process_has_left_in_memory_is_told_from_what_others_have_there(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    for name in (
        "other-program",
        "sem.mp-1",
        f"paceline-{os.getpid()}-abc",
        f"torch_{os.getpid()}_1_2",
        f"paceline-{ended.pid}-abc",
        f"torch_{ended.pid}_1_2",
    ):
        (tmp_path / name).touch()
    assert left_in_memory(tmp_path) == {f"paceline-{ended.pid}-abc", f"torch_{ended.pid}_1_2"}


def test_without_memory_the_socket_is_made_among_the_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix, "MEMORY", str(tmp_path / "nowhere"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    listener, address = UNIX.listen()
    with listener, connect(address):
        assert Path(listener.getsockname()).parent.parent == Path(tempfile.gettempdir())
        assert not Path(listener.getsockname()).parent.exists()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match=r"cannot create a socket .* --transport tcp"):
        UNIX.listen()


def test_a_process_that_has_changed_its_user_listens_too() -> None:
    """Others cannot look into its descriptors, so the socket keeps its name until it is closed."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    ended = subprocess.run(
        [sys.executable, "-c", CHANGED_USER, str(NOBODY)], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["connected", "False"]


CHANGED_USER = """
import os, sys
from pathlib import Path
from paceline.wire.transports import connect
from paceline.wire.transports import UNIX
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
listener, address = UNIX.listen()
child = os.fork()
if not child:
    with connect(address):
        print("connected", flush=True)
        os._exit(0)
os.waitpid(child, 0)
listener.close()
print(Path(address.removeprefix("unix:")).parent.exists())
"""

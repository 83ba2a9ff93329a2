"""A framed, non-blocking stream of messages over one socket.

A frame is a prefix (magic, length of the header, length of the payload), the header in MessagePack, and the
payload raw. Lengths are checked before anything is allocated: the header against a fixed bound, the payload
against what the receiver, who has seen the header, says it expects. The payload is received straight into the
memory that the receiver names; what follows it, into a small buffer, with the same system call.

Sending never blocks: what the socket does not take at once is queued, so a peer that reads slowly holds up
nobody else. Whoever queues keeps the queue bounded, by having at most one bulk message under way per peer and shard.
A payload is not copied if it is *lent*: it leaves from where it lies, and its owner asks to `keep` what is still
queued of it before that memory changes. Most often nothing is queued any more.

Two peers that share memory may have a pair of rings (see `ring`). Headers go through these then; a message that has a
payload, or a large header, goes through the socket as ever, and an empty frame in the ring keeps its place in the
order. The socket also wakes a peer that has fallen asleep, and tells that one is gone. Where a message's payload goes
is asked when its place in the ring has been read: what comes before it in the order has been handed out by then.

One call of `receive` does a bounded amount of work, however much a peer sends: what the ring held when it began, and
a few buffers of the socket. No message that is whole stays behind in the buffer, so a level-triggered selector says
when there is more.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from ..core.messages import Bell, Message
from ..errors import DeadlineError, PeerLostError, ProtocolError
from .forks import close_in_forks
from .ring import Ring

__all__ = ["HEADER_LIMIT_BYTES", "Sink", "Stream", "no_payload"]

T = TypeVar("T", bound=Message)

Sink = Callable[[T, int], Sequence[memoryview]]
"""(message, payload size in bytes) -> where its payload goes, which must be of that size. Asked for every message;
`[]` for one that has none. Raises `ProtocolError` to refuse it."""

PREFIX = struct.Struct("<4sIQ")
MAGIC = b"PCL1"
HEADER_LIMIT_BYTES = 64 * 1024 * 1024  # a layout of a million parameters fits
GREETING_LIMIT_BYTES = 4096  # for a peer that has not shown its token
BUFFERS_PER_CALL = 512  # of one sendmsg; the system's limit is 1024
LOOPBACK_BUFFER_BYTES = (
    384 * 1024
)  # what is received is still in the cache then: a fifth less time for 25 to 100 MB
BUFFER_BYTES = 64 * 1024  # of what is received: the headers of many messages
ANCILLARY_BYTES = socket.CMSG_SPACE(4 * 4)  # for a few descriptors
LARGEST_IN_RING_BYTES = 4096  # of a header
FILLS = 16  # of the buffer, in one call of `receive`

_encoder = msgspec.msgpack.Encoder()
_bell = _encoder.encode(Bell())
BELL = PREFIX.pack(MAGIC, len(_bell), 0) + _bell


def no_payload(message: Message, size_bytes: int) -> Sequence[memoryview]:
    """The sink of a connection on which no message has a payload."""
    return []


class Part(NamedTuple):
    """Some bytes that are to leave.

    Attributes:
        data: the bytes.
        lent: by whom, see `Stream.send`.
        kept: True once they are in memory of the stream's own.
    """

    data: memoryview
    lent: Hashable = None
    kept: bool = False


class Stream(Generic[T]):
    """One end of a connection.

    Args:
        sock: a connected stream socket; owned by the stream from now on.
        accepts: the type, or union, of messages that the peer may send.
        sink: says where payloads go.
        trusted: False until the peer has shown its token: only a small header is read from it.
        takes_descriptor: True while the peer may pass one file descriptor (AF_UNIX only).

    Attributes:
        descriptors: file descriptors that the peer has passed, oldest first.
    """

    def __init__(
        self,
        sock: socket.socket,
        accepts: object,
        sink: Sink[T] = no_payload,
        *,
        trusted: bool = True,
        takes_descriptor: bool = False,
    ) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sock.getpeername()[0].startswith("127."):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_BUFFER_BYTES)
        self.sock = sock
        self.trusted = trusted
        self.takes_descriptor = takes_descriptor
        self.sink = sink
        self.descriptors: list[int] = []
        self._decode: Callable[[bytes | memoryview], T] = msgspec.msgpack.Decoder(accepts).decode
        self._queue: deque[Part] = deque()  # what is to leave through the socket
        self._kept: dict[Hashable, bytearray] = {}  # memory for what is kept, used again
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0  # of what has been received into it and not been read
        self._wanted = memoryview(bytearray())  # what is left to be filled of a payload
        self._frames = self._read_frames()
        self._ring_out: Ring | None = None
        self._ring_in: Ring | None = None
        # What is for the ring, until it has room, and who has lent it.
        self._late: deque[tuple[bytes, Hashable]] = deque()
        self._on_socket = False  # the next message in the ring's order comes through the socket
        close_in_forks(self)

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self.sock.fileno()

    @property
    def backlog(self) -> bool:
        """True while something that was sent has not left yet: call `flush` when the socket is writable."""
        return bool(self._queue or self._late)

    @property
    def unsent(self) -> int:
        """How many parts of messages have not left yet."""
        return len(self._queue) + len(self._late)

    def owes(self, lent: Hashable) -> bool:
        """True if something of what was sent as `lent` has not left yet."""
        return any(part.lent == lent for part in self._queue) or any(late[1] == lent for late in self._late)

    def use_rings(self, outgoing: Ring, incoming: Ring) -> None:
        """Have what is sent and received from now on go through rings, as far as it can."""
        self._ring_out, self._ring_in = outgoing, incoming

    @property
    def ring_ready(self) -> bool:
        """True if a ring has something that `receive` would yield."""
        return self._ring_in is not None and self._ring_in.ready and not self._on_socket

    def fall_asleep(self) -> bool:
        """Say that only the socket is watched from now on. False if the ring must be looked into first."""
        return self._ring_in is None or self._on_socket or self._ring_in.fall_asleep()

    def wake_up(self) -> None:
        """The ring is watched again."""
        if self._ring_in is not None:
            self._ring_in.wake_up()

    def send(
        self,
        message: Message,
        payload: Sequence[memoryview] = (),
        descriptors: Sequence[int] = (),
        *,
        lent: Hashable = None,
    ) -> None:
        """Send a message; never blocks.

        The payload's memory may change once this returns, unless it is `lent` by somebody who promises to `keep` it
        before that.

        Raises:
            PeerLostError: the connection is gone.
        """
        header = _encoder.encode(message)
        payload = [part for part in payload if part.nbytes]
        if self._ring_out is not None:
            through_ring = not payload and not descriptors and len(header) <= LARGEST_IN_RING_BYTES
            self._late.append((header if through_ring else b"", lent))
            self._fill_ring(self._ring_out)
            if through_ring:
                return
        size_bytes = sum(part.nbytes for part in payload)
        parts = [memoryview(PREFIX.pack(MAGIC, len(header), size_bytes) + header), *payload]
        if not self._queue:
            parts = self._push_out(parts, descriptors)
        elif descriptors:
            raise ProtocolError("descriptors cannot be passed while earlier messages are still queued")
        waiting = [Part(part, lent) for part in parts]
        self._queue.extend(self._copied(waiting) if lent is None and waiting else waiting)

    def keep(self, lent: Hashable) -> None:
        """Copy what is still queued of the memory that somebody has lent: it may change now."""
        places = [place for place, part in enumerate(self._queue) if part.lent == lent and not part.kept]
        if not places:
            return
        for place, part in zip(places, self._copied([self._queue[place] for place in places]), strict=True):
            self._queue[place] = part

    def _copied(self, parts: Sequence[Part]) -> list[Part]:
        """The same parts, all lent by the same, in memory of the stream's own; large memory is used again."""
        lent = parts[0].lent
        size_bytes = sum(part.data.nbytes for part in parts)
        memory = self._kept.get(lent, b"")
        if size_bytes <= BUFFER_BYTES:
            memory = bytearray(size_bytes)
        elif len(memory) < size_bytes or any(part.data.obj is memory for part in self._queue):
            memory = self._kept[lent] = bytearray(size_bytes)
        copies = []
        start = 0
        for part in parts:
            copy = memoryview(memory)[start : start + part.data.nbytes]
            copy[:] = part.data
            copies.append(Part(copy, lent, kept=True))
            start += part.data.nbytes
        return copies

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it now."""
        if self._late and self._ring_out is not None:
            self._fill_ring(self._ring_out)
        if self._queue:
            left = self._push_out([part.data for part in self._queue])
            while len(self._queue) > len(left):
                self._queue.popleft()
            if left:
                self._queue[0] = self._queue[0]._replace(data=left[0])

    def drain(self, timeout_s: float) -> None:
        """Block until everything has left. Raises `DeadlineError`."""
        deadline_s = time.monotonic() + timeout_s
        while self.backlog:
            _wait(self.sock, select.POLLOUT, deadline_s)
            self.flush()

    def receive(self, *, from_socket: bool = True) -> Iterator[T]:
        """Yield each message that has arrived whole, its payload in place; stops when nothing more is here.

        Args:
            from_socket: False to look only into the ring.

        Raises:
            PeerLostError: the connection is gone.
            ProtocolError: the peer sent what it may not send.
        """
        fills = FILLS if from_socket else 0
        while True:
            if self._ring_in is None:
                while (message := next(self._frames)) is not None:
                    yield message
            else:
                yield from self._in_order(self._ring_in)
            if not fills:
                return
            try:
                fills = fills - 1 if self._fill() else 0
            except PeerLostError:
                if self._ring_in is not None:
                    yield from self._in_order(self._ring_in)  # what it said before it left
                raise

    def _in_order(self, ring: Ring) -> Iterator[T]:
        """Yield each message that is whole, in the ring's order, up to those that the ring holds now."""
        end: int | None = None
        while True:
            if self._on_socket or self._start != self._end:
                while (message := next(self._frames)) is not None:
                    yield message
                if self._on_socket:
                    return
            try:
                end = ring.end if end is None else end
                frame = ring.read(end)
            except ValueError as error:
                raise ProtocolError(f"a ring cannot be read: {error}") from error
            if frame is None:
                return
            if frame:
                message = self._read_header(frame)
                if any(target.nbytes for target in self.sink(message, 0)):
                    raise ProtocolError(f"{type(message).__name__} came without its payload")
                yield message
            else:
                self._on_socket = True

    def wait(self, timeout_s: float) -> T:
        """Block until one message has arrived. Raises `DeadlineError` as well."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for message in self.receive():
                return message
            _wait(self.sock, select.POLLIN, deadline_s)

    def close(self) -> None:
        """Close the connection and whatever descriptors came with it and were not taken."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
        self.sock.close()

    def close_in_fork(self) -> None:
        """See `close_in_forks`."""
        self.sock.close()

    def _push_out(self, parts: list[memoryview], descriptors: Sequence[int] = ()) -> list[memoryview]:
        """Hand parts to the socket; return those that it did not take."""
        while parts:
            try:
                if descriptors:
                    sent = socket.send_fds(self.sock, parts[:BUFFERS_PER_CALL], list(descriptors))
                    descriptors = ()
                else:
                    sent = self.sock.sendmsg(parts[:BUFFERS_PER_CALL])
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                raise PeerLostError(f"connection lost: {error}") from error
            while parts and sent >= parts[0].nbytes:
                sent -= parts.pop(0).nbytes
            if sent:
                parts[0] = parts[0][sent:]
        return parts

    def _fill(self) -> bool:
        """Receive what there is, with one call: into the payload under way, then into the buffer. False if that was
        less than there was room for, so that nothing more is here."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == BUFFER_BYTES:
            left = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, len(left)
            self._buffer[: len(left)] = left
        room = self._buffer[self._end :]
        wanted = self._wanted
        # When the buffer is full, all of it follows a message whose place in the ring is to come.
        if not wanted.nbytes and not room.nbytes:
            return False
        ancillary_bytes = ANCILLARY_BYTES if self.takes_descriptor else 0
        try:
            if wanted.nbytes > BUFFER_BYTES and not ancillary_bytes:
                room = room[:0]  # what comes into the buffer is copied once more
                count = self.sock.recv_into(wanted)
            elif wanted.nbytes or ancillary_bytes:
                count, ancillary, _, _ = self.sock.recvmsg_into(
                    [wanted, room], ancillary_bytes, socket.MSG_CMSG_CLOEXEC
                )
                if ancillary:
                    self._take_descriptors(ancillary)
            else:
                count = self.sock.recv_into(room)
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerLostError(f"connection lost: {error}") from error
        if not count:
            raise PeerLostError("the peer closed the connection")
        self._wanted = wanted[count:]
        self._end += max(0, count - wanted.nbytes)
        return count == wanted.nbytes + room.nbytes

    def _take_descriptors(self, ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                self.descriptors += numbers
        if len(self.descriptors) > 1:
            raise ProtocolError("it passed more than one descriptor")

    def _read_frames(self) -> Iterator[T | None]:
        """Yields each message when it is whole, and None where more must be received first."""
        while True:
            while self._end - self._start < PREFIX.size:
                yield None
            magic, header_bytes, payload_bytes = PREFIX.unpack_from(self._buffer, self._start)
            limit_bytes = HEADER_LIMIT_BYTES if self.trusted else GREETING_LIMIT_BYTES
            if magic != MAGIC or not 0 < header_bytes <= limit_bytes:
                raise ProtocolError("this is not a frame of Paceline's, or one that is too large")
            self._start += PREFIX.size
            if header_bytes <= self._end - self._start:
                header = self._buffer[self._start : self._start + header_bytes]
                self._start += header_bytes
            else:
                header = memoryview(bytearray(header_bytes))
                yield from self._until_filled(header)
            message = self._read_header(header)
            ringed = self._ring_in is not None
            bell = isinstance(message, Bell)
            # The ring has its place, after what comes before it.
            while ringed and not bell and not self._on_socket:
                yield None
            targets = self.sink(message, payload_bytes)
            expected_bytes = sum(target.nbytes for target in targets)
            if expected_bytes != payload_bytes:
                raise ProtocolError(
                    f"{type(message).__name__} came with {payload_bytes} bytes of payload, expected {expected_bytes}"
                )
            for target in targets:
                if target.nbytes:
                    yield from self._until_filled(target)
            if ringed and bell:
                continue
            self._on_socket = False
            yield message

    def _read_header(self, header: bytes | memoryview) -> T:
        try:
            return self._decode(header)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"a header cannot be read: {error}") from error

    def _fill_ring(self, ring: Ring) -> None:
        """Put what is late into the ring, as far as it has room; wake who reads it."""
        written = False
        try:
            while self._late and ring.write(self._late[0][0]):
                self._late.popleft()
                written = True
        except ValueError as error:
            raise ProtocolError(f"a ring cannot be written: {error}") from error
        if written and ring.reader_asleep and not self._queue:
            self._queue.extend(Part(part, kept=True) for part in self._push_out([memoryview(BELL)]))

    def _until_filled(self, target: memoryview) -> Iterator[None]:
        """Fill some memory: first with what the buffer has of it, then straight from the socket."""
        count = min(target.nbytes, self._end - self._start)
        target[:count] = self._buffer[self._start : self._start + count]
        self._start += count
        self._wanted = target[count:]
        while self._wanted.nbytes:
            yield None


def _wait(sock: socket.socket, events: int, deadline_s: float) -> None:
    poller = select.poll()
    poller.register(sock, events)
    left_s = deadline_s - time.monotonic()
    if left_s <= 0 or not poller.poll(left_s * 1000):
        with contextlib.suppress(OSError):
            raise DeadlineError(f"no answer from {sock.getpeername()!r} in time")
        raise DeadlineError("no answer in time")

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
order. The socket also wakes a peer that has fallen asleep, and tells that one is gone.
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
from typing import Final, Generic, TypeVar

import msgspec

from ..errors import DeadlineError, PeerLostError, ProtocolError
from .messages import Bell, Message
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
OWN: Final = object()  # of the stream: nobody else has lent it
LARGEST_IN_RING_BYTES = 4096  # of a header

_encoder = msgspec.msgpack.Encoder()
_bell = _encoder.encode(Bell())
BELL = PREFIX.pack(MAGIC, len(_bell), 0) + _bell


def no_payload(message: Message, size_bytes: int) -> Sequence[memoryview]:
    """The sink of a connection on which no message has a payload."""
    return []


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
        self._queue: deque[tuple[memoryview, Hashable]] = deque()  # (what is to leave, who has lent it)
        self._kept: dict[Hashable, bytearray] = {}  # memory for what is kept, used again
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0  # of what has been received into it and not been read
        self._wanted = memoryview(bytearray())  # what is left to be filled of a payload
        self._frames = self._read_frames()
        self._ring_out: Ring | None = None
        self._ring_in: Ring | None = None
        self._late: deque[bytes] = deque()  # for the ring, when it has room
        self._early: T | None = None  # from the socket, before its place in the ring has been read
        self._on_socket = False  # the next message is

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self.sock.fileno()

    @property
    def backlog(self) -> bool:
        """True while something that was sent has not left yet: call `flush` when the socket is writable."""
        return bool(self._queue or self._late)

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
            self._late.append(header if through_ring else b"")
            self._fill_ring(self._ring_out)
            if through_ring:
                return
        size_bytes = sum(part.nbytes for part in payload)
        parts = [memoryview(PREFIX.pack(MAGIC, len(header), size_bytes) + header), *payload]
        if not self._queue:
            parts = self._push_out(parts, descriptors)
        elif descriptors:
            raise ProtocolError("descriptors cannot be passed while earlier messages are still queued")
        if parts:
            self._queue.extend((part, lent) for part in parts)
            if lent is None:
                self.keep(None)

    def keep(self, lent: Hashable) -> None:
        """Copy what is still queued of the memory that somebody has lent: it may change now."""
        places = [place for place, (_, owner) in enumerate(self._queue) if owner == lent]
        if not places:
            return
        size_bytes = sum(self._queue[place][0].nbytes for place in places)
        kept = self._kept.get(lent)
        if kept is None or len(kept) < size_bytes or any(part.obj is kept for part, _ in self._queue):
            kept = self._kept[lent] = bytearray(size_bytes)
        start = 0
        for place in places:
            part, _ = self._queue[place]
            copy = memoryview(kept)[start : start + part.nbytes]
            copy[:] = part
            self._queue[place] = copy, OWN
            start += part.nbytes

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it now."""
        if self._late and self._ring_out is not None:
            self._fill_ring(self._ring_out)
        if self._queue:
            left = self._push_out([part for part, _ in self._queue])
            while len(self._queue) > len(left):
                self._queue.popleft()
            if left:
                self._queue[0] = left[0], self._queue[0][1]

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
        if self._ring_in is None:
            yield from self._receive_from_socket()
            return
        yield from self._receive_from_ring(self._ring_in)
        if not from_socket:
            return
        try:
            for message in self._receive_from_socket():
                if not isinstance(message, Bell):
                    self._early = message
                    yield from self._receive_from_ring(self._ring_in)
        except PeerLostError:
            yield from self._receive_from_ring(self._ring_in)  # what it said before it left
            raise

    def _receive_from_ring(self, ring: Ring) -> Iterator[T]:
        while True:
            if self._on_socket:
                if self._early is None:
                    return
                message, self._early, self._on_socket = self._early, None, False
                yield message
                continue
            try:
                frame = ring.read()
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

    def _receive_from_socket(self) -> Iterator[T]:
        more = True
        while True:
            while (message := next(self._frames)) is not None:
                yield message
            if not more:
                return
            try:
                more = self._fill()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise PeerLostError(f"connection lost: {error}") from error

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
        ancillary_bytes = ANCILLARY_BYTES if self.takes_descriptor else 0
        if (
            wanted.nbytes > BUFFER_BYTES and not ancillary_bytes
        ):  # what comes into the buffer is copied once more
            room = room[:0]
            count = self.sock.recv_into(wanted)
        elif wanted.nbytes or ancillary_bytes:
            count, ancillary, _, _ = self.sock.recvmsg_into(
                [wanted, room], ancillary_bytes, socket.MSG_CMSG_CLOEXEC
            )
            if ancillary:
                self._take_descriptors(ancillary)
        else:
            count = self.sock.recv_into(room)
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
            targets = self.sink(message, payload_bytes)
            expected_bytes = sum(target.nbytes for target in targets)
            if expected_bytes != payload_bytes:
                raise ProtocolError(
                    f"{type(message).__name__} came with {payload_bytes} bytes of payload, expected {expected_bytes}"
                )
            for target in targets:
                if target.nbytes:
                    yield from self._until_filled(target)
            yield message

    def _read_header(self, header: bytes | memoryview) -> T:
        try:
            return self._decode(header)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"a header cannot be read: {error}") from error

    def _fill_ring(self, ring: Ring) -> None:
        """Put what is late into the ring, as far as it has room; wake who reads it."""
        written = False
        while self._late and ring.write(self._late[0]):
            self._late.popleft()
            written = True
        if written and ring.reader_asleep and not self._queue:
            self._queue.extend((part, OWN) for part in self._push_out([memoryview(BELL)]))

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

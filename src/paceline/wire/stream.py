"""A framed, non-blocking stream of messages over one socket.

A frame is a prefix (magic, length of the header, length of the payload), the header in MessagePack, and the
payload raw. Lengths are checked before anything is allocated: the header against a fixed bound, the payload
against what the receiver, who has seen the header, says it expects. The payload is received straight into the
memory that the receiver names; what follows it, into a small buffer, with the same system call.

Sending never blocks: what the socket does not take at once is queued, so a peer that reads slowly holds up
nobody else. Whoever queues keeps the queue bounded, by having at most one bulk message under way per peer and shard.
A payload is not copied if it is *lent*: it leaves from where it lies, and its owner asks to `keep` what is still
queued of it before that memory changes. Most often nothing is queued any more.
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
from .messages import Message

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
BUFFER_BYTES = 64 * 1024  # of what is received: the headers of many messages
ANCILLARY_BYTES = socket.CMSG_SPACE(4 * 4)  # for a few descriptors
OWN: Final = object()  # of the stream: nobody else has lent it

_encoder = msgspec.msgpack.Encoder()


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
        self.sock = sock
        self.trusted = trusted
        self.takes_descriptor = takes_descriptor
        self.sink = sink
        self.descriptors: list[int] = []
        self._decode: Callable[[memoryview], T] = msgspec.msgpack.Decoder(accepts).decode
        self._queue: deque[tuple[memoryview, Hashable]] = deque()  # (what is to leave, who has lent it)
        self._kept: dict[Hashable, bytearray] = {}  # memory for what is kept, used again
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0  # of what has been received into it and not been read
        self._wanted = memoryview(bytearray())  # what is left to be filled of a payload
        self._frames = self._read_frames()

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self.sock.fileno()

    @property
    def backlog(self) -> bool:
        """True while something that was sent has not left yet: call `flush` when the socket is writable."""
        return bool(self._queue)

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
        if self._queue:
            left = self._push_out([part for part, _ in self._queue])
            while len(self._queue) > len(left):
                self._queue.popleft()
            if left:
                self._queue[0] = left[0], self._queue[0][1]

    def drain(self, timeout_s: float) -> None:
        """Block until everything has left. Raises `DeadlineError`."""
        deadline_s = time.monotonic() + timeout_s
        while self._queue:
            _wait(self.sock, select.POLLOUT, deadline_s)
            self.flush()

    def receive(self) -> Iterator[T]:
        """Yield each message that has arrived whole, its payload in place; stops when nothing more is here.

        Raises:
            PeerLostError: the connection is gone.
            ProtocolError: the peer sent what it may not send.
        """
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
        if wanted.nbytes or ancillary_bytes:
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
            try:
                message = self._decode(header)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ProtocolError(f"a header cannot be read: {error}") from error
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

"""A framed, non-blocking stream of messages over one socket.

A frame is a prefix (magic, length of the header, length of the payload), the header in MessagePack, and the
payload raw. Lengths are checked before anything is allocated: the header against a fixed bound, the payload
against what the receiver, who has seen the header, says it expects. The payload is received straight into the
memory that the receiver names.

Sending never blocks: what the socket does not take at once is queued, so a peer that reads slowly holds up
nobody else. Whoever queues keeps the queue bounded, by having at most one bulk message under way per peer.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

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
DESCRIPTORS_PER_CALL = 4

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

    Attributes:
        descriptors: file descriptors that the peer has passed (AF_UNIX only), oldest first.
    """

    def __init__(
        self, sock: socket.socket, accepts: object, sink: Sink[T] = no_payload, *, trusted: bool = True
    ) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.trusted = trusted
        self.sink = sink
        self.descriptors: list[int] = []
        self._decode: Callable[[bytearray], T] = msgspec.msgpack.Decoder(accepts).decode
        self._queue: deque[memoryview] = deque()
        self._parts = self._read_frames()
        self._wanted = memoryview(b"")  # what is left to be filled of the part at hand

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
        stable: bool = False,
    ) -> None:
        """Send a message; never blocks.

        The payload's memory may change once this returns, unless the caller promises with `stable` to leave it
        alone until it has left: what the socket does not take at once is then queued without a copy.

        Raises:
            PeerLostError: the connection is gone.
        """
        header = _encoder.encode(message)
        payload = [part for part in payload if part.nbytes]
        size_bytes = sum(part.nbytes for part in payload)
        head = memoryview(PREFIX.pack(MAGIC, len(header), size_bytes) + header)
        parts = [head, *payload]
        if not self._queue:
            parts = self._push_out(parts, descriptors)
        elif descriptors:
            raise ProtocolError("descriptors cannot be passed while earlier messages are still queued")
        self._queue.extend(parts if stable else (memoryview(bytes(part)) for part in parts))

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it now."""
        if self._queue:
            self._queue = deque(self._push_out(list(self._queue)))

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
        while True:
            while not self._wanted.nbytes:
                part = next(self._parts)
                if isinstance(part, memoryview):
                    self._wanted = part
                else:
                    yield part
            try:
                count = self._receive_some()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise PeerLostError(f"connection lost: {error}") from error
            if not count:
                raise PeerLostError("the peer closed the connection")
            self._wanted = self._wanted[count:]

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

    def _receive_some(self) -> int:
        if self.trusted or self.sock.family != socket.AF_UNIX:
            return self.sock.recv_into(self._wanted)
        # Until the greeting is over descriptors may come along, and only then are they taken in.
        data, descriptors, _, _ = socket.recv_fds(self.sock, self._wanted.nbytes, DESCRIPTORS_PER_CALL)
        self.descriptors += descriptors
        if len(self.descriptors) > 1:
            raise ProtocolError("it passed more than one descriptor")
        self._wanted[: len(data)] = data
        return len(data)

    def _read_frames(self) -> Iterator[memoryview | T]:
        """Yields the memory that is to be filled next, and a message whenever one is whole."""
        prefix = bytearray(PREFIX.size)
        while True:
            yield memoryview(prefix)
            magic, header_bytes, payload_bytes = PREFIX.unpack(prefix)
            limit_bytes = HEADER_LIMIT_BYTES if self.trusted else GREETING_LIMIT_BYTES
            if magic != MAGIC or not 0 < header_bytes <= limit_bytes:
                raise ProtocolError("this is not a frame of Paceline's, or one that is too large")
            header = bytearray(header_bytes)
            yield memoryview(header)
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
                    yield target
            yield message


def _wait(sock: socket.socket, events: int, deadline_s: float) -> None:
    poller = select.poll()
    poller.register(sock, events)
    left_s = deadline_s - time.monotonic()
    if left_s <= 0 or not poller.poll(left_s * 1000):
        with contextlib.suppress(OSError):
            raise DeadlineError(f"no answer from {sock.getpeername()!r} in time")
        raise DeadlineError("no answer in time")

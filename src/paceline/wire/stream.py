"""A framed, non-blocking stream of messages over one socket.

A frame consists of a prefix (magic, length of the header, length of the payload), the header in MessagePack and the
raw payload. Lengths are checked before any memory is allocated: the header must not be longer than a fixed limit, and
the payload must have exactly the size that the receiver expects for this header. The payload is received directly
into memory that the receiver provides. The same system call may also receive later data into a small buffer.

Sending never blocks: data that the socket does not accept immediately is queued, so that a peer that reads slowly
does not delay other peers. Callers keep the queue bounded by sending at most one bulk message per peer and shard at a
time. A *lent* payload is not copied, but sent from its original memory. Before this memory changes, its owner must
call `keep`, which copies the parts that are still queued. In most cases, all parts have already been sent.

Two peers that share memory can send small messages through a pair of rings (see `ring`). A message with a payload or
a large header is still sent through the socket, and an empty frame in the ring marks its position in the order of the
messages. The socket is also used to wake a sleeping peer and to detect that a connection is lost. The stream requests
memory for a payload only after it has reached the position of the message in the ring and has yielded all earlier
messages.

One call of `receive` does a bounded amount of work, no matter how much a peer sends: it receives from the socket at
most `FILLS` times. Before and after each time, it also reads the data that the ring contains at that moment. No
complete message is left in the buffer, so a level-triggered selector reliably reports whether there is more to receive.
"""

from __future__ import annotations

import array
import contextlib
import math
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar, Union, cast

import msgspec

from ..core.messages import Bell, Message, Phase, expected, refusal
from ..errors import DeadlineError, PeerLostError, ProtocolError
from .follow import close_in_forks
from .preface import Patience, Traffic, traffic_of
from .ring import Ring
from .secure import SecureSocket

T = TypeVar("T", bound=Message)

Sink = Callable[[T, int], Sequence[memoryview]]
"""A function that takes a message and the size of its payload in bytes, and returns the memory for the payload.

The memory must have exactly the size of the payload. The sink is called for every message and returns `[]` for a
message without a payload. The sink raises `ProtocolError` to refuse a message.
"""

PREFIX = struct.Struct("<4sIQ")
MAGIC = b"PCL1"
HEADER_LIMIT_BYTES = 64 * 1024 * 1024  # enough for a layout with a million parameter tensors
GREETING_LIMIT_BYTES = 4096  # limit for the header of a peer that has not sent the token yet
BUFFERS_PER_CALL = 512  # maximum number of buffers per call of sendmsg; the system's limit is 1024
# Size of the send buffer on loopback. In such a small buffer, data is still in the CPU cache when the
# receiver copies it, so transfers of 25 to 100 MB take about 20 % less time.
LOOPBACK_BUFFER_BYTES = 384 * 1024
BUFFER_BYTES = 64 * 1024  # size of the receive buffer, which has room for the headers of many messages
ANCILLARY_BYTES = socket.CMSG_SPACE(4 * 4)  # room for a few descriptors
LARGEST_IN_RING_BYTES = 4096  # largest header that is sent through a ring
FILLS = 16  # maximum number of times that one call of `receive` fills the buffer
# Maximum time to wait until a socket has room for a message with a file descriptor, which cannot be queued.
ROOM_S = 1.0

_encoder = msgspec.msgpack.Encoder()

_bell = _encoder.encode(Bell())
BELL = PREFIX.pack(MAGIC, len(_bell), 0) + _bell


def decoder(phase: Phase) -> Callable[[bytes | memoryview], Any]:
    """Return the function that decodes the header of a message in a phase of a connection."""
    return _decoder(tuple(expected(phase)))


@cache
def _decoder(kinds: tuple[type[Message], ...]) -> Callable[[bytes | memoryview], Any]:
    return msgspec.msgpack.Decoder(Union[kinds]).decode  # noqa: UP007


class _Tagged(msgspec.Struct):
    """The part of every header that names the class of the message."""

    type: str


_tag_decoder = msgspec.msgpack.Decoder(_Tagged)


def no_payload(message: Message, size_bytes: int) -> Sequence[memoryview]:
    """Return no memory. This is the sink for connections on which no message has a payload."""
    return []


class QueuedBytes(NamedTuple):
    """Bytes that are queued to be sent.

    Attributes:
        data: the bytes.
        lent: the argument `lent` with which the message was sent, which is the key for `Stream.keep`.
        kept: True if the bytes are in memory that belongs to the stream.
    """

    data: memoryview
    lent: Hashable = None
    kept: bool = False


class Stream(Generic[T]):
    """One end of a connection, which sends and receives messages without blocking.

    Args:
        sock: a connected stream socket or TLS connection, of which the stream takes ownership.
        phase: the phase of the connection, which determines the messages that the peer may send. See
            `paceline.core.messages.table`.
        sink: function that returns the memory into which a payload is received.
        trusted: False until the peer has sent the token. Only a small header is accepted from an untrusted peer.
        takes_descriptor: True while the peer may pass one file descriptor (AF_UNIX only).

    Attributes:
        descriptors: file descriptors that the peer has passed, oldest first.
    """

    def __init__(
        self,
        sock: socket.socket | SecureSocket,
        phase: Phase,
        sink: Sink[T] = no_payload,
        *,
        trusted: bool = True,
        takes_descriptor: bool = False,
    ) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            # If the connection is already lost, sending or receiving the first message raises an exception.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if sock.getpeername()[0].startswith("127."):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_BUFFER_BYTES)
        self.sock = cast(socket.socket, sock)  # `SecureSocket` also has the methods that are used here
        # the number of received bytes that a selector cannot see, because they have already been decrypted
        self._pending: Callable[[], int] = sock.pending if isinstance(sock, SecureSocket) else int
        self.trusted = trusted
        self.takes_descriptor = takes_descriptor
        self.sink = sink
        self.descriptors: list[int] = []
        self.expect(phase)
        # Bytes that are queued to be sent through the socket.
        self._queue: deque[QueuedBytes] = deque()
        # Reusable memory for copies of queued bytes.
        self._kept: dict[Hashable, bytearray] = {}
        # The receive buffer. The bytes from `_start` to `_end` have been received but not read yet.
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0
        # The part of the current payload that has not been received yet.
        self._wanted = memoryview(bytearray())
        # The message of the current payload, and the number of payload bytes after the part that is being received.
        self._incoming: T | None = None
        self._following_bytes = 0
        self._frames = self._read_frames()
        self._ring_out: Ring | None = None
        self._ring_in: Ring | None = None
        # The number of bytes that were passed to the socket, and the number of bytes received from the socket.
        self._sent_bytes = self._received_bytes = 0
        # Frames that wait for room in the ring, each with the argument `lent` of its message.
        self._ring_queue: deque[tuple[bytes, Hashable]] = deque()
        # True if the ring indicates that the next message comes through the socket.
        self._on_socket = False
        close_in_forks(self)

    def expect(self, phase: Phase) -> None:
        """From now on, decode the messages that the peer may send in this phase, and in the phases that follow."""
        self._phase = phase
        self._decode: Callable[[bytes | memoryview], T] = decoder(phase)
        self._next_phases = {kind: after for kind, after in expected(phase).items() if after != phase}

    def fileno(self) -> int:
        """Return the file descriptor of the socket. Selectors call this method."""
        return self.sock.fileno()

    @property
    def backlog(self) -> bool:
        """True if data is still queued. If so, call `flush` when the socket is writable."""
        return bool(self._queue or self._ring_queue)

    @property
    def unsent(self) -> int:
        """The number of message parts that are queued."""
        return len(self._queue) + len(self._ring_queue)

    @property
    def traffic(self) -> Traffic:
        """The bytes that the connection has carried, as counted by the kernel or, if it cannot count, by the stream.

        The kernel counts the data that the peer has acknowledged, so data that is still in a buffer on this machine is
        left out.
        """
        return traffic_of(self.sock) or Traffic(self._sent_bytes, self._received_bytes)

    @property
    def incoming(self) -> tuple[T, int] | None:
        """The message whose payload is being received, and the number of missing bytes.

        None if no payload is being received. The bytes that have arrived are in the memory that the sink has returned.
        """
        if self._incoming is None:
            return None
        return self._incoming, self._wanted.nbytes + self._following_bytes

    def patience(self, silence_s: float | None = None) -> Patience:
        """Return an object that measures for how long the connection has carried nothing. See `Patience`."""
        return Patience(lambda: sum(self.traffic), silence_s)

    def owes(self, lent: Hashable) -> bool:
        """Return True if any part of a message that was sent with this `lent` is still queued."""
        queued = [part.lent for part in self._queue]
        return lent in queued or any(key == lent for _, key in self._ring_queue)

    def use_rings(self, outgoing: Ring, incoming: Ring) -> None:
        """From now on, send and receive small messages through these rings."""
        self._ring_out, self._ring_in = outgoing, incoming

    @property
    def ring_ready(self) -> bool:
        """True if the incoming ring contains a frame that `receive` would read."""
        return self._ring_in is not None and self._ring_in.ready and not self._on_socket

    def fall_asleep(self) -> bool:
        """Tell the peer that this end now watches only the socket. Return False if the ring must be read first."""
        return self._ring_in is None or self._on_socket or self._ring_in.fall_asleep()

    def wake_up(self) -> None:
        """Tell the peer that this end watches the ring again."""
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
        """Send a message with its payload and file descriptors, without blocking.

        Only a message with file descriptors may have to wait until the peer reads earlier data, for `ROOM_S` at most.

        If `lent` is None, the payload's memory may change after this call. Otherwise the memory is not copied, and
        the caller must call `keep(lent)` before the memory changes.

        Raises:
            PeerLostError: the connection is lost.
            ProtocolError: file descriptors cannot be passed because data is queued or the peer does not read, or the
                ring was corrupted.
        """
        header = _encoder.encode(message)
        payload = [part for part in payload if part.nbytes]
        if self._ring_out is not None:
            through_ring = not payload and not descriptors and len(header) <= LARGEST_IN_RING_BYTES
            self._ring_queue.append((header if through_ring else b"", lent))
            self._fill_ring(self._ring_out)
            if through_ring:
                return
        size_bytes = sum(part.nbytes for part in payload)
        parts = [memoryview(PREFIX.pack(MAGIC, len(header), size_bytes) + header), *payload]
        if not self._queue:
            parts = self._push_out(parts, descriptors)
        elif descriptors:
            raise ProtocolError("file descriptors cannot be passed while earlier messages are still queued")
        waiting = [QueuedBytes(part, lent) for part in parts]
        self._queue.extend(self._copied(waiting) if lent is None and waiting else waiting)

    def keep(self, lent: Hashable) -> None:
        """Copy the queued parts of the memory that was sent with this `lent`, so that the memory may change."""
        indices = [index for index, part in enumerate(self._queue) if part.lent == lent and not part.kept]
        if not indices:
            return
        for index, part in zip(indices, self._copied([self._queue[index] for index in indices]), strict=True):
            self._queue[index] = part

    def _copied(self, parts: Sequence[QueuedBytes]) -> list[QueuedBytes]:
        """Return copies of the parts. All parts must have the same `lent`. Memory for large copies is reused."""
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
            copies.append(QueuedBytes(copy, lent, kept=True))
            start += part.data.nbytes
        return copies

    def flush(self) -> None:
        """Send as much of the queued data as the socket accepts now."""
        if self._ring_queue and self._ring_out is not None:
            self._fill_ring(self._ring_out)
        if self._queue:
            left = self._push_out([part.data for part in self._queue])
            while len(self._queue) > len(left):
                self._queue.popleft()
            if left:
                self._queue[0] = self._queue[0]._replace(data=left[0])

    def drain(self, silence_s: float | None = None) -> None:
        """Block until all queued data has been sent, no matter how long this takes.

        Args:
            silence_s: number of seconds for which the connection may carry nothing. Default: `SILENCE_S`.

        Raises:
            DeadlineError: the connection has carried nothing for this time.
            PeerLostError: the connection is lost.
        """
        patience = self.patience(silence_s)
        while self.backlog:
            if self._await(select.POLLOUT, patience):
                self.flush()

    def receive(self, *, from_socket: bool = True) -> Iterator[T]:
        """Yield each message that has been received completely, including its payload, until there are no more.

        Args:
            from_socket: False to read only the ring.

        Raises:
            PeerLostError: the connection is lost.
            ProtocolError: the peer has violated the protocol.
        """
        fills = FILLS if from_socket else 0
        most = 0
        while True:
            if self._ring_in is None:
                while (message := next(self._frames, None)) is not None:
                    yield message
            else:
                yield from self._in_order(self._ring_in)
            if not fills:
                return
            try:
                fills = fills - 1 if self._fill(most) else 0
                if not fills and (most := self._pending()):
                    fills = 1  # read only the decrypted data, so that other peers have their turn
            except PeerLostError:
                # Yield the messages that the peer wrote to the ring before the connection was lost.
                if self._ring_in is not None:
                    yield from self._in_order(self._ring_in)
                raise

    def _in_order(self, ring: Ring) -> Iterator[T]:
        """Yield the complete messages that the ring contains at the time of the call, in the order of the ring."""
        end: int | None = None
        while True:
            if self._on_socket or self._start != self._end:
                while (message := next(self._frames, None)) is not None:
                    yield message
                if self._on_socket:
                    return
            try:
                end = ring.end if end is None else end
                frame = ring.read(end)
            except ValueError as error:
                raise ProtocolError(f"cannot read from a ring: {error}") from error
            if frame is None:
                return
            if frame:
                message = self._read_header(frame)
                if any(target.nbytes for target in self.sink(message, 0)):
                    raise ProtocolError(f"{type(message).__name__} arrived without its payload")
                yield message
            else:
                self._on_socket = True

    def wait(self, silence_s: float | None = None) -> T:
        """Block until a message has arrived, no matter how long its transfer takes, and return the message.

        Args:
            silence_s: number of seconds for which the connection may carry nothing. Default: `SILENCE_S`.

        Raises:
            DeadlineError: the connection has carried nothing for this time.
            PeerLostError: the connection is lost.
            ProtocolError: the peer has violated the protocol.
        """
        patience = self.patience(silence_s)
        ready = True
        while True:
            if ready:
                for message in self.receive():
                    return message
            ready = self._await(select.POLLIN, patience)

    def close(self) -> None:
        """Close the connection and all file descriptors that are still in `descriptors`."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
        self.sock.close()
        # Free the memory of payloads and rings now, not when the garbage collector finds the cycle of references.
        self.sink, self._ring_in, self._ring_out = no_payload, None, None
        with contextlib.suppress(ValueError):  # raised if this method is called while a frame is being read
            self._frames.close()

    def close_in_fork(self) -> None:
        """See `close_in_forks`."""
        self.sock.close()

    def _await(self, events: int, patience: Patience) -> bool:
        """Wait for a short time until one of the events occurs. Return True if an event has occurred.

        Raises:
            DeadlineError: nothing has moved for too long.
        """
        poller = select.poll()
        poller.register(self.sock, events)
        occurred = bool(poller.poll(math.ceil(1000 * patience.wait_s)))
        # The socket may be writable all the time although the ring, whose reader is slow or gone, accepts no frames.
        if patience.look() or not patience.over:
            return occurred
        with contextlib.suppress(OSError):
            raise DeadlineError(
                f"the connection to {self.sock.getpeername()!r} has carried nothing for {patience.quiet_s:.1f} s"
            )
        raise DeadlineError(f"the connection has carried nothing for {patience.quiet_s:.1f} s")

    def _push_out(self, parts: list[memoryview], descriptors: Sequence[int] = ()) -> list[memoryview]:
        """Pass parts to the socket. Return the parts that the socket did not accept."""
        while parts:
            try:
                if descriptors:
                    sent = socket.send_fds(self.sock, parts[:BUFFERS_PER_CALL], list(descriptors))
                    descriptors = ()
                else:
                    sent = self.sock.sendmsg(parts[:BUFFERS_PER_CALL])
            except (BlockingIOError, InterruptedError):
                if not descriptors:
                    break
                self._await_room()
                continue
            except OSError as error:
                raise PeerLostError(f"connection lost: {error}") from error
            self._sent_bytes += sent
            while parts and sent >= parts[0].nbytes:
                sent -= parts.pop(0).nbytes
            if sent:
                parts[0] = parts[0][sent:]
        return parts

    def _await_room(self) -> None:
        """Wait until the socket accepts data. Raise `ProtocolError` if the peer reads nothing for `ROOM_S`."""
        poller = select.poll()
        poller.register(self.sock, select.POLLOUT)
        if not poller.poll(1000 * ROOM_S):
            raise ProtocolError(
                "it does not read what it was sent, so no file descriptor can be passed to it"
            )

    def _fill(self, most: int = 0) -> bool:
        """Receive available data with one call: first into the current payload, then into the buffer.

        Return False if less data was received than there was room for, which means that no more data is available.

        Args:
            most: maximum number of bytes to receive. 0 means no limit.
        """
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == BUFFER_BYTES:
            left = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, len(left)
            self._buffer[: len(left)] = left
        room = self._buffer[self._end :]
        wanted = self._wanted
        # A full buffer can be read only after the position of the next message in the ring has been reached.
        if not wanted.nbytes and not room.nbytes:
            return False
        if most:
            wanted = wanted[:most]
            room = room[: most - wanted.nbytes]
        ancillary_bytes = ANCILLARY_BYTES if self.takes_descriptor else 0
        try:
            if wanted.nbytes > BUFFER_BYTES and not ancillary_bytes:
                # Receive only into the payload: data in the buffer would have to be copied again later.
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
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerLostError(f"connection lost: {error}") from error
        if not count:
            raise PeerLostError("the connection ended")  # it is unknown which side ended it, and why
        self._received_bytes += count
        self._wanted = self._wanted[count:]
        self._end += max(0, count - wanted.nbytes)
        return count == wanted.nbytes + room.nbytes

    def _take_descriptors(self, ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                self.descriptors += numbers
        if len(self.descriptors) > 1:
            raise ProtocolError("the peer passed more than one descriptor")

    def _read_frames(self) -> Generator[T | None, None, None]:
        """Yield each message when it is complete, and None whenever more data must be received first."""
        while True:
            while self._end - self._start < PREFIX.size:
                yield None
            magic, header_bytes, payload_bytes = PREFIX.unpack_from(self._buffer, self._start)
            limit_bytes = HEADER_LIMIT_BYTES if self.trusted else GREETING_LIMIT_BYTES
            if magic != MAGIC or not 0 < header_bytes <= limit_bytes:
                raise ProtocolError(
                    "the received data is not a frame of the Paceline protocol, or its header is too large"
                )
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
            # Wait until the position of the message in the ring has been reached.
            while ringed and not bell and not self._on_socket:
                yield None
            targets = self.sink(message, payload_bytes)
            expected_bytes = sum(target.nbytes for target in targets)
            if expected_bytes != payload_bytes:
                raise ProtocolError(
                    f"{type(message).__name__} has a payload of {payload_bytes} bytes, expected {expected_bytes}"
                )
            if payload_bytes:
                self._incoming, self._following_bytes = message, payload_bytes
            for target in targets:
                if target.nbytes:
                    self._following_bytes -= target.nbytes
                    yield from self._until_filled(target)
            self._incoming = None
            if ringed and bell:
                continue
            self._on_socket = False
            yield message

    def _read_header(self, header: bytes | memoryview) -> T:
        try:
            message = self._decode(header)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            reason = self._unexpected(header) or f"a message header cannot be decoded: {error}"
            raise ProtocolError(reason) from error
        if type(message) in self._next_phases:
            self.expect(self._next_phases[type(message)])
        return message

    def _unexpected(self, header: bytes | memoryview) -> str:
        """Return the reason if a header is refused because its class is not expected now; else ""."""
        try:
            return refusal(self._phase, _tag_decoder.decode(header).type)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return ""

    def _fill_ring(self, ring: Ring) -> None:
        """Put waiting frames into the ring while it has room, and wake its reader if necessary."""
        written = False
        try:
            while self._ring_queue and ring.write(self._ring_queue[0][0]):
                self._ring_queue.popleft()
                written = True
        except ValueError as error:
            raise ProtocolError(f"cannot write to a ring: {error}") from error
        if written and ring.reader_asleep and not self._queue:
            self._queue.extend(QueuedBytes(part, kept=True) for part in self._push_out([memoryview(BELL)]))

    def _until_filled(self, target: memoryview) -> Iterator[None]:
        """Fill `target` from the buffer and then directly from the socket. Yield None while data is missing."""
        count = min(target.nbytes, self._end - self._start)
        target[:count] = self._buffer[self._start : self._start + count]
        self._start += count
        self._wanted = target[count:]
        while self._wanted.nbytes:
            yield None

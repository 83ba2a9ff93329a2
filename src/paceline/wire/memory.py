"""The memory for weights and gradients, and the two ways in which a shard accesses a worker's memory.

Each worker has one memory region. It contains one vector of weights per dtype, followed by one vector of gradients
per dtype. A shard uses one slice of each vector.

With **shared memory**, the region is a sealed memfd whose descriptor the worker passes with its greeting. The memfd
is freed when the last process that maps it has exited, and cannot be shrunk while a server maps it. The
server reads the gradient from the memory into which the worker computed it, and writes the weights into the memory
from which the worker reads them, so pushes and pulls need no further copies. This is safe because a worker's weights
change only inside its own `step()`: the server writes only while a pull is outstanding. Over a **stream**, the same
slices are sent as the payload of messages.

Over TCP, a connection cannot pass a descriptor. If a worker and a server run on the same machine, the worker instead
sends its process id and the number of the memory's descriptor, and the server opens this descriptor in /proc. The
memory has a random name, by which the server recognizes the memory. If the server cannot find the memory, for example
because the server runs in another container or as another user, the slices are sent as payload.

If all workers run in lockstep, even the weights need not be copied. With shared memory, there is a second region, the
*master*, which contains the weights that the servers update. The coordinator creates the master, and all processes
map the master. As long as no update is applied while a worker could be computing with the weights, pulls are answered
*in place*: the workers read the weights in the master. Workers map the master privately (see `follow`). So if a script
edits its weights, which is an error, it changes only its own copy.

A `Region` is one block of memory, divided into vectors. It handles only bytes, not tensors. `run.server_memory`
contains the server's view of a region.

At the end of this module: how a listening process passes connections on to another process.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import socket
from collections.abc import Mapping, Sequence
from typing import Final, Literal, Protocol

from ..core.layout import Layout, Piece, ShardSlice, item_bytes, ranges_of
from ..errors import ProtocolError
from .follow import PAGE_BYTES, MappedMemory, MemoryFollower, close_in_forks
from .ring import RING_BYTES

NAME = "paceline"  # name of memory whose descriptor is passed over a connection
SEALS = 0x0001 | 0x0002 | 0x0004  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW: the size cannot change

Vectors = Mapping[str, memoryview]
"""Mapping from dtype to a flat vector, or to a slice of a flat vector, as bytes."""

Kind = Literal["weights", "gradients"]
# The kinds of vectors in the region of a worker, and in the master region.
WORKER: Final[tuple[Kind, ...]] = ("weights", "gradients")
MASTER: Final[tuple[Kind, ...]] = ("weights",)

# Size of a pair of rings, rounded up to whole pages.
CHANNEL_BYTES = -(-2 * RING_BYTES // PAGE_BYTES) * PAGE_BYTES
PIECE_BYTES = 1024 * 1024  # maximum size of the pieces in which a gradient is sent


def file_limit() -> int | None:
    """Return the maximum size of a file, and so of shared memory, in bytes; None if there is no limit."""
    limit_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit_bytes == resource.RLIM_INFINITY else limit_bytes


def shared_memory_available() -> bool:
    """Return True if this system has memfd (Linux) and permits its use."""
    try:
        Region(Layout((), (), {}), ("weights",), _new_memfd(PAGE_BYTES, NAME)).close()
    except (AttributeError, OSError):
        # The system has no memfd, or a sandbox forbids it.
        return False
    return True


class Region:
    """Memory for weights and gradients: consecutive vectors, in a memfd or in private memory.

    Args:
        layout: layout of the vectors, the same for each kind.
        kinds: kinds of vectors: "weights" and "gradients" for a worker's region, only "weights" for the master.
        descriptor: file descriptor of the memfd, of which the region takes ownership. None for private memory that is
            initialized with zeros.
        channels: number of pairs of rings.

    Attributes:
        descriptor: file descriptor of the memfd, which stays open until `close`; None if no descriptor is open.
        size_bytes: size of the whole region in bytes.
        weights: mapping from dtype to the whole vector of weights, as bytes.
        gradients: mapping from dtype to the whole vector of gradients, as bytes.
        channels: for each pair of rings, its memory as a pair (worker to server, server to worker).
    """

    def __init__(
        self,
        layout: Layout,
        kinds: Sequence[Kind],
        descriptor: int | None,
        *,
        channels: int = 0,
    ) -> None:
        self.descriptor = descriptor
        close_in_forks(self)
        places, vectors_bytes = _places(layout, kinds)
        self.size_bytes = vectors_bytes + channels * CHANNEL_BYTES
        view = memoryview(mmap.mmap(-1 if descriptor is None else descriptor, self.size_bytes))
        self.weights = {dtype: view[a:b] for (kind, dtype), (a, b) in places.items() if kind == "weights"}
        self.gradients = {dtype: view[a:b] for (kind, dtype), (a, b) in places.items() if kind == "gradients"}
        starts = range(vectors_bytes, self.size_bytes, CHANNEL_BYTES)
        self.channels = [
            (view[start : start + RING_BYTES], view[start + RING_BYTES : start + 2 * RING_BYTES])
            for start in starts
        ]

    @classmethod
    def create(
        cls,
        layout: Layout,
        kinds: Sequence[Kind] = WORKER,
        *,
        shared: bool,
        channels: int = 0,
        name: str = NAME,
    ) -> Region:
        """Return a region in new memory that is initialized with zeros.

        The memory is a memfd with this name if `shared` is True, and private otherwise.
        """
        size_bytes = cls.size_of(layout, kinds, channels=channels)
        return cls(layout, kinds, _new_memfd(size_bytes, name) if shared else None, channels=channels)

    @staticmethod
    def size_of(layout: Layout, kinds: Sequence[Kind] = WORKER, *, channels: int = 0) -> int:
        """Return the size of a region in bytes. In shared memory, the size is limited by `file_limit`."""
        return _places(layout, kinds)[1] + channels * CHANNEL_BYTES

    @classmethod
    def attach(
        cls,
        layout: Layout,
        descriptor: int,
        kinds: Sequence[Kind] = WORKER,
        *,
        channels: int = 0,
    ) -> Region:
        """Map a region that another process has created. The descriptor is closed, even after an error.

        Raises:
            ProtocolError: the memory does not have the size that the layout requires, or it is not sealed.
        """
        size_bytes = cls.size_of(layout, kinds, channels=channels)
        try:
            _require_final(descriptor, size_bytes)
            region = cls(layout, kinds, descriptor, channels=channels)
            region.descriptor = None
            return region
        except OSError as error:
            raise ProtocolError(f"shared memory cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)

    def close_in_fork(self) -> None:
        """See `close_in_forks`."""
        self.close()

    def close(self) -> None:
        """Close the descriptor. The memory stays mapped until nothing refers to it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class Master:
    """A worker's view of the master, the shared memory in which the servers update the weights.

    Attributes:
        weights: mapping from dtype to the whole vector of weights, as bytes.
    """

    def __init__(self, layout: Layout, view: MemoryFollower | MappedMemory) -> None:
        places, _ = _places(layout, MASTER)
        self.weights = {dtype: view.memory[a:b] for (_, dtype), (a, b) in places.items()}
        self.edited = view.edited
        self.discard = view.discard
        self.close = view.close

    @classmethod
    def follow(cls, layout: Layout, descriptor: int, *, read_only: bool = False) -> Master | None:
        """Return a view of the memory that the coordinator created, or None if the system cannot provide such views.

        Takes ownership of the descriptor. Raises `ProtocolError` if the memory does not match the layout.

        Args:
            layout: layout of the model.
            descriptor: the descriptor of the memory.
            read_only: True for a view that cannot be edited; False for a view whose edits are private to this process.
        """
        _, size_bytes = _places(layout, MASTER)
        try:
            _require_final(descriptor, size_bytes)
            return cls(layout, (MappedMemory if read_only else MemoryFollower)(descriptor, size_bytes))
        except OSError:
            os.close(descriptor)
            return None
        except ProtocolError:
            os.close(descriptor)
            raise


def cut_pieces(vectors: Vectors, pieces: Sequence[Piece]) -> list[memoryview]:
    """Return the memory of the given pieces of `vectors`, in order. Adjacent pieces are merged."""
    return [
        vectors[dtype][start * item_bytes(dtype) : stop * item_bytes(dtype)]
        for dtype, start, stop in ranges_of(pieces)
    ]


def cut(vectors: Vectors, shard: ShardSlice) -> dict[str, memoryview]:
    """Return the memory of a shard's slice of each vector."""
    return {
        dtype: vectors[dtype][start * item_bytes(dtype) : stop * item_bytes(dtype)]
        for dtype, (start, stop) in shard.bounds.items()
    }


def _require_final(descriptor: int, size_bytes: int) -> None:
    sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
    if (found := os.fstat(descriptor).st_size) != size_bytes or not sealed:
        raise ProtocolError(f"shared memory has {found} bytes ({sealed=}), expected {size_bytes} (sealed)")


def find_memory(process: int, descriptor: int, name: str) -> int | None:
    """Return a new descriptor of shared memory that another process on this machine has created.

    Return None if this process cannot reach the memory.

    Args:
        process: id of the other process.
        descriptor: the descriptor of the memory in the other process.
        name: the name of the memory.
    """
    path = f"/proc/{process}/fd/{descriptor}"
    expected = f"/memfd:{name} (deleted)"
    try:
        if os.readlink(path) != expected:
            return None
        found = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if os.readlink(f"/proc/self/fd/{found}") == expected:
            return found
    except OSError:
        pass  # /proc belongs to a process namespace that does not contain this process
    os.close(found)  # this may be a different file: the other process may have replaced the memory meanwhile
    return None


def _new_memfd(size_bytes: int, name: str) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


def _places(layout: Layout, kinds: Sequence[Kind]) -> tuple[dict[tuple[Kind, str], tuple[int, int]], int]:
    """Return the byte range of each (kind, dtype) in the region, and the size of the region without rings.

    Each range starts on a new page.
    """
    places = {}
    end = 0
    for kind in kinds:
        for dtype, size in layout.sizes.items():
            size_bytes = size * item_bytes(dtype)
            places[kind, dtype] = (end, end + size_bytes)
            end += -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    return places, max(end, PAGE_BYTES)


# -- Passes connected sockets to another process, over a pair of Unix sockets --------------------------------
#
# The listening process has one end of the pair, and the target process of the connections has the other end. A
# socket that has been sent, but not received, belongs to no process: if the target process ends before it has
# received the socket, the system closes the connection.

MARK = b"+"


class ConnectionSource(Protocol):
    """The source of a host's connections: a listening socket, or the sockets that another process passes on."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when a connection is waiting."""

    def accept(self) -> tuple[socket.socket, object]:
        """Return the next connection, and the address of the peer.

        Raises:
            BlockingIOError: no connection is waiting.
            OSError: the next connection is lost, or cannot be accepted.
        """

    def close(self) -> None:
        """Stop accepting connections."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the end that passes sockets on, and the end that receives them. The former never blocks."""
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender.setblocking(False)
    return sender, receiver


def pass_on(sock: socket.socket, sender: socket.socket) -> None:
    """Pass a socket to the process at the other end. The caller must close its own descriptor.

    Raises:
        BlockingIOError: the process has not received the earlier sockets yet, and there is no room for more.
        BrokenPipeError: the process has ended.
    """
    try:
        socket.send_fds(sender, [MARK], [sock.fileno()])
    except OSError as error:
        if error.errno in (errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS):
            raise BlockingIOError(error.errno, error.strerror) from error
        if error.errno == errno.ECONNRESET:
            raise BrokenPipeError(error.errno, error.strerror) from error
        raise


class PassedSockets:
    """Receives the sockets that another process passes on. See `ConnectionSource`.

    Args:
        receiver: the receiving end of a `socket_pair()`, of which this object takes ownership.
    """

    def __init__(self, receiver: socket.socket) -> None:
        receiver.setblocking(False)
        self._receiver = receiver

    def fileno(self) -> int:
        return self._receiver.fileno()

    def accept(self) -> tuple[socket.socket, object]:
        data, descriptors, _, _ = socket.recv_fds(self._receiver, len(MARK), 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise OSError(errno.ESHUTDOWN, "the process that listens has ended")
        if not descriptors:  # the system has closed the connection
            raise ConnectionAbortedError(errno.ECONNABORTED, "there was no descriptor for a connection")
        return socket.socket(fileno=descriptors[0]), None

    def close(self) -> None:
        self._receiver.close()

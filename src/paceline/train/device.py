"""`device`, the device on which a script computes, and copies between its memory and that of the host."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..core.job_sync import EarlyPause
from ..core.layout import Layout
from ..shard.vectors import Vectors, bits
from .session import current


def device() -> torch.device:
    """Return the device on which this worker computes.

    In a run, this is the accelerator that was assigned to the worker (`--devices`), or the CPU if none was. Outside a
    run, it is torch's current accelerator if there is one, else the CPU. So a script that moves its model and its
    batches there runs on any machine. Other accelerators are hidden from a worker if possible, so the first one that
    the worker sees is its own, and it usually has index 0.

    Returns:
        A device with an index, such as `torch.device("cuda:0")`, or `torch.device("cpu")`.

    Example:
        >>> import paceline, torch
        >>> model = torch.nn.Linear(2, 1).to(paceline.device())
        >>> model.weight.device == paceline.device()
        True
    """
    if (session := current()) is not None:
        return session.device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


# -- Copies between the memory of a device and the memory of the host, in the order in which a worker needs them
#
# A device computes asynchronously: a call returns before the device has begun. So a copy must begin after the
# device has computed what is copied, and what needs the result must wait for the copy. A `DeviceQueue`
# carries out copies in the order in which they are submitted. Each copy begins after all computations that
# the script has started before it. Later computations may overlap with the copy, unless they are told to wait.

log = logging.getLogger("paceline.train.device")

READ_WRITE, READ_ONLY = 0, 8  # cudaHostRegisterDefault, cudaHostRegisterReadOnly


class Ticket(Protocol):
    """What was submitted to a `DeviceQueue`."""

    def done(self) -> bool:
        """Return True if it has ended."""

    def order(self) -> None:
        """Let the device wait for its end before all computations that are started after this call."""


class DeviceQueue(Protocol):
    """Carries out copies on a device, one after another.

    Attributes:
        overlaps: True if copies run beside computations. Otherwise, a copy has ended when `submit` returns.
    """

    overlaps: bool

    def submit(self, work: Callable[[], object], *, writes: Sequence[torch.Tensor]) -> Ticket:
        """Carry out a function that only starts copies and computations on the device.

        They begin after all computations that were started before this call, and after all that was submitted before.

        Args:
            work: the function.
            writes: the memory that the function writes. Before `drain`, the host may not use such memory, and neither
                may it write memory that the function reads. Before `Ticket.order`, the device may not use such
                memory.
        """

    def drain(self) -> None:
        """Wait on the host until everything that was submitted has ended."""

    def wait(self) -> None:
        """Wait on the host until all computations that were started before this call have ended."""

    def keep_close(self) -> None:
        """Wait on the host until all computations that were started before the call before this one have ended.

        While a computation may be aborted, this is called at each hook: what a device has been given cannot be taken
        back.
        """

    def register(self, memory: Sequence[torch.Tensor], *, only_read: bool) -> Callable[[], None]:
        """Let the device copy from and to this memory of the host without the host's help, where that is possible.

        Args:
            memory: the memory.
            only_read: True if the device only reads the memory, which may then be read-only.

        Returns:
            A function that ends this. It must be called before the memory is freed.
        """


def queue_of(device: torch.device) -> DeviceQueue:
    """Return a queue for a device. The device of torch's backend may have no streams; then copies do not overlap."""
    try:
        return _StreamQueue(device)
    except RuntimeError:  # this is how backends say that they have no streams
        return _BlockingQueue(device)


class _StreamQueue:
    """A queue on a stream of its own.

    Raises:
        RuntimeError: the backend of the device has no streams.
    """

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        # what the device had to compute at the last call of `keep_close`
        self._reached: torch.Event | None = None

    def submit(self, work: Callable[[], object], *, writes: Sequence[torch.Tensor]) -> Ticket:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            work()
        event = torch.Event(self._device)
        event.record(self._stream)
        return _StreamTicket(event, self._device)

    def drain(self) -> None:
        self._stream.synchronize()

    def wait(self) -> None:
        torch.accelerator.current_stream(self._device).synchronize()

    def keep_close(self) -> None:
        before, self._reached = self._reached, torch.Event(self._device)
        self._reached.record(torch.accelerator.current_stream(self._device))
        if before is not None:
            before.synchronize()

    def register(self, memory: Sequence[torch.Tensor], *, only_read: bool) -> Callable[[], None]:
        if self._device.type != "cuda":  # torch has no generic function for this
            return _nothing
        places = [(each.data_ptr(), each.nbytes) for each in memory if each.numel()]
        ways = [READ_ONLY, READ_WRITE] if only_read else [READ_WRITE]
        registered = [place for place in places if any(self._lock(*place, way) for way in ways)]
        if len(registered) < len(places):
            log.warning("the memory of a worker cannot be locked for its device, so copies take longer")

        def unregister(memory: Sequence[torch.Tensor] = memory) -> None:  # keeps the memory until then
            for address, _ in registered:
                torch.cuda.cudart().cudaHostUnregister(address)

        return unregister

    def _lock(self, address: int, size_bytes: int, way: int) -> bool:
        if int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, way)) == 0:
            return True
        # CUDA keeps the error, and torch would find it after an unrelated kernel. Let torch raise and clear it now.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)
        return False


class _StreamTicket:
    def __init__(self, event: torch.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def done(self) -> bool:
        return self._event.query()

    def order(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._event)


class _BlockingQueue:
    """The queue of a device without streams: its copies follow the computations, and the host waits for them."""

    overlaps = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def submit(self, work: Callable[[], object], *, writes: Sequence[torch.Tensor]) -> Ticket:
        work()
        return _Ended()

    def drain(self) -> None:
        pass

    def wait(self) -> None:
        torch.accelerator.synchronize(self._device)

    def keep_close(self) -> None:
        self.wait()  # the device has no events

    def register(self, memory: Sequence[torch.Tensor], *, only_read: bool) -> Callable[[], None]:
        return _nothing


def _nothing() -> None:
    pass


class _Ended:
    def done(self) -> bool:
        return True

    def order(self) -> None:
        pass


# -- Copies gradients from a device to the host while the backward pass is still running ---------------------
#
# A *piece* is a range of a vector that is copied as a whole, once all of its gradients have been accumulated.
# After that, a script may still change its gradients: it clips, unscales or accumulates them. Versions of
# tensors do not tell, because some operations do not raise them. So the checksum of what was copied is
# compared with that of the gradients at the commit. If they differ, the piece is copied again. If a script
# changes its gradients after the backward pass, early copies save no time, and are suspended for a while.

PIECE_BYTES = 4 * 1024 * 1024
"""Maximum size, in bytes, of a piece of the gradients that is copied early."""

PIECES_BETWEEN = 16
"""Maximum number of pieces that the device keeps until they have been copied to the host."""


class EarlyCopies:
    """Copies pieces of the gradients to the session's memory while the backward pass is still running.

    A piece is copied twice. The first copy is made on the device, in the order of the script's computations, to
    memory that no script can reach. The second is made from there to the host, while later computations run. The
    checksum is that of the first copy, so it belongs to what the host receives, whatever the script does meanwhile.
    No copy reads memory that a computation of the script may write at the same time.

    Args:
        gradients: the flat vectors on the device.
        sent: the session's flat vectors.
        layout: layout of the parameters in the vectors.
        queue: carries out the copies.
    """

    def __init__(self, gradients: Vectors, sent: Vectors, layout: Layout, queue: DeviceQueue) -> None:
        self._queue = queue
        self._pieces = layout.slice_evenly(1)[0].pieces(PIECE_BYTES)
        self._sources = [gradients[piece.dtype][piece.start : piece.stop] for piece in self._pieces]
        self._targets = [sent[piece.dtype][piece.start : piece.stop] for piece in self._pieces]
        self._pieces_of: dict[int, list[int]] = {}
        for number, piece in enumerate(self._pieces):
            for index in piece.parameters:
                self._pieces_of.setdefault(index, []).append(number)
        device = self._sources[0].device
        self._between = [
            _Between(max(each.nbytes for each in self._sources), device)
            for _ in range(min(PIECES_BETWEEN, len(self._pieces)))
        ]
        self._next_between = 0
        self._sums = torch.zeros(len(self._pieces), 2, dtype=torch.int64, device=device)
        self._sum = _Checksum(max(map(torch.numel, self._sources)), device)
        self._lock = threading.Lock()  # gradients become ready on a thread of autograd
        self._pause = EarlyPause()
        self.begin()

    def begin(self) -> None:
        """Prepare for the gradients of another push."""
        with self._lock:
            # For each piece, the parameters whose gradients have not been computed yet.
            self._missing = [set(piece.parameters) for piece in self._pieces]
            self._copies: dict[int, Ticket] = {}  # the pieces that have been copied, in their order
            self._arriving: list[tuple[int, Ticket]] = []  # those that may not have arrived, in their order
            # For each parameter, the pieces that have not arrived.
            self._outstanding = {index: len(numbers) for index, numbers in self._pieces_of.items()}

    def ready(self, index: int) -> list[int]:
        """Copy the pieces that are complete with this gradient. Return the parameters that have arrived now."""
        if self._pause.is_on:
            return []
        with self._lock:
            for number in self._pieces_of[index]:
                self._missing[number].discard(index)
                if not self._missing[number] and number not in self._copies:
                    self._copy(number)
            return self._arrived()

    def rest(self, vectors: Vectors) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return what must be copied to the host besides, as pairs of target and source.

        Args:
            vectors: the vectors that are needed.
        """
        with self._lock:
            needed = [number for number, piece in enumerate(self._pieces) if piece.dtype in vectors]
            early = [number for number in needed if number in self._copies]
            changed = self._changed(early)
            self._pause.ended(changed=bool(changed))
            # If the gradient from before the change comes back, it must be copied again.
            for number in changed:
                del self._copies[number]
            late = [number for number in needed if number not in self._copies]
        return [(self._targets[number], self._sources[number]) for number in late]

    def _copy(self, number: int) -> None:
        source, target, checksum = self._sources[number], self._targets[number], self._sums[number]
        between = self._between[self._next_between]
        self._next_between = (self._next_between + 1) % len(self._between)
        if between.ticket is not None:
            between.ticket.order()
        piece = between.memory[: source.nbytes].view(source.dtype)
        piece.copy_(source)

        def pass_on() -> None:
            checksum.copy_(self._sum.of(piece))
            target.copy_(piece, non_blocking=True)

        between.ticket = ticket = self._queue.submit(pass_on, writes=[checksum, target])
        self._copies[number] = ticket
        self._arriving.append((number, ticket))

    def _arrived(self) -> list[int]:
        arrived = []
        while self._arriving and self._arriving[0][1].done():
            for index in self._pieces[self._arriving.pop(0)[0]].parameters:
                self._outstanding[index] -= 1
                if not self._outstanding[index]:
                    arrived.append(index)
        return arrived

    def _changed(self, early: Sequence[int]) -> set[int]:
        """Return those of some pieces whose gradients have changed since they were copied."""
        if not early:
            return set()
        now = torch.stack([self._sum.of(self._sources[number]) for number in early])
        [*self._copies.values()][-1].order()  # and so after all copies before the last one
        equal = (self._sums[early] == now).all(dim=1).tolist()  # waits until the gradients have been computed
        return {number for number, unchanged in zip(early, equal, strict=True) if not unchanged}


class _Between:
    """Memory for a piece on the device.

    Attributes:
        memory: the memory, as bytes.
        ticket: the last copy from it to the host.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.ticket: Ticket | None = None


class _Checksum:
    """Computes checksums on a device: sums of the bits, which do not depend on the order of the summation.

    The second sum weights each element with a random number of its place. With weights that grow evenly, changes that
    cancel out are not seen, for example those by -1, 2 and -1 in three elements, as rounding causes them.
    """

    def __init__(self, longest: int, device: torch.device) -> None:
        random = torch.Generator().manual_seed(0)
        weights = torch.randint(-(2**31), 2**31, (longest,), dtype=torch.int32, generator=random)
        self._weights = (weights | 1).to(device)  # an odd weight loses no bit of its element

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the two checksums of a flat tensor of at most `longest` elements."""
        integers = bits(values)
        weighted = integers * self._weights[: integers.numel()]
        return torch.stack([integers.sum(dtype=torch.int64), weighted.sum(dtype=torch.int64)])

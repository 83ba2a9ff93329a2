"""`device`, the device on which a script computes, and early copies of gradients during the backward pass."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ..core.job_sync import EarlyPause
from ..core.layout import Layout
from ..shard.device_queue import DeviceQueue, Ticket
from ..shard.vectors import Vectors, bits
from .session import current


def device() -> torch.device:
    """Return the device on which this worker computes.

    In a run, this is the accelerator that was assigned to the worker (`--devices`), or the CPU if none was assigned.
    Outside a run, it is torch's current accelerator if there is one, else the CPU. So a script that moves its model and
    its batches to this device runs on any machine. Other accelerators are hidden from a worker if possible, so the
    first accelerator that the worker sees is its own, and usually has index 0.

    Returns:
        A device with an index, such as the first one of kind "cuda", or the CPU.

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


# -- Copies gradients from a device to the host while the backward pass is still running ---------------------
#
# A *piece* is a range of a vector that is copied as a whole, once all of its gradients have been accumulated.
# After that, a script may still change the gradients, for example to clip, unscale or accumulate them. The
# version counters of tensors do not reveal such changes, because some operations do not increment the
# counters. So at the commit, the checksum of the copied values is compared with that of the gradients. If
# they differ, the piece is copied again. If a script changes its gradients after the backward pass, early
# copies save no time, and are suspended for a while.

PIECE_BYTES = 4 * 1024 * 1024
"""Maximum size, in bytes, of a piece of the gradients that is copied early."""

PIECES_BETWEEN = 16
"""Maximum number of pieces that the device keeps until they have been copied to the host."""


class EarlyCopies:
    """Copies pieces of the gradients to the session's memory while the backward pass is still running.

    A piece is copied twice. The first copy is made on the device, in the order of the script's computations, to
    memory that no script can reach. The second copy is made from this memory to the host, while later computations run.
    The checksum is that of the first copy, so it belongs to the values that the host receives, whatever the script does
    meanwhile. No copy reads memory that a computation of the script may write at the same time.

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
            self._copies: dict[int, Ticket] = {}  # piece -> its copy, in the order of the copies
            self._arriving: list[tuple[int, Ticket]] = []  # copies that may not have arrived yet
            # For each parameter, the number of its pieces that have not arrived.
            self._outstanding = {index: len(numbers) for index, numbers in self._pieces_of.items()}

    def ready(self, index: int) -> list[int]:
        """Copy the pieces that this gradient completes. Return the parameters whose gradients have newly arrived."""
        if self._pause.is_on:
            return []
        with self._lock:
            for number in self._pieces_of[index]:
                self._missing[number].discard(index)
                if not self._missing[number] and number not in self._copies:
                    self._copy(number)
            return self._arrived()

    def rest(self, vectors: Vectors) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the pieces that must still be copied to the host, as pairs of target and source.

        Args:
            vectors: the vectors that are needed.
        """
        with self._lock:
            needed = [number for number, piece in enumerate(self._pieces) if piece.dtype in vectors]
            early = [number for number in needed if number in self._copies]
            changed = self._changed(early)
            self._pause.ended(changed=bool(changed))
            # The changed values will replace the early copy. So if the script later changes a gradient back to its old
            # values, the gradient must be copied again.
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
        """Of the given pieces, return the indices of those whose gradients have changed since the copy."""
        if not early:
            return set()
        now = torch.stack([self._sum.of(self._sources[number]) for number in early])
        [*self._copies.values()][-1].order()  # wait for the last copy, and so for all copies
        equal = (self._sums[early] == now).all(dim=1).tolist()  # waits until the gradients have been computed
        return {number for number, unchanged in zip(early, equal, strict=True) if not unchanged}


class _Between:
    """Memory for a piece on the device.

    Attributes:
        memory: the memory, as bytes.
        ticket: the last copy from this memory to the host.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.ticket: Ticket | None = None


class _Checksum:
    """Computes checksums on a device: sums of the bits, which do not depend on the order of the summation.

    In the second sum, each element is multiplied by a random factor that belongs to the element's index. Factors that
    increase evenly with the index (1, 2, 3, ...) would not reveal changes that cancel out, such as changes by -1, 2 and
    -1 in three neighboring elements, which rounding can cause.
    """

    def __init__(self, longest: int, device: torch.device) -> None:
        random = torch.Generator().manual_seed(0)
        weights = torch.randint(-(2**31), 2**31, (longest,), dtype=torch.int32, generator=random)
        self._weights = (weights | 1).to(device)  # an odd factor loses no bit of the element

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the two checksums of a flat tensor of at most `longest` elements."""
        integers = bits(values)
        weighted = integers * self._weights[: integers.numel()]
        return torch.stack([integers.sum(dtype=torch.int64), weighted.sum(dtype=torch.int64)])

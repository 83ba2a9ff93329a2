"""The stager: where a worker's parameters and gradients are, and how they get to and from the session's memory.

A session has its weights and gradients in flat vectors in the memory of the host. On the CPU, the parameters and
their gradients are views of these vectors (`Aliasing`). On another device, they are views of flat vectors on the
device, which are copied to and from those of the session (`Copying`). This module is the only place where weights and
gradients change memory.

`Copying` copies gradients while the backward pass is still running. A *piece* is a range of a vector that is copied
as a whole, once all of its gradients have been accumulated. After that, a script may still change its gradients: it
clips, unscales or accumulates them. Versions of tensors do not tell, because some operations do not raise them. So
each piece has three checksums: from before its copy, from after it, and from the commit. If they differ, the piece is
copied again. If a script changes its gradients after the backward pass, early copies save no time, and are suspended
for a while.

Weights are copied to the device after each pull. The device waits for this copy before it computes anything else, and
the host waits for it before the session uses its memory again (`settle`).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..core.layout import Layout, dtype_of, item_bytes, of_set
from ..shard.vectors import Vectors, parameter_views, torch_dtype
from .device_queue import DeviceQueue, Ticket, queue_of
from .session import Session

__all__ = ["Aliasing", "Copying", "Stager", "bits", "is_at", "move_into", "point_at", "same", "stager_of"]

LARGE_BYTES = 2 * 1024 * 1024
"""Minimum size, in bytes, of a gradient that is copied with `memmove`."""

PIECE_BYTES = 4 * 1024 * 1024
"""Minimum size, in bytes, of a piece of the gradients that is copied early, unless a vector is smaller."""

LONGEST_PAUSE = 256
"""Maximum number of iterations for which early copies are suspended."""


class Stager(Protocol):
    """Moves weights and gradients between a worker's parameters and its session.

    Attributes:
        weights: the flat vectors of which the parameters are views.
        gradients: the flat vectors of which their gradients are views.
    """

    weights: Vectors
    gradients: Vectors

    def follow(self, weights: Vectors) -> None:
        """Use these vectors as those of the session, which has moved its weights."""
        ...

    def weights_pulled(self, set_index: int | None) -> None:
        """Copy the session's weights to the parameters; those of one parameter set if `set_index` is not None."""
        ...

    def weights_edited(self) -> bool | None:
        """Return True if the script has changed `weights` since the last pull, None if this is not known."""
        ...

    def true_values(self, index: int) -> torch.Tensor | None:
        """Return a parameter's values as of the last pull, on whatever device; None if they are not known."""
        ...

    def gradient_ready(self, index: int) -> Sequence[int]:
        """Record that a gradient has been computed, which may change until `deliver`.

        Returns:
            The parameters whose gradients the session's vectors contain now, and did not before.
        """
        ...

    def deliver(self, set_index: int | None) -> None:
        """Return when the session's vectors contain `gradients`; those of one parameter set if it is not None."""
        ...

    def begin_next(self) -> None:
        """Record that the gradients from now on belong to the next push."""
        ...

    def settle(self) -> None:
        """Return when nothing reads or writes the session's memory any more."""
        ...


def stager_of(layout: Layout, session: Session, device: torch.device) -> Stager:
    """Return the stager for parameters on a device."""
    if device.type == "cpu":
        return Aliasing(session)
    return Copying(layout, session, device, queue_of(device))


class Aliasing:
    """The stager of parameters that are views of the session's vectors."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.weights = session.weights
        self.gradients = session.gradients

    def follow(self, weights: Vectors) -> None:
        self.weights = weights

    def weights_pulled(self, set_index: int | None) -> None:
        pass

    def weights_edited(self) -> bool | None:
        return self._session.weights_edited()

    def true_values(self, index: int) -> torch.Tensor | None:
        return None

    def gradient_ready(self, index: int) -> Sequence[int]:
        return (index,)

    def deliver(self, set_index: int | None) -> None:
        pass

    def begin_next(self) -> None:
        pass

    def settle(self) -> None:
        pass


class Piece(NamedTuple):
    """A range of a vector that is copied as a whole.

    Attributes:
        vector: name of the vector.
        start: index of its first element.
        stop: index of its last element, plus one.
        parameters: the indices of the parameters in this range.
    """

    vector: str
    start: int
    stop: int
    parameters: tuple[int, ...]


def pieces_of(layout: Layout) -> list[Piece]:
    """Divide the vectors of a layout into pieces. Each parameter lies in one piece."""
    members: dict[str, list[int]] = {}
    for index, parameter in enumerate(layout.parameters):
        members.setdefault(parameter.vector, []).append(index)
    pieces = []
    for vector, indices in members.items():
        start, held = 0, []
        for index, following in zip(indices, [*indices[1:], None], strict=True):
            held.append(index)
            stop = layout.sizes[vector] if following is None else layout.offsets[following]
            if following is None or (stop - start) * item_bytes(vector) >= PIECE_BYTES:
                pieces.append(Piece(vector, start, stop, tuple(held)))
                start, held = stop, []
    return pieces


class Copying:
    """The stager of parameters on a device.

    Args:
        layout: layout of the parameters in the flat vectors.
        session: the session.
        device: the device.
        queue: carries out the copies.
    """

    def __init__(self, layout: Layout, session: Session, device: torch.device, queue: DeviceQueue) -> None:
        self._queue = queue
        self._true: Vectors = {}
        self._sent = session.gradients
        self._layout = layout
        self.weights = _on_device(layout, device)
        self.gradients = _on_device(layout, device)
        self._pieces = pieces_of(layout)
        self._piece_of = {
            index: number for number, piece in enumerate(self._pieces) for index in piece.parameters
        }
        self._lock = threading.Lock()  # gradients become ready on a thread of autograd
        self._tickets: list[Ticket] = []  # copies from or to the session's memory that may not have ended
        self._missing: dict[
            int, set[int]
        ] = {}  # piece -> parameters whose gradients have not been accumulated
        self._copied: dict[int, _Early] = {}  # the pieces that were copied early
        self._arriving: list[int] = []  # those that the session has not been told of
        self._sums = _Checksums(self._pieces, device) if queue.overlaps else None
        self._pause = 0  # the number of iterations for which early copies are still suspended
        self._next_pause = 1
        self.follow(session.weights)
        session.before_exchange = self.settle
        self.begin_next()

    def follow(self, weights: Vectors) -> None:
        self.settle()
        self._true = weights
        self._true_views = parameter_views(self._layout, weights)
        self.weights_pulled(None)

    def weights_pulled(self, set_index: int | None) -> None:
        pulled = of_set(self.weights, set_index)

        def copy() -> None:
            for name, vector in pulled.items():
                vector.copy_(self._true[name], non_blocking=self._queue.overlaps)

        ticket = self._queue.submit(copy, writes=list(pulled.values()))
        ticket.order()
        self._tickets.append(ticket)

    def weights_edited(self) -> bool | None:
        return None

    def true_values(self, index: int) -> torch.Tensor | None:
        return self._true_views[index]

    def gradient_ready(self, index: int) -> Sequence[int]:
        if self._sums is None or self._pause:
            return ()
        with self._lock:
            number = self._piece_of[index]
            missing = self._missing[number]
            missing.discard(index)
            if not missing and number not in self._copied:
                self._copied[number] = self._copy_early(number, self._sums)
                self._arriving.append(number)
            return self._arrived()

    def deliver(self, set_index: int | None) -> None:
        vectors = of_set(self.gradients, set_index)
        with self._lock:
            early = [number for number in self._copied if self._pieces[number].vector in vectors]
            changed = self._changed(early)
            self._suspend_if(bool(changed), early)
            rest = [
                piece
                for number, piece in enumerate(self._pieces)
                if piece.vector in vectors and (number not in self._copied or number in changed)
            ]
        self._copy(rest)
        self.settle()

    def begin_next(self) -> None:
        with self._lock:
            self._copied.clear()
            self._arriving.clear()
            self._missing = {number: set(piece.parameters) for number, piece in enumerate(self._pieces)}

    def settle(self) -> None:
        for ticket in self._tickets:
            ticket.wait()
        self._tickets.clear()

    def _copy(self, pieces: Sequence[Piece]) -> None:
        """Start to copy these pieces of the gradients to the session's vectors."""
        pairs = [
            (self._sent[p.vector][p.start : p.stop], self.gradients[p.vector][p.start : p.stop])
            for p in pieces
        ]

        def copy() -> None:
            for target, source in pairs:
                target.copy_(source, non_blocking=self._queue.overlaps)

        self._tickets.append(self._queue.submit(copy, writes=[target for target, _ in pairs]))

    def _copy_early(self, number: int, sums: _Checksums) -> _Early:
        piece = self._pieces[number]
        values = self.gradients[piece.vector][piece.start : piece.stop]
        target = self._sent[piece.vector][piece.start : piece.stop]
        before, after = sums.of(values), sums.new()

        def copy() -> None:
            target.copy_(values, non_blocking=True)
            after.copy_(sums.of(values))

        ticket = self._queue.submit(copy, writes=[target, after])
        self._tickets.append(ticket)
        return _Early(ticket, before, after)

    def _changed(self, early: Sequence[int]) -> set[int]:
        """Return those of some pieces that were copied early whose gradients have changed since."""
        if not early or self._sums is None:
            return set()
        found = []
        for number in early:
            piece, copied = self._pieces[number], self._copied[number]
            now = self._sums.of(self.gradients[piece.vector][piece.start : piece.stop])
            copied.ticket.order()
            found.append(((copied.before == copied.after) & (copied.after == now)).all())
        equal = torch.stack(found).cpu()  # waits until the gradients have been computed
        return {number for number, unchanged in zip(early, equal.tolist(), strict=True) if not unchanged}

    def _suspend_if(self, changed: bool, early: Sequence[int]) -> None:
        if changed:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        else:
            self._next_pause = 1 if early else self._next_pause
            self._pause = max(0, self._pause - 1)

    def _arrived(self) -> list[int]:
        """Return the parameters whose gradients have arrived in the session's memory, and note that it is told."""
        arrived: list[int] = []
        while self._arriving and self._copied[self._arriving[0]].ticket.done():
            arrived += self._pieces[self._arriving.pop(0)].parameters
        return arrived


class _Early(NamedTuple):
    """An early copy of a piece.

    Attributes:
        ticket: the copy.
        before: the checksums of what was to be copied.
        after: the checksums after the copy.
    """

    ticket: Ticket
    before: torch.Tensor
    after: torch.Tensor


class _Checksums:
    """Computes checksums on a device: sums of the bits, which do not depend on the order of the summation.

    The second sum weights each element by its place, so that it notices if elements are exchanged.
    """

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        longest = max((piece.stop - piece.start for piece in pieces), default=0)
        self._device = device
        self._places = torch.arange(1, 2 * longest, 2, dtype=torch.int32, device=device)

    def new(self) -> torch.Tensor:
        """Return memory for the checksums of a piece."""
        return torch.zeros(2, dtype=torch.int64, device=self._device)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the checksums of a flat tensor."""
        integers = bits(values)
        weighted = integers * self._places[: integers.numel()].to(integers.dtype)
        return torch.stack([integers.sum(dtype=torch.int64), weighted.sum(dtype=torch.int64)])


def _on_device(layout: Layout, device: torch.device) -> Vectors:
    return {
        name: torch.zeros(size, dtype=torch_dtype(dtype_of(name)), device=device)
        for name, size in layout.sizes.items()
    }


def point_at(parameters: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
    """Point each parameter at a view, without a change of its version."""
    with _unsafe_preserve_version_counter(tuple(parameters)):
        for parameter, view in zip(parameters, views, strict=True):
            parameter.data = view


def is_at(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Return True if a tensor is at the place of a view, with the same strides, or has no elements."""
    return (tensor.data_ptr() == view.data_ptr() or not tensor.numel()) and tensor.stride() == view.stride()


def move_into(view: torch.Tensor, gradient: torch.Tensor) -> None:
    """Copy a gradient of the same shape into a view, unless it is there already.

    Large gradients on the CPU are copied with `memmove`, which bypasses the cache for large blocks. A write through
    the cache would first read the memory to be overwritten, and caching the data would be useless, because another
    process reads it next.
    """
    if gradient.is_sparse:
        view.copy_(gradient.to_dense())
    elif gradient.data_ptr() != view.data_ptr():
        same_format = gradient.is_contiguous() and gradient.dtype == view.dtype
        if same_format and view.nbytes >= LARGE_BYTES and view.is_cpu and gradient.is_cpu:
            ctypes.memmove(view.data_ptr(), gradient.data_ptr(), view.nbytes)
        else:
            view.copy_(gradient)


def same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same bits, so that NaN equals NaN. They may be on different devices."""
    return torch.equal(bits(tensor), bits(other).to(tensor.device))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's memory as integers."""
    return tensor.detach().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.itemsize])

"""The stager: where a worker's parameters and gradients are, and how they get to and from the session's memory.

A session has its weights and gradients in flat vectors in the memory of the host. On the CPU, the parameters and
their gradients are views of these vectors (`Aliasing`). On another device, they are views of flat vectors on the
device, which are copied to and from those of the session (`Copying`). This module is the only place where weights and
gradients change memory.

`Copying` copies gradients while the backward pass is still running. A *piece* is a range of a vector that is copied
as a whole, once all of its gradients have been accumulated. After that, a script may still change its gradients: it
clips, unscales or accumulates them. Versions of tensors do not tell, because some operations do not raise them. So
the checksum of what was copied is compared with that of the gradients at the commit. If they differ, the piece is
copied again. If a script changes its gradients after the backward pass, early copies save no time, and are suspended
for a while.

Weights are copied to the device after each pull. The device waits for this copy before it computes anything else, and
the host waits for it before the session uses its memory again (`settle`).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Protocol
from weakref import finalize

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..core.layout import Layout, dtype_of, of_set
from ..shard.vectors import Vectors, parameter_views, torch_dtype
from .device_queue import DeviceQueue, Ticket, queue_of
from .session import Session

__all__ = ["Aliasing", "Copying", "Stager", "bits", "is_at", "move_into", "point_at", "same", "stager_of"]

LARGE_BYTES = 2 * 1024 * 1024
"""Minimum size, in bytes, of a gradient that is copied with `memmove`."""

PIECE_BYTES = 4 * 1024 * 1024
"""Maximum size, in bytes, of a piece of the gradients that is copied early."""

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

    def await_gradients(self) -> None:
        """Return when the gradients have been computed."""
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

    def await_gradients(self) -> None:
        pass

    def deliver(self, set_index: int | None) -> None:
        pass

    def begin_next(self) -> None:
        pass

    def settle(self) -> None:
        pass


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
        self._layout = layout
        self._sent = session.gradients
        self.weights = _on_device(layout, device)
        self.gradients = _on_device(layout, device)
        self._unended: list[Ticket] = []  # copies from or to the session's memory that may not have ended
        self._early = _EarlyCopies(self.gradients, self._sent, layout, queue) if queue.overlaps else None
        self._session = session
        finalize(self, queue.register(list(self._sent.values())))
        self._unregister_weights: finalize[..., Copying] | None = None
        self.follow(session.weights)
        session.before_exchange = self.settle

    def follow(self, weights: Vectors) -> None:
        self.settle()
        if self._unregister_weights is not None:
            self._unregister_weights()
            self._unregister_weights = None
        # The servers' memory is mapped privately. A view that a device has locked would no longer follow the servers.
        if self._session.weights_edited() is None:
            self._unregister_weights = finalize(self, self._queue.register(list(weights.values())))
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
        self._unended.append(ticket)

    def weights_edited(self) -> bool | None:
        return None

    def true_values(self, index: int) -> torch.Tensor | None:
        return self._true_views[index]

    def gradient_ready(self, index: int) -> Sequence[int]:
        return () if self._early is None else self._early.ready(index)

    def await_gradients(self) -> None:
        self._queue.wait()

    def deliver(self, set_index: int | None) -> None:
        vectors = of_set(self.gradients, set_index)
        if self._early is None:
            rest = [(self._sent[name], vector) for name, vector in vectors.items()]
        else:
            rest = self._early.rest(vectors)

        def copy() -> None:
            for target, source in rest:
                target.copy_(source, non_blocking=self._queue.overlaps)

        self._unended.append(self._queue.submit(copy, writes=[target for target, _ in rest]))
        self.settle()

    def begin_next(self) -> None:
        if self._early is not None:
            self._early.begin()

    def settle(self) -> None:
        if self._early is not None:
            self._early.settle()
        for ticket in self._unended:
            ticket.wait()
        self._unended.clear()


class _EarlyCopies:
    """Copies pieces of the gradients to the session's memory while the backward pass is still running.

    A piece is copied twice: first on the device, to memory that no script can reach, and from there to the host. The
    checksum is that of the first copy, so it belongs to what the host receives, whatever the script does meanwhile.

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
        # Copies on the device: one for each dtype is enough, because the queue carries out one copy after another.
        self._between = {
            dtype: max((each for each in self._sources if each.dtype == dtype), key=torch.numel).clone()
            for dtype in {each.dtype for each in self._sources}
        }
        self._sums = torch.zeros(len(self._pieces), 2, dtype=torch.int64, device=device)
        self._sum = _Checksum(max(map(torch.numel, self._sources)), device)
        self._lock = threading.Lock()  # gradients become ready on a thread of autograd
        self._unended: list[Ticket] = []
        self._pause = 0  # the number of iterations for which early copies are still suspended
        self._next_pause = 1
        self.begin()

    def begin(self) -> None:
        """Prepare for the gradients of another push."""
        with self._lock:
            # For each piece, the parameters whose gradients have not been computed yet.
            self._missing = [set(piece.parameters) for piece in self._pieces]
            self._copies: dict[int, Ticket] = {}  # the pieces that have been copied
            self._arriving: list[int] = []  # those whose copies may not have ended, in their order
            # For each parameter, the pieces that have not arrived.
            self._outstanding = {index: len(numbers) for index, numbers in self._pieces_of.items()}

    def ready(self, index: int) -> list[int]:
        """Copy the pieces that are complete with this gradient. Return the parameters that have arrived now."""
        if self._pause:
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
            if changed:
                self._pause = self._next_pause
                self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
            else:
                self._next_pause = 1 if early else self._next_pause
                self._pause = max(0, self._pause - 1)
            late = [number for number in needed if number not in self._copies or number in changed]
        return [(self._targets[number], self._sources[number]) for number in late]

    def settle(self) -> None:
        """Wait for the copies to the host."""
        with self._lock:
            unended, self._unended = self._unended, []
        for ticket in unended:
            ticket.wait()

    def _copy(self, number: int) -> None:
        source, target, checksum = self._sources[number], self._targets[number], self._sums[number]
        between = self._between[source.dtype][: source.numel()]

        def pass_on() -> None:
            checksum.copy_(self._sum.of(between))
            target.copy_(between, non_blocking=True)

        self._queue.submit(lambda: between.copy_(source), writes=[between])
        ticket = self._queue.submit(pass_on, writes=[checksum, target])
        self._copies[number] = ticket
        self._unended.append(ticket)
        self._arriving.append(number)

    def _arrived(self) -> list[int]:
        arrived = []
        while self._arriving and self._copies[self._arriving[0]].done():
            for index in self._pieces[self._arriving.pop(0)].parameters:
                self._outstanding[index] -= 1
                if not self._outstanding[index]:
                    arrived.append(index)
        return arrived

    def _changed(self, early: Sequence[int]) -> set[int]:
        """Return those of some pieces whose gradients have changed since they were copied."""
        if not early:
            return set()
        now = torch.stack([self._sum.of(self._sources[number]) for number in early])
        self._copies[early[-1]].order()  # and so for the earlier ones
        equal = (self._sums[early] == now).all(dim=1).tolist()  # waits until the gradients have been computed
        return {number for number, unchanged in zip(early, equal, strict=True) if not unchanged}


class _Checksum:
    """Computes checksums on a device: sums of the bits, which do not depend on the order of the summation.

    The second sum weights each element by its place, so that it notices if elements are exchanged.
    """

    def __init__(self, longest: int, device: torch.device) -> None:
        self._weights = torch.arange(1, 2 * longest, 2, dtype=torch.int32, device=device)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the two checksums of a flat tensor of at most `longest` elements."""
        integers = bits(values)
        weighted = integers * self._weights[: integers.numel()].to(integers.dtype)
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

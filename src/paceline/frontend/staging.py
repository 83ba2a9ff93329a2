"""The stager: where a worker's parameters and gradients are, and how they get to and from the session's memory.

A session has its weights and gradients in flat vectors in the memory of the host. On the CPU, the parameters and
their gradients are views of these vectors (`Aliasing`). On another device, they are views of flat vectors on the
device, which are copied to and from those of the session (`Copying`). This module is the only place where weights and
gradients change memory.

`Copying` copies gradients while the backward pass is still running (see `early_copies.py`). Weights are copied to the
device in pieces, while the rest of a pull still travels, and what remains after it. The device waits for these copies
before it computes anything else, and the host waits for them before the session uses its memory again
(`Callbacks.before_exchange`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol
from weakref import finalize

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..core.protocol.layout import Layout, Range, dtype_of, item_bytes, of_set
from ..shard.vectors import Vectors, parameter_views, torch_dtype
from .device_queue import DeviceQueue, Ticket, queue_of
from .early_copies import EarlyCopies
from .session import Session

__all__ = ["Aliasing", "Copying", "Stager", "is_at", "move_into", "point_at", "stager_of"]

PIECE_BYTES = 4 * 1024 * 1024
"""Minimum size, in bytes, of a piece of the weights that is copied while later ones still travel."""

LARGE_BYTES = 2 * 1024 * 1024
"""Minimum size, in bytes, of a gradient that is copied with `memmove`."""


class Stager(Protocol):
    """Moves weights and gradients between a worker's parameters and its session.

    Attributes:
        weights: the flat vectors of which the parameters are views.
        gradients: the flat vectors for their gradients.
        copies_early: True if `gradient_ready` copies gradients.
    """

    weights: Vectors
    gradients: Vectors
    copies_early: bool

    def follow(self, weights: Vectors) -> None:
        """Use these vectors as those of the session, which has moved its weights."""
        ...

    def weights_pulled(self, set_index: int | None) -> None:
        """Copy the session's weights to the parameters; those of one parameter set if `set_index` is not None."""
        ...

    def weights_edited(self) -> bool | None:
        """Return True if the script has changed `weights` since the last pull, None if this is not known."""
        ...

    def restore_weights(self) -> bool:
        """Undo all changes by the script to `weights` since the last pull. Return False if this is not possible."""
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

    def keep_close(self) -> None:
        """Return when everything has been computed that the script had started before the call before this one.

        What a device has to compute cannot be taken back. So a computation that may be aborted calls this again and
        again.
        """
        ...

    def deliver(self, set_index: int | None) -> None:
        """Return when the session's vectors contain `gradients`; those of one parameter set if it is not None."""
        ...

    def begin_next(self) -> None:
        """Record that the gradients from now on belong to the next push."""
        ...


def stager_of(layout: Layout, session: Session, device: torch.device) -> Stager:
    """Return the stager for parameters on a device."""
    if device.type == "cpu":
        return Aliasing(session)
    return Copying(layout, session, device, queue_of(device))


class Aliasing:
    """The stager of parameters that are views of the session's vectors."""

    copies_early = False

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

    def restore_weights(self) -> bool:
        return self._session.restore_weights()

    def true_values(self, index: int) -> torch.Tensor | None:
        return None

    def gradient_ready(self, index: int) -> Sequence[int]:
        return (index,)

    def await_gradients(self) -> None:
        pass

    def keep_close(self) -> None:
        pass

    def deliver(self, set_index: int | None) -> None:
        pass

    def begin_next(self) -> None:
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
        self._early = EarlyCopies(self.gradients, self._sent, layout, queue) if queue.overlaps else None
        self.copies_early = queue.overlaps
        self._session = session
        finalize(self, queue.register(list(self._sent.values()), only_read=False))
        self._unregister_weights: finalize[..., Copying] | None = None
        self.follow(session.weights)
        session.callbacks.before_exchange = queue.drain
        session.callbacks.on_arrived = self._weights_arrived

    def follow(self, weights: Vectors) -> None:
        self._queue.drain()
        if self._unregister_weights is not None:
            self._unregister_weights()
            self._unregister_weights = None
        memory = list(weights.values())
        self._unregister_weights = finalize(self, self._queue.register(memory, only_read=True))
        self._true = weights
        self._true_views = parameter_views(self._layout, weights)
        # vector, and index of the first element of a part that one shard sends -> index of the first of its elements
        # that has not been copied although those before it have arrived
        self._copied: dict[tuple[str, int], int] = {}
        self.weights_pulled(None)

    def weights_pulled(self, set_index: int | None) -> None:
        vectors = of_set(self.weights, set_index)
        self._copy([piece for name in vectors for piece in self._rest_of(name)]).order()
        self._copied.clear()

    def _weights_arrived(self, name: str, start: int, stop: int) -> None:
        copied = self._copied.get((name, start), start)
        if (stop - copied) * item_bytes(name) >= PIECE_BYTES:
            self._copy([(name, copied, stop)])
            self._copied[name, start] = stop

    def _rest_of(self, name: str) -> list[Range]:
        """Return the ranges of a vector of the weights that have not been copied since the last pull began."""
        copied = sorted((start, stop) for (other, start), stop in self._copied.items() if other == name)
        starts = [0, *(stop for _, stop in copied)]
        stops = [*(start for start, _ in copied), len(self.weights[name])]
        return [(name, start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]

    def _copy(self, ranges: Sequence[Range]) -> Ticket:
        """Copy ranges of the session's weights to the device."""
        targets = [self.weights[name][start:stop] for name, start, stop in ranges]
        sources = [self._true[name][start:stop] for name, start, stop in ranges]

        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=self._queue.overlaps)

        return self._queue.submit(copy, writes=targets)

    def weights_edited(self) -> bool | None:
        return None

    def restore_weights(self) -> bool:
        self.weights_pulled(None)
        return True

    def true_values(self, index: int) -> torch.Tensor | None:
        return self._true_views[index]

    def gradient_ready(self, index: int) -> Sequence[int]:
        return () if self._early is None else self._early.ready(index)

    def await_gradients(self) -> None:
        self._queue.wait()

    def keep_close(self) -> None:
        self._queue.keep_close()

    def deliver(self, set_index: int | None) -> None:
        vectors = of_set(self.gradients, set_index)
        if self._early is None:
            rest = [(self._sent[name], vector) for name, vector in vectors.items()]
        else:
            rest = self._early.rest(vectors)

        def copy() -> None:
            for target, source in rest:
                target.copy_(source, non_blocking=self._queue.overlaps)

        self._queue.submit(copy, writes=[target for target, _ in rest])
        self._queue.drain()

    def begin_next(self) -> None:
        if self._early is not None:
            self._early.begin()


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

"""Copies between the memory of a device and that of the host, in the order in which they are needed.

A device computes asynchronously: a call returns before the device has begun. So a copy must begin after the device has
computed the values that are copied, and each computation that needs the result must wait for the copy. A `DeviceQueue`
carries out copies in the order in which they are submitted. Each copy begins after all computations that were started
before the copy was submitted. Later computations may overlap with the copy, unless they are told to wait.

Workers whose parameters are on a device copy weights and gradients in this way (see `train.weights`), and so do servers
whose optimizers make their steps on a device: see `SliceOnDevice`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import finalize

import torch

from .vectors import Vectors

log = logging.getLogger("paceline.device")

READ_WRITE, READ_ONLY = 0, 8  # cudaHostRegisterDefault, cudaHostRegisterReadOnly


class Ticket(Protocol):
    """Work that was submitted to a `DeviceQueue`."""

    def done(self) -> bool:
        """Return True if the work has ended."""

    def order(self) -> None:
        """Let all computations on the device that are started after this call wait for the end of the work."""


class DeviceQueue(Protocol):
    """Carries out copies on a device, one after another.

    Attributes:
        overlaps: True if copies run at the same time as computations. Otherwise, a copy has ended when `submit`
            returns.
    """

    overlaps: bool

    def submit(self, work: Callable[[], object], *, writes: Sequence[torch.Tensor]) -> Ticket:
        """Carry out a function that only starts copies and computations on the device.

        The work begins after all computations that were started before this call, and after all work submitted before.

        Args:
            work: the function.
            writes: the memory that the function writes. Before `drain`, the host may not use this memory, and may not
                write memory that the function reads. Before `Ticket.order`, the device may not use this memory for
                other work.
        """

    def drain(self) -> None:
        """Wait on the host until everything that was submitted has ended."""

    def wait(self) -> None:
        """Wait on the host until all computations that were started before this call have ended."""

    def keep_close(self) -> None:
        """Wait on the host until all computations that were started before the previous call of this method have ended.

        While a computation may be aborted, this method is called at each hook. So only little work is queued on the
        device at the time of an abort: work that a device has been given cannot be taken back.
        """

    def register(self, memory: Sequence[torch.Tensor], *, only_read: bool) -> Callable[[], None]:
        """Let the device copy from and to this memory of the host without the host's help, where that is possible.

        Args:
            memory: the memory.
            only_read: True if the device only reads the memory, which may then be read-only.

        Returns:
            A function that ends the registration. It must be called before the memory is freed.
        """


def queue_of(device: torch.device) -> DeviceQueue:
    """Return a queue for a device. If the device's backend in torch has no streams, copies do not overlap."""
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
        # marks the last computation that was started before the last call of `keep_close`
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
            log.warning("some memory of the host cannot be locked for a device, so copies take longer")

        def unregister(memory: Sequence[torch.Tensor] = memory) -> None:  # the default keeps the memory alive
            for address, _ in registered:
                torch.cuda.cudart().cudaHostUnregister(address)

        return unregister

    def _lock(self, address: int, size_bytes: int, way: int) -> bool:
        if int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, way)) == 0:
            return True
        # CUDA keeps the error, and torch would find it after an unrelated kernel. So let torch raise and clear the
        # error now.
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


# -- The weights and the gradient of a slice on a device, on which an optimizer makes its steps ---------------


class SliceOnDevice:
    """A copy of a slice's weights on a device, and memory on this device for a gradient.

    The server sends the weights from the memory of the host. `publish` copies the weights to this memory when the step
    on the device has ended. When anything else has changed the weights on the host, `bring_weights` must be called.

    Args:
        weights: the slice's vectors in the memory of the host.
        gradient: the vectors in which the host sums up gradients.
        device: the device.
        queue: carries out the copies. Default: the device's own queue.

    Attributes:
        weights: the vectors of the weights on the device.
        gradient: the vectors of the gradient on the device.
    """

    def __init__(
        self, weights: Vectors, gradient: Vectors, device: torch.device, queue: DeviceQueue | None = None
    ) -> None:
        self.weights = {name: torch.empty_like(each, device=device) for name, each in weights.items()}
        self.gradient = {name: torch.empty_like(each, device=device) for name, each in weights.items()}
        self._queue = queue_of(device) if queue is None else queue
        self._on_host = weights
        memory = [*weights.values(), *gradient.values()]
        finalize(self, self._queue.register(memory, only_read=False))
        self.bring_weights()

    def bring_weights(self) -> None:
        """Copy the weights to the device, and wait for the copy. The host may then change its weights again."""
        self._copy(self.weights, self._on_host)
        self._queue.drain()

    def bring(self, gradient: Vectors) -> Vectors:
        """Copy a gradient to the device, and return the copy. The host must not change the source before `publish`."""
        self._copy(self.gradient, gradient).order()
        return self.gradient

    def publish(self) -> None:
        """Copy the weights to the host when the computations on the device have ended, and wait for the copy."""
        self._copy(self._on_host, self.weights)
        self._queue.drain()

    def _copy(self, targets: Vectors, sources: Vectors) -> Ticket:
        def copy() -> None:
            for name, target in targets.items():
                target.copy_(sources[name], non_blocking=self._queue.overlaps)

        return self._queue.submit(copy, writes=[*targets.values()])

"""A double of a device with streams: its memory is on the CPU, but its copies are late.

A stager without a single wait would pass on a device whose copies block. Here, nothing has been copied before
somebody waits for it: until then, the memory that a copy writes contains NaN. A copy reads its source at a random
time between `submit` and the wait, so it finds what was written there meanwhile. If memory is written from which the
device still copies, the wait raises an error, because the device might have read the memory at another time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from paceline.shard.vectors import bits
from paceline.train import device as early_copies
from paceline.train import training
from paceline.train import weights as staging
from paceline.train.weights import Copying, Stager

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.core.layout import Layout
    from paceline.train.session import Session

__all__ = ["DelayedQueue", "on_the_double"]


class DelayedQueue:
    """Carries out what is submitted in its order, at random times.

    Args:
        seed: seed of these times.
        host: the memory of the host.
    """

    overlaps = True

    def __init__(self, seed: int, host: Mapping[str, torch.Tensor]) -> None:
        self._random = random.Random(seed)
        self._submitted: list[_Submitted] = []
        self.registered: set[int] = set()  # the addresses of the memory that is registered
        self._host = set(map(_place_of, host.values()))
        # the addresses of the memory of the device that is written with what comes from the host
        self._from_host: set[int] = set()

    def submit(self, work: Callable[[], object], *, writes: Sequence[torch.Tensor]) -> _Submitted:
        self.run_on()
        submitted = _Submitted(self, work, writes, to_host=any(map(self.is_of_host, writes)))
        submitted.reads_host = not self._from_host.isdisjoint(map(_place_of, writes))
        self._submitted.append(submitted)
        submitted.hide()
        self.run_on()
        return submitted

    def drain(self) -> None:
        if self._submitted:
            self.run_until(self._submitted[-1], for_host=True)

    def wait(self) -> None:
        """The CPU computes at once."""

    def keep_close(self) -> None:
        """The CPU computes at once."""

    def register(self, memory: Sequence[torch.Tensor], *, only_read: bool) -> Callable[[], None]:
        """Count the memory as registered until the result is called."""
        places = [each.data_ptr() for each in memory]
        assert not self.registered & set(places)
        self.registered.update(places)
        return lambda: self.registered.difference_update(places)

    def run_on(self) -> None:
        """Let the device carry out some of what has been submitted, as it does by itself."""
        for submitted in self._submitted:
            if submitted.result is None:
                if self._random.random() < 0.75:
                    return
                submitted.carry_out()

    def run_until(self, last: _Submitted, *, for_host: bool) -> None:
        """Let the device carry out everything up to this, and show the results to the device, or to the host, too."""
        if last.shown:
            return
        for submitted in self._submitted:
            if submitted.result is None:
                submitted.carry_out()
            # Only when the host has waited, it may write its memory.
            if for_host if submitted.reads_host else not submitted.ordered:
                submitted.require_same_source()
            submitted.show(for_host=for_host)
            if submitted is last:
                break
        self._submitted = [each for each in self._submitted if not each.shown]

    def is_of_host(self, memory: torch.Tensor) -> bool:
        """Return True if this is memory of the host."""
        return _place_of(memory) in self._host

    def note_from_host(self, memory: Sequence[torch.Tensor]) -> None:
        """Record that what is written to this memory of the device comes from the host."""
        self._from_host.update(map(_place_of, memory))

    def before(self, submitted: _Submitted) -> list[_Submitted]:
        """Return what was submitted before this and has been carried out, but is not shown completely."""
        return self._submitted[: self._submitted.index(submitted)]


class _Submitted:
    """A ticket.

    Attributes:
        to_host: True if memory of the host is written.
        reads_host: True if memory of the host is known to be read.
        result: the content of the memory that is written, once it has been written.
        ordered: True if the device has waited for it, so that the memory of the device contains the result.
        shown: True if this memory contains the result.
    """

    def __init__(
        self,
        queue: DelayedQueue,
        work: Callable[[], object],
        writes: Sequence[torch.Tensor],
        *,
        to_host: bool,
    ) -> None:
        self._queue = queue
        self._work = work
        self._writes = writes
        self.to_host = to_host
        self.reads_host = False
        self.ordered = False
        self.result: list[torch.Tensor] | None = None
        self.shown = False

    def done(self) -> bool:
        self._queue.run_on()
        if self.result is not None:
            self._queue.run_until(self, for_host=True)
        return self.shown

    def order(self) -> None:
        if not self.to_host:  # only what comes from the host is awaited by the device alone
            self.reads_host = True
            self._queue.note_from_host(self._writes)
        self._queue.run_until(self, for_host=False)

    def hide(self) -> None:
        """Fill the memory with NaN, or with the largest number if it contains integers."""
        for each in self._writes:
            _overwrite(each, torch.full_like(bits(each), -1))

    def carry_out(self) -> None:
        earlier = self._queue.before(self)  # the device sees its own results, in the order of the queue
        memory = [each for submitted in [*earlier, self] for each in submitted._writes]
        hidden = [each.clone() for each in memory]
        for submitted in earlier:
            submitted._write(lambda each: True)
        self._work()
        self.result = [each.clone() for each in self._writes]
        for each, content in zip(memory, hidden, strict=True):
            _overwrite(each, bits(content))

    def show(self, *, for_host: bool) -> None:
        """Show the results in the memory of the device and, if `for_host` is True, in that of the host."""
        self._write(lambda each: self._queue.is_of_host(each) if self.ordered else True, for_host=for_host)
        self.ordered = True
        self.shown = for_host

    def _write(self, chosen: Callable[[torch.Tensor], bool], *, for_host: bool = True) -> None:
        assert self.result is not None
        for each, result in zip(self._writes, self.result, strict=True):
            if chosen(each) and (for_host or not self._queue.is_of_host(each)):
                _overwrite(each, bits(result))

    def require_same_source(self) -> None:
        """Check that what was read is as it was when it was read."""
        assert self.result is not None
        now = [each.clone() for each in self._writes]
        self._work()
        again = [each.clone() for each in self._writes]
        for each, content in zip(self._writes, now, strict=True):
            _overwrite(each, bits(content))
        for result, other in zip(self.result, again, strict=True):
            assert torch.equal(bits(result), bits(other)), (
                "memory was written from which the device still copies"
            )


def _place_of(memory: torch.Tensor) -> int:
    """Return the address of the vector to which memory belongs."""
    return memory.untyped_storage().data_ptr()


def _overwrite(tensor: torch.Tensor, content: torch.Tensor) -> None:
    """Set the bits of a tensor without a change of its version, as a device does."""
    with _unsafe_preserve_version_counter(tensor):
        bits(tensor).copy_(content)


@contextmanager
def on_the_double(seed: int, piece_bytes: int) -> Iterator[list[DelayedQueue]]:
    """Return a context in which parameters on the CPU count as those of a device whose copies are late.

    Returns:
        The queues that have been created.
    """
    created: list[DelayedQueue] = []

    def stager_of(layout: Layout, session: Session, device: torch.device) -> Stager:
        assert device.type == "cpu"
        queue = DelayedQueue(seed + len(created), session.gradients)
        created.append(queue)
        return Copying(layout, session, device, queue)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "stager_of", stager_of)
        for module in (early_copies, staging):
            patch.setattr(module, "PIECE_BYTES", piece_bytes)
        patch.setattr(early_copies, "PIECES_BETWEEN", 2)
        yield created

"""The order of the items in one epoch, which every worker computes for itself.

A worker draws the order from the loader's own sampler, with random generators that are seeded from the run's seed and
the number of the epoch. So all workers see the same order. The order is drawn lazily: it may be much longer than the
part of it that is used.

Several threads may draw orders; they take turns, because the samplers draw from the generators of the process. A
script that draws random numbers on one thread while another thread iterates over a distributed loader must give the
loader a generator of its own.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

import torch

from ..shard.buffer_bytes import lent_bytes
from .generator_states import GeneratorStates, generators_lock

__all__ = ["EpochOrder"]

# Items are drawn in chunks of this size, because saving the states of the generators takes time.
CHUNK = 1024
DIGESTED = 256  # number of items at the beginning of the order that `digest` covers
MOST_DIGESTED_BYTES = 1 << 16  # maximum number of bytes of each tensor that `digest` covers


class EpochOrder:
    """The order of one epoch.

    Args:
        begin: function that returns a new iterator over the items, for example `iter(sampler)`.
        seed: seed for the random generators during the iteration.
        chunk: number of items that are drawn at a time.

    Attributes:
        start: the first position whose item is kept. Asking for an earlier position begins a new iteration.
    """

    def __init__(self, begin: Callable[[], Iterable[Any]], seed: int, chunk: int = CHUNK) -> None:
        self._begin = begin
        self._seed = seed
        self._chunk = chunk
        self._digest: str | None = None  # None if it has not been computed
        self._iterator: Iterator[Any] | None
        self._drawn: list[Any]
        self._restart()

    def items(self, start: int, size: int) -> list[Any]:
        """Return the items at the positions from `start` on: `size` items, or fewer at the end of the order."""
        self._reach(start, start + size)
        begin = start - self.start
        return self._drawn[begin : begin + size]

    def ends_before(self, start: int, stop: int) -> int | None:
        """Return the size of the order if it is smaller than `stop`, else None.

        Items before position `start` are no longer kept.
        """
        self._reach(start, stop)
        size = self.start + len(self._drawn)
        return size if size < stop else None

    @property
    def content(self) -> dict[str, Any]:
        """How far the order has been drawn: the position, the generators there, and the hash of the first items.

        The state of what is iterated over is not included.
        """
        return {
            "position": self.start + len(self._drawn),
            "generators": self._generators.content,
            "digest": self._digest,
        }

    def go_on(self, content: Mapping[str, Any]) -> None:
        """Go on from how far an equal order has been drawn. The next iterator must already go on from there."""
        self._drawn, self.start, self._digest = [], content["position"], content["digest"]
        with generators_lock:
            outside = GeneratorStates()
            self._iterator = iter(self._begin())  # draws nothing that counts
            self._generators = GeneratorStates.of(content["generators"])
            outside.give_back()

    def digest(self) -> str:
        """Return a hash of the first items; "" if there are items of a type that cannot be hashed reliably."""
        if self._digest is None:
            self._digest = self._hash()
        return self._digest

    def _hash(self) -> str:
        found = blake2b(digest_size=8)
        try:
            for item in self.items(0, min(DIGESTED, self._chunk)):
                _digest(item, found.update)
        except TypeError:
            return ""
        return found.hexdigest()

    def _reach(self, start: int, stop: int) -> None:
        """Draw the items up to, but not including, position `stop`, and discard those before `start`."""
        if self.start <= start and stop <= self.start + len(self._drawn):
            return
        if start < self.start:
            self._restart()
        while self.start + len(self._drawn) < stop and not self._ended:
            surplus = min(start - self.start, len(self._drawn))
            del self._drawn[:surplus]
            self.start += surplus
            self._draw()

    def _restart(self) -> None:
        self._iterator = None
        with generators_lock:
            # The states with which the iteration continues.
            self._generators = GeneratorStates.seeded(self._seed)
        self.start = 0  # position of the first item in `_drawn`
        self._drawn = []
        self._ended = False

    def _draw(self) -> None:
        """Draw the next chunk of items, using the saved generator states of this order."""
        with generators_lock:
            outside = GeneratorStates()
            self._generators.give_back()
            try:
                if self._iterator is None:
                    self._iterator = iter(self._begin())
                drawn = list(itertools.islice(self._iterator, self._chunk))
                self._generators = GeneratorStates()
            finally:
                outside.give_back()
        self._drawn += drawn
        self._ended = len(drawn) < self._chunk


def _digest(item: object, update: Callable[[bytes], object]) -> None:
    """Pass the content of an item to a hash function; raise `TypeError` if its type is not supported."""
    numpy = sys.modules.get("numpy")
    match item:
        case bool() | int() | float() | str() | bytes() | None:
            update(repr(item).encode())
        case list() | tuple():
            update(b"(")
            for element in item:
                _digest(element, update)
            update(b")")
        case dict():
            for key, element in item.items():
                _digest((key, element), update)
        case torch.Tensor() if not item.is_sparse:
            flat = item.detach().reshape(-1)[: MOST_DIGESTED_BYTES // max(1, item.element_size())]
            update(repr(tuple(item.shape)).encode())
            update(lent_bytes(flat.cpu().contiguous()).tobytes())
        case _ if numpy is not None and isinstance(item, numpy.ndarray | numpy.generic):
            _digest(torch.as_tensor(numpy.asarray(item)), update)
        case _:
            raise TypeError(f"{type(item).__name__} cannot be hashed reliably")

"""Stores the model buffers (such as BatchNorm statistics) that each worker last sent, and pools them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..core.protocol.model_spec import BufferSpec
from .buffer_bytes import checksum, pool

__all__ = ["BufferSlots"]


class BufferSlots:
    """Stores each worker's latest values of the model's buffers.

    Args:
        specs: the buffers of the model.
        first: the initial values of the buffers, which are the same for every worker.

    Attributes:
        added: the initial values of the buffers that were added last, by name.
    """

    def __init__(self, specs: Sequence[BufferSpec], first: Sequence[torch.Tensor]) -> None:
        self._specs = specs
        self._first = {spec.name: tensor for spec, tensor in zip(specs, first, strict=True)}
        self._slots: dict[int, dict[str, torch.Tensor]] = {}
        self.added = dict(self._first)
        self._checksum = -1  # of `added`; -1 if not computed yet

    @property
    def checksum(self) -> int:
        """Checksum of `added`."""
        if self._checksum < 0:
            self._checksum = checksum([*self.added.values()])
        return self._checksum

    def extend(self, specs: Sequence[BufferSpec], added: Mapping[str, torch.Tensor]) -> None:
        """Replace the description of the buffers. `added` maps the name of each new buffer to its initial value.

        A tensor that was a buffer may have become a parameter, and is then no longer described.
        """
        self._specs = specs
        self.added = {spec.name: added[spec.name] for spec in specs if spec.name in added}
        self._checksum = -1
        names = {spec.name for spec in specs}
        first = {**self._first, **added}
        self._first = {name: first[name] for name in first if name in names}
        self._slots = {
            worker: self._first | {name: tensor for name, tensor in slot.items() if name in names}
            for worker, slot in self._slots.items()
        }

    def put(self, worker: int, buffers: Mapping[int, torch.Tensor]) -> None:
        """Replace some of a worker's buffers (index -> tensor), and take ownership of the new tensors."""
        slot = self._slots.setdefault(worker, dict(self._first))
        for index, tensor in buffers.items():
            slot[self._specs[index].name] = tensor

    def pooled(self) -> dict[str, torch.Tensor]:
        """Return the buffers, pooled over the workers that have sent any; if none have, return the initial values."""
        if not self._slots:
            return self._first
        return self._first | pool([self._slots[worker] for worker in sorted(self._slots)])

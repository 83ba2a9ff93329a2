"""What the script of a resumed run gets back, until it has reached the place where the earlier run was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..core.protocol.model_spec import BufferSpec
from .of_session import OfSession

__all__ = ["Place", "Resumption", "resumption_of"]


class Place(NamedTuple):
    """The place at which a script asks for its next batch.

    Attributes:
        stream: name of the stream of epochs from which the batch is; "" if the script has no distributed loader.
        epoch: number of the epoch in this stream.
    """

    stream: str
    epoch: int


class Resumption:
    """What a script gets back in a worker of a resumed run.

    Attributes:
        own: what the script of the worker with the same index had; None if there is nothing to restore, or not any
            more. See `worker_state.capture`.
        tracked: the states of the objects that the script tracked, as bytes, as long as `own` is there.
    """

    def __init__(self) -> None:
        self.own: Mapping[str, Any] | None = None
        self.tracked: bytes | bytearray | None = None
        self._buffers: dict[str, torch.Tensor] = {}

    def begin(self, own: Mapping[str, Any], tracked: bytes | bytearray | None) -> None:
        """Take what the script had."""
        self.own, self.tracked, self._buffers = own, tracked, dict(own["buffers"])

    def take_buffers(self, specs: Iterable[BufferSpec]) -> dict[str, torch.Tensor]:
        """Return and forget those of these buffers that the model of this worker had, by name."""
        return {spec.name: self._buffers.pop(str(spec)) for spec in specs if str(spec) in self._buffers}

    def has_reached(self, place: Place) -> bool:
        """Return True if the script is where it was, or further on, and has not got its state back yet."""
        if self.own is None:
            return False
        before = Place(*self.own["place"])
        return place.stream == before.stream and place.epoch >= before.epoch


resumption_of = OfSession(lambda _: Resumption())
"""Returns what the script of a session's worker gets back."""

"""What the script of a resumed run gets back, until it has reached the place where the earlier run was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..core.protocol.model_spec import BufferSpec
from .of_session import OfSession

__all__ = ["Place", "resumption_of"]


class Place(NamedTuple):
    """The place at which a script asks for its next batch.

    Attributes:
        stream: name of the stream of epochs from which the batch is; "" if the script has no distributed loader.
        epoch: number of the epoch in this stream.
    """

    stream: str
    epoch: int


class _Resumption:
    """What a script gets back in a worker of a resumed run.

    Attributes:
        begun: True once the state has been asked for.
        state: what the script held; None if there is nothing to restore, or not any more. See `worker_state`.
        restored: the state that was put back last, until the script gets a batch; None if there is none.
        repeats: True while the script goes through a batch only to have its variables again. See `repeated`.
        buffers: the buffers that the model of this worker had, by their descriptions, until training begins.
    """

    def __init__(self) -> None:
        self.begun = False
        self.state: Mapping[str, Any] | None = None
        self.restored: Mapping[str, Any] | None = None
        self.repeats = False
        self.buffers: Mapping[str, torch.Tensor] = {}

    def take_buffers(self, specs: Iterable[BufferSpec]) -> dict[str, torch.Tensor]:
        """Return and forget those of these buffers that the model of this worker had, by name."""
        had, self.buffers = self.buffers, {}
        return {spec.name: had[str(spec)] for spec in specs if str(spec) in had}

    def lies_beyond(self, place: Place) -> bool:
        """True if the script was in a later epoch of the same stream when it held the state."""
        return (
            self.state is not None
            and place.stream == self.state["place"][0]
            and place < Place(*self.state["place"])
        )

    def take_at(self, place: Place) -> Mapping[str, Any] | None:
        """Return and forget the state if the script is where it was, or further on; else None."""
        if self.state is None:
            return None
        before = Place(*self.state["place"])
        if place.stream != before.stream or place.epoch < before.epoch:
            return None
        state, self.state = self.state, None
        return state


resumption_of = OfSession(lambda _: _Resumption())
"""Returns what the script of a session's worker gets back."""

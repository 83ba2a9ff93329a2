"""What a run with `--sync auto` observes of its workers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ....sync.events import Number
from .protocol_table import Message, sent

__all__ = ["Cycle", "PacesObserved"]

Cycle = tuple[Annotated[int, msgspec.Meta(ge=-1)], Annotated[float, msgspec.Meta(ge=0.0)]]
"""The number of samples of a push, -1 if it is unknown, and the time in seconds of the cycle that it ends."""


@sent("server", to="coordinator", during="serving")
class PacesObserved(Message, frozen=True, tag=True):
    """The server of shard 0 has observed some cycles of the workers. See `core.sync.paces`.

    Attributes:
        cycles: (worker, its latest cycles) for each worker with cycles that have not been reported before.
        pushes: number of pushes with a gradient that shard 0 has received since the run began.
        batches: number of these pushes that were computed from a batch of their own.
        samples: number of samples in the pushes that shard 0 has received and not dropped.
        now_s: time of the last of these pushes, in seconds.
        clips: True if the script clips the joint gradient, which not all sync models allow.
    """

    cycles: tuple[tuple[Number, tuple[Cycle, ...]], ...]
    pushes: Number
    batches: Number
    samples: Number
    now_s: float
    clips: bool = False

"""Messages of barriers and reductions, and of the pauses that they cause."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ....sync.events import Number
from ..model_spec import ModelSpec
from .connection import MOST_WORDS
from .protocol_table import Message, sent

__all__ = [
    "Combined",
    "Contributed",
    "Paused",
    "Resumed",
    "StandInAllowed",
    "StoodIn",
]


@sent("worker", to="coordinator")
class Contributed(Message, frozen=True, tag=True):
    """A worker's script has called `paceline.barrier` or `paceline.reduce`, or has added parameters, and waits.

    See `core.sync.joint_calls` and `core.changes.extension`.

    Attributes:
        call: the call and the structure of its argument, in words; the same in all workers.
        number: the number of such calls that this worker has made, including this one.
        op: "mean" or "sum".
        numbers: the numbers to combine, as native float64; b"" for a barrier.
        weight: the weight of the numbers in a mean.
        may_push: True if the worker may push without a gradient while it waits, so that others need not wait for it.
        model: the extended model, if the script has added parameters; else None.
        since_step: number of earlier such calls since the worker's last step, or since it has begun an epoch.
    """

    call: Annotated[str, msgspec.Meta(max_length=MOST_WORDS)]
    number: Number
    op: Literal["mean", "sum"] = "sum"
    numbers: Annotated[bytes, msgspec.Meta(max_length=2**20)] = b""
    weight: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    may_push: bool = False
    model: ModelSpec | None = None
    since_step: Number = 0

    @property
    def name(self) -> str:
        """A short name for the call, such as "barrier 3"."""
        return f"{self.call.partition('(')[0]} {self.number}"


@sent("worker", to="coordinator", during="training")
class StoodIn(Message, frozen=True, tag=True):
    """In lockstep, a worker has pushed without a gradient for the first time, while its script was not training."""


@sent("coordinator", to="worker")
class StandInAllowed(Message, frozen=True, tag=True):
    """In lockstep, a worker may push without a gradient while it waits in a barrier or a reduction.

    Sent once, when a worker has reported a `StoodIn`: from then on, the workers need not have the same number of
    steps when they make a call.
    """


@sent("coordinator", to="worker")
class Paused(Message, frozen=True, tag=True):
    """The run has too few workers. Begin no further iteration until `Resumed` arrives."""


@sent("coordinator", to="worker")
class Resumed(Message, frozen=True, tag=True):
    """The run has enough workers again, so it continues."""


@sent("coordinator", to="worker")
class Combined(Message, frozen=True, tag=True):
    """All live workers have made a call, so the call ends.

    Attributes:
        numbers: the sum or the mean of the workers' numbers, as native float64.
        refused: the reason why the calls have no result, because the workers' calls differ; else "".
    """

    numbers: bytes = b""
    refused: str = ""

"""What a worker reports of its pushes to the guard of the run, and how the guard lowers the rate of the shards."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ....sync.events import Number
from .protocol_table import Message, sent

__all__ = ["MOST_OBSERVED", "MOST_PARAMETER", "Observation", "PushesObserved", "RateTempered"]

MOST_OBSERVED = 256
"""Maximum number of observations in one report."""


MOST_PARAMETER = 1024
"""Maximum length of the name of a parameter in an observation. Longer names are cut off."""


class Observation(msgspec.Struct, frozen=True, array_like=True):
    """What a worker has seen of one of its pushes. See `paceline.core.oversight.guard`.

    Attributes:
        updates: number of updates in the weights from which the gradient was computed, at shard 0.
        loss: loss of the iteration, which may be NaN or inf; None if the script has passed none.
        gradient: L2 norm of the worker's own gradient; NaN or inf if an element is. None if there is no gradient.
        weights: L2 norm of a sample of the weights from which the gradient was computed, scaled up to all weights;
            NaN or inf if an element of the sample is.
        parameter: name of the first parameter whose gradient contains NaN or inf; "" if there is none.
        set_index: the parameter set that is pushed.
    """

    updates: Number
    loss: float | None = None
    gradient: float | None = None
    weights: float | None = None
    parameter: Annotated[str, msgspec.Meta(max_length=MOST_PARAMETER)] = ""
    set_index: Number = 0


@sent("worker", to="coordinator", during="training")
class PushesObserved(Message, frozen=True, tag=True):
    """What a worker has seen of its latest pushes, in order."""

    observed: Annotated[tuple[Observation, ...], msgspec.Meta(max_length=MOST_OBSERVED)]


@sent("coordinator", to="server", during="serving")
class RateTempered(Message, frozen=True, tag=True):
    """The factor by which all shards multiply the learning rate from now on. See the event of the same name."""

    factor: float

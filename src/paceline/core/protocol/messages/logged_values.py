"""What a worker reports of the metrics that its script has logged."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ....sync.events import Number
from .protocol_table import Message, sent

__all__ = ["LONGEST_NAME", "MOST_LOGGED", "LoggedValue", "MetricsLogged", "Source"]

LONGEST_NAME = 100
"""Maximum length of the name of a metric, in characters."""

MOST_LOGGED = 1000
"""Maximum number of values in one report."""

Source = Literal["script", "closure", "guess"]
"""Where a value comes from, the best source first: the script has logged it, a closure has returned it, or it is the
tensor on which the script has called `backward()`."""


class LoggedValue(msgspec.Struct, frozen=True, array_like=True):
    """The mean of what a script has logged under one name, at one progress of the job, for one push.

    Attributes:
        name: name of the metric.
        value: the mean.
        weight: its weight in a mean over the workers: the number of samples of the push.
        count: number of values that were logged.
        age_s: seconds since the last of them was logged, so that no two clocks are compared.
        samples: number of samples that all workers together had used by then; 0 if unknown.
        updates: number of updates by then.
        source: where the values come from.
        evaluating: True if they were logged inside `paceline.evaluating()`.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME)]
    value: float
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e15)]
    count: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    age_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    samples: Number
    updates: Number
    source: Source = "script"
    evaluating: bool = False


@sent("worker", to="coordinator")
class MetricsLogged(Message, frozen=True, tag=True):
    """What the script of a worker has logged since the worker's last report."""

    values: Annotated[tuple[LoggedValue, ...], msgspec.Meta(max_length=MOST_LOGGED)]

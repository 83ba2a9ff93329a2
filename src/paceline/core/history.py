"""The metrics of a job over its progress: what scripts have logged, merged over the workers, in bounded memory.

A metric is a name and a series of points. There are two kinds:

    mean    logged by all workers, such as the training loss. A point is the mean of the values that were logged
            within a bucket of the job's progress, weighted by their numbers of samples
    point   logged by one worker only at a time, such as the accuracy on the test data. Points are not merged

A bucket is a span of the job's progress, which is the number of samples used by all workers together; of updates, if
the numbers of samples are unknown. It is not a span of time, because workers are not equally fast. If a metric has
more than `MOST_BUCKETS` buckets, all buckets become twice as wide.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

__all__ = ["LONGEST_NAME", "MOST_BUCKETS", "MOST_METRICS", "Metric", "MetricPoint"]

MOST_BUCKETS = 2000
"""Maximum number of points of a metric."""

MOST_METRICS = 200
"""Maximum number of metrics of a job."""

LONGEST_NAME = 100
"""Maximum length of the name of a metric, in characters."""


class MetricPoint(msgspec.Struct, frozen=True):
    """One point of a metric. One line of `metrics.jsonl` is such a point, with its `name`.

    Attributes:
        time_s: time of the last value in the bucket, in seconds since the run began.
        samples: number of samples that all workers together had used by then; 0 if unknown.
        updates: number of updates by then.
        value: the mean of the values, weighted by their samples. May be NaN or inf.
        weight: sum of these weights.
        count: number of values.
        worker: the worker, for a metric of the kind "point"; -1 for a mean over the workers.
    """

    time_s: float
    samples: int
    updates: int
    value: float
    weight: float = 1.0
    count: int = 1
    worker: int = -1


class Metric(msgspec.Struct, frozen=True):
    """A metric with all its points, in order of the job's progress.

    Attributes:
        name: the name that the script has given to it, or "loss" for what closures return.
        kind: "mean" or "point"; see above.
        points: the points.
        guessed: True if the script has logged nothing, and the values are those of the tensor on which it called
            `backward()`.
    """

    name: Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
    kind: Literal["mean", "point"]
    points: tuple[MetricPoint, ...]
    guessed: bool = False

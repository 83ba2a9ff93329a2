"""The metrics of a job over its progress: what scripts have logged, merged over the workers, in bounded memory.

A metric is a name and a series of points. There are two kinds:

    mean    logged by all workers, such as the training loss. A point is the mean of the values that were logged
            within a bucket of the job's progress, weighted by their numbers of samples
    point   logged by one worker only at a time, such as the accuracy on the test data. The values of different
            workers are not merged

A metric is of the kind "point" as long as each of its values was logged inside `paceline.evaluating()` or by the main
worker of a job with several workers. With the first other value, it becomes a "mean", also of its earlier values. So
the kind depends on the values, but not on the order in which they arrive.

A bucket is a span of the job's progress, which is the number of samples used by all workers together; of updates, if
the numbers of samples are unknown. It is not a span of time, because workers are not equally fast. A bucket is one
sample wide at first, so values merge only if they belong to the same progress. If a metric has more than
`MOST_BUCKETS` points, neighboring buckets merge in pairs: all buckets become twice as wide.

The loss may have several sources: the script logs it, a closure returns it, or it is guessed. Each source has a
series of its own. Only the best one is shown, so a loss never counts twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal, get_args

import msgspec

from ...state import stateful
from ..protocol.messages import LONGEST_NAME, Source

__all__ = [
    "LOSS",
    "MOST_BUCKETS",
    "MOST_METRICS",
    "History",
    "Kind",
    "Metric",
    "MetricHistory",
    "MetricPoint",
]

MOST_BUCKETS = 2000
"""Maximum number of points of a metric."""

MOST_METRICS = 200
"""Maximum number of metrics of a job."""

LOSS = "loss"
"""The metric that is shown as the loss of a worker."""

WIDEST = 2**53
"""Maximum width of a bucket: the largest progress."""

Kind = Literal["mean", "point"]


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
    kind: Kind
    points: tuple[MetricPoint, ...]
    guessed: bool = False

    def __repr__(self) -> str:
        return f"Metric({self.name!r}, {self.kind}, {len(self.points)} points)"

    @property
    def values(self) -> tuple[float, ...]:
        """The value of each point."""
        return tuple(point.value for point in self.points)

    @property
    def samples(self) -> tuple[int, ...]:
        """For each point, the number of samples that all workers together had used; 0 if unknown."""
        return tuple(point.samples for point in self.points)

    @property
    def updates(self) -> tuple[int, ...]:
        """For each point, the number of updates of the weights."""
        return tuple(point.updates for point in self.points)

    @property
    def time_s(self) -> tuple[float, ...]:
        """For each point, the time in seconds since the run began."""
        return tuple(point.time_s for point in self.points)


class MetricHistory(Mapping[str, Metric]):
    """The metrics of a run by their names, in the order in which they were first logged. It cannot be changed.

    Example:
        >>> points = MetricPoint(0.5, 32, 1, 2.5), MetricPoint(1, 64, 2, 1.5)
        >>> history = MetricHistory([Metric("loss", "mean", points)])
        >>> history["loss"].values, history["loss"].samples
        ((2.5, 1.5), (32, 64))
        >>> history
        MetricHistory(loss: 2 points)
    """

    def __init__(self, metrics: Iterable[Metric] = ()) -> None:
        self._metrics = {metric.name: metric for metric in metrics}

    def __getitem__(self, name: str) -> Metric:
        return self._metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def __repr__(self) -> str:
        counts = ((metric.name, len(metric.points)) for metric in self._metrics.values())
        words = (f"{name}: {count} point{'s' * (count != 1)}" for name, count in counts)
        return f"MetricHistory({', '.join(words)})"


@stateful(decides="_names", history="noted _series")
class History:
    """Merges the values that the workers of a job have logged. Other threads may call `metrics` at any time.

    Attributes:
        noted: number of values that were noted.

    Example:
        >>> history = History()
        >>> for worker, value in enumerate((1.0, 4.0)):  # two workers with batches of 10 and 20 samples
        ...     _ = history.note(
        ...         "loss", "mean", value, 10 * (worker + 1), time_s=0.5, samples=0, updates=0, worker=worker
        ...     )
        >>> history.metrics()[0].points
        (MetricPoint(time_s=0.5, samples=0, updates=0, value=3.0, weight=30, count=2, worker=-1),)
    """

    def __init__(self) -> None:
        self.noted = 0
        self._names: set[str] = set()
        self._series: dict[tuple[str, Source], _Series] = {}

    def note(
        self,
        name: str,
        kind: Kind,
        value: float,
        weight: float,
        *,
        time_s: float,
        samples: int,
        updates: int,
        worker: int,
        count: int = 1,
        source: Source = "script",
    ) -> bool:
        """Add a value. Return False, and add nothing, if the job has too many metrics already.

        Args:
            name: name of the metric.
            kind: "point" if the value was logged inside `paceline.evaluating()`, or by the main worker of a job with
                several workers; else "mean".
            value: the value, or the mean of several.
            weight: its weight in a mean; > 0.
            time_s: when it was logged.
            samples: number of samples that all workers together had used by then; 0 if unknown.
            updates: number of updates by then.
            worker: the worker that has logged it.
            count: number of values of which `value` is the mean.
            source: where it comes from.
        """
        if name not in self._names:
            if len(self._names) == MOST_METRICS:
                return False
            self._names.add(name)
        series = self._series.get((name, source))
        if series is None:
            series = self._series[name, source] = _Series()
        owner = worker if kind == "point" else -1
        series.note(kind, MetricPoint(time_s, samples, updates, value, weight, count, owner))
        self.noted += 1
        return True

    def metrics(self) -> tuple[Metric, ...]:
        """Return all metrics, each with the values of its best source."""
        series = self._series.copy()
        found = []
        for name in dict.fromkeys(name for name, _ in series):
            source = next(source for source in get_args(Source) if (name, source) in series)
            kind, points = series[name, source].read()
            found.append(Metric(name, kind, points, source == "guess"))
        return tuple(found)


@stateful(history="_state")
class _Series:
    """The values of one metric from one source.

    A point is immutable, and whatever changes more than one point replaces the whole state. So another thread that
    copies the state finds whole points, and none twice.
    """

    def __init__(self) -> None:
        # the kind, the width of a bucket, and (bucket, worker) -> its point
        self._state: tuple[Kind, int, dict[tuple[int, int], MetricPoint]] = ("point", 1, {})

    def note(self, kind: Kind, point: MetricPoint) -> None:
        if kind == "mean" and self._state[0] == "point":
            _, width, points = self._state
            self._state = (
                "mean",
                width,
                _merged(((bucket, -1), each) for (bucket, _), each in _by_key(points)),
            )
        kept, width, points = self._state
        key = (point.samples or point.updates) // width, point.worker if kept == "point" else -1
        points[key] = _joined(points.get(key), point, key[1])
        if len(points) > MOST_BUCKETS:
            self._widen()

    def read(self) -> tuple[Kind, tuple[MetricPoint, ...]]:
        kind, _, points = self._state
        return kind, tuple(point for _, point in _by_key(points.copy()))

    def _widen(self) -> None:
        """Merge neighboring buckets in pairs, until there are few enough points or only one bucket."""
        kind, width, points = self._state
        factor = 1
        while width * factor < WIDEST:
            factor *= 2
            if len({(bucket // factor, worker) for bucket, worker in points}) <= MOST_BUCKETS:
                break
        merged = _merged(((bucket // factor, worker), point) for (bucket, worker), point in _by_key(points))
        self._state = kind, width * factor, merged


def _by_key(points: Mapping[tuple[int, int], MetricPoint]) -> list[tuple[tuple[int, int], MetricPoint]]:
    """Return the points of a series in the order of their buckets and workers."""
    return sorted(points.items(), key=lambda item: item[0])


def _merged(points: Iterable[tuple[tuple[int, int], MetricPoint]]) -> dict[tuple[int, int], MetricPoint]:
    """Join the points with the same key."""
    merged: dict[tuple[int, int], MetricPoint] = {}
    for key, point in points:
        merged[key] = _joined(merged.get(key), point, key[1])
    return merged


def _joined(one: MetricPoint | None, other: MetricPoint, worker: int) -> MetricPoint:
    """Return the weighted mean of two points."""
    if one is None:
        return other if other.worker == worker else msgspec.structs.replace(other, worker=worker)
    weight = one.weight + other.weight
    return MetricPoint(
        max(one.time_s, other.time_s),
        max(one.samples, other.samples),
        max(one.updates, other.updates),
        # The sum of the products might exceed the largest float.
        one.value * (one.weight / weight) + other.value * (other.weight / weight),
        weight,
        one.count + other.count,
        worker,
    )

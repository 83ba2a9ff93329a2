"""The metrics that scripts have logged, and the times that workers have spent on each activity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec

from ..state import stateful
from ..sync.events import MOST_WEIGHT
from .messages import LONGEST_NAME, MOST_LOGGED, Activity, LoggedValue, MetricsLogged, Source, TimeSpent
from .requests import COORDINATOR, Request, Send

# -- The metrics of a job over its progress: what scripts have logged, merged over the workers, in bounded memory
#
# A metric is a name and a series of points. There are two kinds:
#
#     mean    logged by all workers, such as the training loss. A point is the mean of the values that were logged
#             within a bucket of the job's progress, weighted by their numbers of samples
#     point   logged by only one worker at a time, such as the accuracy on the test data. The values of different
#             workers are not merged
#
# A metric is of the kind "point" as long as each of its values was logged inside `paceline.evaluating()` or
# by the main worker of a job with several workers. With the first value for which neither is true, the metric becomes a
# "mean", which includes the earlier values. So the kind depends on the values, but not on the order in which they
# arrive.
#
# A bucket is a span of the job's progress. The progress is the number of samples used by all workers together or, if
# the numbers of samples are unknown, the number of updates. A bucket is not a span of time, because workers are not
# equally fast. A bucket is one sample wide at first, so values merge only if they were logged at the same progress. If
# a metric has more than `MOST_BUCKETS` points, neighboring buckets merge in pairs: all buckets become twice as wide.
#
# The loss may have several sources: the script logs it, a closure returns it, or it is guessed. Each source
# has a series of its own. Only the series of the best source is shown, so a loss never counts twice.

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
    """One point of a metric. Each line of `metrics.jsonl` contains one such point, and the `name` of the metric.

    Attributes:
        time_s: time of the last value in the bucket, in seconds since the run began.
        samples: number of samples that all workers together had used at this time; 0 if unknown.
        updates: number of updates at this time.
        value: the mean of the values, weighted by their samples. May be NaN or inf.
        weight: sum of the weights of the values.
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
        name: the name that the script has given to the metric, or "loss" for the values that closures return.
        kind: "mean" or "point". See the comment above `MOST_BUCKETS`.
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


@stateful(history="noted _series")
class History:
    """Merges the values that the workers of a job have logged. Other threads may call `metrics` at any time.

    Attributes:
        noted: number of values that were added with `note`.

    Example:
        >>> history = History()
        >>> for worker, value in enumerate((1.0, 4.0)):  # two workers with batches of 10 and 20 samples
        ...     _ = history.note("loss", "mean", MetricPoint(0.5, 0, 0, value, 10 * (worker + 1), worker=worker))
        >>> history.metrics()[0].points
        (MetricPoint(time_s=0.5, samples=0, updates=0, value=3.0, weight=30, count=2, worker=-1),)
    """

    def __init__(self) -> None:
        self.noted = 0
        self._names: set[str] = set()
        self._series: dict[tuple[str, Source], _Series] = {}

    def note(self, name: str, kind: Kind, point: MetricPoint, source: Source = "script") -> bool:
        """Add a value. Return False, and add nothing, if the job has too many metrics already.

        Args:
            name: name of the metric.
            kind: "point" if the value was logged inside `paceline.evaluating()`, or by the main worker of a job with
                several workers; else "mean".
            point: the value, with the worker that has logged it.
            source: where the value comes from.
        """
        if name not in self._names:
            if len(self._names) == MOST_METRICS:
                return False
            self._names.add(name)
        series = self._series.get((name, source))
        if series is None:
            series = self._series[name, source] = _Series()
        series.note(kind, point)
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

    A point is immutable, and a change of more than one point replaces the whole state. So another thread that copies
    the state finds only complete points, and finds each point once.
    """

    def __init__(self) -> None:
        # the kind, the width of a bucket, and (bucket, worker) -> its point
        self._state: tuple[Kind, int, dict[tuple[int, int], MetricPoint]] = ("point", 1, {})

    def note(self, kind: Kind, point: MetricPoint) -> None:
        if kind == "mean" and self._state[0] == "point":
            _, width, points = self._state
            merged = _merged(((bucket, -1), each) for (bucket, _), each in _by_key(points))
            self._state = "mean", width, merged
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


# -- Adds what the scripts have logged to the history of the run ---------------------------------------------


@stateful(fixed="_history")
class MetricIntake:
    """Adds logged values to a history, and warns once if there are too many names.

    Args:
        history: the history of the run.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._crowded = False  # True once the scripts have logged more names than a job may have

    def take(self, worker: int, message: MetricsLogged, now_s: float, *, alone: bool) -> str:
        """Add the values that a worker has logged.

        Args:
            worker: index of the worker.
            message: the values.
            now_s: the current time in seconds.
            alone: True if the worker is the main worker of a job with several workers, and so logs for all of them.

        Returns:
            A warning, once, if the job has too many names; else "".
        """
        warning = ""
        for logged in message.values:
            point = MetricPoint(
                max(0.0, now_s - logged.age_s),
                logged.samples,
                logged.updates,
                logged.value,
                logged.weight,
                logged.count,
                worker,
            )
            single = logged.evaluating or (alone and logged.source == "script")
            kept = self._history.note(logged.name, "point" if single else "mean", point, logged.source)
            if not kept and not self._crowded:
                self._crowded = True
                warning = (
                    f"The scripts have logged more than {MOST_METRICS} metrics. Metrics whose names came later are "
                    f"not kept. The first of these names is {logged.name!r}, from worker {worker}."
                )
        return warning


# -- The values that a worker's script has logged, until the worker reports them to the coordinator ----------
#
# Scripts may log many times per second. So a worker first merges the values that were logged at the same progress of
# the job, and reports a few times per second at most. A value that was logged between two pushes belongs to the later
# push if the gradient of this push was being computed. Otherwise, the value belongs to the earlier push, whose loss a
# script may log after `step()`. In a mean over the workers, the value has the weight of its push, however often the
# script has logged.
#
# A report contains ages instead of times, so no two clocks are compared. In virtual time, values reach the
# coordinator without a message, so a simulation has the same events and bytes whether its script logs or not.
# Metrics decide nothing, so they are neither recorded in traces nor part of the states of the exhaustive search.

LEAST_WEIGHT = 1
"""The smallest weight of a value, and its weight if the number of samples is unknown."""

MOST_AGE_S = 1e9


class Noted(msgspec.Struct, frozen=True, gc=False):
    """A value that a script has logged, or the mean of several such values.

    Attributes:
        name: name of the metric.
        value: the value.
        time_s: time at which the value was logged, in seconds on the worker's clock.
        samples: number of samples that all workers together had used at this time; 0 if unknown.
        updates: number of updates at this time.
        source: where the value comes from.
        evaluating: True if the value was logged inside `paceline.evaluating()`.
        late: True if the value belongs to the push before it, not to the push after it.
        times: number of logged values of which `value` is the mean.
    """

    name: str
    value: float
    time_s: float
    samples: int
    updates: int
    source: Source = "script"
    evaluating: bool = False
    late: bool = False
    times: int = 1


class Settled(msgspec.Struct, frozen=True):
    """The values that a script has logged before a push, and the losses among them.

    Attributes:
        noted: everything that the script has logged.
        loss: the loss of the iteration that is pushed; None if it is unknown.
        follows: True if the loss is unknown because the script logs it after `step()`.
        earlier_loss: the loss of the previous iteration, if the script has logged this loss since the previous push;
            else None.
        shown: the last known loss, for display; None if there is no new loss.
        guessed: True if `shown` is a guess.
    """

    noted: Sequence[Noted] = ()
    loss: float | None = None
    follows: bool = False
    earlier_loss: float | None = None
    shown: float | None = None
    guessed: bool = False


def merge(noted: Iterable[Noted]) -> list[Noted]:
    """Merge the values with the same name, progress and origin into their mean.

    >>> noted = [Noted("loss", 1.0, 0.1, 32, 1), Noted("loss", 3.0, 0.2, 32, 1), Noted("loss", 5.0, 0.3, 64, 2)]
    >>> [(each.value, each.times, each.time_s) for each in merge(noted)]
    [(2.0, 2, 0.2), (5.0, 1, 0.3)]
    """
    merged: dict[tuple[object, ...], Noted] = {}
    for each in noted:
        key = each.name, each.samples, each.updates, each.source, each.evaluating, each.late
        known = merged.get(key)
        if known is not None:
            times = known.times + each.times
            value = known.value * (known.times / times) + each.value * (each.times / times)
            time_s = max(known.time_s, each.time_s)
            each = msgspec.structs.replace(each, value=value, time_s=time_s, times=times)
        merged[key] = each
    return list(merged.values())


@stateful()
class UnsentMetrics:
    """The metrics that a worker has yet to report.

    Example:
        >>> unsent = UnsentMetrics()
        >>> unsent.pushed(32)
        >>> unsent.take([Noted("loss", 0.5, 1.0, 64, 2)])
        >>> [report] = unsent.report(now_s=1.25)
        >>> report.message.values[0].weight, report.message.values[0].age_s
        (32.0, 0.25)
    """

    def __init__(self) -> None:
        self._values: list[tuple[Noted, float]] = []  # with their weights
        self._weight: float = LEAST_WEIGHT  # of the last push
        self._earlier_weight: float = LEAST_WEIGHT  # of the push before the last one

    @property
    def fills_a_message(self) -> bool:
        """True if the values fill a message, so that they should not wait until the next report is due."""
        return len(self._values) >= MOST_LOGGED

    def pushed(self, weight: float | None) -> None:
        """Record a push with its weight in a mean over the workers, such as its number of samples; None if unknown."""
        self._earlier_weight = self._weight
        self._weight = min(max(weight or LEAST_WEIGHT, LEAST_WEIGHT), MOST_WEIGHT)

    def take(self, noted: Sequence[Noted], *, ended: bool = False) -> None:
        """Take what the script has logged since the last call.

        Args:
            noted: the values.
            ended: True if no push follows these values, because the script has ended. Otherwise, the last push has
                followed them.
        """
        for each in merge(noted) if len(noted) > 1 else noted:
            late = each.late and not ended
            weight = each.times if each.evaluating else self._earlier_weight if late else self._weight
            self._values.append((each, float(weight)))

    def report(self, now_s: float) -> list[Request]:
        """Return reports of all values that have not been reported yet. `now_s` is the time on the worker's clock."""
        if not self._values:
            return []
        values = [
            LoggedValue(
                each.name,
                each.value,
                weight,
                each.times,
                min(max(0.0, now_s - each.time_s), MOST_AGE_S),
                each.samples,
                each.updates,
                each.source,
                each.evaluating,
            )
            for each, weight in self._values
        ]
        self._values.clear()
        return [
            Send(COORDINATOR, MetricsLogged(tuple(values[start : start + MOST_LOGGED])))
            for start in range(0, len(values), MOST_LOGGED)
        ]


# -- What the workers of a run spend their time on, as far as they know it themselves ------------------------
#
#     Stopwatch     in a worker: measures the time of each activity
#     TimeSpent     what a stopwatch shows; the worker reports it in a `Status` and in its `WorkerFinished`
#     TimeLedger    at the coordinator: keeps the last report of each worker, and adds up the reports
#
# These definitions hold everywhere: in the report, in `time_use`, for balanced batches, for `auto` and
# `advise`, and for the predictions of models from intervals:
#
#     loading      inside `next()` and `iter()` of a loader that the script distributes
#     computing    from the end of loading until `step()` pushes
#     outside      from the end of `step()` until the script asks for the next batch, for example while it evaluates,
#                  saves or logs, within an epoch or at its end. The time inside `evaluating`, `barrier` and `reduce`
#                  is outside, too, wherever the script calls them
#
# In three cases, the order of the calls is not enough. First, a step may have no batch of its own before it, such as
# the second step of two optimizers, or any step of a script that distributes no loader. The computation of such a step
# has begun at the end of the previous step. Second, if no gradient is accumulated in a pass over a distributed loader,
# such as the loader of an evaluation, the whole pass is outside. Third, requests for data are exchanges, even inside
# `next()`.
#
# A worker cannot tell during which part of an exchange of pushes and pulls it waited for other workers: only the shards
# know this. So an exchange is not reported at all; `trace.activity_cells` determines from the traces which part of the
# exchange was waiting.
#
# A lost worker makes no report when it leaves. Its *tail* is the time from its last report until it was lost. The tail
# counts as time in the activity of the last report, unless this activity was an exchange. A live worker reports at
# least ten times per second while it iterates, so a tail is either short or spent on a single activity.
#
# All times are in ticks.

STATES = ("computing", "loading", "wasted", "paused", "outside")
"""The states whose times the workers know."""

STATE_OF: Mapping[Activity, str] = {
    "computing": "computing",
    "loading": "loading",
    "restarting": "wasted",
    "paused": "paused",
    "outside": "outside",
    "between": "outside",
}
"""The state to which the time of an activity belongs. Exchanges belong to no state."""


class Lap(NamedTuple):
    """The times that a worker has spent in one iteration, from the arrival of its weights until its push.

    Attributes:
        loading: time in which the script asked for batches.
        computing: time of the computation that is pushed.
        outside: time in which the script did not train.
    """

    loading: int = 0
    computing: int = 0
    outside: int = 0

    @property
    def busy(self) -> int:
        """The time that the worker has needed for the push itself."""
        return self.loading + self.computing


class PassMark(NamedTuple):
    """The values that a stopwatch shows when a pass over a loader begins. See `Stopwatch.end_pass`."""

    trained: int
    loading: int
    computing: int


class Stopwatch:
    """Measures the time that one worker spends on each activity. The first activity is an exchange.

    Args:
        now_ticks: the current time.

    Example:
        >>> watch = Stopwatch(now_ticks=0)
        >>> watch.begin_iteration("computing", now_ticks=10)
        >>> watch.drop(now_ticks=40)
        >>> watch.enter("computing", now_ticks=42)
        'restarting'
        >>> watch.push(now_ticks=142)
        Lap(loading=0, computing=100, outside=0)
        >>> watch.begin_iteration("between", now_ticks=150)
        >>> watch.ask(now_ticks=157)  # the script has evaluated the model
        >>> watch.draw(now_ticks=158)
        >>> watch.push(now_ticks=160)
        Lap(loading=1, computing=2, outside=7)
        >>> spent = watch.read(now_ticks=160)
        >>> spent.computing, spent.loading, spent.wasted, spent.outside
        (102, 1, 32, 7)
    """

    __slots__ = (
        "_activity",
        "_base",
        "_between",
        "_pushes",
        "_since_ticks",
        "_spent",
        "_unfinished",
        "loads",
    )

    def __init__(self, now_ticks: int) -> None:
        self.loads = False  # True once the script has asked a distributed loader for a batch
        self._activity: Activity = "exchanging"
        self._since_ticks = now_ticks
        self._spent = dict.fromkeys(STATES, 0)
        self._unfinished = 0  # time of the computation that has been neither pushed nor aborted yet
        self._between = 0  # time since the last step that is computing or outside, depending on what follows
        self._base = (0, 0)  # the times of loading and outside when the iteration began
        self._pushes = 0

    @property
    def after_step(self) -> Activity:
        """The activity of the script after a step, as far as this activity is known at the end of the step."""
        return "between" if self.loads else "computing"

    def enter(self, activity: Activity, now_ticks: int) -> Activity:
        """Begin an activity, and return the previous one."""
        previous, self._activity = self._activity, activity
        length, self._since_ticks = now_ticks - self._since_ticks, now_ticks
        if previous == "computing":
            self._unfinished += length
        elif previous == "between":
            self._between += length
        elif previous != "exchanging":
            self._spent[STATE_OF[previous]] += length
        return previous

    def ask(self, now_ticks: int) -> None:
        """Begin to load a batch: what the script has done since its last step was outside of training."""
        self.loads = True
        self.enter("loading", now_ticks)
        self._spent["outside"] += self._between
        self._between = 0

    def draw(self, now_ticks: int) -> None:
        """Begin to compute, because a loader has returned a batch."""
        self.enter("computing", now_ticks)

    def begin_pass(self, trained: int, now_ticks: int) -> PassMark:
        """Begin a pass over a loader, and begin to load its first batch.

        Args:
            trained: number of batches for which the script has accumulated a gradient so far.
            now_ticks: the current time.
        """
        self.ask(now_ticks)
        return PassMark(trained + self._pushes, self._spent["loading"], self._unfinished)

    def end_pass(self, mark: PassMark, trained: int, now_ticks: int) -> None:
        """End a pass over a loader. If no gradient was accumulated in the pass, all of its time was outside."""
        self.enter("between", now_ticks)
        if trained + self._pushes == mark.trained:
            loaded = max(0, self._spent["loading"] - mark.loading)
            computed = max(0, self._unfinished - mark.computing)
            self._spent["loading"] -= loaded
            self._unfinished -= computed
            self._spent["outside"] += loaded + computed

    def begin_iteration(self, activity: Activity, now_ticks: int) -> None:
        """Begin the next iteration with an activity: the weights have arrived."""
        self.enter(activity, now_ticks)
        self._base = self._spent["loading"], self._spent["outside"]

    def lap(self, now_ticks: int) -> Lap:
        """Return what the worker has done in this iteration, as if its computation ended now."""
        self.enter(self._activity, now_ticks)
        loading, outside = self._base
        return Lap(
            max(0, self._spent["loading"] - loading),
            self._unfinished + self._between,
            max(0, self._spent["outside"] - outside),
        )

    def push(self, now_ticks: int) -> Lap:
        """Begin the exchange after a computation. Return what the worker has done in the iteration."""
        lap = self.lap(now_ticks)
        self._end_computation("computing", "exchanging", now_ticks)
        self._pushes += 1
        return lap

    def drop(self, now_ticks: int) -> None:
        """Begin the pull after a computation that was aborted."""
        self._end_computation("wasted", "restarting", now_ticks)

    def read(self, now_ticks: int) -> TimeSpent:
        """Return what the worker has spent its time on."""
        self.enter(self._activity, now_ticks)
        spent = {**self._spent, "outside": self._spent["outside"] + self._between}
        return TimeSpent(**spent, unfinished=self._unfinished, activity=self._activity)

    def _end_computation(self, state: str, activity: Activity, now_ticks: int) -> None:
        self.enter(activity, now_ticks)
        self._spent[state] += self._unfinished + self._between
        self._unfinished = self._between = 0


class WorkerTime(NamedTuple):
    """The times that a worker has spent in each state, summed over all incarnations of its index.

    Attributes:
        reported: state -> time that the worker has reported.
        tails: state -> time from the last report until the worker was lost, or until now. If the worker stopped
            computing before the end of this time, the time in which it waited is included.
        queued: part of the reported times in which the worker's main thread was ready to run, but had no CPU core.
    """

    reported: dict[str, int]
    tails: dict[str, int]
    queued: int = 0


@stateful(history="_last _left")
class TimeLedger:
    """Adds up the reports of all workers.

    A computation that was neither pushed nor aborted counts as wasted if the worker was lost. It counts as outside of
    training if the worker has finished, since its result was not used. If the worker has not left, it counts as
    computing.

    Example:
        >>> ledger = TimeLedger()
        >>> ledger.report(0, TimeSpent(computing=100, activity="computing"), now_ticks=100)
        >>> ledger.leave(0, now_ticks=130, lost=True)
        >>> ledger.totals(now_ticks=200)[0].tails
        {'computing': 0, 'loading': 0, 'wasted': 30, 'paused': 0, 'outside': 0}
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[TimeSpent, int]] = {}  # worker -> its last report, and when it arrived
        self._left: dict[int, WorkerTime] = {}  # worker -> the times of its incarnations that have left

    def report(self, worker: int, spent: TimeSpent, now_ticks: int) -> None:
        """Record the report of a worker."""
        self._last[worker] = spent, now_ticks

    def leave(self, worker: int, now_ticks: int, *, lost: bool) -> None:
        """Record that a worker has left."""
        if worker in self._last:
            self._left[worker] = self._total(worker, now_ticks, "wasted" if lost else "outside")
            del self._last[worker]

    def totals(self, now_ticks: int) -> dict[int, WorkerTime]:
        """Return, for each worker that has made a report, what it has spent its time on."""
        workers = sorted({*self._last, *self._left})
        return {worker: self._total(worker, now_ticks, "computing") for worker in workers}

    def _total(self, worker: int, now_ticks: int, unfinished: str) -> WorkerTime:
        """Return the times of a worker. Its unfinished computation belongs to the state `unfinished`."""
        before = self._left.get(worker) or WorkerTime(dict.fromkeys(STATES, 0), dict.fromkeys(STATES, 0))
        reported, tails, queued = dict(before.reported), dict(before.tails), before.queued
        if worker in self._last:
            spent, at_ticks = self._last[worker]
            queued += spent.queued
            for state in STATES:
                reported[state] += getattr(spent, state)
            reported[unfinished] += spent.unfinished
            if spent.activity != "exchanging":
                state = unfinished if spent.activity == "computing" else STATE_OF[spent.activity]
                tails[state] += now_ticks - at_ticks
        return WorkerTime(reported, tails, queued)

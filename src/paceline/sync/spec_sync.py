"""SpecSync, speculative synchronization: a computation on outdated weights is aborted and restarted.

A worker starts its next iteration immediately, and the coordinator counts the pushes of the other workers. If, within
ABORT_TIME of the start, the other workers have pushed more than m * ABORT_RATE times (m is the number of live
workers), the coordinator tells the worker to discard its computation, to pull, and to start the same batch again. In
the *fixed* variant, ABORT_TIME and ABORT_RATE are given (the paper finds them by a grid search, which it calls
cherry-picking). In the *adaptive* variant, both are tuned at the end of each epoch. Let T_i be the duration of worker
i's last iteration. If this iteration had started with a delay D, its weights would have included u_i(D) more pushes,
but a fraction D / T_i of the other m - 1 workers would have missed worker i's push. The gain in freshness is estimated
as

    F(D) = sum over i of (u_i(D) - D (m - 1) / T_i)                                                      (Eq. 7)

ABORT_TIME is set to the D with the largest F, which is always a delay at which a push arrives. If T is the mean of
all T_i, ABORT_RATE is set to D (m - 1) / (T m).

Reference: Zhang, Tian, Wang and Yan, "Stay fresh: speculative synchronization for fast distributed machine learning",
ICDCS 2018, sections IV and V, Algorithms 1 and 2.
Admission: As in the base model, ASP or SSP. The shards are not involved in the speculation.
State: At the coordinator, each worker's current and last iteration, and the pushes that the next tuning may need.
Guarantee: An iteration is restarted at most once, because a restarted iteration is no longer watched. Therefore every
worker makes progress. Staleness is bounded if the base model bounds it.
Use: When staleness slows down training more than repeating computations does, and pushes arrive in bursts. Only a
computation in a closure of `optimizer.step` can be aborted (see docs/how-to/choose-a-model.md, Restarted computations).
Without a closure, the model behaves as its base model.
Deviations: An epoch ends when every live worker has pushed since the last tuning, or when the last worker that has not
pushed leaves. D is at most T; if several delays are equally good, the shortest is chosen. There is no speculation
before the first tuning, or while no D has a positive F, or with a single worker. An iteration uses the parameters that
are in force at its start, and m is the number of live workers when its timer is due. If the last iteration was
restarted, T_i and u_i are counted from the first start of this iteration. Unless the run has `--hyperparameters raw`,
T_i and u_i leave out the time that the script spent outside of training before the iteration, for example to evaluate
the model. Each push says how long this time was. An edit of the weights does not count as an iteration, and its push
does not end an epoch. The same holds for the first iteration with batches of a new size on an accelerator, because
later iterations are shorter.

>>> from paceline.sync.events import IterationFinished, IterationStarted, TimerFired, WorkerJoined
>>> coordinator = SpecSync(abort_time_s=0.5, abort_rate=0.5).at_coordinator()
>>> for worker in (0, 1, 2):
...     _ = coordinator.handle(WorkerJoined(now_ticks=0, worker=worker))
>>> coordinator.handle(IterationFinished(now_ticks=1_000_000_000, worker=0, iteration=0))
[]
>>> coordinator.handle(IterationStarted(now_ticks=1_000_000_000, worker=0, iteration=1))
[SetTimer(worker=0, iteration=1, due_ticks=1500000000)]
>>> for worker in (1, 2):  # two pushes are more than 3 * 0.5
...     _ = coordinator.handle(IterationFinished(now_ticks=1_200_000_000, worker=worker, iteration=0))
>>> coordinator.handle(TimerFired(now_ticks=1_500_000_000, worker=0, iteration=1))
[RestartWorker(worker=0, iteration=1)]
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError, InternalError
from ..state import stateful
from .actions import AnyAction, RestartWorker, SetTimer
from .asp import ASP
from .events import IterationFinished, IterationStarted, TimerFired, WorkerFinished, WorkerJoined, WorkerLost
from .model import JobMachine, ShardMachine, SyncModel, require_seconds, require_within
from .ssp import SSP
from .ticks import Seconds, decimal, in_ticks


class SpecSync(SyncModel):
    """Speculative synchronization.

    Attributes:
        base: model that the shards run, ASP or SSP. Its parameters may follow: `spec-sync:base=ssp,staleness=4`.
        abort_time_s: ABORT_TIME in seconds, a number or a fraction > 0. None (the default) selects the adaptive
            variant.
        abort_rate: ABORT_RATE, a number or a fraction >= 0. An iteration is restarted if other workers push more
            than `abort_rate` times per live worker within `abort_time_s` of its start. Give both parameters or
            neither.
    """

    name = "spec-sync"
    style = "#000000", 0
    shown = ("spec-sync:abort_time_s=0.3,abort_rate=0.2",)
    demo = ("spec-sync", "spec-sync:abort_time_s=0.01,abort_rate=0.2", "spec-sync:base=ssp:staleness=3")
    whole_job = True
    agrees_on_means = True
    needs_starts = True

    base: ASP | SSP = ASP()
    abort_time_s: Seconds | None = None
    abort_rate: float | Fraction | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.base, ASP | SSP):
            raise ConfigurationError(f"{self.name}: base is {self.base}, expected asp or ssp.")
        if (self.abort_time_s is None) != (self.abort_rate is None):
            raise ConfigurationError(
                f"{self.name}: abort_time_s is {self.abort_time_s} and abort_rate is {self.abort_rate}; give both, "
                "or neither to have them tuned automatically."
            )
        if self.abort_time_s is not None and self.abort_rate is not None:
            require_seconds(self.name, "abort_time_s", self.abort_time_s, math.ulp(0.0), 1e6)
            require_within(self.name, "abort_rate", self.abort_rate, 0.0, math.inf)

    @property
    def independent(self) -> bool:
        return self.base.independent

    @property
    def needs_staleness(self) -> bool:
        return self.base.needs_staleness

    @property
    def needs_at_once(self) -> bool:
        return self.base.needs_at_once

    @property
    def scales_pushes(self) -> bool:
        return self.base.scales_pushes

    def at_shard(self, seed: int = 0, shard: int = 0) -> ShardMachine:
        return self.base.at_shard(seed, shard)

    def at_coordinator(self, seed: int = 0) -> Speculator:
        return Speculator(self)


class Speculation(msgspec.Struct, frozen=True):
    """The two parameters that decide whether an iteration is restarted.

    Attributes:
        abort_time_ticks: ABORT_TIME, the number of ticks for which an iteration is watched after its start.
        abort_rate: ABORT_RATE, the largest number of pushes per live worker that does not cause a restart. It may be
            infinite.
    """

    abort_time_ticks: int
    abort_rate: Fraction | float

    def most_pushes(self, workers: int) -> float:
        """Return the largest number of pushes that does not cause a restart, for this number of live workers."""
        rate = self.abort_rate
        return rate if isinstance(rate, float) else workers * rate.numerator // rate.denominator


class Span(msgspec.Struct, frozen=True):
    """The start and end times of a worker's last completed iteration.

    The time for which the script was outside of training before the iteration is left out.
    """

    start_ticks: int
    end_ticks: int

    @property
    def ticks(self) -> int:
        """The duration in ticks."""
        return self.end_ticks - self.start_ticks


@stateful()
class Watched:
    """The coordinator's record of one live worker."""

    def __init__(self, iteration: int, start_ticks: int | None) -> None:
        self.iteration = iteration  # the next iteration that the worker will finish
        self.start_ticks = start_ticks  # start of this iteration; None until it has started
        self.last: Span | None = None  # the last iteration that was no warm-up
        self.pushes_before = 0  # total number of pushes before the current iteration started
        self.speculation: Speculation | None = None  # None if the current iteration is not watched


@stateful(fixed="_model _adaptive")
class Speculator(JobMachine):
    """The scheduler from the paper's Algorithm 2. Each event takes O(1) time, except for an event that ends an epoch.

    Attributes:
        speculation: the current parameters; None while new iterations are not watched.
    """

    def __init__(self, model: SpecSync) -> None:
        self.speculation: Speculation | None = None
        self._model = model
        self._adaptive = model.abort_time_s is None
        self._workers: dict[int, Watched] = {}  # live workers, in order of joining
        self._push_count = 0  # total number of pushes since the start of the run
        self._pushes: list[tuple[int, int]] = []  # (time, worker) of pushes that the next tuning may need
        # live workers that have not pushed since the last tuning; the push of a warm-up does not count
        self._yet_to_push: set[int] = set()

    def finished(self, event: IterationFinished) -> list[AnyAction]:
        watched = self._workers[event.worker]
        assert watched.start_ticks is not None
        if not event.warm_up:
            start_ticks = min(watched.start_ticks + event.outside_ticks, event.now_ticks)
            watched.last = Span(start_ticks, event.now_ticks)
        watched.iteration = event.iteration + 1
        watched.start_ticks = watched.speculation = None
        self._push_count += 1
        if self._adaptive:
            self._pushes.append((event.now_ticks, event.worker))
            if not event.warm_up:
                self._yet_to_push.discard(event.worker)
            self._end_epoch_if_complete()
        return []

    def started(self, event: IterationStarted) -> list[AnyAction]:
        watched = self._workers[event.worker]
        watched.start_ticks = event.now_ticks
        watched.pushes_before = self._push_count
        watched.speculation = self.speculation
        if self.speculation is None:
            return []
        return [SetTimer(event.worker, event.iteration, event.now_ticks + self.speculation.abort_time_ticks)]

    def timer_fired(self, timer: TimerFired) -> list[AnyAction]:
        """Run CHECKRESYNC: restart the iteration if too many pushes have been counted since its start.

        All of these pushes are from other workers, because the worker itself pushes only at the end of the iteration.
        """
        watched = self._workers.get(timer.worker)
        if watched is None or watched.iteration != timer.iteration or watched.speculation is None:
            return []
        most = watched.speculation.most_pushes(len(self._workers))
        watched.speculation = None
        if self._push_count - watched.pushes_before > most:
            return [RestartWorker(timer.worker, timer.iteration)]
        return []

    def joined(self, event: WorkerJoined) -> list[AnyAction]:
        # A worker that joins a run in progress reports when its first weights have arrived.
        self._workers[event.worker] = Watched(event.iteration, None if event.pulls else event.now_ticks)
        self._yet_to_push.add(event.worker)
        if self.speculation is None:
            self.speculation = self._stated()
        return []

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        del self._workers[event.worker]
        self._yet_to_push.discard(event.worker)
        self._end_epoch_if_complete()
        return []

    def validate(self) -> None:
        if not self._yet_to_push <= self._workers.keys():
            raise InternalError(
                f"workers {self._yet_to_push} have yet to push, but the live workers are {set(self._workers)}"
            )
        if len(self._pushes) > self._push_count or self._pushes != sorted(
            self._pushes, key=lambda push: push[0]
        ):
            raise InternalError(
                f"the log of pushes has more than {self._push_count} entries, or is out of order: {self._pushes}"
            )

    def outlook(self, most_workers: int) -> dict[str, object]:
        """Return what is compared (see `stateful`).

        Of the log of pushes, only the number of pushes since each watched start counts. A number that is large enough
        for a restart is replaced by the smallest such number.
        """
        workers: dict[int, object] = {}
        for worker, watched in self._workers.items():
            since = None
            if watched.speculation is not None:
                most = watched.speculation.most_pushes(most_workers)
                since = self._push_count - watched.pushes_before
                since = since if since <= most else math.floor(most) + 1
            workers[worker] = watched.iteration, watched.start_ticks, watched.last, watched.speculation, since
        return {"_push_count": None, "_workers": workers}

    def _stated(self) -> Speculation | None:
        """Return the parameters that the model was given; None if the parameters are tuned."""
        time_s, rate = self._model.abort_time_s, self._model.abort_rate
        if time_s is None or rate is None:
            return None
        time_ticks = in_ticks(time_s, self.ticks_per_s)
        return Speculation(time_ticks, rate if math.isinf(rate) else decimal(rate))

    def _end_epoch_if_complete(self) -> None:
        """Tune the parameters if every live worker has pushed since the last tuning."""
        if not self._adaptive or self._yet_to_push or not self._workers:
            return
        spans = {worker: each.last for worker, each in self._workers.items() if each.last is not None}
        self.speculation = tune(spans, self._pushes)
        self._yet_to_push = set(self._workers)
        # The next tuning needs only the pushes since the earliest start of an iteration that is still being computed.
        starts = [each.start_ticks for each in self._workers.values() if each.start_ticks is not None]
        self._pushes = [push for push in self._pushes if starts and push[0] > min(starts)]


def tune(spans: Mapping[int, Span], pushes: Sequence[tuple[int, int]]) -> Speculation | None:
    """Run Algorithm 1: return the abort time with the largest F (Eq. 7) and its abort rate, or None if no F is > 0.

    Args:
        spans: live worker -> start and end of the worker's last completed iteration.
        pushes: (time in ticks, worker) of all pushes since the earliest start of a span, in order of time.

    The candidates for D are the delays of at most T from the start of each worker's span to each later push by
    another worker. F is computed for all candidates together: the sum of all u_i(D) is the number of candidates <= D,
    which is the rank of D among the sorted candidates. The computation takes O(m p log(m p)) time for m workers and
    p pushes. As printed in the paper, Algorithm 1 takes O(m p) time for each candidate.

    The result is exact. F is first computed with floats. If the F of a candidate is so close to the largest F, or to 0,
    that rounding errors might decide, this F is computed again exactly.

    >>> tune({0: Span(0, 40), 1: Span(5, 45)}, [(10, 1), (40, 0), (45, 1)])  # D = 10: gain 1, loss 20 / 40
    Speculation(abort_time_ticks=10, abort_rate=Fraction(1, 8))
    """
    m = len(spans)
    durations = [span.ticks for span in spans.values()]
    if m < 2 or min(durations) <= 0 or not pushes:
        return None
    total = sum(durations)
    delays = _delays(spans, pushes, total // m)
    if not len(delays):
        return None
    gain = np.searchsorted(delays, delays, side="right")
    loss = delays.astype(np.float64) * ((m - 1) * sum(1 / duration for duration in durations))
    estimate = gain - loss
    # Let u = 2**-53 be the unit roundoff. The relative error of `loss`, a sum of m reciprocals followed by three
    # operations, is less than (m + 4) u. The bound `error` is larger than the errors of `gain - loss`.
    error = (gain + loss) * ((m + 8) * 2.0**-52)
    close = np.flatnonzero(estimate + error >= (estimate - error).max())
    best = int(close[0])
    if delays[close[-1]] != delays[best] or abs(estimate[best]) <= error[best]:
        improvements = _exactly([(int(gain[i]), int(delays[i])) for i in close], durations)
        best = int(close[improvements.index(max(improvements))])
        if max(improvements) <= 0:
            return None
    elif estimate[best] <= 0:
        return None
    abort_time = int(delays[best])
    return Speculation(abort_time, Fraction(abort_time * (m - 1), total))


def _delays(spans: Mapping[int, Span], pushes: Sequence[tuple[int, int]], longest: int) -> NDArray[Any]:
    """Return the candidates for D, sorted: the delays in (0, longest] from a start to a push by another worker."""
    origin = min(span.start_ticks for span in spans.values())
    earliest = pushes[0][0] - origin  # below 0 if the worker that began first has left
    latest = max(pushes[-1][0], *(span.end_ticks for span in spans.values())) - origin
    # Whole numbers beyond 64 bits occur only if times are stated as fractions with very large denominators.
    kind = np.int64 if earliest > -(2**62) and latest < 2**62 else object
    push = np.array([time - origin for time, _ in pushes], dtype=kind)
    pusher = np.array([worker for _, worker in pushes])
    parts = []
    for worker, span in spans.items():
        first = np.searchsorted(push, span.start_ticks - origin, side="right")
        delay = push[first:][pusher[first:] != worker] - (span.start_ticks - origin)
        parts.append(delay[delay <= longest])
    return np.sort(np.concatenate(parts))


def _exactly(candidates: Sequence[tuple[int, int]], durations: Sequence[int]) -> list[Fraction]:
    """Return F (Eq. 7) of each candidate, a pair (sum of all u_i, D)."""
    # Add pairs of fractions, then pairs of sums, and so on: the terms then stay as short as possible. Equal durations
    # are common in simulations, and are added first.
    terms = [(count, duration) for duration, count in Counter(durations).items()]
    while len(terms) > 1:
        pairs = itertools.zip_longest(terms[::2], terms[1::2], fillvalue=(0, 1))
        terms = [(a * d + c * b, b * d) for (a, b), (c, d) in pairs]
    loss = (len(durations) - 1) * Fraction(*terms[0])
    return [gain - delay * loss for gain, delay in candidates]

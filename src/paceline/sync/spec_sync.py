"""SpecSync, speculative synchronization: a computation on outdated weights is aborted and restarted.

A worker starts its next iteration immediately, and the coordinator counts the pushes of the other workers. If, within
ABORT_TIME of the start, the other workers have pushed more than m * ABORT_RATE times (m is the number of live
workers), the coordinator tells the worker to discard what it has computed, pull, and start the same batch again. In
the *fixed* variant, ABORT_TIME and ABORT_RATE are given (the paper finds them by a grid search, which it calls
cherry-picking). In the *adaptive* variant, both are tuned at the end of each epoch. Let T_i be the duration of worker
i's last iteration. If this iteration had started with a delay D, its weights would have included u_i(D) more pushes,
but a fraction D / T_i of the other m - 1 workers would have missed its push. The gain in freshness is estimated as

    F(D) = sum over i of (u_i(D) - D (m - 1) / T_i)                                                      (Eq. 7)

ABORT_TIME is set to the D with the largest F, which is always a delay at which a push arrives. If T is the mean of
all T_i, ABORT_RATE is set to D (m - 1) / (T m).

Reference: Zhang, Tian, Wang and Yan, "Stay fresh: speculative synchronization for fast distributed machine
learning", ICDCS 2018, sections IV and V, Algorithms 1 and 2.
Admission: As in the base model, ASP or SSP. The shards are not involved in the speculation.
State: At the coordinator, each worker's current and last iteration, and the pushes that the next tuning may need.
Guarantee: An iteration is restarted at most once, because a restarted iteration is no longer watched. Therefore every
worker makes progress. Staleness is bounded if the base model bounds it.
Use: When staleness slows down training more than repeating computations does, and pushes arrive in bursts.
Deviations: An epoch ends when every live worker has pushed since the last tuning. D is at most T; if several delays
are equally good, the shortest is chosen. There is no speculation before the first tuning, or while no D has a
positive F.

>>> from paceline.sync.events import IterationFinished, IterationStarted, TimerFired, WorkerJoined
>>> coordinator = SpecSync(abort_time_s=0.5, abort_rate=0.5).at_coordinator()
>>> for worker in (0, 1, 2):
...     _ = coordinator.handle(WorkerJoined(now_s=0.0, worker=worker))
>>> coordinator.handle(IterationFinished(now_s=1.0, worker=0, iteration=0))
[]
>>> coordinator.handle(IterationStarted(now_s=1.0, worker=0, iteration=1))
[SetTimer(worker=0, iteration=1, due_s=1.5)]
>>> for worker in (1, 2):  # two pushes are more than 3 * 0.5
...     _ = coordinator.handle(IterationFinished(now_s=1.2, worker=worker, iteration=0))
>>> coordinator.handle(TimerFired(now_s=1.5, worker=0, iteration=1))
[RestartWorker(worker=0, iteration=1)]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from ..errors import ConfigurationError, InternalError
from .actions import AnyAction, RestartWorker, SetTimer
from .asp import ASP
from .events import (
    IterationFinished,
    IterationStarted,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from .model import JobMachine, ShardMachine, SyncModel, require_within
from .ssp import SSP

__all__ = ["Span", "SpecSync", "Speculation", "tune"]


class SpecSync(SyncModel, frozen=True, repr_omit_defaults=True):
    """Speculative synchronization.

    Attributes:
        base: model that the shards run, ASP or SSP.
        abort_time_s: ABORT_TIME in seconds, a number > 0. None (the default) selects the adaptive variant.
        abort_rate: ABORT_RATE, a number >= 0. An iteration is restarted if other workers push more than `abort_rate`
            times per live worker within `abort_time_s` of its start. Give both parameters or neither.
    """

    name = "spec-sync"

    base: ASP | SSP = ASP()
    abort_time_s: float | None = None
    abort_rate: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.base, ASP | SSP):
            raise ConfigurationError(f"{self.name}: base is {self.base}, expected asp or ssp.")
        if (self.abort_time_s is None) != (self.abort_rate is None):
            raise ConfigurationError(
                f"{self.name}: abort_time_s is {self.abort_time_s} and abort_rate is {self.abort_rate}; give both, "
                "or neither to have them tuned automatically."
            )
        if self.abort_time_s is not None and self.abort_rate is not None:
            require_within(self.name, "abort_time_s", self.abort_time_s, math.ulp(0.0), 1e6)
            require_within(self.name, "abort_rate", self.abort_rate, 0.0, math.inf)

    @property
    def whole_job(self) -> bool:
        return True

    @property
    def agrees_on_means(self) -> bool:
        return True

    @property
    def independent(self) -> bool:
        return self.base.independent

    @property
    def needs_staleness(self) -> bool:
        return self.base.needs_staleness

    @property
    def needs_starts(self) -> bool:
        return True

    def at_shard(self, seed: int = 0, shard: int = 0) -> ShardMachine:
        return self.base.at_shard(seed, shard)

    def at_coordinator(self, seed: int = 0) -> Speculator:
        if self.abort_time_s is None or self.abort_rate is None:
            return Speculator(None)
        return Speculator(Speculation(self.abort_time_s, self.abort_rate))


class Speculation(msgspec.Struct, frozen=True):
    """The two parameters that decide whether an iteration is restarted.

    Attributes:
        abort_time_s: ABORT_TIME, the number of seconds for which an iteration is watched after its start.
        abort_rate: ABORT_RATE, the largest number of pushes per live worker that does not cause a restart.
    """

    abort_time_s: float
    abort_rate: float


class Span(msgspec.Struct, frozen=True):
    """The start and end times of a worker's last completed iteration."""

    start_s: float
    end_s: float


class Watched:
    """The coordinator's record of one live worker."""

    def __init__(self, iteration: int, start_s: float) -> None:
        self.iteration = iteration  # the next iteration that the worker will finish
        self.start_s: float | None = start_s  # start of that iteration; None until it has started
        self.last: Span | None = None  # the previous iteration
        self.pushes_before = 0  # total number of pushes before the current iteration started
        self.speculation: Speculation | None = None  # None if the current iteration is not watched


class Speculator(JobMachine):
    """The scheduler from the paper's Algorithm 2. Each event takes O(1) time, except for an event that ends an epoch.

    Attributes:
        speculation: the current parameters; None while new iterations are not watched.
    """

    def __init__(self, fixed: Speculation | None) -> None:
        self.speculation = fixed
        self._adaptive = fixed is None
        self._workers: dict[int, Watched] = {}  # live workers, in order of joining
        self._push_count = 0  # total number of pushes since the start of the run
        self._pushes: list[tuple[float, int]] = []  # (time, worker) of pushes that the next tuning may need
        self._yet_to_push: set[int] = set()  # live workers that have not pushed since the last tuning

    def finished(self, event: IterationFinished) -> list[AnyAction]:
        watched = self._workers[event.worker]
        assert watched.start_s is not None
        watched.last = Span(watched.start_s, event.now_s)
        watched.iteration = event.iteration + 1
        watched.start_s = watched.speculation = None
        self._push_count += 1
        if self._adaptive:
            self._pushes.append((event.now_s, event.worker))
            self._yet_to_push.discard(event.worker)
            self._end_epoch_if_complete()
        return []

    def started(self, event: IterationStarted) -> list[AnyAction]:
        watched = self._workers[event.worker]
        watched.start_s = event.now_s
        watched.pushes_before = self._push_count
        watched.speculation = self.speculation
        if self.speculation is None:
            return []
        return [SetTimer(event.worker, event.iteration, event.now_s + self.speculation.abort_time_s)]

    def timer_fired(self, timer: TimerFired) -> list[AnyAction]:
        """Run CHECKRESYNC: restart the iteration if too many pushes have been counted since its start.

        All of these pushes are from other workers, because the worker itself pushes only at the end of the iteration.
        """
        watched = self._workers.get(timer.worker)
        if watched is None or watched.iteration != timer.iteration or watched.speculation is None:
            return []
        too_many = len(self._workers) * watched.speculation.abort_rate
        watched.speculation = None
        if self._push_count - watched.pushes_before > too_many:
            return [RestartWorker(timer.worker, timer.iteration)]
        return []

    def joined(self, event: WorkerJoined) -> list[AnyAction]:
        self._workers[event.worker] = Watched(event.iteration, event.now_s)
        self._yet_to_push.add(event.worker)
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

    def _end_epoch_if_complete(self) -> None:
        """Tune the parameters if every live worker has pushed since the last tuning."""
        if not self._adaptive or self._yet_to_push or not self._workers:
            return
        spans = {
            worker: watched.last for worker, watched in self._workers.items() if watched.last is not None
        }
        self.speculation = tune(spans, self._pushes)
        self._yet_to_push = set(self._workers)
        # The next tuning needs only the pushes since the earliest start of an iteration that is still being computed.
        starts_s = [w.start_s for w in self._workers.values() if w.start_s is not None]
        self._pushes = [push for push in self._pushes if starts_s and push[0] > min(starts_s)]


def tune(spans: dict[int, Span], pushes: Sequence[tuple[float, int]]) -> Speculation | None:
    """Run Algorithm 1: return the abort time with the largest F (Eq. 7) and its abort rate, or None if no F is > 0.

    Args:
        spans: live worker -> start and end of the worker's last completed iteration.
        pushes: (time, worker) of all pushes since the earliest start of a span, in order of time.

    The candidates for D are the delays of at most T from the start of each worker's span to each later push by
    another worker. F is computed for all candidates together: the sum of all u_i(D) is the number of candidates <= D,
    which is the rank of D among the sorted candidates. The computation takes O(m p log(m p)) time for m workers and
    p pushes. As printed in the paper, Algorithm 1 takes O(m p) time for each candidate.

    >>> tune({0: Span(0.0, 4.0), 1: Span(0.5, 4.5)}, [(1.0, 1), (4.0, 0), (4.5, 1)])  # D = 1: gain 1, loss 2 / 4
    Speculation(abort_time_s=1.0, abort_rate=0.125)
    """
    m = len(spans)
    length_s = [span.end_s - span.start_s for span in spans.values()]
    if m < 2 or min(length_s) <= 0:
        return None
    mean_s = sum(length_s) / m
    push_s = np.array([push[0] for push in pushes])
    pusher = np.array([push[1] for push in pushes])
    parts = []
    for worker, span in spans.items():
        first = np.searchsorted(push_s, span.start_s, side="right")
        distance_s = push_s[first:][pusher[first:] != worker] - span.start_s
        parts.append(distance_s[(distance_s > 0) & (distance_s <= mean_s)])
    delay_s = np.sort(np.concatenate(parts))
    if not len(delay_s):
        return None
    gain = np.searchsorted(delay_s, delay_s, side="right")
    loss_per_s = (m - 1) * sum(1.0 / length for length in length_s)
    improvement = gain - delay_s * loss_per_s
    best = int(np.argmax(improvement))
    if improvement[best] <= 0:
        return None
    abort_time_s = float(delay_s[best])
    return Speculation(abort_time_s, abort_time_s * (m - 1) / (mean_s * m))

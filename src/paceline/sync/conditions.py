"""The mechanism of FluentPS: each shard independently evaluates a pull condition and a push condition.

Theory (FluentPS, section III, Algorithm 1 and Table III). V_train is the overall progress of the shard: the number
of complete rounds. A pull reports `progress`, the index of the iteration that its worker has just pushed. The pull is
answered immediately if the *pull condition* holds; otherwise it is delayed and filed under a round. The *push
condition* decides when the current round is complete. The push condition is evaluated in a loop after each push and
each departure of a worker, because one event can complete several rounds. Each time the push condition holds, V_train
advances by one, and all pulls filed under the completed round are answered. There are two ways to choose the round of
a delayed pull:

    soft barrier      the round is V_train: the pull is answered when the current round closes. With the pull
                      condition `progress < V_train + s`, this happens as soon as c_p - min c has decreased to s
    lazy execution    the round is max(progress, V_train): the pull is answered when the slowest worker has caught up

A worker that joins a run in progress with c_p = c takes part from round c on. Its first pull is answered when this
round begins, and earlier rounds do not count the worker. The condition `always` is an exception: with it, even this
pull is answered immediately.

If the push condition does not require all workers, a worker may be *late*: c_p < V_train. Where pushes are averaged,
`paceline.sync.drop_stragglers` explains what becomes of the pushes of a late worker, whatever the conditions are.

Guarantee: Under all conditions, each push is applied, averaged or dropped exactly once, and no worker waits for
a worker that has left. The conditions determine whether a run makes progress. The models of this
package ensure progress.

If a condition written by the user fails, `fault` is set, and the state machine of another model takes over.

Deviations: Conditions test `Count[V_train] >= n` with the number n of live workers, whereas the paper tests
`== N`. Count[V_train] stays correct when workers join and leave.

The n of `push_scale` is a different n. The paper divides each gradient by a constant, the total number N of workers
(Algorithm 1, line 15, and Table II). Here, workers come and go, so n is the largest number of workers that have been
present at this shard at the same time. When a worker finishes or is lost, n stays the same, so the factor of the last
and most outdated pushes does not increase. A worker that joins again is not counted twice: n increases only if a join
makes more workers present than ever before. A change of the model does not change n. A checkpoint contains n, so a
resumed run begins with the n of its job, even if the run has fewer workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..errors import InternalError, InvalidEventError, unknown_name
from ..state import stateful
from .actions import AnswerPull, AnyAction, ApplyMean, ApplyPush, DropPush, HoldPush
from .events import (
    AnyEvent,
    PullRequested,
    PushReceived,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from .model import Counts, Handover, ShardMachine, SyncModel, without_torn


class PushState:
    """The state that a push condition receives.

    Attributes:
        v_train: V_train, the current round, which ends when the push condition holds.
        live: number of live workers, without those that join in a later round.
        pushed: Count[V_train], the number of these workers that have pushed round V_train. If the shards run different
            models, this includes late workers whose push is in the mean of the round.
        slowest: min c, the smallest c_p of the live workers.
        fastest: max c, the largest c_p of the live workers.
    """

    __slots__ = ("_coming", "_counts", "live", "pushed", "v_train")

    def __init__(self, counts: Counts, v_train: int, pushed: int, coming: Mapping[int, int]) -> None:
        self._counts = counts
        self._coming = coming
        self.v_train = v_train
        self.live = len(counts.count) - len(coming)
        self.pushed = pushed

    @property
    def slowest(self) -> int:
        return self._counts.slowest

    @property
    def fastest(self) -> int:
        return self._counts.fastest

    def count(self, iteration: int) -> int:
        """Return Count[iteration], the number of live workers that have pushed at least `iteration + 1` times.

        As in `live`, workers that join in a later round are left out: they have not pushed yet, although their c_p is
        the number of this round. Takes time linear in the number of distinct counts; `pushed` takes constant time.
        """
        return self._counts.beyond(iteration) - sum(rnd > iteration for rnd in self._coming.values())


class PullState(PushState):
    """The state that a pull condition receives: the attributes of `PushState`, and attributes that describe the pull.

    Attributes:
        worker: the worker p that pulls.
        iteration: label of the iteration that the worker has just pushed.
        progress: c_p - 1, the worker's progress as FluentPS defines it.
        gap: c_p - min c, the number of iterations by which the worker is ahead of the slowest live worker.
        significance: |g| / |w| of the worker's push, or None if it was not measured.
    """

    __slots__ = ("iteration", "progress", "significance", "worker")

    def __init__(
        self,
        counts: Counts,
        v_train: int,
        pushed: int,
        pull: PullRequested,
        significance: float | None,
        coming: Mapping[int, int],
    ) -> None:
        super().__init__(counts, v_train, pushed, coming)
        self.worker = pull.worker
        self.iteration = pull.iteration
        self.progress = counts.count[pull.worker] - 1
        self.significance = significance

    @property
    def gap(self) -> int:
        return self.progress + 1 - self._counts.slowest


PullCondition = Callable[[PullState], bool]
"""Function that returns True if a pull should be answered now."""

PushCondition = Callable[[PushState], bool]
"""Function that returns True if the current round, V_train, is complete."""

Execution = Callable[[int, int], int]
"""Function of (progress, V_train) that returns the round for a delayed pull: V_train or a later round."""

EXECUTIONS: dict[str, Execution] = {
    "soft": lambda progress, v_train: v_train,
    "lazy": max,
}


def always(state: PullState) -> bool:
    """Return True: answer every pull on arrival."""
    return True


def everybody(state: PushState) -> bool:
    """Return True if every live worker has pushed round V_train. All rows of Table III but one use this condition."""
    return state.pushed >= state.live


PushScale = Callable[[int, int], float]
"""Function of n and tau that returns the factor of a push. See `ApplyingModel`."""

PUSH_SCALES: dict[str, PushScale] = {
    "1": lambda n, tau: 1.0,
    "1/n": lambda n, tau: 1.0 / n,
    "1/tau": lambda n, tau: 1.0 / max(1, tau),
    "n/tau": lambda n, tau: min(1.0, n / max(1, tau)),
}


class ApplyingModel(SyncModel, kw_only=True):
    """Base class for models that apply each push on arrival.

    Attributes:
        push_scale: factor by which each gradient is multiplied: "1", "1/n", "1/tau" or "n/tau". Here, n is the largest
            number of workers that have been present in the job at the same time, and tau is the staleness of the push.
            In FluentPS's Algorithm 1, line 15, the factor is "1/n", where n is the total number of workers (Table II).
            The factor "1/tau", which is 1 for tau = 0, gives staleness-aware rates (Zhang, Gupta, Lian and Liu,
            "Staleness-aware async-SGD for distributed deep learning", IJCAI 2016). The factor "n/tau", which is at
            most 1, gives delay-adaptive rates (Mishchenko, Bach, Even and Woodworth, "Asynchronous SGD beats minibatch
            SGD under arbitrary delays", NeurIPS 2022).
    """

    push_scale: str = "1"

    def __post_init__(self) -> None:
        if self.push_scale not in PUSH_SCALES:
            raise unknown_name(f"push_scale of {self.name}", self.push_scale, PUSH_SCALES)

    @property
    def agrees_on_means(self) -> bool:
        return True

    @property
    def scales_pushes(self) -> bool:
        return self.push_scale != "1"

    @property
    def needs_staleness(self) -> bool:
        return "tau" in self.push_scale

    @property
    def needs_at_once(self) -> bool:
        return "n" in self.push_scale


class ConditionModel(ApplyingModel, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Base class for models that apply each push on arrival and may delay pulls.

    Attributes:
        execution: "soft" to answer a delayed pull when the current round closes (the exact rule of SSP), or "lazy" to
            answer it when the slowest worker has caught up (the default of FluentPS).
    """

    execution: str = "soft"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.execution not in EXECUTIONS:
            raise unknown_name(f"execution of {self.name}", self.execution, EXECUTIONS)

    def machine(self, pull_condition: PullCondition) -> ConditionMachine:
        """Return a state machine with this pull condition and the options of this model."""
        return ConditionMachine(
            pull_condition, execution=EXECUTIONS[self.execution], scale=PUSH_SCALES[self.push_scale]
        )


@stateful(fixed="_pull_condition _push_condition _average _execution _scale")
class ConditionMachine(ShardMachine):
    """The state machine of models that are defined by conditions. It runs Algorithm 1 of FluentPS at one shard.

    Args:
        pull_condition: function that is evaluated once for each pull, when the pull arrives.
        push_condition: function that is evaluated in a loop after each push and each departure of a worker.
        average: True to hold the pushes of a round and apply their mean when the round is complete. A push for a
            round that is already complete is dropped (see `DropStragglers`). False to apply each push on arrival.
        execution: function that chooses the round under which a delayed pull is filed.
        scale: function that returns the factor of each gradient; ignored if `average` is True.

    Attributes:
        v_train: V_train, the number of complete rounds.
    """

    def __init__(
        self,
        pull_condition: PullCondition,
        push_condition: PushCondition = everybody,
        *,
        average: bool = False,
        execution: Execution = EXECUTIONS["soft"],
        scale: PushScale = PUSH_SCALES["1"],
    ) -> None:
        super().__init__()
        self.v_train = 0
        self._pull_condition = pull_condition
        self._push_condition = push_condition
        self._average = average
        self._execution = execution
        self._scale = None if scale is PUSH_SCALES["1"] else scale
        # Count[V_train]: the number of live workers with c_p > V_train that are not in `_coming`, plus the number of
        # workers for which `_late` has True
        self._pushed = 0
        # Workers that have joined a run in progress and have not pulled their first weights yet.
        self._entering: set[int] = set()
        self._coming: dict[int, int] = {}  # worker that joins in a later round -> this round, its c_p
        # If the shards run different models: late worker that has received the weights of round V_train -> True if the
        # mean of this round has a push of the worker
        self._late: dict[int, bool] = {}
        self._held: list[tuple[int, int]] = []  # (worker, iteration) of each push that is held to be averaged
        self._delayed: dict[int, dict[int, int]] = {}  # round -> worker -> iteration of the delayed pull
        self._filed_under: dict[int, int] = {}  # worker -> round under which the delayed pull is filed
        self._significance: dict[int, float] = {}  # worker -> |g| / |w| of the last push, if measured

    @property
    def averages(self) -> bool:
        """True if the pushes of a round are held, and their mean is applied."""
        return self._average

    def check(self, event: AnyEvent) -> None:
        """Raise `InvalidEventError` for a push that continues from a round that no shard can have reached yet.

        Another shard can be ahead of this one only by pushes that are still in flight to this shard, and each worker
        has at most one push in flight.
        """
        if type(event) is PushReceived and event.progress is not None:
            furthest = self.counts.furthest + self.counts.joins
            if event.progress > furthest:
                raise InvalidEventError(
                    f"worker {event.worker} goes on from round {event.progress}, expected at most {furthest}"
                )

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Process one legal event and return the resulting actions."""
        match event:
            case PushReceived():
                before = self.counts.pushed(event.worker, event.progress)
                return [self._receive(event, before), *self._close_rounds()]
            case PullRequested():
                return self.pulled(event)
            case WorkerJoined():
                return self._join(event)
            case WorkerLost() | WorkerFinished():
                ahead = self.counts.left(event.worker) > self.v_train
                self._pushed -= self._coming.pop(event.worker, None) is None and ahead
                self._entering.discard(event.worker)
                self._pushed -= self._late.pop(event.worker, False)
                self._significance.pop(event.worker, None)
                self._forget_pull(event.worker)
                return self._close_rounds()
            case _:
                return super().handle(event)

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        """Answer a pull now if the pull condition holds; otherwise file it under a round."""
        worker = pull.worker
        if worker in self._entering:
            self._entering.remove(worker)
            if worker not in self._coming:
                return [self._answer(worker, pull.iteration)]
            rnd = self._coming[worker] - 1
        else:
            significance = self._significance.get(worker)
            state = PullState(self.counts, self.v_train, self._pushed, pull, significance, self._coming)
            if self._pull_condition(state):
                return [self._answer(worker, pull.iteration)]
            rnd = self._execution(state.progress, self.v_train)
        self._delayed.setdefault(rnd, {})[worker] = pull.iteration
        self._filed_under[worker] = rnd
        return []

    def holds(self, worker: int) -> bool:
        return any(holder == worker for holder, _ in self._held)

    def settle(self, worker: int, kept: int | None) -> list[AnyAction]:
        self.frozen.discard(worker)
        self._held, dropped = without_torn(self._held, worker, kept)
        return dropped if worker in self.counts.count else [*dropped, *self._close_rounds()]

    @property
    def entry(self) -> int:
        """The least c_p with which a worker could join now.

        If pushes are averaged, this is the next round, in which all workers begin at the same time: the current round
        does not wait for a worker that is still receiving its weights. If other shards run other models, a
        worker may join late, because V_train can be far ahead of the slowest worker, for which those shards wait.
        """
        if self._takes_late:
            return self.counts.slowest
        return self.v_train + (self._average and self.counts.live_count > 0)

    def may_join(self, count: int) -> bool:
        """Return True unless the round `count` is complete already."""
        return self._takes_late or count >= self.v_train

    def hand_over(self) -> Handover:
        delayed = {worker: pulls[worker] for pulls in self._delayed.values() for worker in pulls}
        return Handover(self.counts, self._held, delayed, self._significance)

    def take_over(self, handover: Handover, now_ticks: int) -> list[AnyAction]:
        """Continue from the state of another state machine.

        V_train starts at the c_p of the slowest worker. If this state machine averages, held pushes are kept for the
        mean of their round; otherwise, their mean is applied now. Delayed pulls are tested again.
        """
        self._significance = handover.significance
        self.v_train = handover.counts.slowest
        self._pushed = handover.counts.beyond(self.v_train)
        actions: list[AnyAction] = []
        if self._average:
            self.counts, self._held = handover.counts, handover.held
            handover = handover._replace(held=[])
            actions = self._close_rounds()
        return actions + super().take_over(handover, now_ticks)

    def outlook(self, most_workers: int) -> dict[str, object]:
        """Return what is compared (see `stateful`).

        The order of the held pushes is left out, because a mean always adds them in the order of the workers.
        """
        return {"_held": frozenset(self._held)}

    def waits(self) -> dict[int, str]:
        live = self.counts.live_count
        return {
            worker: f"round {rnd} ({self._pushed} of {live} workers have pushed round {self.v_train})"
            for worker, rnd in self._filed_under.items()
        }

    def validate(self) -> None:
        super().validate()
        filed = {worker: rnd for rnd, pulls in self._delayed.items() for worker in pulls}
        if filed != self._filed_under or not self._filed_under.keys() <= self.counts.count.keys():
            raise InternalError(
                f"the delayed pulls {self._delayed} do not match their index {self._filed_under}"
            )
        if any(rnd < self.v_train for rnd in self._delayed):
            raise InternalError(
                f"pulls {self._delayed} are filed under rounds before V_train = {self.v_train}"
            )
        counts = self.counts.count
        if any(rnd <= self.v_train or counts.get(worker) != rnd for worker, rnd in self._coming.items()):
            raise InternalError(
                f"workers {self._coming} join after round {self.v_train}, but the values of c_p are {counts}"
            )
        if not self._entering <= counts.keys():
            raise InternalError(f"workers {self._entering} have joined, but {set(counts)} are live")
        pushed = sum(count > self.v_train for count in counts.values()) - len(self._coming)
        pushed += sum(self._late.values())
        if pushed != self._pushed:
            raise InternalError(f"Count[{self.v_train}] is {pushed}, but the stored count is {self._pushed}")
        if any(counts.get(worker, math.inf) > self.v_train for worker in self._late):
            raise InternalError(
                f"workers {self._late} are late in round {self.v_train}, but the values of c_p are {counts}"
            )

    @property
    def _takes_late(self) -> bool:
        """True if a round may close without some workers, whose later pushes then count for later rounds."""
        return self._average and not self.alone and self._push_condition is not everybody

    def _join(self, event: WorkerJoined) -> list[AnyAction]:
        worker = event.worker
        count = self.v_train if event.count is None else event.count
        self.counts.joined(worker, count)
        if event.pulls:
            self._entering.add(worker)
        if count <= self.v_train:
            return []
        if not event.pulls or self._pull_condition is always:
            self._pushed += 1
            return []
        self._coming[worker] = count
        return self._close_rounds()

    def _receive(self, push: PushReceived, before: int) -> AnyAction:
        progress = self.counts.count[push.worker] - 1
        self._pushed += before <= self.v_train <= progress
        if push.significance is not None:
            self._significance[push.worker] = push.significance
        missed = self._average and progress < self.v_train
        if self._late and push.worker in self._late:
            missed = self._fill(push, missed)
        if push.empty or missed:
            return DropPush(push.worker, push.iteration)
        if self._average:
            self._held.append((push.worker, push.iteration))
            return HoldPush(push.worker, push.iteration)
        if self._scale is not None:
            # Old traces lack this number. When they were recorded, the live workers were counted instead.
            workers = self.counts.live_count if push.at_once is None else push.at_once
            factor = self._scale(workers, push.staleness or 0)
            return ApplyPush(push.worker, push.iteration, factor)
        return ApplyPush(push.worker, push.iteration)

    def _fill(self, push: PushReceived, late: bool) -> bool:
        """Count a push of a worker in `_late`. Return True if the mean already contains a push of this worker."""
        averaged = self._late[push.worker]
        if not late:
            self._pushed -= averaged  # c_p has reached this round, so the worker would be counted twice
            del self._late[push.worker]
        elif not (averaged or push.empty):
            self._pushed += 1
            self._late[push.worker] = True
        return averaged

    def _close_rounds(self) -> list[AnyAction]:
        actions: list[AnyAction] = []
        while self._is_complete():
            actions += self._apply_mean()
            closing = self._delayed.pop(self.v_train, {})
            self.v_train += 1
            if self._late:
                self._pushed -= sum(self._late.values())
                self._late.clear()
            self._pushed -= self.counts.at(self.v_train)
            for worker in [worker for worker, rnd in self._coming.items() if rnd == self.v_train]:
                del self._coming[worker]
                self._pushed += 1  # the worker was not included in `_pushed`
            for worker, iteration in closing.items():
                del self._filed_under[worker]
                actions.append(self._answer(worker, iteration))
        # If the last worker has left, no further push can complete this round.
        if not (self.counts.live_count or self.frozen):
            actions += self._apply_mean()
        return actions

    def _is_complete(self) -> bool:
        """Return True if the current round is complete, or if all live workers join in a later round.

        Even if the condition always holds, the result becomes False at some point: `_pushed` is 0 when V_train reaches
        the largest c_p.
        """
        if self.frozen:
            return False
        if self._pushed:
            return self._push_condition(PushState(self.counts, self.v_train, self._pushed, self._coming))
        return bool(self._coming) and len(self._coming) == self.counts.live_count

    def _apply_mean(self) -> list[AnyAction]:
        if not self._held:
            return []
        mean = ApplyMean(tuple(sorted(self._held)))
        self._held.clear()
        return [mean]

    def _answer(self, worker: int, iteration: int) -> AnyAction:
        late = self.counts.count[worker] < self.v_train  # True if the worker's next push would also be late
        if self._average and late:
            if self.alone:
                return AnswerPull(worker, iteration, self.v_train)
            self._late.setdefault(worker, False)
        return AnswerPull(worker, iteration)

    def _forget_pull(self, worker: int) -> None:
        if worker in self._filed_under:
            rnd = self._filed_under.pop(worker)
            del self._delayed[rnd][worker]
            if not self._delayed[rnd]:
                del self._delayed[rnd]


# -- Exponential, logarithm and normal quantile, computed only with + - * / and the square root --------------
#
# The results of the C library's functions can differ in the last bit between machines. These functions return
# the same results on every machine, because IEEE 754 defines the rounding of every operation that they use.
# So simulations give bit-identical results on every machine. The errors of `exp` and `log` are at most a few
# units in the last place; the relative error of `normal_quantile` is at most 1.2e-9.

# The leading 32 bits of ln 2, so that the product with a small integer is exact.
LN2_HIGH = 0.693147180369123816490
LN2_LOW = 1.90821492927058770002e-10  # ln 2 - LN2_HIGH
SQRT_HALF = 0.7071067811865476
MOST, LEAST = 709.0, -745.0  # `exp` returns infinity above MOST and 0 below LEAST
TERMS = 17  # number of terms in each series; more terms would not change the result

# Acklam's rational approximation (2003), with separate coefficients for the tails and for the middle.
TAIL = 0.02425
TAIL_OVER = (
    -7.784894002430293e-03,
    -3.223964580411365e-01,
    -2.400758277161838e00,
    -2.549732539343734e00,
    4.374664141464968e00,
    2.938163982698783e00,
)
TAIL_UNDER = (
    7.784695709041462e-03,
    3.224671290700398e-01,
    2.445134137142996e00,
    3.754408661907416e00,
    1.0,
)
MIDDLE_OVER = (
    -3.969683028665376e01,
    2.209460984245205e02,
    -2.759285104469687e02,
    1.383577518672690e02,
    -3.066479806614716e01,
    2.506628277459239e00,
)
MIDDLE_UNDER = (
    -5.447609879822406e01,
    1.615858368580409e02,
    -1.556989798598866e02,
    6.680131188771972e01,
    -1.328068155288572e01,
    1.0,
)


def exp(x: float) -> float:
    """Return e^x, but infinity for `x` > 709 and 0 for `x` < -745.

    >>> round(exp(1.0), 12)
    2.718281828459
    """
    if x > MOST:
        return math.inf
    if x < LEAST:
        return 0.0
    halvings = round(x / (LN2_HIGH + LN2_LOW))
    rest = (x - halvings * LN2_HIGH) - halvings * LN2_LOW
    value = 1.0
    for term in range(TERMS, 0, -1):
        value = 1.0 + rest / term * value
    return math.ldexp(value, halvings)


def log(x: float) -> float:
    """Return the natural logarithm of `x`, for `x` > 0.

    >>> round(log(10.0), 12)
    2.302585092994
    """
    mantissa, exponent = math.frexp(x)
    if mantissa < SQRT_HALF:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = 0.0
    for term in range(2 * TERMS + 1, 0, -2):
        series = series * square + 1.0 / term
    return exponent * LN2_HIGH + (2.0 * ratio * series + exponent * LN2_LOW)


def normal_quantile(p: float) -> float:
    """Return the x for which P(X < x) = `p`, where X is a standard normal variable and 0 < `p` < 1.

    >>> round(normal_quantile(0.975), 6)
    1.959964
    """
    if p > 0.5:
        return -normal_quantile(1.0 - p)
    if p < TAIL:
        q = math.sqrt(-2.0 * log(p))
        return _polynomial(TAIL_OVER, q) / _polynomial(TAIL_UNDER, q)
    q = p - 0.5
    return q * _polynomial(MIDDLE_OVER, q * q) / _polynomial(MIDDLE_UNDER, q * q)


def _polynomial(coefficients: tuple[float, ...], x: float) -> float:
    value = 0.0
    for coefficient in coefficients:
        value = value * x + coefficient
    return value


# -- Tracks how long each worker's iterations take, for models that depend on the workers' speeds ------------
#
# An interval ends with a push. It begins with the worker's previous push, as DSSP defines it. If the model
# calls `begin` when it answers the worker's pull, the interval begins with the answer, and so does not contain
# the time for which the worker has waited. Neither the warm-up of an accelerator nor an edit of the weights is an
# interval, because their durations say nothing about other iterations. The time that a script spends outside of
# training is not part of an interval, either.


@stateful()
class Intervals:
    """The beginning of the current interval of each live worker, and the length of the worker's last interval.

    Attributes:
        last_ticks: worker -> time of the worker's last push or join, or the time given to `begin`.
        interval_ticks: worker -> length of the interval that ended with the worker's last push other than a warm-up,
            without the time outside of training.
    """

    def __init__(self) -> None:
        self.last_ticks: dict[int, int] = {}
        self.interval_ticks: dict[int, int] = {}

    def note(self, event: AnyEvent) -> None:
        """Update the times after the model has accepted an event."""
        match event:
            case PushReceived():
                if not event.warm_up:
                    length_ticks = event.now_ticks - self.last_ticks[event.worker]
                    self.interval_ticks[event.worker] = max(0, length_ticks - event.outside_ticks)
                self.last_ticks[event.worker] = event.now_ticks
            case WorkerJoined():
                self.last_ticks[event.worker] = event.now_ticks
            case WorkerLost() | WorkerFinished():
                del self.last_ticks[event.worker]
                self.interval_ticks.pop(event.worker, None)

    def begin(self, worker: int, now_ticks: int) -> None:
        """Begin a worker's current interval now, instead of at its last push."""
        self.last_ticks[worker] = now_ticks

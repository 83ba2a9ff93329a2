"""The guard of a run: it judges the workers' reports about their pushes, and says when training goes wrong.

The guard is a part of the coordinator, and does not decide how pushes are handled. The guard reports each problem once,
when the problem occurs, with figures, the sync model, the mean staleness and advice. The mode of the guard determines
what it reports, and what else it does:

    off       it reports only what is certain: the weights, or the gradients of all workers, contain NaN or inf
    tell      it reports all problems
    stop      it reports all problems, and ends the run if training diverges; the host keeps the last good weights

In every mode, the guard watches the gradients with NaN that the run skips. If a worker pushes NaN five times in a row,
and the other workers do not, a warning names this worker. After ten times, the worker is taken out. A worker that is
taken out because of NaN does not join again.

With its push, a worker reports the loss, the norm of its gradient, which the check for NaN computes anyway, and the
norm of its weights, estimated from 8192 elements (`Observation`). A live worker observes at most one push in 2 ms, and
reports at most once in 10 ms, which bounds the cost to less than 1 % of a step of 5 ms. In virtual time, all pushes are
observed. With the guard off, only gradients with NaN are reported.

The guard changes neither the weights nor the learning rate. In earlier versions, a mode `temper` halved the learning
rate while training diverged. In 21 of 25 simulated runs in which this happened, the result was better without this
mode. So `temper` now means `tell`. Traces of earlier versions contain the decisions of the mode `temper`
(`RateTempered`), and a replay carries out these decisions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import product
from statistics import median
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec

from ..errors import unknown_name
from ..state import stateful
from .job_cut import CourseCut, GuardCut
from .messages import Observation

GuardMode = Literal["off", "tell", "stop"]

GUARD_MODES: dict[str, GuardMode] = {"off": "off", "tell": "tell", "stop": "stop", "temper": "tell"}
"""Choice of the user -> mode. The choice "temper" comes from earlier versions."""

ON_NAN = ("stop", "skip")
"""The ways to handle a gradient that contains NaN or inf: end the run, or leave the push out."""

DIVERGED = "training"
"""The name of the failed part of the run if the guard has stopped the run."""

NAMED_NAN, MOST_NAN = 5, 10
"""Numbers of pushes with NaN in a row after which a warning names a worker, and after which it is taken out."""

SURE_NAN = 2
"""If every worker has pushed NaN this many times in a row, no worker is expected to push anything else."""

CONFIRMED = 24
"""Number of sound points (two windows, see `WINDOW`) after which the weights before these points are certainly good."""

SMOOTHED = 32
"""Number of pushes over which the mean staleness is smoothed."""

LOWER = "Lower the learning rate or the momentum"
LOCKSTEP = f"{LOWER}, or clip the gradients."
LOOK = "Look at its data and its machine."
UNDECIDED = (
    "With two workers, it is unknown which of them is wrong. Look at the data and the machine of both."
)
RELAXED = (
    f"{LOWER}, clip the gradients, or use --sync bsp with --batch balanced, under which no update is stale."
)


def guard_mode(guard: str | None, *, translated: bool) -> GuardMode:
    """Return the mode of a run's guard.

    Args:
        guard: the user's choice; None for the default, which is "tell" if hyper-parameters are translated, else "off".
        translated: True if hyper-parameters are translated.

    Raises:
        ConfigurationError: there is no such mode.

    >>> guard_mode(None, translated=True), guard_mode(None, translated=False), guard_mode("tell", translated=False)
    ('tell', 'off', 'tell')
    """
    if guard is None:
        return "tell" if translated else "off"
    if guard not in GUARD_MODES:
        raise unknown_name("guard", guard, {*GUARD_MODES.values()})
    return GUARD_MODES[guard]


class GuardVerdict(msgspec.Struct, frozen=True):
    """A finding of the guard, and its consequences.

    Attributes:
        words: what has been noticed, in sentences.
        stops: True if the run must end.
        takes_out: worker that is taken out of the run; None if no worker is taken out.
    """

    words: str
    stops: bool = False
    takes_out: int | None = None


@stateful(fixed="mode _skips_nan")
class Guard:
    """Judges the pushes of all workers of a run.

    Args:
        mode: what the guard does.
        skips_nan: True if gradients with NaN or inf are not pushed, False if the first such gradient ends the run.

    Attributes:
        mode: what the guard does.
        points: number of points that have been judged, of all parameter sets.
        sound: number, counted from 1, of the last of these points at which nothing was wrong; 0 if there is none. See
            `CONFIRMED`.
    """

    def __init__(self, mode: GuardMode = "off", *, skips_nan: bool = False) -> None:
        self.mode = mode
        self.points = self.sound = 0
        self._skips_nan = skips_nan
        self._said: set[tuple[str, int]] = set()  # (kind, worker or -1)
        self._courses: dict[int, Course] = {}
        self._outliers: dict[int, Outliers] = {}
        self._nan: dict[tuple[int, int], int] = {}  # (worker, set) -> number of pushes with NaN in a row
        self._last_updates: dict[int, int] = {}
        self._staleness = 0.0

    def judged(self) -> tuple[int, int]:
        """Return the number of points that were judged, and the number of the last sound point."""
        return self.points, self.sound

    def take(
        self, worker: int, seen: Observation, *, present: Collection[int], sync: str, lockstep: bool
    ) -> list[GuardVerdict]:
        """Judge a push.

        Args:
            worker: the worker that has pushed.
            seen: what the worker has observed about this push.
            present: the workers that take part in the run.
            sync: the sync model in force.
            lockstep: True if the model keeps all workers in lockstep.
        """
        self._note_staleness(worker, seen.updates)
        where = f"update {seen.updates}, {sync}, mean staleness {self._staleness:.1f}"
        advice = LOCKSTEP if lockstep else RELAXED
        if seen.weights is not None and not math.isfinite(seen.weights):
            return self._certain("weights", f"The weights contain NaN or inf ({where}).", advice)
        if seen.gradient is None:
            return []
        key = worker, seen.set_index
        if not math.isfinite(seen.gradient):
            self._nan[key] = self._nan.get(key, 0) + 1
            return self._of_nan(worker, seen, present, where, advice)
        self._nan.pop(key, None)
        if self.mode == "off":
            return []
        verdicts = self._of_worker(worker, seen, where)
        course = self._courses.setdefault(seen.set_index, Course())
        if not course.take(seen):
            return verdicts
        self.points += 1
        symptom = course.symptom(loss_counts=len(self._courses) == 1)
        if symptom is None:
            if course.is_full:
                self.sound = self.points
            return verdicts
        return verdicts + self._diverges(
            symptom.kind, f"Training diverges ({where}): {symptom.words}. {advice}"
        )

    def cut(self) -> GuardCut:
        """Return the state with which the guard of a resumed run begins."""
        courses = (course.cut(set_index) for set_index, course in sorted(self._courses.items()))
        return GuardCut(tuple(filter(None, courses)))

    def resume(self, cut: GuardCut) -> None:
        """Go on from the state of an earlier run's guard, which says how training began."""
        self._courses = {each.set_index: Course.resumed(each) for each in cut.courses}

    def left(self, worker: int) -> None:
        """Forget a worker that has left the run."""
        self._last_updates.pop(worker, None)
        self._said -= {("worker", worker), ("pair", -1)}
        for outliers in self._outliers.values():
            outliers.forget(worker)
        for key in [key for key in self._nan if key[0] == worker]:
            del self._nan[key]

    def _note_staleness(self, worker: int, updates: int) -> None:
        """Count other workers' updates between the weights on which a worker's last two pushes were computed.

        This number is the staleness of the earlier push.
        """
        before = self._last_updates.get(worker)
        self._last_updates[worker] = updates
        if before is not None and updates > before:
            self._staleness += (updates - before - 1 - self._staleness) / SMOOTHED

    def _certain(self, kind: str, words: str, advice: str) -> list[GuardVerdict]:
        """Report a problem that is reported in every mode, but only once."""
        if not self._is_new(kind):
            return []
        return [GuardVerdict(f"{words} {advice}", stops=self.mode == "stop")]

    def _is_new(self, kind: str, worker: int = -1) -> bool:
        """Return True if this kind of problem has not been reported yet, and record it as reported."""
        new = (kind, worker) not in self._said
        self._said.add((kind, worker))
        return new

    def _of_nan(
        self, worker: int, seen: Observation, present: Collection[int], where: str, advice: str
    ) -> list[GuardVerdict]:
        """Judge a push whose gradient contains NaN or inf."""
        key = worker, seen.set_index
        if not self._skips_nan:  # the worker fails, and says why
            words = f"The gradient of {seen.parameter!r} contains NaN or inf at worker {worker} ({where})."
            return [GuardVerdict(f"{words} {advice}", stops=True)] if self.mode == "stop" else []
        streaks = [self._nan.get((other, seen.set_index), 0) for other in present]
        streak = self._nan[key]
        if all(streaks):
            # This push says nothing about this worker alone, so it does not count toward a longer row.
            self._nan[key] = max(streak - 1, min(streak, SURE_NAN))
            if any(each < SURE_NAN for each in streaks):
                return []
            words = (
                "The gradients of all workers contain NaN or inf, for example that of "
                f"{seen.parameter!r} ({where})."
            )
            return self._certain("gradients", words, f"Nothing is learned any more. {advice}")
        if streak not in (NAMED_NAN, MOST_NAN):
            return []
        words = (
            f"Worker {worker} has sent NaN or inf {streak} times in a row, the last time in the gradient of "
            f"{seen.parameter!r}, and the other workers have not ({where})."
        )
        if streak == NAMED_NAN:
            return [GuardVerdict(f"{words} After {MOST_NAN} times, the run continues without it. {LOOK}")]
        return [GuardVerdict(f"{words} The run continues without it. {LOOK}", takes_out=worker)]

    def _of_worker(self, worker: int, seen: Observation, where: str) -> list[GuardVerdict]:
        """Judge whether a worker differs from the other workers."""
        outliers = self._outliers.setdefault(seen.set_index, Outliers())
        outliers.take(worker, seen)
        difference = outliers.difference(worker)
        if difference is None:
            return []
        if (other := difference.other) is not None:
            if not self._is_new("pair"):
                return []
            words = f"Worker {worker} differs from worker {other} ({where}): {difference.words}. {UNDECIDED}"
        elif self._is_new("worker", worker):
            words = f"Worker {worker} differs from all others ({where}): {difference.words}. {LOOK}"
        else:
            return []
        return [GuardVerdict(words)]

    def _diverges(self, kind: str, words: str) -> list[GuardVerdict]:
        """Report that training diverges, once for each kind of symptom."""
        return [GuardVerdict(words, stops=self.mode == "stop")] if self._is_new(kind) else []


# -- Decides from the workers' reports about their pushes whether training diverges --------------------------
#
# A `Course` follows one parameter set. Pushes that were computed from the same weights form one *point*, so a window of
# points is a window of updates under every sync model: under bsp, all pushes of a round form a point; under asp, almost
# every push is a point of its own. Each quantity is compared with its value at the beginning of training, when nothing
# had diverged yet:
#
# - the *loss*: let b be the loss at the beginning, and r the largest decrease below b so far (0 if there is
#   none). The loss has risen if it is above b + max(2 |b|, r). If r is at least 0.4 |b|, the loss has relapsed
#   if it is back above b - r / 4. Warm restarts and noise stay below both bounds. If the data change, the loss
#   jumps and falls again, but the weights stay where they were. So a relapse counts only if the norm of the
#   weights has grown as well, or if the relapse lasts. A script with several optimizers may train an adversarial
#   game, whose loss does not show progress, so the loss of such a script is not used;
# - the *gradient*: its norm is more than ten times the norm at the beginning, and more than ten times the
#   median of every earlier window;
# - the *weights*: their norm is at least five times the norm at the beginning, and has tripled within twenty
#   points. If no loss is known, their norm must be ten times the norm at the beginning, since small initial
#   weights grow in healthy training.
#
# A single batch proves nothing: ten of twelve points must show the same symptom. A loss or a norm of gradients
# that falls within the window counts as recovering. The norm of the weights does not depend on single batches,
# so three points suffice for this norm.

WINDOW = 12
"""Number of points that are judged together. A symptom at ten of these points suffices (see `MOST_NORMAL`)."""

MOST_NORMAL = 2
"""Maximum number of points in the window that need not show a symptom: a lucky batch must not hide the symptom."""

FIRST_NORMS = 3
"""Number of pushes at the beginning of training. The medians over these pushes count as the values at the beginning.
Usually, all of these pushes were computed on the initial weights."""

RISE = 2.0
"""A loss has risen if it exceeds the loss at the beginning by more than this multiple of the loss at the beginning."""

LEARNED, KEPT = 0.4, 0.25
"""The model has learned something if the loss has fallen by the first share of the loss at the beginning. What was
learned is lost if less than the second share of this decrease remains."""

FALLING = 0.72
"""A loss or a norm falls if it decreases in this share of the pairs of an earlier and a later point, among the points
that show the symptom. Without a trend, this happens in one window in ten (Mann and Whitney's U)."""

GRADIENT = 10.0
"""The norm of a gradient is abnormal if it exceeds all earlier usual norms by this factor."""

BEST = 0.1
"""Larger gradients are no symptom while the loss exceeds its lowest level by at most this share."""

WEIGHTS, WEIGHTS_ALONE, TRIPLED = 5.0, 10.0, 3.0
"""Factors by which the norm of the weights must have grown: since the beginning if the loss is known, since the
beginning if the loss is unknown, and within `LATELY` points."""

LATELY = 20
"""Number of points within which the norm of the weights must have tripled."""

FALLEN = 0.1
"""Weights may grow if the loss has fallen by this share since the beginning: small initial weights have to grow."""

FEW = 3
"""Number of points in a row at which the norm of the weights must have tripled."""

MOVED, LASTING = 1.03, 100
"""A relapse of the loss counts if the norm of the weights has grown by this factor lately, or if the relapse has lasted
for this number of points. A change of the data is no relapse: the weights do not grow, and the loss falls again."""


class Symptom(msgspec.Struct, frozen=True):
    """A symptom of training that goes wrong.

    Attributes:
        kind: "loss", "gradient" or "weights".
        words: description of the symptom with figures, as a clause.
    """

    kind: str
    words: str


class Point(NamedTuple):
    """The means of what was observed about the pushes that were computed from the same weights.

    Attributes:
        loss: loss; None if it is unknown.
        gradient: norm of the gradient of a worker.
        weights: norm of the weights.
    """

    loss: float | None
    gradient: float
    weights: float

    @classmethod
    def of(cls, pushes: Sequence[Observation]) -> Point:
        losses = [
            math.inf if math.isnan(each.loss) else each.loss for each in pushes if each.loss is not None
        ]
        return cls(
            _mean(losses) if losses else None,
            _mean([each.gradient or 0.0 for each in pushes]),
            _mean([each.weights or 0.0 for each in pushes]),
        )


@stateful()
class Course:
    """The course of the training of one parameter set."""

    def __init__(self) -> None:
        self._first: list[Observation] = []  # the first pushes
        self._begun: Point | None = None  # the beginning; None until it is known
        self._open: list[Observation] = []  # the pushes of the point that is not complete
        self._window: deque[Point] = deque(maxlen=WINDOW)
        self._weights: deque[float] = deque(maxlen=LATELY)
        self._gradients: deque[float] = deque(maxlen=LATELY)  # recent levels: medians over a window
        self._usual = 0.0  # highest level of the gradient before those in `_gradients`
        self._level: float | None = None  # level of the loss: its median over the window
        self._lowest = math.inf  # lowest level of the loss
        self._relapsed = 0  # number of points for which the relapse of the loss has lasted

    @classmethod
    def resumed(cls, cut: CourseCut) -> Course:
        """Return the course of a resumed run, which is compared with the beginning of the job."""
        course = cls()
        course._begun = Point(cut.loss, cut.gradient, cut.weights)
        course._usual = cut.usual
        course._lowest = math.inf if cut.lowest is None else cut.lowest
        return course

    def cut(self, set_index: int) -> CourseCut | None:
        """Return the state with which a resumed run continues this course; None if the beginning is not known yet."""
        if self._begun is None:
            return None
        lowest = self._lowest if math.isfinite(self._lowest) else None
        return CourseCut(set_index, *self._begun, max([self._usual, *self._gradients]), lowest)

    @property
    def is_full(self) -> bool:
        """True if the window is full, so that any symptom in it would have been noticed."""
        return len(self._window) == WINDOW

    def take(self, seen: Observation) -> bool:
        """Record a push with a finite gradient. Return True if the previous point is complete now."""
        if self._begun is None:
            self._begin(seen)
        complete = bool(self._open) and seen.updates != self._open[0].updates
        if complete:
            self._close(Point.of(self._open))
            self._open.clear()
        self._open.append(seen)
        return complete

    def symptom(self, *, loss_counts: bool) -> Symptom | None:
        """Return the symptom at the last point; None if nothing is wrong.

        Args:
            loss_counts: False if the loss says nothing about progress.
        """
        begun = self._begun
        if begun is None:
            return None
        if not loss_counts:
            begun = begun._replace(loss=None)
        return self._of_loss(begun) or self._of_gradient(begun) or self._of_weights(begun)

    def _begin(self, seen: Observation) -> None:
        self._first.append(seen)
        if len(self._first) < FIRST_NORMS:
            return
        points = [Point.of([each]) for each in self._first]
        loss = _middle([point.loss for point in points])
        self._begun = Point(
            loss if loss is not None and math.isfinite(loss) else None,
            median(point.gradient for point in points),
            points[0].weights,
        )

    def _close(self, point: Point) -> None:
        self._window.append(point)
        self._weights.append(point.weights)
        if not self.is_full:
            return
        if len(self._gradients) == LATELY:
            self._usual = max(self._usual, self._gradients[0])
        self._gradients.append(median([each.gradient for each in self._window]))
        self._level = _middle([each.loss for each in self._window])
        if self._level is not None:
            self._lowest = min(self._lowest, self._level)

    def _of_loss(self, begun: Point) -> Symptom | None:
        losses = [point.loss for point in self._window if point.loss is not None]
        if begun.loss is None or self._level is None or len(losses) < WINDOW:
            return None
        reach = max(0.0, begun.loss - self._lowest)
        top = begun.loss + max(RISE * abs(begun.loss), reach)
        back = begun.loss - KEPT * reach
        lost = reach >= LEARNED * abs(begun.loss) and _most_above(back, losses)
        self._relapsed = self._relapsed + 1 if lost else 0
        figures = f"{begun.loss:.3g} at the beginning, {self._lowest:.3g} at best, and is {self._level:.3g}"
        if _stays_above(top, losses):
            return Symptom("loss", f"the loss grows: it was {figures}")
        moved = lost and self._weights[-1] >= MOVED * min(self._weights)
        if (moved and _stays_above(back, losses)) or self._relapsed >= LASTING:
            return Symptom("loss", f"what was learned is lost: the loss was {figures}")
        return None

    def _of_gradient(self, begun: Point) -> Symptom | None:
        if not self.is_full:
            return None
        level = None if begun.loss is None else self._level
        if level is not None and level <= self._lowest + BEST * abs(self._lowest):
            return None
        gradients = [point.gradient for point in self._window]
        usual = max(begun.gradient, self._usual)
        if not usual or not _stays_above(GRADIENT * usual, gradients):
            return None
        return Symptom(
            "gradient",
            f"the norm of the gradients is {median(gradients):.3g}, and was at most {usual:.3g} before",
        )

    def _of_weights(self, begun: Point) -> Symptom | None:
        factor = WEIGHTS_ALONE if begun.loss is None else WEIGHTS
        least = max(factor * begun.weights, TRIPLED * min(self._weights))
        if not begun.weights or self._weights[-1] < least or len(self._window) < FEW:
            return None
        latest = list(self._window)[-FEW:]
        if min(point.weights for point in latest) < least:
            return None
        level = _middle([point.loss for point in latest])
        if begun.loss is not None and level is not None and level < begun.loss - FALLEN * abs(begun.loss):
            return None
        return Symptom(
            "weights",
            f"the weights explode: their norm was {begun.weights:.3g}, and is {latest[-1].weights:.3g}",
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _middle(values: Sequence[float | None]) -> float | None:
    """Return the median of the values that are known; None if no value is known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _most_above(bound: float, values: Sequence[float]) -> bool:
    """Return True if almost all values exceed a bound."""
    return sum([value <= bound for value in values]) <= MOST_NORMAL


def _stays_above(bound: float, values: Sequence[float]) -> bool:
    """Return True if almost all values of a window exceed a bound, and do not fall."""
    if not _most_above(bound, values):
        return False
    above = [value for value in values if value > bound]
    half = len(above) // 2
    pairs = [after < before for before, after in product(above[:half], above[half:])]
    return sum(pairs) < FALLING * len(pairs)


# -- Finds a worker whose losses or gradients differ from those of all others, as with corrupted data --------
#
# Near the end of training, the losses and the norms of single batches have heavy tails: one hard sample makes
# a norm a hundred times as large as that of the next batch. So a ratio proves nothing by itself. The test asks how
# unlikely a worker's values are among the values of the other workers:
#
# - **One push.** Let y be the logarithm of half the worker's value. Take the logarithms of the last `WINDOW`
#   values of another worker, and y itself. The p-value of y with respect to the other worker is the share of
#   these numbers that are at least y. Where y is larger than all logarithms of the other worker, p decreases
#   exponentially as y grows. The scale of this decrease is that of the tail of the logarithms, by Hill's
#   estimator: the more the values of the other worker scatter, the less a large value says. The largest p over
#   all other workers counts, so a worker that resembles another worker is no outlier.
# - **Batches of unequal sizes.** A value is a mean over a batch. If the batches of the other worker are k times as
#   large, only 1/k of the value is compared, because a sum over fewer samples is usually not larger. The same
#   holds if they are k times as small, because some losses, such as contrastive ones, grow with the batch.
# - **Many pushes.** If the worker's values have the same distribution as the values of the other workers, then
#   1 / (2 sqrt(p)) has a mean of at most 1, for any distribution (a p-to-e calibrator [1]). So each product of
#   these numbers over consecutive pushes is a test martingale. The largest product that ends at the latest push
#   is kept (Page's CUSUM, at least 1). The worker is named when this product reaches `RARE`.
# - **False alarms.** If the pushes of a healthy worker are independent, the worker is named once in `RARE` =
#   10**6 of its pushes on average, by Ville's inequality, which allows a test after every push. Pushes are not
#   independent, since samples come back in each epoch. Two rules therefore make false alarms rarer. Only half of a
#   value is compared, because the data of the workers may be unequal. And all values below a share of the value at the
#   beginning count as equal, because a fault does no harm while the values are so small. In 200 healthy runs, each
#   judged by three guards that began after 0 %, 40 % and 80 % of the run, no worker was named
#   (`tests/core/test_outliers.py`).
#
# One push increases the logarithm of the product by at most `MOST`, so three pushes are needed. A worker with a fault
# that multiplies usual losses by ten is named after three to five of its pushes: with four workers, within 20 updates.
#
# If only one other worker is known, it is unknown which of the two is wrong. The finding then names both workers.
#
# [1] Vovk, Wang: E-values: calibration, combination and applications. The Annals of Statistics 49(3), 2021.

LEAST = 5
"""Number of values that must be known of a worker before other workers are compared with it."""

FIRST_COMPARED = 8
"""The median of this many values, the first ones from all workers together, is the value at the beginning."""

FACTOR = 2.0
"""Factor by which the values of healthy workers may differ, because their data differ."""

LEAST_LOSS, LEAST_GRADIENT = 0.25, 0.1
"""Shares of the value at the beginning below which all losses, and all norms of gradients, count as equal."""

ROUNDING = 1e-6
"""Losses below this value are mostly rounding errors of float32 numbers."""

LEAST_TAIL = 0.25
"""Least scale of the tail of the logarithms, so that after nearly equal values, a slightly larger value is not
suspicious."""

RARE = 1e6
"""Product at which a worker is named. It is also the mean number of a healthy worker's pushes between false alarms."""

MOST = 5.0
"""Maximum increase of the logarithm of the product with one push."""

HUGE = 1e30  # replaces larger values, and infinite ones


class Deviation(NamedTuple):
    """The difference between a worker and all other workers.

    Attributes:
        words: what differs, as a clause about the worker.
        other: the only other worker that is known; None if there are several.
    """

    words: str
    other: int | None


@stateful()
class Outliers:
    """The latest losses and norms of gradients of each worker."""

    def __init__(self) -> None:
        self._losses = Values(LEAST_LOSS, ROUNDING)
        self._gradients = Values(LEAST_GRADIENT, 0.0)

    def take(self, worker: int, seen: Observation) -> None:
        """Record a push with a finite gradient."""
        if seen.gradient is not None:
            self._gradients.take(worker, seen.gradient, seen.samples)
        if seen.loss is not None and not math.isnan(seen.loss):
            self._losses.take(worker, seen.loss, seen.samples)

    def forget(self, worker: int) -> None:
        """Forget a worker that has left."""
        self._losses.forget(worker)
        self._gradients.forget(worker)

    def difference(self, worker: int) -> Deviation | None:
        """Return how the pushes of a worker differ from those of all other workers; None if they do not differ."""
        for values, name in ((self._losses, "its losses"), (self._gradients, "the norms of its gradients")):
            if values.stands_out(worker):
                own, largest, other = values.compared(worker)
                whose = "the others" if other is None else f"worker {other}"
                return Deviation(
                    f"{name} are usually {own:.3g}, those of {whose} at most {largest:.3g}", other
                )
        return None


@stateful()
class Values:
    """The latest values of one kind, such as losses, of each worker, and the evidence that the worker is an outlier.

    Args:
        share: share of the value at the beginning below which all values count as equal.
        rounding: absolute value below which all values count as equal.
    """

    def __init__(self, share: float, rounding: float) -> None:
        self._share = share
        self._rounding = rounding
        self._first: list[float] = []  # the first values of all workers
        self._latest: dict[int, Latest] = {}
        self._evidence: dict[int, float] = {}  # worker -> logarithm of the product, if it is larger than 0

    def take(self, worker: int, value: float, samples: int) -> None:
        """Record a value of a worker, and compare it with the latest values of all other workers.

        Args:
            worker: the worker.
            value: the mean over a batch.
            samples: number of samples in this batch; 0 if unknown.
        """
        if len(self._first) < FIRST_COMPARED:
            self._first.append(value)
        begun = median(self._first)
        level = max(self._share * begun, self._rounding)
        if level > 0:
            own = math.log(min(max(value, level), HUGE))
            if len(self._first) == FIRST_COMPARED:
                added = self._compare(worker, own - math.log(FACTOR), samples) if value > level else -math.inf
                self._evidence[worker] = max(0.0, self._evidence.get(worker, 0.0) + added)
            self._latest.setdefault(worker, Latest()).take(value, own, samples)

    def forget(self, worker: int) -> None:
        self._latest.pop(worker, None)
        self._evidence.pop(worker, None)
        # Evidence against a worker counts only as long as there is another worker with which it can be compared.
        known = self._known()
        self._evidence = {w: each for w, each in self._evidence.items() if any(other != w for other in known)}

    def stands_out(self, worker: int) -> bool:
        """Return True if the latest values of a worker are very unlikely among those of every other worker."""
        return self._evidence.get(worker, 0.0) >= math.log(RARE)

    def compared(self, worker: int) -> tuple[float, float, int | None]:
        """Return a worker's usual value, the largest usual value of the other workers, and the only other worker.

        The last of these is None if there are several other workers.
        """
        others = [other for other in self._known() if other != worker]
        largest = max(self._latest[other].usual for other in others)
        return self._latest[worker].lately, largest, others[0] if len(others) == 1 else None

    def _known(self) -> list[int]:
        return [worker for worker, latest in self._latest.items() if latest.is_known]

    def _compare(self, worker: int, y: float, samples: int) -> float:
        """Return log(1 / (2 sqrt(p))), or 0 if fewer than half of the other workers are known.

        Here, p is the largest p-value of `y`, from a batch of this number of samples, with respect to any other known
        worker.
        """
        smallest, known, others = MOST, 0, 0
        for other, latest in self._latest.items():
            if other == worker:
                continue
            others += 1
            if latest.is_known:
                known += 1
                known_sizes = samples > 0 and latest.samples > 0
                larger = abs(math.log(latest.samples / samples)) if known_sizes else 0.0
                smallest = min(smallest, -latest.log_p(y - larger) / 2 - math.log(2))
                if smallest < 0:  # the value resembles those of this other worker, as nearly all values do
                    return smallest
        return smallest if known and 2 * known >= others else 0.0


@stateful()
class Latest:
    """The latest values of one worker, and the tail of their logarithms.

    Attributes:
        samples: number of samples in the batch of the last value; 0 if unknown.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._logs: deque[float] = deque(maxlen=WINDOW)
        self._tail = LEAST_TAIL

    def take(self, value: float, log: float, samples: int) -> None:
        self.samples = samples
        self._values.append(value)
        self._logs.append(log)
        largest = sorted(self._logs, reverse=True)
        count = max(2, len(largest) // 4)
        if len(largest) > count:
            self._tail = max(LEAST_TAIL, sum(largest[:count]) / count - largest[count])

    @property
    def is_known(self) -> bool:
        return len(self._values) >= LEAST

    @property
    def usual(self) -> float:
        return median(self._values)

    @property
    def lately(self) -> float:
        """The median of the last three values only, because something may have changed before them."""
        return median(list(self._values)[-3:])

    def log_p(self, y: float) -> float:
        """Return the logarithm of the p-value of y with respect to these values."""
        largest, count = max(self._logs), len(self._logs) + 1
        if y > largest:
            return -math.log(count) - (y - largest) / self._tail
        return math.log((1 + sum(log >= y for log in self._logs)) / count)


# -- Keeps weights that are certainly good: nothing was wrong when they were taken, and for some time after that
#
# A divergence is noticed up to 20 updates after it begins. So the weights that are taken now are only a
# candidate, until `CONFIRMED` further points have been sound; then the candidate replaces the good weights. At most two
# copies are kept.

Weights = TypeVar("Weights")


class GoodWeights(Generic[Weights]):
    """The last good weights, and the candidate that may replace them.

    Args:
        judged: returns the number of points that the guard of the run has judged, and the number of the last sound
            point.
    """

    def __init__(self, judged: Callable[[], tuple[int, int]]) -> None:
        self._judged = judged
        self._good: Weights | None = None
        self._candidate: tuple[Weights, int] | None = None  # the weights, and number of points judged before

    @property
    def wanted(self) -> bool:
        """True if weights that are taken now could become the good weights."""
        self._confirm()
        points, sound = self._judged()
        return self._candidate is None and 0 < points == sound

    def take(self, weights: Weights) -> None:
        """Take weights as the candidate. They replace an earlier candidate that has not been confirmed."""
        self._candidate = weights, self._judged()[0]

    @property
    def good(self) -> Weights | None:
        """The last weights that are certainly good; None if there are none."""
        self._confirm()
        return self._good

    def _confirm(self) -> None:
        if self._candidate is None:
            return
        (weights, before), (points, sound) = self._candidate, self._judged()
        if sound >= before + CONFIRMED:
            self._good, self._candidate = weights, None
        elif sound < points:  # the candidate may have been taken when something was wrong already
            self._candidate = None

"""Decides from what the workers report of their pushes whether training diverges.

A `Course` follows one parameter set. Pushes that were computed from the same weights form one *point*, so a window of
points is a window of updates under every sync model: under bsp, all workers of a round form a point, under asp almost
every push. Everything is compared with how training began, when nothing had diverged yet:

- the *loss*: with a beginning b and a reach r (how far below b the loss has come, which is positive for what has been
  learned), it has risen if it is above b + max(2 |b|, r), and has relapsed if it is back above b - r / 4, where r is
  at least 0.4 |b|. Warm restarts and noise stay below both. If the data change, the loss jumps and falls again, but
  the weights stay where they were: so it counts as a relapse only if their norm has grown, too, or if it lasts. A
  loss in an adversarial game says nothing, so it is not used if the script has several optimizers;
- the *gradient*: its norm is more than ten times larger than any level of it that was usual for a window;
- the *weights*: their norm is at least five times that of the beginning, and tripled within twenty points. Without a
  loss, it must be ten times that of the beginning, since small initial weights grow, too.

A single batch proves nothing: ten of twelve points must show the same, and a loss or a gradient that falls within the
window counts as recovering. Weights do not recover by chance, so three points suffice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import NamedTuple

import msgspec

from ...state import stateful
from ..protocol.job_cut import CourseCut
from ..protocol.messages import Observation

__all__ = ["WINDOW", "Course", "Symptom"]

WINDOW = 12
"""Number of points that are judged together: with ten of them, a divergence is named within 20 updates."""

MOST_NORMAL = 2
"""Maximum number of points in the window that do not show a symptom. More would wait for every lucky batch."""

FIRST = 3
"""Number of pushes whose median is the beginning: usually, all of them are computed from the initial weights."""

RISE = 2.0
"""A loss has risen if it exceeds its beginning by more than this multiple of it."""

LEARNED, KEPT = 0.4, 0.25
"""Something has been learned if the loss has fallen by the first share of its beginning. It is lost if less than the
second share of what was learned remains."""

FALLING = 0.72
"""A loss or a norm falls if this share of the pairs of an earlier and a later point fall, among those that show the
symptom. Without a trend, one window in ten has so many (Mann and Whitney's U)."""

GRADIENT = 10.0
"""A gradient is beyond anything seen if its norm is larger by this factor."""

BEST = 0.1
"""Larger gradients are nothing to worry about while the loss is within this share of its lowest level."""

WEIGHTS, WEIGHTS_ALONE, TRIPLED = 5.0, 10.0, 3.0
"""Growth of the norm of the weights: since the beginning, the same if no loss is known, and in twenty points."""

LATELY = 20
"""Number of points in which the weights must have tripled."""

FALLEN = 0.1
"""Weights may grow if the loss has fallen by this share of its beginning: small initial weights must."""

FEW = 3
"""Number of points in a row at which the weights must have tripled."""

MOVED, LASTING = 1.03, 100
"""What was learned is lost if the norm of the weights has grown by this factor lately, or if it has been lost for
this number of points. If only the data have changed, the weights have not, and the loss falls again."""


class Symptom(msgspec.Struct, frozen=True):
    """What shows that training goes wrong.

    Attributes:
        kind: "loss", "gradient" or "weights".
        words: the same in words with figures, as a clause.
    """

    kind: str
    words: str


class Point(NamedTuple):
    """What was seen of the pushes that were computed from the same weights: means over the pushes.

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


@stateful(decides="_first _begun _open _window _weights _gradients _usual _level _lowest _relapsed")
class Course:
    """The course of the training of one parameter set."""

    def __init__(self) -> None:
        self._first: list[Observation] = []  # the first pushes
        self._begun: Point | None = None  # the beginning; None until it is known
        self._open: list[Observation] = []  # the pushes of the point that is not complete
        self._window: deque[Point] = deque(maxlen=WINDOW)
        self._weights: deque[float] = deque(maxlen=LATELY)
        self._gradients: deque[float] = deque(maxlen=LATELY)  # recent levels of the gradient
        self._usual = 0.0  # highest level of the gradient before them
        self._level: float | None = None  # level of the loss
        self._lowest = math.inf  # lowest level of the loss
        self._relapsed = 0  # number of points for which what was learned has been lost

    @classmethod
    def resumed(cls, cut: CourseCut) -> Course:
        """Return the course of a run that goes on: it is compared with how the job began."""
        course = cls()
        course._begun = Point(cut.loss, cut.gradient, cut.weights)
        course._usual = cut.usual
        course._lowest = math.inf if cut.lowest is None else cut.lowest
        return course

    def cut(self, set_index: int) -> CourseCut | None:
        """Return what a run needs to go on with this course; None if the beginning is not known yet."""
        if self._begun is None:
            return None
        lowest = self._lowest if math.isfinite(self._lowest) else None
        return CourseCut(set_index, *self._begun, max([self._usual, *self._gradients]), lowest)

    @property
    def is_full(self) -> bool:
        """True if the window is full, so that what has happened in it has been noticed."""
        return len(self._window) == WINDOW

    def take(self, seen: Observation) -> bool:
        """Record a push with a finite gradient. Return True if this completes a point."""
        if self._begun is None:
            self._begin(seen)
        complete = bool(self._open) and seen.updates != self._open[0].updates
        if complete:
            self._close(Point.of(self._open))
            self._open.clear()
        self._open.append(seen)
        return complete

    def forget_window(self) -> None:
        """Judge only what comes from now on, because something was changed."""
        self._window.clear()
        self._weights.clear()
        self._relapsed = 0

    def symptom(self, *, loss_counts: bool) -> Symptom | None:
        """Return what is wrong at the last point, or None.

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
        if len(self._first) < FIRST:
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
    """Return the median of the values that are known; None if there are none."""
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

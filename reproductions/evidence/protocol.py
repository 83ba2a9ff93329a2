"""How the contenders are tuned and evaluated, for any problem.

Each contender is tuned by itself, for each size of the batches and each measure. The settings are learning rates that
differ by a factor of sqrt 2, three values of momentum, and the variants of the contender, with the same number of
settings for every contender: with more variants, fewer learning rates of each. If the best learning rate is at an end,
more of them are added. A setting that diverges with any tuning seed is rejected. The evaluation uses other seeds than
the tuning. The result of a run that does not reach the target, or that diverges, is infinite: "never".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from ..grid_search import Point, Score, search_lines

TUNING_SEEDS = (100, 101, 102)
EVALUATION_SEEDS = tuple(range(16))
MOMENTA = (0.0, 0.5, 0.9)
STEPS = range(-20, 8)
"""The steps of the learning rates that are ever used (see `rate_of`)."""

DECAYS = ("constant", "with time", "with gradients")
"""How the learning rate decays: not at all, linearly with time, or linearly with the number of gradients."""


def rate_of(momentum: float, step: int) -> float:
    """Return the learning rate for a step. The same steps are useful for all values of momentum.

    >>> [round(rate_of(0.9, step), 3) for step in (-2, 0, 2)]
    [0.158, 0.316, 0.632]
    """
    return float(math.sqrt(1 - momentum) * 2.0 ** (step / 2))


class Setting(NamedTuple):
    """A setting with which a run is made: how the learning rate decays, the momentum, and the step of the rate."""

    decay: str
    momentum: float
    step: int


def setting_of(point: Point, measure: str) -> Setting:
    """Return the setting for a point of the grid and a measure."""
    decay = {"loss at equal time": "with time", "loss at equal gradients": "with gradients"}
    return Setting(decay.get(measure, "constant"), point.momentum, point.step)


class Outcome(NamedTuple):
    """The outcome of a run."""

    value: float  # the measure; infinite if the target was not reached
    final: float  # the loss at the end, by which settings are compared that do not reach the target
    diverged: bool  # True if the loss was ever above twice the initial loss, or not a number

    @property
    def result(self) -> float:
        """The measure; infinite if the run has diverged."""
        return math.inf if self.diverged else self.value


def tuned(
    outcomes: Callable[[Point], Sequence[Outcome]], variants: int, middle: int, budget: int
) -> tuple[Point, int]:
    """Return the best setting, and the number of settings that were tried.

    Args:
        outcomes: function that returns the outcomes of a setting with the tuning seeds.
        variants: number of variants of the contender.
        middle: the step at which the tuning begins.
        budget: number of settings before learning rates are added.
    """

    def score(point: Point) -> Score:
        found = outcomes(point)
        if any(outcome.diverged for outcome in found):
            return Score(math.inf, math.inf)
        return Score(median(o.value for o in found), median(o.final for o in found))

    starts = [Point(momentum, middle, variant) for variant in range(variants) for momentum in MOMENTA]
    scores = search_lines(score, starts, max(3, budget // len(starts)), len(STEPS))
    return min(scores, key=lambda point: (scores[point], point)), len(scores)

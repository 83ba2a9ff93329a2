"""The search for a best setting: which points of a grid of learning rate x momentum to measure next.

The learning rates are 0.1 * 2^(step/2) for whole steps; each momentum has a grid of its own. A measurement is a
whole run, so it is spent in three rounds: *coarse*, with one seed, a factor of 2 apart, going on while the best
point is the grid's last; *fine*, the points between the best one and its neighbours; *final*, the best few with
all seeds, judged by the median, and then the winner's neighbours too, until one wins against both of its own. So
the point that wins is never on an edge, and never won because its neighbour had bad luck with one seed.

Pure: it knows nothing of runs; whoever calls it says how a point is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

__all__ = ["Point", "Score", "learning_rate", "search"]

COARSE = 2  # steps; a factor of 2
FINALISTS = 3


class Point(NamedTuple):
    """A point of the grid."""

    momentum: float
    step: int


class Score(NamedTuple):
    """How good a point is; the lesser of two is the better."""

    time_to_target_s: float  # infinite if it was not reached
    final_error: float  # 1 - accuracy; decides between equal times


Measure = Callable[[Point, int], Score]
"""Measures a point with a seed."""


def learning_rate(step: int) -> float:
    """The learning rate of a step, to two digits.

    >>> [learning_rate(step) for step in (-2, -1, 0, 1, 2)]
    [0.05, 0.071, 0.1, 0.14, 0.2]
    """
    return float(f"{0.1 * 2 ** (step / 2):.2g}")


def search(measure: Measure, starts: Mapping[float, int], seeds: Sequence[int]) -> dict[Point, Score]:
    """Find the best point.

    Args:
        measure: called at most once for each point and seed.
        starts: momentum -> the step around which its grid begins.
        seeds: of the final round; the first one is that of the others.

    Returns:
        the finalists with their medians over all seeds, the best first.
    """
    first: dict[Point, Score] = {}

    def try_once(*points: Point) -> None:
        for point in points:
            if point not in first:
                first[point] = measure(point, seeds[0])

    for momentum, start in starts.items():
        try_once(*(Point(momentum, start + offset) for offset in (-COARSE, 0, COARSE)))
        while beyond := _beyond(_best(first, momentum), first):
            try_once(beyond)
        try_once(*_neighbours(_best(first, momentum)))

    finals: dict[Point, Score] = {}
    candidates = sorted(first, key=first.__getitem__)[:FINALISTS]
    while candidates:
        try_once(*candidates)
        for point in candidates:
            finals[point] = _median([first[point], *(measure(point, seed) for seed in seeds[1:])])
        winner = min(finals, key=finals.__getitem__)
        candidates = [neighbour for neighbour in _neighbours(winner) if neighbour not in finals]
    return dict(sorted(finals.items(), key=lambda item: item[1]))


def _best(scores: Mapping[Point, Score], momentum: float) -> Point:
    """The best point of one momentum; of equal ones the most central, so that a plateau is not walked along."""
    points = [point for point in scores if point.momentum == momentum]
    centre = sum(point.step for point in points) / len(points)
    return min(points, key=lambda point: (scores[point], abs(point.step - centre)))


def _beyond(point: Point, known: Mapping[Point, Score]) -> Point | None:
    """The point to measure next if this one is the last of its coarse grid, on either side; None if it is not."""
    steps = [other.step for other in known if other.momentum == point.momentum]
    if point.step == min(steps):
        return point._replace(step=point.step - COARSE)
    if point.step == max(steps):
        return point._replace(step=point.step + COARSE)
    return None


def _neighbours(point: Point) -> tuple[Point, Point]:
    return point._replace(step=point.step - 1), point._replace(step=point.step + 1)


def _median(scores: Sequence[Score]) -> Score:
    times_s = median(score.time_to_target_s for score in scores)
    return Score(times_s, median(score.final_error for score in scores))

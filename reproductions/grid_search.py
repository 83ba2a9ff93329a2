"""A search that finds the best learning rate and momentum with few measurements.

The learning rates are 0.1 * 2^(step/2) for integer steps, with a separate grid for each momentum. Each measurement is
a complete run. To keep the number of measurements small, the search has three rounds:

1. Coarse: learning rates that differ by factors of 2, with one seed. The grid is extended while its best point is on
   its edge.
2. Fine: the points between the best point and its neighbors, with one seed.
3. Final: the best few points with all seeds, compared by the median over the seeds. Then the neighbors of the winner
   are added, until a point has won against both of its neighbors.

As a result, the winner never lies on an edge of the grid, and is better than both of its neighbors in the median
over all seeds, not only with one seed.

`search_lines` is for measurements that cost next to nothing. It measures a number of adjacent points for each variant
and momentum, and extends each line while its best point is at an end.

The search itself does not train anything; its caller provides the function that measures a point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

COARSE = 2  # steps between adjacent points in the coarse round; their learning rates differ by a factor of 2
FINALISTS = 3  # number of points at the start of the final round


class Point(NamedTuple):
    """A point in the grid: a momentum, the step that determines the learning rate, and a variant of the model."""

    momentum: float
    step: int
    variant: int = 0


class Score(NamedTuple):
    """The score of a point. Smaller scores are better.

    Attributes:
        time_to_target_s: seconds to the target accuracy; infinity if the target was not reached.
        final_error: 1 minus the final accuracy; if times are equal, the smaller error wins.
    """

    time_to_target_s: float
    final_error: float


Measure = Callable[[Point, int], Score]
"""Function that measures a point with a given seed."""


def learning_rate(step: int) -> float:
    """Return the learning rate for a step, rounded to two significant digits.

    >>> [learning_rate(step) for step in (-2, -1, 0, 1, 2)]
    [0.05, 0.071, 0.1, 0.14, 0.2]
    """
    return float(f"{0.1 * 2 ** (step / 2):.2g}")


def search(measure: Measure, starts: Mapping[float, int], seeds: Sequence[int]) -> dict[Point, Score]:
    """Find the best point.

    Args:
        measure: function that measures a point, called at most once for each point and seed.
        starts: momentum -> step of the learning rate at which the search begins.
        seeds: seeds for the final round. The other rounds use only the first seed.

    Returns:
        The points of the final round, best first, with the medians of their scores over all seeds.
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
        try_once(*_neighbors(_best(first, momentum)))

    finals: dict[Point, Score] = {}
    candidates = sorted(first, key=first.__getitem__)[:FINALISTS]
    while candidates:
        try_once(*candidates)
        for point in candidates:
            finals[point] = _median([first[point], *(measure(point, seed) for seed in seeds[1:])])
        winner = min(finals, key=finals.__getitem__)
        candidates = [neighbor for neighbor in _neighbors(winner) if neighbor not in finals]
    return dict(sorted(finals.items(), key=lambda item: item[1]))


def search_lines(
    measure: Callable[[Point], Score], starts: Sequence[Point], width: int, most: int = 40
) -> dict[Point, Score]:
    """Measure lines of adjacent points, and extend each line until its best point is not at an end.

    Args:
        measure: function that returns the score of a point over all seeds.
        starts: the point in the middle of each line.
        width: number of points of each line before it is extended.
        most: largest number of points of a line.

    Returns:
        The score of every measured point.

    >>> found = search_lines(lambda point: Score(abs(point.step - 5), 0.0), [Point(0.0, 0)], 3)
    >>> min(found, key=found.__getitem__), len(found)
    (Point(momentum=0.0, step=5, variant=0), 8)
    """
    scores: dict[Point, Score] = {}
    for start in starts:
        low = start.step - width // 2
        line = {(p := start._replace(step=low + index)): measure(p) for index in range(width)}
        while len(line) < most:
            best = min(line, key=lambda point: (line[point], abs(point.step - start.step)))
            ends = min(line, key=_step), max(line, key=_step)
            if best not in ends:
                break
            beyond = best._replace(step=best.step + (1 if best == ends[1] else -1))
            line[beyond] = measure(beyond)
        scores |= line
    return scores


def _step(point: Point) -> int:
    return point.step


def _best(scores: Mapping[Point, Score], momentum: float) -> Point:
    """Return the best point with this momentum.

    If points have equal scores, the most central one wins, so that the grid is not extended along a plateau.
    """
    points = [point for point in scores if point.momentum == momentum]
    centre = sum(point.step for point in points) / len(points)
    return min(points, key=lambda point: (scores[point], abs(point.step - centre)))


def _beyond(point: Point, known: Mapping[Point, Score]) -> Point | None:
    """Return the next point outside the grid if the given point is on an edge of the coarse grid, else None."""
    steps = [other.step for other in known if other.momentum == point.momentum]
    if point.step == min(steps):
        return point._replace(step=point.step - COARSE)
    if point.step == max(steps):
        return point._replace(step=point.step + COARSE)
    return None


def _neighbors(point: Point) -> tuple[Point, Point]:
    return point._replace(step=point.step - 1), point._replace(step=point.step + 1)


def _median(scores: Sequence[Score]) -> Score:
    times_s = median(score.time_to_target_s for score in scores)
    return Score(times_s, median(score.final_error for score in scores))

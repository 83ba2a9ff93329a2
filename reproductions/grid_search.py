"""Searches that find the best learning rate and momentum with few measurements.

The learning rates are 0.1 * 2^(step/2) for integer steps, with a separate line of steps for each variant and momentum.
`search_lines` measures a number of adjacent points of each line, and extends the line while its best point is at an
end.

`search` is for measurements that are complete runs. First, the lines are measured with one seed, and then the best few
points with all seeds. Points are compared by the median over the seeds. The neighbors of the winner are added, until a
point has won against both of its neighbors. So the winner never lies at an end, and is better than both of its
neighbors in the median over all seeds, not only with one seed.

The searches do not train anything; their callers provide the function that measures a point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

WIDTH = 5  # number of points of a line before it is extended
FINALISTS = 3  # number of points at the start of the final round


class Point(NamedTuple):
    """A point in the grid: a momentum, the step that determines the learning rate, and a variant of the model."""

    momentum: float
    step: int
    variant: int = 0


class Score(NamedTuple):
    """The score of a point. Smaller scores are better."""

    time_to_target_s: float  # seconds to the target accuracy; infinity if the target was not reached
    final_error: float  # 1 minus the final accuracy; if times are equal, the smaller error wins


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
        seeds: seeds for the final points. The lines are measured with the first seed only.

    Returns:
        The final points, best first, with the medians of their scores over all seeds.
    """
    lines = [Point(momentum, step) for momentum, step in starts.items()]
    first = search_lines(lambda point: measure(point, seeds[0]), lines, WIDTH)
    finals: dict[Point, Score] = {}
    candidates = sorted(first, key=first.__getitem__)[:FINALISTS]
    while candidates:
        for point in candidates:
            if point not in first:
                first[point] = measure(point, seeds[0])
            finals[point] = _median([first[point], *(measure(point, seed) for seed in seeds[1:])])
        winner = min(finals, key=finals.__getitem__)
        beside = (winner._replace(step=winner.step + offset) for offset in (-1, 1))
        candidates = [neighbor for neighbor in beside if neighbor not in finals]
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
            ends = min(line, key=lambda point: point.step), max(line, key=lambda point: point.step)
            if best not in ends:
                break
            beyond = best._replace(step=best.step + (1 if best == ends[1] else -1))
            line[beyond] = measure(beyond)
        scores |= line
    return scores


def _median(scores: Sequence[Score]) -> Score:
    times_s = median(score.time_to_target_s for score in scores)
    return Score(times_s, median(score.final_error for score in scores))

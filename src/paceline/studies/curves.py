"""Pure functions of curves: when a curve reaches a target, its mean over seeds, and what is not dominated.

A curve is a sequence of points (x, value) with ascending x: seconds, updates or samples.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from .statistics import Estimate, mean_interval

__all__ = ["Curve", "band", "crossing", "not_dominated", "value_at"]

Curve = Sequence[tuple[float, float]]

Key = TypeVar("Key", bound=Hashable)


def crossing(curve: Curve, target: float, *, higher_is_better: bool = False) -> float:
    """Return where a curve first reaches a target, or infinity.

    The value is measured only now and then, so the place is interpolated on the straight line between two points. If
    the point before is not finite, or there is none, it is that of the point itself.

    >>> crossing([(0.0, 8.0), (10.0, 6.0), (20.0, 4.0)], 5.0)
    15.0
    >>> crossing([(10.0, 0.25), (20.0, 0.75)], 0.5, higher_is_better=True), crossing([(10.0, 0.75)], 0.5)
    (15.0, inf)
    """
    sign = 1.0 if higher_is_better else -1.0
    before: tuple[float, float] | None = None
    for x, value in curve:
        if sign * (value - target) >= 0:
            if before is None or not math.isfinite(before[1]):
                return x
            return before[0] + (x - before[0]) * (target - before[1]) / (value - before[1])
        before = x, value
    return math.inf


def value_at(curve: Curve, x: float) -> float:
    """Return the value of a curve between its points, interpolated; NaN outside of them.

    >>> value_at([(0.0, 1.0), (2.0, 5.0)], 0.5), value_at([(0.0, 1.0), (2.0, 5.0)], 3.0)
    (2.0, nan)
    """
    index = bisect.bisect_left(curve, x, key=lambda point: point[0])
    if index == len(curve):
        return math.nan
    after_x, after = curve[index]
    if after_x == x:
        return after
    if index == 0:
        return math.nan
    before_x, before = curve[index - 1]
    return before + (after - before) * (x - before_x) / (after_x - before_x)


def band(curves: Sequence[Curve], places: Sequence[float]) -> list[tuple[float, Estimate]]:
    """Return the mean of several curves with its interval, at those of the given places that all curves cover.

    >>> band([[(0.0, 1.0), (2.0, 3.0)], [(1.0, 3.0), (2.0, 5.0)]], [0.0, 1.0, 2.0])[0]
    (1.0, Estimate(value=2.5, low=-3.85..., high=8.85...))
    """
    found = []
    for x in places:
        values = [value_at(curve, x) for curve in curves]
        if all(map(math.isfinite, values)):
            found.append((x, mean_interval(values)))
    return found


def not_dominated(points: Mapping[Key, tuple[float, float]], *, higher_is_better: bool) -> list[Key]:
    """Return the keys of the points (cost, value) for which no other one has less cost and a better value.

    The keys are in order of the cost. Points whose cost is infinite are dominated by each finite one with a value as
    good.

    >>> not_dominated({"a": (1.0, 0.8), "b": (2.0, 0.9), "c": (3.0, 0.85)}, higher_is_better=True)
    ['a', 'b']
    """
    sign = 1.0 if higher_is_better else -1.0

    def dominated(key: Key) -> bool:
        cost, value = points[key]
        return any(
            other[0] <= cost and sign * other[1] >= sign * value and other != (cost, value)
            for other in points.values()
        )

    return sorted((key for key in points if not dominated(key)), key=lambda key: points[key][0])

"""Goals for the results of the benchmark, and whether they are met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from .plan import FLOOR, GLOO, OPTIMIZER, SHM_ASP, SHM_BSP, SOCKET_BSP, TCP_BSP, Case, TransportRow

__all__ = ["GOALS", "Times", "TransportGoal", "goal_rows", "ratio_of", "times_by_case", "update_of"]


class Goal(NamedTuple):
    """A bound on a time, or on the ratio of two times.

    Attributes:
        top: case whose time is bounded or, for a ratio, is the numerator.
        bottom: case whose time is the denominator; None for a bound on the time of `top`.
        size_mb: model size in MB (2**20 bytes).
        workers: number of workers.
        bound: the bound, a ratio or a time in microseconds.
        at_least: True if `bound` is a lower bound, False if it is an upper bound.
    """

    top: Case
    bottom: Case | None
    size_mb: float
    workers: int
    bound: float
    at_least: bool = False


def update_of(optimizer: str) -> Case:
    """Return the case that represents an update by this optimizer."""
    return Case(f"update by {optimizer}", OPTIMIZER.transport, OPTIMIZER.mode)


def traffic_of(optimizer: str) -> Case:
    """Return the case that represents the memory traffic of an update by this optimizer."""
    return Case(f"traffic of {optimizer}", OPTIMIZER.transport, OPTIMIZER.mode)


LARGE_MB = (25.0, 100.0)

GOALS: tuple[Goal, ...] = (
    *(Goal(SHM_ASP, FLOOR, size_mb, 2, 1.3) for size_mb in LARGE_MB),
    *(Goal(GLOO, SHM_BSP, size_mb, n, 4.0, at_least=True) for size_mb in LARGE_MB for n in (2, 4)),
    Goal(SHM_ASP, None, 0.004, 2, 60.0),
    *(Goal(TCP_BSP, SOCKET_BSP, size_mb, n, 1.15) for size_mb in LARGE_MB for n in (2, 4)),
    *(
        Goal(GLOO, TCP_BSP, size_mb, n, speed, at_least=True)
        for size_mb in LARGE_MB
        for n, speed in ((2, 0.8), (4, 1.0))
    ),
    Goal(update_of("Adam"), traffic_of("Adam"), 100.0, 1, 1.5),
)


class TransportGoal(msgspec.Struct, frozen=True):
    """A goal and its result.

    Attributes:
        goal: the goal.
        figure: measured time in microseconds, or measured ratio.
        met: True if `figure` is within the bound.
    """

    goal: Goal
    figure: float
    met: bool


Times = Mapping[tuple[Case, float, int], float]
"""(case, size in MB, number of workers) -> time in milliseconds."""


def goal_rows(rows: Sequence[TransportRow]) -> list[TransportGoal]:
    """Compare the measured times with the goals. Goals whose times were not measured are left out."""
    times_ms = times_by_case(rows)
    found = []
    for goal in GOALS:
        figure = _measured(times_ms, goal)
        if figure is not None:
            met = figure >= goal.bound if goal.at_least else figure <= goal.bound
            found.append(TransportGoal(goal, figure, met))
    return found


def _measured(times_ms: Times, goal: Goal) -> float | None:
    if goal.bottom is not None:
        return ratio_of(times_ms, goal.top, goal.bottom, goal.size_mb, goal.workers)
    median_ms = times_ms.get((goal.top, goal.size_mb, goal.workers))
    return None if median_ms is None else median_ms * 1e3


def ratio_of(times_ms: Times, top: Case, bottom: Case, size_mb: float, workers: int) -> float | None:
    """Return the ratio of the times of two cases, or None if one of the times was not measured."""
    above, below = (times_ms.get((case, size_mb, workers)) for case in (top, bottom))
    return None if above is None or below is None else above / below


def times_by_case(rows: Sequence[TransportRow]) -> Times:
    """Return the median times of the rows, indexed by case, size and number of workers."""
    times_ms: dict[tuple[Case, float, int], float] = {}
    for row in rows:
        case = Case(row.system, row.transport, row.mode)
        if row.optimizer is not None:
            case = update_of(row.optimizer)
            assert row.traffic_ms is not None
            times_ms[traffic_of(row.optimizer), row.size_mb, row.workers] = row.traffic_ms
        times_ms[case, row.size_mb, row.workers] = row.median_ms
    return times_ms

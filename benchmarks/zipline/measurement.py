"""Waiting times and computation times of ZipLine's methods, compared with Tables 3 and 4 of the paper.

This module contains the inputs for our own measurements and the goals for the fast solver. The numbers printed in the
paper are in `reproductions/papers.toml`. This module measures only computation times and waiting times; the tests
check that the methods' results are correct.

No small input is used twice in a row, because the processor's branch predictor would learn it and the method would
appear several times faster than it is. Within a round, the compared methods take turns, so that a change in the
machine's speed affects all of them. If there are several inputs, successive calls use different inputs. All measured
times are medians.

Source ("the paper"): Zhao et al., "ZipLine: an optimized algorithm for the elastic bulk synchronous parallel model",
Machine Learning (2021), section 6.1.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean, median
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.cli.progress_bar import TellShare
from paceline.errors import ConfigurationError
from paceline.zipline import METHODS, LastInterval, Solution, generate_pushes, solve, solve_periodic
from reproductions.papers import ELASTIC_BSP, QuotedTable

__all__ = [
    "DISTRIBUTIONS",
    "GOALS_MS",
    "NAIVE_SHAPE",
    "PAPER_MEANS_US",
    "PAPER_SUCCESS_SHARES",
    "PAPER_WAITS_MS",
    "TABLE_3_SHAPES",
    "TABLE_4_SHAPES",
    "SuccessRow",
    "TimeRow",
    "WaitRow",
    "ZiplineGoal",
    "ZiplineReport",
    "measure",
    "plain_sort",
]

Floats = NDArray[np.float64]
Shape = tuple[int, int]  # (number of workers, lookahead); the paper calls them n and R
Attempt = Callable[[], Solution]


def _no_progress(what: str, share: float, slow: bool = False) -> None:
    pass


# -- numbers from the paper --------------------------------------------------------------------------------------


def _shapes(table: QuotedTable) -> tuple[Shape, ...]:
    pairs = (column.split(",") for column in table.columns)
    return tuple((int(workers), int(lookahead)) for workers, lookahead in pairs)


TABLE_3_SHAPES = _shapes(ELASTIC_BSP.tables["table3"])
TABLE_4_SHAPES = _shapes(ELASTIC_BSP.tables["table4"])

PAPER_WAITS_MS = ELASTIC_BSP.tables["table3"].rows
"""Method -> waiting times in ms from Table 3, in the order of TABLE_3_SHAPES."""

PAPER_SUCCESS_SHARES = {
    method: percent / 100 for method, (percent,) in ELASTIC_BSP.tables["table3-success"].rows.items()
}
"""Method -> success rate, from the last column of Table 3."""

PAPER_MEANS_US = ELASTIC_BSP.tables["table4"].rows
"""Method -> mean times in microseconds from Table 4, in the order of TABLE_4_SHAPES."""

# -- own measurements --------------------------------------------------------------------------------------------

PERIODIC = "solve_periodic"
COLUMNS = (*PAPER_WAITS_MS, "naive", "auto", PERIODIC)
NAIVE_SHAPE: Shape = (4, 10)  # not in the paper; small enough for the naive method, which enumerates all sets
NAIVE_SETS = 10**5  # largest number of sets for which the naive method is measured; more would take minutes

GOALS_MS: dict[Shape, float] = {(10, 15): 0.025, (1000, 15): 0.15, (1000, 150): 1.4, (10_000, 150): 30.0}
"""Shape -> goal for the time of `solve_periodic` in ms, including the prediction."""
# Upper bound on the ratio of the times of solve and solve_periodic; only solve receives the matrix of end times.
MATRIX_GOAL = 1.2
# Upper bound on the ratio of the time of solve to that of a plain sort, for inputs unlike the paper's.
PLAIN_SORT_GOAL = 1.5
PLAIN_SORT_SHAPES: tuple[Shape, ...] = ((10, 15), (1000, 15), (1000, 150), (10_000, 150))

DISTRIBUTIONS: dict[str, Callable[[int, int, np.random.Generator], Floats]] = {
    "identical workers": lambda n, r, g: np.tile(g.uniform(1000, 1500) * np.arange(1.0, r + 1), (n, 1)),
    "two speeds, 1 : 100": lambda n, r, g: (
        g.choice([10.0, 1000.0], (n, 1)) * g.uniform(1, 1.1, (n, r)).cumsum(axis=1)
    ),
    "bursts": lambda n, r, g: g.exponential(g.choice([1.0, 5000.0], (n, r), p=[0.9, 0.1])).cumsum(axis=1),
    "heavy tails": lambda n, r, g: 1000 * g.pareto(0.6, (n, r)).cumsum(axis=1),
}
"""Distribution -> function that draws end times in ms, as an array of shape (n, R).

Of these, only "identical workers" can result from predictions: predictions from two pushes are periodic.
"""

NOTES = (
    "The paper's times are means of 10 runs of C++11 code on one data set (Xeon E5-2620 v3, 2.4 GHz). Our times are "
    "medians over different inputs, with Python and NumPy on this machine. The ratio between our times and the "
    "paper's depends on languages and machines as much as on methods, so compare only times in the same row.",
    "Our methods start from the last two pushes, so our times include predicting the end times and building their "
    "matrix. The paper does not say whether its times include these steps.",
    "zipline, zipline-opt, zipline-opt-bs and naive are plain Python loops. The grid scans use NumPy to form "
    "each set of end times; auto and solve_periodic use NumPy throughout. Therefore, the ratios between methods "
    "differ from the paper's. The paper's tables do not contain naive, auto or solve_periodic.",
    "Waiting times depend on the randomly drawn workers, especially if there are few workers. The paper's waiting "
    "times are from one data set; our waiting times are medians over several inputs. In the paper's published data, "
    "the first predicted end time is the time of the last push; in our data, it is one interval later.",
    "Our success rate is the share of inputs on which a method finds the smallest wait found by any method, averaged "
    "over the rows with n >= 10. The paper's success rate seems to be the share of rows (grid-scan: 3 of 10). "
    "full-grid-scan is not exact: the grid point nearest to an end time may lie on the wrong side of the end time.",
    "naive enumerates all R^n sets of one end time per worker, so it is not measured if there are more than "
    f"{NAIVE_SETS:,} sets. With 10 workers and 15 end times each, there are already 5.8e11 sets. Therefore, naive is "
    "measured with 4 workers, for which the paper has no numbers.",
    "In the goals, times of solve_periodic include the prediction, but ratios do not. For the ratios, solve and the "
    "plain sort receive the matrix of end times, and solve_periodic receives the last push and the interval of each "
    "worker. The plain sort sorts all end times, takes a running maximum and picks one end time per worker. "
    "Only solve checks its input, which takes a large part of its time if the input is small.",
)


class WaitRow(msgspec.Struct, frozen=True, kw_only=True):
    """A cell of Table 3: the waiting time of one method, for a number of workers and a lookahead.

    Attributes:
        method: a name in `paceline.zipline.METHODS`, or "solve_periodic".
        workers: n, the number of workers.
        lookahead: R, the lookahead.
        inputs: number of inputs that were measured.
        wait_ms: wait (d_Z) at the barrier that the method finds, median over the inputs; None if the method was not
            measured.
        optimal_share: fraction of the inputs on which no method finds a smaller wait, from 0 to 1; None if the method
            was not measured.
        paper_wait_ms: wait in the paper; None if the paper has no number.
        empty_because: the reason why the method was not measured; None if it was measured.
    """

    method: str
    workers: int
    lookahead: int
    inputs: int
    wait_ms: float | None
    optimal_share: float | None
    paper_wait_ms: float | None
    empty_because: str | None


class SuccessRow(msgspec.Struct, frozen=True, kw_only=True):
    """A cell of the last column of Table 3: the success rate of one method.

    Attributes:
        method: see `WaitRow`.
        shapes: number of shapes that were measured.
        optimal_share: mean of `WaitRow.optimal_share` over these shapes; None if no shape was measured.
        paper_success_share: success rate in the paper; None if the paper has no number.
    """

    method: str
    shapes: int
    optimal_share: float | None
    paper_success_share: float | None


class TimeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A cell of Table 4: the computation time of one method, for a number of workers and a lookahead.

    Attributes:
        method: see `WaitRow`.
        workers: n, the number of workers.
        lookahead: R, the lookahead.
        inputs: number of measured calls, each with a different input.
        median_ms: median time to compute the result from the last two pushes; None if the method was not measured.
        paper_mean_ms: mean time in the paper; None if the paper has no number.
        empty_because: the reason why the method was not measured; None if it was measured.
    """

    method: str
    workers: int
    lookahead: int
    inputs: int
    median_ms: float | None
    paper_mean_ms: float | None
    empty_because: str | None


class ZiplineGoal(msgspec.Struct, frozen=True, kw_only=True):
    """A goal of this project and its result. A goal is a bound on a time or on the ratio of two times.

    Attributes:
        what: name of the measured function.
        distribution: distribution of the end times.
        workers: n, the number of workers.
        lookahead: R, the lookahead.
        inputs: number of inputs that were measured.
        median_ms: median time over the inputs.
        against: name of the function that `what` is compared with; None if the goal is a bound on a time.
        against_median_ms: median time of `against` over the inputs; None if `against` is None.
        ratio: ratio of the median times of `what` and `against`, median over the rounds; None if `against` is None.
        goal_ms: upper bound on `median_ms`; None if the goal is a bound on a ratio.
        goal_ratio: upper bound on `ratio`; None if the goal is a bound on a time.
        met: True if the goal is met.
    """

    what: str
    distribution: str
    workers: int
    lookahead: int
    inputs: int
    median_ms: float
    against: str | None = None
    against_median_ms: float | None = None
    ratio: float | None = None
    goal_ms: float | None = None
    goal_ratio: float | None = None
    met: bool


class ZiplineReport(msgspec.Struct, frozen=True, kw_only=True):
    """All results, and the environment in which they were measured.

    Attributes:
        python: version of Python.
        numpy: version of NumPy.
        machine: processor architecture.
        cores: number of cores.
        rounds: number of rounds.
        quick: True if only small inputs were measured.
        waits: cells of Table 3.
        success: cells of the last column of Table 3.
        times: cells of Table 4.
        goals: goals of this project.
        notes: remarks on how to read the results.
    """

    python: str
    numpy: str
    machine: str
    cores: int | None
    rounds: int
    quick: bool
    waits: list[WaitRow]
    success: list[SuccessRow]
    times: list[TimeRow]
    goals: list[ZiplineGoal]
    notes: tuple[str, ...] = NOTES


class _Call(NamedTuple):
    """The duration of one call, and the waiting time at the barrier that the call found."""

    duration_ms: float
    wait_ms: float


Round = dict[str, list[_Call]]
"""Name of a function -> its calls in the order of the inputs."""


class _Heat(NamedTuple):
    """A group of functions that are measured in turn on inputs of one kind.

    Attributes:
        name: kind of input.
        shape: (number of workers, lookahead).
        inputs: number of inputs per round.
        work_s: approximate time per round, for the progress display.
        make: function that draws an input and returns the functions to measure, each bound to this input.
    """

    name: str
    shape: Shape
    inputs: int
    work_s: float
    make: Callable[[np.random.Generator], Mapping[str, Attempt]]


def measure(
    *, rounds: int | None = None, quick: bool = False, tell: TellShare = _no_progress
) -> ZiplineReport:
    """Run all measurements. This takes about a minute per round.

    Args:
        rounds: number of rounds, each with new inputs. The default is 3, or 1 if `quick` is True.
        quick: True to measure only small inputs. This takes a few seconds.
        tell: progress callback, called before each measured call.

    Raises:
        ConfigurationError: `rounds` is less than 1.
    """
    rounds = (1 if quick else 3) if rounds is None else rounds
    if rounds < 1:
        raise ConfigurationError(f"rounds is {rounds}, expected at least 1.")
    heats = _heats(quick)
    total_s, done_s = rounds * sum(heat.work_s for heat in heats), 0.0
    results: dict[tuple[str, Shape], list[Round]] = {}
    for number in range(rounds):
        for index, heat in enumerate(heats):
            generator = np.random.default_rng([number, index])
            calls = [heat.make(generator) for _ in range(heat.inputs)]
            n, r = heat.shape
            where = f"round {number + 1} of {rounds}, {heat.name}, n = {n}, R = {r}"
            seconds_each = heat.work_s / heat.inputs

            def tell_heat(
                what: str,
                share: float,
                slow: bool = seconds_each > 1,
                where: str = where,
                before_s: float = done_s,
                work_s: float = heat.work_s,
            ) -> None:
                tell(f"{where}: {what}", (before_s + share * work_s) / total_s, slow)

            results.setdefault((heat.name, heat.shape), []).append(_in_turns(calls, tell_heat))
            done_s += heat.work_s
    tell("done", 1.0)
    paper = {shape: _merged(found) for (name, shape), found in results.items() if name == "paper"}
    waits = _wait_rows(paper, quick)
    return ZiplineReport(
        python=platform.python_version(),
        numpy=np.__version__,
        machine=platform.machine(),
        cores=os.cpu_count(),
        rounds=rounds,
        quick=quick,
        waits=waits,
        success=_success_rows(waits),
        times=_time_rows(paper, quick),
        goals=_goal_rows(results),
    )


def plain_sort(times: Floats) -> Solution:
    """Find the best barrier by sorting all end times: a straightforward implementation that `solve` is compared with.

    `times` has the shape (n, R) and is not checked.

    >>> plain_sort(np.array([[2.0, 4.0, 6.0, 8.0, 10.0], [5.0, 10.0, 15.0, 20.0, 25.0]])).barrier
    10.0
    """
    lookahead = times.shape[1]
    start = times.ravel()
    following = np.empty_like(start)
    following[:-1] = start[1:]
    following[lookahead - 1 :: lookahead] = np.inf
    order = start.argsort()
    start = start[order]
    # A window must include, for each worker, the first end time at or after the start of the window.
    end = np.empty_like(start)
    end[0] = times[:, 0].max()
    end[1:] = following[order[:-1]]
    np.maximum.accumulate(end, out=end)
    best = (end - start).argmin()
    barrier = end[best]
    picks = ((times > barrier).argmax(axis=1) - 1) % lookahead
    return Solution(float(barrier - start[best]), float(barrier), picks, start.size)


# -- measurement -------------------------------------------------------------------------------------------------


def _heats(quick: bool) -> list[_Heat]:
    """Return all groups of measurements of one round."""
    heats = []
    for n, r in (NAIVE_SHAPE, *TABLE_3_SHAPES):
        if _left_out((n, r), quick):
            continue
        # The full grid scan limits the number of inputs, because it takes almost all of the time.
        inputs = int(np.clip(1e9 / (n * r) ** 2, 1, 20))
        heats.append(
            _Heat("paper", (n, r), inputs, inputs * 2e-9 * (n * r) ** 2, partial(_by_all_methods, n, r))
        )
    for n, r in GOALS_MS:
        if not _left_out((n, r), quick, 15_000):
            inputs = _inputs_for_fast(n, r)
            heats.append(_Heat("steady", (n, r), inputs, inputs * 1e-7 * n * r, partial(_by_ours, n, r)))
    for n, r in PLAIN_SORT_SHAPES:
        if not _left_out((n, r), quick, 15_000):
            for name in DISTRIBUTIONS:
                inputs = _inputs_for_fast(n, r)
                make = partial(_by_sorting, name, n, r)
                heats.append(_Heat(name, (n, r), inputs, inputs * 2e-7 * n * r, make))
    return heats


def _left_out(shape: Shape, quick: bool, largest: int = 1500) -> bool:
    """Return True if --quick leaves this shape out because it has too many end times."""
    return quick and shape[0] * shape[1] > largest


def _inputs_for_fast(n: int, r: int) -> int:
    """Return the number of inputs per round: more if the inputs are small, because their times vary more."""
    return int(np.clip(2e6 / (n * r), 5, 200))


def _by_all_methods(n: int, r: int, generator: np.random.Generator) -> dict[str, Attempt]:
    """Draw workers as in the paper. Return calls of all methods that are fast enough for this shape."""
    pushes = generate_pushes(n, generator)
    attempts: dict[str, Attempt] = {
        method: partial(_predict_and_solve, pushes, r, method)
        for method in COLUMNS
        if method in METHODS and not _too_many_sets(method, (n, r))
    }
    attempts[PERIODIC] = partial(_predict_and_solve_periodic, pushes, r)
    return attempts


def _by_ours(n: int, r: int, generator: np.random.Generator) -> dict[str, Attempt]:
    """Draw workers as in the paper. Return calls of the functions that have goals."""
    pushes = generate_pushes(n, generator)
    last, interval = LastInterval()(pushes)
    return {
        "from pushes": partial(_predict_and_solve_periodic, pushes, r),
        PERIODIC: partial(solve_periodic, last, interval, r),
        "solve": partial(solve, _end_times(last, interval, r)),
    }


def _by_sorting(distribution: str, n: int, r: int, generator: np.random.Generator) -> dict[str, Attempt]:
    """Draw end times from the given distribution. Return calls of `solve` and of the plain sort."""
    times = DISTRIBUTIONS[distribution](n, r, generator)
    return {"solve": partial(solve, times), "plain sort": partial(plain_sort, times)}


def _predict_and_solve(pushes: Floats, lookahead: int, method: str) -> Solution:
    last, interval = LastInterval()(pushes)
    return solve(_end_times(last, interval, lookahead), method)


def _predict_and_solve_periodic(pushes: Floats, lookahead: int) -> Solution:
    last, interval = LastInterval()(pushes)
    return solve_periodic(last, interval, lookahead)


def _end_times(last: Floats, interval: Floats, lookahead: int) -> Floats:
    """Return the matrix of exactly those end times that `solve_periodic` considers."""
    times: Floats = last[:, None] + np.arange(1, lookahead + 1) * interval[:, None]
    return times


def _too_many_sets(method: str, shape: Shape) -> bool:
    """Return True if the naive method would have to enumerate too many sets."""
    return method == "naive" and shape[1] ** shape[0] > NAIVE_SETS


def _in_turns(calls: Sequence[Mapping[str, Attempt]], tell: TellShare) -> Round:
    """Call every function once on every input. The functions take turns; successive calls have different inputs."""
    names = list(calls[0])
    found: dict[str, dict[int, _Call]] = {name: {} for name in names}
    count = len(calls) * len(names)
    for step in range(len(calls)):
        for place, name in enumerate(names):
            index = (step + place * len(calls) // len(names)) % len(calls)
            attempt = calls[index][name]
            tell(name, (step * len(names) + place) / count)
            begun_ns = time.perf_counter_ns()
            solution = attempt()
            ended_ns = time.perf_counter_ns()
            found[name][index] = _Call((ended_ns - begun_ns) / 1e6, solution.wait)
    return {name: [by_index[index] for index in sorted(by_index)] for name, by_index in found.items()}


def _merged(rounds: Sequence[Round]) -> Round:
    """Concatenate the calls of all rounds."""
    return {name: [call for calls in rounds for call in calls[name]] for name in rounds[0]}


# -- rows --------------------------------------------------------------------------------------------------------


def _wait_rows(paper: Mapping[Shape, Round], quick: bool) -> list[WaitRow]:
    rows = []
    for shape in (NAIVE_SHAPE, *TABLE_3_SHAPES):
        found = paper.get(shape, {})
        # Each tuple from zip contains the calls of all methods on one input.
        least = [min(call.wait_ms for call in one) for one in zip(*found.values(), strict=True)]
        for method in COLUMNS:
            calls = found.get(method, [])
            optimal = [call.wait_ms == best for call, best in zip(calls, least if calls else (), strict=True)]
            rows.append(
                WaitRow(
                    method=method,
                    workers=shape[0],
                    lookahead=shape[1],
                    inputs=len(calls),
                    wait_ms=median(call.wait_ms for call in calls) if calls else None,
                    optimal_share=sum(optimal) / len(optimal) if optimal else None,
                    paper_wait_ms=_printed(PAPER_WAITS_MS, method, TABLE_3_SHAPES, shape),
                    empty_because=None if calls else _why_empty(method, shape, quick),
                )
            )
    return rows


def _success_rows(waits: Sequence[WaitRow]) -> list[SuccessRow]:
    rows = []
    for method in COLUMNS:
        shares = [
            row.optimal_share
            for row in waits
            if row.method == method
            and row.optimal_share is not None
            and (row.workers, row.lookahead) in TABLE_3_SHAPES
        ]
        rows.append(
            SuccessRow(
                method=method,
                shapes=len(shares),
                optimal_share=fmean(shares) if shares else None,
                paper_success_share=PAPER_SUCCESS_SHARES.get(method),
            )
        )
    return rows


def _time_rows(paper: Mapping[Shape, Round], quick: bool) -> list[TimeRow]:
    rows = []
    for shape in (NAIVE_SHAPE, *TABLE_4_SHAPES):
        for method in COLUMNS:
            calls = paper.get(shape, {}).get(method, [])
            printed_us = _printed(PAPER_MEANS_US, method, TABLE_4_SHAPES, shape)
            rows.append(
                TimeRow(
                    method=method,
                    workers=shape[0],
                    lookahead=shape[1],
                    inputs=len(calls),
                    median_ms=_median_ms(calls) if calls else None,
                    paper_mean_ms=None if printed_us is None else printed_us / 1e3,
                    empty_because=None if calls else _why_empty(method, shape, quick),
                )
            )
    return rows


def _goal_rows(results: Mapping[tuple[str, Shape], list[Round]]) -> list[ZiplineGoal]:
    rows = []
    for (name, shape), rounds in results.items():
        if name == "paper":
            continue
        if name == "steady":
            calls = _merged(rounds)["from pushes"]
            rows.append(
                ZiplineGoal(
                    what=PERIODIC,
                    distribution=name,
                    workers=shape[0],
                    lookahead=shape[1],
                    inputs=len(calls),
                    median_ms=_median_ms(calls),
                    goal_ms=GOALS_MS[shape],
                    met=_median_ms(calls) <= GOALS_MS[shape],
                )
            )
        against, goal = (PERIODIC, MATRIX_GOAL) if name == "steady" else ("plain sort", PLAIN_SORT_GOAL)
        rows.append(_ratio_row(name, shape, rounds, against, goal))
    # Times first, then ratios.
    return sorted(rows, key=lambda row: (row.goal_ms is None, row.against != PERIODIC))


def _ratio_row(name: str, shape: Shape, rounds: Sequence[Round], against: str, goal: float) -> ZiplineGoal:
    merged = _merged(rounds)
    ratio = median(_median_ms(one["solve"]) / _median_ms(one[against]) for one in rounds)
    return ZiplineGoal(
        what="solve",
        distribution=name,
        workers=shape[0],
        lookahead=shape[1],
        inputs=len(merged["solve"]),
        median_ms=_median_ms(merged["solve"]),
        against=against,
        against_median_ms=_median_ms(merged[against]),
        ratio=ratio,
        goal_ratio=goal,
        met=ratio <= goal,
    )


def _median_ms(calls: Sequence[_Call]) -> float:
    return median(call.duration_ms for call in calls)


def _printed(
    table: Mapping[str, Sequence[float]], method: str, shapes: Sequence[Shape], shape: Shape
) -> float | None:
    """Return the number printed in the paper, or None if there is no such number."""
    return table[method][shapes.index(shape)] if method in table and shape in shapes else None


def _why_empty(method: str, shape: Shape, quick: bool) -> str:
    n, r = shape
    if _too_many_sets(method, shape):
        return f"{r}^{n} sets, about 10^{n * np.log10(r):.0f}, are too many to enumerate"
    assert _left_out(shape, quick), f"{method} was not measured with {n} workers, lookahead {r}"
    return "left out by --quick"

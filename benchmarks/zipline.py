"""Waiting times and computation times of ZipLine's methods, compared with Tables 3 and 4 of the paper.

This module contains the inputs for our own measurements and the goals for the fast solver. The numbers printed in the
paper are in `reproductions/papers.toml`. This module measures only computation times and waiting times; the tests
check that the methods' results are correct.

No small input is used twice in a row, because the processor's branch predictor would learn the input and the method
would appear several times faster than it is. Within a round, the compared methods take turns, so that a change in the
machine's speed affects all of them. If there are several inputs, successive calls use different inputs. All measured
times are medians.

Source ("the paper"): Zhao et al., "ZipLine: an optimized algorithm for the elastic bulk synchronous parallel model",
Machine Learning (2021), section 6.1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.cli.console import TellShare
from paceline.zipline import METHODS, LastInterval, Solution, generate_pushes, solve, solve_periodic
from reproductions.papers import ELASTIC_BSP, QuotedTable

from .harness import Benchmark, Columns, Figures, Rounds, rounds_text

Floats = NDArray[np.float64]
Shape = tuple[int, int]  # (number of workers, lookahead); the paper calls them n and R
Attempt = Callable[[], Solution]


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

Of these distributions, only "identical workers" can result from predictions, because predictions from two pushes are
periodic.
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
    "full-grid-scan is not exact: of a worker's end times, it takes the one nearest to a given end time, although only "
    "an end time on the other side may belong to the narrowest set.",
    "naive enumerates all R^n sets of one end time per worker, so it is not measured if there are more than "
    f"{NAIVE_SETS:,} sets. With 10 workers and 15 end times each, there are already 5.8e11 sets. Therefore, naive is "
    "measured with 4 workers, for which the paper has no numbers.",
    "In the goals, times of solve_periodic include the prediction, but ratios do not. For the ratios, solve and the "
    "plain sort receive the matrix of end times, and solve_periodic receives the last push and the interval of each "
    "worker. The plain sort sorts all end times, takes a running maximum and picks one end time per worker. "
    "Only solve checks its input. If the input is small, this check takes a large part of the time of solve.",
)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A cell of Tables 3 and 4: one method, for a number of workers and a lookahead."""

    method: str  # a name in `paceline.zipline.METHODS`, or "solve_periodic"
    workers: int  # n
    lookahead: int  # R
    inputs: int  # number of measured calls, each with a different input
    # The following fields are None if the method was not measured.
    wait_ms: float | None = None  # wait (d_Z) at the barrier that the method finds, median over the inputs
    optimal_share: float | None = None  # fraction of the inputs on which no method finds a smaller wait
    median_ms: float | None = None  # median time to compute the result from the last two pushes
    # The following fields are None if the paper has no number.
    paper_wait_ms: float | None = None
    paper_mean_ms: float | None = None
    empty_because: str = ""  # the reason why the method was not measured

    @property
    def shape(self) -> Shape:
        """The number of workers and the lookahead."""
        return self.workers, self.lookahead


class GoalRow(msgspec.Struct, frozen=True, kw_only=True):
    """A goal of this project and its result: a bound on a time or, with `against`, on the ratio of two times."""

    what: str  # name of the measured function
    distribution: str  # of the end times
    workers: int
    lookahead: int
    inputs: int
    median_ms: float  # median time over the inputs
    goal: float  # upper bound on the time in ms or on the ratio
    against: str | None = None  # name of the function that `what` is compared with
    against_median_ms: float | None = None
    ratio: float | None = None  # ratio of the median times, median over the rounds

    @property
    def met(self) -> bool:
        """True if the goal is met."""
        return (self.median_ms if self.ratio is None else self.ratio) <= self.goal


class _Call(NamedTuple):
    """The duration of one call, and the waiting time at the barrier that the call found."""

    duration_ms: float
    wait_ms: float


Round = dict[str, list[_Call]]
"""Name of a function -> its calls in the order of the inputs."""


class _Heat(NamedTuple):
    """A group of functions that are measured in turn on inputs of one kind."""

    name: str  # kind of input
    shape: Shape  # (number of workers, lookahead)
    inputs: int  # number of inputs per round
    work_s: float  # approximate time per round, for the progress display
    # Function that draws an input and returns the functions to measure, each bound to this input.
    make: Callable[[np.random.Generator], Mapping[str, Attempt]]


@Benchmark(minutes=3, quick={"small": True, "rounds": 1}, notes=NOTES)
def measure(tell: TellShare, rounds: Rounds = 3, small: bool = False) -> list[Figures[Any]]:
    """Compare the waiting and computation times of ZipLine's methods with Tables 3 and 4 of the ElasticBSP paper.

    Also checks the results against this project's goals. Each round has new inputs.
    """
    cells, goals = measure_cells(tell, rounds, small)
    return figures_of(cells, goals, rounds)


def measure_cells(tell: TellShare, rounds: int, small: bool) -> tuple[list[Cell], list[GoalRow]]:
    """Measure all cells of Tables 3 and 4, and the goals. With `small`, leave out large inputs."""
    heats = _heats(small)
    total_s, done_s = rounds * sum(heat.work_s for heat in heats), 0.0
    results: dict[tuple[str, Shape], list[Round]] = {}
    for number in range(rounds):
        for index, heat in enumerate(heats):
            generator = np.random.default_rng([number, index])
            calls = [heat.make(generator) for _ in range(heat.inputs)]
            n, r = heat.shape
            tell(f"round {number + 1} of {rounds}, {heat.name}, n = {n}, R = {r}", done_s / total_s)
            results.setdefault((heat.name, heat.shape), []).append(take_turns(calls))
            done_s += heat.work_s
    paper = {shape: _merged(found) for (name, shape), found in results.items() if name == "paper"}
    return list(_cells(paper, small)), _goal_rows(results)


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


def _heats(small: bool) -> list[_Heat]:
    """Return all groups of measurements of one round."""
    heats = []
    for n, r in (NAIVE_SHAPE, *TABLE_3_SHAPES):
        if _left_out((n, r), small):
            continue
        # The full grid scan limits the number of inputs, because it takes almost all of the time.
        inputs = int(np.clip(1e9 / (n * r) ** 2, 1, 20))
        heats.append(
            _Heat("paper", (n, r), inputs, inputs * 2e-9 * (n * r) ** 2, partial(_by_all_methods, n, r))
        )
    for n, r in GOALS_MS:
        if not _left_out((n, r), small, 15_000):
            inputs = _inputs_for_fast(n, r)
            heats.append(_Heat("steady", (n, r), inputs, inputs * 1e-7 * n * r, partial(_by_ours, n, r)))
    for n, r in PLAIN_SORT_SHAPES:
        if not _left_out((n, r), small, 15_000):
            for name in DISTRIBUTIONS:
                inputs = _inputs_for_fast(n, r)
                make = partial(_by_sorting, name, n, r)
                heats.append(_Heat(name, (n, r), inputs, inputs * 2e-7 * n * r, make))
    return heats


def _left_out(shape: Shape, small: bool, largest: int = 1500) -> bool:
    """Return True if --quick leaves this shape out because it has too many end times."""
    return small and shape[0] * shape[1] > largest


def _inputs_for_fast(n: int, r: int) -> int:
    """Return the number of inputs per round: more for small inputs, because their times vary more."""
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


def take_turns(calls: Sequence[Mapping[str, Attempt]]) -> Round:
    """Call every function once on every input. The functions take turns; successive calls have different inputs."""
    names = list(calls[0])
    found: dict[str, dict[int, _Call]] = {name: {} for name in names}
    for step in range(len(calls)):
        for place, name in enumerate(names):
            index = (step + place * len(calls) // len(names)) % len(calls)
            attempt = calls[index][name]
            begun_ns = time.perf_counter_ns()
            solution = attempt()
            ended_ns = time.perf_counter_ns()
            found[name][index] = _Call((ended_ns - begun_ns) / 1e6, solution.wait)
    return {name: [by_index[index] for index in sorted(by_index)] for name, by_index in found.items()}


def _merged(rounds: Sequence[Round]) -> Round:
    """Concatenate the calls of all rounds."""
    return {name: [call for calls in rounds for call in calls[name]] for name in rounds[0]}


# -- rows --------------------------------------------------------------------------------------------------------


def _cells(paper: Mapping[Shape, Round], small: bool) -> Iterator[Cell]:
    for shape in (NAIVE_SHAPE, *TABLE_3_SHAPES):
        found = paper.get(shape, {})
        # Each tuple from zip contains the calls of all methods on one input.
        least = [min(call.wait_ms for call in one) for one in zip(*found.values(), strict=True)]
        for method in COLUMNS:
            calls = found.get(method, [])
            optimal = [call.wait_ms == best for call, best in zip(calls, least if calls else (), strict=True)]
            printed_us = _printed(PAPER_MEANS_US, method, TABLE_4_SHAPES, shape)
            yield Cell(
                method=method,
                workers=shape[0],
                lookahead=shape[1],
                inputs=len(calls),
                wait_ms=median(call.wait_ms for call in calls) if calls else None,
                optimal_share=fmean(optimal) if optimal else None,
                median_ms=_median_ms(calls) if calls else None,
                paper_wait_ms=_printed(PAPER_WAITS_MS, method, TABLE_3_SHAPES, shape),
                paper_mean_ms=None if printed_us is None else printed_us / 1e3,
                empty_because="" if calls else _why_empty(method, shape, small),
            )


def success_share(cells: Sequence[Cell], method: str) -> float | None:
    """Return the mean share of optimal results of a method over the shapes of Table 3; None if there is no result."""
    shares = [c.optimal_share for c in cells if c.method == method and c.shape in TABLE_3_SHAPES]
    return fmean(found) if (found := [share for share in shares if share is not None]) else None


def _goal_rows(results: Mapping[tuple[str, Shape], list[Round]]) -> list[GoalRow]:
    rows = []
    for (name, shape), rounds in results.items():
        row = partial(_goal_row, name, shape, rounds)
        if name == "steady":
            rows.append(row(PERIODIC, GOALS_MS[shape], measured="from pushes"))
            rows.append(row("solve", MATRIX_GOAL, against=PERIODIC))
        elif name != "paper":
            rows.append(row("solve", PLAIN_SORT_GOAL, against="plain sort"))
    # Times first, then ratios.
    return sorted(rows, key=lambda row: (row.against is not None, row.against != PERIODIC))


def _goal_row(
    name: str,
    shape: Shape,
    rounds: Sequence[Round],
    what: str,
    goal: float,
    *,
    against: str | None = None,
    measured: str | None = None,
) -> GoalRow:
    calls = _merged(rounds)
    of_what = calls[measured or what]
    ratios = [_median_ms(one[what]) / _median_ms(one[against]) for one in rounds] if against else []
    return GoalRow(
        what=what,
        distribution=name,
        workers=shape[0],
        lookahead=shape[1],
        inputs=len(of_what),
        median_ms=_median_ms(of_what),
        goal=goal,
        against=against,
        against_median_ms=_median_ms(calls[against]) if against else None,
        ratio=median(ratios) if ratios else None,
    )


def _median_ms(calls: Sequence[_Call]) -> float:
    return median(call.duration_ms for call in calls)


def _printed(
    table: Mapping[str, Sequence[float]], method: str, shapes: Sequence[Shape], shape: Shape
) -> float | None:
    """Return the number printed in the paper, or None if there is no such number."""
    return table[method][shapes.index(shape)] if method in table and shape in shapes else None


def _why_empty(method: str, shape: Shape, small: bool) -> str:
    n, r = shape
    if _too_many_sets(method, shape):
        return f"{r}^{n} sets, about 10^{n * np.log10(r):.0f}, are too many to enumerate"
    assert _left_out(shape, small), f"{method} was not measured with {n} workers, lookahead {r}"
    return "left out by --quick"


# -- tables ------------------------------------------------------------------------------------------------------

HEADINGS = tuple(
    "zip-/line zip-/line-/opt zip-/line-/opt-bs full-/grid-/scan grid-/scan naive auto solve_/peri-/odic".replace(
        "/", "\n"
    ).split(" ")
)
GOAL_NAMES = {PERIODIC: "periodic", "plain sort": "sort"}
GOAL_COLUMNS: Columns[GoalRow] = {
    "what": lambda row: f"{row.what} / {GOAL_NAMES[row.against]}" if row.against else row.what,
    "end times": lambda row: row.distribution,
    "n": lambda row: row.workers,
    "R": lambda row: row.lookahead,
    "ms": lambda row: _digits(row.median_ms),
    "against ms": lambda row: _digits(row.against_median_ms),
    "ratio": lambda row: "" if row.ratio is None else f"{row.ratio:.2f}",
    "goal": lambda row: f"{row.goal:g} {'x' if row.against else 'ms'}",
    "met": lambda row: "[green]yes[/]" if row.met else "[red]no[/]",
}


def figures_of(cells: Sequence[Cell], goals: Sequence[GoalRow], rounds: int) -> list[Figures[Any]]:
    """Return Table 3, Table 4 and the goals as tables that are at most 80 characters wide, and the cells."""
    calls = _span([cell.inputs for cell in cells])
    inputs = _span([row.inputs for row in goals])
    return [
        PaperTable(
            "Table 3: smallest wait found, ms", cells, f"medians over {calls} inputs", waits_of(cells)
        ),
        PaperTable("Table 4: computation time, ms", cells, f"medians over {calls} calls", times_of(cells)),
        Figures(
            "Goals", goals, GOAL_COLUMNS, f"medians over {inputs} inputs, {rounds_text(rounds)}", labels=2
        ),
    ]


class PaperTable(Figures[Cell]):
    """A table whose columns are the methods, with a line of our numbers and a line of the paper's numbers."""

    def __init__(self, title: str, cells: Sequence[Cell], caption: str, lines: list[list[str]]) -> None:
        columns = dict.fromkeys(("n", "R", "", *HEADINGS), lambda cell: "")
        super().__init__(title, cells, columns, f"{caption}; -: not measured, see below", labels=3)
        self.lines = lines

    def cells(self) -> list[list[str]]:
        return self.lines


def waits_of(cells: Sequence[Cell]) -> list[list[str]]:
    """Return the lines of Table 3."""
    lines = []
    for shape in (NAIVE_SHAPE, *TABLE_3_SHAPES):
        some = [cell for cell in cells if cell.shape == shape]
        lines += _pair(shape, [cell.wait_ms for cell in some], [cell.paper_wait_ms for cell in some], _whole)
    ours = [success_share(cells, method) for method in COLUMNS]
    paper = [PAPER_SUCCESS_SHARES.get(method) for method in COLUMNS]
    lines.append(["succ.", "", "ours", *("-" if share is None else f"{share:.0%}" for share in ours)])
    return [*lines, ["", "", "paper", *("" if share is None else f"{share:.0%}" for share in paper)]]


def times_of(cells: Sequence[Cell]) -> list[list[str]]:
    """Return the lines of Table 4."""
    lines = []
    for shape in (NAIVE_SHAPE, *TABLE_4_SHAPES):
        some = [cell for cell in cells if cell.shape == shape]
        lines += _pair(
            shape, [cell.median_ms for cell in some], [cell.paper_mean_ms for cell in some], _digits
        )
    return lines


def _pair(
    shape: Shape,
    ours: Sequence[float | None],
    paper: Sequence[float | None],
    text: Callable[[float | None], str],
) -> list[list[str]]:
    """Return a line with our numbers and, if the paper has numbers, a line with the paper's numbers."""
    lines = [[*map(str, shape), "ours", *("-" if value is None else text(value) for value in ours)]]
    if any(value is not None for value in paper):
        lines.append(["", "", "paper", *map(text, paper)])
    return lines


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _digits(value: float | None) -> str:
    """Format a number with at least three significant digits and without an exponent.

    >>> [_digits(value) for value in (0.0072, 1.316, 49.94, 2380.0, 207000.0, None)]
    ['0.00720', '1.32', '49.9', '2380', '207000', '']
    """
    if value is None:
        return ""
    places = 2 - int(np.floor(np.log10(value))) if value > 0 else 0
    return f"{value:.{max(0, places)}f}"


def _span(counts: Sequence[int]) -> str:
    measured = [count for count in counts if count]
    return f"{min(measured)} to {max(measured)}" if min(measured) < max(measured) else str(measured[0])

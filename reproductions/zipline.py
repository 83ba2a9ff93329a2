"""Tables and figures of ZipLine (Zhao et al., Machine Learning 2021, sections 3 to 6.1): choosing a barrier."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from rich.table import Table

from benchmarks.zipline import NAIVE_SHAPE, TABLE_4_SHAPES, Cell, figures_of, measure_cells
from paceline.cli.console import TellShare
from paceline.look.timelines import COLOURS, DASHES, new_figure
from paceline.zipline import (
    LastInterval,
    Solution,
    bsp_barrier,
    candidate_waits,
    generate_pushes,
    random_barrier,
    solve,
)
from paceline.zipline.end_times import Floats

from .exhibit import Exhibit, Figure, Made, Options, beside
from .papers import ELASTIC_BSP, Quote
from .verdicts import Measured

PAPER = "ElasticBSP and ZipLine (2021)"
SEED = 0  # of the input that the figures show; the tables show the distribution over `SEEDS` inputs
SEEDS = {10: 400, 1000: 40}  # number of workers -> number of inputs


def predicted(workers: int, lookahead: int, seed: int = SEED) -> Floats:
    """Return end times in ms with the shape (workers, lookahead), generated and predicted as in the paper."""
    last, interval = LastInterval()(generate_pushes(workers, np.random.default_rng(seed)))
    times: Floats = last[:, None] + np.arange(1, lookahead + 1) * interval[:, None]
    return times


@cache
def published(lookahead: int) -> Floats:
    """Return the end times in ms that the authors predict from their data, for 1,000 workers.

    The first column is the last push itself, not one interval later.
    """
    file = Path(__file__).with_name("datasets") / "elasticbsp-pushes.csv"
    last, interval = np.loadtxt(file, delimiter=",").T
    times: Floats = last[:, None] + np.arange(lookahead) * interval[:, None]
    return times


# -- Figures 4, 6 and 7 ----------------------------------------------------------------------------------------


def distribution(values: Sequence[float]) -> str:
    """Format the median of some numbers and the range that contains nine tenths of them.

    >>> distribution(range(101))
    '50 (5 to 95)'
    """
    low, middle, high = np.percentile(np.asarray(values, dtype=float), (5, 50, 95))
    return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"


def place(paper: Quote, values: Sequence[float]) -> str:
    """Say where the paper's value lies among ours.

    >>> place(Quote(where="Fig. 4", value=600, means="d_Z"), [500, 600, 600, 700])
    'above 25 %, equal 50 %, below 25 %'
    """
    differences = [round(value) - paper.value for value in values]
    above, equal, below = (
        sum(kind) / len(values) for kind in zip(*((d < 0, d == 0, d > 0) for d in differences), strict=True)
    )
    return f"above {above:.0%}, equal {equal:.0%}, below {below:.0%}".replace("%", " %")


def _over_inputs(title: str, rows: Mapping[str, tuple[Quote | None, str, Sequence[float]]]) -> Table:
    """Return a table: label -> the paper's value, our value for the plotted input, our values for all inputs."""
    cells: dict[str, list[tuple[Quote | None, str]]] = {
        label: [
            (None, drawn),
            (paper, distribution(values)),
            (None, "-" if paper is None else place(paper, values)),
        ]
        for label, (paper, drawn, values) in rows.items()
    }
    return beside(title, cells, ["drawn\ninput", "median\n(5 to 95 %)", "the paper's value\nis ... of ours"])


def figure_4(options: Options, tell: TellShare) -> Made:
    """Compare three ways to choose a barrier for 10 workers and R = 15."""
    seeds = 10 if options.quick else SEEDS[10]
    found = [_three_ways(predicted(10, 15, seed), seed) for seed in range(seeds)]
    waits = {name: [one[name].wait for one in found] for name in found[0]}
    chosen = found[SEED]
    zipline, random, bsp = waits.values()
    over_bsp, over_random = (float(np.median(np.divide(zipline, other))) for other in (bsp, random))
    return Made(
        tables=[
            _over_inputs(
                f"{PAPER}, Fig. 4: waiting time d_Z in ms, {seeds} inputs",
                {
                    name: (QUOTED_WAITS.get(name), f"{chosen[name].wait:.0f}", values)
                    for name, values in waits.items()
                },
            )
        ],
        figure=lambda: _draw_barriers(predicted(10, 15), chosen),
        data=waits,
        measured={"fig4-wait": _range(zipline)},
        notes=[
            f"Medians over {seeds} inputs: the d_Z of ZipLine is {over_bsp:.2f} times the d_Z of BSP and "
            f"{over_random:.2f} times the d_Z of a random barrier.",
        ],
    )


def _range(values: Sequence[float]) -> Measured:
    """Return the median over the inputs, and the range that contains nine tenths of them."""
    low, middle, high = np.percentile(np.asarray(values, dtype=float), (5, 50, 95))
    return Measured(value=float(middle), low=float(low), high=float(high), how="generated inputs")


QUOTED_WAITS = {"ZipLine (min_d)": ELASTIC_BSP.numbers["fig4-wait"]}


def _three_ways(times: Floats, seed: int) -> dict[str, Solution]:
    return {
        "ZipLine (min_d)": solve(times),
        "random (rnd_d)": random_barrier(times, np.random.default_rng(seed)),
        "BSP (bsp_d)": bsp_barrier(times),
    }


def _draw_barriers(times: Floats, chosen: Mapping[str, Solution]) -> Figure:
    figure = new_figure(11.0, 4.2)
    axes = figure.subplots()
    workers = range(len(times))
    for worker in workers:
        axes.plot(times[worker] / 1000, [worker] * len(times[worker]), ".", color="#999999")
    for (name, found), color, marker in zip(
        chosen.items(), (COLOURS[4], COLOURS[3], COLOURS[5]), "sD^", strict=True
    ):
        picked = times[list(workers), found.picks] / 1000
        axes.plot(picked, list(workers), marker, color=color, label=f"{name}: {found.wait:.0f} ms")
        axes.axvline(found.barrier / 1000, color=color, linewidth=0.8)
    axes.set(xlabel="seconds", ylabel="worker", yticks=list(workers))
    axes.set_title("Fig. 4: when to synchronize 10 workers, R = 15")
    axes.legend(frameon=True, fontsize=9)
    return figure


def _candidates(number: str, workers: int, lookahead: int, paper: Mapping[str, str], quick: bool) -> Made:
    """Compare the candidates of many inputs with the paper's. `paper` maps a label to the key of a number."""
    claims = ELASTIC_BSP.claims()
    seeds = range(5 if quick else SEEDS[workers])
    scans = [candidate_waits(predicted(workers, lookahead, seed)) for seed in seeds]
    ours = {
        "number of candidates": [float(len(scan)) for scan in scans],
        "position of the smallest d_Z": [float(np.argmin(scan)) + 1 for scan in scans],
        "smallest d_Z, ms": [float(scan.min()) for scan in scans],
    }
    waits = scans[SEED]
    best = int(np.argmin(waits))
    rows = {
        label: (claims[paper[label]] if label in paper else None, f"{values[SEED]:,.0f}", values)
        for label, values in ours.items()
    }

    def draw() -> Figure:
        figure = new_figure(11.0, 3.8)
        axes, spread = figure.subplots(1, 2, width_ratios=(3, 1))
        axes.plot(np.arange(1, len(waits) + 1), waits, "." if len(waits) < 1000 else ",", color=COLOURS[0])
        axes.plot([best + 1], [waits[best]], "s", color=COLOURS[4], label=f"best: {waits[best]:.0f} ms")
        axes.set(xlabel="candidate Z, in scan order", ylabel="d_Z, ms")
        axes.set_title(f"Fig. {number}: every d_Z that ZipLine evaluates, n = {workers:,}, R = {lookahead}")
        axes.legend(frameon=False)
        smallest = "smallest d_Z, ms"
        spread.hist(ours[smallest], bins=15, color=COLOURS[5])
        spread.axvline(claims[paper[smallest]].value, color=COLOURS[4])
        spread.set_title(f"line: {claims[paper[smallest]]} ms, the paper's")
        spread.set(xlabel=f"{smallest}, {len(scans)} inputs", ylabel="inputs")
        return figure

    return Made(
        tables=[_over_inputs(f"{PAPER}, Fig. {number}: n = {workers:,}, {len(scans)} inputs", rows)],
        figure=draw,
        data=ours,
        measured={paper[label]: _range(values) for label, values in ours.items() if label in paper},
    )


def figure_6(options: Options, tell: TellShare) -> Made:
    """Plot d_Z for every candidate in the example of Fig. 4."""
    paper = {
        "number of candidates": "fig6-candidates",
        "position of the smallest d_Z": "fig6-position",
        "smallest d_Z, ms": "fig4-wait",
    }
    return _candidates("6", 10, 15, paper, options.quick)


def figure_7(options: Options, tell: TellShare) -> Made:
    """Plot d_Z for every candidate with 1,000 workers, and count the candidates of three methods."""
    workers, lookahead = 1000, 15
    paper = {
        "number of candidates": "fig7-candidates",
        "smallest d_Z, ms": f"table3: zipline, {workers}, {lookahead}",
    }
    made = _candidates("7", workers, lookahead, paper, options.quick)
    times = published(lookahead)
    counts: dict[str, list[tuple[Quote | None, str]]] = {}
    measured = {}
    for method in ("zipline", "full-grid-scan", "grid-scan"):
        tell(method, 0.5)
        if method == "full-grid-scan" and options.quick:
            continue
        key = "fig7-candidates" if method == "zipline" else f"fig7-{method}"
        found = solve(times, method)
        counts[method] = [
            (ELASTIC_BSP.numbers[key], f"{found.candidates:,}"),
            (TABLE_3.cell(method, f"{workers}, {lookahead}"), f"{found.wait:,.0f}"),
        ]
        measured[key] = Measured.exactly(found.candidates, PUBLISHED)
        measured[f"table3: {method}, {workers}, {lookahead}"] = Measured.exactly(found.wait, PUBLISHED)
    table = beside(f"{PAPER}, Fig. 7: the authors' data", counts, ["candidates", "d_Z, ms"])
    return msgspec.structs.replace(
        made, tables=[table, *made.tables], notes=[FIRST_END_TIME], measured={**made.measured, **measured}
    )


TABLE_3 = ELASTIC_BSP.tables["table3"]
PUBLISHED = "the authors' data"
FIRST_END_TIME = (
    "The candidates are all end times from the first one by which every worker has ended an iteration. In the data "
    "that the authors published, the first predicted end time of a worker is its last push; in our generated inputs "
    "it is one interval later."
)


# -- Tables 3 and 4, Figure 10 ---------------------------------------------------------------------------------


_found: dict[bool, tuple[list[Cell], list[Table]]] = {}


def _cells(options: Options, tell: TellShare) -> tuple[list[Cell], list[Table]]:
    """Return the cells and tables of the benchmark, which runs only once for all exhibits."""
    if options.quick not in _found:
        rounds = 1 if options.quick else 3
        cells, goals = measure_cells(tell, rounds, options.quick)
        tables = [figures.table() for figures in figures_of(cells, goals, rounds)]
        _found[options.quick] = cells, tables
    return _found[options.quick]


def _timed(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells of the shapes for which the paper has times, and of the shape for the naive method."""
    return [cell for cell in cells if cell.shape in (NAIVE_SHAPE, *TABLE_4_SHAPES)]


def table_3(options: Options, tell: TellShare) -> Made:
    """Compare the smallest waiting time that each method finds."""
    cells, tables = _cells(options, tell)
    measured = {}
    for column in TABLE_3.columns:
        workers, lookahead = map(int, column.split(", "))
        if workers == WORKERS:
            inputs = [published(lookahead)]
        else:
            inputs = [
                predicted(workers, lookahead, seed) for seed in range(5 if options.quick else SEEDS[WORKERS])
            ]
        # ZipLine and its variants find the same waiting time: the tests compare them, and the fastest is used here.
        exact = [solve(times).wait for times in inputs]
        for method in TABLE_3.rows:
            if method == "full-grid-scan" and options.quick and workers * lookahead > QUICKLY_SCANNED:
                continue
            scans = method in ("grid-scan", "full-grid-scan")
            waits = [solve(times, method).wait for times in inputs] if scans else exact
            found = Measured.exactly(waits[0], PUBLISHED) if workers == WORKERS else _range(waits)
            measured[f"table3: {method}, {column}"] = found
    lines = {
        method: [
            (TABLE_3.cell(method, column), "-" if found is None else str(found.value))
            for column in THOUSAND
            for found in [measured.get(f"table3: {method}, {column}")]
        ]
        for method in TABLE_3.rows
    }
    table = beside(f"{PAPER}, Table 3: smallest d_Z in ms in the authors' data", lines, list(THOUSAND))
    return Made(
        [table, *tables[:1]], lambda: _draw_times(cells), msgspec.to_builtins(cells), _machine(), measured
    )


WORKERS = 1000  # in the data that the authors published
QUICKLY_SCANNED = 1500  # end times; the full grid scan of ten times as many takes half a second
THOUSAND = tuple(column for column in TABLE_3.columns if column.startswith(f"{WORKERS},"))


def table_4(options: Options, tell: TellShare) -> Made:
    """Compare the computation time of each method."""
    cells, tables = _cells(options, tell)
    times = {
        (cell.method, f"{cell.workers}, {cell.lookahead}"): cell.median_ms
        for cell in _timed(cells)
        if cell.median_ms is not None
    }
    measured = {
        f"table4: {method}, {shape}": Measured.exactly(times[method, shape] / times["zipline", shape])
        for method, shape in TABLE_4
        if method != "zipline" and (method, shape) in times and ("zipline", shape) in times
    }
    return Made(
        tables[1:2], lambda: _draw_times(cells), msgspec.to_builtins(_timed(cells)), _machine(), measured
    )


VARIANTS = ("zipline", "zipline-opt", "zipline-opt-bs")
_PRINTED = ELASTIC_BSP.tables["table4"]
TABLE_4 = {
    (method, shape): _PRINTED.cell(method, shape) for method in _PRINTED.rows for shape in _PRINTED.columns
}


def figure_10(options: Options, tell: TellShare) -> Made:
    """Compare how the computation times of ZipLine and its variants grow with the number of workers and R."""
    found, _ = _cells(options, tell)
    rows = [row for row in _timed(found) if row.method in (*VARIANTS, "auto")]
    shapes = list(dict.fromkeys((row.workers, row.lookahead) for row in rows))
    cells = {(row.method, row.workers, row.lookahead): row for row in rows}
    lines: dict[str, Sequence[tuple[Quote | None, str]]] = {}
    for workers, lookahead in shapes:
        pairs = []
        for method in (*VARIANTS, "auto"):
            row = cells.get((method, workers, lookahead))
            paper = TABLE_4.get((method, f"{workers}, {lookahead}"))
            pairs.append(
                (paper, "-" if row is None or row.median_ms is None else f"{row.median_ms * 1e3:,.0f}")
            )
        lines[f"n = {workers:,}, R = {lookahead}"] = pairs
    table = beside(f"{PAPER}, Fig. 10: computation time, us", lines, [*VARIANTS, "auto"])
    return Made([table], lambda: _draw_times(found), msgspec.to_builtins(rows), _machine())


def _machine() -> list[str]:
    versions = f"Python {platform.python_version()} and NumPy {np.__version__}"
    return [f"Measured with {versions}. The paper's code uses C++11."]


MARKERS = "os^vDPX"  # there are more methods than colors


def _draw_times(cells: Sequence[Cell]) -> Figure:
    figure = new_figure(9.0, 4.6)
    axes = figure.subplots()
    timed = _timed(cells)
    methods = list(dict.fromkeys(row.method for row in timed))
    for number, method in enumerate(methods):
        for lookahead, dashes in zip((15, 150), DASHES, strict=False):
            points = [
                (row.workers, row.median_ms)
                for row in timed
                if row.method == method and row.lookahead == lookahead and row.median_ms is not None
            ]
            if points:
                axes.plot(
                    [workers for workers, _ in points],
                    [ms for _, ms in points],
                    marker=MARKERS[number % len(MARKERS)],
                    linestyle=dashes,
                    color=COLOURS[number % len(COLOURS)],
                    label=f"{method}, R = {lookahead}",
                )
    axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="ms")
    axes.set_title("our computation time for one barrier")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7.5, ncols=2)
    return figure


GENERATED = (
    "The push times are drawn with the paper's generator (section 6.1), but not from the paper's seed."
)
CANDIDATES = "the waiting time d_Z for every candidate barrier"
MEASURED = "Measured with Python and NumPy on this machine, instead of C++ on a server with 24 cores."

EXHIBITS = tuple(
    Exhibit(name=f"zipline-{name}", title=title, differs=differs, minutes=minutes, make=make, stand_in=False)
    for name, title, differs, minutes, make in (
        ("fig4", "three ways to choose a barrier", GENERATED, 0.1, figure_4),
        ("fig6", f"{CANDIDATES}, with 10 workers", GENERATED, 0.1, figure_6),
        ("fig7", f"{CANDIDATES}, with 1,000 workers", GENERATED, 0.1, figure_7),
        ("fig10", "computation time of ZipLine and its variants", MEASURED, 3, figure_10),
        ("table3", "the smallest waiting time that each method finds", GENERATED, 6, table_3),
        ("table4", "computation time of each method", MEASURED, 3, table_4),
    )
)

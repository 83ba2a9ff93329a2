"""Tables and figures of ZipLine (Zhao et al., Machine Learning 2021, sections 3 to 6.1): choosing a barrier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from rich.table import Table

from benchmarks.zipline import measurement
from benchmarks.zipline.tables import tables
from paceline.cli.progress import TellShare
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

from .exhibit import Exhibit, Made, Options, beside

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXHIBITS"]

PAPER = "ElasticBSP and ZipLine (2021)"
SEED = 4


def predicted(workers: int, lookahead: int, seed: int = SEED) -> Floats:
    """Return end times in ms with the shape (workers, lookahead), generated and predicted as in the paper."""
    last, interval = LastInterval()(generate_pushes(workers, np.random.default_rng(seed)))
    times: Floats = last[:, None] + np.arange(1, lookahead + 1) * interval[:, None]
    return times


# -- Figures 4, 6 and 7 ----------------------------------------------------------------------------------------


def figure_4(options: Options, tell: TellShare) -> Made:
    """Compare three ways to choose a barrier for 10 workers and R = 15."""
    times = predicted(10, 15)
    chosen = {
        "ZipLine (min_d)": solve(times),
        "random (rnd_d)": random_barrier(times, np.random.default_rng(SEED)),
        "BSP (bsp_d)": bsp_barrier(times),
    }
    seeds = 10 if options.quick else 200
    ratios = [
        (
            solve(one).wait / bsp_barrier(one).wait,
            solve(one).wait / random_barrier(one, np.random.default_rng(k)).wait,
        )
        for k in range(seeds)
        for one in [predicted(10, 15, k)]
    ]
    paper = {"ZipLine (min_d)": "599"}
    rows = {name: [(paper.get(name, "-"), f"{found.wait:.0f}")] for name, found in chosen.items()}
    over_bsp, over_random = (float(np.median([pair[index] for pair in ratios])) for index in (0, 1))
    return Made(
        tables=[beside(f"{PAPER}, Fig. 4: waiting time d_Z, ms", rows, ["d_Z"])],
        figure=lambda: _draw_barriers(times, chosen),
        data={name: found.wait for name, found in chosen.items()},
        notes=[
            f"Medians over {seeds} inputs: the d_Z of ZipLine is {over_bsp:.2f} times the d_Z of BSP and "
            f"{over_random:.2f} times the d_Z of a random barrier.",
        ],
    )


def _draw_barriers(times: Floats, chosen: Mapping[str, Solution]) -> Figure:
    from paceline.report.canvas import COLOURS, new_figure

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
    axes.set_xlabel("seconds")
    axes.set_ylabel("worker")
    axes.set_yticks(list(workers))
    axes.set_title("Fig. 4: when to synchronize 10 workers, R = 15")
    axes.legend(frameon=True, fontsize=9)
    return figure


def _candidates(number: str, workers: int, lookahead: int, paper: tuple[str, str]) -> Made:
    waits = candidate_waits(predicted(workers, lookahead))
    best = int(np.argmin(waits))
    rows = {
        "number of candidates": [(paper[0], f"{len(waits):,}")],
        "position of the smallest d_Z": [(paper[1], f"{best + 1:,}")],
        "smallest d_Z, ms": [("599" if workers == 10 else "-", f"{waits[best]:.0f}")],
    }

    def draw() -> Figure:
        from paceline.report.canvas import COLOURS, new_figure

        figure = new_figure(10.0, 3.8)
        axes = figure.subplots()
        axes.plot(np.arange(1, len(waits) + 1), waits, "." if len(waits) < 1000 else ",", color=COLOURS[0])
        axes.plot([best + 1], [waits[best]], "s", color=COLOURS[4], label=f"best: {waits[best]:.0f} ms")
        axes.set_xlabel("candidate Z, in scan order")
        axes.set_ylabel("d_Z, ms")
        axes.set_title(f"Fig. {number}: every d_Z that ZipLine evaluates, n = {workers:,}, R = {lookahead}")
        axes.legend(frameon=False)
        return figure

    return Made(
        tables=[beside(f"{PAPER}, Fig. {number}", rows, ["n = " + f"{workers:,}"])],
        figure=draw,
        data=waits.tolist() if len(waits) < 1000 else {"best": best + 1, "count": len(waits)},
    )


def figure_6(options: Options, tell: TellShare) -> Made:
    """Plot d_Z for every candidate in the example of Fig. 4."""
    return _candidates("6", 10, 15, ("141", "97"))


def figure_7(options: Options, tell: TellShare) -> Made:
    """Plot d_Z for every candidate with 1,000 workers."""
    return _candidates("7", 1000, 15, ("-", "-"))


# -- Tables 3 and 4, Figure 10 ---------------------------------------------------------------------------------


@cache
def _measured(quick: bool) -> measurement.ZiplineReport:
    return measurement.measure(quick=quick, tell=_tell[-1])


_tell: list[TellShare] = []


def _report(options: Options, tell: TellShare) -> measurement.ZiplineReport:
    """Return the report of the benchmark. The benchmark runs only once for all exhibits."""
    _tell.append(tell)
    return _measured(options.quick)


def table_3(options: Options, tell: TellShare) -> Made:
    """Compare the smallest waiting time that each method finds."""
    report = _report(options, tell)
    table, _, _ = tables(report)
    return Made([table], lambda: _draw_times(report), msgspec.to_builtins(report.waits), _machine(report))


def table_4(options: Options, tell: TellShare) -> Made:
    """Compare the computation time of each method."""
    report = _report(options, tell)
    _, table, _ = tables(report)
    return Made([table], lambda: _draw_times(report), msgspec.to_builtins(report.times), _machine(report))


VARIANTS = ("zipline", "zipline-opt", "zipline-opt-bs")


def figure_10(options: Options, tell: TellShare) -> Made:
    """Compare how the computation times of ZipLine and its variants grow with the number of workers and R."""
    report = _report(options, tell)
    rows = [row for row in report.times if row.method in (*VARIANTS, "auto")]
    shapes = list(dict.fromkeys((row.workers, row.lookahead) for row in rows))
    cells = {(row.method, row.workers, row.lookahead): row for row in rows}
    lines: dict[str, Sequence[tuple[str, str]]] = {}
    for workers, lookahead in shapes:
        pairs = []
        for method in (*VARIANTS, "auto"):
            row = cells.get((method, workers, lookahead))
            pairs.append((_ms(row.paper_mean_ms if row else None), _ms(row.median_ms if row else None)))
        lines[f"n = {workers:,}, R = {lookahead}"] = pairs
    table: Table = beside(f"{PAPER}, Fig. 10: computation time, ms", lines, [*VARIANTS, "auto"])
    return Made([table], lambda: _draw_times(report), msgspec.to_builtins(rows), _machine(report))


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _machine(report: measurement.ZiplineReport) -> list[str]:
    return [f"Measured with Python {report.python} and NumPy {report.numpy}. The paper's code uses C++11."]


def _draw_times(report: measurement.ZiplineReport) -> Figure:
    from paceline.report.canvas import COLOURS, DASHES, new_figure

    figure = new_figure(9.0, 4.6)
    axes = figure.subplots()
    methods = list(dict.fromkeys(row.method for row in report.times))
    for number, method in enumerate(methods):
        for lookahead, dashes in zip((15, 150), DASHES, strict=False):
            points = [
                (row.workers, row.median_ms)
                for row in report.times
                if row.method == method and row.lookahead == lookahead and row.median_ms is not None
            ]
            if points:
                axes.plot(
                    [workers for workers, _ in points],
                    [ms for _, ms in points],
                    marker="o",
                    linestyle=dashes,
                    color=COLOURS[number % len(COLOURS)],
                    label=f"{method}, R = {lookahead}",
                )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("workers")
    axes.set_ylabel("ms")
    axes.set_title("our computation time for one barrier")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7.5, ncols=2)
    return figure


GENERATED = "The push times are drawn with the paper's generator (section 6.1), but with another seed."
MEASURED = "Measured with Python and NumPy on this machine, instead of C++ on a server with 24 cores."

EXHIBITS = (
    Exhibit(
        name="zipline-fig4",
        source=f"{PAPER}, Fig. 4",
        title="three ways to choose a barrier",
        differs=GENERATED,
        minutes=0.1,
        make=figure_4,
    ),
    Exhibit(
        name="zipline-fig6",
        source=f"{PAPER}, Fig. 6",
        title="the waiting time d_Z for every candidate barrier, with 10 workers",
        differs=GENERATED,
        minutes=0.1,
        make=figure_6,
    ),
    Exhibit(
        name="zipline-fig7",
        source=f"{PAPER}, Fig. 7",
        title="the waiting time d_Z for every candidate barrier, with 1,000 workers",
        differs=GENERATED,
        minutes=0.1,
        make=figure_7,
    ),
    Exhibit(
        name="zipline-fig10",
        source=f"{PAPER}, Fig. 10",
        title="computation time of ZipLine and its variants",
        differs=MEASURED,
        minutes=3,
        make=figure_10,
    ),
    Exhibit(
        name="zipline-table3",
        source=f"{PAPER}, Table 3",
        title="the smallest waiting time that each method finds",
        differs=GENERATED,
        minutes=3,
        make=table_3,
    ),
    Exhibit(
        name="zipline-table4",
        source=f"{PAPER}, Table 4",
        title="computation time of each method",
        differs=MEASURED,
        minutes=3,
        make=table_4,
    ),
)

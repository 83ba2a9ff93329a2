"""Tables of the results of the ZipLine benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from rich import box
from rich.table import Table

from .measurement import (
    NAIVE_SHAPE,
    PERIODIC,
    TABLE_3_SHAPES,
    TABLE_4_SHAPES,
    Shape,
    ZiplineGoal,
    ZiplineReport,
)

__all__ = ["tables"]


HEADINGS = (
    "zip-\nline",
    "zip-\nline-\nopt",
    "zip-\nline-\nopt-bs",
    "full-\ngrid-\nscan",
    "grid-\nscan",
    "naive",
    "auto",
    "solve_\nperi-\nodic",
)
GOAL_NAMES = {PERIODIC: "periodic", "plain sort": "sort"}


def tables(report: ZiplineReport) -> list[Table]:
    """Return Table 3, Table 4 and the goals as tables that are at most 80 characters wide."""
    rounds = f"{report.rounds} round{'s' if report.rounds != 1 else ''}"
    empty = f"\n-: not measured; {'left out by --quick, or see below' if report.quick else 'see below'}"
    waits = _paper_table("Table 3: smallest wait found, ms")
    times = _paper_table("Table 4: computation time, ms")
    inputs = _span([row.inputs for row in report.waits])
    waits.caption = f"medians over {inputs} inputs, {rounds}; paper: one data set{empty}"
    calls = _span([row.inputs for row in report.times])
    times.caption = f"medians over {calls} calls, {rounds}; paper: means of 10 runs{empty}"
    for shape in (NAIVE_SHAPE, *TABLE_3_SHAPES):
        cells = [row for row in report.waits if (row.workers, row.lookahead) == shape]
        _add_pair(waits, shape, [row.wait_ms for row in cells], [row.paper_wait_ms for row in cells], _whole)
    waits.add_section()
    waits.add_row("success", "", "ours", *(_percent(row.optimal_share, 1) for row in report.success))
    waits.add_row(
        "", "", "paper", *(_percent(row.paper_success_share, 0) for row in report.success), style="dim"
    )
    for shape in (NAIVE_SHAPE, *TABLE_4_SHAPES):
        timed = [row for row in report.times if (row.workers, row.lookahead) == shape]
        _add_pair(
            times, shape, [row.median_ms for row in timed], [row.paper_mean_ms for row in timed], _digits
        )
    return [waits, times, _goal_table(report.goals, rounds)]


def _paper_table(title: str) -> Table:
    table = _table(title)
    table.add_column("n", justify="right", no_wrap=True, vertical="bottom")
    table.add_column("R", justify="right", no_wrap=True, vertical="bottom")
    table.add_column("", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    return table


def _goal_table(goals: Sequence[ZiplineGoal], rounds: str) -> Table:
    table = _table("Goals")
    table.caption = f"medians over {_span([row.inputs for row in goals])} inputs, {rounds}"
    for heading in ("what", "end times"):
        table.add_column(heading, no_wrap=True, vertical="bottom")
    for heading in ("n", "R", "ms", "against\nms", "ratio", "goal", "met"):
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for row in goals:
        table.add_row(
            row.what if row.against is None else f"{row.what} / {GOAL_NAMES[row.against]}",
            row.distribution,
            str(row.workers),
            str(row.lookahead),
            _digits(row.median_ms),
            _digits(row.against_median_ms),
            "" if row.ratio is None else f"{row.ratio:.2f}",
            f"{row.goal_ms:g} ms" if row.goal_ms is not None else f"{row.goal_ratio:g} x",
            "[green]yes[/]" if row.met else "[red]no[/]",
        )
    return table


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0,
    )


def _add_pair(
    table: Table,
    shape: Shape,
    ours: Sequence[float | None],
    paper: Sequence[float | None],
    text: Callable[[float | None], str],
) -> None:
    """Add a row with our numbers and, if the paper has numbers, a row with the paper's numbers."""
    table.add_row(
        str(shape[0]), str(shape[1]), "ours", *("-" if value is None else text(value) for value in ours)
    )
    if any(value is not None for value in paper):
        table.add_row("", "", "paper", *map(text, paper), style="dim")


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


def _percent(share: float | None, places: int) -> str:
    return "" if share is None else f"{share:.{places}%}"


def _span(counts: Sequence[int]) -> str:
    measured = [count for count in counts if count]
    return f"{min(measured)} to {max(measured)}" if min(measured) < max(measured) else str(measured[0])

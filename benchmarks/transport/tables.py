"""Tables of the results: steps, updates and goals."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from .goals import TransportGoal, goal_rows, ratio_of, times_by_case
from .plan import (
    FLOOR,
    GLOO,
    SHM_ASP,
    SHM_BSP,
    SOCKET_ASP,
    SOCKET_BSP,
    TCP_ASP,
    TCP_BSP,
    Case,
    TransportRow,
    elements,
)

__all__ = ["tables"]

# Heading of a column of ratios -> case of a row -> numerator and denominator of the ratio in that cell.
RATIOS: dict[str, dict[Case, tuple[Case, Case]]] = {
    "x\nfloor": {SHM_ASP: (SHM_ASP, FLOOR)},
    "gloo /\nthis": {SHM_BSP: (GLOO, SHM_BSP), TCP_BSP: (GLOO, TCP_BSP)},
    "x\nsocket": {TCP_ASP: (TCP_ASP, SOCKET_ASP), TCP_BSP: (TCP_BSP, SOCKET_BSP)},
}


def tables(rows: Sequence[TransportRow], rounds: int) -> list[Table]:
    """Return tables of the measured steps, updates and goals."""
    steps = [row for row in rows if row.optimizer is None]
    updates = [row for row in rows if row.optimizer is not None]
    goals = goal_rows(rows)
    made = [_step_table(steps, rounds)] if steps else []
    sizes_mb = dict.fromkeys(row.size_mb for row in updates)
    made += [_update_table([row for row in updates if row.size_mb == size_mb]) for size_mb in sizes_mb]
    return [*made, _goal_table(goals)] if goals else made


def _step_table(rows: Sequence[TransportRow], rounds: int) -> Table:
    table = _table("One training step", ("MB", "workers", "ms", "low - high", *RATIOS), ("system", "", ""))
    table.caption = (
        f"medians over {rounds} round{'s' if rounds != 1 else ''}; low and high: fastest and slowest round"
    )
    times_ms = times_by_case(rows)
    before = None
    for row in rows:
        case, place = Case(row.system, row.transport, row.mode), (row.size_mb, row.workers)
        if before not in (None, place):
            table.add_section()
        where = ("", "") if place == before else (f"{row.size_mb:g}", str(row.workers))
        ratios = (
            "" if case not in pairs else _text(ratio_of(times_ms, *pairs[case], *place))
            for pairs in RATIOS.values()
        )
        table.add_row(*case, *where, _ms(row.median_ms), _span(row), *ratios)
        before = place
    return table


def _update_table(rows: Sequence[TransportRow]) -> Table:
    table = _table(
        f"One update of {rows[0].size_mb:g} MB of parameters",
        ("ms", "low - high", "traffic ms", "x traffic", "fastest ns/weight"),
        ("optimizer",),
    )
    for row in rows:
        assert row.optimizer is not None
        assert row.traffic_ms is not None
        assert row.fastest_ms is not None
        ratio = row.median_ms / row.traffic_ms
        per_weight_ns = 1e6 * row.fastest_ms / elements(row.size_mb)
        table.add_row(
            row.optimizer,
            _ms(row.median_ms),
            _span(row),
            _ms(row.traffic_ms),
            _text(ratio),
            _text(per_weight_ns),
        )
    return table


def _goal_table(goals: Sequence[TransportGoal]) -> Table:
    table = _table("Goals", ("MB", "workers", "measured", "goal", "met"), ("what",))
    for row in goals:
        goal = row.goal
        unit = "us" if goal.bottom is None else "x"
        table.add_row(
            _short(goal.top) if goal.bottom is None else f"{_short(goal.top)} / {_short(goal.bottom)}",
            f"{goal.size_mb:g}",
            str(goal.workers),
            f"{_text(row.figure)} {unit}",
            f"{'>=' if goal.at_least else '<='} {goal.bound:g} {unit}",
            "[green]yes[/]" if row.met else "[red]no[/]",
        )
    return table


def _table(title: str, numbers: Sequence[str], names: Sequence[str]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0,
    )
    for name in names:
        table.add_column(name, no_wrap=True)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _short(case: Case) -> str:
    """Return the shortest name of a case that distinguishes it from all other cases.

    >>> _short(Case("gloo", "tcp", "bsp")), _short(Case("paceline", "shm", "asp"))
    ('gloo', 'paceline shm asp')
    """
    several = case.system in ("paceline", "socket")
    return " ".join(case) if several else case.system


def _ms(value: float) -> str:
    """Format a time in milliseconds with three decimals, or with fewer decimals if it is 10 ms or longer.

    >>> [_ms(value) for value in (0.0512, 12.346, 123.456, 45678.9)]
    ['0.051', '12.35', '123.5', '45679']
    """
    return f"{value:.{max(0, 4 - len(f'{abs(value):.0f}'))}f}"


def _span(row: TransportRow) -> str:
    return f"{_ms(row.low_ms)} - {_ms(row.high_ms)}"


def _text(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.2f}"

"""`python -m benchmarks zipline`: what it measures and shows. No test checks how fast anything is."""

from __future__ import annotations

import json
from io import StringIO
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import zipline
from benchmarks.commands import app_of
from benchmarks.zipline import (
    COLUMNS,
    DISTRIBUTIONS,
    NAIVE_SHAPE,
    PAPER_SUCCESS_SHARES,
    TABLE_3_SHAPES,
    TABLE_4_SHAPES,
    Cell,
    GoalRow,
    figures_of,
    measure_cells,
    plain_sort,
    success_share,
)
from paceline.cli.console import shown_progress
from paceline.zipline import METHODS, bsp_barrier, solve

PAPER_METHODS = ["zipline", "zipline-opt", "zipline-opt-bs", "full-grid-scan", "grid-scan"]
EXACT = ["zipline", "zipline-opt", "zipline-opt-bs", "auto", "solve_periodic"]


def tell(what: str, share: float, slow: bool = False) -> None:
    pass


@pytest.fixture(scope="module")
def report() -> tuple[list[Cell], list[GoalRow]]:
    return measure_cells(tell, 1, small=True)


@pytest.fixture(scope="module")
def cells(report: tuple[list[Cell], list[GoalRow]]) -> list[Cell]:
    return report[0]


# -- the paper's tables --------------------------------------------------------------------------------------


def test_every_cell_of_table_3_is_there_with_what_the_paper_prints(cells: list[Cell]) -> None:
    found = {(row.method, *row.shape): row.paper_wait_ms for row in cells}

    printed = {key for key, wait_ms in found.items() if wait_ms is not None}
    assert printed == {
        (method, n, r) for method in PAPER_METHODS for n in (10, 50, 100, 500, 1000) for r in (15, 150)
    }
    assert len(found) == len(cells)
    assert [found["zipline", n, 15] for n in (10, 50, 100, 500, 1000)] == [599, 1103, 1228, 1351, 1403]
    assert [found["full-grid-scan", n, 150] for n in (10, 50, 100, 500, 1000)] == [
        518,
        1055,
        1175,
        1307,
        1382,
    ]
    assert [found["grid-scan", n, 15] for n in (10, 50, 100, 500, 1000)] == [599, 1103, 1345, 1357, 1405]
    assert [found["grid-scan", n, 150] for n in (10, 50, 100, 500, 1000)] == [518, 1103, 1253, 1344, 1401]


def test_the_success_rates_are_those_of_the_paper(cells: list[Cell]) -> None:
    assert {**dict.fromkeys(PAPER_METHODS[:4], 1.0), "grid-scan": 0.3} == PAPER_SUCCESS_SHARES
    assert all(success_share(cells, method) == 1.0 for method in EXACT)
    assert success_share(cells, "naive") is None  # no shape of the paper


def test_every_cell_of_table_4_is_there_with_what_the_paper_prints(cells: list[Cell]) -> None:
    found = {(row.method, *row.shape): row.paper_mean_ms for row in cells}

    printed = {key for key, mean_ms in found.items() if mean_ms is not None}
    assert printed == {(method, n, r) for method in PAPER_METHODS for n in (10, 100, 1000) for r in (15, 150)}
    for method, n, r, mean_us in [
        *(("zipline", 10, 15, 1.49e2), ("zipline", 1000, 150, 2.38e6), ("zipline", 100, 15, 6.37e3)),
        *(("zipline-opt", 10, 15, 90), ("zipline-opt", 10, 150, 808), ("zipline-opt", 1000, 15, 93_900)),
        *(("zipline-opt-bs", 100, 15, 2650), ("zipline-opt-bs", 100, 150, 2.3e4)),
        *(("full-grid-scan", 100, 150, 2.15e6), ("full-grid-scan", 1000, 150, 2.07e8)),
        *(("grid-scan", 10, 150, 5500), ("grid-scan", 1000, 15, 7450), ("grid-scan", 1000, 150, 2.57e5)),
    ]:
        assert found[method, n, r] == pytest.approx(mean_us / 1000)


def test_a_cell_is_measured_or_says_why_it_is_empty(cells: list[Cell]) -> None:
    for cell in cells:
        empty = [each is None for each in (cell.wait_ms, cell.optimal_share, cell.median_ms)]
        assert set(empty) == {cell.inputs == 0} == {bool(cell.empty_because)}


def test_naive_search_is_measured_where_its_sets_can_be_formed(cells: list[Cell]) -> None:
    naive = {(row.workers, row.lookahead): row for row in cells if row.method == "naive"}
    assert naive.pop(NAIVE_SHAPE).wait_ms is not None
    assert set(naive) == set(TABLE_3_SHAPES)
    for row in naive.values():
        assert row.wait_ms is None
        assert "too many" in str(row.empty_because)
    assert naive[10, 15].empty_because == "15^10 sets, about 10^12, are too many to enumerate"


def test_only_quick_leaves_anything_else_out() -> None:
    """Look at the full plan without measuring it."""
    shapes = [heat.shape for heat in zipline._heats(small=False) if heat.name == "paper"]
    assert shapes == [NAIVE_SHAPE, *TABLE_3_SHAPES]
    assert set(TABLE_4_SHAPES) < set(shapes)
    for heat in zipline._heats(small=False):
        if heat.name == "paper" and heat.shape[0] <= 100:
            attempts = heat.make(np.random.default_rng(0))
            expected = set(METHODS) | {"solve_periodic"}
            assert set(attempts) == (expected if heat.shape == NAIVE_SHAPE else expected - {"naive"})


def test_the_exact_methods_agree_on_every_wait(cells: list[Cell]) -> None:
    measured = [cell for cell in cells if cell.wait_ms is not None]
    for shape in {cell.shape for cell in measured}:
        rows = {cell.method: cell for cell in measured if cell.shape == shape}
        assert len({rows[method].wait_ms for method in EXACT}) == 1
        assert all(rows[method].optimal_share == 1.0 for method in EXACT)
        assert all(row.inputs == rows["auto"].inputs > 1 for row in rows.values())
        for method in ("grid-scan", "full-grid-scan"):
            # The wait is not smaller on any input, so the median is not smaller either.
            assert (rows[method].wait_ms or 0.0) >= (rows["auto"].wait_ms or 0.0)
    assert {cell.method for cell in measured if cell.shape == NAIVE_SHAPE} == {*METHODS, *EXACT}


@pytest.mark.thorough
def test_the_waits_are_the_same_in_every_run_and_other_rounds_have_other_inputs(
    cells: list[Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_cells = [heat for heat in zipline._heats(small=True) if heat.name == "paper"]
    monkeypatch.setattr(zipline, "_heats", lambda small: of_cells)
    again, more = (measure_cells(tell, rounds, small=True)[0] for rounds in (1, 2))
    assert [cell.wait_ms for cell in again] == [cell.wait_ms for cell in cells]
    assert [cell.inputs for cell in more] == [2 * cell.inputs for cell in cells]
    assert more[8].wait_ms != cells[8].wait_ms


# -- the goals -----------------------------------------------------------------------------------------------


def test_the_goals_are_all_in_the_plan() -> None:
    plan = {(heat.name, heat.shape) for heat in zipline._heats(small=False) if heat.name != "paper"}
    assert plan == {
        *(("steady", shape) for shape in zipline.GOALS_MS),
        *((name, shape) for name in DISTRIBUTIONS for shape in zipline.GOALS_MS),
    }
    assert zipline.GOALS_MS == {(10, 15): 0.025, (1000, 15): 0.15, (1000, 150): 1.4, (10_000, 150): 30}


def test_a_goal_is_met_if_its_figure_is_no_more_than_it(report: tuple[list[Cell], list[GoalRow]]) -> None:
    goals = report[1]
    assert {(row.what, row.against) for row in goals} == {
        ("solve_periodic", None),
        ("solve", "solve_periodic"),
        ("solve", "plain sort"),
    }
    for row in goals:
        if row.against is None:
            assert (row.ratio, row.against_median_ms) == (None, None)
            assert row.met == (row.median_ms <= row.goal)
        else:
            assert row.ratio is not None
            assert row.against_median_ms is not None
            assert row.goal == {"solve_periodic": 1.2, "plain sort": 1.5}[row.against]
            assert row.met == (row.ratio <= row.goal)
            # With one round, the ratio is the ratio of the medians.
            assert row.ratio == pytest.approx(row.median_ms / row.against_median_ms)
    assert {row.distribution for row in goals if row.against == "plain sort"} == set(DISTRIBUTIONS)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize(("n", "lookahead"), [(1, 4), (5, 1), (30, 20), (400, 15)])
def test_a_plain_sort_answers_what_solve_answers(name: str, n: int, lookahead: int) -> None:
    times = DISTRIBUTIONS[name](n, lookahead, np.random.default_rng(n))
    expected, answer = solve(times), plain_sort(times)
    assert (answer.wait, answer.barrier) == (expected.wait, expected.barrier)
    assert answer.picks.tolist() == expected.picks.tolist()
    assert answer.wait <= bsp_barrier(times).wait


def test_what_is_compared_takes_turns_and_never_repeats_an_input() -> None:
    order: list[tuple[str, int]] = []

    def call(name: str, index: int) -> Any:
        def attempt() -> Any:
            order.append((name, index))
            return solve([[float(index)], [0.0]])

        return attempt

    names = ["a", "b", "c"]
    found = zipline.take_turns([{name: call(name, index) for name in names} for index in range(9)])
    assert [name for name, _ in order] == names * 9
    assert all(before[1] != after[1] for before, after in pairwise(order))
    for name in names:
        assert sorted(index for other, index in order if other == name) == list(range(9))
        assert [made.wait_ms for made in found[name]] == [float(index) for index in range(9)]


# -- what is shown -------------------------------------------------------------------------------------------


def test_the_tables_show_both_sides(report: tuple[list[Cell], list[GoalRow]]) -> None:
    waits, times, goals = figures_of(*report, rounds=1)
    lines = waits.cells()
    assert ["", "", "paper", *["599"] * 5, "", "", ""] in lines
    assert ["", "", "paper", "1382", "1382", "1382", "1382", "1401", "", "", ""] in lines
    assert ["1000", "150", "ours", *["-"] * len(COLUMNS)] in lines
    assert ["", "", "paper", "100%", "100%", "100%", "100%", "30%", "", "", ""] in lines
    assert ["", "", "paper", "2380", "778", "566", "207000", "257", "", "", ""] in times.cells()
    assert len(goals.cells()) == len(report[1])
    console = Console(file=StringIO(), width=80, color_system=None)
    for figures in (waits, times, goals):
        console.print(figures.table())
    assert isinstance(console.file, StringIO)
    assert "…" not in console.file.getvalue()


def test_progress_elsewhere_than_on_a_terminal_is_a_line_now_and_then() -> None:
    file = StringIO()
    with shown_progress(Console(file=file, width=80)) as tell:
        tell("first", 0.0)
        tell("too soon", 0.25)
        tell("long", 0.5, slow=True)
    assert file.getvalue() == "0%, first\n50%, long\n"


def test_progress_on_a_terminal_is_a_bar_that_goes_away() -> None:
    file = StringIO()
    with shown_progress(Console(file=file, width=80, force_terminal=True)) as tell:
        tell("first", 0.0)
        tell("long", 0.5, slow=True)
    assert "50%" in file.getvalue()
    assert file.getvalue().endswith("\x1b[2K")


# -- the command ---------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_quick_prints_tables_and_notes_and_progress_goes_elsewhere() -> None:
    result = CliRunner().invoke(app_of(["zipline"]), ["zipline", "--quick"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    for title in ("Table 3", "Table 4", "Goals"):
        assert title in result.stdout
    words = " ".join(result.stdout.split())
    assert "C++11" in words
    assert "compare only times in the same row" in words
    assert "0%, round 1 of 1" in result.stderr
    assert "round 1 of 1, paper" not in result.stdout


def test_json_has_a_line_for_each_cell_with_units_in_its_keys(
    report: tuple[list[Cell], list[GoalRow]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zipline, "measure_cells", lambda *_, **options: report)
    result = CliRunner().invoke(app_of(["zipline"]), ["zipline", "--quick", "--json"])
    _, *rows = map(json.loads, result.stdout.splitlines())
    assert len(rows) > len(COLUMNS) * len(TABLE_3_SHAPES)
    for row in rows:
        for key, value in row.items():
            if isinstance(value, float):
                assert key.endswith(("_ms", "_share", "ratio", "goal")), key

"""`python -m benchmarks zipline`: what it measures and shows. No test checks how fast anything is."""

from __future__ import annotations

import json
from io import StringIO
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import commands
from benchmarks.zipline import measurement
from benchmarks.zipline.measurement import (
    DISTRIBUTIONS,
    NAIVE_SHAPE,
    TABLE_3_SHAPES,
    TABLE_4_SHAPES,
    ZiplineReport,
    measure,
    plain_sort,
)
from benchmarks.zipline.tables import tables
from paceline.cli.progress_bar import shown_progress
from paceline.errors import ConfigurationError
from paceline.zipline import METHODS, bsp_barrier, solve

PAPER_METHODS = ["zipline", "zipline-opt", "zipline-opt-bs", "full-grid-scan", "grid-scan"]
EXACT = ["zipline", "zipline-opt", "zipline-opt-bs", "auto", "solve_periodic"]


@pytest.fixture(scope="module")
def report() -> ZiplineReport:
    return measure(quick=True)


@pytest.fixture(scope="module")
def printed_as_json() -> str:
    """Return what the command prints for two rounds."""
    result = CliRunner().invoke(commands.app, ["zipline", "--quick", "--json", "--rounds", "2"])
    assert result.exit_code == 0, result.output
    return result.stdout


def shown(report: ZiplineReport) -> list[str]:
    """Return each table as text, 80 columns wide."""
    texts = []
    for table in tables(report):
        console = Console(file=StringIO(), width=80, color_system=None)
        console.print(table)
        assert isinstance(console.file, StringIO)
        texts.append(console.file.getvalue())
    return texts


# -- the paper's tables --------------------------------------------------------------------------------------


def test_every_cell_of_table_3_is_there_with_what_the_paper_prints(report: ZiplineReport) -> None:
    cells = {(row.method, row.workers, row.lookahead): row.paper_wait_ms for row in report.waits}

    printed = {key for key, wait_ms in cells.items() if wait_ms is not None}
    assert printed == {
        (method, n, r) for method in PAPER_METHODS for n in (10, 50, 100, 500, 1000) for r in (15, 150)
    }
    assert len(cells) == len(report.waits)
    assert [cells["zipline", n, 15] for n in (10, 50, 100, 500, 1000)] == [599, 1103, 1228, 1351, 1403]
    assert [cells["full-grid-scan", n, 150] for n in (10, 50, 100, 500, 1000)] == [
        518,
        1055,
        1175,
        1307,
        1382,
    ]
    assert [cells["grid-scan", n, 15] for n in (10, 50, 100, 500, 1000)] == [599, 1103, 1345, 1357, 1405]
    assert [cells["grid-scan", n, 150] for n in (10, 50, 100, 500, 1000)] == [518, 1103, 1253, 1344, 1401]


def test_the_success_rates_are_there_with_what_the_paper_prints(report: ZiplineReport) -> None:
    printed = {row.method: row.paper_success_share for row in report.success}
    assert printed == {
        **dict.fromkeys(PAPER_METHODS[:4], 1.0),
        "grid-scan": 0.3,
        **dict.fromkeys(["naive", "auto", "solve_periodic"]),
    }


def test_every_cell_of_table_4_is_there_with_what_the_paper_prints(report: ZiplineReport) -> None:
    cells = {(row.method, row.workers, row.lookahead): row.paper_mean_ms for row in report.times}

    printed = {key for key, mean_ms in cells.items() if mean_ms is not None}
    assert printed == {(method, n, r) for method in PAPER_METHODS for n in (10, 100, 1000) for r in (15, 150)}
    assert len(cells) == len(report.times)
    for method, n, r, mean_us in [
        *(("zipline", 10, 15, 1.49e2), ("zipline", 1000, 150, 2.38e6), ("zipline", 100, 15, 6.37e3)),
        *(("zipline-opt", 10, 15, 90), ("zipline-opt", 10, 150, 808), ("zipline-opt", 1000, 15, 93_900)),
        *(("zipline-opt-bs", 100, 15, 2650), ("zipline-opt-bs", 100, 150, 2.3e4)),
        *(("full-grid-scan", 100, 150, 2.15e6), ("full-grid-scan", 1000, 150, 2.07e8)),
        *(("grid-scan", 10, 150, 5500), ("grid-scan", 1000, 15, 7450), ("grid-scan", 1000, 150, 2.57e5)),
    ]:
        assert cells[method, n, r] == pytest.approx(mean_us / 1000)


def test_a_cell_is_measured_or_says_why_it_is_empty(report: ZiplineReport) -> None:
    for row in report.waits:
        assert (row.wait_ms is None) == (row.optimal_share is None) == (row.inputs == 0)
        assert (row.wait_ms is None) == bool(row.empty_because)
    for timed in report.times:
        assert (timed.median_ms is None) == (timed.inputs == 0) == bool(timed.empty_because)
        assert timed.median_ms is None or timed.median_ms > 0


def test_naive_search_is_measured_where_its_sets_can_be_formed(report: ZiplineReport) -> None:
    naive = {(row.workers, row.lookahead): row for row in report.waits if row.method == "naive"}
    assert naive.pop(NAIVE_SHAPE).wait_ms is not None
    assert set(naive) == set(TABLE_3_SHAPES)
    for row in naive.values():
        assert row.wait_ms is None
        assert "too many" in str(row.empty_because)
    assert naive[10, 15].empty_because == "15^10 sets, about 10^12, are too many to enumerate"


def test_only_quick_leaves_anything_else_out() -> None:
    """Look at the full plan without measuring it."""
    shapes = [heat.shape for heat in measurement._heats(quick=False) if heat.name == "paper"]
    assert shapes == [NAIVE_SHAPE, *TABLE_3_SHAPES]
    assert set(TABLE_4_SHAPES) < set(shapes)
    for heat in measurement._heats(quick=False):
        if heat.name == "paper" and heat.shape[0] <= 100:
            attempts = heat.make(np.random.default_rng(0))
            expected = set(METHODS) | {"solve_periodic"}
            assert set(attempts) == (expected if heat.shape == NAIVE_SHAPE else expected - {"naive"})


def test_the_exact_methods_agree_on_every_wait(report: ZiplineReport) -> None:
    measured = [row for row in report.waits if row.wait_ms is not None]
    for shape in {(row.workers, row.lookahead) for row in measured}:
        rows = {row.method: row for row in measured if (row.workers, row.lookahead) == shape}
        assert len({rows[method].wait_ms for method in EXACT}) == 1
        assert all(rows[method].optimal_share == 1.0 for method in EXACT)
        assert all(row.inputs == rows["auto"].inputs > 1 for row in rows.values())
        for method in ("grid-scan", "full-grid-scan"):
            # The wait is not smaller on any input, so the median is not smaller either.
            assert (rows[method].wait_ms or 0.0) >= (rows["auto"].wait_ms or 0.0)
    assert {row.method for row in measured if (row.workers, row.lookahead) == NAIVE_SHAPE} == {
        *METHODS,
        *EXACT,
    }


def test_the_waits_are_the_same_in_every_run_and_other_rounds_have_other_inputs(
    report: ZiplineReport, printed_as_json: str
) -> None:
    again, more = measure(quick=True), msgspec.json.decode(printed_as_json, type=ZiplineReport)
    assert again.waits == report.waits
    assert [row.inputs for row in more.waits] == [2 * row.inputs for row in report.waits]
    assert more.waits[5].wait_ms != report.waits[5].wait_ms


def test_a_report_takes_a_round_at_least() -> None:
    with pytest.raises(ConfigurationError, match="rounds is 0, expected at least 1"):
        measure(quick=True, rounds=0)


# -- the goals -----------------------------------------------------------------------------------------------


def test_the_goals_are_all_in_the_plan() -> None:
    plan = {(heat.name, heat.shape) for heat in measurement._heats(quick=False) if heat.name != "paper"}
    assert plan == {
        *(("steady", shape) for shape in measurement.GOALS_MS),
        *((name, shape) for name in DISTRIBUTIONS for shape in measurement.GOALS_MS),
    }
    assert measurement.GOALS_MS == {(10, 15): 0.025, (1000, 15): 0.15, (1000, 150): 1.4, (10_000, 150): 30}


def test_a_goal_is_met_if_its_figure_is_no_more_than_it(report: ZiplineReport) -> None:
    assert {(row.what, row.against) for row in report.goals} == {
        ("solve_periodic", None),
        ("solve", "solve_periodic"),
        ("solve", "plain sort"),
    }
    for row in report.goals:
        if row.against is None:
            assert row.goal_ms is not None
            assert (row.ratio, row.goal_ratio, row.against_median_ms) == (None, None, None)
            assert row.met == (row.median_ms <= row.goal_ms)
        else:
            assert row.ratio is not None
            assert row.against_median_ms is not None
            assert row.goal_ratio == {"solve_periodic": 1.2, "plain sort": 1.5}[row.against]
            assert row.met == (row.ratio <= row.goal_ratio)
            # With one round, the ratio is the ratio of the medians.
            assert row.ratio == pytest.approx(row.median_ms / row.against_median_ms)
    distributions = {row.distribution for row in report.goals if row.against == "plain sort"}
    assert distributions == set(DISTRIBUTIONS)


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
    found = measurement._in_turns(
        [{name: call(name, index) for name in names} for index in range(9)], measurement._no_progress
    )
    assert [name for name, _ in order] == names * 9
    assert all(before[1] != after[1] for before, after in pairwise(order))
    for name in names:
        assert sorted(index for other, index in order if other == name) == list(range(9))
        assert [made.wait_ms for made in found[name]] == [float(index) for index in range(9)]


# -- what is shown -------------------------------------------------------------------------------------------


def test_the_tables_fit_80_columns_and_show_both_sides(report: ZiplineReport) -> None:
    waits, times, goals = shown(report)
    assert all(len(line) <= 80 for text in (waits, times, goals) for line in text.splitlines())
    assert "…" not in waits + times + goals
    lines = [line.split() for line in waits.splitlines()]
    assert ["paper", *["599"] * 5] in lines
    assert ["paper", "1382", "1382", "1382", "1382", "1401"] in lines
    assert ["1000", "150", "ours", *["-"] * 8] in lines
    assert ["paper", "100%", "100%", "100%", "100%", "30%"] in lines
    assert ["paper", "2380", "778", "566", "207000", "257"] in [line.split() for line in times.splitlines()]
    assert sum(line.rstrip().endswith((" yes", " no")) for line in goals.splitlines()) == len(report.goals)


def test_a_full_report_fits_too(report: ZiplineReport) -> None:
    """The widest tables: every cell filled, slow figures, the largest shape."""
    waits = [msgspec.structs.replace(row, wait_ms=1403.0) for row in report.waits]
    times = [msgspec.structs.replace(row, median_ms=45_678.9) for row in report.times]
    goals = [msgspec.structs.replace(row, workers=10_000, lookahead=150) for row in report.goals]
    wide = msgspec.structs.replace(report, waits=waits, times=times, goals=goals, quick=False, rounds=10)
    assert "…" not in "".join(shown(wide))


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


def test_quick_prints_tables_and_notes_and_progress_goes_elsewhere() -> None:
    result = CliRunner().invoke(commands.app, ["zipline", "--quick"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    for title in ("Table 3", "Table 4", "Goals"):
        assert title in result.stdout
    words = " ".join(result.stdout.split())
    assert "C++11" in words
    assert "compare only times in the same row" in words
    assert "0%, round 1 of 1" in result.stderr
    assert "round 1 of 1, paper" not in result.stdout


def test_json_is_one_object_with_units_in_its_keys(printed_as_json: str) -> None:
    document = json.loads(printed_as_json)
    assert (document["rounds"], document["quick"]) == (2, True)
    assert msgspec.json.decode(printed_as_json, type=ZiplineReport).rounds == 2
    for kind in ("waits", "success", "times", "goals"):
        assert document[kind]
        for row in document[kind]:
            for key, value in row.items():
                if isinstance(value, float):
                    assert key.endswith(("_ms", "_share", "ratio")), key


def test_rounds_below_one_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match="rounds is 0, expected a whole number >= 1"):
        CliRunner().invoke(commands.app, ["zipline", "--rounds", "0"], catch_exceptions=False)

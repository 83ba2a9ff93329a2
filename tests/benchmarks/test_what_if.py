"""`python -m benchmarks what-if` and `advice`: what they show. No test checks how fast anything is."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from benchmarks import advice, what_if
from benchmarks.commands import app_of
from paceline.errors import ConfigurationError


def test_the_table_marks_errors_beyond_the_goals() -> None:
    times = {
        ("bsp", "the recorded run"): [(10.3, 10.0), (10.1, 10.0), (10.0, 10.0)],
        ("bsp", "half the bandwidth"): [(18.0, 20.0)],
        ("asp", "the recorded run"): [(10.3, 10.0)],
        ("asp", "twice the workers"): [(26.0, 20.0), (22.2, 20.0)],
    }
    rows = what_if.rows(times)
    assert [row.met for row in rows] == [True, True, False, False]
    assert (rows[0].ratio, rows[0].low, rows[0].high) == (1.01, 1.0, 1.03)
    cells = [[cell(row) for cell in what_if.COLUMNS.values()] for row in rows]
    assert cells[0][2:] == ["10.00 s", "10.10 s", "1.010", "1.000 to 1.030"]
    assert [row[4] for row in cells] == ["1.010", "0.900", "1.030 !", "1.205 !"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--rounds 0", "rounds is 0, expected a whole number >= 1"),
        ("--rate 1", "rate is '1', expected a rate"),
        ("--queue-ms 0", "queue_ms is 0, expected more than 0 and at most 1000"),
    ],
)
def test_wrong_options_are_refused(options: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        CliRunner().invoke(app_of(["what-if"]), ["what-if", *options.split()], catch_exceptions=False)


def test_the_table_marks_promises_that_were_not_kept() -> None:
    rows = [
        advice.AdviceRow("logging", "--batch balanced", 1.5, 1.4),
        advice.AdviceRow("a slow loader", "--sync asp", 4.74, 1.08),
    ]
    assert [advice.COLUMNS["error"](row) for row in rows] == ["+7.1%", "+338.9% !"]

"""`python -m benchmarks what-if` and `advice`: what they measure and show. No test checks how fast anything is."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks import advice
from benchmarks.overlap.namespaces import why_not
from benchmarks.what_if import CASES, WhatIfPlan, WhatIfReport, measure, rows, table
from paceline.errors import ConfigurationError


def test_the_table_marks_errors_beyond_the_goals() -> None:
    times = {
        ("bsp", "the recorded run"): [(10.3, 10.0), (10.1, 10.0), (10.0, 10.0)],
        ("bsp", "half the bandwidth"): [(18.0, 20.0)],
        ("asp", "the recorded run"): [(10.3, 10.0)],
        ("asp", "twice the workers"): [(26.0, 20.0), (22.2, 20.0)],
    }
    report = WhatIfReport("400mbit", 0.01, 3, rows(times))
    assert [row.met for row in report.rows] == [True, True, False, False]
    assert (report.rows[0].ratio, report.rows[0].low, report.rows[0].high) == (1.01, 1.0, 1.03)
    console = Console(width=120, record=True)
    console.print(table(report))
    shown = console.export_text()
    for words in ("queues of 10 ms", "10.10 s", "1.010 ", "1.000 to 1.030", "0.900 ", "1.030!", "1.205!"):
        assert words in shown


def test_a_plan_that_is_not_sound_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="rounds is 0, expected a whole number >= 1"):
        WhatIfPlan(rounds=0).require_sound()
    with pytest.raises(ConfigurationError, match="rate is '1', expected a rate"):
        WhatIfPlan(rate="1").require_sound()
    with pytest.raises(
        ConfigurationError, match=r"queue_s is 0\.0, expected more than 0 and at most 1 second"
    ):
        WhatIfPlan(queue_s=0.0).require_sound()


def test_the_table_marks_promises_that_were_not_kept() -> None:
    rows = [
        advice.AdviceRow("logging", "--batch balanced", 1.5, 1.4),
        advice.AdviceRow("a slow loader", "--sync asp", 4.74, 1.08),
    ]
    assert [row.met for row in rows] == [True, False]
    console = Console(width=120, record=True)
    console.print(advice.table(rows))
    shown = console.export_text()
    assert "+7.1% " in shown
    assert "+338.9%!" in shown


@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.usefixtures("machines_alone")
@pytest.mark.skipif(bool(why_not()), reason=f"creating network namespaces needs {why_not()}")
def test_each_case_is_predicted_and_measured() -> None:
    told: list[float] = []

    def tell(what: str, share: float, slow: bool = False) -> None:
        told.append(share)

    report = measure(WhatIfPlan(rounds=1, iterations=2, syncs=("asp",)), tell)

    assert [row.case for row in report.rows] == list(CASES)
    assert all(row.measured_s > 0 and row.predicted_s > 0 for row in report.rows)
    assert told == sorted(told)

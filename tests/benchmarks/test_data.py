"""`python -m benchmarks data`: what it measures and shows. No test checks how fast anything is."""

from __future__ import annotations

import pytest

from benchmarks.data import STEP_S, LoaderRow, Pass, compare, figures_of
from benchmarks.data_requests import RequestsRow


def test_passes_over_both_loaders_are_compared() -> None:
    ms = 1e-3
    plain = Pass(10, 1 * ms, 0.1 * ms, 0.5 * ms, 0, 0, 0.0)
    slow = Pass(10, 2 * ms, 0.2 * ms, 0.7 * ms, 0, 0, 0.0)
    row = compare(
        4,
        2,
        [
            (plain, Pass(10, 3 * ms, 0.12 * ms, 0.51 * ms, 4, 1, 0.2 * ms)),
            (slow, Pass(30, 4 * ms, 0.22 * ms, 0.71 * ms, 4, 1, 0.4 * ms)),
        ],
    )
    assert (row.workers, row.processes) == (4, 2)
    assert row.added_us == pytest.approx(30)
    assert row.added == pytest.approx(30e-6 / STEP_S)
    assert row.first_ms == pytest.approx(2)
    assert (row.requests, row.waits) == (8 / 40, 2 / 40)
    assert row.wait_us == pytest.approx(300)


def test_the_tables_mark_missed_goals() -> None:
    loaders = [
        LoaderRow(1, 0, 20, 40, 300, 310, 30, 0.5, 0.1, 0.0, 0.0),
        LoaderRow(4, 2, 20, 80, 300, 310, 70, 0.5, 0.1, 0.05, 40.0),
    ]
    requests = [
        RequestsRow("state machine", 1000, 0.0, 5.0),
        RequestsRow("coordinator", 1000, 9990.0, 20.0),
    ]
    times, waits, asked = (figures.cells() for figures in figures_of(loaders, requests))
    assert [row[-1] for row in times] == ["+0.60%", "+1.40% !"]
    assert waits[1][-2:] == ["5.0%", "40 us"]
    assert [row[-1] for row in asked] == ["5.0%", "20.0% !"]

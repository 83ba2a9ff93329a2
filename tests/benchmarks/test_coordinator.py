"""`python -m benchmarks coordinator`: what it measures and shows. No test checks how fast anything is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.coordinator import CoordinatorRow, measure, table
from tests.support.marks import thorough

ROW = CoordinatorRow("asp", True, 1000, 125, 990.0, 1100.0, 0.11, 0.9, 0.0003, 0.005, 0)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("sync", "secure"),
    [("asp", True), *thorough(("elastic-bsp:lookahead=3", False), ("spec-sync", False))],
)
def test_light_workers_train_like_real_ones(sync: str, secure: bool) -> None:
    [row] = measure(
        lambda what, share, slow=False: None, [(sync, 4, secure)], workers=12, seconds=0.5, interval_s=0.05
    )
    assert (row.sync, row.secure, row.workers, row.machines) == (sync, secure, 12, 4)
    assert row.notifications_per_s >= row.iterations_per_s > 0
    assert row.share > 0
    assert row.fewest > 0
    assert 0 < row.response_s <= row.slow_response_s
    assert row.taken_out == 0


def test_the_table_marks_missed_goals() -> None:
    slow = CoordinatorRow("spec-sync", True, 1000, 125, 850.0, 2600.0, 0.6, 0.9, 0.0003, 0.005, 1)
    file = io.StringIO()
    Console(file=file, width=200).print(table([ROW, slow]))
    shown = file.getvalue()
    assert "10.0%" in shown
    assert "10.0%!" not in shown
    assert "23.1%!" in shown

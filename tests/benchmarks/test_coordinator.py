"""`python -m benchmarks coordinator`: what it measures and shows. No test checks how fast anything is."""

from __future__ import annotations

import pytest

from benchmarks.coordinator import COLUMNS, CoordinatorRow, measure
from tests.support.marks import thorough

ROW = CoordinatorRow("asp", True, 1000, 125, 990.0, 1100.0, 0.11, 0.9, 0.0003, 0.005, 0)


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.parametrize(
    ("sync", "secure"),
    [("asp", True), *thorough(("elastic-bsp:lookahead=3", False), ("spec-sync", False))],
)
def test_light_workers_train_like_real_ones(sync: str, secure: bool) -> None:
    [figures] = measure(
        lambda what, share, slow=False: None, [(sync, 4, secure)], workers=12, seconds=0.5, interval_s=0.05
    )
    [row] = figures.rows
    assert (row.sync, row.secure, row.workers, row.machines) == (sync, secure, 12, 4)
    assert row.notifications_per_s >= row.iterations_per_s > 0
    assert row.share > 0
    assert row.fewest > 0
    assert 0 < row.response_s <= row.slow_response_s
    assert row.taken_out == 0


def test_the_table_marks_missed_goals() -> None:
    slow = CoordinatorRow("spec-sync", True, 1000, 125, 850.0, 2600.0, 0.6, 0.9, 0.0003, 0.005, 1)
    assert [COLUMNS["core"](row) for row in (ROW, slow)] == ["10.0%", "23.1% !"]

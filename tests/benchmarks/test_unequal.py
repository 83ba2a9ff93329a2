"""`python -m benchmarks unequal`: what it shows. No test checks how fast anything is."""

from __future__ import annotations

from benchmarks.unequal import COLUMNS, UnequalRow


def test_the_table_marks_missed_goals() -> None:
    rows = [
        UnequalRow("pace", "bsp", "equal", 24.0, 24.5, 1.0),
        UnequalRow("pace", "asp", "equal", 12.0, 13.0, 2.0),
        UnequalRow("slowdown", "asp", "equal", 10.0, 10.1, 2.4),
        UnequalRow("slowdown", "bsp", "balanced", 12.0, 12.1, 2.0),
    ]
    assert [COLUMNS["speedup"](row) for row in rows] == ["1.00", "2.00 !", "2.40", "2.00"]
    assert [COLUMNS["error"](row) for row in rows] == ["+2.1%", "+8.3% !", "+1.0%", "+0.8%"]

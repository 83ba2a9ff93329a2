"""`python -m benchmarks unequal`: what it measures and shows. No test checks how fast anything is."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks.unequal import SCENARIOS, UnequalRow, measure, table


@pytest.mark.chaos
@pytest.mark.processes
def test_each_scenario_is_run_and_simulated_under_each_model() -> None:
    told: list[float] = []

    def tell(what: str, share: float, slow: bool = False) -> None:
        told.append(share)

    rows = measure(tell, (("bsp", "equal"), ("bsp", "balanced")), epochs=1)

    assert [(row.scenario, row.sync, row.batch) for row in rows] == [
        (scenario, "bsp", batch) for scenario in SCENARIOS for batch in ("equal", "balanced")
    ]
    assert all(row.live_s > 0 and row.simulated_s > 0 for row in rows)
    assert all(row.speedup == 1.0 for row in rows if row.batch == "equal")
    assert told == sorted(told)


def test_the_table_marks_missed_goals() -> None:
    rows = [
        UnequalRow("pace", "bsp", "equal", 24.0, 24.5, 1.0),
        UnequalRow("pace", "asp", "equal", 12.0, 13.0, 2.0),
        UnequalRow("slowdown", "asp", "equal", 10.0, 10.1, 2.4),
        UnequalRow("slowdown", "bsp", "balanced", 12.0, 12.1, 2.0),
    ]
    console = Console(width=120, record=True)
    console.print(table(rows))
    bsp, slow, fast, balanced = [line.split() for line in console.export_text().splitlines() if " s " in line]
    assert "1.00" in bsp
    assert "2.00!" in slow
    assert "+8.3%!" in slow
    assert "2.40" in fast
    assert "+1.0%" in fast
    assert "2.00" in balanced

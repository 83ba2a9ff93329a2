"""`python -m benchmarks simulator`: what it measures and shows. No test checks how fast anything is."""

from __future__ import annotations

import pytest

from benchmarks import simulator
from benchmarks.simulator import FidelityRow, SpeedRow, measure


def test_errors_are_relative_to_the_live_run() -> None:
    row = FidelityRow("asp", 10.0, 9.0, 2.0, 2.5)
    assert row.gradients_off == pytest.approx(-0.1)
    assert row.staleness_off == pytest.approx(0.25)
    assert FidelityRow("bsp", 10.0, 9.0, 0.0, 0.0).staleness_off == 0.0


def test_the_tables_mark_the_goals_that_are_missed() -> None:
    fidelity = [FidelityRow("asp", 10.0, 9.5, 2.0, 2.5), FidelityRow("bsp", 10.0, 8.0, 0.0, 0.0)]
    speed = [
        SpeedRow("events per second", 120_000.0, 100_000, "1/s", at_least=True),
        SpeedRow("memory", 2000.0, 1024.0, "MiB"),
    ]
    assert [[cell(row) for cell in simulator.COLUMNS.values()] for row in fidelity] == [
        ["asp", "10.00", "9.50", "-5.0%", "2.00", "2.50", "+25.0% !"],
        ["bsp", "10.00", "8.00", "-20.0% !", "0.00", "0.00", "+0.0%"],
    ]
    assert [[cell(row) for cell in simulator.SPEED_COLUMNS.values()] for row in speed] == [
        ["events per second", "1.2e+05 1/s", ">= 100,000 1/s"],
        ["memory", "2e+03 MiB !", "<= 1,024 MiB"],
    ]


@pytest.mark.thorough
@pytest.mark.processes
def test_a_model_is_measured_live_and_simulated() -> None:
    told: list[str] = []
    [accuracy] = measure(lambda what, share, slow=False: told.append(what), ("asp",), 1.0, speed=False)
    [row] = accuracy.rows
    assert row.sync == "asp"
    assert row.live_gradients_per_s > 0
    assert row.simulated_gradients_per_s > 0
    assert told[-1] == "live run and simulation under asp"


def test_both_loops_compute_something() -> None:
    assert simulator.training_ratio(4, workers=2, iterations=3) > 0

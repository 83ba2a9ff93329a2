"""`python -m benchmarks simulator`: what it measures and shows. No test checks how fast anything is."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from benchmarks import simulator
from benchmarks.simulator import FidelityRow, SimulatorReport, SpeedRow, measure, tables


def shown(report: SimulatorReport) -> str:
    console = Console(file=StringIO(), width=100)
    for table in tables(report):
        console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


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
    lines = [line.split() for line in shown(SimulatorReport(fidelity, speed)).splitlines()]
    assert ["asp", "10.00", "9.50", "-5.0%", "2.00", "2.50", "+25.0%", "!"] in lines
    assert ["bsp", "10.00", "8.00", "-20.0%", "!", "0.00", "0.00", "+0.0%"] in lines
    assert ["memory", "2e+03", "MiB", "!", "<=", "1,024", "MiB"] in lines
    assert ["events", "per", "second", "1.2e+05", "1/s", ">=", "100,000", "1/s"] in lines
    assert "speed" not in shown(SimulatorReport(fidelity, []))


@pytest.mark.processes
def test_a_model_is_measured_live_and_simulated() -> None:
    told: list[str] = []
    report = measure(lambda what, share, slow=False: told.append(what), ("asp",), 1.0, speed=False)
    [row] = report.fidelity
    assert (row.sync, report.speed) == ("asp", [])
    assert row.live_gradients_per_s > 0
    assert row.simulated_gradients_per_s > 0
    assert told[-1] == "live run and simulation under asp"


def test_both_loops_compute_something() -> None:
    assert simulator.training_ratio(4, workers=2, iterations=3) > 0

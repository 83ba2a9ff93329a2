"""`python -m benchmarks data`: what it measures and shows. No test checks how fast anything is."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks.data import STEP_S, DataReport, LoaderRow, Pass, compare, measure, tables
from benchmarks.data_requests import RequestsRow


@pytest.mark.chaos
@pytest.mark.processes
def test_loaders_and_the_coordinator_are_measured() -> None:
    told: list[float] = []

    def tell(what: str, share: float, slow: bool = False) -> None:
        told.append(share)

    report = measure(tell, workers=(2,), processes=(0,), rounds=1, asking=20, seconds=0.1)

    [row] = report.loaders
    assert (row.workers, row.processes) == (2, 0)
    assert min(row.plain_us, row.distributed_us, row.plain_step_us, row.distributed_step_us) > 0
    assert 0 < row.requests <= 1
    for asked in report.requests:
        assert (asked.workers, asked.request_us > 0) == (20, True)
    assert len(report.requests) == 3
    assert told == sorted(told)


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
    report = DataReport(
        [
            LoaderRow(1, 0, 20, 40, 300, 310, 30, 0.5, 0.1, 0.0, 0.0),
            LoaderRow(4, 2, 20, 80, 300, 310, 70, 0.5, 0.1, 0.05, 40.0),
        ],
        [
            RequestsRow("state machine", 1000, 0.0, 5.0),
            RequestsRow("coordinator", 1000, 9990.0, 20.0),
        ],
    )
    console = Console(width=80, record=True)
    for table in tables(report):
        console.print(table)
    shown = [line.split() for line in console.export_text().splitlines() if " us " in line]
    good, bad, waits, core, host = shown
    assert "5.0%" in waits
    assert "40" in waits
    assert "+0.60%" in good
    assert "+1.40%!" in bad
    assert "5.0%" in core
    assert "20.0%!" in host

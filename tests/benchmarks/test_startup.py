"""`python -m benchmarks startup`: the time from the start of a script to its first update."""

from __future__ import annotations

import pytest

from benchmarks import startup


@pytest.mark.chaos
@pytest.mark.processes
def test_the_script_reaches_its_first_update_alone_and_in_a_run() -> None:
    pytest.importorskip("sklearn")
    cases = (startup.CASES[0], startup.CASES[2])
    told: list[float] = []

    def tell(what: str, share: float, slow: bool = False) -> None:
        told.append(share)

    alone, run = startup.measure(tell, rounds=1, cases=cases)
    assert told == [0, 0.25, 0.5, 0.75]
    assert alone.more_s == 0
    for row in (alone, run):
        assert 0 < row.first_update_s < row.total_s
        assert row.processor_s > 0
    assert run.more_s == pytest.approx(run.first_update_s - alone.first_update_s)
    assert run.met == (run.more_s <= 1.0)


def test_the_table_names_the_goals_and_whether_they_are_met() -> None:
    row = startup.StartupRow("4 workers", 5.6, 1.0, 6.0, 9.0, "at most 5.5 s", False)
    table = startup.table([row])
    assert list(table.columns[1].cells) == ["5.60"]
    assert list(table.columns[-1].cells) == ["at most 5.5 s: not met"]

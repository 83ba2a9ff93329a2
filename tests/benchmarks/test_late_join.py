"""`python -m benchmarks late-join`: the first update of a worker that joins a run in progress."""

from __future__ import annotations

import pytest

from benchmarks import late_join


@pytest.mark.chaos
@pytest.mark.processes
def test_a_worker_joins_a_run_in_progress_and_makes_an_update() -> None:
    told: list[str] = []

    def tell(what: str, share: float, slow: bool = False) -> None:
        told.append(what)

    [row] = late_join.measure(tell, rounds=1, syncs=("asp",))
    assert told == ["asp"]
    assert row.sync == "asp"
    assert row.met == (0 < row.seconds[0] <= late_join.GOAL_S)


def test_the_table_says_whether_the_goal_is_met() -> None:
    table = late_join.table([late_join.LateJoinRow("bsp", [2.5, 0.5, 2.25], False)])
    assert [list(column.cells) for column in table.columns] == [
        ["bsp"],
        ["2.25"],
        ["2.50, 0.50, 2.25"],
        ["at most 2 s: not met"],
    ]

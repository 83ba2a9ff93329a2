"""`python -m benchmarks look`: what it costs to look at a run."""

from __future__ import annotations

import pytest

from benchmarks import look


@pytest.mark.processes
@pytest.mark.chaos
def test_cases_take_turns_in_a_run() -> None:
    told: list[float] = []

    def tell(what: str, share: float, slow: bool = False) -> None:
        told.append(share)

    [figures] = look.measure(tell, siege=True, rounds=1, times=look.Times(warm_up_s=1.0))
    rows = figures.rows
    assert told == sorted(told)
    assert told[-1] > 0.5
    assert [row.name for row in rows] == [case.name for case in look.SIEGE]
    assert rows[0].ratio == 1.0
    for row in rows:
        assert row.ratio == row.low == row.high == pytest.approx(row.step_ms / rows[0].step_ms)
        assert row.requests_per_s > 0


def test_the_table_says_whether_the_goals_are_met() -> None:
    nothing = look.LookRow("nothing", 5.0, 1.0, 1.0, 1.0, 0.0, "", True)
    flood = look.LookRow("flood", 5.5, 1.1, 1.05, 1.2, 998.7, "at most 1.053", False)
    cells = [
        [look.COLUMNS[name](row) for name in ("ratio", "requests/s", "goal")] for row in (nothing, flood)
    ]
    assert cells == [["1.0000", "", ""], ["1.1000", "999", "at most 1.053: not met"]]

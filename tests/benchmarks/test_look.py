"""`python -m benchmarks look`: what it costs to look at a run."""

from __future__ import annotations

import pytest

from benchmarks import look


@pytest.mark.processes
@pytest.mark.parametrize(
    "cases", [pytest.param(each, marks=pytest.mark.chaos) for each in (look.CASES, look.SIEGE)]
)
def test_cases_take_turns_in_a_run(cases: tuple[look.Case, ...]) -> None:
    told: list[float] = []

    def tell(what: str, share: float, slow: bool = False) -> None:
        told.append(share)

    rows = look.measure(tell, 1, cases, look.Times(warm_up_s=1.0))
    assert told == sorted(told)
    assert told[-1] > 0.5
    assert [row.name for row in rows] == [case.name for case in cases]
    assert rows[0].ratio == 1.0
    for case, row in zip(cases, rows, strict=True):
        assert row.step_ms > 0
        assert row.ratio == row.low == row.high == pytest.approx(row.step_ms / rows[0].step_ms)
        assert (row.requests_per_s > 0) == bool(case.flood)


def test_the_table_says_whether_the_goals_are_met() -> None:
    rows = [
        look.LookRow("nothing", 5.0, 1.0, 1.0, 1.0, 0.0, "", True),
        look.LookRow("flood", 5.5, 1.1, 1.05, 1.2, 998.7, "at most 1.053", False),
    ]
    table = look.table(rows, 3)
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns["ratio"] == ["1.0000", "1.1000"]
    assert columns["requests/s"] == ["", "999"]
    assert columns["goal"] == ["", "at most 1.053: not met"]

"""`python -m benchmarks startup`, `late-join` and `ray-startup`: whether their goals are met."""

from __future__ import annotations

from benchmarks import late_join, ray_startup, startup


def test_the_time_to_the_first_update_is_compared_with_the_script_alone() -> None:
    alone = [(1.0, 2.0, 1.5), (1.2, 2.2, 1.5), (1.1, 2.1, 1.5)]
    run = [(1.9, 3.0, 3.0), (2.3, 3.0, 3.0), (2.2, 3.0, 3.0)]
    row = startup._row(startup.CASES[2], run, alone)
    assert (row.first_update_s, round(row.more_s, 6), row.met) == (2.2, 1.1, False)
    assert startup.COLUMNS["goal"](row) == "at most 1 s more: not met"


def test_the_goals_are_judged_by_the_medians() -> None:
    join = late_join.LateJoinRow("bsp", [2.5, 0.5, 2.25])
    assert [cell(join) for cell in late_join.COLUMNS.values()] == [
        "bsp",
        "2.25",
        "2.50, 0.50, 2.25",
        "at most 2 s: not met",
    ]
    assert ray_startup.COLUMNS["goal"](ray_startup.RayRow("ray", [4.0], 2.5)) == "at most 3 s more: met"

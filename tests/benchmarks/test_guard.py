"""`python -m benchmarks guard`: its table, and some of its runs. The command judges all of them."""

from __future__ import annotations

import pytest

from benchmarks import guard
from benchmarks.guard.cost import Cost
from benchmarks.guard.judging import Judged, judge
from benchmarks.guard.scenarios import HEALTHY, PLANTED
from tests.support.marks import thorough

SEED = 7

SOME = [
    "NaN in the data of worker 2 at 40",
    "warm restarts",
    *thorough(
        "rate x 30 at 60, loss unknown",
        "momentum 0.99, quadratic",
        "wrong labels at worker 3",
        "one NaN in 50",
        "rate x 30, bsp",
        "loss of one batch x 100",
        "harder data at half",
    ),
]


def test_twenty_divergences_are_planted_and_twenty_runs_are_healthy() -> None:
    assert len({scenario.name for scenario in PLANTED}) == len(PLANTED) == 20
    assert len({scenario.name for scenario in HEALTHY}) == len(HEALTHY) == 20
    assert all(scenario.planted_at is not None for scenario in PLANTED)
    assert all(scenario.planted_at is None for scenario in HEALTHY)


@pytest.mark.parametrize("name", SOME)
def test_the_guard_speaks_in_time_or_is_silent(name: str) -> None:
    [scenario] = [scenario for scenario in (*PLANTED, *HEALTHY) if scenario.name == name]
    judged = judge(scenario, SEED)
    assert judged.right, judged


def test_a_run_is_right_if_the_guard_speaks_in_time_or_is_silent() -> None:
    assert Judged("a", 0, False, None, None, "", True).right
    assert not Judged("a", 0, False, None, 7, "words", True).right
    assert Judged("a", 0, True, 10, 30, "words", True).right
    assert not Judged("a", 0, True, 10, 31, "words", True).right
    assert not Judged("a", 0, True, 10, None, "", True).right
    assert not Judged("a", 0, True, 10, 12, "words", False).right
    assert Judged("a", 0, True, 10, 8, "words", True).late == 0


def test_the_tables_have_a_row_for_each_run_and_mark_a_cost_that_is_too_high() -> None:
    words = "Look (update 3): it diverges. Stop."
    rate = [Judged("rate", seed, True, 10, 12 + seed, words, True) for seed in range(3)]
    calm = [Judged("calm", 0, False, None, None, "", True)]
    runs, cost = guard.figures_of([rate, calm], Cost(10.0, 20.0, 30.0))
    assert runs.cells() == [["rate", "it diverges", "3", "3", "2 to 4"], ["calm", "", "1", "1", ""]]
    assert cost.cells()[0][-1] == "60.0 !"
    assert "4 of 4 runs are right" in runs.caption


@pytest.mark.thorough
def test_scenarios_are_judged_and_the_cost_is_measured() -> None:
    scenarios = (PLANTED[0], HEALTHY[0])
    runs, cost = guard.measure(lambda what, share, slow=False: None, scenarios, seeds=(0,))
    assert [[each.right for each in row] for row in runs.rows] == [[True], [True]]
    assert cost.rows[0].total_us > 0

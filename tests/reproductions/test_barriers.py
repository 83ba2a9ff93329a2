"""The exhibits about barriers: what they draw is what the sync model and the solvers do."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.sim import Cluster, simulate
from paceline.zipline import candidate_waits, generate_pushes, solve
from reproductions.barriers import FIGURE_9, figure_5, figure_8, growth, plans_of, pushes_of, scan
from reproductions.exhibit import Options

from .test_exhibits import silent


def test_growth_is_the_exponent_of_a_power_law() -> None:
    assert growth([10, 100, 1000], [5.0, 500.0, 50000.0]) == pytest.approx(2)


def test_the_candidates_of_the_scan_are_those_that_the_solver_evaluates() -> None:
    last = generate_pushes(5, np.random.default_rng(0))[:, 1]
    for times in (FIGURE_9, last[:, None] + 1000.0 * np.outer([1, 1.1, 1.2, 1.3, 1.4], np.arange(1, 6))):
        waits = [max(z.values()) - min(z.values()) for z in scan(times)]
        assert waits == pytest.approx(candidate_waits(times))
        best = scan(times)[int(np.argmin(waits))]
        assert max(best.values()) == solve(times).barrier


def test_figure_9_has_two_best_candidates_of_which_the_first_is_chosen() -> None:
    waits = candidate_waits(FIGURE_9)
    first, second = np.flatnonzero(waits == waits.min())
    assert (
        max(scan(FIGURE_9)[first].values()) == solve(FIGURE_9).barrier < max(scan(FIGURE_9)[second].values())
    )


def test_pushes_and_plans_are_read_from_a_trace() -> None:
    trace = simulate(Cluster(compute_s=[1.0, 2.0]), "elastic-bsp:lookahead=4", 6, record=True).trace[-1]
    pushes = pushes_of(trace)
    assert [push.time_s for push in pushes if push.worker == 1][:3] == [2.0, 4.0, 6.0]
    (at_s, plan), *_ = plans_of(trace)
    assert at_s == 4.0
    assert plan.wait_ticks == 0
    stopped = {push.worker: push.iteration for push in pushes if push.stopped and push.time_s <= 6.0}
    assert stopped == dict(plan.stops)


def test_the_second_plan_of_figure_5_follows_the_faster_worker() -> None:
    [table] = figure_5(Options(), silent).tables
    assert [list(column.cells)[1] for column in table.columns][2] == "1.0, 1.7, 1.3"


def test_the_barrier_of_figure_8_is_the_one_with_the_smaller_difference() -> None:
    made = figure_8(Options(), silent)
    differences = {at: max(counts) - min(counts) for at, counts in made.data["iterations"].items()}
    assert differences["12"] < differences["24"]
    *_, chosen = (list(column.cells) for column in made.tables[1].columns)
    assert chosen == ["yes", "no"]
    assert set(made.data["staleness"]["BSP"]) == {0}

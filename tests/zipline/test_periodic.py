"""`solve_periodic` is `solve` on end times that it does not build."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.errors import ConfigurationError
from paceline.zipline import LastInterval, Solution, generate_pushes, solve, solve_periodic, solver
from paceline.zipline import zipline as sweep
from tests.support.marks import thorough

Floats = NDArray[np.float64]


def answer(solution: Solution) -> tuple[float, float, list[int]]:
    return solution.wait, solution.barrier, solution.picks.tolist()


def built(last: NDArray[Any], interval: NDArray[Any], lookahead: int) -> Floats:
    times: Floats = last[:, None] + np.arange(1, lookahead + 1) * interval[:, None]
    return times


# Times whose end times nearly meet: sums that differ in their last bit, bases beside which intervals almost or
# altogether vanish, and a worker that stands as good as still.
lasts = st.sampled_from([0.0, 0.1, 0.3, 0.7, -0.3, 1e9, 1e9 + 0.1, -1e15, 1e16]) | st.floats(-1e3, 1e3)
intervals = st.sampled_from([0.1, 0.2, 0.3, 0.1 + 0.2, 0.7, 1 / 3, 1.0, 3.0, 1e-8, 1e-12, 1e9]) | st.floats(
    1e-3, 1e3
)


@given(st.lists(st.tuples(lasts, intervals), min_size=1, max_size=8), st.integers(1, 20))
@settings(max_examples=80)
def test_it_agrees_with_solve_where_end_times_nearly_meet(
    workers: list[tuple[float, float]], lookahead: int
) -> None:
    last, interval = np.array([last for last, _ in workers]), np.array([interval for _, interval in workers])
    expected = answer(solve(built(last, interval, lookahead), "zipline"))
    assert answer(solve_periodic(last, interval, lookahead)) == expected
    for per_bucket in (1, 6):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sweep, "FEW", 0)
            patch.setattr(solver, "FEW", 0)
            patch.setattr(sweep, "PER_BUCKET", per_bucket)
            assert answer(solve_periodic(last, interval, lookahead)) == expected
            assert answer(solve(built(last, interval, lookahead))) == expected


@pytest.mark.parametrize("base", [0.0, -3.0e12, *thorough(1.0e9)])
def test_it_agrees_with_solve_on_thousands_of_small_inputs(
    base: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(int(abs(base)))
    monkeypatch.setattr(sweep, "FEW", 0)
    monkeypatch.setattr(solver, "FEW", 0)
    for _ in range(800):
        n, lookahead = generator.integers(1, 13), int(generator.integers(1, 25))
        last = base + generator.integers(0, 20, n) * 0.1
        interval = generator.integers(1, 8, n) * generator.choice([0.1, 1 / 3, 1e-7])
        times = built(last, interval, lookahead)
        expected = answer(solve(times, "zipline-opt-bs"))
        assert answer(solve_periodic(last, interval, lookahead)) == expected
        assert answer(solve(times)) == expected


@pytest.mark.parametrize(("n", "lookahead"), [(10, 15), (300, 15), (1000, 15), (60, 150), (2, 3000)])
@pytest.mark.parametrize("warm_up_ms", [0.0, 20_000.0])
def test_it_agrees_with_zipline_opt_bs_on_the_papers_workers(
    n: int, lookahead: int, warm_up_ms: float
) -> None:
    pushes = generate_pushes(n, np.random.default_rng(n), warm_up_ms=warm_up_ms)
    last, interval = LastInterval()(pushes)
    times = built(last, interval, lookahead)
    expected = answer(solve(times, "zipline-opt-bs"))
    assert answer(solve_periodic(last, interval, lookahead)) == expected
    assert answer(solve(times)) == expected


@pytest.mark.parametrize("seed", [0, *thorough(1, 2)])
def test_it_agrees_with_solve_on_workers_of_all_sorts(seed: int) -> None:
    generator = np.random.default_rng(seed)
    n, lookahead = 900, 40
    for interval in (
        np.full(n, 1000.0),
        generator.choice([1.0, 100.0], n),
        generator.lognormal(0, 1, n),
        1.0 + generator.pareto(0.7, n),
    ):
        last = generator.random(n) * interval
        times = built(last, interval, lookahead)
        expected = answer(solve(times, "zipline-opt-bs"))
        assert answer(solve_periodic(last, interval, lookahead)) == expected
        assert answer(solve(times)) == expected


def test_it_takes_no_more_memory_than_a_few_matrices() -> None:
    n, lookahead = 2000, 150
    generator = np.random.default_rng(0)
    matrix_bytes = 8 * n * lookahead
    for interval in (generator.uniform(1000, 1500, n), np.full(n, 1000.0)):
        last = 1000.0 * generator.random(n)
        tracemalloc.start()
        solve_periodic(last, interval, lookahead)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 8 * matrix_bytes


def test_lists_and_whole_numbers_will_do() -> None:
    lookahead: Any = np.int64(4)
    assert answer(solve_periodic([0, 0], [2, 3], lookahead)) == (0.0, 6.0, [2, 1])


@pytest.mark.parametrize(
    ("last", "interval", "lookahead", "message"),
    [
        ([0.0], [1.0], 0, "lookahead must be an integer >= 1; it is 0"),
        ([0.0], [1.0], 1.5, "lookahead must be an integer >= 1; it is 1.5"),
        ([0.0, 0.0], [1.0, 0.0], 3, "the interval of worker 1 is 0.0"),
        ([0.0, 0.0], [-1.0, 1.0], 3, "the interval of worker 0 is -1.0"),
        ([0.0, 0.0], [1.0, float("nan")], 3, "the interval of worker 1 is nan"),
        ([0.0, 0.0], [1.0, float("inf")], 3, "must be finite for every worker; for worker 1 it is inf"),
        ([float("nan"), 0.0], [1.0, 1.0], 3, "must be finite for every worker; for worker 0 it is nan"),
        ([float("-inf"), 0.0], [1.0, 1.0], 3, "must be finite for every worker; for worker 0 it is -inf"),
        ([0.0, 0.0], [1.0, 1e308], 3, "must be finite for every worker; for worker 1 it is inf"),
        ([0.0, 0.0], [1.0], 3, "shapes are (2,) and (1,)"),
        ([], [], 3, "shapes are (0,) and (0,)"),
        ([[0.0]], [[1.0]], 3, "shapes are (1, 1) and (1, 1)"),
        (["now"], [1.0], 3, "must be arrays of numbers"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(
    last: Any, interval: Any, lookahead: Any, message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        solve_periodic(last, interval, lookahead)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)

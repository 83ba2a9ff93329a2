"""All exact methods give one answer, the canonical one, and it is what a search through every set finds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import paceline.zipline as zipline
from paceline.errors import ConfigurationError
from paceline.zipline import METHODS, Solution, solve
from paceline.zipline import zipline as sweep

EXACT = ["auto", "naive", "zipline", "zipline-opt", "zipline-opt-bs"]
SCANS = ["grid-scan", "full-grid-scan"]

BATCH = 2500 if os.environ.get("PACELINE_CHECK_MODELS") else 200


def answer(solution: Solution) -> tuple[float, float, list[int]]:
    return solution.wait, solution.barrier, solution.picks.tolist()


def every_set(batch: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Wait, barrier and picks of the canonical set of each (n, R) matrix in a (B, n, R) batch, by brute force."""
    _, n, lookahead = batch.shape
    # Latest columns first, so that argmin finds them first.
    picks = np.array(list(product(reversed(range(lookahead)), repeat=n)))
    sets = batch[:, np.arange(n), picks]
    barrier = sets.max(axis=2)
    wait = barrier - sets.min(axis=2)
    best = (wait * 10_000 + barrier).argmin(axis=1)
    each = np.arange(len(batch))
    return wait[each, best], barrier[each, best], picks[best]


# Ten shapes times 800 matrices (10,000 in `make check-models`). Few different times make many ties.
@pytest.mark.parametrize(
    ("n", "lookahead"), [(1, 5), (2, 2), (2, 5), (3, 1), (3, 3), (3, 4), (3, 5), (4, 2), (4, 3), (4, 4)]
)
def test_the_exact_methods_agree_with_brute_force_ties_included(
    n: int, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(100 * n + lookahead)
    for latest in (3, 8, 20, 60):
        batch = np.sort(generator.integers(0, latest, (BATCH, n, lookahead)), axis=2)
        wait, barrier, picks = every_set(batch)
        for k, times in enumerate(batch.astype(np.float64)):
            expected = wait[k], barrier[k], picks[k].tolist()
            monkeypatch.setattr(sweep, "FEW", 4096 if k % 4 == 0 else 0)
            monkeypatch.setattr(sweep, "PER_BUCKET", 1 + k % 3)
            for method in ("auto", "zipline", "zipline-opt", "zipline-opt-bs"):
                assert answer(METHODS[method](times)) == expected, (method, times)
            if k % 50 == 0:
                assert answer(solve(times, "naive")) == expected, times


@pytest.mark.parametrize("method", EXACT)
def test_of_equal_waits_the_earliest_barrier_is_chosen(method: str) -> None:
    assert answer(solve([[1, 5, 9], [2, 6, 10]], method)) == (1.0, 2.0, [0, 0])


@pytest.mark.parametrize("method", EXACT)
def test_each_worker_stops_with_its_latest_end_time_not_after_the_barrier(method: str) -> None:
    assert answer(solve([[0, 10], [1, 3], [4, 4]], method)) == (4.0, 4.0, [0, 1, 1])


@pytest.mark.parametrize("method", METHODS)
def test_one_worker_never_waits(method: str) -> None:
    assert answer(solve([[3, 4, 7]], method)) == (0.0, 3.0, [0])


@pytest.mark.parametrize("method", METHODS)
def test_one_end_time_each_leaves_no_choice(method: str) -> None:
    assert answer(solve([[3], [1], [2]], method)) == (2.0, 3.0, [0, 0, 0])


DISTRIBUTIONS: dict[str, Callable[[int, int, np.random.Generator], NDArray[Any]]] = {
    "identical": lambda n, r, g: np.tile(1000.0 * np.arange(r), (n, 1)),
    "all but identical": lambda n, r, g: g.normal(1000.0, 1e-9, (n, r)).cumsum(axis=1),
    "in step but out of phase": lambda n, r, g: 1000.0 * np.arange(r) + g.uniform(0, 1000, (n, 1)),
    "two speeds": lambda n, r, g: g.choice([1.0, 100.0], (n, 1)) * g.uniform(1, 1.1, (n, r)).cumsum(axis=1),
    "bursts": lambda n, r, g: g.exponential(g.choice([0.01, 50.0], (n, r), p=[0.9, 0.1])).cumsum(axis=1),
    "heavy tails": lambda n, r, g: g.pareto(0.6, (n, r)).cumsum(axis=1),
    "one outlier": lambda n, r, g: np.vstack(
        [g.uniform(1000, 1500, (n - 1, 1)) * np.arange(r), np.linspace(-1e12, 1e12, r)]
    ),
    "ties": lambda n, r, g: np.sort(g.integers(0, r, (n, r)), axis=1),
    "one after the other": lambda n, r, g: (
        np.sort(g.uniform(0, 10, (n, r)), axis=1) + 20.0 * np.arange(n)[:, None]
    ),
    "negative": lambda n, r, g: -g.random((n, r)).cumsum(axis=1)[:, ::-1],
}


@pytest.mark.parametrize(("n", "lookahead"), [(7, 6), (60, 150), (700, 15)])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_auto_agrees_with_zipline_opt_bs_whatever_the_distribution(name: str, n: int, lookahead: int) -> None:
    times = DISTRIBUTIONS[name](n, lookahead, np.random.default_rng(n))
    assert answer(solve(times)) == answer(solve(times, "zipline-opt-bs"))


matrices = st.integers(1, 5).flatmap(
    lambda lookahead: st.lists(
        st.lists(
            st.integers(-20, 20).map(float) | st.floats(-1e15, 1e15), min_size=lookahead, max_size=lookahead
        ).map(sorted),
        min_size=1,
        max_size=6,
    )
)


@given(matrices)
def test_the_exact_methods_agree_on_any_floats(times: list[list[float]]) -> None:
    expected = answer(solve(times, "zipline"))
    assert answer(solve(times, "zipline-opt")) == expected
    assert answer(solve(times, "zipline-opt-bs")) == expected
    assert answer(solve(times)) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "FEW", 0)
        assert answer(solve(times)) == expected


@given(matrices)
def test_wait_and_barrier_are_those_of_the_picked_times(times: list[list[float]]) -> None:
    for method in METHODS:
        if method != "naive":
            solution = solve(times, method)
            picked = [row[i] for row, i in zip(times, solution.picks, strict=True)]
            assert (solution.wait, solution.barrier) == (max(picked) - min(picked), max(picked))


@given(matrices, st.randoms(use_true_random=False))
def test_the_order_of_the_workers_does_not_matter(times: list[list[float]], random: Any) -> None:
    order = list(range(len(times)))
    random.shuffle(order)
    straight, shuffled = solve(times), solve([times[p] for p in order])
    assert (straight.wait, straight.barrier) == (shuffled.wait, shuffled.barrier)
    assert straight.picks[order].tolist() == shuffled.picks.tolist()


@given(matrices.filter(lambda times: len(times) > 1))
def test_one_worker_less_or_one_end_time_more_never_waits_longer(times: list[list[float]]) -> None:
    wait = solve(times).wait
    assert solve(times[1:]).wait <= wait
    assert solve([[*row, row[-1] + 1] for row in times]).wait <= wait


@pytest.mark.parametrize(
    ("method", "candidates"), [("naive", 4**3), ("grid-scan", 4), ("full-grid-scan", 12)]
)
def test_candidates_are_as_many_as_the_paper_says(method: str, candidates: int) -> None:
    assert solve([[0, 3, 6, 9], [1, 5, 9, 13], [2, 4, 6, 8]], method).candidates == candidates


def test_zipline_has_one_candidate_per_end_time_once_it_has_met_every_worker() -> None:
    times = [[1, 4, 6], [2, 3, 8], [5, 7, 9]]
    assert zipline.candidate_waits(times).tolist() == [2, 3, 4, 2, 3]  # at 5, 6, 7, 8 and 9
    assert solve(times, "zipline").candidates == 5


@pytest.mark.parametrize("method", ["zipline-opt", "zipline-opt-bs"])
def test_zipline_opt_has_a_candidate_only_where_the_oldest_end_time_is_replaced(method: str) -> None:
    # Z is complete with 5; then 8 replaces 3, the oldest.
    assert solve([[1, 4, 6], [2, 3, 8], [5, 7, 9]], method).candidates == 2


def test_full_grid_scan_is_not_optimal() -> None:
    times = [[5, 105], [15, 205], [0, 15], [7, 22]]
    assert solve(times, "full-grid-scan").wait == 15
    assert answer(solve(times)) == (10.0, 15.0, [0, 0, 1, 0])


def test_no_smaller_input_than_that_of_its_docstring_misleads_full_grid_scan() -> None:
    """Few workers before few end times before small numbers; a single end time per worker leaves no choice."""
    smallest = [[0, 1], [0, 3], [1, 4], [3, 4]]
    assert (solve(smallest, "full-grid-scan").wait, solve(smallest, "naive").wait) == (3.0, 2.0)
    for workers, most in ((2, 4), (3, 4), (4, 3)):
        rows = combinations_with_replacement(range(most + 1), 2)
        for times in combinations_with_replacement(rows, workers):
            assert solve(times, "full-grid-scan").wait == naive_wait(times)


@given(st.lists(st.lists(st.integers(0, 30), min_size=4, max_size=4).map(sorted), min_size=1, max_size=3))
def test_full_grid_scan_is_optimal_for_up_to_three_workers(times: list[list[int]]) -> None:
    assert solve(times, "full-grid-scan").wait == naive_wait(times)


def naive_wait(times: Sequence[Sequence[int]]) -> int:
    return min(max(z) - min(z) for z in product(*times))


def test_a_grid_scan_settles_ties_by_the_first_worker_the_earlier_column_and_the_first_set() -> None:
    # Workers 0 and 1 both begin at 2, and 0 is designated; worker 2's end times 1 and 3 are equally near to 2; the
    # set around 6 is no narrower.
    scan = solve([[2, 6], [2, 6], [1, 3]], "grid-scan")
    assert (answer(scan), scan.candidates) == ((1.0, 2.0, [0, 0, 0]), 2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([1.0, 2.0], "shape is (2,)"),
        ([[[1.0]]], "shape is (1, 1, 1)"),
        ([], "shape is (0,)"),
        ([[], []], "shape is (2, 0)"),
        ([[1.0, 2.0], [1.0]], "rows of equal length"),
        ([["soon", "later"]], "numbers"),
        ([[1.0, 2.0], [1.0, float("nan")]], "worker 1 in column 1 is nan"),
        ([[1.0, float("inf")]], "worker 0 in column 1 is inf"),
        ([[1.0, 2.0], [2.0, 1.0], [0.0, 0.0]], "ascending; in the row of worker 1, 2.0 precedes 1.0"),
    ],
)
def test_bad_times_are_refused_in_one_sentence(times: Any, message: str, method: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        solve(times, method)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_method_is_refused_and_the_nearest_one_named() -> None:
    with pytest.raises(
        ConfigurationError, match=r"ZipLine method 'zipline-op'; did you mean 'zipline-opt'\?"
    ):
        solve([[1.0]], "zipline-op")


def test_rows_may_stand_still_and_be_whole_numbers_in_any_layout() -> None:
    times = np.asfortranarray([[1, 1, 2], [0, 2, 2]])
    assert answer(solve(times)) == (0.0, 2.0, [2, 2])
    assert times.tolist() == [[1, 1, 2], [0, 2, 2]]


def test_the_public_names() -> None:
    assert sorted(zipline.__all__) == [
        "LastInterval",
        "METHODS",
        "MeanInterval",
        "MedianInterval",
        "Predictor",
        "Solution",
        "bsp_barrier",
        "candidate_waits",
        "generate_pushes",
        "random_barrier",
        "solve",
        "solve_periodic",
    ]

"""The statistics of studies: intervals that hold as often as they say, Holm's correction, and ranks."""

from __future__ import annotations

import math
import runpy
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from paceline.errors import ConfigurationError
from paceline.studies.statistics import (
    Time,
    compare_samples,
    difference,
    holm,
    holm_adjusted,
    mean_interval,
    mean_ranks,
    not_dominated,
    ratio_of_times,
    typical_time,
)
from tests.support.marks import thorough

REPETITIONS = 2000
SEEDS = 5
FACTOR = 1.5
"""By how much our times are longer than the others'."""

COMMON, OWN = 0.3, 0.2
"""Standard deviations of the logarithm of a time: what two runs with the same seed share, and what they do not."""


def times(logs: Sequence[float], end: float) -> list[Time]:
    return [Time(min(math.exp(log), end), end, math.exp(log) <= end) for log in logs]


def drawn(draw: np.random.Generator, count: int, *, paired: bool) -> tuple[list[float], list[float]]:
    """Logarithms of our times and of the others', of which the typical ones are `FACTOR` and 1."""
    ours, others = draw.normal(0.0, COMMON, (2, count))
    if paired:
        others = ours
    x = ours + draw.normal(math.log(FACTOR), OWN, count)
    y = others + draw.normal(0.0, OWN, count)
    return x.tolist(), y.tolist()


def coverage(holds: Callable[[np.random.Generator], bool]) -> float:
    draw = np.random.default_rng(7)
    return sum(holds(draw) for _ in range(REPETITIONS)) / REPETITIONS


@pytest.mark.parametrize("paired", [True, False], ids=["paired", "unpaired"])
@pytest.mark.parametrize(
    ("end", "never"),
    [(1e9, 0.0), (1.9, 0.25), *thorough((2.4, 0.1))],
    ids=["all reach it", "a quarter never", "a tenth never"],
)
@pytest.mark.thorough
def test_intervals_cover_a_known_ratio_of_times(end: float, never: float, paired: bool) -> None:
    missed = []

    def holds(draw: np.random.Generator) -> bool:
        ours, others = (times(logs, end) for logs in drawn(draw, SEEDS, paired=paired))
        missed.append(sum(not time.reached for time in ours) / SEEDS)
        ratio = ratio_of_times(ours, others, paired=paired)
        return ratio.low <= FACTOR <= ratio.high

    assert 0.93 <= coverage(holds) <= 0.97
    assert np.mean(missed) == pytest.approx(never, abs=0.03)


@pytest.mark.parametrize("paired", [True, False], ids=["paired", "unpaired"])
def test_intervals_cover_a_known_difference(paired: bool) -> None:
    def holds(draw: np.random.Generator) -> bool:
        found = difference(*drawn(draw, SEEDS, paired=paired), paired=paired)
        return found.low <= math.log(FACTOR) <= found.high

    assert 0.93 <= coverage(holds) <= 0.97


@pytest.mark.parametrize("end", [1e9, *thorough(1.9, 2.4)])
def test_intervals_cover_a_known_time(end: float) -> None:
    def holds(draw: np.random.Generator) -> bool:
        estimate = typical_time(times(drawn(draw, SEEDS, paired=True)[0], end))
        return estimate.low <= FACTOR <= estimate.high

    assert 0.93 <= coverage(holds) <= 0.97


@pytest.mark.parametrize("end", [1e9, 1.5], ids=["all reach it", "some never"])
@pytest.mark.thorough
def test_among_20_equal_models_holm_finds_a_difference_in_at_most_5_percent(end: float) -> None:
    """The models have the same seeds, and are all compared with the same reference."""

    def finds(draw: np.random.Generator) -> bool:
        common = draw.normal(0.0, COMMON, SEEDS)
        reference, *models = (times((common + draw.normal(0.0, OWN, SEEDS)).tolist(), end) for _ in range(21))
        p_values = {index: ratio_of_times(model, reference).p for index, model in enumerate(models)}
        return bool(holm(p_values))

    assert coverage(finds) <= 0.05


def test_without_censored_times_the_interval_is_that_of_students_test() -> None:
    ours, others = [1.0, 1.4, 1.1, 2.0], [1.2, 1.9, 1.3, 2.2]
    ratio = ratio_of_times(*([Time(value, 9.0, True) for value in values] for values in (ours, others)))
    assert ratio == pytest.approx(compare_samples(ours, others))


def test_runs_that_never_reach_the_target_bound_the_ratio_on_one_side() -> None:
    never = [Time(60.0, 60.0, False)] * 5
    soon = [Time(value, 60.0, True) for value in (20.0, 22.0, 19.0, 21.0, 20.5)]
    slower, faster, neither = (
        ratio_of_times(never, soon),
        ratio_of_times(soon, never),
        ratio_of_times(never, never),
    )
    assert slower.ratio == slower.high == math.inf
    assert 2.5 < slower.low < 3.2  # 60 s are about 3 times as long as the others have taken
    assert faster.ratio == faster.low == 0.0
    assert faster.high == pytest.approx(1 / slower.low)
    assert slower.p == faster.p < 0.001
    assert math.isnan(neither.ratio)
    assert (neither.low, neither.high, neither.p) == (0.0, math.inf, 1.0)


def test_one_run_that_never_reaches_the_target_is_not_left_out() -> None:
    others = [Time(value, 60.0, True) for value in (20.0, 22.0, 19.0, 21.0, 20.5)]
    ours = [Time(value, 60.0, True) for value in (30.0, 31.0, 32.0, 29.0)]
    with_it = ratio_of_times([*ours, Time(60.0, 60.0, False)], others)
    without = ratio_of_times(ours, others[:4])
    assert with_it.ratio > without.ratio
    assert with_it.high > without.high


def test_runs_may_end_at_different_times() -> None:
    """A run that ends early says nothing about later times, and counts only until then."""
    ours = [Time(value, 40.0, True) for value in (30.0, 31.0, 33.0, 29.0)]
    others = [*(Time(value, 60.0, True) for value in (20.0, 22.0, 19.0)), Time(10.0, 10.0, False)]
    early = ratio_of_times(ours, others)
    assert 1.0 < early.ratio < 1.6
    assert early.low < 1.0  # the fourth pair is a tie


def test_one_seed_has_no_interval() -> None:
    one, other = [Time(30.0, 60.0, True)], [Time(20.0, 60.0, True)]
    ratio = ratio_of_times(one, other)
    assert ratio.ratio == pytest.approx(1.5)
    assert (ratio.low, ratio.high, ratio.p) == (0.0, math.inf, 1.0)
    assert math.isnan(mean_interval([0.9]).low)


def test_a_result_that_is_not_finite_makes_a_difference_unknown() -> None:
    unknown = difference([1.0, math.nan], [1.0, 2.0])
    assert math.isnan(unknown.value)
    assert unknown.p == 1.0


def test_a_target_that_is_never_reached_is_infinite_and_last_in_the_ranks() -> None:
    never = [math.inf] * 16
    ratio = compare_samples(never, [1.0] * 16)
    assert (ratio.ratio, ratio.low, ratio.high) == (math.inf,) * 3
    assert ratio.p == pytest.approx(2**-15)
    assert compare_samples(never, never).tie
    assert mean_ranks({"one": [2.0] * 16, "other": never}) == {"one": 1.0, "other": 2.0}


@pytest.mark.parametrize("pairs", range(1, 9))
def test_an_interval_by_signs_is_no_narrower_than_its_confidence_allows(pairs: int) -> None:
    """The median lies outside of all values in 2 of 2^pairs cases, which is more than 5 % up to five pairs."""
    ratio = compare_samples([math.inf, *[2.0] * (pairs - 1)], [1.0] * pairs)
    assert (ratio.low, ratio.tie) == ((0.0, True) if pairs <= 5 else (pytest.approx(2.0), False))


def test_the_interval_of_a_ratio_contains_1_as_often_as_it_should() -> None:
    draw = np.random.default_rng(1)
    ties = sum(compare_samples(np.exp(draw.normal(0, 0.3, 16)).tolist(), [1.0] * 16).tie for _ in range(1000))
    assert 930 <= ties <= 970


def test_holm_rejects_no_more_than_bonferroni_for_the_smallest_and_stops_at_the_first_that_fails() -> None:
    assert holm({"a": 0.012, "b": 0.013, "c": 0.02, "d": 0.9}) == {"a", "b", "c"}
    assert holm({"a": 0.013, "b": 0.0001, "c": 0.03, "d": 0.04}) == {"a", "b"}


def test_adjusted_probabilities_are_significant_exactly_where_holm_finds_a_difference() -> None:
    draw = np.random.default_rng(3)
    for _ in range(200):
        p_values = dict(enumerate((draw.random(6) ** 3).tolist()))
        adjusted = holm_adjusted(p_values)
        assert {key for key, p in adjusted.items() if p <= 0.05} == holm(p_values)


@pytest.mark.parametrize("higher", [True, False], ids=["higher is better", "lower is better"])
def test_a_value_that_is_not_a_number_is_dominated_by_any_other_at_no_more_cost(higher: bool) -> None:
    points = {"good": (1.0, 0.8), "diverged": (2.0, math.nan), "later": (3.0, math.nan)}
    assert not_dominated(points, higher_is_better=higher) == ["good"]
    del points["good"]
    assert not_dominated(points, higher_is_better=higher) == ["diverged"]


def test_without_scipy_a_study_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.delitem(sys.modules, "paceline.studies.statistics")
    with pytest.raises(ConfigurationError, match=r"pip install 'paceline\[study\]'"):
        runpy.run_module("paceline.studies.statistics")

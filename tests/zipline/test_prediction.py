"""From recent pushes to the pace of each worker."""

from __future__ import annotations

from math import nan

import numpy as np
import pytest

from paceline.errors import ConfigurationError
from paceline.zipline import LastInterval, MeanInterval, MedianInterval, Predictor, solve_periodic

EVERY_PREDICTOR: list[Predictor] = [
    LastInterval(),
    MeanInterval(),
    MedianInterval(),
    MeanInterval(1),
    MedianInterval(1),
]


@pytest.mark.parametrize("predictor", EVERY_PREDICTOR, ids=repr)
def test_a_steady_worker_is_predicted_exactly(predictor: Predictor) -> None:
    last, interval = predictor(
        [[0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0], [1.0, 4.0, 7.0, 10.0, 13.0, 16.0, 19.0]]
    )
    assert (last.tolist(), interval.tolist()) == ([12.0, 19.0], [2.0, 3.0])


@pytest.mark.parametrize("predictor", EVERY_PREDICTOR, ids=repr)
def test_it_looks_at_no_more_than_its_memory(predictor: Predictor) -> None:
    recent = np.cumsum(np.random.default_rng(0).random((3, predictor.memory)), axis=1)
    long_ago = np.sort(np.random.default_rng(1).uniform(-9, 0, (3, 5)), axis=1)
    _, interval = predictor(recent)
    _, same = predictor(np.hstack([long_ago, recent]))
    assert interval.tolist() == same.tolist()


@pytest.mark.parametrize("predictor", EVERY_PREDICTOR, ids=repr)
def test_two_pushes_are_enough_and_missing_ones_are_padded_in_front(predictor: Predictor) -> None:
    last, interval = predictor([[1.0, 2.0, 4.0, 8.0], [nan, nan, 5.0, 9.0]])
    assert last.tolist() == [8.0, 9.0]
    assert interval[1] == 4.0
    assert predictor([[5.0, 9.0]])[1].tolist() == [4.0]


def test_the_paper_takes_the_last_interval() -> None:
    last, interval = LastInterval()([[0.0, 5.0, 7.0]])
    assert (last.tolist(), interval.tolist()) == ([7.0], [2.0])


def test_the_mean_is_a_moving_average() -> None:
    pushes = np.cumsum([[0.0, 9.0, 1.0, 2.0, 3.0, 6.0]], axis=1)
    assert MeanInterval(window=4)(pushes)[1].tolist() == [3.0]


def test_one_stall_moves_the_mean_and_the_last_interval_but_not_the_median() -> None:
    pushes = np.cumsum([[0.0, 2.0, 2.0, 2.0, 2.0, 50.0]], axis=1)
    assert LastInterval()(pushes)[1].tolist() == [50.0]
    assert MeanInterval()(pushes)[1].tolist() == [11.6]
    assert MedianInterval()(pushes)[1].tolist() == [2.0]


def test_looking_further_back_predicts_jittery_workers_better() -> None:
    generator = np.random.default_rng(0)
    pace = generator.uniform(1.0, 1.5, 1000)
    pushes = np.cumsum(pace[:, None] * generator.normal(1.0, 0.1, (1000, 12)), axis=1)

    def error(predictor: Predictor) -> float:
        return float(np.abs(predictor(pushes)[1] - pace).mean())

    assert error(MeanInterval(10)) < error(MedianInterval(10)) < 0.6 * error(LastInterval())


@pytest.mark.parametrize("pushes", [[1.0, 2.0], [[1.0], [2.0]], [[[1.0, 2.0]]]])
def test_pushes_of_the_wrong_shape_are_refused(pushes: list[float]) -> None:
    with pytest.raises(ConfigurationError, match="at least two push times per worker"):
        LastInterval()(pushes)


@pytest.mark.parametrize("predictor", [MeanInterval(), MedianInterval()], ids=repr)
def test_a_worker_that_has_pushed_once_is_refused(predictor: Predictor) -> None:
    with pytest.raises(ConfigurationError, match="worker 1 has fewer than two pushes"):
        predictor([[1.0, 2.0, 3.0], [nan, nan, 3.0]])


def test_the_solver_refuses_the_last_interval_of_a_worker_that_has_pushed_once() -> None:
    with pytest.raises(ConfigurationError, match="interval of worker 1 is nan"):
        solve_periodic(*LastInterval()([[1.0, 2.0], [nan, 3.0]]), lookahead=3)


def test_a_window_without_intervals_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least 1 interval; it is 0"):
        MeanInterval(window=0)

"""Translated updates on a quadratic with noise, by the exact recursion of second moments along recorded orders.

For the loss c x^2 / 2 and gradients c x + noise, the weight x, the velocity u and the weights x_1, ..., x_n that the
workers have pulled are a linear system with additive noise. So the rate at which x decays, and the variance of x in
the long run, follow from matrices, without sampling. They are compared with those of SGD with momentum on the joint
batch. The orders of the pushes and the pulls are those of simulated runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction as Ratio

import numpy as np
import pytest

from paceline import Cluster, simulate
from paceline.sync.actions import AnswerPull, ApplyMean, ApplyPush
from paceline.sync.translation import Fraction, Standing, translate
from tests.support.marks import thorough

RATE, MOMENTUM = 0.02, 0.9

Order = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""For each update: the workers whose pushes it uses, and the workers that are answered after it."""


def recorded_order(workers: int, sync: str, until_s: float) -> Order:
    slow = max(1, workers // 4)
    # The compute times have no short common period, so the order of the pushes changes again and again.
    times = [Ratio(3 * 997 + 7 * w if w < slow else 997 + 5 * w, 997) for w in range(workers)]
    (trace, *_) = simulate(
        Cluster(compute_s=times), sync, iterations=None, until_s=until_s, record=True
    ).trace
    order: Order = []
    for entry in trace.entries:
        pushed: tuple[int, ...] = ()
        for action in entry.actions:
            if isinstance(action, ApplyPush):
                pushed = (action.worker,)
            elif isinstance(action, ApplyMean):
                pushed = tuple(worker for worker, _ in action.pushes)
        order.append((pushed, tuple(a.worker for a in entry.actions if isinstance(a, AnswerPull))))
    return order


def matrices(
    workers: int, order: Order, curvature: float, fraction: Fraction
) -> Iterator[tuple[float, np.ndarray, np.ndarray]]:
    """Yield (joint steps, matrix, noise) of each update. The state is (x, u, x_1, ..., x_n)."""
    size = workers + 2
    for pushed, answered in order:
        matrix, noise, count = np.eye(size), np.zeros(size), len(pushed)
        if pushed:
            step, part = fraction.step * count, fraction.means * count
            gradient, velocity = np.zeros(size), np.zeros(size)
            gradient[[2 + worker for worker in pushed]] = curvature / count
            velocity[1] = 1.0
            matrix[0] -= step * RATE * (gradient + MOMENTUM * velocity)
            matrix[1] += part * (gradient - (1 - MOMENTUM) * velocity)
            noise[:2] = np.sqrt(workers / count) * np.array([-step * RATE, part])
        for worker in answered:
            matrix[2 + worker], noise[2 + worker] = matrix[0], noise[0]
        yield fraction.step * count, matrix, noise


def decay_and_variance(
    workers: int, order: Order, curvature: float, fraction: Fraction, joint_steps: int
) -> tuple[float, float]:
    """Return the factor by which x decays per joint step, and its variance for a joint gradient's noise of 1."""
    size = workers + 2
    moment, mean = np.zeros((size, size)), np.zeros(size)
    mean[[0, *range(2, size)]] = 1.0
    steps, variances, halfway = 0.0, [], 0.0
    for taken, matrix, noise in matrices(workers, order, curvature, fraction):
        steps += taken
        mean, moment = matrix @ mean, matrix @ moment @ matrix.T + np.outer(noise, noise)
        if steps > joint_steps / 2:
            halfway = halfway or abs(mean[0])
            variances.append(moment[0, 0])
        if steps > joint_steps:
            return (abs(mean[0]) / halfway) ** (2 / joint_steps), float(np.mean(variances))
    raise AssertionError("the recorded order is too short")


def in_one_process(curvature: float) -> tuple[float, float]:
    matrix = np.array([[1 - RATE * curvature, -RATE * MOMENTUM], [curvature, MOMENTUM]])
    noise = np.array([-RATE, 1.0])
    moment = np.zeros((2, 2))
    for _ in range(20_000):
        moment = matrix @ moment @ matrix.T + np.outer(noise, noise)
    return float(np.abs(np.linalg.eigvals(matrix)).max()), float(moment[0, 0])


def standing(workers: int, *, delay: bool = True) -> Fraction:
    return translate(Standing(1 / workers, (workers - 1) / workers if delay else 0.0))


@pytest.mark.parametrize(
    ("workers", "sync"),
    [(4, "asp"), (4, "elastic-bsp:lookahead=8"), *thorough((4, "ssp:staleness=3"), (16, "asp"))],
)
def test_small_steps_decay_and_vary_as_in_one_process(workers: int, sync: str) -> None:
    # h c / (1 - m), the part of the way to the minimum that a joint step moves the weights, is 0.003.
    curvature = 0.003 * (1 - MOMENTUM) / RATE
    until_s = 5_000 if sync.startswith("ssp") else 2_000  # under ssp, all are as slow as the slowest
    order = recorded_order(workers, sync, until_s)
    decay, variance = decay_and_variance(workers, order, curvature, standing(workers), 1_500)
    expected_decay, expected_variance = in_one_process(curvature)
    assert np.log(decay) / np.log(expected_decay) == pytest.approx(1, rel=0.05)
    assert variance / expected_variance == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("sync", ["asp", "elastic-bsp:lookahead=8"])
@pytest.mark.parametrize(("workers", "travel"), [(4, 0.05), *thorough((16, 0.02), (4, 0.02), (16, 0.05))])
def test_without_a_correction_for_the_delay_larger_steps_do_so_too(
    workers: int, sync: str, travel: float
) -> None:
    curvature = travel * (1 - MOMENTUM) / RATE
    order = recorded_order(workers, sync, 550)
    decay, variance = decay_and_variance(workers, order, curvature, standing(workers, delay=False), 400)
    expected_decay, expected_variance = in_one_process(curvature)
    assert np.log(decay) / np.log(expected_decay) == pytest.approx(1, rel=0.05)
    assert variance / expected_variance == pytest.approx(1, rel=0.05)


def largest_stable(workers: int, fraction: Fraction) -> float:
    """Return the largest h c, to 5 %, with which x does not grow along the order of an ASP run."""
    order = recorded_order(workers, "asp", 200)
    low, high = 0.01, 8.0
    while high > 1.05 * low:
        middle = float(np.sqrt(low * high))
        state = np.ones(workers + 2)
        norms = []
        for _, matrix, _ in matrices(workers, order, middle / RATE, fraction):
            state = matrix @ state
            norms.append(np.linalg.norm(state))
        shrinks = norms[-1] < norms[len(norms) // 2]
        low, high = (middle, high) if shrinks else (low, middle)
    return low


@pytest.mark.parametrize("workers", [4, *thorough(16)])
def test_the_correction_for_the_delay_makes_larger_curvatures_stable(workers: int) -> None:
    corrected, uncorrected = (largest_stable(workers, standing(workers, delay=d)) for d in (True, False))
    # In one process, the limit is 2 (1 + m) = 3.8.
    assert corrected > 1.1 * uncorrected
    assert 1.1 < corrected < 1.5

"""The regret bounds of FluentPS (Yao, Wu and Wang, CLUSTER 2019, section III-E), held against simulated runs.

Proposition 1 (Eq. 1) bounds the regret of SGD under SSP, Theorem 1 (Eqs. 2 and 3) under constant PSSP, and Theorem 2
under dynamic PSSP, each after T = Max_Iter * N iterations of N workers. They assume convex functions f_t with slopes
of at most L, and points at distances of at most sqrt(2) F, because D(w || w') = |w - w'|^2 / 2 <= F^2. Three things
are not stated, and are taken from Ho et al. (2013), whose theorem Proposition 1 cites:

- The t-th function belongs to worker p in iteration i, with t = i N + p + 1.
- The step size: eta_t = sigma / sqrt(t) with sigma = F / (L sqrt(2 (s + 1) N)). PSSP has no single s; here, its
  sigma is that of s' = s + 1/c - 1, at which Eq. 1 equals Eq. 3.
- Updates are added as they are. Algorithm 1, line 15, divides them by N, which the theorems do not consider.

The sync models run in the simulator, and SGD is computed along the recorded order of pushes and answers, in two ways:

- With the weights of the shard: an answer contains all pushes so far. At most N - 1 gradients are on their way at
  any time, however far ahead some workers are, so even ASP stays below the bounds here.
- With the oldest weights that an answer guarantees: the pushes of the rounds before V_train, and the worker's own. The
  theorems allow these weights, too, and they show what the model has admitted.

With the second weights and functions whose slopes turn so that late updates push the weights in the worst direction,
the regret was 7 to 14 % of the bound under SSP, and 6 to 8 % under PSSP. If the staleness is not bounded as assumed,
such functions exceed the bound.

Theorem 1 does not say how long a delayed pull waits. With lazy execution, the default of the paper, the regret stays
below its bound. With the soft barrier, which the paper uses too, the gap of a fast worker grows without limit, and
the regret exceeds the bound.
"""

from __future__ import annotations

import cmath
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import cache, partial
from itertools import accumulate
from statistics import mean, stdev
from typing import NamedTuple

import pytest
import torch

import paceline
from paceline import Cluster, simulate
from paceline.sync.actions import AnswerPull
from paceline.sync.events import PullRequested, PushReceived
from tests.support.marks import thorough

LIPSCHITZ = 1.0  # L
F = 1.0
RADIUS = F / math.sqrt(2)  # of a disc in which no two points are further than sqrt(2) F from each other


def eq_1(s: float, workers: int, iterations: int) -> float:
    """Return the bound of Proposition 1, for s that need not be whole: with s = s' it is that of Eq. 3."""
    return 4 * F * LIPSCHITZ * math.sqrt(2 * (s + 1) * workers / iterations)


# -- convex functions of the plane, whose points are complex numbers ---------------------------------------------


class Functions(ABC):
    """The functions f_t that were evaluated in a run."""

    @abstractmethod
    def at(self, w: complex, worker: int, iteration: int) -> tuple[float, complex]:
        """Return the value and the slope at w of the function of this worker and iteration."""

    @abstractmethod
    def least(self, center: complex) -> float:
        """Return the least sum of all functions so far, over the disc with this center."""


class Turning(Functions):
    """f_t(w) = <e_t, w>, where e_t is the unit vector with the given angle.

    If the angle turns by a right angle while updates are late, then these updates push w in the direction in which
    the function grows. Functions before iteration `start` are 0, because the first and largest steps might leave the
    disc.
    """

    def __init__(self, angle: Callable[[int], float], start: int) -> None:
        self._angle = angle
        self._start = start
        self._sum = 0j

    def at(self, w: complex, worker: int, iteration: int) -> tuple[float, complex]:
        slope = LIPSCHITZ * cmath.exp(1j * self._angle(iteration)) if iteration >= self._start else 0j
        self._sum += slope
        return (slope.conjugate() * w).real, slope

    def least(self, center: complex) -> float:
        return (self._sum.conjugate() * center).real - abs(self._sum) * RADIUS


def turning(lag: float, start: int) -> Turning:
    """Functions for updates that are `lag` iterations late."""
    return Turning(lambda iteration: math.pi / 2 * iteration / lag, start)


def slowing(share: float, turns: int, start: int) -> Turning:
    """Functions for workers that know, at iteration i, only the rounds before `share` times i."""
    speed = (math.pi / 2 + 2 * math.pi * turns) / math.log(1 / share)
    return Turning(lambda iteration: speed * math.log(iteration + 1), start)


class Distances(Functions):
    """f_t(w) = |x - a_t| for w = (x, y): the random a_t of worker 0 are larger than those of the others."""

    def __init__(self) -> None:
        self._draw = random.Random(1)
        self._points: list[float] = []

    def at(self, w: complex, worker: int, iteration: int) -> tuple[float, complex]:
        point = max(-RADIUS, min(RADIUS, self._draw.gauss(-0.2 if worker else 0.4, 0.3)))
        self._points.append(point)
        return abs(w.real - point), complex((w.real > point) - (w.real < point))

    def least(self, center: complex) -> float:
        median = sorted(self._points)[len(self._points) // 2]
        return sum(abs(point - median) for point in self._points)


# -- SGD along a recorded order ----------------------------------------------------------------------------------


class Step(NamedTuple):
    """What one event at the shard was, and which workers got an answer."""

    pushed: int | None  # worker
    pulled: int | None  # worker
    answered: tuple[int, ...]


Order = tuple[Step, ...]


def machines(workers: int, slow_s: float) -> Cluster:
    """Machines of which the first needs `slow_s` for an iteration, and each other one about 1 s."""
    return Cluster(compute_s=[slow_s, *(1 + Fraction(w, 1000) for w in range(1, workers))])


@cache
def recorded(sync: str, workers: int, slow_s: float, iterations: int, seed: int = 0) -> Order:
    trace, *_ = simulate(machines(workers, slow_s), sync, iterations, seed, record=True).trace
    return tuple(
        Step(
            entry.event.worker if isinstance(entry.event, PushReceived) else None,
            entry.event.worker if isinstance(entry.event, PullRequested) else None,
            tuple(action.worker for action in entry.actions if isinstance(action, AnswerPull)),
        )
        for entry in trace.entries
    )


def step_size(s: float, workers: int, worker: int, iteration: int) -> float:
    """Return eta_t."""
    sigma = F / (LIPSCHITZ * math.sqrt(2 * (s + 1) * workers))
    return sigma / math.sqrt(iteration * workers + worker + 1)


class Sgd:
    """SGD with the step sizes of the theorems for the threshold s.

    Attributes:
        losses: (worker, iteration) -> f_t(w_t).
        reach: radius of a disc that contains all points w_t, divided by that of the disc of the assumptions.
        share: R[W], divided by its bound.
    """

    def __init__(self, order: Order, s: float, functions: Functions, *, oldest: bool) -> None:
        workers = 1 + max(step.pushed for step in order if step.pushed is not None)
        count = [0] * workers
        updates: list[list[complex]] = [[] for _ in range(workers)]
        own = [0j] * workers  # sum of the worker's updates for the rounds from V_train on
        v_train = 0
        complete = 0j  # sum of all updates for the rounds before V_train
        shard = 0j  # sum of all updates
        pulled = [0j] * workers
        points: list[complex] = []
        self.losses: dict[tuple[int, int], float] = {}
        for worker, _, answered in order:
            if worker is not None:
                iteration = count[worker]
                loss, slope = functions.at(pulled[worker], worker, iteration)
                points.append(pulled[worker])
                self.losses[worker, iteration] = loss
                update = -step_size(s, workers, worker, iteration) * slope
                updates[worker].append(update)
                count[worker] += 1
                own[worker] += update
                shard += update
                while min(count) > v_train:
                    for each in range(workers):
                        complete += updates[each][v_train]
                        own[each] -= updates[each][v_train]
                    v_train += 1
            for each in answered:
                pulled[each] = complete + own[each] if oldest else shard
        x, y = [w.real for w in points], [w.imag for w in points]
        center = complex(min(x) + max(x), min(y) + max(y)) / 2
        self.reach = max(abs(w - center) for w in points) / RADIUS
        regret = (sum(self.losses.values()) - functions.least(center)) / len(points)
        self.share = regret / eq_1(s, workers, len(points))


def share_of_bound(order: Order, s: float, functions: Functions, *, oldest: bool = True) -> float:
    """Return R[W], divided by its bound for the threshold s. All w_t must be in a disc, as the theorems assume."""
    sgd = Sgd(order, s, functions, oldest=oldest)
    assert sgd.reach <= 1
    return sgd.share


@pytest.mark.parametrize(
    ("sync", "s"), [("ssp:staleness=1", 1.0), ("pssp:staleness=0,probability=0.5,execution=lazy", 1.0)]
)
def test_a_run_that_trains_takes_the_same_steps(sync: str, s: float) -> None:
    workers, iterations = 3, 20

    def train() -> None:
        model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(model.weight)
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        worker, functions = paceline.worker_index(), turning(2, 0)
        for iteration in range(iterations):
            optimizer.zero_grad()
            _, slope = functions.at(0j, worker, iteration)
            loss = model(torch.tensor([slope.real, slope.imag], dtype=torch.float64)).sum()
            (step_size(s, workers, worker, iteration) * loss).backward()
            paceline.log(loss=loss.item())
            optimizer.step()

    trained = simulate(machines(workers, 3.0), sync, train_fn=train, hyperparameters="raw").losses
    assert trained is not None
    expected = Sgd(recorded(sync, workers, 3.0, iterations), s, turning(2, 0), oldest=False).losses
    assert {(loss.worker, loss.iteration): loss.loss for loss in trained} == pytest.approx(
        expected, abs=1e-12
    )


# -- the bounds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 3, *thorough(8)])
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_proposition_1_bounds_the_regret_of_ssp(workers: int, staleness: int) -> None:
    """Eq. 1: R[W](s, N) <= 4 F L sqrt(2 (s + 1) N / T)."""
    order = recorded(f"ssp:staleness={staleness}", workers, 3.0, 40 * (staleness + 1))
    assert share_of_bound(order, staleness, Distances(), oldest=False) < 0.1
    assert share_of_bound(order, staleness, Distances()) < 0.1
    assert 0 < share_of_bound(order, staleness, turning(staleness + 1, 0), oldest=False) < 0.2
    assert 0.05 < share_of_bound(order, staleness, turning(staleness + 1, 0)) < 0.2


def upper_end(shares: list[float]) -> float:
    """Return the upper end of an interval that contains the mean of eight or more runs with a probability of 0.99."""
    assert len(shares) >= 8
    return mean(shares) + 3.5 * stdev(shares) / math.sqrt(len(shares))


def expected_share(sync: str, s: float, iterations: int, slow_s: float, seeds: Iterable[int]) -> float:
    """Return the upper end for R[W], divided by its bound for the threshold s, in runs of four workers."""
    return upper_end(
        [
            share_of_bound(recorded(sync, 4, slow_s, iterations, seed), s, turning(s + 1, round(3 * (s + 1))))
            for seed in seeds
        ]
    )


SEEDS = [range(8), *thorough(range(8, 40))]


@pytest.mark.parametrize("seeds", SEEDS, ids=len)
@pytest.mark.parametrize(("staleness", "inverse"), [(0, 2), (1, 3), *thorough((3, 2), (3, 5))])
def test_theorem_1_bounds_the_expected_regret_of_constant_pssp(
    staleness: int, inverse: int, seeds: range
) -> None:
    """Eq. 3: R[W](s, N, c) <= 4 F L sqrt(2 (s + 1/c) N / T), which is the bound of SSP(s + 1/c - 1)."""
    sync = f"pssp:staleness={staleness},probability={1 / inverse},execution=lazy"
    s = staleness + inverse - 1
    assert 0.03 < expected_share(sync, s, 30 * (s + 1), 30.0, seeds) < 0.2


@pytest.mark.parametrize("seeds", SEEDS, ids=len)
@pytest.mark.parametrize(("staleness", "alpha"), [(0, 1.0), (1, 0.5), *thorough((3, 1.0), (2, 2.0))])
def test_theorem_2_bounds_the_expected_regret_of_dynamic_pssp(
    staleness: int, alpha: float, seeds: range
) -> None:
    """Theorem 2: R[W] <= 4 F L sqrt(2 (s + 2/alpha) N / T), the bound of constant PSSP with c = alpha / 2."""
    sync = f"dynamic-pssp:staleness={staleness},alpha={alpha},execution=lazy"
    s = staleness + 2 / alpha - 1
    assert 0.02 < expected_share(sync, s, round(30 * (s + 1)), 30.0, seeds) < 0.2


# -- what breaks the bounds --------------------------------------------------------------------------------------


def test_a_larger_staleness_than_that_of_the_bound_exceeds_it() -> None:
    """The run of SSP(15) meets all assumptions of Proposition 1 for s = 0, except that on the staleness."""
    late, in_time = (recorded(f"ssp:staleness={staleness}", 8, 3.0, 500) for staleness in (15, 0))
    assert share_of_bound(late, 0, turning(16, 102)) > 1.1
    assert share_of_bound(in_time, 0, turning(16, 102)) < 0.2


def test_asp_exceeds_the_bound_if_one_worker_is_slower() -> None:
    """The others know only the rounds of the slowest, which is behind by more and more iterations."""
    asp, ssp = (recorded(sync, 8, 1.4, 450) for sync in ("asp", "ssp:staleness=0"))
    assert share_of_bound(asp, 0, slowing(1 / 1.4, 1, 20)) > 1.1
    assert share_of_bound(ssp, 0, slowing(1 / 1.4, 1, 20)) < 0.2
    # With the weights of the shard, at most seven gradients are on their way, however slow the slowest is.
    assert share_of_bound(asp, 0, slowing(1 / 1.4, 1, 20), oldest=False) < 0.3


@pytest.mark.parametrize("seeds", [range(1), *thorough(range(8))], ids=len)
def test_with_the_soft_barrier_pssp_exceeds_the_bound_of_theorem_1(seeds: range) -> None:
    """A delayed pull is answered after one iteration of the slowest worker, not after it has caught up. Meanwhile,
    others finish 1/c iterations on average. So they are ahead by more and more, and know only a share of c."""
    c = 0.75
    sync, functions = f"pssp:staleness=0,probability={c},execution=", partial(slowing, c, 1, 50)
    soft = [recorded(f"{sync}soft", 8, 4.0, 950, seed) for seed in seeds]
    assert mean(share_of_bound(order, 1 / c - 1, functions()) for order in soft) > 1.1
    assert share_of_bound(soft[0], 1 / c - 1, functions(), oldest=False) < 0.2
    lazy = recorded(f"{sync}lazy", 8, 4.0, 400)
    assert share_of_bound(lazy, 1 / c - 1, functions()) < 0.2


# -- the staleness that PSSP admits ------------------------------------------------------------------------------


class Pull(NamedTuple):
    """A pull of one of the faster workers, when it arrives."""

    v_train: int
    gap: int  # k = progress - V_train
    delayed: bool


def pulls(order: Order) -> list[Pull]:
    count: dict[int, int] = dict.fromkeys((worker for step in order for worker in step.answered), 0)
    found = []
    for pushed, pulled, answered in order:
        if pushed is not None:
            count[pushed] += 1
        if pulled:  # not worker 0, the slowest
            v_train = min(count.values())
            found.append(Pull(v_train, count[pulled] - 1 - v_train, pulled not in answered))
    return found


def test_with_lazy_execution_the_gaps_are_geometric_as_theorem_1_assumes() -> None:
    """ "the percentage of s_i appearing in S' is c (1 - c)^(s_i - s)", where S' are the gaps of at least s. The mean
    of those at which a pull is delayed is s + 1/c - 1."""
    s, c = 2, 0.4
    found = pulls(recorded(f"pssp:staleness={s},probability={c},execution=lazy", 8, 200.0, 400))
    gaps = [pull.gap for pull in found if pull.gap >= s]
    delayed = [pull.gap for pull in found if pull.delayed]
    assert len(delayed) > 500
    for gap in range(s, s + 4):
        assert gaps.count(gap) / len(gaps) == pytest.approx(c * (1 - c) ** (gap - s), abs=0.03)
    deviation = math.sqrt(1 - c) / c / math.sqrt(len(delayed))
    assert abs(mean(delayed) - (s + 1 / c - 1)) < 4 * deviation


@pytest.mark.parametrize("c", [0.5, 0.25])
def test_with_the_soft_barrier_the_gap_grows_by_1_over_c_minus_1_per_round(c: float) -> None:
    """So the expected staleness has no bound, unlike with lazy execution."""
    rounds = 30
    soft, lazy = (
        pulls(recorded(f"pssp:staleness=1,probability={c},execution={execution}", 8, 50.0, iterations))
        for execution, iterations in (("soft", round(rounds / c) + 40), ("lazy", 100))
    )
    deviation = math.sqrt(rounds * (1 - c)) / c / math.sqrt(7)
    last = [pull.gap for pull in soft if pull.v_train == rounds and pull.delayed]
    assert abs(mean(last) - rounds * (1 / c - 1)) < 4 * deviation + 1 / c
    assert mean(pull.gap for pull in lazy) < 1 + 1 / c - 1


# -- the equations -----------------------------------------------------------------------------------------------


def square_root(x: Fraction) -> tuple[Fraction, Fraction]:
    """Return two fractions between which the root of x is."""
    scale = 10**15
    root = math.isqrt(x.numerator * scale**2 // x.denominator)
    return Fraction(root, scale), Fraction(root + 1, scale)


def mean_root(s: int, c: Fraction) -> tuple[Fraction, Fraction]:
    """Return two fractions between which the sum of c (1 - c)^(i - s) sqrt(i + 1) over all i >= s is.

    By Eq. 2, the bound is 4 F L sqrt(2 N / T) times this number. The rest of the sum after j terms is at most the
    sum of (1 - c)^(i - s) c (i + 1), which is (1 - c)^j (s + j + 1/c).
    """
    low = high = Fraction(0)
    for j, weight in enumerate(accumulate([1 - c] * 10_000, lambda x, y: x * y, initial=c)):
        if weight == 0:
            return low, high
        rest = weight / c * (s + j + 1 / c)
        if rest < Fraction(1, 10**9):
            return low, high + rest
        below, above = square_root(Fraction(s + j + 1))
        low, high = low + weight * below, high + weight * above
    raise AssertionError("the sum converges too slowly")


STALENESS = [0, 1, 2, 3, 10, *thorough(4, 5, 30, 100)]
PROBABILITIES = [
    Fraction(1, 10), Fraction(1, 3), Fraction(1, 2), Fraction(9, 10), *thorough(Fraction(1, 50), Fraction(99, 100))
]  # fmt: skip


@pytest.mark.parametrize("c", PROBABILITIES, ids=str)
@pytest.mark.parametrize("s", STALENESS)
def test_eq_2_is_less_than_eq_3(s: int, c: Fraction) -> None:
    """Eq. 3 is 4 F L sqrt(2 N / T) sqrt(s + 1/c). Both are compared without rounding."""
    low, high = mean_root(s, c)
    assert s + 1 <= low**2  # less than the bound of SSP(s) it is not
    assert high**2 < s + 1 / c


@pytest.mark.parametrize("s", STALENESS)
def test_eq_2_equals_eq_3_and_eq_1_if_every_pull_is_delayed(s: int) -> None:
    """Section III-E: with a probability of 1, PSSP "reduces to SSP". Only the first line of Eq. 2 says so: its second
    line divides by (1 - c)^s, which is 0. With c = 0, the first line is 0, although PSSP is then ASP, without a
    bound, as Eq. 3 says. So Eq. 2 holds for 0 < c < 1, and its first line for c = 1, too."""
    low, high = mean_root(s, Fraction(1))
    assert low <= square_root(Fraction(s + 1))[1]
    assert high >= square_root(Fraction(s + 1))[0]
    assert high - low < Fraction(1, 10**12)


@pytest.mark.parametrize("c", PROBABILITIES, ids=str)
@pytest.mark.parametrize("s", STALENESS)
def test_the_bound_on_a_squared_is_what_the_paper_says(s: int, c: Fraction) -> None:
    """ "A^2 <= x^2s (s - s x + 1) / (1 - x)^3": the product of the two sums of the Cauchy inequality, up to a rest
    after j terms. With it, the bound of the line before Eq. 3 is that of Eq. 3."""
    x = 1 - c
    closed = x ** (2 * s) * (s - s * x + 1) / (1 - x) ** 3
    terms = 400 if c > Fraction(1, 20) else 2500
    powers = list(accumulate([x] * terms, lambda a, b: a * b, initial=x**s))
    partial_sums = float(sum(map(float, powers))) * sum(float(p) * (s + j + 1) for j, p in enumerate(powers))
    assert partial_sums == pytest.approx(float(closed), rel=1e-9)
    assert (c / x**s) ** 2 * closed == s + 1 / c

"""Pure functions of the results of runs: intervals for their differences, Holm's correction, ranks, and curves.

A run that ends before it reaches its target is *censored*: its time to the target is only known to be longer than the
run. Censored times are neither left out nor replaced by the time at which the run ended. `ratio_of_times(ours, others)`
tests each ratio: the times in `ours` are divided by the ratio, both times of each pair are cut off where the shorter
run of the pair ends, and Student's test compares them. The ratio belongs to the interval if the test finds no
difference. If the times really differ by exactly this ratio, the cut-off treats both sides alike, so the test is valid.
Without censored times, the interval is Student's interval for the mean of the logarithms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple, TypeVar

import numpy as np

from ..errors import ConfigurationError

try:
    from scipy import special, stats
except ImportError as error:
    raise ConfigurationError(
        "studies require SciPy, which is not installed; run: pip install 'paceline[study]'"
    ) from error

CONFIDENCE = 0.95

FARTHEST = 32.0  # logarithm of the largest ratio that is considered
PRECISION = 1e-7  # of the logarithm of a ratio
SHORTEST = 1e-9  # a time of 0 counts as this time, because 0 has no logarithm

Key = TypeVar("Key", bound=Hashable)


class Ratio(NamedTuple):
    """The ratio of one alternative's results to those of another.

    Attributes:
        ratio: the geometric mean of the ratios; the median if a result is infinite ("never").
        low: lower end of the interval.
        high: upper end of the interval.
        p: p-value: the probability of at least this difference if there were no true difference.
    """

    ratio: float
    low: float
    high: float
    p: float

    @property
    def tie(self) -> bool:
        """True if the interval contains 1."""
        return self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        """Return the ratio with its interval: "0.52 [0.50, 0.55]"."""
        return f"{_text(self.ratio)} [{_text(self.low)}, {_text(self.high)}]"


class Time(NamedTuple):
    """The time at which a run reached its target, or at which it ended.

    Attributes:
        value: seconds, updates or samples until the target was reached or, without the target, until the run ended.
        end: seconds, updates or samples until the run ended. A longer run might have reached the target.
        reached: True if the target was reached.
    """

    value: float
    end: float
    reached: bool


class Estimate(NamedTuple):
    """An estimate with its interval. NaN means that a value is unknown, and infinity means "never"."""

    value: float
    low: float
    high: float


class Difference(NamedTuple):
    """The mean difference of one alternative's results from those of another.

    Attributes:
        value: the mean difference.
        low: lower end of the interval.
        high: upper end of the interval.
        p: p-value: the probability of at least this difference if there were no true difference.
    """

    value: float
    low: float
    high: float
    p: float


def compare_samples(ours: Sequence[float], others: Sequence[float]) -> Ratio:
    """Return the ratio of our results to the others', paired on seeds, with an interval.

    The logarithms of the ratios are averaged, and the interval is Student's. If any result is infinite, the ratio is
    the median, its interval is that of the sign test, and a pair of infinite results counts as equal. If the ends of
    the runs are known, use `ratio_of_times` for times.

    >>> ratio = compare_samples([1.0, 1.1, 0.9, 1.0], [2.0, 2.0, 2.0, 2.0])
    >>> str(ratio), ratio.tie
    ('0.50 [0.44, 0.57]', False)
    >>> str(compare_samples([math.inf] * 8, [1.0] * 8))
    'inf [inf, inf]'
    """
    logs = [_log_ratio(one, other) for one, other in zip(ours, others, strict=True)]
    if not all(map(math.isfinite, logs)) or len(logs) < 2:
        return _by_signs(sorted(logs))
    return _ratio(_mean(logs).interval)


def ratio_of_times(ours: Sequence[Time], others: Sequence[Time], *, paired: bool = True) -> Ratio:
    """Return the ratio of our times to the others', with an interval. The module's docstring explains censored times.

    The ratio is infinite if only the other runs reach the target, 0 if only our runs reach it, and NaN if no run does.

    Args:
        ours: our times.
        others: the times with which they are compared; if `paired`, in the same order of seeds.
        paired: True if the times at the same place have the same seed.

    >>> ours, others = ([Time(value, 9.0, True) for value in values] for values in ([1.0, 1.1, 0.9], [2.0, 2.0, 2.1]))
    >>> str(ratio_of_times(ours, others))
    '0.49 [0.36, 0.67]'
    >>> never = [Time(9.0, 9.0, False)] * 3
    >>> str(ratio_of_times(never, others))
    'inf [4.13, inf]'
    """
    if all(time.reached for time in (*ours, *others)):
        x, y = ([each.value for each in _Logs.of(times)] for times in (ours, others))
        return _ratio(_mean_difference(x, y, paired=paired).interval)
    return _ratio(_inverted(_cut_off(ours, others, paired=paired)))


def typical_time(times: Sequence[Time]) -> Estimate:
    """Return the geometric mean of times, with an interval.

    If some of the times are censored, each value is tested: the logarithm of each time is cut off at the same distance
    on both sides of the value's logarithm, and Student's test compares the mean of these logarithms with the value's
    logarithm. The value is in the interval if the test finds no difference. The distance reaches from the value to the
    end of the run that took this time, so values beyond the end of the shortest run cannot be tested. If all values up
    to the end of the shortest run belong to the interval, the interval has no upper end.

    >>> estimate = typical_time([Time(value, 9.0, True) for value in (1.0, 1.2, 1.1)])
    >>> [round(number, 2) for number in estimate]
    [1.1, 0.87, 1.38]
    >>> typical_time([Time(9.0, 9.0, False)] * 3).value
    inf
    """
    if all(time.reached for time in times):
        return Estimate(*_ratio(_mean([each.value for each in _Logs.of(times)]).interval)[:3])
    # The largest value that can be tested lies just before the end of the shortest run.
    farthest = min(each.end for each in _Logs.of(times)) - PRECISION
    return Estimate(*_ratio(_inverted(_cut_around(times), farthest))[:3])


def difference(ours: Sequence[float], others: Sequence[float], *, paired: bool = True) -> Difference:
    """Return the mean difference of our results from the others', with Student's interval.

    The difference is unknown, with an infinite interval, if a result is not finite.

    Args:
        ours: our results.
        others: the results with which they are compared; if `paired`, in the same order of seeds.
        paired: True if the results at the same place have the same seed.

    >>> [round(number, 2) for number in difference([1.0, 1.2, 1.1], [0.8, 0.9, 1.0])]
    [0.2, -0.05, 0.45, 0.07]
    """
    if not all(map(math.isfinite, (*ours, *others))):
        return Difference(math.nan, -math.inf, math.inf, 1.0)
    return _mean_difference(ours, others, paired=paired).interval


def mean_interval(values: Sequence[float]) -> Estimate:
    """Return the mean of values, with Student's interval. With one value, there is no interval (NaN).

    >>> [round(number, 2) for number in mean_interval([1.0, 1.2, 1.1])]
    [1.1, 0.85, 1.35]
    """
    if not all(map(math.isfinite, values)):
        return Estimate(math.nan, math.nan, math.nan)
    if len(values) < 2:
        return Estimate(values[0], math.nan, math.nan)
    return Estimate(*_mean(values).interval[:3])


def holm(p_values: Mapping[Key, float], level: float = 1 - CONFIDENCE) -> set[Key]:
    """Return the comparisons that remain significant after Holm's correction for the number of comparisons.

    >>> sorted(holm({"a": 0.01, "b": 0.04, "c": 0.03}))
    ['a']
    """
    return {key for key, p in holm_adjusted(p_values).items() if p <= level}


def holm_adjusted(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """Return the level at which each comparison is just significant after Holm's correction, at most 1.

    >>> holm_adjusted({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'b': 0.06, 'c': 0.06}
    """
    found: dict[Key, float] = {}
    least = 0.0
    for index, key in enumerate(sorted(p_values, key=p_values.__getitem__)):
        least = found[key] = min(1.0, max(least, (len(p_values) - index) * p_values[key]))
    return {key: found[key] for key in p_values}


def mean_ranks(results: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    """Return the mean rank of each alternative over the seeds, from 1. Equal results share their ranks.

    >>> mean_ranks({"a": [1.0, 2.0], "b": [3.0, math.inf], "c": [math.inf, math.inf]})
    {'a': 1.0, 'b': 2.25, 'c': 2.75}
    """
    ranks = stats.rankdata(list(results.values()), axis=0)
    return {key: float(own.mean()) for key, own in zip(results, ranks, strict=True)}


def _p(t: float, freedom: int) -> float:
    """Return the probability that Student's t is at least as far from 0 as `t`."""
    return 2 * float(special.stdtr(freedom, -abs(t))) if freedom > 0 else 1.0


@functools.cache
def _critical(freedom: int) -> float:
    """Return the value that Student's t must exceed to be significant."""
    return float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2)) if freedom > 0 else math.inf


class _Mean(NamedTuple):
    """A mean, or the difference of two means, with its standard error and the degrees of freedom of Student's t."""

    value: float
    error: float
    freedom: int

    @property
    def t(self) -> float:
        """Student's t. If all values are equal, t is 0 for a mean of 0, and infinite for any other mean."""
        if self.error == 0.0:
            return math.copysign(math.inf, self.value) if self.value else 0.0
        return self.value / self.error

    @property
    def interval(self) -> Difference:
        """The mean, with Student's interval, and the p-value for a true mean of 0."""
        mean, error, freedom = self
        if error == 0.0:
            return Difference(mean, mean, mean, 1.0 if mean == 0.0 else 0.0)
        half = _critical(freedom) * error
        return Difference(mean, mean - half, mean + half, _p(self.t, freedom))


def _mean(values: Sequence[float]) -> _Mean:
    count = len(values)
    error = math.sqrt(_squares(values) / (count - 1) / count) if count > 1 else math.inf
    return _Mean(sum(values) / count, error, count - 1)


def _squares(values: Sequence[float]) -> float:
    """Return the sum of the squared distances from the mean. NumPy takes much longer for a few values."""
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values)


def _mean_difference(ours: Sequence[float], others: Sequence[float], *, paired: bool) -> _Mean:
    """Return the mean difference. Unless pairs are compared, the variances are assumed to be equal."""
    if paired:
        return _mean([one - other for one, other in zip(ours, others, strict=True)])
    freedom = len(ours) + len(others) - 2
    squares = _squares(ours) + _squares(others)
    error = math.sqrt(squares / freedom * (1 / len(ours) + 1 / len(others))) if freedom > 0 else math.inf
    return _Mean(fmean(ours) - fmean(others), error, freedom)


class _Logs(NamedTuple):
    """The logarithm of a time, and of the time at which its run ended."""

    value: float
    end: float

    @classmethod
    def of(cls, times: Sequence[Time]) -> list[_Logs]:
        return [cls(*(math.log(max(each, SHORTEST)) for each in time[:2])) for time in times]


Test = Callable[[float], _Mean]
"""Function that returns the mean difference at a shift. The difference and Student's t decrease as the shift grows."""


def _cut_off(ours: Sequence[Time], others: Sequence[Time], *, paired: bool) -> Test:
    """Return the test that shifts the others' logarithms, and cuts off all logarithms."""
    x, y = _Logs.of(ours), _Logs.of(others)
    first_x, first_y = min(one.end for one in x), min(other.end for other in y)

    def at(shift: float) -> _Mean:
        if paired:
            ends = [min(one.end, other.end + shift) for one, other in zip(x, y, strict=True)]
            own, theirs = ends, ends
        else:
            end = min(first_x, first_y + shift)
            own, theirs = [end] * len(x), [end] * len(y)
        return _mean_difference(
            [min(one.value, end) for one, end in zip(x, own, strict=True)],
            [min(other.value + shift, end) for other, end in zip(y, theirs, strict=True)],
            paired=paired,
        )

    return at


def _cut_around(times: Sequence[Time]) -> Test:
    """Return the test that compares logarithms with a center, and cuts off distances on both sides of the center."""
    logs = _Logs.of(times)

    def around(center: float) -> _Mean:
        most = [max(0.0, each.end - center) for each in logs]
        return _mean([max(-m, min(m, each.value - center)) for m, each in zip(most, logs, strict=True)])

    return around


def _inverted(at: Test, farthest: float = FARTHEST) -> Difference:
    """Return the range of shifts at which a test finds no difference, its middle, and the p-value at the shift 0.

    Args:
        at: the test.
        farthest: the largest shift that can be tested.
    """
    same = at(0.0)
    most = _critical(same.freedom)
    low = _boundary(lambda shift: at(shift).t > most, farthest)
    high = _boundary(lambda shift: at(shift).t >= -most, farthest)
    # Between `first` and `last`, the mean difference is 0: our runs are cut off wherever they differ from the others.
    first = _boundary(lambda shift: at(shift).value > 0.0, farthest)
    last = _boundary(lambda shift: at(shift).value >= 0.0, farthest)
    if math.isinf(first) and math.isinf(last):
        middle = math.nan if first != last else first
    else:
        middle = first if math.isinf(first) else last if math.isinf(last) else (first + last) / 2
    return Difference(middle, low, high, _p(same.t, same.freedom))


def _boundary(holds: Callable[[float], bool], farthest: float) -> float:
    """Return the shift up to which a condition holds; infinite if it holds for all shifts or for none."""
    below, above = -FARTHEST, farthest
    if not holds(below):
        return -math.inf
    if holds(above):
        return math.inf
    while above - below > PRECISION:
        middle = (below + above) / 2
        below, above = (middle, above) if holds(middle) else (below, middle)
    return (below + above) / 2


def _ratio(logs: Difference) -> Ratio:
    return Ratio(math.exp(logs.value), math.exp(logs.low), math.exp(logs.high), logs.p)


def _log_ratio(one: float, other: float) -> float:
    if math.isinf(one) or math.isinf(other):
        return 0.0 if one == other else math.copysign(math.inf, 1.0 if math.isinf(one) else -1.0)
    return math.log(one / other)


def _by_signs(logs: Sequence[float]) -> Ratio:
    """Return the median of sorted logarithms, with the interval and the p-value of the sign test.

    With fewer than six values, even the interval from the smallest to the largest value contains the true median too
    rarely. So the interval contains all ratios.
    """
    count = len(logs)
    # Number of values below the interval, and above it; -1 if the interval must be larger than the range of all values.
    outside = int(stats.binom.ppf((1 - CONFIDENCE) / 2, count, 0.5)) - 1
    low, high = (logs[outside], logs[count - 1 - outside]) if outside >= 0 else (-math.inf, math.inf)
    above, below = sum(value > 0 for value in logs), sum(value < 0 for value in logs)
    p = float(stats.binomtest(above, above + below).pvalue) if above + below else 1.0
    return Ratio(math.exp(median(logs)), math.exp(low), math.exp(high), p)


def _text(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 or math.isinf(ratio) else f"{ratio:.0f}"


# -- Pure functions of curves: when a curve reaches a target, its mean over seeds, and what is not dominated
#
# A curve is a sequence of points (x, value) with ascending x: seconds, updates or samples.

Curve = Sequence[tuple[float, float]]


def crossing(curve: Curve, target: float, *, higher_is_better: bool = False) -> float:
    """Return where a curve first reaches a target, or infinity.

    The value is measured only now and then, so the result is interpolated on the straight line between two points. If
    there is no finite point before the first point at the target, the result is the x of this first point.

    >>> crossing([(0.0, 8.0), (10.0, 6.0), (20.0, 4.0)], 5.0)
    15.0
    >>> crossing([(10.0, 0.25), (20.0, 0.75)], 0.5, higher_is_better=True), crossing([(10.0, 0.75)], 0.5)
    (15.0, inf)
    """
    sign = 1.0 if higher_is_better else -1.0
    before: tuple[float, float] | None = None
    for x, value in curve:
        if sign * (value - target) >= 0:
            if before is None or not math.isfinite(before[1]):
                return x
            return before[0] + (x - before[0]) * (target - before[1]) / (value - before[1])
        before = x, value
    return math.inf


def value_at(curve: Curve, x: float) -> float:
    """Return the value of a curve at `x`, interpolated between its points; NaN before the first or after the last.

    >>> value_at([(0.0, 1.0), (2.0, 5.0)], 0.5), value_at([(0.0, 1.0), (2.0, 5.0)], 3.0)
    (2.0, nan)
    """
    places, values = zip(*curve, strict=True)
    return float(np.interp(x, places, values, left=math.nan, right=math.nan))


def band(curves: Sequence[Curve], places: Sequence[float]) -> list[tuple[float, Estimate]]:
    """Return the mean of several curves with its interval, at those of the given places that all curves cover.

    >>> band([[(0.0, 1.0), (2.0, 3.0)], [(1.0, 3.0), (2.0, 5.0)]], [0.0, 1.0, 2.0])[0]
    (1.0, Estimate(value=2.5, low=-3.85..., high=8.85...))
    """
    found = []
    for x in places:
        values = [value_at(curve, x) for curve in curves]
        if all(map(math.isfinite, values)):
            found.append((x, mean_interval(values)))
    return found


def not_dominated(points: Mapping[Key, tuple[float, float]], *, higher_is_better: bool) -> list[Key]:
    """Return the keys of the points (cost, value) for which no other point has less cost and a better value.

    The keys are in order of the cost. A point with infinite cost is dominated by every point with finite cost whose
    value is at least as good. NaN counts as an infinite cost, and as the worst value.

    >>> not_dominated({"a": (1.0, 0.8), "b": (2.0, 0.9), "c": (3.0, 0.85)}, higher_is_better=True)
    ['a', 'b']
    """
    sign = -1.0 if higher_is_better else 1.0
    # The smallest numbers are the best.
    ranked = {
        key: (math.inf if math.isnan(cost) else cost, math.inf if math.isnan(value) else sign * value)
        for key, (cost, value) in points.items()
    }

    def dominated(key: Key) -> bool:
        cost, value = ranked[key]
        return any(
            other[0] <= cost and other[1] <= value and other != (cost, value) for other in ranked.values()
        )

    return sorted((key for key in ranked if not dominated(key)), key=lambda key: ranked[key][0])

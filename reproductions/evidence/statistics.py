"""Intervals for ratios of paired results, ranks in which "never" is the last, and Holm's correction."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from scipy import stats

__all__ = ["CONFIDENCE", "Ratio", "compare", "holm", "mean_ranks"]

CONFIDENCE = 0.95

Key = TypeVar("Key", bound=Hashable)


class Ratio(NamedTuple):
    """The ratio of one alternative's results to those of another, paired on seeds.

    Attributes:
        ratio: the geometric mean of the ratios; the median if a result is infinite ("never").
        low: lower end of the interval.
        high: upper end of the interval.
        p: probability of a difference as large as this one if there were none.
    """

    ratio: float
    low: float
    high: float
    p: float

    @property
    def tie(self) -> bool:
        """True if the interval holds 1."""
        return self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        """Return the ratio with its interval: "0.52 [0.50, 0.55]"."""
        return f"{_text(self.ratio)} [{_text(self.low)}, {_text(self.high)}]"


def compare(ours: Sequence[float], others: Sequence[float]) -> Ratio:
    """Return the ratio of our results to the others', with an interval.

    The logarithms of the ratios are averaged, and the interval is Student's. If any result is infinite, the ratio is
    the median, its interval is that of the sign test, and a pair of infinite results counts as equal.

    >>> ratio = compare([1.0, 1.1, 0.9, 1.0], [2.0, 2.0, 2.0, 2.0])
    >>> str(ratio), ratio.tie
    ('0.50 [0.44, 0.57]', False)
    >>> str(compare([math.inf] * 8, [1.0] * 8))
    'inf [inf, inf]'
    """
    logs = [_log_ratio(one, other) for one, other in zip(ours, others, strict=True)]
    count = len(logs)
    if not all(map(math.isfinite, logs)) or count < 2:
        return _by_signs(sorted(logs))
    mean = sum(logs) / count
    error = math.sqrt(sum((value - mean) ** 2 for value in logs) / (count - 1) / count)
    if error == 0.0:
        return Ratio(math.exp(mean), math.exp(mean), math.exp(mean), 1.0 if mean == 0.0 else 0.0)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, count - 1))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), p)


def holm(p_values: Mapping[Key, float], level: float = 1 - CONFIDENCE) -> set[Key]:
    """Return the comparisons that remain significant after Holm's correction for the number of comparisons.

    >>> sorted(holm({"a": 0.01, "b": 0.04, "c": 0.03}))
    ['a']
    """
    found: set[Key] = set()
    for index, key in enumerate(sorted(p_values, key=p_values.__getitem__)):
        if p_values[key] > level / (len(p_values) - index):
            break
        found.add(key)
    return found


def mean_ranks(results: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    """Return the mean rank of each alternative over the seeds, from 1. Equal results share their ranks.

    >>> mean_ranks({"a": [1.0, 2.0], "b": [3.0, math.inf], "c": [math.inf, math.inf]})
    {'a': 1.0, 'b': 2.25, 'c': 2.75}
    """
    ranks = stats.rankdata(list(results.values()), axis=0).mean(axis=1)
    return {key: float(rank) for key, rank in zip(results, ranks, strict=True)}


def _log_ratio(one: float, other: float) -> float:
    if math.isinf(one) or math.isinf(other):
        return 0.0 if one == other else math.copysign(math.inf, 1.0 if math.isinf(one) else -1.0)
    return math.log(one / other)


def _by_signs(logs: Sequence[float]) -> Ratio:
    """Return the median of sorted logarithms, with the interval and the probability of the sign test."""
    count = len(logs)
    outside = 0  # number of values below the interval, and above it
    while outside + 1 <= count // 2 and 2 * stats.binom.cdf(outside, count, 0.5) <= 1 - CONFIDENCE:
        outside += 1
    outside = max(0, outside - 1)
    signs = sum(value > 0 for value in logs), sum(value < 0 for value in logs)
    p = min(1.0, 2 * float(stats.binom.cdf(min(signs), max(1, sum(signs)), 0.5))) if sum(signs) else 1.0
    middle = (
        (logs[(count - 1) // 2] + logs[count // 2]) / 2
        if logs[count // 2] != logs[(count - 1) // 2]
        else logs[count // 2]
    )
    return Ratio(_exp(middle), _exp(logs[outside]), _exp(logs[count - 1 - outside]), p)


def _exp(log: float) -> float:
    return math.inf if log == math.inf else math.exp(log)


def _text(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 or math.isinf(ratio) else f"{ratio:.0f}"

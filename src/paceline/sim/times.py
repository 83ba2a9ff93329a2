"""How long things take in virtual time: constant, random, drifting, now and then slow, or as they were recorded.

A time is a function of (seed, who, which): it is keyed, not drawn one after another. So the same worker needs the
same time for its tenth iteration under every sync model, which makes runs comparable with few seeds, and a run is the
same on any machine: only + - * / and the square root are used on the way (`arithmetic`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from ..errors import ConfigurationError
from ..sync.arithmetic import exp, log, normal_quantile
from ..sync.draws import uniforms

__all__ = [
    "Constant",
    "Drifting",
    "LogNormal",
    "Occasional",
    "Pareto",
    "Recorded",
    "Sample",
    "Times",
    "Uniform",
    "times_of",
]

Sample = Callable[[int, float], float]
"""(which one, counted from 0; when it begins, in seconds) -> how long it takes, in seconds."""


class Spec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """How long something takes, in seconds. A value."""

    def sampler(self, *key: int) -> Sample:
        """The times of whoever has this key: (seed, who)."""
        raise TypeError(f"{type(self).__name__} does not say how long anything takes")

    @property
    def typical_s(self) -> float:
        """A time in the middle, for words and pictures."""
        raise TypeError(f"{type(self).__name__} does not say how long anything takes")


class Constant(Spec, frozen=True, kw_only=True, tag="constant"):
    """Always the same.

    >>> Constant(seconds=2.0).sampler(0)(7, 0.0)
    2.0
    """

    seconds: float

    def __post_init__(self) -> None:
        _require_time("seconds", self.seconds)

    def sampler(self, *key: int) -> Sample:
        return lambda which, now_s: self.seconds

    @property
    def typical_s(self) -> float:
        return self.seconds


class Uniform(Spec, frozen=True, kw_only=True, tag="uniform"):
    """Anything between two times alike."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _require_time("low", self.low)
        _require_time("high", self.high)
        if self.low > self.high:
            raise ConfigurationError(
                f"uniform: low is {self.low:g} and high {self.high:g}, expected low <= high."
            )

    def sampler(self, *key: int) -> Sample:
        low, width, draw = self.low, self.high - self.low, uniforms(*key)
        return lambda which, now_s: low + width * draw(which)

    @property
    def typical_s(self) -> float:
        return (self.low + self.high) / 2


class LogNormal(Spec, frozen=True, kw_only=True, tag="log-normal"):
    """The logarithm is normal: mostly about the median, at times much longer.

    Attributes:
        median: in seconds.
        sigma: standard deviation of the logarithm: 0.1 for a little jitter, 1 for wild.
    """

    median: float
    sigma: float

    def __post_init__(self) -> None:
        _require_time("median", self.median)
        _require_factor("sigma", self.sigma, 0.0)

    def sampler(self, *key: int) -> Sample:
        draw = uniforms(*key)
        return lambda which, now_s: self.median * exp(self.sigma * normal_quantile(draw(which) + 2.0**-54))

    @property
    def typical_s(self) -> float:
        return self.median


class Pareto(Spec, frozen=True, kw_only=True, tag="pareto"):
    """Heavy-tailed: no time is too long to happen some day.

    Attributes:
        least: in seconds.
        alpha: the chance of x times the least is x^-alpha; with 1 or less there is no mean.
    """

    least: float
    alpha: float

    def __post_init__(self) -> None:
        _require_time("least", self.least)
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigurationError(
                f"pareto: alpha is {self.alpha:g}, expected a number > 0, for example 2."
            )

    def sampler(self, *key: int) -> Sample:
        draw = uniforms(*key)
        return lambda which, now_s: self.least * exp(-log(1.0 - draw(which)) / self.alpha)

    @property
    def typical_s(self) -> float:
        return self.least * exp(log(2.0) / self.alpha)


class Recorded(Spec, frozen=True, kw_only=True, tag="recorded"):
    """As they were, in order; after the last one from the first again."""

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ConfigurationError("recorded: there are no times, expected one at least.")
        for value in self.seconds:
            _require_time("a recorded time", value)

    def sampler(self, *key: int) -> Sample:
        return lambda which, now_s: self.seconds[which % len(self.seconds)]

    @property
    def typical_s(self) -> float:
        return sorted(self.seconds)[len(self.seconds) // 2]


class Drifting(Spec, frozen=True, kw_only=True, tag="drifting"):
    """Changes steadily with the time of day.

    Attributes:
        base: at the beginning.
        factor: what it has become the multiple of, at the end of the drift and from then on.
        over: seconds that the drift takes.
    """

    base: Times
    factor: float
    over: float

    def __post_init__(self) -> None:
        _require_factor("factor", self.factor, 0.0)
        if not (math.isfinite(self.over) and self.over > 0):
            raise ConfigurationError(f"drifting: over is {self.over:g}, expected a number of seconds > 0.")

    def sampler(self, *key: int) -> Sample:
        base = times_of(self.base).sampler(*key)
        over, grown = self.over, self.factor - 1.0
        return lambda which, now_s: base(which, now_s) * (1.0 + grown * min(1.0, now_s / over))

    @property
    def typical_s(self) -> float:
        return times_of(self.base).typical_s * (1.0 + self.factor) / 2


class Occasional(Spec, frozen=True, kw_only=True, tag="occasional"):
    """Slow for a while, once in every period, at a time that chance decides.

    What begins during the slow spell is slow to its end.

    Attributes:
        base: otherwise.
        factor: how many times longer it takes then.
        lasting: seconds that a slow spell lasts.
        every: seconds of the period.
    """

    base: Times
    factor: float
    lasting: float
    every: float

    def __post_init__(self) -> None:
        _require_factor("factor", self.factor, 1.0)
        if not 0 < self.lasting <= self.every < math.inf:
            raise ConfigurationError(
                f"occasional: lasting is {self.lasting:g} s and every {self.every:g}, expected 0 < lasting <= every."
            )

    def sampler(self, *key: int) -> Sample:
        base = times_of(self.base).sampler(*key)
        room, draw = self.every - self.lasting, uniforms(*key, SPELLS)

        def sample(which: int, now_s: float) -> float:
            period = int(now_s // self.every)
            into = now_s - period * self.every - room * draw(period)
            return base(which, now_s) * (self.factor if 0.0 <= into < self.lasting else 1.0)

        return sample

    @property
    def typical_s(self) -> float:
        return times_of(self.base).typical_s


Distribution = Constant | Uniform | LogNormal | Pareto | Recorded | Drifting | Occasional
"""A description of how long something takes."""

Times = float | Distribution
"""A number of seconds, or a description."""

SPELLS = 1 << 32  # no iteration has this number: the draws of slow spells are others than those of times


def times_of(times: Times | Sequence[float]) -> Distribution:
    """What users give, as a description: a number is constant, a list is recorded.

    Raises:
        ConfigurationError: it is neither, or a time is negative.
    """
    if isinstance(times, Distribution):
        return times
    if isinstance(times, bool):
        raise ConfigurationError(f"a time is {times!r}, expected a number of seconds.")
    if isinstance(times, int | float):
        return Constant(seconds=float(times))
    if isinstance(times, Sequence) and not isinstance(times, str):
        return Recorded(seconds=tuple(float(value) for value in times))
    raise ConfigurationError(
        f"a time is {times!r}, expected a number of seconds, a list of recorded ones, or a distribution such as "
        "paceline.sim.Uniform(low=1.0, high=2.0)."
    )


def _require_time(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigurationError(f"{name} is {value:g}, expected a number of seconds >= 0.")


def _require_factor(name: str, value: float, least: float) -> None:
    if not (math.isfinite(value) and value >= least):
        raise ConfigurationError(f"{name} is {value:g}, expected a number >= {least:g}.")

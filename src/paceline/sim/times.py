"""Distributions of durations in virtual time: constant, random, recorded, resampled, or changed in some way.

A random duration is a function of (seed, worker, iteration number), not the next number of a random sequence. So a
worker needs the same time for its tenth iteration under every sync model, and a few seeds are sufficient to compare
sync models. The durations are the same on every machine, because they are computed with only + - * / and square roots
(see `paceline.sync.conditions`). Only `Own` relies on NumPy and on the user's code.
"""

from __future__ import annotations

import csv
import math
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from ..errors import ConfigurationError
from ..sync.conditions import exp, log, normal_quantile
from ..sync.draws import uniforms
from ..sync.ticks import Seconds, vanishes

if TYPE_CHECKING:
    import numpy as np
else:  # the types of fields are resolved without NumPy, whose import takes time
    np = Any

Sample = Callable[[int, float], Seconds]
"""A function that returns a duration in seconds, which is not rounded to a whole number of ticks yet.

The arguments are the index of the iteration or message, and the virtual time in seconds at which it begins.
"""


class Spec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """Base class for distributions of durations."""

    def sampler(self, *key: int) -> Sample:
        """Return the function that computes the durations for a key, such as (seed, worker, purpose)."""
        raise TypeError(f"{type(self).__name__} does not implement sampler")

    @property
    def typical_s(self) -> float:
        """A typical duration in seconds, for descriptions and plots."""
        raise TypeError(f"{type(self).__name__} does not implement typical_s")


class Constant(Spec, frozen=True, kw_only=True, tag="constant"):
    """A constant duration.

    Attributes:
        seconds: the duration, in seconds: a float or an exact fraction.

    >>> Constant(seconds=2.0).sampler(0)(7, 0.0)
    2.0
    """

    seconds: Seconds

    def __post_init__(self) -> None:
        _require_time("seconds", self.seconds)

    def sampler(self, *key: int) -> Sample:
        return lambda number, now_s: self.seconds

    @property
    def typical_s(self) -> float:
        return float(self.seconds)


class Uniform(Spec, frozen=True, kw_only=True, tag="uniform"):
    """A uniform distribution.

    Attributes:
        low: shortest duration, in seconds.
        high: longest duration, in seconds.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _require_time("low", self.low)
        _require_time("high", self.high)
        if self.low > self.high:
            raise ConfigurationError(
                f"uniform: low is {self.low:g} and high is {self.high:g}, expected low <= high."
            )

    def sampler(self, *key: int) -> Sample:
        low, width, draw = self.low, self.high - self.low, uniforms(*key)
        return lambda number, now_s: low + width * draw(number)

    @property
    def typical_s(self) -> float:
        return (self.low + self.high) / 2


class LogNormal(Spec, frozen=True, kw_only=True, tag="log-normal"):
    """A log-normal distribution: most durations are close to the median, and some are much longer.

    Attributes:
        median: median duration, in seconds.
        sigma: standard deviation of the natural logarithm of a duration. 0.1 means little variation, 1 means a lot.
    """

    median: float
    sigma: float

    def __post_init__(self) -> None:
        _require_time("median", self.median)
        _require_factor("sigma", self.sigma, 0.0)

    def sampler(self, *key: int) -> Sample:
        draw = uniforms(*key)
        return lambda number, now_s: self.median * exp(self.sigma * normal_quantile(draw(number) + 2.0**-54))

    @property
    def typical_s(self) -> float:
        return self.median


class Pareto(Spec, frozen=True, kw_only=True, tag="pareto"):
    """A Pareto distribution, which has a heavy tail: very long durations occur occasionally.

    Attributes:
        least: shortest duration, in seconds.
        alpha: exponent of the tail. A duration exceeds x times the shortest duration with probability x^-alpha. If
            alpha is 1 or less, the mean is infinite.
    """

    least: float
    alpha: float

    def __post_init__(self) -> None:
        _require_time("least", self.least)
        _require_positive("pareto: alpha", self.alpha, "number > 0, for example 2")

    def sampler(self, *key: int) -> Sample:
        draw = uniforms(*key)
        return lambda number, now_s: self.least * exp(-log(1.0 - draw(number)) / self.alpha)

    @property
    def typical_s(self) -> float:
        return self.least * exp(log(2.0) / self.alpha)


class _Listed(Spec, frozen=True, kw_only=True):
    """Base class for distributions that consist of measured durations."""

    seconds: tuple[Seconds, ...]

    def __post_init__(self) -> None:
        kind = self.__struct_config__.tag
        if not isinstance(self.seconds, Sequence) or not self.seconds:
            raise ConfigurationError(
                f"{kind}: seconds is {self.seconds!r}, expected a list of at least one number of seconds."
            )
        for value in self.seconds:
            _require_time("a recorded time", value)

    @property
    def typical_s(self) -> float:
        return median(map(float, self.seconds))


class Recorded(_Listed, frozen=True, kw_only=True, tag="recorded"):
    """A list of recorded durations. When the list is exhausted, it starts again from the beginning.

    Attributes:
        seconds: the recorded durations, in seconds: floats or exact fractions.
    """

    def sampler(self, *key: int) -> Sample:
        return lambda number, now_s: self.seconds[number % len(self.seconds)]


class Resampled(_Listed, frozen=True, kw_only=True, tag="resampled"):
    """Random blocks of recorded durations, for a machine like the recorded one.

    Each block begins at a random place in the list, so two machines that resample the same list are not slow at the
    same time. Within a block, the durations follow each other as they did in the recording (the circular block
    bootstrap of Politis and Romano, 1992).

    Attributes:
        seconds: the recorded durations, in seconds.
        block: number of durations in a block; None for the square root of the number of recorded durations, rounded up.
    """

    block: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block is not None and (isinstance(self.block, bool) or self.block < 1):
            raise ConfigurationError(f"resampled: block is {self.block!r}, expected a whole number >= 1.")

    def sampler(self, *key: int) -> Sample:
        seconds, count, draw = self.seconds, len(self.seconds), uniforms(*key)
        length = self.block or math.isqrt(count - 1) + 1

        def sample(number: int, now_s: float) -> Seconds:
            block, place = divmod(number, length)
            return seconds[(int(draw(block) * count) + place) % count]

        return sample


class Timed(_Listed, frozen=True, kw_only=True, tag="timed"):
    """Durations that were measured at known times. Each duration applies from its time until the time of the next one.

    The last duration applies for the mean time between two measurements. Then the durations repeat from the first one.

    Attributes:
        at: time of each measurement, in seconds, in ascending order.
        seconds: the measured durations, in seconds.
        shifted: True to begin at a random time, for a machine like the one that was measured.
    """

    at: tuple[float, ...]
    shifted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.at) != len(self.seconds) or any(b <= a for a, b in pairwise(self.at)):
            raise ConfigurationError("timed: expected one time for each duration, in ascending order.")

    def sampler(self, *key: int) -> Sample:
        at = [time_s - self.at[0] for time_s in self.at]
        period = at[-1] * len(at) / max(1, len(at) - 1) or 1.0
        begun_s = uniforms(*key)(SLOW_PHASES) * period if self.shifted else 0.0
        return lambda number, now_s: self.seconds[bisect_right(at, (begun_s + now_s) % period) - 1]


@runtime_checkable
class Law(Protocol):
    """A distribution of your own."""

    def sample(self, generator: np.random.Generator, /) -> float:
        """Return a duration in seconds that depends only on the generator."""


class Own(Spec, frozen=True, kw_only=True, tag="own"):
    """Durations that an object of your own draws. Wherever times are expected, the object itself may be given.

    For each iteration, the object receives a new generator, whose state is derived from the key and the number of the
    iteration. So all sync models are compared with the same durations.

    Attributes:
        law: the object. Its method `sample(generator)` receives a `numpy.random.Generator`, and returns a number of
            seconds.
    """

    law: Law

    def __post_init__(self) -> None:
        self.sampler(0)(0, 0.0)

    def sampler(self, *key: int) -> Sample:
        import numpy as np

        draw, bits, law = uniforms(*key), 1 << 53, self.law

        def sample(number: int, now_s: float) -> Seconds:
            seed = int(draw(number) * bits)
            seconds = law.sample(np.random.Generator(np.random.SFC64(seed)))
            if not (isinstance(seconds, int | float | np.number) and 0 <= seconds < math.inf):
                raise ConfigurationError(
                    f"{type(law).__name__}.sample returned {seconds!r}, expected a number of seconds >= 0."
                )
            return float(seconds)

        return sample

    @property
    def typical_s(self) -> float:
        sample = self.sampler(0)
        return median(float(sample(number, 0.0)) for number in range(TYPICAL))


class Scaled(Spec, frozen=True, kw_only=True, tag="scaled"):
    """A distribution whose durations are multiplied by a factor, for a machine that is slower or faster.

    Attributes:
        base: the distribution.
        factor: the factor, above 0.

    >>> Scaled(base=2.0, factor=1.5).sampler(0)(7, 0.0)
    3.0
    """

    base: Times
    factor: float

    def __post_init__(self) -> None:
        _require_positive("scaled: factor", self.factor, "number > 0")

    def sampler(self, *key: int) -> Sample:
        base, factor = times_of(self.base).sampler(*key), self.factor
        return lambda number, now_s: float(base(number, now_s)) * factor

    @property
    def typical_s(self) -> float:
        return times_of(self.base).typical_s * self.factor


class Drifting(Spec, frozen=True, kw_only=True, tag="drifting"):
    """A distribution that drifts: until virtual time `over`, its durations change linearly with virtual time.

    Attributes:
        base: distribution at the beginning.
        factor: factor by which the durations are multiplied after the end of the drift.
        over: length of the drift, in seconds of virtual time.
    """

    base: Times
    factor: float
    over: float

    def __post_init__(self) -> None:
        _require_factor("factor", self.factor, 0.0)
        _require_positive("drifting: over", self.over)

    def sampler(self, *key: int) -> Sample:
        base = times_of(self.base).sampler(*key)
        over, grown = self.over, self.factor - 1.0
        return lambda number, now_s: float(base(number, now_s)) * (1.0 + grown * min(1.0, now_s / over))

    @property
    def typical_s(self) -> float:
        return times_of(self.base).typical_s * (1.0 + self.factor) / 2


class Occasional(Spec, frozen=True, kw_only=True, tag="occasional"):
    """A distribution with slow phases: one in each period of `every` seconds, at a random time in the period.

    If an iteration or a message begins in a slow phase, its whole duration is multiplied by `factor`.

    Attributes:
        base: distribution outside the slow phases.
        factor: factor by which the durations are multiplied in the slow phases.
        lasting: length of a slow phase, in seconds.
        every: length of each period, in seconds.
    """

    base: Times
    factor: float
    lasting: float
    every: float

    def __post_init__(self) -> None:
        _require_factor("factor", self.factor, 1.0)
        if not 0 < self.lasting <= self.every < math.inf:
            raise ConfigurationError(
                f"occasional: lasting is {self.lasting:g} and every is {self.every:g}, expected 0 < lasting <= every."
            )

    def sampler(self, *key: int) -> Sample:
        base = times_of(self.base).sampler(*key)
        room, draw = self.every - self.lasting, uniforms(*key, SLOW_PHASES)

        def sample(number: int, now_s: float) -> Seconds:
            period = int(now_s // self.every)
            elapsed_s = now_s - period * self.every - room * draw(period)  # time since the slow phase began
            length_s = base(number, now_s)
            return float(length_s) * self.factor if 0.0 <= elapsed_s < self.lasting else length_s

        return sample

    @property
    def typical_s(self) -> float:
        return times_of(self.base).typical_s


class Sum(Spec, frozen=True, kw_only=True, tag="sum"):
    """The sum of several durations, such as those of the batches whose gradients a worker accumulates for one push.

    Attributes:
        base: distribution of each duration.
        count: number of durations, at least 1.

    >>> Sum(base=Recorded(seconds=(1.0, 2.0, 3.0)), count=2).sampler(0)(1, 0.0)
    4.0
    """

    base: Times
    count: int

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ConfigurationError(f"sum: count is {self.count!r}, expected a whole number >= 1.")

    def sampler(self, *key: int) -> Sample:
        base, count = times_of(self.base).sampler(*key), self.count

        def sample(number: int, now_s: float) -> Seconds:
            total: Seconds = 0
            for index in range(number * count, (number + 1) * count):
                total += base(index, now_s + float(total))
            return total

        return sample

    @property
    def typical_s(self) -> float:
        return times_of(self.base).typical_s * self.count


Distribution = (
    Constant
    | Uniform
    | LogNormal
    | Pareto
    | Recorded
    | Resampled
    | Timed
    | Own
    | Scaled
    | Drifting
    | Occasional
    | Sum
)
"""Any distribution of durations."""

Times = Seconds | Decimal | Distribution | Law
"""A constant number of seconds, a distribution of durations, or an object of your own that draws durations."""

TYPICAL = 201
"""Number of durations whose median is `typical_s` if the distribution is unknown."""

# Part of the key for the random times of the slow phases. No iteration has this number, so these draws are
# independent of the draws for the durations.
SLOW_PHASES = 1 << 32


def times_of(times: Times | Sequence[Seconds | Decimal]) -> Distribution:
    """Return the distribution for a user's specification of times.

    A number means a constant duration, and a list means recorded durations. A `Fraction` or a `Decimal` is exact, and
    any other number is rounded to a whole number of nanoseconds.

    Raises:
        ConfigurationError: the specification is not valid, or a time is negative.
    """
    if isinstance(times, Distribution):
        return times
    if isinstance(times, bool):
        raise ConfigurationError(f"a time is {times!r}, expected a number of seconds.")
    if isinstance(times, int | float | Fraction | Decimal):
        return Constant(seconds=_seconds(times))
    if isinstance(times, Sequence) and not isinstance(times, str):
        return Recorded(seconds=tuple(_seconds(value) for value in times))
    if isinstance(times, Law) and not isinstance(times, type):
        return Own(law=times)
    raise ConfigurationError(
        f"a time is {times!r}, expected a number of seconds, a list of recorded times, a distribution such as "
        "paceline.sim.Uniform(low=1.0, high=2.0), or an object with a method sample(generator)."
    )


def _seconds(value: Seconds | Decimal) -> Seconds:
    if isinstance(value, Decimal) and value.is_finite():
        return Fraction(value)
    return value if isinstance(value, Fraction | int) else float(value)


def _require_time(name: str, value: Seconds) -> None:
    if not isinstance(value, int | float | Fraction):
        raise ConfigurationError(f"{name} is {value!r}, expected a number of seconds >= 0.")
    if not (math.isfinite(value) and value >= 0):
        raise ConfigurationError(f"{name} is {float(value):g}, expected a number of seconds >= 0.")
    if vanishes(value):
        raise ConfigurationError(
            f"{name} is {value:g}, which would be rounded to 0, because floats are rounded to nanoseconds. Give the "
            "time as a fractions.Fraction, or use a larger unit."
        )


def _require_positive(name: str, value: float, what: str = "number of seconds > 0") -> None:
    if not 0 < value < math.inf:
        raise ConfigurationError(f"{name} is {value:g}, expected a {what}.")


def _require_factor(name: str, value: float, least: float) -> None:
    if not (math.isfinite(value) and value >= least):
        raise ConfigurationError(f"{name} is {value:g}, expected a number >= {least:g}.")


# -- Settings for individual workers that differ from the rest of the cluster --------------------------------
#
# They are about a worker's presence, its connection, and what its script does besides training.


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """The times at which a worker joins and is lost. By default, a worker is present during the whole run.

    Attributes:
        joins_at_s: virtual time at which the worker joins, in seconds.
        lost_at_s: virtual time at which the worker is lost, in seconds; None if it is not lost at a given time.
        preempted_every_s: mean of the random time between joining and being lost, in seconds; None if the worker is
            not lost at random times.
        back_after_s: time after which a lost worker joins again, in seconds; None if it does not join again.
    """

    joins_at_s: Seconds = 0.0
    lost_at_s: Seconds | None = None
    preempted_every_s: float | None = None
    back_after_s: Seconds | None = None

    def __post_init__(self) -> None:
        for name, least in (("joins_at_s", 0.0), ("lost_at_s", self.joins_at_s), ("back_after_s", 0.0)):
            value = getattr(self, name)
            number = isinstance(value, int | float | Fraction)
            if value is not None and not (number and math.isfinite(value) and value >= least):
                raise ConfigurationError(
                    f"{name} is {value!r}, expected a number of seconds >= {float(least):g}."
                )
        every_s = self.preempted_every_s
        if every_s is not None:
            _require_positive("preempted_every_s", every_s)
        if self.lost_at_s is not None and every_s is not None:
            raise ConfigurationError(
                "lost_at_s and preempted_every_s are both given, but a worker is lost either at a fixed time or at "
                "random times. Omit one of them."
            )
        if self.back_after_s is not None and self.lost_at_s is None and every_s is None:
            raise ConfigurationError(
                "back_after_s is given for a worker that is never lost. Also give lost_at_s or preempted_every_s."
            )


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for one worker's network connection, where they differ from the cluster's settings.

    Attributes:
        bandwidth_bps: bandwidth of the worker's network interface, in bits per second in each direction; None for
            the cluster's bandwidth.
        to_server_s: latency of messages that the worker sends; None for the cluster's latency.
        from_server_s: latency of messages that the worker receives; None for the cluster's latency.
    """

    bandwidth_bps: float | None = None
    to_server_s: Times | None = None
    from_server_s: Times | None = None


class Outside(msgspec.Struct, frozen=True, kw_only=True):
    """The times that a worker's script spends outside of training, for example to evaluate or save the model.

    Unlike the time of a computation, these times do not grow with the batch size.

    Attributes:
        each_s: time before each iteration, except for the time between two epochs.
        epoch_s: time at the end of each epoch, in a simulation with data.
        without_epochs_s: time before each iteration in a simulation without data, in which there are no epochs; None
            for `each_s`.
    """

    each_s: Times = 0.0
    epoch_s: Times = 0.0
    without_epochs_s: Times | None = None


# -- What several workers have in common: pauses that strike them at the same time, and links that they share


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """Pauses in which several workers compute nothing at the same time, for example all workers of a rack.

    A computation that is in progress goes on after the pause. Messages are not delayed.

    Attributes:
        workers: indices of the workers.
        every_s: mean of the exponentially distributed time between the end of a pause and the beginning of the next
            pause, in seconds.
        lasting_s: length of a pause, as a number of seconds or a distribution.
    """

    workers: tuple[int, ...]
    every_s: float
    lasting_s: Times

    def __post_init__(self) -> None:
        times_of(self.lasting_s)
        if not 0 < self.every_s < math.inf:
            raise ConfigurationError(
                f"every_s of a pause is {self.every_s!r}, expected a number of seconds > 0."
            )


class Uplink(msgspec.Struct, frozen=True, kw_only=True):
    """A link to the servers that several workers share, in addition to their own network interfaces.

    Attributes:
        workers: indices of the workers.
        bandwidth_bps: bandwidth of the link, in bits per second in each direction.
    """

    workers: tuple[int, ...]
    bandwidth_bps: float

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth_bps < math.inf:
            raise ConfigurationError(
                f"bandwidth_bps of an uplink is {self.bandwidth_bps!r}, expected a number of bits per second > 0."
            )


class Pauses:
    """The random times of all pauses of one kind in a run. Each time is computed when it is first needed.

    Args:
        pause: describes the pauses.
        key: key of the random times of the pauses.

    Attributes:
        begins_s: beginnings of the pauses that have been computed so far, in seconds.
        ends_s: ends of these pauses, in seconds.
    """

    def __init__(self, pause: Pause, *key: int) -> None:
        self._every_s = pause.every_s
        self._draw = uniforms(*key, 0)
        self._lasting: Sample = times_of(pause.lasting_s).sampler(*key, 1)
        self.begins_s: list[float] = []
        self.ends_s: list[float] = []

    def following(self, time_s: float) -> tuple[float, float]:
        """Return the beginning and the end of the first pause that ends after a time."""
        while not self.ends_s or self.ends_s[-1] <= time_s:
            number = len(self.ends_s)
            free_s = self.ends_s[-1] if self.ends_s else 0.0
            begin_s = free_s - log(1.0 - self._draw(number)) * self._every_s
            self.begins_s.append(begin_s)
            self.ends_s.append(begin_s + float(self._lasting(number, begin_s)))
        index = bisect_right(self.ends_s, time_s)
        return self.begins_s[index], self.ends_s[index]


def prolonged_s(pauses: Sequence[Pauses], begun_s: float, length_s: float) -> float:
    """Return how long a computation takes, including the pauses that interrupt it.

    Args:
        pauses: all pauses of the worker.
        begun_s: when the computation begins, in seconds.
        length_s: how long it takes without pauses, in seconds.
    """
    now_s, left_s = begun_s, length_s
    while True:
        begin_s, end_s = min(each.following(now_s) for each in pauses)
        if begin_s >= now_s + left_s:
            return now_s + left_s - begun_s
        left_s -= max(0.0, begin_s - now_s)
        now_s = end_s


def require_workers(what: str, workers: Sequence[int], count: int) -> None:
    """Raise `ConfigurationError` unless these are indices of workers."""
    if not workers or not all(isinstance(worker, int) and 0 <= worker < count for worker in workers):
        raise ConfigurationError(
            f"the workers of {what} are {list(workers)!r}, expected at least one number from 0 to {count - 1}."
        )


# -- Delays that were measured on a cluster, from a CSV file: the seconds of each worker's computations ------

COLUMNS = (["worker", "seconds"], ["worker", "time", "seconds"])


def read_delays(path: str | os.PathLike[str]) -> list[Recorded] | list[Timed]:
    """Return the distribution of each worker's compute times from a CSV file.

    The first line names the columns. With `worker,seconds`, each worker's seconds are used in the order of the file,
    and repeat after the worker's last line. With `worker,time,seconds`, the times are in seconds, too: an iteration
    takes the seconds of the worker's last measurement before the iteration begins. These measurements also repeat.
    Workers are numbered from 0, without gaps.

    Raises:
        ConfigurationError: the file cannot be read, or a line is not valid; the message names the line.

    Example:
        >>> path = getfixture("tmp_path") / "delays.csv"
        >>> _ = path.write_text("worker,seconds\\n0,1.0\\n1,3.0\\n0,1.5\\n")
        >>> [times.seconds for times in read_delays(path)]
        [(1.0, 1.5), (3.0,)]
    """
    shown = os.fspath(path)
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            columns = [name.strip().lower() for name in next(lines, [])]
            if columns not in COLUMNS:
                raise ConfigurationError(
                    f"the first line of {shown} is {','.join(columns)!r}, expected the columns worker,seconds or "
                    "worker,time,seconds."
                )
            rows = list(_rows(shown, lines, len(columns)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigurationError(f"the file of delays {shown} cannot be read: {reason}.") from error
    by_worker: dict[int, list[list[float]]] = defaultdict(list)
    for worker, *numbers in rows:
        by_worker[int(worker)].append(numbers)
    if sorted(by_worker) != list(range(len(by_worker))) or not by_worker:
        raise ConfigurationError(
            f"{shown} has the workers {', '.join(map(str, sorted(by_worker))) or 'none'}, expected 0, 1, 2, ... "
            "without gaps."
        )
    measured = [by_worker[worker] for worker in range(len(by_worker))]
    try:
        if len(columns) == 2:
            return [Recorded(seconds=tuple(seconds for [seconds] in each)) for each in measured]
        return [
            Timed(at=tuple(at for at, _ in each), seconds=tuple(seconds for _, seconds in each))
            for each in map(sorted, measured)
        ]
    except ConfigurationError as error:
        raise ConfigurationError(f"{shown}: {error}") from error


def _rows(shown: str, lines: Iterator[list[str]], columns: int) -> Iterator[list[float]]:
    """Yield the numbers of each line that is not empty."""
    for number, line in enumerate(lines, start=2):
        if not line:
            continue
        try:
            if len(line) != columns:
                raise ValueError
            yield [int(line[0]), *map(float, line[1:])]
        except ValueError:
            raise ConfigurationError(
                f"line {number} of {shown} is {','.join(line)!r}, expected a worker and "
                f"{'seconds' if columns == 2 else 'its time and seconds'}, for example "
                f"{'0,1.5' if columns == 2 else '0,12.0,1.5'}."
            ) from None

"""What several workers have in common: pauses that strike them at the same time, and links that they share."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from ..errors import ConfigurationError
from ..sync.arithmetic import log
from ..sync.draws import uniforms
from .times import Sample, Times, times_of

__all__ = ["Pause", "Pauses", "Uplink", "prolonged_s", "require_workers"]


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """Pauses in which several workers compute nothing, for example because they are in the same rack.

    A computation that is in progress goes on after the pause. Messages are not delayed.

    Attributes:
        workers: indices of the workers.
        every_s: mean of the random time between the end of a pause and the next one, in seconds. It is distributed
            exponentially.
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
    """The times of all pauses of one kind in a run, which are drawn when they are needed.

    Args:
        pause: describes the pauses.
        key: key of their random times.

    Attributes:
        begins_s: beginnings of the pauses that were drawn, in seconds.
        ends_s: their ends.
    """

    def __init__(self, pause: Pause, *key: int) -> None:
        self._every_s = pause.every_s
        self._draw = uniforms(*key, 0)
        self._lasting: Sample = times_of(pause.lasting_s).sampler(*key, 1)
        self.begins_s: list[float] = []
        self.ends_s: list[float] = []

    def following(self, time_s: float) -> tuple[float, float]:
        """Return the begin and the end of the first pause that ends after a time."""
        while not self.ends_s or self.ends_s[-1] <= time_s:
            number = len(self.ends_s)
            free_s = self.ends_s[-1] if self.ends_s else 0.0
            begin_s = free_s - log(1.0 - self._draw(number)) * self._every_s
            self.begins_s.append(begin_s)
            self.ends_s.append(begin_s + float(self._lasting(number, begin_s)))
        index = bisect_right(self.ends_s, time_s)
        return self.begins_s[index], self.ends_s[index]


def prolonged_s(pauses: Sequence[Pauses], begun_s: float, length_s: float) -> float:
    """Return the length of a computation, with the pauses that it falls into.

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

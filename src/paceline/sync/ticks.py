"""Ticks, the unit of time of every decision. Times in ticks are whole numbers, so sums and comparisons are exact.

In a live run, a tick is a nanosecond. In a simulation, a tick is a nanosecond, or a nanosecond divided by a whole
number, such that each time that is stated as a `Fraction` or a `Decimal` is a whole number of ticks (see `resolution`).
Decisions therefore do not depend on the unit in which the times are stated, and two events that should coincide do
coincide.

Floats cannot represent most decimal numbers: three times 0.1 s is not 0.3 s. A time that is given as a float is
therefore rounded to a whole number of nanoseconds, which is the number that was meant if the float has at most nine
decimals. Times that are drawn at random or computed are rounded in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from math import lcm

import msgspec

TICKS_PER_S = 1_000_000_000
"""The number of ticks per second, unless a stated time is not a whole number of nanoseconds."""

Seconds = float | Fraction
"""A time in seconds: a float, which is rounded to a whole number of nanoseconds, or an exact integer or fraction."""


def in_ticks(seconds: Seconds, ticks_per_s: int = TICKS_PER_S) -> int:
    """Return a time in ticks. `ticks_per_s` is a multiple of `TICKS_PER_S`.

    >>> in_ticks(0.1 + 0.2), in_ticks(Fraction(1, 3), resolution(Fraction(1, 3)))
    (300000000, 1000000000)
    """
    # The first comparison is for speed: nearly all times are floats, and the check for fractions is slow.
    if type(seconds) is not float and isinstance(seconds, Fraction | int):
        return round(seconds * ticks_per_s)
    return round(seconds * TICKS_PER_S) * (ticks_per_s // TICKS_PER_S)


def vanishes(seconds: Seconds) -> bool:
    """Return True if a time is a float above 0 that is rounded to 0.

    >>> vanishes(4e-10), vanishes(Fraction(4, 10**10)), vanishes(0.0)
    (True, False, False)
    """
    return isinstance(seconds, float) and 0 < seconds < 1 and in_ticks(seconds) == 0


def resolution(*stated: object) -> int:
    """Return the smallest number of ticks per second for which all stated fractions are whole numbers of ticks.

    The result is a multiple of `TICKS_PER_S`. Numbers of other types are ignored, because they are rounded to whole
    numbers of nanoseconds.

    Args:
        stated: times in seconds, or structures that contain them: structs, mappings and sequences.

    >>> resolution([0.25, Fraction(1, 4)]), resolution({0: Fraction(1, 7)}, Fraction(1, 3))
    (1000000000, 21000000000)
    """
    return lcm(TICKS_PER_S, *(time.denominator for time in _fractions(stated)))


def _fractions(value: object) -> Iterator[Fraction]:
    if isinstance(value, Fraction):
        yield value
    elif isinstance(value, msgspec.Struct):
        yield from _fractions(msgspec.structs.astuple(value))
    elif isinstance(value, Mapping):
        yield from _fractions(tuple(value.values()))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for element in value:
            yield from _fractions(element)


def decimal(number: float | Fraction) -> Fraction:
    """Return the number that a float stands for: the shortest decimal number that is read as this float.

    >>> decimal(0.1), decimal(Fraction(1, 3))
    (Fraction(1, 10), Fraction(1, 3))
    """
    return number if isinstance(number, Fraction) else Fraction(repr(float(number)))

"""The checks of settings. Each is a `setting.Check`, or returns one."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..errors import ConfigurationError, unknown_name
from ..trace.run_dir import require_usable
from .setting import Check

__all__ = [
    "directory",
    "duration",
    "number",
    "numbers",
    "one_of",
    "paces",
    "port",
    "run_dir",
    "whole",
    "written_duration",
    "written_paces",
]

Pace = tuple[float, float]

UNITS_S = {"h": 3600, "min": 60, "s?": 1}
DURATION = re.compile(r"(?=.)" + "".join(rf"(?:(\d+(?:\.\d+)?) *{unit} *)?" for unit in UNITS_S))


def one_of(choices: Collection[str], *others: str) -> Check:
    """Return a check that accepts the names in a collection, as it is when the check is made, and some others."""

    def check(name: str, value: Any) -> str:
        if value not in choices and value not in others:
            raise unknown_name(name, value, [*others, *choices])
        return str(value)

    return check


def whole(*, least: int) -> Check:
    """Return a check that accepts the whole numbers from `least`."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{name} is {value!r}, expected a whole number >= {least}.")
        return value

    return check


def number(accepts: Callable[[float], bool], expected: str) -> Check:
    """Return a check that accepts some numbers, which `expected` describes."""

    def check(name: str, value: Any) -> float:
        if not isinstance(value, int | float) or not accepts(value):
            raise ConfigurationError(f"{name} is {value!r}, expected {expected}.")
        return float(value)

    return check


def port(name: str, value: Any) -> int:
    """Accept the number of a TCP port, or 0."""
    if not isinstance(value, int) or not 0 <= value <= 65535:
        raise ConfigurationError(f"{name} is {value!r}, expected a number from 0 (any free port) to 65535.")
    return value


def run_dir(name: str, value: str | os.PathLike[str]) -> str:
    """Accept a directory that can be written and contains no run."""
    require_usable(value)
    return str(value)


def directory(name: str, value: str | os.PathLike[str]) -> str:
    """Accept the name of a directory, which may not exist yet. Return its absolute path."""
    if not os.fspath(value):
        raise ConfigurationError(f"{name} is empty, expected the name of a directory.")
    return os.path.abspath(value)


def is_bucket(place: str | os.PathLike[str]) -> bool:
    """Return True for the URL of a bucket, such as "s3://bucket/run", and False for the name of a directory."""
    return "://" in os.fspath(place)


def directory_or_bucket(name: str, value: str | os.PathLike[str]) -> str:
    """Accept the name of a directory, or the URL of a bucket. Return the absolute path, or the URL as it is."""
    return os.fspath(value) if is_bucket(value) else directory(name, value)


def duration(name: str, value: str | float) -> float:
    """Accept a number of seconds, a text such as 5min, or "off", which means 0.

    Returns:
        the duration in seconds.

    >>> duration("checkpoint_every", "1h30min")
    5400.0
    """
    if value == "off":
        return 0.0
    found = DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is not None:
        seconds = sum(
            float(part or 0) * unit_s for part, unit_s in zip(found.groups(), UNITS_S.values(), strict=True)
        )
    else:
        seconds = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not 0 < seconds < math.inf:
        raise ConfigurationError(
            f'{name} is {value!r}, expected a time such as 30s, 5min or 1h30min, a number of seconds > 0, or "off".'
        )
    return float(seconds)


def written_duration(seconds: float) -> str:
    """Return a duration as it is written on the command line.

    >>> [written_duration(seconds) for seconds in (0, 90, 0.5, 7200)]
    ['off', '1min30s', '0.5s', '2h']
    """
    hours, rest_s = divmod(seconds, UNITS_S["h"])
    minutes, rest_s = divmod(rest_s, UNITS_S["min"])
    parts = zip((hours, minutes, rest_s), ("h", "min", "s"), strict=True)
    return "".join(f"{count:g}{unit}" for count, unit in parts if count) or "off"


def numbers(name: str, value: str | Sequence[float]) -> tuple[float, ...]:
    """Accept numbers, or a text such as 1,1,1,3."""
    if not isinstance(value, str):
        return tuple(value)
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError:
        raise ConfigurationError(
            f"{name} is {value!r}, expected numbers separated by commas, for example 1,1,1,3."
        ) from None


def paces(name: str, value: str | Sequence[float | Pace]) -> tuple[Pace, ...]:
    """Accept the pace of each worker, or a text such as .05,.02+.03.

    A pace is a number of seconds, which is proportional to the size of the batch, or a pair of a fixed and a
    proportional part.

    Returns:
        a pair for each worker.
    """
    if isinstance(value, str):
        return tuple(_pace(name, value, part) for part in value.split(","))
    pairs = [each if isinstance(each, tuple) else (0.0, each) for each in value]
    for pair in pairs:
        if len(pair) != 2 or not all(isinstance(part, int | float) for part in pair):
            raise ConfigurationError(
                f"{name} is {value!r}, expected a number of seconds for each worker, or a pair of numbers: a fixed "
                "part and a part that is proportional to the size of the batch."
            )
    return tuple((float(fixed), float(proportional)) for fixed, proportional in pairs)


def _pace(name: str, text: str, part: str) -> Pace:
    """Return the pace in a part of the text of an option."""
    fixed, plus, proportional = part.rpartition("+")
    try:
        return float(fixed) if plus else 0.0, float(proportional)
    except ValueError:
        raise ConfigurationError(
            f"{name} is {text!r}, expected numbers of seconds separated by commas, for example .05,.05,.15, or pairs "
            "of a fixed and a proportional part, for example .02+.03,.02+.03,.05+.1."
        ) from None


def written_paces(value: Sequence[Pace]) -> str:
    """Return paces as they are written on the command line.

    >>> written_paces([(0.0, 0.05), (0.02, 0.03)])
    '0.05,0.02+0.03'
    """
    return ",".join(
        f"{fixed:g}+{proportional:g}" if fixed else f"{proportional:g}" for fixed, proportional in value
    )

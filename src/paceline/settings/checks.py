"""The checks of settings, the rows of their table, and functions that read the TOML files of users.

Each setting is checked by a `Check`. Some functions here, such as `port`, are checks. The other ones, such as `one_of`,
return a check.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigurationError, unknown_name
from ..trace.run_dir import require_usable

Pace = tuple[float, float]

UNITS_S = {"h": 3600, "min": 60, "s?": 1}  # unit, as a regular expression -> seconds
DURATION = re.compile(r"(?=.)" + "".join(rf"(?:(\d+(?:\.\d+)?) *{unit} *)?" for unit in UNITS_S))


def one_of(choices: Collection[str], *others: str) -> Check:
    """Return a check that accepts the names in `others`, and those that `choices` contains when a value is checked."""

    def check(name: str, value: Any) -> str:
        if value not in choices and value not in others:
            raise unknown_name(name, value, [*others, *choices])
        return str(value)

    return check


def whole(*, least: int) -> Check:
    """Return a check that accepts whole numbers that are at least `least` and less than 2**64."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{name} is {value!r}, expected a whole number >= {least}.")
        if value >= 2**64:  # the processes of a run cannot send each other such numbers
            raise ConfigurationError(f"{name} is {value}, expected a whole number < 2**64.")
        return value

    return check


def number(accepts: Callable[[float], bool], expected: str) -> Check:
    """Return a check that accepts a number if `accepts` returns True for it. `expected` describes these numbers."""

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


def named_device(name: str, value: object) -> str:
    """Accept "auto", or the name of a device in torch's notation."""
    if not re.fullmatch(r"(?!cpu:|auto:)[a-z][a-z0-9_]*(:[0-9]{1,4})?", str(value)):
        raise ConfigurationError(
            f"{name} is {value!r}, expected 'cpu', 'auto', or a device such as 'cuda:1'."
        )
    return str(value)


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
        The duration in seconds.

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

    A pace is the number of seconds for a batch of the loader's size. For other batches, the time changes in proportion
    to their size. A pace may also be a pair of a fixed part and such a proportional part.

    Returns:
        A pair for each worker.
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
    """Return the pace that `part` describes, which is the part of an option's `text` for one worker."""
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


# -- The rows of the table of settings -----------------------------------------------------------------------

RUN, SERVE, SCHEDULED = "run", "serve", "scheduled"
"""The commands that start a run: `paceline run`, `paceline serve`, and `paceline join` in a job of a scheduler."""

Check = Callable[[str, Any], Any]
"""A function from the name and the value of a setting to the value that the run uses.

The function receives the value that a user has written: an argument in Python, or the text of an option. If this value
is not valid, the function raises `ConfigurationError`, which states the name, the value and what was expected.
"""


def as_given(name: str, value: Any) -> Any:
    """Accept any value."""
    return value


def written(value: Any) -> str:
    """Return a value as it is written on the command line; "" for None."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ",".join(map(written, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A row of the table: the properties of a setting, apart from its type.

    The type of a setting says how its option is read: `bool` is a flag, `int` a whole number, `float` a number, and
    `Sequence[str]` an option that can be repeated. The option of any other type is a text, which `check` reads.

    Attributes:
        default: the value if the user gives none. A default of None is not checked.
        doc: documentation of the argument in Python.
        help: help text of the option.
        metavar: placeholder for the option's value in the help text. Default: a placeholder for the type.
        option: name of the option. Default: the name of the setting, with hyphens.
        panel: heading under which the help text shows the option.
        commands: the commands that have the option.
        check: returns the value that the run uses.
        field: attribute of `run.job.Job` with the value; None if there is no such attribute. Default: the name of the
            setting.
        written: returns the value that the run uses, as it is written on the command line.
        reported: True if the report of a run shows the value.
        trusted: True if the command that resumes a run repeats this value only if the run directory is trusted (see
            `paceline.trust`), because the value names code to import, a place to write to, or an address to serve at.
        name: name of the setting. `named` sets it.
    """

    default: Any
    doc: str
    help: str
    metavar: str = ""
    option: str = ""
    panel: str = "Run"
    commands: tuple[str, ...] = (RUN, SERVE, SCHEDULED)
    check: Check = as_given
    field: str | None = ""
    written: Callable[[Any], str] = written
    reported: bool = True
    trusted: bool = False
    name: str = ""

    def named(self, name: str) -> Setting:
        """Return the row of the setting with this name."""
        return replace(
            self,
            name=name,
            option=self.option or f"--{name.replace('_', '-')}",
            field=name if self.field == "" else self.field,
        )

    def value(self, given: Any) -> Any:
        """Return the value that the run uses, given the value that a user has written.

        Raises:
            ConfigurationError: the value is not valid.
        """
        return None if given is None and self.default is None else self.check(self.name, given)


# -- TOML files that users write: their tables as types, and errors that name the entry and its valid values ---

WORDS = {
    "array": "a list",
    "object": "a table",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
}
"""Name of a type in msgspec's messages -> the words for this type in a message to the user."""


def read_toml(path: Path, what: str, hint: str) -> dict[str, Any]:
    """Return the content of a TOML file.

    Args:
        path: the file.
        what: what kind of file this is, for an error message.
        hint: sentence at the end of the error if the file cannot be read.

    Raises:
        ConfigurationError: the file cannot be read, or is not a TOML file.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise ConfigurationError(f"{what} {path} cannot be read: {reason}. {hint}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not a TOML file: {error}") from error


def converted(
    values: Any,
    kind: Any,
    *,
    tables: Mapping[str, type[msgspec.Struct]],
    choices: Mapping[str, Collection[str]] | None = None,
    where: str = "",
) -> Any:
    """Convert the values of a table, or of an entry, to a type.

    Args:
        values: the table or entry.
        kind: the type.
        tables: pattern of the place of a table within `values`, such as "target" or r"models\\[.*\\]", or "" for
            `values` itself -> the entries of this table.
        choices: name of an entry -> its permitted words, for each entry that must be one of several words.
        where: the name of this table or entry in the file; "" for the whole file.

    Raises:
        ConfigurationError: an entry is not valid. The message names it.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _readable(str(error), values, tables, choices or {}, where) from error


def _readable(
    reason: str,
    values: Any,
    tables: Mapping[str, type[msgspec.Struct]],
    choices: Mapping[str, Collection[str]],
    where: str,
) -> ConfigurationError:
    """Return the error for a message of msgspec. See `converted`."""
    place = ""
    if match := re.search(r"got `(\w+)` - at `key` in `\$\.?(.*)`$", reason):
        return ConfigurationError(f"a name in {match[2] or where} is {_type_words(match[1])}, expected text.")
    if match := re.search(r" - at `\$(.*)`$", reason):
        place, reason = match[1].lstrip("."), reason[: match.start()]
    full = ".".join(filter(None, [where, place])).replace(".[", "[")
    if match := re.search(r"unknown field `(.*)`", reason):
        table = next(table for pattern, table in tables.items() if re.fullmatch(pattern, place))
        return unknown_name(f"entry in {full}" if full else "entry", match[1], table.__struct_fields__)
    if match := re.search(r"missing required field `(.*)`", reason):
        return ConfigurationError(f"{full}{'.' if full else ''}{match[1]} is missing.")
    if match := re.search(r"Invalid enum value (.*)", reason):
        return unknown_name(full, match[1].strip("'"), choices[place.rpartition(".")[2]])
    if match := re.fullmatch(r"Expected `([^`]+)`(.*), got `([^`]+)`", reason):
        return ConfigurationError(
            f"{full} is {_type_words(match[3])}, expected {_type_words(match[1])}{match[2]}."
        )
    reason = re.sub("Expected `([^`]+)`", lambda match: f"expected {_type_words(match[1])}", reason)
    return ConfigurationError(f"{full} is {_value_at(values, place)!r}, {reason}.")


def _type_words(types: str) -> str:
    return " or ".join(dict.fromkeys(WORDS.get(name, name) for name in types.split(" | ")))


def _value_at(values: Any, place: str) -> Any:
    """Return the value at a place that is named as in messages of msgspec, such as "budget.seconds" or "models[2]"."""
    for key in re.findall(r"[^.\[\]]+", place):
        values = values[int(key)] if isinstance(values, Sequence) else values[key]
    return values

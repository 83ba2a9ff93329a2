"""TOML files that users write: their tables as types, and errors that name the entry and what it may be."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigurationError, unknown_name

__all__ = ["converted", "read_toml"]

WORDS = {
    "array": "a list",
    "object": "a table",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
}
"""The names of types in msgspec's messages -> what they are called in a file."""


def read_toml(path: Path, what: str, hint: str) -> dict[str, Any]:
    """Return the content of a TOML file.

    Args:
        path: the file.
        what: what an error calls the file.
        hint: sentence that follows if the file cannot be read.

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
    """Return the values of a table, or of an entry, as a type.

    Args:
        values: the table or entry.
        kind: the type.
        tables: pattern of the place of a table within this one, such as "target" or r"models\\[.*\\]", or "" for this
            one -> its entries.
        choices: name of an entry -> what it may be, for entries that are one of several words.
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
        return ConfigurationError(f"a name in {match[2] or where} is {_words(match[1])}, expected text.")
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
        return ConfigurationError(f"{full} is {_words(match[3])}, expected {_words(match[1])}{match[2]}.")
    reason = re.sub("Expected `([^`]+)`", lambda match: f"expected {_words(match[1])}", reason)
    return ConfigurationError(f"{full} is {_at(values, place)!r}, {reason}.")


def _words(types: str) -> str:
    return " or ".join(dict.fromkeys(WORDS.get(name, name) for name in types.split(" | ")))


def _at(values: Any, place: str) -> Any:
    """Return the value at a place as msgspec names it: "budget.seconds", "models[2]"."""
    for key in re.findall(r"[^.\[\]]+", place):
        values = values[int(key)] if isinstance(values, Sequence) else values[key]
    return values

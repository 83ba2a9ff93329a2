"""A file of results, one JSON object per line, to which each result is appended when its task has ended.

So a command that was stopped continues with the missing results. If a command is killed while it writes a line, the
line has no end. Such a line is ignored, and the next result takes its place.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import platform
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.errors import ConfigurationError

Kind = TypeVar("Kind", bound=msgspec.Struct)


def read_results(path: Path, *kinds: type[Kind]) -> list[Kind]:
    """Return the results in a file, in the order of its lines; none if the file does not exist.

    Args:
        path: the file.
        kinds: the types that a line may have. If there are several types, their tags tell them apart.

    Raises:
        ConfigurationError: the file cannot be read, or a line is not a result of these kinds.
    """
    decoder = msgspec.json.Decoder(functools.reduce(operator.or_, kinds))
    try:
        content = path.read_bytes() if path.exists() else b""
        found: list[Kind] = decoder.decode_lines(content[: _finished(content)])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(
            f"{path} is not a file of results: {error}. Move it elsewhere, or choose another file."
        ) from error
    return found


def append_results(path: Path, *results: msgspec.Struct) -> None:
    """Append results to a file. The file and its folder are made if they do not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    with path.open("r+b") as file:
        file.truncate(_finished(file.read()))
        file.seek(0, 2)
        file.write(b"".join(msgspec.json.encode(each) + b"\n" for each in results))


def rounded(value: float, digits: int) -> float | None:
    """Return a number, rounded to `digits` significant digits; None if it is not finite.

    >>> rounded(12345.678, 4), rounded(math.inf, 4)
    (12350.0, None)
    """
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def machine() -> str:
    """Return a description of the machine on which a result is made: "2 cores (x86_64), Python 3.11.7"."""
    return f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"


def _finished(content: bytes) -> int:
    """Return the number of bytes up to the end of the last line that has an end."""
    return content.rfind(b"\n") + 1

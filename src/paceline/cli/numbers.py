"""Options whose value is a number. A value that is no such number is rejected with a sentence of our own.

Without these parsers, the message would come from the library that converts the values of options, and it would not
contain the value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import typer

from ..errors import ConfigurationError

__all__ = ["number_option", "whole_number", "whole_number_option"]


def whole_number_option(
    name: str, *names: str, least: int | None = None, most: int | None = None, **settings: Any
) -> Any:
    """Return an option whose value is a whole number.

    Args:
        name: name of the option, for example --workers.
        names: other names of the option.
        least: smallest value; None if the library checks the value.
        most: largest value; None for no limit.
        settings: other arguments for `typer.Option`.
    """
    return _option(name, *names, read=whole_number, what="a whole number", least=least, most=most, **settings)


def number_option(name: str, *names: str, least: float | None = None, **settings: Any) -> Any:
    """Return an option whose value is a number with or without a fraction. See `whole_number_option`."""
    return _option(name, *names, read=float, what="a number", least=least, most=None, **settings)


def _option(
    name: str,
    *names: str,
    read: Callable[[str], float],
    what: str,
    least: float | None,
    most: float | None,
    **settings: Any,
) -> Any:
    bounds = "" if least is None else f" >= {least:g}" if most is None else f" from {least:g} to {most:g}"

    def refusal(shown: str) -> ConfigurationError:
        key = name.removeprefix("--").replace("-", "_")  # as the library names it
        return ConfigurationError(f"{key} is {shown}, expected {what}{bounds}.")

    def parse(given: str | float) -> float:
        if not isinstance(given, str):
            return given  # the default value
        try:
            value = read(given)
        except ValueError:
            raise refusal(repr(given)) from None
        if (least is not None and not value >= least) or (most is not None and not value <= most):
            raise refusal(f"{value}")
        return value

    return typer.Option(name, *names, parser=parse, **{"metavar": "N", **settings})


def whole_number(text: str) -> int:
    """Return the integer that a text stands for. Unlike `int`, accept only digits and a sign."""
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(text)
    return int(text)

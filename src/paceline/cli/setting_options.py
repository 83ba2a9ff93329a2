"""The options of the settings of a run, which are made from the table of settings.

A command takes them as `**settings`, and passes them on to `make_job` in the same way. The options
accept any value. The table checks them, so that a wrong one is rejected with the same message as in Python.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from ..settings import SETTINGS
from ..settings.table import TYPES
from .numbers import whole_number

__all__ = ["as_options", "option_of", "takes_settings"]

Command = Callable[..., None]


def _lenient(read: Callable[[str], float]) -> Callable[[Any], Any]:
    """Return a function that reads a number, and returns anything else as it is, such as the default value."""

    def read_or_return(given: Any) -> Any:
        try:
            return read(given) if isinstance(given, str) else given
        except ValueError:
            return given

    return read_or_return


NUMBERS: dict[Any, Callable[[str], float]] = {
    int: whole_number,
    int | None: whole_number,
    float: float,
    float | None: float,
}
"""Type of a setting -> the function that reads its option."""

READ_AS = {bool: bool, Sequence[str]: list[str]}
"""Type of a setting -> the type of its option. All other options are texts or numbers."""


def option_of(name: str) -> Any:
    """Return the option of a setting, as an annotation."""
    row, kind = SETTINGS[name], TYPES[name]
    more: dict[str, Any] = {}
    if kind in NUMBERS:
        more = {"parser": _lenient(NUMBERS[kind]), "metavar": "N"}
    if kind == Sequence[str]:
        more = {"show_default": False}
    if row.metavar:
        more["metavar"] = row.metavar
    return typer.Option(row.option, help=row.help, rich_help_panel=row.panel, **more)


def takes_settings(name: str, *, before: str) -> Callable[[Command], Command]:
    """Return a decorator which gives a command an option for each of its settings, in place of `**settings`.

    A parameter of the command itself takes the place of the setting with its name.

    Args:
        name: name of the command in `Setting.commands`.
        before: the parameter that the options precede in the help text.
    """

    def decorate(command: Command) -> Command:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[:-1]
        names = [parameter.name for parameter in own]
        options = [
            inspect.Parameter(
                row.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=row.default,
                annotation=Annotated[READ_AS.get(TYPES[row.name], str | None), option_of(row.name)],
            )
            for row in SETTINGS.values()
            if name in row.commands and row.name not in names
        ]
        place = names.index(before)
        parameters = [*own[:place], *options, *own[place:]]

        @functools.wraps(command)
        def with_settings(**values: Any) -> None:
            command(**values)

        with_settings.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_settings.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_settings

    return decorate


def as_options(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings as they are written on a command line, except those that have their default value."""
    words = []
    for name, value in settings.items():
        row = SETTINGS[name]
        if TYPES[name] == Sequence[str]:
            words += [f"{row.option}={each}" for each in value]
        elif value is True:
            words.append(row.option)
        elif value != row.default:
            words.append(f"{row.option}={value}")
    return words

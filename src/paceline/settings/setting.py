"""What a row of the table of settings contains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["RUN", "SCHEDULED", "SERVE", "Check", "Setting", "as_given", "written"]

RUN, SERVE, SCHEDULED = "run", "serve", "scheduled"
"""The commands that start a run: `paceline run`, `paceline serve`, and `paceline join` in a job of a scheduler."""

Check = Callable[[str, Any], Any]
"""A function from the name and the value of a setting to the value that the run uses.

The value is what a user has written: an argument in Python, or the text of an option. If this value is not valid, the
function raises `ConfigurationError`, which states the name, the value and what was expected.
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
    """What is known about a setting, apart from its name and its type.

    The type says how its option is read: `bool` is a flag, `int` a whole number, `float` a number, and
    `Sequence[str]` an option that can be repeated. The option of any other type is a text, which `check` reads.

    Attributes:
        default: the value of a user who says nothing. If it is None, None is not checked.
        doc: documentation of the argument in Python.
        help: help text of the option.
        metavar: what the help text shows for the option's value. Default: what its type says.
        option: name of the option. Default: the name of the setting, with hyphens.
        panel: heading under which the help text shows the option.
        commands: the commands that have the option.
        check: returns the value that the run uses.
        field: attribute of `runtime.job.Job` that has this value; None if there is none. Default: the name of the
            setting.
        written: returns this value as it is written on the command line.
        reported: True if the report of a run shows the value.
        trusted: True if a run that is resumed uses the value of the run before only if its directory is trusted (see
            `paceline.trust`): the value names code to import, a place to write to, or an address to serve at.
        name: name of the setting, which the table knows.
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
        """Return the value that the run uses, given what a user has written.

        Raises:
            ConfigurationError: this is not valid.
        """
        return None if given is None and self.default is None else self.check(self.name, given)

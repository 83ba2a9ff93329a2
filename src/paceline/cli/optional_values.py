"""Options whose value may be left out, such as --dashboard. The library for the command line does not know them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from typer.core import TyperCommand

__all__ = ["OptionalValues", "completed"]

PORT = re.compile(r"(\S+:)?[0-9]+")

OPTIONAL = {"--dashboard": PORT}
"""Option -> what its value looks like. In a command with a script, anything else that follows is the script."""


class OptionalValues(TyperCommand):
    """A command which understands an option of `OPTIONAL` without a value. Its value is then ""."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        valued = {
            name
            for parameter in self.params
            if parameter.param_type_name == "option" and not getattr(parameter, "is_flag", False)
            for name in parameter.opts
        }
        return super().parse_args(ctx, completed(args, valued, mixed=ctx.allow_interspersed_args))


def completed(args: Sequence[str], valued: Collection[str], *, mixed: bool = False) -> list[str]:
    """Return arguments in which the options of `OPTIONAL` have values.

    Args:
        args: the arguments.
        valued: the names of all options that have values.
        mixed: True if options may also follow other arguments; False if these belong to a script.

    >>> completed(["-n", "4", "--dashboard", "train.py", "--dashboard"], ["-n", "--dashboard"])
    ['-n', '4', '--dashboard=', 'train.py', '--dashboard']
    >>> completed(["--dashboard", "0.0.0.0:8000", "train.py"], ["--dashboard"])
    ['--dashboard=0.0.0.0:8000', 'train.py']
    """
    done: list[str] = []
    left = list(args)
    while left:
        word = left.pop(0)
        if word in OPTIONAL:
            is_value = left and (
                OPTIONAL[word].fullmatch(left[0]) if not mixed else not left[0].startswith("-")
            )
            done.append(f"{word}={left.pop(0) if is_value else ''}")
            continue
        done.append(word)
        if word == "--" or not (word.startswith("-") or mixed):
            break
        if word in valued and left:
            done.append(left.pop(0))
    return [*done, *left]

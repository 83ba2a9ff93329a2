"""What `help` and notebooks show of a function that takes the settings of a run as `**settings: Unpack[Settings]`."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

from .table import SETTINGS, TYPES

__all__ = ["shows_settings"]

Function = TypeVar("Function", bound=Callable[..., Any])

WIDTH = 114  # of a docstring without its indentation


def shows_settings(function: Function) -> Function:
    """Show each setting as an argument of a function, in its signature and in its docstring.

    In the docstring, the settings replace the line that documents `settings`.
    """
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    settings = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=row.default, annotation=TYPES[name])
        for name, row in SETTINGS.items()
    ]
    head, _, rest = (inspect.getdoc(function) or "").partition("    settings:")
    lines = [_documented(name, row.doc) for name, row in SETTINGS.items()]
    function.__doc__ = "\n".join([head.rstrip(), *lines]) + rest[rest.index("\n") :]
    function.__signature__ = signature.replace(parameters=[*own, *settings])  # type: ignore[attr-defined]
    return function


def _documented(name: str, doc: str) -> str:
    return textwrap.fill(f"{name}: {doc}", WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)

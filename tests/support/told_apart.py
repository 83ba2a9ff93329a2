"""Where a program tells things apart by their names."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Collection, Iterator
from pathlib import Path

import paceline

__all__ = ["lines_that_tell_apart", "source_that_tells_apart"]

SOURCE = Path(paceline.__file__).parent


def source_that_tells_apart(names: Collection[str]) -> set[str]:
    """Return the places in Paceline, as `file:line`, that compare something with one of some names."""
    texts = {path.relative_to(SOURCE): path.read_text() for path in SOURCE.rglob("*.py")}
    return {
        f"{path}:{line}"
        for path, text in texts.items()
        if any(f'"{name}"' in text for name in names)
        for line in lines_that_tell_apart(text, names)
    }


def lines_that_tell_apart(text: str, names: Collection[str]) -> Iterator[int]:
    """Yield the lines on which a program compares something with a name, or looks it up in a table of names."""
    for node in ast.walk(ast.parse(text)):
        sides: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            sides = [*node.keys]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("startswith", "removeprefix"):
            sides = [*node.args]
        inner = itertools.chain.from_iterable(ast.walk(side) for side in sides if side is not None)
        if any(isinstance(each, ast.Constant) and each.value in names for each in inner):
            yield next(side.lineno for side in sides if side is not None)

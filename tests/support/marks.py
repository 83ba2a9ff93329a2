"""Parameters with which tests run only on demand. See CONTRIBUTING.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["chaos", "thorough"]


def chaos(*values: object) -> list[Any]:
    """Parameters with which a test shows little more: only `make chaos` runs it with them."""
    return marked(pytest.mark.chaos, values)


def thorough(*values: object) -> list[Any]:
    """Parameters with which a test shows little more: only `make thorough` runs it with them."""
    return marked(pytest.mark.thorough, values)


def marked(mark: pytest.MarkDecorator, values: Iterable[object]) -> list[Any]:
    """Parameters with a mark. A tuple contains the values of several parameters."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark) for value in values]

"""Words for figures."""

from __future__ import annotations

__all__ = ["counted"]


def counted(count: int, noun: str) -> str:
    """Return a number of things in words, such as "2 workers"."""
    return f"{count} {noun}{'s' if count != 1 else ''}"

"""The names of runs in tables and pictures that compare them."""

from __future__ import annotations

__all__ = ["run_name"]


def run_name(sync: str, batch: str) -> str:
    """Return the name of a run: its sync model, with a note if the batches were balanced.

    >>> run_name("bsp", "equal"), run_name("bsp", "balanced")
    ('bsp', 'bsp, balanced batches')
    """
    return f"{sync}, balanced batches" if batch == "balanced" else sync

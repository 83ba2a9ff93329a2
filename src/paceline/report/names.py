"""The names of runs in tables and pictures that compare them."""

from __future__ import annotations

__all__ = ["run_name", "wrappable"]


def run_name(sync: str, batch: str, hyperparameters: str = "raw") -> str:
    """Return the name of a run: its sync model, with what is special about its batches and hyper-parameters.

    >>> run_name("bsp", "equal"), run_name("bsp", "balanced")
    ('bsp', 'bsp, balanced batches')
    >>> run_name("asp", "equal", "translated")
    'asp, translated'
    """
    notes = ["balanced batches"] * (batch == "balanced") + ["translated"] * (hyperparameters == "translated")
    return ", ".join([sync, *notes])


def wrappable(name: str) -> str:
    """Return the name of a run with spaces where a table may wrap it.

    >>> wrappable("ssp:staleness=3,execution=lazy, balanced batches")
    'ssp: staleness=3, execution=lazy, balanced batches'
    """
    return name.replace(", ", ",").replace(",", ", ").replace(":", ": ", 1)

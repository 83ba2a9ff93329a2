"""Words for figures, and texts that are shortened between words."""

from __future__ import annotations

from collections.abc import Collection

from rich.cells import cell_len

__all__ = ["counted", "duration", "named_workers", "rough_duration", "shortened"]

MOST_NAMED = 4  # number of workers that are named in a sentence


def counted(count: int, noun: str) -> str:
    """Return a number of things in words, such as "2 workers"."""
    return f"{count} {noun}{'s' if count != 1 else ''}"


def named_workers(workers: Collection[int]) -> str:
    """Return the names of workers, or of the first ones if there are many.

    >>> named_workers([3]), named_workers([1, 2]), named_workers(range(64))
    ('worker 3', 'workers 1, 2', 'workers 0, 1, 2, 3 and 60 others')
    """
    named = ", ".join(map(str, sorted(workers)[:MOST_NAMED]))
    others = len(workers) - MOST_NAMED
    more = f" and {counted(others, 'other')}" if others > 0 else ""
    return f"worker{'s' * (len(workers) != 1)} {named}{more}"


def duration(seconds: float) -> str:
    """Return a duration with two units at most.

    >>> duration(0.84), duration(75), duration(7260)
    ('0.8 s', '1 min 15 s', '2 h 1 min')
    """
    return f"{seconds:.1f} s" if seconds < 59.95 else rough_duration(seconds)


def rough_duration(seconds: float) -> str:
    """Return a duration in whole seconds, with two units at most.

    >>> rough_duration(0.84), rough_duration(75), rough_duration(7260)
    ('1 s', '1 min 15 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest_s = divmod(whole, 60)
    return f"{minutes} min {rest_s} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def shortened(text: str, width: int) -> str:
    """Return a text that is at most `width` cells wide. A longer one ends after a word, with an ellipsis.

    >>> shortened("2 of 3 workers have pushed", 16), shortened("waiting", 6)
    ('2 of 3 workers…', '…')
    """
    if cell_len(text) <= width:
        return text
    kept = ""
    for word in text.split():
        longer = f"{kept} {word}" if kept else word
        if cell_len(longer.rstrip(",;:")) >= width:
            break
        kept = longer
    return kept.rstrip(",;:") + "…"

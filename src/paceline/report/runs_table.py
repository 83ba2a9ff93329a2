"""A table with one row per run that fits the width of the screen, without words that are cut in the middle.

On a narrow screen, less important columns are left out, and the caption names them. Names of runs are wrapped between
words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

__all__ = ["runs_table"]

GAP = 2  # columns of the screen between two columns of the table
INDENT = 2  # a name may begin with a mark, from which its first word is not separated


def runs_table(
    names: Sequence[str],
    columns: Mapping[str, Sequence[str]],
    *,
    expendable: Sequence[str],
    width: int,
    title: str = "",
    caption: str = "",
) -> Table:
    """Return a table whose first column contains the names of runs.

    Args:
        names: the names, with spaces where they may be wrapped.
        columns: heading -> cells, from left to right. Headings may have several lines, and cells only one.
        expendable: headings of the columns that may be left out, beginning with the least important one.
        width: width of the screen, in columns.
        title: text above the table.
        caption: text below the table.
    """
    longest = max((len(word) for name in names for word in name.split()), default=0) + INDENT
    least = min(longest, max(width // 2, 1))  # a longer word is continued on the next line
    kept = dict(columns)
    for heading in expendable:
        if least + _taken(kept) <= width:
            break
        kept.pop(heading, None)
    if left_out := [" ".join(heading.split()) for heading in columns if heading not in kept]:
        caption += f"\nleft out in {width} columns: {'; '.join(left_out)}"
    table = Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        caption=caption.strip("\n") or None,
        caption_justify="left",
    )
    table.add_column(
        "sync",
        overflow="fold",
        vertical="bottom",
        min_width=least,
        max_width=max(least, width - _taken(kept)),
    )
    for heading in kept:
        table.add_column(heading, justify="right", no_wrap=True)
    for number, name in enumerate(names):
        table.add_row(name, *(cells[number] for cells in kept.values()))
    return table


def _taken(columns: Mapping[str, Sequence[str]]) -> int:
    """Return the width that the columns take, with the gaps before them."""
    return sum(GAP + max(map(len, [*heading.split("\n"), *cells])) for heading, cells in columns.items())

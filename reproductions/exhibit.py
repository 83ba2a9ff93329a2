"""What a reproduced table or figure is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from rich import box
from rich.table import Table

from paceline.cli.progress import TellShare

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Exhibit", "Made", "Options", "beside", "ratio", "seconds"]


class Options(msgspec.Struct, frozen=True):
    """How much to do.

    Attributes:
        quick: as little as shows that it works: for a first look, not for figures.
        seeds: medians over so many runs, where the paper has several.
    """

    quick: bool = False
    seeds: int = 3


class Made(msgspec.Struct, frozen=True):
    """What came out.

    Attributes:
        tables: the paper's numbers beside ours.
        figure: draws the plot; matplotlib is loaded only then.
        data: the numbers of the figure, plain, to be kept as JSON.
        notes: what was found, in sentences.
    """

    tables: Sequence[Table]
    figure: Callable[[], Figure]
    data: Any
    notes: Sequence[str] = ()


class Exhibit(msgspec.Struct, frozen=True, kw_only=True):
    """One table or figure of a paper.

    Attributes:
        name: on the command line.
        source: paper and number.
        title: what it shows, in a line.
        differs: what differs from the paper, network and data first of all.
        minutes: about how long it takes.
        make: makes it.
    """

    name: str
    source: str
    title: str
    differs: str
    minutes: float
    make: Callable[[Options, TellShare], Made]


def beside(title: str, rows: Mapping[str, Sequence[tuple[str, str]]], columns: Sequence[str]) -> Table:
    """A table of the paper's figures beside ours.

    Args:
        title: above it.
        rows: label -> for each column (the paper's, ours). "-" stands for a figure that the paper does not have; a
            column without any has no place for them.
        columns: their headings.
    """
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("", overflow="fold", vertical="bottom", min_width=8)
    printed = [
        any(pairs[index][0] not in ("-", "") for pairs in rows.values()) for index in range(len(columns))
    ]
    for heading, has_paper in zip(columns, printed, strict=True):
        if has_paper:
            table.add_column(f"{heading}\npaper", justify="right")
        table.add_column("ours" if has_paper else heading, justify="right", vertical="bottom")
    for label, pairs in rows.items():
        cells = []
        for (paper, ours), has_paper in zip(pairs, printed, strict=True):
            cells += [paper, ours] if has_paper else [ours]
        table.add_row(label, *cells)
    return table


def seconds(time_s: float) -> str:
    """A time that may be infinite, to three digits or the second.

    >>> seconds(7.25), seconds(1234.5), seconds(math.inf)
    ('7.25', '1234', 'never')
    """
    if math.isinf(time_s):
        return "never"
    return f"{time_s:.3g}" if time_s < 100 else f"{time_s:.0f}"


def ratio(one: float, other: float) -> str:
    """Of two such; "-" where there is none."""
    return f"{one / other:.2f}" if math.isfinite(one) and math.isfinite(other) else "-"

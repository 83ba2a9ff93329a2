"""Types for exhibits, which are reproductions of the papers' tables and figures."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich import box
from rich.table import Table

from paceline.cli.console import TellShare
from paceline.errors import unknown_name

from .papers import PAPERS, Quote
from .verdicts import Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:  # matplotlib is loaded when something is drawn, if it is installed
    Axes = Figure = object


class Options(msgspec.Struct, frozen=True):
    """Options for making an exhibit.

    Attributes:
        quick: True to do only enough work to check that the code runs. The results are then meaningless.
        seeds: number of seeds for training runs.
        data: folder with the published data sets, from the option `--data`; None to train the stand-ins.
        again: True to train only at the common learning rate, which is enough to compare with a kept result.
    """

    quick: bool = False
    seeds: int = 8
    data: Path | None = None
    again: bool = False

    @property
    def sweeps(self) -> bool:
        """True if many learning rates are tried. On the published data, this would take too long."""
        return not self.quick and not self.again and self.data is None


class Made(msgspec.Struct, frozen=True):
    """The results of reproducing a table or figure.

    Attributes:
        tables: tables with the paper's numbers beside ours.
        figure: function that draws the plot. Matplotlib is imported only when this function is called.
        data: the plotted numbers, which are written to a JSON file.
        notes: findings and explanations, as sentences.
        measured: key of a number of the paper (see `Paper.claims`) -> what was measured for it. If the same number
            was measured in several ways, the first way follows the paper.
    """

    tables: Sequence[Table]
    figure: Callable[[], Figure]
    data: Any
    notes: Sequence[str] = ()
    measured: Mapping[str, Measured | Sequence[Measured]] = {}


class Exhibit(msgspec.Struct, frozen=True, kw_only=True):
    """A table or figure of a paper, and the function that reproduces it.

    Attributes:
        name: name on the command line.
        title: what the exhibit shows, in one line.
        differs: how the reproduction differs from the paper, mainly in the network and the data.
        minutes: approximate time in minutes for making the exhibit.
        make: function that makes the exhibit, given the options and a progress callback.
        numbers: the tables and figures that it reproduces, as listed in `papers.toml`; by default, the one in its name.
        stand_in: True if other networks, data or machines stand in for those of the paper.
        with_data: how the reproduction differs if the published data are given; "" if no data are used.
        trains_on: names of the workloads that it trains if the data are given, in `reproductions.problems.WORKLOADS`.
    """

    name: str
    title: str
    differs: str
    minutes: float
    make: Callable[[Options, TellShare], Made]
    numbers: tuple[str, ...] = ()
    stand_in: bool = True
    with_data: str = ""
    trains_on: tuple[str, ...] = ()

    @property
    def covers(self) -> tuple[str, ...]:
        """The tables and figures that it reproduces: "ElasticBSP, Fig. 4"."""
        kind, number = re.findall(r"(fig|table)(\w+)$", self.name)[0] if not self.numbers else ("", "")
        numbers = self.numbers or (f"{'Fig.' if kind == 'fig' else 'Table'} {number}",)
        return tuple(f"{PAPERS[self.paper].name}, {each}" for each in numbers)

    @property
    def source(self) -> str:
        """The paper and its tables and figures: "SpecSync (2018), Fig. 12 and Fig. 13"."""
        numbers = dict.fromkeys(each.split(", ")[1] for each in self.covers)
        return f"{PAPERS[self.paper]}, {' and '.join(numbers)}"

    @property
    def paper(self) -> str:
        """The prefix of the paper, under which it stands in `papers.toml`. ZipLine is part of ElasticBSP's paper."""
        prefix = self.name.partition("-")[0]
        return "elasticbsp" if prefix == "zipline" else prefix

    def differing(self, options: Options) -> str:
        """Return how the reproduction differs from the paper with these options."""
        return self.differs if options.data is None else self.with_data


_plain = partial(Table, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)


def plain_table(title: str, first: str, *others: str) -> Table:
    """Return a table with these headings. Names are aligned on the left, numbers on the right."""
    table = _plain(title=title)
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="left" if heading in ("cluster", "sync model") else "right")
    return table


def beside(
    title: str, rows: Mapping[str, Sequence[tuple[Quote | None, str]]], columns: Sequence[str]
) -> Table:
    """Return a table with the paper's numbers beside ours.

    Args:
        title: title of the table.
        rows: label of a row -> one pair (the paper's number, our number) for each column. None means that the paper
            has no such number. If the paper has no number in a column, the column shows only our numbers.
        columns: headings of the columns.
    """
    table = _plain(title=title, collapse_padding=True)
    table.add_column("", overflow="fold", vertical="bottom", min_width=8)
    printed = [any(pairs[index][0] is not None for pairs in rows.values()) for index in range(len(columns))]
    for heading, has_paper in zip(columns, printed, strict=True):
        if has_paper:
            table.add_column(f"{heading}\npaper", justify="right")
        table.add_column("ours" if has_paper else heading, justify="right", vertical="bottom")
    for label, pairs in rows.items():
        cells = []
        for (paper, ours), has_paper in zip(pairs, printed, strict=True):
            cells += ["-" if paper is None else str(paper), ours] if has_paper else [ours]
        table.add_row(label, *cells)
    return table


def known(what: str, names: Iterable[str], every: Iterable[str]) -> list[str]:
    """Return the given names, in the order of `every`; all names if none is given.

    Raises:
        ConfigurationError: a name is unknown.
    """
    wanted, every = list(names), list(every)
    for name in wanted:
        if name not in every:
            raise unknown_name(what, name, every)
    return [name for name in every if not wanted or name in wanted]


def seconds(time_s: float) -> str:
    """Format a time in seconds: three significant digits below 100 s, else a whole number; "never" for infinity.

    >>> seconds(7.25), seconds(1234.5), seconds(math.inf)
    ('7.25', '1234', 'never')
    """
    if math.isinf(time_s):
        return "never"
    return f"{time_s:.3g}" if time_s < 100 else f"{time_s:.0f}"

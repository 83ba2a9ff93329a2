"""A table that fits the width that there is: less important columns are left out, and texts end after a word."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from .words import shortened

__all__ = ["Cell", "Column", "FittedTable"]

GAP = 2  # number of cells between two columns

Cell = tuple[str, str]
"""A text, and its style."""


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: its heading.
        kind: "number" for figures, which are aligned on the right and never shortened, else "text".
        rank: the columns with the lowest ranks are left out first; None to keep the column.
        least: width to which its texts may be shortened. Default: the width of their first words.
        reserved: width that it has at least if it is shown, so that columns do not come and go with its texts.
    """

    name: str
    kind: Literal["text", "number"] = "text"
    rank: int | None = None
    least: int | None = None
    reserved: int = 0


class FittedTable:
    """A table without borders whose lines are not longer than the console is wide, if possible.

    Args:
        columns: the columns.
        rows: for each row, a cell per column.

    Example:
        >>> table = FittedTable(
        ...     [Column("worker", "number"), Column("waits for", rank=1)], [(("0", ""), ("a slow worker", ""))]
        ... )
        >>> [line.plain for line in table.lines(18)]
        ['worker  waits for', '     0  a slow…']
        >>> [line.plain for line in table.lines(12)]
        ['worker', '     0']
    """

    def __init__(self, columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> None:
        self._columns = columns
        self._rows = list(rows)
        self._texts = [[column.name, *(row[k][0] for row in self._rows)] for k, column in enumerate(columns)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.lines(options.max_width)

    def lines(self, width: int) -> list[Text]:
        """Return the lines of the table for a console of this width."""
        widths = self._widths(width)
        heading: list[Cell] = [(column.name, "bold") for column in self._columns]
        return [self._line(row, widths) for row in (heading, *self._rows)]

    def _widths(self, width: int) -> dict[int, int]:
        """Return the widths of the columns that are shown."""
        widths = {k: self._least(k) for k in range(len(self._columns))}
        ranks = [(column.rank, k) for k, column in enumerate(self._columns) if column.rank is not None]
        for _, k in sorted(ranks):
            if _total(widths) <= width:
                break
            del widths[k]
        for k in widths:
            natural = max(map(cell_len, self._texts[k]))
            widths[k] += max(min(natural - widths[k], width - _total(widths)), 0)
        return widths

    def _least(self, k: int) -> int:
        column, texts = self._columns[k], self._texts[k]
        if column.kind == "number":
            return max(map(cell_len, texts))
        shortest = max(map(_first_word, texts))
        if column.least is not None:
            shortest = max(min(max(map(cell_len, texts)), column.least), shortest)
        return max(cell_len(column.name), column.reserved, shortest)

    def _line(self, row: Sequence[Cell], widths: dict[int, int]) -> Text:
        line = Text(no_wrap=True, overflow="ignore")
        for place, (k, width) in enumerate(widths.items()):
            text, style = row[k]
            if self._columns[k].kind == "text":
                text = shortened(text, width)
            padding = " " * (width - cell_len(text))
            line.append(" " * (GAP if place else 0))
            cells = (padding, text) if self._columns[k].kind == "number" else (text, padding)
            for cell in cells:
                line.append(cell, style if cell is text else "")
        line.rstrip()
        return line


def _total(widths: dict[int, int]) -> int:
    """Return the width of a table whose columns have these widths."""
    return sum(widths.values()) + GAP * max(len(widths) - 1, 0)


def _first_word(text: str) -> int:
    """Return the least width to which a text can be shortened without cutting its first word."""
    first, _, rest = text.partition(" ")
    return cell_len(first.rstrip(",;:")) + 1 if rest else cell_len(text)

"""What the three papers print: the numbers that are quoted, and all of their tables and figures.

The file `papers.toml` is the only place that contains these numbers. Exhibits, benchmarks and the tests of the
documentation take them from here.

>>> from reproductions.papers import ELASTIC_BSP, FLUENT_PS
>>> quote = FLUENT_PS.numbers["fewer-delayed-pulls-soft"]
>>> str(quote), quote.value, quote.where
('up to 97.1 %', 97.1, 'section IV-B4, Fig. 9')
>>> str(ELASTIC_BSP.tables["table3"].cell("grid-scan", "100, 15"))
'1,345'
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

__all__ = ["ELASTIC_BSP", "FLUENT_PS", "PAPERS", "SPEC_SYNC", "Listed", "Paper", "Quote", "QuotedTable"]


class Quote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number that a paper prints.

    Attributes:
        where: the section, table or figure that prints it.
        value: the number.
        means: what it measures, and for which network, data and number of workers.
        unit: "x" for a ratio, "%" for a percentage, another unit, or "" for a count or a fraction.
        bound: the paper's own restriction; "" if it states the number without one.
    """

    where: str
    value: float
    means: str
    unit: str = ""
    bound: Literal["", "up to", "over", "above", "about", "below"] = ""

    def __str__(self) -> str:
        """Return the number with its bound and its percent sign, but without any other unit."""
        percent = " %" if self.unit == "%" else ""
        return f"{self.bound} {self.value:,.10g}{percent}".lstrip()


class QuotedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of the same unit that a paper prints in rows and columns.

    Attributes:
        where: the table or figure.
        means: what the numbers measure.
        columns: names of the columns.
        rows: name of a row -> one value for each column.
        unit: see `Quote`.
    """

    where: str
    means: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[float, ...]]
    unit: str = ""

    def __post_init__(self) -> None:
        for name, values in self.rows.items():
            if len(values) != len(self.columns):
                raise ValueError(
                    f"{self.where}: row {name!r} has {len(values)} values for {len(self.columns)} columns."
                )

    def cell(self, row: str, column: str) -> Quote:
        """Return one number of the table.

        Raises:
            KeyError: there is no such row.
            ValueError: there is no such column.
        """
        value = self.rows[row][self.columns.index(column)]
        return Quote(where=self.where, value=value, means=f"{self.means}: {row}, {column}", unit=self.unit)

    def cells(self) -> list[Quote]:
        """Return all numbers, row by row."""
        return [self.cell(row, column) for row in self.rows for column in self.columns]


class Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table or figure of a paper.

    Attributes:
        shows: what it shows.
        only_quoted: why it is not to be reproduced; "" if it is.
    """

    shows: str
    only_quoted: str = ""


class Paper(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A paper, the numbers quoted from it, and the list of its tables and figures.

    Attributes:
        name: name of the system that the paper describes.
        year: year of publication.
        title: title of the paper.
        authors: family names, in the paper's order.
        published: journal or conference.
        numbers: quoted numbers by name.
        tables: quoted tables by name.
        exhibits: tables and figures by the paper's own numbering.
    """

    name: str
    year: int
    title: str
    authors: tuple[str, ...]
    published: str
    numbers: dict[str, Quote]
    tables: dict[str, QuotedTable]
    exhibits: dict[str, Listed]

    def __str__(self) -> str:
        """Return the name and the year."""
        return f"{self.name} ({self.year})"

    def quotes(self) -> list[Quote]:
        """Return all quoted numbers, those in tables included."""
        return [*self.numbers.values(), *(quote for table in self.tables.values() for quote in table.cells())]


PAPERS: dict[str, Paper] = msgspec.toml.decode(
    Path(__file__).with_name("papers.toml").read_bytes(), type=dict[str, Paper]
)
"""All papers by the prefix that their exhibits have on the command line."""

ELASTIC_BSP, SPEC_SYNC, FLUENT_PS = (PAPERS[name] for name in ("elasticbsp", "specsync", "fluentps"))

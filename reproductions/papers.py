"""The numbers that are quoted from the three papers, and the list of all tables and figures of these papers.

The file `papers.toml` is the only place that contains these numbers. Exhibits, benchmarks and the tests of the
documentation take the numbers from here.

>>> from reproductions.papers import ELASTIC_BSP, FLUENT_PS
>>> quote = FLUENT_PS.numbers["fewer-delayed-pulls-soft"]
>>> str(quote), quote.value, quote.where
('up to 97.1 %', 97.1, 'sections III-E1 and IV-B4, Fig. 9')
>>> str(ELASTIC_BSP.tables["table3"].cell("grid-scan", "100, 15"))
'1,345'
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import msgspec

ABOUT = 0.1
"""Relative distance up to which a number is "about" another number."""


Bound = Literal["", "up to", "over", "above", "at least", "about", "below", "at most"]


class Quote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number that a paper prints.

    Attributes:
        where: the section, table or figure that prints it.
        value: the number.
        means: what the number measures, and for which network, data and number of workers.
        unit: "x" for a ratio, "%" for a percentage, another unit, or "" for a count or a fraction.
        bound: the paper's own restriction; "" if it states the number without one.
        neutral: the value that would mean that there is no effect; given if the number is an effect with the unit "%".
        absolute: True if the number depends on the paper's machines and data, so that no stand-in can confirm or
            contradict it.
        setting: True if the number is no result, but a setting or an example that the paper chose.
        not_made: why no exhibit measures the number; "" if an exhibit does or should.
    """

    where: str
    value: float
    means: str
    unit: str = ""
    bound: Bound = ""
    neutral: float | None = None
    absolute: bool = False
    setting: bool = False
    not_made: str = ""

    @property
    def no_effect(self) -> float | None:
        """The value that would mean that there is no effect: 1 for a ratio; None if the number is not an effect."""
        return 1.0 if self.unit == "x" and self.neutral is None else self.neutral

    @property
    def range(self) -> tuple[float, float]:
        """The values for which the paper's number stands: those with the same printed digits, or within its bound.

        >>> Quote(where="Fig. 1", value=1.77, means="speed").range
        (1.765, 1.775)
        """
        decimals = len(f"{self.value:.10g}".partition(".")[2])
        half = ABOUT * abs(self.value) if self.bound == "about" else 0.5 * 10.0**-decimals
        least, most = round(self.value - half, 10), round(self.value + half, 10)
        if self.bound in ("over", "above", "at least"):
            return self.value, math.inf
        if self.bound == "below":
            return -math.inf, self.value
        if self.bound == "at most":
            return -math.inf, most
        return least, math.inf if self.bound == "up to" else most

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
        bound: see `Quote`.
        relative_to: row or column with whose numbers all others are compared, because only their ratios can be expected
            to be the same on other machines; "" to compare the numbers themselves.
        absolute: see `Quote`.
        setting: see `Quote`.
        not_made: see `Quote`; it concerns the numbers that are not measured.
    """

    where: str
    means: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[float, ...]]
    unit: str = ""
    bound: Bound = ""
    relative_to: str = ""
    absolute: bool = False
    setting: bool = False
    not_made: str = ""

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
        return Quote(
            where=self.where,
            value=value,
            means=f"{self.means}: {row}, {column}",
            unit=self.unit,
            bound=self.bound,
            absolute=self.absolute,
            setting=self.setting,
            not_made=self.not_made,
        )

    def base(self, row: str, column: str) -> Quote | None:
        """Return the number with which a cell is compared; None if the cell is not compared, or only with itself."""
        if not self.relative_to or self.relative_to in (row, column):
            return None
        in_rows = self.relative_to in self.rows
        return self.cell(self.relative_to if in_rows else row, column if in_rows else self.relative_to)

    def claims(self) -> dict[str, Quote]:
        """Return the claims of the table: its numbers or, if these are compared with each other, their ratios."""
        found = {}
        for row in self.rows:
            for column in self.columns:
                cell, base = self.cell(row, column), self.base(row, column)
                if base is not None:
                    found[f"{row}, {column}"] = _relative(cell, base, self.relative_to)
                elif not self.relative_to:
                    found[f"{row}, {column}"] = cell
        return found


class Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table or figure of a paper.

    Attributes:
        shows: what it shows.
        only_quoted: why it is not to be reproduced; "" if it is to be reproduced.
    """

    shows: str
    only_quoted: str = ""


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An algorithm or theorem of a paper.

    Attributes:
        says: what it says.
        found: what the tests have found about this statement.
        tests: the file with these tests.
    """

    says: str
    found: str
    tests: str


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
        statements: algorithms and theorems by the paper's own numbering.
    """

    name: str
    year: int
    title: str
    authors: tuple[str, ...]
    published: str
    numbers: dict[str, Quote]
    tables: dict[str, QuotedTable]
    exhibits: dict[str, Listed]
    statements: dict[str, Statement]

    def __str__(self) -> str:
        """Return the name and the year."""
        return f"{self.name} ({self.year})"

    def claims(self) -> dict[str, Quote]:
        """Return the results that the paper claims, by key: the name of a number, or "table: row, column"."""
        found = {
            **self.numbers,
            **{
                f"{name}: {place}": quote
                for name, table in self.tables.items()
                for place, quote in table.claims().items()
            },
        }
        return {key: quote for key, quote in found.items() if not quote.setting}


def _relative(cell: Quote, base: Quote, name: str) -> Quote:
    """Return the ratio of two numbers of a table, rounded to three significant digits."""
    ratio = cell.value / base.value
    return Quote(
        where=cell.where,
        value=float(f"{ratio:.3g}"),
        means=f"{cell.means}, relative to {name}",
        unit="x",
        not_made=cell.not_made,
    )


PAPERS: dict[str, Paper] = msgspec.toml.decode(
    Path(__file__).with_name("papers.toml").read_bytes(), type=dict[str, Paper]
)
"""All papers by the prefix that their exhibits have on the command line."""

ELASTIC_BSP, SPEC_SYNC, FLUENT_PS = (PAPERS[name] for name in ("elasticbsp", "specsync", "fluentps"))

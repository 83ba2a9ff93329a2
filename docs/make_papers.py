"""Write `docs/papers.md`, what the papers report and what is reproduced: `python docs/make_papers.py`.

The numbers come from `reproductions/papers.toml`, and the states from the exhibits in `reproductions`. With --check,
nothing is written, and the exit code is 0 if the page is up to date, 1 otherwise.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `reproductions` is not installed

from reproductions.catalogue import coverage  # noqa: E402
from reproductions.papers import PAPERS, Paper, Quote  # noqa: E402

TARGET = ROOT / "docs" / "papers.md"

HEAD = """\
# What the papers report

Paceline implements the systems of three papers. This page lists the numbers that our exhibits and our documentation
quote from them, and all of their tables and figures. It does not contain results of ours:
[the page on the papers' claims](papers-claims.md) compares some of them with the papers' claims, and the command

    python -m reproductions NAME...

reproduces tables and figures, and shows the papers' numbers beside ours. *On a stand-in* means that another network,
other data or a simulated cluster takes the place of the paper's. Names with a link have a kept result: a text with
the command, the time that it took and the machine, and next to it the numbers and a picture.
"""


def text() -> str:
    """Return the page."""
    return "\n".join([HEAD, *(line for paper in PAPERS.values() for line in section(paper))])


def section(paper: Paper) -> Iterator[str]:
    """Yield the lines of the section on a paper."""
    yield f"## {paper}"
    yield ""
    yield textwrap.fill(f"{', '.join(paper.authors)}: *{paper.title}*. {paper.published}.", 118)
    yield ""
    yield from table(
        ("reported", "unit", "what it measures", "where"),
        ((str(quote), unit(quote), quote.means, quote.where) for quote in paper.numbers.values()),
    )
    tables = dict.fromkeys(each.where for each in paper.tables.values())
    yield f"Numbers are also quoted from {', '.join(tables)}."
    yield ""
    yield from table(
        ("table or figure", "shows", "state", "name"),
        (
            (
                row.item.removeprefix(f"{paper.name}, "),
                row.shows,
                row.state,
                ", ".join(linked(exhibit.name) for exhibit in row.exhibits),
            )
            for row in coverage()
            if row.item.startswith(f"{paper.name}, ")
        ),
    )


def linked(name: str) -> str:
    """Return the name of an exhibit, with a link to the kept result of a full run if there is one."""
    kept = f"reproductions/results/{name}.txt"
    return f"[`{name}`](../{kept})" if (ROOT / kept).exists() else f"`{name}`"


def unit(quote: Quote) -> str:
    """Return the unit, unless it is already part of the text of the quote."""
    return {"%": "", "x": "times"}.get(quote.unit, quote.unit)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table and an empty line."""
    yield f"| {' | '.join(headings)} |"
    yield "|---" * len(headings) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def main() -> int:
    """Write the page or, with --check, only check it. Return the exit code."""
    if "--check" in sys.argv[1:]:
        return TARGET.read_text() != text()
    TARGET.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())

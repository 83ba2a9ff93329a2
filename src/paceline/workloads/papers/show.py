"""`paceline paper`: which exhibits there are, and making some of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from ...errors import unknown_name
from ...report.canvas import save
from ..zipline_bench import Tell
from . import EXHIBITS
from .exhibit import Exhibit, Options

__all__ = ["chosen", "list_table", "make"]


def chosen(names: Sequence[str]) -> list[Exhibit]:
    """The exhibits of these names; "all" for every one. Raises `ConfigurationError` for a name that there is not."""
    if list(names) == ["all"]:
        return list(EXHIBITS.values())
    for name in names:
        if name not in EXHIBITS:
            raise unknown_name("exhibit", name, [*EXHIBITS, "all"])
    return [EXHIBITS[name] for name in names]


def list_table() -> Table:
    """All of them, with what they show and how long they take."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("shows")
    table.add_column("minutes", justify="right")
    for exhibit in EXHIBITS.values():
        minutes = f"{exhibit.minutes:g}" if exhibit.minutes >= 1 else "< 1"
        table.add_row(exhibit.name, f"{exhibit.source}: {exhibit.title}", minutes)
    return table


def make(exhibit: Exhibit, options: Options, out: Path, console: Console, tell: Tell) -> None:
    """Make one: print its tables, what differs and what was found; keep its numbers and its plot."""
    made = exhibit.make(options, tell)
    console.print(f"[bold]{exhibit.source}[/]: {exhibit.title}", highlight=False)
    for table in made.tables:
        console.print(table)
    for note in made.notes:
        console.print(f"- {note}", highlight=False, markup=False)
    console.print(f"- What differs: {exhibit.differs}", "", highlight=False, markup=False)
    kept = {
        "exhibit": exhibit.name,
        "source": exhibit.source,
        "differs": exhibit.differs,
        "notes": made.notes,
        "tables": [_plain(table) for table in made.tables],
        "data": made.data,
    }
    (out / f"{exhibit.name}.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n"
    )
    save(made.figure(), out / f"{exhibit.name}.png")


def _plain(table: Table) -> dict[str, object]:
    """A table as text: title, headings, rows."""
    columns = [list(map(str, column.cells)) for column in table.columns]
    return {
        "title": str(table.title),
        "columns": [str(column.header).replace("-\n", "-").replace("\n", " ") for column in table.columns],
        "rows": [list(row) for row in zip(*columns, strict=True)],
    }

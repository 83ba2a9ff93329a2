"""All exhibits (the reproduced tables and figures), with functions that list and make them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from paceline.cli.progress import TellShare
from paceline.errors import unknown_name
from paceline.report.canvas import save

from . import claims, elastic_bsp, fluent_ps, model_map, spec_sync, zipline
from .exhibit import Exhibit, Options

__all__ = ["EXHIBITS", "chosen", "list_table", "make"]

EXHIBITS: dict[str, Exhibit] = {
    exhibit.name: exhibit
    for module in (zipline, elastic_bsp, spec_sync, fluent_ps, claims, model_map)
    for exhibit in module.EXHIBITS
}
"""All exhibits by name, grouped by paper."""


def chosen(names: Sequence[str]) -> list[Exhibit]:
    """Return the exhibits with these names, or all exhibits if the only name is "all".

    Raises:
        ConfigurationError: a name is unknown.
    """
    if list(names) == ["all"]:
        return list(EXHIBITS.values())
    for name in names:
        if name not in EXHIBITS:
            raise unknown_name("exhibit", name, [*EXHIBITS, "all"])
    return [EXHIBITS[name] for name in names]


def list_table() -> Table:
    """Return a table of all exhibits: what each exhibit shows and how long it takes to make."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("shows")
    table.add_column("minutes", justify="right")
    for exhibit in EXHIBITS.values():
        minutes = f"{exhibit.minutes:g}" if exhibit.minutes >= 1 else "< 1"
        table.add_row(exhibit.name, f"{exhibit.source}: {exhibit.title}", minutes)
    return table


def make(exhibit: Exhibit, options: Options, out: Path, console: Console, tell: TellShare) -> None:
    """Make an exhibit: print its tables and notes, and write its numbers and its plot to the folder `out`."""
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
    """Return the title, the headings and the rows of a table as text."""
    columns = [list(map(str, column.cells)) for column in table.columns]
    return {
        "title": str(table.title),
        "columns": [str(column.header).replace("-\n", "-").replace("\n", " ") for column in table.columns],
        "rows": [list(row) for row in zip(*columns, strict=True)],
    }

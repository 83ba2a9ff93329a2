"""All exhibits (the reproduced tables and figures), with functions that list and make them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from paceline.cli.console import TellShare
from paceline.errors import ConfigurationError, unknown_name
from paceline.look.timelines import save

from . import barriers, elastic_bsp, fluent_ps, spec_sync, verdicts, zipline
from .exhibit import Exhibit, Made, Options, plain_table
from .papers import PAPERS, Listed
from .problems import problem, size
from .result_file import machine
from .verdicts import Kept, Measured, judged, with_unit

TEXT_WIDTH = 118  # columns of the text files

EXHIBITS: dict[str, Exhibit] = {
    exhibit.name: exhibit
    for module in (barriers, zipline, elastic_bsp, spec_sync, fluent_ps)
    for exhibit in module.EXHIBITS
}
"""All exhibits by name, grouped by paper."""


class Row(msgspec.Struct, frozen=True):
    """A table or figure of a paper, and whether it is reproduced.

    Attributes:
        item: the paper's name and number: "ElasticBSP, Fig. 4".
        shows: what it shows.
        state: "reproduced", "reproduced on a stand-in", "quoted only: " with the reason, or "not yet".
        exhibits: the exhibits that reproduce it.
    """

    item: str
    shows: str
    state: str
    exhibits: tuple[Exhibit, ...] = ()


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


def require_data(exhibits: Sequence[Exhibit], data: Path) -> None:
    """Check that the option `--data` has an effect, and that the data can be read, before anything is trained.

    Raises:
        ConfigurationError: an exhibit trains on no published data, or a data set is missing or incomplete.
    """
    for exhibit in exhibits:
        if not exhibit.trains_on:
            able = ", ".join(name for name, each in EXHIBITS.items() if each.trains_on)
            raise ConfigurationError(
                f"{exhibit.name} trains on no published data. Leave out --data, or choose among: {able}."
            )
    for workload in dict.fromkeys(name for exhibit in exhibits for name in exhibit.trains_on):
        learned = problem(workload, data)
        if (found := size(learned.images().train)) != learned.train_size:
            raise ConfigurationError(
                f"{workload}: {data} contains {found:,} training samples, expected {learned.train_size:,}. Unpack the "
                "whole data set."
            )


def coverage() -> list[Row]:
    """Return a row for each table and figure of the papers, in the order of the papers."""
    return [
        _row(f"{paper.name}, {number}", listed)
        for paper in PAPERS.values()
        for number, listed in paper.exhibits.items()
    ]


def _row(item: str, listed: Listed) -> Row:
    exhibits = tuple(exhibit for exhibit in EXHIBITS.values() if item in exhibit.covers)
    if exhibits:
        stand_in = all(exhibit.stand_in for exhibit in exhibits)
        state = "reproduced on a stand-in" if stand_in else "reproduced"
    else:
        state = f"quoted only: {listed.only_quoted}" if listed.only_quoted else "not yet"
    return Row(item, listed.shows, state, exhibits)


def list_tables() -> list[Table]:
    """Return a table of the papers' tables and figures with their states, and a table of numbers with verdicts."""
    papers = _list("table or figure", "shows", "state", "name", "minutes")
    for row in coverage():
        names = "\n".join(exhibit.name for exhibit in row.exhibits)
        times = "\n".join(_minutes(exhibit) for exhibit in row.exhibits)
        papers.add_row(row.item, row.shows, row.state, names, times)
    numbers = _list("number", "paper", "ours, with its interval", "verdict", "name")
    for prefix, paper in PAPERS.items():
        for each in judged(prefix):
            means = f"{paper.name}: {each.quote.means}"
            ours = with_unit(each.ours, each.quote)
            numbers.add_row(means, str(each.quote), ours, str(each.verdict), each.exhibit)
    return [papers, numbers]


def _list(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in headings:
        table.add_column(
            heading, no_wrap=heading == "name", justify="right" if heading == "minutes" else "left"
        )
    return table


def _minutes(exhibit: Exhibit) -> str:
    return f"{exhibit.minutes:g}" if exhibit.minutes >= 1 else "< 1"


def make(exhibit: Exhibit, options: Options, out: Path, console: Console, tell: TellShare) -> None:
    """Make an exhibit, print it, and write it to the folder `out`: as text, its numbers as JSON, and its plot."""
    begun_s = time.monotonic()
    made = exhibit.make(options, tell)
    run = {
        "command": _command(exhibit, options),
        "seconds": round(time.monotonic() - begun_s),
        "machine": machine(),
    }
    with (out / f"{exhibit.name}.txt").open("w") as file:
        for each in (console, Console(file=file, width=TEXT_WIDTH)):
            _print(exhibit, exhibit.differing(options), made, each)
        file.write("{command}\n{seconds} s on {machine}\n".format(**run))
    kept = {
        "exhibit": exhibit.name,
        "source": exhibit.source,
        **run,
        "differs": exhibit.differing(options),
        "notes": made.notes,
        "measured": {
            f"{exhibit.paper}/{key}": [found] if isinstance(found, Measured) else found
            for key, found in made.measured.items()
        },
        "tables": [_plain(table) for table in made.tables],
        "data": made.data,
    }
    (out / f"{exhibit.name}.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n"
    )
    save(made.figure(), out / f"{exhibit.name}.png")


def compared(exhibit: Exhibit, folder: Path) -> tuple[Table, bool]:
    """Compare an exhibit that was made again with its kept result, number by number.

    Args:
        exhibit: the exhibit.
        folder: where the exhibit was made.

    Returns:
        A table, and True if every value lies in its kept interval.

    Raises:
        ConfigurationError: there is no kept result.
    """
    kept, again = (Kept.read(file) for file in (require_kept(exhibit), folder / f"{exhibit.name}.json"))
    identical = kept.tables == again.tables
    table = plain_table(
        f"{exhibit.name}: {'identical tables' * identical}", "number", "kept", "again", "inside"
    )
    inside = {key: kept.measured[key][0].holds(found[0]) for key, found in again.measured.items()}
    for key, found in again.measured.items():
        table.add_row(key, str(kept.measured[key][0]), str(found[0]), "yes" if inside[key] else "NO")
    return table, all(inside.values())


def require_kept(exhibit: Exhibit) -> Path:
    """Return the file with the kept numbers of an exhibit.

    Raises:
        ConfigurationError: there is no such file.
    """
    if not (file := verdicts.RESULTS / f"{exhibit.name}.json").exists():
        raise ConfigurationError(f"{exhibit.name} has no kept result to compare with. Leave out --again.")
    return file


def _print(exhibit: Exhibit, differs: str, made: Made, console: Console) -> None:
    console.print(f"[bold]{exhibit.source}[/]: {exhibit.title}", highlight=False)
    for table in made.tables:
        console.print(table)
    for note in made.notes:
        console.print(f"- {note}", highlight=False, markup=False)
    console.print(f"- What differs: {differs}", "", highlight=False, markup=False)


def _command(exhibit: Exhibit, options: Options) -> str:
    """Return the command that makes an exhibit with these options."""
    words = ["python -m reproductions", exhibit.name]
    words += ["--quick"] * options.quick
    words += ["--again"] * options.again
    words += [f"--seeds {options.seeds}"] * (options.seeds != Options().seeds)
    words += [f"--data {options.data}"] * (options.data is not None)
    return " ".join(words)


def _plain(table: Table) -> dict[str, object]:
    """Return the title, the headings and the rows of a table as text."""
    columns = [list(map(str, column.cells)) for column in table.columns]
    return {
        "title": str(table.title),
        "columns": [str(column.header).replace("-\n", "-").replace("\n", " ") for column in table.columns],
        "rows": [list(row) for row in zip(*columns, strict=True)],
    }

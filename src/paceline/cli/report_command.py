"""`paceline report`: the report of runs as a page, and in short in the terminal."""

from __future__ import annotations

import sys
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from ..errors import ConfigurationError
from ..files import Unfinished
from ..launcher.live_run.reporting import REPORT
from ..launcher.terminal.output import plain_console, print_sentence
from .console import interruptible
from .options import AsJson
from .run_folders import require_no_folder_of_runs

if TYPE_CHECKING:
    from ..report.run_report import RunReport

__all__ = ["report"]

TELL_S = 2.0  # time after which the user is told what takes so long


def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR...",
            help="Directories of runs. Several runs are compared on one page.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="File for the page. Default: report.html in the (first) run directory.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write the report of a run as one HTML file, and say what held the run back.

    paceline report runs/20260101-120000
    """
    if as_json and (show or out is not None):
        raise ConfigurationError("--json prints the report, so --out and --open cannot be used with it.")
    with interruptible("no report was written"):
        from ..report.page import page_of
        from ..report.run_reading import ReportReader

        for run_dir in run_dirs:
            require_no_folder_of_runs(run_dir, "report", ", or several to compare them")
            ReportReader(run_dir)  # raises an error unless the directory contains a run
        path = run_dirs[0] / REPORT if out is None else out
        if not as_json:
            _require_file(path)
        tell = _Teller()
        reports = [_read(run_dir, tell) for run_dir in run_dirs]
        if as_json:
            encoded = msgspec.json.encode(reports[0] if len(reports) == 1 else reports)
            sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")
            return
        try:
            with Unfinished(path) as place:
                place.write_text(page_of(reports), encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"{str(path)!r} cannot be written: {error.strerror or error}. Name another file with --out."
            ) from error
    console = plain_console()
    for each in reports:
        _print(each, console, name=len(reports) > 1)
    print(f"report: {path}")
    if show:
        webbrowser.open(path.resolve().as_uri())


def _print(report: RunReport, console: Console, *, name: bool) -> None:
    """Print what a report begins with."""
    if name:
        print(f"{report.name}:")
    print_sentence(console, report.headline)
    for number, cause in enumerate(report.causes, start=1):
        print_sentence(console, f"{number}. {cause.words}")
        for remedy in cause.remedies:
            print_sentence(console, f"   - {remedy}")


def _read(run_dir: Path, tell: _Teller) -> RunReport:
    from ..report.run_reading import ReportReader
    from ..runtime.run_lock import is_held

    def look() -> bool:
        tell.look(run_dir)
        return False

    return ReportReader(run_dir, is_held).read(hurried=look)


class _Teller:
    """Tells the user which run is being read, if reading takes long."""

    def __init__(self) -> None:
        self._due_s = time.monotonic() + TELL_S
        self._told: set[Path] = set()

    def look(self, run_dir: Path) -> None:
        """Say which run is being read, unless this was said, or reading has only begun."""
        if time.monotonic() > self._due_s and run_dir not in self._told:
            self._told.add(run_dir)
            print(f"reading {run_dir} ...", file=sys.stderr, flush=True)


def _require_file(path: Path) -> None:
    """Raise `ConfigurationError` if the page cannot be written to this file."""
    if path.is_dir():
        raise ConfigurationError(
            f"--out is {str(path)!r}, which is a directory; name a file, such as report.html."
        )
    if not path.parent.is_dir():
        raise ConfigurationError(
            f"--out is {str(path)!r}, but {str(path.parent)!r} does not exist; create it first."
        )

"""The command line: `paceline run`, `simulate`, `sync` and the others. Reads arguments, calls the library, prints.

Bad input is one sentence on standard error and exit code 2, before anything starts. A run that fails shows the
failing process's own traceback, once, and exits with 1. One that comes to its end although workers have crashed, or
whose results are not all where they should be, exits with 3. Ctrl-C ends every process and exits with 130, SIGTERM
with 143.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from .. import __version__
from ..errors import ConfigurationError, PacelineError, UsageError
from .measuring import bench
from .rehearsing import advise, paper, simulate
from .running import RunCommand, demo, run
from .terminal import EXIT_BAD_INPUT, EXIT_FAILED, keep_streams_usable

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Data-parallel PyTorch training on machines that are not equally fast.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _paceline(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def sync(
    name: Annotated[str | None, typer.Argument(help="Show all about this model.", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--list", help="List every model with its parameters.")] = False,
) -> None:
    """The synchronization models: all of them (--list), or everything about one.

    paceline sync pssp
    """
    from ..report.models import describe, models_table, page_text, pages

    if name is None or every:
        Console().print(models_table(pages()), highlight=False, markup=False)
    else:
        Console().print(page_text(describe(name)), highlight=False, markup=False)


# In the order in which the help has them; what follows a script's name is the script's own.
app.command(
    cls=RunCommand, context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False}
)(run)
app.command()(demo)
app.add_typer(bench, name="bench")
app.command()(simulate)
app.command()(advise)
app.command()(paper)
app.command()(sync)


def main() -> None:
    """The entry point: turns errors into one sentence and an exit code."""
    keep_streams_usable()
    try:
        app()
    except (ConfigurationError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except PacelineError as error:
        print(f"error: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        sys.exit(EXIT_FAILED)

"""`paceline check`: what would go wrong if a script ran with several workers."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..launcher.terminal.output import plain_console, print_sentence
from .console import EXIT_FAILED, interruptible, print_json
from .numbers import number_option, whole_number_option
from .options import AsJson

if TYPE_CHECKING:
    from ..inspection.mistakes import Mistake

__all__ = ["check"]

COLORS = {"error": "bold red", "wrong": "bold yellow", "note": "bold cyan"}


def check(
    script: Annotated[Path, typer.Argument(help="Python script that uses paceline.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script.", show_default=False)
    ] = None,
    workers: Annotated[
        int, whole_number_option("--workers", "-n", help="Number of workers, at least 2.")
    ] = 2,
    iterations: Annotated[
        int,
        whole_number_option(
            "--iterations", help="Number of optimizer steps after which the script is ended."
        ),
    ] = 5,
    sync: Annotated[
        str, typer.Option("--sync", metavar="NAME:KEY=VALUE,...", help="Synchronization model.")
    ] = "bsp",
    joint_batch: Annotated[
        bool,
        typer.Option(
            "--joint-batch", help="Divide the batches of the script among the workers, as for paceline run."
        ),
    ] = False,
    timeout: Annotated[
        float,
        number_option(
            "--timeout", metavar="SECONDS", help="Time after which the script is ended in any case."
        ),
    ] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Check whether a script is ready for several workers.

    The script runs for a few iterations, first in one process and then with several workers. Listed are the places
    where workers would do the same work, write the same file, use the wrong length of an epoch, or fail. It also says
    how many samples an update has. The script runs in the current directory, so files that it writes in its first
    iterations are written.

    Exit code: 0 if there is nothing but notes, 1 otherwise.

    paceline check train.py --epochs 10
    """
    with interruptible():
        from ..inspection.check import check_script

        console = plain_console(stderr=True, quiet=as_json)
        with console.status("") if console.is_terminal and not as_json else nullcontext():
            found = check_script(
                script,
                arguments or (),
                workers=workers,
                iterations=iterations,
                sync=sync,
                joint_batch=joint_batch,
                timeout_s=timeout,
                tell=partial(console.print, style="dim", highlight=False, markup=False),
            )
    if as_json:
        print_json(found)
    else:
        _print(found, script, workers, iterations)
    if any(mistake.severity != "note" for mistake in found):
        raise typer.Exit(EXIT_FAILED)


def _print(found: list[Mistake], script: Path, workers: int, iterations: int) -> None:
    console = plain_console(highlight=False)
    for mistake in found:
        place = f"{os.path.relpath(mistake.file)}:{mistake.line}: " if mistake.file else ""
        said = f"{place}{mistake.severity}: {mistake.name}\n  {mistake.text}\n  Fix: {mistake.fix}"
        print_sentence(console, said, marked=(mistake.severity, COLORS[mistake.severity]))
    if not found:
        seen = f"the first {iterations} iterations" if iterations > 1 else "the first iteration"
        print_sentence(console, f"{script}: nothing was found in {seen} with {workers} workers.")

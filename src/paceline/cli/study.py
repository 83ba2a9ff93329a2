"""`paceline study` compares sync models over several seeds. `paceline check` looks for mistakes in a script."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import PacelineError, first_line
from ..start.terminal import plain_console, print_sentence
from .console import (
    EXIT_FAILED,
    EXIT_NOT_ALL_WELL,
    interruptible,
    load_named_models,
    print_json,
    shown_progress,
)
from .options import AsJson, ModelImports, number_option, whole_number_option

if TYPE_CHECKING:
    from ..lab.mistakes import Mistake
    from ..lab.pool import Failure


MOST_SHOWN = 10  # number of failed runs that are shown


def study(
    description: Annotated[
        Path,
        typer.Argument(
            metavar="STUDY.toml",
            help="Description of the study: what to train, models, clusters, seeds, hyper-parameters and target.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder for tables and figures. If the folder contains a part of the same study, the study goes on. "
            "Default: ./runs/ with the name of the file.",
            show_default=False,
        ),
    ] = None,
    processes: Annotated[
        int | None,
        whole_number_option(
            "--processes",
            least=1,
            help="Number of runs at the same time. Default: one for each core.",
            show_default=False,
        ),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Carry out the runs on a Ray cluster instead of on this machine.")
    ] = False,
    imports: ModelImports = None,
) -> None:
    """Compare sync models on simulated clusters over several seeds, with confidence intervals, tables and figures.

    paceline study study.toml --out results
    """
    from ..lab.pool import in_processes, on_ray
    from ..look.timelines import can_draw
    from ..studies.cells import prepare
    from ..studies.description import read_study_file
    from ..studies.study import NO_FIGURES, run_study, write

    load_named_models("", imports)
    found = read_study_file(description, imports or ())
    folder = out or Path("runs", description.stem)
    errors = plain_console(stderr=True)
    if not can_draw():
        print_sentence(errors, f"warning: {NO_FIGURES}")
    with (
        interruptible(
            f"the runs that had ended are kept in {folder}, and the same command continues with the missing runs"
        ),
        shown_progress(errors) as tell,
    ):
        with on_ray(prepare) if ray else in_processes(processes, prepare) as pool:
            result = run_study(found, folder, pool, tell)
        write(result, folder)
    for line in failure_lines(result.failures):
        errors.print(line, highlight=False, soft_wrap=True)
    print(f"{'summary, tables and figures' if can_draw() else 'summary and tables'}: {folder}")
    if result.failures:
        raise typer.Exit(EXIT_NOT_ALL_WELL)


def failure_lines(failures: Sequence[Failure]) -> list[str]:
    """Return the text of the first failure, a line for each of a few more failures, and one line for all the rest.

    The text contains the traceback of the training function. The summary contains all failures.
    """
    texts = [f"failed: {name}: {_text(error)}" for name, error in failures[:MOST_SHOWN]]
    more = len(failures) - len(texts)
    return [
        *texts[:1],
        *(text.partition("\n")[0] for text in texts[1:]),
        *[f"failed: {more} more; summary.md names all failed runs"] * (more > 0),
    ]


def _text(error: BaseException) -> str:
    """Return the message of an exception. It includes the type, unless the exception is one of Paceline's."""
    return str(error) if isinstance(error, PacelineError) else first_line(error)


# -- `paceline check`: what would go wrong if a script ran with several workers ------------------------------

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

    The script runs for a few iterations, first in one process and then with several workers. The command
    lists the places where workers would do the same work, write the same file, use the wrong length of an epoch, or
    fail, and says how many samples an update has. The script runs in the current directory, and writes its files there.

    Exit code: 0 if the list is empty or contains only notes, 1 otherwise.

    paceline check train.py --epochs 10
    """
    with interruptible():
        from ..lab.check import check_script

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
                tell=partial(console.print, style="dim", highlight=False),
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

"""`paceline study`: a comparison of sync models with seeds, intervals, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import PacelineError, first_line
from ..launcher.terminal.output import plain_console, print_sentence
from .console import EXIT_NOT_ALL_WELL, interruptible, load_named_models
from .numbers import whole_number_option
from .options import ModelImports
from .progress_bar import shown_progress

if TYPE_CHECKING:
    from ..studies.work import Failure

__all__ = ["failure_lines", "study"]

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
            help="Folder for tables and figures. If it contains a part of the same study, the study goes on. "
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
    """Compare sync models on simulated clusters, with seeds, intervals, tables and figures for a paper.

    paceline study study.toml --out results
    """
    from ..report.canvas import can_draw
    from ..studies.cells import prepare
    from ..studies.description import read_file
    from ..studies.on_ray import on_ray
    from ..studies.study import NO_FIGURES, carry_out, write
    from ..studies.work import in_processes

    load_named_models("", imports)
    found = read_file(description, imports or ())
    folder = out or Path("runs", description.stem)
    errors = plain_console(stderr=True)
    if not can_draw():
        print_sentence(errors, f"warning: {NO_FIGURES}")
    with (
        interruptible(
            f"the runs that had ended are kept in {folder}, and the same command goes on with them"
        ),
        shown_progress(errors) as tell,
    ):
        with on_ray(prepare) if ray else in_processes(processes, prepare) as pool:
            result = carry_out(found, folder, pool, tell)
        write(result, folder)
    for line in failure_lines(result.failures):
        errors.print(line, markup=False, highlight=False, soft_wrap=True)
    print(f"{'summary, tables and figures' if can_draw() else 'summary and tables'}: {folder}")
    if result.failures:
        raise typer.Exit(EXIT_NOT_ALL_WELL)


def failure_lines(failures: Sequence[Failure]) -> list[str]:
    """Return the text of the first failure, a line for each of some others, and one for the rest.

    The text contains the traceback of the training function. The rest is in the summary.
    """
    texts = [f"failed: {name}: {_text(error)}" for name, error in failures[:MOST_SHOWN]]
    more = len(failures) - len(texts)
    return [
        *texts[:1],
        *(text.partition("\n")[0] for text in texts[1:]),
        *[f"failed: {more} more runs, which summary.md names"] * (more > 0),
    ]


def _text(error: BaseException) -> str:
    """Return the message of an exception, which names its type only if it is not one of Paceline's."""
    return str(error) if isinstance(error, PacelineError) else first_line(error)

"""Makes the table from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from paceline.cli.console import shown_progress

from ..exhibit import known
from .plan import Scope
from .summary import cells_of, findings, tables
from .table import KINDS, make, missing, read, tune


def make_table(
    scope: Scope,
    kinds: Sequence[str],
    seeds: int,
    path: Path,
    console: Console,
    errors: Console,
    *,
    processes: int,
    epochs: int | None = None,
) -> None:
    """Make the runs that a file of results lacks, append the results, and print the summary of the scope.

    Args:
        scope: which part of the table is asked for.
        kinds: some of `KINDS`.
        seeds: number of seeds.
        path: the file.
        console: where the summary is printed.
        errors: where the progress is shown.
        processes: see `make`.
        epochs: number of epochs; None for those of each problem.

    Raises:
        ConfigurationError: a kind is unknown.
    """
    known("kind of hyper-parameters", kinds, KINDS)
    with shown_progress(errors) as tell:
        tell("tuning bsp", 0.0, slow=True)
        tune(scope.problems, path, epochs)
        orders = missing(scope, kinds, seeds, path, epochs)
        make(orders, processes, tell)
    _, results = read(path)
    wanted = {
        key: result
        for key, result in results.items()
        if result.seeds == seeds
        and result.problem in scope.problems
        and result.cluster in scope.clusters
        and result.workers in scope.workers
        and result.model in scope.models
        and (result.hyperparameters in kinds or result.model == "bsp")
    }
    cells = cells_of(wanted)
    for table in tables(cells):
        console.print(table, "")
    for sentence in findings(cells):
        console.print(f"- {sentence}", markup=False, highlight=False)

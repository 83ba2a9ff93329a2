"""`paceline simulate`, `advise` and `paper`: virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..errors import ConfigurationError
from .options import AsJson, Out
from .terminal import counting, interruptible, print_json

__all__ = ["advise", "paper", "simulate"]


def simulate(
    cluster: Annotated[
        str,
        typer.Argument(
            help="A cluster file (TOML), or a cluster of the papers by its name: elastic-bsp, spec-sync-1, ...",
            show_default=False,
        ),
    ],
    sync: Annotated[
        str,
        typer.Option(
            "--sync",
            metavar="NAME:KEY=VALUE,...",
            help="One sync model or several, with commas between: bsp,ssp:staleness=3,elastic-bsp. "
            "'all' are ten, each with its paper's parameters.",
        ),
    ] = "all",
    iterations: Annotated[
        int, typer.Option("--iterations", min=1, help="All models run for as long as bsp takes for so many.")
    ] = 100,
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="KEY=FROM..TO",
            help="Try values of one key instead: lookahead=5..480 (doubling), =1..9:2 (steps of 2) or =1,5,20.",
            show_default=False,
        ),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(
            "--script",
            metavar="'train.py ARGS'",
            help="Train instead: run this script, as paceline run would, in virtual time under each model, and "
            "compare the losses.",
            show_default=False,
        ),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option("--shards", min=1, help="How many. Default: one for each server.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of all that chance decides.")] = 0,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Rehearse a cluster: which sync model computes most there, how stale, who waits. Takes seconds.

    paceline simulate cluster.toml --sync bsp,ssp:staleness=3,elastic-bsp
    """
    import shlex

    from ..workloads import ranking, rehearsal

    if sweep is not None and script is not None:
        raise ConfigurationError("--sweep and --script are two commands; give one of them.")
    try:
        path, *arguments = shlex.split(script or "") or [""]
    except ValueError as error:
        raise ConfigurationError(f"the script {script!r} cannot be read: {error}.") from error
    if script is not None and not Path(path).is_file():
        raise ConfigurationError(f"the script {path!r} is not a file; give the path of a Python file.")
    machines = rehearsal.load_cluster(cluster)
    syncs = ranking.read_syncs(sync)
    swept = ranking.sweep_values(sweep) if sweep is not None else None
    asked = syncs if swept is None else [name for _, name in ranking.variants(syncs, *swept)]
    ranking.require_runnable(machines, asked, shards)
    folder = rehearsal.new_folder(out, "simulate")
    console = Console(quiet=as_json)
    with interruptible("nothing has been kept, and nothing is left running"), counting() as tell:
        rows: Sequence[object]
        if script is not None:
            from ..workloads.rehearsal_training import train_and_compare

            rows = train_and_compare(
                machines,
                syncs,
                Path(path),
                arguments,
                seed=seed,
                shards=shards,
                out=folder,
                console=console,
                tell=tell,
            )
        elif swept is None:
            rows = rehearsal.compare(
                machines,
                syncs,
                iterations=iterations,
                seed=seed,
                shards=shards,
                out=folder,
                console=console,
                tell=tell,
            )
        else:
            rows = rehearsal.explore(
                machines,
                syncs,
                *swept,
                iterations=iterations,
                seed=seed,
                shards=shards,
                out=folder,
                console=console,
                tell=tell,
            )
    if as_json:
        print_json(rows)
    else:
        print(f"pictures and figures: {folder}")


def advise(
    run_dir: Annotated[
        Path, typer.Argument(help="The directory of a finished run.", show_default=False, metavar="RUN_DIR")
    ],
    sync: Annotated[
        str,
        typer.Option(
            "--sync", metavar="NAME:KEY=VALUE,...", help="Which sync models to compare; 'all' are ten."
        ),
    ] = "all",
    as_json: AsJson = False,
) -> None:
    """Which sync model suits the machines of a run: what it recorded, replayed under every model.

    paceline advise runs/20261121-120000
    """
    from ..sim.recorded import read_cluster_of_run
    from ..workloads import advise as advising
    from ..workloads.ranking import read_syncs

    with interruptible("nothing is left running"), counting() as tell:
        report = advising.advise(run_dir, read_syncs(sync), tell)
    if as_json:
        print_json(report)
    else:
        advising.show(report, read_cluster_of_run(run_dir), Console())


def paper(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Which tables and figures: zipline-table3, fluentps-fig9, ..., or all.", show_default=False
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--list", help="List those there are.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="As little as shows that it works; not for figures.")
    ] = False,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Medians over so many runs.")] = 3,
    out: Out = None,
) -> None:
    """Make tables and figures of the papers anew, beside the papers' own numbers.

    paceline paper fluentps-fig9 specsync-fig3
    """
    from ..workloads.papers.exhibit import Options
    from ..workloads.papers.show import chosen, list_table, make
    from ..workloads.rehearsal import new_folder
    from ..workloads.zipline_tables import shown_progress

    if every or not names:
        Console().print(list_table())
        return
    exhibits = chosen(names)
    folder = new_folder(out, "paper")
    errors = Console(stderr=True)
    errors.print(f"about {max(1.0, sum(exhibit.minutes for exhibit in exhibits)):.0f} min on two cores")
    for exhibit in exhibits:
        with interruptible("what was made until now is kept"), shown_progress(errors) as tell:
            make(exhibit, Options(quick=quick, seeds=seeds), folder, Console(), tell)
    print(f"plots and numbers: {folder}")

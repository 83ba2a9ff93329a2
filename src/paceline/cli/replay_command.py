"""`paceline replay`: repeats the decisions of a recorded run, with its own model or with another one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from ..errors import ConfigurationError
from ..launcher.terminal.output import plain_console
from ..report.names import wrappable
from .console import load_named_models, print_json
from .options import AsJson, ModelImports, Trusted
from .run_folders import require_no_folder_of_runs

__all__ = ["replay"]

MOST_SHOWN = 5  # number of differences that are shown of each trace


def replay(
    run_dir: Annotated[
        Path, typer.Argument(help="Directory of a run.", show_default=False, metavar="RUN_DIR")
    ],
    sync: Annotated[
        str | None,
        typer.Option(
            "--sync",
            metavar="NAME:KEY=VALUE,...",
            help="Another synchronization model. It is told what the shards have received, at the recorded times.",
            show_default=False,
        ),
    ] = None,
    imports: ModelImports = None,
    trust: Trusted = False,
    as_json: AsJson = False,
) -> None:
    """Repeat the decisions of a run from its traces: are they the same? What would another model have decided?

    paceline replay runs/20261121-120000
    """
    from ..sync import parse
    from ..trace.kept_models import load_kept_models
    from ..trace.recording import read_run
    from ..trace.redecide import decisions_of, redecide
    from ..trace.replay import replay as replay_trace

    if not run_dir.is_dir():
        wrong = "is not a directory" if run_dir.exists() else "does not exist"
        raise ConfigurationError(f"{str(run_dir)!r} {wrong}; give the directory of a run.")
    require_no_folder_of_runs(run_dir, "replay")
    load_named_models("", imports)
    load_kept_models(run_dir, trust=trust)  # --sync may name its models
    load_named_models(sync or "", None)
    model = None if sync is None else parse(sync)
    traces = read_run(run_dir)
    if not traces:
        raise ConfigurationError(
            f"{run_dir} contains no traces. Give the directory of a run that was made without --traces off."
        )
    console = plain_console(quiet=as_json)
    if model is None:
        differences = {trace.header.recorded_by: replay_trace(trace) for trace in traces}
        entries = sum(len(trace.entries) for trace in traces)
        for host, found in differences.items():
            for difference in found[:MOST_SHOWN]:
                console.print(f"{host}: {difference}", highlight=False, markup=False, soft_wrap=True)
            if len(found) > MOST_SHOWN:
                console.print(f"{host}: {len(found) - MOST_SHOWN} more differences", highlight=False)
        count = sum(map(len, differences.values()))
        console.print(
            f"{entries:,} events at {len(traces)} state machines: "
            + (f"{count:,} decisions differ." if count else "all decisions are the same."),
            highlight=False,
        )
        if as_json:
            print_json({"events": entries, "differences": differences})
        if count:
            raise typer.Exit(1)
        return
    if model.needs_plans or model.at_coordinator() is not None:
        raise ConfigurationError(
            f"{sync} plans for the whole job, and another plan would have changed when workers push. Simulate it "
            f"with the recorded times instead: paceline simulate {run_dir} --sync {sync}"
        )
    shards = [trace for trace in traces if trace.header.host == "shard"]
    if not all(trace.header.is_whole for trace in shards):
        raise ConfigurationError(
            "the beginning of the traces was deleted, so another model has nothing to begin with. Record a run with "
            "--traces full."
        )
    pairs = [(decisions_of(trace), redecide(trace, model)) for trace in shards]
    if as_json:
        print_json([{"recorded": recorded, "other": other} for recorded, other in pairs])
        return
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, collapse_padding=True, title=str(run_dir), title_justify="left"
    )
    table.add_column("shard")
    table.add_column("sync", overflow="fold")
    for heading in (
        "updates",
        "dropped",
        "delayed pulls",
        "waited, s",
        "staleness mean, max",
        "pushes too early",
    ):
        table.add_column(heading, justify="right")
    for index, pair in enumerate(pairs):
        for decided in pair:
            table.add_row(
                str(index),
                wrappable(decided.sync),
                str(decided.updates),
                str(decided.dropped),
                str(sum(decided.delayed.values())),
                f"{sum(decided.waited_s.values()):.3g}",
                f"{decided.mean_staleness:.2f}, {decided.max_staleness}",
                str(sum(decided.too_early.values())),
            )
    console.print(table)
    for index, (recorded, other) in enumerate(pairs):
        first = other.differs_s
        console.print(
            f"shard {index}: {other.sync} decides "
            + ("the same." if first is None else f"otherwise than {recorded.sync}, first at {first:.6g} s."),
            highlight=False,
        )
    early = sorted({worker for _, other in pairs for worker in other.too_early})
    if early:
        console.print(
            f"Under {sync}, workers {', '.join(map(str, early))} would have waited longer, so what they sent later "
            f"would have come later still. To see how the run would have gone on: paceline simulate {run_dir} "
            f"--sync {sync}",
            highlight=False,
            soft_wrap=not console.is_terminal,
        )

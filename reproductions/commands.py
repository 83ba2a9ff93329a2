"""The commands of `python -m reproductions`: tables and figures of the papers, and searches for hyper-parameters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from paceline.cli.console import interruptible, new_folder, run_app, shown_progress
from paceline.cli.options import Out, RunDir, whole_number_option
from paceline.errors import ConfigurationError
from paceline.look.timelines import NO_MATPLOTLIB, can_draw


class _ExhibitsByDefault(TyperGroup):
    """A command group that passes all arguments to `exhibits` unless the first is a command or a help option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["exhibits", *args]
        return super().parse_args(ctx, args)


def only(option: str, what: str, example: str) -> Any:
    """Return an option that may be given several times, to choose some of the available names."""
    return typer.Option(option, help=f"Only this {what}, such as {example}. Default: all of them.")


Results = Annotated[
    Path | None,
    typer.Option(
        "--results",
        help="File to which each result is appended. Results that it already contains are not computed again. "
        "Default: a file in reproductions/results.",
        show_default=False,
    ),
]

app = typer.Typer(
    cls=_ExhibitsByDefault,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    subcommand_metavar="[NAME]... | COMMAND",
    help="Reproduce tables and figures of the papers on this machine, and search for hyper-parameters.\n\n"
    "NAME is the name of a table or figure. `--list` lists the names; `exhibits --help` lists the "
    "options.",
)


def main() -> None:
    """Run the command line."""
    run_app(app)


@app.callback()
def _reproductions() -> None:
    pass


@app.command("exhibits")
def exhibits(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help='Tables and figures to reproduce, for example zipline-table3 or fluentps-fig9, or "all".',
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--list", help="List all tables and figures of the papers, and which are reproduced."),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Do only enough work to check that the code runs. The resulting numbers are meaningless.",
        ),
    ] = False,
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="Train only at the common learning rate, and say whether each number lies in the interval of the kept "
            "result. The exit code is 1 if a number lies outside.",
        ),
    ] = False,
    seeds: Annotated[
        int,
        whole_number_option(
            "--seeds", least=1, help="Number of seeds of each training run. The intervals are over the seeds."
        ),
    ] = 8,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="Folder with the published data sets: cifar-10-batches-bin, cifar-100-binary or imagenet. Train "
            "the paper's network with the paper's protocol, which may take days. By default, small networks on "
            "scikit-learn's digits stand in.",
            show_default=False,
        ),
    ] = None,
    out: Out = None,
) -> None:
    """Reproduce tables and figures of the papers, and show the papers' own numbers beside ours (the default command).

    python -m reproductions fluentps-fig9 specsync-fig3
    """
    from .catalogue import chosen, compared, list_tables, make, require_data, require_kept
    from .exhibit import Options
    from .kept_runs import UNFINISHED, kept_until_complete

    if every or not names:
        for table in list_tables():
            Console().print(table, "")
        return
    wanted = chosen(names)
    if data is not None:
        require_data(wanted, data)
    if again and (quick or data is not None):
        raise ConfigurationError("--again compares with kept results. Leave out --quick and --data.")
    for exhibit in wanted if again else ():
        require_kept(exhibit)
    if not can_draw():
        raise ConfigurationError(NO_MATPLOTLIB)
    folder = new_folder(out, "reproductions")
    errors = Console(stderr=True)
    errors.print(f"about {max(1.0, sum(exhibit.minutes for exhibit in wanted)):.0f} min on two cores")
    kept = f"training runs that had ended have been kept in {UNFINISHED}, and the same command goes on from there"
    with kept_until_complete():
        for exhibit in wanted:
            with interruptible(kept), shown_progress(errors) as tell:
                make(exhibit, Options(quick, seeds, data, again), folder, Console(), tell)
    print(f"plots and numbers: {folder}")
    found = [compared(exhibit, folder) for exhibit in wanted if again]
    for table, _ in found:
        Console().print(table, "")
    if not all(inside for _, inside in found):
        raise typer.Exit(1)


@app.command("evidence")
def evidence(
    study: Annotated[
        str, typer.Argument(help="The problem: quadratics, text-transformer, digits or ratings.")
    ] = "quadratics",
    places: Annotated[list[str] | None, only("--place", "simulated cluster", "'jitter, 4 workers'")] = None,
    contenders: Annotated[list[str] | None, only("--contender", "sync model", "'bsp balanced'")] = None,
    results: Results = None,
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="Print how long the missing results will take, and compute nothing."),
    ] = False,
) -> None:
    """Compare the sync models, with 95 % intervals: tune each model, then evaluate it with 16 other seeds.

    If the command is stopped and started again, it continues with the first missing result.
    """
    from .evidence.commands import run_study

    path = results or Path(__file__).parent / "results" / f"evidence-{study}.jsonl"
    errors = Console(stderr=True)
    with interruptible("all results so far have been kept"):
        run_study(study, places or [], contenders or [], path, errors, only_estimate=estimate)


@app.command("same-accuracy")
def same_accuracy(
    problems: Annotated[list[str] | None, only("--problem", "problem", "digits-mlp")] = None,
    clusters: Annotated[list[str] | None, only("--cluster", "cluster", "'steady 3x'")] = None,
    workers: Annotated[
        list[int] | None,
        typer.Option("--workers", help="Only this number of workers. Default: 4, 16 and 40."),
    ] = None,
    models: Annotated[list[str] | None, only("--model", "sync model beside bsp", "asp")] = None,
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--hyperparameters",
            help="Only these: raw, translated or 'translated without delay'. Default: raw and translated.",
        ),
    ] = None,
    seeds: Annotated[int, whole_number_option("--seeds", least=1, help="Number of seeds.")] = 8,
    processes: Annotated[
        int,
        whole_number_option(
            "--processes", least=1, help="1 to work in one process, a larger number to work on all cores."
        ),
    ] = 2,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Do only enough work to check that the code runs: one epoch, two seeds, four workers. The resulting "
            "numbers are meaningless, and are kept in runs/same-accuracy-quick.jsonl by default.",
        ),
    ] = False,
    results: Results = None,
) -> None:
    """With the same hyper-parameters, compare the result of training under each sync model with the result under bsp.

    Each option may be given several times. If the command is stopped and started again, it continues with the first
    missing result. At the end, the command prints a summary of the results.
    """
    from .catalogue import TEXT_WIDTH
    from .same_accuracy.commands import make_table
    from .same_accuracy.plan import Scope

    name = (
        "runs/same-accuracy-quick.jsonl" if quick else Path(__file__).parent / "results/same-accuracy.jsonl"
    )
    scope = Scope.chosen(problems or [], clusters or [], workers or ([4] if quick else []), models or [])
    with interruptible("all results so far have been kept"):
        make_table(
            scope,
            kinds or ("raw", "translated"),
            2 if quick else seeds,
            results or Path(name),
            Console(width=None if sys.stdout.isatty() else TEXT_WIDTH),
            Console(stderr=True),
            processes=processes,
            epochs=1 if quick else None,
        )


@app.command("wire")
def wire(
    problems: Annotated[list[str] | None, only("--problem", "problem", "text-gpt")] = None,
    codecs: Annotated[list[str] | None, only("--wire", "codec beside float32", "int4")] = None,
    seeds: Annotated[int, whole_number_option("--seeds", least=2, help="Number of seeds.")] = 6,
    processes: Annotated[int, whole_number_option("--processes", least=1, help="Number of processes.")] = 1,
    results: Results = None,
) -> None:
    """Compare the result of training with rounded gradients and weights with the result of training with float32.

    All runs together take about 50 minutes of processor time; a run takes from one second to half a minute. If the
    command is stopped and started again, it continues with the first missing run. At the end, it prints the results.
    """
    from .wire import cells, found, make, missing, result_tables

    path = results or Path(__file__).parent / "results/wire.jsonl"
    wanted = cells(problems or [], codecs or [])
    left, errors = missing(wanted, seeds, path), Console(stderr=True)
    minutes = sum(run.cost_s for run in left) / 60
    errors.print(f"{len(left)} runs are missing: about {minutes:.0f} min of processor time")
    with interruptible("all results so far have been kept"), shown_progress(errors) as tell:
        make(left, path, processes, tell)
    for table in result_tables(found(wanted, seeds, path)):
        Console(width=None if sys.stdout.isatty() else 140).print(table, "")


@app.command("tune-demo")
def tune_demo(
    run_dir: Annotated[
        str | None,
        typer.Option(
            "--run-dir", help="Directory for the measurements. Default: ./runs/tuning.", show_default=False
        ),
    ] = None,
) -> None:
    """Search for the best learning rate and momentum for each sync model in the demo.

    Takes about 45 minutes. If the search is stopped and started again, it continues from the stored measurements.
    """
    from .tune_demo import tune

    with interruptible("all measurements have been kept, and every process of the run has exited"):
        tune(console=Console(), run_dir=None if run_dir is None else Path(run_dir))


@app.command("cherry-pick")
def cherry_pick(run_dir: RunDir = None) -> None:
    """Search a grid for the best abort time and abort rate for SpecSync in the demo, and report the search time.

    Takes about 4 minutes.
    """
    from paceline.lab.demo import EVERY_SETTING
    from paceline.trace.run_dir import require_usable

    from .cherry_pick import cherry_pick as search

    if run_dir is not None:
        require_usable(run_dir)
    [spec_sync] = [setting for setting in EVERY_SETTING if setting.sync == "spec-sync"]
    with interruptible():
        search(spec_sync, console=Console(), run_dir=None if run_dir is None else Path(run_dir))

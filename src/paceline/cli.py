"""The command line: `paceline run`, `demo`, `simulate`, `sync`, `bench`. Reads arguments, calls the library, prints.

Bad input is one sentence on standard error and exit code 2, before anything starts. A run that fails shows the
failing process's own traceback, once, and exits with 1. Ctrl-C ends every process and exits with 130.
"""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from . import __version__
from .errors import ConfigurationError, PacelineError, UsageError

__all__ = ["app", "main"]

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

NOTHING_LEFT = "nothing has been measured to its end, and nothing is left running"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Data-parallel PyTorch training on machines that are not equally fast.",
)


class Transport(enum.StrEnum):
    """How bytes move."""

    AUTO = "auto"
    SHM = "shm"
    UNIX = "unix"
    TCP = "tcp"


class Slicing(enum.StrEnum):
    """How the parameters are cut."""

    EVEN = "even"
    BY_PARAMETER = "by-parameter"


class Overlap(enum.StrEnum):
    """What waits for what."""

    SHARDS = "shards"
    OFF = "off"


class OnNan(enum.StrEnum):
    """What a gradient with NaN or inf does."""

    STOP = "stop"
    SKIP = "skip"


Workers = Annotated[int, typer.Option("--workers", "-n", help="How many workers.", rich_help_panel="Run")]
Servers = Annotated[
    int | None,
    typer.Option(
        "--servers",
        help="How many servers; each holds one shard of the parameters, or more (--shards). "
        "Default: as many as the workers leave cores over, at least one.",
        show_default=False,
        rich_help_panel="Run",
    ),
]
Sync = Annotated[
    str,
    typer.Option(
        "--sync",
        metavar="NAME:KEY=VALUE,...",
        help="The synchronization model: bsp, asp, ssp:staleness=3, elastic-bsp:lookahead=15, ... "
        "([bold]paceline sync[/] lists all). 'bsp|asp' gives each shard its own; "
        "bsp@0,elastic-bsp@epoch:5 changes in mid-run, at an epoch or an iteration (@100).",
        rich_help_panel="Run",
    ),
]
Shards = Annotated[
    int | None,
    typer.Option(
        "--shards",
        help="How many slices the parameters are cut into. Default: one for each server.",
        show_default=False,
        rich_help_panel="Run",
    ),
]
SlicingOption = Annotated[
    Slicing,
    typer.Option(
        "--slicing",
        help="Cut evenly, whatever the layers' sizes (EPS), or by whole parameters, as PS-Lite does.",
        rich_help_panel="Run",
    ),
]
OverlapOption = Annotated[
    Overlap,
    typer.Option(
        "--overlap",
        help="Each shard answers for itself, or (off, for bsp) nobody pulls until everybody has pushed "
        "everything, as in PS-Lite.",
        rich_help_panel="Run",
    ),
]
TransportOption = Annotated[
    Transport,
    typer.Option(
        "--transport", help="Shared memory or sockets of one machine, or TCP.", rich_help_panel="Run"
    ),
]
Port = Annotated[
    int,
    typer.Option("--port", help="TCP port of the coordinator, 0 for any free one.", rich_help_panel="Run"),
]
Seed = Annotated[
    int, typer.Option("--seed", help="Of the data's order and the jitter.", rich_help_panel="Run")
]
OnNanOption = Annotated[
    OnNan,
    typer.Option(
        "--on-nan",
        help="A gradient with NaN or inf stops the run, or its push is skipped.",
        rich_help_panel="Run",
    ),
]
RunDir = Annotated[
    str | None,
    typer.Option(
        "--run-dir",
        help="Where logs, traces and results go. Default: a new directory under ./runs.",
        show_default=False,
        rich_help_panel="Run",
    ),
]
Pace = Annotated[
    str | None,
    typer.Option(
        "--pace",
        metavar="S,S,...",
        help="Least seconds per iteration, one number per worker; it sleeps the rest.",
        show_default=False,
        rich_help_panel="Emulating unequal machines",
    ),
]
Slowdown = Annotated[
    str | None,
    typer.Option(
        "--slowdown",
        metavar="X,X,...",
        help="Stretches the measured compute time, one factor >= 1 per worker.",
        show_default=False,
        rich_help_panel="Emulating unequal machines",
    ),
]
Jitter = Annotated[
    float,
    typer.Option(
        "--jitter",
        metavar="J",
        help="Varies either by a uniform factor 1 +- J, seeded.",
        rich_help_panel="Emulating unequal machines",
    ),
]


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


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
def run(
    script: Annotated[Path, typer.Argument(help="A Python script that uses paceline.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its own arguments, as they are.", show_default=False)
    ] = None,
    workers: Workers = 2,
    servers: Servers = None,
    sync: Sync = "bsp",
    shards: Shards = None,
    slicing: SlicingOption = Slicing.EVEN,
    overlap: OverlapOption = Overlap.SHARDS,
    transport: TransportOption = Transport.AUTO,
    port: Port = 0,
    seed: Seed = 0,
    on_nan: OnNanOption = OnNan.STOP,
    run_dir: RunDir = None,
    pace: Pace = None,
    slowdown: Slowdown = None,
    jitter: Jitter = 0.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show what would start, and stop.")
    ] = False,
) -> None:
    """Run a script in several workers, as [bold]python script.py[/] runs it in one.

    paceline run --workers 4 --servers 2 --sync elastic-bsp:lookahead=15 train.py --epochs 10
    """
    from .engines.launch import run_script
    from .runtime.job import describe, make_job

    sys.path.insert(0, str(script.resolve().parent))  # where a user's own conditions are looked for
    if not script.is_file():
        what = "is not a file" if script.exists() else "does not exist"
        raise ConfigurationError(f"the script {str(script)!r} {what}; give the path of a Python file.")
    job = make_job(
        workers=workers,
        servers=servers,
        sync=sync,
        shards=shards,
        slicing=slicing.value,
        overlap=overlap.value,
        transport=transport.value,
        seed=seed,
        pace=_numbers("pace", pace),
        slowdown=_numbers("slowdown", slowdown),
        jitter=jitter,
        on_nan=on_nan.value,
        run_dir=run_dir,
        port=port,
        dry_run=dry_run,
    )
    if dry_run:
        _print_pairs(
            {**describe(job), "command": " ".join([sys.executable, str(script), *(arguments or [])])}
        )
        return
    with _interruptible():
        result = run_script(job, script, arguments or [], console=Console(stderr=True))
    _print_summary(result.summary)
    print(f"weights, traces and logs: {result.run_dir}")


@app.command()
def demo(
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Repeat with this many seeds; medians.")] = 1,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="Find each model's best learning rate and momentum instead (about 45 minutes)."
        ),
    ] = False,
    every: Annotated[
        bool,
        typer.Option(
            "--all", help="Under every sync model, with delayed pulls and aborts (about 7 minutes)."
        ),
    ] = False,
    cherry_pick: Annotated[
        bool,
        typer.Option(
            "--cherry-pick",
            help="Find SpecSync's abort time and rate by trying a grid of them, and say what that cost "
            "(about 4 minutes).",
        ),
    ] = False,
    run_dir: RunDir = None,
) -> None:
    """Four workers, one of them three times slower, learn handwritten digits under four sync models.

    Takes under three minutes on two cores, and ends with a table and a picture.
    """
    from .runtime.job import require_usable
    from .workloads import cherry_pick as picking
    from .workloads import demo as digits_demo

    if tune + every + cherry_pick > 1:
        raise ConfigurationError("--tune, --all and --cherry-pick are three commands; give one of them.")
    console = Console()
    home = None if run_dir is None else Path(run_dir)
    if run_dir is not None and not tune:
        require_usable(run_dir)
    with _interruptible():
        if tune:
            digits_demo.tune(console=console, run_dir=home)
        elif cherry_pick:
            [spec_sync] = [s for s in digits_demo.EVERY_SETTING if s.sync == "spec-sync"]
            picking.cherry_pick(spec_sync, console=console, run_dir=home)
        else:
            settings = digits_demo.EVERY_SETTING if every else digits_demo.SETTINGS
            digits_demo.run_demo(console=console, run_dir=home, seeds=tuple(range(seeds)), settings=settings)


bench = typer.Typer(no_args_is_help=True, help="Measure this machine.")
app.add_typer(bench, name="bench")


@bench.command("zipline")
def bench_zipline(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            min=1,
            help="How often to measure everything; medians. Default: 3, or 1 with --quick.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only what takes a few seconds.")] = False,
) -> None:
    """How long it takes to choose a barrier: the ElasticBSP paper's Tables 3 and 4, and goals of our own.

    Takes about three minutes; run it on a machine that has nothing else to do.
    """
    import msgspec

    from .workloads import zipline_bench, zipline_tables

    with _interruptible(NOTHING_LEFT), zipline_tables.shown_progress(Console(stderr=True)) as tell:
        report = zipline_bench.measure(rounds=rounds, quick=quick, tell=tell)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
        return
    console = Console()
    for table in zipline_tables.tables(report):
        console.print(table, "")
    for note in report.notes:
        console.print(f"- {note}", highlight=False, markup=False)


@bench.command("sync")
def bench_sync(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """What each sync model costs a shard per push and pull, with 10 and with 10,000 workers (a few seconds)."""
    import msgspec

    from .workloads import sync_bench

    console = Console(stderr=True)
    with (
        _interruptible(NOTHING_LEFT),
        console.status("measuring") if console.is_terminal else contextlib.nullcontext(),
    ):
        rows = sync_bench.measure()
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
    else:
        Console().print(sync_bench.cost_table(rows))


class _SpacedLists(TyperCommand):
    """A command whose lists may have spaces in them, as it takes no arguments: `--sizes 1 25` is `--sizes 1,25`."""

    LISTS = ("--sizes", "--workers", "--systems")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        joined: list[str] = []
        for arg in args:
            if len(joined) >= 2 and joined[-2] in self.LISTS and not arg.startswith("-"):
                joined[-1] += f",{arg}"
            else:
                joined.append(arg)
        return super().parse_args(ctx, joined)


@bench.command("transport", cls=_SpacedLists)
def bench_transport(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of tables.")] = False,
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="MB ...", help="Sizes of the model, in 2**20 bytes.")
    ] = "0.004,1,25,100",
    workers: Annotated[str, typer.Option("--workers", metavar="N ...", help="How many workers.")] = "2,4",
    servers: Annotated[int, typer.Option("--servers", help="How many servers.")] = 2,
    rounds: Annotated[int, typer.Option("--rounds", help="How often to measure everything; medians.")] = 3,
    systems: Annotated[
        str,
        typer.Option(
            "--systems", metavar="NAME ...", help="Which of floor, socket, gloo, paceline and optimizer."
        ),
    ] = "floor,socket,gloo,paceline,optimizer",
) -> None:
    """What a step costs by shared memory and by TCP, against bare copies, bare sockets and gloo all-reduce.

    Takes about 11 minutes; run it on a machine that has nothing else to do.
    """
    import msgspec

    from .workloads import transport_bench
    from .workloads.zipline_tables import shown_progress

    plan = transport_bench.Plan(
        sizes_mb=tuple(_numbers("sizes", sizes) or ()),
        workers=tuple(_whole("workers", number) for number in _numbers("workers", workers) or ()),
        servers=servers,
        rounds=rounds,
        systems=tuple(systems.split(",")),
    )
    plan.require_sound()
    console = Console(stderr=True)
    minutes = transport_bench.estimate_s(plan) / 60
    console.print(f"about {minutes:.0f} min on two cores" if minutes >= 1 else "less than a minute or so")
    with _interruptible(NOTHING_LEFT), shown_progress(console) as tell:
        rows = transport_bench.measure(plan, tell)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
        return
    for table in transport_bench.tables(rows, rounds):
        Console().print(table, "")


@bench.command("overlap")
def bench_overlap(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
    rate: Annotated[str, typer.Option("--rate", help="Of each direction of each link.")] = "1gbit",
    rounds: Annotated[int, typer.Option("--rounds", help="How often to measure everything; medians.")] = 3,
    iterations: Annotated[int, typer.Option("--iterations", help="Of each run.")] = 8,
    shards: Annotated[int, typer.Option("--shards", help="Of the setting that is sliced evenly.")] = 16,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            metavar="PATH",
            help="Also draw an iteration of each setting (PNG).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """What overlap synchronization and even slicing save on slow links: FluentPS's comparison with PS-Lite.

    4 workers and 4 servers, each in a network namespace of its own: needs root, ip and tc. Takes about 5 minutes.
    """
    import msgspec

    from .report.canvas import new_figure, save
    from .workloads import overlap_bench
    from .workloads.zipline_tables import shown_progress

    plan = overlap_bench.Plan(rate=rate, rounds=rounds, iterations=iterations, shards=shards)
    plan.require_sound()
    if picture is not None:
        new_figure(1.0, 1.0)  # refused here, if it cannot be drawn
        if not picture.parent.is_dir():
            raise ConfigurationError(
                f"the picture {str(picture)!r} cannot be written: its folder does not exist."
            )
    console = Console(stderr=True)
    console.print(f"about {overlap_bench.estimate_s(plan) / 60:.0f} min on two cores")
    with _interruptible(NOTHING_LEFT), shown_progress(console) as tell:
        report = overlap_bench.measure(plan, tell)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        Console().print(overlap_bench.table(report))
    if picture is not None:
        save(overlap_bench.picture(report), picture)


@bench.command("simulator")
def bench_simulator(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Is virtual time true to life, for every sync model, and how fast does it pass.

    Takes about 8 minutes; run it on a machine that has nothing else to do.
    """
    import msgspec

    from .workloads import simulator_bench
    from .workloads.zipline_tables import shown_progress

    console = Console(stderr=True)
    console.print(f"about {simulator_bench.estimate_s() / 60:.0f} min on two cores")
    with _interruptible(NOTHING_LEFT), shown_progress(console) as tell:
        report = simulator_bench.measure(tell)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
        return
    for table in simulator_bench.tables(report):
        Console().print(table, "")


@app.command()
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
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Where pictures and figures go. Default: a new directory under ./runs.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """Rehearse a cluster: which sync model computes most there, how stale, who waits. Takes seconds.

    paceline simulate cluster.toml --sync bsp,ssp:staleness=3,elastic-bsp
    """
    import shlex

    import msgspec

    from .workloads import ranking, rehearsal

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
    with _interruptible("nothing has been kept, and nothing is left running"), _counting() as tell:
        rows: Sequence[object]
        if script is not None:
            from .workloads.rehearsal_training import train_and_compare

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
        print(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
    else:
        print(f"pictures and figures: {folder}")


@app.command()
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Which sync model suits the machines of a run: what it recorded, replayed under every model.

    paceline advise runs/20261121-120000
    """
    import msgspec

    from .sim.recorded import read_cluster_of_run
    from .workloads import advise as advising
    from .workloads.ranking import read_syncs

    with _interruptible("nothing is left running"), _counting() as tell:
        report = advising.advise(run_dir, read_syncs(sync), tell)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        advising.show(report, read_cluster_of_run(run_dir), Console())


@app.command()
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
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Where plots and numbers go. Default: a new directory under ./runs.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make tables and figures of the papers anew, beside the papers' own numbers.

    paceline paper fluentps-fig9 specsync-fig3
    """
    from .workloads.papers.exhibit import Options
    from .workloads.papers.show import chosen, list_table, make
    from .workloads.rehearsal import new_folder
    from .workloads.zipline_tables import shown_progress

    if every or not names:
        Console().print(list_table())
        return
    exhibits = chosen(names)
    folder = new_folder(out, "paper")
    errors = Console(stderr=True)
    errors.print(f"about {max(1.0, sum(exhibit.minutes for exhibit in exhibits)):.0f} min on two cores")
    for exhibit in exhibits:
        with _interruptible("what was made until now is kept"), shown_progress(errors) as tell:
            make(exhibit, Options(quick=quick, seeds=seeds), folder, Console(), tell)
    print(f"plots and numbers: {folder}")


@app.command()
def sync(
    name: Annotated[str | None, typer.Argument(help="Show all about this model.", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--list", help="List every model with its parameters.")] = False,
) -> None:
    """The synchronization models: all of them (--list), or everything about one.

    paceline sync pssp
    """
    from .report.models import describe, models_table, page_text, pages

    if name is None or every:
        Console().print(models_table(pages()), highlight=False, markup=False)
    else:
        Console().print(page_text(describe(name)), highlight=False, markup=False)


def main() -> None:
    """The entry point: turns errors into one sentence and an exit code."""
    try:
        app()
    except (ConfigurationError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)


@contextlib.contextmanager
def _interruptible(then: str = "every process of the run has been ended") -> Iterator[None]:
    """Ctrl-C ends what runs in order, and says so."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted: {then}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None


@contextlib.contextmanager
def _counting() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar for things that can be counted: (how many are done, of how many, which)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("")
        yield lambda done, of, what: progress.update(bar, completed=done, total=of, description=what)


def _numbers(name: str, text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigurationError(
            f"{name} is {text!r}, expected numbers with commas between, as in 1,1,1,3."
        ) from None


def _whole(name: str, number: float) -> int:
    if not number.is_integer():
        raise ConfigurationError(f"{name} is {number:g}, expected a whole number >= 1.")
    return int(number)


def _print_pairs(pairs: dict[str, str]) -> None:
    table = Table.grid(padding=(0, 2))
    for key, value in pairs.items():
        table.add_row(f"[bold]{key}[/]", value)
    Console(soft_wrap=True).print(table)


def _print_summary(summary: dict[str, object]) -> None:
    shown = {
        "sync": str(summary["sync"]),
        "duration": f"{summary['duration_s']:.1f} s",
        "updates": f"{summary['updates']} ({summary['updates_per_s']:.1f} per second)",
        "waiting": f"{summary['waiting_share']:.1%} of the workers' time",
        "restarts": f"{summary['restarts']}, {summary['wasted_s']:.1f} s computed in vain",
        "staleness": f"mean {summary['mean_staleness']:.2f}, largest {summary['max_staleness']} (in updates)",
    }
    if not summary["restarts"]:
        del shown["restarts"]
    if summary["emulated"]:
        shown["emulated"] = str(summary["emulated"])
    _print_pairs(shown)


if __name__ == "__main__":
    main()

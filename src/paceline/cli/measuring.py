"""`paceline bench ...`: what this machine reaches."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from ..errors import ConfigurationError
from .options import AsJson
from .terminal import interruptible, print_json, read_numbers, read_whole

__all__ = ["NOTHING_LEFT", "bench"]

NOTHING_LEFT = "nothing has been measured to its end, and nothing is left running"

bench = typer.Typer(no_args_is_help=True, help="Measure this machine.")


@bench.command("zipline")
def zipline(
    as_json: AsJson = False,
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
    from ..workloads import zipline_bench, zipline_tables

    with interruptible(NOTHING_LEFT), zipline_tables.shown_progress(Console(stderr=True)) as tell:
        report = zipline_bench.measure(rounds=rounds, quick=quick, tell=tell)
    if as_json:
        print_json(report)
        return
    console = Console()
    for table in zipline_tables.tables(report):
        console.print(table, "")
    for note in report.notes:
        console.print(f"- {note}", highlight=False, markup=False)


@bench.command("sync")
def sync(as_json: AsJson = False) -> None:
    """What each sync model costs a shard per push and pull, with 10 and with 10,000 workers (a few seconds)."""
    from ..workloads import sync_bench

    console = Console(stderr=True)
    with (
        interruptible(NOTHING_LEFT),
        console.status("measuring") if console.is_terminal else contextlib.nullcontext(),
    ):
        rows = sync_bench.measure()
    if as_json:
        print_json(rows)
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
def transport(
    as_json: AsJson = False,
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
    from ..workloads import transport_bench
    from ..workloads.zipline_tables import shown_progress

    plan = transport_bench.Plan(
        sizes_mb=tuple(read_numbers("sizes", sizes) or ()),
        workers=tuple(read_whole("workers", number) for number in read_numbers("workers", workers) or ()),
        servers=servers,
        rounds=rounds,
        systems=tuple(systems.split(",")),
    )
    plan.require_sound()
    console = Console(stderr=True)
    minutes = transport_bench.estimate_s(plan) / 60
    console.print(f"about {minutes:.0f} min on two cores" if minutes >= 1 else "less than a minute or so")
    with interruptible(NOTHING_LEFT), shown_progress(console) as tell:
        rows = transport_bench.measure(plan, tell)
    if as_json:
        print_json(rows)
        return
    for table in transport_bench.tables(rows, rounds):
        Console().print(table, "")


@bench.command("overlap")
def overlap(
    as_json: AsJson = False,
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
    from ..report.canvas import new_figure, save
    from ..workloads import overlap_bench
    from ..workloads.zipline_tables import shown_progress

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
    with interruptible(NOTHING_LEFT), shown_progress(console) as tell:
        report = overlap_bench.measure(plan, tell)
    if as_json:
        print_json(report)
    else:
        Console().print(overlap_bench.table(report))
    if picture is not None:
        save(overlap_bench.picture(report), picture)


@bench.command("simulator")
def simulator(as_json: AsJson = False) -> None:
    """Is virtual time true to life, for every sync model, and how fast does it pass.

    Takes about 8 minutes; run it on a machine that has nothing else to do.
    """
    from ..workloads import simulator_bench
    from ..workloads.zipline_tables import shown_progress

    console = Console(stderr=True)
    console.print(f"about {simulator_bench.estimate_s() / 60:.0f} min on two cores")
    with interruptible(NOTHING_LEFT), shown_progress(console) as tell:
        report = simulator_bench.measure(tell)
    if as_json:
        print_json(report)
        return
    for table in simulator_bench.tables(report):
        Console().print(table, "")

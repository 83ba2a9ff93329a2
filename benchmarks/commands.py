"""The commands of `python -m benchmarks`. Each command reads its options, measures, and prints tables or JSON."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from paceline.cli.console import interruptible, print_json, read_whole, run_app
from paceline.cli.numbers import whole_number_option
from paceline.cli.options import AsJson
from paceline.cli.progress_bar import TellShare, shown_progress
from paceline.errors import ConfigurationError
from paceline.settings.checks import numbers

__all__ = ["NOTHING_LEFT", "app", "main"]

Result = TypeVar("Result")

NOTHING_LEFT = "there are no results, and all processes have been stopped"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Measure how fast Paceline is on this machine. Run the benchmarks on an otherwise idle machine.",
)


def main() -> None:
    """Run the command line."""
    run_app(app)


class _SpacedLists(TyperCommand):
    """A command whose list options also accept spaces between values: `--sizes 1 25` means `--sizes 1,25`.

    The command must not have positional arguments.
    """

    LISTS = ("--sizes", "--workers", "--systems")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        joined: list[str] = []
        for arg in args:
            if len(joined) >= 2 and joined[-2] in self.LISTS and not arg.startswith("-"):
                joined[-1] += f",{arg}"
            else:
                joined.append(arg)
        return super().parse_args(ctx, joined)


@app.command("transport", cls=_SpacedLists)
def transport(
    as_json: AsJson = False,
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="MB ...", help="Model sizes in MB (2**20 bytes).")
    ] = "0.004,1,25,100",
    workers: Annotated[str, typer.Option("--workers", metavar="N ...", help="Numbers of workers.")] = "2,4",
    servers: Annotated[int, whole_number_option("--servers", help="Number of servers.")] = 2,
    rounds: Annotated[
        int,
        whole_number_option("--rounds", help="Number of rounds. Each result is the median over the rounds."),
    ] = 3,
    systems: Annotated[
        str,
        typer.Option(
            "--systems",
            metavar="NAME ...",
            help="Systems to measure, any of: floor, socket, gloo, paceline, optimizer.",
        ),
    ] = "floor,socket,gloo,paceline,optimizer",
) -> None:
    """Time a training step over shared memory and over TCP, and compare it with plain copies, sockets and gloo.

    Takes about 11 minutes.
    """
    from . import transport as benchmark

    plan = benchmark.TransportPlan(
        sizes_mb=numbers("sizes", sizes),
        workers=tuple(read_whole("workers", number) for number in numbers("workers", workers)),
        servers=servers,
        rounds=rounds,
        systems=tuple(systems.split(",")),
    )
    plan.require_sound()
    rows = _measured(benchmark.estimate_s(plan), lambda tell: benchmark.measure(plan, tell))
    _show(rows, benchmark.tables(rows, rounds), as_json=as_json)


@app.command("overlap")
def overlap(
    as_json: AsJson = False,
    rate: Annotated[
        str, typer.Option("--rate", help="Rate of each network link in each direction, for example 250mbit.")
    ] = "1gbit",
    rounds: Annotated[
        int,
        whole_number_option("--rounds", help="Number of rounds. Each result is the median over the rounds."),
    ] = 3,
    iterations: Annotated[int, whole_number_option("--iterations", help="Measured iterations per run.")] = 8,
    shards: Annotated[
        int, whole_number_option("--shards", help="Number of shards in the setting with even slicing.")
    ] = 16,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            metavar="PATH",
            help="Also draw one iteration of each setting and save the picture as this PNG file.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure the time saved on slow links by overlap synchronization and by slices of equal size (FluentPS paper).

    Runs 4 workers and 4 servers, each in its own network namespace. Takes about 5 minutes.

    Requires root privileges and the commands ip and tc.
    """
    from paceline.report.canvas import new_figure, save

    from .overlap import measurement as benchmark

    plan = benchmark.OverlapPlan(rate=rate, rounds=rounds, iterations=iterations, shards=shards)
    plan.require_sound()
    if picture is not None:
        new_figure(1.0, 1.0)  # raises an error now, before anything starts, if matplotlib is missing
        if not picture.parent.is_dir():
            raise ConfigurationError(
                f"cannot save the picture as {str(picture)!r}: the folder does not exist. Create it first."
            )
    report = _measured(benchmark.estimate_s(plan), lambda tell: benchmark.measure(plan, tell))
    _show(report, [benchmark.table(report)], as_json=as_json)
    if picture is not None:
        save(benchmark.picture(report), picture)


@app.command("links", cls=_SpacedLists)
def links(
    as_json: AsJson = False,
    rate: Annotated[
        str, typer.Option("--rate", help="Rate of each network link in each direction, for example 250mbit.")
    ] = "1gbit",
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="MB ...", help="Model sizes in MB (2**20 bytes).")
    ] = "25,100",
    rounds: Annotated[
        int,
        whole_number_option("--rounds", help="Number of rounds. Each result is the median over the rounds."),
    ] = 3,
    wire: Annotated[
        str,
        typer.Option(
            "--wire",
            metavar="<bf16>",
            help="Compare this format of gradients and weights with float32 instead, with two workers and the first "
            "of the sizes. This takes about 4 minutes on links of 250mbit, and does not need iperf3.",
        ),
    ] = "float32",
) -> None:
    """Compare a push and a pull over a network link with iperf3, without and with TLS.

    Also measures what a slow link to one of two servers slows down. Takes about 4 minutes.

    Requires root privileges and the commands ip, tc and iperf3.
    """
    from . import links as benchmark
    from . import wire as formats

    sizes_mb = numbers("sizes", sizes)
    if wire != "float32":
        compared = formats.WirePlan(wire=wire, rate=rate, size_mb=(*sizes_mb, 0.0)[0], rounds=rounds)
        compared.require_sound()
        saved = _measured(formats.estimate_s(compared), lambda tell: formats.measure(compared, tell))
        _show(saved, [formats.table(saved)], as_json=as_json)
        return
    plan = benchmark.LinksPlan(rate=rate, sizes_mb=sizes_mb, rounds=rounds)
    plan.require_sound()
    report = _measured(benchmark.estimate_s(plan), lambda tell: benchmark.measure(plan, tell))
    _show(report, benchmark.tables(report), as_json=as_json)


@app.command("sync")
def sync(as_json: AsJson = False) -> None:
    """Time a push and a pull under each sync model, with 10 and with 10,000 workers.

    Takes a few seconds.
    """
    from . import sync as benchmark

    console = Console(stderr=True)
    with (
        interruptible(NOTHING_LEFT),
        console.status("measuring") if console.is_terminal else contextlib.nullcontext(),
    ):
        rows = benchmark.measure()
    if as_json:
        print_json(rows)
    else:
        Console().print(benchmark.cost_table(rows))


@app.command("zipline")
def zipline(
    as_json: AsJson = False,
    rounds: Annotated[
        int | None,
        whole_number_option(
            "--rounds",
            least=1,
            help="Number of rounds, each with new inputs. Default: 3, or 1 with --quick.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure only small inputs. This takes a few seconds.")
    ] = False,
) -> None:
    """Compare the waiting and computation times of ZipLine's methods with Tables 3 and 4 of the ElasticBSP paper.

    Also checks the results against this project's goals. Takes about 3 minutes.
    """
    from .zipline import measurement as benchmark
    from .zipline.tables import tables

    with interruptible(NOTHING_LEFT), shown_progress(Console(stderr=True)) as tell:
        report = benchmark.measure(rounds=rounds, quick=quick, tell=tell)
    if as_json:
        print_json(report)
        return
    console = Console()
    for table in tables(report):
        console.print(table, "")
    for note in report.notes:
        console.print(f"- {note}", highlight=False, markup=False)


@app.command("simulator")
def simulator(as_json: AsJson = False) -> None:
    """Compare simulations with live runs under every sync model, and measure how fast simulations are.

    Takes about 8 minutes.
    """
    from . import simulator as benchmark

    report = _measured(benchmark.estimate_s(), benchmark.measure)
    _show(report, benchmark.tables(report), as_json=as_json)


@app.command("guard")
def guard(as_json: AsJson = False) -> None:
    """Let the guard of a run judge 20 planted divergences and 20 healthy runs, with three seeds each.

    The cost of the guard is measured, too. Takes about 2 minutes.
    """
    from . import guard as benchmark

    report = _measured(benchmark.estimate_s(), benchmark.measure)
    _show(report, benchmark.tables(report), as_json=as_json)


@app.command("look")
def look(
    as_json: AsJson = False,
    siege: Annotated[
        bool,
        typer.Option(
            "--siege", help="Measure what 1,000 requests per second without a token cost the run instead."
        ),
    ] = False,
    rounds: Annotated[
        int, whole_number_option("--rounds", least=1, help="Number of rounds, with one turn of each case.")
    ] = 20,
) -> None:
    """Measure what it costs to log and to look at a run with steps of 5 ms: live page, TensorBoard and OpenMetrics.

    Needs paceline[tensorboard,metrics]. Takes about 9 minutes.
    """
    from . import look as benchmark

    benchmark.require_packages()
    cases = benchmark.SIEGE if siege else benchmark.CASES
    rows = _measured(benchmark.estimate_s(rounds, cases), lambda tell: benchmark.measure(tell, rounds, cases))
    _show(rows, [benchmark.table(rows, rounds)], as_json=as_json)


@app.command("unequal")
def unequal(as_json: AsJson = False) -> None:
    """Compare the time of 10 epochs under several sync models if one of four workers is 3 times slower.

    Each sync model is measured live and simulated. Takes about 6 minutes.
    """
    from . import unequal as benchmark

    rows = _measured(benchmark.estimate_s(), benchmark.measure)
    _show(rows, [benchmark.table(rows)], as_json=as_json)


@app.command("what-if")
def what_if(
    as_json: AsJson = False,
    rate: Annotated[
        str, typer.Option("--rate", help="Rate of each network link in each direction, for example 250mbit.")
    ] = "800mbit",
    queue_ms: Annotated[
        float, typer.Option("--queue-ms", help="Queue of each link, as the time to send what it holds.")
    ] = 10.0,
    rounds: Annotated[
        int,
        whole_number_option("--rounds", help="Number of rounds. Each result is the median over the rounds."),
    ] = 3,
) -> None:
    """Predict runs with half the bandwidth and with twice the workers from a recorded run, and measure them live.

    Takes about 15 minutes.

    Requires root privileges and the commands ip and tc.
    """
    from . import what_if as benchmark

    plan = benchmark.WhatIfPlan(rate=rate, queue_s=queue_ms / 1000, rounds=rounds)
    plan.require_sound()
    report = _measured(benchmark.estimate_s(plan), lambda tell: benchmark.measure(plan, tell))
    _show(report, [benchmark.table(report)], as_json=as_json)


@app.command("advice")
def advice(
    as_json: AsJson = False,
    rounds: Annotated[
        int,
        whole_number_option("--rounds", help="Number of rounds. Each result is the median over the rounds."),
    ] = 1,
) -> None:
    """Compare what paceline advise promises of a change with a live run of this change, for several kinds of scripts.

    Takes about 8 minutes.
    """
    from . import advice as benchmark

    rows = _measured(benchmark.estimate_s(rounds), lambda tell: benchmark.measure(rounds, tell=tell))
    _show(rows, [benchmark.table(rows)], as_json=as_json)


@app.command("auto")
def auto(as_json: AsJson = False) -> None:
    """Compare --sync auto with every fixed choice on 60 simulated clusters.

    Also checks the results against this project's goals. Takes about 6 minutes.
    """
    from . import auto as benchmark

    report = _measured(benchmark.estimate_s(), benchmark.measure)
    _show(report, benchmark.tables(report), as_json=as_json)


@app.command("data")
def data(as_json: AsJson = False) -> None:
    """Measure what it costs to hand out data: the time per batch, and the coordinator's load with 1,000 workers.

    Takes about 3 minutes.
    """
    from . import data as benchmark

    report = _measured(benchmark.estimate_s(), benchmark.measure)
    _show(report, benchmark.tables(report), as_json=as_json)


@app.command("coordinator")
def coordinator(as_json: AsJson = False) -> None:
    """Measure how much of a core the coordinator uses with 1,000 light workers, and how fast it responds.

    Takes about 3 minutes.
    """
    from . import coordinator as benchmark

    rows = _measured(benchmark.estimate_s(), benchmark.measure)
    _show(rows, [benchmark.table(rows)], as_json=as_json)


@app.command("startup")
def startup(as_json: AsJson = False) -> None:
    """Measure the time from the start of a script to its first update, alone and in runs with one and four workers.

    Also checks the results against this project's goals. Takes about 2 minutes.
    """
    from . import startup as benchmark

    rows = _measured(benchmark.estimate_s(), benchmark.measure)
    _show(rows, [benchmark.table(rows)], as_json=as_json)


@app.command("late-join")
def late_join(as_json: AsJson = False) -> None:
    """Measure the time from the end of its imports to the first update of a worker that joins a run in progress.

    Takes about 3 minutes.
    """
    from . import late_join as benchmark

    rows = _measured(benchmark.estimate_s(), benchmark.measure)
    _show(rows, [benchmark.table(rows)], as_json=as_json)


@app.command("checkpoints", cls=_SpacedLists)
def checkpoints(
    as_json: AsJson = False,
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="MB ...", help="Model sizes in MB (2**20 bytes).")
    ] = "25,400",
    rounds: Annotated[
        int, whole_number_option("--rounds", least=1, help="Number of checkpoints in each run.")
    ] = 3,
) -> None:
    """Measure how much longer the steps of a worker are while a checkpoint is written, with SGD and with Adam.

    Takes about 15 minutes.
    """
    from . import checkpoints as benchmark

    cases = benchmark.cases_of(numbers("sizes", sizes))
    rows = _measured(benchmark.estimate_s(rounds, cases), lambda tell: benchmark.measure(tell, rounds, cases))
    _show(rows, [benchmark.table(rows)], as_json=as_json)


@app.command("ray-startup")
def ray_startup(as_json: AsJson = False) -> None:
    """Measure the time from the call of `launch` to the first update on a warm Ray cluster and on the local engine.

    Needs paceline[ray]. Takes about a minute.
    """
    from . import ray_startup as benchmark

    found = _measured(benchmark.estimate_s(), benchmark.measure)
    _show(found, [benchmark.table(found)], as_json=as_json)


@app.command("accelerator")
def accelerator(
    as_json: AsJson = False,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="The device, for example cuda or cuda:1.")
    ] = "cuda",
    rounds: Annotated[
        int,
        whole_number_option("--rounds", help="Number of rounds. Each result is the median over the rounds."),
    ] = 3,
) -> None:
    """Compare a training step on an accelerator with plain PyTorch, and measure how much of the copies is hidden.

    Needs a device with streams, such as cuda. Takes about 4 minutes.
    """
    from . import accelerator as benchmark

    rows = _measured(
        benchmark.estimate_s(rounds=rounds), lambda tell: benchmark.measure(device, tell, rounds=rounds)
    )
    _show(rows, [benchmark.table(rows)], as_json=as_json)


def _measured(estimate_s: float, measure: Callable[[TellShare], Result]) -> Result:
    """Announce how long a measurement takes, carry it out while its progress is shown, and return its result."""
    console = Console(stderr=True)
    minutes = estimate_s / 60
    estimate = f"about {minutes:.0f} min on two cores" if minutes >= 1 else "a minute or less"
    console.print(f"This takes {estimate}.")
    with interruptible(NOTHING_LEFT), shown_progress(console) as tell:
        return measure(tell)


def _show(result: object, tables: Iterable[Table], *, as_json: bool) -> None:
    """Print a result as JSON or as tables."""
    if as_json:
        print_json(result)
        return
    for table in tables:
        Console().print(table, "")

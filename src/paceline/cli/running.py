"""`paceline run` and `paceline demo`: training in real processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..errors import ConfigurationError
from .options import (
    Jitter,
    OnNan,
    OnNanOption,
    Overlap,
    OverlapOption,
    Pace,
    Port,
    RunDir,
    Seed,
    Servers,
    Shards,
    Slicing,
    SlicingOption,
    Slowdown,
    Sync,
    Transport,
    TransportOption,
    Workers,
)
from .terminal import interruptible, read_numbers

__all__ = ["demo", "run"]


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
    from ..engines.launch import run_script
    from ..runtime.job import describe, make_job

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
        pace=read_numbers("pace", pace),
        slowdown=read_numbers("slowdown", slowdown),
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
    with interruptible():
        result = run_script(job, script, arguments or [], console=Console(stderr=True))
    _print_summary(result.summary)
    print(f"weights, traces and logs: {result.run_dir}")


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
    from ..runtime.job import require_usable
    from ..workloads import cherry_pick as picking
    from ..workloads import demo as digits_demo

    if tune + every + cherry_pick > 1:
        raise ConfigurationError("--tune, --all and --cherry-pick are three commands; give one of them.")
    console = Console()
    home = None if run_dir is None else Path(run_dir)
    if run_dir is not None and not tune:
        require_usable(run_dir)
    with interruptible():
        if tune:
            digits_demo.tune(console=console, run_dir=home)
        elif cherry_pick:
            [spec_sync] = [s for s in digits_demo.EVERY_SETTING if s.sync == "spec-sync"]
            picking.cherry_pick(spec_sync, console=console, run_dir=home)
        else:
            settings = digits_demo.EVERY_SETTING if every else digits_demo.SETTINGS
            digits_demo.run_demo(console=console, run_dir=home, seeds=tuple(range(seeds)), settings=settings)


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

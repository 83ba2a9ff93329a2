"""Options that several commands have, and the choices of those that are one of a few."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer


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
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="A module from which the script may take conditions in mid-run (conditions:pull=MODULE:function). "
        "Can be given several times.",
        show_default=False,
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
StallTimeout = Annotated[
    float | None,
    typer.Option(
        "--stall-timeout",
        metavar="SECONDS",
        help="End a worker or server that has been silent for this long while others wait for it. A worker is lost "
        "then, and the others go on. Default: never; the terminal names whom the run waits for in any case.",
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
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Where pictures and numbers go. Default: a new directory under ./runs.",
        show_default=False,
    ),
]

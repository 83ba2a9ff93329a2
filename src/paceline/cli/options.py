"""The command-line options that several commands share, apart from those of the table of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .numbers import whole_number_option
from .setting_options import option_of

Workers = Annotated[
    int | None,
    whole_number_option(
        "--workers",
        "-n",
        least=1,
        help="Number of workers. Default: one for each accelerator of this machine; 2 if there is none.",
        show_default=False,
        rich_help_panel="Run",
    ),
]
DevicesOption = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="auto|DEVICE,...",
        help="Devices of the workers, one worker for each: cuda:0,cuda:1,cpu. A device may occur several times, and "
        "a single one is used by all --workers. Default: auto, all accelerators of the kind that torch chooses, or "
        "the CPU if there is none.",
        show_default=False,
        rich_help_panel="Run",
    ),
]
ServedServers = Annotated[
    int,
    whole_number_option(
        "--servers",
        least=1,
        help="Number of servers. Each server holds one or more shards of the parameters (see --shards).",
        rich_help_panel="Run",
    ),
]
RemoteServers = Annotated[
    int,
    whole_number_option(
        "--remote-servers",
        least=0,
        metavar="M",
        help="Number of these servers that other machines bring (paceline join --servers K), so that their links "
        "share the traffic. The other servers, at least one, run on this machine.",
        rich_help_panel="Run",
    ),
]
Trusted = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Import the modules that the directory names, although you have not made the run with the same home "
        "directory.",
    ),
]
ModelImports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Import this module, which defines your own synchronization models. The module may be in the current "
        "directory. Can be repeated.",
        show_default=False,
    ),
]
Port = Annotated[int, option_of("port")]
RunDir = Annotated[str | None, option_of("run_dir")]
AsModule = Annotated[
    bool,
    typer.Option(
        "-m",
        help="Run a module, as python -m does: give its name (package.module) in the place of the script.",
        show_default=False,
        rich_help_panel="Run",
    ),
]
ShowAll = Annotated[
    bool,
    typer.Option(
        "--show-all",
        help="Show the output of all workers and servers, each line with the name of its process. No process has "
        "a terminal. Default: show the output of worker 0.",
        show_default=False,
        rich_help_panel="Run",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Directory for pictures and JSON files. Default: a new directory under ./runs.",
        show_default=False,
    ),
]
_CHANGES = "What if"
ChangedWorkers = Annotated[
    int | None,
    whole_number_option(
        "--workers",
        least=1,
        help="Simulate this number of workers. The additional ones are like the others, in turn; their times are "
        "resampled from the recorded ones.",
        show_default=False,
        rich_help_panel=_CHANGES,
    ),
]
ChangedServers = Annotated[
    int | None,
    whole_number_option(
        "--servers",
        least=1,
        help="Simulate this number of servers.",
        show_default=False,
        rich_help_panel=_CHANGES,
    ),
]
ChangedBandwidth = Annotated[
    str | None,
    typer.Option(
        "--bandwidth",
        metavar="RATE",
        help="Simulate this bandwidth of each machine, for example 1gbit or '100 MB/s'.",
        show_default=False,
        rich_help_panel=_CHANGES,
    ),
]
ChangedSlow = Annotated[
    str | None,
    typer.Option(
        "--slow",
        metavar="WORKER:FACTOR,...",
        help="Multiply the compute times of some workers: 3:2 if worker 3 takes twice as long.",
        show_default=False,
        rich_help_panel=_CHANGES,
    ),
]
RecordedBandwidth = Annotated[
    str | None,
    typer.Option(
        "--recorded-bandwidth",
        metavar="RATE",
        help="Bandwidth of each machine in the recorded run. Its transfers are then simulated, instead of "
        "counting as latency.",
        show_default=False,
        rich_help_panel=_CHANGES,
    ),
]
SimulatedWire = Annotated[
    str | None,
    typer.Option(
        "--wire",
        metavar="<float32|bf16>",
        help="Simulate this format of float32 gradients and weights, as for paceline run. Default: that of the "
        "recorded run, else float32.",
        show_default=False,
        rich_help_panel=_CHANGES,
    ),
]

"""The command-line options.

An option whose value is one of a few names accepts any text here. The library checks the name, so that an unknown
name is rejected with the same message as in Python.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .numbers import number_option, whole_number_option

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
Servers = Annotated[
    int | None,
    whole_number_option(
        "--servers",
        least=1,
        help="Number of servers. Each server holds one or more shards of the parameters (see --shards). "
        "Default: one for each CPU core that the workers leave free, but at least one.",
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
Sync = Annotated[
    str,
    typer.Option(
        "--sync",
        metavar="NAME:KEY=VALUE,...",
        help="Synchronization model: bsp, asp, ssp:staleness=3, elastic-bsp:lookahead=15, ... "
        "([bold]paceline sync[/] lists all). 'bsp|asp' uses bsp for shard 0 and asp for shard 1. "
        "'bsp@0,elastic-bsp@epoch:5' switches to elastic-bsp at epoch 5; @100 means iteration 100. 'auto' begins "
        "with bsp and balanced batches, and changes to another model if that saves 10 % of the time per epoch.",
        rich_help_panel="Run",
    ),
]
Imports = Annotated[
    list[str],
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Import this module, which defines your own synchronization models or conditions, or adds a kind of "
        "device to torch. If the script uses your conditions only in paceline.set_sync, name their module here. Can "
        "be repeated.",
        show_default=False,
        rich_help_panel="Run",
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
Shards = Annotated[
    int | None,
    whole_number_option(
        "--shards",
        help="Number of slices into which the parameters are divided. Default: one per server.",
        show_default=False,
        rich_help_panel="Run",
    ),
]
SlicingOption = Annotated[
    str,
    typer.Option(
        "--slicing",
        metavar="<even|by-parameter>",
        help="even: slice the parameters into equal parts, as in FluentPS. by-parameter: keep each parameter "
        "whole, as in PS-Lite.",
        rich_help_panel="Run",
    ),
]
OverlapOption = Annotated[
    str,
    typer.Option(
        "--overlap",
        metavar="<shards|off>",
        help="shards: each shard answers pulls independently. off: workers pull only after all workers have pushed "
        "to all shards, as in PS-Lite; this requires bsp.",
        rich_help_panel="Run",
    ),
]
TransportOption = Annotated[
    str,
    typer.Option(
        "--transport",
        metavar="<auto|shm|unix|tcp>",
        help="How processes exchange messages: shared memory (shm), Unix sockets (unix) or TCP (tcp). auto uses "
        "shared memory if the system supports it, otherwise Unix sockets.",
        rich_help_panel="Run",
    ),
]
Port = Annotated[
    int,
    whole_number_option(
        "--port", help="TCP port of the coordinator. 0 means any free port.", rich_help_panel="Run"
    ),
]
Seed = Annotated[
    int,
    whole_number_option(
        "--seed",
        least=0,
        help="Random seed for the data order, the jitter and the sync models.",
        rich_help_panel="Run",
    ),
]
OnNanOption = Annotated[
    str,
    typer.Option(
        "--on-nan",
        metavar="<stop|skip>",
        help="If a gradient contains NaN or inf, stop the run or skip the push. A worker whose gradients contain NaN "
        "ten times in a row is then taken out.",
        rich_help_panel="Run",
    ),
]
HyperparametersOption = Annotated[
    str,
    typer.Option(
        "--hyperparameters",
        metavar="<raw|translated>",
        help="translated: the learning rate, momentum and other hyper-parameters mean under every synchronization "
        "model what they mean in one process on the joint batch. An update that uses a part of the joint batch takes "
        "the same part of a step. raw: each update takes a whole step, as in the papers. Under bsp, both are the "
        "same.",
        rich_help_panel="Run",
    ),
]
WireOption = Annotated[
    str,
    typer.Option(
        "--wire",
        metavar="<float32|bf16>",
        help="Format in which float32 gradients and weights travel between processes. bf16: rounded to bfloat16, so "
        "half as many bytes travel, which helps on a slow network. The servers keep and update float32 weights. "
        "gradients=bf16 or weights=bf16 rounds only one direction. Nothing travels between processes that share "
        "memory, so bf16 has no effect there.",
        rich_help_panel="Run",
    ),
]
RunDir = Annotated[
    str | None,
    typer.Option(
        "--run-dir",
        help="Directory for logs, traces and results. Default: a new directory under ./runs.",
        show_default=False,
        rich_help_panel="Run",
    ),
]
GuardOption = Annotated[
    str | None,
    typer.Option(
        "--guard",
        metavar="<off|tell|temper|stop>",
        help="What happens if training diverges. tell: it is said, with what to do. temper: the learning rate is "
        "halved as well, at most four times, and restored when training goes well again; under bsp, as tell. "
        "stop: the run ends, and the last good weights are kept. off: nothing, but NaN in the weights is said. "
        "Default: temper if hyper-parameters are translated, else off.",
        show_default=False,
        rich_help_panel="Run",
    ),
]
TracesOption = Annotated[
    str,
    typer.Option(
        "--traces",
        metavar="<full|recent|off>",
        help="What is kept of the traces and records, which grow by about 0.6 KB per iteration of a worker. recent: "
        "the last 100 MB; the statistics still count everything. recent:N: the last N MB. full: everything. off: "
        "nothing, so the summary has no statistics.",
        rich_help_panel="Run",
    ),
]
StallTimeout = Annotated[
    float | None,
    number_option(
        "--stall-timeout",
        metavar="SECONDS",
        help="Kill a worker or server that has been silent for this many seconds while others wait for it. Default: "
        "never. If a worker is killed, the run continues without it. With or without this option, the terminal shows "
        "which process the run is waiting for.",
        show_default=False,
        rich_help_panel="Run",
    ),
]
TorchrunEnv = Annotated[
    bool,
    typer.Option(
        "--torchrun-env",
        help="Set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each worker, as "
        "torchrun does, for scripts and loggers that read them.",
        rich_help_panel="Run",
    ),
]
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
Pace = Annotated[
    str | None,
    typer.Option(
        "--pace",
        metavar="S,S,...",
        help="Minimum duration of an iteration in seconds, one number per worker. A worker that finishes an "
        "iteration earlier sleeps until this time has passed. The number applies to a batch of the loader's size; "
        "for other sizes, the duration changes in proportion. .02+.03 stands for a fixed part of .02 and a "
        "proportional part of .03.",
        show_default=False,
        rich_help_panel="Emulating unequal machines",
    ),
]
Slowdown = Annotated[
    str | None,
    typer.Option(
        "--slowdown",
        metavar="X,X,...",
        help="Factors >= 1 by which the workers' compute times are multiplied, one factor per worker. The times are "
        "measured, so they depend on the batch size just as they do on the real machine.",
        show_default=False,
        rich_help_panel="Emulating unequal machines",
    ),
]
Jitter = Annotated[
    float,
    number_option(
        "--jitter",
        metavar="J",
        help="Random variation: in each iteration, the pace or slowdown is multiplied by a uniform random factor "
        "between 1 - J and 1 + J.",
        rich_help_panel="Emulating unequal machines",
    ),
]
BatchOption = Annotated[
    str,
    typer.Option(
        "--batch",
        metavar="<equal|balanced>",
        help="Sizes of the batches that paceline.distribute hands out. equal: the same size for all workers. "
        "balanced: sizes in proportion to the workers' speeds. The joint batch of all workers stays the same.",
        rich_help_panel="Run",
    ),
]
SplitOption = Annotated[
    str,
    typer.Option(
        "--split",
        metavar="<auto|dynamic|static>",
        help="How paceline.distribute divides an epoch, unless the script says so. dynamic: each worker receives its "
        "next batch when it needs one. static: all workers receive equal shares of every joint batch. auto: static "
        "if the sync model keeps all workers in lockstep, as bsp does, else dynamic.",
        rich_help_panel="Run",
    ),
]
Dashboard = Annotated[
    str | None,
    typer.Option(
        "--dashboard",
        metavar="[[HOST:]PORT]",
        help="Serve the report of the run as a live page, at an address that the terminal shows. Without a value, "
        "any free port of this machine is used; 0.0.0.0:8000 also serves other machines.",
        show_default=False,
        rich_help_panel="Looking at the run",
    ),
]
Tensorboard = Annotated[
    str | None,
    typer.Option(
        "--tensorboard",
        metavar="DIR",
        help="Write what the script logs, the speed, staleness and waiting for TensorBoard, in a new directory in "
        "DIR with the name of the run. Needs paceline[tensorboard].",
        show_default=False,
        rich_help_panel="Looking at the run",
    ),
]
MetricsPort = Annotated[
    str | None,
    typer.Option(
        "--metrics-port",
        metavar="[HOST:]PORT",
        help="Serve the state of the run as OpenMetrics at /metrics, for Prometheus. 0 means any free port. Needs "
        "paceline[metrics].",
        show_default=False,
        rich_help_panel="Looking at the run",
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

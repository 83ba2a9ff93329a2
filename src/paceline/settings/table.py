"""The table of settings: what users can set, in Python and on the command line.

A new setting needs a row here, an attribute of `run.job.Job`, which every process of a run receives, and the code
that uses it. The row becomes an argument of `paceline.launch`, an option of the commands that start a run, and a line
in their help texts and in the report of a run. Combinations of settings are checked in `run.job_options`.

The help texts show the settings in the order of the rows.
"""

from __future__ import annotations

import inspect
import math
import os
import textwrap
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypedDict, TypeVar, get_type_hints

from ..core.guard import ON_NAN, guard_mode
from ..core.layout import CODECS, SLICINGS, WireFormat
from ..core.lease import BATCH_SIZINGS, SPLITS
from ..errors import unknown_name
from ..sync import SyncModel
from ..sync.schedule import OVERLAPS, Schedule
from ..sync.translation import HYPERPARAMETERS
from ..trace.recording import KeptTraces
from ..wire.transports import TRANSPORTS
from .checks import (
    RUN,
    SERVE,
    Setting,
    directory_or_bucket,
    duration,
    named_device,
    number,
    numbers,
    one_of,
    paces,
    port,
    run_dir,
    whole,
    written_duration,
    written_paces,
)

EMULATION = "Emulating unequal machines"
LOOKING = "Looking at the run"
RESUMING = "Checkpoints"

ON_SERVER_LOSS = ("resume", "stop")


class Settings(TypedDict, total=False):
    """The settings of a run, with the types that they have in Python."""

    servers: Annotated[
        int | None,
        Setting(
            default=None,
            doc="number of servers. Default: one for each CPU core that the workers leave free, but at least one; "
            'with engine "ray", one.',
            help="Number of servers. Each server holds one or more shards of the parameters (see --shards). "
            "Default: one for each CPU core that the workers leave free, but at least one.",
            check=whole(least=1),
            commands=(RUN,),
        ),
    ]
    sync: Annotated[
        str | SyncModel | Sequence[SyncModel] | Schedule,
        Setting(
            default="bsp",
            doc="the sync model, as an object, a list with one object per shard, or a string in the notation of the "
            'command line. The string may also describe a schedule ("bsp@0,elastic-bsp@epoch:5").',
            help="Synchronization model: bsp, asp, ssp:staleness=3, elastic-bsp:lookahead=15, ... "
            "(paceline sync lists all). 'bsp|asp' uses bsp for shard 0 and asp for shard 1. "
            "'bsp@0,elastic-bsp@epoch:5' switches to elastic-bsp at epoch 5; @100 means iteration 100. 'auto' begins "
            "with bsp and balanced batches, and changes to another model if the change saves 10 % of the time per "
            "epoch.",
            metavar="NAME:KEY=VALUE,...",
        ),
    ]
    imports: Annotated[
        Sequence[str],
        Setting(
            default=(),
            trusted=True,
            doc="names of modules to import: modules that define the conditions of a sync model to which the function "
            "changes during the run with `paceline.set_sync`; packages that define the optimizer, if the function "
            "itself imports the optimizer; packages that add a kind of device to torch.",
            help="Import this module, which defines your own synchronization models or conditions, or adds a kind of "
            "device to torch. If the script uses your conditions only in paceline.set_sync, name their module here. "
            "Can be repeated.",
            metavar="MODULE",
            option="--import",
            check=lambda name, value: tuple(value),
            written=" ".join,
        ),
    ]
    shards: Annotated[
        int | None,
        Setting(
            default=None,
            doc="number of slices into which the parameters are divided. Default: one per server.",
            help="Number of slices into which the parameters are divided. Default: one per server.",
            check=whole(least=1),
        ),
    ]
    slicing: Annotated[
        str,
        Setting(
            default="auto",
            doc='"auto" for slices of equal size, as in FluentPS, but of whole tensors if the optimizer needs them, as '
            'Muon does; "even" for slices of equal size; "by-parameter" to keep each parameter whole, as in PS-Lite.',
            help="auto: slice the parameters into equal parts, as in FluentPS, but keep tensors whole if the optimizer "
            "needs them, as Muon does. even: equal parts. by-parameter: keep each parameter whole, as in PS-Lite.",
            metavar=f"<{'|'.join(SLICINGS)}>",
            check=one_of(SLICINGS),
        ),
    ]
    overlap: Annotated[
        str,
        Setting(
            default="shards",
            doc='"shards" if each shard answers pulls independently, or "off" if no worker pulls until all workers '
            "have pushed all of their gradients, as in PS-Lite (BSP only).",
            help="shards: each shard answers pulls independently. off: workers pull only after all workers have "
            "pushed to all shards, as in PS-Lite; this requires bsp.",
            metavar="<shards|off>",
            check=one_of(OVERLAPS),
        ),
    ]
    server_device: Annotated[
        str,
        Setting(
            default="cpu",
            doc="the device on which servers make the steps of optimizers that need whole tensors, such as Muon: "
            '"cpu", a device such as "cuda" or "cuda:1", or "auto" for an accelerator of the machine that no worker of '
            "the run uses, if there is one. The steps of other optimizers are made on the CPU.",
            help="Device on which the servers make the steps of optimizers that need whole tensors, such as Muon: cpu, "
            "a device such as cuda or cuda:1, or auto for an accelerator of the machine that no worker of the run "
            "uses, if there is one. The steps of other optimizers are made on the CPU.",
            metavar="<cpu|auto|DEVICE>",
            check=named_device,
        ),
    ]
    split: Annotated[
        str,
        Setting(
            default="auto",
            doc='how `distribute` divides an epoch among the workers by default: "auto", "dynamic" or "static".',
            help="How paceline.distribute divides an epoch, unless the script says how. dynamic: each worker receives "
            "its next batch when it needs one. static: all workers receive equal shares of every joint batch. auto: "
            "static if the sync model keeps all workers in lockstep, as bsp does, else dynamic.",
            metavar="<auto|dynamic|static>",
            check=one_of(SPLITS),
        ),
    ]
    batch: Annotated[
        str,
        Setting(
            default="equal",
            doc='"equal" if `distribute` gives all workers batches of the same size, or "balanced" if it gives '
            "faster workers larger batches and slower workers smaller ones.",
            help="Sizes of the batches that paceline.distribute hands out. equal: the same size for all workers. "
            "balanced: sizes in proportion to the workers' speeds. The joint batch of all workers stays the same.",
            metavar="<equal|balanced>",
            check=one_of(BATCH_SIZINGS),
        ),
    ]
    joint_batch: Annotated[
        bool,
        Setting(
            default=False,
            doc="True if the batch size of a loader is the size of the joint batch: `distribute` divides each batch of "
            "the loader among the workers that are present, so the hyper-parameters mean the same as in one process. "
            "False if each worker has batches of this size, so that the joint batch is larger.",
            help="The batch size in the script is the size of the joint batch: paceline.distribute divides each batch "
            "of the loader among the workers that are present. So the learning rate and the other hyper-parameters "
            "mean the same as in one process. Default: each worker has batches of this size, so with n workers the "
            "joint batch is n times as large.",
        ),
    ]
    seed: Annotated[
        int,
        Setting(
            default=0,
            doc="random seed for the order of the data, the jitter and the sync models.",
            help="Random seed for the data order, the jitter and the sync models.",
            check=whole(least=0),
        ),
    ]
    on_nan: Annotated[
        str,
        Setting(
            default="stop",
            doc='what happens if a gradient contains NaN or inf: "stop" to end the run, or "skip" to drop the push.',
            help="If a gradient contains NaN or inf, stop the run or skip the push. With skip, a worker whose "
            "gradients contain NaN ten times in a row is taken out of the run.",
            metavar="<stop|skip>",
            check=one_of(ON_NAN),
        ),
    ]
    hyperparameters: Annotated[
        str,
        Setting(
            default="translated",
            doc='"translated" if the learning rate, momentum and other hyper-parameters mean under every sync model '
            "what they mean in one process on the joint batch: an update that uses a part of the joint batch takes "
            'the same part of a step. "raw" if each update takes a whole step, as in the papers. Under "bsp", and '
            "under models with a `push_scale`, both have the same effect.",
            help="translated: the learning rate, momentum and other hyper-parameters mean under every "
            "synchronization model what they mean in one process on the joint batch. An update that uses a part of "
            "the joint batch takes the same part of a step. raw: each update takes a whole step, as in the papers. "
            "Under bsp, both have the same effect.",
            metavar="<raw|translated>",
            check=one_of(HYPERPARAMETERS),
        ),
    ]
    wire: Annotated[
        str,
        Setting(
            default="float32",
            doc='codec with which gradients and weights travel between processes: "float32", "bf16" for half of the '
            'bytes, "int8" for a quarter, or "int4" for a seventh. The servers keep and update weights that are '
            'not encoded. A codec for each direction is written "gradients=int8,weights=int4". Weights travel as int8 '
            "or int4 only under models whose workers all have the same weights, such as bsp; under all other models, "
            'they travel as bf16 instead. The codec has no effect if all processes share memory (transport "shm").',
            help="Codec with which gradients and weights travel between processes. On a slow network, int8 (a quarter "
            "of the bytes) and int4 (a seventh) make steps faster; bf16 halves the bytes. The servers keep and update "
            "weights that are not encoded. gradients=int8,weights=int4 names a codec for each direction. Weights "
            "travel as int8 or int4 only under models whose workers all have the same weights, such as bsp; under all "
            "other models, they travel as bf16 instead. Nothing travels between processes that share memory, so "
            "--wire has no effect between them.",
            metavar=f"<{'|'.join(CODECS)}>",
            check=lambda name, value: WireFormat.read(value),
        ),
    ]
    guard: Annotated[
        str | None,
        Setting(
            default=None,
            doc='what happens if training diverges: "off" for nothing, "tell" to print a message, or "stop" to end the '
            'run and keep the last good weights. Default: with translated hyper-parameters "tell", otherwise "off". '
            'NaN in the weights is reported in any case. "temper", a mode of earlier versions, means "tell".',
            help="What happens if training diverges. tell: a message reports this, and says what to do. stop: the "
            "run ends, and the last good weights are kept. off: nothing, except that NaN in the weights is reported. "
            "Default: with translated hyper-parameters, tell; otherwise, off.",
            metavar="<off|tell|stop>",
            check=lambda name, value: guard_mode(value, translated=True),
        ),
    ]
    traces: Annotated[
        str,
        Setting(
            default="recent",
            doc='what is kept of the traces and records: "full" for everything, "recent" for the last 100 MB (or '
            '"recent:500" for the last 500 MB), or "off" for nothing, so that the summary has no statistics.',
            help="What is kept of the traces and records, which grow by about 0.6 KB per iteration of a worker. "
            "recent: the last 100 MB; the statistics still count everything. recent:N: the last N MB. full: "
            "everything. off: nothing, so the summary has no statistics.",
            metavar="<full|recent|off>",
            check=lambda name, value: KeptTraces.read(value),
        ),
    ]
    stall_timeout: Annotated[
        float | None,
        Setting(
            default=None,
            doc="number of seconds after which a silent worker or server is killed if other processes wait for it. "
            "Default: never. If a worker is killed, the run continues without it.",
            help="Kill a worker or server that has been silent for this many seconds while others wait for it. "
            "Default: never. If a worker is killed, the run continues without it. With or without this option, the "
            "terminal shows which process the run is waiting for.",
            metavar="SECONDS",
            check=number(
                lambda seconds: 0 < seconds < math.inf,
                "a number of seconds > 0, for example 60; omit it to disable the timeout",
            ),
            field="stall_timeout_s",
        ),
    ]
    run_dir: Annotated[
        str | os.PathLike[str] | None,
        Setting(
            default=None,
            doc="directory for logs, traces and results. Default: a new directory in ./runs.",
            help="Directory for logs, traces and results. Default: a new directory under ./runs.",
            commands=(RUN, SERVE),
            check=run_dir,
            reported=False,
        ),
    ]
    transport: Annotated[
        str,
        Setting(
            default="auto",
            doc='"shm" (shared memory), "unix" (AF_UNIX sockets), "tcp", or "auto" for the best available transport.',
            help="How processes exchange messages: shared memory (shm), Unix sockets (unix) or TCP (tcp). auto uses "
            "shared memory if the system supports it, otherwise Unix sockets.",
            metavar=f"<{'|'.join(['auto', *TRANSPORTS])}>",
            commands=(RUN,),
            check=one_of(TRANSPORTS, "auto"),
        ),
    ]
    port: Annotated[
        int,
        Setting(
            default=0,
            doc='TCP port of the coordinator if the transport is "tcp" or the engine is "ray"; 0 for any free port.',
            help="TCP port of the coordinator. 0 means any free port. `paceline run` takes a port only with "
            "--transport tcp.",
            commands=(RUN,),
            check=port,
            reported=False,
        ),
    ]
    torchrun_env: Annotated[
        bool,
        Setting(
            default=False,
            doc="True to set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each "
            "worker, as torchrun does, for scripts and loggers that read them.",
            help="Set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each worker, as "
            "torchrun does, for scripts and loggers that read them.",
            commands=(RUN,),
            field=None,
        ),
    ]
    checkpoint_every: Annotated[
        str | float,
        Setting(
            default="5min",
            doc='time between two checkpoints, such as "30s", "5min" or a number of seconds; "off" for no '
            "checkpoints. Training does not wait for checkpoints. A run that finishes within this time writes no "
            "checkpoint.",
            help="Time between two checkpoints, such as 30s, 5min or 1h, or a number of seconds; off for no "
            "checkpoints. Training does not wait for checkpoints. A run that finishes within this time writes no "
            "checkpoint.",
            metavar="TIME|off",
            panel=RESUMING,
            check=duration,
            field="checkpoint_every_s",
            written=written_duration,
        ),
    ]
    keep: Annotated[
        int,
        Setting(
            default=3,
            doc="number of the newest checkpoints that are kept.",
            help="Number of the newest checkpoints that are kept.",
            panel=RESUMING,
            check=whole(least=1),
        ),
    ]
    checkpoint_dir: Annotated[
        str | os.PathLike[str] | None,
        Setting(
            default=None,
            trusted=True,
            doc="directory for the run's checkpoints, for example on shared storage, or the URL of a bucket, such as "
            '"s3://bucket/run", to which the checkpoints are copied from the run directory. Each run has a folder of '
            "its own in this directory or bucket. Default: `checkpoints` in the run directory.",
            help="Directory for the run's checkpoints, for example on shared storage, or the URL of a bucket, such "
            "as s3://bucket/run, to which the checkpoints are copied from the run directory. Each run has a folder of "
            "its own in this directory or bucket. Default: checkpoints in the run directory.",
            metavar="DIR|URL",
            panel=RESUMING,
            check=directory_or_bucket,
        ),
    ]
    resume: Annotated[
        str | os.PathLike[str] | None,
        Setting(
            default=None,
            doc="directory of a run that has ended before it was finished. The job goes on in this directory, from its "
            "newest whole checkpoint. Or the URL of the bucket to which the checkpoints of the run were copied: then "
            "the job goes on in `run_dir`, by default a directory in ./runs.",
            help="Go on with the run in this directory, from its newest whole checkpoint. The command and the "
            "settings of the run are used again, unless you give new ones. Instead of a directory, you can give the "
            "URL of the bucket with the run's checkpoints: then the run goes on in --run-dir.",
            metavar="RUN_DIR|URL",
            panel=RESUMING,
            commands=(RUN, SERVE),
            check=directory_or_bucket,
            field=None,
        ),
    ]
    force: Annotated[
        bool,
        Setting(
            default=False,
            doc="True to use a run directory even if a run in progress holds it. That run ends without saving its "
            "weights, and its progress since its newest checkpoint is lost.",
            help="Use the run directory even if a run in progress holds it. That run ends without saving its "
            "weights, and its progress since its newest checkpoint is lost.",
            panel=RESUMING,
            field=None,
        ),
    ]
    trust: Annotated[
        bool,
        Setting(
            default=False,
            doc="True to let the directory that is resumed decide where checkpoints are, even if you have not "
            "started its run.",
            help="Do what the run directory says: run its command, import its modules, use its paths. Needed if you "
            "did not start its run, or started it with another home directory.",
            panel=RESUMING,
            field=None,
        ),
    ]
    accept_changes: Annotated[
        bool,
        Setting(
            default=False,
            doc="True to resume even if the script has changed since the run began.",
            help="Resume even if the script has changed since the run began.",
            panel=RESUMING,
            commands=(RUN,),
            field=None,
        ),
    ]
    on_server_loss: Annotated[
        str,
        Setting(
            default="resume",
            doc='"resume" if the run goes on from its newest checkpoint when a server is lost, or "stop" to end it.',
            help="resume: if a server is lost, the run goes on from its newest checkpoint, with all processes "
            "started again. stop: the run ends, and its weights are saved.",
            metavar="<resume|stop>",
            panel=RESUMING,
            check=one_of(ON_SERVER_LOSS),
        ),
    ]
    dashboard: Annotated[
        bool | int | str | None,
        Setting(
            default=None,
            trusted=True,
            doc='True, a port or "HOST:PORT" to serve the report of the run as a live page while the run goes on. '
            "The address of the page is printed.",
            help="Serve the report of the run as a live page, at an address that the terminal shows. Without a "
            "value, any free port of this machine is used; 0.0.0.0:8000 also serves other machines.",
            metavar="[[HOST:]PORT]",
            panel=LOOKING,
            commands=(RUN, SERVE),
            field=None,
        ),
    ]
    tensorboard: Annotated[
        str | os.PathLike[str] | None,
        Setting(
            default=None,
            trusted=True,
            doc="directory in which a new directory with the name of the run is created, for TensorBoard files with "
            "the speed, the staleness, the waiting, and the metrics that the script logs. Needs "
            "`pip install paceline[tensorboard]`.",
            help="Write TensorBoard files with the speed, the staleness, the waiting, and the metrics that the script "
            "logs. They are written to a new directory in DIR that has the name of the run. Needs "
            "paceline[tensorboard].",
            metavar="DIR",
            panel=LOOKING,
            commands=(RUN, SERVE),
            field=None,
        ),
    ]
    metrics_port: Annotated[
        int | str | None,
        Setting(
            default=None,
            trusted=True,
            doc='port, or "HOST:PORT", at which the state of the run is served as OpenMetrics, at /metrics. Needs '
            "`pip install paceline[metrics]`.",
            help="Serve the state of the run as OpenMetrics at /metrics, for Prometheus. 0 means any free port. "
            "Needs paceline[metrics].",
            metavar="[HOST:]PORT",
            panel=LOOKING,
            commands=(RUN, SERVE),
            field=None,
        ),
    ]
    pace: Annotated[
        str | Sequence[float | tuple[float, float]] | None,
        Setting(
            default=None,
            doc="minimum duration of an iteration in seconds, for each worker, with a batch of the loader's size. A "
            "worker that finishes earlier sleeps for the rest of this time. The duration is proportional to the size "
            "of the batch; a pair (fixed, proportional) adds a part that does not depend on the size.",
            help="Minimum duration of an iteration in seconds, one number per worker. A worker that finishes an "
            "iteration earlier sleeps until this time has passed. The number applies to a batch of the loader's "
            "size; for other sizes, the duration changes in proportion. .02+.03 stands for a fixed part of .02 and a "
            "proportional part of .03.",
            metavar="S,S,...",
            panel=EMULATION,
            commands=(RUN,),
            check=paces,
            written=written_paces,
        ),
    ]
    slowdown: Annotated[
        str | Sequence[float] | None,
        Setting(
            default=None,
            doc="for each worker, a factor >= 1. The worker's measured compute time, whatever the size of its batch, "
            "is multiplied by this factor.",
            help="Factors >= 1 by which the workers' compute times are multiplied, one factor per worker. The times "
            "are measured, so they depend on the batch size just as they do on the real machine.",
            metavar="X,X,...",
            panel=EMULATION,
            commands=(RUN,),
            check=numbers,
        ),
    ]
    jitter: Annotated[
        float,
        Setting(
            default=0.0,
            doc="amount of random variation: `pace` and `slowdown` are multiplied by a random factor, which is drawn "
            "uniformly between 1 - jitter and 1 + jitter.",
            help="Random variation: in each iteration, the pace or slowdown is multiplied by a uniform random factor "
            "between 1 - J and 1 + J.",
            metavar="J",
            panel=EMULATION,
            commands=(RUN,),
            check=number(lambda jitter: 0 <= jitter < 1, "a number in [0, 1), for example 0.2"),
        ),
    ]


TYPES: dict[str, Any] = get_type_hints(Settings)
"""Name of each setting -> its type in Python."""

SETTINGS: dict[str, Setting] = {
    name: hint.__metadata__[0].named(name)
    for name, hint in get_type_hints(Settings, include_extras=True).items()
}
"""Name of each setting -> its row."""


def checked(settings: Settings) -> dict[str, Any]:
    """Return the value that a run uses for each setting, given the values that a user has set.

    Raises:
        ConfigurationError: a value is not valid.
        TypeError: there is no such setting.
    """
    if unknown := sorted(settings.keys() - SETTINGS.keys()):
        raise TypeError(str(unknown_name("argument", unknown[0], SETTINGS)))
    return {name: row.value(settings.get(name, row.default)) for name, row in SETTINGS.items()}


# -- How `help` and notebooks show a function that takes the settings of a run as `**settings: Unpack[Settings]`

Function = TypeVar("Function", bound=Callable[..., Any])

WIDTH = 114  # width of a docstring without its indentation


def shows_settings(function: Function) -> Function:
    """Show each setting as an argument of a function, in its signature and in its docstring.

    In the docstring, the settings replace the line that documents `settings`.
    """
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    settings = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=row.default, annotation=TYPES[name])
        for name, row in SETTINGS.items()
    ]
    head, _, rest = (inspect.getdoc(function) or "").partition("    settings:")
    lines = [_documented(name, row.doc) for name, row in SETTINGS.items()]
    function.__doc__ = "\n".join([head.rstrip(), *lines]) + rest[rest.index("\n") :]
    function.__signature__ = signature.replace(parameters=[*own, *settings])  # type: ignore[attr-defined]
    return function


def _documented(name: str, doc: str) -> str:
    return textwrap.fill(f"{name}: {doc}", WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)

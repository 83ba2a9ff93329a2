"""`launch`, which runs a training function or a script in several workers, and the engines that place the workers."""

from __future__ import annotations

import inspect
import logging
import math
import os
import pickle
import sys
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Unpack

import cloudpickle
import torch
from msgspec import structs
from rich.console import Console

from .. import VERSION
from ..errors import ConfigurationError, UsageError, unknown_name
from ..look.show_process import Outlets, open_outlets
from ..run.job import Job
from ..run.job_options import make_job
from ..run.resuming import require_same_source
from ..settings import Settings
from ..settings.checks import number
from ..settings.table import shows_settings
from ..shard.foreign import loaded_optimizers
from ..shard.optimizer_sources import OptimizerSources, imported_packages
from ..train.session import current
from ..wire.secure import new_secret, take_secret
from ..wire.transports import TRANSPORTS
from .display import announce_run
from .local import ProcessPlacement
from .processes.devices import assign_devices, shared, with_server_devices
from .processes.spawn import Starter
from .ray import import_ray, start_on_ray
from .results import RunResult
from .run import start
from .terminal import StandardStreams, plain_console

log = logging.getLogger("paceline.launch")

_above_zero = number(lambda value: 0 < value < math.inf, "a number of seconds > 0")


@shows_settings
def launch(
    function: Callable[..., object],
    *,
    args: Sequence[object] = (),
    workers: int | tuple[int, int] | None = None,
    devices: str | torch.device | Sequence[str | torch.device] | None = None,
    engine: str = "local",
    progress: bool | None = None,
    snapshot_every_s: float | None = None,
    placement: ProcessPlacement | None = None,
    show_all: bool = False,
    resources: Mapping[str, float] | None = None,
    **settings: Unpack[Settings],
) -> RunResult:
    """Run a training function in several workers, each in its own process, and return the result.

    Each worker is a separate process. The function is sent to the workers by value if it was defined in a script or
    a notebook, and by reference if it can be imported. The script itself is not run again in the workers.

    Args:
        function: the training function, which uses `DistributedOptimizer` and `distribute`.
        args: arguments for the function.
        workers: number of workers. Default: one for each accelerator of this machine; 2 if there is none. With engine
            "ray", the number is required, and may be a pair of a minimum and a maximum: training begins with the
            minimum number of workers, and pauses while there are fewer. More workers join, up to the maximum, when
            Ray has resources for them.
        devices: the devices of the workers, such as "cuda:0,cuda:1,cpu" or a sequence of devices, one worker for
            each. A single device is used by all workers. Default: "auto", all accelerators of the kind that torch
            chooses, or the CPU if there is none. See `paceline.device`.
        engine: where the processes run: "local" for this machine, or "ray" for a Ray cluster, which needs
            `pip install paceline[ray]` on all of its nodes. Without a connection to a cluster, `ray.init()` is called
            and, at the end, `ray.shutdown()`.
        progress: True to show the progress of the run. Default: True if standard error is a terminal.
        snapshot_every_s: interval in seconds at which copies of the weights are stored in the result. Default: no
            copies are stored.
        placement: machine of each process; requires transport "tcp". Default: all processes run on this machine.
        show_all: True to show the output of all workers and servers, each line with the name of its process. Default:
            show the output of worker 0.
        resources: with engine "ray", the resources that Ray reserves for each worker. Default: {"CPU": 1}. With
            "GPU", Ray sets CUDA_VISIBLE_DEVICES for the worker. Each server gets one CPU.
        settings: how the run trains and what it shows, such as `sync` and `seed`. See `paceline.settings.table`.

    Raises:
        ConfigurationError: an argument is not valid; no process was started.
        RunFailedError: a process failed; all processes have ended. The notes of the exception say where the log is
            and where the weights at the time of the failure were saved.
        KeyboardInterrupt: Ctrl-C was pressed; all processes have ended and the weights were saved. SIGTERM, SIGHUP
            and SIGQUIT raise `SystemExit` in the same way, unless the program has its own handlers for these signals.
    """
    if current() is not None:
        raise UsageError(
            "launch() was called inside a worker. If the file that defines the training function also calls "
            "launch(), put that call under: if __name__ == '__main__':"
        )
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    if snapshot_every_s is not None:
        _above_zero("snapshot_every_s", snapshot_every_s)
    try:
        payload = cloudpickle.dumps(sys.path) + cloudpickle.dumps((function, tuple(args)))
    except (TypeError, pickle.PicklingError, RuntimeError) as error:
        raise ConfigurationError(
            f"the training function, or an object that it refers to, cannot be sent to another process: {error}. "
            "Create such objects inside the function."
        ) from error
    chosen = ENGINES[engine]
    source = _source_of(function)
    asked = Asked(workers, devices, placement, resources, snapshot_every_s, show_all, settings, source)
    job = make_job(**{**settings, **chosen.options(asked)}, dry_run=True)
    job = structs.replace(job, optimizers=loaded_optimizers(settings.get("imports", ())))
    if job.resumed is not None and not settings.get("accept_changes"):
        name = "the training function"
        if note := require_same_source(name, asked.source, Path(job.run_dir), "accept_changes=True"):
            log.warning("%s", note)
    outlets = open_outlets(
        settings.get("dashboard"), settings.get("tensorboard"), settings.get("metrics_port")
    )
    console = plain_console(
        stderr=True, quiet=not (progress if progress is not None else sys.stderr.isatty())
    )
    announce_run(job, console)
    if warning := shared(job.devices):
        log.warning("%s", warning)
    with outlets:
        return chosen.start(job, payload, asked, console, outlets)


def run_script(
    job: Job,
    script: Path,
    arguments: Sequence[str],
    *,
    console: Console,
    starter: Starter | None = None,
    module: str = "",
    show_all: bool = False,
    observer: Sequence[str] = (),
    outlets: Outlets | None = None,
    command: str = "",
    force: bool = False,
) -> RunResult:
    """Run a script in every worker, as `python script arguments...` would.

    Args:
        job: the configuration of the run.
        script: path of the script.
        arguments: arguments of the script.
        console: console for the progress display.
        starter: starts the processes; by default, a new starter.
        module: name of the script as a module, to run it as `python -m module arguments...` would.
        show_all: see `launch`.
        observer: a program and its first arguments. If given, the workers run this program. Its further arguments are
            the script and the script's arguments, and it runs the script.
        outlets: where the run is shown while it goes on.
        command: the command line that repeats the run. Default: the command line of this process.
        force: see `start`.
    """
    path = [os.getcwd() if module else str(script.resolve().parent), *sys.path]
    packages = (*job.optimizers.packages, *imported_packages(script))
    job = structs.replace(job, optimizers=OptimizerSources(packages, str(script.resolve())))
    order = ["module", module] if module else ["script", *observer, str(script)]
    streams = StandardStreams(reads=True, show_all=show_all)
    return start(
        job,
        [*order, *arguments],
        b"",
        path,
        console=console,
        starter=starter,
        streams=streams,
        outlets=outlets,
        command=command,
        source=script.read_text(encoding="utf-8", errors="replace"),
        force=force,
    )


def _source_of(function: Callable[..., object]) -> str:
    """Return the source of a function; "" if it cannot be read, as for a `functools.partial`."""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""


# -- The engines of `launch`: where the processes of a run are placed, and how the launcher hears of their end
#
# The local engine starts all processes on this machine (see `start.local`). Any other engine places
# *programs* on machines: one program serves the run (see `start.run`), and one for each worker joins
# the run (see `start.join`). Each program starts the processes of its machine as the local engine does, and
# tells the coordinator how they end. So such an engine knows nothing of servers and workers: it places its programs,
# and places a program again if the program ends too early.
#
# A scheduler that starts the programs by itself, such as Slurm, needs no engine (see `start.schedulers`).


class Asked(NamedTuple):
    """The arguments of `launch` that concern an engine. See `launch` for the attributes that are not described here.

    Attributes:
        source: the source of the training function; "" if it cannot be read.
    """

    workers: int | tuple[int, int] | None
    devices: str | torch.device | Sequence[str | torch.device] | None
    placement: ProcessPlacement | None
    resources: Mapping[str, float] | None
    snapshot_every_s: float | None
    show_all: bool
    settings: Settings
    source: str


class Engine(ABC):
    """Places the processes of a run for `launch`, on this machine or on others.

    Attributes:
        name: the name by which users choose the engine.
    """

    name: ClassVar[str]

    @abstractmethod
    def options(self, asked: Asked) -> dict[str, Any]:
        """Return the arguments of `make_job` that the engine decides. These replace the user's arguments.

        Raises:
            ConfigurationError: the engine cannot do what the user asks for.
        """

    @abstractmethod
    def start(self, job: Job, payload: bytes, asked: Asked, console: Console, outlets: Outlets) -> RunResult:
        """Place the processes of a run, wait until all of them have ended, and return the result.

        Args:
            job: the configuration of the run. The run directory does not exist yet.
            payload: the module search path and the training function, for each worker.
            asked: what the user asks for.
            console: console for messages.
            outlets: where the run is shown while it goes on.

        Raises:
            RunFailedError: a process has failed, or could not be placed.
            KeyboardInterrupt: Ctrl-C was pressed.
        """


class Local(Engine):
    """All processes run on this machine."""

    name = "local"

    def options(self, asked: Asked) -> dict[str, Any]:
        workers, settings = asked.workers, asked.settings
        if isinstance(workers, tuple) or asked.resources is not None:
            given = "resources is given" if asked.resources is not None else f"workers is {workers!r}"
            raise ConfigurationError(
                f"{given}, but engine is {self.name!r}; this needs engine {OnRay.name!r}."
            )
        imports, masked = settings.get("imports", ()), not settings.get("torchrun_env")
        assigned = assign_devices(asked.devices, workers, usual=2, imports=imports, masked=masked)
        return {"workers": assigned.workers, "devices": assigned.devices}

    def start(self, job: Job, payload: bytes, asked: Asked, console: Console, outlets: Outlets) -> RunResult:
        job = with_server_devices(job)
        return start(
            job,
            ["function"],
            payload,
            sys.path,
            console=console,
            snapshot_every_s=asked.snapshot_every_s,
            placement=asked.placement,
            streams=StandardStreams(show_all=asked.show_all),
            source=asked.source,
            outlets=outlets,
            force=asked.settings.get("force", False),
        )


class OnRay(Engine):
    """Ray places each worker on a node, and the coordinator and all servers on one node. See `start.ray`."""

    name = "ray"

    def options(self, asked: Asked) -> dict[str, Any]:
        import_ray()
        workers, settings = asked.workers, asked.settings
        transport = settings.get("transport", "auto")
        if transport not in ("auto", *(name for name, each in TRANSPORTS.items() if each.spans_machines)):
            raise ConfigurationError(
                f"transport is {transport!r}, but the nodes of a Ray cluster are connected by 'tcp'; omit transport."
            )
        if workers is None:
            raise ConfigurationError(
                "workers is missing: engine 'ray' needs the number of workers, such as 4 or (2, 16)."
            )
        given = {
            "torchrun_env": settings.get("torchrun_env", False),
            "devices": asked.devices is not None,
            "placement": asked.placement is not None,
        }
        if name := next((name for name, is_given in given.items() if is_given), ""):
            raise ConfigurationError(
                f"{name} cannot be used with engine 'ray', because Ray places the workers; omit it."
            )
        outlets = ("dashboard", "tensorboard", "metrics_port")
        if any(settings.get(name) not in (None, False) for name in outlets):
            raise ConfigurationError(
                "dashboard, tensorboard and metrics_port cannot be used with engine 'ray', because Ray places the "
                "coordinator; omit them."
            )
        least, most = workers if isinstance(workers, tuple) else (workers, workers)
        return {
            "workers": most,
            "least": least,
            "pause_below": least if isinstance(workers, tuple) else 1,
            "joined": True,
            "servers": settings.get("servers") or 1,
            "transport": "tcp",
        }

    def start(self, job: Job, payload: bytes, asked: Asked, console: Console, outlets: Outlets) -> RunResult:
        token = take_secret(os.environ) or new_secret()
        return start_on_ray(
            structs.replace(job, version=VERSION, token=token, secure=True),
            payload,
            sys.path,
            resources={"CPU": 1.0} if asked.resources is None else asked.resources,
            console=console,
            snapshot_every_s=asked.snapshot_every_s,
            show_all=asked.show_all,
            source=asked.source,
            force=asked.settings.get("force", False),
        )


ENGINES: dict[str, Engine] = {each.name: each for each in (Local(), OnRay())}
"""Name -> engine."""

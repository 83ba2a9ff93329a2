"""Functions that run a training function or a script in several workers and return the result."""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Unpack

import cloudpickle
import torch
from msgspec import structs
from rich.console import Console

from ..errors import ConfigurationError, UsageError, unknown_name
from ..frontend.session import current
from ..outlets.wanted import Outlets, open_outlets
from ..plugins.optimizer_sources import OptimizerSources, imported_packages
from ..runtime.job import Job
from ..runtime.job_options import make_job
from ..runtime.resuming import require_same_source
from ..settings import Settings
from ..settings.arguments import shows_settings
from ..shard.foreign import loaded_optimizers
from .engines import ENGINES, Asked
from .live_run.local import Placement
from .live_run.run import start
from .live_run.run_results import RunResult
from .processes.devices import shared
from .processes.starting import Starter
from .terminal.channels import Streams
from .terminal.output import plain_console
from .terminal.run_display import announce

__all__ = ["ENGINES", "RunResult", "launch", "run_script"]

log = logging.getLogger("paceline.launch")


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
    placement: Placement | None = None,
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
            "ray", this is required and may be a pair: training begins with the least number of workers and pauses
            below it, and others join, as Ray has resources for them, up to the largest number.
        devices: the devices of the workers, such as "cuda:0,cuda:1,cpu" or a sequence of devices, one worker for
            each. A single device is used by all workers. Default: "auto", all accelerators of the kind that torch
            chooses, or the CPU if there is none. See `paceline.device`.
        engine: where the processes run: "local" for this machine, or "ray" for a Ray cluster, which needs
            `pip install paceline[ray]` on all of its nodes. Without a connection to a cluster, `ray.init()` is called
            and, at the end, `ray.shutdown()`.
        progress: True to show the progress of the run. Default: True if standard error is a terminal.
        snapshot_every_s: interval in seconds at which copies of the weights are stored in the result. Default: none.
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
    announce(job, console)
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
        starter: starts the processes; by default, a new one.
        module: name of the script as a module, to run it as `python -m module arguments...` would.
        show_all: see `launch`.
        observer: a program and its first arguments. If given, the workers run this program, which is also given the
            script and its arguments, and runs them.
        outlets: where the run is shown while it goes on.
        command: the command line that repeats the run. Default: that of this process.
        force: see `start`.
    """
    path = [os.getcwd() if module else str(script.resolve().parent), *sys.path]
    packages = (*job.optimizers.packages, *imported_packages(script))
    job = structs.replace(job, optimizers=OptimizerSources(packages, str(script.resolve())))
    order = ["module", module] if module else ["script", *observer, str(script)]
    streams = Streams(reads=True, show_all=show_all)
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
        source=script.read_text(errors="replace"),
        force=force,
    )


def _source_of(function: Callable[..., object]) -> str:
    """Return the source of a function; "" if it cannot be read, as for a `functools.partial`."""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""

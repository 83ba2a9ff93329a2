"""Functions that run a training function or a script in several workers and return the result."""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Unpack

import cloudpickle
import torch
from msgspec import structs
from rich.console import Console

from .. import __version__
from ..errors import ConfigurationError, UsageError, unknown_name
from ..frontend.session import current
from ..outlets.wanted import Outlets, open_outlets
from ..plugins.optimizer_sources import OptimizerSources, imported_packages
from ..runtime.job import Job
from ..runtime.job_options import make_job
from ..settings import Settings
from ..settings.arguments import shows_settings
from ..shard.foreign import loaded_optimizers
from ..wire.addresses import TRANSPORTS
from ..wire.secret import new_secret, take_secret
from .channels import Streams
from .devices import Assigned, assign_devices, shared
from .local import Placement
from .progress import announce
from .ray_run import import_ray, start_on_ray
from .results import RunResult
from .run import start
from .starting import Starter

__all__ = ["ENGINES", "RunResult", "launch", "run_script"]

log = logging.getLogger("paceline.launch")

ENGINES = ("local", "ray")


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
    on_ray = engine == "ray"
    if on_ray:
        import_ray()
        _require_for_ray(settings, placement, workers, devices)
        if any(
            settings.get(name) not in (None, False) for name in ("dashboard", "tensorboard", "metrics_port")
        ):
            raise ConfigurationError(
                "dashboard, tensorboard and metrics_port cannot be used with engine 'ray', because Ray places the "
                "coordinator; omit them."
            )
    elif isinstance(workers, tuple) or resources is not None:
        given = "resources is given" if resources is not None else f"workers is {workers!r}"
        raise ConfigurationError(f"{given}, but engine is {engine!r}; this needs engine 'ray'.")
    imports = settings.get("imports", ())
    assigned = Assigned(0)
    if on_ray:
        settings |= {"transport": "tcp", "servers": settings.get("servers") or 1}
    elif not isinstance(workers, tuple):
        masked = not settings.get("torchrun_env")
        assigned = assign_devices(devices, workers, usual=2, imports=imports, masked=masked)
        workers = assigned.workers
    assert workers is not None
    least, most = workers if isinstance(workers, tuple) else (workers, workers)
    job = make_job(
        workers=most,
        least=least,
        devices=assigned.devices,
        pause_below=(least if isinstance(workers, tuple) else 1) if on_ray else 0,
        joined=on_ray,
        dry_run=True,
        **settings,
    )
    job = structs.replace(job, optimizers=loaded_optimizers(imports))
    outlets = open_outlets(
        settings.get("dashboard"), settings.get("tensorboard"), settings.get("metrics_port")
    )
    console = Console(stderr=True, quiet=not (progress if progress is not None else sys.stderr.isatty()))
    announce(job, console)
    if warning := shared(job.devices):
        log.warning("%s", warning)
    if on_ray:
        job = structs.replace(
            job, version=__version__, token=take_secret(os.environ) or new_secret(), secure=True
        )
        return start_on_ray(
            job,
            payload,
            sys.path,
            resources={"CPU": 1.0} if resources is None else resources,
            console=console,
            snapshot_every_s=snapshot_every_s,
            show_all=show_all,
        )
    with outlets:
        return start(
            job,
            ["function"],
            payload,
            sys.path,
            console=console,
            snapshot_every_s=snapshot_every_s,
            placement=placement,
            streams=Streams(show_all=show_all),
            outlets=outlets,
        )


def _require_for_ray(
    settings: Settings, placement: Placement | None, workers: object, devices: object
) -> None:
    """Raise `ConfigurationError` for options that a run on a Ray cluster does not have."""
    transport, torchrun_env = settings.get("transport", "auto"), settings.get("torchrun_env")
    if transport not in ("auto", *(name for name, each in TRANSPORTS.items() if each.spans_machines)):
        raise ConfigurationError(
            f"transport is {transport!r}, but the nodes of a Ray cluster are connected by 'tcp'; omit transport."
        )
    if workers is None:
        raise ConfigurationError(
            "workers is None, but engine 'ray' needs their number, such as 4 or (2, 16)."
        )
    if torchrun_env or placement is not None or devices is not None:
        name = "torchrun_env" if torchrun_env else "devices" if devices is not None else "placement"
        raise ConfigurationError(
            f"{name} cannot be used with engine 'ray', because Ray places the workers; omit it."
        )


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
    )

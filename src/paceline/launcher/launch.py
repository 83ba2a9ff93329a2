"""Functions that run a training function or a script in several workers and return the result."""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

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
from ..shard.foreign import loaded_optimizers
from ..sync import SyncModel
from ..sync.schedule import Schedule
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


def launch(
    function: Callable[..., object],
    *,
    args: Sequence[object] = (),
    workers: int | tuple[int, int] | None = None,
    devices: str | torch.device | Sequence[str | torch.device] | None = None,
    servers: int | None = None,
    shards: int | None = None,
    slicing: str = "even",
    overlap: str = "shards",
    sync: str | SyncModel | Sequence[SyncModel] | Schedule = "bsp",
    imports: Sequence[str] = (),
    engine: str = "local",
    transport: str = "auto",
    port: int = 0,
    split: str = "auto",
    batch: str = "equal",
    seed: int = 0,
    pace: Sequence[float | tuple[float, float]] | None = None,
    slowdown: Sequence[float] | None = None,
    jitter: float = 0.0,
    on_nan: str = "stop",
    hyperparameters: str = "translated",
    wire: str = "float32",
    run_dir: str | os.PathLike[str] | None = None,
    guard: str | None = None,
    traces: str = "recent",
    stall_timeout: float | None = None,
    torchrun_env: bool = False,
    progress: bool | None = None,
    snapshot_every_s: float | None = None,
    placement: Placement | None = None,
    show_all: bool = False,
    resources: Mapping[str, float] | None = None,
    dashboard: bool | int | str = False,
    tensorboard: str | os.PathLike[str] | None = None,
    metrics_port: int | str | None = None,
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
        servers: number of servers. Default: one for each CPU core that the workers leave free, but at least one; with
            engine "ray", one.
        shards: number of slices into which the parameters are divided. Default: one per server.
        slicing: "even" for slices of equal size, as in FluentPS, or "by-parameter" to keep each parameter whole, as
            in PS-Lite.
        overlap: "shards" if each shard answers pulls independently, or "off" if no worker pulls until all workers
            have pushed all of their gradients, as in PS-Lite (BSP only).
        sync: the sync model, as an object, a list with one object per shard, or a string in the notation of the
            command line. The string may also describe a schedule ("bsp@0,elastic-bsp@epoch:5").
        imports: names of modules that define conditions, if the function changes to these conditions during the run
            with `paceline.set_sync`, of packages that define the optimizer, if the function itself imports it, and
            of packages that add a kind of device to torch.
        engine: where the processes run: "local" for this machine, or "ray" for a Ray cluster, which needs
            `pip install paceline[ray]` on all of its nodes. Without a connection to a cluster, `ray.init()` is called
            and, at the end, `ray.shutdown()`.
        transport: "shm" (shared memory), "unix" (AF_UNIX sockets), "tcp", or "auto" for the best one available.
        port: TCP port of the coordinator if the transport is "tcp" or the engine is "ray"; 0 for any free port.
        split: how `distribute` divides an epoch among the workers by default: "auto", "dynamic" or "static".
        batch: "equal" if `distribute` gives all workers batches of the same size, or "balanced" if it gives faster
            workers larger batches and slower workers smaller ones.
        seed: random seed for the order of the data, the jitter and the sync models.
        pace: minimum duration of an iteration in seconds, for each worker, with a batch of the loader's size. A
            worker that finishes earlier sleeps for the rest of that time. The duration is proportional to the size of
            the batch; a pair (fixed, proportional) adds a part that does not depend on the size.
        slowdown: for each worker, a factor >= 1. The worker's measured compute time, whatever the size of its batch,
            is multiplied by this factor.
        jitter: amount of random variation: `pace` and `slowdown` are multiplied by a random factor, which is drawn
            uniformly between 1 - jitter and 1 + jitter.
        on_nan: "stop" to end the run if a gradient contains NaN or inf, or "skip" to drop that push.
        hyperparameters: "translated" if the learning rate, momentum and other hyper-parameters mean under every sync
            model what they mean in one process on the joint batch: an update that uses a part of the joint batch
            takes the same part of a step. "raw" if each update takes a whole step, as in the papers. Under "bsp", and
            under models with a `push_scale`, both are the same.
        wire: format in which float32 gradients and weights travel between processes: "float32", or "bf16" to round
            them to bfloat16, so that half as many bytes travel. The servers keep and update float32 weights. A format
            for each direction is written "gradients=bf16,weights=float32". Without effect if all processes share
            memory (transport "shm").
        run_dir: directory for logs, traces and results. Default: a new directory in ./runs.
        guard: what happens if training diverges: "off" for nothing, "tell" to say it, "temper" to halve the learning
            rate as well, at most four times, until training goes well again, or "stop" to end the run and keep the
            last good weights. Default: "temper" if hyper-parameters are translated, else "off". NaN in the weights is
            said in any case, and under `bsp`, "temper" leaves the learning rate alone.
        traces: what is kept of the traces and records: "full" for everything, "recent" for the last 100 MB (or
            "recent:500" for the last 500 MB), or "off" for nothing; the summary then has no statistics.
        stall_timeout: number of seconds after which a silent worker or server is killed if others wait for it.
            Default: never. If a worker is killed, the run continues without it.
        torchrun_env: True to set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each
            worker, as torchrun does, for scripts and loggers that read them.
        progress: True to show the progress of the run. Default: True if standard error is a terminal.
        snapshot_every_s: interval in seconds at which copies of the weights are stored in the result. Default: none.
        placement: machine of each process; requires transport "tcp". Default: all processes run on this machine.
        show_all: True to show the output of all workers and servers, each line with the name of its process. Default:
            show the output of worker 0.
        resources: with engine "ray", the resources that Ray reserves for each worker. Default: {"CPU": 1}. With
            "GPU", Ray sets CUDA_VISIBLE_DEVICES for the worker. Each server gets one CPU.
        dashboard: True, a port or "HOST:PORT" to serve the report of the run as a live page while the run goes on.
            Its address is printed.
        tensorboard: directory for what the script logs, the speed, staleness and waiting; a new directory in it has
            the name of the run. Needs `pip install paceline[tensorboard]`.
        metrics_port: port, or "HOST:PORT", at which the state of the run is served as OpenMetrics, at /metrics. Needs
            `pip install paceline[metrics]`.

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
        _require_for_ray(transport, torchrun_env, placement, workers, devices)
        if dashboard is not False or tensorboard is not None or metrics_port is not None:
            raise ConfigurationError(
                "dashboard, tensorboard and metrics_port cannot be used with engine 'ray', because Ray places the "
                "coordinator; omit them."
            )
    elif isinstance(workers, tuple) or resources is not None:
        given = "resources is given" if resources is not None else f"workers is {workers!r}"
        raise ConfigurationError(f"{given}, but engine is {engine!r}; this needs engine 'ray'.")
    assigned = Assigned(0)
    if not isinstance(workers, tuple) and not on_ray:
        assigned = assign_devices(devices, workers, usual=2, imports=imports, masked=not torchrun_env)
        workers = assigned.workers
    assert workers is not None
    least, most = workers if isinstance(workers, tuple) else (workers, workers)
    job = make_job(
        workers=most,
        least=least,
        devices=assigned.devices,
        pause_below=(least if isinstance(workers, tuple) else 1) if on_ray else 0,
        joined=on_ray,
        servers=1 if on_ray and servers is None else servers,
        shards=shards,
        slicing=slicing,
        overlap=overlap,
        sync=sync,
        imports=imports,
        transport="tcp" if on_ray else transport,
        split=split,
        batch=batch,
        seed=seed,
        pace=pace,
        slowdown=slowdown,
        jitter=jitter,
        on_nan=on_nan,
        hyperparameters=hyperparameters,
        wire=wire,
        run_dir=run_dir,
        guard=guard,
        traces=traces,
        stall_timeout=stall_timeout,
        port=port,
        torchrun_env=torchrun_env,
        dry_run=True,
    )
    job = structs.replace(job, optimizers=loaded_optimizers(imports))
    outlets = open_outlets(dashboard, tensorboard, metrics_port)
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
    transport: str, torchrun_env: bool, placement: Placement | None, workers: object, devices: object
) -> None:
    """Raise `ConfigurationError` for options that a run on a Ray cluster does not have."""
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

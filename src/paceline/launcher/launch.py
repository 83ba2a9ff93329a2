"""Start a run, watch it, bring back what it made. The same path for a function and for a script."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import cloudpickle
from rich.console import Console

from ..errors import ConfigurationError, UsageError, unknown_name
from ..frontend.session import current
from ..runtime.job import Job, make_job
from ..sync import SyncModel
from ..sync.schedule import Schedule
from .local import Placement
from .results import RunResult
from .run import start

__all__ = ["ENGINES", "RunResult", "launch", "run_script"]

ENGINES = ("local",)


def launch(
    function: Callable[..., object],
    *,
    args: Sequence[object] = (),
    workers: int,
    servers: int | None = None,
    shards: int | None = None,
    slicing: str = "even",
    overlap: str = "shards",
    sync: str | SyncModel | Sequence[SyncModel] | Schedule = "bsp",
    imports: Sequence[str] = (),
    engine: str = "local",
    transport: str = "auto",
    port: int = 0,
    seed: int = 0,
    pace: Sequence[float] | None = None,
    slowdown: Sequence[float] | None = None,
    jitter: float = 0.0,
    on_nan: str = "stop",
    run_dir: str | os.PathLike[str] | None = None,
    stall_timeout: float | None = None,
    progress: bool | None = None,
    snapshot_every_s: float | None = None,
    placement: Placement | None = None,
) -> RunResult:
    """Run a training function in every worker of a new run, each a process of its own.

    The function is sent to fresh interpreters by value if it was defined in a script or a notebook, by
    reference if it can be imported; the script itself is not run again in them.

    Args:
        function: trains, with a `DistributedOptimizer` and `distribute`.
        args: what it is called with.
        workers: how many workers.
        servers: how many servers; by default as many as cores are left over, at least one.
        shards: how many slices the parameters are cut into; by default one for each server.
        slicing: "even" (EPS), or "by-parameter" as PS-Lite does.
        overlap: "shards": each answers for itself; "off": nobody pulls until everybody has pushed everything, as in
            PS-Lite (BSP only).
        sync: the sync model, as a value, as a list of one for each shard, or in the notation of the command line,
            which also has schedules ("bsp@0,elastic-bsp@epoch:5").
        imports: modules from which the function may take conditions in mid-run, with `paceline.set_sync`.
        engine: where processes come from: "local".
        transport: "shm" (shared memory), "unix" (sockets of this machine), "tcp", or "auto" for the best there is.
        port: TCP port of the coordinator with transport "tcp"; 0 for any free one.
        seed: of the data's order and the jitter.
        pace: for each worker, the least seconds per iteration (it sleeps the rest).
        slowdown: for each worker, the factor by which its measured compute time is stretched.
        jitter: varies both by a uniform factor 1 +- jitter.
        on_nan: "stop" the run at a gradient with NaN or inf, or "skip" that push.
        run_dir: where logs, traces and results go; by default a new directory under ./runs.
        stall_timeout: end a worker or server that has been silent for this many seconds while others wait for it; by
            default never. A worker is lost then, and the others go on.
        progress: show it; by default, if there is a terminal.
        snapshot_every_s: keep the weights of every so many seconds, on a fixed grid of times.
        placement: the machine of each process (transport "tcp"); by default all listen on loopback.

    Raises:
        ConfigurationError: bad input; nothing was started.
        RunFailedError: a process failed; nothing is left running. Its notes say where the log is, and where the
            weights are, as they were then.
        KeyboardInterrupt: Ctrl-C; every process has been ended, and the weights were saved. SIGTERM and SIGHUP raise
            a `SystemExit` likewise, unless the program has handlers of its own.
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
            f"the training function, or something that it refers to, cannot be sent to another process: {error}. "
            "Create such things inside the function."
        ) from error
    job = make_job(
        workers=workers,
        servers=servers,
        shards=shards,
        slicing=slicing,
        overlap=overlap,
        sync=sync,
        imports=imports,
        transport=transport,
        seed=seed,
        pace=pace,
        slowdown=slowdown,
        jitter=jitter,
        on_nan=on_nan,
        run_dir=run_dir,
        stall_timeout=stall_timeout,
        port=port,
        dry_run=True,
    )
    console = Console(stderr=True, quiet=not (progress if progress is not None else sys.stderr.isatty()))
    return start(
        job,
        ["function"],
        payload,
        sys.path,
        console=console,
        snapshot_every_s=snapshot_every_s,
        placement=placement,
    )


def run_script(job: Job, script: Path, arguments: Sequence[str], *, console: Console) -> RunResult:
    """Run a script in every worker, as `python script arguments...` would."""
    path = [str(script.resolve().parent), *sys.path]
    return start(job, ["script", str(script), *arguments], b"", path, console=console)

"""Start a run, watch it, bring back what it made. The same path for a function and for a script."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import safetensors.torch
import torch
from rich.console import Console

from ..errors import ConfigurationError, PacelineError, RunFailedError, UsageError, unknown_name
from ..measures import measure
from ..runtime.coordinator import Coordinator
from ..runtime.job import Job, make_job
from ..runtime.reader import Reader, WeightsSnapshot
from ..runtime.records import read_records
from ..runtime.session import current
from ..runtime.stall import StallWatch
from ..sync import Conditions, SyncModel
from ..sync.schedule import Schedule
from ..sync.user_conditions import local_conditions
from ..trace import Trace, read
from .local import LocalEngine, Placement
from .progress import Progress

__all__ = ["ENGINES", "RunResult", "launch", "run_script", "start"]

ENGINES = ("local",)

POLL_INTERVAL_S = 0.05
REASONS_TIMEOUT_S = 0.5  # after the first sign of a failure: its cause may be reported after its consequences
GRACE_S = 10.0  # for processes that have nothing left to do
LAST_WORDS_S = 0.5  # for servers of a run that has failed: to write their traces


class RunResult(msgspec.Struct, frozen=True):
    """What a run made.

    Attributes:
        state_dict: the final weights and buffers under the model's own names, as plain tensors.
        summary: figures of the run; also `summary.json` in `run_dir`.
        run_dir: logs, traces, `weights.safetensors`, `summary.json`.
        snapshots: (seconds since training began, weights), if they were asked for.
    """

    state_dict: dict[str, torch.Tensor]
    summary: dict[str, Any]
    run_dir: Path
    snapshots: list[tuple[float, WeightsSnapshot]]

    @property
    def trace(self) -> list[Trace]:
        """The trace of each shard, in order, then the coordinator's."""
        return read_traces(self.run_dir)


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
    engine: str = "local",
    transport: str = "auto",
    port: int = 0,
    seed: int = 0,
    pace: Sequence[float] | None = None,
    slowdown: Sequence[float] | None = None,
    jitter: float = 0.0,
    on_nan: str = "stop",
    run_dir: str | os.PathLike[str] | None = None,
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
        engine: where processes come from: "local".
        transport: "shm" (shared memory), "unix" (sockets of this machine), "tcp", or "auto" for the best there is.
        port: TCP port of the coordinator with transport "tcp"; 0 for any free one.
        seed: of the data's order and the jitter.
        pace: for each worker, the least seconds per iteration (it sleeps the rest).
        slowdown: for each worker, the factor by which its measured compute time is stretched.
        jitter: varies both by a uniform factor 1 +- jitter.
        on_nan: "stop" the run at a gradient with NaN or inf, or "skip" that push.
        run_dir: where logs, traces and results go; by default a new directory under ./runs.
        progress: show it; by default, if there is a terminal.
        snapshot_every_s: keep the weights of every so many seconds, on a fixed grid of times.
        placement: the machine of each process (transport "tcp"); by default all listen on loopback.

    Raises:
        ConfigurationError: bad input; nothing was started.
        RunFailedError: a process failed; nothing is left running.
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
        transport=transport,
        seed=seed,
        pace=pace,
        slowdown=slowdown,
        jitter=jitter,
        on_nan=on_nan,
        run_dir=run_dir,
        port=port,
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


def start(
    job: Job,
    worker_arguments: Sequence[str],
    worker_input: bytes,
    path: Sequence[str],
    *,
    console: Console,
    snapshot_every_s: float | None = None,
    placement: Placement | None = None,
) -> RunResult:
    """Start the processes of a run, wait for its end, collect. See `launch`.

    Args:
        job: the run.
        worker_arguments: of each worker's process.
        worker_input: what it finds on its standard input.
        path: where the servers look for modules with conditions.
        console: for the progress.
        snapshot_every_s: see `launch`.
        placement: see `launch`.
    """
    if placement is None:
        placement = Placement.on_loopback(job)
    else:
        placement.require_for(job)
    server_input = _for_servers(job, path)
    coordinator = Coordinator.listen(job, placement.coordinator)
    coordinator.start()
    with Progress(coordinator, console) as progress:
        engine = LocalEngine(job, coordinator.address, placement, progress.print)
        sampler = Sampler(coordinator, snapshot_every_s) if snapshot_every_s else None
        stall = StallWatch(coordinator)
        try:
            engine.start(worker_arguments, worker_input, server_input)
            if sampler is not None:
                sampler.start()
            while not coordinator.over.wait(POLL_INTERVAL_S):
                progress.update()
                if engine.failed_server() or engine.failed_worker():
                    break
                if report := stall.look():
                    coordinator.fail(RunFailedError("the run", report))
            _raise_failure(coordinator, engine)
            final = _final_weights(coordinator)
            if sampler is not None:
                sampler.stop()
            coordinator.stop()
            engine.end(grace_s=GRACE_S)
        except BaseException:
            coordinator.stop()
            engine.end(grace_s=LAST_WORDS_S)
            raise
    for worker in coordinator.lost:
        console.print(f"[yellow]worker {worker} was lost; the others went on without it[/]")
    run_dir = Path(job.run_dir)
    summary = _summary(job, coordinator, read_traces(run_dir))
    (run_dir / "summary.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"
    )
    safetensors.torch.save_file(
        {name: tensor.contiguous() for name, tensor in final.state_dict.items()},
        run_dir / "weights.safetensors",
    )
    return RunResult(final.state_dict, summary, run_dir, sampler.taken if sampler is not None else [])


class Sampler:
    """Takes a snapshot of the weights at every multiple of an interval, on a thread of its own."""

    def __init__(self, coordinator: Coordinator, interval_s: float) -> None:
        self.taken: list[tuple[float, WeightsSnapshot]] = []
        self._coordinator = coordinator
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-sampler", daemon=True)

    def start(self) -> None:
        """Begin when training does."""
        self._thread.start()

    def stop(self) -> None:
        """Take no more."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        coordinator = self._coordinator
        while not coordinator.started.wait(POLL_INTERVAL_S):
            if self._stopped.is_set() or coordinator.over.is_set():
                return
        # A server that is gone ends this quietly: the run itself says what has failed.
        with contextlib.suppress(PacelineError), _reader(coordinator) as reader:
            tick = 0
            while True:
                due_s = coordinator.started_s + tick * self._interval_s
                if self._stopped.wait(max(0.0, due_s - coordinator.job.now_s())) or coordinator.over.is_set():
                    return
                snapshot = reader.read()
                now_s = coordinator.job.now_s() - coordinator.started_s
                self.taken.append((now_s, snapshot))
                tick = max(tick + 1, math.ceil(now_s / self._interval_s))  # what was missed is missed


def read_traces(run_dir: Path) -> list[Trace]:
    """The traces in a run directory: each shard's, in order, then the coordinator's."""
    shards = sorted(run_dir.glob("trace-shard-*.jsonl"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return [read(path) for path in [*shards, *run_dir.glob("trace-coordinator.jsonl")]]


def _for_servers(job: Job, path: Sequence[str]) -> bytes:
    """What servers are handed: where modules are looked for, and the conditions that cannot be imported."""
    models = [model for step in job.sync.steps for model in step.models if isinstance(model, Conditions)]
    names = {name for model in models for name in (model.pull, model.push) if name in local_conditions}
    conditions = {name: local_conditions[name] for name in names}
    try:
        return bytes(cloudpickle.dumps(list(path)) + cloudpickle.dumps(conditions))
    except (TypeError, pickle.PicklingError, RuntimeError) as error:
        raise ConfigurationError(
            f"a condition, or something that it refers to, cannot be sent to the servers: {error}. Define it in a "
            "module."
        ) from error


def _raise_failure(coordinator: Coordinator, engine: LocalEngine) -> None:
    """Raise the first failure there was, its cause before its consequences."""
    if coordinator.failure is not None or engine.failed_server() or engine.failed_worker():
        time.sleep(REASONS_TIMEOUT_S)
        failure = engine.failed_server() or coordinator.failure or engine.failed_worker()
        assert failure is not None
        raise failure
    if len(coordinator.lost) == coordinator.job.workers:
        raise RunFailedError("the run", "every worker was lost")
    if not coordinator.started.is_set():
        raise RunFailedError(
            "the run",
            "no worker ever called step() on a paceline.DistributedOptimizer, so nothing was trained",
        )


def _final_weights(coordinator: Coordinator) -> WeightsSnapshot:
    with _reader(coordinator) as reader:
        return reader.read()


@contextlib.contextmanager
def _reader(coordinator: Coordinator) -> Iterator[Reader]:
    assert coordinator.model is not None
    reader = Reader.connect(coordinator.model, coordinator.shards, coordinator.job.token)
    try:
        yield reader
    finally:
        reader.close()


def _summary(job: Job, coordinator: Coordinator, traces: Sequence[Trace]) -> dict[str, Any]:
    measures = measure([trace for trace in traces if trace.header.host == "shard"])
    return {
        "sync": str(job.sync),
        "workers": job.workers,
        "servers": job.servers,
        "shards": job.shards,
        "slicing": job.slicing,
        "overlap": job.overlap,
        "transport": job.transport,
        "seed": job.seed,
        "emulated": job.emulated,
        "lost_workers": coordinator.lost,
        "faults": coordinator.faults,
        "wasted_s": sum(record.wasted_s for worker in read_records(Path(job.run_dir)) for record in worker),
        **msgspec.to_builtins(measures, str_keys=True),
    }

"""What a run is: one validated value that every process of it gets.

Everything a user can ask for is checked here, before anything starts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from ..errors import ConfigurationError, unknown_name
from ..sync import AnySyncModel, SyncModel
from ..sync.notation import parse_shards, require_shards
from ..sync.schedule import Schedule, read_schedule
from ..sync.user_conditions import import_modules, require_named
from ..wire.addresses import listen_tcp
from ..wire.memory import shared_memory_available
from .footprint import (
    available_bytes,
    descriptor_limit,
    descriptor_shortage,
    open_descriptors,
    process_shortage,
)

__all__ = [
    "JOB_VARIABLE",
    "LOOPBACK",
    "TRANSPORTS",
    "Assignment",
    "Job",
    "claim_run_dir",
    "describe",
    "make_job",
    "require_usable",
]

JOB_VARIABLE = "PACELINE_PLACE"
"""The environment variable by which a process of a run learns its `Assignment` in it: MessagePack in hexadecimal."""

LOOPBACK = "127.0.0.1"
"""Where everybody listens over TCP, unless told otherwise."""

TRANSPORTS = ("auto", "shm", "unix", "tcp")
SLICINGS = ("even", "by-parameter")
OVERLAPS = ("shards", "off")
ON_NAN = ("stop", "skip")

LONGEST_MODEL = 1000  # characters of one, as it comes from a peer


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A run.

    Attributes:
        workers: how many.
        servers: how many; each holds the shards whose index, modulo their number, is its own.
        shards: how many slices the parameters are cut into.
        slicing: "even", whatever the layers' sizes (EPS), or "by-parameter".
        overlap: "shards", each answers for itself, or "off", nobody pulls until everybody has pushed everything.
        sync: the sync model, or one for each shard, and when it changes.
        imports: modules whose conditions the run may change to, beside those that `sync` names.
        transport: "shm" (shared memory, one machine), "unix" (sockets, one machine) or "tcp".
        seed: of the data's order, the jitter and whatever else is drawn.
        pace_s: for each worker, the least time of an iteration; () for none.
        slowdown: for each worker, the factor by which its measured compute time is stretched; () for none.
        jitter: half-width of the uniform factor 1 +- jitter on both.
        on_nan: what a gradient with NaN or inf does: "stop" the run, or "skip" that push.
        run_dir: where logs, traces and results go; "" for a new directory that is yet to be made.
        stall_timeout_s: a process that others await is ended when it has been silent for this long; None for never.
        port: TCP port that the coordinator listens on, 0 for any free one.
        token: who does not show it gets nothing.
        epoch_s: the monotonic clock's reading at which the run's own time is 0.
    """

    workers: int
    servers: int
    shards: int
    slicing: Literal["even", "by-parameter"]
    overlap: Literal["shards", "off"]
    sync: Schedule
    imports: tuple[str, ...]
    transport: Literal["shm", "unix", "tcp"]
    seed: int
    pace_s: tuple[float, ...]
    slowdown: tuple[float, ...]
    jitter: float
    on_nan: Literal["stop", "skip"]
    run_dir: str
    stall_timeout_s: float | None
    port: int
    token: str
    epoch_s: float

    def now_s(self) -> float:
        """Seconds since the run began; the same clock in all processes of one machine."""
        return time.monotonic() - self.epoch_s

    def read_sync(self, text: str) -> tuple[AnySyncModel, ...]:
        """The sync model in this notation, or one for each shard, to which a peer wants to change.

        Raises:
            ConfigurationError: there is none such, or this run cannot change to it.
        """
        if any(len(model) > LONGEST_MODEL for model in text.split("|")):
            raise ConfigurationError(f"a sync model of more than {LONGEST_MODEL} characters.")
        models = parse_shards(text)
        self.require_runnable(models)
        return models

    def require_runnable(self, models: Sequence[AnySyncModel]) -> None:
        """Refuse sync models to which this run cannot change. Nothing is imported that was not named at its launch.

        Raises:
            ConfigurationError: and why.
        """
        require_shards(models, self.shards)
        read_schedule(models).require_overlap(self.overlap)
        launched = [model for step in self.sync.steps for model in step.models]
        require_named(models, launched, self.imports)
        for model in models:
            model.require_runnable(self.workers)

    @property
    def emulated(self) -> str:
        """How unequal machines are emulated, in words; "" if they are not."""
        parts = []
        if self.pace_s:
            parts.append("least seconds per iteration " + ", ".join(f"{p:g}" for p in self.pace_s))
        if self.slowdown:
            parts.append("compute time stretched by " + ", ".join(f"{s:g}" for s in self.slowdown))
        if parts and self.jitter:
            parts.append(f"jitter +-{self.jitter:.0%}")
        return "; ".join(parts)


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """One process's place in a run: what it is, whom to call, and at which host it listens over TCP."""

    job: Job
    role: Literal["server", "worker"]
    index: int
    coordinator: str
    host: str = LOOPBACK


def make_job(
    *,
    workers: int,
    servers: int | None = None,
    shards: int | None = None,
    slicing: str = "even",
    overlap: str = "shards",
    sync: str | SyncModel | Sequence[SyncModel] | Schedule = "bsp",
    imports: Sequence[str] = (),
    transport: str = "auto",
    seed: int = 0,
    pace: Sequence[float] | None = None,
    slowdown: Sequence[float] | None = None,
    jitter: float = 0.0,
    on_nan: str = "stop",
    run_dir: str | os.PathLike[str] | None = None,
    stall_timeout: float | None = None,
    port: int = 0,
    dry_run: bool = False,
) -> Job:
    """Check everything that a user asks for, then make the run's description and its directory.

    A dry run makes no directory; see `claim_run_dir`.

    Raises:
        ConfigurationError: one sentence that names the value, what was expected and what to do.
    """
    workers = _whole("workers", workers, least=1)
    if servers is None:
        servers = max(1, (os.cpu_count() or 1) - workers)  # the cores that the workers leave over
    for name, value, choices in (
        ("transport", transport, TRANSPORTS),
        ("slicing", slicing, SLICINGS),
        ("overlap", overlap, OVERLAPS),
        ("on_nan", on_nan, ON_NAN),
    ):
        if value not in choices:
            raise unknown_name(name, value, choices)
    if not 0 <= port <= 65535:
        raise ConfigurationError(f"port is {port}, expected a number from 0 (any free one) to 65535.")
    if port and transport != "tcp":
        raise ConfigurationError(
            f"port is {port} and transport {transport!r}: only 'tcp' listens on a port, and 'auto' never chooses it. "
            "Ask for transport 'tcp', or leave port out."
        )
    if transport == "auto":
        transport = "shm" if shared_memory_available() else "unix"
    if transport == "shm" and not shared_memory_available():
        raise ConfigurationError(
            "transport 'shm' needs memfd, which this system lacks or forbids; use 'unix', or 'auto' for the best "
            "there is."
        )
    if not 0 <= jitter < 1:
        raise ConfigurationError(f"jitter is {jitter}, expected a number in [0, 1), for example 0.2.")
    if stall_timeout is not None and not 0 < stall_timeout < math.inf:
        raise ConfigurationError(
            f"stall_timeout is {stall_timeout}, expected a number of seconds > 0, for example 60; leave it out for "
            "none."
        )
    pace_s = _per_worker("pace", pace, workers, least=0.0)
    stretched = _per_worker("slowdown", slowdown, workers, least=1.0)
    if jitter and not (pace_s or stretched):
        raise ConfigurationError(
            f"jitter is {jitter}, and there is neither a pace nor a slowdown that it could vary. Give one of "
            "them, or leave jitter out."
        )
    if port:
        listen_tcp(port=port)[0].close()  # refused here, if it is in use
    if run_dir is not None:
        require_usable(run_dir)
    servers = _whole("servers", servers, least=1)
    shards = _whole("shards", servers if shards is None else shards, least=1)
    if shards < servers:
        raise ConfigurationError(
            f"shards is {shards} and servers {servers}: each server needs one at least. Ask for {servers} shards or "
            "more."
        )
    import_modules(imports)
    schedule = read_schedule(sync)
    schedule.require_runnable(workers, shards)
    schedule.require_overlap(overlap)
    for reason in (
        descriptor_shortage(workers, servers, shards, transport, open_descriptors(), descriptor_limit()),
        process_shortage(workers, servers, available_bytes()),
    ):
        if reason:
            raise ConfigurationError(reason)
    job = Job(
        workers=workers,
        servers=servers,
        shards=shards,
        slicing="even" if slicing == "even" else "by-parameter",
        overlap="shards" if overlap == "shards" else "off",
        sync=schedule,
        imports=tuple(imports),
        transport="shm" if transport == "shm" else "unix" if transport == "unix" else "tcp",
        seed=_whole("seed", seed, least=0),
        pace_s=pace_s,
        slowdown=stretched,
        jitter=float(jitter),
        on_nan="skip" if on_nan == "skip" else "stop",
        run_dir="" if run_dir is None else str(run_dir),
        stall_timeout_s=None if stall_timeout is None else float(stall_timeout),
        port=port,
        token=secrets.token_hex(16),
        epoch_s=time.monotonic(),
    )
    return job if dry_run else claim_run_dir(job)


def claim_run_dir(job: Job) -> Job:
    """Make the directory of a run that was described without one: the last thing before it starts."""
    return msgspec.structs.replace(job, run_dir=str(_make_run_dir(job.run_dir or None)))


_SLICED = {"even": "evenly (even)", "by-parameter": "by parameter (by-parameter)"}
_OVERLAPPED = {
    "shards": "each shard answers for itself (shards)",
    "off": "nobody pulls until everybody has pushed everything (off)",
}
_CARRIED = {
    "shm": "shared memory (shm)",
    "unix": "sockets of this machine (unix)",
    "tcp": "TCP on loopback (tcp)",
}


def describe(job: Job) -> dict[str, str]:
    """What a run is, in words: what `--dry-run` shows."""
    return {
        "sync model": str(job.sync),
        "workers": str(job.workers),
        "servers": str(job.servers),
        "shards": f"{job.shards} of the parameters, sliced {_SLICED[job.slicing]}",
        "overlap": _OVERLAPPED[job.overlap],
        "transport": _CARRIED[job.transport],
        "emulated": job.emulated or "nothing: each worker runs as fast as it can",
        "on NaN": job.on_nan,
        "seed": str(job.seed),
        "run directory": job.run_dir or "a new directory under ./runs",
    }


def _whole(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} is {value!r}, expected a whole number >= {least}.")
    return value


def _per_worker(name: str, values: Sequence[float] | None, workers: int, least: float) -> tuple[float, ...]:
    if values is None or len(values) == 0:
        return ()
    if len(values) != workers:
        raise ConfigurationError(
            f"{name} has {len(values)} values for {workers} workers; give one for each, "
            f"for example {','.join(f'{v:g}' for v in [*values, *[values[-1]] * workers][:workers])}."
        )
    for value in values:
        if not (math.isfinite(value) and value >= least):
            raise ConfigurationError(f"{name} is {value:g} for one worker, expected a number >= {least:g}.")
    return tuple(float(value) for value in values)


def require_usable(path: str | os.PathLike[str]) -> None:
    """Refuse a run directory that cannot be written, or that holds a run already; make nothing."""
    if not os.fspath(path):
        raise ConfigurationError("the run directory is empty; name one, or leave it out for a new one.")
    run_dir = Path(path).absolute()
    if (run_dir / "summary.json").exists() or any(run_dir.glob("trace-*.jsonl")):
        raise ConfigurationError(f"the run directory {path} holds a run already; choose another.")
    nearest = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"the run directory {path} cannot be written; choose another with --run-dir."
        )


def _make_run_dir(path: str | os.PathLike[str] | None) -> Path:
    """Make the run's directory. Without a path, a new one under ./runs, named by the time."""
    try:
        if path is not None:
            run_dir = Path(path).absolute()
            run_dir.mkdir(parents=True, exist_ok=True)
            probe = run_dir / f".writable-{secrets.token_hex(4)}"
            probe.touch()
            probe.unlink()
            return run_dir
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for number in itertools.count(1):
            run_dir = Path("runs", stamp if number == 1 else f"{stamp}-{number}").absolute()
            with contextlib.suppress(FileExistsError):
                run_dir.mkdir(parents=True)
                break
        return run_dir
    except OSError as error:
        raise ConfigurationError(
            f"the run directory {path or 'runs'} cannot be written: {error.strerror}. Choose another with "
            "--run-dir."
        ) from error

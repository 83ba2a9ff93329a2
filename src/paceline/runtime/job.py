"""The configuration of a run, which is passed to each of its processes.

The user's options are validated here, before any process is started.
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
from typing import Literal, cast

import msgspec

from ..core.data_feed import Work
from ..core.guard import GuardMode, guard_mode
from ..core.lease import BATCH_SIZINGS, SPLITS, BatchSizing, Split
from ..core.placement import Placement, round_robin
from ..core.wire_format import EXACT, WireFormat
from ..errors import ConfigurationError, unknown_name
from ..plugins import load_models, modules_of
from ..plugins.conditions import require_named
from ..plugins.optimizer_sources import OptimizerSources
from ..sync import SyncModel
from ..sync.notation import parse_shards, require_shards
from ..sync.schedule import Schedule, read_schedule
from ..sync.ticks import TICKS_PER_S
from ..sync.translation import HYPERPARAMETERS
from ..wire.addresses import listen_tcp
from ..wire.memory import shared_memory_available
from ..wire.tls import Contexts, contexts
from .devices import CPU, Device
from .footprint import (
    available_bytes,
    descriptor_limit,
    descriptor_shortage,
    hard_descriptor_limit,
    open_descriptors,
    process_shortage,
)

__all__ = [
    "LOOPBACK",
    "TRANSPORTS",
    "Assignment",
    "Job",
    "claim_run_dir",
    "decode_job",
    "describe",
    "encode_job",
    "make_job",
    "require_script",
    "require_usable",
]

LOOPBACK = "127.0.0.1"
"""The default address on which processes listen for TCP connections."""

TRANSPORTS = ("auto", "shm", "unix", "tcp")
SLICINGS = ("even", "by-parameter")
OVERLAPS = ("shards", "off")
ON_NAN = ("stop", "skip")
TRACES = ("full", "recent", "off")
TRACE_MB = 100  # default number of megabytes that recent traces occupy

LONGEST_MODEL = 1000  # maximum number of characters in the notation of a sync model that a peer sends


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The validated settings of one run, which are the same in all of its processes.

    Attributes:
        workers: number of workers; if machines can join, the largest number of workers.
        least: number of workers with which training begins; if machines can join, the others may join later.
        pause_below: number of workers below which the run pauses until other workers join; 0 if it never pauses.
        joined: True if the workers run on machines that join the run, and none is started by the launcher.
        servers: number of servers. See `placement`.
        remote_servers: number of servers, the last ones, that machines bring when they join the run.
        shards: number of slices into which the parameters are divided.
        slicing: "even" for slices of equal size, or "by-parameter" for slices that contain about the same number of
            whole parameters.
        overlap: "shards" if each shard answers pulls independently, or "off" if no worker pulls until all workers
            have pushed to all shards.
        sync: the sync model, or one model per shard, and any planned changes, in the notation of the command line.
        imports: modules that every process imports, because they define sync models or conditions that the run
            uses or may change to.
        transport: "shm" (shared memory, one machine), "unix" (sockets, one machine) or "tcp".
        split: how an epoch is divided among the workers by default: "auto", "dynamic" or "static".
        batch: "equal" if all workers have batches of the same size by default, or "balanced" if their sizes follow
            the workers' speeds.
        seed: random seed for the order of the data, the jitter and all other random choices.
        pace_s: for each worker, the minimum duration in seconds of an iteration with one batch of the loader's size;
            () if there is no minimum.
        fixed_s: the part of each of these durations that does not depend on the size of the batch.
        slowdown: for each worker, the factor by which the measured compute time is multiplied; () if there is none.
        jitter: in each iteration, `pace_s` and `slowdown` are multiplied by a random number, uniformly distributed
            between 1 - `jitter` and 1 + `jitter`.
        on_nan: "stop" to end the run if a gradient contains NaN or inf, or "skip" to drop that push.
        hyperparameters: "translated" if the hyper-parameters of the script refer to a joint batch, and those of each
            update are translated (see `paceline.sync.translation`), or "raw" if each update uses them as they are.
        run_dir: directory of the logs, traces and results; "" if a new directory is to be created.
        guard: what happens if training diverges; see `paceline.core.guard`.
        stall_timeout_s: seconds after which a silent process is killed if others wait for it; None for no limit.
        port: TCP port of the coordinator; 0 for any free port.
        torchrun_port: MASTER_PORT in the environment of the workers, which is then as under torchrun; 0 to leave the
            environment as it is.
        token: secret that each peer must send before it is served.
        mark: 16 hexadecimal digits that tell this run from others with the same secret; they are not secret.
        epoch_ns: reading of the monotonic clock at time 0 of the run, in nanoseconds.
        secure: True if the connections use TLS, with keys that are derived from the token.
        version: version of Paceline, which must be the same on all machines; "" if the run is on one machine only.
        traces: "full" if the traces of the run and the records of its workers are kept, "recent" if the oldest parts
            are deleted during the run, so that `trace_bytes` suffice, or "off" if there are none.
        trace_bytes: number of bytes that the traces and records may occupy in the run directory, about.
        wire: the format in which float32 gradients and weights travel between processes.
        optimizers: the places from which processes may take the classes of optimizers that are not torch's.
        devices: the device of each worker that the launcher starts; () if none is assigned.
    """

    workers: int
    least: int
    pause_below: int
    joined: bool
    servers: int
    shards: int
    slicing: Literal["even", "by-parameter"]
    overlap: Literal["shards", "off"]
    sync: str
    imports: tuple[str, ...]
    transport: Literal["shm", "unix", "tcp"]
    split: Split
    batch: BatchSizing
    seed: int
    pace_s: tuple[float, ...]
    fixed_s: tuple[float, ...]
    slowdown: tuple[float, ...]
    jitter: float
    on_nan: Literal["stop", "skip"]
    hyperparameters: Literal["raw", "translated"]
    run_dir: str
    guard: GuardMode
    stall_timeout_s: float | None
    port: int
    torchrun_port: int
    token: str
    mark: str
    epoch_ns: int
    secure: bool = False
    version: str = ""
    remote_servers: int = 0
    traces: Literal["full", "recent", "off"] = "recent"
    trace_bytes: int = TRACE_MB * 10**6
    wire: WireFormat = EXACT
    optimizers: OptimizerSources = OptimizerSources()
    devices: tuple[Device, ...] = ()

    def __repr__(self) -> str:
        """Return a description without the token, which must not appear in a log."""
        return f"Job({self.workers} workers, {self.servers} servers, {self.sync!r}, {self.run_dir!r})"

    @property
    def placement(self) -> Placement:
        """The servers of the shards."""
        return round_robin(self.shards, self.servers)

    @property
    def local_servers(self) -> int:
        """Number of servers on the coordinator's machine. They have the lowest indices."""
        return self.servers - self.remote_servers

    @property
    def schedule(self) -> Schedule:
        """The first sync model and the planned changes, parsed from `sync`."""
        return read_schedule(self.sync)

    @property
    def translated(self) -> bool:
        """True if the hyper-parameters of each update are translated."""
        return self.hyperparameters == "translated"

    @property
    def wire_in_vain(self) -> str:
        """A sentence that says that `wire` has no effect, because nothing travels; "" if it has an effect."""
        if self.transport != "shm" or self.wire.exact:
            return ""
        return (
            f"--wire {self.wire} had no effect, because all processes of the run share memory (transport 'shm'), so "
            "gradients and weights did not travel."
        )

    @property
    def traces_setting(self) -> str:
        """The setting `traces` in the notation of the command line."""
        usual = self.traces != "recent" or self.trace_bytes == TRACE_MB * 10**6
        return self.traces if usual else f"recent:{self.trace_bytes // 10**6}"

    @property
    def takes_fractions(self) -> bool:
        """True if updates can take fractions of the optimizer's steps, under a model that is planned or chosen."""
        schedule = self.schedule
        return self.translated and (schedule.auto or not all(model.lockstep for model in schedule.models))

    @property
    def contexts(self) -> Contexts | None:
        """The TLS contexts of the run; None if its connections do not use TLS."""
        return contexts(self.token)._replace(mark=bytes.fromhex(self.mark)) if self.secure else None

    def now_ticks(self) -> int:
        """Return the time since the run began, in ticks. All processes on one machine use the same clock."""
        return time.monotonic_ns() - self.epoch_ns  # in a live run, a tick is a nanosecond

    def ticks_of(self, monotonic_s: float) -> int:
        """Return a time on the clock of `time.monotonic` as ticks since the run began."""
        return round(monotonic_s * TICKS_PER_S) - self.epoch_ns

    def monotonic_s_of(self, ticks: int) -> float:
        """Return a time since the run began as a time on the clock of `time.monotonic`."""
        return (ticks + self.epoch_ns) / TICKS_PER_S

    def now_s(self) -> float:
        """Return the time since the run began, in seconds."""
        return self.now_ticks() / TICKS_PER_S

    def pace_of(self, worker: int, work: Work) -> float:
        """Return the minimum duration in seconds of an iteration that computes a gradient for some data."""
        if not self.pace_s:
            return 0.0
        fixed_s = self.fixed_s[worker]
        return fixed_s * work.batches + (self.pace_s[worker] - fixed_s) * work.full_batches

    def read_sync(self, text: str) -> tuple[SyncModel, ...]:
        """Parse the new sync model, or the new models of all shards, that a peer has requested.

        Raises:
            ConfigurationError: the notation is not valid, or this run cannot change to the model.
        """
        if (longest := max(map(len, text.split("|")))) > LONGEST_MODEL:
            raise ConfigurationError(
                f"a sync model's notation has {longest} characters, expected at most {LONGEST_MODEL}; shorten it."
            )
        models = parse_shards(text)
        self.require_runnable(models)
        return models

    def require_runnable(self, models: Sequence[SyncModel]) -> None:
        """Check that this run can switch to the given sync models.

        User-defined conditions must be in modules that were named at launch.

        Raises:
            ConfigurationError: the run cannot change to these models; the message says why.
        """
        require_shards(models, self.shards)
        read_schedule(models).require_overlap(self.overlap)
        launched = [model for step in self.schedule.steps for model in step.models]
        require_named(models, launched, self.imports)
        for model in models:
            model.require_runnable(self.workers)

    def torchrun_environment(self, worker: int) -> dict[str, str]:
        """Return the environment variables that torchrun would set for a worker; {} unless the user wants them."""
        if not self.torchrun_port:
            return {}
        rank, world = str(worker), str(self.workers)
        return {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self.torchrun_port),
        }

    @property
    def devices_setting(self) -> str:
        """The devices of the workers in the notation of the command line; "" if all workers are on the CPU."""
        named = [device.name for device in self.devices]
        return ",".join(named) if set(named) - {CPU.name} else ""

    @property
    def emulated(self) -> str:
        """The options with which unequal machines are emulated, and what they mean; "" if nothing is emulated."""
        parts = []
        if self.pace_s:
            paces = [
                f"{fixed:g}+{pace - fixed:g}" if fixed else f"{pace:g}"
                for pace, fixed in zip(self.pace_s, self.fixed_s, strict=True)
            ]
            parts.append(f"--pace {','.join(paces)} (minimum seconds per iteration)")
        if self.slowdown:
            factors = ",".join(f"{factor:g}" for factor in self.slowdown)
            parts.append(f"--slowdown {factors} (factors of the compute time)")
        if parts and self.jitter:
            parts.append(f"--jitter {self.jitter:g}")
        return ", ".join(parts)


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one process in a run: its role and the addresses that it uses.

    Attributes:
        job: the configuration of the run.
        role: "server" or "worker".
        index: index of the server or worker.
        coordinator: address of the coordinator.
        host: address on which the process listens for TCP connections.
        incarnation: how often the index of the worker has been used before.
        machine: index of the machine on which the process runs; 0 for the one with the coordinator.
        address: address at which a server is reached, if its connections come through a listener; else "".
        device: the device of the worker; None if none is assigned, so that it uses the CPU.
        imports: modules that only the workers of this machine import, because they add kinds of devices to torch.
    """

    job: Job
    role: Literal["server", "worker"]
    index: int
    coordinator: str
    host: str = LOOPBACK
    incarnation: int = 0
    machine: int = 0
    address: str = ""
    device: Device | None = None
    imports: tuple[str, ...] = ()


def make_job(
    *,
    workers: int,
    least: int | None = None,
    pause_below: int = 0,
    joined: bool = False,
    servers: int | None = None,
    remote_servers: int = 0,
    shards: int | None = None,
    slicing: str = "even",
    overlap: str = "shards",
    sync: str | SyncModel | Sequence[SyncModel] | Schedule = "bsp",
    imports: Sequence[str] = (),
    split: str = "auto",
    batch: str = "equal",
    transport: str = "auto",
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
    port: int = 0,
    torchrun_env: bool = False,
    devices: Sequence[Device] = (),
    dry_run: bool = False,
) -> Job:
    """Validate the user's options, create the run directory and return the configuration of the run.

    For a dry run, the directory is not created. See `claim_run_dir`. `least` is by default the number of workers.

    Raises:
        ConfigurationError: an option is not valid. The message states the value, what was expected and what to do.
    """
    workers = _require_integer("workers", workers, least=1)
    least = _require_integer("least", workers if least is None else least, least=1)
    if least > workers:
        raise ConfigurationError(
            f"the least number of workers is {least} and the largest is {workers}; write --workers MIN:MAX, or in "
            "Python workers=(MIN, MAX)."
        )
    if servers is None:
        # One server for each core that the workers leave free, but at least one.
        servers = max(1, (os.cpu_count() or 1) - workers)
    for name, value, choices in (
        ("transport", transport, TRANSPORTS),
        ("slicing", slicing, SLICINGS),
        ("overlap", overlap, OVERLAPS),
        ("on_nan", on_nan, ON_NAN),
        ("hyperparameters", hyperparameters, HYPERPARAMETERS),
        ("split", split, SPLITS),
        ("batch", batch, BATCH_SIZINGS),
    ):
        if value not in choices:
            raise unknown_name(name, value, choices)
    if not 0 <= port <= 65535:
        raise ConfigurationError(f"port is {port}, expected a number from 0 (any free port) to 65535.")
    if port and transport != "tcp":
        raise ConfigurationError(
            f"port is {port} and transport is {transport!r}, but only 'tcp' uses a port, and 'auto' never chooses "
            "'tcp'. Use transport 'tcp', or omit port."
        )
    if transport == "auto":
        transport = "shm" if shared_memory_available() else "unix"
    if transport == "shm" and not shared_memory_available():
        raise ConfigurationError(
            "transport 'shm' needs memfd, which this system does not have or does not permit; use 'unix', or 'auto' "
            "for the best available transport."
        )
    if not 0 <= jitter < 1:
        raise ConfigurationError(f"jitter is {jitter}, expected a number in [0, 1), for example 0.2.")
    if stall_timeout is not None and not 0 < stall_timeout < math.inf:
        raise ConfigurationError(
            f"stall_timeout is {stall_timeout}, expected a number of seconds > 0, for example 60; omit it to disable "
            "the timeout."
        )
    parts = _paces(pace)
    pace_s = _per_worker("pace", [sum(both) for both in parts], workers, least=0.0)
    fixed_s = _per_worker("pace", [fixed for fixed, _ in parts], workers, least=0.0)
    _per_worker("pace", [proportional for _, proportional in parts], workers, least=0.0)
    slowdowns = _per_worker("slowdown", slowdown, workers, least=1.0)
    if jitter and not (pace_s or slowdowns):
        raise ConfigurationError(
            f"jitter is {jitter}, but it has no effect without pace or slowdown, and neither is set. Set one of "
            "them, or omit jitter."
        )
    # Listening raises an error if the port is in use.
    if port:
        listen_tcp(port=port)[0].close()
    if run_dir is not None:
        require_usable(run_dir)
    servers = _require_integer("servers", servers, least=1)
    remote_servers = _require_integer("remote_servers", remote_servers, least=0)
    if remote_servers >= servers:
        raise ConfigurationError(
            f"remote_servers is {remote_servers} and servers is {servers}, but at least one server must run on this "
            f"machine. Use at least {remote_servers + 1} servers."
        )
    shards = _require_integer("shards", servers if shards is None else shards, least=1)
    if shards < servers:
        raise ConfigurationError(
            f"shards is {shards} and servers is {servers}, but each server needs at least one shard. Use at least "
            f"{servers} shards."
        )
    kept, trace_bytes = _traces(traces)
    load_models(sync, imports)
    schedule = read_schedule(sync)
    if schedule.auto:  # the result is the same as with equal batches, and unequal workers wait less
        batch = "balanced"
    imports = tuple(dict.fromkeys([*imports, *modules_of(schedule.models)]))
    schedule.require_runnable(workers, shards)
    schedule.require_overlap(overlap)
    for reason in (
        descriptor_shortage(
            workers,
            servers,
            shards,
            transport,
            open_descriptors(),
            descriptor_limit(),
            hard_descriptor_limit(),
        ),
        process_shortage(workers, servers, available_bytes()),
    ):
        if reason:
            raise ConfigurationError(reason)
    job = Job(
        workers=workers,
        least=least,
        pause_below=pause_below,
        joined=joined,
        servers=servers,
        remote_servers=remote_servers,
        shards=shards,
        slicing="even" if slicing == "even" else "by-parameter",
        overlap="shards" if overlap == "shards" else "off",
        sync=str(schedule),
        imports=imports,
        transport="shm" if transport == "shm" else "unix" if transport == "unix" else "tcp",
        split=cast(Split, split),
        batch="balanced" if batch == "balanced" else "equal",
        seed=_require_integer("seed", seed, least=0),
        pace_s=pace_s,
        fixed_s=fixed_s,
        slowdown=slowdowns,
        jitter=float(jitter),
        on_nan="skip" if on_nan == "skip" else "stop",
        hyperparameters="translated" if hyperparameters == "translated" else "raw",
        run_dir="" if run_dir is None else str(run_dir),
        guard=guard_mode(guard, translated=hyperparameters == "translated"),
        wire=WireFormat.read(wire),
        traces=kept,
        trace_bytes=trace_bytes,
        stall_timeout_s=None if stall_timeout is None else float(stall_timeout),
        port=port,
        torchrun_port=_free_port() if torchrun_env else 0,
        token=secrets.token_hex(16),
        mark=secrets.token_hex(8),
        epoch_ns=time.monotonic_ns(),
        optimizers=OptimizerSources(packages=imports),
        devices=tuple(devices),
    )
    return job if dry_run else claim_run_dir(job)


def _traces(text: str) -> tuple[Literal["full", "recent", "off"], int]:
    """Return what is kept of the traces, and how many bytes of them, given the notation of the command line."""
    kept, colon, size = text.partition(":")
    if kept not in TRACES:
        raise unknown_name("traces", text, TRACES)
    if colon and not (kept == "recent" and size.isascii() and size.isdecimal() and int(size) > 0):
        raise ConfigurationError(
            f"traces is {text!r}, expected a number of megabytes only for recent traces, such as 'recent:500'."
        )
    return cast(Literal["full", "recent", "off"], kept), (int(size) if size else TRACE_MB) * 10**6


def _free_port() -> int:
    """Return a TCP port on the loopback interface that is free now."""
    listener, _ = listen_tcp()
    with listener:
        port: int = listener.getsockname()[1]
    return port


def claim_run_dir(job: Job) -> Job:
    """Create the run directory and return the configuration with the directory's path. Call this after all checks."""
    return msgspec.structs.replace(job, run_dir=str(_make_run_dir(job.run_dir or None)))


def encode_job(job: Job) -> bytes:
    """Return the configuration of a run as it is sent to the machines that join the run."""
    return msgspec.json.encode(job)


def decode_job(data: bytes, now_ticks: int) -> Job:
    """Return the configuration that `encode_job` has encoded, on the clock of this machine.

    Args:
        data: the encoded configuration.
        now_ticks: the time of the run now.
    """
    job = msgspec.json.decode(data, type=Job)
    return msgspec.structs.replace(job, epoch_ns=time.monotonic_ns() - now_ticks)


_SLICING_TEXTS = {"even": "evenly (even)", "by-parameter": "by parameter (by-parameter)"}
_OVERLAP_TEXTS = {
    "shards": "each shard answers pulls independently (shards)",
    "off": "no worker pulls until all workers have pushed to all shards (off)",
}
_SPLIT_TEXTS = {
    "auto": "in equal shares if the sync model keeps all workers in lockstep, else on demand (auto)",
    "dynamic": "on demand (dynamic)",
    "static": "in equal shares of every joint batch (static)",
}
_BATCH_TEXTS = {
    "equal": "of equal size in all workers (equal)",
    "balanced": "in proportion to each worker's speed (balanced)",
}
_HYPERPARAMETERS_TEXTS = {
    "translated": "of the joint batch, translated for each update (translated)",
    "raw": "used as they are in each update (raw)",
}
_GUARD_TEXTS = {
    "off": "says only if nothing is learned any more, because of NaN (off)",
    "tell": "says when training diverges (tell)",
    "temper": "lowers the learning rate when training diverges (temper)",
    "stop": "stops the run when training diverges, and keeps the last good weights (stop)",
}
_TRACES_TEXTS = {
    "full": "all are kept (full)",
    "recent": "the last {mb:g} MB are kept (recent)",
    "off": "none are made (off)",
}
_TRANSPORT_TEXTS = {
    "shm": "shared memory (shm)",
    "unix": "AF_UNIX sockets (unix)",
    "tcp": "TCP on loopback (tcp)",
}


def _wire_text(job: Job) -> str:
    """Return the description of the format in which gradients and weights travel."""
    if job.transport == "shm":
        return f"nothing travels, so {job.wire} has no effect" if not job.wire.exact else "nothing travels"
    return "float32" if job.wire.exact else f"{job.wire}, for float32 gradients and weights"


def describe(job: Job) -> dict[str, str]:
    """Return the description of a run that `--dry-run` prints."""
    devices = "; ".join(_with_memory(device) for device in job.devices)
    return {
        "sync model": job.sync,
        "workers": f"{job.least} to {job.workers}" if job.least < job.workers else str(job.workers),
        **({"devices": devices} if job.devices_setting else {}),
        "servers": str(job.servers)
        + (f", {job.remote_servers} of them on other machines" if job.remote_servers else ""),
        "shards": f"{job.shards}, with the parameters sliced {_SLICING_TEXTS[job.slicing]}",
        "overlap": _OVERLAP_TEXTS[job.overlap],
        "transport": _TRANSPORT_TEXTS[job.transport],
        "wire": _wire_text(job),
        "data": f"divided {_SPLIT_TEXTS[job.split]}",
        "batches": _BATCH_TEXTS[job.batch],
        "hyper-parameters": _HYPERPARAMETERS_TEXTS[job.hyperparameters],
        "emulated": job.emulated or "nothing: each worker runs at full speed",
        "on NaN": job.on_nan,
        "guard": _GUARD_TEXTS[job.guard],
        "traces": _TRACES_TEXTS[job.traces].format(mb=job.trace_bytes / 10**6),
        "seed": str(job.seed),
        "run directory": job.run_dir or "a new directory in ./runs",
    }


def _with_memory(device: Device) -> str:
    """Return the label of a device and the size of its memory, if this is known."""
    return f"{device.label}, {device.memory_bytes / 1e9:.1f} GB" if device.memory_bytes else device.label


def _require_integer(name: str, value: int, least: int) -> int:
    """Return `value` if it is an integer >= `least`. Raise `ConfigurationError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} is {value!r}, expected a whole number >= {least}.")
    return value


def _paces(pace: Sequence[float | tuple[float, float]] | None) -> list[tuple[float, float]]:
    """Return the fixed and the proportional part of each pace. Raise `ConfigurationError` for other values."""
    parts = [value if isinstance(value, tuple) else (0.0, value) for value in pace or ()]
    for part in parts:
        if len(part) != 2 or not all(isinstance(number, int | float) for number in part):
            raise ConfigurationError(
                f"pace is {pace!r}, expected a number of seconds for each worker, or a pair of numbers: a fixed part "
                "and a part that is proportional to the size of the batch."
            )
    return parts


def _per_worker(name: str, values: Sequence[float] | None, workers: int, least: float) -> tuple[float, ...]:
    """Return `values` if there is one number >= `least` per worker, or () if there are no values.

    Raise `ConfigurationError` otherwise.
    """
    if values is None or len(values) == 0:
        return ()
    if len(values) != workers:
        raise ConfigurationError(
            f"{name} has {len(values)} values for {workers} workers; give one value per worker, "
            f"for example {','.join(f'{v:g}' for v in [*values, *[values[-1]] * workers][:workers])}."
        )
    for value in values:
        if not (math.isfinite(value) and value >= least):
            raise ConfigurationError(f"{name} is {value:g} for one worker, expected a number >= {least:g}.")
    return tuple(float(value) for value in values)


def require_script(path: Path) -> None:
    """Raise `ConfigurationError` if a script does not exist or is not a file."""
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise ConfigurationError(f"the script {str(path)!r} {what}; give the path of a Python file.")


def require_usable(path: str | os.PathLike[str]) -> None:
    """Raise `ConfigurationError` if a run directory cannot be written or already contains a run.

    This function does not create the directory.
    """
    if not os.fspath(path):
        raise ConfigurationError(
            "the name of the run directory is empty; give a name, or omit this option to create a new directory."
        )
    run_dir = Path(path).absolute()
    if _has_ended(run_dir / "summary.json") or any(run_dir.glob("trace-*.jsonl")):
        raise ConfigurationError(f"the run directory {path} already contains a run; choose another.")
    nearest = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigurationError(f"the run directory {path} cannot be written; choose another one.")


def _has_ended(summary: Path) -> bool:
    """Return True if there is a summary, unless it is that of a run that has ended before training began."""
    try:
        ended: dict[str, object] = msgspec.json.decode(summary.read_bytes(), type=dict)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    measured = "duration_s" in ended or ended.get("traces") == "off"
    return ended.get("ended") not in ("failed", "interrupted") or measured


def _make_run_dir(path: str | os.PathLike[str] | None) -> Path:
    """Create and return the run directory: `path`, or a new directory in ./runs, named after the date and time."""
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
            f"the run directory {path or 'runs'} cannot be written: {error.strerror}. Choose another one: in "
            "Python with run_dir, on the command line with --run-dir."
        ) from error

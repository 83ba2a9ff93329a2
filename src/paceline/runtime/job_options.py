"""The validation of the user's options, from which the configuration of a run is made before any process starts."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

from ..core.oversight.guard import ON_NAN, guard_mode
from ..core.protocol.layout import SLICINGS
from ..core.protocol.lease import BATCH_SIZINGS, SPLITS, Split
from ..core.protocol.wire_format import WireFormat
from ..errors import ConfigurationError, unknown_name
from ..plugins import load_models, modules_of
from ..plugins.optimizer_sources import OptimizerSources
from ..sync import SyncModel
from ..sync.schedule import OVERLAPS, Schedule, read_schedule
from ..sync.translation import HYPERPARAMETERS
from ..trace.run_dir import require_usable
from ..wire.addresses import TRANSPORTS, best_transport
from ..wire.tcp import TCP
from .compute_devices import Device
from .footprint import (
    available_bytes,
    descriptor_limit,
    descriptor_shortage,
    hard_descriptor_limit,
    open_descriptors,
    process_shortage,
)
from .job import TRACE_MB, Job, claim_run_dir

__all__ = ["make_job", "require_script"]

TRACES = ("full", "recent", "off")


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
        ("transport", transport, ("auto", *TRANSPORTS)),
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
    carrier = best_transport() if transport == "auto" else TRANSPORTS[transport]
    if port and not carrier.spans_machines:
        raise ConfigurationError(
            f"port is {port} and transport is {transport!r}, but only 'tcp' uses a port, and 'auto' never chooses "
            "'tcp'. Use transport 'tcp', or omit port."
        )
    if not carrier.available():
        raise ConfigurationError(
            f"transport {transport!r} needs {carrier.needs}, which this system does not have or does not permit; use "
            "'auto' for the best available transport."
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
        TCP.listen(port=port)[0].close()
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
            open_descriptors(),
            descriptor_limit(),
            hard_descriptor_limit(),
            shared=carrier.shares_memory,
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
        transport=carrier.name,
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
    listener, _ = TCP.listen()
    with listener:
        port: int = listener.getsockname()[1]
    return port


def require_script(path: Path) -> None:
    """Raise `ConfigurationError` if a script does not exist or is not a file."""
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise ConfigurationError(f"the script {str(path)!r} {what}; give the path of a Python file.")


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

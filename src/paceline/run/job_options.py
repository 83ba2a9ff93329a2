"""The validation of the user's options, and the creation of a run's configuration before any process starts."""

from __future__ import annotations

import math
import secrets
import time
import traceback
import warnings
from collections.abc import Sequence
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES
from pathlib import Path
from typing import Unpack

from ..checkpoints.manifest import new_lineage
from ..core.guard import guard_mode
from ..errors import ConfigurationError
from ..settings import SETTINGS, Settings, checked
from ..settings.checks import is_bucket, whole
from ..shard.optimizer_sources import OptimizerSources
from ..sync.plugins import load_models, modules_of
from ..sync.schedule import read_schedule
from ..wire.transports import TCP, TRANSPORTS, Transport, best_transport
from .compute_devices import Device, usable_cores
from .footprint import (
    available_bytes,
    descriptor_limit,
    descriptor_shortage,
    hard_descriptor_limit,
    open_descriptors,
    process_shortage,
)
from .job import Job, claim_run_dir
from .resuming import cut_of, earlier_run, fetch_run, find_resumed, lineage_of, require_trust


def make_job(
    *,
    workers: int,
    least: int | None = None,
    pause_below: int = 0,
    joined: bool = False,
    remote_servers: int = 0,
    devices: Sequence[Device] = (),
    dry_run: bool = False,
    **settings: Unpack[Settings],
) -> Job:
    """Validate the user's options, create the run directory and return the configuration of the run.

    For a dry run, the directory is not created. See `claim_run_dir`. The default of `least` is the number of workers.

    Raises:
        ConfigurationError: an option is not valid. The message states the value, the expected values, and a remedy.
    """
    workers = whole(least=1)("workers", workers)
    least = whole(least=1)("least", workers if least is None else least)
    if least > workers:
        raise ConfigurationError(
            f"the least number of workers is {least}, which is more than the largest number, {workers}; write "
            "--workers MIN:MAX, or in Python workers=(MIN, MAX)."
        )
    values = checked(settings)
    servers, shards, jitter = values["servers"], values["shards"], values["jitter"]
    pace, slowdown = values["pace"] or (), values["slowdown"] or ()
    resumed = None
    lineage, origin = new_lineage(), ""
    if (run_dir := values["resume"]) is not None:
        bucket = None
        if is_bucket(run_dir):
            fetched = fetch_run(run_dir, values["run_dir"], force=values["force"])
            run_dir, bucket = str(fetched.run_dir.absolute()), fetched.bucket
        elif values["run_dir"]:
            raise ConfigurationError(
                f"run_dir is {values['run_dir']!r} and resume is {run_dir!r}, but a resumed run goes on in its own "
                "directory; omit run_dir."
            )
        file = earlier_run(Path(run_dir), force=values["force"])
        checkpoint_dir = values["checkpoint_dir"] or bucket
        if checkpoint_dir is None and (named := file.value_of("--checkpoint-dir")):
            if not values["trust"]:
                require_trust(file, Path(run_dir), {"--checkpoint-dir": named})
            checkpoint_dir = named
        resumed = find_resumed(file, Path(run_dir), checkpoint_dir, trust=values["trust"])
        lineage, origin = lineage_of(file, Path(run_dir), resumed)
        # The seed determines the order of the data in each epoch, so the resuming run has the seed of the earlier run.
        values |= {"run_dir": run_dir, "checkpoint_dir": checkpoint_dir, "seed": cut_of(resumed).seed}
    elif values["checkpoint_dir"] and is_bucket(values["checkpoint_dir"]):
        from ..checkpoints.buckets import require_bucket  # imports torch

        require_bucket(values["checkpoint_dir"])
    carrier = _carrier(values["transport"], values["port"])
    _require_per_worker("pace", [sum(parts) for parts in pace], workers, least=0.0)
    for parts in zip(*pace, strict=True):
        _require_per_worker("pace", parts, workers, least=0.0)
    _require_per_worker("slowdown", slowdown, workers, least=1.0)
    if jitter and not (pace or slowdown):
        raise ConfigurationError(
            f"jitter is {jitter}, but it has no effect without pace or slowdown, and neither is set. Set one of "
            "them, or omit jitter."
        )
    if servers is None:
        # One server for each core that the workers leave free, but at least one.
        servers = max(1, usable_cores() - workers)
    remote_servers = whole(least=0)("remote_servers", remote_servers)
    if remote_servers >= servers:
        raise ConfigurationError(
            f"remote_servers is {remote_servers} and servers is {servers}, but at least one server must run on this "
            f"machine. Use at least {remote_servers + 1} servers."
        )
    if shards is None:
        shards = servers
    if shards < servers:
        raise ConfigurationError(
            f"shards is {shards} and servers is {servers}, but each server needs at least one shard. Use at least "
            f"{servers} shards."
        )
    sync, imports, hyperparameters = (values[name] for name in ("sync", "imports", "hyperparameters"))
    load_models(sync, imports)
    schedule = read_schedule(sync)
    schedule.require_runnable(workers, shards)
    schedule.require_overlap(values["overlap"])
    values["wire"].require_usable(str(schedule), common=schedule.lockstep)
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
    values |= {
        "transport": carrier.name,
        "servers": servers,
        "shards": shards,
        "sync": str(schedule),
        "imports": tuple(dict.fromkeys([*imports, *modules_of(schedule.models)])),
        # Under "auto", balanced batches give the same result as equal batches, and unequal workers wait less.
        "batch": "balanced" if schedule.auto else values["batch"],
        "guard": guard_mode(values["guard"], translated=hyperparameters == "translated"),
        "pace": pace,
        "slowdown": slowdown,
        "run_dir": values["run_dir"] or "",
    }
    job = Job(
        workers=workers,
        least=least,
        pause_below=pause_below,
        joined=joined,
        remote_servers=remote_servers,
        torchrun_port=_free_port() if values["torchrun_env"] else 0,
        token=secrets.token_hex(16),
        mark=secrets.token_hex(8),
        epoch_ns=time.monotonic_ns(),
        optimizers=OptimizerSources(packages=values["imports"]),
        devices=tuple(devices),
        resumed=resumed,
        lineage=lineage,
        origin=origin,
        **{row.field: values[name] for name, row in SETTINGS.items() if row.field is not None},
    )
    return job if dry_run else claim_run_dir(job)


def _carrier(transport: str, port: int) -> Transport:
    """Return the transport of a run, given its name, which may be "auto".

    Raises:
        ConfigurationError: this system does not have the transport, the port is in use, or the transport uses no port.
    """
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
    if port:
        TCP.listen(port=port)[0].close()  # raises an error if the port is in use
    return carrier


def _free_port() -> int:
    """Return a TCP port on the loopback interface that is free now."""
    listener, _ = TCP.listen()
    with listener:
        port: int = listener.getsockname()[1]
    return port


def require_script(path: Path) -> None:
    """Compile a script, so that a syntax error is found before anything starts.

    Raises:
        ConfigurationError: the script does not exist, is not a file, or cannot be compiled. A note shows the line.
    """
    # A descriptor of this process is not the same file in the workers, even if it is a file here.
    if not path.is_file() or str(path).startswith(("/dev/stdin", "/dev/fd/", "/proc/")):
        what = (
            "is not a file; save the script in a file, and give the path of this file"
            if path.exists()
            else "does not exist; give the path of a Python file"
        )
        raise ConfigurationError(f"the script {str(path)!r} {what}.")
    if path.suffix in (*BYTECODE_SUFFIXES, *EXTENSION_SUFFIXES):  # a compiled module need not be checked
        return
    try:
        source = path.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers show these warnings
            compile(source, str(path), "exec", dont_inherit=True)
    except OSError as error:
        raise ConfigurationError(f"the script {str(path)!r} cannot be read: {error}.") from error
    except SyntaxError as error:
        if not error.text:  # for example bytes that are not UTF-8
            raise ConfigurationError(f"the script {str(path)!r} cannot be compiled: {error.msg}.") from error
        refusal = ConfigurationError(
            f"the script {str(path)!r} has a syntax error in line {error.lineno}: {error.msg}. Nothing was started."
        )
        refusal.add_note("".join(traceback.format_exception_only(error)[:-1]).rstrip())
        raise refusal from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigurationError(f"the script {str(path)!r} cannot be compiled: {error}.") from error


def _require_per_worker(name: str, values: Sequence[float], workers: int, least: float) -> None:
    """Raise `ConfigurationError` unless there is one number >= `least` per worker, or no number."""
    if values and len(values) != workers:
        raise ConfigurationError(
            f"{name} has {len(values)} values for {workers} workers; give one value per worker, "
            f"for example {','.join(f'{v:g}' for v in [*values, *[values[-1]] * workers][:workers])}."
        )
    for value in values:
        if not (math.isfinite(value) and value >= least):
            raise ConfigurationError(f"{name} is {value:g} for one worker, expected a number >= {least:g}.")

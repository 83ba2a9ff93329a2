"""The configuration of a run, which is passed to each of the run's processes, and the description of the run.

`job_options` checks the conditions that involve several settings.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from ..core.data_feed import Work
from ..core.guard import GuardMode
from ..core.layout import CODECS, Placement, WireFormat, dtype_of, round_robin
from ..core.lease import BatchSizing, Split
from ..errors import ConfigurationError
from ..settings import SETTINGS
from ..settings.checks import is_bucket
from ..shard.optimizer_sources import OptimizerSources
from ..sync import SyncModel
from ..sync.notation import parse_shards, require_shards
from ..sync.plugins import require_named
from ..sync.schedule import Schedule, read_schedule
from ..sync.ticks import TICKS_PER_S
from ..trace.recording import KeptTraces
from ..trace.run_dir import make_run_dir
from ..wire.secure import Contexts, contexts
from ..wire.transports import TRANSPORTS, Transport
from .compute_devices import CPU, Device

LOOPBACK = "127.0.0.1"
"""The default address on which processes listen for TCP connections."""

CHECKPOINTS = "checkpoints"
"""The usual directory of the checkpoints, in the run directory."""

LONGEST_MODEL = 1000  # maximum number of characters in the notation of a sync model that a peer sends


class ResumedFrom(msgspec.Struct, frozen=True):
    """The checkpoint with which a run begins.

    Attributes:
        path: directory of the checkpoint, on the machine of the coordinator.
        faults: for each checkpoint that is newer than the one at `path`, a sentence that says why it is not used.
        highest: the highest number of all checkpoints of the lineage, whole or not. The checkpoints of this run get
            higher numbers.
        lock: number of the newest lock on the run directory when the checkpoint was chosen; None if this process
            already has the lock. See `run_lock`.
    """

    path: str
    faults: tuple[str, ...] = ()
    highest: int = 0
    lock: int | None = None

    @property
    def number(self) -> int:
        """The number of the checkpoint."""
        return int(Path(self.path).name)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The validated settings of one run, which are the same in all of its processes.

    Attributes:
        workers: number of workers; if machines can join, the largest number of workers.
        least: number of workers with which training begins; if machines can join, further workers may join later.
        pause_below: number of workers below which the run pauses until other workers join; 0 if it never pauses.
        joined: True if the workers run on machines that join the run, so that the launcher starts no workers.
        servers: number of servers. See `core.layout.Placement`.
        remote_servers: number of servers that machines bring when they join the run. These servers have the highest
            indices.
        shards: number of slices into which the parameters are divided.
        slicing: "auto" for slices of equal size, except for optimizers that need whole tensors; "even"; or
            "by-parameter" for slices that contain about the same number of whole parameters.
        overlap: "shards" if each shard answers pulls independently, or "off" if no worker pulls until all workers
            have pushed to all shards.
        server_device: the device on which the servers of the launcher's machine make the steps of optimizers that need
            whole tensors, as the user names it.
        sync: the sync model, or one model per shard, and any planned changes, in the notation of the command line.
        imports: modules that every process imports, because they define sync models or conditions that the run
            uses now or may use later.
        transport: name of the transport; see `paceline.wire.transports.TRANSPORTS`.
        split: how an epoch is divided among the workers by default: "auto", "dynamic" or "static".
        batch: "equal" if all workers have batches of the same size by default, or "balanced" if the sizes of the
            batches follow the workers' speeds.
        joint_batch: True if the batch size of a loader is by default the size of the joint batch of all workers.
        seed: random seed for the order of the data, the jitter and all other random choices.
        pace: for each worker, the minimum duration in seconds of an iteration with one batch of the loader's size: a
            fixed part and a part that is proportional to the size of the batch; () if there is no minimum.
        slowdown: for each worker, the factor by which the measured compute time is multiplied; () if there is none.
        jitter: in each iteration, `pace` and `slowdown` are multiplied by a random number, uniformly distributed
            between 1 - `jitter` and 1 + `jitter`.
        on_nan: "stop" to end the run if a gradient contains NaN or inf, or "skip" to drop the push with this gradient.
        hyperparameters: "translated" if the script's hyper-parameters refer to a joint batch, and are translated for
            each update (see `paceline.sync.translation`), or "raw" if each update uses them unchanged.
        run_dir: directory of the logs, traces and results; "" if a new directory is to be created.
        guard: what happens if training diverges; see `paceline.core.guard`.
        checkpoint_every_s: time between two checkpoints, in seconds; 0 for no checkpoints.
        keep: number of checkpoints that are kept: the newest ones.
        checkpoint_dir: directory with a folder for the checkpoints, or the URL of a bucket; None for the usual
            directory. See `checkpoints.buckets`.
        on_server_loss: "resume" if the run goes on from its newest checkpoint when a server is lost, or "stop" if the
            run ends.
        stall_timeout_s: seconds after which a silent process is killed if other processes wait for it; None for no
            limit.
        port: TCP port of the coordinator; 0 for any free port.
        torchrun_port: MASTER_PORT in the environment of the workers, which then has the variables that torchrun sets; 0
            to leave the environment as it is.
        token: secret that each peer must send before it is served.
        mark: 16 hexadecimal digits that distinguish this run from other runs with the same secret. The digits are not
            secret.
        epoch_ns: reading of the monotonic clock at time 0 of the run, in nanoseconds.
        secure: True if the connections use TLS, with keys that are derived from the token.
        version: version of Paceline, which must be the same on all machines; "" if the run is on one machine only.
        traces: which parts of the run's traces and of its workers' records are kept.
        wire: the format in which float32 gradients and weights travel between processes.
        optimizers: the places from which processes may take the classes of optimizers that are not torch's.
        devices: the device of each worker that the launcher starts; () if none is assigned.
        server_devices: the devices among which the servers of this machine are divided; () for the CPU.
        resumed: the checkpoint with which the run begins; None if the run does not resume another one.
        lineage: the common identity of this run and of all runs that it has resumed in its directory. Each checkpoint
            of these runs names this identity. See `paceline.checkpoints.manifest`.
        origin: the directory of the checkpoint with which this lineage has begun, if that checkpoint is of another
            lineage; else "".
    """

    workers: int
    least: int
    pause_below: int
    joined: bool
    servers: int
    shards: int
    slicing: Literal["auto", "even", "by-parameter"]
    overlap: Literal["shards", "off"]
    server_device: str
    sync: str
    imports: tuple[str, ...]
    transport: str
    split: Split
    batch: BatchSizing
    seed: int
    pace: tuple[tuple[float, float], ...]
    slowdown: tuple[float, ...]
    jitter: float
    on_nan: Literal["stop", "skip"]
    hyperparameters: Literal["raw", "translated"]
    run_dir: str
    guard: GuardMode
    checkpoint_every_s: float
    keep: int
    checkpoint_dir: str | None
    on_server_loss: Literal["resume", "stop"]
    stall_timeout_s: float | None
    port: int
    torchrun_port: int
    token: str
    mark: str
    epoch_ns: int
    secure: bool = False
    version: str = ""
    remote_servers: int = 0
    traces: KeptTraces = KeptTraces()
    wire: WireFormat = WireFormat()
    joint_batch: bool = False
    optimizers: OptimizerSources = OptimizerSources()
    devices: tuple[Device, ...] = ()
    server_devices: tuple[Device, ...] = ()
    resumed: ResumedFrom | None = None
    lineage: str = ""
    origin: str = ""

    def __repr__(self) -> str:
        """Return a description without the token, which must not appear in a log."""
        return f"Job({self.workers} workers, {self.servers} servers, {self.sync!r}, {self.run_dir!r})"

    @property
    def checkpoints(self) -> Path:
        """The directory in which the run's checkpoints are written."""
        if self.checkpoint_dir is None or self.bucket is not None:
            return Path(self.run_dir, CHECKPOINTS, self.lineage)
        return Path(self.checkpoint_dir, self.lineage)

    @property
    def bucket(self) -> str | None:
        """The URL of the bucket to which each checkpoint is copied; None for none."""
        return self.checkpoint_dir if self.checkpoint_dir and is_bucket(self.checkpoint_dir) else None

    @property
    def carrier(self) -> Transport:
        """The transport that `transport` names."""
        return TRANSPORTS[self.transport]

    @property
    def placement(self) -> Placement:
        """The servers of the shards."""
        return round_robin(self.shards, self.servers)

    @property
    def local_servers(self) -> int:
        """Number of servers on the coordinator's machine. These servers have the lowest indices."""
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
    def marks_outside(self) -> bool:
        """True if each push says how long its worker's script was outside of training.

        Models can then exclude this time. With raw hyper-parameters, models predict from whole intervals, as in their
        papers. A run that chooses its models itself always needs these times.
        """
        return self.translated or self.schedule.auto

    def codecs(self, vectors: Iterable[str] = ()) -> str:
        """Return the codecs of gradients and weights, such as "gradients as int8, weights as bf16".

        "" if nothing is encoded.

        Args:
            vectors: names of the model's vectors, if known. The result then also names the dtypes that are not encoded.
        """
        if self.wire.exact or self.wire_in_vain(vectors):
            return ""
        weights = self.wire.codec_of_weights(common=self.schedule.lockstep)
        how = ", as differences from what the workers have" if CODECS[weights].based else ""
        others = sorted({dtype_of(vector) for vector in vectors} - self.wire.encoded_dtypes)
        said = f"; {' and '.join(others)} values as they are" if others else ""
        return f"gradients as {self.wire.gradients}, weights as {weights}{how}{said}"

    def wire_in_vain(self, vectors: Iterable[str] = ()) -> str:
        """Return a sentence that says why `wire` has no effect; "" if `wire` has an effect.

        Args:
            vectors: names of the model's vectors, if known.
        """
        if self.wire.exact:
            return ""
        if self.carrier.shares_memory:
            return (
                f"--wire {self.wire} has no effect, because all processes of the run share memory (transport "
                f"{self.transport!r}), so gradients and weights do not travel. With --transport tcp, they would be "
                "rounded."
            )
        dtypes = {dtype_of(vector) for vector in vectors}
        if not dtypes or dtypes & self.wire.encoded_dtypes:
            return ""
        return (
            f"--wire {self.wire} has no effect, because all parameters of the model are "
            f"{' or '.join(sorted(dtypes))}, so gradients and weights travel as they are. With float32 parameters, "
            "they would be rounded."
        )

    @property
    def takes_fractions(self) -> bool:
        """True if an update can take a fraction of a step under at least one sync model that the run may use."""
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
        """Return the minimum duration in seconds of an iteration that computes a gradient for the given data."""
        if not self.pace:
            return 0.0
        fixed_s, proportional_s = self.pace[worker]
        return fixed_s * work.batches + proportional_s * work.full_batches

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
        schedule = read_schedule(models)
        schedule.require_overlap(self.overlap)
        self.wire.require_usable(str(schedule), common=schedule.lockstep)
        launched = [model for step in self.schedule.steps for model in step.models]
        require_named(models, launched, self.imports)
        for model in models:
            model.require_runnable(self.workers)

    def torchrun_environment(self, worker: int) -> dict[str, str]:
        """Return the environment variables that torchrun would set for a worker; {} if the user does not want them."""
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
        """The options with which unequal machines are emulated, with their meaning; "" if nothing is emulated."""
        parts = []
        if self.pace:
            parts.append(f"--pace {SETTINGS['pace'].written(self.pace)} (minimum seconds per iteration)")
        if self.slowdown:
            factors = SETTINGS["slowdown"].written(self.slowdown)
            parts.append(f"--slowdown {factors} (factors of the compute time)")
        if parts and self.jitter:
            parts.append(f"--jitter {self.jitter:g}")
        return ", ".join(parts)


Role = Literal["server", "worker"]


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one process in a run: its role and the addresses that it uses.

    Attributes:
        job: the configuration of the run.
        role: "server" or "worker".
        index: index of the server or worker.
        coordinator: address of the coordinator.
        host: address on which the process listens for TCP connections.
        incarnation: how often the index of the worker has been used before.
        machine: index of the machine on which the process runs; 0 for the machine with the coordinator.
        address: address of a server whose connections come through a listener; else "".
        device: the device of the worker or server; None for the CPU.
        imports: modules that only processes of this machine import, because they add kinds of devices to torch.
    """

    job: Job
    role: Role
    index: int
    coordinator: str
    host: str = LOOPBACK
    incarnation: int = 0
    machine: int = 0
    address: str = ""
    device: Device | None = None
    imports: tuple[str, ...] = ()


def claim_run_dir(job: Job) -> Job:
    """Create the run directory and return the configuration with the directory's path. Call this after all checks."""
    return msgspec.structs.replace(job, run_dir=str(make_run_dir(job.run_dir or None)))


def encode_job(job: Job) -> bytes:
    """Return the configuration of a run in the format in which it is sent to the machines that join the run."""
    return msgspec.json.encode(job)


def decode_job(data: bytes, now_ticks: int) -> Job:
    """Return the configuration that `encode_job` has encoded, with `epoch_ns` on the clock of this machine.

    Args:
        data: the encoded configuration.
        now_ticks: the current time on the clock of the run.
    """
    job = msgspec.json.decode(data, type=Job)
    return msgspec.structs.replace(job, epoch_ns=time.monotonic_ns() - now_ticks)


# -- The description of a run that `--dry-run` prints --------------------------------------------------------

_SLICING_TEXTS = {
    "auto": "evenly, except tensors that an optimizer needs whole (auto)",
    "even": "evenly (even)",
    "by-parameter": "by parameter (by-parameter)",
}
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
    "off": "reports only NaN or inf in the weights, or in the gradients of all workers (off)",
    "tell": "says when training diverges (tell)",
    "stop": "stops the run when training diverges, and keeps the last good weights (stop)",
}
_TRACES_TEXTS = {
    "full": "all are kept (full)",
    "recent": "the last {mb:g} MB are kept (recent)",
    "off": "none are made (off)",
}


def _wire_text(job: Job) -> str:
    """Return the description of the format in which gradients and weights travel."""
    if job.carrier.shares_memory:
        return "nothing travels" if job.wire.exact else f"nothing travels, so {job.wire} has no effect"
    return job.codecs() or "float32"


def describe(job: Job) -> dict[str, str]:
    """Return the description of a run that `--dry-run` prints."""
    devices = "; ".join(_with_memory(device) for device in job.devices)
    return {
        "sync model": job.sync,
        "workers": f"{job.least} to {job.workers}" if job.least < job.workers else str(job.workers),
        **({"devices": devices} if job.devices_setting else {}),
        "servers": str(job.servers)
        + (f", {job.remote_servers} of them on other machines" if job.remote_servers else "")
        + (
            f", with steps of whole tensors on {', '.join(map(_with_memory, job.server_devices))}"
            if job.server_devices
            else ""
        ),
        "shards": f"{job.shards}, with the parameters sliced {_SLICING_TEXTS[job.slicing]}",
        "overlap": _OVERLAP_TEXTS[job.overlap],
        "transport": job.carrier.words,
        "wire": _wire_text(job),
        "data": f"divided {_SPLIT_TEXTS[job.split]}",
        "batches": _BATCH_TEXTS[job.batch]
        + (", parts of a joint batch of the script's size (joint-batch)" if job.joint_batch else ""),
        "hyper-parameters": _HYPERPARAMETERS_TEXTS[job.hyperparameters],
        "emulated": job.emulated or "nothing: each worker runs at full speed",
        "on NaN": job.on_nan,
        "guard": _GUARD_TEXTS[job.guard],
        "traces": _TRACES_TEXTS[job.traces.kept].format(mb=job.traces.megabytes),
        "seed": str(job.seed),
        "run directory": job.run_dir or "a new directory in ./runs",
    }


def _with_memory(device: Device) -> str:
    """Return the label of a device and, if known, the size of its memory."""
    return f"{device.label}, {device.memory_bytes / 1e9:.1f} GB" if device.memory_bytes else device.label

"""The description of a run that `--dry-run` prints."""

from __future__ import annotations

from .compute_devices import Device
from .job import Job

__all__ = ["describe"]

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


def _wire_text(job: Job) -> str:
    """Return the description of the format in which gradients and weights travel."""
    if job.carrier.shares_memory:
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
    """Return the label of a device and the size of its memory, if this is known."""
    return f"{device.label}, {device.memory_bytes / 1e9:.1f} GB" if device.memory_bytes else device.label

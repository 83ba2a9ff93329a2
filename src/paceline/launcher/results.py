"""What a run leaves behind. Its weights come first and survive whatever else fails; all the rest is best effort."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError

from ..errors import ConfigurationError
from ..runtime.coordinator import Coordinator
from ..runtime.reader import WeightsSnapshot
from ..trace.measures import measure
from ..trace.recording import Trace, read_run
from ..trace.records import read_records

__all__ = ["RunResult", "save_weights", "summarize", "write_summary"]

NAMED = 5  # missing tensors that a sentence names


class RunResult(msgspec.Struct, frozen=True):
    """What a run made.

    Attributes:
        state_dict: the final weights and buffers under the model's own names, as plain tensors.
        summary: figures of the run; also `summary.json` in `run_dir`.
        run_dir: logs, traces, `weights.safetensors`, `summary.json`.
        snapshots: (seconds since training began, weights), if they were asked for.
        problems: what went wrong when the run had ended, in words, such as weights that had to be saved elsewhere.
    """

    state_dict: dict[str, torch.Tensor]
    summary: dict[str, Any]
    run_dir: Path
    snapshots: list[tuple[float, WeightsSnapshot]]
    problems: tuple[str, ...] = ()

    @property
    def trace(self) -> list[Trace]:
        """The trace of each shard, in order, then the coordinator's."""
        return read_run(self.run_dir)


def save_weights(snapshot: WeightsSnapshot, run_dir: Path) -> tuple[Path | None, list[str]]:
    """Save the weights to the run's directory or, if that is gone or full, to a new temporary one.

    A snapshot that lacks tensors is saved as `weights-partial.safetensors`, so that nobody takes it for the model.

    Returns:
        where they are, None if they could not be saved at all; and what has to be said about it.
    """
    if not snapshot.state_dict:
        return None, ["no weights were saved: none could be read"]
    name = "weights-partial.safetensors" if snapshot.absent else "weights.safetensors"
    said = []
    if snapshot.absent:
        others = len(snapshot.absent) - NAMED
        named = ", ".join(snapshot.absent[:NAMED]) + (f" and {others} more" if others > 0 else "")
        said.append(f"the saved weights are partial; missing: {named}")
    try:
        return _save(snapshot, run_dir / name), said
    except (OSError, SafetensorError) as error:
        said.append(f"the weights cannot be saved to {run_dir}: {_reason(error)}")
    try:
        elsewhere = Path(tempfile.mkdtemp(prefix=f"paceline-{run_dir.name}-"))
    except OSError as error:
        return None, [*said, f"nor to a temporary directory: {_reason(error)}"]
    try:
        path = _save(snapshot, elsewhere / name)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            elsewhere.rmdir()
        return None, [*said, f"nor to {elsewhere}: {_reason(error)}"]
    return path, [*said, f"they were saved to {path} instead"]


def _save(snapshot: WeightsSnapshot, path: Path) -> Path:
    """Write the file whole or not at all."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        safetensors.torch.save_file(
            {name: tensor.contiguous() for name, tensor in snapshot.state_dict.items()}, unfinished
        )
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    return path


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def summarize(
    coordinator: Coordinator, faults: Sequence[str], crashed: Sequence[int], weights: Path
) -> dict[str, Any]:
    """The figures of a run. Those that need its traces are left out where these cannot be read.

    Args:
        coordinator: of the run.
        faults: what went wrong without ending the run, in words.
        crashed: workers that ended by their own doing.
        weights: where they were saved.
    """
    job = coordinator.job
    run_dir = Path(job.run_dir)
    faults = list(faults)
    figures: dict[str, Any] = {}
    try:
        shards = [trace for trace in read_run(run_dir) if trace.header.host == "shard"]
        if len(shards) == job.shards:
            figures = msgspec.to_builtins(measure(shards), str_keys=True)
            figures["wasted_s"] = sum(
                record.wasted_s for worker in read_records(run_dir) for record in worker
            )
        else:
            faults.append(f"{run_dir} has the traces of {len(shards)} of {job.shards} shards: no figures")
    except (ConfigurationError, OSError, msgspec.DecodeError) as error:
        faults.append(f"the run's traces cannot be read, so there are no figures: {error}")
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
        "lost_workers": coordinator.core.lost,
        "losses": {str(w): coordinator.ending(w) for w in coordinator.core.lost},
        "crashed_workers": list(crashed),
        "faults": faults,
        "weights": str(weights),
        **figures,
    }


def write_summary(summary: dict[str, Any], run_dir: Path) -> str:
    """Write `summary.json`; return why that was not possible, or ""."""
    try:
        text = msgspec.json.format(msgspec.json.encode(summary), indent=2)
        (run_dir / "summary.json").write_bytes(text + b"\n")
    except OSError as error:
        return f"summary.json cannot be written to {run_dir}: {_reason(error)}"
    return ""

"""The results of a run: the weights and the summary.

The weights are saved first, so that they are not lost if a later step fails. A failure to write another file does not
make the run fail.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from math import fsum
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError

from ...core.coordinator import Coordinator
from ...core.data.data_ledger import DataLedger
from ...core.metrics.history import MetricHistory
from ...core.protocol.job_cut import JobCut
from ...errors import ConfigurationError
from ...files import write_json
from ...report.causes import sentences_of
from ...report.evidence import evidence_of
from ...runtime.coordinator_host import CoordinatorHost
from ...runtime.job import Job
from ...shard.snapshot import WeightsSnapshot
from ...sync.effects import samples_words
from ...sync.model import agree_on_means
from ...sync.ticks import TICKS_PER_S
from ...trace.digest import Digest
from ...trace.findings import Handout, find, find_moved
from ...trace.kept_models import kept_modules, modules_of_models
from ...trace.measures import Measures, Meter
from ...trace.recording import Trace, read_run, trace_files
from ...trace.time_use import time_shares, time_use

__all__ = ["RunResult", "save_weights", "summarize", "write_summary"]

NO_METRICS = MetricHistory()

NAMED = 5  # maximum number of missing tensors that a message names


class RunResult(msgspec.Struct, frozen=True):
    """The result of a run.

    Attributes:
        state_dict: the final weights and buffers as plain tensors, with the names from the model's `state_dict`.
        summary: settings and statistics of the run, which are also written to `summary.json` in `run_dir`. The entry
            `findings` says in sentences how much time the workers lost, why, and what would help.
        run_dir: the directory with the logs, the traces, `weights.safetensors`, `metrics.jsonl` and `summary.json`.
        snapshots: pairs (seconds since training began, weights); empty if no snapshots were requested.
        problems: messages about problems at the end of the run, for example if the weights had to be saved to another
            directory.
        history: what the script has logged (see `paceline.log`): name -> metric, such as `history["loss"].values`.
    """

    state_dict: dict[str, torch.Tensor]
    summary: dict[str, Any]
    run_dir: Path
    snapshots: list[tuple[float, WeightsSnapshot]]
    problems: tuple[str, ...] = ()
    history: MetricHistory = NO_METRICS

    def __repr__(self) -> str:
        """A few words, which a notebook shows: the weights alone may be millions of numbers."""
        sync, ended = self.summary.get("sync"), self.summary.get("ended")
        return f"RunResult({sync}, {ended}, {len(self.state_dict)} tensors, run_dir={str(self.run_dir)!r})"

    @property
    def tracked(self) -> dict[str, Any]:
        """The states of the objects that the script tracked, by name, as kept last. See `paceline.track`."""
        path = self.run_dir / "tracked.pt"
        return torch.load(path)["states"] if path.exists() else {}

    @property
    def trace(self) -> list[Trace]:
        """The traces of all shards, in order, followed by the trace of the coordinator."""
        return read_run(self.run_dir)


def save_weights(snapshot: WeightsSnapshot, run_dir: Path) -> tuple[Path | None, list[str]]:
    """Save the weights to the run directory or, if that fails, to a new temporary directory.

    A snapshot that lacks tensors is saved as `weights-partial.safetensors`, so that it is not mistaken for a complete
    model.

    Returns:
        The path of the file (None if the weights could not be saved), and a list of messages about problems.
    """
    if not snapshot.state_dict:
        return None, ["no weights were saved, because no weights could be read"]
    name = "weights-partial.safetensors" if snapshot.absent else "weights.safetensors"
    messages = []
    if snapshot.absent:
        others = len(snapshot.absent) - NAMED
        named = ", ".join(snapshot.absent[:NAMED]) + (f" and {others} more" if others > 0 else "")
        messages.append(f"the saved weights are incomplete; missing: {named}")
    try:
        return snapshot.save(run_dir / name), messages
    except (OSError, SafetensorError) as error:
        messages.append(f"the weights cannot be saved to {run_dir}: {_reason(error)}")
    try:
        temporary_dir = Path(tempfile.mkdtemp(prefix=f"paceline-{run_dir.name}-"))
    except OSError as error:
        return None, [*messages, f"the weights cannot be saved to a temporary directory: {_reason(error)}"]
    try:
        path = snapshot.save(temporary_dir / name)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            temporary_dir.rmdir()
        return None, [*messages, f"the weights cannot be saved to {temporary_dir}: {_reason(error)}"]
    return path, [*messages, f"the weights were saved to {path} instead"]


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def summarize(
    coordinator: CoordinatorHost,
    faults: Sequence[str],
    crashed: Sequence[int],
    weights: Path | None,
    ended: str,
    failure: str = "",
    program: Sequence[str] = (),
    hurried: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Return the settings, problems and statistics of a run. If the traces cannot be read, there are no statistics.

    Args:
        coordinator: the coordinator of the run.
        faults: messages about problems that did not end the run.
        crashed: indices of the workers that have crashed.
        weights: path of the saved weights; None if no weights were saved.
        ended: "finished", "interrupted" if a signal ended the run, or "failed".
        failure: why the run failed.
        program: what each worker ran, as in `Order.arguments`; () if machines that joined the run have chosen it.
        hurried: called repeatedly. If it returns True, the statistics are left out.
    """
    job = coordinator.job
    faults = list(faults)
    python = program[:1] == ["function"]
    vain = [job.wire_in_vain] if job.wire_in_vain else []
    found = [*vain, *coordinator.core.findings, *find_moved(coordinator.core.data.moved, python=python)]
    figures: dict[str, Any] = {}
    measures: Measures | None = None
    resumed = coordinator.core.resumed
    pushes: dict[str, int] = {}
    epochs = _epochs(coordinator.core.data, figures, job.workers)
    devices = coordinator.watch.named_devices()
    try:
        meter = _meter(coordinator, faults, hurried)
        if meter is not None:
            measures = meter.measures()
            figures = msgspec.to_builtins(measures, str_keys=True)
            epochs = _epochs(coordinator.core.data, figures, job.workers)
            pushes = figures.pop("pushes")
            if resumed is not None:
                # The versions of shards, which the traces count, go on.
                made = figures["updates"] - resumed.shards[0].version
                figures |= {"updates": made, "updates_per_s": made / (figures["duration_s"] or 1.0)}
                pushes = {name: count + getattr(resumed.pushes, name, 0) for name, count in pushes.items()}
            spent = coordinator.core.time_ledger.totals(job.now_ticks())
            uses = time_use(meter.presences(), spent, TICKS_PER_S)
            figures["wasted_s"] = fsum(use.wasted_s for use in uses.values())
            figures |= time_shares(uses)
            figures["time_use"] = msgspec.to_builtins(uses, str_keys=True)
            figures["queued_s"] = {str(worker): each.queued / TICKS_PER_S for worker, each in spent.items()}
    except (ConfigurationError, OSError, msgspec.DecodeError) as error:
        faults.append(f"the run's traces cannot be read, so the summary has no statistics: {error}")
    summary = {
        "ended": ended,
        **({"failure": failure} if failure else {}),
        "sync": job.sync,
        "hyperparameters": job.hyperparameters,
        "program": list(program),
        "workers": job.workers,
        "least_workers": job.least,
        "servers": job.servers,
        "joined": job.joined,
        **({} if job.joined else {"cores": usable_cores()}),
        "shards": job.shards,
        "shard_bytes": [bounds.size_bytes for bounds in coordinator.core.slices],
        "rounded_bytes": [bounds.rounded_bytes for bounds in coordinator.core.slices],
        "slicing": job.slicing,
        "overlap": job.overlap,
        "transport": job.transport,
        "wire": str(job.wire),
        "seed": job.seed,
        "guard": job.guard,
        "samples_per_update": samples_line(job, coordinator.core, program),
        "divisible": _handout(coordinator.core.data, asked=job.batch == "balanced").divisible,
        **kept_modules(list(dict.fromkeys([*job.imports, *modules_of_models(job.schedule.models)]))),
        **epochs,
        **(
            {}
            if coordinator.core.auto is None
            else {"choices": list(map(str, coordinator.core.auto.choices))}
        ),
        "emulated": job.emulated,
        "traces": job.traces.kept,
        "main_worker": coordinator.core.main.worker,
        "left": coordinator.core.members.left,
        "lost_workers": coordinator.core.members.lost,
        **_departures(coordinator.core),
        "crashed_workers": list(crashed),
        "faults": faults,
        "noticed": found,
        "findings": found,
        "weights": "" if weights is None else str(weights),
        "ledger": {
            "samples": _samples(coordinator.core.data, figures.get("dropped_samples", 0) + _dropped(resumed)),
            "pushes": pushes,
        },
        **({"devices": {str(w): device for w, device in devices.items()}} if devices else {}),
        "machines": {str(worker): machine for worker, machine in coordinator.machines.machine_of.items()},
        "links": [[*link, total_bytes] for link, total_bytes in coordinator.watch.traffic.totals().items()],
        **figures,
    }
    if measures is not None:
        evidence = evidence_of(summary, job.run_dir)
        summary["findings"] = find(
            measures,
            found=found,
            lost_time=sentences_of(evidence) if evidence is not None else (),
            clippable=agree_on_means(job.schedule.models),
        )
    return summary


def _meter(coordinator: CoordinatorHost, faults: list[str], hurried: Callable[[], bool]) -> Meter | None:
    """Return the statistics of the run; None if there are none. Add to `faults` what is missing, and why.

    Raises:
        ConfigurationError: a trace cannot be read.
    """
    job, left = coordinator.job, coordinator.core.members.left
    run_dir = Path(job.run_dir)
    if job.traces.kept == "off":
        faults.append(
            "the summary has no statistics, such as updates, gradients, staleness and waiting, because the run made "
            "no traces (--traces off)"
        )
        return None
    traces = [trace for trace in trace_files(run_dir) if trace.header.host == "shard"]
    if len(traces) != job.shards:
        faults.append(
            f"{run_dir} contains the traces of only {len(traces)} of {job.shards} shards, so the summary has no "
            "statistics"
        )
        return None
    digest = Digest(run_dir, left=left, only_statistics=True)
    if digest.left_out:
        shards = ", ".join(map(str, digest.left_out))
        faults.append(
            f"the statistics leave out the shards on other machines ({shards}), which have deleted the beginning of "
            "their traces. Run with --traces full to keep everything."
        )
    if not digest.advance(hurried=hurried):
        faults.append(
            "the summary has no statistics, because a second signal has asked the run to end at once"
        )
        return None
    return digest.meter


def samples_line(job: Job, core: Coordinator, program: Sequence[str]) -> str:
    """Return how many samples an update has, in words; "" if there is one worker, or training has not begun."""
    if core.samples is None:
        return ""
    option = "joint_batch=True" if program[:1] == ["function"] else "--joint-batch"
    translated = job.hyperparameters == "translated"
    samples = core.samples._replace(translated=translated, asked=job.joint_batch)
    return samples_words(job.schedule.first, samples, option)


def _departures(core: Coordinator) -> dict[str, Any]:
    """Return why workers have left the run before they had finished, one entry per incarnation of a worker.

    `losses` contains only the last loss of each worker.
    """
    early = [departure for departure in core.members.departures if departure.fate != "finished"]
    causes = [core.cause(departure) for departure in early]
    return {
        "losses": {
            str(departure.worker): cause
            for departure, cause in zip(early, causes, strict=True)
            if departure.fate == "lost"
        },
        "departures": [
            {
                **departure._asdict(),
                "cause": cause,
                "returned": core.members.has_returned(departure),
            }
            for departure, cause in zip(early, causes, strict=True)
        ],
    }


def _epochs(data: DataLedger, figures: Mapping[str, Any], workers: int) -> dict[str, Any]:
    """Return what is known about the epochs of the loader from which the most samples were used.

    `batches_per_push` is larger than 1 if the script accumulated gradients over several batches, and
    `pushes_per_batch` if it made several steps with the same batch, as with several optimizers.
    """
    if (last := data.most_used_order()) is None:
        return {}
    order, epochs = last
    sampled = max(1, figures.get("sampled_gradients", 0))
    per_push = figures.get("samples", 0) / sampled
    share = order.batch / workers if order.joint else order.batch  # of a worker, in a joint batch
    return {
        "epochs": epochs,
        "epoch_samples": order.size or 0,
        "batch_size": order.batch,
        "batches_per_push": max(1, round(per_push / share)),
        "pushes_per_batch": max(1.0, figures.get("gradients", 0) / sampled),
        "batch": "balanced" if order.balanced else "equal",
        "joint_batch": order.joint,
        "split": order.split,
    }


def _handout(data: DataLedger, *, asked: bool) -> Handout:
    """Return how data was handed out to the workers. `asked` is True if the run was asked for balanced batches."""
    last = data.most_used_order()
    return Handout() if last is None else Handout.of(last[0], asked=asked)


def _dropped(resumed: JobCut | None) -> int:
    """Return the number of samples that earlier runs of the job have dropped, and that no trace here contains."""
    return 0 if resumed is None else resumed.pushes.dropped_samples


def _samples(data: DataLedger, dropped: int) -> dict[str, int]:
    """Return the number of samples in each state, over all loaders whose samples were used for training."""
    trained = [counts for counts in data.counts().values() if counts.used]
    return {
        "used": sum(counts.used for counts in trained) - dropped,
        "dropped": dropped,
        "torn": sum(counts.torn for counts in trained),
        "returned": sum(counts.returned for counts in trained),
        "left": sum(counts.left + counts.leased for counts in trained),
        "left_out": sum(counts.left_out for counts in trained),
    }


def usable_cores() -> int:
    """Return the number of cores that the processes of this machine may use: a job of a scheduler may have few."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on Linux
        return os.cpu_count() or 0


def write_summary(summary: dict[str, Any], run_dir: Path) -> str:
    """Write `summary.json`. Return a message if writing fails, else ""."""
    try:
        write_json(run_dir / "summary.json", summary)
    except OSError as error:
        return f"summary.json cannot be written to {run_dir}: {_reason(error)}"
    return ""

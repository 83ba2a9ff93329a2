"""The results of a run: weights, summary, `run.json`, snapshots and report. Also, the files that a resumed run keeps.

The weights are saved first, so that they are not lost if a later step fails. A failure to write another file does not
make the run fail.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import re
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import MsgspecError
from safetensors import SafetensorError

from .. import VERSION
from ..core.data_ledger import DataLedger
from ..core.guard import GoodWeights, guard_mode
from ..core.job_cut import JobCut
from ..core.layout import ModelSpec, doubt_wire
from ..core.metrics import MetricHistory
from ..errors import ConfigurationError, PacelineError
from ..files import Unfinished, write_json
from ..look.causes import evidence_of, sentences_of
from ..look.step_cost import StepCost
from ..run.compute_devices import CPU, usable_cores
from ..run.coordinator import CoordinatorHost, Departed, StateReport
from ..run.job import CHECKPOINTS, Job
from ..run.readers import Reader
from ..run.resuming import SOURCE, cut_of
from ..run.run_lock import is_lock
from ..settings import SETTINGS
from ..shard.store import WeightsSnapshot
from ..sync.model import Samples, samples_words
from ..sync.ticks import TICKS_PER_S
from ..sync.translation import averages_words
from ..trace.activity_cells import time_shares, time_use
from ..trace.digest import Digest
from ..trace.findings import Handout, find, find_moved
from ..trace.measures import Measures, Meter
from ..trace.recording import Trace, kept_modules, modules_of_models, read_run, trace_files
from ..trace.report import NAME, ReportedSetting, Resumption, RunFile, read_run_file
from ..trace.run_dir import REPORT, set_aside
from ..wire.secure import SECRET
from ..wire.transports import best_transport, seen_from

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
        """Return a short text for notebooks, which would otherwise show the weights, perhaps millions of numbers."""
        sync, ended = self.summary.get("sync"), self.summary.get("ended")
        return f"RunResult({sync}, {ended}, {len(self.state_dict)} tensors, run_dir={str(self.run_dir)!r})"

    @property
    def tracked(self) -> dict[str, Any]:
        """Name -> the newest saved state of each object that the script tracked. See `paceline.track`."""
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
    place = "a temporary directory"
    try:
        place = tempfile.mkdtemp(prefix=f"paceline-{run_dir.name}-")
        path = snapshot.save(Path(place, name))
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            os.rmdir(place)
        return None, [*messages, f"the weights cannot be saved to {place}: {_reason(error)}"]
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
        program: the script, module or function that each worker ran, as in `ProcessOrder.arguments`; () if machines
            that joined the run chose this.
        hurried: called repeatedly. If it returns True, the statistics are left out.
    """
    job = coordinator.job
    faults = list(faults)
    python = program[:1] == ["function"]
    core, watch, report = coordinator.core, coordinator.watch, coordinator.report
    model = report.model
    resumed, data, spent, devices, machines, serving, links = coordinator.ask(
        lambda: (
            core.resumed,
            copy.deepcopy(core.data),
            core.time_ledger.totals(job.now_ticks()),
            watch.named_devices(),
            coordinator.machines.hosts_of("worker"),
            coordinator.machines.hosts_of_servers,
            watch.traffic.totals(),
        )
    )
    dropped_before = 0 if resumed is None else resumed.pushes.dropped_samples
    found = [*filter(None, [wire_line(job, model)]), *report.findings, *find_moved(data.moved, python=python)]
    figures: dict[str, Any] = {}
    measures: Measures | None = None
    pushes: dict[str, int] = {}
    try:
        meter = _meter(coordinator, faults, hurried)
        if meter is not None:
            measures = meter.measures()
            figures = msgspec.to_builtins(measures, str_keys=True)
            pushes = figures.pop("pushes")
            if resumed is not None:
                pushes = {name: count + getattr(resumed.pushes, name, 0) for name, count in pushes.items()}
            uses = time_use(meter.presences(), spent, TICKS_PER_S)
            figures["wasted_s"] = fsum(use.wasted_s for use in uses.values())
            figures |= time_shares(uses)
            figures["time_use"] = msgspec.to_builtins(uses, str_keys=True)
            figures["queued_s"] = {str(worker): each.queued / TICKS_PER_S for worker, each in spent.items()}
    except (ConfigurationError, OSError, msgspec.DecodeError) as error:
        faults.append(f"the run's traces cannot be read, so the summary has no statistics: {error}")
    weights_codec = job.wire.codec_of_weights(common=job.schedule.lockstep)
    step_cost = step_cost_of(job, report)
    summary = {
        "ended": ended,
        **({"failure": failure} if failure else {}),
        "sync": job.sync,
        "hyperparameters": job.hyperparameters,
        "program": _without_secrets(program),
        "workers": job.workers,
        "least_workers": job.least,
        "servers": job.servers,
        "joined": job.joined,
        **({} if job.joined else {"cores": usable_cores()}),
        "shards": job.shards,
        "optimizers": [] if model is None else [each.name for each in model.optimizers],
        "vectors": {} if model is None else model.layout.sizes,
        "shard_bytes": [bounds.size_bytes for bounds, _ in report.shards],
        "push_bytes": [bounds.encoded_bytes(job.wire.gradients) for bounds, _ in report.shards],
        "pull_bytes": [bounds.encoded_bytes(weights_codec) for bounds, _ in report.shards],
        "slicing": job.slicing,
        **({} if step_cost is None else {"step_cost": msgspec.to_builtins(step_cost, str_keys=True)}),
        "overlap": job.overlap,
        "transport": job.transport,
        "wire": str(job.wire),
        "repeated_bases": report.repeated_bases,
        "seed": job.seed,
        "guard": job.guard,
        "samples_per_update": samples_line(job, report.samples, program),
        "divisible": _handout(data, asked=job.batch == "balanced").divisible,
        **kept_modules(list(dict.fromkeys([*job.imports, *modules_of_models(job.schedule.models)]))),
        **_epochs(data, figures, job.workers),
        **({"choices": list(map(str, report.choices))} if job.schedule.auto else {}),
        "emulated": job.emulated,
        "traces": job.traces.kept,
        "main_worker": report.main,
        "left": [each.worker for each in report.departed if each.fate == "left"],
        "lost_workers": [each.worker for each in report.departed if each.fate == "lost"],
        **_departures(report.departed),
        "crashed_workers": list(crashed),
        "faults": faults,
        "noticed": found,
        "findings": found,
        "weights": "" if weights is None else str(weights),
        "ledger": {
            # Earlier runs of the job have dropped samples that no trace here contains.
            "samples": _samples(data, figures.get("dropped_samples", 0) + dropped_before),
            "pushes": pushes,
        },
        **({"devices": {str(w): device for w, device in devices.items()}} if devices else {}),
        "machines": {str(worker): machine for worker, machine in machines.items()},
        "server_machines": serving,
        "links": [[*link, total_bytes] for link, total_bytes in links.items()],
        **figures,
    }
    if measures is not None:
        evidence = evidence_of(summary, job.run_dir)
        summary["findings"] = find(
            measures,
            found=found,
            lost_time=sentences_of(evidence) if evidence is not None else (),
            clippable=job.schedule.agrees_on_means,
        )
    return summary


def _meter(coordinator: CoordinatorHost, faults: list[str], hurried: Callable[[], bool]) -> Meter | None:
    """Return the statistics of the run; None if there are none. Add to `faults` what is missing, and why.

    Raises:
        ConfigurationError: a trace cannot be read.
    """
    job = coordinator.job
    left = [each.worker for each in coordinator.report.departed if each.fate == "left"]
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
            "the summary has no statistics, because a second signal has asked the run to end immediately"
        )
        return None
    return digest.meter


def samples_line(job: Job, samples: Samples | None, program: Sequence[str]) -> str:
    """Return how many samples an update has, in words; "" if there is one worker, or training has not begun."""
    if samples is None:
        return ""
    option = "joint_batch=True" if program[:1] == ["function"] else "--joint-batch"
    translated = job.hyperparameters == "translated"
    asked = samples._replace(translated=translated, asked=job.joint_batch)
    return samples_words(job.schedule.first, asked, option)


def averages_line(job: Job, model: ModelSpec | None) -> str:
    """Return which optimizers receive a running mean of gradients, in words; "" if none does."""
    if model is None or job.hyperparameters != "translated" or job.schedule.lockstep or job.workers < 2:
        return ""
    return averages_words([each.name for each in model.optimizers])


def wire_line(job: Job, model: ModelSpec | None) -> str:
    """Return a sentence that says why `--wire` has no effect, or why it should be changed; "" otherwise."""
    if model is None:
        return job.wire_in_vain()
    common, names = job.schedule.lockstep, [each.name for each in model.optimizers]
    return job.wire_in_vain(model.layout.sizes) or doubt_wire(names, job.wire, common=common)


def _departures(departed: Sequence[Departed]) -> dict[str, Any]:
    """Return the reasons why workers left the run before they had finished.

    `departures` has one entry per incarnation of a worker. `losses` contains only the last time that each worker was
    lost.
    """
    early = [each for each in departed if each.fate != "finished"]
    rows = [each._asdict() for each in early]
    for row in rows:
        del row["explained"]
    return {
        "losses": {str(each.worker): each.cause for each in early if each.fate == "lost"},
        "departures": rows,
    }


def _epochs(data: DataLedger, figures: Mapping[str, Any], workers: int) -> dict[str, Any]:
    """Return statistics of the epochs of the loader from which the most samples were used.

    `batches_per_push` is larger than 1 if the script accumulated gradients over several batches.
    `pushes_per_batch` is larger than 1 if the script made several steps with the same batch, as with two optimizers.
    """
    if (last := data.most_used_order()) is None:
        return {}
    order, epochs = last
    sampled = max(1, figures.get("sampled_gradients", 0))
    per_push = figures.get("samples", 0) / sampled
    share = order.batch / workers if order.joint else order.batch  # in a joint batch, the part of one worker
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
    """Return how data was handed out to the workers. `asked` is True if the user has asked for balanced batches."""
    last = data.most_used_order()
    return Handout() if last is None else Handout.of(last[0], asked=asked)


def _samples(data: DataLedger, dropped: int) -> dict[str, int]:
    """Return the number of samples in each state, over all loaders whose samples were used for training."""
    trained = [each for each in data.counts().values() if each.used]
    return {
        "used": sum(each.used for each in trained) - dropped,
        "dropped": dropped,
        "torn": sum(each.torn for each in trained),
        "returned": sum(each.returned for each in trained),
        "left": sum(each.left + each.leased for each in trained),
        "left_out": sum(each.left_out for each in trained),
    }


def step_cost_of(job: Job, report: StateReport) -> StepCost | None:
    """Return the cost of the optimizer steps for the servers; None if the cost is not known yet."""
    if report.model is None:
        return None
    cores, lockstep = usable_cores() or 1, job.schedule.lockstep

    def cores_of(servers: int) -> float:
        threads = max(1, cores // (job.workers + servers))  # of each process
        return min(threads, cores / (servers if lockstep else job.workers + servers))

    return StepCost.of(
        report.model,
        [bounds for bounds, _ in report.shards],
        report.steps,
        slicing=job.slicing,
        block=job.wire.block,
        servers=job.servers,
        cores_of=None if job.joined else cores_of,
        on_host=not job.server_devices,
    )


def server_device_line(job: Job, model: ModelSpec | None) -> str:
    """Return a sentence that says where the servers of this machine make optimizer steps; "" if nothing is unusual."""
    if job.server_device == CPU.kind or model is None:
        return ""
    option = f"--server-device {job.server_device}"
    if names := " and ".join(each.name for each in model.optimizers if each.whole):
        if job.server_devices:
            found = " and ".join(device.label for device in job.server_devices)
            return f"the servers make the steps of {names} on {found}"
        return f"{option} has found no accelerator without a worker, so the steps of {names} are made on the CPU."
    if not job.server_devices:
        return ""
    names = " and ".join(each.name for each in model.optimizers)
    return (
        f"{option} has no effect, because only optimizers that need whole tensors use it. The steps of {names} are "
        "made on the CPU."
    )


def write_summary(summary: dict[str, Any], run_dir: Path) -> str:
    """Write `summary.json`. Return a message if writing fails, else ""."""
    try:
        write_json(run_dir / "summary.json", summary)
    except OSError as error:
        return f"summary.json cannot be written to {run_dir}: {_reason(error)}"
    return ""


# -- The description of a run in `run.json`: its settings, and the command that repeats it -------------------

# An argument whose value is replaced, because it may be a secret, such as --api-key=... or --hf-token ...
SECRET_OPTION = re.compile(
    r"^--?([\w-]*[-_])?(password|passwd|secret|api[-_]?key|access[-_]?key|token)(=|$)", re.I
)
HIDDEN = "..."

SHOWN_FIRST = ["batch", "split", "pace", "slowdown", "jitter", "hyperparameters", "guard", "traces", "on_nan"]
"""The settings for which people look first."""


def description_of(job: Job, program: Sequence[str], command: str = "") -> RunFile:
    """Return the description of a run that begins now.

    Args:
        job: the configuration of the run.
        program: the script, module or function that each worker runs, as in `ProcessOrder.arguments`.
        command: the command line that repeats the run. Default: the command line of this process.
    """
    return RunFile(
        version=VERSION,
        begun_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=_without_run_dir(command or command_of(), Path(job.run_dir)),
        folder=os.getcwd(),
        program=tuple(_without_secrets(program)),
        settings=tuple(_settings(job)),
        sync=job.sync,
        workers=job.workers,
        servers=job.servers,
        shards=job.shards,
        joined=job.joined,
        emulated=job.emulated,
        run_dir=str(Path(job.run_dir).absolute()),
        lineage=job.lineage,
        origin=job.origin,
    )


def command_of(arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> str:
    """Return the command line with which a user can repeat this process; "" if it would not repeat the run.

    Args:
        arguments: the interpreter and its arguments. Default: those of this process.
        environment: the environment variables, which tell how a scheduler has started the process.

    >>> command_of(["/usr/bin/python3", "/opt/bin/paceline", "run", "--run-dir", "my runs/1", "train.py"])
    "paceline run --run-dir 'my runs/1' train.py"
    >>> command_of(["/usr/bin/python3", "-u", "train.py", "--api-key", "123"])
    'python3 -u train.py --api-key ...'
    >>> command_of(["/usr/bin/python3", "-m", "ipykernel_launcher", "-f", "kernel.json"])
    ''
    >>> sizes = {"GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "4"}
    >>> command_of(["/usr/bin/python3", "-u", "-m", "paceline.join", "train.py"], sizes)
    'torchrun --nnodes=1 --nproc-per-node=4 -m paceline.join train.py'
    """
    interpreter, *words = sys.orig_argv if arguments is None else arguments
    if "paceline.join" in words:
        nodes, local = environment.get("GROUP_WORLD_SIZE"), environment.get("LOCAL_WORLD_SIZE")
        sizes = [f"--nnodes={nodes}", f"--nproc-per-node={local}"] if nodes and local else []
        words = ["torchrun", *sizes, "-m", *words[words.index("paceline.join") :]]
    elif words[:2] == ["-m", "paceline"]:
        words = ["paceline", *words[2:]]
    elif words and Path(words[0]).name == "paceline":
        words[0] = "paceline"
    elif not words or words[0] == "-c" or words[:2] == ["-m", "ipykernel_launcher"]:
        return ""
    else:
        words = [Path(interpreter).name, *words]
    if words[:3] == ["paceline", "join", "--slurm"]:
        words = ["srun", *words]
    return shlex.join(_without_secrets(words))


def how_to_resume(command: str, run_dir: Path, *, function: bool = False, joined: bool = False) -> str:
    """Return how a user resumes a run, as the end of a sentence.

    Args:
        command: the command line that repeats the run; see `command_of`.
        run_dir: the directory of the run.
        function: True if the workers call a function.
        joined: True if machines join the run.

    >>> how_to_resume("paceline run train.py", Path("my runs/1"))
    ": paceline run --resume 'my runs/1'"
    >>> how_to_resume("srun paceline join --slurm train.py", Path("runs/1"), joined=True)
    ', start the job again with --run-dir runs/1'
    >>> how_to_resume("python driver.py", Path("runs/1"), function=True, joined=True)  # on a Ray cluster
    ': paceline.launch(..., resume="runs/1")'
    """
    words = shlex.split(command)[:2]
    if words in (["paceline", "run"], ["paceline", "serve"]) and not function:
        return f": {shlex.join([*words, '--resume', str(run_dir)])}"
    if joined and not function:  # a scheduler has started the run
        return f", start the job again with {shlex.join(['--run-dir', str(run_dir)])}"
    return f': paceline.launch(..., resume="{run_dir}")'


def _without_run_dir(command: str, run_dir: Path) -> str:
    """Return a command line without the option that names the run directory: no other run can use this directory."""
    words = shlex.split(command)
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        following = 1 if value else 2
        value = value or "".join(words[place + 1 : place + 2])
        if name == "--run-dir" and Path(value).absolute() == run_dir.absolute():
            return shlex.join(words[:place] + words[place + following :])
    return command


def _without_secrets(words: Sequence[str]) -> list[str]:
    """Return the arguments, with `HIDDEN` instead of values that may be secrets."""
    shown = []
    hide = False
    for word in words:
        found = SECRET_OPTION.match(word)
        shown.append(HIDDEN if hide else word[: found.end()] + HIDDEN * (found[3] == "=") if found else word)
        hide = found is not None and not found[3] and not hide
    return shown


def _settings(job: Job) -> list[ReportedSetting]:
    """Return the settings of a run in the order in which people look for them."""
    workers = f"{job.least}:{job.workers}" if job.least < job.workers else str(job.workers)
    rows: list[tuple[str, str, str | None]] = [
        ("--sync", job.sync, "bsp"),
        ("--workers", workers, None),
        *([("--devices", job.devices_setting, None)] if job.devices_setting else []),
        ("--servers", str(job.servers), None),
        ("--remote-servers", str(job.remote_servers), "0"),
    ]
    usual = {
        "shards": str(job.servers),
        "guard": guard_mode(None, translated=job.translated),
        "transport": job.transport if job.joined else best_transport().name,
    }
    told = {name for name, _, _ in rows}
    for name in dict.fromkeys([*SHOWN_FIRST, *SETTINGS]):
        row = SETTINGS[name]
        if row.reported and row.field and row.option not in told:
            default = "" if row.default is None else row.written(row.value(row.default))
            rows.append((row.option, row.written(getattr(job, row.field)), usual.get(name, default)))
    return [ReportedSetting(name, value, value == default) for name, value, default in rows]


# -- A run that goes on from a checkpoint: what its directory keeps of the time before, and what the user is told

log = logging.getLogger("paceline.run")

QUIET = ("--devices", "--server-device", "--transport")
"""Options whose usual values depend on the machine. A change of these options is not reported."""


class _Progress(NamedTuple):
    """The progress of a job, over all its runs: its updates, the samples in these updates, and its duration."""

    updates: int
    samples: int
    elapsed_s: float


class Earlier(NamedTuple):
    """What is known about a job before its run goes on from a checkpoint.

    Attributes:
        cut: the state of the job at the checkpoint.
        checkpoint: the directory of the checkpoint.
        faults: a sentence for each newer checkpoint, which says why it is not used.
        file: the description of the previous run; None if it cannot be read.
        progress: how far the job had come; None if this cannot be read.
    """

    cut: JobCut
    checkpoint: str
    faults: tuple[str, ...]
    file: RunFile | None
    progress: _Progress | None

    def resumption(self, now: RunFile, why: str) -> Resumption:
        """Return the description of the interruption.

        Args:
            now: the description of the run that goes on.
            why: why the run was interrupted, as a sentence; "" if a user has resumed the run.
        """
        at, lost = _reached(self.cut), self.progress
        before = {} if self.file is None else {each.name: each.value for each in self.file.settings}
        changes = [
            f"{each.name} {before[each.name] or 'none'} -> {each.value or 'none'}"
            for each in now.settings
            if each.name in before and before[each.name] != each.value and each.name not in QUIET
        ]
        return Resumption(
            why=why,
            begun_at=now.begun_at,
            checkpoint=self.checkpoint,
            updates=at.updates,
            samples=at.samples,
            elapsed_s=at.elapsed_s,
            lost_updates=None if lost is None else max(0, lost.updates - at.updates),
            lost_samples=None if lost is None else max(0, lost.samples - at.samples),
            lost_s=None if lost is None else max(0.0, lost.elapsed_s - at.elapsed_s),
            changes=tuple(changes),
            faults=self.faults,
        )


def make_room(job: Job) -> Earlier:
    """Move the files of an ended run into a subfolder of its directory, because the run goes on in this directory.

    Raises:
        ConfigurationError: the directory cannot be written, or the checkpoint cannot be read.
    """
    assert job.resumed is not None
    run_dir, cut = Path(job.run_dir), cut_of(job.resumed)
    try:
        file = read_run_file(run_dir)
    except (OSError, MsgspecError):
        file = None
    folder = set_aside(
        run_dir,
        Path(job.resumed.path).name,
        # The checkpoints and the description are still needed. The files of the lock are in use by this process.
        stays=lambda name: name in (CHECKPOINTS, NAME, SOURCE, SECRET) or is_lock(name),
    )
    return Earlier(cut, job.resumed.path, job.resumed.faults, file, _progress_in(folder, file))


def _reached(cut: JobCut) -> _Progress:
    """Return how far a job had come at a cut."""
    first = cut.shards[0]
    return _Progress(first.version, first.samples, cut.elapsed_s)


def _progress_in(folder: Path, file: RunFile | None) -> _Progress | None:
    """Return how far a job had come when a run ended, from the traces of the run; None if they cannot be read."""
    before: Sequence[Resumption] = () if file is None else file.resumptions
    samples, elapsed_s = (before[-1].samples, before[-1].elapsed_s) if before else (0, 0.0)
    try:
        digest = Digest(folder, only_statistics=True)
        digest.advance()
        measures = digest.meter.measures()
    except (ConfigurationError, OSError, MsgspecError) as error:
        log.info("the traces in %s cannot be read: %s", folder, error)
        return None
    shards = digest.meter.state.shards
    end_s = max(shard.now for shard in shards) / TICKS_PER_S
    updates = shards[0].earlier_updates + measures.updates
    return _Progress(updates, samples + measures.samples, elapsed_s + end_s)


# -- Threads that take snapshots of the weights during a run, over connections of their own, as readers do ---

POLL_INTERVAL_S = 0.05

LEAST_KEEPING_S = 1.0
"""Minimum time between two snapshots of good weights."""

KEEPING_SHARE = 0.02
"""Maximum share of the run's time that is spent on these snapshots."""


class _SnapshotThread:
    """A thread that takes snapshots of the weights while the run goes on. Subclasses decide when."""

    def __init__(self, coordinator: CoordinatorHost, name: str) -> None:
        self._coordinator = coordinator
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, which waits for training to begin."""
        self._thread.start()

    def stop(self, hurried: Callable[[], bool]) -> None:
        """Stop taking snapshots. If a snapshot is in progress, wait until it has ended or `hurried` returns True."""
        self._stopped.set()
        while self._thread.is_alive() and not hurried():
            self._thread.join(POLL_INTERVAL_S)

    def _run(self) -> None:
        coordinator = self._coordinator
        while not coordinator.started.wait(POLL_INTERVAL_S):
            if self._stopped.is_set() or coordinator.over.is_set():
                return
        while not self._stopped.wait(POLL_INTERVAL_S) and not coordinator.over.is_set():
            # If a server is lost, there is no message, because the run itself reports the failure. If the model has
            # been extended, snapshots of the former model fail, and a new reader is needed.
            with contextlib.suppress(PacelineError), self._reader() as reader:
                while self._wait():
                    self._take(reader)
                return

    def _wait(self) -> bool:
        """Wait until the next snapshot is due. Return False if the run is over."""
        raise NotImplementedError

    def _take(self, reader: Reader) -> None:
        raise NotImplementedError

    def _is_over_after(self, wait_s: float) -> bool:
        return self._stopped.wait(wait_s) or self._coordinator.over.is_set()

    def _reader(self) -> contextlib.closing[Reader]:
        coordinator = self._coordinator
        job, report = coordinator.job, coordinator.report
        assert report.model is not None
        shards = [(shard, seen_from(address, coordinator.address)) for shard, address in report.shards]
        return contextlib.closing(Reader.connect(report.model, shards, job.token, job.contexts))


class Sampler(_SnapshotThread):
    """Takes a snapshot of the weights at regular intervals.

    Attributes:
        taken: pairs (seconds since training began, weights).
    """

    def __init__(self, coordinator: CoordinatorHost, interval_s: float) -> None:
        super().__init__(coordinator, "paceline-sampler")
        self.taken: list[tuple[float, WeightsSnapshot]] = []
        self._interval_s = interval_s
        self._tick = 0

    def _wait(self) -> bool:
        due_s = self._coordinator.started_s + self._tick * self._interval_s
        return not self._is_over_after(max(0.0, due_s - self._coordinator.job.now_s()))

    def _take(self, reader: Reader) -> None:
        snapshot = reader.read().completed(Path(self._coordinator.job.run_dir))
        now_s = self._coordinator.job.now_s() - self._coordinator.started_s
        self.taken.append((now_s, snapshot))
        # Skip the due times that passed while the snapshot was being taken.
        self._tick = max(self._tick + 1, math.ceil(now_s / self._interval_s))


class Keeper(_SnapshotThread):
    """Keeps the last weights that were certainly good (see `core.guard`), for a run that its guard may stop.

    At most one snapshot per second is taken, and taking snapshots takes at most 2 % of the time. At most two
    snapshots are in memory.
    """

    def __init__(self, coordinator: CoordinatorHost) -> None:
        super().__init__(coordinator, "paceline-keeper")
        self._weights: GoodWeights[WeightsSnapshot] = GoodWeights(
            lambda: coordinator.ask(coordinator.core.guard.judged)
        )
        self._due_s = 0.0

    @property
    def good(self) -> WeightsSnapshot | None:
        """The last weights that were certainly good; None if there are none."""
        return self._weights.good

    def _wait(self) -> bool:
        while not self._is_over_after(POLL_INTERVAL_S):
            if self._weights.wanted and time.monotonic() >= self._due_s:
                return True
        return False

    def _take(self, reader: Reader) -> None:
        begun_s = time.monotonic()
        self._weights.take(reader.read().completed(Path(self._coordinator.job.run_dir)))
        now_s = time.monotonic()
        self._due_s = now_s + max(LEAST_KEEPING_S, (now_s - begun_s) / KEEPING_SHARE)


TELL_S = 2.0  # time after which the user is told what takes so long


def write_report(run_dir: Path, tell: Callable[[str], object], hurried: Callable[[], bool]) -> str:
    """Write the report of a run that has ended. Return a message if this fails, else "".

    An error here does not make the run fail, because its results have been saved.

    Args:
        run_dir: the run directory.
        tell: called with a sentence if reading the traces takes long.
        hurried: called from time to time. If it returns True, no report is written.
    """
    # These modules are imported here, so that other commands need not spend time on loading them.
    from ..look.page import page_of
    from ..look.run_reading import ReportReader

    teller = threading.Timer(
        TELL_S, tell, ["Reading the traces for the report. Press Ctrl-C twice to skip the report."]
    )
    teller.daemon = True
    teller.start()
    try:
        report = ReportReader(run_dir).read(hurried=hurried)
        if not hurried():
            with Unfinished(run_dir / REPORT) as place:
                place.write_text(page_of([report]), encoding="utf-8")
    except (ConfigurationError, OSError) as error:
        return f"{REPORT} cannot be written to {run_dir}: {_reason(error)}"
    except Exception as error:
        return f"{REPORT} cannot be written to {run_dir} (this is a bug in Paceline; please report it): {error!r}"
    finally:
        teller.cancel()
        teller.join()
    return ""

"""The contents of `run.json` and of a report, as plain values.

`look.run_reading` finds these values, and `look.page` shows them. All times are in seconds since the run began, on the
coordinator's clock. Durations are in seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from ..core.metrics import Metric
from ..core.status import JobStatus
from ..files import read_regular, write_json
from ..trust import SIGNATURE, is_signed, signature_of
from ..words import counted


class Cause(msgspec.Struct, frozen=True):
    """One thing that took time, and what would help.

    A report begins with a list of such causes, the cause of the most lost time first.

    Attributes:
        words: what happened, in one or two sentences.
        lost_s: time that was lost, summed over the workers; None if `words` is not about lost time.
        share: the lost time as a share of the workers' time, from 0 to 1.
        remedies: what would help, in sentences, most effective first.
        brief: what happened, as a clause for the headline; "" if `words` is not about time.
    """

    words: str
    lost_s: float | None = None
    share: float | None = None
    remedies: tuple[str, ...] = ()
    brief: str = ""


class ReportedSetting(msgspec.Struct, frozen=True):
    """A setting of the run, in the words of the command line.

    Attributes:
        name: name of the option, such as "--sync".
        value: its value as text.
        default: True if this is the default value.
    """

    name: str
    value: str
    default: bool = False


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The times and counts of one worker.

    Attributes:
        worker: index of the worker.
        machine: name of the worker's machine; "" if all workers ran on one machine.
        device: name of the worker's device; "" for the CPU.
        fate: "finished", "left", "lost", or "" while the worker takes part in the run.
        why: why the worker left or was lost; "" otherwise.
        iterations: number of the worker's iterations.
        samples: number of samples that the worker has used; 0 if unknown.
        samples_per_s: samples per second while the worker computes; None if unknown.
        time_s: kind (see `KINDS`) -> seconds.
        awaited_s: seconds for which other workers have waited for this worker, summed over the other workers.
        mean_batch: mean number of samples per iteration; None if unknown.
        share: the worker's share of the samples in all applied updates (of the gradients, if the samples are unknown),
            from 0 to 1; None if unknown.
    """

    worker: int
    machine: str = ""
    device: str = ""
    fate: str = ""
    why: str = ""
    iterations: int = 0
    samples: int = 0
    samples_per_s: float | None = None
    time_s: dict[str, float] = {}
    awaited_s: float = 0.0
    mean_batch: float | None = None
    share: float | None = None


class Spans(msgspec.Struct, frozen=True):
    """The exact times of one worker's iterations; in a long run, only of its newest iterations.

    All times are in units of 0.1 ms.

    Attributes:
        worker: index of the worker.
        begun: when each iteration began.
        lengths: for each iteration, five durations: wasted time, computing, transfer to the shards, waiting, and the
            transfer back.
        awaited: for each iteration: the worker whose event ended the wait; -1 if there is no such worker, or if it
            is not the same worker at all shards.
    """

    worker: int
    begun: tuple[int, ...]
    lengths: tuple[tuple[int, int, int, int, int], ...]
    awaited: tuple[int, ...]


class TimelineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What each worker did over time, in buckets of equal width. For the newest iterations, exact times are also known.

    Attributes:
        width_s: width of a bucket in seconds.
        buckets: number of buckets. Bucket i begins at i * width_s.
        workers: the workers, in the order of `shares` and `awaited`.
        shares: for each worker, base64 of buckets * len(KINDS) bytes, with the kinds of one bucket side by side. Each
            byte is the share of the bucket that the worker has spent on this kind, from 0 to 255. For the rest of the
            bucket, the worker was absent.
        awaited: for each worker, base64 of one little-endian int16 per bucket: the other worker for which this worker
            has waited longest in the bucket; -1 for none.
        spans: the exact times of iterations, for each worker.
        exact_from_s: from this time on, `spans` contains all iterations of all workers.
        barriers_s: the times at which held pushes were applied together; only the last 10,000 of these times are kept.
        error_s: maximum error of a time, because clocks of machines differ.
    """

    width_s: float
    buckets: int
    workers: tuple[int, ...]
    shares: tuple[str, ...]
    awaited: tuple[str, ...]
    spans: tuple[Spans, ...] = ()
    exact_from_s: float = 0.0
    barriers_s: tuple[float, ...] = ()
    error_s: float = 0.0


class Mark(msgspec.Struct, frozen=True):
    """Something that happened once: a worker joined, left or was lost, the model changed, or the guard acted.

    Attributes:
        time_s: when.
        kind: the kind of event.
        words: what happened, in a sentence.
        worker: the worker, or -1.
    """

    time_s: float
    kind: Literal["joined", "left", "finished", "lost", "model", "guard", "paused", "note"]
    words: str
    worker: int = -1


class WaitingFor(msgspec.Struct, frozen=True):
    """The waits with the same reason under one sync model, summed over the workers.

    Attributes:
        reason: what ended the wait, in words, such as "a push of worker 3", "a timer", "worker 2 was lost".
        total_s: seconds.
        count: number of waits.
        awaited: the worker that was awaited, or -1.
    """

    reason: str
    total_s: float
    count: int
    awaited: int = -1


class ModelInForce(msgspec.Struct, frozen=True, kw_only=True):
    """Staleness and waiting while one sync model was in force at shard 0.

    Attributes:
        sync: the model in the notation of the command line.
        from_s: when the model came into force.
        to_s: when another model came into force, or the run ended.
        staleness: (staleness in updates, number of pushes), ascending, counted at all shards.
        waiting: the reasons for waiting, longest first.
        wait_lengths: histogram of the durations of waits: (upper end of a bin in seconds, number of waits), ascending.
        updates: number of updates in this time.
    """

    sync: str
    from_s: float
    to_s: float
    staleness: tuple[tuple[int, int], ...] = ()
    waiting: tuple[WaitingFor, ...] = ()
    wait_lengths: tuple[tuple[float, int], ...] = ()
    updates: int = 0


class LinkTotal(msgspec.Struct, frozen=True):
    """The traffic from one machine to another.

    Attributes:
        sender: name of the machine that sends.
        receiver: name of the machine that receives.
        total_bytes: number of bytes.
        bytes_per_s: mean rate while the run trained; None if unknown.
    """

    sender: str
    receiver: str
    total_bytes: int
    bytes_per_s: float | None = None


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the report of one run shows. See the classes above.

    Attributes:
        name: name of the run, which is the name of its directory.
        run_dir: path of the run's directory.
        version: version of Paceline that was used; "" if unknown.
        begun_at: date and time when the run began, in ISO 8601 with the offset from UTC; "" if unknown.
        state: what became of the run. "cut off" if its launcher was killed before it could write a summary.
        failure: why the run failed, in words; "" if it did not fail.
        duration_s: how long the run has trained so far: from when the first worker joined until the last worker left.
        headline: one or two sentences: how much was trained, how fast, and the most costly cause.
        causes: what took the time and what would help; empty if nothing stands out.
        settings: the settings, in the order in which people look for them.
        command: the command that repeats the run; "" if unknown.
        emulated: how unequal machines were emulated; "" if the run emulated nothing.
        figures: name -> text, as in the summary that `paceline run` prints.
        metrics: what the script has logged.
        progress: (time_s, samples, updates) of all workers together, at most 2,000 points.
        workers: one entry per worker.
        timeline: what each worker did over time; None if there are no traces.
        models: one entry for each period in which one model was in force.
        links: the traffic between machines; empty if the run was on one machine.
        pushes: what became of the pushes: outcome -> number of pushes.
        samples: what became of the samples: outcome -> number of samples.
        marks: the single events of the run, in order of time.
        notes: what the reader should know about this report, such as what is missing and why.
        live: the state of the job, while the run is in progress; None afterwards.
        now_s: the time of a live report, in seconds since the run began; None afterwards.
    """

    name: str
    run_dir: str
    version: str = ""
    begun_at: str = ""
    state: Literal["running", "finished", "interrupted", "failed", "cut off"]
    failure: str = ""
    duration_s: float = 0.0
    headline: str = ""
    causes: tuple[Cause, ...] = ()
    settings: tuple[ReportedSetting, ...] = ()
    command: str = ""
    emulated: str = ""
    figures: dict[str, str] = {}
    metrics: tuple[Metric, ...] = ()
    progress: tuple[tuple[float, int, int], ...] = ()
    workers: tuple[WorkerReport, ...] = ()
    timeline: TimelineReport | None = None
    models: tuple[ModelInForce, ...] = ()
    links: tuple[LinkTotal, ...] = ()
    pushes: dict[str, int] = {}
    samples: dict[str, int] = {}
    marks: tuple[Mark, ...] = ()
    notes: tuple[str, ...] = ()
    live: JobStatus | None = None
    now_s: float | None = None


# -- `run.json` in a run directory: the settings of a run, and how it can be repeated ------------------------
#
# The launcher writes this file when the run begins, so that even a run whose launcher was killed has a
# report. The file is signed (see `paceline.trust`), because a resumed run runs the program that this file names.

FORMAT = 1
NAME = "run.json"


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """An interruption of a run, after which the run has gone on from a checkpoint.

    Attributes:
        why: why the run was interrupted, as a sentence; "" if a user has resumed the run.
        begun_at: date and time at which the run went on, in ISO 8601 with the offset from UTC.
        checkpoint: the directory of the checkpoint.
        updates: number of updates that the job had made at the checkpoint.
        samples: number of samples in these updates, as far as this number is known.
        elapsed_s: time for which the job had run at the checkpoint, in seconds.
        lost_updates: number of updates that the run had made after the checkpoint; None if unknown.
        lost_samples: number of samples in the lost updates; None if unknown.
        lost_s: time between the checkpoint and the interruption, in seconds; None if unknown.
        changes: the settings that were changed, such as "--workers 3 -> 2".
        faults: a sentence for each newer checkpoint, which says why it is not used.
    """

    why: str = ""
    begun_at: str
    checkpoint: str
    updates: int
    samples: int
    elapsed_s: float
    lost_updates: int | None = None
    lost_samples: int | None = None
    lost_s: float | None = None
    changes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """What happened, in sentences."""
        name = Path(self.checkpoint).name
        if self.lost_updates is None:
            lost = "The work after this checkpoint is lost. The traces do not say how much work this was."
        elif not self.lost_updates:
            lost = "The traces show no work after this checkpoint."
        else:
            lost = (
                f"The work after this checkpoint is lost: {counted(self.lost_updates, 'update')}, "
                f"{counted(self.lost_samples or 0, 'sample')} and {self.lost_s or 0.0:.1f} s."
            )
        said = [
            self.why,
            *self.faults,
            f"The run goes on from checkpoint {name} (update {self.updates}). {lost}",
        ]
        if self.changes:
            said.append(f"Changed: {', '.join(self.changes)}.")
        return " ".join(filter(None, said))


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `run.json`.

    Attributes:
        format: version of the format of this file.
        version: version of Paceline.
        begun_at: date and time at which the run began, in ISO 8601 with the offset from UTC.
        run_dir: the directory in which the run began. By this path, a resumed run recognizes that its directory is a
            copy of another one.
        lineage: an identity that the run shares with the runs that have resumed it in its directory, and that its
            checkpoints contain; "" in runs of earlier versions. See `paceline.checkpoints.manifest`.
        origin: the directory of the checkpoint with which the run began, if this checkpoint has another lineage; ""
            otherwise.
        command: the command line that repeats the run, quoted for a shell; "" if there is none, as in a notebook.
        folder: the current directory in which this command was called.
        program: what each worker ran, as in `ProcessOrder.arguments`; () if machines that join the run choose it.
        settings: all settings, with the names of their options.
        sync: the sync model or schedule, in the notation of the command line.
        workers: number of workers; if machines can join, the largest number.
        servers: number of servers.
        shards: number of shards.
        joined: True if machines join the run. The traces of their workers stay on these machines.
        emulated: how unequal machines are emulated; "" if the run emulates nothing.
        resumptions: the interruptions of the run, in order.
        signature: the signature of the user who has started the run. `read_run_file` returns "" for the signature of
            another user.
    """

    format: int = FORMAT
    version: str
    begun_at: str
    command: str
    folder: str
    program: tuple[str, ...] = ()
    settings: tuple[ReportedSetting, ...] = ()
    sync: str
    workers: int
    servers: int
    shards: int
    joined: bool = False
    emulated: str = ""
    resumptions: tuple[Resumption, ...] = ()
    run_dir: str = ""
    lineage: str = ""
    origin: str = ""
    signature: str = ""

    def value_of(self, option: str) -> str:
        """Return the value of a setting, given the name of its option; "" if this file does not contain the setting."""
        return next((setting.value for setting in self.settings if setting.name == option), "")


def write_run_file(file: RunFile, run_dir: Path, *, sign: bool = True) -> None:
    """Write `run.json`.

    Args:
        file: the content of `run.json`.
        run_dir: the directory of the run.
        sign: True to sign the file as the work of this user.

    Raises:
        OSError: the file cannot be written.
    """
    content = msgspec.to_builtins(file)
    write_json(run_dir / NAME, {**content, SIGNATURE: signature_of(content) if sign else ""})


def read_run_file(run_dir: Path) -> RunFile | None:
    """Return the content of `run.json`; None if there is no such file, as in simulations and runs of older versions.

    Raises:
        msgspec.DecodeError: this is not the content of a `run.json`.
        OSError: the file cannot be read.
    """
    try:
        data = read_regular(run_dir / NAME)
    except FileNotFoundError:
        return None
    return parse_run_file(data)


def parse_run_file(data: bytes) -> RunFile:
    """Return the content of `run.json`, given its bytes.

    Raises:
        msgspec.DecodeError: this is not the content of a `run.json`.
    """
    file = msgspec.json.decode(data, type=RunFile)
    return file if is_signed(msgspec.json.decode(data)) else msgspec.structs.replace(file, signature="")

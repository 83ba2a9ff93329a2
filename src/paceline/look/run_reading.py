"""Reads a run directory, and makes the report about the run.

A run directory may be read while its run goes on, or after the launcher was killed. Some files may not have been
copied from another machine, and a file may be damaged. So the report contains what is known, and a note about
everything that is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from ..core.lease import Split
from ..core.metrics import Metric
from ..errors import ConfigurationError
from ..files import read_regular
from ..trace.activity import SPAN_UNITS_PER_S, Activity, Happening
from ..trace.activity_cells import KINDS, LEAST_CLASS_S, Era, Total
from ..trace.clocks import MachineClock, read_clocks
from ..trace.digest import Digest, shares_of_updates
from ..trace.findings import Handout
from ..trace.recording import held_files
from ..trace.report import (
    LinkTotal,
    Mark,
    ModelInForce,
    ReportedSetting,
    RunFile,
    RunReport,
    Spans,
    TimelineReport,
    WaitingFor,
    WorkerReport,
    read_run_file,
)
from ..trace.run_dir import read_metrics
from ..words import listed
from .causes import Evidence, causes_of, evidence_of, headline_of, links_of
from .summary import summary_rows

State = Literal["running", "finished", "interrupted", "failed", "cut off"]
ENDED = ("finished", "interrupted", "failed")
DAMAGED = (KeyError, ValueError, TypeError, AttributeError, IndexError)
"""Exceptions that occur while statistics are read, if a trace lacks entries or a summary has unexpected entries."""


def holds_run(folder: Path) -> bool:
    """Return True if a directory contains a run, or some of the files of a run."""
    return any((folder / name).exists() for name in ("run.json", "summary.json")) or any(
        folder.glob("trace-*.jsonl")
    )


def read_report(run_dir: Path, in_progress: Callable[[Path], bool] = lambda run_dir: False) -> RunReport:
    """Return the report of a run. See `ReportReader`."""
    return ReportReader(run_dir, in_progress).read()


class ReportReader:
    """Reads the report of one run. While the run is in progress, each call of `read` reads only what is new.

    Args:
        run_dir: the run directory.
        in_progress: called with a run directory that has no summary. It returns True if the run is still in progress,
            and False if its launcher was killed.

    Raises:
        ConfigurationError: the directory contains no run.
    """

    def __init__(self, run_dir: Path, in_progress: Callable[[Path], bool] = lambda run_dir: False) -> None:
        if not run_dir.is_dir():
            wrong = "is not a directory" if run_dir.exists() else "does not exist"
            raise ConfigurationError(f"{str(run_dir)!r} {wrong}; give the directory of a run.")
        if not holds_run(run_dir):
            raise ConfigurationError(
                f"{str(run_dir)!r} is not the directory of a run: it contains no run.json, summary.json or trace. "
                "Give the directory that paceline run prints when it ends."
            )
        self._run_dir = run_dir
        self._in_progress = in_progress
        self._digest: Digest | None = None
        self._traces: list[Path] = []  # traces of the shards in `_digest`
        self._damaged: dict[str, str] = {}  # what is damaged -> a note

    def read(self, now_s: float | None = None, hurried: Callable[[], bool] = lambda: False) -> RunReport:
        """Return the report of the run as of now.

        Args:
            now_s: the time in seconds since the run began, if the run is in progress and this time is known.
            hurried: called from time to time, because long traces take a while. If it returns True, the rest is not
                read.
        """
        summary = self._summary()
        described = self._described()
        clocks = self._clocks()
        complete = self._advance(clocks, summary, hurried)
        notes = list(self._damaged.values())
        if not complete:
            notes.append("The traces were not read to their end, because reading them took too long.")
        # The summary of a simulation by an earlier version does not say that the simulation has finished.
        ended: State = summary.get("ended", "finished" if summary else "running")
        if ended not in ENDED:
            ended = "running" if self._in_progress(self._run_dir) else "cut off"
        assembly = _Assembly(self._run_dir, ended, summary, described, self._digest, now_s, notes)
        return assembly.report(self._metrics(notes))

    def _summary(self) -> dict[str, Any]:
        path = self._run_dir / "summary.json"
        try:
            return cast("dict[str, Any]", msgspec.json.decode(read_regular(path), type=dict))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self._damaged["summary"] = f"summary.json cannot be read: {error}."
            return {}

    def _described(self) -> RunFile | None:
        try:
            return read_run_file(self._run_dir)
        except (OSError, ValueError) as error:
            self._damaged["settings"] = f"run.json cannot be read: {error}."
            return None

    def _clocks(self) -> dict[int, MachineClock]:
        try:
            return read_clocks(self._run_dir)
        except (ConfigurationError, OSError) as error:
            self._damaged["clocks"] = str(error)
            return {}

    def _metrics(self, notes: list[str]) -> tuple[Metric, ...]:
        try:
            return tuple(read_metrics(self._run_dir).values())
        except (OSError, ValueError) as error:
            notes.append(f"metrics.jsonl cannot be read: {error}.")
            return ()

    def _advance(
        self,
        clocks: dict[int, MachineClock],
        summary: Mapping[str, Any],
        hurried: Callable[[], bool],
        *,
        again: bool = True,
    ) -> bool:
        """Digest what is new in the traces and records. Return False if `hurried` has ended the reading early.

        Meanwhile, the run may have digested and deleted a part of these files. In this case, begin once more with the
        run's own digest.
        """
        traces = held_files(self._run_dir, "trace-shard-*")
        if traces != self._traces:  # the servers of a run do not begin their traces at the same moment
            self._traces, self._digest = traces, None
        try:
            if self._digest is None:
                left = summary.get("left", ())
                self._digest = Digest(self._run_dir, left=left, clocks=clocks)
                self._damaged.pop("traces", None)  # a trace is empty until its header is written
        except (ConfigurationError, OSError) as error:
            if traces:
                self._damaged["traces"] = _sentence(error)
            return True
        self._digest.activity.converter.clocks = clocks
        while True:
            try:
                return self._digest.advance(hurried=hurried)
            except (ConfigurationError, OSError) as error:
                if self._digest.overtaken and again:
                    self._digest = None
                    return self._advance(clocks, summary, hurried, again=False)
                broken = [each for each in self._digest.sources if str(each.path) in str(error)]
                name = broken[0].path.name if broken else "traces"
                self._damaged[name] = f"{_sentence(error)} The rest of this file is not in the report."
                if not broken:
                    return True
                self._digest.sources = [each for each in self._digest.sources if each not in broken]
            except DAMAGED as error:
                self._damaged["traces"] = (
                    f"The traces lack entries ({error!r}), so this report is incomplete."
                )
                return True


def _sentence(error: Exception) -> str:
    text = str(error)
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


class _Assembly:
    """Puts a report together from what is known about a run."""

    def __init__(
        self,
        run_dir: Path,
        state: State,
        summary: dict[str, Any],
        described: RunFile | None,
        digest: Digest | None,
        now_s: float | None,
        notes: list[str],
    ) -> None:
        self._run_dir = run_dir
        self._summary = {"ended": state, **summary} if summary else {}
        self._described = described
        self._digest = digest
        self._notes = notes
        self._state = state
        self._now_s = now_s if self._state == "running" else None
        # worker that was lost or has left early, and whose index was not used again -> its departure
        self._gone = {
            each.get("worker"): each for each in summary.get("departures", ()) if not each.get("returned")
        }
        self._activity: Activity | None = None
        if digest is not None:
            self._activity = digest.activity.closed(self._now_s, self._gone)
        self._measure()

    def report(self, metrics: tuple[Metric, ...]) -> RunReport:
        """Return the report."""
        summary, described, activity = self._summary, self._described, self._activity
        begun_s, end_s = self._span()
        workers = self._workers()
        links = links_of(summary)
        self._note_what_is_missing(metrics)
        models = () if activity is None else models_of(activity, end_s)
        evidence = self._evidence(workers, links, end_s - begun_s, end_s)
        causes = causes_of(evidence) if workers else ()
        return RunReport(
            name=self._run_dir.resolve().name,
            run_dir=str(self._run_dir),
            version="" if described is None else described.version,
            begun_at="" if described is None else described.begun_at,
            state=self._state,
            failure=str(summary.get("failure", "")),
            duration_s=evidence.duration_s,
            headline=headline_of(evidence, causes),
            causes=causes,
            settings=self._settings(),
            command="" if described is None else described.command,
            emulated=self._emulated,
            figures=self._figures(),
            metrics=metrics,
            progress=()
            if activity is None
            else tuple((round(at_s, 3), samples, updates) for at_s, samples, updates in activity.progress),
            workers=workers,
            timeline=None if activity is None else timeline_of(activity),
            models=models,
            links=links,
            pushes=_counts(summary, "pushes"),
            samples=_counts(summary, "samples"),
            marks=()
            if activity is None
            else marks_of(activity, summary.get("departures", ()), summary.get("left", ())),
            notes=tuple(self._notes),
            now_s=self._now_s,
        )

    def _measure(self) -> None:
        """If the summary has no statistics, add those that can be computed from the traces."""
        if "duration_s" in self._summary or self._digest is None:
            return
        try:
            measures = self._digest.meter.measures()
        except DAMAGED:
            self._notes.append("There are no statistics, because the traces are incomplete.")
            return
        figures: dict[str, Any] = msgspec.to_builtins(measures, str_keys=True)
        pushes = figures.pop("pushes")
        activity = self._activity
        assert activity is not None
        if measures.present_s:
            paused_s = sum(times_in(activity, worker)["paused"] for worker in activity.workers)
            figures["paused_share"] = paused_s / measures.present_s
        figures["wasted_s"] = sum(times_in(activity, worker)["wasted"] for worker in activity.workers)
        self._summary = {
            "sync": self._sync,
            "shards": len(self._digest.shards),
            "emulated": self._emulated,
            **self._summary,
            "ended": self._state,
            **figures,
            "ledger": {**self._summary.get("ledger", {}), "pushes": pushes},
        }

    @property
    def _sync(self) -> str:
        if "sync" in self._summary:
            return str(self._summary["sync"])
        if self._described is not None:
            return self._described.sync
        return self._activity.eras[0].sync if self._activity is not None else ""

    @property
    def _emulated(self) -> str:
        described = "" if self._described is None else self._described.emulated
        return str(self._summary.get("emulated", described))

    def _span(self) -> tuple[float, float]:
        """Return when training began and ended, in seconds since the run began."""
        if self._activity is None or not self._activity.workers:
            return 0.0, 0.0
        own = self._activity.workers.values()
        begun_s = min(each.first_joined_s for each in own)
        if self._now_s is not None:
            return begun_s, self._now_s
        if all(each.fate for each in own):
            return begun_s, max(each.left_s for each in own)
        return begun_s, self._activity.now_s

    def _workers(self) -> tuple[WorkerReport, ...]:
        summary, activity = self._summary, self._activity
        if activity is None:
            return ()
        uses: Mapping[str, Mapping[str, float]] = summary.get("time_use", {})
        machines: Mapping[str, str] = summary.get("machines", {})
        devices: Mapping[str, str] = summary.get("devices", {})
        shares = shares_of_updates(summary.get("worker_samples", {}), summary.get("worker_gradients", {}))
        found = []
        for worker, own in sorted(activity.workers.items()):
            use = uses.get(str(worker))
            time_s = times_in(activity, worker)
            if use is not None:
                time_s = {kind: use.get(f"{kind}_s", 0.0) for kind in time_s}
            computing_s = time_s["computing"]
            fate = "left" if own.fate == "finished" and worker in self._gone else own.fate
            found.append(
                WorkerReport(
                    worker=worker,
                    machine=machines.get(str(worker), ""),
                    device="" if (device := devices.get(str(worker), "")) == "cpu" else device,
                    fate=fate,
                    why=str(self._gone.get(worker, {}).get("cause", "")),
                    iterations=own.iterations,
                    samples=own.samples,
                    samples_per_s=own.samples / computing_s if own.samples and computing_s else None,
                    time_s=time_s,
                    awaited_s=own.awaited_s,
                    mean_batch=own.samples / own.computations if own.samples and own.computations else None,
                    share=shares.get(str(worker)),
                )
            )
        return tuple(found)

    def _settings(self) -> tuple[ReportedSetting, ...]:
        """Return the settings in `run.json` or, if there is no such file, those in the summary."""
        if self._described is not None:
            return self._described.settings
        names = (
            "sync",
            "workers",
            "servers",
            "batch",
            "split",
            "hyperparameters",
            "wire",
            "guard",
            "shards",
            "seed",
        )
        return tuple(
            ReportedSetting(f"--{name}", str(self._summary[name])) for name in names if name in self._summary
        )

    def _figures(self) -> dict[str, str]:
        if not self._summary:
            return {}
        try:
            rows = summary_rows(self._summary)
        except DAMAGED as error:
            self._notes.append(f"The summary lacks figures: {error!r}.")
            return {}
        words = self._summary.get("samples_per_update", "")
        return rows | ({"an update": str(words)} if words else {})

    def _evidence(
        self, workers: tuple[WorkerReport, ...], links: tuple[LinkTotal, ...], lasted_s: float, end_s: float
    ) -> Evidence:
        summary, activity, described = self._summary, self._activity, self._described
        run_dir = str(self._run_dir)
        if self._has_ended and (known := evidence_of(summary, run_dir)) is not None:
            return known  # the evidence that the terminal uses
        others: dict[str, Any] = {"duration_s": lasted_s} if "duration_s" not in summary else {}
        if described is not None:
            others["joined"] = described.joined
            others |= {
                name: getattr(described, name) for name in ("servers", "program") if name not in summary
            }
        if activity is not None:
            others["last_push_s"] = {worker: own.last_push_s for worker, own in activity.workers.items()}
            if "time_use" not in summary:
                others["unsplit"] = tuple(each for each in activity.workers if each not in activity.recorded)
        if "epochs" not in summary and not self._has_ended and summary.get("samples"):
            # The run has not said how its data was handed out, but the numbers of samples show that Paceline handed it
            # out.
            balanced = self._setting("--batch") == "balanced"
            split = cast(Split, self._setting("--split") or "auto")
            others["handout"] = Handout(split, balanced, divisible=True)
        evidence = evidence_of(
            summary,
            run_dir,
            state=self._state,
            sync=self._sync,
            workers=workers,
            end_s=end_s,
            links=links,
            wire=self._setting("--wire") or "float32",
            **others,
        )
        assert evidence is not None
        return evidence

    @property
    def _has_ended(self) -> bool:
        return self._state in ENDED

    def _setting(self, name: str) -> str:
        return next((each.value for each in self._settings() if each.name == name), "")

    def _note_what_is_missing(self, metrics: tuple[Metric, ...]) -> None:
        notes, digest, activity = self._notes, self._digest, self._activity
        if self._state == "cut off":
            notes.append(
                "There is no summary, because the process that launched the run was killed. The figures are those of "
                "the traces, whose last entries may be missing."
            )
        if activity is None or digest is None:
            why = " (--traces off)" if self._summary.get("traces") == "off" else ""
            notes.append(f"There are no traces of the shards{why}, so it is not known what the workers did.")
            return
        if digest.left_out:
            notes.append(f"The traces of shards {digest.left_out} lack their beginning, and are left out.")
        expected = self._summary.get("shards", len(digest.shards))
        if len(digest.shards) < expected:
            notes.append(
                f"The run directory contains only {len(digest.shards)} of {expected} traces of shards."
            )
        unknown = sorted(worker for worker, own in activity.workers.items() if own.iterations)
        unknown = [worker for worker in unknown if worker not in activity.recorded]
        if unknown:
            notes.append(
                f"There are no records of {listed(unknown)} (machines that join a run keep the records of their "
                "workers). So in the timeline, the time between an answer and the next push counts as computing. To "
                "see transfers, too, copy the files worker-*.jsonl from such machines into the run directory."
            )
        if activity.converter.unknown:
            notes.append(
                f"The clocks of machines {sorted(activity.converter.unknown)} are unknown, so their times may be "
                "shifted."
            )
        if not metrics:
            notes.append("The script has logged no metric, such as the loss: call paceline.log(loss=loss).")


def _counts(summary: Mapping[str, Any], kind: str) -> dict[str, int]:
    """Return how many pushes or samples were used, dropped and so on, according to the summary's ledger."""
    ledger = summary.get("ledger", {})
    found = ledger.get(kind, {}) if isinstance(ledger, dict) else {}
    return {str(name): int(count) for name, count in found.items()} if isinstance(found, dict) else {}


# -- The parts of a report that describe the activity of the workers -----------------------------------------

MOST_REASONS = 100  # maximum number of reasons for waiting that are listed separately for one model
MOST_FINISHED = 32  # if more workers have finished, the timeline does not mark when

REASONS = {
    "push": "a push of worker {}",
    "change": "worker {} to reach the change of the model",
    "joined": "worker {} to join",
    "finished": "worker {}, which finished",
    "lost": "worker {}, which was lost",
    "timer": "a timer of the sync model",
}
"""Reason of a wait -> what the pull waited for."""


def timeline_of(activity: Activity) -> TimelineReport | None:
    """Return what each worker did over time; None if no worker has done anything."""
    workers = tuple(sorted(activity.workers))
    if not workers or not activity.cells.buckets:
        return None
    cells = activity.cells
    own: dict[int, list[int]] = {worker: [] for worker in workers}  # worker -> indices of its spans
    spans = list(activity.spans)
    for place, span in enumerate(spans):
        own[span.worker].append(place)
    for worker in workers:
        own[worker].sort(key=lambda place: spans[place].begun)
    return TimelineReport(
        width_s=cells.width_s,
        buckets=cells.buckets,
        workers=workers,
        shares=tuple(map(cells.shares, workers)),
        awaited=tuple(map(cells.awaited, workers)),
        spans=tuple(
            Spans(
                worker,
                tuple(spans[place].begun for place in places),
                tuple(spans[place].lengths for place in places),
                tuple(spans[place].awaited for place in places),
            )
            for worker, places in own.items()
        ),
        exact_from_s=activity.exact_from_s,
        barriers_s=tuple(round(at_s * SPAN_UNITS_PER_S) / SPAN_UNITS_PER_S for at_s in activity.barriers_s),
        error_s=activity.converter.bound_s,
    )


def times_in(activity: Activity, worker: int) -> dict[str, float]:
    """Return the seconds that a worker has spent on each kind of activity."""
    return dict(zip(KINDS, activity.workers[worker].times_s, strict=True))


def models_of(activity: Activity, end_s: float) -> tuple[ModelInForce, ...]:
    """Return staleness and waiting under each model that was in force."""
    eras = activity.eras
    ends = [(era.from_s, era.from_updates) for era in eras[1:]] + [(end_s, activity.updates)]
    return tuple(_model(era, *end) for era, end in zip(eras, ends, strict=True))


def _model(era: Era, to_s: float, to_updates: int) -> ModelInForce:
    longest = sorted(era.waits.items(), key=lambda each: -each[1].total_s)
    waiting = [_reason(reason, awaited, total) for (reason, awaited), total in longest[:MOST_REASONS]]
    if rest := longest[MOST_REASONS:]:
        total_s = sum(total.total_s for _, total in rest)
        waiting.append(WaitingFor("other workers", total_s, sum(total.count for _, total in rest)))
    return ModelInForce(
        sync=era.sync,
        from_s=era.from_s,
        to_s=to_s,
        staleness=tuple(sorted(era.staleness.items())),
        waiting=tuple(waiting),
        wait_lengths=tuple(
            (LEAST_CLASS_S * 2**length, count) for length, count in sorted(era.lengths.items())
        ),
        updates=to_updates - era.from_updates,
    )


def _reason(reason: str, awaited: int, total: Total) -> WaitingFor:
    return WaitingFor(REASONS[reason].format(awaited), total.total_s, total.count, awaited)


def marks_of(
    activity: Activity, departures: Sequence[Mapping[str, object]], left: Collection[int]
) -> tuple[Mark, ...]:
    """Return the single events of a run, such as the moment at which a worker was lost, in order of time.

    Args:
        activity: what the workers did.
        departures: why workers have left before they had finished, as in `summary.json`.
        left: the workers that left before their scripts had ended, once for each time.
    """
    causes: dict[int, list[str]] = {}  # worker -> why its incarnations were lost, in order
    for departure in departures:
        if departure.get("fate") == "lost":
            causes.setdefault(int(str(departure["worker"])), []).append(str(departure.get("cause", "")))
    happenings = activity.happenings
    # The first losses may be missing: those before training began, and those that are no longer kept.
    known = Counter(each.worker for each in happenings if each.kind == "lost")
    for worker, own in causes.items():
        del own[: -known[worker]]
    finished = sum(each.kind == "finished" for each in happenings)
    early = Counter(left)
    marks = []
    for each in happenings:
        early[each.worker] -= each.kind == "finished"
        is_early = early[each.worker] >= 0
        if each.kind == "finished" and finished > MOST_FINISHED and not is_early:
            continue
        marks.append(_mark(each, causes, is_early))
    return tuple(marks)


def _mark(happening: Happening, causes: dict[int, list[str]], is_early: bool) -> Mark:
    worker, at_s = happening.worker, happening.time_s
    match happening.kind:
        case "joined":
            return Mark(at_s, "joined", f"worker {worker} joined the run", worker)
        case "lost":
            own = causes.get(worker, [])
            cause = own.pop(0) if own else ""
            return Mark(at_s, "lost", f"worker {worker} was lost{': ' if cause else ''}{cause}", worker)
        case "model":
            return Mark(at_s, "model", f"the sync model changed to {happening.text}")
        case "rate":
            return Mark(at_s, "guard", f"the guard set the factor of the learning rate to {happening.text}")
        case "finished" if is_early:
            return Mark(at_s, "left", f"worker {worker} left the run", worker)
        case _:
            return Mark(at_s, "finished", f"worker {worker} finished", worker)

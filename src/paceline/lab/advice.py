"""`paceline advise`: simulates the machines of a finished run under every sync model, and recommends models.

The simulation does not show how staleness affects the loss. Therefore, the recommended models are ordered by their
effect on the result of training (see `sync.model`): first bsp, whose updates are those of a single process, then
`drop-stragglers`, then models with bounded staleness and models with unlimited staleness. Each model that changes the
result comes with the command that shows the accuracy of the script under this model.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from ..core.lease import BatchSizing
from ..core.requests import Entry
from ..errors import ConfigurationError
from ..look.causes import COMPARE, evidence_of, sentences_of, steps_of
from ..look.step_cost import step_cost_in
from ..look.summary import speed_unit
from ..look.tables import Figures, ranking_table
from ..sim import Cluster, Dataset, simulate
from ..start.terminal import print_sentence
from ..sync.events import WorkerFinished, WorkerJoined, WorkerLost
from ..sync.model import EFFECTS, Effect, backup_quorum, effect_of
from ..sync.schedule import read_schedule
from ..trace.digest import Digest
from ..trace.findings import find, how_to_check
from ..trace.measures import Measures, Meter
from ..trace.recording import Header, TraceFile, load_kept_models, modules_of_models, trace_files
from ..words import run_name
from .clusters import NO_CHANGES, Changes, describe, describe_data, load_cluster
from .comparison import STAR, show_faults, show_recommendation
from .pool import TellCount
from .ranking import EVERY_MODEL, mark_front, rank
from .recommendation import ENOUGH, WORTH_IT, Recommendation, candidates_of, recommend, wire_variants

SLOW = 1.5  # a worker is slow if its iterations take this many times as long as those of the median worker
ONLY_RECENT = (
    "The run has kept only the end of its traces and records (--traces recent), so the simulation repeats the last "
    "iterations."
)
REFUSED = (
    "left out, because it does not allow optimizer.clip_grad_norm(), which the script of the run calls. Such a script "
    "would fail under this model."
)
ROUGH = 0.1  # recommendations are called rough if the simulation deviates from the run by more than this

_ASSUMED = "compute times are taken as proportional to the batch size, unless the run had balanced batches"


class Advice(msgspec.Struct, frozen=True):
    """A recommended sync model, with the reason for the recommendation.

    Attributes:
        wish: what the model is best for, or a note that no other model is much faster.
        sync: the recommended model.
        batch: the recommended sizes of the workers' batches: "equal" or "balanced".
        reason: explanation of the recommendation, as sentences.
        effect: what the model does to the result of training: "exact", "fresh" or "stale"; see `sync.model`.
        check: the command that shows the accuracy of the script under the model, to be run before `command`; "" if
            the model is exact.
        command: the command that runs the script or the training function of the run under the model. If the script
            is unknown, the command contains SCRIPT in its place.
    """

    wish: str
    sync: str
    batch: BatchSizing
    reason: str
    effect: Effect
    check: str
    command: str


class MachineReport(msgspec.Struct, frozen=True):
    """A comparison of all models on the machines of a run, with recommendations.

    Attributes:
        name: name of the simulated cluster.
        cluster: description of the simulated cluster.
        workers: number of workers of the simulated cluster.
        sync: sync model of the run.
        emulated: description of how the run emulated unequal machines; "" if the run emulated nothing. If there is a
            description, the advice is for the emulated machines.
        findings: sentences about the time that workers of the run lost, and about remedies; see
            `paceline.trace.findings`.
        measured_updates_per_s: updates per second in the run while all workers were present.
        simulated_updates_per_s: updates per second in a simulation of the run.
        measured_gradients_per_s: gradients per second in the run while all workers were present.
        simulated_gradients_per_s: gradients per second in a simulation of the run.
        deviation: relative difference of the simulated from the measured gradients per second, which shows how
            accurate the other simulations are; 0.0 if nothing was measured.
        caution: sentences about a large deviation, which makes the recommendations rough; "" if the deviation is
            small.
        data: the data that was simulated; None if the run's data is unknown.
        rows: results for every model, sorted by speed, descending. If the data is known, there are rows for equal and
            for balanced batches.
        advice: the recommendations, one for each wish.
        recommendation: what to do first, and why.
    """

    name: str
    cluster: str
    workers: int
    sync: str
    emulated: str
    findings: list[str]
    measured_updates_per_s: float
    simulated_updates_per_s: float
    measured_gradients_per_s: float
    simulated_gradients_per_s: float
    deviation: float
    caution: str
    data: Dataset | None
    rows: list[Figures]
    advice: list[Advice]
    recommendation: Recommendation | None


def advise(
    run_dir: Path,
    syncs: Sequence[str] = EVERY_MODEL,
    tell: TellCount = lambda done, of, what: None,
    changes: Changes = NO_CHANGES,
    wire: str | None = None,
) -> MachineReport:
    """Simulate the machines of a run under several models, and recommend models.

    Args:
        run_dir: directory of the run.
        syncs: the models.
        tell: progress callback.
        changes: how the simulated machines differ from the recorded machines.
        wire: format in which gradients and weights travel in the simulations; None for the format of the run.

    Raises:
        ConfigurationError: the directory does not contain a finished run, its files are damaged, a module with one
            of its sync models cannot be imported, or a change is not valid.
    """
    load_kept_models(run_dir)
    summary = _summary(run_dir)
    recorded = load_cluster(str(run_dir), changes.recorded_bandwidth)
    if (logs := len(list(run_dir.glob("worker-*.jsonl")))) != summary["workers"]:
        raise ConfigurationError(
            f"{run_dir} has records of {logs} workers, but summary.json lists {summary['workers']} workers. Put the "
            "missing files worker-<index>.jsonl back, or give the directory of another run."
        )
    cluster = changes.made(recorded)
    run_wire = summary.get("wire", "float32")
    wire = wire or run_wire
    measures = _measures(run_dir)
    summary["clips"] = measures.clips  # missing in summaries of earlier versions of Paceline
    iterations = max(20, min(int(count) for count in summary["iterations"].values()))
    own = summary["sync"]
    traces = [trace for trace in trace_files(run_dir) if trace.header.host == "shard"]
    together_s, together = _while_all_were_present(traces[0])
    data = _dataset(summary, recorded.workers)
    batch = summary.get("batch", "equal")
    again = simulate(
        recorded, own, None, summary["seed"], until_s=together_s, data=data, batch=batch, wire=run_wire
    )
    data = _dataset(summary, cluster.workers)
    if data is not None:
        # Simulate no more epochs than are needed for a comparison.
        rounds = data.rounds(cluster.workers) * data.pushes_per_batch
        data = msgspec.structs.replace(data, epochs=min(data.epochs, math.ceil(iterations / rounds)))
    measured_per_s, simulated_per_s = together.gradients / together_s, again.measures.gradients / together_s
    deviation = simulated_per_s / measured_per_s - 1 if measured_per_s else 0.0
    runnable = _runnable(syncs if tuple(syncs) != EVERY_MODEL else _with_backups(cluster), cluster)
    refused = [sync for sync in runnable if measures.clips and not read_schedule(sync).agrees_on_means]
    rows = rank(
        cluster,
        [sync for sync in runnable if sync not in refused],
        iterations=iterations,
        wire=wire,
        data=data,
        balances=summary.get("divisible", True),
        tell=tell,
    )
    rows += [Figures(sync=sync, failure=REFUSED) for sync in refused]
    changed = {"workers": changes.workers, "servers": changes.servers, "shards": changes.servers}
    numbers = {name: value for name, value in changed.items() if value is not None}
    return MachineReport(
        sync=own,
        emulated=cluster.emulated,
        findings=find(
            measures,
            lost_time=_lost_time(summary, str(run_dir), changes),
            clippable=read_schedule(own).agrees_on_means,
        ),
        measured_updates_per_s=together.updates / together_s,
        simulated_updates_per_s=again.updates / together_s,
        measured_gradients_per_s=measured_per_s,
        simulated_gradients_per_s=simulated_per_s,
        deviation=deviation,
        caution=_caution(deviation, summary["iterations"], traces[0].header),
        data=data,
        rows=rows,
        cluster=describe(cluster),
        name=cluster.name,
        workers=cluster.workers,
        advice=_advice(rows, summary | numbers, str(run_dir), changes),
        recommendation=recommend(
            candidates_of(rows),
            wire_variants(cluster, rows, seed=0, shards=None, data=data, wire=wire, tell=tell),
            servers=cluster.servers,
            check=lambda sync: _how_to_check(str(run_dir), summary, sync, changes),
            distributes="program" not in summary or summary.get("split") is not None,
            steps=_steps(summary),
        ),
    )


def _measures(run_dir: Path) -> Measures:
    """Return the statistics of the whole run, even if the beginning of its traces was deleted."""
    digest = Digest(run_dir, only_statistics=True)
    digest.advance()
    return digest.meter.measures()


def _caution(deviation: float, iterations: Mapping[str, int], header: Header) -> str:
    part = "" if header.is_whole else f"{ONLY_RECENT} "
    if abs(deviation) <= ROUGH:
        return part.strip()
    more = "more" if deviation > 0 else "fewer"
    return (
        f"{part}"
        f"A simulation of this run computes {abs(deviation):.0%} {more} gradients per second than were measured, so "
        f"the recommendations are rough. Possible reasons: the run had few iterations ({min(iterations.values())} by "
        "the worker with the fewest), its transfers did not always take the same time, or the machine was also busy "
        "with other work. For better recommendations, repeat the run for longer on an idle machine."
    )


def _dataset(summary: Mapping[str, Any], workers: int) -> Dataset | None:
    """Return the data of a run; None if no data of known size was handed out to the workers.

    If the script accumulated gradients, the batches of a push count as one batch. If the script computed several
    gradients from each batch, the simulated workers compute the same number.
    """
    samples, batch_size, epochs = (summary.get(key) or 0 for key in ("epoch_samples", "batch_size", "epochs"))
    if not (samples >= workers and batch_size and epochs):
        return None
    batch_size *= summary.get("batches_per_push", 1)
    pushes = summary.get("pushes_per_batch", 1.0)
    return Dataset(
        samples=samples,
        batch_size=batch_size,
        epochs=epochs,
        split=summary.get("split") or "auto",
        pushes_per_batch=pushes,
        joint_batch=bool(summary.get("joint_batch", False)),
    )


def _lost_time(summary: Mapping[str, Any], run_dir: str, changes: Changes) -> list[str]:
    """Return the sentences about lost time and remedies that the terminal and the run's report show."""
    evidence, cost = evidence_of(summary, run_dir), step_cost_in(summary)
    found = [] if evidence is None else [each for each in sentences_of(evidence) if COMPARE not in each]
    return found if cost is None or changes.servers is None else [*found, cost.with_servers(changes.servers)]


def _steps(summary: Mapping[str, Any]) -> str:
    """Return sentences about the optimizers' steps; "" unless these take half of the time that counts as transfers."""
    evidence = evidence_of(summary, "")
    cause = None if evidence is None else steps_of(evidence)
    return "" if cause is None else " ".join([cause.words, *cause.remedies])


def _while_all_were_present(shard: TraceFile) -> tuple[float, Measures]:
    """Return the length in seconds and the statistics of the first part of a run.

    This part ends when the first worker leaves or, if no worker leaves, with the last event. If the beginning of the
    trace was deleted, the workers that were present count as joining at the first remaining entry.
    """
    begun_s, now_s = None, 0.0
    meter = Meter(1, shard.header.ticks_per_s)
    for entry in shard.entries:
        now_s = shard.header.time_s(entry)
        if begun_s is None:
            begun_s = now_s
            if shard.header.keyframe is not msgspec.UNSET:
                for worker in shard.header.keyframe.workers:
                    joined = WorkerJoined(now_ticks=entry.event.now_ticks, worker=worker)
                    meter.at_shard(0).record(Entry(joined, version=entry.version))
        meter.at_shard(0).record(entry)
        if isinstance(entry.event, WorkerFinished | WorkerLost) and now_s > begun_s:
            break
    if begun_s is None:
        raise ConfigurationError(
            "the trace of shard 0 contains only a header: no events were recorded, so the run cannot be simulated."
        )
    return max(now_s - begun_s, 1e-9), meter.measures()


def _with_backups(cluster: Cluster) -> tuple[str, ...]:
    """Return `EVERY_MODEL` and, if most workers are fast, `drop-stragglers` with a quorum without the slow workers."""
    typical_s = [cluster.compute(worker).typical_s for worker in range(cluster.workers)]
    slow = sum(worker_s > SLOW * median(typical_s) for worker_s in typical_s)
    quorum = backup_quorum(cluster.workers, slow)
    return EVERY_MODEL if quorum is None else (*EVERY_MODEL, f"drop-stragglers:quorum={quorum}")


def _runnable(syncs: Sequence[str], cluster: Cluster) -> list[str]:
    """Return bsp, which is the baseline, and the models that can run on this cluster."""
    found = ["bsp"]
    for sync in syncs:
        try:
            read_schedule(sync).require_runnable(cluster.workers, cluster.servers)
        except ConfigurationError:
            continue
        if sync not in found:
            found.append(sync)
    return found


def _how_to_check(run_dir: str, summary: Mapping[str, Any], sync: str, changes: Changes) -> str:
    joint = bool(summary.get("joint_batch"))
    return how_to_check(run_dir, summary.get("program", ()), ("bsp", sync), changes.options, joint=joint)


def _advice(
    rows: Sequence[Figures], summary: Mapping[str, Any], run_dir: str, changes: Changes
) -> list[Advice]:
    rows = [row for row in rows if row.sound]
    [bsp] = [row for row in rows if row.sync == "bsp" and row.batch == "equal"]
    effects = {row.sync: effect_of(read_schedule(row.sync).models) for row in rows}
    exact = max((row for row in rows if row.sync == "bsp"), key=lambda row: row.speed)
    if exact.speed < WORTH_IT * bsp.speed:
        exact = bsp
    backups = [row for row in rows if effects[row.sync] == "fresh" and row.speed >= WORTH_IT * exact.speed]
    bounded = [row for row in mark_front([row for row in rows if _bounded(row.sync)]) if row.front]
    middle = max(bounded, key=lambda row: row.speed)
    unit = speed_unit(row.samples_per_s for row in rows)
    picks = [
        ("the result of one process", exact),
        *[("no stale gradients, but late gradients are dropped", row) for row in backups[:1]],
        (f"most {unit} per second with bounded staleness or barriers", middle),
        (f"most {unit} per second", rows[0]),
    ]
    if rows[0].speed < WORTH_IT * bsp.speed:
        picks = [("no other model is 10 % faster", bsp)]
    advice: dict[tuple[str, str], Advice] = {}
    for wish, row in picks:
        key = row.sync, row.batch
        if key in advice:
            advice[key] = msgspec.structs.replace(advice[key], wish=f"{advice[key].wish}; {wish}")
            continue
        effect = effects[row.sync]
        check = _how_to_check(run_dir, summary, row.sync, changes)
        advice[key] = Advice(
            wish,
            row.sync,
            row.batch,
            _reason(row, bsp),
            effect,
            "" if effect == "exact" else check,
            command_for(summary, row.sync, row.batch),
        )
    return list(advice.values())


def _bounded(sync: str) -> bool:
    """Return True if the model has barriers or limits how far ahead a worker may get."""
    return sync.partition(":")[0] in ("bsp", "ssp", "dssp", "dsps", "elastic-bsp", "drop-stragglers")


def _reason(row: Figures, bsp: Figures) -> str:
    if row is bsp:
        share = f"{row.waiting_share:.0%}"
        return f"workers spend {share} of their time waiting; another model can save at most this share."
    faster = row.speed / bsp.speed
    what = speed_unit([row.samples_per_s])
    wasted = f" and spend {row.wasted_share:.0%} on aborted computations" if row.wasted_share >= 0.005 else ""
    reason = (
        f"{faster:.2f} times as many {what} per second as under bsp. Workers spend "
        f"{row.waiting_share:.0%} of their time waiting (bsp: {bsp.waiting_share:.0%}){wasted}. "
        f"The mean staleness is {row.mean_staleness:.1f} updates."
    )
    if row.mean_staleness > 0 and faster < ENOUGH:
        reason += (
            f" This model may still train more slowly than bsp: with fewer than about {ENOUGH:g} times as many "
            f"{what} as under bsp, staleness can cost more time than is saved (docs/models/when-it-pays.md)."
        )
    return reason


def _summary(run_dir: Path) -> dict[str, Any]:
    if not run_dir.is_dir():
        name = repr(str(run_dir))
        wrong = f"{name} is not a directory" if run_dir.exists() else f"the directory {name} does not exist"
        raise ConfigurationError(f"{wrong}; give the directory of a run, which the run prints when it ends.")
    try:
        summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
        read_schedule(summary["sync"])
        if summary.get("ended") == "failed":
            raise ConfigurationError(
                f"{run_dir} does not contain a finished run: the run has failed. Give the directory of another run."
            )
        if summary.get("traces") == "off":
            raise ConfigurationError(
                f"the run in {run_dir} made no traces (--traces off), so it cannot be simulated. Give the directory "
                "of another run."
            )
        if missing := {"workers", "servers", "seed", "iterations"} - summary.keys():
            raise ValueError(f"it does not contain {' and '.join(sorted(missing))}.")
        return summary
    except FileNotFoundError:
        raise ConfigurationError(
            f"{run_dir} does not contain a finished run: there is no summary.json. Give the directory that paceline "
            "run prints when it ends."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{run_dir / 'summary.json'} cannot be read: {error}") from error


def show(report: MachineReport, console: Console) -> None:
    """Print a report: the table of all models and the recommendations."""
    caption = (
        f"{report.cluster}\n{STAR}\nthe run itself ({report.sync}): {report.measured_gradients_per_s:.4g} "
        f"gradients per s measured, {report.simulated_gradients_per_s:.4g} simulated ({report.deviation:+.1%})"
    )
    if report.data is not None:
        caption += f"\n{describe_data(report.data, report.workers)}; {_ASSUMED}"
    for finding in report.findings:
        print_sentence(console, finding)
    title = f"{report.name}, simulated under each model"
    console.print(ranking_table(title, report.rows, caption, console.width))
    show_faults(report.rows, console)
    if report.emulated:
        print_sentence(
            console,
            f"\nThis run emulated unequal machines: {report.emulated}. The recommendations are for the emulated "
            "machines.",
        )
    if report.caution:
        print_sentence(console, f"\n{report.caution}")
    for advice in report.advice:
        name = run_name(advice.sync, advice.batch)
        wish = Text.assemble("\n", (advice.wish, "bold"), f": {name}")
        console.print(wish, highlight=False, soft_wrap=not console.is_terminal)
        print_sentence(console, f"  {advice.reason}")
        checked = " Check the accuracy first:" if advice.check else ""
        print_sentence(console, f"  Accuracy: {EFFECTS[advice.effect]}.{checked}")
        # Commands may be copied, so they are not wrapped.
        for command in filter(None, [advice.check, advice.command]):
            console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)
    show_recommendation(report.recommendation, console)


# -- The command that runs the script of a recorded run again, under another sync model ----------------------


def command_for(summary: Mapping[str, Any], sync: str, batch: BatchSizing) -> str:
    """Return the command line, or the call of `launch` in Python, that runs a script under a sync model.

    Args:
        summary: the summary of the run. The summary says how the run was launched, and names the modules to import.
        sync: the sync model.
        batch: sizes of the workers' batches.
    """
    modules = dict.fromkeys([*summary.get("imports", ()), *modules_of_models(read_schedule(sync).models)])
    kind, *words = summary.get("program") or ["serve" if "least_workers" in summary else "script", "SCRIPT"]
    workers = str(summary["workers"])
    if kind == "serve" and summary["least_workers"] < summary["workers"]:
        workers = f"{summary['least_workers']}:{workers}"
    settings = {"workers": workers, "servers": str(summary["servers"])}
    if (shards := summary.get("shards", summary["servers"])) != summary["servers"]:
        settings["shards"] = str(shards)
    named = {"sync": sync}
    if batch == "balanced":
        named["batch"] = batch
    if (split := summary.get("split") or "auto") != "auto":
        named["split"] = split  # as simulated; no effect if the script chooses the split
    if summary.get("hyperparameters") == "raw":
        named["hyperparameters"] = "raw"
    joint = bool(summary.get("joint_batch"))
    if kind == "function":
        numbers = "".join(f", {name}={value}" for name, value in settings.items())
        imports = f", imports={list(modules)!r}" if modules else ""
        texts = "".join(f", {name}={value!r}" for name, value in named.items())
        flag = ", joint_batch=True" if joint else ""
        return f"paceline.launch(FUNCTION{numbers}{texts}{flag}{imports})"
    settings |= named
    options = [word for name, value in settings.items() for word in (f"--{name}", value)]
    options += ["--joint-batch"] * joint
    options += [word for name in modules for word in ("--import", name)]
    program = {"serve": [], "module": ["-m", *words]}.get(kind, words)
    return shlex.join(["paceline", "serve" if kind == "serve" else "run", *options, *program])

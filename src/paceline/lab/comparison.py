"""`paceline simulate`: comparisons of sync models on a cluster, with their tables, pictures and JSON files."""

from __future__ import annotations

import contextlib
import math
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from ..core.lease import BatchSizing
from ..core.metrics import MetricPoint
from ..errors import RunFailedError, UsageError
from ..files import write_json
from ..look.summary import LossCurve, loss_picture, speed_unit
from ..look.tables import Figures, ranking_picture, ranking_table, runs_table, sweep_picture
from ..look.timelines import activity_of, can_draw, no_picture, save, timelines_picture
from ..sim import Cluster, Dataset, simulate
from ..start.terminal import print_sentence
from ..sync.schedule import read_schedule
from ..trace.findings import how_to_check
from ..words import run_name, wrappable
from .clusters import NO_CHANGES, Changes, describe, describe_data
from .pool import TellCount, on_all_cores
from .ranking import failed, figures_of, rank, sweep, without_key
from .recommendation import (
    WIRE_SHARE,
    Candidate,
    Recommendation,
    WireVariant,
    candidates_of,
    recommend,
    wire_variants,
)

NO_RECOMMENDATION = (
    'No model is recommended, because there are no results for bsp, or because bsp is marked with "!".'
)
STAR = "*: no model is better in speed or staleness without being worse in the other"
MOST_DRAWN = 16  # timelines are drawn for clusters with at most this many workers
SHOWN_ITERATIONS = 12  # length of the timelines, in iterations of the slowest worker


class Comparison(msgspec.Struct, frozen=True):
    """The results of a comparison, as `paceline simulate --json` prints them.

    Attributes:
        rows: the results for each model.
        recommendation: what to do, according to the rows; None if bsp, with which all models are compared, has no
            results or cannot be recommended.
    """

    rows: list[Figures]
    recommendation: Recommendation | None


def show_recommendation(recommendation: Recommendation | None, console: Console) -> None:
    """Print a recommendation and its command. The command is not wrapped, so that it can be copied."""
    if recommendation is None:
        print_sentence(console, f"\n{NO_RECOMMENDATION}")
        return
    print_sentence(console, f"\n{recommendation.text}")
    if recommendation.check:
        console.print("To check the accuracy, run:", highlight=False)
        console.print(f"  {recommendation.check}", highlight=False, markup=False, soft_wrap=True)


def show_faults(rows: Iterable[Figures], console: Console) -> None:
    """Print for each model why it failed, which pushes were never applied, and which user-defined conditions failed."""
    for row in rows:
        for fault in [row.failure, row.unapplied, *(fault.splitlines()[0] for fault in row.faults)]:
            if fault:
                print_sentence(console, f"{row.name}: {fault}", style="red")


def require_results(rows: Sequence[Figures]) -> None:
    """Raise `RunFailedError` if the simulation of every model has failed."""
    if all(row.failure for row in rows):
        raise RunFailedError("every simulation", "\n".join(f"{row.name}: {row.failure}" for row in rows))


def compare(
    cluster: Cluster,
    syncs: Sequence[str],
    *,
    iterations: int,
    seed: int,
    shards: int | None,
    data: Dataset | None,
    wire: str = "float32",
    source: str = "CLUSTER",
    changes: Changes = NO_CHANGES,
    out: Path,
    console: Console,
    tell: TellCount,
) -> Comparison:
    """Rank sync models. Print a table and a recommendation, and save the results as JSON and as pictures.

    The pictures are the ranking and timelines. Without matplotlib, a sentence says that they are left out. `source`
    is the argument of the command that describes the cluster, and `changes` are the command's options that change the
    cluster.
    """
    simulated = _Simulated(cluster, iterations, seed, shards, wire, data, tell)
    rows = simulated.ranked(syncs)
    require_results(rows)
    comparison = Comparison(rows, _recommendation(simulated, rows, source, changes))
    note = f"{describe(cluster)}; " + (
        describe_data(data, cluster.workers)
        if data is not None
        else f"{rows[0].until_s:.4g} virtual seconds, in which bsp completes {iterations} iterations"
    )
    console.print(ranking_table(cluster.name, rows, f"{note}\n{STAR}", console.width))
    show_faults(rows, console)
    show_recommendation(comparison.recommendation, console)
    write_json(out / "ranking.json", comparison)
    drawn = ["ranking.png", *(["timelines.png"] if cluster.workers <= MOST_DRAWN else [])]
    if not can_draw():
        print_sentence(console, no_picture(*drawn))
        return comparison
    rows = [row for row in rows if not row.failure]
    save(ranking_picture(cluster.name, note, rows), out / "ranking.png")
    if cluster.workers <= MOST_DRAWN:
        slowest_s = max(cluster.compute(worker).typical_s for worker in range(cluster.workers))
        whole_s = max(row.until_s for row in rows)
        shown_s = min(SHOWN_ITERATIONS * (slowest_s or 1.0), whole_s)
        timelines = {}
        for sync in (sync for sync in syncs if sync in {row.sync for row in rows}):
            result = simulate(
                cluster, sync, None, seed, until_s=2 * shown_s, shards=shards, wire=wire, record=True
            )
            if any(result.records):  # there is no timeline if no worker has finished an iteration
                timelines[sync] = activity_of(result.records, result.trace)
        if timelines:
            save(timelines_picture(timelines, shown_s, whole_s), out / "timelines.png")
    return comparison


class _Simulated(NamedTuple):
    """The settings with which the models of a comparison are simulated. See `rank`."""

    cluster: Cluster
    iterations: int
    seed: int
    shards: int | None
    wire: str
    data: Dataset | None
    tell: TellCount

    def ranked(self, syncs: Sequence[str]) -> list[Figures]:
        """Simulate models, and also bsp with balanced batches if bsp is among them."""
        return rank(self.cluster, syncs, balanced_bsp=True, iterations=self.iterations, **self._options())

    def wire_variants(self, rows: Sequence[Figures]) -> list[WireVariant]:
        """Simulate bsp with fewer or faster transfers, see `recommendation.wire_variants`. `rows` contains bsp."""
        return wire_variants(self.cluster, rows, **self._options())

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("seed", "shards", "wire", "data", "tell")}


def _recommendation(
    simulated: _Simulated, rows: Sequence[Figures], source: str, changes: Changes
) -> Recommendation | None:
    """Return the recommendation that follows from a ranking. If the ranking lacks bsp, bsp is simulated, too."""
    if not any(row.sync == "bsp" for row in rows):
        rows = [*simulated.ranked(["bsp"]), *rows]
    return recommend(
        candidates_of(rows),
        simulated.wire_variants(rows),
        servers=simulated.cluster.servers,
        check=lambda sync: how_to_check(source, ["script", "SCRIPT"], ("bsp", sync), changes.options),
    )


def explore_models(
    cluster: Cluster,
    syncs: Sequence[str],
    key: str,
    values: Sequence[float],
    *,
    iterations: int,
    seed: int,
    shards: int | None,
    wire: str = "float32",
    source: str = "CLUSTER",
    changes: Changes = NO_CHANGES,
    out: Path,
    console: Console,
    tell: TellCount,
) -> Comparison:
    """Compare different values of a parameter. Print a table and a recommendation, and save the results.

    Without matplotlib, a sentence says that the picture is left out. `source` is the argument of the command that
    describes the cluster, and `changes` are the command's options that change the cluster.
    """
    points = sweep(
        cluster, syncs, key, values, iterations=iterations, seed=seed, shards=shards, wire=wire, tell=tell
    )
    rows = [row for _, row in points]
    require_results(rows)
    simulated = _Simulated(cluster, iterations, seed, shards, wire, None, tell)
    comparison = Comparison(rows, _recommendation(simulated, rows, source, changes))
    console.print(ranking_table(cluster.name, rows, describe(cluster), console.width))
    show_faults(rows, console)
    show_recommendation(comparison.recommendation, console)
    write_json(out / "sweep.json", comparison)
    if not can_draw():
        print_sentence(console, no_picture("sweep.png"))
        return comparison
    lines: dict[str, list[tuple[float, Figures]]] = {}
    for value, row in ((value, row) for value, row in points if not row.failure):
        lines.setdefault(without_key(row.sync, key), []).append((value, row))
    save(sweep_picture(f"{cluster.name}: {key}", key, lines), out / "sweep.png")
    return comparison


# -- `paceline simulate --script`: runs a training script on a simulated cluster, under several sync models
#
# Unlike a ranking by speed, such a run shows how staleness affects the loss.

TRANSFERS = 100  # iterations of the simulations of bsp with fewer or faster transfers
POINTS = 60  # approximate maximum number of points in a curve
HYPERPARAMETERS_TEXTS = {
    "translated": "The script's hyper-parameters refer to the joint batch, and are translated for updates with a part "
    "of this batch.",
    "raw": "All models use the script's learning rate, but models that average gradients, such as bsp, tolerate a "
    "larger rate.",
}
GUESSED = "The losses are guessed: they are the values on which the script called backward(). "
CLOSE = 0.02  # a loss that is larger by at most this share counts as the same, because losses of batches are noisy
WINDOW = 0.05  # each point of a curve is an average over this share of all points


class TrainedScript(msgspec.Struct, frozen=True):
    """The results of training under one model.

    Attributes:
        figures: speed, staleness and use of time in the simulation.
        curve: smoothed losses, as pairs (virtual seconds, loss).
        final_loss: loss at the last point of the curve.
        said: the last line that the script has printed, in which many scripts say how accurate their model is; "" if
            there is none.
        guessed: True if the script has logged no loss, so the losses are the values on which it called `backward()`.
        optimizers: names of the optimizers that the script created.
        size_bytes: size of all parameters in bytes.
    """

    figures: Figures
    curve: list[tuple[float, float]]
    final_loss: float
    said: str = ""
    guessed: bool = False
    optimizers: tuple[str, ...] = ()
    size_bytes: int = 0

    @property
    def close_to_final(self) -> float:
        """The largest loss that counts as equal to the final loss."""
        return self.final_loss + CLOSE * abs(self.final_loss)

    def reaches_s(self, loss: float) -> float | None:
        """Return the virtual time at which the curve first reaches a loss, or None."""
        return next((time_s for time_s, value in self.curve if value <= loss), None)


class TrainingComparison(msgspec.Struct, frozen=True):
    """The results of training under several models, as `paceline simulate --script --json` prints them.

    Attributes:
        rows: the results for each model.
        recommendation: what to do, according to the rows; None if bsp, with which all models are compared, is not among
            the models.
    """

    rows: list[TrainedScript]
    recommendation: Recommendation | None


class _Task(msgspec.Struct, frozen=True):
    cluster: Cluster
    sync: str
    batch: BatchSizing
    script: str
    arguments: list[str]
    seed: int
    shards: int | None
    hyperparameters: str
    joint_batch: bool
    wire: str
    log: str


def train_and_compare(
    cluster: Cluster,
    syncs: Sequence[str],
    script: Path,
    arguments: Sequence[str],
    *,
    seed: int,
    shards: int | None,
    hyperparameters: str = "translated",
    joint_batch: bool = False,
    wire: str = "float32",
    out: Path,
    console: Console,
    tell: TellCount,
) -> TrainingComparison:
    """Run the script under each model, print a table and a recommendation, and plot the losses over virtual time.

    A model that keeps all workers in lockstep, as bsp does, also trains with balanced batches, if the script's data
    can be divided. Without matplotlib, a sentence says that the picture is left out.

    Raises:
        RunFailedError: the script failed.
        UsageError: the script trained, but reported no losses.
    """
    pairs = [(sync, batch) for sync in syncs for batch in _sizings(sync)]
    tasks = [
        _Task(
            cluster,
            sync,
            batch,
            str(script),
            list(arguments),
            seed,
            shards,
            hyperparameters,
            joint_batch,
            wire,
            str(out / f"script-{number}.log"),
        )
        for number, (sync, batch) in enumerate(pairs)
    ]
    # Each run needs a new process, because imported modules keep their state.
    ended = on_all_cores(_run, tasks, lambda task: run_name(task.sync, task.batch), tell, fresh=True)
    found = [row for row in ended if row is not None]
    require_results([row.figures for row in found])
    rows = [row for row in found if row.curve]
    if len(rows) < len([row for row in found if not row.figures.failure]):
        raise UsageError(
            f"{script} reported no losses to compare: call paceline.log(loss=loss) before each step()."
        )
    transfers = _Simulated(cluster, TRANSFERS, seed, shards, wire, None, tell)
    comparison = TrainingComparison(found, _recommended_for_script(rows, transfers))
    write_json(out / "training.json", comparison)
    console.print(_table(cluster, rows, hyperparameters, console.width))
    for sentence in verdicts(rows):
        print_sentence(console, sentence)
    for row in rows:
        if row.said:
            print_sentence(console, f"{row.figures.name} printed: {row.said}")
    show_faults([row.figures for row in found], console)
    show_recommendation(comparison.recommendation, console)
    if can_draw():
        curves = [LossCurve(row.figures.name, row.curve) for row in rows]
        save(
            loss_picture(f"{script.name} on {cluster.name}", describe(cluster), curves), out / "training.png"
        )
    else:
        print_sentence(console, no_picture("training.png"))
    return comparison


def _sizings(sync: str) -> tuple[BatchSizing, ...]:
    """Return the sizes of batches for a model: equal and, if this does not change the result, also balanced."""
    schedule = read_schedule(sync)
    lockstep = all(model.lockstep for model in schedule.models)
    return ("equal", "balanced") if lockstep and not schedule.auto else ("equal",)


def _recommended_for_script(rows: Sequence[TrainedScript], simulated: _Simulated) -> Recommendation | None:
    """Return the recommendation that follows from the losses.

    A model that changes the result of training is judged by the time at which it reaches the last loss of bsp.
    If transfers take much of the time under bsp, `simulated` runs further simulations without training, to find out how
    transfers could take less time.
    """
    of_bsp = next((row for row in rows if row.figures.name == "bsp"), None)
    if of_bsp is None:
        return None
    own_s = of_bsp.reaches_s(of_bsp.close_to_final) or of_bsp.figures.until_s
    reached_s = {row.figures.name: row.reaches_s(of_bsp.close_to_final) for row in rows}
    variants: list[WireVariant] = []
    if of_bsp.figures.transfer_share >= WIRE_SHARE:
        cluster = replace(simulated.cluster, size_bytes=of_bsp.size_bytes, optimizers=of_bsp.optimizers)
        simulated = simulated._replace(cluster=cluster)
        variants = simulated.wire_variants(simulated.ranked(["bsp"]))
    return recommend(
        [_measured(each, own_s, reached_s) for each in candidates_of([row.figures for row in rows])],
        variants,
        servers=simulated.cluster.servers,
        check=str,
    )


def _measured(candidate: Candidate, own_s: float, reached_s: Mapping[str, float | None]) -> Candidate:
    """Return a candidate with the results of training under its model.

    If the model changes the result of training, `times` is computed from the times at which a loss is reached.

    Args:
        candidate: the candidate.
        own_s: time at which bsp reaches its last loss.
        reached_s: name of a model -> time at which the model reaches this loss; None if it does not reach the loss.
    """
    if candidate.effect == "exact":
        return msgspec.structs.replace(candidate, measured=True)
    time_s = reached_s[run_name(candidate.sync, candidate.batch)]
    return msgspec.structs.replace(candidate, measured=True, times=own_s / time_s if time_s else 0.0)


def smooth(points: Sequence[MetricPoint]) -> list[tuple[float, float]]:
    """Average the losses over windows of points. Each result has the time of the last point in its window.

    >>> smooth([MetricPoint(1.0, 8, 1, 4.0), MetricPoint(2.0, 16, 2, 2.0)])
    [(1.0, 4.0), (2.0, 2.0)]
    """
    width = max(1, round(len(points) * WINDOW))
    stride = max(1, len(points) // POINTS)
    ends = range(width, len(points) + 1, stride)
    return [(points[end - 1].time_s, _mean(points[end - width : end])) for end in ends]


def _mean(points: Sequence[MetricPoint]) -> float:
    """Return the mean of the values, weighted by their samples."""
    return fsum(point.value * point.weight for point in points) / fsum(point.weight for point in points)


def _run(task: _Task) -> TrainedScript | None:
    """Run a script in this process, under one model. The script's standard output is written to a file.

    Returns:
        The results; None if the batches should be balanced, but the script's data cannot be divided.
    """
    sys.argv = [task.script, *task.arguments]
    sys.path.insert(0, str(Path(task.script).resolve().parent))
    with open(task.log, "w") as log, contextlib.redirect_stdout(log):
        try:
            result = simulate(
                task.cluster,
                task.sync,
                seed=task.seed,
                train_fn=runpy.run_path,
                args=(task.script, None, "__main__"),
                shards=task.shards,
                hyperparameters=task.hyperparameters,
                wire=task.wire,
                batch=task.batch,
                joint_batch=task.joint_batch,
                needs_losses=True,
            )
        except RunFailedError as error:
            return TrainedScript(failed(task.sync, error, task.batch), [], float("nan"))
    if task.batch == "balanced" and not result.balanced:
        return None
    loss = result.history.get("loss")
    curve = smooth([] if loss is None else sorted(loss.points, key=lambda point: point.time_s))
    figures = figures_of(task.sync, result, batch=task.batch)
    lines = Path(task.log).read_text(errors="replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    final_loss = curve[-1][1] if curve else float("nan")
    guessed, size_bytes = loss is not None and loss.guessed, sum(result.shard_bytes)
    return TrainedScript(figures, curve, final_loss, said, guessed, result.optimizers, size_bytes)


def verdicts(rows: Sequence[TrainedScript]) -> list[str]:
    """Return a sentence about each model after the first: when it reaches the last loss of the first model.

    These sentences compare measured losses, so a model that is only fast does not count as better.
    """
    first, *others = rows
    target = first.close_to_final
    first_s = first.reaches_s(target) or first.figures.until_s
    sentences = []
    for row in others:
        reached_s = row.reaches_s(target)
        if reached_s is None:
            losses = f"its last loss is {row.final_loss:.4g} instead of {first.final_loss:.4g}"
            sentences.append(
                f"{row.figures.name}: never reaches the last loss of {first.figures.name}; {losses}."
            )
        elif reached_s < first_s:
            faster = first_s / reached_s if reached_s else math.inf
            sentences.append(
                f"{row.figures.name}: reaches the last loss of {first.figures.name} {faster:.2f} times sooner."
            )
        else:
            sentences.append(
                f"{row.figures.name}: reaches the last loss of {first.figures.name}, but not sooner."
            )
    return sentences


def _table(cluster: Cluster, rows: Sequence[TrainedScript], hyperparameters: str, width: int) -> Table:
    first, target = rows[0].figures.name, rows[0].close_to_final
    unit = speed_unit(row.figures.samples_per_s for row in rows)
    speed, total, reached = f"{unit}\nper s", "virtual\ns in\ntotal", f"s to\nloss\n{target:.4g}"
    staleness, waited = "staleness\n(updates)\nmean", "time\nwaited"
    columns: dict[str, Callable[[TrainedScript], str]] = {
        total: lambda row: f"{row.figures.until_s:.4g}",
        speed: lambda row: f"{getattr(row.figures, f'{unit}_per_s'):.4g}",
        reached: lambda row: "never" if (s := row.reaches_s(target)) is None else f"{s:.4g}",
        "last\nloss": lambda row: f"{row.final_loss:.4g}",
        staleness: lambda row: f"{row.figures.mean_staleness:.1f}",
        waited: lambda row: f"{row.figures.waiting_share:.1%}",
    }
    return runs_table(
        [f"{'' if row.figures.sound else '! '}{wrappable(row.figures.name)}" for row in rows],
        {heading: [show(row) for row in rows] for heading, show in columns.items()},
        expendable=(staleness, waited, speed, total),
        width=width,
        title=cluster.name,
        caption=f"{describe(cluster)}; smoothed losses on the training batches. The last loss of {first} is "
        f"{rows[0].final_loss:.4g}; up to {CLOSE:.0%} more counts as the same. "
        f"{GUESSED if rows[0].guessed else ''}"
        f"{HYPERPARAMETERS_TEXTS[hyperparameters]}",
    )

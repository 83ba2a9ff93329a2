"""`paceline simulate --script`: runs a training script on a simulated cluster, under several sync models.

Unlike a ranking by speed, such a run shows how staleness affects the loss.
"""

from __future__ import annotations

import contextlib
import math
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from math import fsum
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from ..core.metrics.history import MetricPoint
from ..core.protocol.lease import BatchSizing
from ..errors import RunFailedError, UsageError
from ..files import write_json
from ..launcher.terminal.output import print_sentence
from ..report.canvas import can_draw, no_picture, save
from ..report.loss import LossCurve, loss_picture
from ..report.names import run_name, wrappable
from ..report.runs_table import runs_table
from ..report.speed import speed_unit
from ..sim import Cluster, simulate
from ..sync.schedule import read_schedule
from .clusters import describe
from .comparison import require_results, show_faults, show_recommendation
from .process_pool import TellCount, on_all_cores
from .ranking import Figures, failed, figures_of
from .recommendation import Candidate, Recommendation, candidates_of, recommend

__all__ = ["Trained", "TrainingComparison", "smooth", "train_and_compare"]

POINTS = 60  # approximate maximum number of points in a curve
HYPERPARAMETERS_TEXTS = {
    "translated": "The script's hyper-parameters refer to the joint batch, and are translated for all other updates.",
    "raw": "All models use the script's learning rate, but models that average gradients, such as bsp, tolerate a "
    "larger rate.",
}
GUESSED = "The losses are guessed: those on which the script called backward(). "
CLOSE = 0.02  # a loss that is larger by at most this share counts as the same, because losses of batches are noisy
WINDOW = 0.05  # each point of a curve is an average over this share of all points


class Trained(msgspec.Struct, frozen=True):
    """The results of training under one model.

    Attributes:
        figures: speed, staleness and use of time in the simulation.
        curve: smoothed losses, as pairs (virtual seconds, loss).
        final_loss: loss at the last point of the curve.
        said: the last line that the script has printed, in which many scripts say how accurate their model is; "" if
            there is none.
        guessed: True if the script has logged no loss, and the values are those on which it called `backward()`.
    """

    figures: Figures
    curve: list[tuple[float, float]]
    final_loss: float
    said: str = ""
    guessed: bool = False

    @property
    def close_to_final(self) -> float:
        """The largest loss that counts as the final loss."""
        return self.final_loss + CLOSE * abs(self.final_loss)

    def reaches_s(self, loss: float) -> float | None:
        """Return the virtual time at which the curve first reaches a loss, or None."""
        return next((time_s for time_s, value in self.curve if value <= loss), None)


class TrainingComparison(msgspec.Struct, frozen=True):
    """The results of training under several models, as `paceline simulate --script --json` prints them.

    Attributes:
        rows: the results for each model.
        recommendation: what they recommend; None if bsp, with which all others are compared, is not among the models.
    """

    rows: list[Trained]
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
    comparison = TrainingComparison(found, _recommendation(rows, cluster))
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
    """Return the sizes of batches with which a model is trained: balanced ones, too, if the result is the same."""
    schedule = read_schedule(sync)
    lockstep = all(model.lockstep for model in schedule.models)
    return ("equal", "balanced") if lockstep and not schedule.auto else ("equal",)


def _recommendation(rows: Sequence[Trained], cluster: Cluster) -> Recommendation | None:
    """Return what the losses recommend. Models that are not exact are judged by when they reach the loss of bsp."""
    of_bsp = next((row for row in rows if row.figures.name == "bsp"), None)
    if of_bsp is None:
        return None
    own_s = of_bsp.reaches_s(of_bsp.close_to_final) or of_bsp.figures.until_s
    reached_s = {row.figures.name: row.reaches_s(of_bsp.close_to_final) for row in rows}
    return recommend(
        [_measured(each, own_s, reached_s) for each in candidates_of([row.figures for row in rows])],
        servers=cluster.servers,
        check=str,
    )


def _measured(candidate: Candidate, own_s: float, reached_s: Mapping[str, float | None]) -> Candidate:
    """Return a candidate whose loss was measured.

    Args:
        candidate: the candidate.
        own_s: time at which bsp reaches its own last loss.
        reached_s: time at which each model reaches this loss; None if it does not.
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


def _run(task: _Task) -> Trained | None:
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
            return Trained(failed(task.sync, error, task.batch), [], float("nan"))
    if task.batch == "balanced" and not result.balanced:
        return None
    loss = result.history.get("loss")
    curve = smooth([] if loss is None else sorted(loss.points, key=lambda point: point.time_s))
    figures = figures_of(task.sync, result, batch=task.batch)
    lines = Path(task.log).read_text(errors="replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    final_loss = curve[-1][1] if curve else float("nan")
    return Trained(figures, curve, final_loss, said, loss is not None and loss.guessed)


def verdicts(rows: Sequence[Trained]) -> list[str]:
    """Return a sentence about each model that says what it is worth, compared with the first one.

    The losses of all models were measured, so a model that is only fast is not recommended.
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
            sentences.append(f"{row.figures.name}: reaches the last loss {faster:.2f} times sooner.")
        else:
            sentences.append(f"{row.figures.name}: reaches the last loss no sooner.")
    return sentences


def _table(cluster: Cluster, rows: Sequence[Trained], hyperparameters: str, width: int) -> Table:
    first, target = rows[0].figures.name, rows[0].close_to_final
    unit = speed_unit(row.figures.samples_per_s for row in rows)
    speed, total, reached = f"{unit}\nper s", "virtual\ns in\ntotal", f"s to\nloss\n{target:.4g}"
    staleness, waited = "staleness\n(updates)\nmean", "time\nwaited"
    columns: dict[str, Callable[[Trained], str]] = {
        total: lambda row: f"{row.figures.until_s:.4g}",
        speed: lambda row: (
            f"{row.figures.samples_per_s if unit == 'samples' else row.figures.gradients_per_s:.4g}"
        ),
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

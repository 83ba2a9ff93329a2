"""`paceline simulate --script`: runs a training script on a simulated cluster, under several sync models.

Unlike a ranking by speed, such a run shows how staleness affects the loss.
"""

from __future__ import annotations

import contextlib
import math
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import RunFailedError, UsageError
from ..files import write_json
from ..launcher.output import print_sentence
from ..report.canvas import can_draw, save
from ..report.loss import LossCurve, loss_picture
from ..report.speed import speed_unit
from ..sim import Cluster, Loss, simulate
from .clusters import describe
from .comparison import require_results, show_faults
from .process_pool import TellCount, on_all_cores
from .ranking import Figures, failed, figures_of

__all__ = ["Trained", "smooth", "train_and_compare"]

POINTS = 60  # approximate maximum number of points in a curve
HYPERPARAMETERS_TEXTS = {
    "translated": "The script's hyper-parameters refer to the joint batch, and are translated for all other updates.",
    "raw": "All models use the script's learning rate, but models that average gradients, such as bsp, tolerate a "
    "larger rate.",
}
WINDOW = 0.05  # each point of a curve is an average over this share of all pushes


class Trained(msgspec.Struct, frozen=True):
    """The results of training under one model.

    Attributes:
        figures: speed, staleness and use of time in the simulation.
        curve: smoothed losses, as pairs (virtual seconds, loss).
        final_loss: loss at the last point of the curve.
        said: the last line that the script has printed, in which many scripts say how accurate their model is; "" if
            there is none.
    """

    figures: Figures
    curve: list[tuple[float, float]]
    final_loss: float
    said: str = ""

    def reaches_s(self, loss: float) -> float | None:
        """Return the virtual time at which the curve first reaches a loss, or None."""
        return next((time_s for time_s, value in self.curve if value <= loss), None)


class _Task(msgspec.Struct, frozen=True):
    cluster: Cluster
    sync: str
    script: str
    arguments: list[str]
    seed: int
    shards: int | None
    hyperparameters: str
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
    out: Path,
    console: Console,
    tell: TellCount,
) -> list[Trained]:
    """Run the script under each model, print a table, and plot the losses over virtual time.

    Without matplotlib, nothing is plotted.

    Raises:
        RunFailedError: the script failed.
        UsageError: the script trained, but reported no losses.
    """
    tasks = [
        _Task(
            cluster,
            sync,
            str(script),
            list(arguments),
            seed,
            shards,
            hyperparameters,
            str(out / f"script-{number}.log"),
        )
        for number, sync in enumerate(syncs)
    ]
    # Each run needs a new process, because imported modules keep their state.
    found = on_all_cores(_run, tasks, lambda task: task.sync, tell, fresh=True)
    write_json(out / "training.json", found)
    require_results([row.figures for row in found])
    rows = [row for row in found if row.curve]
    if len(rows) < len([row for row in found if not row.figures.failure]):
        raise UsageError(
            f"{script} reported no losses to compare: call paceline.log(loss=loss) before each step()."
        )
    console.print(_table(cluster, rows, rows[0].final_loss, rows[0].figures.sync, hyperparameters))
    for sentence in verdicts(rows):
        print_sentence(console, sentence)
    for row in rows:
        if row.said:
            console.print(f"{row.figures.sync} printed: {row.said}", highlight=False, markup=False)
    show_faults([row.figures for row in found], console)
    if can_draw():
        curves = [LossCurve(row.figures.sync, row.curve) for row in rows]
        save(
            loss_picture(f"{script.name} on {cluster.name}", describe(cluster), curves), out / "training.png"
        )
    return found


def smooth(history: Sequence[Loss]) -> list[tuple[float, float]]:
    """Average the losses over windows of pushes. Each point has the time of the last push in its window.

    >>> smooth([Loss(1.0, 0, 0, 4.0), Loss(2.0, 1, 0, 2.0)])
    [(1.0, 4.0), (2.0, 2.0)]
    """
    width = max(1, round(len(history) * WINDOW))
    stride = max(1, len(history) // POINTS)
    ends = range(width, len(history) + 1, stride)
    return [
        (history[end - 1].time_s, fmean(loss.loss for loss in history[end - width : end])) for end in ends
    ]


def _run(task: _Task) -> Trained:
    """Run a script in this process, under one model. The script's standard output is written to a file."""
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
                needs_losses=True,
            )
        except RunFailedError as error:
            return Trained(failed(task.sync, error), [], float("nan"))
    curve = smooth(result.losses or [])
    figures = figures_of(task.sync, result)
    lines = Path(task.log).read_text(errors="replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return Trained(figures, curve, curve[-1][1] if curve else float("nan"), said)


def verdicts(rows: Sequence[Trained]) -> list[str]:
    """Return a sentence about each model that says what it is worth, compared with the first one.

    The losses of all models were measured, so a model that is only fast is not recommended.
    """
    first, *others = rows
    target, first_s = first.final_loss, first.figures.until_s
    sentences = []
    for row in others:
        reached_s = row.reaches_s(target)
        if reached_s is None:
            losses = f"its last loss is {row.final_loss:.4g} instead of {target:.4g}"
            sentences.append(
                f"{row.figures.sync}: never reaches the last loss of {first.figures.sync}; {losses}."
            )
        elif reached_s < first_s:
            faster = first_s / reached_s if reached_s else math.inf
            sentences.append(f"{row.figures.sync}: reaches the last loss {faster:.2f} times sooner.")
        else:
            sentences.append(f"{row.figures.sync}: reaches the last loss no sooner.")
    return sentences


def _table(
    cluster: Cluster, rows: Sequence[Trained], target: float, first: str, hyperparameters: str
) -> Table:
    table = Table(
        title=escape(cluster.name),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        caption=f"{escape(describe(cluster))}; smoothed losses on the training batches. The last loss of "
        f"{escape(first)} is {target:.4g}. {HYPERPARAMETERS_TEXTS[hyperparameters]}",
        caption_justify="left",
    )
    # The table must fit into 80 columns.
    table.add_column("sync", overflow="fold", vertical="bottom", min_width=18)
    unit = speed_unit(row.figures.samples_per_s for row in rows)
    for heading in (
        "virtual\ns in\ntotal",
        f"{unit}\nper s",
        f"s to\nloss\n{target:.4g}",
        "last\nloss",
        "staleness\n(updates)\nmean",
        "time\nwaited",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        reached_s = row.reaches_s(target)
        table.add_row(
            f"{'' if row.figures.sound else '! '}{row.figures.sync}",
            f"{row.figures.until_s:.4g}",
            f"{row.figures.samples_per_s if unit == 'samples' else row.figures.gradients_per_s:.4g}",
            "never" if reached_s is None else f"{reached_s:.4g}",
            f"{row.final_loss:.4g}",
            f"{row.figures.mean_staleness:.1f}",
            f"{row.figures.waiting_share:.1%}",
        )
    return table

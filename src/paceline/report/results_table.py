"""A table that compares the results of runs, with one row per sync model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

import msgspec
from rich.table import Table

from .names import run_name, wrappable
from .runs_table import runs_table
from .speed import speed_unit

__all__ = ["TrialOutcome", "comparison_table", "medians"]


class TrialOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of training under one sync model: the result of one run, or the medians of several runs.

    Attributes:
        sync: the sync model, in the notation of the command line.
        batch: sizes of the workers' batches: "equal" or "balanced".
        hyperparameters: "translated" if the learning rate and momentum are those of a joint batch, else "raw".
        learning_rate: learning rate of the runs.
        momentum: momentum of the runs.
        seeds: random seeds for the runs.
        target_accuracy: target accuracy on the test images, from 0 to 1.
        time_to_target_s: time of the first evaluation that, like the one before it, is at or above the target, in
            seconds since training began; None if there is no such evaluation.
        final_accuracy: accuracy of the final weights on the test images, from 0 to 1.
        updates_per_s: optimizer steps per second. Updates under different models contain different numbers of
            gradients, so the table compares the samples or gradients per second.
        gradients_per_s: gradients per second, of all workers together.
        samples_per_s: samples per second, of all workers together; 0 if the number of samples is unknown.
        waiting_share: fraction of the workers' total time that was spent waiting, from 0 to 1.
        mean_staleness: mean staleness over all pushes and shards, in updates.
        max_staleness: largest staleness of any push at any shard in any run, in updates.
        delayed_share: fraction of pulls that were delayed, from 0 to 1; a pull counts once for each shard.
        restarts: number of computations that were aborted and restarted.
        wasted_share: fraction of the workers' total time spent on aborted computations and the pulls after them.
        emulated: description of how the runs emulated unequal machines; "" if they did not.
    """

    sync: str
    batch: str = "equal"
    hyperparameters: str = "raw"
    learning_rate: float
    momentum: float
    seeds: tuple[int, ...]
    target_accuracy: float
    time_to_target_s: float | None
    final_accuracy: float
    updates_per_s: float
    gradients_per_s: float
    samples_per_s: float
    waiting_share: float
    mean_staleness: float
    max_staleness: int
    delayed_share: float = 0.0
    restarts: float = 0
    wasted_share: float = 0.0
    emulated: str

    @property
    def name(self) -> str:
        """The sync model, with what is special about its batches and hyper-parameters."""
        return run_name(self.sync, self.batch, self.hyperparameters)


def medians(outcomes: Sequence[TrialOutcome]) -> TrialOutcome:
    """Combine the outcomes of runs with the same settings: take medians, but the maximum of `max_staleness`."""
    first = outcomes[0]
    time_s = median(math.inf if o.time_to_target_s is None else o.time_to_target_s for o in outcomes)
    return TrialOutcome(
        sync=first.sync,
        batch=first.batch,
        hyperparameters=first.hyperparameters,
        learning_rate=first.learning_rate,
        momentum=first.momentum,
        seeds=tuple(seed for outcome in outcomes for seed in outcome.seeds),
        target_accuracy=first.target_accuracy,
        time_to_target_s=time_s if math.isfinite(time_s) else None,
        final_accuracy=median(outcome.final_accuracy for outcome in outcomes),
        updates_per_s=median(outcome.updates_per_s for outcome in outcomes),
        gradients_per_s=median(outcome.gradients_per_s for outcome in outcomes),
        samples_per_s=median(outcome.samples_per_s for outcome in outcomes),
        waiting_share=median(outcome.waiting_share for outcome in outcomes),
        mean_staleness=median(outcome.mean_staleness for outcome in outcomes),
        max_staleness=max(outcome.max_staleness for outcome in outcomes),
        delayed_share=median(outcome.delayed_share for outcome in outcomes),
        restarts=median(outcome.restarts for outcome in outcomes),
        wasted_share=median(outcome.wasted_share for outcome in outcomes),
        emulated=first.emulated,
    )


def comparison_table(outcomes: Sequence[TrialOutcome], *, every: bool = False, width: int = 80) -> Table:
    """Return a table with one row per outcome that fits into `width` columns of a screen.

    The caption describes the seeds and the emulation of unequal machines. If `every` is True, the table has columns
    for delayed pulls and aborted computations instead of the learning rate, the momentum and the speed.
    """
    first = outcomes[0]
    unit = speed_unit(outcome.samples_per_s for outcome in outcomes)
    runs = f"medians of {len(first.seeds)} seeds" if len(first.seeds) > 1 else f"seed {first.seeds[0]}"
    rates, speed, waited = "rate,\nmomentum", f"{unit}\nper s", "time\nwaited"
    staleness, delayed, wasted = "staleness\n(updates)\nmean, max", "pulls\ndelayed", "aborts,\nwasted"
    columns: dict[str, Callable[[TrialOutcome], str]] = {
        rates: lambda o: f"{o.learning_rate:g}, {o.momentum:g}",
        f"s to\n{first.target_accuracy:.0%}": lambda o: (
            "never" if o.time_to_target_s is None else f"{o.time_to_target_s:.2f}"
        ),
        "final\naccur.": lambda o: f"{o.final_accuracy:.1%}",
        speed: lambda o: f"{o.samples_per_s if unit == 'samples' else o.gradients_per_s:.1f}",
        waited: lambda o: f"{o.waiting_share:.1%}",
        staleness: lambda o: f"{o.mean_staleness:.1f}, {o.max_staleness}",
    }
    if every:
        del columns[rates], columns[speed]
        columns |= {
            delayed: lambda o: f"{o.delayed_share:.1%}",
            wasted: lambda o: f"{o.restarts:g}, {o.wasted_share:.1%}",
        }
    return runs_table(
        [wrappable(outcome.name).replace(", translated", "\n  translated") for outcome in outcomes],
        {heading: [show(outcome) for outcome in outcomes] for heading, show in columns.items()},
        expendable=(wasted, delayed, rates, staleness, waited, speed),
        width=width,
        caption=f"{runs}; {f'emulated: {first.emulated}' if first.emulated else 'no emulation'}{_legend(outcomes)}",
    )


def _legend(outcomes: Sequence[TrialOutcome]) -> str:
    """Return what the rows with translated hyper-parameters mean; "" if there are none."""
    if not any(outcome.hyperparameters == "translated" for outcome in outcomes):
        return ""
    return (
        "\ntranslated: with the learning rate and momentum of bsp, as if only --sync had changed; other rows: with "
        "the best ones of the model itself, used as they are"
    )

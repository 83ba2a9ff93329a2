"""A table that compares the results of runs, with one row per sync model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

import msgspec
from rich import box
from rich.table import Table

__all__ = ["TrialOutcome", "comparison_table", "medians"]


class TrialOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of training under one sync model: the result of one run, or the medians of several runs.

    Attributes:
        sync: the sync model, in the notation of the command line.
        learning_rate: learning rate of the runs.
        momentum: momentum of the runs.
        seeds: random seeds of the runs.
        target_accuracy: target accuracy on the test images, from 0 to 1.
        time_to_target_s: time of the first evaluation that, like the one before it, is at or above the target, in
            seconds since training began; None if there is no such evaluation.
        final_accuracy: accuracy of the final weights on the test images, from 0 to 1.
        updates_per_s: number of optimizer steps per second.
        waiting_share: share of the total time of all workers that was spent waiting, from 0 to 1.
        mean_staleness: mean staleness over all pairs (push, shard), in versions.
        max_staleness: maximum staleness over all pairs (push, shard) of all runs, in versions.
        delayed_share: share of pulls that were delayed, counted per (worker, shard), from 0 to 1.
        restarts: number of computations that were aborted and restarted.
        wasted_share: share of the total time of all workers that was spent on aborted computations, from 0 to 1.
        emulated: description of how unequal machines were emulated; "" if no machines were emulated.
    """

    sync: str
    learning_rate: float
    momentum: float
    seeds: tuple[int, ...]
    target_accuracy: float
    time_to_target_s: float | None
    final_accuracy: float
    updates_per_s: float
    waiting_share: float
    mean_staleness: float
    max_staleness: int
    delayed_share: float = 0.0
    restarts: float = 0
    wasted_share: float = 0.0
    emulated: str


def medians(outcomes: Sequence[TrialOutcome]) -> TrialOutcome:
    """Return the medians of the results of several runs of the same sync model and settings."""
    first = outcomes[0]
    time_s = median(math.inf if o.time_to_target_s is None else o.time_to_target_s for o in outcomes)
    return TrialOutcome(
        sync=first.sync,
        learning_rate=first.learning_rate,
        momentum=first.momentum,
        seeds=tuple(seed for outcome in outcomes for seed in outcome.seeds),
        target_accuracy=first.target_accuracy,
        time_to_target_s=time_s if math.isfinite(time_s) else None,
        final_accuracy=median(outcome.final_accuracy for outcome in outcomes),
        updates_per_s=median(outcome.updates_per_s for outcome in outcomes),
        waiting_share=median(outcome.waiting_share for outcome in outcomes),
        mean_staleness=median(outcome.mean_staleness for outcome in outcomes),
        max_staleness=max(outcome.max_staleness for outcome in outcomes),
        delayed_share=median(outcome.delayed_share for outcome in outcomes),
        restarts=median(outcome.restarts for outcome in outcomes),
        wasted_share=median(outcome.wasted_share for outcome in outcomes),
        emulated=first.emulated,
    )


def comparison_table(outcomes: Sequence[TrialOutcome], *, every: bool = False) -> Table:
    """Return a table with one row per outcome. The caption says which machines were emulated.

    If `every` is True, the table shows delayed pulls and aborts instead of the settings and the update rate, and
    wraps long names of sync models.
    """
    first = outcomes[0]
    runs = f"medians of {len(first.seeds)} seeds" if len(first.seeds) > 1 else f"seed {first.seeds[0]}"
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        caption=f"{runs}; emulated: {first.emulated or 'nothing'}",
        caption_justify="left",
    )
    columns: dict[str, Callable[[TrialOutcome], str]] = {
        "rate,\nmomentum": lambda o: f"{o.learning_rate:g}, {o.momentum:g}",
        f"s to\n{first.target_accuracy:.0%}": lambda o: (
            "never" if o.time_to_target_s is None else f"{o.time_to_target_s:.2f}"
        ),
        "final\naccur.": lambda o: f"{o.final_accuracy:.1%}",
        "updates\nper s": lambda o: f"{o.updates_per_s:.1f}",
        "time\nwaited": lambda o: f"{o.waiting_share:.1%}",
        "staleness\nmean, max": lambda o: f"{o.mean_staleness:.1f}, {o.max_staleness}",
    }
    if every:
        del columns["rate,\nmomentum"], columns["updates\nper s"]
        columns |= {
            "pulls\ndelayed": lambda o: f"{o.delayed_share:.1%}",
            "aborts,\nwasted": lambda o: f"{o.restarts:g}, {o.wasted_share:.1%}",
        }
    if every:
        table.add_column("sync", overflow="fold", vertical="bottom", min_width=23)
    else:
        table.add_column("sync", no_wrap=True, vertical="bottom")
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        # The name can be wrapped at the added spaces.
        name = outcome.sync.replace(",", ", ").replace(":", ": ") if every else outcome.sync
        table.add_row(name, *(show(outcome) for show in columns.values()))
    return table

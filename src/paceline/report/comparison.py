"""What runs came to, side by side: one row per sync model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

import msgspec
from rich import box
from rich.table import Table

__all__ = ["Outcome", "comparison_table", "medians"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What training under one sync model came to: of one run, or the medians of several.

    Attributes:
        sync: the sync model, in the notation of the command line.
        learning_rate: that it ran with.
        momentum: likewise.
        seeds: of the runs.
        target_accuracy: on the test images, from 0 to 1.
        time_to_target_s: when the second evaluation in a row was at or above it, in seconds since training
            began; None if that never came.
        final_accuracy: of the final weights, on the test images, from 0 to 1.
        updates_per_s: optimizer steps.
        waiting_share: of all workers' time together, the share that they waited, from 0 to 1.
        mean_staleness: over (push, shard), in versions.
        max_staleness: likewise; of several runs, the largest.
        delayed_share: of all pulls, per (worker, shard), those that were not answered on arrival, from 0 to 1.
        restarts: computations that were dropped and started anew.
        wasted_share: of all workers' time together, the share that went into these, from 0 to 1.
        emulated: how unequal machines were emulated, in words.
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


def medians(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome out of several runs' of the same sync model and setting, figure by figure."""
    first = outcomes[0]
    time_s = median(math.inf if o.time_to_target_s is None else o.time_to_target_s for o in outcomes)
    return Outcome(
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


def comparison_table(outcomes: Sequence[Outcome], *, every: bool = False) -> Table:
    """The table, one row per outcome; its caption says what was emulated.

    `every` shows delayed pulls and aborts instead of the settings and the updates, and breaks long names.
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
    columns: dict[str, Callable[[Outcome], str]] = {
        "rate,\nmomentum": lambda o: f"{o.learning_rate:g}, {o.momentum:g}",
        f"s to\n{first.target_accuracy:.0%}": lambda o: (
            "never" if o.time_to_target_s is None else f"{o.time_to_target_s:.2f}"
        ),
        "final\naccur.": lambda o: f"{o.final_accuracy:.1%}",
        "updates\nper s": lambda o: f"{o.updates_per_s:.1f}",
        "share\nwaited": lambda o: f"{o.waiting_share:.1%}",
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
        name = outcome.sync.replace(",", ", ").replace(":", ": ") if every else outcome.sync  # breaks there
        table.add_row(name, *(show(outcome) for show in columns.values()))
    return table

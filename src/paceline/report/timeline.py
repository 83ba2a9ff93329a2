"""Timelines: what each worker of a run was doing, second by second, and where the barriers fell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..runtime.records import read_records
from ..sync.actions import ApplyMean
from ..trace import read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COMPUTING", "WAITING", "Timeline", "draw_timeline", "read_timeline"]

COMPUTING = "#56B4E9"
WAITING = "#D55E00"
BAR_HEIGHT = 0.78

Span = tuple[float, float]
"""From, to: seconds since training began."""


class Timeline(msgspec.Struct, frozen=True):
    """What the workers of one run did.

    Attributes:
        computing: for each worker, its iterations, from the arrival of the weights to the push. Sleep that
            emulates a slower machine counts as computing.
        waiting: for each worker, from each push to the arrival of the new weights.
        barriers_s: when pushes that had been held were applied together.
    """

    computing: tuple[tuple[Span, ...], ...]
    waiting: tuple[tuple[Span, ...], ...]
    barriers_s: tuple[float, ...]


def read_timeline(run_dir: Path) -> Timeline:
    """The timeline of a run, out of its directory."""
    records = read_records(run_dir)
    zero_s = min(worker[0].begun_s for worker in records if worker)
    return Timeline(
        tuple(tuple((r.begun_s - zero_s, r.pushed_s - zero_s) for r in worker) for worker in records),
        tuple(tuple((r.pushed_s - zero_s, r.answered_s - zero_s) for r in worker) for worker in records),
        tuple(
            entry.event.now_s - zero_s
            for entry in read(run_dir / "trace-shard-0.jsonl").entries
            if any(isinstance(action, ApplyMean) for action in entry.actions)
        ),
    )


def draw_timeline(axes: Axes, timeline: Timeline, until_s: float) -> None:
    """Draw the first seconds: one row of bars per worker, worker 0 on top, and a line for each barrier."""
    for worker, (computing, waiting) in enumerate(zip(timeline.computing, timeline.waiting, strict=True)):
        bottom = worker - BAR_HEIGHT / 2
        for spans, colour in ((computing, COMPUTING), (waiting, WAITING)):
            bars = [(start, stop - start) for start, stop in spans if start < until_s]
            axes.broken_barh(bars, (bottom, BAR_HEIGHT), facecolor=colour, edgecolor="white", linewidth=0.4)
    shown = [barrier_s for barrier_s in timeline.barriers_s if barrier_s <= until_s]
    axes.vlines(shown, -0.5, len(timeline.computing) - 0.5, color="black", linewidth=1.3)
    axes.set_xlim(0.0, until_s)
    axes.set_ylim(len(timeline.computing) - 0.5, -0.5)
    axes.set_yticks(range(len(timeline.computing)), [f"worker {i}" for i in range(len(timeline.computing))])
    axes.tick_params(axis="y", length=0, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)

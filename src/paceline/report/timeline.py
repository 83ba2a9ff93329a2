"""Timelines of runs: when each worker was computing or waiting, and when barriers occurred."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..sync.actions import ApplyMean
from ..trace.recording import Trace, read
from ..trace.records import IterationRecord, read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COMPUTING", "DROPPED", "WAITING", "Timeline", "draw_timeline", "read_timeline", "timeline_of"]

COMPUTING = "#56B4E9"
WAITING = "#D55E00"
DROPPED = "#F0E442"
BAR_HEIGHT = 0.78

Span = tuple[float, float]
"""The start and end of a time span, in seconds since training began."""


class Timeline(msgspec.Struct, frozen=True):
    """The time spans in which the workers of one run were computing or waiting.

    Attributes:
        computing: each worker's computations, from the arrival of the weights to the push. The sleep that
            emulates a slower machine counts as computing.
        dropped: each worker's aborted computations.
        waiting: each worker's waits, from a push to the arrival of the new weights.
        barriers_s: the times at which held pushes were applied together, in seconds since training began.
    """

    computing: tuple[tuple[Span, ...], ...]
    dropped: tuple[tuple[Span, ...], ...]
    waiting: tuple[tuple[Span, ...], ...]
    barriers_s: tuple[float, ...]


def read_timeline(run_dir: Path) -> Timeline:
    """Return the timeline of a run from the files in its directory."""
    return timeline_of(read_records(run_dir), read(run_dir / "trace-shard-0.jsonl"))


def timeline_of(records: Sequence[Sequence[IterationRecord]], shard: Trace) -> Timeline:
    """Create a timeline from the iteration records of all workers and the trace of one shard.

    The timeline begins at the earliest start of any worker's first iteration.
    """
    zero_s = min(worker[0].begun_s for worker in records if worker)

    def spans(span_of: Callable[[IterationRecord], Span | None]) -> tuple[tuple[Span, ...], ...]:
        found = [[span for record in worker if (span := span_of(record)) is not None] for worker in records]
        return tuple(tuple((start - zero_s, stop - zero_s) for start, stop in worker) for worker in found)

    return Timeline(
        computing=spans(lambda r: (r.begun_s if r.restarted_s is None else r.restarted_s, r.pushed_s)),
        dropped=spans(lambda r: None if r.dropped_s is None else (r.begun_s, r.dropped_s)),
        waiting=spans(lambda r: (r.pushed_s, r.answered_s)),
        barriers_s=tuple(
            shard.time_s(entry) - zero_s
            for entry in shard.entries
            if any(isinstance(action, ApplyMean) for action in entry.actions)
        ),
    )


def draw_timeline(axes: Axes, timeline: Timeline, until_s: float) -> None:
    """Draw the first `until_s` seconds: one row of bars per worker (worker 0 on top), and one line per barrier."""
    kinds = (timeline.computing, timeline.dropped, timeline.waiting)
    for worker, row in enumerate(zip(*kinds, strict=True)):
        bottom = worker - BAR_HEIGHT / 2
        for spans, color in zip(row, (COMPUTING, DROPPED, WAITING), strict=True):
            bars = [(start, stop - start) for start, stop in spans if start < until_s]
            axes.broken_barh(bars, (bottom, BAR_HEIGHT), facecolor=color, edgecolor="white", linewidth=0.4)
    shown = [barrier_s for barrier_s in timeline.barriers_s if barrier_s <= until_s]
    axes.vlines(shown, -0.5, len(timeline.computing) - 0.5, color="black", linewidth=1.3)
    axes.set_xlim(0.0, until_s)
    axes.set_ylim(len(timeline.computing) - 0.5, -0.5)
    axes.set_yticks(range(len(timeline.computing)), [f"worker {i}" for i in range(len(timeline.computing))])
    axes.tick_params(axis="y", length=0, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)

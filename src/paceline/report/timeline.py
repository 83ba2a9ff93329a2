"""Timelines of runs: when each worker was computing or waiting, and when barriers occurred."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..sync.actions import ApplyMean
from ..sync.ticks import TICKS_PER_S, in_ticks
from ..trace.clocks import MachineClock, clock_of, read_clocks
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

    All times are on the coordinator's clock. The durations are those that each machine has measured.

    Attributes:
        computing: each worker's computations, from the arrival of the weights to the push. The sleep that
            emulates a slower machine counts as computing.
        dropped: each worker's aborted computations.
        waiting: each worker's waits, from a push to the arrival of the new weights.
        barriers_s: the times at which held pushes were applied together, in seconds since training began.
        bound_s: maximum error of a time, in seconds; 0 if all processes ran on the coordinator's machine.
    """

    computing: tuple[tuple[Span, ...], ...]
    dropped: tuple[tuple[Span, ...], ...]
    waiting: tuple[tuple[Span, ...], ...]
    barriers_s: tuple[float, ...]
    bound_s: float = 0.0


def read_timeline(run_dir: Path) -> Timeline:
    """Return the timeline of a run from the files in its directory.

    Workers on other machines write `worker-<index>.jsonl` there; copy these files into the directory.

    Raises:
        ConfigurationError: the offset of the clock of a machine is unknown.
    """
    trace = read(run_dir / "trace-shard-0.jsonl")
    return timeline_of(read_records(run_dir), trace, read_clocks(run_dir))


def timeline_of(
    records: Sequence[Sequence[IterationRecord]],
    shard: Trace,
    clocks: Mapping[int, MachineClock] | None = None,
) -> Timeline:
    """Create a timeline from the iteration records of all workers and the trace of one shard.

    The timeline begins at the earliest start of any worker's first iteration.

    Args:
        records: the records of each worker.
        shard: the trace.
        clocks: machine -> its clock, as `read_clocks` returns it. Default: only the coordinator's clock.

    Raises:
        ConfigurationError: the offset of the clock of a machine is unknown.
    """
    converter = _Converter(clocks or {0: MachineClock()})
    # for each record, the time that must be added to its times
    added_s = {
        (worker, number): converter.added_s(record.begun_s, record.machine)
        for worker, each in enumerate(records)
        for number, record in enumerate(each)
    }
    zero_s = min(each[0].begun_s + added_s[worker, 0] for worker, each in enumerate(records) if each)

    def spans(span_of: Callable[[IterationRecord], Span | None]) -> tuple[tuple[Span, ...], ...]:
        found: list[tuple[Span, ...]] = []
        for worker, each in enumerate(records):
            moved = []
            for number, record in enumerate(each):
                if (span := span_of(record)) is not None:
                    shift_s = added_s[worker, number] - zero_s
                    moved.append((span[0] + shift_s, span[1] + shift_s))
            found.append(tuple(moved))
        return tuple(found)

    return Timeline(
        computing=spans(lambda r: (r.begun_s if r.restarted_s is None else r.restarted_s, r.pushed_s)),
        dropped=spans(lambda r: None if r.dropped_s is None else (r.begun_s, r.dropped_s)),
        waiting=spans(lambda r: (r.pushed_s, r.answered_s)),
        barriers_s=tuple(
            at_s + converter.added_s(at_s, shard.machine) - zero_s
            for entry in shard.entries
            if any(isinstance(action, ApplyMean) for action in entry.actions)
            for at_s in [shard.time_s(entry)]
        ),
        bound_s=converter.bound_s,
    )


class _Converter:
    """Converts times to the coordinator's clock.

    Attributes:
        bound_s: maximum error of the times that were converted, in seconds.
    """

    def __init__(self, clocks: Mapping[int, MachineClock]) -> None:
        self._clocks = clocks
        self.bound_s = 0.0

    def added_s(self, at_s: float, machine: int | msgspec.UnsetType) -> float:
        """Return the time in seconds that must be added when the clock of a machine shows `at_s`."""
        machine = 0 if machine is msgspec.UNSET else machine
        at_ticks = in_ticks(at_s)
        moment = clock_of(machine, self._clocks).on_coordinator(at_ticks)
        self.bound_s = max(self.bound_s, moment.bound_ticks / TICKS_PER_S)
        return (moment.ticks - at_ticks) / TICKS_PER_S


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

"""Timelines of runs: when each worker was computing, transferring data or waiting, and when barriers occurred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..sync.actions import AnswerPull, ApplyMean
from ..sync.events import PullRepeated, PushReceived
from ..trace.clocks import Converter, MachineClock, read_clocks
from ..trace.recording import AnyTrace, trace_files
from ..trace.records import IterationRecord, read_records
from .colors_of_time import COMPUTING, TRANSFER, WAITING, WASTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Timeline", "draw_timeline", "read_timeline", "timeline_of"]

BAR_HEIGHT = 0.78

Span = tuple[float, float]
"""The start and end of a time span, in seconds since training began."""


class Timeline(msgspec.Struct, frozen=True):
    """The time spans in which the workers of one run were computing, transferring data or waiting.

    All times are on the coordinator's clock. The durations are those that each machine has measured.

    Attributes:
        computing: each worker's computations, from the arrival of the weights to the push. The sleep that
            emulates a slower machine counts as computing.
        wasted: each worker's aborted computations and the pulls after them.
        transfer: each worker's transfers: from a push until the push has arrived at all shards, and from the moment
            when all shards may answer the pull until the new weights have arrived.
        waiting: each worker's waits, between these two transfers.
        barriers_s: the times at which held pushes were applied together, in seconds since training began.
        bound_s: maximum error of a time, in seconds; 0 if all processes ran on the coordinator's machine.
    """

    computing: tuple[tuple[Span, ...], ...]
    wasted: tuple[tuple[Span, ...], ...]
    transfer: tuple[tuple[Span, ...], ...]
    waiting: tuple[tuple[Span, ...], ...]
    barriers_s: tuple[float, ...]
    bound_s: float = 0.0


def read_timeline(run_dir: Path) -> Timeline:
    """Return the timeline of a run from the files in its directory.

    Workers on other machines write `worker-<index>.jsonl` there; copy these files into the directory. Of a long run,
    the timeline shows the end, as far as the traces and records were kept.

    Raises:
        ConfigurationError: the offset of the clock of a machine is unknown.
    """
    shards = [trace for trace in trace_files(run_dir) if trace.header.host == "shard"]
    return timeline_of(read_records(run_dir), shards, read_clocks(run_dir))


def timeline_of(
    records: Sequence[Sequence[IterationRecord]],
    shards: Sequence[AnyTrace],
    clocks: Mapping[int, MachineClock] | None = None,
) -> Timeline:
    """Create a timeline from the iteration records of all workers and the traces of all shards.

    The timeline begins at the earliest start of any worker's first iteration.

    Args:
        records: the records of each worker.
        shards: the traces, beginning with that of shard 0, whose barriers are shown.
        clocks: machine -> its clock, as `read_clocks` returns it. Default: only the coordinator's clock.

    Raises:
        ConfigurationError: the offset of the clock of a machine is unknown.
    """
    converter = Converter(clocks or {0: MachineClock()})
    # for each record, the time that must be added to its times
    added_s = {
        (worker, number): converter.added_s(record.begun_s, record.machine)
        for worker, each in enumerate(records)
        for number, record in enumerate(each)
    }
    zero_s = min(each[0].begun_s + added_s[worker, 0] for worker, each in enumerate(records) if each)

    arrived_s: dict[tuple[int, int], float] = {}  # (worker, iteration) -> when the push was at all shards
    released_s: dict[tuple[int, int], float] = {}  # (worker, iteration) -> when all shards answered the pull
    barriers_s: list[float] = []
    for index, shard in enumerate(shards):
        for entry in shard.entries:
            event, local_s = entry.event, shard.header.time_s(entry)
            at_s = local_s + converter.added_s(local_s, shard.header.machine) - zero_s
            if isinstance(event, PushReceived):
                key = event.worker, event.iteration
                arrived_s[key] = max(at_s, arrived_s.get(key, at_s))
            for action in entry.actions:
                if isinstance(action, AnswerPull) and not isinstance(event, PullRepeated):
                    key = action.worker, action.iteration
                    released_s[key] = max(at_s, released_s.get(key, at_s))
            if index == 0 and any(isinstance(action, ApplyMean) for action in entry.actions):
                barriers_s.append(at_s)

    uses: dict[str, list[tuple[Span, ...]]] = {"computing": [], "wasted": [], "transfer": [], "waiting": []}
    for worker, each in enumerate(records):
        spans: dict[str, list[Span]] = {use: [] for use in uses}
        for number, record in enumerate(each):
            shift_s = added_s[worker, number] - zero_s
            begun_s, pushed_s, answered_s = (
                at_s + shift_s for at_s in (record.begun_s, record.pushed_s, record.answered_s)
            )
            if record.restarted_s is not None:
                spans["wasted"].append((begun_s, record.restarted_s + shift_s))
            spans["computing"].append((pushed_s - record.computing_s, pushed_s))
            # The shards may be on other machines, whose clocks are known only up to an error.
            released = min(released_s.get((worker, record.iteration), pushed_s), answered_s)
            arrived = min(max(arrived_s.get((worker, record.iteration), pushed_s), pushed_s), released)
            wait = max(arrived, pushed_s), max(released, pushed_s)
            spans["transfer"] += [(pushed_s, wait[0]), (wait[1], answered_s)]
            spans["waiting"].append(wait)
        for use, found in spans.items():
            uses[use].append(tuple(span for span in found if span[1] > span[0]))
    return Timeline(
        **{use: tuple(found) for use, found in uses.items()},
        barriers_s=tuple(barriers_s),
        bound_s=converter.bound_s,
    )


def draw_timeline(axes: Axes, timeline: Timeline, until_s: float) -> None:
    """Draw the first `until_s` seconds: one row of bars per worker (worker 0 on top), and one line per barrier."""
    kinds = (timeline.computing, timeline.wasted, timeline.transfer, timeline.waiting)
    for worker, row in enumerate(zip(*kinds, strict=True)):
        bottom = worker - BAR_HEIGHT / 2
        for spans, color in zip(row, (COMPUTING, WASTED, TRANSFER, WAITING), strict=True):
            bars = [(start, stop - start) for start, stop in spans if start < until_s]
            edge = "white" if color == COMPUTING else "none"  # separates the iterations
            axes.broken_barh(bars, (bottom, BAR_HEIGHT), facecolor=color, edgecolor=edge, linewidth=0.4)
    shown = [barrier_s for barrier_s in timeline.barriers_s if barrier_s <= until_s]
    axes.vlines(shown, -0.5, len(timeline.computing) - 0.5, color="black", linewidth=1.3)
    axes.set_xlim(0.0, until_s)
    axes.set_ylim(len(timeline.computing) - 0.5, -0.5)
    axes.set_yticks(range(len(timeline.computing)), [f"worker {i}" for i in range(len(timeline.computing))])
    axes.tick_params(axis="y", length=0, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)

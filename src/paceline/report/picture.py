"""Pictures of runs: timelines of one or more runs, alone or below a plot of the runs' accuracy over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .accuracy import Curve, draw_accuracy
from .canvas import new_figure
from .colors_of_time import COMPUTING, TRANSFER, WAITING, WASTED
from .timeline import Timeline, draw_timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["comparison_picture", "timeline_picture", "timelines_picture"]

WIDTH_INCHES = 11.0
CURVES_HEIGHT_INCHES = 4.6
STRIP_HEIGHT_INCHES = 1.25


def comparison_picture(
    title: str,
    note: str,
    curves: Sequence[Curve],
    target: float,
    timelines: Mapping[str, Timeline],
    until_s: float,
) -> Figure:
    """Plot the accuracy of several runs over time, and draw the timelines of the runs below the plot.

    Args:
        title: title of the picture.
        note: text in smaller print below the title, such as a description of the emulated machines.
        curves: accuracy of each run over time.
        target: target accuracy, from 0 to 1.
        timelines: mapping from sync model to timeline, in drawing order.
        until_s: end of the drawn part of each timeline, in seconds since training began.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    heights = [CURVES_HEIGHT_INCHES, *[STRIP_HEIGHT_INCHES] * len(timelines)]
    figure = new_figure(WIDTH_INCHES, sum(heights) + 1.0)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    top, *strips = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    top.set_title(note, fontsize=9.5)
    draw_accuracy(top, curves, target)
    _draw_strips(strips, timelines, until_s)
    if strips:
        strips[-1].set_xlabel(f"seconds since training began (first {until_s:g} s)")
    return figure


def timelines_picture(timelines: Mapping[str, Timeline], until_s: float, whole_s: float) -> Figure:
    """Draw the beginning of several timelines, one below the other.

    Args:
        timelines: mapping from sync model to timeline, in drawing order.
        until_s: end of the drawn part of each timeline, in seconds since training began.
        whole_s: length of the longest run, in seconds.
    """
    workers = max((len(timeline.computing) for timeline in timelines.values()), default=1)
    height_inches = STRIP_HEIGHT_INCHES * max(1.0, workers / 4)
    figure = new_figure(WIDTH_INCHES, height_inches * len(timelines) + 0.8)
    strips = list(figure.subplots(len(timelines), 1, squeeze=False)[:, 0])
    _draw_strips(strips, timelines, until_s)
    part = f": the first {until_s:.4g} of {whole_s:.4g} s" if until_s < whole_s else ""
    strips[-1].set_xlabel(f"virtual seconds since training began{part}")
    return figure


def timeline_picture(timeline: Timeline, until_s: float) -> Figure:
    """Draw a single timeline with a legend."""
    figure = new_figure(WIDTH_INCHES, STRIP_HEIGHT_INCHES + 0.7)
    strip = figure.subplots()
    draw_timeline(strip, timeline, until_s)
    strip.set_xlabel("seconds")
    _explain(strip)
    return figure


def _draw_strips(strips: Sequence[Axes], timelines: Mapping[str, Timeline], until_s: float) -> None:
    for strip, (label, timeline) in zip(strips, timelines.items(), strict=True):
        draw_timeline(strip, timeline, until_s)
        strip.tick_params(axis="x", labelbottom=strip is strips[-1])
        strip.set_title(label, loc="left", fontsize=10, fontweight="bold")
    if len(strips):
        _explain(strips[0])


def _explain(strip: Axes) -> None:
    """Draw a legend above a timeline."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=COMPUTING, label="computing, one bar per iteration"),
        Patch(facecolor=TRANSFER, label="transferring data"),
        Patch(facecolor=WASTED, label="aborted or lost computations"),
        Patch(facecolor=WAITING, label="waiting"),
        Line2D([], [], color="black", linewidth=1.3, label="barrier"),
    ]
    strip.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize=8.5,
        borderaxespad=0.2,
    )

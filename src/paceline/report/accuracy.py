"""A plot of test accuracy over time: one curve per run, and a marker where a run reached the target accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from .canvas import new_figure
from .styles_of_models import Style, styles_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Curve", "accuracy_picture"]

LEAST_SHOWN = 0.5  # lower end of the accuracy axis, far above the accuracy of random guessing (0.1)


class Curve(msgspec.Struct, frozen=True):
    """The test accuracy of one run over time.

    Attributes:
        label: name of the run in the legend.
        times_s: ascending times of the evaluations, in seconds since training began.
        accuracies: test accuracies at `times_s`, from 0 to 1.
        reached_s: time at which the run reached the target, in seconds since training began; None if it never did.
    """

    label: str
    times_s: tuple[float, ...]
    accuracies: tuple[float, ...]
    reached_s: float | None


def accuracy_picture(title: str, note: str, curves: Sequence[Curve], target: float) -> Figure:
    """Draw the curves and the target. Runs with the same label (different seeds) share a style and a legend entry.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    figure = new_figure(11.0, 5.6)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    axes = figure.subplots()
    axes.set_title(note, fontsize=9.5)
    for label, style in styles_of(curve.label for curve in curves).items():
        _draw_group(axes, [curve for curve in curves if curve.label == label], style, target)
    axes.axhline(target, color="black", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        f"target {target:.0%}",
        (0.0, target),
        xycoords=("axes fraction", "data"),
        xytext=(5, 4),
        textcoords="offset points",
        fontsize=9,
    )
    axes.set_xlim(0.0, max((curve.times_s[-1] for curve in curves if curve.times_s), default=1.0))
    axes.set_ylim(LEAST_SHOWN, 1.0)
    axes.set_xlabel("seconds since training began")
    axes.set_ylabel("accuracy on the test images")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=True, fontsize=9)
    return figure


def _draw_group(axes: Axes, curves: Sequence[Curve], style: Style, target: float) -> None:
    """Draw the curves of the runs that share a label.

    Where a run reached the target, draw a marker and a vertical line from the marker to the time axis.
    """
    reached_s = [curve.reached_s for curve in curves if curve.reached_s is not None]
    for curve in curves:
        axes.plot(
            curve.times_s,
            curve.accuracies,
            color=style.color,
            linestyle=style.dashes,
            linewidth=1.8,
            alpha=1.0 if len(curves) == 1 else 0.5,
            label=_legend(curve.label, reached_s, len(curves), target) if curve is curves[0] else None,
        )
    axes.vlines(reached_s, LEAST_SHOWN, target, color=style.color, linewidth=1.0, linestyle=":", zorder=1)
    axes.plot(
        reached_s,
        [target] * len(reached_s),
        linestyle="none",
        marker="o",
        markersize=8,
        markerfacecolor=style.color,
        markeredgecolor="white",
        zorder=5,
    )


def _legend(label: str, reached_s: Sequence[float], runs: int, target: float) -> str:
    """Return the legend entry for the runs that share a label."""
    if not reached_s:
        return f"{label}: {target:.0%} not reached"
    if runs == 1:
        return f"{label}: {target:.0%} after {reached_s[0]:.2f} s"
    times = ", ".join(f"{time_s:.2f}" for time_s in sorted(reached_s))
    never = f", not reached in {runs - len(reached_s)} of {runs} runs" if len(reached_s) < runs else ""
    return f"{label}: {target:.0%} after {times} s{never}"

"""A plot of training loss over virtual time, with one curve per sync model."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from .canvas import new_figure
from .styles_of_models import styles_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LossCurve", "loss_picture"]

NOTE_COLUMNS = 130


class LossCurve(msgspec.Struct, frozen=True):
    """One curve of the plot: training loss over virtual time.

    Attributes:
        label: name of the curve in the legend.
        points: (virtual time in seconds, training loss) pairs.
    """

    label: str
    points: list[tuple[float, float]]


def loss_picture(title: str, note: str, curves: Sequence[LossCurve]) -> Figure:
    """Draw all curves in one picture. The loss axis is logarithmic if the losses differ by more than a factor of 20.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    figure = new_figure(10.0, 5.2)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    axes = figure.subplots()
    axes.set_title(textwrap.fill(note, NOTE_COLUMNS), fontsize=9.5)
    styles = styles_of(curve.label for curve in curves)
    for curve in curves:
        axes.plot(
            [time_s for time_s, _ in curve.points],
            [loss for _, loss in curve.points],
            color=styles[curve.label].color,
            linestyle=styles[curve.label].dashes,
            linewidth=1.7,
            label=curve.label,
        )
    losses = [loss for curve in curves for _, loss in curve.points if loss > 0]
    if losses and max(losses) > 20 * min(losses):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("virtual seconds")
    axes.set_ylabel("training loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=True, fontsize=9)
    return figure

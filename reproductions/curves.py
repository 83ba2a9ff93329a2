"""Plots of accuracy or loss over time, in the same style for all figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .training import TrainingOutcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_curves"]

AXIS = {"accuracy": "accuracy on the test images", "loss": "loss over the first {} training samples"}
WORST_LOSS = 2.6  # upper end of the loss axis; a network that guesses digits at random has a loss of 2.3


def draw_curves(
    axes: Axes,
    outcomes: Sequence[TrainingOutcome],
    title: str,
    *,
    variants: int = 1,
    along: Callable[[TrainingOutcome], Sequence[float]] = lambda outcome: outcome.times_s,
    along_name: str = "virtual seconds",
) -> None:
    """Draw one line per run. A run's label determines its color and line style; runs with seed 0 are drawn on top.

    Args:
        axes: axes on which the lines are drawn.
        outcomes: outcomes of runs with the same target.
        title: title of the axes.
        variants: number of consecutive labels that share a color and differ in line style.
        along: function that returns the position of each evaluation on the x axis.
        along_name: label of the x axis.
    """
    from paceline.look.timelines import COLOURS, DASHES

    labels = list(dict.fromkeys(outcome.run.label for outcome in outcomes))
    target = outcomes[0].run.target
    for outcome in outcomes:
        number, variant = divmod(labels.index(outcome.run.label), variants)
        first = outcome.run.seed == 0
        axes.plot(
            along(outcome),
            # If a run diverges, its line leaves the plot at the top.
            [min(value, 2 * WORST_LOSS) for value in outcome.values],
            color=COLOURS[number % len(COLOURS)],
            linestyle=DASHES[(variant + number // len(COLOURS)) % len(DASHES)],
            alpha=1.0 if first else 0.25,
            linewidth=1.6 if first else 0.8,
            zorder=2 if first else 1,
            label=outcome.run.label if first else None,
        )
    axes.axhline(target.value, color="black", linewidth=0.8, linestyle=":")
    axes.set_ylim(0, WORST_LOSS if target.measure == "loss" else 1)
    axes.set_xlabel(along_name)
    axes.set_ylabel(AXIS[target.measure].format(outcomes[0].run.problem.loss_count))
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=True, fontsize=7.5)

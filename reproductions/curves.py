"""What training runs came to, over time: drawn the same way in every figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .training import JUDGED, Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_curves"]

AXIS = {"accuracy": "accuracy on the test images", "loss": f"loss over {JUDGED} training images"}
WORST_LOSS = 2.6  # drawn; a network that names the digits by chance has 2.3


def draw_curves(
    axes: Axes,
    outcomes: Sequence[Outcome],
    title: str,
    *,
    variants: int = 1,
    along: Callable[[Outcome], Sequence[float]] = lambda outcome: outcome.times_s,
    along_name: str = "virtual seconds",
) -> None:
    """Draw a line for each run: a colour for each label, the first seed's above the others.

    Args:
        axes: where.
        outcomes: of one target.
        title: above them.
        variants: so many labels that follow each other share a colour, and differ in their dashes.
        along: what lies on the x axis at each evaluation.
        along_name: and its name.
    """
    from paceline.report.canvas import COLOURS, DASHES

    labels = list(dict.fromkeys(outcome.run.label for outcome in outcomes))
    target = outcomes[0].run.target
    for outcome in outcomes:
        number, variant = divmod(labels.index(outcome.run.label), variants)
        first = outcome.run.seed == 0
        axes.plot(
            along(outcome),
            [min(value, 2 * WORST_LOSS) for value in outcome.values],  # what diverges leaves at the top
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
    axes.set_ylabel(AXIS[target.measure])
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=True, fontsize=7.5)

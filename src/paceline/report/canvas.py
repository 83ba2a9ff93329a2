"""Figures without a screen: made, drawn on, saved as PNG. matplotlib is optional; without it, a clear error.

No global state of matplotlib is touched (no pyplot, no rcParams), so a user's own figures stay as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "DASHES", "new_figure", "save"]

COLOURS = ("#0072B2", "#E69F00", "#CC79A7", "#009E73", "#D55E00", "#56B4E9")
"""Told apart by colour-blind readers (Okabe and Ito, 2008); one per thing that is compared, in order."""

DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
"""Line styles in the same order, for a print without colours."""

DOTS_PER_INCH = 130


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """An empty figure.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "pictures are drawn with matplotlib, which is not installed: pip install 'paceline[report]'"
        ) from error
    figure = Figure(figsize=(width_inches, height_inches), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    figure.savefig(path, format="png")
